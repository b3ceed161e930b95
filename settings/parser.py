"""The parser of the options, whose errors are one line.

Nothing here imports torch, so that help and errors need not wait for it.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from errors import UserError, did_you_mean
from settings import __version__
from settings.options import OPTIONS, defaults


def expand_home(dest: str, value: Any) -> Any:
    """Return the value of an option with ~ and ~USER replaced where a path, or that of NAME=PATH, begins with it.

    Shells leave `--output-dir=~/runs` as it is. A path that is there as it is written stays: an older run may be in it.
    UserError if there is no such user.
    """
    if isinstance(value, list):
        return [expand_home(dest, each) for each in value]
    is_path = isinstance(value, str) and "~" in value and dest != "multi_label"  # where it separates labels
    begin = re.match(r"(?:\w[\w.-]*=)?(?=~[\w.-]*(?:/|$))", value) if is_path and not os.path.lexists(value) else None
    if begin is None:
        return value
    path = os.path.expanduser(value[begin.end() :])
    if path.startswith("~"):
        raise UserError(f"{value}: {path.partition('/')[0]} is nobody's home folder here; give a whole path")
    return begin[0] + path


class HelpOnWord(argparse.Action):
    """`--help`, and `--help WORD` for the options that mention it."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, word: Any, __: str | None = None) -> None:
        """Print the help, and exit."""
        import_others = getattr(parser, "import_others", None)  # of a `OneLineParser`
        if word:
            found = [action for action in parser._actions if word in f"{action.option_strings} {action.help}".lower()]
            lines = [] if found or import_others is None else import_others().lines_about(word)
            if not found and not lines:
                raise UserError(f"--help {word}: no option mentions it")
            formatter = parser.formatter_class(prog=parser.prog)
            formatter.add_arguments(found)
            print(formatter.format_help() if found else "\n".join([*lines, ""]), end="")
        else:
            parser.print_help()
        parser.exit()


class PrintVersion(argparse.Action):
    """`--version`: this repository's version, and those of torch and torchvision, which are not imported for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the versions, and exit."""
        found = [f"{name} {version(name)}" for name in ("torch", "torchvision") if find_spec(name)]
        print(", ".join([f"touchstone {__version__}", *found]))
        parser.exit()


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the word that was probably meant."""

    # Returns `other_scripts`, which explains unknown flags and tells what other scripts' flags with a word are here.
    import_others: Callable[[], ModuleType] | None = None
    resolve: Callable[[argparse.Namespace], Any]  # set with it; refuses options that cannot be used together

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse --, and expand ~."""
        if "--" in arg_strings:
            raise argparse.ArgumentError(action, "expected a value, not --")
        return super()._get_values(action, expand_home(action.dest, arg_strings))

    def error(self, message: str) -> None:
        """Raise the error instead of printing two pages of usage first, on every rank."""
        message = message.replace("ignored explicit argument", "it is a switch and takes no value, but was given")
        raise UserError(f"{message} (--help lists the options)")

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse all of `args`; refuse an unknown option, and a locale in which names such as Käfer cannot be found."""
        if (encoding := sys.getfilesystemencoding()) != "utf-8":
            raise UserError(f"file names are {encoding} in this locale; set PYTHONUTF8=1 or LC_ALL=C.UTF-8")
        words = list(sys.argv[1:] if args is None else args)
        try:
            parsed, unknown = self.parse_known_args(words, namespace)
        except UserError:
            # A line that begins with a folder is another script's, whose values need not be ours.
            if self.import_others is None or not words or words[0].startswith("-"):
                raise
            unknown = words
        if not unknown:
            return parsed
        if self.import_others is not None:
            raise self.import_others().explain(words, self)
        hint = did_you_mean(unknown[0].split("=")[0], self._option_string_actions)
        raise UserError(f"unrecognized argument {unknown[0]}{hint} (--help lists the options)")


EPILOG = """\
most used: --recipe, --data-path, --model, --epochs, --batch-size, --lr, --amp,
  --output-dir, --resume auto, --test-only, --dry-run
  # a recipe on eight GPUs, resumed from its newest checkpoint; command-line options override it
  torchrun --nproc_per_node=8 train.py --recipe resnet50-v1 --data-path DIR --resume auto
  # one GPU or none, and no data
  python train.py --model resnet18 --synthetic 640 --epochs 1
  # the accuracy of a finished run
  python train.py --data-path DIR --test-only --resume runs/resnet50/best.pth"""


def get_args_parser(add_help: bool = True) -> argparse.ArgumentParser:
    """Return the parser of all options, torchvision's among them, in groups."""
    parser = build_parser(add_help=add_help)
    parser.set_defaults(**defaults())
    return parser


def build_parser(*, add_help: bool = True) -> OneLineParser:
    """Return the parser of all options, whose result holds only those that were given."""
    parser = OneLineParser(
        prog="train.py",
        usage="train.py [--recipe NAME] [--data-path DIR] [options]",
        description="Train and evaluate image classification models: torchvision's flags, reproducible and robust.",
        epilog=EPILOG,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if add_help:
        text = "show all options, or only those that mention WORD, and exit"
        nothing: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        parser.add_argument(
            "-h", "--help", metavar="WORD", nargs="?", const="", type=str.lower, action=HelpOnWord, help=text, **nothing
        )
        text = "print the versions of this repository, torch and torchvision, and exit"
        parser.add_argument("--version", nargs=0, action=PrintVersion, help=text, **nothing)
    for title, options in OPTIONS.items():
        group = parser if title == "start" else parser.add_argument_group(title)
        for option in options:
            option.add_to(group)
    return parser
