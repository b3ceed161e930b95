"""Whether a pack of `scripts.pack`, whose images are no longer the original files, can serve a run's options."""

from collections.abc import Sequence
from typing import Any

from errors import UserError, one_line


def check_pack(where: str, pack: dict[str, Any], *, exif: bool, grey_range: Sequence[int] | None) -> None:
    """Raise UserError if the pack at `where` was written for other values of `--exif` or `--grey-range`."""
    if exif and not pack.get("exif"):
        found = f"{where} is a pack without the orientations of its images"
        raise UserError(f"--exif: {found}; pack again with this version")
    # Its images of more than 8 bits have become images of 8, by the range that was given then.
    if pack.get("grey_range") != grey_range:
        written, given = ("none" if each is None else str(each) for each in (pack.get("grey_range"), grey_range))
        found = f"{where} is a pack written with {written}"
        raise UserError(one_line(f"--grey-range {given}: {found}; give that, or pack again"))


def size_remark(pack: dict[str, Any], *, is_training: bool, px: int) -> str:
    """Return a remark about a pack of images that were resized, which are now resized to `px`; empty if none is due.

    Of training it is due if the images are too small.
    """
    side = pack.get("px")
    if type(side) is not int or (is_training and px <= side):
        return ""
    enlarged = f"; they are enlarged to {px} pixels" if px > side else ""
    found = f"a pack of images resized to short side {side}, not the originals"
    return f"{found}: accuracy may differ (docs/data.md){enlarged}"
