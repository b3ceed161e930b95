"""Random numbers addressed by where they are used, so that nothing random has to be saved.

Every draw of a run is a pure function of the seed and of an address: (epoch, image, repetition) for augmentation,
(step, shard) for mixing, dropout and stochastic depth. Worker count, prefetching, world size and restarts therefore
cannot change a draw. The one exception is the order of an epoch, which torchvision seeds with `seed + epoch`.
"""

import random

import torch

# One purpose a draw; two purposes at the same address draw unrelated numbers.
AUGMENTATION, MIXING, FORWARD = 1, 2, 3

_MASK = (1 << 64) - 1


def fold_seed(*address: int) -> int:
    """Mix integers into one 32-bit seed by a chain of splitmix64 steps.

    `seed + epoch + index` collides at once, and torch's CPU generator uses the low 32 bits of a seed only; so mix in 64
    bits first (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    state = 0
    for number in address:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state & 0xFFFFFFFF


def seed_host(*address: int) -> None:
    """Seed Python's and torch's process-wide CPU generators for the draws at an address.

    `torch.manual_seed` would do the same at a hundred times the cost (92 to 123 us), once an image.
    """
    seed = fold_seed(*address)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)


def seed_device(device: torch.device, *address: int) -> None:
    """Seed the CPU generators and the device's own one for the draws at an address."""
    seed_host(*address)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(fold_seed(*address))
