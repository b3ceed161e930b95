"""Break runs on purpose and count what is lost: `make chaos`, or `python -m tests.chaos --kills 100`.

The oracle is an uninterrupted run: the folder of a broken and resumed run has to end like its (tests/endings.py).
Beside random faults in whole runs, every point of a very small one is tried (tests/rounds.py). Everything random is
seeded; the faults stand in the processes, not in the code.
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
from pathlib import Path

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


class Chaos:
    """Campaigns of faults against runs of one recipe, and what came of them.

    Args:
        folder: where the runs live; each is removed when it has been compared.
        seed: of all that is random.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.counts = Counter()
        self.problems = []
        self.images = write_images(folder / "images", {"train": [11, 10, 8], "val": [3, 2, 2]})
        self.numbers = itertools.count()
        self.references, self.duration_s = {}, {}

    def train(self, out: Path, world_size: int, *extra: str, shards: int = 4, faults=(), strikes=()):
        """Run train.py once on `world_size` processes; return what became of them."""
        batch = ["--batch-size", str(8 // shards), "--global-batch-size", str(8 // shards * shards)]
        argv = ["--data-path", str(self.images), "--output-dir", str(out), *OPTIONS, *batch, *extra]
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return run_ranks(train_rank, world_size, argv, list(faults), log_folder=logs, strikes=strikes)

    def reference(self, world_size: int, shards: int, extra: tuple[str, ...] = ()) -> None:
        """Run an uninterrupted run, and take its time on so many processes, if that has not been done."""
        key = shards, extra
        if key not in self.references:
            out = self.folder / f"reference{next(self.numbers)}"
            self.train(out, 1, *extra, shards=shards).check()
            self.references[key] = Ending(out, has_same_saves=has_same_saves(extra))
            if extra:
                self.reference(1, shards)
                # How often a run saves, and on how many loader processes, changes nothing that it computes.
                differences = self.references[key].differences(self.references[shards, ()])
                self.problems += [text for text in differences if text.startswith(("checkpoint.pth", "metrics", ".:"))]
            shutil.rmtree(out)
        if (world_size, *key) not in self.duration_s:
            out = self.folder / f"timed{next(self.numbers)}"
            start = time.monotonic()
            self.train(out, world_size, *extra, shards=shards).check()
            self.duration_s[world_size, *key] = time.monotonic() - start
            self.compare(out, shards, f"an undisturbed run on {world_size}", extra)

    def compare(self, out: Path, shards: int, what: str, extra: tuple[str, ...] = ()) -> None:
        """Count a finished run that differs from the uninterrupted one, and remove it."""
        differences = Ending(out, has_same_saves=has_same_saves(extra)).differences(self.references[shards, extra])
        if differences:
            self.counts["different"] += 1
            self.problems.append(f"{what}: {'; '.join(differences)}")
        shutil.rmtree(out)

    def note_loss(self, out: Path, before: int) -> int:
        """Count torn files and steps that went back; return the newest step that is safe."""
        newest = -1
        for path in out.glob("checkpoint-*.pth"):
            try:
                newest = max(newest, load_whole(path)["step"])
            except UserError as error:
                self.counts["lost"] += 1
                self.problems.append(f"torn under its final name: {error}")
        if newest < before:
            self.counts["lost"] += 1
            self.problems.append(f"step {before} was safe, and then only {newest}")
        return newest

    def campaign(
        self, kind: str, number: int, world_size: int | tuple, *extra: str, shards: int = 4, **trouble
    ) -> None:
        """Break runs until `number` faults of a kind have struck; each run is resumed until it ends, and compared.

        Args:
            kind: the count.
            number: how many faults.
            world_size: processes of a run; or several, of which each start takes one.
            extra: further options.
            shards: of the global batch.
            trouble: `strike(duration_s)` returns signals as `run_ranks` takes them, or `fault(attempt)` a fault.
        """
        sizes = world_size if isinstance(world_size, tuple) else (world_size,)
        for size in sizes:
            self.reference(size, shards, extra)
        start, struck, attempts = time.monotonic(), 0, 0
        while struck < number:
            out, safe, is_over = self.folder / f"run{next(self.numbers)}", -1, False
            while not is_over:
                attempts += 1
                if attempts > 4 * number + 40:
                    self.problems.append(f"{kind}: only {struck} of {number} faults struck in {attempts} attempts")
                    return
                size = self.rng.choice(sizes)
                duration_s = self.duration_s[size, shards, extra]
                strikes = trouble["strike"](duration_s) if "strike" in trouble and struck < number else []
                faults = [trouble["fault"](struck)] if "fault" in trouble and struck < number else []
                outcome = self.train(out, size, *extra, shards=shards, strikes=strikes, faults=faults)
                is_over = status(out).get("state") == "finished" and outcome.codes == [0] * size
                struck += not is_over
                self.counts[kind] += not is_over
                if not is_over and struck % 50 == 0:
                    print(f"{kind}: {struck} of {number}, {time.monotonic() - start:.0f} s", flush=True)
                safe = self.note_loss(out, safe)
                if not is_over and not was_struck(outcome.codes, status(out)):
                    self.counts["lost"] += 1
                    self.problems.append(f"{kind}: ended by itself:\n{outcome.output[-2000:]}")
                    return
            self.compare(out, shards, kind, extra)
        print(
            f"{kind}: {struck} struck in {attempts} starts on {world_size}, {time.monotonic() - start:.0f} s",
            flush=True,
        )

    def kill_one(self, duration_s: float, world_size: int = 1) -> list[tuple]:
        """Return one SIGKILL to a random rank at a random time.

        Mostly before a resumed run, which is shorter than a whole one, has ended; that it gets on all the same is
        what the campaign's limit of attempts checks.
        """
        return [(self.rng.uniform(0, 0.6 * duration_s), self.rng.randrange(world_size), signal.SIGKILL)]

    def kill_all(self, duration_s: float, world_size: int) -> list[tuple]:
        """Return a SIGKILL to every rank at one random time."""
        at_s = self.rng.uniform(0, duration_s)
        return [(at_s, rank, signal.SIGKILL) for rank in range(world_size)]

    def signal_one(self, duration_s: float, world_size: int = 1) -> list[tuple]:
        """Return a signal that asks for a stop, to a random rank at a random time."""
        number = self.rng.choice([signal.SIGTERM, signal.SIGUSR1]) if world_size > 1 else signal.SIGTERM
        return [(self.rng.uniform(0, duration_s), self.rng.randrange(world_size), number)]

    def kills(self, number: int) -> None:
        """SIGKILL one process at random moments, a third of the time with loader processes."""
        step = ["--checkpoint-steps", "1"]
        self.campaign("kills", number - number // 3, 1, *step, strike=self.kill_one)
        self.campaign("kills", number // 3, 1, *step, "--workers", "2", strike=self.kill_one)

    def rank_kills(self, number: int, number_of_all: int) -> None:
        """SIGKILL a random one of four ranks; then all of three at once."""
        step = ["--checkpoint-steps", "1"]
        self.campaign("rank_kills", number, 4, *step, strike=lambda duration_s: self.kill_one(duration_s, 4))
        self.campaign(
            "rank_kills", number_of_all, 3, *step, shards=3, strike=lambda duration_s: self.kill_all(duration_s, 3)
        )

    def signals(self, number: int, number_of_ranks: int) -> None:
        """Ask for a stop at random moments, with no saving but that at the ends of epochs: one process, one of four."""
        self.campaign("signals", number, 1, strike=self.signal_one)
        self.campaign("signals", number_of_ranks, 4, strike=lambda duration_s: self.signal_one(duration_s, 4))

    def resizes(self, number: int) -> None:
        """Kill a run at random moments, and go on with it on 1, 2 or 4 processes, in random order."""
        self.campaign("resizes", number, (1, 2, 4), "--checkpoint-steps", "1", strike=self.kill_one)

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


def has_same_saves(extra: tuple[str, ...]) -> bool:
    """Tell whether a run saves at every step; if not, one that was told to stop has saved at other steps."""
    return "--checkpoint-steps" in extra


def status(out: Path) -> dict:
    """Return what status.json says; nothing where there is none yet."""
    path = out / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Run all campaigns and print the one line of counts; exit 1 where one is too small or anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    asked = {
        "kills": 1000, "rank-kills": 100, "all-rank-kills": 10, "resizes": 20, "signals": 50,
        "rank-signals": 20, "faults": 40, "bitflips": 3000,
    }  # fmt: skip
    for name, number in asked.items():
        parser.add_argument(f"--{name}", metavar="N", type=int, default=number, help=f"default {number}")
    for name, number in {"crash-points": 10_000, "failing-calls": 60, "power-loss": 120}.items():
        parser.add_argument(
            f"--{name}", metavar="N", type=int, default=number, help=f"of each scenario, at most; default {number}"
        )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of all that is random; default 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), args.seed)
        # Beside runs of one process, so that two cores have something to do.
        most = {"crash_points": args.crash_points, "failing_calls": args.failing_calls, "power_loss": args.power_loss}
        rounds = Rounds(most, Path(folder) / "rounds", num_workers=1)
        chaos.bitflips(args.bitflips)
        chaos.hostile()
        chaos.kills(args.kills)
        more, problems = rounds.finish()
        chaos.counts += more
        chaos.counts["different"] += len(problems)
        chaos.problems += problems
        chaos.signals(args.signals, args.rank_signals)
        chaos.resizes(args.resizes)
        chaos.rank_kills(args.rank_kills, args.all_rank_kills)
        chaos.faults(args.faults)
    names = ("kills", "rank_kills", "signals", "faults", "bitflips", *most)
    counts = {name: chaos.counts[name] for name in names}
    counts["rank_kills"] += chaos.counts["resizes"]
    bad = {name: chaos.counts[name] for name in ("lost", "different", "executed")}
    for problem in chaos.problems:
        print(problem)
    print("chaos: " + " ".join(f"{name}={number}" for name, number in {**counts, **bad}.items()))
    enough = {
        "kills": args.kills,
        "rank_kills": args.rank_kills + args.all_rank_kills + args.resizes,
        "signals": args.signals + args.rank_signals,
        "faults": args.faults,
        "bitflips": args.bitflips,
    }
    sys.exit(bool(chaos.problems) or any(bad.values()) or any(counts[name] < enough[name] for name in enough))


if __name__ == "__main__":
    main()
