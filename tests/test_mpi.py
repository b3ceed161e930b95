"""A real mpirun, of Open MPI and of MPICH: the same bits as on one process, and after a process was killed."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY
from tests.runs import FLAG, Runs, assert_same
from tests.test_joined import DYING, OPTIONS

LAUNCHERS = {
    "mpirun.openmpi": ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"],
    "mpirun.mpich": ["-n", "2"],
}


def start(launcher, *words):
    command = [launcher, *LAUNCHERS[launcher], *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    how = {"env": environment, "capture_output": True, "text": True, "timeout": 300, "cwd": REPOSITORY}
    return subprocess.run(command, check=False, **how)


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_bits_by_mpirun_and_after_a_killed_process(image_folder, tmp_path, launcher):
    if shutil.which(launcher) is None and "CI" not in os.environ:
        pytest.skip(f"{launcher} is not installed")
    (tmp_path / "dying.py").write_text(DYING)
    runs = Runs(image_folder, tmp_path, [*OPTIONS, "--model", f"{tmp_path / 'dying.py'}:Dying"])
    runs.run("undisturbed", 1, FLAG).check()
    # A script for each process, which mpirun starts in place of Python.
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    (tmp_path / "dying.py.strike").touch()
    assert start(launcher, sys.executable, "train.py", *runs.argv("killed", FLAG)).returncode != 0
    assert runs.saved("killed") == [2, 3]
    resumed = start(launcher, wrapper, sys.executable, "train.py", *runs.argv("killed", FLAG), "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed step 3" in resumed.stdout
    assert "2 processes x " in resumed.stdout
    assert_same(runs, "killed")
    refused = start(launcher, sys.executable, "train.py", "--modle", "x")
    assert refused.returncode != 0
    assert refused.stderr.count("train.py: error") == 1, refused.stderr
