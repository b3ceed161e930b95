"""What is known of an option: its bounds, and how resumed runs, recipes and evaluations treat it.

Nothing here imports torch, so that help and errors need not wait for it.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, get_args

from errors import UserError

# How a resumed run treats an option that differs from the checkpoint's: FREE options change no result, and the change
# is printed; SILENT ones differ at every restart; --allow-change must name ON_REQUEST ones. Any other text says why
# the option cannot be changed.
FREE, SILENT, ON_REQUEST = "free", "silent", "on request"

# Whether the processes of a run may have different values: SAME in none; of OWN options each machine has its own; of
# AS_TYPED ones rank 0's counts where the command lines give none.
SAME, OWN, AS_TYPED = "same", "own", "as typed"

# Whether the recipe that a run writes holds an option: NEVER for one that says where the run is or how it was started,
# IF_GIVEN for one whose default depends on the machine.
ALWAYS, NEVER, IF_GIVEN = "always", "never", "if given"

# Largest number of steps, epochs and the like: a float counts no further in ones.
MOST_COUNT = 1 << 53


def split_custom(name: str) -> tuple[str, str] | None:
    """Return the file and the function of FILE.py:FUNCTION, or None for a library's name."""
    path, colon, function = name.rpartition(":")
    return (path, function) if colon and path.endswith(".py") else None


class OwnCode(str):
    """FILE.py:FUNCTION that the command line itself names: code runs from no file that only others name."""


def lower(text: str) -> str:
    """Return a name in lower case, and FILE.py:FUNCTION as it is."""
    # torchvision's script lowers --opt and --lr-scheduler too, so that its commands with SGD run here.
    return text if split_custom(text) else text.lower()


def as_list(value: Any) -> list:
    """Return a list as it is, and any other value as the only one of a list."""
    return value if isinstance(value, list) else [value]


def flag_of(name: str) -> str:
    """Return the long flag of an option by the name of its field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """One option, and how resumed runs, recipes and evaluations treat it; `--help` shows its default."""

    dest: str  # name of the field that holds it
    default: Any
    type: Callable[[str], Any]  # parses a value; bool makes a switch
    _: KW_ONLY
    help: str  # meaning and unit
    aliases: Sequence[str] = ()
    at_least: float = -MOST_COUNT
    at_most: float = MOST_COUNT
    above: float = -math.inf
    below: float = math.inf
    resume: str = ON_REQUEST  # FREE, SILENT, ON_REQUEST, or the reason why a resumed run cannot change it
    recipe: str = ALWAYS  # ALWAYS, NEVER or IF_GIVEN
    ranks: str = SAME  # SAME, OWN or AS_TYPED
    is_of_checkpoint: bool = False  # an evaluation takes it from the checkpoint's run unless it is given
    needs: str = ""  # options without one of which it has no effect: `mixup_alpha|cutmix_alpha`, `opt=adamw|timm/`
    not_with: str = ""  # options beside any of which it has no effect
    is_range: bool = False  # two numbers, the lower first
    is_strict: bool = False  # refused where the command line gives it without `needs`; for options of ours
    metavar: str | tuple[str, ...] | None = None  # this and the rest are argparse's; by default N for an integer
    choices: Sequence[Any] | None = None
    nargs: int | str | None = None
    const: Any = None

    def __post_init__(self) -> None:
        if self.metavar is None and self.type is int:
            object.__setattr__(self, "metavar", "N")

    @property
    def flag(self) -> str:
        """Its long name on a command line."""
        return flag_of(self.dest)

    @property
    def name(self) -> str:
        """The flag without its dashes."""
        return self.flag[2:]

    @property
    def keys(self) -> list[str]:
        """The names that a recipe may use."""
        return [flag[2:] for flag in (self.flag, *self.aliases) if flag.startswith("--")]

    @property
    def why_fixed(self) -> str | None:
        """Reason why a resumed run cannot change it, or None."""
        return None if self.resume in (FREE, SILENT, ON_REQUEST) else self.resume

    def add_to(self, group: Any) -> None:
        """Add it to a group of a parser; its help shows the default, unless that is empty or off."""
        is_empty = self.default is None or self.default is False or self.default == ""
        default = " ".join(self.default) if isinstance(self.default, list) else self.default
        text = self.help if is_empty else f"{self.help} (default: {default})"
        # Options that are not given stay out of the namespace, or their defaults would replace the recipe's values.
        settings = {"default": argparse.SUPPRESS, "help": text}
        if self.type is bool:
            group.add_argument(self.flag, action=argparse.BooleanOptionalAction, **settings)
            return
        given = {"choices": self.choices, "nargs": self.nargs, "const": self.const, "metavar": self.metavar}
        is_more = self.default is None and self.type not in (int, float)  # what is given again is added
        # argparse alone keeps the last of two --extensions, and loses the endings of the first without a word.
        given["action"] = "extend" if is_more and self.nargs in ("*", "+") else None
        given = {name: value for name, value in given.items() if value is not None}
        group.add_argument(*self.aliases, self.flag, dest=self.dest, type=self.type, **settings, **given)

    def check(self, value: Any) -> None:
        """Raise UserError if a number lies outside the bounds, or is not finite."""
        for number in value if isinstance(value, list | tuple) else [value]:
            # By type: a switch is an int to isinstance, and has no bounds.
            if type(number) in (int, float) and (expected := self._misses(number)):
                # Python refuses to print more than 4,300 digits, which a hexadecimal number of a recipe may have.
                given = number if abs(number) < 1 << 63 or type(number) is float else "of that many digits"
                raise UserError(f"{self.flag} {given}: expected {expected}")
        if self.is_range and isinstance(value, list | tuple) and value[0] >= value[1]:
            raise UserError(f"{self.flag} {value[0]} {value[1]}: expected two numbers, the lower first")

    def _misses(self, number: float) -> str:
        """Return the bound that a number lies beyond, in words, or an empty string."""
        tests = [
            # First, as NaN fails every comparison below, and would be told of a bound that it is not beyond.
            (type(number) is int or math.isfinite(number), "a finite number"),
            # Before the single bounds, so that the line about a probability of -1 names both ends.
            ((self.at_least, self.at_most) != (0, 1) or 0 <= number <= 1, "a number from 0 to 1"),
            (number >= self.at_least, f"{self.at_least} or more"),
            (number > self.above, f"a number above {self.above}"),
            (number < self.below, f"a number below {self.below}"),
            (number <= self.at_most, f"{max(self.at_least, 0)} to {self.at_most:.10g}"),
        ]
        return next((expected for is_inside, expected in tests if not is_inside), "")

    def why_idle(self, values: Mapping[str, Any]) -> str:
        """Return why it has no effect beside the values of all options, or an empty string."""
        for name in self.not_with.split("|") if self.not_with else ():
            if values[name]:
                return f"with {flag_of(name)}"
        names, _, wanted = self.needs.partition("=")
        if not names or any(_is_on(values[name], wanted) for name in names.split("|")):
            return ""
        flags = " or ".join(map(flag_of, names.split("|")))
        return f"without {flags} {wanted.replace('|', ', ')}".rstrip()

    def is_value(self, value: Any) -> bool:
        """Tell whether a plain value has the type and is among the choices of this option."""
        # By type as well: True == 1 == 1.0 in Python, and a checkpoint's 1 must not pass for a switch.
        if value is None or (type(value) is type(self.default) and value == self.default):
            return value == self.default
        kind = self.type if isinstance(self.type, type) else str
        if self.nargs in (None, "?"):
            return type(value) is kind and (self.choices is None or value in self.choices)
        is_right = isinstance(value, list) and all(type(item) is kind for item in value)
        return is_right and (len(value) == self.nargs or (self.nargs == "+" and bool(value)) or self.nargs == "*")

    def from_toml(self, value: Any) -> Any:
        """Return a recipe's value as the command line would give it; UserError if this option takes no such value."""
        values = as_list(value)
        if self.type is float:
            # TOML reads lr = 1 as an integer; beyond 2**53 a float would be another number, which is refused below.
            values = [float(item) if type(item) is int and abs(item) < MOST_COUNT else item for item in values]
        elif self.type in (str.lower, lower):
            values = [lower(item) if isinstance(item, str) else item for item in values]
        given = values if isinstance(value, list) else values[0]
        if not self.is_value(given):
            kind = f"one of {', '.join(map(str, self.choices))}" if self.choices else _KINDS[self.type.__name__]
            many = {None: "", "?": "", 2: "two in a list, each "}.get(self.nargs, "a list, each ")
            raise UserError(f"{self.name} = {json.dumps(value, default=str)}, but {self.name} takes {many}{kind}")
        return given


_KINDS = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string", "lower": "a string"}


def _is_on(value: Any, wanted: str) -> bool:
    """Tell whether an option is on, or has one of the wanted values; those that end with / are beginnings."""
    if not wanted:
        return bool(value)
    return any(value == each or (each[-1] == "/" and value.startswith(each)) for each in wanted.split("|"))


def option(default: Any = None, **rules: Any) -> Any:
    """Return a field of a group of options: its default, and the rules of `Option` by their names."""
    if isinstance(default, list):
        # dataclasses refuse a list as a default, since every instance would share and could change it.
        return field(default_factory=default.copy, metadata=rules)
    return field(default=default, metadata=rules)


def read_group(group: type) -> list[Option]:
    """Return the options of a group's fields, with the type that each one's annotation names."""
    options, defaults = [], group()
    for each in fields(group):
        if each.metadata:
            rules = {"type": _parser_of(each.type), **each.metadata}
            options.append(Option(each.name, getattr(defaults, each.name), **rules))
    return options


def _parser_of(annotation: Any) -> Any:
    """Return the type of one value of a field: int of `int | None` and of `list[int]`."""
    for part in get_args(annotation):
        if part is not type(None):
            return _parser_of(part)
    return annotation
