"""Measure a training step: against its limit and torchvision's way, on several processes, and after a save."""

import argparse
import copy
import io
import json
import os
import random
import resource
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
from torch.utils.data import DataLoader, Subset, TensorDataset

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
from monitoring.flops import count_flops
from monitoring.gauges import peak_tflops
from monitoring.monitor import read_records
from options import COMPILE_MODES
from run import BareRun
from sampler import TrainSampler, VirtualShards
from scripts.tool import positive

NUM_CLASSES = 1000
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Way:
    """A way to train: one model with everything that its step needs, built as train.py builds it.

    A subclass has `run_steps`.

    Args:
        args: the options of one process of the run.
        device: the device of the model.
        num_steps: steps per call.

    Attributes:
        memory_gib: the peak GPU memory of the last call; 0 on other devices.
    """

    memory_gib = 0.0

    def __init__(self, args: argparse.Namespace, device: torch.device, num_steps: int) -> None:
        self.args, self.device, self.num_steps = args, device, num_steps
        model = models.build_model(args, NUM_CLASSES)
        self.model = models.place_model(model, args, device)
        self.model_ema = models.build_ema(args, self.model)
        self.criterion = metrics.build_criterion(args)
        self.optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, self.model))
        self.scaler = models.build_scaler(args, device)
        self.shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)

    def __call__(self) -> int:
        """Train; return the number of images."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.run_steps()
        synchronize(self.device)
        if is_cuda:
            self.memory_gib = torch.cuda.max_memory_allocated(self.device) / 2**30
        return self.num_steps * self.args.global_batch_size

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
    """A run's part in a step: learning rates of a schedule, and metrics that are read when a line is due.

    Args:
        way: has the optimizer and the shards.
        model: its model, wrapped for several processes.
    """

    def __init__(self, way: Way, model: nn.Module) -> None:
        super().__init__(model, way.device)
        self.sharded_step = gradients.build_sharded_step(way.args, model, way.shards, way.device)
        self.scheduler = optim.LRScheduler(way.args, way.optimizer)
        self.tally = metrics.Tally([metrics.Accuracy()], way.shards.num_local)
        self.args, self.parameters, self.due = way.args, list(way.model.parameters()), []

    def begin_step(self, epoch: int, step: int) -> None:
        """Set the learning rate of a step."""
        super().begin_step(epoch, step)
        self.scheduler.set_position(epoch, step, self.steps_per_epoch)
        self.is_record_due = (self.number + 1) % self.args.print_freq == 0

    def end_step(self, metric_logger: Any, grad_norm: Tensor | None) -> None:
        """Read the metrics when a line is due."""
        if self.is_record_due:
            self.due = [grad_norm, nn.utils.get_total_norm(self.parameters)]
        if metric_logger.is_line_due:
            self.tally.synchronize_between_processes()
            metric_logger.show(*self.tally.read())
            self.due = [float(norm) for norm in self.due]


class OurLoop(Way):
    """The real `train_one_epoch` from the real loader."""

    def __init__(self, args: argparse.Namespace, device: torch.device, num_steps: int) -> None:
        super().__init__(args, device, num_steps)
        dataset = data.SyntheticImages(num_steps * args.global_batch_size, args.train_crop_size, NUM_CLASSES)
        sampler = TrainSampler(len(dataset), self.shards)
        self.loader = data.build_device_loader(args, dataset, sampler, device, NUM_CLASSES)
        self.wrapped = gradients.wrap_model(self.model, args)
        self.run = LoggedRun(self, self.wrapped)

    def run_steps(self) -> None:
        """Run an epoch."""
        with redirect_stdout(io.StringIO()):
            train.train_one_epoch(
                self.wrapped, self.criterion, self.optimizer, self.loader, self.device, 0, self.args, self.model_ema,
                self.scaler, self.run,
            )  # fmt: skip


class BareStep(Way):
    """The same arithmetic on a batch that is on the device: passes, accumulation, clipping, update and average.

    It loads, counts, seeds, schedules and logs nothing, and reads nothing from the device.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, num_steps: int) -> None:
        super().__init__(args, device, num_steps)
        size = args.train_crop_size
        memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
        image = torch.randn(args.batch_size, 3, size, size, device=device).to(memory_format=memory_format)
        self.batch = image, torch.arange(args.batch_size, device=device) % NUM_CLASSES
        self.autocast = models.autocast(args, device)

    def run_steps(self) -> None:
        """Run the steps."""
        (image, target), loss_scale = self.batch, 1.0 / self.shards.num_local
        self.model.train()
        for number in range(self.num_steps):
            self.optimizer.zero_grad()
            for _ in self.shards.local:
                with self.autocast:
                    loss = self.criterion(self.model(image), target)
                self.scaler.scale(loss * loss_scale).backward()
            self.update(number)


class TorchvisionsWay(Way):
    """A plain loop like that of torchvision's reference script: NCHW, uncompiled, reading three numbers per step.

    It ignores channels_last, compile and the global batch, for that script has none of them. As from torchvision's
    presets, its images are float32 and come normalised from the loader; here they cost nothing to make, which favours
    torchvision.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, num_steps: int) -> None:
        args = copy.copy(args)
        args.channels_last, args.compile, args.global_batch_size, args.num_shards = False, None, args.batch_size, 1
        super().__init__(args, device, num_steps)
        pool, size = data.SyntheticImages.POOL, args.train_crop_size
        images = TensorDataset(torch.randn(pool, 3, size, size), torch.arange(pool) % NUM_CLASSES)
        self.loader = DataLoader(
            Subset(images, [number % pool for number in range(num_steps * args.batch_size)]), args.batch_size,
            shuffle=True, num_workers=args.workers, pin_memory=device.type == "cuda",
            persistent_workers=args.workers > 0,
        )  # fmt: skip
        # torchvision leaves the optimizer's kernels to torch's defaults.
        for group in self.optimizer.param_groups:
            group.update({name: None for name in ("foreach", "fused") if name in group})
        self.optimizer._step_supports_amp_scaling = False

    def run_steps(self) -> None:
        """Run an epoch."""
        self.model.train()
        logger = utils.MetricLogger()
        for number, (image, target) in enumerate(self.loader):
            image, target = image.to(self.device), target.to(self.device)
            with models.autocast(self.args, self.device):
                output = self.model(image)
                loss = self.criterion(output, target)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.update(number)
            correct1, correct5 = utils.accuracy(output, target, topk=(1, 5))
            logger.update(loss=loss.item(), acc1=correct1.item(), acc5=correct5.item())


def interleave(
    ways: dict[str, Callable[[], int]], rounds: int, num_turns: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Run the ways by turns, in random order, and return each one's images per second in each round.

    Args:
        ways: each does the work of a turn and returns the number of its images.
        rounds: rounds that count; one before them warms the page cache, the processes and the kernels.
        num_turns: turns of each way in a round.
        clock: process_time for one thread, perf_counter for several processes and for devices.
    """
    rates = {name: [] for name in ways}
    order, rng = list(ways), random.Random(0)
    for round_number in range(rounds + 1):
        num_images, spent_s = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
        for _ in range(num_turns):
            rng.shuffle(order)
            for name in order:
                start = clock()
                num_images[name] += ways[name]()
                spent_s[name] += clock() - start
        for name in ways if round_number else ():
            rates[name].append(num_images[name] / spent_s[name])
        if collectives.is_main_process():
            print(f"round {round_number} of {rounds}" + (" (warm-up)" if not round_number else ""), file=sys.stderr)
    return rates


def compare_rates(rates: list[float], others: list[float]) -> dict[str, Any]:
    """Return the median, the quartiles and the range of the ratios of rates to others, round by round."""
    ratios = [rate / other for rate, other in zip(rates, others, strict=True)]
    low, middle, high = quartiles(ratios)
    return {"ratio": middle, "ratio_quartiles": [low, high], "ratio_range": [min(ratios), max(ratios)]}


def summarize(rates: dict[str, list[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """Return each way's median rate, and its ratios to the baseline as `compare_rates` does."""
    return {
        name: {"images_per_s": statistics.median(values), **compare_rates(values, rates[baseline])}
        for name, values in rates.items()
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Return the facts, besides the options, that a timing depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"device": name, "torch": str(torch.__version__), "threads": torch.get_num_threads()}


SWITCHES = ["--amp", "--tf32", "--channels-last", "--grad-checkpointing"]


def to_argv(options: argparse.Namespace, *names: str) -> list[str]:
    """Return the options of these names that have a value, as train.py's command line has them."""
    given = {name: getattr(options, name) for name in names}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def training_args(options: argparse.Namespace, *extra: str) -> argparse.Namespace:
    """Return the options of the measured run: like a recipe's, for one process."""
    argv = ["--synthetic", "--lr-warmup-epochs", "1", "--lr-scheduler", "cosineannealinglr", "--lr", "0.01"]
    argv += ["--epochs", "100", "--lr-per-step", f"--val-crop-size={options.train_crop_size}"]
    argv += to_argv(options, "model", "batch_size", "train_crop_size", "workers", "opt")
    argv += to_argv(options, "device", "amp_dtype", "compile")
    argv += [switch for switch in SWITCHES if getattr(options, switch[2:].replace("-", "_"))]
    args = config.parse_args([*argv, *extra])
    record, _ = config.on_machine(args)
    record = config.with_shards(record.replaced(distributed=False, rank=0, world_size=1), state=None)
    return argparse.Namespace(**vars(record))  # not frozen: some ways change an option


# The additions of a modern recipe to a step, which the second variant measures.
MODERN = ["--model-ema", "--model-ema-steps", "4", "--clip-grad-norm", "1.0"]


# The ways of our loop that `--compare` knows, with the options that they add.
LOOPS = {"ddp": [], "deterministic": ["--use-deterministic-algorithms"]}


def benchmark_step(options: argparse.Namespace) -> dict[str, Any]:
    """Measure our loop against the bare step and torchvision's way: plain, and with average, clipping, accumulation.

    Raises:
        UserError: `--nproc` and `--compare` do not fit each other, or a process failed.
    """
    given = {name: value for name, value in vars(options).items() if name not in ("run", "json")}
    if options.compare:
        return {"options": given, **compare_loops(options)}
    if options.nproc > 1:
        raise UserError(f"--nproc {options.nproc} needs --compare ddp,deterministic; the other ways are of one process")
    if options.threads:
        torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {"options": given, "ratios": {}}
    for variant, extra in [
        ("plain", []),
        ("ema_clip_accumulation", [*MODERN, "--global-batch-size", str(2 * options.batch_size)]),
    ]:
        args = training_args(options, *extra)
        device = torch.device(args.device)
        models.set_tf32(is_allowed=args.tf32)
        torch.backends.cudnn.benchmark = True
        steps = max(options.steps // args.num_shards, 1)
        ways = {"loop": OurLoop(args, device, steps), "bare": BareStep(args, device, steps)}
        ways["torchvision"] = TorchvisionsWay(args, device, steps * args.num_shards)
        rates = interleave(ways, options.rounds)
        summary = {
            name: {"images_per_s": statistics.median(values), **compare_rates(rates["loop"], values)}
            for name, values in rates.items()
        }
        flops, peak = count_flops(args, NUM_CLASSES), peak_tflops(args, device)
        achieved_tflops = summary["loop"]["images_per_s"] * flops / 1e12
        figures[variant] = {
            "rates": rates,
            "summary": summary,
            "memory_gib": {name: way.memory_gib for name, way in ways.items()} if device.type == "cuda" else {},
            "process_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "gflop_per_image": flops / 1e9,
            "achieved_tflops": achieved_tflops,
            "mfu": None if peak is None else achieved_tflops / peak,
        }
        show_step(variant, figures[variant], peak)
        suffix = "" if variant == "plain" else f"_{variant}"
        figures["ratios"] |= {f"loop_vs_{way}{suffix}": summary[way]["ratio"] for way in ("bare", "torchvision")}
        del ways
    return figures | {"machine": describe(device)}


def show_step(variant: str, figures: dict[str, Any], peak: float | None) -> None:
    """Print one comparison."""
    print(f"\n{variant.replace('_', ', ')}: images/s, and our loop as a multiple of each (quartiles; range)")
    for name, row in figures["summary"].items():
        memory = f"   {figures['memory_gib'][name]:.2f} GiB" if figures["memory_gib"] else ""
        print(f"{row_text(name, row)}{memory}")
    mfu = "unknown: no peak known for this device" if figures["mfu"] is None else f"{figures['mfu']:.1%} of {peak:g}"
    print(
        f"  {figures['gflop_per_image']:.2f} GFLOP an image, {figures['achieved_tflops']:.3f} TFLOP/s; MFU {mfu}; "
        f"this process at most {figures['process_memory_gib']:.2f} GiB"
    )


def row_text(name: str, row: dict[str, Any]) -> str:
    """Return a line of one way's rate and ratios."""
    low, high, least, most = *row["ratio_quartiles"], *row["ratio_range"]
    ratios = f"x{row['ratio']:.3f} ({low:.3f} to {high:.3f}; {least:.3f} to {most:.3f})"
    return f"  {name:<14}{row['images_per_s']:9.1f}   {ratios}"


def loops(text: str) -> list[str]:
    """Read names of `LOOPS` with commas between them; an argparse type."""
    names = text.split(",")
    if len(names) < 2 or len(set(names)) < len(names) or not set(names) <= LOOPS.keys():
        raise argparse.ArgumentTypeError(f"{text}: expected two or more of {', '.join(LOOPS)}, with commas")
    return names


def compare_loops(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ways of our loop against the first one, on `--nproc` processes, and print their ratios to it."""
    with tempfile.TemporaryDirectory() as folder:
        figures = start_ranks(options, options.nproc, Path(folder), max_nproc=options.nproc)
    first = options.compare[0]
    print(f"{options.nproc} processes: images/s in all, and each as a multiple of {first} (quartiles; range)")
    figures["summary"] = summarize(figures["rates"], first)
    for name, row in figures["summary"].items():
        print(row_text(name, row))
    figures["ratios"] = {f"{name}_vs_{first}": figures["summary"][name]["ratio"] for name in options.compare[1:]}
    return figures


def join_ranks(options: argparse.Namespace, *extra: str) -> tuple[argparse.Namespace, torch.device]:
    """Return the options and the device of one process of several. Collective: every rank must call it."""
    args = training_args(options, *extra)
    args.world_size = int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        utils.init_distributed_mode(args)
    args.rank, args.distributed = collectives.get_rank(), True
    args.gpu = collectives.choose_gpu(read_launch(), args.device)
    args.num_shards = args.world_size
    args.global_batch_size = args.batch_size * args.world_size
    return args, models.set_up_device(args)


def compare_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the loops of `--compare` in turns, as one process of several. Collective: every rank must call it."""
    ways = {}
    for name in options.compare:
        args, device = join_ranks(options, *LOOPS[name])
        ways[name] = partial(run_together, OurLoop(args, device, options.steps))
    rates = interleave(ways, options.rounds)
    return {"nproc": options.nproc, "rates": rates, "machine": describe(device)}


def run_together(loop: OurLoop) -> int:
    """Choose the kernels of a loop's options, and begin it on all processes at once."""
    models.set_up_device(loop.args)
    dist.barrier()
    return loop()


def scaling_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts of a step, as one process of several. Collective: every rank must call it."""
    args, device = join_ranks(options)
    loop = OurLoop(args, device, options.steps)
    alone = copy.copy(args)
    alone.global_batch_size, alone.num_shards, alone.rank, alone.world_size = args.batch_size, 1, 0, 1
    bare = BareStep(alone, device, options.steps)
    gradients = torch.zeros(sum(parameter.numel() for parameter in loop.model.parameters()), device=device)
    ways = {
        "step_s": loop,
        "compute_s": bare,
        "data_s": lambda: sum(len(image) for image, _ in loop.loader),
        "all_reduce_s": lambda: [dist.all_reduce(gradients) for _ in range(options.steps)],
    }
    seconds = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            synchronize(device)
            seconds[name].append((time.perf_counter() - start) / options.steps)
    figures: dict[str, Any] = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    figures |= {"nproc": args.world_size, "batch_size": args.batch_size, "machine": describe(device)}
    return figures | {"gradient_bytes": gradients.numel() * gradients.element_size(), "seconds": seconds}


def start_processes(options: argparse.Namespace, max_nproc: int, command: list[str], stdout: Any, failure: str) -> None:
    """Run Python, with the cores divided among `max_nproc` processes; UserError with `failure` if it fails."""
    threads = options.threads or max(collectives.count_cores() // max_nproc, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    folder = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, *command], stdout=stdout, check=False, cwd=folder, env=environment)
    if done.returncode:
        raise UserError(f"benchmark {failure}; see above")


def start_ranks(options: argparse.Namespace, nproc: int, folder: Path, max_nproc: int) -> dict[str, Any]:
    """Start `nproc` processes with torchrun, each with 1 / `max_nproc` of the cores; return the figures of rank 0."""
    path = folder / f"{nproc}.json"
    passed = {**vars(options), "json": str(path)}
    passed.pop("run", None)
    command = [*TORCHRUN, f"--nproc_per_node={nproc}", "-m", "scripts.step_benchmark", json.dumps(passed)]
    failure = f"{options.command} failed on {nproc} processes"
    start_processes(options, max_nproc, command, subprocess.DEVNULL, failure)
    return json.loads(path.read_text())


ASSUMPTIONS = """\
a step takes data + compute + the part of the all-reduce that the backward pass (2/3 of compute) does not hide:
  best:  data + compute/3 + max(2/3 compute, all-reduce); worst: data + compute + all-reduce + all else measured
  compute and data are measured at the largest number of processes: cores, disks and GPUs are assumed to grow with it
  all-reduce = 2 (N - 1) / N x gradient bytes / bandwidth, as in a ring; the bandwidth is measured at the same number,
  and says nothing of a network between machines"""


def predict(measured: list[dict[str, Any]], nproc: int) -> dict[str, float]:
    """Return the bandwidth and the bounds of images/s that the model above gives for `nproc` processes."""
    last = measured[-1]
    compute, data_s, size = last["compute_s"], last["data_s"], last["gradient_bytes"]
    volume = 2 * (last["nproc"] - 1) / last["nproc"] * size
    bandwidth = volume / last["all_reduce_s"] if volume else float("inf")
    reduce_s = 2 * (nproc - 1) / nproc * size / bandwidth
    best = data_s + compute / 3 + max(2 / 3 * compute, reduce_s)
    # The loop's own part, and the time that the passes lose where the all-reduce takes their cores.
    else_s = max(last["step_s"] - data_s - compute - last["all_reduce_s"], 0)
    images = nproc * last["batch_size"]
    return {
        "nproc": nproc,
        "bandwidth_gb_per_s": bandwidth / 1e9 if volume else None,
        "images_per_s_best": images / best,
        "images_per_s_worst": images / (data_s + compute + reduce_s + else_s),
    }


def benchmark_scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Measure 1 to N processes with torchrun, print where the time goes, and predict more of them."""
    with tempfile.TemporaryDirectory() as folder:
        measured = [start_ranks(options, n, Path(folder), max(options.nproc)) for n in sorted(options.nproc)]
    base = measured[0]["batch_size"] / measured[0]["step_s"]  # images/s a process
    print("processes  images/s  efficiency   ms a step: step = data + compute + the rest   all-reduce alone")
    for row in measured:
        row["images_per_s"] = row["nproc"] * row["batch_size"] / row["step_s"]
        row["efficiency"] = row["images_per_s"] / row["nproc"] / base
        step, data_ms, compute, reduce = (1e3 * row[f"{name}_s"] for name in ("step", "data", "compute", "all_reduce"))
        print(
            f"{row['nproc']:9d}  {row['images_per_s']:8.1f}  {row['efficiency']:10.2f}   {step:.1f} = {data_ms:.1f} + "
            f"{compute:.1f} + {step - data_ms - compute:.1f}   {reduce:.1f}"
        )
    print(ASSUMPTIONS)
    checks = [predict(measured, row["nproc"]) for row in measured]
    more = [predict(measured, measured[-1]["nproc"] * factor) for factor in (2, 4, 8)]
    for row in [*checks, *more]:
        print(
            f"{row['nproc']:4d} processes: {row['images_per_s_worst']:.1f} to {row['images_per_s_best']:.1f} images/s"
        )
    return {"measured": measured, "model_of_measured": checks, "predicted": more, "assumptions": ASSUMPTIONS}


def benchmark_saving(options: argparse.Namespace) -> dict[str, Any]:
    """Run train.py, which saves every few steps, and print how much longer the steps after a save take than others.

    The times are those of the run's own records, one per step.

    Raises:
        UserError: the run failed, or there are too few steps between two saves to tell.
    """
    every = options.every
    if every < 4:
        raise UserError(f"--every {every}: expected 4 or more, since the last half of the steps is the measure")
    with tempfile.TemporaryDirectory() as folder:
        run_saving(options, Path(folder, "run"), (options.rounds + 2) * every)
        times = {row["step"]: row["time"] for row in read_records(Path(folder, "run")) if row["kind"] == "train"}
    ratios, costs, plain = [], [], []
    for save in range(2 * every, (options.rounds + 2) * every, every):  # the first save allocates its memory
        steps = [times[step + 1] - times[step] for step in range(save, save + every)]
        base = statistics.median(steps[every // 2 :])
        plain.append(base)
        ratios.append([step / base for step in steps])
        costs.append(sum(steps) - every * base)
    figures = {
        "plain_s": plain, "step_ratios": ratios, "save_costs_s": costs, "machine": describe(torch.device("cpu")),
        "ratios": {"saving_vs_plain": statistics.median(row[0] for row in ratios)},
    }  # fmt: skip
    print(f"{len(costs)} saves of {statistics.median(costs):.2f} s each; a step takes {statistics.median(plain):.2f} s")
    print("steps after a save, as a multiple of those long after one: median (quartiles)")
    for place in range(every):
        low, middle, high = quartiles([row[place] for row in ratios])
        print(f"  {place + 1:<4}{middle:.3f} ({low:.3f} to {high:.3f})")
    return figures


def run_saving(options: argparse.Namespace, folder: Path, num_steps: int) -> None:
    """Train `num_steps` steps into a folder, and save every `--every` of them."""
    command = [*TORCHRUN, f"--nproc_per_node={options.nproc}"] if options.nproc > 1 else []
    command += ["train.py", "--output-dir", str(folder)]
    command += ["--synthetic", str(num_steps * options.batch_size * options.nproc), "--epochs", "1", "--workers", "0"]
    command += ["--checkpoint-steps", str(options.every), "--print-freq", "1", "--lr", "1e-6"]
    command += to_argv(options, "model", "batch_size", "train_crop_size", "device")
    start_processes(options, options.nproc, command, sys.stderr, "saving failed")


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def add_commands(commands: Any) -> None:
    """Register the commands here with the subparsers of scripts/benchmark.py; `options.run` is the function to call."""
    step = commands.add_parser("step", help="a training step, against its limit and torchvision's loop")
    scaling = commands.add_parser("scaling", help="1 to N processes, and a model of more")
    saving = commands.add_parser("saving", help="steps while a checkpoint is written, against the others")
    for command, model, px, batch_size, rounds, rounds_help in [
        (step, "resnet18", 224, 64, 9, "rounds (default: 9, and a warm-up)"),
        (scaling, "resnet18", 224, 64, 3, "rounds (default: 3, and a warm-up)"),
        (saving, "resnet50", 128, 16, 9, "saves (default: 9, and a warm-up)"),
    ]:
        words = f"images per process (default: {batch_size})"
        command.add_argument("--model", default=model, help=f"as train.py's (default: {model})")
        command.add_argument("--train-crop-size", metavar="PX", type=positive, default=px, help=f"side (default: {px})")
        command.add_argument("--batch-size", metavar="N", type=positive, default=batch_size, help=words)
        command.add_argument("--device", help="default: the accelerator that is there, else cpu")
        command.add_argument("--rounds", metavar="N", type=positive, default=rounds, help=rounds_help)
    for command in (step, scaling):
        command.add_argument("--workers", metavar="N", type=int, default=0, help="loader processes (default: 0)")
        command.add_argument("--steps", metavar="N", type=positive, default=10, help="per round (default: 10)")
        for switch in SWITCHES:
            command.add_argument(switch, action="store_true", help="as train.py's")
        command.add_argument("--amp-dtype", choices=sorted(models.AMP_DTYPES), help="as train.py's")
        command.add_argument("--compile", nargs="?", const="default", choices=COMPILE_MODES, help="likewise")
        command.add_argument("--opt", default="sgd", help="likewise (default: sgd)")
    step.add_argument("--threads", metavar="N", type=positive, help="CPU threads (default: torch's)")
    step.add_argument(
        "--compare", metavar="WAYS", type=loops,
        help="compare ways of our loop instead, such as ddp,deterministic (--use-deterministic-algorithms)",
    )  # fmt: skip
    step.add_argument("--nproc", metavar="N", type=positive, default=1, help="processes of --compare (default: 1)")
    step.set_defaults(run=benchmark_step)
    scaling.add_argument("--nproc", metavar="N", type=positive, nargs="+", default=[1, 2], help="counts (default: 1 2)")
    scaling.add_argument("--threads", metavar="N", type=positive, help="CPU threads each (default: cores / largest N)")
    scaling.set_defaults(run=benchmark_scaling)
    saving.add_argument("--nproc", metavar="N", type=positive, default=1, help="processes (default: 1)")
    saving.add_argument("--threads", metavar="N", type=positive, help="CPU threads each (default: cores / N)")
    saving.add_argument("--every", metavar="N", type=positive, default=8, help="steps between saves (default: 8)")
    saving.set_defaults(run=benchmark_saving)


if __name__ == "__main__":
    if not sys.argv[1:] or not sys.argv[1].startswith("{"):
        argparse.ArgumentParser().exit(2, "python -m scripts.benchmark step, scaling and saving start this\n")
    OPTIONS = argparse.Namespace(**json.loads(sys.argv[1]))
    FIGURES = compare_rank(OPTIONS) if OPTIONS.command == "step" else scaling_rank(OPTIONS)
    if collectives.is_main_process():
        Path(OPTIONS.json).write_text(json.dumps(FIGURES))
    collectives.shut_down()
