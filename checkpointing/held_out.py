"""`--minival`: whether weights have trained on the images that it holds out."""

from typing import Any

from settings.options import DataOptions


def holds_out(options: dict[str, Any], fraction: float, fold: int) -> bool:
    """Tell whether a run with these options held out what this `--minival` and `--minival-fold` do, or more."""
    saved_fraction = options.get("minival")
    saved_fold = options.get("minival_fold", 0)
    if not (isinstance(saved_fraction, float) and isinstance(saved_fold, int)):
        return False
    if (saved_fraction, saved_fold) == (fraction, fold):
        return True
    # Images are held out in the order of their names' hashes: fold 0 of a larger fraction holds all of a smaller one.
    return fold == saved_fold == 0 and fraction <= saved_fraction


def warn_trained_on(source: str, options: dict[str, Any], images: Any, data_options: DataOptions, val: Any) -> None:
    """Print a line if weights were trained on images that `--minival`, which is given, holds out here.

    Args:
        source: the name of the weights.
        options: those of the run that trained them.
        images: the `data` of its checkpoint, if it has any.
        data_options: the options of this run.
        val: the validation set.
    """
    if not isinstance(images, dict):
        return
    if holds_out(options, data_options.minival, data_options.minival_fold):
        return
    whole = getattr(val.index, "whole", val.index)
    facts = {**whole.identity(), "fingerprint": whole.fingerprint()}
    known = {name: value for name, value in images.items() if isinstance(value, str)}
    # One of them is enough: a sample of sizes and a fingerprint are the same in folders, tars and packs.
    for name in ("path", "sample", "fingerprint"):
        if facts[name] is not None and known.get(name) == facts[name]:
            part = f"--minival {data_options.minival} --minival-fold {data_options.minival_fold}"
            print(f"{source} has trained on images that {part} holds out: its accuracy here will be too high")
            return
