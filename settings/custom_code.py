"""Code of the user's own, FILE.py:FUNCTION: run where the command line itself names it, and known by its hash."""

import ast
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from distributed.signals import at_end
from errors import UserError, did_you_mean
from files import open_to_read
from settings.choices import TABLES
from settings.options import BY_NAME, WHY_TYPED, split_custom


def own_code(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the options, among all by name, that name code of the user's own, each with a FILE.py:FUNCTION."""
    given = [(name, values[name] if isinstance(values[name], list) else [values[name]]) for name in TABLES]
    return [(name, str(text)) for name, texts in given for text in texts if split_custom(str(text))]


def hash_code(own: Sequence[tuple[str, str]]) -> str:
    """Return each option with a hash of its file and of each module that this imports from its own folder.

    `own` are pairs of `own_code`, or of an option and a file; a missing file has no hash.

    Raises:
        UserError: two files import modules of one name from their own folders: Python would give both the first.
    """
    hashes, known = [], {}
    for name, value in own:
        path = (split_custom(value) or (value,))[0]
        for module, files in {"": [], **_find_modules(path)}.items():
            if module and known.setdefault(module, files) != files:
                raise UserError(f"{value} imports a different {module} than your other code; rename one of the files")
            with suppress(OSError), open_to_read(path) as file:
                content = b"".join(map(Path.read_bytes, files)) if module else file.read()
                hashes.append(f"{f'{name} {module}'.strip()} {hashlib.sha256(content).hexdigest()[:16]}")
    return ", ".join(hashes)


def _find_modules(path: str) -> dict[str, list[Path]]:
    """Return the files of the modules and packages of its own folder that a Python file imports, without running any.

    Installed ones of the same name have precedence, and so have this project's, in whose folder none is looked for.
    """
    found, todo = {}, [Path(os.path.realpath(path))]
    folder = todo[0].parent
    for each in todo if folder != Path(__file__).resolve().parents[1] else ():  # it grows
        with suppress(OSError, SyntaxError, ValueError), open_to_read(each) as file:
            nodes = [*ast.walk(ast.parse(file.read()))]
            names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
            for name in sorted({name.partition(".")[0] for name in names} - found.keys()):
                files = [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]
                origin = getattr(importlib.util.find_spec(name), "origin", None) or folder
                if Path(origin).is_relative_to(folder) and (files := [*filter(Path.is_file, files)]):
                    found[name] = files
                    todo += files
    return found


def check_code(args: Any) -> None:
    """Load what trains by code of the user's own, beside the model; raises as `load_function`."""
    for name, value in own_code(vars(args)):
        if name != "model":
            load_function(name, args, value)


def load_function(option: str, args: Any, value: str | None = None) -> Callable[..., Any]:
    """Return the function that an option chooses: by a name of its table, or FILE.py:FUNCTION.

    The file is run, if the command line itself gives it. `value` is by default the option's whole value.

    Raises:
        UserError: only a recipe or a checkpoint names the file, it cannot be run, or it has no such function.
    """
    value, flag = value or getattr(args, option), BY_NAME[option].flag
    if not split_custom(value):
        return TABLES[option][1][value].load()
    if value not in getattr(args, "trusted", ()):
        raise UserError(f"a recipe or a checkpoint names {value}, {WHY_TYPED.replace('--model', flag)}")
    path, name = split_custom(value)
    if not Path(path).is_file():
        raise UserError(f"{flag} {value}: no such file; give FILE.py:FUNCTION")
    try:
        module = _run_file(os.path.realpath(path), hash_code([("", path)]))
        function = getattr(module, name, None)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == os.path.realpath(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)  # a syntax error's own
        raise UserError(f"{flag} {path} cannot be run (line {line}): {type(error).__name__}: {error}") from error
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{flag} {value}: {path} has no function {name}{did_you_mean(name, known)}")
    return function


_imported: dict[str, str] = {}  # the hash of each module of an own folder that files which were run import


@cache
def _run_file(path: str, code: str) -> ModuleType:
    """Run a Python file, once in a run for each content, and return its module.

    `code` is the result of `hash_code` for it. It imports the modules of its folder as they are now, even if this
    process has imported them before: their state, too, is that of a fresh process.
    """
    hashes = dict(each.rpartition(" ")[::2] for each in code.split(", ")[1:])
    if any(_imported.get(name, text) != text for name, text in hashes.items()):
        _forget()
    at_end(sys.modules.update, _remove(hashes.keys() - _imported.keys()))
    at_end(_forget)
    _imported.update(hashes)
    for file in [path, *chain(*_find_modules(path).values())]:
        with suppress(OSError):  # Python takes two contents of one second and size for the same
            os.remove(importlib.util.cache_from_source(file))
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)  # behind our own modules
        at_end(sys.path.remove, folder)
    spec.loader.exec_module(module)
    return module


def _forget() -> None:
    _remove(_imported.keys())
    _imported.clear()


def _remove(names: Collection[str]) -> dict[str, ModuleType]:
    """Return the modules of these names, and those inside them, which are imported no longer."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}


def parse_kwargs(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the arguments in `--model-kwargs`; UserError if one is not KEY=VALUE. What is no literal is text."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--model-kwargs {text}: expected KEY=VALUE, such as width=8")
        if key in found:
            raise UserError(f"--model-kwargs {key} is given twice; give it once")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found[key] = value
    return found
