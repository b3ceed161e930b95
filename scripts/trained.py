"""Open a trained model, from a checkpoint or by its published name, and compute with it."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import config
import data
import models
from checkpointing.published import fetch_by_name, preprocessing_line
from checkpointing.weights import load_weights
from distributed import collectives
from errors import UserError
from loading.loader import check_memory, check_workers
from metrics import build_evaluated
from options import PREPROCESSING, WHY_TYPED, is_same_model, split_custom
from presets import ClassificationPresetEval, build_presets
from sampler import EvalSampler
from scripts.exported import describe_weights
from scripts.tool import add_train_option, positive


class Trained(NamedTuple):
    """A model and the facts that its users need."""

    model: nn.Module  # on the CPU, in evaluation mode: (B, 3, S, S) normalised floats to (B, num_classes) logits
    args: config.Record  # the options that it is evaluated with: `model`, `val_crop_size`, `interpolation` ...
    classes: list[str] | None  # names of the classes; None where the file has none
    kind: str  # words for a message, such as `the raw weights of resnet18`
    trained_with: dict[str, Any]  # all options of its training or publication that the file holds
    origin: str  # words about where the preprocessing of its images comes from
    is_published: bool  # the weights were given by their name; their classes have English names

    @property
    def preset(self) -> ClassificationPresetEval:
        """The transform of a PIL image into (3, S, S) normalised floats."""
        return build_presets(self.args)[1]

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The preprocessing of its images and its origin, as plain values."""
        return {**{name: getattr(self.args, name) for name in PREPROCESSING}, "origin": self.origin}

    def count_classes(self) -> int:
        """Return how many classes the model scores."""
        size = self.args.val_crop_size
        with torch.inference_mode():
            return self.model(torch.zeros(1, 3, size, size)).size(1)


def add_options(
    parser: argparse.ArgumentParser, source: str = "a file, or published weights: resnet50.IMAGENET1K_V2"
) -> None:
    """Add the arguments that name the weights and, for a bare state dict, its model."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=source)
    parser.add_argument("--ema", action="store_true", help="take the averaged weights, not the raw ones")
    names = "a torchvision name, timm/NAME, or FILE.py:FUNCTION, which must be given even if the file says it"
    parser.add_argument("--model", metavar="NAME", help=f"the model, where the file does not say it: {names}")
    for name in PREPROCESSING:
        add_train_option(parser, name, "in place of the checkpoint's own or the published one")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for loading images and choosing the device."""
    parser.add_argument("--batch-size", metavar="N", type=positive, default=128, help="(default: 128)")
    add_train_option(parser, "workers", "loader processes (default: as train.py)")
    add_train_option(parser, "device", "cuda, cpu ... (default: the accelerator of this machine, else cpu)")


def settle(trained: Trained, options: argparse.Namespace, *, is_alone: bool = True) -> config.Record:
    """Return the options with which a tool evaluates a model on this machine.

    Args:
        trained: the model and the options of its training.
        options: the tool's; those that replace the checkpoint's have the names of train.py's.
        is_alone: the tool runs as one process.
    """
    ours = ("batch_size", "data_path", "device", "workers")
    given = {name: value for name in ours if (value := getattr(options, name, None)) is not None}
    given |= {"synthetic": None} if "data_path" in given else {}
    args = trained.args.replaced(**given, test_only=True, compile=None)
    config.validate(args)
    args, _ = config.on_machine(args)
    if is_alone and args.world_size > 1:
        raise UserError(f"{args.world_size} processes were started, and this tool is one; start it without a launcher")
    check_workers(args.workers)
    check_memory(args)
    return args.replaced(distributed=args.world_size > 1)


class _Numbers(list):
    """Numbers of images in their order, as a sampler."""

    batch_size: int


class Evaluation:
    """A model on the device of this process, and the loader processes that bring it the images of several sets.

    Collective: every rank must make one.

    Args:
        trained: the model, which moves to the device.
        args: as `settle` returns them.
        sets: images, each set with its own preset; the same images may come several times, with different presets.
    """

    def __init__(self, trained: Trained, args: config.Record, sets: list[data.IndexedImageFolder]) -> None:
        self.args, self.sets = args, sets
        # Before other threads start, such as the process group's: see `BatchLoader.start`.
        self.started = data.start_loaders(sets, args)
        collectives.join_processes(args)
        self.device = models.set_up_device(args)
        model = models.place_model(trained.model, args, self.device).eval()
        self.model = models.FlipAverage(model) if args.eval_flip else model
        self.autocast = models.autocast(args, self.device)

    def load(self, place: int, numbers: list[int] | None = None) -> data.DeviceLoader:
        """Return batches of the images of a set that have these numbers; by default of this process's share of all."""
        args, images = self.args, self.sets[place]
        sampler = EvalSampler(len(images), args.batch_size, args.rank, args.world_size)
        if numbers is not None:
            sampler = _Numbers(numbers)
            sampler.batch_size = args.batch_size
        return data.build_device_loader(args, self.started[place], sampler, self.device, len(images.classes))


def open_given(options: argparse.Namespace) -> Trained:
    """Return the model that the arguments of `add_options` name, and print how its images are prepared."""
    given = given_preprocessing(options)
    trained = open_trained(str(options.checkpoint), model=options.model, is_average=options.ema, given=given)
    print(preprocessing_line(trained.args, trained.origin))
    if trained.args.eval_flip:
        print("--eval-flip of the checkpoint: evaluations average the scores of an image and its mirror image; "
              "predictions and exported files score the image alone")  # fmt: skip
    return trained


def given_preprocessing(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options about preprocessing that the command line gives."""
    return {name: value for name in PREPROCESSING if (value := getattr(options, name, None)) is not None}


def open_trained(
    source: str, *, model: str | None = None, is_average: bool = False, given: Mapping[str, Any] | None = None
) -> Trained:
    """Open a checkpoint of this script, torchvision, timm or pytorch/examples, a bare state dict, or published weights.

    A bare state dict may be a safetensors file. If `scripts.export` wrote it, its description gives model and options.

    Args:
        source: a path; or `resnet50`, `resnet50.IMAGENET1K_V1` or `ResNet50_Weights.IMAGENET1K_V1`.
        model: the model's name, where the file does not say it.
        is_average: take the average of a checkpoint, not its raw weights.
        given: preprocessing in place of the weights' own: some of `options.PREPROCESSING`.

    Raises:
        UserError: `model` contradicts the weights' own options, or is needed and missing.
    """
    path = Path(source)
    if path.is_dir():
        raise UserError(f"{source} is a folder; give a file in it, such as {path / 'checkpoint.pth'}")
    is_published = not path.is_file()
    if is_published:
        weights = fetch_by_name(source)
    else:
        weights = load_weights(path, is_average=is_average, name=source)
        describe_weights(weights, path)
    name = weights.options.get("model")
    if None not in (name, model) and not is_same_model(name, model):
        raise UserError(f"{source} holds {weights.kind}, and --model is {model}; leave --model out")
    if name is None and model is None:
        raise UserError(f"{source} does not say of which model it is; give --model NAME")
    if model is None and split_custom(name):
        raise UserError(f"{source} is of {name}, {WHY_TYPED}")
    built, args, origin = build_evaluated(source, model or name, weights, given or {}, is_typed=model is not None)
    options = {**weights.options, **{option: getattr(args, option) for option in PREPROCESSING}}
    return Trained(built, args, weights.classes, weights.kind, options, origin, is_published)
