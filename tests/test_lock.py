"""One writer a folder: a second run is refused by the name of the first, or waits for it to end."""

import errno
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from checkpointing import folder
from checkpointing.folder import CheckpointFolder
from checkpointing.store import CheckpointManager
from tests.endings import differing_results
from tests.ranks import run_ranks, train_rank
from tests.started import refused


def paused_rank(argv, gate):
    """Run train.py; before its fourth step, say so in a file and wait for another."""
    original, steps = torch.optim.SGD.step, 0

    def step(*args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == 4:
            Path(f"{gate}.reached").touch()
            wait_for(Path(f"{gate}.opened"))
        return original(*args, **kwargs)

    torch.optim.SGD.step = step
    train_rank(argv)


def hasty_rank(argv, wait_s):
    folder.LOCK_WAIT_S = wait_s
    train_rank(argv)


def wait_for(path, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


class Paused:
    """A run in the middle of its second epoch, in a thread of its own."""

    def __init__(self, started, tmp_path):
        self.out, self.gate = tmp_path / "out", tmp_path / "gate"
        self.argv = list(map(str, [*started.argv, "--output-dir", self.out, "--epochs", 2, "--workers", 1]))
        (tmp_path / "first").mkdir()
        self.thread = threading.Thread(target=self.run, args=(tmp_path / "first",))
        self.thread.start()
        wait_for(Path(f"{self.gate}.reached"))
        self.pid = int(re.search(r"pid (\d+)", (self.out / ".lock").read_text())[1])

    def run(self, log_folder):
        self.outcome = run_ranks(paused_rank, 1, self.argv, str(self.gate), log_folder=log_folder)

    def times(self):
        return {path.name: path.stat().st_mtime_ns for path in self.out.iterdir()}

    def settled_times(self):
        """Return when each file was last written, once the thread that saves is done; the run itself stands still."""
        deadline, last = time.monotonic() + 60, None
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):  # had another name a moment ago
                now = self.times()
                if now == last and not any(".tmp." in name for name in now):
                    return now
                last = now
            time.sleep(0.2)
        raise TimeoutError(f"{self.out} is still written to")

    def release(self):
        Path(f"{self.gate}.opened").touch()
        self.thread.join()
        return self.outcome


def test_a_second_run_is_refused_by_the_name_of_the_first_and_touches_nothing(started, tmp_path):
    first = Paused(started, tmp_path)
    try:
        before = first.settled_times()
        for extra in (["--resume", "auto"], ["--overwrite"], []):
            outcome = run_ranks(hasty_rank, 1, [*first.argv, *extra], 0.3, log_folder=tmp_path)
            refused(outcome, "is in use by another run", f"pid {first.pid},", "host ", "started ", code=6)
            assert outcome.output.count("waiting up to") == 1
        assert first.times() == before
    finally:
        first.release().check()
    assert differing_results(first.out, started.out) == []


def test_a_second_run_waits_for_an_orphan_to_end_and_goes_on(started, tmp_path):
    first = Paused(started, tmp_path)
    killer = threading.Timer(1.0, os.kill, (first.pid, signal.SIGKILL))
    killer.start()
    outcome = run_ranks(hasty_rank, 1, [*first.argv, "--resume", "auto"], 60.0, log_folder=tmp_path)
    assert first.release().codes == [-9]
    assert "waiting up to 60 s for it to end" in outcome.check().output
    assert "resumed step 3 " in outcome.output
    assert differing_results(first.out, started.out) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(tmp_path, number, monkeypatch, capsys):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.lockf", refuse)
    CheckpointManager(tmp_path).lock()
    assert "this file system has no locks" in capsys.readouterr().out


def test_the_lock_says_who_holds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    CheckpointFolder(tmp_path).acquire()
    text = (tmp_path / ".lock").read_text()
    assert re.fullmatch(rf"host \S+, pid {os.getpid()}, Slurm job 4711, started [-0-9]+ [:0-9]+\n", text)
