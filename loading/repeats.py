"""Orders in which images come more than once: classes in turn, and repetitions that are no neighbours."""

from collections import Counter
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=int)  # a number of an image, or a `SampleKey`


def balanced_order(labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return as many images as there are, in an order that shows each class as often, but for one time.

    K classes come in turn, in another random order in every K positions. The images of a class follow a random
    permutation of them, and then another one: in a pass over the set, each image of a small class comes several times,
    as often as the others of its class but for one time, and of a large class only some come.

    Args:
        labels: (N,) the images' classes; those without images have no turn.
        generator: all draws are from it.
    """
    # Stable sorts throughout: only they give one order of equal keys in every version of torch and on any processor.
    by_class = labels.argsort(stable=True).split(labels.bincount()[labels.unique()].tolist())
    num_turns = -(-len(labels) // len(by_class))
    turns = torch.rand(num_turns, len(by_class), generator=generator)
    turns = turns.argsort(dim=1, stable=True).flatten()[: len(labels)]
    positions_by_class = turns.argsort(stable=True).split(turns.bincount().tolist())
    order = torch.empty_like(labels)
    for images, positions in zip(by_class, positions_by_class, strict=True):
        num_passes = -(-len(positions) // len(images))
        # Permutations one after the other, as draws with replacement would show some images often and others never.
        shown = [images[torch.randperm(len(images), generator=generator)] for _ in range(num_passes)]
        order[positions] = torch.cat(shown)[: len(positions)]
    return order


def count_earlier(order: torch.Tensor) -> torch.Tensor:
    """Return for each position of an order how often its image comes earlier, a part of its draws' address."""
    by_image = order.argsort(stable=True)
    images = order[by_image]
    earlier = torch.empty_like(order)
    # In the sorted order an image's places are one run, and `searchsorted` finds where it begins.
    earlier[by_image] = torch.arange(len(order)) - torch.searchsorted(images, images)
    return earlier


def without_neighbours(keys: list[Key]) -> list[Key]:
    """Return the keys in a circular order without two neighbours of the same image, if there is one.

    Image by image, the most frequent ones first, the keys take every other position, and then the positions between.
    Only an image with more than half of the keys can come round to its own first position.
    """
    counts = Counter(keys)
    keys = sorted(keys, key=lambda key: -counts[key])
    half = (len(keys) + 1) // 2
    return [keys[position // 2 + half * (position % 2)] for position in range(len(keys))]
