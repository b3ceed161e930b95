"""The script from its first line on, as a real process: signals while it imports, mistakes, unusual surroundings."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

import settings
from checkpointing.checkpoint import RunState
from checkpointing.status import StatusFile
from tests import ranks
from tests.endings import differing_results, read_metrics
from tests.images import write_images
from tests.ranks import REPOSITORY, run_ranks
from tests.started import SMALL_PLAIN, Started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture(scope="module")
def started(image_folder, tmp_path_factory):
    return Started(image_folder, tmp_path_factory.mktemp("started"), SMALL_PLAIN)


def start(started, out, *extra, before=(), **options):
    argv = [*before, sys.executable, REPOSITORY / "train.py", *started.argv, "--output-dir", out, "--epochs", 3]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.Popen([*map(str, [*argv, "--workers", 2, *extra])], text=True, errors="replace", **options)


def is_caught(pid, number):
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(caught, 16) >> (number - 1) & 1


@pytest.mark.parametrize(
    ("number", "delay_s"),
    [(TERM, 0.0), *(pytest.param(HUP if tick % 2 else INT, tick / 4, marks=pytest.mark.slow) for tick in range(16))],
)
def test_a_signal_while_python_imports_is_a_preemption_like_any_other(started, tmp_path, number, delay_s):
    out = started.copy(tmp_path / "out")
    StatusFile(out, RunState(3, {}, {})).replace("running")  # as a killed run leaves it
    process = start(started, out, "--resume", "auto", stderr=subprocess.PIPE)
    begin = time.monotonic()
    ranks.wait_for(lambda: is_caught(process.pid, HUP))
    time.sleep(max(0.0, begin + delay_s - time.monotonic()))
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    status = json.loads((out / "status.json").read_bytes())
    assert process.returncode == 0, output + errors
    if status["state"] == "preempted" or delay_s < 2:
        assert (status["state"], status["step"], status["requeue"]) == ("preempted", 6, True), output
        assert re.fullmatch(f"{number.name}: stopping after this step(; once more to stop at once)?\n", errors)


def test_a_second_ctrl_c_while_python_imports_ends_it_with_one_line(started, tmp_path):
    process = start(started, tmp_path / "out")
    ranks.wait_for(lambda: is_caught(process.pid, HUP))
    process.send_signal(INT)
    assert process.stdout.readline() == "SIGINT: stopping after this step; once more to stop at once\n"
    process.send_signal(INT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.splitlines()[0].startswith("train.py: error: interrupted")


def test_a_rank_whose_torchrun_is_killed_before_it_has_joined_ends(started, tmp_path):
    """Torch would try to connect to the dead store for --dist-timeout, deaf to signals."""
    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where nobody listens
    place |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shell = ["sh", "-c", '"$@" & wait', "sh"]
    agent = start(started, tmp_path / "out", "--batch-size", 4, before=shell, env={**os.environ, **place})
    assert any("joining 2 processes" in line for line in agent.stdout)
    time.sleep(0.2)  # it may wait by now, or not: it ends either way
    agent.kill()
    agent.communicate(timeout=60)  # until nobody has the pipe, loader processes neither


@pytest.mark.parametrize(("argv", "code", "words"), [
    ("--help", 0, "--lr-warmup-epochs"), ("--help lr", 0, "--lr-power"), ("--list-recipes ffcv", 0, "--recipe NAME"),
    ("--version", 0, f"touchstone {settings.__version__}, torch {torch.__version__.partition('+')[0]}"),
    ("--synthetic --bach-size 3", 2, "did you mean --batch-size?"), ("--synthetic --epochs 0", 2, "1 or more"),
    ("--data-path nowhere/data/digits", 2, "-m scripts.make_digits nowhere/data/digits"),
    ("--recipe imagenette", 2, "with train/ and val/; docs/imagenette.md says how to download it"),
])  # fmt: skip
def test_help_and_mistakes_are_answered_before_torch_is_imported_in_a_narrow_terminal_too(argv, code, words, tmp_path):
    command = [sys.executable, "-X", "importtime", REPOSITORY / "train.py", *argv.split()]
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": tmp_path}
    outcome = subprocess.run(command, check=False, env={**os.environ, "COLUMNS": "5"}, **how)
    lines = outcome.stderr.splitlines()
    imported = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert outcome.returncode == code, said
    assert "settings.config" in imported
    assert not imported & {"torch", "torchvision", "numpy"}
    assert len(said) == (1 if code else 0), said
    assert words in (said[0] if code else outcome.stdout)


def test_one_version_everywhere(started):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    described = json.loads((started.out / "run.json").read_bytes())["environment"]
    assert project["version"] == settings.__version__ == described["touchstone"]
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    newest = re.search(r"\n## (\d+\.\d+\.\d+) - 20", text)[1]
    number, dev, _ = settings.__version__.partition(".dev0")
    assert bool(dev) == ("\n## Unreleased" in text)  # a commit between two releases is not taken for either
    assert [*map(int, number.split("."))] > [*map(int, newest.split("."))] if dev else number == newest


def be_as_on_windows():
    sys.modules["fcntl"] = sys.modules["resource"] = None
    del os.fork
    for name, module in [*sys.modules.items()]:
        if REPOSITORY in Path(getattr(module, "__file__", None) or "/").parents[:2]:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["train.py", "scripts.evaluate", "scripts.report", "scripts.prepare"])
def test_a_python_without_fork_as_on_windows_is_told_so_in_one_line(name, tmp_path):
    name = REPOSITORY / name if name == "train.py" else name
    done = run_ranks(ranks.module_rank, 1, name, ["--help"], (be_as_on_windows,), log_folder=tmp_path)
    assert done.codes == [2]
    assert done.output == "error: Touchstone needs Linux or macOS; on Windows, use it in WSL2\n"


def rank_with_a_seed(argv):
    ranks.train_rank([*argv, "--seed", os.environ["RANK"]])


@pytest.mark.dist
def test_each_process_says_the_cause_in_one_line_where_no_launcher_ends_the_others(tmp_path):
    """As by hand: rank 0, at whose store they meet, ends ten seconds before the other, which is no stall either."""
    argv = [*SMALL_PLAIN, *"--synthetic 16 --stall-timeout 0.14 --output-dir".split(), str(tmp_path / "out")]
    port = ranks.free_port()
    places = [ranks.torchrun_environment(rank, 2, port) for rank in range(2)]
    processes, logs = ranks.start_ranks(rank_with_a_seed, places, (argv,), tmp_path)
    cause = "rank 1 differs from rank 0: --seed 1 (rank 0: --seed 0)"
    cause += "; start each with the same command, code and versions"
    for process, log, where in zip(processes, logs, ("", " on rank 1"), strict=True):
        process.join(60)
        assert process.exitcode == 2
        lines = [line for line in log.read_text().splitlines() if "error" in line or "stall" in line]
        assert lines == [f"train.py: error{where}: {cause}"]


# What a shell does before it starts "$@"; for the rows with `unshare` it is root in a world of its own.
IN_NAMESPACE = 'unshare --mount --net --uts sh -c \'{}; exec "$@"\' sh "$@"'
HIDDEN = IN_NAMESPACE.format("mount -t tmpfs none {}")
OTHER_KERNELS = "no /proc"  # where torch cannot tell what the processor can do
WORKS = {
    # As in a container of Kubernetes or OpenShift: a user with no name and no home, a checkout of somebody else's.
    "a user and a machine without names, no network": IN_NAMESPACE.format(
        'hostname nowhere.invalid; unset HOME USER LOGNAME; set setpriv --reuid 12345 --regid 12345 --clear-groups "$@"'
    ),
    "a home that cannot be written, ASCII, files that nobody may read": (
        'umask 777; HOME=/dev/null/x TMPDIR=/nonexistent LC_ALL=POSIX exec "$@"'
    ),
    "nothing in the environment, no output and no input, 32 open files": (
        'ulimit -n 32; exec env -i OMP_NUM_THREADS=1 "$@" >&- 2>&- <&-'
    ),
    OTHER_KERNELS: HIDDEN.format("/proc"),
}
REFUSED = {
    "no /dev/shm": (HIDDEN.format("/dev/shm -o ro"), "--workers 2", "the size of /dev/shm"),
    "a working folder that is gone": ('cd "$(mktemp -d)"; rmdir "$PWD"; exec "$@"', "", "current folder was removed"),
    "16 open files": ('ulimit -n 16; exec "$@"', "--workers 2", "Too many open files"),
    "a locale without UTF-8": ('LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 exec "$@"', "", "set PYTHONUTF8=1"),
}


def start_below(shell, folder, images, *argv):
    is_root = subprocess.run(["unshare", "--mount", "--net", "--uts", "true"], check=False).returncode == 0
    if not is_root and ("unshare" in shell or "setpriv" in shell):
        pytest.skip("needs root")
    reading = ["sh", "-c", shell, "sh", sys.executable, "-c", f"open({str(REPOSITORY / 'train.py')!r})"]
    if "setpriv" in shell and subprocess.run(reading, check=False).returncode:
        pytest.skip("other users cannot read this checkout or its Python")
    command = [sys.executable, REPOSITORY / "train.py", *SMALL_PLAIN, "--data-path", images, "--batch-size", "8"]
    command += ["--use-deterministic-algorithms", "--epochs", "1", "--output-dir", folder / "out", *argv]
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    command = ["sh", "-c", shell, "sh", *map(str, command)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages")}
    how = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, check=False, cwd=folder, **how)


@pytest.fixture(scope="module")
def images(tmp_path_factory):  # of a class that ASCII cannot name, where every user may read
    folder = write_images(tmp_path_factory.mktemp("images"), {"train": [8, 8], "val": [3, 2]})
    for path in [*folder.glob("*/class1")]:
        path.rename(path.with_name("Käfer"))
    for path in (folder, *folder.parents[:-2]):
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def usual(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual")
    (folder / "packages" / "tensorflow").mkdir(parents=True)
    (folder / "packages" / "tensorflow" / "__init__.py").write_text("open(__file__ + '.imported', 'w')\n")
    done = start_below('exec "$@"', folder, images)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.parametrize("name", WORKS)
def test_it_trains_with_the_same_numbers(name, usual, images, tmp_path):
    done = start_below(WORKS[name], tmp_path, images)
    assert done.returncode == 0, done.stderr
    if name == OTHER_KERNELS:
        losses = [read_metrics(folder / "metrics.jsonl")[-1]["loss"] for folder in (tmp_path / "out", usual)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    else:
        assert differing_results(tmp_path / "out", usual) == []


@pytest.mark.parametrize("name", REFUSED)
def test_it_ends_in_one_line(name, images, tmp_path):
    shell, argv, words = REFUSED[name]
    done = start_below(shell, tmp_path, images, *argv.split())
    assert done.returncode in (1, 2), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("train.py: error: ")
    assert words in done.stderr


def test_a_tensorflow_beside_torch_is_not_imported(usual):
    """Its import takes seven seconds and half a gigabyte, for files that no run writes."""
    assert list(usual.glob("events.out.tfevents.*"))
    assert not (usual.parent / "packages" / "tensorflow" / "__init__.py.imported").exists()
