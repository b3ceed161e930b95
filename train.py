"""Train and evaluate an image classification model: torchvision's reference script, exact and hard to kill."""

if __name__ == "__main__":
    # Ahead of all other imports, which take seconds, in which a signal would kill the script.
    import startup

    startup.begin_script()

import json
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch

import config
import data
import models
import optim
import precision
import preview
import utils
from checkpoint import RunState, load_weights
from config import get_args_parser
from errors import ImageError, LoaderKilledError, NoProgressError, PreemptedError, StorageError, UserError
from files import explain_failure, read_json, write_atomically
from guard import check_classes, check_data, check_options, run_facts
from hook import StepHook
from loader import check_workers
from losses import build_criterion
from monitor import MOST_STARTS, LogWindow, Monitor, note_start, write_status
from preemption import PreemptionGuard
from sampler import EvalSampler, RASampler, TrainSampler, VirtualShards
from startup import take_signals
from store import CheckpointManager

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
    dataset, dataset_test = load_datasets(traindir, valdir, args)
    return dataset, dataset_test, *build_samplers(dataset, dataset_test, args)


def load_datasets(traindir, valdir, args):
    """Return the training set (None with `--test-only`) and the validation set; as `load_data`."""
    start = time.perf_counter()
    dataset, dataset_test = data.build_datasets(traindir, valdir, args)
    if dataset is not None:
        print(
            f"{len(dataset)} training and {len(dataset_test)} validation images of {len(dataset.classes)} classes "
            f"({time.perf_counter() - start:.1f} s)"
        )
    return dataset, dataset_test


def start_loading(args):
    """Return the training and validation sets, and their loaders where those are processes, which start now."""
    sets = load_datasets(*(os.path.join(args.data_path or "", split) for split in ("train", "val")), args)
    return sets, data.start_loaders(sets, args)


def build_samplers(dataset, dataset_test, args):
    """Return the samplers of the training set's batches (None for no set) and of the validation set's."""
    test_sampler = EvalSampler(len(dataset_test), args.batch_size, args.rank, args.world_size)
    if dataset is None:
        return None, test_sampler
    shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)
    if args.ra_sampler:
        train_sampler = RASampler(len(dataset), shards, args.seed, repetitions=args.ra_reps)
    else:
        train_sampler = TrainSampler(len(dataset), shards, args.seed)
    print(
        f"global batch {args.global_batch_size} = {shards.num_shards} shards x {shards.batch_size} images, "
        f"{shards.num_local} a process; {train_sampler.steps_per_epoch} steps an epoch"
    )
    return train_sampler, test_sampler


def begin_run(args, state, parts, dataset, dataset_test, sampler):
    """Return the state of the run: resumed, where there is a checkpoint.

    Raises:
        UserError: the options contradict the checkpoint.
    """
    run = RunState(sampler.steps_per_epoch, run_facts(args, dataset, dataset_test), parts)
    run.resume(state, args.start_epoch if "start_epoch" in args.given else None, args.epochs)
    return run


def set_up(args):
    """Fill in what follows from this machine, and join the other processes. Collective: every rank must call it.

    Returns:
        This process's device, the signal guard, and what `start_loading` returns, or None where it is still to be seen
        what is loaded.

    Raises:
        UserError: the device, the processes, the weights or the data are not there.
    """
    guard = PreemptionGuard(is_installed=not args.test_only)
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
    utils.read_launcher(args)
    for note in notes:
        print(note)
    check_workers(args.workers)
    is_known = args.decode_device == "cpu" and not (args.test_only and args.resume)
    # Before there are other threads, as those of the process group: see `ProcessLoader.start`.
    loading = start_loading(args) if is_known else None
    return join(args), guard, loading


def join(args):
    """Join the other processes; return this one's device. Collective: every rank must call it."""
    utils.init_distributed_mode(args)
    torch.use_deterministic_algorithms(args.use_deterministic_algorithms)
    is_repeatable = args.use_deterministic_algorithms or args.test_only
    precision.set_tf32(is_allowed=args.tf32)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = not is_repeatable, is_repeatable
    device = torch.device(args.device)
    if args.distributed and device.type != "cpu":
        device = torch.device(device.type, args.gpu)
    return device


def load_resumed(args, manager, device):
    """Return the checkpoint that `--resume` means, or None, with the run's shards set accordingly.

    Changes nothing in the output folder but who holds its lock. Collective: every rank must call it.

    Raises:
        UserError: it cannot be used, or the output folder holds a run that the options do not speak of.
    """
    if not args.test_only:
        manager.lock()
        go_on_after_restart(args, manager)
    state = manager.read(args.resume)
    if args.test_only:
        if args.resume and state is None:
            raise UserError(f"--test-only --resume auto: there is no checkpoint in --output-dir {args.output_dir}")
        if state is not None:
            manager.say_damaged()
            take_evaluation_options(args, state["args"])
        data.settle_decode_device(args, device)
        return state
    manager.check(args.resume, overwrite=args.overwrite)
    data.settle_decode_device(args, device, state)
    if state is not None:
        if "weights" not in args.given:  # of which two models take how they scale their input
            args.weights = state["args"]["weights"]
        check_options(state, args)
    set_shards(args, state)
    return state


def describe_launch():
    """Return what the processes that one torchrun starts and restarts have in common; None without torchrun."""
    agent = os.environ.get("TORCHELASTIC_RUN_ID")
    return agent and f"{agent} {socket.gethostname()} {os.getppid()}"


def go_on_after_restart(args, manager):
    """Where torchrun restarts the processes, go on with what they saved before, whatever the first start was told.

    What another torchrun left in the folder is not theirs. Collective: every rank must call it.
    """

    def has_saved():
        launch = read_json(manager.folder / "run.json").get("launch")
        is_ours = launch not in (None, "") and launch == describe_launch()
        return b"yes" if is_ours and manager.files.numbered() else None

    if utils.call_on_master(has_saved):
        print(f"restarted by torchrun: going on from the newest checkpoint in {manager.folder}")
        args.resume, args.overwrite = "auto", False


def take_evaluation_options(args, trained):
    """Evaluate a checkpoint as its run did, but for what the command line says."""
    names = [
        "model", "weights", "val_resize_size", "val_crop_size", "interpolation", "backend", "decoder", "decode_device",
        "eval_flip", "amp", "amp_dtype", "tf32", "label_smoothing", "bce_loss", "bce_target_thresh",
    ]  # fmt: skip
    for name in names:
        if name not in args.given and name in trained and getattr(args, name) != trained[name]:
            setattr(args, name, trained[name])
            print(f"--{name.replace('_', '-')} {trained[name]}: as in the checkpoint")
    config.check_taken(args, names)


def set_shards(args, state):
    """Set the global batch and its shards: those of the resumed run, else what the options and the world size give.

    Raises:
        UserError: this world size cannot compute the shards.
    """
    if state is None:
        args.global_batch_size = args.global_batch_size or args.batch_size * args.world_size
        args.num_shards = args.global_batch_size // args.batch_size
    else:
        args.global_batch_size, args.num_shards = state["shards"]["global_batch_size"], state["shards"]["num_shards"]
    shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)
    shards.check(needs_same_bits=args.use_deterministic_algorithms, is_synchronised=args.sync_bn)


def start_weights(args, state, dataset_test):
    """Return the state dict that `--weights` means, or None; a resumed run has its own.

    Raises:
        UserError: it means none, or cannot be evaluated on these classes.
    """
    if args.weights is None or state is not None:
        return None
    if Path(args.weights).is_file():
        weights, kind = load_weights(Path(args.weights), is_average=args.ema)
        print(f"--weights {args.weights}: {kind}")
        check_classes(weights.classes, args, dataset_test)
        return weights
    weights = models.resolve_weights(args)
    try:
        # Torch's hub would unpickle whatever is in its cache: its default is weights_only=False.
        return weights.get_state_dict(progress=utils.is_main_process(), check_hash=True, weights_only=True)
    except OSError as error:
        raise UserError(f"--weights {args.weights}: cannot download {weights.url} ({error})") from error
    except Exception as error:  # as of any bad file: see load_checkpoint
        raise UserError(
            f"--weights {args.weights}: the copy of {weights.url} in torch's cache is damaged or contains code and was "
            "refused; remove it, so that it is fetched anew"
        ) from error


def is_restarted():
    """Tell whether a launcher has started this run again by itself."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def open_run(args, manager, run):
    """Make the output folder ready and write down what the run is. Collective: every rank must call it.

    Also that of a finished run: a kill may have left its last save half done.
    """
    start = note_start(manager.folder, run)
    manager.open(args.resume, run, overwrite=args.overwrite)
    utils.call_on_master(describe_run, args, run, manager.folder, start)


def describe_run(args, run, folder, start):
    """Write run.json, what the run is, recipe.toml, which runs it again, and status.json. Rank 0 only.

    Raises:
        NoProgressError: a launcher starts it again and again, and it gets nowhere.
        StorageError: the files cannot be written.
    """
    try:
        write_description(args, run, folder, start)
    except OSError as error:
        raise StorageError(f"--output-dir {folder}: {explain_failure(error, folder, 0)}; nothing was begun") from error


def write_description(args, run, folder, start):
    """Do what `describe_run` says, but for the words about a disk that fails."""
    write_status(folder, "running", run.step, start=start)
    if start["count"] > MOST_STARTS and is_restarted() and not run.is_finished(args.epochs):
        reason = f"no progress: start number {start['count']} in a row from step {run.step}"
        write_status(folder, "failed", run.step, reason)
        raise NoProgressError(f"{reason}; not trying again by itself: look into the log, then start it by hand")
    record = {"command": sys.argv, "host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    record |= {"launch": describe_launch(), **run.facts}
    for name, text in [("run.json", json.dumps(record, indent=2) + "\n"), ("recipe.toml", config.write_recipe(args))]:
        path = folder / name
        if not (run.is_finished(args.epochs) and path.exists()):  # which tell how it was computed
            write_atomically(path, lambda file, text=text: file.write(text.encode()))


def evaluate_all(args, model, model_ema, criterion, data_loader, device):
    """Evaluate the model and its average, if there is one; return the results by their names in the log."""
    results = {}
    for kind, scored, suffix in [("val", model, ""), ("val_ema", model_ema, "EMA")]:
        if scored is not None:
            scored = models.FlipAverage(scored) if args.eval_flip else scored
            with precision.autocast(args, device):
                results[kind] = evaluate(scored, criterion, data_loader, device, log_suffix=suffix)
    return results


def evaluate_loaded(args, model, state, criterion, data_loader, device, seen):
    """Evaluate what `--resume` or `--weights` gave; say which images have changed. Collective."""
    model_ema = models.load_evaluated(args, model, state)
    with seen:
        evaluate_all(args, model, model_ema, criterion, data_loader, device)


def main(args):
    """Train or, with `--test-only`, evaluate what the options say. Collective: every rank must call it.

    Raises:
        UserError: something that was given cannot be used.
    """
    device, preemption, loading = set_up(args)
    manager = CheckpointManager(
        Path(args.output_dir), keep_last=args.keep_last, keep_every=args.keep_every, minutes=args.checkpoint_minutes,
        save_per_node=args.save_per_node,
    )  # fmt: skip
    state = load_resumed(args, manager, device)
    (dataset, dataset_test), (started, started_test) = loading or start_loading(args)
    train_sampler, test_sampler = build_samplers(dataset, dataset_test, args)
    num_classes = len(dataset_test.classes)
    check_data(state, args, dataset, dataset_test)
    seen = data.SeenRecord(args, state, train=dataset, val=dataset_test)
    data_loader = data.build_device_loader(args, dataset, train_sampler, device, num_classes, started)
    data_loader_test = data.build_device_loader(args, dataset_test, test_sampler, device, num_classes, started_test)

    model = models.build_model(args, num_classes, start_weights(args, state, dataset_test))
    model_without_ddp = models.place_model(model, args, device)
    model_ema = models.build_ema(args, model_without_ddp)
    criterion = build_criterion(args)
    if args.test_only:
        evaluate_loaded(args, model_without_ddp, state, criterion, data_loader_test, device, seen)
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
        "optimizer": optim.OptimizerState(optimizer),
        "model_ema": model_ema,
        "scaler": scaler if scaler.is_enabled() else None,
        "log_window": window,
    }
    run = begin_run(args, state, parts, dataset, dataset_test, train_sampler)
    open_run(args, manager, run)
    del state
    with (
        seen,
        Monitor.of_run(args.output_dir, run) as monitor,
        StepHook(args, run, window, monitor, manager, model_without_ddp, preemption, train_sampler) as hook,
    ):
        for epoch in range(run.epoch, args.epochs):
            hook.check()
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
                data.report_images(data_loader, epoch)
                seen.keep()
            if not run.is_evaluated:
                watched = hook.watched(data_loader_test)
                results = evaluate_all(args, model_without_ddp, model_ema, criterion, watched, device)
                hook.take_results(results)
        hook.finish()


def cli():
    """Run the script: what a user can mend ends in one line and an exit code, what is our fault in a traceback."""
    try:
        args = config.parse_args()
        if args.list_recipes or args.dry_run:
            take_signals().release()
            text = config.list_recipes() if args.list_recipes else preview.preview(args)
            print(text)  # looked up here: after a preview only the first of several processes prints
        else:
            main(args)
    except UserError as error:
        utils.leave(error, error.exit_code)
    except PreemptedError as stop:
        print(f"{stop}; --resume auto goes on")
    except (ImageError, LoaderKilledError) as error:
        utils.leave(error, error.exit_code, is_agreed=False)
    except KeyboardInterrupt:
        utils.leave(KeyboardInterrupt("interrupted; --resume auto goes on from the last checkpoint"), 1)
    except SystemExit as end:  # of the parser
        utils.end_process(end.code or 0)
    except Exception as error:
        if limit := utils.explain_limit(error):
            utils.leave(limit, limit.exit_code)
        with suppress(OSError):  # the terminal may be gone
            traceback.print_exc()
        utils.end_process(1)
    utils.shut_down()
    utils.end_process(0)


if __name__ == "__main__":
    cli()
