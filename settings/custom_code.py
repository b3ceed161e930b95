"""What an option chooses: by a name of its table, or by code of the user's own, FILE.py:FUNCTION.

Code is run where the command line itself names it.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from errors import UserError
from settings.choices import TABLES
from settings.options import BY_NAME, WHY_TYPED
from settings.rules import OwnCode, as_list, split_custom
from settings.stages import Parsed


def own_code(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the options, among all by name, that name code of the user's own, each with a FILE.py:FUNCTION."""
    found = []
    for name in TABLES:
        found += [(name, text) for text in as_list(values[name]) if isinstance(text, str) and split_custom(text)]
    return found


def check_code(args: Parsed) -> None:
    """Load what trains by code of the user's own, beside the model; raises as `load_function`."""
    for name, value in own_code(args.flat()):
        if name != "model":
            load_function(name, value)


def load_function(option: str, value: str) -> Callable[..., Any]:
    """Return the function that an option chooses: by a name of its table, or FILE.py:FUNCTION.

    The file is run, if the command line itself gives it, which makes the value an `OwnCode`.

    Raises:
        UserError: only a recipe or a checkpoint names the file, it cannot be run, or it has no such function.
    """
    flag = BY_NAME[option].flag
    if not split_custom(value):
        _, table = TABLES[option]
        return table[value].load()
    # A recipe or a checkpoint may be anybody's file: to use one must not run the code that it names.
    if not isinstance(value, OwnCode):
        raise UserError(f"a recipe or a checkpoint names {value}, {WHY_TYPED.replace('--model', flag)}")
    from settings.own_code import find_function

    return find_function(value, flag)


def parse_kwargs(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the arguments in `--model-kwargs`; UserError if one is not KEY=VALUE. What is no literal is text."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--model-kwargs {text}: expected KEY=VALUE, such as width=8")
        if key in found:
            raise UserError(f"--model-kwargs {key} is given twice; give it once")
        # As in timm, whose --model-kwargs take literals of Python: 8, 0.5, (7, 7), and else text.
        try:
            found[key] = ast.literal_eval(value)
        # All errors that Python's documentation names: the last two are of values that nest too deep.
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found[key] = value
    return found
