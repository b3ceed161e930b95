"""Packages that are good to have and never needed."""

import importlib
from types import ModuleType

from errors import UserError


def require_timm(option: str, value: str) -> ModuleType:
    """Import timm for an option that asks for something of its.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UserError(f"{option} {value} comes from timm, which is not installed: pip install timm") from error
