"""Write TensorBoard's event file of a run, made again from the run's other files at each start."""

import json
import shlex
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from checkpointing.finder import EVENT_FILES, own_files
from files import read_bytes, read_json
from monitoring import pictures
from options import BY_NAME, CURVES, FREE, SILENT

# Fields without a curve: the step, time, images and processes of a measurement.
NOT_DRAWN = {"kind", "step", "epoch", "time", "n", "world_size", "images", "hours"}

# The custom scalars tab: charts by their titles, each with patterns of tags; all curves of a chart share its axes.
LAYOUT = {
    "Training and validation": {
        curve["title"]: [f"{kind}/{name}$" for kind in ("train", "(mini)?val", "(mini)?val_ema")]
        for name, curve in CURVES.items()
    },
    "Optimization": {
        "learning rate": ["train/lr"],
        "norms": ["train/grad_norm$", "train/weight_norm$"],
    },
    "Speed": {
        "images a second": ["train/images_per_s$", "train/images_per_s_per_device$"],
        "share of time waiting for data; MFU": ["train/data_wait$", "train/mfu$"],
        "shares of a step's time, of each epoch": ["bottleneck/.*_share$"],
        "memory, GiB": ["train/memory_gib$"],
    },
}


class EventFile:
    """TensorBoard's view of a run: one file, which replaces those of earlier starts.

    A file for each start with `purge_step` would not do: TensorBoard reads files in the order of the times in their
    names, so after a clock was set back the purge comes first and points are shown twice; and it reads no further than
    a half-written record.

    Args:
        folder: the run's folder.
        records: the records of metrics.jsonl.
        step: the run's step; pictures of later steps are left out, since the run will draw them again.
        steps_per_epoch: pictures after epochs 1, 2, 4, 8 and so on are shown, so that the file stays small.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, records: Iterable[dict], step: int, steps_per_epoch: int) -> None:
        # Not above: it takes a tenth of a second, and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        report = threading.excepthook
        if getattr(report, "func", None) is not _report_thread:
            threading.excepthook = partial(_report_thread, report)
        self.folder, self.steps_per_epoch, self._shown = folder, steps_per_epoch, set()
        earlier, texts = self._files(), _texts(folder)
        _, start, self._end = hparams({name: _plain(value) for name, value in changed_options(folder).items()}, {})
        # The purge makes a running TensorBoard forget the earlier files.
        self.writer = SummaryWriter(str(folder), purge_step=0, flush_secs=10)
        charts = {title: {name: ["Multiline", tags] for name, tags in each.items()} for title, each in LAYOUT.items()}
        self.writer.add_custom_scalars(charts)
        self.writer.file_writer.add_summary(start)
        for name, text in texts.items():
            # Markdown shows lines that are indented by four as they are.
            self.writer.add_text(f"run/{name}", "\n".join(f"    {line}" for line in text.splitlines()))
        try:
            for record in records:
                self.add(record)
            self.add_pictures(step)
        except OSError:
            earlier = self._files() - earlier
            raise
        finally:
            for path in earlier:
                path.unlink()

    def _files(self) -> set[Path]:
        return {path for path in own_files(self.folder, EVENT_FILES) if path.is_file()}

    def add(self, record: dict) -> None:
        """Add the points of one more record; after an OSError the file is of no use."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # As `add_scalar`, but with one event for all curves, which takes a tenth of the time.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in drawn(record).items()]
        self.writer.file_writer.add_summary(Summary(value=values), record["step"], record["time"])

    def add_pictures(self, step: int) -> None:
        """Add new pictures of steps up to `step`, and write all that was added."""
        for tag, drawn_at, path in pictures.list(self.folder):
            if (
                path.suffix == ".png"
                and path not in self._shown
                and drawn_at <= step
                and (drawn_at // self.steps_per_epoch).bit_count() <= 1
            ):
                self._shown.add(path)
                with suppress(OSError, ValueError), Image.open(path, formats=["PNG"]) as image:  # not if it is damaged
                    pixels = numpy.asarray(image.convert("RGB"))
                    self.writer.add_image(f"view/{tag}", pixels, drawn_at, dataformats="HWC")
        self.writer.flush()

    def close(self, is_finished: bool) -> None:
        """Close the file, and record that the run has finished, if it has."""
        if is_finished:
            self.writer.file_writer.add_summary(self._end)
        self.writer.close()


def _report_thread(report: Callable[[Any], None], failure: Any) -> None:
    """Report an error that ends a thread, except one of TensorBoard's writer, which its next call raises again."""
    if type(failure.thread).__name__ != "_AsyncWriterThread":
        report(failure)


def drawn(record: dict) -> dict[str, float]:
    """Return the points of a record: values by the tags of their curves."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if record["kind"] != "epoch" and name not in NOT_DRAWN and isinstance(value, float | int)
    }


def changed_options(folder: Path) -> dict[str, Any]:
    """Return the options whose values may make a run's numbers differ from those of a run with the defaults."""
    args = read_json(folder / "run.json").get("args", {})
    given = args.get("given", [])
    return {
        name: args[name]
        for name, option in BY_NAME.items()
        if args.get(name) not in (None, option.default)
        if (option.resume not in (FREE, SILENT) or name == "weights") and (option.default is not None or name in given)
    }


def _plain(value: Any) -> bool | float | str:
    is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and value.isascii())
    return value if is_plain else json.dumps(value)


def _texts(folder: Path) -> dict[str, str]:
    run = read_json(folder / "run.json")
    about = {name: value for name, value in run.get("data", {}).items() if name != "classes"}  # a thousand lines
    texts = {
        "environment": json.dumps(run.get("environment"), indent=2),
        "data": json.dumps(about, indent=2),
        "command": shlex.join(run.get("command", [])),
    }
    with suppress(FileNotFoundError):
        texts["recipe"] = read_bytes(folder / "recipe.toml").decode()
    return texts
