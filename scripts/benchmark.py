"""Measure speed side by side with torchvision's way, in one run, as ratios: `python -m scripts.benchmark --help`."""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import config
import data
from decode import ImageFile
from errors import UserError
from presets import resize
from sampler import TrainSampler, VirtualShards
from scripts import step_benchmark

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def torchvisions_preset(*, is_training: bool) -> transforms.Compose:
    """Return torchvision's reference preset (v1, PIL), built of the installed torchvision."""
    if is_training:
        steps = [transforms.RandomResizedCrop(224, antialias=True), transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(256, antialias=True), transforms.CenterCrop(224)]
    to_float = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    return transforms.Compose(steps + to_float)


def compare(ways: dict[str, Callable[[], int]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Run each way once a round, in random order, and return its images per second of each round.

    Args:
        ways: each does its work and returns how many images that was.
        rounds: how often.
        clock: process_time for one thread, perf_counter for several processes.
    """
    rates = {name: [] for name in ways}
    order, rng = list(ways), random.Random(0)
    for round_number in range(rounds + 1):
        rng.shuffle(order)
        for name in order:
            start = clock()
            num_images = ways[name]()
            if round_number:  # the first warms the page cache and the processes
                rates[name].append(num_images / (clock() - start))
        print(f"round {round_number} of {rounds}" + (" (warm-up)" if not round_number else ""), file=sys.stderr)
    return rates


def summarize(rates: dict[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Return each way's median rate, and the median and range of its ratio to the baseline of the same round."""
    summary = {}
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates[baseline], strict=True)]
        summary[name] = {
            "images_per_s": statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return summary


def show(title: str, summary: dict[str, dict[str, float]]) -> None:
    """Print one comparison."""
    print(f"\n{title}")
    for name, row in summary.items():
        spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        print(f"  {name:<14}{row['images_per_s']:9.1f} images/s   x{row['ratio']:.2f} ({spread})")


def one_thread(folder: Path, args: argparse.Namespace, *, is_training: bool) -> dict[str, dict[str, float]]:
    """Compare from file to crop in this process, in CPU time: torchvision's way, ours, and ours with exact pixels."""
    theirs = datasets.ImageFolder(folder, torchvisions_preset(is_training=is_training))
    which = 0 if is_training else 1
    exact = argparse.Namespace(**{**vars(args), "backend": "pil"})
    ours = {
        "ours": data.IndexedImageFolder(folder, data.build_presets(args)[which]),
        "--backend pil": data.IndexedImageFolder(folder, data.build_presets(exact)[which]),
    }

    def run(dataset: torch.utils.data.Dataset) -> Callable[[], int]:
        def load() -> int:
            torch.manual_seed(0)
            for index in range(len(dataset)):
                dataset[index]
            return len(dataset)

        return load

    ways = {"torchvision": run(theirs), **{name: run(dataset) for name, dataset in ours.items()}}
    return summarize(compare(ways, args.rounds, time.process_time), "torchvision")


def end_to_end(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Compare loaders with worker processes, in wall time, with one copy of each batch as pinning makes."""
    theirs = datasets.ImageFolder(folder, torchvisions_preset(is_training=True))
    their_loader = DataLoader(
        theirs, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers, persistent_workers=True
    )
    ours = data.IndexedImageFolder(folder, data.build_presets(args)[0])
    sampler = TrainSampler(len(ours), VirtualShards(args.batch_size, 1))
    our_loader = data.build_loader(ours, sampler, args)

    def run(loader: DataLoader) -> Callable[[], int]:
        def load() -> int:
            return sum(len(image.clone()) for _ in range(args.epochs_a_round) for image, _ in loader)

        return load

    ways = {"torchvision": run(their_loader), "ours": run(our_loader)}
    return summarize(compare(ways, args.rounds, time.perf_counter), "torchvision")


def stages(folder: Path, num_images: int = 100) -> dict[str, float]:
    """Return the mean microseconds of CPU time that each stage of our way takes for a training image."""
    samples = data.scan_classes(folder)[1][:num_images]
    crop = transforms.RandomResizedCrop(224)
    spent = dict.fromkeys(["read", "header", "decode", "resize", "batch"], 0.0)
    torch.manual_seed(0)
    crops = []
    for path, _ in samples:
        marks = [time.process_time()]
        payload = (folder / path).read_bytes()
        marks.append(time.process_time())
        file = ImageFile(payload)
        sized = torch.empty(3, *file.size[::-1], device="meta")
        box = crop.get_params(sized, crop.scale, crop.ratio)
        marks.append(time.process_time())
        pixels = file.decode(*box)
        marks.append(time.process_time())
        crops.append((resize(pixels, 224, 224, "bilinear"), 0))
        marks.append(time.process_time())
        for name, begin, end in zip(spent, marks, marks[1:], strict=False):
            spent[name] += end - begin
    start = time.process_time()
    data.collate(crops)
    spent["batch"] = time.process_time() - start
    return {name: seconds / len(samples) * 1e6 for name, seconds in spent.items()}


def pixel_difference(folder: Path, args: argparse.Namespace, num_images: int = 100) -> dict[str, float]:
    """Return the mean and largest difference from torchvision's pixels, in grey levels, for equal boxes."""
    total, largest, count = 0.0, 0, 0
    for which, is_training in [(0, True), (1, False)]:
        preset = data.build_presets(args)[which]
        steps = torchvisions_preset(is_training=is_training).transforms[:3]
        exact = transforms.Compose(steps)
        theirs = datasets.ImageFolder(folder)
        for index in range(0, len(theirs), max(len(theirs) // num_images, 1)):
            torch.manual_seed(index)
            expected = exact(theirs[index][0])
            torch.manual_seed(index)
            found = preset.load(Path(theirs.samples[index][0]).read_bytes())
            difference = (found.int() - expected.int()).abs()
            total, count = total + float(difference.sum()), count + difference.numel()
            largest = max(largest, int(difference.max()))
    return {"mean": total / count, "max": largest}


def benchmark_loader(options: argparse.Namespace) -> dict:
    """Measure loading, print the tables, and return every figure."""
    torch.set_num_threads(1)
    args = config.parse_args(
        ["--data-path", str(options.data_path), "--device", "cpu", "--workers", str(options.workers)]
    )
    args.rounds, args.epochs_a_round, args.batch_size = options.rounds, 2, 50
    train, val = options.data_path / "train", options.data_path / "val"
    figures = {
        "train": one_thread(train, args, is_training=True),
        "eval": one_thread(val, args, is_training=False),
        "end_to_end": end_to_end(train, args),
        "stages_us": stages(train),
        "pixel_difference": pixel_difference(val, args),
    }
    show("training images, one thread, CPU time", figures["train"])
    show("evaluation images, one thread, CPU time", figures["eval"])
    show(f"training batches from {options.workers} processes, wall time", figures["end_to_end"])
    print("\nour stages, microseconds of CPU time a training image")
    print("  " + "   ".join(f"{name} {value:.0f}" for name, value in figures["stages_us"].items()))
    difference = figures["pixel_difference"]
    print(
        f"\npixels against torchvision's: mean difference {difference['mean']:.4f}, largest {difference['max']} of 255"
    )
    figures["ratios"] = {name: figures[name]["ours"]["ratio"] for name in ("train", "eval", "end_to_end")}
    return figures


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    loader = commands.add_parser("loader", help="from files to batches, against torchvision's preset")
    loader.add_argument("--data-path", metavar="DIR", type=Path, required=True, help="folder with train/ and val/")
    loader.add_argument("--workers", metavar="N", type=int, default=2, help="loader processes (default: 2)")
    loader.add_argument("--rounds", metavar="N", type=int, default=5, help="interleaved rounds (default: 5)")
    loader.add_argument("--json", metavar="FILE", type=Path, help="write every figure there")
    loader.set_defaults(run=benchmark_loader)
    step_benchmark.add_commands(commands)
    options = parser.parse_args()
    try:
        figures = options.run(options)
    except UserError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
