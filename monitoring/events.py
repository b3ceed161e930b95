"""Write TensorBoard's event file of a run, made again from its records at each start."""

import os
import socket
import struct
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from checkpointing.folder import EVENT_FILES, PICTURES, own_files
from settings.choices import CURVES

# Fields without a curve: the step, time, images and processes of a measurement.
NOT_DRAWN = {"kind", "step", "epoch", "time", "n", "world_size", "images", "hours"}

# Charts of training and all evaluations together.
CHARTS = {CURVES[name].title: ["Multiline", [rf"^\w+/{name}$"]] for name in ("loss", "acc1", "acc5")}


def curves(record: dict) -> dict[str, float]:
    """Return the points of a record by the tags of their curves; none of an epoch's means."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if name not in NOT_DRAWN and isinstance(value, float | int) and record["kind"] != "epoch"
    }


class EventFile:
    """TensorBoard's view of a run: one file, which replaces those of earlier starts.

    A file for each start with `purge_step` would not do: TensorBoard reads files in the order of the times in their
    names, so after a clock was set back the purge comes first and points are shown twice; and it reads no further than
    a half-written record. `SummaryWriter` writes in a thread, which prints a traceback if the disk is full.

    Raises:
        OSError: the file cannot be written; so do the methods, after which it is of no use.
    """

    starts_over = True

    def __init__(self, folder: Path, facts: dict) -> None:
        # TensorBoard would import TensorFlow, where it is installed, for files that are not written here: 7 seconds.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        # Not above: they take a tenth of a second, and only rank 0 needs them.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import custom_scalars, text

        self._folder = folder
        self._shown = set()  # names of pictures that are in the file
        earlier = own_files(folder, EVENT_FILES)
        path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._buffered = open(path, "xb")  # noqa: SIM115
        self._file = RecordWriter(self._buffered)
        try:
            self._add(file_version="brain.Event:2")
            # Makes a running TensorBoard forget the earlier files.
            self._add(session_log=SessionLog(status=SessionLog.START))
            self._add(summary=custom_scalars({"Training and validation": CHARTS}))
            rows = ["| option | value |", "|---|---|"]
            for name, value in facts.get("args", {}).items():
                rows.append(f"| {name.replace('_', '-')} | {str(value).replace('|', '/')} |")
            self._add(summary=text("options", "\n".join(rows)))
            self._file.flush()
            # Only now that the new file is written: if it cannot be, the earlier ones still show the run.
            for old in earlier:
                old.unlink()
        except BaseException:
            self._drop()
            path.unlink(missing_ok=True)
            raise

    def _drop(self) -> None:
        """Close the file without what could not be written: Python 3.13 would try once more, and print a traceback."""
        self._buffered.raw.close()

    def _add(self, step: int = 0, time_s: float | None = None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if time_s is None:
            time_s = time.time()
        event = Event(wall_time=time_s, step=step, **content)
        self._file.write(event.SerializeToString())

    def write(self, record: dict) -> None:
        """Add the points of a record."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = curves(record)
        if not points:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
        try:
            self._add(record["step"], record["time"], summary=Summary(value=values))
            self._add_pictures()
            self._file.flush()
        except BaseException:
            self._drop()
            raise

    def _add_pictures(self) -> None:
        """Add the run's pictures that are new: of the first batch, and of the surest mistakes."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for path in own_files(self._folder, PICTURES):
            if path.suffix != ".png" or path.name in self._shown:
                continue
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # a newer one may have replaced it
            # The header of a PNG: signature, length and name of the first chunk, 16 bytes; then its sides.
            width, height = struct.unpack(">2I", content[16:24])
            image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)
            found = PICTURES.fullmatch(path.name)
            summary = Summary(value=[Summary.Value(tag=found["tag"], image=image)])
            self._add(int(found["step"]), summary=summary)
            self._shown.add(path.name)

    @property
    def is_outgrown(self) -> bool:
        """Whether the file holds eight pictures that others have replaced, and should be made anew without them."""
        # Nothing can be taken out of an event file, which would hold a picture of each evaluation for ever.
        return sum(not (self._folder / name).exists() for name in self._shown) >= 8

    def close(self) -> None:
        """Add the last pictures, and close the file."""
        try:
            self._add_pictures()
            self._file.close()
        finally:
            self._drop()
