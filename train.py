"""Train and evaluate an image classification model: torchvision's reference script, exact and fault-tolerant."""

if __name__ == "__main__":
    # Before all other imports, which take seconds: a signal would kill the script, and a mistake would wait.
    from distributed import signals

    signals.begin_script()
    from settings.config import read_command_line

    ARGS = read_command_line()

from contextlib import nullcontext

import torch

import utils
from checkpointing.agreement import check_images, check_processes, check_weights
from checkpointing.guard import check_data, check_options, describe_data, find_hashes
from checkpointing.preprocessing import choose_preprocessing, preprocessing_line
from checkpointing.status import note_refusal
from checkpointing.store import CheckpointManager
from data import build_device_loaders, build_train_sampler, check_shards, load_data, start_loading
from distributed import collectives, signals
from distributed.decision import StepDecisions
from distributed.ending import announce_failure, end_process, end_with_error, leave_group
from distributed.launch import read_launch
from distributed.lending import lent_process
from errors import PreemptedError, UserError
from metrics import Accuracy, Tally, build_metrics, check_count, image_numbers, result_line
from models import build, gradients, optim
from models.losses import build_loss
from models.trained import load_evaluated
from monitoring.console import hash_line, log
from randomness import EVALUATION, seed_device
from run import BareRun, Run
from settings import config
from settings.parser import get_args_parser
from settings.stages import Parsed, values_of

__all__ = ["evaluate", "get_args_parser", "load_data", "main", "train_one_epoch"]


def train_one_epoch(
    model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None, run=None
):
    """Train on all batches of a loader, a step for every group of this process's shards.

    Args:
        model: the model, in DDP or bare, as `gradients.wrap_model` returns it.
        criterion: from (output, target) to the mean loss of a batch.
        optimizer: makes one step for each group of shards.
        data_loader: yields (image, target) batches: a `DeviceLoader`, or any plain loader.
        device: where the model is.
        epoch: its number, from 0.
        args: print_freq, clip_grad_norm, model_ema_steps, lr_warmup_epochs, amp, amp_dtype; any may be missing.
        model_ema: the average to update, or None.
        scaler: scales the loss under `--amp`; None leaves it as it is.
        run: the run around the steps; None for a bare loop, in which each process computes one micro-batch a step.
    """
    args = Parsed.of({"amp": scaler is not None, **values_of(args)})
    device = torch.device(device)
    run = run or BareRun(model, device)
    run.begin_epoch(model, epoch)
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    metric_logger = utils.MetricLogger(delimiter="  ", formats={"lr": "{value:.4g}", "img/s": "{value:.1f}"})
    # `log_every` goes over the steps and prints lines; it tells `end_step` by `is_line_due` to copy the metrics, which
    # come from the device then alone. `timed` counts the seconds in which a step waits for its images.
    batches, numbers = metric_logger.timed(run.training_batches(data_loader)), image_numbers(data_loader)
    steps = run.steps(len(data_loader))
    precision = build.autocast(args.precision, device)
    for step in metric_logger.log_every(steps, args.monitoring.print_freq, f"Epoch: [{epoch}]", steps.start):
        run.begin_step(epoch, step)
        optimizer.zero_grad()
        # `zip` asks the shards first: their end takes no batch from the loader, which would be lost to the next step.
        for shard, (image, target), index in zip(run.local_shards, batches, numbers, strict=False):
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with run.shard(shard):
                with precision:
                    output = model(image)
                    loss = criterion(output, target)
                # `backward` adds up the gradients of this process's shards, and DDP takes the mean over the processes:
                # so scaled, they become the gradients of the mean loss of the global batch, whoever computes what.
                scaler.scale(loss * run.loss_scale).backward()
            run.measure(loss, output, target, index)
        run.finish_gradients()
        scaler.unscale_(optimizer)
        clip = args.optimization
        limits = clip.clip_grad_norm, run.is_record_due, clip.clip_agc, clip.clip_grad_value
        grad_norm = optim.clip_gradients(model.parameters(), *limits)
        scaler.step(optimizer)
        scaler.update()
        if model_ema and step % args.model.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.schedule.lr_warmup_epochs:
                # Weights of the warm-up are far from the last ones: the average is a copy until it is over.
                model_ema.reset()
        metric_logger.update(lr=optim.current_lr(optimizer))
        run.end_step(metric_logger, grad_norm)


def evaluate(model, criterion, data_loader, device, print_freq=100, log_suffix=""):
    """Evaluate a model on every image of a set, as `measure` does, and return the percentage of hits: Acc@1."""
    return measure(model, criterion, data_loader, device, print_freq, log_suffix)["acc1"]


def measure(model, criterion, data_loader, device, print_freq=100, log_suffix="", metrics=None, observe=None):
    """Evaluate a model on every image of a set, each exactly once, over all processes.

    With `EvalSampler`, all values are the same in every bit at any number of processes. Collective: every rank must
    call it, with the bare model: ranks may have different numbers of batches, on which DDP would hang.

    Args:
        model: the bare model; every rank takes the buffers of rank 0.
        criterion: from (output, target) to the mean loss of a batch.
        data_loader: yields (image, target) batches of a sized `dataset`.
        device: where the model is.
        print_freq: batches between two lines.
        log_suffix: name of the model in the result line, such as EMA.
        metrics: the metrics beside the loss; by default Acc@1 and Acc@5.
        observe: called with the arguments of `Metric.batch_sums` for each batch, or None.

    Returns:
        The metrics' values by their names, the mean loss of an image, and n, the number of images.

    Raises:
        RuntimeError: one of our loaders did not yield each image of the set once.
    """
    model.eval()
    # Running statistics: each rank has moved its own, and all evaluate those of rank 0.
    gradients.broadcast_from_master(list(model.buffers()))
    metrics = metrics or [Accuracy()]
    tally, metric_logger = Tally(metrics), utils.MetricLogger(delimiter="  ", is_share=True)
    observers = [metric.observe for metric in metrics] + ([] if observe is None else [observe])
    header = f"Test: {log_suffix}".rstrip()
    batches = metric_logger.log_every(data_loader, print_freq, header)
    with torch.inference_mode(), torch.random.fork_rng([]):
        for (image, target), index in zip(batches, image_numbers(data_loader), strict=False):
            if index is not None:
                # A model that draws does so by image: the same on any number of processes.
                seed_device(torch.device(device), EVALUATION, int(index[0]))
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(image)
            tally.update(criterion(output, target), output, target, index)
            for each in observers:
                each(output, target, index)
            if metric_logger.is_line_due:
                metric_logger.show(*tally.read_local())
    # In the order of the batches, whichever rank computed them: torch rounds a sum by its order.
    tally.synchronize_between_processes()
    values, n = tally.compute_and_reset()
    for metric in metrics:
        values |= metric.gather()
    for line in [result_line(values, n), *check_count(n, data_loader)]:
        print(f"{header} {line}")
    return {**values, "n": n}


def evaluate_all(args, model, model_ema, criterion, loaders, device, metrics=None, run=None):
    """Evaluate the model and its average, if there is one, on each set; return the results by their names in the log.

    These are the sets' names, with _ema for the average. The lines of `val` do not name their set.
    """
    results = {}
    with run.evaluated_weights() if run else nullcontext():
        for name, data_loader in loaders.items():
            for kind, scored, suffix in [(name, model, ""), (f"{name}_ema", model_ema, "EMA")]:
                if scored is not None:
                    scored = build.FlipAverage(scored) if args.model.eval_flip else scored
                    label = suffix if name == "val" else f"{name} {suffix}".rstrip()
                    loader, observe = run.evaluated(kind, data_loader) if run else (data_loader, None)
                    with build.autocast(args.precision, device):
                        results[kind] = measure(scored, criterion, loader, device, 100, label, metrics, observe)
    return results


def resolve(args):
    """Derive options from machine and published weights; return all, and lines about these. UserError for a misfit."""
    args = config.resolve(args)
    optim.check_schedule(args.schedule, args.optimization.lr)
    args, notes = config.on_machine(args)
    if args.model.weights or args.model.model.startswith("timm/"):
        from checkpointing.first_weights import choose_published_options

        args, more = choose_published_options(args)
        notes += more
    return args, notes


def join(args, notes):
    """Print the notes, start to load, join the other processes. Collective: every rank must call it.

    Returns:
        This process's device, the `StepDecisions`, and the `data.Loading`, or None where the checkpoint says how
        images are prepared.

    Raises:
        UserError: the processes or the data are not there, or a process differs.
    """
    decisions = StepDecisions(signals.start_signal_handling(is_training=not args.checkpoint.test_only))
    build.set_up_threads(args.precision)
    collectives.setup_for_distributed(args.distributed.rank == 0)
    if args.distributed.rank == 0 and not args.checkpoint.test_only:
        log.keep()
    for line in notes:
        print(line)
    build.check_model(args)
    # Loader processes are forked before there are threads, as those of the process group, and read while all join.
    loading = None if args.checkpoint.test_only and args.checkpoint.resume else start_loading(args)
    collectives.join_processes(args.distributed, args.monitoring.stall_timeout)
    check_processes(args)
    if not args.checkpoint.test_only:
        signals.follow_agent()
    return build.set_up_device(args.precision, args.distributed, args.checkpoint.test_only), decisions, loading


def find_checkpoint(args, manager):
    """Lock the folder, read the checkpoint or find none, and fix the options that depend on it.

    Changes nothing in the output folder except its lock: `Run` restores the state, and takes over the folder last.
    Collective: every rank must call it.

    Raises:
        UserError: the checkpoint cannot be used, or the folder holds a run that no option resumes or removes.
    """
    if not args.checkpoint.test_only:
        manager.lock()
        if manager.is_restarted():
            print(f"restarted by torchrun: resuming from the newest checkpoint in {manager.folder}")
            args = args.replaced(resume="auto", overwrite=False)
    state = manager.read(args.checkpoint.resume)
    args = config.agree_on_type(args, None if state is None else state["args"])
    if args.checkpoint.test_only:
        if args.checkpoint.resume and state is None:
            place = f"--output-dir {args.checkpoint.output_dir}"
            raise UserError(f"--test-only --resume auto: there is no checkpoint in {place}")
        if state is not None:
            args, notes = config.as_trained(args, state["args"])
            source = f"the checkpoint of --resume {args.checkpoint.resume}"
            args, origin = choose_preprocessing(args, source, state["args"])
            print(*notes, preprocessing_line(args, origin), sep="\n")
        return args, state
    manager.check(args.checkpoint.resume, overwrite=args.checkpoint.overwrite)
    if state is not None:
        check_options(state, args)
    args = config.assign(args, state)
    check_shards(args)
    return args, state


def find_weights(args, state, val):
    """Return the weights of `--weights`; None without it, and where the checkpoint has them."""
    if args.model.weights is None or state is not None:
        return None
    from checkpointing.first_weights import start_weights

    return start_weights(args, val)


@lent_process()
def main(args):
    """Train or, with `--test-only`, evaluate; UserError for unusable input. Collective: every rank must call it."""
    args, notes = resolve(args)
    device, decisions, loading = join(args, notes)
    manager = CheckpointManager.of_options(args.checkpoint)
    args, state = find_checkpoint(args, manager)
    # The model, the loss and what is measured. The first weights are those of the checkpoint, which `Run` restores with
    # all of its state; or those of --weights, a file or published ones, with a new head for other classes; or random.
    if loading is None or not loading.serves(args):
        loading = start_loading(args)
    datasets = check_images(loading.datasets)
    check_data(state, args, *datasets)
    sampler = build_train_sampler(datasets[0], args.augmentation, args.optimization, args.distributed)
    data_loader, loaders = build_device_loaders(args, loading, sampler, device)
    weights = find_weights(args, state, datasets[1])
    model_without_ddp = build.build_model(args, loading.num_classes, weights)
    build.move_to_device(model_without_ddp, args.precision, device)
    build.compile_model(model_without_ddp, args.precision, args.augmentation)
    check_weights(model_without_ddp)
    model_ema = build.build_ema(args, model_without_ddp)
    criterion = check_weights(build_loss(args, model_without_ddp, *datasets[:2]))
    metrics = build_metrics(args, loading.num_classes)
    if args.checkpoint.test_only:
        model_ema = load_evaluated(args, model_without_ddp, state)
        optim.check_finite(model_without_ddp, model_ema)
        print(hash_line(find_hashes(args, describe_data(*datasets[:2]), model_without_ddp)))
        evaluate_all(args, model_without_ddp, model_ema, criterion, loaders, device, metrics)
        return
    groups = optim.build_parameter_groups(args.optimization, model_without_ddp)
    optimizer = optim.build_optimizer(args.optimization, args.precision, args.model.model, groups)
    scaler = build.build_scaler(args.precision, device)
    model = gradients.wrap_model(model_without_ddp, args.distributed, args.precision.compile)
    run = Run(
        args, state, manager, decisions, sampler=sampler, datasets=datasets, model=model, metrics=metrics,
        parts={"model": model_without_ddp, "optimizer": optimizer, "model_ema": model_ema, "scaler": scaler},
    )  # fmt: skip
    del state
    with run:
        for epoch in run.epochs():
            if run.has_steps_left:
                train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler, run)
                run.save()  # before the evaluation, too: a kill in it costs no training
            if run.is_evaluation_due:
                scored = model_without_ddp, model_ema, criterion, loaders, device, metrics, run
                run.record_results(evaluate_all(args, *scored))


def cli(args=None):
    """Run the script: a user's mistake ends in one line and an exit code, a bug in a traceback."""
    args = args or config.read_command_line()
    try:
        try:
            if args.start.dry_run:
                from monitoring.preview import print_preview

                signals.start_signal_handling(is_training=False)
                print_preview(args)
            else:
                main(args)
        except PreemptedError as stop:
            print(f"{stop}; --resume auto continues")
        leave_group()
    except BaseException as error:
        if not isinstance(error, Exception | KeyboardInterrupt):  # not the parser's, whose work is done
            error = UserError(f"code of your own has raised {error!r:.90}; let it raise an Exception", exit_code=1)
        error = announce_failure(error)
        note_refusal(args.checkpoint, args.model.model, args.start.dry_run, error)
        collectives.watchdog.stop()  # `end_with_error` waits for other ranks
        end_with_error(error, read_launch())
    end_process(0)


if __name__ == "__main__":
    signals.end_imports()
    cli(ARGS)
