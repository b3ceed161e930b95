"""The script from its first line on, as a real process: signals while it imports, closed files, limits."""

import argparse
import ctypes
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest

from checkpointing.ahead import read_ahead
from checkpointing.checkpoint import RunState
from checkpointing.startup import Phases
from checkpointing.status import StatusFile
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

TERM, INT = signal.SIGTERM, signal.SIGINT
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def started(started_anywhere):
    """A run that each Python here, which is one of its own, can go on with."""
    return started_anywhere


def command(started, out, *extra):
    argv = [*started.argv, "--output-dir", out, "--epochs", 3, "--workers", 2, *extra]
    return [sys.executable, str(REPOSITORY / "train.py"), *map(str, argv)]


def start(started, out, *extra, **options):
    files = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        command(started, out, *extra), text=True, errors="replace", **files, env=ENVIRONMENT, **options
    )


def read_status(out):
    return json.loads((out / "status.json").read_bytes())


def wait_for_handler(pid, number):
    """Wait until a process catches a signal: before that, Python itself is starting."""
    deadline = time.monotonic() + 30
    while True:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
        if caught >> (number - 1) & 1:
            return
        assert time.monotonic() < deadline
        time.sleep(0.005)


def check_preempted(started, out, number, delay_s):
    """Signal a run that goes on where one was killed, so many seconds after its start, and see how it ends."""
    started.copy(out)
    StatusFile(out, RunState(3, {}, {})).replace("running")  # as a killed run leaves it
    process = start(started, out, "--resume", "auto")
    begin = time.monotonic()
    wait_for_handler(process.pid, signal.SIGHUP)
    time.sleep(max(0.0, begin + delay_s - time.monotonic()))
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert f"{number.name}: stopping" in output or read_status(out)["state"] == "finished", output
    return output, read_status(out)


@pytest.mark.parametrize(("number", "delay_s"), [(TERM, 0.0), (INT, 1.5)])
def test_a_signal_while_python_imports_is_a_preemption_like_any_other(started, tmp_path, number, delay_s):
    output, status = check_preempted(started, tmp_path / "out", number, delay_s)
    assert (status["state"], status["step"], status["requeue"]) == ("preempted", 6, True), output


@pytest.mark.slow
def test_a_signal_at_any_moment_of_the_first_seconds_is_a_preemption(started, tmp_path):
    for tick in range(2, 81):
        out = tmp_path / f"out{tick}"
        _, status = check_preempted(started, out, [TERM, INT, signal.SIGHUP, signal.SIGQUIT][tick % 4], tick / 20)
        assert status["state"] in ("preempted", "finished")
        shutil.rmtree(out)


@pytest.mark.dist
def test_under_torchrun_ranks_that_are_signalled_while_they_import_agree_and_say_so(started, tmp_path):
    out = tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    log = open(tmp_path / "log", "w+")  # noqa: SIM115
    agent = subprocess.Popen(
        [*torchrun, *command(started, out, "--batch-size", 4)[1:]], stdout=log, stderr=log, env=ENVIRONMENT
    )
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    deadline = time.monotonic() + 60
    while len(ranks := children.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for rank in ranks:
        wait_for_handler(rank, signal.SIGHUP)
    agent.send_signal(TERM)
    agent.wait(60)
    output = (tmp_path / "log").read_text()
    assert "SIGTERM: stopping before the first step" in output
    assert "all 2 ranks stopped after step 0; nothing to save yet" in output
    assert read_status(out)["state"] == "preempted"


def test_a_second_ctrl_c_while_python_imports_ends_it_with_one_line(started, tmp_path):
    process = start(started, tmp_path / "out")
    wait_for_handler(process.pid, signal.SIGHUP)
    process.send_signal(INT)
    assert process.stdout.readline() == "SIGINT: stopping before the first step; once more to stop at once\n"
    process.send_signal(INT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "train.py: error: interrupted\n")


@pytest.mark.parametrize(("argv", "code"), [(["--test-only", "--resume", "auto"], -TERM), (["--epochs", "0"], 2)])
def test_what_is_no_training_heeds_an_early_signal_in_its_own_way(started, tmp_path, argv, code):
    process = start(started, tmp_path / "out", *argv)
    wait_for_handler(process.pid, signal.SIGHUP)
    process.send_signal(TERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--help"], 0, "--lr-warmup-epochs"),
        (["--list-recipes", "ffcv"], 0, "resnet18-fast16"),
        (["--synthetic", "--bach-size", "3"], 2, "did you mean --batch-size?"),
        (["--data-path", "nowhere/data/digits"], 2, "-m scripts.make_digits nowhere/data/digits"),
        (["--data-path", "."], 2, "has no train/"),
        (["--synthetic", "--epochs", "0"], 2, "1 or more"),
    ],
)
def test_help_and_mistakes_are_answered_before_torch_is_imported(argv, code, words, tmp_path):
    outcome = subprocess.run(
        [sys.executable, "-X", "importtime", str(REPOSITORY / "train.py"), *argv],
        capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False, cwd=tmp_path,
    )  # fmt: skip
    lines = outcome.stderr.splitlines()
    imported = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert outcome.returncode == code, said
    assert "config" in imported
    assert not imported & {"torch", "torchvision", "numpy"}
    assert len(said) == (1 if code else 0), said
    assert words in (said[0] if code else outcome.stdout)


def test_importing_train_handles_no_signal():
    code = "import signal, sys, train; print(signal.getsignal(15) is signal.SIG_DFL, sys.excepthook.__module__)"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert outcome.stdout == "True sys\n"


def shell(started, out, line, *extra, **environment):
    """Run the script from a shell line, in which "$@" is the command."""
    words = ["bash", "-c", line, "bash", *command(started, out, *extra)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, env={**ENVIRONMENT, **environment}
    )


@pytest.mark.parametrize(
    "line", ['exec "$@" <&- >&- 2>&-', '"$@" | true; exit ${PIPESTATUS[0]}', 'exec "$@" > /dev/full']
)
def test_nobody_who_listens_is_no_reason_to_fail(started, tmp_path, line):
    out = started.copy(tmp_path / "out")
    outcome = shell(started, out, line, "--resume", "auto")
    assert outcome.returncode == 0, outcome.stderr
    assert read_status(out)["state"] == "finished"
    assert outcome.stderr == ""


def test_a_name_that_the_terminal_cannot_show_is_shown_otherwise(started, tmp_path):
    images = Path(shutil.copytree(started.argv[1], tmp_path / "images"))
    for split in ("train", "val"):
        (images / split / "class0").rename(images / split / os.fsdecode(b"\xff\xe9"))
    (images / "train" / os.fsdecode(b"\xff\xe9") / "image000.jpg").write_bytes(b"no image")
    out = tmp_path / "r\xe9sultat"
    bad = ["--data-path", images, "--bad-images", "skip"]
    outcome = shell(started, out, 'exec "$@"', *bad, PYTHONIOENCODING="ascii")
    assert outcome.returncode == 0, outcome.stderr
    assert "1 image could not be read and had to be replaced" in outcome.stdout
    assert r"\udcff\udce9" in outcome.stdout
    assert r"r\xe9sultat" in outcome.stdout
    assert read_status(out)["state"] == "finished"


# The first of those that this process may use.
ONE_CORE = "taskset -cp $(taskset -cp $$ | grep -o '[0-9]*' | sed -n 2p) $$ > /dev/null"
# What bash sets or gives, the options, and what the one line says.
LIMITS = {
    "files": ("ulimit -n 32", ["--workers", 16], "Too many open files"),
    "memory": ("ulimit -v 2000000", [], "an import failed"),
    "workers": (ONE_CORE, ["--workers", 1000], "--workers 1000: this process has 1 cores"),
    "batch": (":", ["--batch-size", 1 << 24, "--train-crop-size", 16384], "more than this machine's memory"),
    "batches": (
        "ulimit -v 16000000",
        ["--workers", 64, "--prefetch-factor", 4096, "--train-crop-size", 1024],
        "no memory for",
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_the_machine_does_not_give_is_said_in_one_line(started, tmp_path, limit):
    line, extra, words = LIMITS[limit]
    outcome = shell(started, tmp_path / "out", f'{line}; exec "$@"', *extra)
    assert outcome.returncode == 2, outcome.stdout + outcome.stderr
    output = outcome.stdout + outcome.stderr
    (error,) = [text for text in output.splitlines() if "error" in text]
    assert error.startswith("train.py: error: ")
    assert words in error
    assert "Traceback" not in output


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="sets a limit that root is free of")
def test_no_more_processes_is_said_in_one_line(started, tmp_path):
    line = "exec setpriv --ruid=65534 --bounding-set=-sys_resource,-sys_admin prlimit --nproc=1:1"
    outcome = shell(started, tmp_path / "out", f'{line} "$@"')
    assert outcome.returncode == 2, outcome.stderr
    assert outcome.stderr.count("train.py: error: cannot start 2 loader processes") == 1
    assert "Traceback" not in outcome.stderr


def test_garbage_is_looked_for_again_once_all_is_imported():
    code = "import gc; from checkpointing import startup; startup.begin_script(); import json; before = gc.isenabled()"
    code += "; startup.end_imports(); print(before, gc.isenabled(), gc.get_freeze_count() > 1000)"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert outcome.stdout == "False True True\n"


def is_cached(path):
    """Tell whether all pages of a file are in memory, without a look at any of them."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        pages = numpy.frombuffer(content, numpy.uint8)
        found = (ctypes.c_ubyte * -(-pages.size // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.size), found) == 0
        del pages
        return all(page & 1 for page in found)


@pytest.mark.parametrize("resume", ["", "auto", "checkpoint-00000001.pth"])
def test_the_files_that_a_resumed_run_verifies_are_in_memory_by_then(tmp_path, resume):
    names = ["checkpoint-00000001.pth", "checkpoint-00000002.pth", "best.pth", "best_ema.pth"]
    for name in names[:3]:
        with open(tmp_path / name, "wb") as file:
            file.write(bytes(2 << 20))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(is_cached(tmp_path / name) for name in names[:3]):
        pytest.skip("this file system lies in memory")
    expected = {"": [], "auto": names[1:3], names[0]: [names[0], names[2]]}[resume]
    before = threading.active_count()
    args = argparse.Namespace(resume=resume if resume in ("", "auto") else str(tmp_path / resume), dry_run=False)
    read_ahead(args, str(tmp_path))
    deadline = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [name for name in names[:3] if is_cached(tmp_path / name)] == expected


def test_phases_are_those_since_the_beginning_once():
    phases = Phases()
    phases.end("import")  # of a script that calls `main`: nobody knows when it began
    time.sleep(0.1)
    phases.end("data")
    phases.end("model")
    time.sleep(0.2)
    phases.end("data")
    assert re.fullmatch(r"ready in 0\.[34] s: data 0\.[34], model 0\.0", phases.read())
    phases.begin()
    phases.end("import")
    assert re.fullmatch(r"ready in 0\.0 s: import 0\.0", phases.read())
