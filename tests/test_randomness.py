"""Random numbers of an address: splitmix64's, torch's where they stand for them, and evenly spread."""

import statistics

import torch

from presets import CropBox
from randomness import Draws, TorchDraws, unit

# The first numbers of splitmix64 from the state 0, as published with it (Vigna, splitmix64.c).
SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_draws_are_splitmix64s():
    draws = Draws()
    assert [high << 32 | low for high, low in (draws.pair() for _ in SPLITMIX64)] == SPLITMIX64
    assert Draws().uniform() == unit(SPLITMIX64[0] >> 32)


def test_torch_makes_its_numbers_of_the_bits_that_are_drawn():
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    draws = TorchDraws(generators[0])
    for _ in range(100):
        first, second = draws.pair()
        assert torch.rand(1, generator=generators[1]).item() == unit(first)
        assert torch.randint(97, (1,), generator=generators[1]).item() == second % 97
        assert draws.uniform() == torch.rand(1, generator=generators[1]).item()
    assert torch.equal(*(generator.get_state() for generator in generators))


def test_boxes_and_flips_of_addresses_are_spread_as_torchs():
    box, size = CropBox((0.08, 1.0)), (375, 500)

    def moments(all_draws):
        boxes = [box.draw(*size, draws) for draws in all_draws]
        shares = [(top, left, height * width, height / width) for top, left, height, width in boxes]
        return [(statistics.fmean(column), statistics.stdev(column)) for column in zip(*shares, strict=True)]

    count = 20_000
    ours = moments(Draws(1, 0, epoch, image, 0) for epoch in range(2) for image in range(count // 2))
    theirs = moments(TorchDraws(torch.Generator().manual_seed(seed)) for seed in range(count))
    for (mean, spread), (other_mean, other_spread) in zip(ours, theirs, strict=True):
        assert abs(mean - other_mean) < 4.5 * spread * (2 / count) ** 0.5
        assert abs(spread / other_spread - 1) < 0.03
    flips = sum(Draws(1, 0, 0, image, 0).uniform() < 0.3 for image in range(count))
    assert abs(flips / count - 0.3) < 4.5 * (0.3 * 0.7 / count) ** 0.5
