"""Meters, printing, launchers, and what processes tell each other."""

import io
import re

import numpy as np
import pytest
import torch

import utils
from tests.ranks import run_check


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
