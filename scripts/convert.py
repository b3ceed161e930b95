"""Rewrite a checkpoint for another script: `python -m scripts.convert CHECKPOINT --to torchvision --output FILE`."""

import argparse
import copy
import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpointing.published import preprocessing_line
from checkpointing.weights import (
    BARE,
    Weights,
    as_checkpoint,
    plain_state_dict,
    read_content,
    take_weights,
    write_weights,
)
from errors import UserError, one_line
from options import PREPROCESSING
from scripts.tool import build_parser, check_inputs, output_file, run
from scripts.trained import Trained, add_options, given_preprocessing, open_weights

PROG = "python -m scripts.convert"

EPILOG = """\
examples:
  python -m scripts.convert model_89.pth --to touchstone --output resnet50.pth
  python -m scripts.convert runs/resnet50/best.pth --to torchvision --output model.pth
  python -m scripts.convert runs/resnet50/best_ema.pth --ema --to pytorch-examples --output model_best.pth.tar
  python -m scripts.convert model_best.pth.tar --model timm/efficientnet_b0 --to touchstone --output b0.pth

The input may be of any of these scripts, or a bare state dict with --model; no code in it is run. The tool converts:
  weights     bit for bit, under the model's own names (pytorch/examples': with `module.` before them)
  average     model_ema of touchstone and torchvision, state_dict_ema of timm; pytorch/examples has none
  options     as plain values under `args`; sizes, interpolation, mean and std of the evaluation under our names
  classes     under `data`, which the other scripts do not look at
It prints the names of all else, which it leaves out, the optimizer's state among them: no script can resume a run of
another one, since it does not know the run's position, its schedule or the images that it has seen. train.py --weights
and all tools read the result for touchstone; the other scripts evaluate theirs, and timm's --initial-checkpoint reads
the weights.
"""

SCRIPTS = ("touchstone", "torchvision", "timm", "pytorch-examples")

# The keys that are converted.
_KNOWN = {"model", "state_dict", "model_ema", "state_dict_ema", "epoch", "args", "arch", "data", "best", "best_acc1",
          "metric", "version"}  # fmt: skip


class Parts(NamedTuple):
    """What is converted of a checkpoint; None for a part that it does not have."""

    weights: Weights  # as they are in the file, with options and classes
    average: Weights | None  # likewise
    num_averaged: Tensor | None  # number of updates of the average
    epoch: int | None  # the last completed epoch
    best_acc1: float | None  # the best of the evaluations so far


def read(content: dict, name: str, *, is_average: bool) -> Parts:
    """Return what is converted of a checkpoint's content; its average may stand for the weights."""
    weights = take_weights(content, name, is_average=is_average)
    key = next((key for key in ("model_ema", "state_dict_ema") if content.get(key)), None)
    average = take_weights(content, name, is_average=True) if key and not is_average else None
    count = content[key].get("n_averaged") if key else None
    count = count if isinstance(count, Tensor) and count.numel() == 1 else None
    return Parts(weights, average, count, find_epoch(content, weights.script), find_best(content))


def find_epoch(content: dict, script: str) -> int | None:
    """Return the last completed epoch; pytorch/examples and old versions of timm write the next one instead."""
    epoch = content.get("epoch")
    if type(epoch) is not int:
        return None
    version = content.get("version", 1)
    is_next = script == "pytorch-examples" or (script == "timm" and isinstance(version, int) and version < 2)
    return epoch - is_next


def find_best(content: dict) -> float | None:
    """Return the best Acc@1 so far, where the checkpoint holds it."""
    best = content.get("best")
    if isinstance(best, dict) and best.get("metric") == "val/acc1":
        best = best.get("value")
    for value in (best, content.get("best_acc1"), content.get("metric")):
        is_number = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
        if is_number and math.isfinite(float(value)):
            return float(value)
    return None


def find_counterpart(trained: Trained, weights: Weights, to: str) -> str:
    """Return our name of the target's model that takes the weights: the same, or one that computes the same."""
    name = trained.args.model
    if to == "touchstone" or name.startswith("timm/") == (to == "timm"):
        return name
    other = f"timm/{name}" if to == "timm" else name.removeprefix("timm/")
    given = {option: getattr(trained.args, option) for option in PREPROCESSING}
    weights = copy.copy(weights)
    weights.options = {**weights.options, "model": other}
    try:
        theirs = open_weights(f"--to {to}", weights, given=given)
    except UserError as error:
        raise UserError(f"--to {to}: it has no model with the weights of {name} ({error})") from error
    side = trained.args.val_crop_size
    image = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        is_same = torch.allclose(theirs.model(image), trained.model(image), rtol=1e-3, atol=1e-4)
    if not is_same:
        raise UserError(f"--to {to}: its {other} takes these weights and computes something else than {name}")
    return other


def as_average(parts: Parts) -> dict[str, Tensor]:
    """Return the average as the state dict of torch's AveragedModel, which torchvision saves."""
    state = plain_state_dict(parts.average, "module.")
    # With a count of 0 the next update would replace the average.
    state["n_averaged"] = torch.tensor(1) if parts.num_averaged is None else parts.num_averaged
    state.move_to_end("n_averaged", last=False)
    return state


def for_torchvision(parts: Parts, name: str) -> dict[str, Any]:
    """Return the checkpoint as torchvision's script has it; ours has the same keys."""
    average = None if parts.average is None else as_average(parts)
    more = {"model_ema": average, "epoch": parts.epoch, "best_acc1": parts.best_acc1}
    content = as_checkpoint(parts.weights, **{key: value for key, value in more.items() if value is not None})
    content["args"]["model"] = name
    return content


def for_timm(parts: Parts, name: str) -> dict[str, Any]:
    """Return the checkpoint as timm's script has it."""
    content = for_torchvision(parts, name)
    arch = name.removeprefix("timm/")
    found = {"arch": arch, "state_dict": content["model"], "version": 2, "args": {**content["args"], "model": arch}}
    found |= {key: content[key] for key in ("epoch", "data") if key in content}
    found |= {"state_dict_ema": plain_state_dict(parts.average)} if parts.average is not None else {}
    return found | ({"metric": parts.best_acc1} if parts.best_acc1 is not None else {})


def in_parallel(state: dict[str, Tensor], arch: str) -> dict[str, Tensor]:
    """Return a state dict under the names that it has in pytorch/examples' wrapped model."""
    if not arch.startswith(("alexnet", "vgg")):
        return plain_state_dict(state, "module.")
    # In these models it wraps the features alone.
    return OrderedDict((re.sub(r"^features\.", "features.module.", name), tensor) for name, tensor in state.items())


def for_examples(parts: Parts, name: str) -> dict[str, Any]:
    """Return the checkpoint as pytorch/examples' script has it, whose model stands in DistributedDataParallel."""
    content = for_torchvision(parts, name)
    found = {
        "arch": name,
        "state_dict": in_parallel(content["model"], name),
        "best_acc1": torch.tensor(0.0 if parts.best_acc1 is None else parts.best_acc1),
        "epoch": 0 if parts.epoch is None else parts.epoch + 1,
    }
    return found | {key: content[key] for key in ("args", "data") if key in content}


def lost(parts: Parts, content: dict, written: dict, to: str) -> list[str]:
    """Return a line about each part of the content that is not written, or that the target wants."""
    others = [] if parts.weights.script == BARE else sorted(str(name) for name in content.keys() - _KNOWN)
    lines = [f"{', '.join(others)}: no other script can use it"] if others else []
    no_values = sorted(parts.weights.options.keys() - written["args"].keys())
    lines += [f"args {', '.join(no_values)}: no plain values"] if no_values else []
    if to == "pytorch-examples":
        if parts.average is not None:
            lines.append("average: pytorch-examples has none; with --ema it takes the place of the weights")
        lines += ["best_acc1: not known, written as 0"] if parts.best_acc1 is None else []
        lines += ["epoch: not known, written as 0"] if parts.epoch is None else []
    return lines


def convert(options: argparse.Namespace) -> None:
    """Write the checkpoint for another script."""
    name, to = str(options.checkpoint), options.to
    check_inputs(options.output, [name])
    if not Path(name).is_file():
        raise UserError(f"{name} is no file; give a checkpoint")
    content = read_content(Path(name))
    parts = read(content, name, is_average=options.ema)
    trained = open_weights(name, parts.weights, options.model, given_preprocessing(options))
    print(preprocessing_line(trained.args, trained.origin))
    parts.weights.options = {**trained.trained_with, "model": trained.args.model}
    arch = find_counterpart(trained, parts.weights, to)
    written = {"timm": for_timm, "pytorch-examples": for_examples}.get(to, for_torchvision)(parts, arch)
    write_weights(options.output, written)
    script = parts.weights.script
    kind = parts.weights.kind.partition(",")[0] if script != BARE else f"the weights of {arch}"
    average = ", their average" if parts.average is not None and to != "pytorch-examples" else ""
    print(one_line(f"{options.output}: {kind}{average}; from {script} for {to}, as {arch}"))
    for line in lost(parts, content, written, to):
        print(f"left out: {one_line(line)}")


def main() -> None:
    """Convert the checkpoint of the command line."""
    usage = f"CHECKPOINT --to {'|'.join(SCRIPTS)} --output FILE [--model NAME] [--ema]"
    parser = build_parser(PROG, usage, "Rewrite a checkpoint for another script.", EPILOG)
    add_options(parser, "a checkpoint of any of these scripts, or a state dict")
    parser.add_argument("--to", choices=SCRIPTS, required=True, help="the script that will read the file")
    parser.add_argument("--output", metavar="FILE", type=output_file(), required=True, help="the file to write")
    run(PROG, lambda: convert(parser.parse_args()), "interrupted; nothing was written")


if __name__ == "__main__":
    main()
