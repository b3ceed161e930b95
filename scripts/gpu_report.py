"""Measure what needs a GPU: its tests, steps, scaling, a resume, and the first steps of a recipe; 20 minutes at most.

Writes one JSON file and, for a GPU, the table in docs/performance.md. What could not be measured gets no row.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpointing.archive import load_checkpoint
from checkpointing.guard import describe_environment, describe_processor
from distributed.collectives import count_cores
from errors import UserError, counted
from monitoring.monitor import read_records
from scripts import tool
from settings.config import find_device

PROG = "python -m scripts.gpu_report"
EXAMPLES = """examples:
  python -m scripts.gpu_report                                  on every GPU of this machine (make gpu-report)
  python -m scripts.gpu_report --device cpu --model resnet18 --crop 32 --batch-size 4 --steps 3    to try it
"""
LIMIT_S = 20 * 60
BEGIN, END = "<!-- gpu: python -m scripts.gpu_report -->\n", "<!-- end of gpu -->\n"
PRECISIONS = ["", "--tf32", "--amp", "--amp --amp-dtype bfloat16 --channels-last",
              "--amp --amp-dtype bfloat16 --channels-last --compile"]  # fmt: skip


class Row(NamedTuple):
    """One measurement: commands to run one after the other, and what reads the result from the folder they wrote to."""

    name: str
    commands: list[str]  # what follows `python`
    read: Callable[[Path], str | None]  # None if nothing was measured


def read_tests(folder: Path) -> str | None:
    """Return the counts of the tests that ran; those that were skipped for want of a GPU did not."""
    suite = next(ElementTree.parse(folder / "tests.xml").iter("testsuite"))
    skipped, bad = int(suite.get("skipped")), int(suite.get("failures")) + int(suite.get("errors"))
    passed = int(suite.get("tests")) - skipped - bad
    return f"{passed} passed, {bad} failed, {skipped} skipped" if passed + bad else None


def read_step(folder: Path) -> str:
    """Return the rate of our step, and its ratio to the bare one."""
    found = json.loads((folder / "step.json").read_text())
    middle, low, high, *_ = found["ratios"]["ours / bare"]
    rate = statistics.median(found["rates"]["ours"])
    return f"{rate:,.0f} images/s a process; ours / bare {middle:.3f} ({low:.3f} to {high:.3f})"


def read_resume(folder: Path) -> str:
    """Compare the weights of a run with those of one that ended after an epoch and was resumed."""
    whole, resumed = (load_checkpoint(folder / name / "checkpoint.pth", name)["model"] for name in ("whole", "resumed"))
    differing = sum(not torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    return f"{differing} of {counted(len(whole), 'tensor')} differ" if differing else "the same bits"


def read_recipe(folder: Path) -> str:
    """Return the rate, the share of time that waited for data, and the memory of a run's lines but the first."""
    records = [record for record in read_records(folder / "recipe") if record["kind"] == "train"][1:]
    rate, wait = (statistics.median(record[name] for record in records) for name in ("images_per_s", "data_wait"))
    return f"{rate:,.0f} images/s, {wait:.1%} waiting for data, {records[-1]['memory_gib']:.1f} GiB"


def build_rows(options: Namespace, folder: Path, num_gpus: int) -> Iterator[Row]:
    """Yield the measurements for this machine."""
    there, ranks, lines = shlex.quote(str(folder)), max(num_gpus, 1), max(options.steps // (5 if num_gpus else 10), 1)
    crop = f"--train-crop-size {options.crop} --val-crop-size {options.crop}" if options.crop else ""
    model = f"--model {shlex.quote(options.model)} --batch-size {options.batch_size} --device {options.device} {crop}"
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={ranks}" if num_gpus > 1 else ""
    yield Row("tests of `-m gpu`", [f"-m pytest -q -m gpu --junitxml {there}/tests.xml"], read_tests)
    # With --workers 0 a compiled step waits for the loop to load: 0.61 of the bare one on an H200; 0.92 with workers.
    workers = min(count_cores() // ranks, 16) if num_gpus else 0
    step = f"-m scripts.benchmark step --rounds 5 --steps {lines} --workers {workers}"
    step += f" --json {there}/step.json {model}"
    for precision in PRECISIONS if num_gpus else PRECISIONS[:1]:
        yield Row(f"step, {precision or 'float32'}", [f"{step} {precision}"], read_step)
    if launcher:
        yield Row(f"step on {ranks} GPUs, {PRECISIONS[3]}", [f"{launcher} {step} {PRECISIONS[3]}"], read_step)
    run = f"train.py --use-deterministic-algorithms {model} --synthetic {20 * options.batch_size} --output-dir {there}"
    whole, first = f"{run}/whole --epochs 2", f"{run}/resumed --epochs 1"
    again = f"{run}/resumed --epochs 2 --resume auto --allow-change epochs"
    yield Row("a run of two epochs, and one resumed after the first", [whole, first, again], read_resume)
    batch = ranks * options.batch_size
    recipe = f"train.py --recipe resnet50-fast16 --epochs 1 --lr-warmup-epochs 0 --crop-ramp-epochs 0 1 {model}"
    recipe += f" --lr-scaling linear --global-batch-size {batch} --synthetic {options.steps * batch}"
    recipe += f" --train-crop-size-min {options.crop}" if options.crop else ""
    recipe += f" --print-freq {lines} --output-dir {there}/recipe"
    yield Row("`resnet50-fast16`, made-up images", [f"{launcher} {recipe}"], read_recipe)


def measure(row: Row, folder: Path, end_s: float) -> str | None:
    """Run a row's commands; return its result, or None and say why there is none."""
    for command in row.commands:
        try:
            words, left_s = [sys.executable, *shlex.split(command)], max(end_s - time.monotonic(), 1)
            done = subprocess.run(words, cwd=tool.ROOT, capture_output=True, text=True, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"{row.name}: not measured: the {LIMIT_S // 60} minutes are over")
            return None
        if done.returncode and row.read is not read_tests:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            print(f"{row.name}: not measured: exit code {done.returncode}: {last}")
            return None
    try:
        result = row.read(folder)
    except (OSError, ValueError, LookupError, UserError) as error:
        print(f"{row.name}: not measured: {type(error).__name__}: {error}")
        return None
    print(f"{row.name}: {result or 'not measured: every test was skipped'}", flush=True)
    return result


def write_report(options: Namespace) -> dict[str, Any]:
    """Measure all rows, and write the JSON file and, for a GPU, the table."""
    num_gpus = torch.cuda.device_count() if options.device.startswith("cuda") else 0
    end_s = time.monotonic() + LIMIT_S
    environment = describe_environment(Namespace(device=options.device, world_size=max(num_gpus, 1)))
    rows, report = {}, {"date": time.strftime("%Y-%m-%d"), "processor": describe_processor()}
    report |= {"environment": environment, "device": options.device, "rows": rows}
    with tempfile.TemporaryDirectory() as name:
        for row in build_rows(options, Path(name), num_gpus):
            result = measure(row, Path(name), end_s)
            if result is not None:
                rows[row.name] = result
            tool.write_report(options.json, report)
    if num_gpus:
        place = f"{num_gpus} x {environment['gpu']}, torch {environment['torch']}, {options.model}"
        table = "".join(f"| {name} | {result} |\n" for name, result in rows.items())
        table = f"| {place}, batch {options.batch_size} | result |\n|---|---|\n{table}"
        tool.replace_between(tool.ROOT / "docs" / "performance.md", BEGIN, END, table)
    print(f"wrote {options.json}{' and the table in docs/performance.md' if num_gpus else ''}")
    return rows


def main() -> None:
    """Measure what the command line asks for."""
    parser = tool.build_parser(PROG, "[options]", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--device", metavar="DEVICE", default="cuda", help="cuda, or cpu to try the command (default: cuda)")
    add("--model", metavar="NAME", default="resnet50", help="the model (default: resnet50)")
    add("--batch-size", metavar="N", type=tool.positive, default=256, help="images a process (default: 256)")
    add("--crop", metavar="PX", type=tool.positive, help="size of the images (default: 224, and the recipe's)")
    add("--steps", metavar="N", type=tool.positive, default=200, help="steps of the recipe (default: 200)")
    json_help = "the results (default: gpu-report.json)"
    add("--json", metavar="FILE", type=tool.output_file(".json"), default=Path("gpu-report.json"), help=json_help)

    def work() -> None:
        options = parser.parse_args()
        options.device = find_device(options)
        if not write_report(options):
            raise UserError("nothing could be measured")

    tool.run(PROG, work, "interrupted; what was measured is in the --json file")


if __name__ == "__main__":
    main()
