"""Open the parquet files of ImageNet that Hugging Face publishes, for `scripts.prepare`."""

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import UserError, in_one_line

_SHARD = re.compile(r"(?P<split>[\w-]+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?\.parquet")

# Hugging Face's name of an image of ImageNet: the official name, followed by the synset.
_SYNSET_NAME = re.compile(r"(?P<stem>[\w-]+)_(?P<synset>n\d{8})\.(?P<ending>JPEG|jpe?g|png)")


def find_synset(path: str | None) -> tuple[str, str] | None:
    """Return the synset and the official file name in Hugging Face's path of an image, or None if it has none."""
    found = _SYNSET_NAME.fullmatch(os.path.basename(path or ""))
    return (found["synset"], f"{found['stem']}.{found['ending']}") if found else None


def check_names(files: Sequence[Path]) -> None:
    """Check that a set of files is complete.

    Raises:
        UserError: a file is missing.
    """
    found = [(path, _SHARD.fullmatch(path.name)) for path in files]
    present = {(match["split"], int(match["number"])) for _, match in found if match}
    for path, match in found:
        count = int(match["count"]) if match else 0
        for number in range(count):
            if (match["split"], number) not in present:
                name = f"{match['split']}-{number:05d}-of-{match['count']}.parquet"
                raise UserError(f"{path.with_name(name)} is missing; all {count} files of the set are needed")


def open_parquet(path: Path) -> Any:
    """Open a parquet file with the columns `image` (bytes and path) and `label`.

    Raises:
        UserError: pyarrow is not installed; the file is damaged, or has other columns.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow, which is not installed: pip install pyarrow") from error
    with in_one_line(f"{path} is truncated, or not a parquet file; download it again"):
        table = parquet.ParquetFile(path)
        columns = {field.name: str(field.type) for field in table.schema_arrow}
    image, label = columns.get("image", ""), columns.get("label", "")
    if not image.startswith("struct<") or "bytes: " not in image or not label.startswith(("int", "uint")):
        found = ", ".join(f"{name} ({kind[:60]})" for name, kind in columns.items())
        raise UserError(f"{path} has {found}; it needs image (struct of bytes and path) and label (int)")
    return table
