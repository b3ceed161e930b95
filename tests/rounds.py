"""Rounds of kills, failing calls and power losses over all scenarios: `python -m tests.rounds crash_points`."""

import argparse
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.crash import SCENARIOS, Problem, Scenario, Trial, summarize
from tests.power_loss import lose_power, power_losses
from tests.ranks import _context

# How the points of a kind are found, and how one is tried.
KINDS = {
    "crash_points": (Trial.kill_points, Trial.kill),
    "failing_calls": (Trial.failures, Trial.fail),
    "power_loss": (power_losses, lose_power),
}


def spread(points: list, most: int | None) -> list:
    """Return all points, or so many of them at equal distances."""
    if most is None or len(points) <= most:
        return points
    return [points[index * len(points) // most] for index in range(most)]


def run_scenario(scenario: Scenario, folder: Path, most: dict[str, int | None], share: tuple[int, int]) -> Trial:
    """Try the points of one scenario: every n-th of each kind from the k-th on, with share = (k, n)."""
    trial = Trial(scenario, folder)
    for kind, most_of_kind in most.items():
        find, try_point = KINDS[kind]
        for point in spread(find(trial), most_of_kind)[share[0] :: share[1]]:
            try_point(trial, point)
    return trial


def _work(most: dict, scenarios: list[int], folder: str, share: tuple[int, int], result: str) -> None:
    """Do one worker's share, and write down what came of it; runs in a child of the warm server."""
    counts, problems = Counter(), []
    start = time.monotonic()
    for number in scenarios:
        trial = run_scenario(SCENARIOS[number], Path(folder) / str(number), most, share)
        counts += trial.counts
        problems += trial.problems
        shutil.rmtree(trial.place.disk.parent)
        tried = ", ".join(f"{kind} {counts[kind]}" for kind in most)
        print(f"{tried}: by worker {share[0]}, {time.monotonic() - start:.0f} s", flush=True)
    Path(result).write_bytes(pickle.dumps((counts, [tuple(problem) for problem in problems])))


class Rounds:
    """Rounds of some kinds over the scenarios, on worker processes that start at once.

    Args:
        most: by kind, how many points of a scenario to try, at equal distances; None for all.
        folder: an empty one.
        num_workers: processes.
        chosen: the numbers of the scenarios; None for all.
    """

    def __init__(
        self, most: dict[str, int | None], folder: Path, num_workers: int = 2, chosen: Sequence[int] | None = None
    ) -> None:
        chosen = range(len(SCENARIOS)) if chosen is None else chosen
        folder.mkdir(exist_ok=True)
        self.results = [folder / f"result{index}" for index in range(num_workers)]
        self.workers = []
        for index, result in enumerate(self.results):
            arguments = (most, list(chosen), str(folder / f"worker{index}"), (index, num_workers), str(result))
            self.workers.append(_context.Process(target=_work, args=arguments))
            self.workers[-1].start()

    def finish(self) -> tuple[Counter, list[str]]:
        """Wait for the workers; return the counts and the problems."""
        counts, problems = Counter(), []
        for worker, result in zip(self.workers, self.results, strict=True):
            worker.join()
            assert worker.exitcode == 0, f"a worker ended with {worker.exitcode}"
            more, found = pickle.loads(result.read_bytes())
            counts += more
            problems += [Problem(*fields) for fields in found]
        return counts, summarize(problems)


def main() -> None:
    """Run a round and print what it found; exit 1 where that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.rounds", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--only", default="", help="scenarios whose names hold this")
    parser.add_argument("--most", metavar="N", type=int, help="points of a scenario, at equal distances; default all")
    parser.add_argument("--workers", metavar="N", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rounds-") as folder:
        chosen = [number for number, scenario in enumerate(SCENARIOS) if args.only in scenario.name]
        counts, problems = Rounds({args.kind: args.most}, Path(folder), args.workers, chosen).finish()
    for problem in problems:
        print(problem)
    print(f"{args.kind}: {counts[args.kind]} tried, lost={counts['lost']}, {len(problems)} kinds of problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
