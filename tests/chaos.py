"""Break runs on purpose and count what is lost: `make chaos`, or `python -m tests.chaos kills=100 power_loss=40`.

Random faults strike whole runs, and those of tests/faults.py; points of a very small run are tried (tests/crash.py).
A resumed run's folder has to end like that of an uninterrupted one (tests/endings.py).
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from checkpointing.archive import load_checkpoint
from checkpointing.schema import check_schema
from errors import UserError
from tests import faults
from tests.crash import SCENARIOS, Trial, lose_power, possible_states
from tests.endings import Ending, flatten, load_whole, unequal
from tests.images import write_images
from tests.ranks import run_ranks
from tests.runs import Runs

# BatchNorm, stochastic depth, momentum, average, mixing, erasing, clipping; 4 epochs of 3 steps on 29 images.
OPTIONS = """
    --model timm/tiny_test --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --device cpu --workers 0
    --stochastic-depth 0.1 --random-erase 0.3 --mixup-alpha 0.2 --cutmix-alpha 1.0 --label-smoothing 0.1
    --model-ema --model-ema-steps 2 --model-ema-decay 0.9 --lr 0.05 --lr-warmup-epochs 1 --clip-grad-norm 1.0
    --epochs 4 --print-freq 2 --lr-scheduler cosineannealinglr --use-deterministic-algorithms --resume auto
""".split()


class Campaign(NamedTuple):
    signals: tuple[signal.Signals, ...]  # one of which is sent to a random rank at a random time
    world_sizes: tuple[int, ...] = (1,)  # processes of a run; each start takes one of them
    options: tuple[str, ...] = ("--checkpoint-steps", "1")  # without which a run saves at the ends of epochs only
    shards: int = 4  # of the global batch
    is_for_all: bool = False  # whether every rank is sent it, at one time

    @property
    def has_same_saves(self) -> bool:
        """Whether a run saves at every step; if not, one that was told to stop has saved at other steps."""
        return "--checkpoint-steps" in self.options

    def strike(self, rng: random.Random, duration_s: float, world_size: int) -> list[tuple]:
        """Return signals as `run_ranks` takes them; most come before a resumed run, which is shorter, has ended."""
        at_s, number = rng.uniform(0, 0.7 * duration_s), rng.choice(self.signals)
        ranks = range(world_size) if self.is_for_all else [rng.randrange(world_size)]
        return [(at_s, rank, number) for rank in ranks]


KILL = (signal.SIGKILL,)
CAMPAIGNS = {
    "kills": Campaign(KILL),
    "loader_kills": Campaign(KILL, options=("--checkpoint-steps", "1", "--workers", "2")),
    "rank_kills": Campaign(KILL, (4,)),
    "all_rank_kills": Campaign(KILL, (3,), shards=3, is_for_all=True),
    "resizes": Campaign(KILL, (1, 2, 4)),
    "signals": Campaign((signal.SIGTERM,), options=()),
    "rank_signals": Campaign((signal.SIGTERM, signal.SIGUSR1), (4,), options=()),
}

# How often each kind strikes; the points of the last three, at equal distances, are of each scenario of tests/crash.py.
NUMBERS = {
    "kills": 200, "loader_kills": 80, "rank_kills": 40, "all_rank_kills": 5, "resizes": 15, "signals": 40,
    "rank_signals": 10, "faults": 20, "bitflips": 2000,
}  # fmt: skip
POINTS = {"crash_points": 60, "failing_calls": 30, "power_loss": 50}


def flip_bits(content: bytes, bits: Iterable[int]) -> tuple[int, list[int]]:
    """Flip bits of a checkpoint, one at a time; return the number of refusals, and where wrong data was read."""
    expected, refusals, accepted = flatten(load_checkpoint(content, "it")), 0, []
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = flatten(check_schema(load_checkpoint(bytes(damaged), "it"), "it"))
        except UserError:
            refusals += 1
        else:
            accepted += [bit] * bool(unequal(found, expected))
    return refusals, accepted


class Chaos:
    """Campaigns of faults against runs of one recipe, each run removed when it has been compared; their outcomes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.counts, self.problems = random.Random(seed), Counter(), []
        self.images = write_images(folder / "images", {"train": [11, 10, 8], "val": [3, 2, 2]})
        self.runs, self.out = Runs(self.images, folder / "runs", OPTIONS), folder / "runs" / "out"
        self.references, self.duration_s = {}, {}
        run_ranks(print, 1, log_folder=folder)  # starts the server that forks ranks, whose time is not a run's

    def note(self, outcome: str, text: str) -> None:
        self.counts[outcome] += 1
        self.problems.append(text)

    def run(self, kind: str, number: int) -> None:
        self.campaign(kind, number) if kind in CAMPAIGNS else getattr(self, kind)(number)

    def reference(self, campaign: Campaign) -> None:
        key = campaign.shards, campaign.options
        for size in {1, *campaign.world_sizes}:
            if (size, *key) not in self.duration_s:
                start = time.monotonic()
                self.runs.run("out", size, *campaign.options, shards=campaign.shards).check()
                self.duration_s[size, *key] = time.monotonic() - start
                self.references.setdefault(key, Ending(self.out, has_same_saves=campaign.has_same_saves))
                self.compare(campaign, f"an undisturbed run on {size}")

    def compare(self, campaign: Campaign, what: str) -> None:
        expected = self.references[campaign.shards, campaign.options]
        differences = Ending(self.out, has_same_saves=campaign.has_same_saves).differences(expected)
        if differences:
            self.note("different", f"{what}: {'; '.join(differences)}")
        shutil.rmtree(self.out)

    def note_loss(self, before: int) -> int:
        """Count truncated files and steps that went back; return the newest step that is safe."""
        newest = -1
        for path in self.out.glob("checkpoint-*.pth"):
            try:
                newest = max(newest, load_whole(path)["step"])
            except UserError as error:
                self.note("lost", f"{path.name}: damaged under its final name: {error}")
        if newest < before:
            self.note("lost", f"step {before} was safe, and then only {newest}")
        return newest

    def campaign(self, kind: str, number: int) -> None:
        campaign, safe, attempts, is_over = CAMPAIGNS[kind], -1, 0, True
        self.reference(campaign)
        while self.counts[kind] < number or not is_over:
            attempts += 1
            if attempts > 5 * number + 40:
                self.note("different", f"{kind}: only {self.counts[kind]} faults struck in {attempts} attempts")
                return
            size = self.rng.choice(campaign.world_sizes)
            duration_s = self.duration_s[size, campaign.shards, campaign.options]
            strikes = campaign.strike(self.rng, duration_s, size) if self.counts[kind] < number else []
            outcome = self.runs.run("out", size, *campaign.options, shards=campaign.shards, strikes=strikes)
            state = self.runs.status("out").get("state")
            safe = self.note_loss(safe)
            is_over = outcome.codes == [0] * size and state == "finished"
            if is_over:
                self.compare(campaign, kind)
                safe = -1
                continue
            self.counts[kind] += 1
            if state != "preempted" and all(code >= 0 for code in outcome.codes):
                self.note("lost", f"{kind}: ended by itself:\n{outcome.output[-2000:]}")
                return

    def bitflips(self, number: int) -> None:
        self.runs.run("out", 1, "--epochs", 2).check()
        content = (self.out / "checkpoint.pth").read_bytes()
        _, accepted = flip_bits(content, [self.rng.randrange(8 * len(content)) for _ in range(number)])
        self.counts["bitflips"] += number
        for bit in accepted:
            self.note("lost", f"bit {bit} flipped: wrong values accepted")
        shutil.rmtree(self.out)

    def faults(self, number: int) -> None:
        """Strike runs with random faults of the table in tests/faults.py, and resume them on 1, 2 or 4 processes."""
        runs = faults.FaultyRuns(self.images, self.runs.folder / "faults", faults.OPTIONS)
        for count in range(number):
            what = self.rng.choice(list(faults.FAULTS))
            try:
                runs.strike(what, f"fault{count}", self.rng.choice([1, 2, 4]))
            except AssertionError as error:
                self.note("different", f"{what}: {str(error)[-2000:]}")
            self.counts["faults"] += 1


def run_campaign(kind: str, number: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    torch.set_num_threads(1)
    chaos = Chaos(folder / kind, seed)
    chaos.run(kind, number)
    return chaos.counts, chaos.problems


def run_scenario(index: int, most: dict[str, int], folder: Path) -> tuple[Counter, list[str]]:
    torch.set_num_threads(1)
    rng = random.Random(index)
    trial = Trial(SCENARIOS[index], folder / f"scenario{index}")
    kinds = {
        "crash_points": (Trial.kill_points, Trial.kill),
        "failing_calls": (Trial.failures, Trial.fail),
        "power_loss": (possible_states, lose_power),
    }
    for kind, number in most.items():
        find, strike = kinds[kind]
        points, start = find(trial), rng.random()
        for place in sorted({int((count + start) / number * len(points)) for count in range(number)}):
            trial.attempt(kind, strike, points[place])
    return trial.counts, trial.problems


def main() -> None:
    numbers = {**NUMBERS, **POINTS}
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", metavar="KIND=N", nargs="*", help=f"only these, so often; default {numbers}")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of all that is random; default 0")
    args = parser.parse_args()
    if args.kinds:
        numbers = {kind: int(number) for kind, number in (each.split("=") for each in args.kinds)}
    points = {kind: numbers.pop(kind) for kind in POINTS if kind in numbers}
    start, counts, problems = time.monotonic(), Counter(), []
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, ProcessPoolExecutor(2) as pool:
        folder = Path(name)
        work = [pool.submit(run_campaign, kind, number, args.seed, folder) for kind, number in numbers.items()]
        work += [pool.submit(run_scenario, index, points, folder) for index in range(len(SCENARIOS)) if points]
        for future in work:
            more, found = future.result()
            counts += more
            problems += found
    print(*problems, f"{(time.monotonic() - start) / 60:.0f} minutes", sep="\n")
    print("chaos:", *(f"{kind}={counts[kind]}" for kind in [*numbers, *points, "lost", "different"]))
    sys.exit(bool(problems) or any(counts[kind] < numbers[kind] for kind in numbers))


if __name__ == "__main__":
    main()
