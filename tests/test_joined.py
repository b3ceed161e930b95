"""Processes that another has started or joined: a group made by hand, or by Ray Train, and two kinds of mpirun."""

import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

import train
import utils
from distributed.ending import leave_group
from errors import PreemptedError
from settings.config import parse_args
from tests.ranks import REPOSITORY, free_port, run_ranks, strike_at
from tests.runs import FLAG, Runs, assert_same
from tests.started import SMALL

OPTIONS = [*SMALL, *"--epochs 2 --print-freq 2 --workers 1 --checkpoint-steps 2 --lr 0.05 --model-ema".split()]

# Kills rank 1 in the fourth step, once, where there is a file `strike`.
DYING = """
import os
from distributed.collectives import get_rank
from tests.tiny import Tiny

class Dying(Tiny):
    count = 0

    def forward(self, image):
        self.count += self.training
        if self.count == 8 and get_rank() == 1 and os.path.exists(f"{__file__}.strike"):
            os.remove(f"{__file__}.strike")
            os.kill(os.getpid(), 9)
        return super().forward(image)
"""


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "dying.py").write_text(DYING)
    runs = Runs(image_folder, folder, [*OPTIONS, "--model", f"{folder / 'dying.py'}:Dying"])
    runs.run("undisturbed", 2, FLAG).check()
    return runs


def start(folder, *command, **variables):
    how = {"env": {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}, "cwd": folder, "timeout": 300}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **how)


def own_group(world_size, port, backend="cpu:gloo,cuda:gloo"):
    """Make the group as its owner does, in another order than that of the variables."""
    rank = world_size - 1 - int(os.environ.get("RANK", "0"))
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    return rank


def check_left(rank, world_size, backend="cpu:gloo,cuda:gloo"):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend_config()) == (rank, world_size, backend)
    numbers = torch.tensor([rank])
    group = dist.group.WORLD if backend.startswith("cpu") else dist.new_group(backend="gloo")
    dist.all_reduce(numbers, group=group)
    assert numbers.item() == world_size * (world_size - 1) // 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def joined_rank(world_size, port, backend, argvs):
    rank = own_group(world_size, port, backend)
    with ThreadPoolExecutor(1) as pool:
        assert [*pool.map(train.main, map(parse_args, argvs))] == [None] * len(argvs)
    args = Namespace(device="cpu")
    utils.init_distributed_mode(args)
    assert (args.rank, args.world_size, args.distributed) == (rank, world_size, True)
    assert utils.reduce_across_processes(rank).item() == world_size * (world_size - 1) // 2
    leave_group()
    check_left(rank, world_size, backend)


# The last carries no CPU tensors, as one of NCCL's.
@pytest.mark.parametrize(
    ("world_size", "backend"), [(1, "cpu:gloo,cuda:gloo"), (4, "cpu:gloo,cuda:gloo"), (2, "cuda:gloo")]
)
def test_a_group_of_anothers_is_used_and_left_with_the_same_bits(runs, tmp_path, world_size, backend):
    names = [f"joined-{world_size}-{backend.replace(':', '-')}-{number}" for number in range(2)]
    arguments = (world_size, free_port(), backend, [runs.argv(name, FLAG) for name in names])
    outcome = run_ranks(joined_rank, world_size, *arguments, log_folder=tmp_path).check()
    assert f"{world_size} process{'es' if world_size > 1 else ''} x " in outcome.output
    for name in names:
        assert_same(runs, name)


def stopped_rank(port, argv):
    rank = own_group(2, port)
    if rank == 1:
        strike_at("train.optim.clip_gradients", 3, "after", signal.SIGTERM)
    with pytest.raises(PreemptedError, match="SIGTERM on rank 1"):
        train.main(parse_args(argv))
    check_left(rank, 2)
    train.main(parse_args([*argv, "--resume", "auto"]))
    check_left(rank, 2)


def test_a_signal_stops_a_joined_run_and_the_next_call_resumes_it(runs, tmp_path):
    run_ranks(stopped_rank, 2, free_port(), runs.argv("stopped", FLAG), log_folder=tmp_path).check()
    assert_same(runs, "stopped")


@pytest.mark.skipif(find_spec("ray") is None, reason="ray[train] is not installed")
def test_the_example_trains_with_ray_and_after_a_killed_worker(runs, tmp_path):
    shutil.copy(REPOSITORY / "examples" / "ray_train.py", tmp_path)
    ray = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    start_ray = partial(start, tmp_path, sys.executable, "ray_train.py", **ray)
    done = start_ray(*runs.argv("ray", FLAG))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(runs, "ray")
    log = (runs.folder / "ray" / "log.txt").read_text()
    assert log.count("evaluate  python train.py --test-only") == 1
    assert "default_worker" not in log + (runs.folder / "ray" / "run.json").read_text()
    strike = runs.folder / "dying.py.strike"
    strike.touch()
    done = start_ray(*runs.argv("killed", FLAG), "--resume", "auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not strike.exists()
    assert "resumed step 3" in (runs.folder / "killed" / "log.txt").read_text()
    assert_same(runs, "killed")
    refused = start_ray("--modle", "x")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("train.py: error: --modle is unknown")


LAUNCHERS = {"mpirun.openmpi": "--allow-run-as-root --oversubscribe --bind-to none -n 2", "mpirun.mpich": "-n 2"}


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_bits_by_mpirun_and_after_a_killed_process(runs, tmp_path, launcher):
    if shutil.which(launcher) is None and "CI" not in os.environ:
        pytest.skip(f"{launcher} is not installed")
    wrapper = tmp_path / "wrapper.sh"  # a script for each process, which mpirun starts in place of Python
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    (runs.folder / "dying.py.strike").touch()
    script, argv = [sys.executable, "train.py"], runs.argv(launcher, FLAG)
    mpirun = partial(start, REPOSITORY, launcher, *LAUNCHERS[launcher].split())
    assert mpirun(*script, *argv).returncode != 0
    assert runs.saved(launcher) == [2, 3]
    resumed = mpirun(wrapper, *script, *argv, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed step 3" in resumed.stdout
    assert "2 processes x " in resumed.stdout
    assert_same(runs, launcher)
    refused = mpirun(*script, "--modle", "x")
    assert refused.returncode != 0
    assert refused.stderr.count("train.py: error") == 1, refused.stderr
