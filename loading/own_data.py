"""Checks of a data set of the user's own, of `--data-path FILE.py:FUNCTION`."""

import numbers
from collections.abc import Callable

from errors import UserError
from files import retry
from loading.source import Source, check_label_sets


def open_own(function: Callable[[str], Source], split: str, separator: str | None) -> Source:
    """Return what the user's function returns for a split; UserError unless that can be a source of images."""
    source = function(split)
    if not isinstance(source, Source) or not 0 < len(source) < 1 << 31:
        raise UserError(f"it returned {source!r:.80} for {split}; expected a Source of fewer than 2**31 images")
    _check_labels(check_label_sets(source, separator))
    _check_first(source)
    source.fingerprint()  # whose names may be no text
    return source


def _check_labels(source: Source) -> None:
    """Refuse classes and labels that cannot be."""
    names, sets = source.classes, source.label_sets
    are_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not are_texts or len({*names}) < len(names):
        raise UserError("classes: expected a list of unique names")
    num_labels = len(names)
    if sets is not None:
        if sets.dtype != bool or sets.shape[1:] != (len(names),):
            raise UserError(f"label_sets are {sets.dtype} of shape {sets.shape}; expected bool of (sets, {len(names)})")
        num_labels = len(sets)
    labels = [source.label(number) for number in range(len(source))]
    for label in labels:
        # A bool is a number for Python.
        is_number = isinstance(label, numbers.Integral) and type(label) is not bool
        if not is_number or not 0 <= label < num_labels:
            raise UserError(f"a label is {label!r}; expected a whole number from 0 to {num_labels - 1}")


def _check_first(source: Source) -> None:
    """Refuse a source without a form, or whose first image cannot be read."""
    if not isinstance(getattr(source, "form", None), str):
        raise UserError("form: expected a name for this kind of data, for checkpoints and messages")
    content = retry(lambda: source.read(0))
    # Both must work before a run needs them.
    _ = {**source.identity()}
    source.path(0)
    if not isinstance(content, bytes | bytearray):
        raise UserError(f"read returned {content!r:.80}; expected the bytes of an image's file")
