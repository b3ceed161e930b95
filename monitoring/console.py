"""The console: log.txt, which keeps what a run prints, and the first and last lines of a run."""

import os
import re
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from checkpointing.checkpoint import RunState
from distributed.lending import at_end
from errors import counted, one_line, warn_on_failure
from files import open_regular
from settings.custom_code import own_code
from settings.options import BY_NAME
from settings.stages import Resolved

# Most bytes of text that wait for the folder, or for room on a full disk.
_MAX_WAITING = 1 << 16

# What a terminal would not show: colours, and the beginning of a line that a carriage return rewrites.
_UNSEEN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[^\n]*\r(?!\n)|\r(?=\n)")


class _Tee:
    """A stream that also calls a function with each text; its other attributes are the stream's."""

    def __init__(self, stream: TextIO, take: Callable[[str], None]) -> None:
        self._stream = stream
        self._take = take

    def write(self, text: str) -> int:
        # First into the file: a terminal that is gone raises.
        self._take(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LogFile:
    """log.txt in a run's folder: what its first process has printed at all its starts, as plain text.

    A failure to write is printed once and ends no run.
    """

    def __init__(self) -> None:
        self._streams = ExitStack()
        self._folder: Path | None = None
        self._file: int | None = None  # its descriptor
        self._line = ""  # the part of a line that has come so far
        # The folder is claimed last of a start: until then text waits here, and a start that is refused writes none.
        self._waiting = b""

    def keep(self) -> None:
        """Keep what is printed from now on."""
        self.close()
        self._line = ""
        self._waiting = b""
        at_end(self.close)
        self._streams.enter_context(redirect_stdout(_Tee(sys.stdout, self.add)))
        self._streams.enter_context(redirect_stderr(_Tee(sys.stderr, self.add)))

    def open(self, folder: Path) -> None:
        """Write the kept text into a folder, and from now on each line as it comes."""
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        start = f"==== {when}, {socket.gethostname()}, process {os.getpid()}: {one_line(shlex.join(command()))}"
        self._waiting = f"\n{start}\n".encode(errors="backslashreplace") + self._waiting
        self._folder = folder
        self.add("")

    def add(self, text: str) -> None:
        """Add text, which is written when its line ends."""
        whole, end, self._line = (self._line + text).rpartition("\n")
        lines = _UNSEEN.sub("", whole + end).split("\n")[:-1]
        text = "".join(f"{one_line(line)}\n" for line in lines)
        self._waiting = (self._waiting + text.encode(errors="backslashreplace"))[-_MAX_WAITING:]
        if self._folder is not None and self._waiting:  # the warning of a failure comes back here once
            warn_on_failure(f"log.txt in {self._folder} is not written", self._write)

    def _write(self) -> None:
        if self._file is None:
            self._file = open_regular(self._folder / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        while self._waiting:
            self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def close(self, error: BaseException | None = None) -> None:
        """Write the error that ended the run, if there is one, and stop keeping text."""
        if error is not None:
            if hasattr(error, "exit_code"):
                self.add(f"{type(error).__name__}: {error}\n")
            else:  # a bug, or an error of a library
                self.add("".join(traceback.format_exception(error)))
        self._streams.close()
        self._folder = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


log = LogFile()


def command() -> list[str]:
    """Return the command line; without that of Ray's workers, which may hold a password, and of Jupyter's kernels."""
    return ["train.py"] if sys.argv[0].endswith(("default_worker.py", "kernel_launcher.py")) else sys.argv


def hash_line(hashes: dict[str, str]) -> str:
    """Return the line by which a reader compares two machines."""
    return "hashes: data {data}, options {options}, first weights {weights}".format(**hashes)


def describe_size(model: nn.Module) -> str:
    """Return how many parameters a model has, and how many of them are trained if those are fewer."""
    parameters = list(model.parameters())
    num_all = sum(each.numel() for each in parameters)
    num_trained = sum(each.numel() for each in parameters if each.requires_grad)
    trained = f", {num_trained:,} trained" if num_trained < num_all else ""
    return f"{num_all:,} parameters{trained}"


def first_lines(args: Resolved, model: nn.Module, state: RunState, folder: Path) -> list[str]:
    """Return the lines that a run prints before its first step."""
    device = next(model.parameters()).device
    kind = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    batch = f"{counted(state.steps_per_epoch, 'step')} of {counted(args.optimization.global_batch_size, 'image')}"
    records = ["metrics.jsonl", *(name for name in args.monitoring.logger if name != "none")]
    return [
        f"{args.model.model}: {describe_size(model)}, on {device}{kind}, "
        f"{counted(args.distributed.world_size, 'process')}",
        f"{counted(args.schedule.epochs, 'epoch')} of {batch}; the output goes to {folder}",
        f"records go to {', '.join(records)}",
        hash_line(state.facts["hashes"]),
    ]


def last_lines(args: Resolved, state: RunState, folder: Path) -> list[str]:
    """Return the lines about a finished run beside its result: commands to use it."""
    best = next((name for name, best in state.bests.items() if best is not None), "checkpoint")
    checkpoint = str(folder / f"{best}.pth")
    # Only what the checkpoint cannot say: it has the preprocessing, but data and devices move.
    words = ["--test-only", "--resume", checkpoint]
    if args.data.synthetic is None:
        words += ["--data-path", args.data.data_path]
        for name in ("minival", "minival_fold", "limit_val_images"):
            if value := getattr(args.data, name):
                words += [BY_NAME[name].flag, str(value)]
    else:
        words += ["--synthetic", str(args.data.synthetic)]
    if "device" in args.origin.given:
        words += ["--device", str(args.distributed.device)]
    # Code is run only where the command line itself names it, so a FILE.py is given again.
    model = []
    for name, text in own_code(args.flat()):
        if name in ("model", "criterion"):
            words += [BY_NAME[name].flag, text]
            model += [BY_NAME[name].flag, text] if name == "model" else []
    if args.monitoring.metrics:
        words += ["--metrics", *args.monitoring.metrics]
    quoted = shlex.quote(str(folder))
    # A program of one's own that calls `main` takes none of these options.
    script = sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"
    curves = [f"curves    tensorboard --logdir {quoted}"] if "tensorboard" in args.monitoring.logger else []
    return [
        *curves,
        f"evaluate  python {shlex.join([script, *words])}",
        f"report    python -m scripts.report {quoted}",
        f"predict   python -m scripts.predict {shlex.join([checkpoint, 'IMAGES', *model])}",
    ]
