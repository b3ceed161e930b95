"""The checkpoints of a folder: how they are written, what stays, what a failing disk does, and who may write."""

import builtins
import errno
import importlib.util
import io
import json
import os
import re
import resource
import shutil
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import config
import data
import files
import models
import optim
from checkpointing import folder as folders
from checkpointing import guard
from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import RunState
from checkpointing.folder import CheckpointFolder
from checkpointing.schema import check_schema
from checkpointing.status import StatusFile
from checkpointing.store import CheckpointManager
from errors import StorageError, UserError
from files import explain_failure, find_os_error
from metrics import Accuracy, Tally
from monitoring.monitor import Monitor
from tests.endings import differing, differing_results, flatten
from tests.ranks import run_ranks, torchrun_environment, train_rank
from tests.runs import FixedRun, state_at
from tests.started import damage_flipped, refused, state_of


@pytest.fixture
def folder(tmp_path):
    files = CheckpointFolder(tmp_path / "out")
    files.acquire()
    files.adopt("", None, FixedRun(0))
    return files


def save(manager, run):
    """Save, and wait for it."""
    manager.save(run)
    return manager.settle()


def numbered_steps(folder):
    return [int(path.name[11:19]) for path in reversed(folder.numbered())]


def num_bytes_read():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.parametrize("has_own_best", [False, True])
def test_a_start_reads_each_checkpoint_once(folder, has_own_best):
    best, more = {"metric": "val/acc1", "value": 1.0, "step": 1}, {"model": {"weight": torch.rand(1 << 18)}}
    folder.save(state_at(1, best=best) | more, ["best"])
    if has_own_best:
        folder.save(state_at(2, best=best) | more)
    size = (folder.folder / "best.pth").stat().st_size
    files, before = CheckpointFolder(folder.folder), num_bytes_read()
    found = files.read("auto")
    files.acquire()
    files.adopt("auto", found, FixedRun(found.state["step"], best))
    assert (num_bytes_read() - before) / size == pytest.approx(1 + has_own_best, abs=0.2)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced_is_no_reason_to_stop(folder, number, monkeypatch):
    sync = os.fsync

    def refuse(descriptor):
        if os.path.isdir(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    assert folder.save(state_at(1)) is None
    assert folder.read("auto").state["step"] == 1


# Retention


def test_the_newest_and_the_best_stay(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2)
    folder.acquire()
    folder.adopt("", None, FixedRun(0))
    for step in range(1, 14):
        assert folder.save(state_at(step), ["best"] * (step == 3)) is None
    assert numbered_steps(folder) == [12, 13]
    assert load_checkpoint(tmp_path / "best.pth", "best")["step"] == 3
    assert load_checkpoint(tmp_path / "checkpoint.pth", "newest")["step"] == 13


def test_what_is_resumed_from_stays_until_two_newer_are_there(tmp_path):
    for step in (5, 6):
        CheckpointFolder(tmp_path, keep_last=2).save(state_at(step))
    folder = CheckpointFolder(tmp_path, keep_last=2)
    folder.acquire()
    folder.adopt("auto", folder.read("auto"), FixedRun(6))
    folder.save(state_at(7))
    assert numbered_steps(folder) == [6, 7]
    folder.save(state_at(8))
    assert numbered_steps(folder) == [7, 8]


def test_retention_touches_no_name_but_its_own(folder):
    others = ["checkpoint-7.pth", "checkpoint-00000001.pth.bak", "checkpoint-00000001.pt", "my-checkpoint-00000001.pth"]
    for name in others:
        (folder.folder / name).write_bytes(b"mine")
    for step in range(2, 8):
        folder.save(state_at(step))
    assert all((folder.folder / name).read_bytes() == b"mine" for name in others)


def test_going_back_twice_keeps_what_was_superseded_first(tmp_path):
    for value in (1.0, 2.0, 3.0):
        folder = CheckpointFolder(tmp_path)
        folder.acquire()
        if folder.numbered():
            older = tmp_path / "checkpoint-00000001.pth"
            folder.acquire()
            folder.adopt(str(older), folder.read(str(older)), FixedRun(1))
        folder.save(state_at(1, 0.0))
        folder.save(state_at(2, value))
    kept = ["superseded-checkpoint-00000002.pth", "superseded-2-checkpoint-00000002.pth", "checkpoint-00000002.pth"]
    values = [load_checkpoint(tmp_path / name, name)["model"]["weight"][0].item() for name in kept]
    assert values == [1.0, 2.0, 3.0]


def test_the_linked_name_counts_where_the_newest_numbered_file_was_removed(folder):
    for step in (1, 2, 3):
        folder.save(state_at(step))
    (folder.folder / "checkpoint-00000003.pth").unlink()
    assert folder.read("auto").state["step"] == 3


# When, and what is best


def test_the_clock_asks_after_its_minutes_and_counts_from_the_last_save(tmp_path, monkeypatch):
    manager, never = CheckpointManager(tmp_path / "a", minutes=2), CheckpointManager(tmp_path / "b")

    def is_due(manager, now_s):
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        return manager.is_due()

    assert not is_due(never, 1e9)
    assert not is_due(never, 1000.0)
    manager.lock()
    manager.adopt("", FixedRun(0))
    assert [is_due(manager, now_s) for now_s in (1000.0, 1119.0, 1120.0, 1500.0)] == [False, False, True, True]
    save(manager, FixedRun(1))
    assert [is_due(manager, now_s) for now_s in (1500.0, 1619.0, 1620.0)] == [False, False, True]


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("acc1", [10.0, 30.0, 20.0], 30.0),
        ("loss", [3.0, 1.0, 2.0], 1.0),
        ("loss", [float("nan"), 5.0, 6.0], 5.0),
        ("loss", [float("inf"), 5.0], 5.0),
    ],
)
@pytest.mark.parametrize(("kind", "name"), [("val", "best"), ("val_ema", "best_ema")])
def test_best_is_the_highest_but_of_a_loss_the_lowest(kind, name, metric, values, expected):
    run = RunState(1, {}, {})
    for epoch, value in enumerate(values):
        run.start_epoch(epoch)
        run.note_results({kind: {metric: value}}, metric)
    assert run.bests[name]["value"] == expected
    assert run.bests[name]["step"] == values.index(expected)


@pytest.mark.parametrize(
    ("losses", "step"),
    [([11.55, 2.78], 1), ([2.78, 11.55], 0), ([2.78, 2.78], 0), ([float("nan"), 2.78], 1), ([2.78, float("nan")], 0)],
)
def test_of_two_equal_results_the_one_of_lower_loss_is_best_then_the_earlier(losses, step):
    run = RunState(1, {}, {})
    for epoch, loss in enumerate(losses):
        run.start_epoch(epoch)
        run.note_results({"val": {"acc1": 36.29, "loss": loss}}, "acc1")
    assert run.bests["best"]["step"] == step


def test_a_best_that_an_earlier_version_saved_without_its_loss_stays_best_in_a_tie():
    run = RunState(1, {}, {})
    run.bests["best"] = {"metric": "val/acc1", "value": 36.29, "step": 0}
    run.start_epoch(1)
    run.note_results({"val": {"acc1": 36.29, "loss": 2.78}}, "acc1")
    assert run.bests["best"]["step"] == 0
    check_schema(state_at(1, best=run.bests["best"]), "it")


def test_another_metric_begins_a_best_of_its_own():
    run = RunState(1, {}, {})
    run.note_results({"val": {"acc1": 99.0}}, "acc1")
    run.start_epoch(1)
    run.note_results({"val": {"acc1": 98.0, "loss": 3.0}}, "loss")
    assert run.bests == {"best": {"metric": "val/loss", "value": 3.0, "loss": 3.0, "step": 1}, "best_ema": None}


def test_the_raw_weights_and_their_average_have_a_best_each(tmp_path):
    run = RunState(1, {}, {"model": torch.nn.Linear(1, 1)})
    files = CheckpointFolder(tmp_path)
    files.acquire()
    files.adopt("", None, run)
    for epoch, (raw, average) in enumerate([(50.0, 60.0), (55.0, 58.0), (54.0, 59.0)]):
        run.start_epoch(epoch)
        run.advance()
        run.note_results({"val": {"acc1": raw}, "val_ema": {"acc1": average}}, "acc1")
        assert files.save(run.state_dict(), run.best_now) is None
    steps = {name: load_checkpoint(tmp_path / name, name)["step"] for name in ("best.pth", "best_ema.pth")}
    assert steps == {"best.pth": 2, "best_ema.pth": 1}


# How a file is written


def trace_save(folder, log):
    """Save four times in a folder that keeps two, and write down the system calls of the last save."""
    files = CheckpointFolder(Path(folder), keep_last=2)
    files.acquire()
    files.adopt("", None, FixedRun(0))
    for step in (1, 2, 3):
        files.save(state_at(step))
    calls = []

    class Traced(io.FileIO):
        def write(self, content):
            calls.append("write")
            return super().write(content)

    def traced_open(path, mode="r", *args, **kwargs):
        is_temporary = ".tmp." in str(path) and mode == "xb"
        return io.BufferedWriter(Traced(path, "w")) if is_temporary else io.FileIO(path, mode)

    def hook(event, arguments):
        if event == "open" and ".tmp." in str(arguments[0]):
            calls.append("open for writing" if arguments[2] & os.O_WRONLY else "open for reading")

    def wrap(name):
        original = getattr(os, name)

        def traced(target, *args, **kwargs):
            if name == "fsync":
                target = os.readlink(f"/proc/self/fd/{target}")
                calls.append("fsync folder" if os.path.isdir(target) else "fsync file")
                return original(os.open(target, os.O_RDONLY))
            calls.append(f"{name} {Path(args[0] if args else target).name}")
            return original(target, *args, **kwargs)

        setattr(os, name, traced)

    builtins.open = traced_open
    sys.addaudithook(hook)
    for name in ("fsync", "replace", "unlink", "link"):
        wrap(name)
    files.save(state_at(4))
    Path(log).write_text(json.dumps(calls))


def test_a_save_syncs_and_reads_back_before_it_renames_and_deletes_last(tmp_path):
    run_ranks(trace_save, 1, str(tmp_path / "out"), str(tmp_path / "calls"), log_folder=tmp_path).check()
    calls = json.loads((tmp_path / "calls").read_text())
    temporary = next(call.split()[1] for call in calls if call.startswith("link"))
    once = [call for index, call in enumerate(calls) if calls[index - 1 : index] != [call]]
    assert once == [
        f"unlink {calls[0].split()[1]}",
        "open for writing",
        "write",
        "fsync file",
        "open for reading",
        "replace checkpoint-00000004.pth",
        "fsync folder",
        f"unlink {temporary}",
        f"link {temporary}",
        "replace checkpoint.pth",
        "fsync folder",
        "unlink checkpoint-00000002.pth",
    ]


def test_a_file_that_reads_back_otherwise_gets_no_name(folder, monkeypatch):
    """The disk returns other bytes than it was given: the file is changed between the write and the check."""
    folder.save(state_at(1))
    sync = os.fsync

    def corrupt(descriptor):
        sync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if ".tmp." in path:
            content = bytearray(Path(path).read_bytes())
            content[content.index(struct.pack("<f", 7.0))] ^= 1
            Path(path).write_bytes(content)

    monkeypatch.setattr(os, "fsync", corrupt)
    failure = folder.save(state_at(2, 7.0))
    assert "does not read back as it was written" in failure
    assert "still safe: checkpoint-00000001.pth" in failure
    assert sorted(path.name for path in folder.folder.glob("*.pth*")) == ["checkpoint-00000001.pth", "checkpoint.pth"]


# A disk that fails


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk full on / (needs 205.0 MB, "),
        (errno.EDQUOT, "the disk quota on / is used up (needs 205.0 MB)"),
        (errno.EFBIG, "allows no file so large (needs 205.0 MB)"),
        (errno.EACCES, "no permission to write in /"),
        (errno.EROFS, "/ can only be read"),
        (errno.EIO, "Input/output error in /"),
    ],
)
def test_a_failure_is_explained_with_numbers(number, words):
    assert words in explain_failure(OSError(number, os.strerror(number)), Path("/"), 205_000_000)


def test_a_folder_that_is_gone_is_said(tmp_path):
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert explain_failure(error, tmp_path / "gone", 1) == f"{tmp_path / 'gone'} is gone"


def test_the_cause_is_found_below_what_torch_raises():
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Exception) as caught:  # noqa: PT011 (which one differs between releases of torch)
        torch.save(state_at(1), Full())
    assert find_os_error(caught.value).errno == errno.ENOSPC
    wrapped = RuntimeError("unexpected pos")
    wrapped.__context__ = caught.value
    assert find_os_error(wrapped).errno == errno.ENOSPC
    assert find_os_error(ValueError()) is None


def fail_saves(monkeypatch, number, calls):
    """Let writing a checkpoint's bytes fail at the given saves; a list of the saves that began."""
    begun = []
    sync = os.fsync

    def failing(descriptor):
        if ".tmp." in os.readlink(f"/proc/self/fd/{descriptor}"):
            begun.append(len(begun) + 1)
            if begun[-1] in calls:
                raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    return begun


def test_one_failing_save_is_a_line_and_two_in_a_row_are_the_end(tmp_path, monkeypatch, capsys):
    manager = CheckpointManager(tmp_path)
    manager.lock()
    manager.adopt("", FixedRun(0))
    save(manager, FixedRun(1))
    fail_saves(monkeypatch, errno.ENOSPC, {1, 3, 4})
    save(manager, FixedRun(2))
    line = capsys.readouterr().out.strip()
    assert line.startswith("warning: checkpoint-00000002.pth was not saved: disk full on /")
    assert line.endswith("MB free); still safe: checkpoint-00000001.pth; training continues")
    save(manager, FixedRun(3))
    save(manager, FixedRun(4))
    with pytest.raises(StorageError, match=r"two checkpoints in a row could not be saved: checkpoint-00000005.pth was"):
        save(manager, FixedRun(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "checkpoint-00000001.pth", "checkpoint-00000003.pth", "checkpoint.pth",
    ]  # fmt: skip
    assert check_schema(load_checkpoint(tmp_path / "checkpoint.pth", "newest"), "newest")["step"] == 3


def test_the_last_save_of_a_run_may_not_fail(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    manager.lock()
    manager.adopt("", FixedRun(0))
    fail_saves(monkeypatch, errno.EDQUOT, {1})
    with pytest.raises(
        StorageError, match=r"last checkpoint of the run .* quota .* still safe: nothing in this folder"
    ):
        manager.save(FixedRun(1), is_last=True)


def test_a_folder_deleted_during_a_run_fails_its_saves_and_leaves_no_traceback(tmp_path, capsys):
    manager = CheckpointManager(tmp_path / "out")
    manager.lock()
    manager.adopt("", FixedRun(0))
    save(manager, FixedRun(1))
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    (tmp_path / "out").rmdir()
    save(manager, FixedRun(2))
    assert f"was not saved: {tmp_path / 'out'} is gone; still safe: nothing in this folder" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_folder_that_cannot_be_written_any_more_keeps_what_it_has(folder, number, monkeypatch):
    folder.save(state_at(1))
    before = state_of(folder.folder)
    original = io.open

    def refuse(path, mode="r", *args, **kwargs):
        if "x" in mode:
            raise OSError(number, os.strerror(number), str(path))
        return original(path, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    failure = folder.save(state_at(2), ["best"])
    assert failure.startswith("checkpoint-00000002.pth was not saved: ")
    assert failure.endswith("still safe: checkpoint-00000001.pth")
    assert state_of(folder.folder) == before


def test_a_link_that_fails_is_told_from_a_save_that_fails(folder, monkeypatch):
    folder.save(state_at(1))

    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        failure = folder.save(state_at(2), ["best"])
    assert failure.startswith("checkpoint-00000002.pth was saved, but not given its other names: Input/output error")
    assert folder.read("auto").state["step"] == 2
    assert folder.save(state_at(3)) is None  # which gives the names that are owed, too
    steps = {name: load_checkpoint(folder.folder / name, name)["step"] for name in ("checkpoint.pth", "best.pth")}
    assert steps == {"checkpoint.pth": 3, "best.pth": 2}


@pytest.mark.parametrize("number", sorted(folders._NO_LINKS))
def test_without_hard_links_the_names_are_copies(folder, number, monkeypatch):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    for step in range(1, 6):
        assert folder.save(state_at(step), ["best"] * (step == 1)) is None
    assert load_checkpoint(folder.folder / "checkpoint.pth", "newest")["step"] == 5
    assert load_checkpoint(folder.folder / "best.pth", "best")["step"] == 1
    assert folder.read("auto").path.name == "checkpoint-00000005.pth"


def test_a_delete_that_fails_is_one_warning(folder, monkeypatch, capsys):
    original = Path.unlink

    def refuse(path, *args, **kwargs):
        if path.suffix == ".pth":
            raise OSError(errno.EIO, "Input/output error")
        original(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for step in range(1, 8):
            assert folder.save(state_at(step)) is None
    assert capsys.readouterr().out.count("old checkpoints cannot be deleted") == 1
    assert numbered_steps(folder) == [1, 2, 3, 4, 5, 6, 7]
    folder.save(state_at(8))
    assert numbered_steps(folder) == [6, 7, 8]


def test_little_space_is_said_before_it_is_too_late(folder, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 30}))
    for step in (1, 2):
        assert folder.save(state_at(step)) is None
    assert capsys.readouterr().out.count("warning: 0.0 MB free on /") == 1


class Disk:
    """Fails the first reads of files whose name matches."""

    def __init__(self, monkeypatch, name, number, times):
        self.tries = 0
        original = os.open

        def failing(path, flags, *mode, **options):
            if Path(path).name == name:
                self.tries += 1
                if self.tries <= times:
                    raise OSError(number, os.strerror(number))
            return original(path, flags, *mode, **options)

        monkeypatch.setattr(os, "open", failing)
        monkeypatch.setattr("files.RETRY_S", 0.0)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_read_that_fails_is_tried_again_and_then_stops(folder, number, monkeypatch):
    for step in (1, 2):
        folder.save(state_at(step))
    with monkeypatch.context() as patch:
        disk = Disk(patch, "checkpoint-00000002.pth", number, 2)
        assert folder.read("auto").state["step"] == 2
        assert disk.tries == 3
    before = state_of(folder.folder)
    disk = Disk(monkeypatch, "checkpoint-00000002.pth", number, 99)
    with pytest.raises(
        StorageError, match=r"checkpoint-00000002.pth cannot be read: .* an older checkpoint is not taken"
    ):
        folder.read("auto")
    assert disk.tries == 3
    assert state_of(folder.folder) == before


def test_a_listing_that_fails_is_tried_again(folder, monkeypatch):
    folder.save(state_at(1))
    original, tries = os.listdir, []

    def listdir(path):
        tries.append(path)
        if len(tries) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return original(path)

    monkeypatch.setattr("files.RETRY_S", 0.0)
    monkeypatch.setattr(os, "listdir", listdir)
    assert folder.read("auto").state["step"] == 1


def test_an_unreadable_best_is_not_taken_for_a_damaged_one(folder, monkeypatch):
    for step in (1, 2):
        folder.save(state_at(step), ["best"] * (step == 1))
    found = folder.read("auto")
    Disk(monkeypatch, "best.pth", errno.EIO, 99)
    with pytest.raises(StorageError, match=r"best.pth cannot be read"):
        folder.adopt("auto", found, FixedRun(2, best={"metric": "val/acc1", "value": 1.0, "step": 1}))
    assert (folder.folder / "best.pth").exists()


def test_a_full_disk_holds_metrics_back_and_loses_none(tmp_path, capsys):
    run = RunState(2, {}, {})
    with opened(tmp_path, run) as monitor:
        monitor.write("train", 1, 0, loss=1.0)
        file, monitor._file = monitor._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        for step in (2, 3):
            monitor.write("train", step, 0, loss=1.0)
        monitor.sync()
        monitor._file = file
        monitor.write("train", 4, 0, loss=1.0)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: metrics.jsonl in {tmp_path} is not written: No space left on device")


def opened(folder, state):
    """Return what writes the records of a run in a folder."""
    monitor = Monitor(folder, state)
    monitor.open()
    return monitor


def points(folder):
    """Return the (step, value) of each curve that TensorBoard shows of a run."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_tensorboard_and_status_on_a_full_disk_end_no_run(tmp_path, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    state = RunState(2, {}, {})
    monkeypatch.setattr("files.RETRY_S", 0.0)
    with opened(tmp_path, state) as monitor:
        monitor.write("train", 1, 0, loss=1.0)
        with monkeypatch.context() as patch:
            (path,) = tmp_path.glob("events.*")
            path.unlink()
            path.mkdir()
            patch.setattr("checkpointing.status.write_json", refuse)
            monitor.write("train", 2, 0, loss=2.0)
            monitor.sync()
            monitor.write("train", 3, 0, loss=3.0)
            path.rmdir()
            status = StatusFile(tmp_path, state)
            status.write("running")
            with pytest.raises(StorageError, match=r"all is saved, but status.json was not written: disk full"):
                status.finish()
        monitor.write("train", 4, 0, loss=4.0)
        monitor.sync()
        assert points(tmp_path) == {"train/loss": [(step, float(step)) for step in range(1, 5)]}
        assert len(list(tmp_path.glob("events.*"))) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert [line.split(" in ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "warning: the file of TensorBoard", "warning: status.json",
    ]  # fmt: skip


def test_curves_that_were_lost_are_drawn_again_at_the_next_start_even_if_the_clock_is_set_back(tmp_path, monkeypatch):
    run = RunState(2, {}, {})
    with opened(tmp_path, run) as monitor:
        for step in (1, 2, 3):
            monitor.write("train", step, 0, loss=float(step))
    run.epoch, run.steps, run.is_resumed = 1, 0, True
    yesterday = time.time() - 86_400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    with opened(tmp_path, run) as monitor:
        monitor.write("train", 3, 1, loss=30.0)
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert points(tmp_path) == {"train/loss": [(1, 1.0), (2, 2.0), (3, 30.0)]}


class FullFile(io.FileIO):
    """A file on a disk that is full after 100 kB."""

    def write(self, content):
        if self.tell() > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(content)


def broken_rank(argv, how, failing):
    """Run train.py on a disk that fails, in one way or another, at the saves whose numbers are in `failing`."""
    original_save, original_fsync, saves = CheckpointFolder.save, os.fsync, 0

    def is_failing_now(name):
        return saves in failing and "checkpoint-" in name and ".tmp." in name

    def save(folder, state, *options):
        nonlocal saves
        saves += 1
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if how == "rlimit" and saves in failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            return original_save(folder, state, *options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def fsync(descriptor):
        if how == "fsync" and is_failing_now(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, "No space left on device")
        original_fsync(descriptor)

    def full_open(path, mode="r", *args, **kwargs):
        if how == "write" and is_failing_now(str(path)):
            return io.BufferedWriter(FullFile(path, "x"))
        return open(path, mode, *args, **kwargs)

    CheckpointFolder.save, os.fsync, files.open = save, fsync, full_open
    train_rank(argv)


CAUSES = {"rlimit": "the ulimit -f, 1.0 MB, allows no file so large", "fsync": "disk full on", "write": "disk full on"}


@pytest.mark.parametrize("how", CAUSES)
@pytest.mark.parametrize("number", [1, 2, 8])
def test_a_full_disk_costs_nothing_but_the_save(started_anywhere, tmp_path, how, number):
    out = tmp_path / "out"
    argv = list(map(str, [*started_anywhere.argv, "--output-dir", out, "--epochs", 2]))
    outcome = run_ranks(broken_rank, 1, argv, how, [number], log_folder=tmp_path)
    safe = {1: "nothing in this folder", 2: "checkpoint-00000001.pth", 8: "checkpoint-00000006.pth"}[number]
    step = {1: 1, 2: 2, 8: 6}[number]
    for words in (f"checkpoint-{step:08d}.pth was not saved: {CAUSES[how]}", f"; still safe: {safe}", "needs 3.0 MB"):
        assert words in outcome.output
    assert list(out.glob("*.tmp*")) == []
    if number == 8:
        refused(outcome, "the last checkpoint of the run could not be saved", code=1)
        status = json.loads((out / "status.json").read_text())
        assert status["state"] == "failed"
        assert CAUSES[how] in status["reason"]
        outcome = run_ranks(train_rank, 1, [*argv, "--resume", "auto"], log_folder=tmp_path)
    outcome.check()
    assert differing_results(out, started_anywhere.out) == []


def test_two_failing_saves_in_a_row_end_the_run_on_every_rank(started, tmp_path):
    out = tmp_path / "out"
    argv = list(map(str, [*started.argv, "--batch-size", 4, "--global-batch-size", 8, "--output-dir", out]))
    outcome = run_ranks(broken_rank, 2, [*argv, "--epochs", "2"], "fsync", [3, 4], log_folder=tmp_path)
    refused(outcome, "two checkpoints in a row could not be saved: checkpoint-00000003.pth was not saved", code=1)
    assert "resumed step" not in outcome.output
    assert CheckpointFolder(out).read("auto").state["step"] == 2


# A copy on each node


def node_environment(rank, world_size, port):
    """What torchrun tells the only rank of each of several nodes."""
    return {**torchrun_environment(rank, world_size, port), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def node_rank(argv, faults=()):
    train_rank([word.replace("RANK", os.environ["RANK"]) for word in argv], faults)


class Nodes:
    """Two processes on two nodes, as far as they can tell."""

    def __init__(self, started, tmp_path, out="outRANK"):
        self.tmp_path = tmp_path
        self.argv = [*started.argv, "--batch-size", 4, "--global-batch-size", 8, "--output-dir", tmp_path / out]
        self.argv += ["--save-per-node", "--epochs", 2]

    def run(self, *argv, faults=()):
        words = list(map(str, [*self.argv, *argv]))
        return run_ranks(node_rank, 2, words, list(faults), log_folder=self.tmp_path, launcher=node_environment)

    def contents(self, rank):
        return {path.name: path.read_bytes() for path in (self.tmp_path / f"out{rank}").glob("*.pth")}


@pytest.mark.dist
def test_each_node_keeps_a_copy_and_the_newest_of_all_is_resumed(started, tmp_path):
    nodes = Nodes(started, tmp_path)
    kill = [(0, "checkpointing.store.CheckpointManager.save", 6, "before")]  # when the one before is made
    assert nodes.run(faults=kill).codes[0] == -9
    assert nodes.contents(0) == nodes.contents(1)
    assert sorted(nodes.contents(0)) == [
        "best.pth", *(f"checkpoint-{step:08d}.pth" for step in (2, 3, 4)), "checkpoint.pth",
    ]  # fmt: skip
    # The first node loses its newest files, and its best; the other node's newest is damaged: a copy of each is left.
    for name in ("checkpoint-00000004.pth", "checkpoint.pth", "best.pth", "checkpoint-00000003.pth"):
        (tmp_path / "out0" / name).unlink()
    outcome = nodes.run("--resume", "auto").check()
    assert "the newest checkpoint is the copy of rank 1" in outcome.output
    assert "resumed step 4 " in outcome.output
    assert "starts anew" not in outcome.output
    assert nodes.contents(0) == nodes.contents(1)
    # A run on one node ends as these two.
    alone = tmp_path / "alone"
    argv = [*started.argv, "--batch-size", 4, "--global-batch-size", 8, "--output-dir", alone, "--epochs", 2]
    run_ranks(train_rank, 1, list(map(str, argv)), log_folder=tmp_path).check()
    assert differing_results(alone, tmp_path / "out0") == []


@pytest.mark.dist
def test_a_node_that_lost_everything_gets_it_back(started, tmp_path):
    nodes = Nodes(started, tmp_path)
    assert nodes.run(faults=[(0, "checkpointing.store.CheckpointManager.save", 6, "before")]).codes[0] == -9
    shutil.rmtree(tmp_path / "out0")
    damage_flipped(tmp_path / "out1" / "checkpoint-00000004.pth")
    (tmp_path / "out1" / "checkpoint.pth").unlink()
    outcome = nodes.run("--resume", "auto").check()
    assert "resumed step 3 " in outcome.output
    assert "rank 1: checkpoint" in outcome.output
    assert "kept as checkpoint-00000004.pth.corrupt" in outcome.output
    assert nodes.contents(0) == nodes.contents(1)
    assert not list((tmp_path / "out0").glob("*.corrupt"))


@pytest.mark.dist
def test_nodes_that_share_a_folder_have_one_writer(started, tmp_path):
    nodes = Nodes(started, tmp_path, out="shared")
    outcome = nodes.run("--resume", "auto", "--epochs", 1).check()
    assert "2 nodes see 1 folders; one writer in each" in outcome.output
    assert [name for name in os.listdir(tmp_path / "shared") if name.startswith(".")] == [".lock"]
    assert load_checkpoint(tmp_path / "shared" / "checkpoint.pth", "it")["step"] == 3


# Bits


def flip_bits(tmp_path, choose):
    """Flip bits of a small checkpoint, one at a time; return the number of refusals, and where wrong data was read."""
    state = state_at(3, args={"lr": 0.1, "given": ["lr"]}, best={"metric": "val/acc1", "value": 50.0, "step": 3})
    state["model"] = {f"layer{index}": torch.arange(100.0 * index, 100.0 * index + 60) for index in range(4)}
    folder = CheckpointFolder(tmp_path)
    assert folder.save(state) is None
    content = (tmp_path / "checkpoint.pth").read_bytes()
    expected = flatten(load_checkpoint(content, "it"))
    refusals, accepted = 0, []
    for place in choose(content):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        try:
            found = flatten(check_schema(load_checkpoint(bytes(flipped), "it"), "it"))
        except UserError:
            refusals += 1
            continue
        if found.keys() != expected.keys() or differing(found, expected):
            accepted.append(place)
    return refusals, accepted


def test_wrong_data_is_accepted_in_none_of_3000_bit_flips(tmp_path):
    def choose(content):
        return torch.randint(8 * len(content), (3000,), generator=torch.Generator().manual_seed(12)).tolist()

    refusals, accepted = flip_bits(tmp_path, choose)
    assert accepted == []
    assert refusals > 1000  # the others hit padding between the records, which holds nothing


def test_a_record_that_a_flipped_bit_makes_a_folder_is_refused(tmp_path):
    """To Python's zipfile it is whole, and torch reads uninitialised memory in its place."""

    def choose(content):
        starts = [match.start() for match in re.finditer(rb"PK\x01\x02", content)]
        return [8 * (start + 38) + 4 for start in starts]

    refusals, accepted = flip_bits(tmp_path, choose)
    assert accepted == []
    assert refusals >= 4 + 2  # four layers, the pickle and the byte order among the records


@pytest.mark.slow
def test_wrong_data_is_accepted_at_no_bit_at_all(tmp_path):
    refusals, accepted = flip_bits(tmp_path, lambda content: range(8 * len(content)))
    assert accepted == []
    assert refusals > 10_000


def recipe_state(argv):
    """Return the state of a run of a recipe after a step, with its optimizer, average and scaler, and a small model."""
    args = config.parse_args([*argv, "--data-path", "d", "--device", "cpu"])
    args = config.with_shards(args.replaced(rank=0, gpu=0, distributed=False, world_size=1), None)
    args = args.replaced(layer_decay=None)  # is about the layers of the recipe's own model
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
    model(torch.zeros(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    parts = {
        "model": model,
        "optimizer": optim.OptimizerState(optimizer),
        "model_ema": models.build_ema(args, model),
        "scaler": torch.amp.GradScaler("cpu", enabled=True) if args.amp else None,
        "log_window": Tally([Accuracy()]),
    }
    images = data.SyntheticImages(4096, 1, num_classes=3)
    run = RunState(4096 // args.global_batch_size, guard.run_facts(args, "pillow", images, images), parts)
    run.steps = run.steps_per_epoch
    run.note_results({"val": {"acc1": 1.0}}, "acc1")
    return run.state_dict()


RECIPES = sorted(path.stem for path in config.RECIPES_DIR.glob("*.toml"))


@pytest.mark.parametrize("share", range(8))
def test_what_any_recipe_saves_loads_without_an_allow_list(tmp_path, share):
    """Some dozen recipes a case, so that one name in the report is one of eight."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        for name in RECIPES[share::8]:
            if name.endswith(("-a1", "-a2", "-a3")) and importlib.util.find_spec("timm") is None:
                continue  # their optimizer is timm's
            state = recipe_state(["--recipe", name])
            files = CheckpointFolder(tmp_path / name)
            files.folder.mkdir()
            assert files.save(state) is None, name
            path = files.path_of(state["step"])
            loaded = torch.load(path, weights_only=True)
            assert loaded["args"] == state["args"], name
            assert differing(flatten(loaded["optimizer"]), flatten(state["optimizer"])) == [], name
            check_schema(loaded, name)
    finally:
        torch.serialization.add_safe_globals(allowed)
