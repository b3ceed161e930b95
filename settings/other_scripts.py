"""Command lines of timm's, pytorch/examples' and older torchvision's scripts, rewritten for here.

The flags are the rows of other_scripts.toml, of which `python -m settings.other_scripts` prints the table for
docs/other-scripts.md. Only a command line that cannot be parsed comes here, and `--help WORD`.
"""

import argparse
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from distributed.launch import read_launch
from errors import UserError, did_you_mean, find_timm_config
from settings.options import BY_NAME, defaults


class OtherFlag(NamedTuple):
    """A flag of another script: the names of its values, the script, the words for here, and a remark."""

    values: list[str]
    script: str
    here: str  # with the names of the values in it, or `leave it out` or `not here`
    remark: str  # one that begins with `with` says what is done here anyway, and is for readers of the table


DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FLAGS = {
    name: OtherFlag(values, script, here, remark)
    for names, script, here, remark in DATA["rows"]
    for name, *values in map(str.split, names.split(", "))
}


def table_of(rows: Iterable[Sequence[str]] = DATA["rows"]) -> str:
    """Return rows of the data as a Markdown table."""
    lines = ["| flag | of | here | |", "|---|---|---|---|"]
    for names, script, here, remark in rows:
        flags = ", ".join(f"`{flag}`" for flag in names.split(", "))
        lines.append(f"| {flags} | {script} | {f'`{here}`' if here.startswith('--') else here} | {remark} |")
    return "\n".join(re.sub(" +", " ", line) for line in lines)


def lines_about(word: str) -> list[str]:
    """Return a line for each row of flags that hold a word."""
    rows = [row for row in DATA["rows"] if word in row[0].lower()]
    return [
        f"{names} of {script or 'other scripts'}: {here}{remark and f' ({remark})'}"
        for names, script, here, remark in rows
    ]


# Flags of which pytorch/examples has none: beside one of them the batch is ours.
_NOT_THEIRS = {"--data-path", "--recipe", "--global-batch-size"}
# Flags whose values here depend on other options, each after those that it depends on.
_COMPUTED = ["--pretrained", "--crop-pct", "--grad-accum-steps", "--decay-milestones", "--decay-epochs", "--warmup-lr"]


class OtherCommand:
    """A command line that may be of another script: its unknown flags, and all of it rewritten for here.

    Args:
        words: the command line.
        known: the actions of the parser by their option strings.
    """

    def __init__(self, words: Sequence[str], known: dict[str, argparse.Action]) -> None:
        self.known, self.phrases = known, []
        self.is_understood = True  # whether every word has a meaning here, so that the command can be run
        groups = [*self._groups(list(words))]
        self.given = given = {}
        for flag, values in groups:
            adds_up = isinstance(known.get(flag), argparse._ExtendAction)
            given[flag] = [*given.get(flag, []) * adds_up, *values]
        self.said = {*given, *(re.sub(r"\.0*$", "", f"{flag} {each[0]}") for flag, each in given.items() if each)}
        scripts = {FLAGS[flag].script for flag in given.keys() & FLAGS.keys()}
        self.is_timms = "timm" in scripts
        if self.is_timms:
            for flag in {"--model", "--opt"} & given.keys():
                given[flag] = [re.sub("^(?!.*[/:])", "timm/", given[flag][0])]
            if "--color-jitter" in given and "3a" not in "".join(given.get("--aa", ["3a"])):
                self.phrases.append(f"--color-jitter {given.pop('--color-jitter')[0]} is not needed with --aa")
        # By option, so that none is there twice; a flag without a place stays as it is, to be refused again.
        self.typed = {known[flag].dest: [flag, *given[flag]] for flag, _ in groups if flag in known and flag in given}
        self.options: dict[str, list[str]] = {}
        flags = {**given, **(self._implied() if self.is_timms else {}), **given}
        for flag in sorted(flags, key=lambda flag: flag in _COMPUTED and 1 + _COMPUTED.index(flag)):
            if flag in known:
                dest = known[flag].dest
                self.options.setdefault(dest, self.typed.get(dest, [flag, *flags[flag]]))
                continue
            verdict = self._translate(flag, flags[flag])
            if flag in given:
                self.phrases.append(" ".join([flag, *given[flag], verdict]))
        if scripts & {"examples", "timm"} == {"examples"} and not given.keys() & _NOT_THEIRS:
            self._share_batch()

    def __str__(self) -> str:
        launch = read_launch()
        nodes = f"--nnodes={launch.num_nodes} " if launch.num_nodes > 1 else ""
        starter = f"torchrun {nodes}--nproc_per_node={launch.num_local}" if launch.is_torchrun else "python"
        return f"{starter} train.py {shlex.join(self.words)}"

    @property
    def words(self) -> list[str]:
        """The command line here."""
        return [word for words in self.options.values() for word in words]

    def _share_batch(self) -> None:
        """Give the batch of pytorch/examples, which the GPUs of a machine share, as that of a process and of all."""
        launch, known = read_launch(), {name: words[1] for name, words in self.options.items() if words[1:]}
        with suppress(ValueError):  # refused when the command for here is run
            share = int(known.get("batch_size", 256)) // launch.num_local
            total = share * max(launch.world_size, launch.num_local * int(known.get("world_size", 1)))
            self.phrases.append(f"the batch per machine is --batch-size {share} --global-batch-size {total}")
            words = ["--batch-size", f"{share}", "--global-batch-size", f"{total}"]
            self.options |= {"batch_size": words, "world_size": []}

    def _groups(self, words: list[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield each flag with its values; a word of no flag in place of one."""
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            if not flag.startswith("-"):
                yield word, []
                continue
            if re.match("-[^-].", flag) and flag not in FLAGS and flag[:2] in self.known:  # -j8
                flag, equals, value = flag[:2], "=", word[2:].removeprefix("=")
            if flag not in FLAGS and "_" in flag and (dashed := flag.replace("_", "-")) in self.known | FLAGS:
                self.phrases.append(f"{flag} is {dashed}")
                flag = dashed
            if flag not in self.known | FLAGS and len(flag) > 2:  # torchvision's parser takes a unique beginning
                begun = [name for name in DATA["torchvision"].split() if name.startswith(flag)]
                if len(begun) == 1:
                    self.phrases.append(f"{flag} is {begun[0]}")
                    flag = begun[0]
            values = [value] if equals else []
            number = self._count(flag)
            if not values and words and re.fullmatch(DATA["optional"].get(flag, "(?!)"), words[0]):
                values = [words.pop(0)]
            while words and len(values) < number and not re.match("-[^0-9.]", words[0]):
                values.append(words.pop(0))
            yield flag, values

    def _count(self, flag: str) -> float:
        """Return the most values that a flag takes; that of an unknown one is what follows it."""
        if flag in self.known:
            nargs = self.known[flag].nargs
            return 1 if nargs in (None, "?") else nargs if isinstance(nargs, int) else math.inf
        values = FLAGS[flag].values if flag in FLAGS else ["VALUE"]
        return math.inf if "..." in "".join(values) else len(values)

    def _implied(self) -> dict[str, list[str]]:
        """Return the flags, of timm or of here, that timm's defaults come to beside the given ones."""
        adapts = any(name in "".join(self.given.get("--opt", ())).lower() for name in ("ada", "lamb"))
        words = [words for flags, words in DATA["implied"].items() if self.said.intersection(flags.split("|"))]
        text = " ".join([*words, "--no-decay-1d"]).replace("SCALE", "sqrt" if adapts else "linear")
        return dict(self._groups(text.split()))

    def _translate(self, flag: str, values: list[str]) -> str:
        """Add the words for here of a flag of another script; return what becomes of it, with a remark."""
        row = FLAGS.get(flag)
        if row is None and not flag.startswith("-") and not {"--data-path", "--data-dir"} & self.given.keys():
            row = OtherFlag([], "", f"--data-path {shlex.quote(flag)}", "") if "data_path" not in self.options else None
        if row is None:
            self.is_understood = False
            there = [name for name, other in FLAGS.items() if other.here.startswith("--")]
            return f"is unknown{did_you_mean(flag, [*self.known, *there])}"
        special = DATA["with"].get(flag, {})
        partner = next((other for other in special if other in self.said), "")
        here, theirs = special[partner] if partner else row.here, DATA["values"].get(flag, {})
        is_needless = any(text.startswith(f"{flag} ") for text in self.said.intersection(DATA["not_needed"]))
        if is_needless or self._is_idle(here):
            return "is not needed here"
        remark = f" ({row.remark})" if row.remark and not partner and not row.remark.startswith("with") else ""
        if here in ("leave it out", "not here"):
            where = f"with {partner}" if partner else "here"
            return (f"is not needed {where}" if here == "leave it out" else "is not supported here") + remark
        ours = [theirs[value] for value in values if value in theirs] if theirs else values
        if flag == "--input-size" and values[1:2] != values[2:]:
            ours = []
        words = self._fill(flag, ours, row, here)
        if not self._place(words):
            self.is_understood &= flag not in self.given
            return f"conflicts with other flags over {words[0]}; give only one"
        if values and not ours:
            self.is_understood = False
            return f"is not supported here{did_you_mean(values[0], theirs)}{row.remark and f' ({row.remark})'}"
        return f"is {shlex.join(words)}{'' if theirs else remark}"

    def _place(self, words: list[str]) -> bool:
        """Add words for here, unless an option in them has another value already; return whether they are added."""
        found = {self.known[flag].dest: [flag, *values] for flag, values in self._groups([*words])}
        taken = {**self.typed, **self.options}
        if "model_kwargs" in found:  # which add up
            found["model_kwargs"][1:1] = taken.pop("model_kwargs", [])[1:]
        is_free = all(taken.get(dest, new) == new for dest, new in found.items())
        self.options |= found if is_free else {}
        return is_free

    def _is_idle(self, here: str) -> bool:
        """Tell whether words for here have no effect beside timm's schedule; a mistyped one may be any."""
        theirs, sched = DATA["values"]["--sched"], "".join(self.given.get("--sched", ()))
        needs = getattr(BY_NAME.get(here.split()[0][2:].replace("-", "_")), "needs", "")
        is_meant = sched in theirs or (sched and not did_you_mean(sched, theirs))
        needed = re.split("[=|]", needs) if needs.startswith("lr_scheduler=") and is_meant else []
        return bool(needed) and theirs.get(sched, "cosineannealinglr") not in needed

    def _fill(self, flag: str, values: list[str], row: OtherFlag, here: str) -> list[str]:
        """Return words for here with the values of a flag in them."""
        if flag == "--output" and values:
            values = [os.path.join(*values, *self.given.get("--experiment", ()))]
        if flag == "--pretrained" and values:  # a file, in forks
            return ["--weights", *values]
        if flag in _COMPUTED and "recipe" not in self.options:  # which gives them too
            with suppress(UserError, ValueError, TypeError, ZeroDivisionError):
                return self._compute(flag, *values)
        filled = dict(zip(row.values, values, strict=False))
        self.is_understood &= filled.keys() >= {*row.values} and "PX" not in here
        parts = [re.fullmatch("(.*[/:=])?(.*)", word).groups("") for word in shlex.split(here)]
        return [begin + filled.get(name, name) for begin, name in parts]

    def _compute(self, flag: str, value: str = "", *more: str) -> list[str]:
        """Return the words for here of a flag that other options change too; ValueError and others if they cannot."""
        known = defaults() | {name: words[1] for name, words in self.options.items() if words[1:]}
        batch, model = int(known["batch_size"]) * read_launch().world_size, known["model"]
        if flag == "--grad-accum-steps":
            return ["--global-batch-size", str(batch * int(value))]
        if flag == "--decay-milestones":  # before which timm's rate falls by an epoch
            return ["--lr-milestones", *(str(int(each) - 1) for each in (value, *more))]
        if flag == "--decay-epochs":
            every = float(value)
            if not every % 1:
                return ["--lr-step-size", f"{every:.0f}"]
            gamma = f"{float(known['lr_gamma']) ** (1 / every):.6g}"  # the rate falls by as much, but smoothly
            for name in {"lr_scheduler", "lr_gamma"} - self.typed.keys():
                self.options.pop(name, None)
            return ["--lr-scheduler", "exponentiallr", "--lr-gamma", gamma]
        if flag == "--warmup-lr":
            if "--warmup-prefix" in self.given and "epochs" in self.options:  # after which timm trains --epochs
                self.options["epochs"] = ["--epochs", str(int(known["epochs"]) + int(known["lr_warmup_epochs"]))]
            lr, scaling = float(known["lr"]), known["lr_scaling"]
            if scaling != "none":
                ratio = int(known["global_batch_size"] or batch) / int(known["lr_scaling_batch"])
                lr *= ratio ** (0.5 if scaling == "sqrt" else 1)
            return ["--lr-warmup-decay", f"{float(value) / lr:.6g}"]
        config = find_timm_config(model) if model.startswith("timm/") else None
        if flag == "--pretrained":
            return ["--weights", f"hf-hub:{config.hf_hub_id}" if config else "IMAGENET1K_V1"]
        is_models = config is not None and "val_crop_size" not in self.options
        side = config.input_size[-1] if is_models else float(known["val_crop_size"])
        return ["--val-resize-size", str(math.floor(side / float(value)))]


def explain(words: Sequence[str], parser: argparse.ArgumentParser) -> UserError:
    """Return the error about a command line with words that are unknown to the parser.

    It ends with the command here if every word of the command line is understood.
    """
    command = OtherCommand(words, parser._option_string_actions)
    named, before, after = ("arguments", "\n  ", "\n") if command.phrases[1:] else ("argument", " ", "; ")
    timms = " (options not given have this project's defaults, not timm's)" if command.is_timms else ""
    phrases = before.join(["", *command.phrases])
    end = "--help lists the options"
    try:
        _, unknown = parser.parse_known_args(command.words)
        if command.is_understood and not unknown:
            end = f"the command here{timms}: {command}"
    except UserError as error:  # a known option does not take its value
        end = str(error)
    after = " " if phrases.endswith("?") and after == "; " else after
    # Uncut: half a command would be of no use.
    return UserError(f"unrecognized {named}:{phrases}{after}{end}", has_lines=True)


if __name__ == "__main__":
    print(table_of())
