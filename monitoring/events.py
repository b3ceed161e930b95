"""Write TensorBoard's event file of a run, made anew from the run's other files whenever it is opened."""

import io
import json
import os
import re
import shlex
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from errors import StorageError
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
        "shares of a step's time, of each epoch": ["verdict/.*_share$"],
        "memory, GiB": ["train/memory_gib$"],
    },
}

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{1,18})\.")
_LARGEST_PNG = 16 << 20


class EventFile:
    """TensorBoard's view of a run: one file, made anew from the run's other files whenever it is opened.

    So no failed write, power loss, or clock that was set back loses or doubles a point. Its name holds a later time
    than those before: TensorBoard reads the files of a folder in the order of their names.

    Args:
        folder: the run's folder; its earlier event files are removed once this one is whole.
        records: the records of metrics.jsonl.
        step: the run's step; pictures of later steps are left out, since the run will draw them again.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, records: Iterable[dict], step: int) -> None:
        self.folder = folder
        self._shown = set()  # paths of pictures
        earlier = [path for path in folder.iterdir() if _EVENTS.match(path.name) and not path.is_dir()]
        latest = max((int(_EVENTS.match(path.name)[1]) for path in earlier), default=0)
        name = f"events.out.tfevents.{max(int(time.time()), latest + 1)}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115
        try:
            # The second event tells a running TensorBoard to forget the earlier files.
            start = SessionLog(status=SessionLog.START)
            head = Event(wall_time=_start_s(folder), summary=Summary(value=[_layout(), *_describe(folder)]))
            self._write([Event(file_version="brain.Event:2"), Event(step=0, session_log=start), head])
            self._write(map(_event, records))
            self.add_pictures(step)
            for path in earlier:
                path.unlink()
        except BaseException:
            self._file.close()
            raise

    def _write(self, events: Iterable[Event]) -> None:
        payload = io.BytesIO()
        writer = RecordWriter(payload)
        for event in events:
            writer.write(event.SerializeToString())
        write_all(self._file, payload.getvalue())

    def add(self, record: dict) -> None:
        """Add the points of one more record; after an OSError the file is of no use."""
        self._write([_event(record)])

    def add_pictures(self, step: int) -> int:
        """Add new pictures of steps up to `step`; return the number of added ones that the run's folder has no more."""
        found = pictures.list(self.folder)
        for tag, drawn_at, path in found:
            if path not in self._shown and drawn_at <= step:
                self._shown.add(path)
                self._write(_picture(path, tag, drawn_at))
        return len(self._shown - {path for _, _, path in found})

    def close(self, is_finished: bool | None) -> None:
        """Close the file and record whether the run ended well; record nothing if that is None: the run will go on."""
        try:
            if is_finished is not None:
                status = api_pb2.STATUS_SUCCESS if is_finished else api_pb2.STATUS_FAILURE
                end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
                value = _hparams(hparams_metadata.SESSION_END_INFO_TAG, session_end_info=end)
                self._write([Event(wall_time=time.time(), summary=Summary(value=[value]))])
        finally:
            self._file.close()


def write_all(file: io.FileIO, content: bytes) -> None:
    """Write bytes to an unbuffered file, which may accept them in parts."""
    while content:
        content = content[file.write(content) :]


def drawn(record: dict) -> dict[str, float]:
    """Return the points of a record: values by the tags of their curves."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if record["kind"] != "epoch" and name not in NOT_DRAWN and isinstance(value, float | int)
    }


def changed_options(folder: Path) -> dict[str, Any]:
    """Return the options whose values may make a run's numbers differ from those of a run with the defaults."""
    args = read_json(folder / "run.json").get("args")
    args = args if isinstance(args, dict) else {}
    given = args.get("given") or []
    return {
        name: args[name]
        for name, option in BY_NAME.items()
        if args.get(name) not in (None, option.default)
        if (option.resume not in (FREE, SILENT) or name == "weights") and (option.default is not None or name in given)
    }


def _event(record: dict) -> Event:
    """Return one record as an event: a point of each curve."""
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in drawn(record).items()]
    return Event(step=record["step"], wall_time=record["time"], summary=Summary(value=values))


def _picture(path: Path, name: str, step: int) -> Iterator[Event]:
    """Yield the event of a PNG file; none if the file is torn or no PNG."""
    try:
        content = read_bytes(path, _LARGEST_PNG)
    except (OSError, StorageError):
        return
    if content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) >= 24:
        width, height = struct.unpack(">II", content[16:24])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)
        value = Summary.Value(tag=f"view/{name}", image=image)  # below the curves in the order of tags
        yield Event(step=step, wall_time=path.stat().st_mtime, summary=Summary(value=[value]))


def _start_s(folder: Path) -> float:
    started = read_json(folder / "run.json").get("started")
    return started if isinstance(started, float) else 0.0


def _layout() -> Summary.Value:
    layout = layout_pb2.Layout()
    for title, charts in LAYOUT.items():
        category = layout.category.add(title=title)
        for name, tags in charts.items():
            category.chart.add(title=name, multiline={"tag": tags})
    content = layout.SerializeToString()
    return _strings(layout_metadata.CONFIG_SUMMARY_TAG, layout_metadata.create_summary_metadata(), content)


def _describe(folder: Path) -> Iterator[Summary.Value]:
    """Yield the run's options for the HParams tab, and its texts."""
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=_start_s(folder))
    for name, value in changed_options(folder).items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            is_plain = isinstance(value, str) and value.isascii()
            start.hparams[name].string_value = value if is_plain else json.dumps(value)
    yield _hparams(hparams_metadata.SESSION_START_INFO_TAG, session_start_info=start)
    for name, text in _texts(folder).items():
        # Markdown shows lines that are indented by four as they are.
        block = "\n".join(f"    {line}" for line in text.splitlines())
        yield _strings(f"run/{name}", text_metadata.create_summary_metadata(name, ""), block.encode())


def _texts(folder: Path) -> dict[str, str]:
    run = read_json(folder / "run.json")
    with suppress(KeyError, TypeError):
        run["data"] = {name: value for name, value in run["data"].items() if name != "classes"}  # a thousand lines
    texts = {name: json.dumps(run[name], indent=2) for name in ("environment", "data") if name in run}
    with suppress(KeyError, TypeError):
        texts["command"] = shlex.join(run["command"])
    with suppress(OSError, StorageError, ValueError):
        texts["recipe"] = read_bytes(folder / "recipe.toml").decode()
    return texts


def _strings(tag: str, metadata: SummaryMetadata, text: bytes) -> Summary.Value:
    tensor = TensorProto(dtype=DT_STRING, string_val=[text], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _hparams(tag: str, **message: Any) -> Summary.Value:
    metadata = hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**message))
    return Summary.Value(tag=tag, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR)
