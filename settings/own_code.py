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

from distributed.lending import at_end
from errors import UserError, did_you_mean
from files import open_to_read
from settings.rules import split_custom


def hash_code(own: Sequence[tuple[str, str]]) -> str:
    """Return each option with a hash of its file and of each module that this imports from its own folder.

    `own` are pairs of `own_code`, or of an option and a file; a missing file has no hash.

    Raises:
        UserError: two files import modules of one name from their own folders: Python would give both the first.
    """
    hashes = []
    known: dict[str, list[Path]] = {}
    for name, value in own:
        path, _ = split_custom(value) or (value, "")
        modules = _find_modules(path)
        for module, files in modules.items():
            if known.setdefault(module, files) != files:
                raise UserError(f"{value} imports a different {module} than your other code; rename one of the files")
        for module, files in {"": [Path(path)], **modules}.items():
            with suppress(OSError):
                hashes.append(f"{f'{name} {module}'.strip()} {_hash_files(files)}")
    return ", ".join(hashes)


def _hash_files(paths: Sequence[Path]) -> str:
    """Return 64 bits of a hash of the files' contents; OSError if one cannot be read."""
    content = hashlib.sha256()
    for path in paths:
        with open_to_read(path) as file:
            content.update(file.read())
    return content.hexdigest()[:16]


def _find_modules(path: str) -> dict[str, list[Path]]:
    """Return the files of the modules and packages of its own folder that a Python file imports, without running any.

    Installed ones of the same name have precedence, and so have this project's, in whose folder none is looked for.
    """
    found: dict[str, list[Path]] = {}
    todo = [Path(os.path.realpath(path))]
    folder = todo[0].parent
    if folder == Path(__file__).resolve().parents[1]:
        return found
    for each in todo:  # it grows
        # A file that cannot be read or parsed says so where it is run.
        with suppress(OSError, SyntaxError, ValueError), open_to_read(each) as file:
            for name in sorted(_imported_by(file.read()) - found.keys()):
                files = [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]
                origin = getattr(importlib.util.find_spec(name), "origin", None) or folder
                if not Path(origin).is_relative_to(folder):
                    continue
                if files := list(filter(Path.is_file, files)):
                    found[name] = files
                    todo += files
    return found


def _imported_by(code: bytes) -> set[str]:
    """Return the first part of the name of each module that code imports, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


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
        # A syntax error has no frame of the file, but a line of its own.
        line = lines[-1] if lines else getattr(error, "lineno", None)
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
    hashes = dict(text.rsplit(" ", 1) for text in code.split(", ")[1:])  # those of its modules, after its own
    if any(_imported.get(name, text) != text for name, text in hashes.items()):
        _forget()
    # A second run in this process is that of a fresh one: modules of the same names come back when this one ends.
    at_end(sys.modules.update, _remove(hashes.keys() - _imported.keys()))
    at_end(_forget)
    _imported.update(hashes)
    for file in [Path(path), *chain(*_find_modules(path).values())]:
        # Python knows its cached code by second and size alone, and would run the old file (PEP 552).
        with suppress(OSError):
            os.remove(importlib.util.cache_from_source(file))
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(Path(path).parent)
    # Behind our own modules: a data.py beside the file must not hide ours.
    if folder not in sys.path:
        sys.path.append(folder)
        at_end(sys.path.remove, folder)
    spec.loader.exec_module(module)
    return module


def _forget() -> None:
    _remove(_imported.keys())
    _imported.clear()


def _remove(names: Collection[str]) -> dict[str, ModuleType]:
    """Return the modules of these names, and those inside them, which are imported no longer."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}
