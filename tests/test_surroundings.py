"""A small training in unusual surroundings works, with the numbers of any other, or ends in one line."""

import os
import subprocess
import sys

import pytest

from tests.endings import differing_results, read_metrics
from tests.images import write_images
from tests.ranks import REPOSITORY
from tests.started import SMALL_PLAIN

# What a shell does before it starts "$@"; for the rows with `unshare` it is root in a world of its own.
IN_NAMESPACE = 'unshare --mount --net --uts sh -c \'{}; exec "$@"\' sh "$@"'
HIDDEN = IN_NAMESPACE.format("mount -t tmpfs none {}")
OTHER_KERNELS = "no /proc"  # where torch cannot tell what the processor can do
WORKS = {
    # As in a container of Kubernetes or OpenShift: a user with no name and no home, a checkout of somebody else's.
    "a user without a name": 'unset HOME USER LOGNAME; exec setpriv --reuid 12345 --regid 12345 --clear-groups "$@"',
    "a home that cannot be written, ASCII, files that nobody may read": (
        'umask 777; HOME=/dev/null/x TMPDIR=/nonexistent LC_ALL=POSIX exec "$@"'
    ),
    "nothing in the environment, no output and no input, 32 open files": (
        'ulimit -n 32; exec env -i OMP_NUM_THREADS=1 "$@" >&- 2>&- <&-'
    ),
    OTHER_KERNELS: HIDDEN.format("/proc"),
    "no network, and a name that nobody knows": IN_NAMESPACE.format("hostname nowhere.invalid"),
}
REFUSED = {
    "no /dev/shm": (HIDDEN.format("/dev/shm -o ro"), "--workers 2", "the size of /dev/shm"),
    "a working folder that is gone": ('cd "$(mktemp -d)"; rmdir "$PWD"; exec "$@"', "", "current folder was removed"),
    "16 open files": ('ulimit -n 16; exec "$@"', "--workers 2", "Too many open files"),
    "a locale without UTF-8": ('LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 exec "$@"', "", "set PYTHONUTF8=1"),
}


def start(shell, folder, images, *argv):
    is_root = subprocess.run(["unshare", "--mount", "--net", "--uts", "true"], check=False).returncode == 0
    if not is_root and ("unshare" in shell or "setpriv" in shell):
        pytest.skip("needs root")
    reading = ["sh", "-c", shell, "sh", sys.executable, "-c", f"open({str(REPOSITORY / 'train.py')!r})"]
    if "setpriv" in shell and subprocess.run(reading, check=False).returncode:
        pytest.skip("other users cannot read this checkout or its Python")
    command = [sys.executable, REPOSITORY / "train.py", *SMALL_PLAIN, "--data-path", images, "--batch-size", "8"]
    command += ["--use-deterministic-algorithms", "--epochs", "1", "--output-dir", folder / "out", *argv]
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages")}
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return subprocess.run(
        ["sh", "-c", shell, "sh", *map(str, command)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Images of classes that ASCII cannot name, where every user may read."""
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
    done = start('exec "$@"', folder, images)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.parametrize("name", WORKS)
def test_it_trains_with_the_same_numbers(name, usual, images, tmp_path):
    done = start(WORKS[name], tmp_path, images)
    assert done.returncode == 0, done.stderr
    if name == OTHER_KERNELS:
        losses = [read_metrics(folder / "metrics.jsonl")[-1]["loss"] for folder in (tmp_path / "out", usual)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    else:
        assert differing_results(tmp_path / "out", usual) == []


@pytest.mark.parametrize("name", REFUSED)
def test_it_ends_in_one_line(name, images, tmp_path):
    shell, argv, words = REFUSED[name]
    done = start(shell, tmp_path, images, *argv.split())
    assert done.returncode in (1, 2), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("train.py: error: ")
    assert words in done.stderr


def test_a_tensorflow_beside_torch_is_not_imported(usual):
    """Its import takes seven seconds and half a gigabyte, for files that no run writes."""
    assert list(usual.glob("events.out.tfevents.*"))
    assert not (usual.parent / "packages" / "tensorflow" / "__init__.py.imported").exists()


@pytest.mark.parametrize(("argv", "code"), [("--help lr", 0), ("--list-recipes", 0), ("--modle", 2)])
def test_a_narrow_terminal(argv, code):
    command = [sys.executable, REPOSITORY / "train.py", *argv.split()]
    environment = {**os.environ, "COLUMNS": "5"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
