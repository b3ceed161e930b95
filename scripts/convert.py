"""Rewrite a checkpoint for another script: `python -m scripts.convert CHECKPOINT --to torchvision --output FILE`."""

import argparse
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import config
import optim
from checkpointing.published import preprocessing_line
from checkpointing.weights import (
    BARE,
    Weights,
    as_checkpoint,
    check_output,
    plain_state_dict,
    read_content,
    take_weights,
    write_weights,
)
from errors import UserError, in_one_line, one_line
from options import BY_NAME, PREPROCESSING
from scripts.tool import build_parser, given_path, run
from scripts.trained import Trained, add_options, build_named, build_trained, given_preprocessing

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
  optimizer   between touchstone, torchvision and pytorch/examples, where its parameter groups are those that train.py
              forms of the same options; timm numbers its parameters otherwise
  options     as plain values under `args`; sizes, mean and std of timm's evaluation under our names
  classes     under `data`, which the other scripts do not look at
The tool prints a line about each thing that it leaves out.

No script can continue another's run: it cannot know the run's position, its schedule or the images that it has seen.
So train.py --weights and all tools take the result for touchstone, and train.py --resume does not. torchvision's
--resume also wants an lr_scheduler to train on (--test-only does without), as pytorch/examples' wants a scheduler.
timm's --initial-checkpoint takes the weights.
"""

# The keys that the readers below look at; the tool leaves out all others, and says so.
_KNOWN = {"model", "state_dict", "model_ema", "state_dict_ema", "optimizer", "scaler", "epoch", "args", "arch", "data",
          "best", "best_acc1", "metric", "version"}  # fmt: skip


class Parts(NamedTuple):
    """All that is known of a checkpoint, whoever wrote it; None for a part that it does not have."""

    trained: Trained  # the model with its weights
    weights: Weights  # as they are in the file, with options and classes
    average: Weights | None  # likewise
    num_averaged: Tensor | None  # number of updates of the average
    optimizer: dict | None  # its state dict, which fits the model
    scaler: dict | None  # the state dict of a GradScaler
    epoch: int | None  # the last completed epoch
    best_acc1: float | None  # the best of the evaluations so far
    lost: list[str]  # a line about each thing that is left out


def read(options: argparse.Namespace) -> Parts:
    """Return all that is in the checkpoint of the command line; with --ema its average stands for the weights."""
    path = Path(options.checkpoint)
    name = str(path)
    if not path.is_file():
        raise UserError(f"{name} is no file; give a checkpoint")
    content = read_content(path, name)
    weights = take_weights(content, name, is_average=options.ema)
    key = next((key for key in ("model_ema", "state_dict_ema") if content.get(key)), None)
    average = take_weights(content, name, is_average=True) if key and not options.ema else None
    count = content[key].get("n_averaged") if key else None
    trained, script = build_named(name, weights, options.model, given_preprocessing(options)), weights.script
    print(preprocessing_line(trained.args, trained.origin))
    weights.options = {**trained.trained_with, "model": trained.args.model}
    others = [] if script == BARE else sorted(str(name) for name in content.keys() - _KNOWN)
    lost = [f"{', '.join(others)}: no other script can use it"] if others else []
    optimizer = content.get("optimizer")
    reason = why_not(optimizer, script, weights.options, trained.model) if optimizer is not None else None
    if reason:
        optimizer, lost = None, [*lost, f"optimizer: {reason}"]
    return Parts(
        trained, weights, average, count if isinstance(count, Tensor) and count.numel() == 1 else None, optimizer,
        content.get("scaler") if isinstance(content.get("scaler"), dict) else None,
        find_epoch(content, script), find_best(content), lost,
    )  # fmt: skip


def find_epoch(content: dict, script: str) -> int | None:
    """Return the last completed epoch; pytorch/examples and old versions of timm write the next one instead."""
    epoch = content.get("epoch")
    if type(epoch) is not int:
        return None
    version = content.get("version", 1)
    is_next = script == "pytorch-examples" or (script == "timm" and isinstance(version, int) and version < 2)
    return epoch - is_next


def find_best(content: dict) -> float | None:
    """Return the best Acc@1 so far, where the checkpoint says it."""
    best = content.get("best")
    if isinstance(best, dict) and best.get("metric") == "val/acc1":
        best = best.get("value")
    for value in (best, content.get("best_acc1"), content.get("metric")):
        is_number = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
        if is_number and math.isfinite(float(value)):
            return float(value)
    return None


def why_not(optimizer: Any, script: str, options: dict, model: nn.Module) -> str | None:
    """Return why an optimizer's state cannot be converted, or None if train.py's with the same options can load it."""
    if script == "timm":
        return "timm groups and numbers its parameters otherwise"
    if options.get("freeze") or options.get("layer_decay") or str(options.get("opt", "sgd")).startswith("timm/"):
        return "its groups come from options that the other scripts do not have"
    ours = {name: value for name, value in options.items() if name in BY_NAME and BY_NAME[name].is_value(value)}
    args = config.filled(argparse.Namespace(**{**ours, "lr_scaling": "none"}))
    model.requires_grad_(True)
    try:
        with in_one_line("it does not fit"):
            built = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
            optim.OptimizerState(built).load_state_dict(optimizer)
    except UserError as error:
        return str(error)
    return None


def carry_optimizer(parts: Parts, to: str, name: str) -> tuple[dict, list[str]]:
    """Return the optimizer and the scaler under the target's keys, and a line about each that is left out."""
    kept, lost = {}, []
    if parts.optimizer is not None:
        groups, kind = parts.optimizer["param_groups"], parts.weights.options.get("opt", "sgd")
        is_other = name != parts.trained.args.model
        if to == "timm" or is_other or (to == "pytorch-examples" and (len(groups) > 1 or kind != "sgd")):
            lost.append(f"optimizer: {to} groups and numbers its parameters otherwise")
        else:
            is_ours = to == "touchstone"
            kept["optimizer"] = {
                key: value for key, value in parts.optimizer.items() if is_ours or key != "group_state"
            }
    if parts.scaler is not None:
        if to in ("touchstone", "torchvision"):
            kept["scaler"] = parts.scaler
        else:
            lost.append("scaler: the loss scale of --amp, which is found anew in a few hundred steps")
    return kept, lost


def find_counterpart(parts: Parts, to: str) -> str:
    """Return our name of the target's model that takes the weights: the same, or one that computes the same."""
    name = parts.trained.args.model
    if to == "touchstone" or name.startswith("timm/") == (to == "timm"):
        return name
    other = f"timm/{name}" if to == "timm" else name.removeprefix("timm/")
    try:
        given = {name: parts.weights.options[name] for name in PREPROCESSING}
        trained = build_trained(f"--to {to}", other, parts.weights, given)
        side = parts.trained.args.val_crop_size
        image = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            is_same = torch.allclose(trained.model(image), parts.trained.model.eval()(image), rtol=1e-3, atol=1e-4)
    except UserError as error:
        raise UserError(f"--to {to}: it has no model with the weights of {name} ({error})") from error
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
    found |= {name: content[name] for name in ("epoch", "data") if name in content}
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


WRITERS: dict[str, Callable[[Parts, str], dict[str, Any]]] = {
    "touchstone": for_torchvision, "torchvision": for_torchvision, "timm": for_timm, "pytorch-examples": for_examples,
}  # fmt: skip


def say_missing(parts: Parts, to: str) -> list[str]:
    """Return a line about each part that the target wants and the checkpoint lacks, or that the target cannot hold."""
    lines = []
    if to == "pytorch-examples":
        if parts.average is not None:
            lines.append("average: pytorch-examples has none; with --ema it takes the place of the weights")
        lines += ["best_acc1: not known, written as 0"] if parts.best_acc1 is None else []
        lines += ["epoch: not known, written as 0"] if parts.epoch is None else []
    schedulers = {"torchvision": "lr_scheduler", "pytorch-examples": "scheduler"}
    if to in schedulers:
        lines.append(f"{schedulers[to]}: none that {to} could train on with; evaluation and weights do without")
    return lines


def convert(options: argparse.Namespace) -> None:
    """Write the checkpoint for another script."""
    check_output(options.output, [options.checkpoint])
    parts = read(options)
    name = find_counterpart(parts, options.to)
    kept, lost = carry_optimizer(parts, options.to, name)
    content = WRITERS[options.to](parts, name)
    write_weights(options.output, {**content, **kept})
    script = parts.weights.script
    no_values = sorted(parts.weights.options.keys() - content["args"].keys())
    lost += [f"args {', '.join(no_values)}: no plain values"] if no_values else []
    kind = parts.weights.kind.partition(",")[0] if script != BARE else f"the weights of {name}"
    carried = [kind, *(["their average"] if parts.average is not None and options.to != "pytorch-examples" else [])]
    print(one_line(f"{options.output}: {', '.join([*carried, *kept])}; from {script} for {options.to}, as {name}"))
    for line in parts.lost + lost + say_missing(parts, options.to):
        print(f"left out: {one_line(line)}")


def main() -> None:
    """Convert the checkpoint of the command line."""
    usage = f"CHECKPOINT --to {'|'.join(WRITERS)} --output FILE [--model NAME] [--ema]"
    parser = build_parser(PROG, usage, "Rewrite a checkpoint for another script.", EPILOG)
    add_options(parser, "a checkpoint of any of these scripts, or a state dict")
    parser.add_argument("--to", choices=WRITERS, required=True, help="the script that will read the file")
    parser.add_argument("--output", metavar="FILE", type=given_path, required=True, help="the file to write")
    run(PROG, lambda: convert(parser.parse_args()), "interrupted; nothing was written")


if __name__ == "__main__":
    main()
