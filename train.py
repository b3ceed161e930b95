"""Train and evaluate an image classification model: torchvision's reference script, exact and hard to kill."""

if __name__ == "__main__":
    # Ahead of all other imports, which take seconds, in which a signal would kill the script.
    from checkpointing import startup

    startup.begin_script()

import torch

import collectives
import config
import data
import models
import optim
import preview
import utils
from checkpointing.guard import check_data
from checkpointing.preemption import PreemptionGuard
from checkpointing.startup import take_signals
from checkpointing.store import CheckpointManager
from errors import PreemptedError, end_by, end_process
from launch import read_launch
from loading.loader import check_memory
from loading.seen import SeenRecord
from losses import build_criterion
from metrics import count_correct
from options import get_args_parser
from run import BareRun, Run, read_resumed, start_weights

__all__ = ["evaluate", "get_args_parser", "load_data", "main", "train_one_epoch"]


def train_one_epoch(
    model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None, run=None
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
        run: what surrounds the steps; None for a bare loop, in which each process computes one shard a step.
    """
    models.set_training_mode(model)
    run = run or BareRun(model, device)
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    metric_logger = utils.MetricLogger(delimiter="  ", formats={"lr": "{value:.4g}", "img/s": "{value:.1f}"})
    batches = metric_logger.timed(data_loader)
    steps = run.steps(len(data_loader))
    autocast = models.autocast(args, device)
    for step in metric_logger.log_every(steps, args.print_freq, f"Epoch: [{epoch}]", steps.start):
        run.begin_step(epoch, step)
        optimizer.zero_grad()
        results = []
        for shard, (image, target) in zip(run.local_shards, batches, strict=False):
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with run.shard(shard):
                with autocast:
                    output = model(image)
                    loss = criterion(output, target)
                scaler.scale(loss * run.loss_scale).backward()
            results.append((loss.detach(), *count_correct(output, target, topk=(1, 5)), len(image)))
        run.finish_gradients()

        scaler.unscale_(optimizer)
        grad_norm = optim.clip_gradients(model.parameters(), args.clip_grad_norm, metric_logger.is_line_due)
        scaler.step(optimizer)
        scaler.update()

        if model_ema and step % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.reset()  # until the warm-up is over, the average is a copy of the weights
        metric_logger.update(lr=optimizer.param_groups[0]["lr"])
        run.end_step(metric_logger, results, grad_norm)


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
            correct1, correct5 = count_correct(output, target, topk=(1, 5))
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


def evaluate_all(args, model, model_ema, criterion, data_loader, device):
    """Evaluate the model and its average, if there is one; return the results by their names in the log."""
    results = {}
    for kind, scored, suffix in [("val", model, ""), ("val_ema", model_ema, "EMA")]:
        if scored is not None:
            scored = models.FlipAverage(scored) if args.eval_flip else scored
            with models.autocast(args, device):
                results[kind] = evaluate(scored, criterion, data_loader, device, log_suffix=suffix)
    return results


def load_data(traindir, valdir, args):
    """Return the training and validation sets and the samplers of their batches; no training set with `--test-only`.

    Raises:
        UserError: the folders cannot be used; says why.
    """
    dataset, dataset_test = data.build_datasets(traindir, valdir, args)
    return dataset, dataset_test, *data.build_samplers(dataset, dataset_test, args)


def join(args):
    """Take what follows from this machine, start what loads the data, and join the other processes.

    Collective: every rank must call it.

    Returns:
        The options, this process's device, what knows of signals, and what `data.start_loading` returns or None.

    Raises:
        UserError: the device, the processes, the weights or the data are not there.
    """
    args = config.complete(args)
    optim.check_rates(args)
    check_memory(args)
    preemption = PreemptionGuard(is_installed=not args.test_only)
    args, notes = config.on_machine(args)
    args, more = data.take_published_options(args)
    models.set_up_threads(args)
    collectives.setup_for_distributed(args.rank == 0)
    for note in notes + more:
        print(note)
    # Before there are other threads, as those of the process group: see `ProcessLoader.start`.
    is_known = args.decode_device == "cpu" and not (args.test_only and args.resume)
    loading = data.start_loading(args) if is_known else None
    collectives.join_processes(args)
    return args, models.set_up_device(args), preemption, loading


def main(args):
    """Train or, with `--test-only`, evaluate what the options say. Collective: every rank must call it.

    Raises:
        UserError: something that was given cannot be used.
    """
    args, device, preemption, loading = join(args)
    manager = CheckpointManager.of_options(args)
    args, state = read_resumed(args, manager, device)

    (dataset, dataset_test), started = loading or data.start_loading(args)
    train_sampler, test_sampler = data.build_samplers(dataset, dataset_test, args)
    check_data(state, args, dataset, dataset_test)
    seen = SeenRecord(args, state, train=dataset, val=dataset_test)
    num_classes = len(dataset_test.classes)
    data_loader = data.build_device_loader(args, dataset, train_sampler, device, num_classes, started[0])
    data_loader_test = data.build_device_loader(args, dataset_test, test_sampler, device, num_classes, started[1])

    weights = None if state else start_weights(args, dataset_test)
    model_without_ddp = models.place_model(models.build_model(args, num_classes, weights), args, device)
    model_ema = models.build_ema(args, model_without_ddp)
    criterion = build_criterion(args)
    if args.test_only:
        model_ema = models.load_evaluated(args, model_without_ddp, state)
        with seen:
            evaluate_all(args, model_without_ddp, model_ema, criterion, data_loader_test, device)
        return

    optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model_without_ddp))
    scaler = models.build_scaler(args, device)
    model = models.wrap_model(model_without_ddp, args)
    parts = {
        "model": model_without_ddp, "optimizer": optim.OptimizerState(optimizer), "model_ema": model_ema,
        "scaler": scaler if scaler.is_enabled() else None,
    }  # fmt: skip
    run = Run(
        args, state, manager, preemption, seen, sampler=train_sampler, datasets=(dataset, dataset_test), parts=parts,
        sharded_step=models.build_sharded_step(args, model, train_sampler.shards, device),
        lr_scheduler=optim.build_lr_scheduler(args, optimizer),
    )  # fmt: skip
    del state
    with run:
        for epoch in run.epochs():
            if run.has_steps_left:
                train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler, run)
                run.end_epoch()
                data.report_images(data_loader, epoch)
            if not run.is_evaluated:
                loader = run.watched(data_loader_test)
                run.take_results(evaluate_all(args, model_without_ddp, model_ema, criterion, loader, device))


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
    except PreemptedError as stop:
        print(f"{stop}; --resume auto goes on")
    except BaseException as error:
        launch = read_launch()
        end_by(error, launch.rank, launch.local_rank)
    collectives.shut_down()
    end_process(0)


if __name__ == "__main__":
    cli()
