"""checkpointing/weights.py: files as torchvision, pytorch/examples and timm write them, averaged and stored."""

import argparse
import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import optim
import utils
from checkpointing.weights import load_weights
from errors import UserError
from tests.started import Hostile


class Wrapped(nn.Module):
    """Names its model as DistributedDataParallel and DataParallel do."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def small_model(seed=0):
    torch.manual_seed(seed)
    return torchvision.models.mnasnet0_5(num_classes=3)  # which notes the version of its state dict


def averaged(model, seed=1):
    """The average of a model's weights and of others, half of each."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)
    other = small_model(seed) if isinstance(model, torchvision.models.MNASNet) else model
    average.update_parameters(other)
    return average


def alexnet_in_parallel():
    model = torchvision.models.alexnet(num_classes=3)
    model.features = Wrapped(model.features)
    return model


NAMESPACE = argparse.Namespace(model="mnasnet0_5", lr=0.1, layers=[1, 2], data_path="/data", device=None)
SCRIPTS = {
    "a bare state dict": lambda model: model.state_dict(),
    "DDP": lambda model: Wrapped(model).state_dict(),
    "compiled": lambda model: torch.compile(model).state_dict(),
    "compiled in DDP": lambda model: Wrapped(torch.compile(model)).state_dict(),
    "DDP, compiled": lambda model: torch.compile(Wrapped(model)).state_dict(),
    "a bare average": lambda model: AveragedModel(model).state_dict(),
    "torchvision": lambda model: {
        "model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters(), 0.1).state_dict(),
        "lr_scheduler": {"last_epoch": 3}, "epoch": 3, "args": NAMESPACE, "model_ema": averaged(model).state_dict(),
    },
    "pytorch/examples": lambda model: {
        "epoch": 4, "arch": "mnasnet0_5", "state_dict": Wrapped(model).state_dict(), "best_acc1": torch.tensor(0.5),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1).state_dict(), "scheduler": {"last_epoch": 4},
    },
    "timm": lambda model: {
        "epoch": 4, "arch": "mnasnet0_5", "state_dict": torch.compile(model).state_dict(), "version": 2,
        "args": NAMESPACE, "state_dict_ema": averaged(model).module.state_dict(), "metric": 70.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_files_of_other_scripts_give_the_models_own_weights(tmp_path, script, is_old):
    model = small_model()
    torch.save(SCRIPTS[script](model), tmp_path / "w.pth", _use_new_zipfile_serialization=not is_old)
    before = set(torch.serialization.get_safe_globals())
    weights = load_weights(tmp_path / "w.pth")
    assert set(torch.serialization.get_safe_globals()) == before
    expected = model.state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert weights._metadata[""] == expected._metadata[""]
    other = small_model(5)
    other.load_state_dict(weights)
    assert "bare" in weights.kind or script not in ("torchvision", "timm") or "which --ema takes" in weights.kind
    name = "timm/mnasnet0_5" if script == "timm" else "mnasnet0_5"
    assert weights.kind.startswith(f"the raw weights of {name}") == (script in list(SCRIPTS)[-3:])


@pytest.mark.parametrize("script", ["torchvision", "timm"])
def test_averages_of_other_scripts_are_taken(tmp_path, script):
    model = small_model()
    torch.save(SCRIPTS[script](model), tmp_path / "w.pth")
    weights = load_weights(tmp_path / "w.pth", is_average=True)
    parts = [net.state_dict()["layers.0.weight"] for net in (model, small_model(1))]
    torch.testing.assert_close(weights["layers.0.weight"], (parts[0] + parts[1]) / 2)
    assert list(weights) == list(model.state_dict())
    assert weights.kind == f"the average of {'timm/' if script == 'timm' else ''}mnasnet0_5"


def test_a_part_in_data_parallel_has_its_own_names(tmp_path):
    with torch.device("meta"):
        state, names = alexnet_in_parallel().state_dict(), list(torchvision.models.alexnet().state_dict())
    for name in state:
        state[name] = torch.zeros(1)  # names are enough
    torch.save({"arch": "alexnet", "state_dict": state}, tmp_path / "w.pth")
    assert list(load_weights(tmp_path / "w.pth")) == names


@pytest.mark.parametrize("script", ["a bare state dict", "pytorch/examples"])
def test_there_is_not_always_an_average(tmp_path, script):
    torch.save(SCRIPTS[script](small_model()), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"holds no average \(model_ema or state_dict_ema\); leave out --ema"):
        load_weights(tmp_path / "w.pth", is_average=True)


class Thing:
    """A class of whoever wrote the file."""


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        lambda hostile: argparse.Namespace(model=hostile),
        lambda hostile: argparse.Namespace(args=argparse.Namespace(model=[hostile])),
        lambda hostile: hostile,
    ],
)
def test_code_beside_or_in_a_namespace_is_refused(tmp_path, place, is_old):
    for culprit in (Hostile(tmp_path / "executed"), Thing()):
        content = {"model": small_model().state_dict(), "args": place(culprit)}
        torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=not is_old)
        with pytest.raises(UserError, match="contains code"):
            load_weights(tmp_path / "w.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"model": argparse.Namespace(weight=torch.zeros(1))},
            "holds no weights as `model`: expected a checkpoint with a state dict there",
        ),
        (
            {"model": {"weight": argparse.Namespace()}},
            "holds more than weights as `model`: expected a checkpoint with a state dict there",
        ),
        (argparse.Namespace(model={}), "holds a Namespace, not a checkpoint"),
        (
            {"epoch": 3},
            "holds more than weights: expected a state dict, or a checkpoint with one as `model` or `state_dict`",
        ),
        ({"state_dict": None}, "holds no weights as `state_dict`: expected a checkpoint"),
        ({"module.a": torch.zeros(1), "a": torch.ones(1)}, "holds weights of one name twice"),
    ],
)
def test_a_file_without_weights_is_refused(tmp_path, content, words):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UserError, match=words):
        load_weights(tmp_path / "w.pth")


def test_torchvisions_names_are_in_utils(tmp_path):
    assert utils.set_weight_decay is optim.set_weight_decay
    utils.mkdir(tmp_path / "a" / "b")
    utils.mkdir(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "c").touch()
    with pytest.raises(FileExistsError):
        utils.mkdir(tmp_path / "c")


@pytest.fixture
def three(tmp_path):
    """Checkpoints of torchvision's with the weights 1, 2 and 6, the counts 5, 8 and 9, and options."""
    paths = []
    for number, count in [(1.0, 5), (2.0, 8), (6.0, 9)]:
        model = {
            "weight": torch.full((2,), number),
            "count": torch.tensor(count),
            "half": torch.full((1,), 3 * number).half(),
        }
        paths.append(tmp_path / f"model_{count}.pth")
        torch.save({"model": model, "epoch": count, "args": NAMESPACE}, paths[-1])
    return paths


def test_checkpoints_are_averaged(three):
    mean = utils.average_checkpoints(map(str, three))
    assert list(mean["model"]) == ["weight", "count", "half"]
    assert mean["model"]["weight"].tolist() == [3.0, 3.0]
    assert mean["model"]["count"].tolist() == 7  # 22 / 3, rounded down
    assert mean["model"]["count"].dtype == torch.int64
    assert mean["model"]["half"].dtype == torch.float32
    assert mean["model"]["half"].item() == 9.0
    assert (mean["epoch"], mean["args"]) == (5, NAMESPACE)
    alone = utils.average_checkpoints(three[:1])["model"]
    assert alone["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (
            {"model": {"weight": torch.zeros(2), "other": torch.zeros(1)}},
            KeyError,
            "other.pth holds other weights than .*model_5.pth: count, half, other",
        ),
        ({"model": {"weight": torch.zeros(3), "count": torch.tensor(3), "half": torch.ones(1)}}, KeyError, ": weight"),
        ({"state_dict": {}}, UserError, "no weights as `model`: expected a checkpoint with a state dict there"),
        ({"model": Thing()}, UserError, "contains code"),
    ],
)
def test_checkpoints_that_do_not_fit_are_not_averaged(three, tmp_path, content, error, words):
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(error, match=words) as refusal:
        utils.average_checkpoints([*three, tmp_path / "other.pth"])
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="no checkpoints"):
        utils.average_checkpoints([])


def test_weights_are_stored_under_their_hash(tmp_path):
    model, trained = small_model(), small_model(3)
    checkpoint = {"model": trained.state_dict(), "model_ema": averaged(trained, 3).state_dict(), "args": NAMESPACE}
    checkpoint["more"] = trained.state_dict()
    checkpoint["more"]["aux.weight"] = torch.zeros(1)
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    paths = [
        utils.store_model_weights(model, str(tmp_path / "checkpoint.pth")),
        utils.store_model_weights(model, tmp_path / "checkpoint.pth", checkpoint_key="model_ema"),
        utils.store_model_weights(model, tmp_path / "checkpoint.pth", "more", strict=False),
    ]
    for path in map(Path, paths):
        assert path.parent == tmp_path
        assert path.name == f"weights-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth"
        stored = torch.load(path, weights_only=True)
        assert list(stored) == list(trained.state_dict())
        assert torch.equal(stored["layers.0.weight"], trained.layers[0].weight)
    assert {type(path) for path in paths} == {str}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(list(tmp_path.iterdir())) == 1 + len(set(paths))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        utils.store_model_weights(model, tmp_path / "checkpoint.pth", "more")
    with pytest.raises(UserError, match="holds no weights as `no`"):
        utils.store_model_weights(model, tmp_path / "checkpoint.pth", "no")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"hello\n", "not an archive of torch.save"),
        (pickle.dumps([1], protocol=4), "not an archive of torch.save"),
        (pickle.dumps(os.system, protocol=2), "contains code"),
        (pickle.dumps(os.system, protocol=0), "not an archive of torch.save"),
    ],
)
def test_a_file_that_torch_never_wrote_is_refused_for_that_and_without_a_warning(tmp_path, content, reason):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(UserError, match=reason):
        load_weights(tmp_path / "w.pth")
