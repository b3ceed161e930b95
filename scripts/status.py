"""Say of each run under some folders whether it lives, and how far it is.

Examples:
  python -m scripts.status runs                                   # every run in runs/, however deep
  python -m scripts.status runs/resnet50 --json

A run renews its status.json every 20 seconds. States beside those of the file (docs/runs.md): `stale`, no renewal for
--stale seconds: the process was killed or stopped, or its disk hangs; `stuck`, no step or batch for --stuck seconds.
The exit code is 1 if a run is stale, stuck, failed or refused, else 0.
"""

import argparse
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from errors import UserError, duration
from files import is_running, read_json
from monitoring.gauges import slow_rank
from monitoring.monitor import OF_TRAINING, read_records
from scripts.tool import as_json, as_path, build_parser, positive, run
from settings.tables import aligned

PROG = "python -m scripts.status"
BAD = ("stale", "stuck", "failed", "refused", "unknown")


def find_runs(roots: list[Path]) -> list[Path]:
    """Return the folders that hold a status.json, in order; UserError for a root without any."""
    found = []
    for root in roots:
        folders = sorted(Path(folder) for folder, _, files in os.walk(root) if "status.json" in files)
        if not folders:
            raise UserError(f"{root} holds no status.json; give the --output-dir of runs, or a folder above them")
        found += folders
    return list(dict.fromkeys(found))


def describe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the state of a run, the ages of its heartbeat and progress in seconds, and its newest result."""
    status, now_s = read_json(folder / "status.json"), time.time()
    numbers = {name: value for name, value in status.items() if isinstance(value, int | float) and name != "pid"}
    number = {name: value for name, value in numbers.items() if abs(value) < 1 << 62}  # no NaN, which JSON lacks
    ages = {f"{name}_age_s": now_s - number[name] for name in ("heartbeat", "progress") if name in number}
    state, reason = str(status.get("state", "unknown")), str(status.get("reason", ""))
    if state == "running" and ages.get("heartbeat_age_s", options.stale + 1) > options.stale:
        state, reason = "stale", process_of(status)
    elif state == "running" and ages.get("progress_age_s", 0) > options.stuck:
        state, reason = "stuck", f"no step or batch for {duration(ages['progress_age_s'])}"
    for name in numbers.keys() - number.keys():
        state, reason = "unknown", f"status.json has no usable number as {name}"
    fields = {name: number.get(name) for name in ("step", "steps", "images_per_s", "left_s")}
    records = []
    with suppress(OSError, UserError):
        records = read_records(folder)
    computing_s = computing(records)
    if state == "running" and computing_s:
        reason = slow_rank(computing_s)
    more = {"computing_s": computing_s, "result": newest_result(records)}
    return {"run": str(folder), "state": state, "reason": reason, **ages, **fields, **more}


def process_of(status: dict[str, Any]) -> str:
    """Say whether the process of a status file is there, if this is its machine."""
    pid, host = status.get("pid"), status.get("host")
    where = f"process {pid} on {host}"
    if host != socket.gethostname() or type(pid) is not int:
        return where
    return f"{where} is {'there' if is_running(pid) else 'gone'}"


def computing(records: list[dict[str, Any]]) -> list[float]:
    """Return the seconds that each rank computed in a run's newest epoch; nothing if it has no such record."""
    found = [each["computing_s"] for each in records if isinstance(each.get("computing_s"), list)]
    return found[-1] if found and all(type(each) is float for each in found[-1]) else []


def newest_result(records: list[dict[str, Any]]) -> str:
    """Return a run's newest Acc@1 or loss in words; nothing if it has no records."""
    results = [each for each in records if each["kind"] not in OF_TRAINING] or records or [{}]
    newest = results[-1]
    for name in ("acc1", "map", "loss"):
        if isinstance(newest.get(name), int | float):
            return f"{newest['kind']} {name} {newest[name]:.4g}" + (f" n={newest['n']}" if "n" in newest else "")
    return ""


def table_of(runs: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    rows = [["run", "state", "heartbeat", "step", "left", "newest result", "reason"]]
    for each in runs:
        heartbeat, left = (duration(each.get(name) or float("nan")) for name in ("heartbeat_age_s", "left_s"))
        steps = "/".join(f"{each[name]:,}" for name in ("step", "steps") if each[name] is not None)
        left = left if each["state"] == "running" else "--"
        rows.append([each["run"], each["state"], heartbeat, steps, left, each["result"], each["reason"]])
    return aligned(rows, to_left=(0, 1, 5, 6))


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    parser = build_parser(PROG, "RUNS... [options]", __doc__)
    add = parser.add_argument
    add("runs", metavar="RUNS", nargs="+", type=as_path, help="an --output-dir, or a folder above several")
    words = "seconds without a renewal after which a run is stale (default: 60)"
    add("--stale", metavar="S", type=positive, default=60, help=words)
    words = "seconds without a step or batch after which a run is stuck (default: 600)"
    add("--stuck", metavar="S", type=positive, default=600, help=words)
    add("--json", action="store_true", help="print a list of objects in place of the table")
    return parser


def work() -> int:
    """Print the runs of the command line; return the exit code."""
    options = get_args_parser().parse_args()
    runs = [describe(folder, options) for folder in find_runs(options.runs)]
    print(as_json(runs).decode().rstrip() if options.json else "\n".join(table_of(runs)))
    return int(any(each["state"] in BAD for each in runs))


def main() -> None:
    """Run the command line."""
    run(PROG, work, "interrupted; nothing was changed")


if __name__ == "__main__":
    main()
