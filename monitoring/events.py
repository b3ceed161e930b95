"""Write TensorBoard's event file of a run, made again from the run's other files at each start."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from checkpointing.checkpoint import RunState
from checkpointing.finder import EVENT_FILES, own_files
from options import BY_NAME, CURVES, FREE, SILENT

# Fields without a curve: the step, time, images and processes of a measurement.
NOT_DRAWN = {"kind", "step", "epoch", "time", "n", "world_size", "images", "hours"}

# The custom scalars tab: charts by their titles, each with patterns of tags; all curves of a chart share its axes.
LAYOUT = {
    "Training and validation": {
        curve["title"]: ["Multiline", [f"{kind}/{name}$" for kind in ("train", "(mini)?val", "(mini)?val_ema")]]
        for name, curve in CURVES.items()
    }
}


class EventFile:
    """TensorBoard's view of a run: one file, which replaces those of earlier starts.

    A file for each start with `purge_step` would not do: TensorBoard reads files in the order of the times in their
    names, so after a clock was set back the purge comes first and points are shown twice; and it reads no further than
    a half-written record. `SummaryWriter` writes in a thread, which prints a traceback if the disk is full.

    Args:
        folder: the run's folder.
        run: the state of the run, whose options are shown.
        records: the records of metrics.jsonl.

    Raises:
        OSError: the file cannot be written; so do the methods, after which it is of no use.
    """

    def __init__(self, folder: Path, run: RunState, records: list[dict]) -> None:
        # Not above: they take a tenth of a second, and only rank 0 needs them.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import custom_scalars, hparams

        earlier = own_files(folder, EVENT_FILES)
        path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        try:
            self._file = RecordWriter(open(path, "wb"))  # noqa: SIM115
            self._write(file_version="brain.Event:2")
            # Makes a running TensorBoard forget the earlier files.
            self._write(session_log=SessionLog(status=SessionLog.START))
            # Without hparams' first summary, a list of metrics, the tab shows all curves.
            _, *options = hparams({name: _plain(value) for name, value in changed_options(run).items()}, {})
            for summary in [custom_scalars(LAYOUT), *options]:
                self._write(summary=summary)
            for record in records:
                self.add(record)
            self._file.flush()
            for old in earlier:
                old.unlink()
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _write(self, step: int = 0, time_s: float | None = None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time() if time_s is None else time_s, step=step, **content)
        self._file.write(event.SerializeToString())

    def add(self, record: dict) -> None:
        """Add the points of a record."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in drawn(record).items()]
        self._write(record["step"], record["time"], summary=Summary(value=values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def drawn(record: dict) -> dict[str, float]:
    """Return the points of a record: values by the tags of their curves."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if record["kind"] != "epoch" and name not in NOT_DRAWN and isinstance(value, float | int)
    }


def changed_options(run: RunState) -> dict[str, Any]:
    """Return the options whose values may make a run's numbers differ from those of a run with the defaults."""
    args = run.facts.get("args", {})
    return {
        name: args[name]
        for name, option in BY_NAME.items()
        if args.get(name) not in (None, option.default)
        if (option.resume not in (FREE, SILENT) or name == "weights")
        if option.default is not None or name in args["given"]
    }


def _plain(value: Any) -> bool | float | str:
    is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and value.isascii())
    return value if is_plain else json.dumps(value)
