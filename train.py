"""Train and evaluate an image classification model: torchvision's reference script, exact and hard to kill."""

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path

import torch

import config
import data
import models
import optim
import precision
import preview
import utils
from checkpoint import (
    CheckpointManager,
    OptimizerState,
    RunState,
    check_fits,
    load_checkpoint,
    load_weights,
    run_facts,
)
from config import get_args_parser
from errors import ImageError, NonFiniteError, UserError
from files import write_atomically
from losses import build_criterion
from monitor import LogWindow, Monitor, write_status
from sampler import EvalSampler, RASampler, TrainSampler, VirtualShards

__all__ = ["evaluate", "get_args_parser", "load_data", "main", "train_one_epoch"]


def train_one_epoch(
    model,
    criterion,
    optimizer,
    data_loader,
    device,
    epoch,
    args,
    model_ema=None,
    scaler=None,
    lr_scheduler=None,
    sharded_step=None,
    on_step=None,
    start_step=0,
):
    """Train on all batches of a loader, a step for every group of this process's shards.

    Args:
        model: the model, in DDP or bare, as `models.wrap_model` returns it.
        criterion: from (output, target) to the mean loss of a batch.
        optimizer: makes one step for each group of shards.
        data_loader: yields (image, target) batches: a `DeviceLoader`, or any plain loader.
        device: where the model is.
        epoch: its number, from 0.
        args: reads print_freq, amp, amp_dtype, clip_grad_norm, model_ema_steps and lr_warmup_epochs.
        model_ema: the average to move along, or None.
        scaler: of the loss under `--amp`, or None.
        lr_scheduler: sets the learning rate of each step; None leaves it.
        sharded_step: what surrounds each shard's passes; by default each process has one shard.
        on_step: called after each step with the metric logger, [(loss, top-1 hits, top-5 hits, images)] of its shards
            and the gradient norm or None; by default this process's meters take them.
        start_step: steps of the epoch that were done before.
    """
    models.set_training_mode(model)
    if sharded_step is None:
        world_size = utils.get_world_size()
        sharded_step = models.ShardedStep(
            model, VirtualShards(0, world_size, utils.get_rank(), world_size), device=device
        )
    shards = sharded_step.shards
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    metric_logger = utils.MetricLogger(delimiter="  ")
    metric_logger.add_meter("lr", utils.SmoothedValue(window_size=1, fmt="{value:.4g}"))
    batches = metric_logger.timed(data_loader)
    steps_per_epoch = start_step + len(data_loader) // shards.num_local
    steps = range(start_step, steps_per_epoch)
    autocast = precision.autocast(args, device)
    for step in metric_logger.log_every(steps, args.print_freq, f"Epoch: [{epoch}]", start_step):
        if lr_scheduler:
            lr_scheduler.set_position(epoch, step, steps_per_epoch)
        optimizer.zero_grad()
        results = []
        for shard, (image, target) in zip(shards.local, batches, strict=False):
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with sharded_step.shard(epoch * steps_per_epoch + step, shard):
                with autocast:
                    output = model(image)
                    loss = criterion(output, target)
                scaler.scale(loss * sharded_step.loss_scale).backward()
            results.append((loss.detach(), *utils.count_correct(output, target, topk=(1, 5)), len(image)))
        sharded_step.finish_gradients()

        scaler.unscale_(optimizer)
        grad_norm = optim.clip_gradients(model.parameters(), args.clip_grad_norm, metric_logger.is_line_due)
        scaler.step(optimizer)
        scaler.update()

        if model_ema and step % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.reset()  # until the warm-up is over, the average is a copy of the weights
        metric_logger.update(lr=optimizer.param_groups[0]["lr"])
        (on_step or update_meters)(metric_logger, results, grad_norm)


def update_meters(metric_logger, results, grad_norm):
    """Show this process's own results: what `train_one_epoch` does outside a run."""
    for loss, correct1, correct5, n in results:
        metric_logger.meters["loss"].update(loss, n)
        metric_logger.meters["acc1"].add(100 * correct1, n)
        metric_logger.meters["acc5"].add(100 * correct5, n)


def evaluate(model, criterion, data_loader, device, print_freq=100, log_suffix=""):
    """Evaluate a model on every image of a set, each exactly once, over all processes.

    The sums are formed from the batches in their order, whichever rank computed them: with `EvalSampler`, counts and
    loss are the same in every bit at any number of processes. Collective: every rank must call it, with the bare model:
    ranks may have different numbers of batches, on which DDP would hang.

    Args:
        model: the bare model; its buffers are made those of rank 0.
        criterion: from (output, target) to the mean loss of a batch.
        data_loader: yields (image, target) batches of a sized `dataset`.
        device: where the model is.
        print_freq: batches between two lines.
        log_suffix: what the result line calls the model, such as EMA.

    Returns:
        acc1 and acc5 in percent, the mean loss of an image, and n, the number of images.

    Raises:
        RuntimeError: the loaders of all ranks together did not yield as many images as the set has.
    """
    model.eval()
    models.broadcast_from_master(list(model.buffers()))
    metric_logger = utils.MetricLogger(delimiter="  ")
    loss_meter, acc1_meter, acc5_meter = (metric_logger.meters[name] for name in ("loss", "acc1", "acc5"))
    header = f"Test: {log_suffix}".rstrip()
    with torch.inference_mode():
        for image, target in metric_logger.log_every(data_loader, print_freq, header):
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(image)
            correct1, correct5 = utils.count_correct(output, target, topk=(1, 5))
            loss_meter.update(criterion(output, target), len(image))
            acc1_meter.add(100 * correct1, len(image))
            acc5_meter.add(100 * correct5, len(image))
    metric_logger.synchronize_between_processes()

    n, num_images = loss_meter.count, len(data_loader.dataset)
    if n != num_images:
        raise RuntimeError(f"evaluated {n} images of a set of {num_images}: the sampler leaves out or repeats some")
    acc1, acc5, loss = acc1_meter.global_avg, acc5_meter.global_avg, loss_meter.global_avg
    print(f"{header} Acc@1 {acc1:.3f} Acc@5 {acc5:.3f} loss {loss:.3f} n={n}")
    return {"acc1": acc1, "acc5": acc5, "loss": loss, "n": n}


def load_data(traindir, valdir, args):
    """Return the training and validation sets and the samplers of their batches; no training set with `--test-only`.

    Raises:
        UserError: the folders cannot be used; says why.
    """
    start = time.perf_counter()
    dataset, dataset_test = data.build_datasets(traindir, valdir, args)
    test_sampler = EvalSampler(len(dataset_test), args.batch_size, args.rank, args.world_size)
    if dataset is None:
        return None, dataset_test, None, test_sampler
    shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)
    if args.ra_sampler:
        train_sampler = RASampler(len(dataset), shards, args.seed, repetitions=args.ra_reps)
    else:
        train_sampler = TrainSampler(len(dataset), shards, args.seed)
    print(
        f"{len(dataset)} training and {len(dataset_test)} validation images of {len(dataset.classes)} classes "
        f"({time.perf_counter() - start:.1f} s)\n"
        f"global batch {args.global_batch_size} = {shards.num_shards} shards x {shards.batch_size} images, "
        f"{shards.num_local} a process; {train_sampler.steps_per_epoch} steps an epoch"
    )
    return dataset, dataset_test, train_sampler, test_sampler


class StepHook:
    """What surrounds the steps of a run: counts them, logs and saves.

    Args:
        args: reads checkpoint_steps, output_dir, global_batch_size and world_size.
        run: the state that is moved and saved.
        window: the log window, part of that state.
        monitor: where log lines go.
        manager: where checkpoints go, on rank 0.
        model: the bare model, looked at before it is saved.
    """

    def __init__(self, args, run, window, monitor, manager, model):
        self.args, self.run, self.window = args, run, window
        self.monitor, self.manager, self.model = monitor, manager, model
        self.start_line(wait_s=0.0)

    def start_line(self, wait_s):
        """Measure rates from now on; at the start of an epoch too, or its first line would include an evaluation."""
        self.line_s, self.line_step, self.line_wait_s = time.perf_counter(), self.run.step, wait_s

    def __call__(self, metric_logger, results, grad_norm):
        """Count a step; log and save if that is due. Collective: every rank must call it."""
        for result in results:
            self.window.update(self.run.step, *result)
        self.run.advance()
        if metric_logger.is_line_due:
            self.log(metric_logger, grad_norm)
        is_epoch_over = self.run.steps == self.run.steps_per_epoch
        if self.args.checkpoint_steps and self.run.step % self.args.checkpoint_steps == 0 and not is_epoch_over:
            self.save()

    def log(self, metric_logger, grad_norm):
        """Write the means over all images since the last line. Collective: every rank must call it."""
        self.window.gather()
        means, n = self.window.read()
        elapsed_s = time.perf_counter() - self.line_s
        images = (self.run.step - self.line_step) * self.args.global_batch_size
        for name, value in means.items():
            metric_logger.meters[name].update(value, n)
        metric_logger.meters.setdefault("img/s", utils.SmoothedValue(fmt="{value:.1f}")).update(images / elapsed_s)
        self.monitor.write(
            "train",
            self.run.step,
            self.run.epoch,
            **means,
            lr=metric_logger.lr.value,
            grad_norm=float(grad_norm),
            images_per_s=images / elapsed_s,
            data_wait=(metric_logger.wait_s - self.line_wait_s) / elapsed_s,
            memory_gib=peak_memory_gib(),
            world_size=self.args.world_size,
        )
        self.start_line(metric_logger.wait_s)

    def save(self):
        """Save the run, or end it if its weights are not finite. Collective: every rank must call it."""
        self.window.gather()
        # Equal on all ranks, and so is the answer.
        if not optim.all_finite(self.model.parameters()):
            raise NonFiniteError(f"the weights after step {self.run.step} are not finite; the last checkpoint is kept")
        if utils.is_main_process():
            self.monitor.sync()
            self.manager.save(self.run.state_dict(), is_best=self.run.is_best)

    def take_results(self, results):
        """Log and save what the epoch was evaluated to. Collective: every rank must call it."""
        for kind, result in results.items():
            self.monitor.write(kind, self.run.step, self.run.epoch, **result)
        # An average is trained for its own sake: where there is one, it is what "best" is about.
        kind = "val_ema" if "val_ema" in results else "val"
        self.run.note_result(f"{kind}/acc1", results[kind]["acc1"])
        self.save()

    def finish(self):
        """Say how the run ended."""
        print(result_of(self.args, self.run))
        self.monitor.status("finished", self.run.step)


def result_of(args, run):
    """Return the last lines of a finished run."""
    best = run.best
    return (
        f"finished {run.epoch + 1} epochs, {run.step} steps; all in {args.output_dir}\n"
        f"best {best['metric']} {best['value']:.3f}, after step {best['step']}"
    )


def peak_memory_gib():
    """Return the most memory that this process has used: the GPU's where there is one, else its own."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def set_up(args):
    """Fill in what follows from this machine, join the other processes, and return this process's device.

    Raises:
        UserError: the device, the processes or the weights are not there.
    """
    notes = config.derive(args)
    if args.weights and not Path(args.weights).is_file():
        for name, value in data.options_of_weights(models.resolve_weights(args)).items():
            if args.test_only and name not in args.given:
                setattr(args, name, value)
                notes.append(f"{name.replace('_', '-')} {value}: as {args.weights} was published")
    if args.use_deterministic_algorithms:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if "OMP_NUM_THREADS" not in os.environ:
            # What torchrun sets for several processes; another number of threads sums in another order.
            torch.set_num_threads(1)
    utils.init_distributed_mode(args)
    for note in notes:
        print(note)
    torch.use_deterministic_algorithms(args.use_deterministic_algorithms)
    is_repeatable = args.use_deterministic_algorithms or args.test_only
    precision.set_tf32(is_allowed=args.tf32)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = not is_repeatable, is_repeatable
    device = torch.device(args.device)
    return torch.device(device.type, args.gpu) if args.distributed and device.type != "cpu" else device


def load_resumed(args, manager):
    """Return the checkpoint that `--resume` means and its bytes, or None twice, with the run's shards set accordingly.

    Only rank 0 touches files, and changes none yet. Collective: every rank must call it.

    Raises:
        UserError: it cannot be used, or the output folder holds a run that the options do not speak of.
    """
    payload = utils.call_on_master(manager.read, args.resume)
    state = None if payload is None else load_checkpoint(payload, args.resume)
    if args.test_only:
        if args.resume and state is None:
            raise UserError(f"--test-only --resume auto: there is no checkpoint in --output-dir {args.output_dir}")
        if state is not None:
            take_evaluation_options(args, state["args"])
        return state, None
    utils.call_on_master(manager.check, args.resume, args.overwrite)
    set_shards(args, state)
    return state, payload


def take_evaluation_options(args, trained):
    """Evaluate a checkpoint as its run did, but for what the command line says."""
    names = ("model", "val_resize_size", "val_crop_size", "interpolation", "backend", "eval_flip", "amp", "amp_dtype")
    for name in names:
        if name not in args.given and getattr(args, name) != trained.get(name):
            setattr(args, name, trained.get(name))
            print(f"--{name.replace('_', '-')} {trained[name]}: as in the checkpoint")


def set_shards(args, state):
    """Set the global batch and its shards: those of the resumed run, else what the options and the world size give.

    Raises:
        UserError: the options contradict the checkpoint, or this world size cannot compute the shards.
    """
    if state is None:
        args.global_batch_size = args.global_batch_size or args.batch_size * args.world_size
        args.num_shards = args.global_batch_size // args.batch_size
    else:
        size, num_shards = state["shards"]["global_batch_size"], state["shards"]["num_shards"]
        if args.batch_size != size // num_shards or args.global_batch_size not in (None, size):
            raise UserError(
                f"cannot resume: the checkpoint has {num_shards} shards of {size // num_shards} images; "
                f"pass --batch-size {size // num_shards}, and --global-batch-size {size} or nothing"
            )
        args.global_batch_size, args.num_shards = size, num_shards
    shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)
    shards.check(needs_same_bits=args.use_deterministic_algorithms)


def start_weights(args, state):
    """Return the state dict that `--weights` means, or None; a resumed run has its own.

    Raises:
        UserError: it means none.
    """
    if args.weights is None or state is not None:
        return None
    if Path(args.weights).is_file():
        return load_weights(Path(args.weights))
    weights = models.resolve_weights(args)
    try:
        return weights.get_state_dict(progress=utils.is_main_process(), check_hash=True)
    except OSError as error:
        raise UserError(f"--weights {args.weights}: cannot download {weights.url} ({error})") from error


def open_folder(args, manager, payload, run):
    """Make the output folder ready, with run.json, what the run is, and recipe.toml, which runs it again. Rank 0 only.

    Raises:
        UserError: it cannot be written.
    """
    manager.open(args.resume, payload, run)
    record = {"command": sys.argv, "host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    record |= run.facts
    folder = manager.folder
    write_atomically(folder / "run.json", lambda file: file.write(json.dumps(record, indent=2).encode() + b"\n"))
    write_atomically(folder / "recipe.toml", lambda file: file.write(config.write_recipe(args).encode()))


def evaluate_all(args, model, model_ema, criterion, data_loader, device):
    """Evaluate the model and its average, if there is one; return the results by their names in the log."""
    results = {}
    for kind, scored, suffix in [("val", model, ""), ("val_ema", model_ema, "EMA")]:
        if scored is not None:
            scored = models.FlipAverage(scored) if args.eval_flip else scored
            with precision.autocast(args, device):
                results[kind] = evaluate(scored, criterion, data_loader, device, log_suffix=suffix)
    return results


def main(args):
    """Train or, with `--test-only`, evaluate what the options say. Collective: every rank must call it.

    Raises:
        UserError: something that was given cannot be used.
    """
    device = set_up(args)
    manager = CheckpointManager(Path(args.output_dir))
    state, payload = load_resumed(args, manager)
    traindir, valdir = (os.path.join(args.data_path or "", split) for split in ("train", "val"))
    dataset, dataset_test, train_sampler, test_sampler = load_data(traindir, valdir, args)
    num_classes = len(dataset_test.classes)
    if state is not None:
        check_fits(state, args, num_classes, dataset)
    data_loader = data.build_device_loader(args, dataset, train_sampler, device, num_classes)
    data_loader_test = data.build_device_loader(args, dataset_test, test_sampler, device, num_classes)

    model = models.build_model(args, num_classes, start_weights(args, state))
    model_without_ddp = models.place_model(model, args, device)
    model_ema = models.build_ema(args, model_without_ddp)
    criterion = build_criterion(args)
    if args.test_only:
        model_ema = models.load_evaluated(args, model_without_ddp, state)
        evaluate_all(args, model_without_ddp, model_ema, criterion, data_loader_test, device)
        return

    optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model_without_ddp))
    lr_scheduler = optim.build_lr_scheduler(args, optimizer)
    scaler = precision.build_scaler(args, device)
    model = models.wrap_model(model_without_ddp, args)
    sharded_step = models.ShardedStep(
        model, train_sampler.shards, device=device, seed=args.seed, is_deterministic=args.use_deterministic_algorithms
    )

    window = LogWindow(train_sampler.shards.num_local)
    parts = {
        "model": model_without_ddp,
        "optimizer": OptimizerState(optimizer),
        "model_ema": model_ema,
        "scaler": scaler if scaler.is_enabled() else None,
        "log_window": window,
    }
    run = RunState(train_sampler.steps_per_epoch, run_facts(args, dataset), parts)
    run.resume(state, args.start_epoch if "start_epoch" in args.given else None, args.epochs)
    if run.is_finished(args.epochs):
        utils.call_on_master(write_status, manager.folder, "finished", run.step)
        print(result_of(args, run))
        return
    utils.call_on_master(open_folder, args, manager, payload, run)
    del state, payload
    with Monitor.of_run(args.output_dir, run) as monitor:
        hook = StepHook(args, run, window, monitor, manager, model_without_ddp)
        for epoch in range(run.epoch, args.epochs):
            first_step = run.start_epoch(epoch)
            # Also where the epoch is only to be evaluated: the rate is part of what is saved.
            lr_scheduler.set_position(epoch, max(first_step - 1, 0), run.steps_per_epoch)
            if first_step < run.steps_per_epoch:
                train_sampler.set_epoch(epoch, first_step)
                hook.start_line(wait_s=0.0)
                train_one_epoch(
                    model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler,
                    lr_scheduler, sharded_step, hook, first_step,
                )  # fmt: skip
                hook.save()
            if not run.is_evaluated:
                results = evaluate_all(args, model_without_ddp, model_ema, criterion, data_loader_test, device)
                hook.take_results(results)
        hook.finish()


def cli():
    """Run the script: what a user can mend ends in one line and an exit code, what is our fault in a traceback."""
    try:
        args = config.parse_args()
        if args.list_recipes:
            print(config.list_recipes())
        elif args.dry_run:
            print(preview.preview(args))
        else:
            main(args)
    except UserError as error:
        utils.leave(error, error.exit_code)
    except ImageError as error:
        utils.leave(error, error.exit_code, is_agreed=False)
    except KeyboardInterrupt:
        utils.leave(KeyboardInterrupt("interrupted; --resume auto goes on from the last checkpoint"), 1)
    utils.shut_down()


if __name__ == "__main__":
    cli()
