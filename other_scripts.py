"""Command lines of timm's, pytorch/examples' and older torchvision's scripts, rewritten for here.

The flags are the rows of docs/other-scripts.md. Only a command line that cannot be parsed comes here.
"""

import argparse
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from errors import UserError, did_you_mean, find_timm_config
from options import BY_NAME, REMOVED


class OtherFlag(NamedTuple):
    """A flag of another script: the names of its values, the script, the words for here, and a remark."""

    values: list[str]
    script: str
    here: str  # with the names of the values in it, or `leave it out` or `not here`
    remark: str


def read_other_flags() -> dict[str, OtherFlag]:
    """Return the flags of other scripts by their names: the table of docs/other-scripts.md."""
    flags = {}
    for line in (Path(__file__).parent / "docs" / "other-scripts.md").read_text().splitlines():
        if line.startswith("| `"):
            names, script, here, remark = (cell.strip() for cell in line[1:-1].split("|"))
            for flag in names.replace("`", "").split(", "):
                name, *values = flag.split()
                flags[name] = OtherFlag(values, script, here.replace("`", ""), remark)
    return flags


# Values of other scripts and ours; none else has one here.
_THEIR_VALUES = {
    "--sched": {"cosine": "cosineannealinglr", "step": "steplr", "multistep": "multisteplr", "poly": "polylr"},
    "--remode": {"pixel": "pixel", "const": "zero"},
    "--eval-metric": {"top1": "acc1", "top5": "acc5", "loss": "loss"},
    "--clip-mode": {"norm": "", "value": "", "agc": ""},
    "--recount": {"1": ""},
    "--tta": {"0": "", "2": "--eval-flip"},
}
_COMPUTED = {"--crop-pct", "--grad-accum-steps", "--warmup-lr"}


def _compute_value(flag: str, value: str, given: dict[str, list[str]]) -> str:
    """Return the value here of a flag that other flags of the command change too; ValueError if it is no number."""

    def number(*names: str, default: float) -> float:
        return next((float(given[name][-1]) for name in names if given.get(name)), default)

    if flag == "--crop-pct":
        side = number("--val-crop-size", "--img-size", "--input-size", default=224)
        return str(math.floor(side / float(value)))
    if flag == "--grad-accum-steps":
        batch = number("--batch-size", "-b", default=BY_NAME["batch_size"].default)
        return str(int(batch) * int(value) * int(os.environ.get("WORLD_SIZE", "1")))
    return f"{float(value) / number('--lr', default=BY_NAME['lr'].default):.6g}"  # --warmup-lr


class OtherCommand:
    """A command line that may be of another script: its unknown flags, and all of it rewritten for here.

    Args:
        words: the command line.
        known: the actions of the parser by their option strings.
    """

    def __init__(self, words: Sequence[str], known: dict[str, argparse.Action]) -> None:
        self.table, self.known = read_other_flags(), known
        self.groups = list(self._groups(list(words)))
        self.given = dict(self.groups)
        self.is_timms = any(self.table[flag].script == "timm" for flag in self.given.keys() & self.table.keys())
        self.phrases, self.words = [], []
        for flag, values in self.groups:
            self._take(flag, values)
        if self.is_timms:
            self._add_timms_rules()

    def __str__(self) -> str:
        return f"python train.py {shlex.join(self.words)}"

    def _groups(self, words: list[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield each flag with its values; a word of no flag with the flag ""."""
        while words:
            flag, equals, value = words.pop(0).partition("=")
            if not flag.startswith("-"):
                yield "", [flag + equals + value]
                continue
            values = [value] if equals else []
            number = self._count(flag)
            while words and len(values) < number and not re.match("-[^0-9.]", words[0]):
                values.append(words.pop(0))
            yield flag, values

    def _count(self, flag: str) -> float:
        """Return the most values that a flag takes; that of an unknown one is what follows it."""
        if flag in self.known:
            nargs = self.known[flag].nargs
            return 1 if nargs in (None, "?") else nargs if isinstance(nargs, int) else math.inf
        values = self.table[flag].values if flag in self.table else ["VALUE"]
        return math.inf if "..." in "".join(values) else len(values)

    def _take(self, flag: str, values: list[str]) -> None:
        if flag in self.known:
            if self.is_timms and flag in ("--model", "--opt") and "/" not in values[0]:
                values = [f"timm/{values[0]}"]
            self.words += [flag, *values]
        elif not flag and not {"--data-path", "--data-dir"} & self.given.keys():
            self.given["--data-path"] = values
            self.phrases.append(f"{values[0]} is --data-path {values[0]}")
            self.words += ["--data-path", *values]
        else:
            here, remark = self._translate(flag, values)
            self.phrases.append(f"{' '.join(filter(None, [flag, *values]))} {here}{f' ({remark})' if remark else ''}")

    def _translate(self, flag: str, values: list[str]) -> tuple[str, str]:
        """Add the words for here of an unknown flag; return what becomes of it, and a remark."""
        if (name := flag.removeprefix("--")) in REMOVED:
            return "was removed" + ("" if REMOVED[name] is None else f" (it is always {REMOVED[name]} now)"), ""
        if flag not in self.table:
            return f"is unknown{did_you_mean(flag, [*self.known, *self.table])}", ""
        row = self.table[flag]
        words = self._fill(flag, values, row)
        if not words:
            return "is not here" if words is None else "has no need here", row.remark
        if f" {' '.join(words)} " not in f" {' '.join(self.words)} ":
            self.words += words
        return f"is {shlex.join(words)}", "" if flag in _THEIR_VALUES or flag in _COMPUTED else row.remark

    def _fill(self, flag: str, values: list[str], row: OtherFlag) -> list[str] | None:
        """Return the words for here of a flag with its values: none if it has no need here, None if it is not here."""
        here = row.here
        if flag in _THEIR_VALUES:
            values = [_THEIR_VALUES[flag].get(value, "not here") for value in values]
            here = here if here.startswith("--") and "not here" not in values else "".join(values) or "leave it out"
        if flag == "--output" and values:
            values = [os.path.join(*values, *self.given.get("--experiment", ()))]
        if flag == "--clip-grad":
            modes = {"agc": "--clip-agc NORM", "value": "--clip-grad-value NORM"}
            here = modes.get("".join(self.given.get("--clip-mode", ())), here)
        if flag.startswith("--lr-base") and "--lr" in self.given:  # which counts then
            return []
        if flag in ("--decay-rate", "--dr") and self.given.get("--sched") == ["poly"]:
            here = "--lr-power F"
        if here == "not here":
            return None
        if here == "leave it out" or (flag == "--experiment" and "--output" in self.given):
            return []
        if flag in _COMPUTED:
            with suppress(ValueError, IndexError, ZeroDivisionError):
                return [here.split()[0], _compute_value(flag, values[0], self.given)]
        if row.values[-1:] and row.values[-1].endswith("..."):
            return [here.split()[0], *values]
        filled = dict(zip(row.values, values, strict=False))
        parts = [re.fullmatch("(.*[/:=])?(.*)", word).groups("") for word in here.split()]
        return [begin + filled.get(name, name) for begin, name in parts]

    def _add_timms_rules(self) -> None:
        """Add what timm does without a flag, or by two flags together."""
        given = self.given
        if "--warmup-lr" in given and "--warmup-epochs" not in given:
            self.words += ["--lr-warmup-epochs", "5", "--lr-warmup-method", "linear"]
        if given.keys() & {"--warmup-epochs", "--warmup-lr"} and "--warmup-prefix" not in given:
            self.words.append("--no-lr-warmup-prefix")
        with suppress(ValueError, KeyError, IndexError):
            if "--warmup-prefix" in given:  # after which timm trains --epochs
                self._change("--epochs", [str(int(given["--epochs"][0]) + int(given["--warmup-epochs"][0]))])
        with suppress(ValueError, KeyError, IndexError, ZeroDivisionError):
            every, rate = float(given["--decay-epochs"][0]), given.get("--decay-rate") or given.get("--dr") or ["0.1"]
            if every % 1:  # here the rate falls by as much, but smoothly
                for flag in ("--lr-step-size", "--lr-gamma", "--lr-scheduler"):
                    self._change(flag, None)
                self.words += ["--lr-scheduler", "exponentiallr", "--lr-gamma", f"{float(rate[0]) ** (1 / every):.6g}"]
        if given.keys() & {"--lr-base", "--lr-base-size", "--lr-base-scale"} and "--lr" not in given:
            adapts = any(name in "".join(given.get("--opt", ())).lower() for name in ("ada", "lamb"))
            scaling = ["--lr-scaling", "sqrt" if adapts else "linear"], ["--lr-scaling-batch", "256"]
            self.words += [word for words in scaling if words[0] not in self.words for word in words]
        if "--aa" in given and "3a" not in "".join(given["--aa"]):
            self._change("--color-jitter", None)
        self.words += ["--random-erase-fill", "pixel"] * ("--reprob" in given and "--remode" not in given)
        self.words += ["--no-decay-1d"] * ("--no-decay-1d" not in given)
        if "--model-ema" in given:
            self.words += ["--model-ema-steps", "1", "--no-model-ema-adjust"]
            self.words += ["--model-ema-decay", "0.9998"] * ("--model-ema-decay" not in given)
        if "--pretrained" in given and given.get("--model"):
            with suppress(UserError):  # timm is not installed
                known = find_timm_config(f"timm/{given['--model'][0].removeprefix('timm/')}")
                self._change("--weights", [f"hf-hub:{known.hf_hub_id}"] if known else ["hf-hub:timm/NAME"])

    def _change(self, flag: str, values: list[str] | None) -> None:
        """Give a flag of the command another value, or take it out."""
        if flag in self.words:
            place = self.words.index(flag)
            self.words[place : place + 2] = [] if values is None else [flag, *values]


def explain(words: Sequence[str], known: dict[str, argparse.Action]) -> UserError:
    """Return the error about a command line with unknown words; arguments as of `OtherCommand`."""
    command = OtherCommand(words, known)
    named, before, after = ("arguments", "\n  ", "\n") if command.phrases[1:] else ("argument", " ", "; ")
    timms = " (what it does not give has the defaults of here, not timm's)" if command.is_timms else ""
    phrases = "".join(f"{before}{phrase}" for phrase in command.phrases)
    error = UserError(f"unrecognized {named}:{phrases}{after}for here{timms}: {command}")
    error.has_lines = True  # uncut: half a command would be of no use
    return error
