"""Measure speed side by side with torchvision's way, in one run, as ratios: `python -m scripts.benchmark --help`."""

import argparse
import importlib.util
import itertools
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

import config
import data
from errors import UserError
from loading import decode, loader
from loading.decode import ImageFile, decode_plainly
from loading.forms import open_source
from options import OneLineParser
from presets import ClassificationPresetEval, ClassificationPresetTrain, resize
from randomness import Draws
from sampler import SampleKey, TrainSampler, VirtualShards
from scripts import monitoring_benchmark, step_benchmark
from scripts.step_benchmark import interleave, summarize
from scripts.tool import as_json, output_file, positive, run, write_output

# Each way loads this many images, then another has its turn: so that other users of the cores, who come and go within
# seconds, slow all ways alike.
IMAGES_A_TURN = 100
EPOCHS_A_ROUND = 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def torchvisions_preset(split: str) -> transforms.Compose:
    """Return torchvision's reference preset (v1, PIL) for train or val, built from the installed torchvision."""
    if split == "train":
        steps = [transforms.RandomResizedCrop(224, antialias=True), transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(256, antialias=True), transforms.CenterCrop(224)]
    to_float = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    return transforms.Compose(steps + to_float)


def load_plainly(path: str) -> Image.Image:
    """Return the RGB image in a file as torchvision's loader does, which also opens formats that we refuse."""
    return decode_plainly(Path(path).read_bytes())


def torchvisions_images(options: argparse.Namespace, split: str) -> Dataset:
    """Return the raw images of train or val, loaded in torchvision's way."""
    return datasets.ImageFolder(options.data_path / split, torchvisions_preset(split), loader=load_plainly)


def show(title: str, summary: dict[str, dict[str, float]]) -> None:
    """Print one comparison."""
    print(f"\n{title}")
    width = max(map(len, summary)) + 2
    for name, row in summary.items():
        low, high = row["ratio_range"]
        print(f"  {name:<{width}}{row['images_per_s']:9.1f} images/s   x{row['ratio']:.2f} ({low:.2f} to {high:.2f})")


class Way(NamedTuple):
    """One of our ways to load: the folder with train/ and val/, and the options."""

    folder: Path
    args: argparse.Namespace

    def preset(self, split: str) -> ClassificationPresetTrain | ClassificationPresetEval:
        """Return the preset of train or val."""
        return data.build_presets(self.args)[0 if split == "train" else 1]

    def images(self, split: str) -> data.IndexedImageFolder:
        """Return the images of train or val, loaded in this way."""
        return data.IndexedImageFolder(self.folder / split, self.preset(split))


def ways_of(options: argparse.Namespace) -> dict[str, Way]:
    """Return a way for each folder and decoder, by name; first the raw images with the first decoder."""
    folders = {"raw": options.data_path, **dict(options.pack)}
    common = ["--device", "cpu", "--workers", str(options.workers), "--batch-size", str(options.batch_size)]
    return {
        f"{name}, {decoder}": Way(
            folder, config.parse_args(["--data-path", str(folder), "--decoder", decoder, *common])
        )
        for name, folder in folders.items()
        for decoder in options.decoder
    }


def one_thread(options: argparse.Namespace, ways: dict[str, Way], split: str) -> dict[str, dict[str, float]]:
    """Compare the CPU time from file to crop in this process: of torchvision's way on the raw files, and of ours."""
    theirs = torchvisions_images(options, split)
    epochs = itertools.count()

    def run(load_one: Callable[[int], Any]) -> Callable[[], int]:
        firsts = itertools.cycle(range(0, len(theirs), IMAGES_A_TURN))

        def load() -> int:
            epoch, first = next(epochs), next(firsts)
            images = range(first, min(first + IMAGES_A_TURN, len(theirs)))
            for index in images:
                load_one(SampleKey(index, epoch) if split == "train" else index)
            return len(images)

        return load

    torch.manual_seed(0)
    runs = {"torchvision": run(theirs.__getitem__)}
    for name, way in ways.items():
        ours = way.images(split)
        if len(ours) != len(theirs):
            raise UserError(f"{name}: {len(ours)} images in {split}, where --data-path has {len(theirs)}")
        runs[name] = run(ours.load)
    num_turns = math.ceil(len(theirs) / IMAGES_A_TURN)
    return summarize(interleave(runs, options.rounds, num_turns, time.process_time), "torchvision")


def end_to_end(options: argparse.Namespace, ways: dict[str, Way]) -> dict[str, dict[str, float]]:
    """Compare the wall time of loaders with worker processes; each batch is copied once, as pinning would."""
    loaders = {
        "torchvision": DataLoader(
            torchvisions_images(options, "train"),
            options.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
        )
    }
    for name, way in ways.items():
        images = way.images("train")
        sampler = TrainSampler(len(images), VirtualShards(options.batch_size, 1))
        loaders[name] = data.build_loader(images, sampler, way.args)
    workers, before = {}, set(multiprocessing.active_children())
    for name, each in loaders.items():
        each.start() if isinstance(each, loader.BatchLoader) else iter(each)  # its processes stay
        workers[name] = set(multiprocessing.active_children()) - before
        before |= workers[name]
    runs = {name: partial(load_epoch, each) for name, each in loaders.items()}
    figures = summarize(interleave(runs, options.rounds, EPOCHS_A_ROUND), "torchvision")
    for name, row in figures.items():
        row["worker_mib"] = max((private_mib(worker.pid) for worker in workers[name]), default=0.0)
        slots = getattr(loaders[name], "slots", [])
        row["shared_mib"] = sum(slot.nbytes for slot in slots) / 2**20
    return figures


def load_epoch(batches: Iterable) -> int:
    """Copy every batch, and return the number of their images."""
    return sum(len(image.clone()) for image, *_ in batches)


def private_mib(pid: int) -> float:
    """Return the MiB of memory that a process shares with no other."""
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(size) for name, size, _ in fields if name.startswith("Private_")) / 1024


class StageClock:
    """A training preset that measures the CPU time of its stages."""

    takes_draws = True

    def __init__(self, preset: ClassificationPresetTrain) -> None:
        self.preset = preset
        self.spent_s = dict.fromkeys(["read", "header and box", "decode", "resize", "batch", "copy", "normalise"], 0.0)
        self.begin_s = time.process_time()

    def end(self, stage: str) -> None:
        """Add the time since the last stage ended to this stage."""
        now_s = time.process_time()
        self.spent_s[stage] += now_s - self.begin_s
        self.begin_s = now_s

    def load(self, payload: bytes, draws: Draws) -> torch.Tensor:
        """Return the crop of a file."""
        self.end("read")
        file = ImageFile(payload, self.preset.decoder)
        box = self.preset.box.draw(*file.size[::-1], draws)
        self.end("header and box")
        pixels = file.decode(*box)
        self.end("decode")
        crop = resize(pixels, self.preset.crop_size, self.preset.crop_size, self.preset.fast_mode)
        self.end("resize")
        return crop


def stages(way: Way, num_images: int = 100) -> dict[str, float]:
    """Return the mean microseconds of CPU time that each stage of our way takes for a training image."""
    images = way.images("train")
    finish, _ = data.build_batch_transforms(way.args, len(images.classes))
    num_images = min(num_images, len(images))
    clock = StageClock(images.transform)
    images.transform = clock
    samples = [images.load(SampleKey(index, 0)) for index in range(num_images)]
    clock.end("read")
    image, target = loader.collate(samples)
    clock.end("batch")
    image.clone()
    clock.end("copy")
    finish(image, target, random.Random(0), 0)
    clock.end("normalise")
    return {name: seconds / num_images * 1e6 for name, seconds in clock.spent_s.items()}


def pixel_difference(way: Way, split: str, num_images: int = 100) -> dict[str, float]:
    """Return the mean and largest difference from torchvision's pixels of the same files and draws, in grey levels."""
    preset, source = way.preset(split), open_source(way.folder / split)
    exact = transforms.Compose(torchvisions_preset(split).transforms[:3])
    total, count, largest = 0, 0, 0
    for number in range(0, len(source), max(len(source) // num_images, 1)):
        payload = source.read(number)
        torch.manual_seed(count)
        expected = exact(decode_plainly(payload))
        torch.manual_seed(count)
        difference = (preset.load(payload).int() - expected.int()).abs()
        total, count = total + int(difference.sum()), count + difference.numel()
        largest = max(largest, int(difference.max()))
    return {"mean": total / count, "max": largest}


def recommend(figures: dict, decoders: list[str]) -> str:
    """Return a sentence that recommends a decoder."""
    if "torchcodec" not in decoders:
        return "torchcodec was not measured; it is often faster: pip install torchcodec"
    if "pillow" not in decoders:
        return "pillow, the default, was not measured; compare them by --decoder pillow torchcodec"
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
    print("\nmemory, MiB: private to the largest loader process, and shared for the batches")
    for name, row in figures["end_to_end"].items():
        print(f"  {name}: {row['worker_mib']:.0f} and {row['shared_mib']:.0f}")
    print("\nstages, microseconds of CPU time per training image; the last two in the training process")
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
    """Return the name and the folder in NAME=DIR; an argparse type."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=DIR")
    return name, Path(folder)


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = OneLineParser(prog="python -m scripts.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("loader", help="from files to batches, against torchvision's preset")
    command.add_argument("--data-path", metavar="DIR", type=Path, required=True, help="folder with train/ and val/")
    command.add_argument(
        "--pack", metavar="NAME=DIR", type=named_folder, action="append", default=[],
        help="another form of the same images, measured against the raw files; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--decoder", nargs="+", choices=sorted(decode.DECODERS), help="decoders to measure (default: all installed)"
    )
    command.add_argument("--workers", metavar="N", type=int, default=2, help="loader processes (default: 2)")
    command.add_argument("--batch-size", metavar="N", type=positive, default=50, help="images per batch (default: 50)")
    command.add_argument("--rounds", metavar="N", type=positive, default=5, help="interleaved rounds (default: 5)")
    command.set_defaults(run=benchmark_loader)
    step_benchmark.add_commands(commands)
    monitoring_benchmark.add_commands(commands)
    for command in commands.choices.values():
        command.add_argument("--json", metavar="FILE", type=output_file(".json"), help="write every figure to FILE")

    def measure() -> None:
        options = parser.parse_args()
        figures = options.run(options)
        if options.json:
            write_output(options.json, as_json(figures), "--json")

    run(parser.prog, measure, "interrupted; nothing was written")


if __name__ == "__main__":
    main()
