"""Which image, on which rank, in which order; meters, printing, and what processes tell each other."""

import io
import itertools
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

import utils
from errors import UserError
from sampler import RASampler, TrainSampler, VirtualShards
from tests.ranks import run_check


def on_all_ranks(build, num_shards, world_size, *, epoch=0, global_batch_size=8):
    batches = {}
    for rank in range(world_size):
        sampler = build(VirtualShards(global_batch_size, num_shards, rank, world_size))
        sampler.set_epoch(epoch)
        keys = BatchSampler(sampler, sampler.shards.batch_size, drop_last=False)
        keys = [[(int(key), key.epoch, key.repetition) for key in batch] for batch in keys]
        own = dict(zip(sampler.addresses(), keys, strict=True))
        assert len(sampler) == sum(map(len, own.values()))
        assert not own.keys() & batches.keys()
        batches |= own
    return batches


def repeated_oracle(num_images, num_shards, global_batch_size, seed, epoch, repetitions):
    """{(step, shard): [(image, repetition)]}, by torch's sampler: shuffle, repeat, cut to the images' number, deal."""
    shuffled = DistributedSampler(range(num_images), 1, 0, seed=seed)
    shuffled.set_epoch(epoch)
    repeated = [(image, repetition) for image in shuffled for repetition in range(repetitions)][:num_images]
    steps, size = num_images // global_batch_size, global_batch_size // num_shards
    found = {}
    for shard in range(num_shards):
        dealt = [repeated[place] for place in DistributedSampler(repeated, num_shards, shard, shuffle=False)]
        found |= {(epoch * steps + step, shard): dealt[step * size : (step + 1) * size] for step in range(steps)}
    return found


@pytest.mark.parametrize("repetitions", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_shards", "world_size"), [(1, 1), (2, 2), (4, 2), (4, 1), (8, 8)])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 2)])
def test_each_step_has_the_images_of_torchs_distributed_sampler(repetitions, num_shards, world_size, seed, epoch):
    batches = on_all_ranks(
        lambda shards: TrainSampler(61, shards, seed, repetitions=repetitions), num_shards, world_size, epoch=epoch
    )
    expected = repeated_oracle(61, num_shards, 8, seed, epoch, repetitions)
    found = {address: [(image, repetition) for image, _, repetition in keys] for address, keys in batches.items()}
    if num_shards < repetitions:  # the same images in the same shards, in an order of their own
        found, expected = ({address: sorted(pairs) for address, pairs in each.items()} for each in (found, expected))
    assert found == expected
    assert {found_epoch for keys in batches.values() for _, found_epoch, _ in keys} == {epoch}


def num_mixed_with_themselves(images):
    return sum(one == other for one, other in zip(images, [images[-1], *images[:-1]], strict=True))


@pytest.mark.parametrize("repetitions", [2, 3, 4, 5])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 6, 16])
def test_no_image_is_mixed_with_itself_where_another_order_exists(repetitions, num_shards, batch_size):
    build = lambda shards: TrainSampler(353, shards, repetitions=repetitions)  # noqa: E731
    batches = on_all_ranks(build, num_shards, 1, global_batch_size=num_shards * batch_size)
    assert batches == on_all_ranks(build, num_shards, num_shards, global_batch_size=num_shards * batch_size)
    for keys in batches.values():
        images = [image for image, _, _ in keys]
        if len(images) < 7:
            best = min(map(num_mixed_with_themselves, itertools.permutations(images)))
        else:
            best = max(max(map(images.count, images)) * 2 - len(images), 0)
        if best == 0:
            assert num_mixed_with_themselves(images) == 0, images


def torchvisions_repeated(num_images, num_replicas, rank, seed, epoch, repetitions):
    """As torchvision's sampler says that it does, but for its cut to a multiple of 256: shuffle, repeat, pad, deal."""
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    repeated = [image for image in order for _ in range(repetitions)]
    num_samples = math.ceil(num_images * repetitions / num_replicas)
    repeated += repeated[: num_samples * num_replicas - len(repeated)]
    return repeated[rank::num_replicas][: num_images // num_replicas]


@pytest.mark.parametrize(("num_replicas", "repetitions"), [(1, 3), (2, 3), (3, 3), (8, 4), (5, 1)])
@pytest.mark.parametrize("num_images", [100, 256, 700])
def test_the_repeated_sampler_for_scripts_is_torchvisions(num_replicas, repetitions, num_images):
    for rank in range(num_replicas):
        sampler = RASampler(range(num_images), num_replicas, rank, seed=5, repetitions=repetitions)
        for epoch in (0, 3):
            sampler.set_epoch(epoch)
            expected = torchvisions_repeated(num_images, num_replicas, rank, 5, epoch, repetitions)
            assert list(sampler) == expected
            assert list(sampler) == expected  # only `set_epoch` moves it
            assert len(sampler) == len(expected)
    keys = list(RASampler(range(512), shuffle=False))  # of one process, without a process group
    assert keys == [image for image in range(171) for _ in range(3)][:512]
    assert [key.repetition for key in keys[:6]] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("needs_same_bits", [False, True])
@pytest.mark.parametrize("num_shards", range(1, 17))
def test_world_sizes_that_can_compute_the_shards(num_shards, needs_same_bits):
    for world_size in range(1, num_shards + 3):
        num_local, rest = divmod(num_shards, world_size)
        can = rest == 0 and (not needs_same_bits or world_size == 1 or num_local.bit_count() == 1)
        with nullcontext() if can else pytest.raises(UserError):
            VirtualShards(num_shards * 4, num_shards, 0, world_size).check(needs_same_bits=needs_same_bits)


def test_synchronised_batch_norm_needs_all_shards_at_once():
    for num_shards in (1, 4):
        VirtualShards(4 * num_shards, num_shards, 0, num_shards).check(needs_same_bits=False, is_synchronised=True)
    with pytest.raises(UserError, match=r"--sync-bn: .* 2 of the 4 micro-batches .* use 4 processes"):
        VirtualShards(16, 4, 0, 2).check(needs_same_bits=False, is_synchronised=True)


def test_meters_are_empty_weighted_and_take_numbers_and_tensors():
    meter = utils.SmoothedValue(fmt="{median} {avg} {global_avg:.3f} {max} {value}")
    assert str(meter) == "0.0 0.0 0.000 0.0 0.0"
    meter.update(1.0, n=3)
    meter.update(torch.tensor([5.0], dtype=torch.float64), n=1)
    assert (meter.total, meter.count, str(meter)) == (8.0, 4, "1.0 3.0 2.000 5.0 5.0")


@pytest.mark.parametrize(("start", "count", "print_freq"), [(0, 10, 4), (0, 9, 4), (0, 1, 100), (6, 5, 4), (3, 1, 1)])
def test_log_every_prints_each_nth_item_and_the_last(capsys, start, count, print_freq):
    logger, due, end = utils.MetricLogger(delimiter="  "), [], start + count
    items = list(range(100, 100 + count))
    for number, item in enumerate(logger.log_every(items, print_freq, "Epoch: [3]", start), start):
        assert item == items[number - start]
        due += [number] if logger.is_line_due else []
        logger.update(loss=torch.tensor(0.25), lr=0.5)
    *lines, total = capsys.readouterr().out.splitlines()
    pattern = (
        r"Epoch: \[3\]  \[ *(\d+)/(\d+)\]  eta: \d+:\d\d:\d\d  "
        r"loss: 0\.2500 \(0\.2500\)  lr: 0\.5000 \(0\.5000\)  time: \d+\.\d{4}  data: \d+\.\d{4}(?:  max mem: \d+)?"
    )
    printed = [tuple(map(int, re.fullmatch(pattern, line).groups())) for line in lines]
    expected = [number for number in range(start, end) if number % print_freq == 0 or number == end - 1]
    assert printed == [(number, end) for number in expected]
    assert due == expected
    assert re.fullmatch(r"Epoch: \[3\] Total time: \d+:\d\d:\d\d", total)


@pytest.mark.parametrize("value", [2**40 + 1, 0.1, [1, 2**24 + 1], [3, 0.1], torch.tensor([1, 2]), torch.tensor(0.5)])
def test_reduce_keeps_a_number_as_it_is(value):
    expected = torch.as_tensor(np.asarray(value))  # numpy keeps int64 and float64
    expected = expected.to(torch.float64 if expected.is_floating_point() else torch.int64)
    total = utils.reduce_across_processes(value)
    assert total.dtype == expected.dtype
    assert torch.equal(total, expected)
    total += 1
    assert not isinstance(value, torch.Tensor) or not torch.equal(total, value)  # it is a copy


def check_processes(rank, world_size, folder):
    utils.save_on_master({"rank": rank}, folder / f"by-rank-{rank}.pth")
    logger = utils.MetricLogger()
    for mean, n in [(0.25, 3), (1.0, 3), (-1.5, 2), (0.5, 1), (2.0, 5)][rank::world_size]:
        logger.meters["hits"].update(mean, n)
    logger.synchronize_between_processes()
    assert (logger.hits.total, logger.hits.count, logger.hits.global_avg) == (11.25, 14, 11.25 / 14)
    total = utils.reduce_across_processes(2**24 + 1)
    assert (total.item(), total.dtype) == (world_size * (2**24 + 1), torch.int64)
    mixed = torch.tensor([2.0**53 - 2, 1e-300], dtype=torch.float64) if rank == 0 else torch.zeros(2).double()
    assert utils.reduce_across_processes(mixed).tolist() == [2.0**53 - 2, 1e-300]
    assert utils.reduce_across_processes([0.1 if rank == 0 else 0.0, 0.0]).tolist() == [0.1, 0.0]


@pytest.mark.dist
def test_processes_sum_meters_and_numbers_and_write_one_file(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    run_check(3, check_processes, tmp_path, folder)
    assert [path.name for path in folder.iterdir()] == ["by-rank-0.pth"]
    assert torch.load(folder / "by-rank-0.pth", weights_only=True) == {"rank": 0}


def test_a_name_that_standard_output_cannot_encode_is_not_raised(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr("sys.stdout", stream)
    utils.setup_for_distributed(True)
    print("r\xe9sultat")
    print("result", flush=True)
    assert stream.buffer.getvalue().endswith(b"result\n")
    stream.close()
    print("nobody reads it")
