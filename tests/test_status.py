"""status.json while a run lives, and scripts/status.py: what is said of runs that were killed, stopped or refused."""

import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from files import own_temporary_folder
from tests.exports import run_tool
from tests.ranks import start_ranks, train_rank, wait_for
from tests.started import SMALL, refused, run_train


def renew_often():
    """Have the file renewed so often that a test need not wait, and the system asked for memory in every step."""
    from checkpointing import status

    status.RENEWAL_S = 0.2
    register_module_forward_pre_hook(lambda *_: bytearray(1 << 26) and None)


@pytest.fixture
def running(image_folder, tmp_path):
    argv = ["--data-path", image_folder, *SMALL, "--batch-size", 8, "--epochs", 100_000, "--print-freq", 1]
    argv = [str(word) for word in [*argv, "--output-dir", tmp_path / "runs" / "a"]]
    (process,), _ = start_ranks(train_rank, [{}], (argv, (), (renew_often,)), tmp_path)
    wait_for(lambda: read(tmp_path / "runs" / "a").get("step", 0) > 2)
    yield process
    process.kill()
    process.join()


def read(folder: Path) -> dict:
    path = folder / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def told(tmp_path, *argv, code):
    _, output = run_tool(tmp_path, "status", tmp_path / "runs", "--json", *argv, code=code)
    return {Path(each["run"]).name: each for each in json.loads(output)}


def test_a_living_run_is_told_from_a_stopped_a_killed_and_a_preempted_one(running, tmp_path):
    status = read(tmp_path / "runs" / "a")
    assert status["state"] == "running"
    assert (status["pid"], status["host"]) == (running.pid, os.uname().nodename)
    assert time.time() - 60 < status["progress"] <= status["heartbeat"] + 0.01 < time.time() + 1
    assert status["steps"] > 100_000
    assert status["left_s"] == pytest.approx((status["steps"] - status["step"]) * 8 / status["images_per_s"])
    wait_for(lambda: read(tmp_path / "runs" / "a")["step"] > status["step"])
    alive = told(tmp_path, code=0)["a"]
    assert alive["state"] == "running"
    assert alive["result"].split()[1] in ("acc1", "loss")
    os.kill(running.pid, signal.SIGSTOP)
    time.sleep(1.2)
    assert told(tmp_path, "--stale", 1, code=1)["a"]["reason"].endswith("is there")
    os.kill(running.pid, signal.SIGCONT)
    wait_for(lambda: time.time() - read(tmp_path / "runs" / "a")["heartbeat"] < 0.5)
    running.kill()
    running.join()
    time.sleep(1.2)
    stale = told(tmp_path, "--stale", 1, code=1)["a"]
    assert (stale["state"], stale["reason"].endswith("is gone")) == ("stale", True)


def test_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for pid in (gone.pid, os.getpid(), os.getppid()):
        (tmp_path / f"it-{pid}-a").mkdir()
    own = Path(own_temporary_folder("it")).name
    assert {path.name for path in tmp_path.iterdir()} == {own, f"it-{os.getpid()}-a", f"it-{os.getppid()}-a"}


def test_a_run_that_is_preempted_or_out_of_memory_says_so(running, tmp_path):
    resource.prlimit(running.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    running.join(60)
    time.sleep(1.2)
    assert told(tmp_path, "--stale", 1, code=1)["a"]["state"] in ("failed", "stale")
    for status, state, code in (
        ({"state": "running", "heartbeat": time.time(), "progress": time.time() - 700}, "stuck", 1),
        ({"state": "preempted", "requeue": True, "heartbeat": 1}, "preempted", 0),
        ({"state": "finished"}, "finished", 0), ({"state": "stopped"}, "stopped", 0),
        ({"state": "running"}, "stale", 1), ({"state": "running", "heartbeat": "x", "pid": 10**30}, "stale", 1),
        ([], "unknown", 1), ({"state": "failed", "reason": "x\x1b[2J"}, "failed", 1),
    ):  # fmt: skip
        (tmp_path / "runs" / "a" / "status.json").write_text(json.dumps(status))
        assert told(tmp_path, code=code)["a"]["state"] == state
    _, output = run_tool(tmp_path, "status", tmp_path / "runs", code=1)
    assert output.splitlines()[0].split()[:4] == ["run", "state", "heartbeat", "step"]
    assert "\x1b" not in output


def test_a_status_file_with_a_number_that_is_none_spoils_no_other_run(tmp_path):
    for name, number in {"a": "3", "b": "NaN", "c": "-Infinity", "d": "1e999", "e": "9" * 400}.items():
        path = tmp_path / "runs" / name / "status.json"
        path.parent.mkdir(parents=True)
        path.write_text(f'{{"state": "finished", "step": 3, "heartbeat": {number}}}')
    _, output = run_tool(tmp_path, "status", tmp_path / "runs", "--json", code=1)
    found = json.loads(output, parse_constant=pytest.fail)  # which JSON does not have
    assert [each["state"] for each in found] == ["finished", *["unknown"] * 4]
    assert {each["reason"] for each in found[1:]} == {"status.json has no usable number as heartbeat"}


def test_a_refused_start_says_so_where_no_run_is(image_folder, tmp_path):
    argv = ["--data-path", image_folder, *SMALL, "--batch-size", 8, "--epochs", 1]
    out = ["--output-dir", tmp_path / "runs" / "b"]
    for words in ("has no such class", "has no such thing"):
        (tmp_path / "mine.py").write_text(f"raise ValueError({words!r})")
        refused(run_train(tmp_path, *argv, *out, "--criterion", f"{tmp_path / 'mine.py'}:loss"), words)
        status = read(tmp_path / "runs" / "b")
        assert (status["state"], words in status["reason"]) == ("refused", True)
        assert told(tmp_path, code=1)["b"]["state"] == "refused"
    run_train(tmp_path, *argv, *out).check()
    before = read(tmp_path / "runs" / "b")
    assert before["state"] == "finished"
    refused(run_train(tmp_path, *argv, *out), "already holds a run")
    assert read(tmp_path / "runs" / "b") == before
    code = ["--criterion", f"{tmp_path / 'mine.py'}:loss", "--output-dir", tmp_path / "runs" / "c"]
    for quiet in (["--dry-run"], ["--test-only", "--weights", tmp_path / "runs" / "b" / "checkpoint.pth"]):
        refused(run_train(tmp_path, *argv, *code, *quiet), "mine.py")
        assert not (tmp_path / "runs" / "c").exists()
