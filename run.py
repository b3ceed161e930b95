"""Training-run lifecycle: start or resume, log, save, stop."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from checkpointing.checkpoint import RunState
from checkpointing.folder import explained
from checkpointing.guard import describe_processor, find_hashes, run_facts
from checkpointing.status import StatusFile
from checkpointing.store import CheckpointManager
from distributed import collectives, signals
from distributed.decision import CONTINUE, StepDecisions, WatchedLoader
from distributed.ending import announce_failure, forget_refusals, loader_killed
from distributed.launch import read_launch
from distributed.watch import watchdog
from errors import ImageError, PreemptedError, StorageError, UserError, counted
from files import write_atomically
from metrics import Accuracy, Metric, Tally
from models import build, gradients, optim
from models.gradients import ShardedStep
from monitoring.console import command, first_lines, last_lines, log
from monitoring.drawing import build_pictures
from monitoring.gauges import Clock, Gauges, Stopwatch, slow_rank
from monitoring.loggers import build_loggers
from monitoring.monitor import Monitor
from sampler import TrainSampler, VirtualShards
from settings import config
from settings.options import ScheduleOptions
from settings.stages import Assigned


class Steps:
    """What a loop over steps asks of the run around it, and what `BareRun` and `Run` share.

    Beside these methods both have `steps`, `training_batches`, `begin_step` and `end_step`.
    """

    is_record_due = False  # whether a record of the present step will need the norm of the gradients
    number = 0  # of the present step of the run: the address of its random draws

    def __init__(self, sharded_step: ShardedStep, tally: Tally) -> None:
        self.sharded_step = sharded_step
        self.tally = tally

    @property
    def local_shards(self) -> range:
        """The numbers of the micro-batches that this process computes in each step."""
        return self.sharded_step.shards.local

    @property
    def loss_scale(self) -> float:
        """Factor of each shard's mean loss."""
        return self.sharded_step.loss_scale

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Switch the model to training mode."""
        build.begin_training(model)

    def shard(self, shard: int) -> AbstractContextManager:
        """Return the context for the forward and backward pass of one micro-batch of the present step."""
        return self.sharded_step.shard(self.number, shard)

    def finish_gradients(self) -> None:
        """Make every gradient the mean over all shards, and seed the draws of the optimizer. Collective."""
        self.sharded_step.finish_gradients(self.number)

    def measure(self, loss: Tensor, output: Any, target: Tensor, index: Tensor | None) -> None:
        """Add a shard's mean loss and the arguments of `metrics.Metric.batch_sums`; read nothing from the device."""
        self.tally.update(loss, output, target, index)


class BareRun(Steps):
    """A loop over steps without a run around it: each process computes one micro-batch per step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        world_size = collectives.get_world_size()
        # A plain loader decides how many images a batch has, so there is no global batch to divide.
        shards = VirtualShards(0, world_size, collectives.get_rank(), world_size)
        super().__init__(ShardedStep(model, shards, device=device), Tally([Accuracy()]))
        self.steps_per_epoch = 0

    def steps(self, num_batches: int) -> range:
        """Return the steps of an epoch whose loader has `num_batches` batches."""
        self.steps_per_epoch = num_batches // len(self.local_shards)
        return range(self.steps_per_epoch)

    def training_batches(self, data_loader: Any) -> Any:
        """Return the loader to take training batches from: here the same one."""
        return data_loader

    def begin_step(self, epoch: int, step: int) -> None:
        """Note the number of the step."""
        self.number = epoch * self.steps_per_epoch + step

    def end_step(self, metric_logger: Any, grad_norm: Tensor | None) -> None:
        """Show this process's metrics since the last line, if one is due."""
        if metric_logger.is_line_due:
            metric_logger.show(*self.tally.read_local())


class Run(Steps):
    """A run, restored from a checkpoint or new; as a context it claims its output folder, and records how it ended.

    `parts` are the objects whose state is saved: model (bare), optimizer, model_ema and scaler; None if it has none.
    """

    def __init__(
        self,
        args: Assigned,
        resumed: dict | None,
        manager: CheckpointManager,
        decisions: StepDecisions,
        *,
        sampler: TrainSampler,
        datasets: tuple,
        model: nn.Module,
        parts: dict[str, Any],
        metrics: list[Metric],
    ) -> None:
        self.args, self.manager, self.decisions, self.sampler = args, manager, decisions, sampler
        self.model = parts["model"]
        self.folder = manager.folder
        device = next(self.model.parameters()).device
        sharded_step = gradients.ShardedStep(
            model, sampler.shards, device=device, seed=args.optimization.seed,
            is_deterministic=args.precision.use_deterministic_algorithms,
        )  # fmt: skip
        # Three tallies of the same steps, because a line, a record and an epoch end at different ones.
        super().__init__(sharded_step, Tally(metrics, sampler.shards.num_local))
        self.window, self.epoch_tally = Tally(metrics), Tally(metrics)
        optimizer = parts["optimizer"]
        self.lr_scheduler = optim.LRScheduler(args.schedule, optimizer)
        self.classifier_first = self._freeze_at_first(model, len(datasets[1].classes))
        self.trained = None
        if optim.has_two_weights(optimizer):
            from models.two_weights import TrainedWeights

            self.trained = TrainedWeights(self.model, optimizer)
        self.state = self._restore(parts, datasets, resumed)
        # A start has nothing to save yet, and no save in progress.
        self.initial_position = self.saved_position = self.saving_position = self.position
        own_folder = self.folder if collectives.is_main_process() else None  # only rank 0 writes to it
        self.monitor = Monitor(own_folder, self.state, build_loggers(args.monitoring.logger))
        evaluated = config.evaluated_set(args.data)
        self.pictures = build_pictures(own_folder, self.state, args.augmentation, datasets[1], evaluated)
        self.gauges = Gauges(args.optimization.global_batch_size, args.distributed.world_size, self.state.parts, device)
        # Records of windows that have ended, which lack the values that are still on the device.
        self.pending_records = []
        # What a line shows beside its metrics, while these are on their way to the host.
        self.line: dict[str, float] | None = None
        self.status = StatusFile(own_folder, self.state, self.progress)
        self.stop_status = "preempted"  # for status.json, if the run ends by a PreemptedError
        self.clock = Clock()
        self.stopwatch = Stopwatch(device, model if args.distributed.world_size > 1 else None)
        self.saving_s = self.starting_s = 0.0  # since the last record of an epoch

    def _freeze_at_first(self, model: nn.Module, num_classes: int) -> Any:
        """Return the `ClassifierFirst` of `--freeze-epochs`, or None without it."""
        if not self.args.model.freeze_epochs:
            return None
        from models.classifier import classifier_layers
        from models.freezing import ClassifierFirst

        ends = classifier_layers(self.model, num_classes)
        return ClassifierFirst(self.model, ends, self.args.model.freeze_epochs, is_ddp=model is not self.model)

    def _restore(self, parts: dict[str, Any], datasets: tuple, resumed: dict | None) -> RunState:
        """Return the state of the run, restored from a checkpoint or new."""
        scaler = parts.get("scaler")
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        parts = {
            **parts,
            "optimizer": optim.OptimizerState(parts["optimizer"]),
            # Saved in the middle of a window, their sums go on: a resumed run logs the numbers of one never stopped.
            "log_window": self.window,
            "log_epoch": self.epoch_tally,
            "scaler": scaler,
            "trained_weights": self.trained,
        }
        facts = run_facts(self.args, *datasets)
        facts["hashes"] = find_hashes(self.args, facts["data"], self.model, resumed)
        state = RunState(self.sampler.steps_per_epoch, facts, parts)
        start_epoch = self.args.schedule.start_epoch if "start_epoch" in self.args.origin.given else None
        state.resume(resumed, start_epoch, self.args.schedule.epochs)
        return state

    # Start and end

    def __enter__(self) -> "Run":
        """Claim the folder, open the log and the records. Collective: every rank must call it.

        A finished run's folder is completed too: a kill may have interrupted its last save.
        """
        # The folder is changed only now that options, data and checkpoint are accepted: a mistyped --data-path beside
        # --overwrite must not cost the run that was there. Checkpoints come first; then run.json, recipe.toml,
        # status.json and log.txt; then the records, and the loggers, which read them.
        self.manager.take_over(self.args.checkpoint.resume, self.state)
        collectives.call_on_master(self.write_description)
        watchdog.enter_run(self.describe, partial(self.status.write, "failed"))
        forget_refusals()
        if collectives.is_main_process():
            log.open(self.folder)
        print(*first_lines(self.args, self.model, self.state, self.folder), sep="\n")
        with ExitStack() as stack:
            # Left in reverse order: the log is closed last, so that it holds the warnings of the others.
            stack.push(lambda kind, error, trace: log.close(error))
            collectives.call_on_master(self.monitor.open)
            stack.enter_context(self.monitor)
            self.status.start_renewal()
            stack.callback(self.manager.close)
            self._contexts = stack.pop_all()
        if signals.began_s is not None:
            self.starting_s = time.monotonic() - signals.began_s
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        cause = error
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
            # torch has no class for this error.
            error = loader_killed(str(error))
        if error is not None:
            error = announce_failure(error)
            kind = type(error)
            self._record_end(error, cause)
        self._contexts.__exit__(kind, error, trace)
        watchdog.leave_run()  # its end is recorded
        if error is not cause:
            raise error from cause

    def _record_end(self, error: BaseException, cause: BaseException) -> None:
        """Write into status.json that an error ends the run; `cause` is the one that this process met."""
        status, reason = "failed", f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, PreemptedError):
            status, reason = self.stop_status, str(error)
        elif isinstance(cause, ImageError) and self.decisions.signals.number:
            # Images that cannot be had after a signal are no failure of their own.
            status = "preempted"
        self.status.write(status, reason)

    def write_description(self) -> None:
        """Write run.json, recipe.toml to repeat the run, and status.json; UserError if that fails. Rank 0 only."""
        start = {"command": command(), "host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        machine = {"processor": describe_processor(), "launch": read_launch().agent}
        description = json.dumps({**start, **machine, **self.state.facts}, indent=2) + "\n"
        with explained(self.folder):
            for name, text in [("run.json", description), ("recipe.toml", config.write_recipe(self.args))]:
                path = self.folder / name
                # A finished run that is started again computes nothing: what it had stays true.
                if not (self.is_done and path.exists()):
                    write_atomically(path, text.encode())
            # Last: a start that is refused for want of room above never ran.
            self.status.replace("running")

    def progress(self) -> dict[str, Any]:
        """Return how far the run is, for status.json."""
        num_steps = self.args.schedule.epochs * self.state.steps_per_epoch
        rate = self.monitor.images_per_s
        left_s = (num_steps - self.state.step) * self.args.optimization.global_batch_size / rate if rate else None
        # A moment and no age, since other machines read the file, which is renewed every 20 s, at any time.
        moved_s = round(time.time() - watchdog.idle_s, 3)
        return {"steps": num_steps, "images_per_s": rate, "left_s": left_s, "progress": moved_s}

    def finish(self) -> None:
        """Record and print how the run ended. Collective: every rank must call it."""
        watchdog.note_progress("recording the end")
        collectives.call_on_master(self.status.finish, self.why_stopped_early() or self.monitor.lacking())
        if collectives.is_main_process():
            try:
                hours = self.monitor.records()[-1].get("hours")  # of all starts
            except (OSError, StorageError, IndexError):
                # The run is saved and recorded as finished: its last lines do without the time.
                hours = None
            print(self.state.result(self.args.checkpoint.output_dir, hours))
            print(*last_lines(self.args, self.state, self.folder), sep="\n")

    # Position

    @property
    def position(self) -> tuple[int, bool]:
        """The position that a save would hold."""
        return self.state.step, self.state.is_evaluated

    @property
    def position_fields(self) -> dict[str, int]:
        """The position as the fields of a record."""
        images = self.state.step * self.args.optimization.global_batch_size
        return {"step": self.state.step, "epoch": self.state.epoch, "images": images}

    def epochs(self) -> Iterator[int]:
        """Yield the epochs that are left to train or to evaluate; then report how the run ended. Collective."""
        schedule = self.args.schedule
        for epoch in range(self.state.epoch, schedule.epochs):
            # Before `start_epoch`: saved as the next epoch's start, a stop lost the record of the last evaluation.
            if cause := self.decisions.decide().stop:
                self.stop(cause)
            if reason := self.why_stopped_early():
                print(reason)
                break
            if schedule.stop_epoch and epoch >= schedule.stop_epoch and not self.is_done:
                self.stop_status = "stopped"
                self.stop(f"--stop-epoch {schedule.stop_epoch} of --epochs {schedule.epochs}")
            first_step = self.state.start_epoch(epoch)
            # Also where the epoch is only evaluated: checkpoints hold the learning rate.
            self.lr_scheduler.set_position(epoch, max(first_step - 1, 0), self.state.steps_per_epoch)
            self.sampler.set_epoch(epoch, first_step)
            self.clock.start_epoch()
            yield epoch
        self.finish()

    @property
    def has_steps_left(self) -> bool:
        """Whether the epoch is still to be trained."""
        return self.state.steps < self.state.steps_per_epoch

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the epoch is still to be evaluated."""
        return not self.state.is_evaluated and is_evaluated_after(self.state.epoch, self.args.schedule)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train or to evaluate."""
        is_last = self.state.epoch == self.args.schedule.epochs - 1
        return self.state.is_evaluated and (is_last or self.why_stopped_early() != "")

    def why_stopped_early(self) -> str:
        """Return why `--patience` ends the run here, or nothing: a function of the position and of the best steps."""
        patience, state = self.args.schedule.patience, self.state
        if patience is None or not state.is_evaluated:
            return ""
        bests = [best["step"] for best in state.bests.values() if best is not None]
        if not bests:
            return ""
        # Counted from the best steps, which checkpoints hold, and not in a counter: a restart cannot change it.
        since = range(max(bests) // state.steps_per_epoch, state.epoch + 1)
        num_worse = sum(is_evaluated_after(epoch, self.args.schedule) for epoch in since)
        if num_worse < patience:
            return ""
        best = f"new best {self.args.checkpoint.best_metric} in {counted(num_worse, 'evaluation')}"
        return f"stopped early after step {state.step}: no {best} since step {max(bests)} (--patience {patience})"

    def describe(self) -> str:
        """Describe the current work, to debug a hang."""
        if not self.has_steps_left:
            return f"evaluating after step {self.state.step}"
        return f"{self.state.step} steps done, images of the next step: {self.sampler.indices_at(self.state.steps)}"

    # Around a step

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Switch the model to training mode, but for the layers that are frozen in this epoch."""
        if self.classifier_first is None:
            super().begin_epoch(model, epoch)
        else:
            self.classifier_first.begin(model, epoch)

    @contextmanager
    def shard(self, shard: int) -> Iterator[None]:
        """Surround the passes of a micro-batch of the present step, and count their time."""
        with super().shard(shard), self.stopwatch.timed():
            yield

    def finish_gradients(self) -> None:
        """Make every gradient the mean over all shards, but drop those of frozen layers. Collective."""
        super().finish_gradients()
        if self.classifier_first is not None:
            self.classifier_first.drop_gradients()

    def steps(self, num_batches: int) -> range:
        """Return the steps of the epoch that are left."""
        return range(self.state.steps, self.state.steps_per_epoch)

    def training_batches(self, data_loader: Any) -> Any:
        """Return a loader of the same training batches; a new run draws the first one as a picture."""
        return self.pictures.watched(data_loader)

    def begin_step(self, epoch: int, step: int) -> None:
        """Set the learning rate of a step."""
        watchdog.note_progress("training")
        self.number = self.state.step
        self.lr_scheduler.set_position(epoch, step, self.state.steps_per_epoch)
        # Windows are counted over the whole run, not from its start: a restart cannot move the records.
        num_done = self.state.step + 1
        is_last = num_done == self.args.schedule.epochs * self.state.steps_per_epoch
        self.is_record_due = is_last or num_done % self.args.monitoring.print_freq == 0

    def end_step(self, metric_logger: Any, grad_norm: Tensor | None) -> None:
        """Count a step; log, save and stop if that is due. Collective: every rank must call it."""
        self.state.steps += 1
        # Of the step before, since its all-reduce ran beside this step: 0.2 ms in the median and 3.5 ms at the 99th
        # percentile (gloo, two busy cores). A signal may take effect a step late, but after the same one on all ranks.
        decision = self.decisions.result(*self.save_flags())
        num_steps = self.args.checkpoint.checkpoint_steps
        is_save_step = num_steps and self.state.step % num_steps == 0
        is_read = is_save_step or not self.has_steps_left or decision != CONTINUE
        if is_read:
            # Decide on this step too: the collectives below wait a day for slow disks, so detect a hung rank here.
            decision = self.decisions.decide(*self.save_flags())
        self.clock.count(metric_logger.wait_s)
        # Of the step before. The device may still be at its end, but has this step to go on with: it does not wait for
        # the host to read, to gather and to print.
        self.log(metric_logger)
        if self.is_record_due:
            # By the host's clock: a record waits for no device.
            rates = self.gauges.rates(*self.clock.since("record"))
            self.pending_records.append({**self.position_fields, **self.gauges.read(grad_norm), **rates})
        if metric_logger.is_line_due:
            self.begin_line(metric_logger)
        if is_read:
            self.log(metric_logger)
        if not self.has_steps_left:
            self.record_epoch()
        if decision.is_written:
            self.wait_for_save()
        # The end of an epoch is saved by `main`, and a stop saves by itself.
        is_save_due = is_save_step or decision.is_save_due
        if is_save_due and self.has_steps_left and not decision.stop:
            self.save()
        if decision.stop:
            self.stop(decision.stop)
        if self.has_steps_left:
            self.decisions.begin(*self.save_flags())  # completed beside the next step

    def save_flags(self) -> tuple[bool, bool]:
        """Return whether this process asks for a save, and has written the one in progress: see `StepDecisions`.

        Only rank 0 knows either. Each rank acts on the decision of all, or some would wait in a save alone.
        """
        return self.manager.is_due(), self.manager.is_written

    def stop(self, cause: str) -> None:
        """Save unless the position is saved; raise PreemptedError, which names the cause and the step. Collective."""
        ranks = f"all {self.args.distributed.world_size} ranks" if self.args.distributed.world_size > 1 else "the run"
        done = f"{cause}: {ranks} stopped after step {self.state.step}"
        start = time.perf_counter()
        self.wait_for_save()
        if self.saved_position == self.position:
            raise PreemptedError(f"{done}, which is saved" if self.state.step else f"{done}; nothing to save yet")
        self.save(is_last=True)
        raise PreemptedError(f"{done}, saved in {time.perf_counter() - start:.1f} s")

    # Around an evaluation

    def evaluated_weights(self) -> AbstractContextManager:
        """Return the context in which the model has the weights that its optimizer evaluates: usually the same."""
        return nullcontext() if self.trained is None else self.trained.set_aside()

    def evaluated(self, kind: str, data_loader: Any) -> tuple[WatchedLoader, Callable[..., None]]:
        """Return a loader on which all ranks stop at the same batch after a signal, and the observer of its outputs."""
        loader = WatchedLoader(data_loader, self.decisions, self.stop)
        return loader, partial(self.pictures.observe, kind)

    def record_results(self, results: dict[str, dict[str, Any]]) -> None:
        """Log and save the results of an evaluation. Collective: every rank must call it."""
        for kind, result in results.items():
            self.monitor.write(kind, **self.position_fields, **result)
        self.state.note_results(results, self.args.checkpoint.best_metric)
        self.pictures.draw()
        # Saved once more, so that a restart does not evaluate again; the best files are made of this save.
        self.save(is_last=self.is_done)

    # Log and save

    def begin_line(self, metric_logger: Any) -> None:
        """Begin to copy the metrics of all images since the last line to the host, and have the line held till then."""
        self.tally.begin_read()
        rate = self.gauges.rates(*self.clock.since("line"))["images_per_s"]
        # The learning rate too: at the next step's end the meter has that step's.
        self.line = {"lr": optim.current_lr(self.state.parts["optimizer"].optimizer), "img/s": rate}
        metric_logger.is_line_held = True

    def log(self, metric_logger: Any) -> None:
        """Show the metrics of the line that has begun, if there is one. Collective: every rank must call it."""
        if self.line is not None:
            self.gather(is_begun=True)
            self.stopwatch.count()  # those of the steps whose metrics were just read
            values, n = self.tally.compute_and_reset()
            metric_logger.show({**values, **self.line}, n, self.epoch_tally.means())
            metric_logger.print_line()
            self.line = None

    def record_epoch(self) -> None:
        """Record an epoch that ends, all of whose metrics have been gathered. Collective: every rank must call it."""
        means, _ = self.epoch_tally.compute_and_reset()
        means["lr"] = max(group["lr"] for group in self.gauges.groups)
        means["saving_s"] = [self.saving_s]
        # Of each rank, to name the one that is short of images or slow: all others wait for its gradients.
        ranks = collectives.gather_plain((self.clock.since("epoch")[2], self.stopwatch.restart()))
        waits, computing = map(list, zip(*ranks, strict=True))
        means |= {"waiting_s": waits, "computing_s": computing, "starting_s": [self.starting_s]}
        self.monitor.write("epoch", **self.position_fields, **means)
        if line := slow_rank(computing):
            print(f"epoch {self.state.epoch}: {line}")
        self.saving_s = self.starting_s = 0.0

    def gather(self, *, is_begun: bool = False) -> None:
        """Add up the metrics since the last call, and write the records of the windows that have ended.

        So a record costs no read of the device of its own. Collective: every rank must call it, after the same step.

        Args:
            is_begun: only those whose copy has begun, up to the step of a line.

        Raises:
            UserError: a loss is not finite; names the first step, the same one on every rank.
        """
        rows = self.tally.synchronize_between_processes(is_begun=is_begun)
        steps = rows.view(-1, self.args.distributed.num_shards, rows.size(1))
        last = self.state.step - len(self.tally.unread) // self.tally.num_local_shards
        for number, step in enumerate(steps, last - len(steps) + 1):
            if not step[:, 0].isfinite().all():
                raise self.failure(f"the loss of step {number - 1} is not finite")
            self.window.add(step)
            self.epoch_tally.add(step)
            if self.pending_records and self.pending_records[0]["step"] == number:
                values, _ = self.window.compute_and_reset()
                self.monitor.write("train", **values, **self.pending_records.pop(0))

    def save(self, *, is_last: bool = False) -> None:
        """Begin to save the run, or end it for numbers that must not be. Collective: every rank must call it.

        Args:
            is_last: whether this is the run's last save: wait for it, and fail if it fails.
        """
        start_s = time.monotonic()
        watchdog.note_progress("saving")
        # First, because a checkpoint holds the sums of all steps before it.
        self.gather()
        self.check_state()
        self.wait_for_save()
        self.saving_position = self.position
        with self.evaluated_weights():
            is_saved = self.manager.save(self.state, records=self.monitor.sync(), is_last=is_last)
        if is_saved:
            self.saved_position = self.saving_position
        self.saving_s += time.monotonic() - start_s

    def check_state(self) -> None:
        """Raise UserError for a state that must not be saved. Collective: every rank must call it."""
        # Weights are equal on all ranks, running statistics are not; rank 0's are saved.
        average = self.state.parts.get("model_ema")
        optimizer = self.state.parts["optimizer"].optimizer
        bad = collectives.call_on_master(optim.find_non_finite, self.model, average, optimizer)
        if bad is not None:
            raise self.failure(f"the {bad} after step {self.state.step} are not finite")
        if self.args.distributed.world_size > 1:
            # A sum of each tensor tells different weights apart, and is little to send.
            sums = torch.stack([each.detach().sum(dtype=torch.float64) for each in self.model.parameters()]).cpu()
            if not all(torch.equal(sums, theirs) for theirs in collectives.all_gather(sums)):
                line = "ranks have different weights than rank 0: use only the generators of torch, numpy and random"
                raise UserError(f"after step {self.state.step} {line}, and processors of one kind", exit_code=1)
        present, known = ([*map(id, buffers)] for buffers in (self.model.buffers(), self.sharded_step.buffers))
        if self.args.distributed.num_shards > 1 and present != known:
            # `ShardedStep` restores the buffers that it knows: one that replaces them would move in every micro-batch.
            raise UserError("--model replaces a buffer in training; update buffers in place, as by copy_", exit_code=1)
        scaler = self.state.parts.get("scaler")
        # It starts at 65,536, and each step that overflows halves it: 17 of these in a row lead below 1.
        if scaler is not None and scaler.get_scale() < 1:
            overflow = f"the loss scale fell to {scaler.get_scale():g} by step {self.state.step}"
            raise self.failure(f"{overflow}: gradients overflow float16 at every step (try --amp-dtype bfloat16)")

    def failure(self, what: str) -> UserError:
        """Return the error of numbers that are not finite, with what is left to resume from. Collective."""
        self.wait_for_save()
        kept = "no checkpoint was saved yet"
        if self.state.is_resumed or self.saved_position != self.initial_position:
            kept = "the last checkpoint is kept"
        # A code of its own, after which no job should start again: a replay fails at the same step.
        return UserError(f"{what}; {kept}; try a lower --lr, a longer warm-up or --clip-grad-norm", exit_code=5)

    def wait_for_save(self) -> None:
        """Wait for the save that is under way, if there is one. Collective: every rank must call it."""
        if self.manager.wait_for_save():
            self.saved_position = self.saving_position


def is_evaluated_after(epoch: int, schedule: ScheduleOptions) -> bool:
    """Tell whether `--eval-every` has an epoch evaluated; the last one always is."""
    num_done = epoch + 1
    return num_done == schedule.epochs or (schedule.eval_every > 0 and num_done % schedule.eval_every == 0)
