"""Packages that some options need, and that need not be installed."""

import importlib
from types import ModuleType
from typing import Any

from errors import UserError


def require_timm(option: str, value: str) -> ModuleType:
    """Return timm for an option that needs it; UserError if it cannot be used."""
    return require_package("timm", f"{option} {value}")


def find_timm_config(model: str) -> Any:
    """Return timm's config of a model's pretrained weights, or None if timm has none; `model` is timm/NAME."""
    try:
        return require_timm("--model", model).get_pretrained_cfg(model.removeprefix("timm/"))
    except RuntimeError:  # timm knows no such tag
        return None


def require_package(package: str, needed_by: str) -> ModuleType:
    """Return the package that `needed_by`, such as an option, needs; UserError if it cannot be used."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise UserError(f"{needed_by} needs {name}, which is not installed: pip install {name} ({error})") from error
