"""Training-run lifecycle: start or resume, log, save, stop."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
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
from distributed.launch import read_launch
from distributed.watch import watchdog
from errors import ImageError, PreemptedError, StorageError, UserError, counted, end_refusals, loader_killed
from files import write_atomically
from metrics import Accuracy, Metric, Tally
from models import build, gradients, optim
from models.classifier import classifier_layers
from models.gradients import ShardedStep
from monitoring.console import command, first_lines, last_lines, log
from monitoring.gauges import Clock, Gauges
from monitoring.loggers import build_loggers
from monitoring.monitor import Monitor
from monitoring.pictures import Pictures
from sampler import TrainSampler, VirtualShards
from settings import config


class Steps:
    """What a loop over steps asks of the run around it, and what `BareRun` and `Run` share.

    Beside these methods both have `steps`, `watched`, `begin_step` and `end_step`.
    """

    is_record_due = False  # whether a record of the present step will need the norm of the gradients
    number = 0  # of the present step of the run: the address of its random draws

    def __init__(self, sharded_step: ShardedStep, tally: Tally) -> None:
        self.sharded_step, self.tally = sharded_step, tally

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
        shards = VirtualShards(0, world_size, collectives.get_rank(), world_size)
        super().__init__(ShardedStep(model, shards, device=device), Tally([Accuracy()]))
        self.steps_per_epoch = 0

    def steps(self, num_batches: int) -> range:
        """Return the steps of an epoch whose loader has `num_batches` batches."""
        self.steps_per_epoch = num_batches // len(self.local_shards)
        return range(self.steps_per_epoch)

    def watched(self, data_loader: Any) -> Any:
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
        args: config.Assigned,
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
        self.args, self.manager, self.decisions = args, manager, decisions
        self.sampler, self.model, self.folder = sampler, parts["model"], manager.folder
        device = next(self.model.parameters()).device
        sharded_step = gradients.build_sharded_step(args, model, sampler.shards, device)
        super().__init__(sharded_step, Tally(metrics, sampler.shards.num_local))  # the tally of a line
        optimizer, scaler = parts["optimizer"], parts.get("scaler")
        self.lr_scheduler = optim.LRScheduler(args, optimizer)
        self.classifier_first = None
        if args.freeze_epochs:
            from models.freezing import ClassifierFirst

            ends = classifier_layers(self.model, len(datasets[1].classes))
            is_ddp = model is not self.model
            self.classifier_first = ClassifierFirst(self.model, ends, args.freeze_epochs, is_ddp=is_ddp)
        self.window, self.epoch_tally = Tally(metrics), Tally(metrics)  # of a record, of an epoch
        self.trained = None
        if optim.has_two_weights(optimizer):
            from models.two_weights import TrainedWeights

            self.trained = TrainedWeights(self.model, optimizer)
        parts = {
            **parts, "optimizer": optim.OptimizerState(optimizer), "log_window": self.window,
            "log_epoch": self.epoch_tally, "scaler": scaler if scaler and scaler.is_enabled() else None,
            "trained_weights": self.trained,
        }  # fmt: skip
        facts = run_facts(args, *datasets)
        facts["hashes"] = find_hashes(args, facts["data"], self.model, resumed)
        self.state = RunState(sampler.steps_per_epoch, facts, parts)
        self.state.resume(resumed, args.start_epoch if "start_epoch" in args.given else None, args.epochs)
        self.first_saved = self.saved = self.saving = self.position  # nothing to save yet, and no save in progress
        own_folder = self.folder if collectives.is_main_process() else None  # only rank 0 writes to it
        self.monitor = Monitor(own_folder, self.state, build_loggers(args))
        self.pictures = Pictures(own_folder, self.state, args, datasets[1], config.evaluated_set(args))
        self.gauges = Gauges(args, parts, device)
        self.due = []  # records of windows that have ended, without values that are still on the device
        self.status, self.ending = StatusFile(own_folder, self.state, self.progress), "preempted"
        self.clock, self.saving_s, self.starting_s = Clock(), 0.0, 0.0  # since the last record of an epoch

    # Start and end

    def __enter__(self) -> "Run":
        """Claim the folder, open the log and the records. Collective: every rank must call it.

        A finished run's folder is completed too: a kill may have interrupted its last save.
        """
        self.manager.claim(self.args.resume, self.state)
        collectives.call_on_master(self.write_description)
        watchdog.enter_run(self.describe, partial(self.status.write, "failed"))
        end_refusals()
        if collectives.is_main_process():
            log.open(self.folder)
        print(*first_lines(self.args, self.model, self.state, self.folder), sep="\n")
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: log.close(error))
            collectives.call_on_master(self.monitor.open)
            stack.enter_context(self.monitor)
            self.status.start_renewal()
            stack.callback(self.manager.close)
            self._contexts = stack.pop_all()
        self.starting_s = time.monotonic() - (signals.began_s or time.monotonic())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        cause = error
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
            error = loader_killed(str(error))
        error = error and collectives.report_end(error)
        if isinstance(error, PreemptedError):
            self.status.write(self.ending, str(error))
        elif error is not None:
            # Images that cannot be had after a signal are no failure of their own.
            state = "preempted" if isinstance(cause, ImageError) and self.decisions.signals.number else "failed"
            self.status.write(state, f"{type(error).__name__}: {error}".rstrip(": "))
        self._contexts.__exit__(error and type(error), error, trace)
        watchdog.leave_run()  # its end is recorded
        if error is not cause:
            raise error from cause

    def write_description(self) -> None:
        """Write run.json, recipe.toml to repeat the run, and status.json; UserError if that fails. Rank 0 only."""
        record = {"command": command(), "host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        record["processor"] = describe_processor()
        description = json.dumps({**record, "launch": read_launch().agent, **self.state.facts}, indent=2) + "\n"
        with explained(self.folder):
            for name, text in {"run.json": description, "recipe.toml": config.write_recipe(self.args)}.items():
                path = self.folder / name
                if not (self.is_done and path.exists()):  # a finished run keeps its own
                    write_atomically(path, text.encode())
            self.status.replace("running")  # last: what was refused never ran

    def progress(self) -> dict[str, Any]:
        """Return how far the run is, for status.json."""
        num_steps, rate = self.args.epochs * self.state.steps_per_epoch, self.monitor.images_per_s
        left_s = rate and (num_steps - self.state.step) * self.args.global_batch_size / rate
        return {
            "steps": num_steps,
            "images_per_s": rate,
            "left_s": left_s,
            "progress": round(time.time() - watchdog.idle_s, 3),
        }

    def finish(self) -> None:
        """Record and print how the run ended. Collective: every rank must call it."""
        watchdog.beat("recording the end")
        collectives.call_on_master(self.status.finish, self.why_stopped_early() or self.monitor.lacking())
        if collectives.is_main_process():
            hours = None  # of all starts
            with suppress(OSError, StorageError, IndexError):
                hours = self.monitor.records()[-1].get("hours")
            print(self.state.result(self.args.output_dir, hours))
            print(*last_lines(self.args, self.state, self.folder), sep="\n")

    # Position

    @property
    def position(self) -> tuple[int, bool]:
        """The position that a save would hold."""
        return self.state.step, self.state.is_evaluated

    @property
    def here(self) -> dict[str, int]:
        """The position as the fields of a record."""
        images = self.state.step * self.args.global_batch_size
        return {"step": self.state.step, "epoch": self.state.epoch, "images": images}

    def epochs(self) -> Iterator[int]:
        """Yield the epochs that are left to train or to evaluate; then report how the run ended. Collective."""
        for epoch in range(self.state.epoch, self.args.epochs):
            if cause := self.decisions.decide().stop:
                self.stop(cause)
            if reason := self.why_stopped_early():
                print(reason)
                break
            if not self.is_done and epoch >= (self.args.stop_epoch or self.args.epochs):
                self.ending = "stopped"
                self.stop(f"--stop-epoch {self.args.stop_epoch} of --epochs {self.args.epochs}")
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
        return not self.state.is_evaluated and is_evaluated_after(self.state.epoch, self.args)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train or to evaluate."""
        is_last = self.state.epoch == self.args.epochs - 1
        return self.state.is_evaluated and (is_last or self.why_stopped_early() != "")

    def why_stopped_early(self) -> str:
        """Return why `--patience` ends the run here, or nothing: a function of the position and of the best steps."""
        args, state = self.args, self.state
        bests = [best["step"] for best in state.bests.values() if best is not None]
        if args.patience is None or not bests or not state.is_evaluated:
            return ""
        since = range(max(bests) // state.steps_per_epoch, state.epoch + 1)
        num_worse = sum(is_evaluated_after(epoch, args) for epoch in since)
        if num_worse < args.patience:
            return ""
        return (
            f"stopped early after step {state.step}: no new best {args.best_metric} in "
            f"{counted(num_worse, 'evaluation')} since step {max(bests)} (--patience {args.patience})"
        )

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

    def finish_gradients(self) -> None:
        """Make every gradient the mean over all shards, but drop those of frozen layers. Collective."""
        super().finish_gradients()
        if self.classifier_first is not None:
            self.classifier_first.drop_gradients()

    def steps(self, num_batches: int) -> range:
        """Return the steps of the epoch that are left."""
        return range(self.state.steps, self.state.steps_per_epoch)

    def watched(self, data_loader: Any) -> Any:
        """Return a loader of the same training batches; a new run draws the first one as a picture."""
        return self.pictures.watched(data_loader)

    def begin_step(self, epoch: int, step: int) -> None:
        """Set the learning rate of a step."""
        watchdog.beat("training")
        self.number = self.state.step
        self.lr_scheduler.set_position(epoch, step, self.state.steps_per_epoch)
        last = self.args.epochs * self.state.steps_per_epoch
        self.is_record_due = (self.state.step + 1) % self.args.print_freq == 0 or self.state.step + 1 == last

    def end_step(self, metric_logger: Any, grad_norm: Tensor | None) -> None:
        """Count a step; log, save and stop if that is due. Collective: every rank must call it."""
        self.state.steps += 1
        decision = self.decisions.result(*self.vote())  # of the step before
        is_due = self.args.checkpoint_steps and self.state.step % self.args.checkpoint_steps == 0
        if metric_logger.is_line_due or is_due or not self.has_steps_left or decision != CONTINUE:
            # Decide on this step too: the collectives below wait a day for slow disks, so detect a hung rank here.
            decision = self.decisions.decide(*self.vote())
        self.clock.count(metric_logger.wait_s)
        if self.is_record_due:
            # By the host's clock: a record waits for no device.
            rates = self.gauges.rates(*self.clock.since("record"))
            self.due.append({**self.here, **self.gauges.read(grad_norm), **rates})
        if metric_logger.is_line_due:
            self.log(metric_logger)
        if decision.is_written:
            self.wait_for_save()
        if (is_due or decision.is_save_due) and self.has_steps_left and not decision.stop:
            self.save()
        if decision.stop:
            self.stop(decision.stop)
        if self.has_steps_left:
            self.decisions.begin(*self.vote())  # completed beside the next step

    def vote(self) -> tuple[bool, bool]:
        """Return this process's vote for the decision of all ranks: see `StepDecisions`."""
        return self.manager.is_due(), self.manager.is_written

    def stop(self, cause: str) -> None:
        """Save unless the position is saved; raise PreemptedError, which names the cause and the step. Collective."""
        ranks = f"all {self.args.world_size} ranks" if self.args.world_size > 1 else "the run"
        done = f"{cause}: {ranks} stopped after step {self.state.step}"
        start = time.perf_counter()
        self.wait_for_save()
        if self.saved == self.position:
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
            self.monitor.write(kind, **self.here, **result)
        self.state.note_results(results, self.args.best_metric)
        self.pictures.draw()
        self.save(is_last=self.is_done)

    # Log and save

    def log(self, metric_logger: Any) -> None:
        """Show the metrics of all images since the last line, and record an epoch that ends. Collective."""
        self.gather()
        values, n = self.tally.compute_and_reset()
        rate = self.gauges.rates(*self.clock.since("line"))["images_per_s"]
        metric_logger.show({**values, "img/s": rate}, n, self.epoch_tally.peek()[0])
        if not self.has_steps_left:
            means, _ = self.epoch_tally.compute_and_reset()
            means |= {"lr": max(group["lr"] for group in self.gauges.groups), "saving_s": [self.saving_s]}
            waits = collectives.gather_plain(self.clock.since("epoch")[2])
            self.monitor.write("epoch", **self.here, **means, waiting_s=waits, starting_s=[self.starting_s])
            self.saving_s = self.starting_s = 0.0

    def gather(self) -> None:
        """Add up the metrics since the last call, and write the records of the windows that have ended.

        So a record costs no read of the device of its own. Collective: every rank must call it, after the same step.

        Raises:
            UserError: a loss is not finite; names the first step, the same one on every rank.
        """
        rows = self.tally.synchronize_between_processes()
        steps = rows.view(-1, self.args.num_shards, rows.size(1))
        for number, step in enumerate(steps, self.state.step - len(steps) + 1):
            if not step[:, 0].isfinite().all():
                raise self.failure(f"the loss of step {number - 1} is not finite")
            self.window.add(step)
            self.epoch_tally.add(step)
            if self.due and self.due[0]["step"] == number:
                values, _ = self.window.compute_and_reset()
                self.monitor.write("train", **values, **self.due.pop(0))

    def save(self, *, is_last: bool = False) -> None:
        """Begin to save the run, or end it for numbers that must not be. Collective: every rank must call it.

        Args:
            is_last: whether this is the run's last save: wait for it, and fail if it fails.
        """
        start_s = time.monotonic()
        watchdog.beat("saving")
        self.gather()
        # Weights are equal on all ranks, running statistics are not; rank 0's are saved.
        average, optimizer = self.state.parts.get("model_ema"), self.state.parts["optimizer"].optimizer
        bad = collectives.call_on_master(optim.find_non_finite, self.model, average, optimizer)
        if bad is not None:
            raise self.failure(f"the {bad} after step {self.state.step} are not finite")
        if self.args.world_size > 1:
            sums = torch.stack([each.detach().sum(dtype=torch.float64) for each in self.model.parameters()]).cpu()
            if not all(torch.equal(sums, theirs) for theirs in collectives.all_gather(sums)):
                line = "ranks have different weights than rank 0: use only the generators of torch, numpy and random"
                raise UserError(f"after step {self.state.step} {line}, and processors of one kind", exit_code=1)
        if self.args.num_shards > 1 and [*map(id, self.model.buffers())] != [*map(id, self.sharded_step.buffers)]:
            raise UserError("--model replaces a buffer in training; update buffers in place, as by copy_", exit_code=1)
        scaler = self.state.parts.get("scaler")
        if scaler is not None and scaler.get_scale() < 1:  # skipped steps halve it: hundreds in a row
            overflow = f"the loss scale fell to {scaler.get_scale():g} by step {self.state.step}"
            raise self.failure(f"{overflow}: gradients overflow float16 at every step (try --amp-dtype bfloat16)")
        self.wait_for_save()
        self.saving = self.position
        with self.evaluated_weights():
            is_saved = self.manager.save(self.state, records=self.monitor.sync(), is_last=is_last)
        if is_saved:
            self.saved = self.saving
        self.saving_s += time.monotonic() - start_s

    def failure(self, what: str) -> UserError:
        """Return the error of numbers that are not finite, with what is left to resume from. Collective."""
        self.wait_for_save()
        is_saved = self.state.is_resumed or self.saved != self.first_saved
        kept = "the last checkpoint is kept" if is_saved else "no checkpoint was saved yet"
        return UserError(f"{what}; {kept}; try a lower --lr, a longer warm-up or --clip-grad-norm", exit_code=5)

    def wait_for_save(self) -> None:
        """Wait for the save that is under way, if there is one. Collective: every rank must call it."""
        if self.manager.wait_for_save():
            self.saved = self.saving


def is_evaluated_after(epoch: int, args: config.Assigned) -> bool:
    """Tell whether `--eval-every` has an epoch evaluated; the last one always is."""
    every, num_done = args.eval_every, epoch + 1
    return num_done == args.epochs or (every > 0 and num_done % every == 0)
