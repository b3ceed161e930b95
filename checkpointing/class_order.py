"""Compare the classes of weights with those of the images: their names, or the order that another script gives them."""

import re
from typing import Any

from checkpointing.guard import compare_classes, refuse_data
from settings.options import parse_allowed
from settings.stages import Parsed


def check_classes(weights: Any, args: Parsed, val: Any) -> None:
    """Refuse to evaluate weights that name other classes; training may start from them.

    Of `Weights` that name none `models.load_matching` counts the classes, and refuses those in an unknown order.
    """
    source = f"--weights {args.model.weights}"
    if args.data.minival:
        from checkpointing.held_out import warn_trained_on

        warn_trained_on(source, weights.options, weights.images, args.data, val)
    weights.disorder = []
    # Only a file that names no classes needs a guess at their order.
    if weights.classes is None:
        if "data" not in parse_allowed(args.checkpoint.allow_change):
            weights.disorder = find_disorder(weights.script, val.classes)
        return
    # Another number of classes has no names to compare: the classifier is replaced, or the weights are refused.
    if len(weights.classes) != len(val.classes):
        return
    refusal = f"{source} has different classes"
    differences = compare_classes(weights.classes, val.classes, refusal)
    if differences and args.checkpoint.test_only:
        refuse_data(args.checkpoint.allow_change, refusal, differences)
    elif differences:
        print(f"{source}: {differences[0]}; training starts from its classifier anyway")


def find_disorder(script: str, classes: list[str]) -> list[str]:
    """Return a line about classes that weights of a script, without names of their own, may have in another order.

    timm sorts them naturally and without case; torchvision and pytorch/examples as here.
    """
    if script in ("", "torchvision", "pytorch-examples"):
        return []
    # No error tells of another order: numbered folders gave 18.3 % of hits where the right order gives 83.3.
    differences = compare_classes(sorted(classes, key=_natural_key), classes)
    advice = "rename the folders in that order: 0-NAME ..."
    return [f"it names no classes; in timm's order {each}; {advice}" for each in differences]


def _natural_key(name: str) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())]
