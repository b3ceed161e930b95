"""The pictures of a run that has any to draw, behind an object that draws none."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpointing.checkpoint import RunState
from settings.options import AugmentationOptions


class NoPictures:
    """Draws nothing, in the place of `monitoring.pictures.Pictures`."""

    def watched(self, data_loader: Iterable) -> Iterable:
        """Return the loader of the training batches as it is."""
        return data_loader

    def observe(self, *batch: Any) -> None:
        """Take no notice of a batch of an evaluation."""

    def draw(self) -> None:
        """Draw nothing of an evaluation."""


def build_pictures(
    folder: Path | None, run: RunState, augmentation: AugmentationOptions, val: Any, evaluated: str
) -> Any:
    """Return what draws a run of images with one label each; one of synthetic images or of several labels has nothing.

    The arguments are those of `Pictures`.
    """
    if val.index.form == "synthetic" or val.index.label_sets is not None:
        return NoPictures()
    # When the run is built, and not when the first picture is due: the files of the project may change under a run.
    from monitoring.pictures import Pictures

    return Pictures(folder, run, augmentation, val, evaluated)
