"""What surrounds the steps of a run: logging, saving, and ending well."""

import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import optim
import utils
from checkpoint import RunState
from errors import LoaderKilledError, NonFiniteError, PreemptedError
from monitor import LogWindow, Monitor, non_finite_loss
from preemption import FiniteWatch, PreemptionGuard, StallWatchdog, WatchedLoader
from sampler import TrainSampler
from store import CheckpointManager


class StepHook:
    """What surrounds the steps of a run: counts them, logs, saves, and ends it well.

    Args:
        args: reads checkpoint_steps, output_dir, global_batch_size, world_size, stall_timeout, best_metric and epochs.
        run: the state that is moved and saved.
        window: the log window, part of that state.
        monitor: where log lines go.
        manager: where checkpoints go.
        model: the bare model, looked at before it is saved.
        guard: knows of signals.
        sampler: knows the images of a step.
    """

    def __init__(
        self,
        args: Any,
        run: RunState,
        window: LogWindow,
        monitor: Monitor,
        manager: CheckpointManager,
        model: nn.Module,
        guard: PreemptionGuard,
        sampler: TrainSampler,
    ) -> None:
        self.args, self.run, self.window = args, run, window
        self.monitor, self.manager, self.model = monitor, manager, model
        self.guard, self.sampler = guard, sampler
        self.finite = FiniteWatch(next(model.parameters()).device)
        self.watchdog = StallWatchdog(60 * args.stall_timeout, self.describe, self.note_stall)
        self.saved = self.position  # nothing to save yet
        self.start_line(wait_s=0.0)

    def __enter__(self) -> "StepHook":
        self.watchdog.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        self.watchdog.end()
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
            raise LoaderKilledError(str(error)) from error

    def describe(self) -> str:
        """Say what is being worked on, for whoever looks into a hang."""
        if self.run.steps == self.run.steps_per_epoch:
            return f"evaluating after step {self.run.step}"
        return f"{self.run.step} steps done, images of the next: {self.sampler.indices_at(self.run.steps)}"

    def note_stall(self, reason: str) -> None:
        """Record that the run hangs and is ended."""
        self.monitor.status("failed", reason)

    @property
    def position(self) -> tuple[int, bool]:
        """Where the run is: what a save is of."""
        return self.run.step, self.run.is_evaluated

    def start_line(self, wait_s: float) -> None:
        """Measure rates from now on; at the start of an epoch too, or its first line would include an evaluation."""
        self.line_s, self.line_step, self.line_wait_s = time.perf_counter(), self.run.step, wait_s

    def __call__(self, metric_logger: utils.MetricLogger, results: list[tuple], grad_norm: Tensor | None) -> None:
        """Count a step; log and save if that is due. Collective: every rank must call it."""
        for result in results:
            self.window.update(self.run.step, *result)
        self.finite.note(self.run.step, [loss for loss, *_ in results])
        self.run.advance()
        self.watchdog.beat()
        verdict = self.guard.agree(is_save_due=self.manager.is_due(), bad_step=self.finite.first_bad())
        if verdict.bad_step is not None:
            raise NonFiniteError(non_finite_loss(verdict.bad_step))
        if metric_logger.is_line_due:
            self.log(metric_logger, grad_norm)
        is_epoch_over = self.run.steps == self.run.steps_per_epoch
        is_due = self.args.checkpoint_steps and self.run.step % self.args.checkpoint_steps == 0
        if (is_due or verdict.is_save_due) and not is_epoch_over and not verdict.stop:
            self.save()
        if verdict.stop:
            self.stop(verdict.stop)

    def check(self) -> None:
        """Stop before the next step or evaluation if a signal asks for it. Collective: every rank must call it."""
        verdict = self.guard.agree()
        if verdict.stop:
            self.stop(verdict.stop)

    def stop(self, cause: str) -> None:
        """Save what is not saved yet, and leave the loop. Collective: every rank must call it.

        Raises:
            PreemptedError: always; says what was agreed.
        """
        ranks = f"all {self.args.world_size} ranks" if self.args.world_size > 1 else "the run"
        done = f"{cause}: {ranks} stopped after step {self.run.step}"
        start = time.perf_counter()
        if self.saved == self.position:
            raise PreemptedError(f"{done}, which is saved" if self.run.step else f"{done}; nothing to save yet")
        self.save(is_last=True)
        raise PreemptedError(f"{done}, saved in {time.perf_counter() - start:.1f} s")

    def watched(self, data_loader: Any) -> WatchedLoader:
        """Return a loader that every rank leaves in the same round when a signal asks for it."""
        return WatchedLoader(data_loader, self.guard, self.stop, self.watchdog.beat)

    def log(self, metric_logger: utils.MetricLogger, grad_norm: Tensor) -> None:
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
        if self.run.step - self.line_step > 1:  # the first step of an epoch waits for the loaders to start
            self.say_who_waits((metric_logger.wait_s - self.line_wait_s) / elapsed_s)
        self.start_line(metric_logger.wait_s)

    def say_who_waits(self, data_wait: float) -> None:
        """Name the process that waits for its data much longer than the others, and so makes them wait. Collective."""
        waits = torch.cat(utils.all_gather(torch.tensor([data_wait])))
        longest, median = float(waits.max()), float(waits.median())
        if longest > median + 0.1:
            print(
                f"slowest: rank {int(waits.argmax())} waits for data {longest:.0%} of the time, the median rank "
                f"{median:.0%}; look at its machine's disk and cores"
            )

    def save(self, *, is_last: bool = False) -> None:
        """Save the run, or end it if its weights are not finite. Collective: every rank must call it.

        Args:
            is_last: whether nothing comes after, so that a failing save fails the run.
        """
        self.window.gather()
        # Weights are equal on all ranks, running statistics are not; rank 0's are saved.
        average, optimizer = self.run.parts.get("model_ema"), self.run.parts["optimizer"].optimizer
        bad = utils.call_on_master(optim.find_non_finite, self.model, average, optimizer)
        if bad is not None:
            raise NonFiniteError(
                f"the {bad.decode()} after step {self.run.step} are not finite; the last checkpoint is kept"
            )
        scaler = self.run.parts.get("scaler")
        if scaler is not None and scaler.get_scale() < 1:  # skipped steps halve it: hundreds in a row
            raise NonFiniteError(
                f"the loss scale fell to {scaler.get_scale():g} by step {self.run.step}: gradients overflow float16 at "
                "every step; the last checkpoint is kept; try --amp-dtype bfloat16 or a lower --lr"
            )
        self.monitor.sync()
        if self.manager.save(self.run, is_last=is_last):
            self.saved = self.position
        self.watchdog.beat()

    def take_results(self, results: dict[str, dict[str, float]]) -> None:
        """Log and save what the epoch was evaluated to. Collective: every rank must call it."""
        for kind, result in results.items():
            self.monitor.write(kind, self.run.step, self.run.epoch, **result)
        self.run.note_results(results, self.args.best_metric)
        self.save(is_last=self.run.is_finished(self.args.epochs))

    def finish(self) -> None:
        """Record and say how the run ended. Collective: every rank must call it."""
        utils.call_on_master(self.monitor.finish)
        print(self.run.result(self.args.output_dir))


def peak_memory_gib() -> float:
    """Return the most memory that this process has used: the GPU's where there is one, else its own."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
