"""Learning-rate schedules beside `--lr-scheduler steplr`, which `models.optim` has."""

import math

# As `models.optim.drop`, each is a formula of the position, which is saved nowhere: see there for the arguments.


def drop_at(peak: float, epoch: float, begin: int, end: int, *, lr_milestones: list[int], lr_gamma: float) -> float:
    """Fall by a factor at each milestone."""
    return peak * lr_gamma ** sum(milestone <= epoch - begin for milestone in lr_milestones)


def decay(peak: float, epoch: float, begin: int, end: int, *, lr_gamma: float) -> float:
    """Fall by a factor an epoch, smoothly."""
    return peak * lr_gamma ** (epoch - begin)


def cosine(peak: float, epoch: float, begin: int, end: int, *, lr_min: float) -> float:
    """Fall to lr_min along half a cosine."""
    return lr_min + (peak - lr_min) * (1.0 + math.cos(math.pi * (epoch - begin) / (end - begin))) / 2.0


def line(peak: float, epoch: float, begin: int, end: int, *, lr_min: float) -> float:
    """Fall to lr_min in a line."""
    return peak + (lr_min - peak) * (epoch - begin) / (end - begin)


def power(peak: float, epoch: float, begin: int, end: int, *, lr_power: float, lr_min: float) -> float:
    """Fall to lr_min along a power of what is left."""
    return lr_min + (peak - lr_min) * (1.0 - (epoch - begin) / (end - begin)) ** lr_power


def cool_down(peak: float, epoch: float, begin: int, end: int, *, lr_cooldown_epochs: int, lr_min: float) -> float:
    """Stay, and fall to lr_min in a line in the last epochs."""
    return peak + (lr_min - peak) * max(0.0, epoch - (end - lr_cooldown_epochs)) / lr_cooldown_epochs
