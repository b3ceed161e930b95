"""Progressive crops, timm's policies, and a step of every classifier."""

import copy

import numpy
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.models import list_models

import data
import train
from checkpointing import guard
from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import RunState
from checkpointing.schema import check_schema
from models import optim
from models.build import build_model
from models.losses import build_criterion
from presets import TimmPolicy
from randomness import seed_host
from sampler import TrainSampler, VirtualShards
from settings import config
from tests.endings import differing, flatten
from tests.ranks import some_slow


def test_a_run_trains_at_the_sizes_of_its_epochs(image_folder):
    argv = "--train-crop-size 64 --train-crop-size-min 32 --crop-ramp-epochs 0 1 --workers 0 --device cpu".split()
    args = config.parse_args(["--data-path", str(image_folder), *argv])
    dataset, _ = data.build_datasets(str(image_folder / "train"), str(image_folder / "val"), args)
    sampler = TrainSampler(len(dataset), VirtualShards(8, 1))
    for epoch, size in [(0, 32), (1, 64), (5, 64)]:
        sampler.set_epoch(epoch)
        assert next(iter(data.build_loader(dataset, sampler, args)))[0].shape == (8, 3, size, size)


def test_timms_policy_draws_from_the_address_alone():
    image, results = Image.effect_noise((32, 32), 60).convert("RGB"), []
    policy = TimmPolicy("timm/rand-m7-mstd0.5-inc1", 32, torchvision.transforms.InterpolationMode.BICUBIC)
    for address in (3, 3, 4, 5, 6):
        numpy.random.rand(len(results))
        seed_host(1, 2, address)
        results.append(policy(image).tobytes())
    assert results[0] == results[1]
    assert len(set(results)) > 2


# What is not happy with 64 px.
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 28}
REPRESENTATIVE = [
    "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v3_small", "regnet_y_400mf",
    "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t",
]  # fmt: skip
OTHERS = sorted(set(list_models(module=torchvision.models)) - set(REPRESENTATIVE))


@pytest.mark.parametrize("name", some_slow([*REPRESENTATIVE, *OTHERS], OTHERS))
def test_a_classifier_trains_a_step_and_resumes(name, tmp_path):
    size = SIZES.get(name, 64)
    argv = f"--synthetic 8 --model {name} --device cpu --workers 0 --lr 0.01 --batch-size 2".split()
    args = config.parse_args([*argv, "--train-crop-size", str(size), "--val-crop-size", str(size)])
    model = build_model(args, 5)
    optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(2, 3, size, size, generator=generator), torch.tensor([1, 3]))]
    train.train_one_epoch(model, build_criterion(args), optimizer, loader, torch.device("cpu"), 0, args)
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    # A ViT's classifier begins at zero, and nothing below it moves yet.
    assert any(moved) if name.startswith("vit_") else sum(moved) > 0.9 * len(moved)
    del before  # some models have hundreds of megabytes of each
    optimizer.zero_grad()
    args = config.assign(args.replaced(world_size=1), None)
    facts = guard.run_facts(args, *data.build_datasets(None, None, args))
    state = RunState(1, facts, {"model": model, "optimizer": optim.OptimizerState(optimizer)}).state_dict()
    torch.save(state, tmp_path / "checkpoint.pth")
    restored = copy.deepcopy(model)
    for tensor in restored.state_dict().values():
        tensor.zero_()
    restored_optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, restored))
    run = RunState(1, facts, {"model": restored, "optimizer": optim.OptimizerState(restored_optimizer)})
    run.load_state_dict(check_schema(load_checkpoint(tmp_path / "checkpoint.pth", "it"), "it"))
    assert differing(model.state_dict(), restored.state_dict()) == []
    assert differing(*(flatten(each.state_dict()["state"]) for each in (optimizer, restored_optimizer))) == []
