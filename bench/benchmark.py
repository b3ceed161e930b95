"""Measure speed side by side.

loader   images from files and packs, and by torchvision's own preset from the same files: CPU time of one thread;
         by TorchCodec too, where it is installed, as loader processes decode
         with --against a race: batches of training images by our loader and by others, one process group each
step     a training step and the same arithmetic with nothing around it; on several processes the step with DDP, the
         arithmetic with nothing sent, and the step with --use-deterministic-algorithms; on one, where
         TORCHVISION_REFERENCES names the folder of torchvision's references/classification, its own train_one_epoch
         from the same loader, in float32 and float16
         The steady step, behind the first steps of each turn, is timed by the device's events where it has them.

Examples:
  python -m bench.benchmark loader --data-path /data/imagenet --pack /data/imagenet-256
  python -m bench.benchmark loader --data-path /data/imagenet --against torchvision timm torchcodec --cores 2
  python -m bench.benchmark step --model resnet50 --batch-size 256 --amp --channels-last --steps 110 --json step.json
  torchrun --nproc_per_node=2 -m bench.benchmark step --model resnet18 --batch-size 32
Both commands also take train.py's options; by default --model resnet18 --batch-size 64, and on a CPU --workers 0.
OMP_NUM_THREADS sets the CPU threads. The ways run by turns, and a ratio compares two of them within a round: compare
ratios, not rates.
"""

import argparse
import copy
import importlib
import io
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision import datasets, transforms

import data
import metrics
import train
import utils
from bench import race
from distributed import collectives
from distributed.ending import leave_group
from distributed.launch import read_launch
from distributed.signals import silence_libraries
from errors import UserError
from loading import decode
from loading.forms import open_split
from metrics import copy_to_host
from models import gradients, optim
from models.build import autocast, build_ema, build_model, build_scaler, compile_model, move_to_device, set_up_device
from models.losses import build_criterion
from monitoring.gauges import moment, seconds_between
from run import BareRun
from sampler import SampleKey, TrainSampler, VirtualShards
from scripts.tool import as_path, as_place, build_parser, output_file, positive, run, write_report
from settings import config, machine
from settings.stages import Assigned
from settings.tables import aligned

PROG = "python -m bench.benchmark"

NUM_CLASSES, NORMALIZE = 1000, transforms.Normalize(config.IMAGENET_MEAN, config.IMAGENET_STD)
SHARED_NAMES = ("presets", "sampler", "train", "transforms", "utils")  # of modules here and in torchvision's folder
DEFAULTS = (  # options of train.py ahead of the given ones
    "--synthetic --model resnet18 --batch-size 64 --epochs 100 --lr 0.01 --lr-warmup-epochs 1 "
    "--lr-scheduler cosineannealinglr --lr-per-step"
)


def interleave(ways: Mapping[str, Callable], rounds: int, clock: Callable) -> dict[str, list[float]]:
    """Run the ways, which return numbers of images, by turns; return images/s of each round, but the first, by way."""
    rates, order = {name: [] for name in ways}, list(ways)
    for _ in range(rounds + 1):
        order = [*order[1:], order[0]]
        for name in order:
            start_s = clock()
            rates[name].append(ways[name]() / (clock() - start_s))
    return {name: values[1:] for name, values in rates.items()}


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def compare(title: str, rates: dict[str, list[float]], *pairs: tuple[str, str]) -> dict[str, Any]:
    """Print the ways' rates, and the ratios of these pairs within a round; return the figures."""
    ratios = {}
    for a, b in pairs:
        values = [x / y for x, y in zip(rates[a], rates[b], strict=True)]
        low, middle, high = quartiles(values)
        ratios[f"{a} / {b}"] = [middle, low, high, min(values), max(values)]
    width = max(map(len, [*rates, *ratios])) + 2
    print(f"\n{title}: median images/s; ratios: median (quartiles; range)")
    for name, values in rates.items():
        print(f"  {name:<{width}}{statistics.median(values):9.1f}")
    for name, values in ratios.items():
        print(f"  {name:<{width}}" + "{:9.3f} ({:.3f} to {:.3f}; {:.3f} to {:.3f})".format(*values))
    return {"rates": rates, "ratios": ratios}


def torchvisions_images(folder: Path, split: str) -> datasets.ImageFolder:
    """Return the images of train or val, loaded as by torchvision's reference preset (v1, PIL)."""
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    if split == "val":
        steps = [transforms.Resize(256), transforms.CenterCrop(224)]
    steps += [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), NORMALIZE]
    # Its own loader would open formats that start programs.
    return datasets.ImageFolder(
        folder / split, transforms.Compose(steps), loader=lambda path: decode.decode_plainly(Path(path).read_bytes())
    )


def load_all(load: Callable[[int], Any], numbers: list[int], split: str, is_fast: bool = False) -> int:
    """Load images in this thread, those of train with new draws each time; return their number."""
    decode.use_torchcodec(is_fast)
    epoch = time.monotonic_ns() % 2**32
    for number in numbers:
        load(SampleKey(number, epoch) if split == "train" else number)
    return len(numbers)


def race_loaders(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Compare the CPU time of our loader and of others, on the same cores; all but one are stopped at any time."""
    load_average = os.getloadavg()[0]
    with ExitStack() as stack:
        racers = race.start(options, argv, stack)
        clock = partial(race.cpu_seconds, {racer.group for racer in racers})
        rates = interleave({racer.name: racer for racer in racers}, options.rounds, clock)
    title = f"training images, CPU time, cores: {options.cores}, load average before: {load_average:.1f}"
    figures = compare(title, rates, *[("ours", racer.name) for racer in racers[1:]])
    rows = [["", "version", "CPU ms an image (quartiles)", "PSNR, dB (10th percentile)", ""]]
    for each in racers:
        cpu_ms = "{1:.2f} ({0:.2f} to {2:.2f})".format(*quartiles([1000 / rate for rate in rates[each.name]]))
        rows.append([each.name, each.version, cpu_ms, "{:.1f} ({:.1f})".format(*each.psnr), each.about])
    print("", *aligned(rows, to_left=(0, 1, 4)), sep="\n")
    return {**figures, "load_average": load_average, "loaders": rows}


def benchmark_loader(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Compare loading evenly spaced images from files and packs with torchvision's preset on the files."""
    torch.set_num_threads(1)
    if options.against:
        return race_loaders(options, argv)
    silence_libraries()
    figures = {}
    for place, split in enumerate(("train", "val")):
        theirs = torchvisions_images(options.data_path, split)
        numbers = list(range(0, len(theirs), max(len(theirs) // options.images, 1)))[: options.images]
        ways = {"torchvision": partial(load_all, theirs.__getitem__, numbers, split)}
        for folder in (options.data_path, *options.pack):
            args = config.parse_args(["--data-path", str(folder), "--device", "cpu", *argv])
            source = open_split(f"{folder}/{split}", args.data)
            preset = data.build_presets(args.data, args.augmentation)[place]
            images = data.IndexedImageFolder(source.root, preset, source=source)
            if len(images) != len(theirs):
                raise UserError(f"{folder} has {len(images)} images in {split}, and --data-path has {len(theirs)}")
            ways[str(folder)] = partial(load_all, images.load, numbers, split)
            if machine.find_torchcodec():  # as in loader processes
                ways[f"{folder}, torchcodec"] = partial(load_all, images.load, numbers, split, is_fast=True)
        rates = interleave(ways, options.rounds, time.process_time)
        pairs = [(name, "torchvision") for name in list(ways)[1:]]
        figures[split] = compare(f"{split} images, one thread, CPU time", rates, *pairs)
    return figures


def training_args(argv: list[str], **changes: Any) -> Assigned:
    """Return train.py's options for this process, from those of the command line and changes to them."""
    record, _ = config.on_machine(config.parse_args([*DEFAULTS.split(), *argv]))
    values = {"world_size": collectives.get_world_size(), "rank": collectives.get_rank(), **changes}
    if record.distributed.device == "cpu" and "workers" not in record.origin.given:
        values["workers"] = 0  # processes would take the cores of the step
    values["is_launched"] = values["world_size"] > 1
    values["gpu"] = collectives.choose_gpu(read_launch(), record.distributed.device)
    args = config.assign(record.replaced(**values), None)
    data.check_shards(args)
    return args


class BareStep:
    """A model and its training as train.py builds them; a step on one batch on the device, with nothing around it.

    Nothing is loaded, counted, seeded, scheduled, sent or read.
    """

    def __init__(self, args: Assigned, num_steps: int) -> None:
        self.args, self.num_steps = args, num_steps
        self.device = set_up_device(args.precision, args.distributed, args.checkpoint.test_only)
        self.model = move_to_device(build_model(args, NUM_CLASSES), args.precision, self.device)
        compile_model(self.model, args.precision, args.augmentation)
        self.model_ema = build_ema(args, self.model)
        self.criterion = build_criterion(args)
        groups = optim.build_parameter_groups(args.optimization, self.model)
        self.optimizer = optim.build_optimizer(args.optimization, args.precision, args.model.model, groups)
        self.scaler = build_scaler(args.precision, self.device)
        place, px, size = args.distributed, args.augmentation.train_crop_size, args.optimization.batch_size
        global_batch_size = args.optimization.global_batch_size
        self.shards = VirtualShards(global_batch_size, place.num_shards, place.rank, place.world_size)
        image = torch.randn((size, args.data.in_chans, px, px), device=self.device)
        layout = torch.channels_last if args.precision.channels_last else torch.contiguous_format
        self.image = image.to(memory_format=layout)
        self.target = torch.arange(size, device=self.device) % NUM_CLASSES
        self.clock: Callable[[], float] = time.perf_counter  # of steps on a device without events
        self.images_per_step = size * self.shards.num_local
        # Of each turn: images/s of the steps after the first ones, and what the first step took more than such a one.
        self.steady_rates: list[float] = []
        self.starts_s: list[float] = []
        self.moments: list[Any] = []  # of a turn: its beginning and the end of each step

    def __call__(self) -> int:
        """Train, beginning on all processes at once; return the number of this process's images."""
        set_up_device(self.args.precision, self.args.distributed, self.args.checkpoint.test_only)
        if dist.is_initialized():
            dist.barrier()
        self.moments = []
        self.mark()
        self.run_steps()
        torch.get_device_module(self.device).synchronize()
        begin, *ends = self.moments
        ends = ends[min(10, len(ends) // 2) - 1 :] if len(ends) > 2 else [begin, *ends]
        step_s = seconds_between(ends[0], ends[-1]) / (len(ends) - 1)
        self.steady_rates.append(self.images_per_step / step_s)
        self.starts_s.append(seconds_between(begin, self.moments[1]) - step_s)
        return self.num_steps * self.images_per_step

    def mark(self) -> None:
        """Note that a step ends."""
        self.moments.append(moment(self.device, self.clock))

    def run_steps(self) -> None:
        """Train for `num_steps` steps."""
        self.model.train()
        for number in range(self.num_steps):
            self.optimizer.zero_grad()
            for _ in self.shards.local:
                with autocast(self.args.precision, self.device):
                    loss = self.criterion(self.model(self.image), self.target)
                self.scaler.scale(loss / self.shards.num_local).backward()
            self.update(number)

    def update(self, number: int) -> None:
        """Clip, update the weights, and average them when it is time."""
        self.scaler.unscale_(self.optimizer)
        if self.args.optimization.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.optimization.clip_grad_norm)
        if self.args.optimization.clip_grad_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.args.optimization.clip_grad_value)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.model_ema and number % self.args.model.model_ema_steps == 0:
            self.model_ema.update_parameters(self.model)
        self.mark()


class LoggedRun(BareRun):
    """A run's part in a step: learning rates of a schedule, and metrics that are read a step after a line is due."""

    def __init__(self, way: BareStep, model: nn.Module) -> None:
        super().__init__(model, way.device)
        self.sharded_step = gradients.ShardedStep(
            model, way.shards, device=way.device, seed=way.args.optimization.seed,
            is_deterministic=way.args.precision.use_deterministic_algorithms,
        )  # fmt: skip
        self.scheduler = optim.LRScheduler(way.args.schedule, way.optimizer)
        self.tally = metrics.Tally([metrics.Accuracy()], way.shards.num_local)
        self.parameters = list(way.model.parameters())
        self.mark, self.print_freq = way.mark, way.args.monitoring.print_freq
        self.is_line_begun = False

    def begin_step(self, epoch: int, step: int) -> None:
        """Set the learning rate."""
        super().begin_step(epoch, step)
        self.scheduler.set_position(epoch, step, self.steps_per_epoch)
        self.is_record_due = (step + 1) % self.print_freq == 0

    def end_step(self, metric_logger: Any, grad_norm: Tensor | None) -> None:
        """Read the metrics of a line's step; begin to copy those of this one, and norms, when a line is due."""
        if self.is_line_begun:
            self.tally.synchronize_between_processes(is_begun=True)
            metric_logger.show(*self.tally.compute_and_reset())
            metric_logger.print_line()
        if self.is_record_due:
            self.norms = [copy_to_host(each) for each in (grad_norm, nn.utils.get_total_norm(self.parameters))]
        self.is_line_begun = metric_logger.is_line_held = metric_logger.is_line_due
        if self.is_line_begun:
            self.tally.begin_read()
        self.mark()


class OurLoop(BareStep):
    """The real `train_one_epoch` from the real loader."""

    def __init__(self, args: Assigned, num_steps: int) -> None:
        super().__init__(args, num_steps)
        num_images = num_steps * args.optimization.global_batch_size
        dataset = data.SyntheticImages(num_images, args.augmentation.train_crop_size, NUM_CLASSES)
        sampler = TrainSampler(len(dataset), self.shards)
        loader = data.build_loader(
            dataset, sampler, args.data, args.augmentation, args.optimization, args.distributed.device
        )
        self.loader: Iterable = data.build_device_loader(args, loader, sampler, self.device, NUM_CLASSES)
        self.wrapped = gradients.wrap_model(self.model, args.distributed, args.precision.compile)
        self.run = LoggedRun(self, self.wrapped)

    def run_steps(self) -> None:
        """Train for one epoch of the loader."""
        parts = self.wrapped, self.criterion, self.optimizer, self.loader, self.device
        with redirect_stdout(io.StringIO()):
            train.train_one_epoch(*parts, 0, self.args, self.model_ema, self.scaler, self.run)


class TorchvisionsLoop(OurLoop):
    """torchvision's own `train_one_epoch`, from our loader; it reads the loss in every step."""

    def __init__(self, args: Assigned, num_steps: int, folder: str) -> None:
        super().__init__(args, num_steps)
        self.theirs = import_train(folder)

    def run_steps(self) -> None:
        """Train for one epoch of the loader."""
        scaler = self.scaler if self.args.precision.amp else None
        values = argparse.Namespace(**self.args.flat())
        parts = self.wrapped, self.criterion, self.optimizer, self, self.device
        with redirect_stdout(io.StringIO()):
            self.theirs.train_one_epoch(*parts, 0, values, self.model_ema, scaler)

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch
            self.mark()  # the next batch is asked for: the step is over


def import_train(folder: str) -> ModuleType:
    """Return the `train.py` of torchvision's references, whose modules bear the names of ours."""
    ours = {name: sys.modules.pop(name) for name in SHARED_NAMES if name in sys.modules}
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("train")
    finally:
        sys.path.remove(folder)
        sys.modules.update(ours)


def without(ours: OurLoop, part: str) -> OurLoop:
    """Return our loop, of the same model and loader, with one part taken away."""
    way = copy.copy(ours)
    way.steady_rates = []
    way.starts_s = []
    way.run = copy.copy(ours.run)
    way.run.mark = way.mark
    way.run.tally = metrics.Tally([metrics.Accuracy()], way.shards.num_local)
    if part == "lines":
        way.args = ours.args.replaced(print_freq=10**9)
        way.run.print_freq = 10**9
    elif part == "metrics":
        way.run.tally = metrics.Tally([], way.shards.num_local)
    else:
        way.loader = [(way.image, way.target)] * (way.num_steps * way.shards.num_local)
    return way


def find_waits(way: BareStep) -> dict[str, int]:
    """Return the calls in a turn that wait for the GPU, by file and line, as torch's sync_debug_mode warns of them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        way()
        torch.cuda.set_sync_debug_mode("default")
    return dict(Counter(f"{Path(each.filename).name}:{each.lineno}" for each in caught))


def benchmark_step(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Compare our training step with the same arithmetic alone and, on several processes, with the same-bits one."""
    utils.init_distributed_mode(argparse.Namespace(**config.parse_args([*DEFAULTS.split(), *argv]).flat()))
    args = training_args(argv)
    own_batch = args.optimization.global_batch_size // args.distributed.world_size
    alone = training_args(argv, world_size=1, rank=0, global_batch_size=own_batch)
    ours = OurLoop(args, options.steps)
    ways: dict[str, BareStep] = {"ours": ours, "bare": BareStep(alone, options.steps)}
    pairs = [("ours", "bare")]
    if args.distributed.is_launched:
        ways["same bits"] = OurLoop(training_args([*argv, "--use-deterministic-algorithms"]), options.steps)
        pairs.append(("same bits", "ours"))
    is_theirs = args.precision.amp_dtype != "bfloat16" and ours.shards.num_shards == 1
    if is_theirs and (folder := os.environ.get("TORCHVISION_REFERENCES")):
        ways["torchvision's"] = TorchvisionsLoop(args, options.steps, folder)
        pairs += [("torchvision's", "bare"), ("ours", "torchvision's")]
    for part in options.without:
        ways[f"without {part}"] = without(ours, part)
        pairs.append((f"without {part}", "bare"))
    # Other users of the cores do not change the CPU time of one thread.
    is_alone = (
        args.distributed.device == "cpu"
        and not args.distributed.is_launched
        and not args.data.workers
        and torch.get_num_threads() == 1
    )
    clock = time.process_time if is_alone else time.perf_counter
    for way in ways.values():
        way.clock = clock
    turns = interleave(ways, options.rounds, clock)
    kind = "CPU" if is_alone else "wall"
    figures = compare(f"a steady step, {kind} time", {name: way.steady_rates[1:] for name, way in ways.items()}, *pairs)
    figures["turns"] = compare(f"whole turns of {options.steps} steps, {kind} time", turns, *pairs)
    figures["start_s"] = {name: statistics.median(way.starts_s[1:]) for name, way in ways.items()}
    print("\nthe first step, more than a steady one, s:", {name: round(s, 3) for name, s in figures["start_s"].items()})
    if ours.device.type == "cuda":
        figures["waits"] = find_waits(ours)
        print("calls that wait for the device, in a turn:", figures["waits"])
    leave_group()
    return figures


COMMANDS = {"loader": benchmark_loader, "step": benchmark_step}


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of the command and of the options that are not train.py's."""
    parser = build_parser(PROG, "COMMAND [options]", __doc__)
    add = parser.add_argument
    add("command", metavar="COMMAND", choices=COMMANDS, help="loader or step")
    add("--rounds", metavar="N", type=positive, default=9, help="rounds (default: 9); one more warms up")
    add("--steps", metavar="N", type=positive, default=10, help="step: steps in a turn (default: 10; a GPU wants 100)")
    text = "step: also our loop without its lines, loader or metrics"
    add("--without", metavar="PART", choices=["lines", "loader", "metrics"], nargs="+", default=[], help=text)
    add("--images", metavar="N", type=positive, default=400, help="loader: images of each split (default: 400)")
    add("--data-path", metavar="DIR", type=as_path, help="loader: class folders in train/ and val/")
    add("--pack", metavar="DIR", type=as_place, nargs="+", default=[], help="loader: packs, or addresses, of them")
    add("--against", metavar="NAME", choices=race.LOADERS, nargs="+", help=f"loader: race {', '.join(race.LOADERS)}")
    cores = range(1, collectives.count_cores() + 1)
    text = "with --against: cores, and above 1 as many loader processes"
    add("--cores", type=int, default=1, choices=cores, help=text)
    add("--json", metavar="FILE", type=output_file(".json"), help="write every figure to FILE")
    return parser


def measure() -> None:
    """Run the benchmark that the command line names."""
    options, argv = get_args_parser().parse_known_args()
    if (options.data_path is None) == (options.command == "loader"):
        raise UserError("loader needs --data-path DIR, and step makes up images")
    figures = COMMANDS[options.command](options, argv)
    if options.json and read_launch().rank == 0:
        write_report(options.json, {"argv": sys.argv[1:], "torch": torch.__version__, **figures})


def main() -> None:
    """Run the command line."""
    run(PROG, measure, "interrupted; nothing was written")


if __name__ == "__main__":
    main()
