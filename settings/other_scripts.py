"""Command lines of other projects' scripts, rewritten whole for here, or not at all.

other_scripts.toml holds the parsers of timm's, pytorch/examples', torchvision's, DeiT's, ConvNeXt's, MAE's, Swin's and
BEiT's scripts. Only a command line that cannot be parsed comes here, and `--help WORD`.
"""

import argparse
import importlib
import math
import re
import shlex
import tomllib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from distributed.launch import read_launch
from errors import UserError, as_user_error, did_you_mean
from settings.options import BY_NAME, defaults, fit_statistics, is_filled_in
from settings.packages import find_timm_config, require_timm
from settings.parser import OneLineParser

DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SCRIPTS: dict[str, dict[str, Any]] = DATA["scripts"]
RULES = [*DATA["rules"], *DATA["training"]]
# A flag after a full stop has this for its name.
READ = {".", *DATA["computed"].split(), *re.findall(r"[\w-]+", " ".join(tests for tests, _ in RULES))}
READ |= {*re.findall(r"{([\w-]+)", str(RULES))}


def true_or_false(text: str) -> bool:
    """Return what a word of ConvNeXt's switches means; ValueError for another."""
    return ["no", "false", "f", "n", "0", "yes", "true", "t", "y", "1"].index(text.lower()) > 4


# DeiT's flags are ours but for a few, and its defaults another training: a model of its own says that it is meant.
_DEITS_MODELS = re.compile(r"(deit|cait|resmlp|patchconvnet)\w*_|vit_\w+_patch")

TYPES: dict[str, Any] = {"i": int, "f": float, "s": str, "b": true_or_false}


class Reading(NamedTuple):
    """A command line as one script's parser reads it."""

    script: str
    values: dict[str, Any]  # by names with dashes, the defaults among them
    typed: dict[str, str]  # the names of given values, and how the script spells their flags
    troubles: list[str]  # the parser's error, and a line about each word that it does not know


def build_script_parser(script: str) -> tuple[OneLineParser, dict[str, Any]]:
    """Return the parser of a script, whose result holds what is given, and its defaults."""
    parser = OneLineParser(prog=script, add_help=False, argument_default=argparse.SUPPRESS)
    preset: dict[str, Any] = {}
    row = SCRIPTS[script]
    for item in (DATA["common"][row.get("base", "none")] + row["flags"]).split():
        found = re.fullmatch(r"(\.?)(.*?)(?:([!~])(.*?))?(?::(\w?)([?+*3]?)(?:=(.*))?)?", item)
        mark, names, sign, dest, kind, more, default = found.groups("")
        dest = mark or dest or max(names.split(","), key=len).lstrip("-").replace("_", "-").lower()
        settings: dict[str, Any] = {"action": "store_false" if sign == "~" else "store_true"}
        value: Any = bool(default)
        if kind:
            settings = {"type": TYPES[kind], "nargs": int(more) if more == "3" else more or None}
            settings["const"] = "inductor" if more == "?" else None  # of --torchcompile
            values = [TYPES[kind](each) for each in default.split(",") if default]
            value = values if more == "+" and values else next(iter(values), None)
        parser.add_argument(*names.split(","), **settings | ({"dest": dest} if names.startswith("-") else {}))
        preset.setdefault(dest, value)
    return parser, preset | row.get("facts", {})


def read(script: str, words: Sequence[str]) -> Reading:
    """Return a command line as a script would read it."""
    parser, values = build_script_parser(script)
    known = [*parser._option_string_actions]
    try:
        found, unknown = parser.parse_known_args(words)
    except UserError as error:
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
        trouble = f"{script}: {str(error).removesuffix(' (--help lists the options)')}"
        return Reading(script, values, {}, [trouble, *_unknown(unknown, known, f" to {script}")])
    # Swin's file, for which its name stands.
    name = Path(getattr(found, "cfg", "")).stem
    for pattern, facts in SCRIPTS[script].get("configs", ()):
        if re.fullmatch(pattern, name):
            values |= {**facts, "name": name, "model": name}
    values |= vars(found)
    troubles = _unknown(unknown, known, f" to {script}")
    if not re.fullmatch(SCRIPTS[script].get("models", ".*"), str(values.get("model"))):
        troubles.append(f"{script} has no model {values['model']}")
    flags = {action.dest: "".join(action.option_strings[-1:]) for action in parser._actions}
    return Reading(script, values, {name: flags[name] for name in vars(found)}, troubles)


def _unknown(words: Sequence[str], known: Sequence[str], whom: str = "") -> list[str]:
    """Return a line about each unknown word; about flags alone, if there are any, since others may be their values."""
    lines = []
    for word in [word.partition("=")[0] for word in words if re.match("-[^0-9.]", word)] or words:
        name = word.lstrip("-").replace("_", "-")
        rules = [text for tests, text in RULES if name in re.split("[ |=]", tests)]
        meaning = DATA["meanings"].get(name, "".join(rules[:1]))
        hint = f"; {_shown(meaning)}" if meaning and not whom else did_you_mean(word, known)
        lines.append(f"{word} is unknown{whom}{hint}")
    return lines


def _shown(meaning: str) -> str:
    """Return a meaning in words."""
    return f"not here: {meaning[1:]}" if meaning.startswith("!") else f"here {re.sub('{.*?}', 'N', meaning.strip('?'))}"


class Translation:
    """A reading as a command here: its words, or the reasons why there is none.

    Raises:
        UserError: timm is needed, and is not installed.
    """

    def __init__(self, reading: Reading, parser: argparse.ArgumentParser) -> None:
        self.script = SCRIPTS[reading.script]
        self.values = reading.values
        self.typed = reading.typed
        self.parser = parser
        self.reasons: list[str] = []
        self.options: dict[str, list[str]] = {}  # the words for here by option
        self.is_training = not self.values.get("eval")
        self._add_meanings(build_script_parser(reading.script)[1])
        if "is-same" not in self.values:
            self._count_batch()
            self._choose_model()
            self._apply(DATA["rules"])
        if "sched" in self.values and self.is_training:
            self._compute_rates()
            self._choose_optimizer()
            self._apply(DATA["training"])
        if "crop-pct" in self.values and not self.reasons:
            self._add_sizes()

    @property
    def words(self) -> list[str]:
        """The command here, without what is so by default; UserError for a value that an option refuses."""
        values = vars(self.parser.parse_known_args([*chain(*self.options.values())])[0])
        given = [name for name in self.options if self.is_training or name in DATA["evaluation"].split()]
        filled = [name for name in given if is_filled_in(name, values.get("model", ""), ())]
        return [*chain(*(self.options[name] for name in given if name in filled or values[name] != defaults()[name]))]

    def add(self, text: str) -> None:
        """Add words for here, with values in place of their names in braces."""
        option: list[str] = []
        for word in text.split():
            if word.startswith("--"):
                action = self.parser._option_string_actions[word]
                option = self.options.setdefault(action.dest, [])
                # What is given again takes the place of the first, or is added.
                if not (option and isinstance(action, argparse._ExtendAction)):
                    option[:] = [word]
                continue
            value = self.values.get(word.strip("{}"))
            option += map(str, value if isinstance(value, list) else [word.format_map(self.values)])

    def refuse(self, name: str, reason: str) -> None:
        """Add a reason why there is no command: a value that was given, or the script's default."""
        value = self.values.get(name)
        shown = "" if value is None or isinstance(value, bool) else re.sub(r"[\[\],']", "", f" {value}")
        self.reasons.append(f"{self.typed.get(name) or f'--{name}'}{shown}: {reason}")

    def _apply(self, rules: Sequence[Sequence[str]]) -> None:
        """Add the words of each rule whose tests hold, or its reason: NAME, !NAME, NAME|NAME and NAME=VALUE|VALUE."""
        for tests, text in rules:
            is_so = all(map(self._holds, tests.split()))
            if is_so and text.startswith("!"):
                self.refuse(*text[1:].split(": ", 1))
            elif is_so:
                self.add(text)

    def _holds(self, test: str) -> bool:
        """Tell whether a test of a rule holds."""
        names, equals, wanted = test.lstrip("!").partition("=")
        found = [self.values.get(name) for name in names.split("|")]
        is_so = str(found[0]) in wanted.split("|") if equals else any(found)
        return is_so != test.startswith("!")

    def _add_meanings(self, preset: dict[str, Any]) -> None:
        """Add what one flag alone decides."""
        own = self.script.get("meanings", {})
        for name, value in self.values.items():
            is_option = name.replace("-", "_") in BY_NAME
            same = f"?--{name} {{}}" if is_option else "!there is nothing like it here"
            if name in READ and not (is_option and "is-same" in self.values):
                same = ""
            meaning = own.get(name, DATA["meanings"].get(name, same))
            if meaning.startswith("!"):
                if value != preset.get(name) and value not in DATA["neutral"].get(name, ()):
                    self.refuse(name, meaning[1:])
                continue
            is_typed = name in self.typed
            if (is_typed and "{}" in meaning) or (value and (is_typed or not meaning.startswith("?"))):
                self.add(meaning.strip("?").replace("{}", "" if value is True else f"{{{name}}}"))

    def _count_batch(self) -> None:
        """Count the images of a process and of a step."""
        values = self.values
        launch = read_launch()
        if "is-shared" in values:  # by the GPUs of a machine
            values["batch-size"] //= launch.num_local
        # --world-size of pytorch/examples counts machines.
        processes = max(launch.world_size, launch.num_local * values.get("world-size", 1))
        values["total"] = values["batch-size"] * processes * values.get("steps", 1)
        values["is-more"] = values["total"] != values["batch-size"] * launch.world_size

    def _choose_model(self) -> None:
        """Find the model: torchvision's, or timm's by the name that it has today, and its weights."""
        values = self.values
        name = re.sub("^(hf-hub:)?timm/", "", values["model"])
        if "is-shared" in values:
            models = importlib.import_module("torchvision.models")
            known = models.list_models(module=models)
        else:
            timm = require_timm("--model", name)
            known = timm.list_models()
            for pattern, replacement in self.script.get("renames", ()):
                name = re.sub(pattern, replacement, name)
            # timm builds models under the names of earlier versions, but has their weights under those of today.
            name = (
                vars(importlib.import_module("timm.models._registry")).get("_deprecated_models", {}).get(name) or name
            )
            values["model"] = f"timm/{name}"
        if name.partition(".")[0] not in known:
            self.refuse("model", f"there is no such model here{did_you_mean(name, known)}")
        elif "is-shared" not in values:
            values["config"] = find_timm_config(f"timm/{name}")
            if values.get("pretrained") or not values.get("checkpoint", "x"):
                values["published"] = getattr(values["config"], "hf_hub_id", None) or "none"

    def _compute_rates(self) -> None:
        """Compute the learning rate, the share of it at which the warm-up begins, and the epochs in which it falls."""
        values = self.values
        peak = values["rate"] = values.get("lr-base") if values["lr"] is None else values["lr"]
        if values["lr"] is None or ("is-scaled" in values and not values.get("unscale-lr")):
            # timm: the square root for adaptive optimizers, which it knows by these letters.
            is_adaptive = "is-timms" in values and re.search("ada|lamb", values["opt"])
            values["scaling"] = values.get("lr-base-scale") or ("sqrt" if is_adaptive else "linear")
            ratio = values["total"] / values["lr-base-size"]
            peak *= ratio**0.5 if values["scaling"] == "sqrt" else ratio
        if "is-min-scaled" in values:  # Swin scales all rates
            values |= {"min-lr": values["min-lr"] * ratio, "warmup-lr": values["warmup-lr"] * ratio}
        values["share"] = values.get("warmup-start", values.get("warmup-lr")) / (peak or 1)
        values["scale-max"] = values.get("scale", [1.0])[-1]
        every = values.get("decay-epochs", 0)
        if values["sched"] == "multistep":
            # timm's rate falls one epoch before each of them.
            values["falls"] = [each - 1 for each in values.get("decay-milestones", ())]
        elif values["sched"] == "step" and every % 1:
            # A step is of whole epochs here: the epochs in which theirs falls.
            values["falls"] = [math.ceil(each * every) for each in range(1, math.ceil(values["epochs"] / every))]
        if values.get("warmup-prefix") is True:  # timm trains --epochs after it
            values["epochs"] += values["warmup-epochs"]
        values["is-short"] = values["epochs"] <= values["warmup-epochs"]

    def _choose_optimizer(self) -> None:
        """Find timm's optimizer, and which of the options it has."""
        optimizers = importlib.import_module("timm.optim")
        name = DATA["optimizers"].get(self.values["opt"].lower(), self.values["opt"].lower())
        if name not in optimizers.list_optimizers():
            self.refuse("opt", f"there is no such optimizer here{did_you_mean(name, optimizers.list_optimizers())}")
            return
        facts = optimizers.get_optimizer_info(name)
        if isinstance(facts.opt_class, str):
            self.refuse("opt", f"it needs {facts.opt_class.partition('.')[0]}")
        self.values |= {**vars(facts), "opt": name}

    def _add_sizes(self) -> None:
        """Add sizes of crops, resizing and normalisation, unless training takes them from timm's configuration."""
        values = self.values
        names = ("img-size", "input-size", "in-chans", "crop-pct", "crop-mode", "interpolation", "mean", "std")
        given = {name.replace("-", "_"): values[name] for name in names if values.get(name)}
        if "is-timms" not in values:
            side = given["input_size"]
            is_squashed = side >= values.get("squash-from", math.inf)
            if is_squashed or (side >= values.get("whole-from", math.inf) and "crop-pct" not in self.typed):
                given["crop_pct"] = 1.0
            given |= {"input_size": [3, side, side], "interpolation": "bicubic"}
            given |= {"crop_mode": "squash" if is_squashed else "center"}
            given |= DATA["statistics"][str(values.get("imagenet-default-mean-and-std", True))]
            if side <= 32:
                self.refuse("input-size", "images of 32 px or fewer are padded, not resized")
        known = values["config"].to_dict() if values["config"] else {}
        find = importlib.import_module("timm.data").resolve_data_config
        with as_user_error("timm refuses the sizes or the statistics of its images"):
            used = find(given, known, use_test_size=not self.is_training and not values.get("use-train-size"))
        method = values.get("train-interpolation")
        if self.is_training and method not in (None, used["interpolation"], "random" if "is-timms" in values else None):
            reason = f"one interpolation here is that of training and evaluation; add --interpolation {method}"
            self.refuse("train-interpolation", reason)
        channels, side, width = used["input_size"]
        if side != width:
            self.refuse("input-size", "images are square here")
        if used != find({}, known) or not self.is_training:
            values |= used | {name: fit_statistics(used[name], channels) for name in ("mean", "std")}
            values |= {"channels": channels, "side": side, "resize": math.floor(side / used["crop_pct"])}
            self.add(DATA["sizes"])


def explain(words: Sequence[str], parser: OneLineParser) -> UserError:
    """Return the error about a command line with words that are unknown to the parser.

    It ends with the command here if the line is one script's, and all of it can be expressed.
    """
    for name, (pattern, start) in DATA["others"].items():
        if re.search(pattern, " ".join(words)):
            return UserError(f"these are words of {name}; here begin from {_command(shlex.split(start))}")
    named = [script for script in SCRIPTS if words and f"/{script}".endswith(f"/{words[0]}")]
    words = words[1:] if named else words
    is_deits = any(map(_DEITS_MODELS.search, words))
    scripts = named or [script for script in SCRIPTS if is_deits or script != "deit/main.py"]
    readings = [read(script, words) for script in scripts]
    fitting = {reading.script: reading for reading in readings if not reading.troubles}
    fitting = {script: reading for script, reading in fitting.items() if SCRIPTS[script].get("unless") not in fitting}
    if len(fitting) > 1 and not named and words[0].startswith("-"):
        # Words that many scripts have are a mistake in a line for here.
        _, unknown = parser.parse_known_args(words)
        lines = _unknown(unknown, [*parser._option_string_actions])
        return UserError(f"{'; '.join(lines)} (--help lists the options)")
    if len(fitting) > 1:
        hint = f"put one of them first: train.py {next(iter(fitting))} ..."
        return UserError(f"{', '.join(fitting)} read these words, and their defaults differ; {hint}")
    if fitting:
        return _answer(next(iter(fitting.values())), parser)
    # The errors of the script that knows most of the flags.
    troubles = [reading.troubles for reading in readings]
    if not named:
        known = parser._option_string_actions
        spelled = [word.replace("_", "-") if word.replace("_", "-") in known else word for word in words]
        given, unknown = parser.parse_known_args(spelled)
        if not unknown:
            parser.resolve(given)
            return UserError(f"flags are spelled with dashes here:\n  {_command(spelled)}", has_lines=True)
        troubles.insert(0, _unknown(unknown, [*known]))
    fewest = min(troubles, key=lambda lines: " ".join(lines).count(" is unknown"))
    return UserError(f"{'; '.join(fewest)} (--help lists the options)")


def _command(words: Sequence[str]) -> str:
    """Return words as a command line here, under the launcher of this process."""
    launch = read_launch()
    starter = "python"
    if launch.is_torchrun:
        starter = f"torchrun --nnodes={launch.num_nodes} --nproc_per_node={launch.num_local}"
    return f"{starter} train.py {shlex.join(words)}"


def _answer(reading: Reading, parser: OneLineParser) -> UserError:
    """Return the command for a reading, or the reasons why there is none."""
    try:
        translation = Translation(reading, parser)
        reasons = translation.reasons
        if not reasons:
            # Tried before it is offered: its values come from another script.
            parser.resolve(parser.parse_args(translation.words))
    except UserError as error:
        reasons = [str(error)]
    if reasons:
        return UserError(f"{reading.script} does what no command here does: {'; '.join(reasons)}")
    source = f"{reading.script}, {translation.script['source']}"
    differs = translation.script.get("differs", "") if translation.is_training else ""
    if "is-timms" in reading.values and reading.values.get("train-interpolation") != "random":
        differs = ""
    if "multiprocessing-distributed" in reading.typed and not read_launch().is_torchrun:
        differs = "\nbut a process for each GPU shares the batch there: ask again after torchrun --nproc_per_node=N"
    return UserError(f"this is a command of {source}; here\n  {_command(translation.words)}{differs}", has_lines=True)


def lines_about(word: str) -> list[str]:
    """Return a line for each flag of other scripts that holds a word."""
    return [f"--{name} of others: {_shown(text)}" for name, text in DATA["meanings"].items() if word in name]
