"""Break runs on purpose and count what is lost: `make chaos`, or `python -m tests.chaos --kills 100`.

The oracle is an uninterrupted run: the folder of a broken and resumed run has to end like its (tests/endings.py).
Beside random faults in whole runs, and those of the table in tests/faults.py, every point of a very small run is tried
(tests/rounds.py). Everything random is seeded; the faults are injected into the processes, not into the code.
"""

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from checkpointing.archive import load_checkpoint
from errors import UserError
from tests.endings import Ending, equal, flatten, load_whole
from tests.faults import FAULTS, Runs
from tests.images import write_images
from tests.ranks import run_ranks, train_rank
from tests.rounds import Rounds
from tests.started import HOSTILE

# BatchNorm, stochastic depth, momentum, average, mixing, erasing, clipping; 4 epochs of 3 steps on 29 images.
OPTIONS = """
    --model timm/tiny_test --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --device cpu --workers 0
    --stochastic-depth 0.1 --random-erase 0.3 --mixup-alpha 0.2 --cutmix-alpha 1.0 --label-smoothing 0.1
    --model-ema --model-ema-steps 2 --model-ema-decay 0.9 --lr 0.05 --lr-warmup-epochs 1 --clip-grad-norm 1.0
    --epochs 4 --print-freq 2 --lr-scheduler cosineannealinglr --use-deterministic-algorithms --resume auto
""".split()


def kill_one(rng: random.Random, duration_s: float, world_size: int) -> list[tuple]:
    """Return one SIGKILL to a random rank at a random time, mostly before a resumed run has ended."""
    return [(rng.uniform(0, 0.6 * duration_s), rng.randrange(world_size), signal.SIGKILL)]


def kill_all(rng: random.Random, duration_s: float, world_size: int) -> list[tuple]:
    """Return a SIGKILL to every rank at one random time."""
    at_s = rng.uniform(0, duration_s)
    return [(at_s, rank, signal.SIGKILL) for rank in range(world_size)]


def signal_one(rng: random.Random, duration_s: float, world_size: int) -> list[tuple]:
    """Return a signal that asks for a stop, to a random rank at a random time."""
    number = rng.choice([signal.SIGTERM, signal.SIGUSR1]) if world_size > 1 else signal.SIGTERM
    return [(rng.uniform(0, duration_s), rng.randrange(world_size), number)]


class Campaign(NamedTuple):
    """Random faults of a kind against runs of the recipe.

    Args:
        number: how many faults, by default.
        strike: returns signals as `run_ranks` takes them, from (random generator, duration of a run, world size).
        world_sizes: processes of a run; each start takes one of them.
        options: further options; without `--checkpoint-steps`, a run saves at the ends of epochs only.
        shards: of the global batch.
    """

    number: int
    strike: Callable[[random.Random, float, int], list[tuple]]
    world_sizes: tuple[int, ...] = (1,)
    options: tuple[str, ...] = ("--checkpoint-steps", "1")
    shards: int = 4

    @property
    def has_same_saves(self) -> bool:
        """Whether a run saves at every step; if not, one that was told to stop has saved at other steps."""
        return "--checkpoint-steps" in self.options


CAMPAIGNS = {
    "kills": Campaign(670, kill_one),
    "loader_kills": Campaign(330, kill_one, options=("--checkpoint-steps", "1", "--workers", "2")),
    "rank_kills": Campaign(100, kill_one, (4,)),
    "all_rank_kills": Campaign(10, kill_all, (3,), shards=3),
    "resizes": Campaign(20, kill_one, (1, 2, 4)),
    "signals": Campaign(50, signal_one, options=()),
    "rank_signals": Campaign(20, signal_one, (4,), options=()),
}


class Chaos:
    """Campaigns of faults against runs of one recipe, and their outcomes.

    Args:
        folder: where the runs live; each is removed when it has been compared.
        seed: of all that is random.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.counts, self.problems = Counter(), []
        self.images = write_images(folder / "images", {"train": [11, 10, 8], "val": [3, 2, 2]})
        self.numbers = itertools.count()
        self.references, self.duration_s = {}, {}

    def train(self, out: Path, world_size: int, *extra: str, shards: int = 4, strikes=()):
        """Run train.py once on `world_size` processes; return its outcome."""
        batch = ["--batch-size", str(8 // shards), "--global-batch-size", str(8 // shards * shards)]
        argv = ["--data-path", str(self.images), "--output-dir", str(out), *OPTIONS, *batch, *extra]
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return run_ranks(train_rank, world_size, argv, log_folder=logs, strikes=strikes)

    def reference(self, campaign: Campaign) -> None:
        """Run a campaign's run uninterrupted, and take its time on each number of processes, if that is not done."""
        key = campaign.shards, campaign.options
        for size in {1, *campaign.world_sizes}:
            if (size, *key) in self.duration_s:
                continue
            out, start = self.folder / f"reference{next(self.numbers)}", time.monotonic()
            self.train(out, size, *campaign.options, shards=campaign.shards).check()
            self.duration_s[size, *key] = time.monotonic() - start
            self.references.setdefault(key, Ending(out, has_same_saves=campaign.has_same_saves))
            self.compare(out, campaign, f"an undisturbed run on {size}")

    def compare(self, out: Path, campaign: Campaign, what: str) -> None:
        """Count a finished run that differs from the uninterrupted one, and remove it."""
        expected = self.references[campaign.shards, campaign.options]
        differences = Ending(out, has_same_saves=campaign.has_same_saves).differences(expected)
        if differences:
            self.counts["different"] += 1
            self.problems.append(f"{what}: {'; '.join(differences)}")
        shutil.rmtree(out)

    def note_loss(self, out: Path, before: int) -> int:
        """Count truncated files and steps that went back; return the newest step that is safe."""
        newest = -1
        for path in out.glob("checkpoint-*.pth"):
            try:
                newest = max(newest, load_whole(path)["step"])
            except UserError as error:
                self.counts["lost"] += 1
                self.problems.append(f"damaged under its final name: {error}")
        if newest < before:
            self.counts["lost"] += 1
            self.problems.append(f"step {before} was safe, and then only {newest}")
        return newest

    def campaign(self, kind: str, number: int) -> None:
        """Break runs until `number` faults of a kind have struck; each run is resumed until it ends, and compared."""
        campaign, start, attempts = CAMPAIGNS[kind], time.monotonic(), 0
        self.reference(campaign)
        while self.counts[kind] < number:
            out, safe, is_over = self.folder / f"run{next(self.numbers)}", -1, False
            while not is_over:
                attempts += 1
                if attempts > 4 * number + 40:
                    self.problems.append(f"{kind}: only {self.counts[kind]} faults struck in {attempts} attempts")
                    return
                size = self.rng.choice(campaign.world_sizes)
                duration_s = self.duration_s[size, campaign.shards, campaign.options]
                is_due = self.counts[kind] < number
                strikes = campaign.strike(self.rng, duration_s, size) if is_due else []
                outcome = self.train(out, size, *campaign.options, shards=campaign.shards, strikes=strikes)
                is_over = status(out).get("state") == "finished" and outcome.codes == [0] * size
                self.counts[kind] += not is_over
                safe = self.note_loss(out, safe)
                if not is_over and not was_struck(outcome.codes, status(out)):
                    self.counts["lost"] += 1
                    self.problems.append(f"{kind}: ended by itself:\n{outcome.output[-2000:]}")
                    return
            self.compare(out, campaign, kind)
        print(f"{kind}: {number} struck in {attempts} starts, {time.monotonic() - start:.0f} s", flush=True)

    def bitflips(self, number: int) -> None:
        """Flip single bits of a checkpoint: it must be refused, or hold what it held."""
        out = self.folder / "flipped"
        self.train(out, 1, "--epochs", "2").check()
        payload = (out / "checkpoint.pth").read_bytes()
        expected = flatten(load_checkpoint(payload, "whole"))
        start, refused = time.monotonic(), 0
        for _ in range(number):
            bit = self.rng.randrange(8 * len(payload))
            damaged = bytearray(payload)
            damaged[bit // 8] ^= 1 << bit % 8
            self.counts["bitflips"] += 1
            try:
                found = flatten(load_checkpoint(bytes(damaged), "damaged"))
            except UserError:
                refused += 1
                continue
            if not all(equal(value, found.get(name)) for name, value in expected.items()):
                self.counts["lost"] += 1
                self.problems.append(f"bit {bit} flipped: wrong values accepted")
        shutil.rmtree(out)
        print(
            f"bitflips: {number}, {refused} refused, the others harmless, {time.monotonic() - start:.0f} s", flush=True
        )

    def hostile(self) -> None:
        """Open files that try to run code, by `--resume auto` and by name."""
        for damage in HOSTILE:
            out = self.folder / damage.__name__
            out.mkdir()
            path = out / "checkpoint-00000003.pth"
            damage(path)
            self.train(out, 1)
            self.train(self.folder / f"{damage.__name__}-elsewhere", 1, "--resume", str(path))
            self.counts["executed"] += (out / "executed").exists()

    def faults(self, number: int) -> None:
        """Strike runs with random faults of the table in tests/faults.py, and resume them on 1, 2 or 4 processes."""
        runs = Runs(self.images, self.folder / "faults")
        runs.folder.mkdir()
        names, start = list(FAULTS), time.monotonic()
        for count in range(number):
            what = self.rng.choice(names)
            try:
                runs.strike(what, f"fault{count}", self.rng.choice([1, 2, 4]))
            except AssertionError as error:
                self.counts["different"] += 1
                self.problems.append(f"{what}: {str(error)[-2000:]}")
            self.counts["faults"] += 1
            shutil.rmtree(runs.folder / f"fault{count}", ignore_errors=True)
        print(f"faults: {number} of the table, {time.monotonic() - start:.0f} s", flush=True)


def was_struck(codes: list[int], record: dict) -> bool:
    """Tell whether a run ended by a signal: killed, or stopped as asked."""
    return any(code < 0 for code in codes) or record.get("state") == "preempted"


def status(out: Path) -> dict:
    """Return the content of status.json, or nothing where there is none yet."""
    path = out / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Run all campaigns and print the one line of counts; exit 1 where one is too small or anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    asked = {name: campaign.number for name, campaign in CAMPAIGNS.items()} | {"faults": 40, "bitflips": 3000}
    of_each_scenario = {"crash_points": 10_000, "failing_calls": 60, "power_loss": 120}
    for name, number in {**asked, **of_each_scenario}.items():
        more = "of each scenario, at most; " if name in of_each_scenario else ""
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar="N", type=int, default=number, help=f"{more}default {number}")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of all that is random; default 0")
    args = vars(parser.parse_args())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), args["seed"])
        # Beside runs of one process, so that two cores have something to do.
        rounds = Rounds({name: args[name] for name in of_each_scenario}, Path(folder) / "rounds", num_workers=1)
        chaos.bitflips(args["bitflips"])
        chaos.hostile()
        for kind in CAMPAIGNS:
            chaos.campaign(kind, args[kind])
        chaos.faults(args["faults"])
        more, problems = rounds.finish()
    counts = {name: (chaos.counts + more)[name] for name in (*asked, *of_each_scenario)}
    chaos.counts["different"] += len(problems)
    bad = {name: (chaos.counts + more)[name] for name in ("lost", "different", "executed")}
    problems += chaos.problems
    print(*problems, sep="\n")
    print("chaos: " + " ".join(f"{name}={number}" for name, number in {**counts, **bad}.items()))
    sys.exit(bool(problems) or any(bad.values()) or any(counts[name] < args[name] for name in asked))


if __name__ == "__main__":
    main()
