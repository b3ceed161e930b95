"""Rounds of kills, failing calls and power losses over all scenarios: `python -m tests.rounds crash_points`."""

import argparse
import pickle
import sys
import tempfile
import time
from collections import Counter
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


def run_scenario(kind: str, scenario: Scenario, folder: Path, most: int | None, share: tuple[int, int]) -> Trial:
    """Try the points of one scenario: every n-th from the k-th on, with share = (k, n)."""
    find, try_point = KINDS[kind]
    trial = Trial(scenario, folder)
    points = find(trial)
    trial.counts["points"] = len(points)
    for point in spread(points, most)[share[0] :: share[1]]:
        try_point(trial, point)
    return trial


def _work(kind: str, scenarios: list[int], folder: str, most: int | None, share: tuple[int, int], result: str) -> None:
    """Do one worker's share, and write down what came of it; runs in a child of the warm server."""
    counts, problems = Counter(), []
    for number in scenarios:
        start, scenario = time.monotonic(), SCENARIOS[number]
        trial = run_scenario(kind, scenario, Path(folder) / str(number), most, share)
        counts += trial.counts
        problems += trial.problems
        if not share[0]:
            print(
                f"{kind}, {scenario.name}: {trial.counts['points']} points, of which {trial.counts[kind]} tried here, "
                f"{len(trial.problems)} problems, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    Path(result).write_bytes(pickle.dumps((counts, [tuple(problem) for problem in problems])))


def run_round(
    kind: str, folder: Path, most: int | None = None, num_workers: int = 2, only: str = ""
) -> tuple[Counter, list[str]]:
    """Try the points of a kind in all scenarios, on several processes; return the counts and the problems.

    Args:
        kind: of `KINDS`.
        folder: an empty one.
        most: how many points of a scenario, at equal distances; None for all.
        num_workers: processes.
        only: only scenarios whose names hold this.
    """
    chosen = [number for number, scenario in enumerate(SCENARIOS) if only in scenario.name]
    workers = []
    for index in range(num_workers):
        place = folder / f"worker{index}"
        place.mkdir(parents=True)
        arguments = (kind, chosen, str(place), most, (index, num_workers), str(folder / f"result{index}"))
        workers.append(_context.Process(target=_work, args=arguments))
        workers[-1].start()
    counts, problems = Counter(), []
    for index, worker in enumerate(workers):
        worker.join()
        assert worker.exitcode == 0, f"worker {index} ended with {worker.exitcode}"
        more, found = pickle.loads((folder / f"result{index}").read_bytes())
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
        counts, problems = run_round(args.kind, Path(folder), args.most, args.workers, args.only)
    for problem in problems:
        print(problem)
    print(f"{args.kind}: {counts[args.kind]} tried, lost={counts['lost']}, {len(problems)} kinds of problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
