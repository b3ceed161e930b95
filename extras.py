"""Packages that are good to have and never needed."""

import importlib
from types import ModuleType

import torch

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


def require_torchcodec(option: str) -> ModuleType:
    """Import TorchCodec for an option that asks for its image decoder.

    Raises:
        UserError: it is not installed, cannot be loaded, or is from before it decoded images.
    """
    try:
        torchcodec = importlib.import_module("torchcodec")
    except ImportError as error:
        raise UserError(f"{option} needs TorchCodec, which is not installed: pip install torchcodec") from error
    try:
        decoders = importlib.import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{option}: TorchCodec {torchcodec.__version__} cannot be loaded ({reason}); install the one that is made "
            f"for torch {torch.__version__}"
        ) from error
    if not hasattr(decoders, "decode_jpeg"):
        raise UserError(
            f"{option}: TorchCodec {torchcodec.__version__} decodes no images; it does from 0.16 on: "
            "pip install --upgrade torchcodec"
        )
    return torchcodec
