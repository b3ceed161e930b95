"""Losses and metrics of the user's own are tried on some targets before a run relies on them."""

from typing import Any

import torch
from torch import Tensor

from errors import UserError, as_user_error
from loading.on_device import one_hot
from metrics import Metric
from settings.options import AugmentationOptions

# A record is one dictionary: a metric of such a name would replace the record's own field, as step or lr.
RESERVED = {"kind", "step", "epoch", "images", "n", "lr", "hours", "time", "grad_norm", "weight_norm", "world_size"}


def example_targets(augmentation: AugmentationOptions, multi_label: str | None, num_classes: int) -> list[Tensor]:
    """Return the targets of some images, in each form that losses and metrics are given in this run."""
    size = 3 if num_classes == 2 else 2  # no shape fits by chance
    classes, shares = torch.zeros(size, dtype=torch.int64), torch.zeros(size, num_classes)
    if multi_label:
        return [shares]
    if augmentation.mixup_alpha or augmentation.cutmix_alpha:
        return [classes, shares]
    return [classes]


def check_metric(metric: Any, num_classes: int, targets: list[Tensor], taken: set[str]) -> None:
    """Refuse a metric of the user's own whose sums of some images are not as it says, or whose names others have."""
    if not isinstance(metric, Metric):
        raise UserError(f"returned {metric!r:.80}; expected a metrics.Metric")
    both = metric.curves.keys() & (taken | RESERVED)
    if both:
        raise UserError(f"its curve {min(both)} has a name that is taken; give it another")
    for target in targets:
        numbers = torch.arange(len(target))
        scores = 20.0 * one_hot(numbers % num_classes, num_classes)  # sure of a class
        batch = scores, target, numbers
        with as_user_error(f"targets of shape {tuple(target.shape)}"):
            # Copies, which a metric may change in place.
            sums = metric.batch_sums(*(each.clone() for each in batch))
            twice = metric.batch_sums(*(torch.cat([each, each]) for each in batch))
        _check_sums(sums, twice, metric.num_sums)
    # The sums are those of the last target, as a tally would pass them on.
    values = dict(metric.compute([float(each) for part in sums for each in part.flatten()], len(target)))
    metric.observe(*batch)
    values |= metric.gather()
    for name, value in values.items():
        for each in value if type(value) is list else [value]:
            if type(each) not in (int, float):  # records hold plain numbers, and no tensors
                raise UserError(f"compute returns a {type(each).__name__} as {name}; expected a float")
    lacking = metric.curves.keys() - values.keys()
    if lacking:
        raise UserError(f"compute returns no {min(lacking)}, which curves names")


def _check_sums(sums: list[Tensor], twice: list[Tensor], num_sums: int) -> None:
    """Refuse the sums over a batch, and over the same batch twice over, if they are not what `num_sums` says."""
    if not all(isinstance(each, Tensor) for each in sums):
        raise UserError("batch_sums returns no list of tensors; leave .item() out, which waits for the device")
    number = sum(each.numel() for each in sums)
    if number != num_sums:
        raise UserError(f"batch_sums returns {number} sums, and its num_sums is {num_sums}; give num_sums")
    # A mean would be the same twice over, and sums that keep a state would grow by more.
    if not all(torch.allclose(2.0 * one, 1.0 * two) for one, two in zip(sums, twice, strict=True)):
        raise UserError("batch_sums of a batch twice over are not twice its own: return sums, and keep no state")
