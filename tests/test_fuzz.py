"""What is read from disk is not believed before it is checked: a round of the fuzzer, and whole runs."""

import io
import os
import re
import subprocess
import time
import warnings
import zipfile

import pytest
import torch

import errors
from checkpointing.archive import load_checkpoint, read_checkpoint
from checkpointing.schema import FORMAT, check_schema
from checkpointing.weights import load_weights
from errors import UserError
from models import optim
from models.build import build_model, check_model
from scripts.trained import open_trained
from settings import config
from settings.options import BY_NAME
from tests import fuzz
from tests.ranks import module_rank, run_ranks
from tests.runs import state_at
from tests.started import refused, run_train


def test_a_short_round_finds_nothing(tmp_path):
    argv, quiet = ["--cases", 80, "--seed", 1], (warnings.simplefilter, "ignore")
    done = run_ranks(module_rank, 1, "tests.fuzz", argv, quiet, log_folder=tmp_path).check()
    assert re.search("cases=80 .*wrong=0", done.output)


@pytest.mark.parametrize(("words", "act"), [
    ("KeyError", lambda _, folder, rng: {}["x"]),
    ("changed ", lambda _, folder, rng: (folder.parent / "outside").touch()),
    ("started ", lambda _, folder, rng: subprocess.run(["/nowhere/gs", "--version"], check=False)),
    ("KeyboardInterrupt", lambda _, folder, rng: time.sleep(9)),
    ("ended the process", lambda _, folder, rng: os._exit(3)),
])  # fmt: skip
def test_the_fuzzer_would_see_it(tmp_path, monkeypatch, words, act):
    monkeypatch.setattr(fuzz, "KINDS", {act: 1})
    monkeypatch.setattr(fuzz, "LIMIT_S", 1)
    assert words in fuzz.run_case(None, 0, 0, tmp_path)


WRONG_FIELDS = {
    "step": [None, -1, 1.0, float("nan"), 7, 1 << 60, True],
    "epoch": [None, -2, 5],
    "position": [None, {}, {"epoch": 0, "steps": 1}, {"epoch": 0, "steps": 3, "is_evaluated": False}],
    "best": [{}, {"metric": 1, "value": 1.0, "step": 0}, {"metric": "val/acc1", "value": 1.0, "step": 9}],
    "best_ema": [{}, 3],
    "shards": [{"global_batch_size": 8, "num_shards": shards} for shards in (0, -1, 3, 16, 10**11, None)],
    "data": [{}, {"num_images": 7, "num_classes": 2, "fingerprint": "x"}, [16, 2]],
    "args": [{}, None, {"lr": torch.zeros(1)}],
    "environment": [{}, None, {"world_size": 0, "threads": 1}],
    "model": [{}, {"weight": 1.0}, {1: torch.zeros(1)}, {"weight": torch.zeros(2).to_sparse()}][1:],
    "optimizer": [{}, {"state": {0: {}}, "param_groups": []}, {"state": {}, "param_groups": [{"params": ["x"]}]}],
    "scaler": [{}, {"scale": 0.0}],
    "log_window": [{}, {"sums": [float("nan")] * 4}],
    "more": [lambda: 0, 10**400, 1j, {"x"}, torch.zeros(1, dtype=torch.complex64)],
}


@pytest.mark.parametrize("field", sorted({*WRONG_FIELDS, *state_at(3)}))
def test_a_field_that_is_wrong_or_missing_is_named(field):
    state = state_at(3)
    assert check_schema(dict(state), "it")["step"] == 3
    for value in WRONG_FIELDS.get(field, ()):
        with pytest.raises(UserError, match="it is not a valid checkpoint: ") as error:
            check_schema(state | {field: value}, "it")
        assert errors.is_printable(str(error.value))
    if field in state:
        del state[field]
        with pytest.raises(UserError, match=f"it lacks {field}"):
            check_schema(state, "it")


def test_a_set_smaller_than_a_global_batch_is_a_contradiction():
    state = state_at(0) | {"epoch": 0}  # of no steps, all are done
    state["data"]["num_images"] = 7
    with pytest.raises(UserError, match="a global batch of 8 of 7 images"):
        check_schema(state, "it")


def test_a_value_that_unfolds_to_more_than_memory_is_refused_at_once():
    value = ["x"]
    for _ in range(40):
        value = [value] * 10
    stream = io.BytesIO()
    torch.save({"model": {}, "args": {"model": value}}, stream)
    with pytest.raises(UserError, match="more values"):
        load_checkpoint(stream.getvalue(), "it")
    with pytest.raises(UserError, match="more values"):
        check_schema(state_at(3) | {"more": value}, "it")


def test_tensors_of_another_model_and_options_out_of_range_are_refused_in_one_line(started, tmp_path):
    state, other = load_checkpoint(started.out / "checkpoint.pth", "it"), tmp_path / "other.pth"
    changed = {**state, "model": {**state["model"], "conv1.0.weight": torch.zeros(3)}}
    torch.save(changed, other)
    outcome = started.go_on(tmp_path, tmp_path / "new", "--resume", other, "--allow-change", "epochs")
    refused(outcome, "the checkpoint's model does not fit", "conv1.0.weight")
    place = started.argv.index("--val-crop-size")
    argv = [*started.argv[:place], *started.argv[place + 2 :], "--test-only", "--resume", other]
    refused(run_train(tmp_path, *argv), "does not fit --model", "conv1.0.weight")
    for value in ("x", 10**9, -5):
        state["args"]["val_crop_size"] = value
        torch.save(state, other)
        refused(run_train(tmp_path, *argv), "--val-crop-size")
    with pytest.raises(UserError, match=r"other\.pth: --val-crop-size -5: expected"):
        open_trained(str(other))
    assert not BY_NAME["val_crop_size"].is_value(torch.zeros(3))


def rewritten(change):
    """Return a checkpoint whose records a function of (name, content) has made anew: [(name, content, compression)]."""
    source, target = io.BytesIO(), io.BytesIO()
    torch.save(state_at(3), source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            for record in change(name, old.read(name)):
                new.writestr(*record)
    return target.getvalue()


ARCHIVES = {
    "compressed": lambda name, content: [(name, content, zipfile.ZIP_DEFLATED)],
    "a bomb": lambda name, content: [(name, content, 0), (f"{name}x", bytes(1 << 24), 8)],
    "twice": lambda name, content: [(name, content, 0), (name.upper(), content, 0)],
    "short storage": lambda name, content: [(name, content[:8] if "data/" in name else content, 0)],
}


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_that_torch_does_not_write_is_refused(kind):
    assert load_checkpoint(rewritten(lambda name, content: [(name, content, 0)]), "it")["format"] == FORMAT
    with pytest.raises(UserError, match="it is damaged"):
        load_checkpoint(rewritten(ARCHIVES[kind]), "it")


def test_a_sparse_file_is_refused_unread(tmp_path):
    path = tmp_path / "checkpoint.pth"
    torch.save(state_at(3), path)
    for size, words in ((200 << 30, "and this machine"), (1 << 29, "it is damaged")):
        os.truncate(path, size)
        with pytest.raises(UserError, match=words):
            read_checkpoint(path, "it")


def test_weights_that_claim_more_than_is_stored_are_refused(tmp_path):
    torch.save({"fc.weight": torch.zeros(1).expand(1 << 40, 512)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"fc\.weight claims to be larger"):
        load_weights(tmp_path / "weights.pth")


# What the layers of torchvision's models can take, by their own arithmetic: pooled to nothing, or not divisible.
@pytest.mark.parametrize(("model", "size", "is_refused"), [
    ("alexnet", 62, True), ("squeezenet1_1", 16, True), ("squeezenet1_1", 17, False), ("densenet121", 24, True),
    ("maxvit_t", 192, True), ("vit_b_16", 225, True), ("inception_v3", 224, True), ("resnet18", 8, False),
    ("timm/vit_tiny_patch16_224", 192, False), ("timm/test_resnet", 40, False),
])  # fmt: skip
def test_a_size_that_a_model_cannot_take_is_refused_before_it_is_used(model, size, is_refused):
    sizes = [f"--{split}-crop-size={size}" for split in ("train", "val")]
    args = config.parse_args(["--synthetic", "--model", model, *sizes, "--batch-size", "2"])
    if is_refused:
        with pytest.raises(UserError, match=f"--model {model} cannot .* --(train|val)-crop-size {size}"):
            check_model(args)
        return
    check_model(args)
    build_model(args, 4)(torch.zeros(2, 3, size, size))


REFUSED = {
    "--model maxvit_t --train-crop-size-min 224 --train-crop-size 448 --crop-ramp-epochs 1 9": "--train-crop-size 256",
    "--model maxvit_t --val-crop-size 256": "--val-crop-size 256",
    "--model timm/swin_tiny_patch4_window7_224 --val-crop-size 256": "--train-crop-size 224",
    "--model timm/levit_128s --train-crop-size 256": "--train-crop-size 256",
    "--model timm/test_vit.r160_in1": "did you mean timm/test_vit.r160_in1k",
    "--model resnet18 --train-crop-size 32 --batch-size 1": "--train-crop-size 32 at --batch-size 1",
}


@pytest.mark.parametrize("argv", REFUSED)
def test_every_size_of_an_epoch_and_a_batch_counts_and_a_mistyped_model_is_named(argv):
    with pytest.raises(UserError, match=REFUSED[argv]):
        check_model(config.parse_args(["--synthetic", *argv.split()]).replaced(is_launched=False))


def test_names_that_no_recipe_can_hold_are_refused():
    for option in ("--data-path", "--output-dir", "--resume", "--weights"):
        for name in (os.fsdecode(b"\xff"), "a\nb"):
            with pytest.raises(UserError, match=f"{option} '.*': expected one line of UTF-8") as error:
                config.parse_args(["--data-path", "x", option, name])
            assert errors.is_printable(str(error.value))


@pytest.mark.parametrize("argv", [["--lr", "1e308"], ["--lr-gamma", "1e9"], ["--batch-size", "9" * 18]])
def test_numbers_beyond_any_run_are_refused(argv):
    def check():
        args = config.parse_args(["--synthetic", "--lr-scheduler", "exponentiallr", *argv])
        optim.check_schedule(args.schedule, args.optimization.lr)

    with pytest.raises(UserError, match=argv[0]):
        check()
