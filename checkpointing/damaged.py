"""Checkpoints that cannot be used: why, and where the files of a run are kept that `--resume auto` is to pass over."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from errors import UserError, counted

# Beginnings of files that are often taken for weights, and what they are.
_BEGINNINGS = {rb"\s*<": "a web page", rb"version https://git-lfs": "a Git LFS pointer; fetch the file by git lfs pull",
               rb".{8}\{": "safetensors; name it so", rb"\x89HDF": "HDF5", rb"\x08.\x12": "ONNX",
               rb"\x1f\x8b": "gzip; unpack it", rb"\x80[\3-\5]": "a pickle not of torch.save"}  # fmt: skip


def first_bytes(begin: bytes) -> str:
    """Say what the first bytes of a file are, and which kind of file has such."""
    if not begin:
        return "it is empty"
    text = f"it begins with {begin[:8]!r}"
    for pattern, kind in _BEGINNINGS.items():
        if re.match(pattern, begin, re.DOTALL):
            return f"{text}: {kind}"
    return text


def explain(name: str, error: Exception) -> str:
    """Say in one line why a file could not be loaded."""
    # Torch's message names the first class or function that the file would have to run.
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found and found[1] == "argparse.Namespace":
        origin = "of another script, such as torchvision's: it holds an argparse.Namespace"
        return f"{name} is a checkpoint {origin}; to start from its weights, pass it to --weights"
    if found and found[1].startswith("numpy."):
        return (
            f"{name} contains numpy objects ({found[1]}), which need code to load; save float(x) or x.tolist() instead"
        )
    if found:
        return f"{name} contains code ({found[1]}) and was refused; nothing in it was run; give a plain state_dict()"
    reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]  # an EOFError has no text
    return f"{name} is damaged or no checkpoint ({reason[:160]}; nothing in it was run)"


def none_usable(folder: Path, num_checkpoints: int, reasons: Sequence[str]) -> UserError:
    """Return the error for a folder whose checkpoints are all damaged or set aside.

    A new run in their place would cost all that was trained, and perhaps for a disk's fault that can be repaired.
    """
    words = [*reasons[:3], "more"] if len(reasons) > 3 else reasons
    text = f"{counted(num_checkpoints, 'checkpoint')} in {folder}, none usable: {'; '.join(words) or 'all set aside'}"
    return UserError(f"{text}. Not starting over: to do so, give --overwrite", exit_code=4)


def rename_aside(path: Path, prefix: str, suffix: str) -> str:
    """Rename a file by a prefix or a suffix, and replace none that was renamed before; return a line about it."""
    name = f"{prefix}{path.name}{suffix}"
    number = 1
    while os.path.lexists(path.parent / name):
        number += 1
        # The ending of a superseded file stays .pth, so that it can be given to --resume.
        name = f"{prefix}{number}-{path.name}" if prefix else f"{path.name}{suffix}-{number}"
    os.replace(path, path.parent / name)
    if prefix:
        return f"{path.name} is newer than the resumed checkpoint; kept as {name}"
    return f"{path.name} is damaged; kept as {name}"
