"""What limits a run is found out: in real runs that were built to be limited, and in simulated ones of any size."""

import json
import os
import random
import re
import time

import pytest
import torch
from torch import nn

from monitoring import bottleneck
from tests.ranks import run_ranks, train_rank

SHORT_S, LONG_S = 0.005, 0.04


class Sleeper(nn.Module):
    """A model of a few weights whose forward pass takes as long as it is told."""

    def __init__(self, num_classes):
        super().__init__()
        self.fc, self.seconds = nn.Linear(3, num_classes), float(os.environ["SLEEP_S"])

    def forward(self, image):
        if self.training and not image.is_meta:
            time.sleep(self.seconds)
        return self.fc(image.mean(dim=(2, 3)))


def limited_rank(argv: list[str], trouble: str) -> None:
    """Run train.py with something slow in it."""
    import data

    is_slow = trouble == "rank" and os.environ["RANK"] == "1"
    os.environ["SLEEP_S"] = str(LONG_S if is_slow else SHORT_S)
    if trouble == "loader":
        load = data.SyntheticImages.load

        def load_slowly(self, key):
            time.sleep(LONG_S / 4)
            return load(self, key)

        data.SyntheticImages.load = load_slowly
    train_rank(argv)


ARGV = """
    --synthetic 320 --train-crop-size 8 --val-resize-size 8 --val-crop-size 8 --batch-size 4 --epochs 1 --lr 0.01
    --device cpu --print-freq 10 --workers 1
""".split()


@pytest.mark.slow  # real processes that sleep: what is measured depends on what else the machine does
@pytest.mark.parametrize(
    ("trouble", "begin"),
    [("loader", "bound by data: waiting for data "), ("rank", "bound by the slowest rank, 1: ")],
)
def test_the_limit_of_a_run_is_named(trouble, begin, tmp_path):
    argv = [*ARGV, "--model", f"{__file__}:Sleeper", "--output-dir", str(tmp_path / "out")]
    output = run_ranks(limited_rank, 2, argv, trouble, log_folder=tmp_path).check().outputs[0]
    found = re.search(r"Epoch: \[0\] (bound by .*|balanced.*)", output)[1]
    assert found.startswith(begin)
    assert "; try " in found
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if record["kind"] == "bottleneck"]
    assert sum(record[name] for name in bottleneck.RECORDED[:-1]) == pytest.approx(1, abs=0.02)


def simulate(
    world_size, num_steps=100, *, seed=0, compute_s=0.05, load_s=0.03, send_s=0.004, slow_rank=None, jitter=0.1
):
    """Return the seconds of steps of made-up processes: each has a loader that is up to four batches ahead."""
    draws = random.Random(seed)
    now = [0.0] * world_size
    loaded = [[] for _ in now]  # when each batch is ready
    taken = [[] for _ in now]
    steps = []
    for step in range(num_steps):
        row = []
        for rank in range(world_size):
            free = taken[rank][step - 4] if step >= 4 else 0.0
            begin = max(loaded[rank][-1] if step else 0.0, free)
            loaded[rank].append(begin + load_s * draws.lognormvariate(0, 2 * jitter))
            taken[rank].append(max(now[rank], loaded[rank][-1]))
            slowness = 2.0 if rank == slow_rank else 1.0
            pause = 0.1 if draws.random() < 0.01 else 0.0  # as of a garbage collection
            done = taken[rank][-1] + compute_s * slowness * draws.lognormvariate(0, jitter) + pause
            row.append((now[rank], taken[rank][-1] - now[rank], done))
        end = max(done for _, _, done in row) + (send_s if world_size > 1 else 0)
        steps.append([(end - begin, wait, end - done if world_size > 1 else 0.0) for begin, wait, done in row])
        now = [end] * world_size
    return torch.tensor(steps, dtype=torch.float64).transpose(0, 1)


@pytest.mark.parametrize(
    ("world_size", "limit", "trouble"),
    [
        *((size, "data", {"load_s": 0.1}) for size in (1, 2, 3, 8)),
        *((size, "communication", {"send_s": 0.05}) for size in (2, 3, 8)),
        *((size, "slowest", {"slow_rank": 1}) for size in (2, 3, 8)),
    ],
)
def test_a_simulated_limit_is_named_with_the_time_that_the_run_would_save(world_size, limit, trouble):
    troubled, untroubled = simulate(world_size, **trouble), simulate(world_size, send_s=0.0, load_s=0.0)
    shares = bottleneck.find_shares(troubled)
    assert shares.limit() == limit
    saved = 1 - float(untroubled[..., 0].sum() / troubled[..., 0].sum())
    assert getattr(shares, limit) == pytest.approx(saved, abs=0.06)
    assert sum(shares[:4]) == pytest.approx(1)
    if limit == "slowest":
        assert shares.rank == 1


def test_ordinary_and_short_simulated_runs_are_not_accused():
    for seed in range(10):
        draws = random.Random(100 + seed)
        load_s, send_s, jitter = draws.uniform(0.005, 0.04), draws.uniform(0, 0.008), draws.uniform(0, 0.2)
        for world_size in (1, 2, 4, 16):
            steps = simulate(world_size, seed=seed, load_s=load_s, send_s=send_s, jitter=jitter)
            assert bottleneck.find_shares(steps).limit() in ("compute", None)
    assert bottleneck.find_shares(simulate(2, num_steps=bottleneck.LEAST_STEPS - 1)) is None
    short = simulate(2, compute_s=0.001, load_s=0.001, send_s=0.0, num_steps=30, jitter=0)
    assert bottleneck.find_shares(short) is None
