"""One writer a folder: a second run is refused by the name of the first, or waits for it to end."""

import errno
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from checkpointing import folder
from checkpointing.folder import CheckpointFolder
from tests.ranks import run_ranks, train_rank
from tests.started import refused, state_of


def holder(out):
    """Hold the lock of a folder, as a run does, until this process is killed."""
    CheckpointFolder(Path(out)).acquire()
    time.sleep(60)


def hasty_rank(argv, wait_s):
    folder.LOCK_WAIT_S = wait_s
    train_rank(argv)


@pytest.fixture
def held(started, tmp_path):
    """The folder of a run that a process, whose number it holds, has locked."""
    out, logs = started.copy(tmp_path / "out"), tmp_path / "holder"
    logs.mkdir()
    (out / ".lock").unlink()
    thread = threading.Thread(target=run_ranks, args=(holder, 1, str(out)), kwargs={"log_folder": logs})
    thread.start()
    deadline = time.monotonic() + 60
    while not (out / ".lock").exists() or "started" not in (out / ".lock").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(re.search(r"pid (\d+)", (out / ".lock").read_text())[1])
    yield out, pid
    if thread.is_alive():
        os.kill(pid, signal.SIGKILL)
    thread.join()


def test_a_second_run_is_refused_by_the_name_of_the_first_and_touches_nothing(started, held, tmp_path):
    out, pid = held
    before = state_of(out)
    for extra in (["--resume", "auto"], ["--overwrite"], []):
        argv = list(map(str, [*started.argv, "--output-dir", out, "--epochs", 3, *extra]))
        outcome = run_ranks(hasty_rank, 1, argv, 0.3, log_folder=tmp_path)
        refused(outcome, f"pid {pid},", "host ", "started ", code=6)
    assert state_of(out) == before


def test_a_second_run_waits_for_the_first_to_end_and_resumes(started, held, tmp_path):
    out, pid = held
    threading.Timer(3.0, os.kill, (pid, signal.SIGKILL)).start()
    argv = list(map(str, [*started.argv, "--output-dir", out, "--epochs", 3, "--resume", "auto"]))
    outcome = run_ranks(hasty_rank, 1, argv, 60.0, log_folder=tmp_path).check()
    assert "resumed step 6 " in outcome.output


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def refuse(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    CheckpointFolder(tmp_path).acquire()
    assert "this file system has no locks" in capsys.readouterr().out


def test_the_lock_names_its_holder(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    CheckpointFolder(tmp_path).acquire()
    text = (tmp_path / ".lock").read_text()
    assert re.fullmatch(rf"host \S+, pid {os.getpid()}, Slurm job 4711, started [-0-9]+ [:0-9]+\n", text)
