"""Run Python files of the user's own, and know them by the hash of their content and of the modules beside them."""

import ast
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from distributed.signals import at_end
from errors import UserError, did_you_mean
from files import open_to_read
from settings.options import split_custom


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


def find_function(value: str, flag: str) -> Callable[..., Any]:
    """Run a file and return a function of it; `value` is FILE.py:FUNCTION, which `flag` gave.

    Raises:
        UserError: the file cannot be run, or it has no such function.
    """
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
