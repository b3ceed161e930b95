"""HEIC files of phones, which an optional package adds to Pillow's formats."""

import functools
import importlib
import importlib.util

from errors import UserError

HEIC_REMEDY = "which needs the package pillow-heif; run pip install pillow-heif, or save it as JPEG"


@functools.cache
def can_read_heic() -> bool:
    """Tell whether the package is there that adds HEIC to Pillow's formats, and add it."""
    if importlib.util.find_spec("pillow_heif") is None:
        return False
    importlib.import_module("pillow_heif").register_heif_opener()
    return True


def require_heic(found: str) -> None:
    """Raise UserError, which says what was found, unless HEICs can be read."""
    if not can_read_heic():
        raise UserError(f"{found}, {HEIC_REMEDY}")
