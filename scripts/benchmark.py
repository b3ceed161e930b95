"""Measure speed side by side with torchvision's way, in one run, as ratios: `python -m scripts.benchmark --help`."""

import argparse
import importlib.util
import itertools
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import config
import data
from errors import UserError
from loading import decode, loader
from loading.decode import ImageFile, decode_plainly
from presets import ClassificationPresetEval, ClassificationPresetTrain, resize
from randomness import Draws
from sampler import SampleKey, TrainSampler, VirtualShards
from scripts import monitoring_benchmark, step_benchmark

# Loaded in one way before it is another's turn. Other users of the cores come and go within seconds, and would
# otherwise be measured too.
IMAGES_A_TURN = 100
EPOCHS_A_ROUND = 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def torchvisions_preset(*, is_training: bool) -> transforms.Compose:
    """Return torchvision's reference preset (v1, PIL), built of the installed torchvision."""
    if is_training:
        steps = [transforms.RandomResizedCrop(224, antialias=True), transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(256, antialias=True), transforms.CenterCrop(224)]
    to_float = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    return transforms.Compose(steps + to_float)


def compare(
    ways: dict[str, Callable[[int], int]], num_turns: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Run the ways by turns, in random order, and return each one's images per second of each round.

    Args:
        ways: each loads the images of a turn and returns how many.
        num_turns: of a round.
        rounds: how often all images are loaded.
        clock: process_time for one thread, perf_counter for several processes.
    """
    rates = {name: [] for name in ways}
    order, rng = list(ways), random.Random(0)
    for round_number in range(rounds + 1):
        num_images, spent_s = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
        for turn in range(num_turns):
            rng.shuffle(order)
            for name in order:
                start = clock()
                num_images[name] += ways[name](turn)
                spent_s[name] += clock() - start
        for name in ways if round_number else ():  # the first warms the page cache and the processes
            rates[name].append(num_images[name] / spent_s[name])
        print(f"round {round_number} of {rounds}" + (" (warm-up)" if not round_number else ""), file=sys.stderr)
    return rates


def summarize(rates: dict[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Return each way's median rate, and the spread of its ratio to the baseline of the same round."""
    summary = {}
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates[baseline], strict=True)]
        summary[name] = {"images_per_s": statistics.median(values), **step_benchmark.spread(ratios)}
    return summary


def show(title: str, summary: dict[str, dict[str, float]]) -> None:
    """Print one comparison."""
    print(f"\n{title}")
    width = max(map(len, summary)) + 2
    for name, row in summary.items():
        spread = "{:.2f} to {:.2f}".format(*row["ratio_range"])
        print(f"  {name:<{width}}{row['images_per_s']:9.1f} images/s   x{row['ratio']:.2f} ({spread})")


class Way(NamedTuple):
    """One of our ways to load: from which folder, and with which options."""

    folder: Path
    args: argparse.Namespace

    def dataset(self, split: str) -> data.IndexedImageFolder:
        """Return the images of train or val, loaded that way."""
        preset = data.build_presets(self.args)[0 if split == "train" else 1]
        return data.IndexedImageFolder(self.folder / split, preset)


def ways_of(options: argparse.Namespace) -> dict[str, Way]:
    """Return each decoder on each folder, by name; the first is the default of a run."""
    folders = {"raw": options.data_path, **dict(options.pack)}
    common = ["--device", "cpu", "--workers", str(options.workers), "--batch-size", str(options.batch_size)]
    return {
        f"{name}, {decoder}": Way(
            folder, config.parse_args(["--data-path", str(folder), "--decoder", decoder, *common])
        )
        for name, folder in folders.items()
        for decoder in options.decoder
    }


def load_plainly(path: str) -> Image.Image:
    """Return an image as torchvision's loader does, which would open any format."""
    return decode_plainly(Path(path).read_bytes())


def one_thread(options: argparse.Namespace, ways: dict[str, Way], split: str) -> dict[str, dict[str, float]]:
    """Compare from file to crop in this process, in CPU time: torchvision's way on the raw files, and ours."""
    theirs = datasets.ImageFolder(
        options.data_path / split, torchvisions_preset(is_training=split == "train"), loader=load_plainly
    )
    epochs = itertools.count()

    def run(load_one: Callable, key_of: Callable[[int, int], int]) -> Callable[[int], int]:
        def load(turn: int) -> int:
            epoch, first = next(epochs), turn * IMAGES_A_TURN
            images = range(first, min(first + IMAGES_A_TURN, len(theirs)))
            for index in images:
                load_one(key_of(index, epoch))
            return len(images)

        return load

    def sample_key(index: int, epoch: int) -> int:
        return SampleKey(index, epoch) if split == "train" else index

    torch.manual_seed(0)
    runs = {"torchvision": run(theirs.__getitem__, lambda index, _: index)}
    ours = {name: way.dataset(split) for name, way in ways.items()}
    for name, dataset in ours.items():
        if len(dataset) != len(theirs):
            raise UserError(f"{name}: {len(dataset)} images in {split}, where --data-path has {len(theirs)}")
    runs |= {name: run(dataset.load, sample_key) for name, dataset in ours.items()}
    num_turns = math.ceil(len(theirs) / IMAGES_A_TURN)
    return summarize(compare(runs, num_turns, options.rounds, time.process_time), "torchvision")


def end_to_end(options: argparse.Namespace, ways: dict[str, Way]) -> dict[str, dict[str, float]]:
    """Compare loaders with workers, in wall time, with one copy of each batch as pinning makes."""
    theirs = datasets.ImageFolder(
        options.data_path / "train", torchvisions_preset(is_training=True), loader=load_plainly
    )
    loaders = {
        "torchvision": DataLoader(
            theirs,
            options.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
        )
    }
    for name, way in ways.items():
        dataset = way.dataset("train")
        sampler = TrainSampler(len(dataset), VirtualShards(options.batch_size, 1))
        loaders[name] = data.build_loader(dataset, sampler, way.args)

    def run(loader: Iterable) -> Callable[[int], int]:
        def load(_: int) -> int:
            return sum(len(image.clone()) for image, *_ in loader)

        return load

    workers, before = {}, set(multiprocessing.active_children())
    for name, each in loaders.items():
        each.start() if isinstance(each, loader.BatchLoader) else iter(each)  # its processes stay
        workers[name] = set(multiprocessing.active_children()) - before
        before |= workers[name]
    runs = {name: run(loader) for name, loader in loaders.items()}
    figures = summarize(compare(runs, EPOCHS_A_ROUND, options.rounds, time.perf_counter), "torchvision")
    for name, row in figures.items():
        row["worker_mib"] = max((private_mib(worker.pid) for worker in workers[name]), default=0.0)
        slots = getattr(loaders[name], "slots", [])
        row["shared_mib"] = sum(slot.nbytes for slot in slots) / 2**20
    return figures


def private_mib(pid: int) -> float:
    """Return the memory of a process that it shares with no other."""
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(size) for name, size, _ in fields if name.startswith("Private_")) / 1024


class StageClock:
    """A training preset that takes the CPU time of its stages."""

    takes_draws = True

    def __init__(self, preset: ClassificationPresetTrain) -> None:
        self.preset = preset
        self.spent_s = dict.fromkeys(["read", "header and box", "decode", "resize", "batch", "copy", "normalise"], 0.0)

    def load(self, payload: bytes, draws: Draws) -> torch.Tensor:
        """Return the crop of a file."""
        marks = [time.process_time()]
        file = ImageFile(payload, self.preset.decoder)
        box = self.preset.box.draw(*file.size[::-1], draws)
        marks.append(time.process_time())
        pixels = file.decode(*box)
        marks.append(time.process_time())
        crop = resize(pixels, self.preset.crop_size, self.preset.crop_size, self.preset.fast_mode)
        marks.append(time.process_time())
        for name, begin, end in zip(["header and box", "decode", "resize"], marks, marks[1:], strict=False):
            self.spent_s[name] += end - begin
        return crop


def stages(way: Way, num_images: int = 100) -> dict[str, float]:
    """Return the mean microseconds of CPU time that each stage of our way takes for a training image."""
    clock = StageClock(data.build_presets(way.args)[0])
    dataset = data.IndexedImageFolder(way.folder / "train", clock)
    num_images = min(num_images, len(dataset))
    start = time.process_time()
    samples = [dataset.load(SampleKey(index, 0)) for index in range(num_images)]
    clock.spent_s["read"] = time.process_time() - start - sum(clock.spent_s.values())
    start = time.process_time()
    image, target = loader.collate(samples)
    clock.spent_s["batch"] = time.process_time() - start
    start = time.process_time()
    image.clone()
    clock.spent_s["copy"] = time.process_time() - start
    finish, _ = data.build_batch_transforms(way.args, len(dataset.classes))
    start = time.process_time()
    finish(image, target, random.Random(0), 0)
    clock.spent_s["normalise"] = time.process_time() - start
    return {name: seconds / num_images * 1e6 for name, seconds in clock.spent_s.items()}


class Comparison:
    """A preset that loads each file in torchvision's way too, with the same draws, and keeps the differences."""

    def __init__(self, preset: ClassificationPresetTrain | ClassificationPresetEval, *, is_training: bool) -> None:
        self.preset = preset
        self.exact = transforms.Compose(torchvisions_preset(is_training=is_training).transforms[:3])
        self.total, self.count, self.largest = 0, 0, 0

    def load(self, payload: bytes, draws: None = None) -> torch.Tensor:
        """Return our pixels."""
        torch.manual_seed(self.count)
        expected = self.exact(decode_plainly(payload))
        torch.manual_seed(self.count)
        found = self.preset.load(payload)
        difference = (found.int() - expected.int()).abs()
        self.total, self.count = self.total + int(difference.sum()), self.count + difference.numel()
        self.largest = max(self.largest, int(difference.max()))
        return found


def pixel_difference(way: Way, split: str, num_images: int = 100) -> dict[str, float]:
    """Return the mean and largest difference from torchvision's pixels of the same files, in grey levels."""
    preset = data.build_presets(way.args)[0 if split == "train" else 1]
    comparison = Comparison(preset, is_training=split == "train")
    dataset = data.IndexedImageFolder(way.folder / split, comparison)
    for index in range(0, len(dataset), max(len(dataset) // num_images, 1)):
        dataset.load(index)
    return {"mean": comparison.total / comparison.count, "max": comparison.largest}


def recommend(figures: dict, decoders: list[str]) -> str:
    """Return a sentence that recommends a decoder."""
    if len(decoders) < 2:
        return "torchcodec was not measured; it is often faster: pip install torchcodec"
    rates = {name: figures["train"][f"raw, {name}"]["images_per_s"] for name in decoders}
    gain = rates["torchcodec"] / rates["pillow"]
    if gain < 1.05:
        return f"--decoder pillow, the default: torchcodec is {gain:.2f} times as fast here"
    return (
        f"--decoder torchcodec: {gain:.2f} times as fast as pillow here; it may differ by a grey level, so a run keeps "
        "the decoder that it began with"
    )


def benchmark_loader(options: argparse.Namespace) -> dict:
    """Measure loading, print the tables, and return every figure."""
    torch.set_num_threads(1)
    decode.silence_libjpeg()
    if options.decoder is None:
        has_torchcodec = importlib.util.find_spec("torchcodec") is not None
        options.decoder = ["pillow", "torchcodec"] if has_torchcodec else ["pillow"]
    for split in ("train", "val"):
        if not (options.data_path / split).is_dir():
            raise UserError(
                f"--data-path {options.data_path} has no folder {split}/, which torchvision's way needs; tars are "
                "measured beside it with --pack NAME=DIR"
            )
    for name, folder in options.pack:
        if not folder.is_dir():
            raise UserError(f"--pack {name}={folder}: there is no such folder")
    ways = ways_of(options)
    figures = {
        "train": one_thread(options, ways, "train"),
        "eval": one_thread(options, ways, "val"),
        "end_to_end": end_to_end(options, ways),
        "stages_us": {name: stages(way) for name, way in ways.items()},
        "pixel_difference": {
            name: {"train": pixel_difference(way, "train"), "eval": pixel_difference(way, "val")}
            for name, way in ways.items()
        },
        "decoders": {name: decode.describe(name) for name in options.decoder},
    }
    show("training images, one thread, CPU time; ratios to torchvision on the raw files", figures["train"])
    show("evaluation images, one thread, CPU time", figures["eval"])
    show(f"training batches from {options.workers} processes, wall time", figures["end_to_end"])
    print("\nmemory, MiB: the largest loader process's own, and the batches' that it shares")
    for name, row in figures["end_to_end"].items():
        print(f"  {name}: {row['worker_mib']:.0f} and {row['shared_mib']:.0f}")
    print("\nstages, microseconds of CPU time a training image; the last two in the training process")
    for name, spent in figures["stages_us"].items():
        print(f"  {name}: " + "   ".join(f"{stage} {value:.0f}" for stage, value in spent.items()))
    print("\npixels against torchvision's of the same files, grey levels of 255: mean and largest difference")
    for name, splits in figures["pixel_difference"].items():
        shown = "   ".join(f"{split} {one['mean']:.4f} {one['max']}" for split, one in splits.items())
        print(f"  {name}: {shown}")
    figures["ratios"] = {name: figures[name][next(iter(ways))]["ratio"] for name in ("train", "eval", "end_to_end")}
    figures["recommendation"] = recommend(figures, options.decoder)
    print(f"\nrecommended: {figures['recommendation']}")
    return figures


def named_folder(text: str) -> tuple[str, Path]:
    """Read NAME=DIR."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=DIR")
    return name, Path(folder)


def positive(text: str) -> int:
    """Read a number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return int(text)


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("loader", help="from files to batches, against torchvision's preset")
    command.add_argument("--data-path", metavar="DIR", type=Path, required=True, help="folder with train/ and val/")
    command.add_argument(
        "--pack", metavar="NAME=DIR", type=named_folder, action="append", default=[],
        help="another form of the same images, measured against the raw files; may be given again",
    )  # fmt: skip
    command.add_argument(
        "--decoder", nargs="+", choices=sorted(decode.DECODERS), help="which to measure (default: those installed)"
    )
    command.add_argument("--workers", metavar="N", type=int, default=2, help="loader processes (default: 2)")
    command.add_argument("--batch-size", metavar="N", type=int, default=50, help="images a batch (default: 50)")
    command.add_argument("--rounds", metavar="N", type=positive, default=5, help="interleaved rounds (default: 5)")
    command.add_argument("--json", metavar="FILE", type=Path, help="write every figure there")
    command.set_defaults(run=benchmark_loader)
    step_benchmark.add_commands(commands)
    monitoring_benchmark.add_commands(commands)
    options = parser.parse_args()
    try:
        figures = options.run(options)
    except UserError as error:
        parser.exit(error.exit_code, f"{parser.prog}: error: {error}\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
