"""Fixtures: generated images, and two ways to run train.py on several processes."""

import builtins
import faulthandler
import gc
import os
import re
import shlex
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

# Nothing here imports torch at once: the process that hands tests out to others needs none of it.
REPOSITORY = Path(__file__).parent.parent

# The number of threads changes the order of sums, and so bits.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config):
    """Start one warm server of `tests.ranks` for all processes that run tests: each of its own takes 6 CPU seconds."""
    is_first = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if is_first and sys.version_info < (3, 14):  # from which on only the process that starts a server may use it
        server = forkserver.ForkServer()
        server.set_forkserver_preload(["tests.warm"])
        os.environ["GLIBC_TUNABLES"] = (
            "glibc.malloc.hugetlb=1"  # a third of a fork's time is that of copying page tables
        )
        server.ensure_running()
        del os.environ["GLIBC_TUNABLES"]
        os.environ["TOUCHSTONE_WARM_SERVER"] = server._forkserver_address


def pytest_unconfigure():
    """Have a Python that does not end after the last test say where it waits, and fail, before CI's time is up."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    gc.unfreeze()  # or Triton's binding prints a list of the objects that nobody has freed


def pytest_collection():
    """Look for no garbage in all that is imported, which stays: that would take a quarter of the time."""
    gc.disable()


def pytest_runtestloop():
    """Leave imported modules and collected tests out of all searches for garbage from now on."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_print():
    """Return `print`, and undo what a test or the code under it makes of it (`utils.setup_for_distributed`)."""
    original = builtins.print
    yield original
    builtins.print = original


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """29 training and 7 validation images of three classes."""
    from tests.images import write_images

    return write_images(tmp_path_factory.mktemp("images"), {"train": [11, 10, 8], "val": [3, 2, 2]})


@pytest.fixture(scope="session")
def started(image_folder, tmp_path_factory):
    """A finished run of two epochs of three steps, and how to go on from it; to be copied, not written to."""
    from tests.started import Started

    return Started(image_folder, tmp_path_factory.mktemp("started"))


@pytest.fixture
def torchrun(tmp_path):
    """Return a function that runs train.py under the real torchrun and returns the finished process."""
    from tests.ranks import start_torchrun

    def run(nproc: int, *argv: str, timeout_s: float = 240) -> subprocess.CompletedProcess:
        stdout, stderr = tmp_path / "torchrun.out", tmp_path / "torchrun.err"
        agent = start_torchrun(nproc, REPOSITORY / "train.py", *argv, log=stderr, stdout=stdout)
        agent.join(timeout_s)
        if agent.exitcode is None:
            agent.kill()  # its ranks end with it
        return subprocess.CompletedProcess(argv, agent.exitcode, stdout.read_text(), stderr.read_text())

    return run


@pytest.fixture(scope="session")
def documented_commands() -> dict[str, list[list[str]]]:
    """Return the arguments of every `train.py` command in the README and in docs/, by file; scripts/slurm.sh is one."""
    commands = {}
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        text = path.read_text()
        lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S)).replace("\\\n", " ").splitlines()
        lines += re.findall(r"`((?:python|torchrun|srun) [^`\n]*train\.py [^`\n]*)`", text)
        # Of a loop over settings one stands for all.
        lines = [re.sub(r"\$(seed|fold)\b", "1", line.replace("$lr", "0.1")) for line in lines]
        words = [shlex.split(line, comments=True) for line in lines]
        for program in ("train.py", "scripts/slurm.sh"):
            found = [line[line.index(program) + 1 :] for line in words if program in line]
            commands[path.name] = commands.get(path.name, []) + found
    return commands
