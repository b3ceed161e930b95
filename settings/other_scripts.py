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
from pathlib import Path
from typing import Any, NamedTuple

from distributed.launch import read_launch
from errors import UserError, did_you_mean
from settings.options import BY_NAME, defaults
from settings.packages import find_timm_config


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
        if here.startswith("--"):
            here = f"`{here}`"
        lines.append(f"| {flags} | {script} | {here} | {remark} |")
    return "\n".join(re.sub(" +", " ", line) for line in lines)


def lines_about(word: str) -> list[str]:
    """Return a line for each row of flags that hold a word."""
    rows = [row for row in DATA["rows"] if word in row[0].lower()]
    text = "{} of {}: {}{}"
    return [text.format(names, of or "other scripts", here, _in_brackets(remark)) for names, of, here, remark in rows]


def _in_brackets(remark: str) -> str:
    return f" ({remark})" if remark else ""


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
        self.known = known
        self.phrases: list[str] = []  # what is said of each flag
        self.is_understood = True  # whether every word has a meaning here, so that the command can be run
        groups = list(self._groups(list(words)))
        self.given: dict[str, list[str]] = {}
        for flag, values in groups:
            # As argparse: of a flag that is given twice the last one counts, or both add up.
            if isinstance(known.get(flag), argparse._ExtendAction):
                values = [*self.given.get(flag, []), *values]
            self.given[flag] = values
        # The tables of the data ask for a flag, or for a flag with a value such as `--vflip 0`, also written 0.0.
        texts = [f"{flag} {values[0]}" for flag, values in self.given.items() if values]
        self.said = {*self.given, *(re.sub(r"\.0*$", "", text) for text in texts)}
        scripts = {FLAGS[flag].script for flag in self.given.keys() & FLAGS.keys()}
        self.is_timms = "timm" in scripts
        if self.is_timms:
            self._adapt_timms()
        # By option, so that none is there twice; a flag without a place stays as it is, to be refused again.
        own = [flag for flag, _ in groups if flag in known and flag in self.given]
        self.typed = {known[flag].dest: [flag, *self.given[flag]] for flag in own}
        self.options: dict[str, list[str]] = {}
        self._rewrite()
        # timm's scripts have `-b` too, where it is the batch of a process, as here.
        is_examples = "examples" in scripts and not self.is_timms
        if is_examples and not self.given.keys() & _NOT_THEIRS:
            self._share_batch()

    def __str__(self) -> str:
        launch = read_launch()
        starter = "python"
        if launch.is_torchrun:
            nodes = f"--nnodes={launch.num_nodes} " if launch.num_nodes > 1 else ""
            starter = f"torchrun {nodes}--nproc_per_node={launch.num_local}"
        return f"{starter} train.py {shlex.join(self.words)}"

    @property
    def words(self) -> list[str]:
        """The command line here."""
        return [word for words in self.options.values() for word in words]

    def _adapt_timms(self) -> None:
        """Name timm's models and optimizers as here, and leave out the colour jitter that timm leaves out."""
        # torchvision has models of the same names, such as resnet50, whose weights and details are others.
        for flag in {"--model", "--opt"} & self.given.keys():
            name = self.given[flag][0]
            # Not to a name that says where it is from: hf-hub:..., timm/..., FILE.py:FUNCTION.
            if "/" not in name and ":" not in name:
                name = f"timm/{name}"
            self.given[flag] = [name]
        # timm's create_transform turns the jitter off beside a policy, but for 3-Augment, of which it is a part.
        policy = self.given.get("--aa")
        if policy is not None and "--color-jitter" in self.given and "3a" not in "".join(policy):
            self.phrases.append(f"--color-jitter {self.given.pop('--color-jitter')[0]} is not needed with --aa")

    def _rewrite(self) -> None:
        """Fill in `options` from the given flags and those that timm's defaults come to."""
        flags = dict(self.given)
        if self.is_timms:
            # timm's defaults differ from ours, so that the same flags without them would train another run.
            for flag, values in self._implied().items():
                flags.setdefault(flag, values)
        first = [flag for flag in flags if flag not in _COMPUTED]
        for flag in [*first, *(flag for flag in _COMPUTED if flag in flags)]:
            if flag in self.known:
                dest = self.known[flag].dest
                self.options.setdefault(dest, self.typed.get(dest, [flag, *flags[flag]]))
                continue
            verdict = self._translate(flag, flags[flag])
            if flag in self.given:
                self.phrases.append(" ".join([flag, *self.given[flag], verdict]))

    def _share_batch(self) -> None:
        """Give the batch of pytorch/examples, which the GPUs of a machine share, as that of a process and of all."""
        launch = read_launch()
        known = {name: words[1] for name, words in self.options.items() if words[1:]}
        try:
            share = int(known.get("batch_size", 256)) // launch.num_local  # 256 is its default
            num_nodes = int(known.get("world_size", 1))  # its --world-size counts machines
        except ValueError:
            return  # It is refused when the command for here is run.
        total = share * max(launch.world_size, launch.num_local * num_nodes)
        self.phrases.append(f"the batch per machine is --batch-size {share} --global-batch-size {total}")
        self.options["batch_size"] = ["--batch-size", f"{share}", "--global-batch-size", f"{total}"]
        self.options["world_size"] = []

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
            flag = self._spell_out(flag)
            values = [value] if equals else []
            number = self._count(flag)
            # `--torchcompile inductor`: only such a word is its value, for the next one may be the data path.
            if not values and words and re.fullmatch(DATA["optional"].get(flag, "(?!)"), words[0]):
                values = [words.pop(0)]
            # As in argparse, -1 and -.5 are values where no option is named by a number.
            while words and len(values) < number and not re.match("-[^0-9.]", words[0]):
                values.append(words.pop(0))
            yield flag, values

    def _spell_out(self, flag: str) -> str:
        """Return the whole flag that is meant, if it is written with underscores or cut short."""
        # ConvNeXt's script writes --data_path where timm's and DeiT's have --data-path.
        dashed = flag.replace("_", "-")
        if flag in FLAGS or flag in self.known:
            return flag
        if dashed in FLAGS or dashed in self.known:
            self.phrases.append(f"{flag} is {dashed}")
            return dashed
        if len(flag) > 2:  # torchvision's parser takes a unique beginning
            begun = [name for name in DATA["torchvision"].split() if name.startswith(flag)]
            if len(begun) == 1:
                self.phrases.append(f"{flag} is {begun[0]}")
                return begun[0]
        return flag

    def _count(self, flag: str) -> float:
        """Return the most values that a flag takes; that of an unknown one is what follows it."""
        if flag in self.known:
            nargs = self.known[flag].nargs
            if nargs in (None, "?"):
                return 1
            return nargs if isinstance(nargs, int) else math.inf
        if flag not in FLAGS:
            return 1
        values = FLAGS[flag].values
        return math.inf if "..." in "".join(values) else len(values)

    def _implied(self) -> dict[str, list[str]]:
        """Return the flags, of timm or of here, that timm's defaults come to beside the given ones."""
        optimizer = "".join(self.given.get("--opt", ())).lower()
        # timm's train.py: the square root for adaptive optimizers, which it knows by these letters of their names.
        scaling = "sqrt" if "ada" in optimizer or "lamb" in optimizer else "linear"
        words = [words for flags, words in DATA["implied"].items() if self.said.intersection(flags.split("|"))]
        # timm's optimizers spare biases and norms from the decay; torchvision's script by default decays all.
        text = " ".join([*words, "--no-decay-1d"]).replace("SCALE", scaling)
        return dict(self._groups(text.split()))

    def _translate(self, flag: str, values: list[str]) -> str:
        """Add the words for here of a flag of another script; return what becomes of it, with a remark."""
        row = FLAGS.get(flag)
        # The first word without a flag is the data path: pytorch/examples and timm take it so.
        is_folder = not flag.startswith("-") and not {"--data-path", "--data-dir"} & self.given.keys()
        if row is None and is_folder and "data_path" not in self.options:
            row = OtherFlag([], "", f"--data-path {shlex.quote(flag)}", "")
        if row is None:
            self.is_understood = False
            # Of other scripts' flags only those that do something here, or the hint would lead to a dead end.
            there = [name for name, other in FLAGS.items() if other.here.startswith("--")]
            return f"is unknown{did_you_mean(flag, [*self.known, *there])}"
        special = DATA["with"].get(flag, {})
        partner = next((other for other in special if other in self.said), "")
        here = special.get(partner, row.here)
        is_needless = any(text.startswith(f"{flag} ") for text in self.said.intersection(DATA["not_needed"]))
        if is_needless or self._is_idle(here):
            return "is not needed here"
        remark = "" if partner or row.remark.startswith("with") else _in_brackets(row.remark)
        if here == "leave it out":
            return f"is not needed {f'with {partner}' if partner else 'here'}{remark}"
        if here == "not here":
            return f"is not supported here{remark}"
        return self._add(flag, values, row, here, remark)

    def _add(self, flag: str, values: list[str], row: OtherFlag, here: str, remark: str) -> str:
        """Add the words for here, filled in; return what becomes of the flag."""
        ours = values
        if theirs := DATA["values"].get(flag, {}):
            ours = [theirs[value] for value in values if value in theirs]
            remark = ""  # it is about all values, and this one has its answer
        # C H W: images are square here.
        if flag == "--input-size" and values[1:2] != values[2:]:
            ours = []
        words = self._fill(flag, ours, row, here)
        if not self._place(words):
            self.is_understood &= flag not in self.given
            return f"conflicts with other flags over {words[0]}; give only one"
        if values and not ours:
            self.is_understood = False
            return f"is not supported here{did_you_mean(values[0], theirs)}{_in_brackets(row.remark)}"
        return f"is {shlex.join(words)}{remark}"

    def _place(self, words: list[str]) -> bool:
        """Add words for here, unless an option in them has another value already; return whether they are added."""
        found = {self.known[flag].dest: [flag, *values] for flag, values in self._groups([*words])}
        taken = {**self.typed, **self.options}
        if "model_kwargs" in found:  # which add up
            found["model_kwargs"][1:1] = taken.pop("model_kwargs", [])[1:]
        if is_free := all(taken.get(dest, new) == new for dest, new in found.items()):
            self.options |= found
        return is_free

    def _is_idle(self, here: str) -> bool:
        """Tell whether words for here have no effect beside timm's schedule; a mistyped one may be any."""
        theirs = DATA["values"]["--sched"]
        sched = "".join(self.given.get("--sched", ()))
        is_meant = sched in theirs or (sched and not did_you_mean(sched, theirs))
        option = here.split()[0].removeprefix("--").replace("-", "_")
        needs = BY_NAME[option].needs if option in BY_NAME else ""
        if not is_meant or not needs.startswith("lr_scheduler="):
            return False
        # A schedule that is not here is answered by itself, and timm's default is cosine.
        return theirs.get(sched, "cosineannealinglr") not in re.split("[=|]", needs)

    def _fill(self, flag: str, values: list[str], row: OtherFlag, here: str) -> list[str]:
        """Return words for here with the values of a flag in them."""
        if flag == "--output" and values:
            values = [os.path.join(*values, *self.given.get("--experiment", ()))]
        if flag == "--pretrained" and values:  # a file, in forks
            return ["--weights", *values]
        if flag in _COMPUTED and "recipe" not in self.options:  # which gives them too
            try:
                return self._compute(flag, *values)
            except (UserError, ValueError, TypeError, ZeroDivisionError):
                pass  # It has no such value: the words are shown with the name of the value in them.
        filled = dict(zip(row.values, values, strict=False))
        self.is_understood &= filled.keys() >= {*row.values} and "PX" not in here
        parts = [re.fullmatch("(.*[/:=])?(.*)", word).groups("") for word in shlex.split(here)]
        return [begin + filled.get(name, name) for begin, name in parts]

    def _compute(self, flag: str, value: str = "", *more: str) -> list[str]:
        """Return the words for here of a flag that other options change too; ValueError and others if they cannot."""
        known = defaults() | {name: words[1] for name, words in self.options.items() if words[1:]}
        batch = int(known["batch_size"]) * read_launch().world_size
        if flag == "--grad-accum-steps":
            return ["--global-batch-size", str(batch * int(value))]
        if flag == "--decay-milestones":  # timm's rate falls one epoch before each of them
            return ["--lr-milestones", *(str(int(each) - 1) for each in (value, *more))]
        if flag == "--decay-epochs":
            return self._compute_decay(float(value), known)
        if flag == "--warmup-lr":
            return self._compute_warmup(value, known, batch)
        model = known["model"]
        config = find_timm_config(model) if model.startswith("timm/") else None
        if flag == "--pretrained":
            return ["--weights", f"hf-hub:{config.hf_hub_id}" if config else "IMAGENET1K_V1"]
        side = known["val_crop_size"]
        if config is not None and "val_crop_size" not in self.options:
            side = config.input_size[-1]
        # timm rounds down too, and resizes 224 / 0.95 to 235.
        return ["--val-resize-size", str(math.floor(float(side) / float(value)))]

    def _compute_decay(self, every: float, known: dict[str, Any]) -> list[str]:
        """Return the words for a rate that falls every so many epochs."""
        if not every % 1:
            return ["--lr-step-size", f"{every:.0f}"]
        # A step is of whole epochs here, so the rate falls by as much, but smoothly.
        gamma = f"{float(known['lr_gamma']) ** (1 / every):.6g}"
        for name in {"lr_scheduler", "lr_gamma"} - self.typed.keys():
            self.options.pop(name, None)
        return ["--lr-scheduler", "exponentiallr", "--lr-gamma", gamma]

    def _compute_warmup(self, value: str, known: dict[str, Any], batch: int) -> list[str]:
        """Return the words for the rate at which the warmup begins, which is a share of the whole rate here."""
        if "--warmup-prefix" in self.given and "epochs" in self.options:  # after which timm trains --epochs
            self.options["epochs"] = ["--epochs", str(int(known["epochs"]) + int(known["lr_warmup_epochs"]))]
        lr = float(known["lr"])
        scaling = known["lr_scaling"]
        if scaling != "none":
            ratio = int(known["global_batch_size"] or batch) / int(known["lr_scaling_batch"])
            if scaling == "sqrt":
                ratio **= 0.5
            lr *= ratio
        return ["--lr-warmup-decay", f"{float(value) / lr:.6g}"]


def explain(words: Sequence[str], parser: argparse.ArgumentParser) -> UserError:
    """Return the error about a command line with words that are unknown to the parser.

    It ends with the command here if every word of the command line is understood.
    """
    command = OtherCommand(words, parser._option_string_actions)
    if len(command.phrases) > 1:
        begin = "unrecognized arguments:" + "".join(f"\n  {phrase}" for phrase in command.phrases) + "\n"
    else:
        begin = "unrecognized argument:" + "".join(f" {phrase}" for phrase in command.phrases)
        begin += " " if begin.endswith("?") else "; "
    end = "--help lists the options"
    try:
        # Tried before it is offered: a mistyped word would otherwise come back in its own remedy.
        _, unknown = parser.parse_known_args(command.words)
        if command.is_understood and not unknown:
            timms = " (options not given have this project's defaults, not timm's)" if command.is_timms else ""
            end = f"the command here{timms}: {command}"
    except UserError as error:  # a known option does not take its value
        end = str(error)
    # Uncut: half a command would be of no use.
    return UserError(f"{begin}{end}", has_lines=True)


if __name__ == "__main__":
    print(table_of())
