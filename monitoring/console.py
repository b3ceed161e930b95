"""Print the first and last lines of a run and its progress, and keep the console's output in log.txt."""

import math
import os
import shlex
import shutil
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpointing.checkpoint import RunState
from errors import counted, duration, one_line
from files import open_regular
from loading.progress import LiveLine, Tap, without_escapes
from monitoring.attempts import Attempts
from options import CURVES, split_custom

# Most bytes of text that wait for the folder, or for room on a full disk.
_MAX_WAITING = 1 << 16

# Formats in which a terminal shows the meters of these names, as single values; a rate has no mean over images.
_MEANS = {name: curve["live"] for name, curve in CURVES.items() if "live" in curve}
_SHOWN = {**_MEANS, "img/s": "{:,.0f} img/s"}


class LogFile:
    """log.txt in a run's folder: the output of its first process at all its starts, as plain text.

    It also gets the lines that a terminal replaces by a live one. A failure to write is printed once and ends no run.
    """

    def __init__(self) -> None:
        self._tap, self._folder, self._file = None, None, None
        self._waiting, self._parts = b"", {}
        self._attempt = Attempts()

    def keep(self) -> None:
        """Keep the output from now on."""
        if self._tap is not None:
            self._tap.remove()
        self.__init__()
        self._tap = Tap(self._see)

    def open(self, folder: Path) -> None:
        """Write the kept output into a folder, and from now on each line as it comes; nothing unless output is kept."""
        if self._tap is not None:
            self._folder = folder
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            start = f"==== {when}, {socket.gethostname()}, process {os.getpid()}: {one_line(shlex.join(sys.argv))}\n"
            self._waiting = start.encode(errors="backslashreplace") + self._waiting
            self.add()

    def _see(self, name: str, text: str) -> None:
        """Take text that is written to a stream; of a line that carriage returns rewrite, keep the last version."""
        *lines, rest = (self._parts.get(name, "") + text.replace("\r\n", "\n")).split("\n")
        self._parts[name] = ""  # before `add`, which may print itself
        if lines:
            self.add(*(line.rpartition("\r")[2] for line in lines))
        self._parts[name] += rest.rpartition("\r")[2]

    def add(self, *lines: str) -> None:
        """Add lines, which the screen need not show."""
        text = "".join(f"{one_line(without_escapes(line))}\n" for line in lines)
        self._waiting = (self._waiting + text.encode(errors="backslashreplace"))[-_MAX_WAITING:]
        if self._folder is not None:  # the warning of a failure comes back here once
            self._attempt(f"log.txt in {self._folder} is not written", self._write)

    def _write(self) -> None:
        if self._file is None:
            # A line that a kill has cut stays a line of its own.
            self._file = open_regular(
                self._folder / "log.txt", os.O_RDWR | os.O_APPEND | os.O_CREAT, follows_links=False
            )
            size = os.fstat(self._file).st_size
            self._waiting = b"\n" * (size > 0 and os.pread(self._file, 1, size - 1) != b"\n") + self._waiting
        while self._waiting:
            self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def close(self, error: BaseException | None = None) -> None:
        """Write the error that ended the run, if there is one, and stop keeping output."""
        if self._tap is not None:
            is_known = hasattr(error, "exit_code")
            text = f"{type(error).__name__}: {error}" if is_known else "".join(traceback.format_exception(error))
            self.add(*([] if error is None else text.splitlines()))
            self._tap.remove()
            if self._file is not None:
                os.close(self._file)
            self._tap = self._folder = self._file = None


log = LogFile()


class Outlook:
    """The time that the rest of a run takes at this process's pace."""

    def __init__(self, state: RunState, epochs: int) -> None:
        self.state, self.epochs = state, epochs
        self._begin = None

    def left_s(self) -> float:
        """Return the seconds to the end of the last epoch, evaluations between epochs included; NaN while unknown."""
        now_s, step = time.monotonic(), self.state.step
        if self._begin is None:  # the first step has been done: it waits for loaders and compilers
            self._begin = now_s, step
        begin_s, first_step = self._begin
        num_left = self.epochs * self.state.steps_per_epoch - step
        return (now_s - begin_s) / (step - first_step) * num_left if step > first_step else math.nan


class LiveView:
    """A loop of a `MetricLogger` on a terminal: one live line, and at the end one that stays.

    Args:
        logger: the `MetricLogger`.
        label: first words of the line.
        num_items: number of the last item plus one.
        num_images: number of images in all, if a loop over batches knows it, else 0.
    """

    def __init__(self, logger: Any, label: str, num_items: int, num_images: int) -> None:
        self.line = LiveLine(sys.stdout)
        self.logger, self.label, self.num_items, self.num_images = logger, label, num_items, num_images
        self.begin_s, self.begin_wait_s = time.monotonic(), logger.wait_s
        self.values = []

    def show(self, num_done: int, pace_s: float) -> None:
        """Show the loop's progress if the line is due; the values are read again when the logger's own line is due.

        `pace_s` is the mean time of an item in seconds, NaN while unknown.
        """
        if not self.line.is_live:
            return
        if self.logger.is_line_due:
            self.values = self._read(_MEANS, "global_avg") if self.logger.is_share else self._read(_SHOWN, "value")
        if self.line.is_due or num_done == self.num_items:
            eta = f"ETA {duration(pace_s * (self.num_items - num_done))}"
            if self.logger.outlook:
                eta = f"{eta}, run {duration(self.logger.outlook.left_s())}"
            has_rate = self.num_images and pace_s > 0
            rate = [f"{self.num_images / self.num_items / pace_s:,.0f} img/s"] if has_rate else []
            self.line.show(f"{self.label} {num_done}/{self.num_items}", eta, *self.values, *rate, self._waited())

    def _read(self, formats: dict[str, str], kind: str) -> list[str]:
        meters = self.logger.meters
        return [text.format(getattr(meters[name], kind)) for name, text in formats.items() if name in meters]

    def _waited(self) -> str:
        """Return words for the share of its time that the loop has waited for data."""
        wait_s = self.logger.wait_s - self.begin_wait_s
        return f"wait {wait_s / max(time.monotonic() - self.begin_s, 1e-9):.0%}"

    def leave(self) -> None:
        """Print the loop's final values, unless another line gives the result."""
        if self.line.is_live and not self.logger.is_share:
            took = f"in {duration(time.monotonic() - self.begin_s)}"
            print("  ".join([f"{self.label} {took}", *self._read(_MEANS, "global_avg"), self._waited()]))


def first_lines(args: Any, model: nn.Module, steps_per_epoch: int, folder: Path) -> list[str]:
    """Return the lines that a run prints before its first step."""
    device = next(model.parameters()).device
    kind = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    batch = f"{counted(steps_per_epoch, 'step')} of {counted(args.global_batch_size, 'image')}"
    return [
        f"{args.model}: {num_parameters:,} parameters, on {device}{kind}, {counted(args.world_size, 'process')}",
        f"{counted(args.epochs, 'epoch')} of {batch}; the output goes to {folder}",
    ]


def last_lines(args: Any, state: RunState, folder: Path) -> list[str]:
    """Return the lines about a finished run beside its result: commands to use it."""
    best = next((name for name, best in state.bests.items() if best is not None), "checkpoint")
    data = ["--data-path", args.data_path] if args.synthetic is None else ["--synthetic", str(args.synthetic)]
    data += ["--minival", str(args.minival)] if args.minival and args.synthetic is None else []
    data += ["--device", str(args.device)] if "device" in args.given else []
    data += ["--model", args.model] if split_custom(args.model) else []  # a FILE.py is run only if it is named
    commands = {
        "curves": ["-m", "tensorboard.main", "--logdir", str(folder)],
        "evaluate": [sys.argv[0], "--test-only", "--resume", str(folder / f"{best}.pth"), *data],
    }
    width = max(map(len, commands))
    return [f"{name:<{width}}  {python_command()} {shlex.join(words)}" for name, words in commands.items()]


def python_command() -> str:
    """Return the command that starts this Python from the present folder."""
    if os.path.abspath(shutil.which("python") or "") == os.path.abspath(sys.executable):
        return "python"
    relative = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if relative.startswith("..") else relative)
