"""Measure speed side by side, as ratios within one run: `python -m scripts.benchmark {loader,step,saving,ranks}`."""

import argparse
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision import datasets, transforms

import config
import data
import gradients
import metrics
import models
import optim
import train
import utils
from distributed import collectives
from distributed.launch import read_launch
from errors import UserError
from loading import decode
from monitoring.monitor import read_records
from run import BareRun
from sampler import SampleKey, TrainSampler, VirtualShards
from scripts.tool import as_json, build_parser, given_path, output_file, positive, run, write_output

PROG = "python -m scripts.benchmark"

EPILOG = """\
loader   images from files and packs, and by torchvision's own preset from the same files: CPU time of one thread
step     a training step, the same arithmetic with nothing around it, and torchvision's loop
saving   the steps of a real run beside the save of a checkpoint, and long after it
ranks    a step on several processes: with nothing sent, with DDP, and with --use-deterministic-algorithms

examples:
  python -m scripts.benchmark loader --data-path /data/imagenet --pack /data/imagenet-256 --decoder torchcodec
  python -m scripts.benchmark step --model resnet50 --batch-size 256 --amp --channels-last --json step.json
  torchrun --nproc_per_node=2 -m scripts.benchmark ranks --model resnet18 --batch-size 32
All commands also take train.py's options; by default --model resnet18 --batch-size 64. OMP_NUM_THREADS sets the CPU
threads. The ways run by turns, and a ratio compares two of them within a round: compare ratios, not rates.
"""

NUM_CLASSES, NORMALIZE = 1000, transforms.Normalize(config.IMAGENET_MEAN, config.IMAGENET_STD)
DEFAULTS = (  # options of train.py ahead of the given ones
    "--synthetic --model resnet18 --batch-size 64 --workers 0 --epochs 100 --lr 0.01 --lr-warmup-epochs 1 "
    "--lr-scheduler cosineannealinglr --lr-per-step"
)


def interleave(ways: dict[str, Callable], rounds: int, clock: Callable = time.perf_counter) -> dict[str, list[float]]:
    """Run the ways, which return numbers of images, by turns; return images/s of each round, but the first, by way."""
    rates, order = {name: [] for name in ways}, list(ways)
    for _ in range(rounds + 1):
        order = [*order[1:], order[0]]
        for name in order:
            start_s = clock()
            rates[name].append(ways[name]() / (clock() - start_s))
    return {name: values[1:] for name, values in rates.items()}


def compare(title: str, rates: dict[str, list[float]], *pairs: tuple[str, str]) -> dict[str, Any]:
    """Print the ways' rates, and the ratios of these pairs within a round; return the figures."""
    ratios = {}
    for a, b in pairs:
        values = [x / y for x, y in zip(rates[a], rates[b], strict=True)]
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        ratios[f"{a} / {b}"] = [middle, low, high, min(values), max(values)]
    width = max(map(len, [*rates, *ratios])) + 2
    print(f"\n{title}: median images/s; ratios: median (quartiles; range)")
    for name, values in rates.items():
        print(f"  {name:<{width}}{statistics.median(values):9.1f}")
    for name, values in ratios.items():
        print(f"  {name:<{width}}" + "{:9.3f} ({:.3f} to {:.3f}; {:.3f} to {:.3f})".format(*values))
    return {"rates": rates, "ratios": ratios}


def torchvisions_images(folder: Path, split: str) -> torch.utils.data.Dataset:
    """Return the images of train or val, loaded as by torchvision's reference preset (v1, PIL)."""
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    if split == "val":
        steps = [transforms.Resize(256), transforms.CenterCrop(224)]
    steps += [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), NORMALIZE]
    # Its own loader would open formats that start programs.
    return datasets.ImageFolder(
        folder / split, transforms.Compose(steps), loader=lambda path: decode.decode_plainly(Path(path).read_bytes())
    )


def load_all(load: Callable[[int], Any], numbers: list[int], split: str) -> int:
    """Load images in this thread, those of train with new draws each time; return their number."""
    epoch = time.monotonic_ns() % 2**32
    for number in numbers:
        load(SampleKey(number, epoch) if split == "train" else number)
    return len(numbers)


def compare_loading(options: argparse.Namespace, ours: dict[str, argparse.Namespace], split: str) -> dict[str, Any]:
    """Compare the CPU time from file to crop, in this thread, on images that are evenly spaced in a split."""
    theirs = torchvisions_images(options.data_path, split)
    numbers = list(range(0, len(theirs), max(len(theirs) // options.images, 1)))[: options.images]
    ways = {"torchvision": partial(load_all, theirs.__getitem__, numbers, split)}
    for name, args in ours.items():
        preset = data.build_presets(args)[0 if split == "train" else 1]
        images = data.IndexedImageFolder(Path(args.data_path, split), preset)
        if len(images) != len(theirs):
            raise UserError(f"{name} has {len(images)} images in {split}, and --data-path has {len(theirs)}")
        ways[name] = partial(load_all, images.load, numbers, split)
    rates = interleave(ways, options.rounds, time.process_time)
    return compare(f"{split} images, one thread, CPU time", rates, *((name, "torchvision") for name in ours))


def benchmark_loader(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Compare loading from files and packs with torchvision's own preset on the files: CPU time of one thread."""
    torch.set_num_threads(1)
    decode.silence_libjpeg()
    ours = {}
    for folder in (options.data_path, *options.pack):
        ours[str(folder)] = config.parse_args(["--data-path", str(folder), "--device", "cpu", *argv])
    return {split: compare_loading(options, ours, split) for split in ("train", "val")}


def training_args(argv: list[str], **changes: Any) -> argparse.Namespace:
    """Return train.py's options for this process, from those of the command line and changes to them."""
    record, _ = config.on_machine(config.parse_args([*DEFAULTS.split(), *argv]))
    place = {"world_size": collectives.get_world_size(), "rank": collectives.get_rank()}
    args = argparse.Namespace(**{**vars(record), **place, **changes})
    args.distributed = args.world_size > 1
    args.gpu = collectives.choose_gpu(read_launch(), args.device)
    args.global_batch_size = args.global_batch_size or args.batch_size * args.world_size
    args.num_shards = args.global_batch_size // args.batch_size
    return args


class Way:
    """One model with everything that its step needs, built as train.py builds it; a subclass trains in `_run_steps`."""

    def __init__(self, args: argparse.Namespace, num_steps: int) -> None:
        self.args, self.device, self.num_steps = args, models.set_up_device(args), num_steps
        self.model = models.place_model(models.build_model(args, NUM_CLASSES), args, self.device)
        self.model_ema = models.build_ema(args, self.model)
        self.criterion = metrics.build_criterion(args)
        self.optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, self.model))
        self.scaler = models.build_scaler(args, self.device)
        self.shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)

    def __call__(self) -> int:
        """Train, beginning on all processes at once; return the number of this process's images."""
        models.set_up_device(self.args)
        if dist.is_initialized():
            dist.barrier()
        self._run_steps()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.num_steps * self.args.batch_size * self.shards.num_local

    def update(self, number: int) -> None:
        """Clip, update the weights, and average them when it is time."""
        self.scaler.unscale_(self.optimizer)
        if self.args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.model_ema and number % self.args.model_ema_steps == 0:
            self.model_ema.update_parameters(self.model)


class LoggedRun(BareRun):
    """A run's part in a step: learning rates of a schedule, and metrics that are read when a line is due."""

    def __init__(self, way: Way, model: nn.Module) -> None:
        super().__init__(model, way.device)
        self.sharded_step = gradients.build_sharded_step(way.args, model, way.shards, way.device)
        self.scheduler = optim.LRScheduler(way.args, way.optimizer)
        self.tally = metrics.Tally([metrics.Accuracy()], way.shards.num_local)
        self.parameters, self.print_freq = list(way.model.parameters()), way.args.print_freq

    def begin_step(self, epoch: int, step: int) -> None:
        """Set the learning rate."""
        super().begin_step(epoch, step)
        self.scheduler.set_position(epoch, step, self.steps_per_epoch)
        self.is_record_due = (step + 1) % self.print_freq == 0

    def end_step(self, metric_logger: Any, grad_norm: Tensor | None) -> None:
        """Read the norms and the metrics when a line is due."""
        if self.is_record_due:
            float(grad_norm + nn.utils.get_total_norm(self.parameters))
        if metric_logger.is_line_due:
            self.tally.synchronize_between_processes()
            metric_logger.show(*self.tally.read())


class OurLoop(Way):
    """The real `train_one_epoch` from the real loader."""

    def __init__(self, args: argparse.Namespace, num_steps: int) -> None:
        super().__init__(args, num_steps)
        dataset = data.SyntheticImages(num_steps * args.global_batch_size, args.train_crop_size, NUM_CLASSES)
        sampler = TrainSampler(len(dataset), self.shards)
        self.loader = data.build_device_loader(args, dataset, sampler, self.device, NUM_CLASSES)
        self.wrapped = gradients.wrap_model(self.model, args)
        self.run = LoggedRun(self, self.wrapped)

    def _run_steps(self) -> None:
        parts = self.wrapped, self.criterion, self.optimizer, self.loader, self.device
        with redirect_stdout(io.StringIO()):
            train.train_one_epoch(*parts, 0, self.args, self.model_ema, self.scaler, self.run)


class BareStep(Way):
    """The same arithmetic on one batch on the device; nothing is loaded, counted, seeded, scheduled, sent or read."""

    def __init__(self, args: argparse.Namespace, num_steps: int) -> None:
        super().__init__(args, num_steps)
        image = torch.randn(args.batch_size, 3, args.train_crop_size, args.train_crop_size, device=self.device)
        self.image = image.to(memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)
        self.target = torch.arange(args.batch_size, device=self.device) % NUM_CLASSES

    def _run_steps(self) -> None:
        self.model.train()
        for number in range(self.num_steps):
            self.optimizer.zero_grad()
            for _ in self.shards.local:
                with models.autocast(self.args, self.device):
                    loss = self.criterion(self.model(self.image), self.target)
                self.scaler.scale(loss / self.shards.num_local).backward()
            self.update(number)


class TorchvisionsLoop(BareStep):
    """A loop like that of torchvision's reference script, whose images cost nothing to load here."""

    def __init__(self, args: argparse.Namespace, num_steps: int) -> None:
        super().__init__(args, num_steps)
        self.image, self.target = self.image.cpu(), self.target.cpu()
        if self.device.type == "cuda":
            self.image, self.target = self.image.pin_memory(), self.target.pin_memory()
        for group in self.optimizer.param_groups:  # torchvision leaves the kernels to torch's defaults
            group.update({name: None for name in ("foreach", "fused") if name in group})
        self.optimizer._step_supports_amp_scaling = False

    def _run_steps(self) -> None:
        self.model.train()
        logger = utils.MetricLogger()
        for number in range(self.num_steps):
            image, target = self.image.to(self.device), self.target.to(self.device)
            with models.autocast(self.args, self.device):
                output = self.model(image)
                loss = self.criterion(output, target)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.update(number)
            correct1, correct5 = utils.accuracy(output, target, topk=(1, 5))
            logger.update(loss=loss.item(), acc1=correct1.item(), acc5=correct5.item())


def benchmark_step(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Compare our training step with the same arithmetic alone, and with torchvision's loop, in this process."""
    args = training_args(argv)
    # torchvision's script has neither of these options, and no accumulation.
    plain = training_args(argv, channels_last=False, compile=None, global_batch_size=args.batch_size)
    ways = {"ours": OurLoop(args, options.steps), "bare": BareStep(args, options.steps)}
    ways["torchvision"] = TorchvisionsLoop(plain, options.steps * args.num_shards)
    # Other users of the cores do not change the CPU time of one thread.
    is_alone = args.device == "cpu" and not args.workers and torch.get_num_threads() == 1
    rates = interleave(ways, options.rounds, time.process_time if is_alone else time.perf_counter)
    return compare(f"a step, {'CPU' if is_alone else 'wall'} time", rates, ("ours", "bare"), ("ours", "torchvision"))


def benchmark_ranks(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Compare a step on the processes of torchrun with one that sends nothing, and with one of the same bits."""
    if read_launch().world_size < 2:
        raise UserError("ranks needs several processes: torchrun --nproc_per_node=2 -m scripts.benchmark ranks")
    utils.init_distributed_mode(argparse.Namespace(**vars(config.parse_args([*DEFAULTS.split(), *argv]))))
    args = training_args(argv)
    alone = training_args(argv, world_size=1, rank=0, global_batch_size=args.batch_size)
    ways = {"alone": BareStep(alone, options.steps), "ddp": OurLoop(args, options.steps)}
    ways["same bits"] = OurLoop(training_args([*argv, "--use-deterministic-algorithms"]), options.steps)
    figures = compare("a step", interleave(ways, options.rounds), ("ddp", "alone"), ("same bits", "ddp"))
    collectives.shut_down()
    return figures


def benchmark_saving(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Compare the steps of a real run after each save begins with those long after it, by the run's own records."""
    every, num_steps = options.steps, (options.rounds + 2) * options.steps
    if every < 4:  # the last half of the steps is the measure
        raise UserError(f"--steps {every}: expected 4 or more steps between two saves")
    num_images = num_steps * training_args(argv).global_batch_size
    more = f"--synthetic {num_images} --epochs 1 --lr-warmup-epochs 0 --checkpoint-steps {every} --print-freq 1".split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *DEFAULTS.split(), *argv, *more, "--output-dir", folder]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise UserError("the measured run failed; see above")
        times = {row["step"]: row["time"] for row in read_records(Path(folder)) if row["kind"] == "train"}
    firsts, costs_s = [], []
    for save in range(2 * every, num_steps, every):  # the first save allocates its memory
        steps_s = [times[step + 1] - times[step] for step in range(save, save + every)]
        plain_s = statistics.median(steps_s[every // 2 :])
        firsts.append(steps_s[0] / plain_s)
        costs_s.append(sum(steps_s) - every * plain_s)
    first, cost_s = map(statistics.median, (firsts, costs_s))
    print(f"{len(firsts)} saves: a step beside one takes {first:.3f} of another; a save adds {cost_s:.3f} s (medians)")
    return {"first_steps": firsts, "save_costs_s": costs_s}


COMMANDS = {"loader": benchmark_loader, "step": benchmark_step, "saving": benchmark_saving, "ranks": benchmark_ranks}


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of the command and of the options that are not train.py's."""
    parser = build_parser(PROG, "COMMAND [options]", "Measure speed side by side.", EPILOG)
    add = parser.add_argument
    add("command", metavar="COMMAND", choices=COMMANDS, help="loader, step, saving or ranks")
    add("--rounds", metavar="N", type=positive, default=9, help="rounds or saves (default: 9); one more warms up")
    add("--steps", metavar="N", type=positive, default=10, help="steps in a turn, or between saves (default: 10)")
    add("--images", metavar="N", type=positive, default=400, help="loader: images of each split (default: 400)")
    add("--data-path", metavar="DIR", type=given_path, help="loader: class folders in train/ and val/")
    add("--pack", metavar="DIR", type=given_path, nargs="+", default=[], help="loader: packs of them, to measure too")
    add("--json", metavar="FILE", type=output_file(".json"), help="write every figure to FILE")
    return parser


def measure() -> None:
    """Measure as the command line says."""
    options, argv = get_args_parser().parse_known_args()
    if (options.data_path is None) == (options.command == "loader"):
        raise UserError("loader needs --data-path DIR, and the others make up images")
    figures = COMMANDS[options.command](options, argv)
    if options.json and read_launch().rank == 0:
        write_output(options.json, as_json({"argv": sys.argv[1:], "torch": torch.__version__, **figures}), "--json")


def main() -> None:
    """Run the benchmark that the command line names."""
    run(PROG, measure, "interrupted; nothing was written")


if __name__ == "__main__":
    main()
