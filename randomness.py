"""Random numbers addressed by where they are used, so that no generator's state has to be saved.

Every draw of a run is a pure function of the seed and an address: (epoch, image, repetition) for augmentation, (step,
micro-batch) for erasing, mixing, dropout and stochastic depth, a step for an optimizer, an image for an evaluation.
Worker count, prefetching, world size and restarts therefore cannot change a draw. Only the order of an epoch is seeded
otherwise, with `seed + epoch` as in torchvision.
"""

import random
from collections.abc import Iterable

import numpy
import torch

# Purposes of draws; two purposes at the same address draw unrelated numbers. A number is part of every run's bits: none
# may change, and a new purpose gets the next one.
AUGMENTATION = 1
MIXING = 2
FORWARD = 3
ERASING = 4
UPDATE = 5
EVALUATION = 6
FLIP = 7

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, as of splitmix64


def fold_seed(*address: int) -> int:
    """Mix integers into one 32-bit seed by a chain of splitmix64 steps.

    `seed + epoch + index` would collide at once, and torch's CPU generator uses only the low 32 bits of a seed; so mix
    in 64 bits first (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    return _fold(address) & 0xFFFFFFFF


def _fold(address: Iterable[int]) -> int:
    state = 0
    for number in address:
        state = _splitmix64(state ^ (number & _MASK))
    return state


def _splitmix64(state: int) -> int:
    state = state + _STEP & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31


class Draws:
    """Random numbers for one address, from splitmix64: drawing a few is cheaper than seeding a generator."""

    def __init__(self, *address: int) -> None:
        self.state = _fold(address)

    def pair(self) -> tuple[int, int]:
        """Draw two 32-bit numbers."""
        bits = _splitmix64(self.state)
        self.state = self.state + _STEP & _MASK
        return bits >> 32, bits & 0xFFFFFFFF

    def uniform(self) -> float:
        """Draw a number in [0, 1)."""
        return unit(self.pair()[0])


class TorchDraws:
    """Random numbers of a torch CPU generator, drawn exactly as torch's own functions draw them."""

    def __init__(self, generator: torch.Generator = torch.default_generator) -> None:
        self.generator = generator

    def pair(self) -> tuple[int, int]:
        """Draw two 32-bit numbers, as torch's functions draw for two samples."""
        # None is the end of int64's range: with any other end torch would reduce the generator's 64 bits by a modulo.
        bits = int(torch.empty(1, dtype=torch.int64).random_(-(1 << 63), None, generator=self.generator).item())
        return bits >> 32 & 0xFFFFFFFF, bits & 0xFFFFFFFF

    def uniform(self) -> float:
        """Draw the number that `torch.rand` would draw."""
        return torch.empty(1).uniform_(generator=self.generator).item()


def unit(bits: int) -> float:
    """Return the number in [0, 1) that torch makes of 32 bits: a float32 of the low 24."""
    return (bits & 0xFFFFFF) / (1 << 24)


def seed_host(*address: int) -> None:
    """Seed Python's and torch's process-wide CPU generators for the draws at an address.

    `torch.manual_seed`, for torch's part, would cost a hundred times as much for each image (92 to 123 us).
    """
    seed = fold_seed(*address)
    # torchvision's transforms draw from torch's generator, and RandomOrder and RandomChoice from Python's; none draws
    # from numpy's. The hash and both seeds take 5 us of an image's 820.
    random.seed(seed)
    torch.default_generator.manual_seed(seed)


def seed_device(device: torch.device, *address: int) -> None:
    """Seed Python's, numpy's, torch's and the device's process-wide generators for the draws at an address."""
    seed_host(*address)
    numpy.random.seed(fold_seed(*address))
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(fold_seed(*address))
