"""Measure what needs a GPU: its tests, steps, models, scaling, a resume; 20 minutes at most.

Writes one JSON file and, for a GPU, the table in docs/performance.md. What could not be measured gets no row. With
--data-path there are rows of real JPEGs; with TORCHVISION_REFERENCES, the folder of torchvision's references/
classification, also one of its own train.py. --only TEXT measures the rows whose names contain TEXT, and keeps the
others that --json holds of the same machine.

Where a GPU is there for minutes, --part measures a third of it in 4 minutes; a second call makes the rows that the
first one had no time for:
  1  the tests; a step of bfloat16, eager and compiled, without this or that, and the calls that wait
  2  float16, two more models, larger batches, optimizers, and the JPEGs of --data-path
  3  two trainings that end: the recipe imagenette, 5 and 20 epochs, on --data-path

Examples:
  python -m bench.gpu_report                                  on every GPU of this machine (make gpu-report)
  python -m bench.gpu_report --only vit_b_16                  the rows of one model alone
  python -m bench.gpu_report --data-path /data/imagenet       and rows of real JPEGs
  make gpu-report PART=3 DATA=data/imagenette                 the third part
  python -m bench.gpu_report --device cpu --model resnet18 --crop 32 --batch-size 4 --steps 20   to try it
"""

import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from checkpointing.archive import load_checkpoint
from checkpointing.guard import describe_environment, describe_processor
from distributed.collectives import count_cores
from errors import UserError, counted
from files import make_folder, read_json
from models.build import build_model
from monitoring.monitor import read_records
from scripts import tool
from settings import config, machine
from settings.options import DataOptions, DistributedOptions

PROG = "python -m bench.gpu_report"
LIMIT_S, PART_LIMIT_S = 20 * 60, 4 * 60
BEGIN, END = "<!-- gpu: python -m bench.gpu_report -->\n", "<!-- end of gpu -->\n"
BFLOAT16 = "--amp --amp-dtype bfloat16 --channels-last"
# Products in bfloat16 with sums in float32, without sparsity, TFLOP/s, by NVIDIA's data sheets. The first name counts
# that the card's own name contains.
PEAKS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362, "L4": 121,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
# Images/s in training that others have published, or that one may expect: card, model, processes, least, most, source.
_NVIDIA, _TIMM, _EXPECTED = "NVIDIA DeepLearningExamples, AMP", "timm's results/, AMP, NHWC", "expected of this card"
PUBLISHED = [
    ("A100", "resnet50", 1, 2470, 2470, _NVIDIA), ("A100", "resnet50", 8, 16621, 16621, _NVIDIA),
    ("RTX 3090", "resnet50", 1, 1218, 1218, _TIMM), ("RTX 3090", "vit_b_16", 1, 393, 393, _TIMM),
    ("RTX 3090", "convnext_tiny", 1, 819, 819, _TIMM), ("H[12]00", "resnet50", 1, 3200, 4500, _EXPECTED),
    ("H[12]00", "vit_b_16", 1, 1900, 2400, _EXPECTED), ("H[12]00", "convnext_tiny", 1, 2000, 3000, _EXPECTED),
]  # fmt: skip
# How a row's figures stand in the table.
FORMS = {
    "result": "{}", "images_per_s": "{:,.0f} images/s",
    "ours_per_bare": "ours / bare {0[0]:.3f} ({0[1]:.3f} to {0[2]:.3f})",
    "ratios": "{}", "start_s": "an epoch's start {:.2f} s", "waits": "calls that wait: {}",
    "efficiency": "{:.1%} of as many single ones", "data_wait": "{:.1%} waiting for data", "memory_gib": "{:.1f} GiB",
    "first_step_s": "first step {:.1f} s", "eval_images_per_s": "evaluation {:,.0f} images/s",
    "mfu": "{:.1%} of the card's peak", "published": "{}",
}  # fmt: skip


class Row(NamedTuple):
    """One measurement: commands to run in turn, and what reads its figures from the folder that they write to."""

    name: str
    commands: list[str]  # what follows `python`
    read: Callable[[Path], dict[str, Any]]  # figures by the names of FORMS; UserError if nothing was measured
    model: str | None = None  # whose share of the card's peak is of interest, on so many processes
    processes: int = 1
    single: str | None = None  # the row of the same command on one process
    part: int | None = None  # of --part


def read_tests(folder: Path) -> dict[str, Any]:
    """Return the counts of the tests that ran; those that were skipped for want of a GPU did not."""
    suite = next(ElementTree.parse(folder / "tests.xml").iter("testsuite"))
    skipped, bad = int(suite.get("skipped")), int(suite.get("failures")) + int(suite.get("errors"))
    passed = int(suite.get("tests")) - skipped - bad
    if not passed + bad:
        raise UserError("every test was skipped")
    return {"result": f"{passed} passed, {bad} failed, {skipped} skipped"}


def read_step(folder: Path) -> dict[str, Any]:
    """Return the rate of our steady step on a process, its ratio to the bare one, and what an epoch's start costs."""
    read = json.loads((folder / "step.json").read_text())
    ratios = dict(read["ratios"])
    found = {"images_per_s": statistics.median(read["rates"]["ours"])}
    found["ours_per_bare"] = ratios.pop("ours / bare")[:3]
    found["start_s"] = read["start_s"]["ours"]
    if ratios:
        found["ratios"] = ", ".join(f"{name} {values[0]:.3f}" for name, values in ratios.items())
    if "waits" in read:
        found["waits"] = ", ".join(f"{place} {count} times" for place, count in read["waits"].items()) or "none"
    return found


def read_training(name: str, folder: Path) -> dict[str, Any]:
    """Return the accuracy with which a run ended, and its hours."""
    last = [record for record in read_records(folder / name) if record["kind"] == "val"][-1]
    took = f"{60 * last['hours']:.1f} minutes"
    return {"result": f"Acc@1 {last['acc1']:.2f} of {counted(last['n'], 'image')} in {took}"}


def read_resume(folder: Path) -> dict[str, Any]:
    """Compare the weights of a run with those of one that ended after an epoch and was resumed."""
    whole, resumed = (load_checkpoint(folder / name / "checkpoint.pth", name)["model"] for name in ("whole", "resumed"))
    differing = sum(not torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    return {"result": f"{differing} of {counted(len(whole), 'tensor')} differ" if differing else "the same bits"}


def read_run(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of a run's records: of all lines but the first, which has the first step, and the last one."""
    records = read_records(folder / name)
    first, *lines = [record for record in records if record["kind"] == "train"]
    rate, wait = (statistics.median(line[field] for line in lines) for field in ("images_per_s", "data_wait"))
    batch = first["images"] / first["step"]
    first_s = first["images"] / first["images_per_s"] - (first["images"] - batch) / rate
    found = {"images_per_s": rate, "data_wait": wait, "memory_gib": lines[-1]["memory_gib"]}
    found["first_step_s"] = max(first_s, batch / rate)  # on a busy machine the other lines may be slower
    if records[-1]["kind"] == "val":  # after a compilation there are two epochs: the second evaluation is of interest
        took_s = 3600 * (records[-1]["hours"] - records[-2]["hours"])
        found["eval_images_per_s"] = records[-1]["n"] / took_s
    return found


def read_torchvisions(batch_size: int, folder: Path) -> dict[str, Any]:
    """Return the rate of torchvision's train.py by its seconds a step; its own img/s leaves out the wait for data."""
    lines = re.findall(r"^Epoch: .*time: ([\d.]+)  data: ([\d.]+)", (folder / "output.txt").read_text(), re.M)[1:]
    step_s, wait_s = (statistics.median(map(float, each)) for each in zip(*lines, strict=True))
    return {"images_per_s": batch_size / step_s, "data_wait": wait_s / step_s}


def link_images(source: Path, folder: Path, least: int) -> Path:
    """Fill a folder with links to the images of source/train and source/val, some more than once: at least so many."""
    for split in ("train", "val"):
        images = sorted(path for path in (source / split).glob("*/*") if path.is_file())
        if not images:
            raise UserError(f"--data-path {source} has no {split}/CLASS/IMAGE; expected ImageNet's folders")
        for number in range(max(least, len(images)) if split == "train" else len(images)):
            image = images[number % len(images)]
            make_folder(folder / split / image.parent.name)
            (folder / split / image.parent.name / f"{number}-{image.name}").symlink_to(image.resolve())
    return folder


def count_flops(model: str, crop: int | None) -> int:
    """Return the floating-point operations of training on one image: three times those of the forward pass.

    A product and its sum are two. torch's counter is wrong about the backward pass of grouped convolutions.
    """
    args, _ = config.on_machine(config.parse_args(["--synthetic", "--model", model, "--device", "cpu"]))
    with torch.device("meta"):
        network, image = build_model(args, 1000), torch.zeros(1, 3, crop or 224, crop or 224)
        with FlopCounterMode(display=False) as counter:
            network.eval()(image)
    return 3 * counter.get_total_flops()


def judge(row: Row, found: dict[str, Any], rows: dict[str, dict], card: str, crop: int | None) -> None:
    """Add how good a rate is: beside one process, the card's peak, and a published figure."""
    if row.processes > 1 and (single := rows.get(row.single)):
        found["efficiency"] = found["images_per_s"] / single["images_per_s"] / row.processes
    if row.model and (peak := next((peak for name, peak in PEAKS.items() if name in card), None)):
        found["mfu"] = found["images_per_s"] * count_flops(row.model, crop) / (peak * 1e12 * row.processes)
    for name, model, processes, low, high, source in PUBLISHED:
        if re.search(name, card) and (model, processes) == (row.model, row.processes) and not crop:
            is_bad = found["images_per_s"] < low / 2
            found["published"] = f"{low:,}{f' to {high:,}' if high > low else ''}: {source}"
            found["published"] += "; BELOW HALF OF IT: something is wrong" if is_bad else ""


def launcher(ranks: int) -> str:
    """Return the words before a command of so many processes."""
    return f"-m torch.distributed.run --standalone --nproc_per_node={ranks} " if ranks > 1 else ""


def model_options(options: Namespace, model: str, batch: int) -> str:
    """Return the options of train.py for a model on the images and the device of the command line."""
    crop = f" --train-crop-size {options.crop} --val-crop-size {options.crop}" if options.crop else ""
    return f"--model {shlex.quote(model)} --batch-size {batch} --device {options.device}{crop}"


def build_rows(options: Namespace, folder: Path, num_gpus: int) -> Iterator[Row]:
    """Yield the measurements for this machine."""
    there, ranks, lines = shlex.quote(str(folder)), max(num_gpus, 1), max(options.steps // 5, 1)
    batch = options.batch_size[0]
    model = model_options(options, options.model[0], batch)
    yield Row("tests of `-m gpu`", [f"-m pytest -q -m gpu --junitxml {there}/tests.xml"], read_tests, part=1)
    step = partial(step_row, options, there, num_gpus)
    if num_gpus or options.part:  # a CPU has them for a trial alone
        yield from part_rows(options, step, f"{BFLOAT16} --compile" if num_gpus else "")
    if options.data_path and options.part in (None, 2):
        images = link_images(options.data_path, folder / "images", options.steps * batch)
        common = f"{model} --data-path {shlex.quote(str(images))} --print-freq {lines}"
        yield from image_rows(options, common, there, num_gpus)
    if options.part == 3:
        yield from training_rows(options, there, num_gpus)
    yield from model_rows(options, there, max(lines // 2, 1), num_gpus)
    yield step("")
    if num_gpus:
        yield step("--tf32")
    if ranks > 1:
        yield step(BFLOAT16, "", f"{ranks} GPUs", ranks=ranks)
    run = f"train.py --use-deterministic-algorithms {model} --synthetic {20 * batch} --output-dir {there}"
    whole, first = f"{run}/whole --epochs 2", f"{run}/resumed --epochs 1"
    again = f"{run}/resumed --epochs 2 --resume auto --allow-change epochs"
    yield Row("a run of two epochs, and one resumed after the first", [whole, first, again], read_resume)
    recipe = f"train.py --recipe resnet50-fast16 --epochs 1 --lr-warmup-epochs 0 --crop-ramp-epochs 0 1 {model}"
    recipe += f" --lr-scaling linear --global-batch-size {ranks * batch} --synthetic {options.steps * ranks * batch}"
    recipe += f" --train-crop-size-min {options.crop}" if options.crop else ""
    recipe += f" --print-freq {lines} --output-dir {there}/recipe"
    yield Row("`resnet50-fast16`, made-up images", [launcher(ranks) + recipe], partial(read_run, "recipe"))


def part_rows(options: Namespace, step: Callable[..., Row], fast: str) -> Iterator[Row]:
    """Yield steps of the parts 1 and 2; `fast` are the options of the fastest."""
    batch = options.batch_size[0]
    without = "--without lines loader metrics --rounds 2"
    yield step(fast, without, part=1)
    if fast:  # the others are slow on many CPUs
        yield step(BFLOAT16, without, part=1)
        yield step("--amp", part=2)
    yield step(f"{fast} --workers 0", "--without loader --rounds 2", part=1)
    for name in options.model[1:]:
        yield step(fast, f"--model {shlex.quote(name)}", name, part=2)
    for size in (2 * batch, 4 * batch):
        yield step(fast, f"--batch-size {size}", f"batch {size}", part=2)
    for optimizer in ("adamw", "timm/muon", "timm/lamb"):
        yield step(f"{fast} --opt {optimizer}", part=2)


def step_row(
    options: Namespace,
    there: str,
    num_gpus: int,
    precision: str,
    more: str = "",
    title: str = "",
    *,
    ranks: int = 1,
    part: int | None = None,
) -> Row:
    """Return the measurement of a step of the first model, or of that of `more`."""
    command = f"{launcher(ranks)}-m bench.benchmark step --rounds 3 --steps {max(options.steps // 2, 1)}"
    # Without processes that load, a compiled step waits for the loop to load: 0.61 of the bare one on an H200.
    workers = min(count_cores() // max(num_gpus, 1), 16) if num_gpus else 0
    common = model_options(options, options.model[0], options.batch_size[0])
    command += f" --workers {workers} --json {there}/step.json {common} {precision} {more}"
    name = ", ".join(each for each in ("step", title, precision.strip() or "float32") if each)
    return Row(name, [command], read_step, part=part)


def training_rows(options: Namespace, there: str, num_gpus: int) -> Iterator[Row]:
    """Yield trainings that end: the recipe imagenette, 5 and 20 epochs, or for a trial on a CPU one and two."""
    command = f"train.py --recipe imagenette --data-path {shlex.quote(str(options.data_path))}"
    if num_gpus:
        command += " --compile"
    else:
        command += f" --device {options.device} --lr-warmup-epochs 0 --batch-size {options.batch_size[0]}"
    if options.crop:
        command += f" --train-crop-size {options.crop} --val-crop-size {options.crop} --val-resize-size {options.crop}"
    for epochs in (5, 20) if num_gpus else (1, 2):
        name = f"imagenette-{epochs}"
        run = f"{command} --epochs {epochs} --output-dir {there}/{name}"
        yield Row(f"the recipe imagenette, {counted(epochs, 'epoch')}", [run], partial(read_training, name), part=3)


def model_rows(options: Namespace, there: str, print_freq: int, num_gpus: int) -> Iterator[Row]:
    """Yield runs on made-up images: each model in two batch sizes, eager and compiled, and the first on more GPUs."""
    counts = sorted({2**power for power in range(num_gpus.bit_length())} | {num_gpus})
    modes = ("", ", compiled") if num_gpus else ("",)
    for model, batch, mode in itertools.product(options.model, options.batch_size, modes):
        single = f"{model}, batch {batch}, bfloat16, NHWC{mode}"
        is_scaled = mode and (model, batch) == (options.model[0], options.batch_size[0])
        for ranks in counts if is_scaled else [1]:
            name = f"{single}, {ranks} processes" if ranks > 1 else single
            folder = name.replace("/", "_")
            command = f"{launcher(ranks)}train.py {model_options(options, model, batch)} {BFLOAT16}"
            command += " --compile" if mode else ""
            command += f" --lr 0.001 --epochs 2 --synthetic {options.steps * batch * ranks // 2}"
            command += f" --print-freq {print_freq} --output-dir {there}/{shlex.quote(folder)}"
            yield Row(name, [command], partial(read_run, folder), model, ranks, single)


def image_rows(options: Namespace, common: str, there: str, num_gpus: int) -> Iterator[Row]:
    """Yield runs of the first model on real JPEGs: torchvision's script, ours with its options, ours at its best."""
    batch, cores = options.batch_size[0], count_cores()
    precisions = ["--amp", f"{BFLOAT16} --compile"] if num_gpus else [""]
    common += f" --epochs 1 --lr 0.001 --workers {min(cores, 16)} --output-dir {there}"
    title = f"{options.model[0]}, batch {batch}, JPEGs, {counted(cores, 'core')}"
    if references := os.environ.get("TORCHVISION_REFERENCES"):
        command = f"{shlex.quote(references)}/train.py {common}/torchvision {precisions[0]}"
        name = f"torchvision's train.py, {title}, {precisions[0] or 'float32'}"
        yield Row(name, [command], partial(read_torchvisions, batch), part=2)
    for number, precision in enumerate(precisions):
        command = f"train.py {common}/jpegs-{number} {precision}"
        yield Row(f"{title}, {precision or 'float32'}", [command], partial(read_run, f"jpegs-{number}"), part=2)


def measure(row: Row, folder: Path, end_s: float) -> dict[str, Any] | None:
    """Run a row's commands; return its figures, or None and say why there are none."""
    try:
        for command in row.commands:
            words, left_s = [sys.executable, *shlex.split(command)], max(end_s - time.monotonic(), 1)
            done = subprocess.run(words, cwd=tool.ROOT, capture_output=True, text=True, timeout=left_s, check=False)
            (folder / "output.txt").write_text(done.stdout)
            if done.returncode and row.read is not read_tests:
                last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
                raise UserError(f"exit code {done.returncode}: {last}")
        return row.read(folder)
    except subprocess.TimeoutExpired:
        reason = "the minutes are over"
    except UserError as error:
        reason = str(error)
    except (OSError, ValueError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
    print(f"{row.name}: not measured: {reason}")
    return None


def as_text(found: dict[str, Any]) -> str:
    """Return a row's figures as they stand in the table."""
    return "; ".join(form.format(found[name]) for name, form in FORMS.items() if name in found)


def write_report(options: Namespace) -> None:
    """Measure all rows, or those of --only, and write the JSON file and, for a GPU, the table."""
    num_gpus = torch.cuda.device_count() if options.device.startswith("cuda") else 0
    limit_s = PART_LIMIT_S if options.part else LIMIT_S
    end_s = time.monotonic() + limit_s
    num_measured = 0
    place = DistributedOptions(device=options.device, world_size=max(num_gpus, 1))
    environment = describe_environment(DataOptions(), place)
    before = read_json(options.json) if options.only or options.part else {}
    rows = before["rows"] if before.get("environment") == environment else {}
    report: dict[str, Any] = {"processor": describe_processor(), "environment": environment}
    report |= {"device": options.device, "rows": rows}
    with tempfile.TemporaryDirectory() as name:
        for row in build_rows(options, Path(name), num_gpus):
            if options.only not in row.name or options.part not in (None, row.part):
                continue
            if options.part and not options.only and row.name in rows:
                print(f"{row.name}: measured before")
            elif found := measure(row, Path(name), end_s):
                judge(row, found, rows, environment.get("gpu", ""), options.crop)
                print(f"{row.name}: {as_text(found)}", flush=True)
                rows[row.name] = {**found, "date": time.strftime("%Y-%m-%d")}  # the code may be another by then
                num_measured += 1
                tool.write_report(options.json, report)
    if not num_measured:
        raise UserError("nothing could be measured, or all was")
    if num_gpus:
        cards = f"{num_gpus} x {environment['gpu']}, torch {environment['torch']}"
        table = "".join(f"| {name} | {as_text(found)} |\n" for name, found in rows.items())
        table = f"| {cards}, {options.model[0]}, batch {options.batch_size[0]} | result |\n|---|---|\n{table}"
        tool.replace_between(tool.ROOT / "docs" / "performance.md", BEGIN, END, table)
    print(f"wrote {options.json}{' and the table in docs/performance.md' if num_gpus else ''}")


def main() -> None:
    """Measure what the command line asks for."""
    parser = tool.build_parser(PROG, "[options]", __doc__)
    add = parser.add_argument
    add("--device", metavar="DEVICE", default="cuda", help="cuda, or cpu to try the command (default: cuda)")
    models = ["resnet50", "vit_b_16", "convnext_tiny"]
    models_help = f"the models; all but the first in rows of their own alone (default: {' '.join(models)})"
    add("--model", metavar="NAME", nargs="+", default=models, help=models_help)
    batch_help = "images a process; all but the first in rows of the models alone (default: 256 64)"
    add("--batch-size", metavar="N", type=tool.positive, nargs="+", default=[256, 64], help=batch_help)
    add("--data-path", metavar="DIR", type=tool.as_path, help="class folders in train/ and val/: rows of real JPEGs")
    add("--only", metavar="TEXT", default="", help="measure rows whose names contain TEXT, such as vit_b_16")
    add("--part", metavar="N", type=int, choices=(1, 2, 3), help="measure a third, in 4 minutes: see above")
    add("--crop", metavar="PX", type=tool.positive, help="size of the images (default: 224, and the recipe's)")
    add("--steps", metavar="N", type=tool.positive, default=200, help="steps of the recipe (default: 200)")
    json_help = "the results (default: gpu-report.json)"
    add("--json", metavar="FILE", type=tool.output_file(".json"), default=Path("gpu-report.json"), help=json_help)

    def work() -> None:
        options = parser.parse_args()
        options.device = machine.find_device(options.device)
        if options.part == 3 and not options.data_path:
            raise UserError("--part 3 trains on Imagenette: --data-path DIR")
        write_report(options)

    tool.run(PROG, work, "interrupted; what was measured is in the --json file")


if __name__ == "__main__":
    main()
