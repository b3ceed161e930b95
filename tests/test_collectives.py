"""What processes tell each other."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch

from distributed import collectives
from errors import UserError
from tests.ranks import run_check, run_ranks, train_rank
from tests.started import SMALL_PLAIN


def check_all(rank, world_size, folder):
    assert (rank, world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert collectives.is_main_process() == (rank == 0)
    print("printed")
    print(f"forced {rank}", force=True)

    rows = torch.arange(4 * rank).reshape(2 * rank, 2) + 100 * rank
    gathered = collectives.all_gather(rows)
    for other in range(world_size):
        assert torch.equal(gathered[other], torch.arange(4 * other).reshape(2 * other, 2) + 100 * other), gathered
    assert [part.shape for part in collectives.all_gather(torch.zeros(0, 2))] == [(0, 2)] * world_size
    dealt = torch.arange(7, dtype=torch.float64)[:, None]
    assert torch.equal(collectives.interleave(collectives.all_gather(dealt[rank::world_size])), dealt)

    for payload in (b"", b"x", bytes(range(256)) * 1000):
        assert collectives.broadcast_bytes(payload if rank == 0 else None) == payload
    assert collectives.broadcast_bytes(b"of rank 0" if rank == 0 else b"ignored and longer") == b"of rank 0"

    def work(text):
        with (folder / "calls").open("a") as file:
            file.write(text)
        return text * 3

    def refuse():
        raise UserError("no usable file", exit_code=4)

    assert collectives.call_on_master(work, "once") == "onceonceonce"
    assert collectives.call_on_master(lambda: None) is None
    with pytest.raises(UserError, match="no usable file") as refusal:
        collectives.call_on_master(refuse)
    assert refusal.value.exit_code == 4


@pytest.mark.dist
def test_what_ranks_exchange_and_that_they_print_once(tmp_path):
    outcome = run_check(3, check_all, tmp_path, tmp_path)
    assert outcome.output.count("printed") == 1
    assert [f"forced {rank}" in output for rank, output in enumerate(outcome.outputs)] == [True] * 3
    assert (tmp_path / "calls").read_text() == "once"


def limit_files(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_limit_of_open_files_is_raised_or_one_line(tmp_path):
    argv = [*SMALL_PLAIN, "--synthetic", "16", "--batch-size", "2", "--epochs", "1", "--output-dir", tmp_path / "out"]
    argv = [*map(str, argv)]
    run_ranks(train_rank, 4, argv, [], (limit_files, 33, 400), log_folder=tmp_path).check()
    done = run_ranks(train_rank, 4, [*argv, "--overwrite"], [], (limit_files, 31, 31), log_folder=tmp_path)
    assert done.codes[0] == 2
    assert done.outputs[0].count("4 processes need 32 open files each; `ulimit -Hn` allows 31: raise it") == 1


GROUPS = {  # /proc/self/cgroup, the files below /sys/fs/cgroup, and the cores
    "version 2, a fraction": ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 2),
    "version 2, of an ancestor": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 1),
    "version 2, in a container": ("0::/", {"cpu.max": "10000 100000"}, 1),
    "version 1": ("3:cpuset:/x\n2:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "5", "cpu/x/cpu.cfs_period_us": "9"}, 1),
    "version 1, the host's path": ("1:cpu:/docker/f", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "9"}, 1),
    "another controller": ("1:cpuset:/x", {"cpu/x/cpu.cfs_quota_us": "1", "cpu/x/cpu.cfs_period_us": "9"}, 99),
    "no limit": ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "9"}, 99),
    "no groups": ("", {}, 99),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_a_share_of_the_processors_counts_as_so_many_cores(name, tmp_path):
    groups, files, expected = GROUPS[name]
    for place, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{path}": files[path] for path in files}}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"{text}\n")
    assert collectives.count_cores(tmp_path) == min(expected, len(os.sched_getaffinity(0)))


def in_half_a_core(folder, argv):
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(2)
    train_rank(argv)


def test_a_run_in_a_group_with_half_a_core_uses_one_thread_and_one_loader_process(tmp_path):
    is_first = Path("/sys/fs/cgroup/cpu").is_dir()
    group = Path("/sys/fs/cgroup") / ("cpu" if is_first else "") / f"touchstone-{os.getpid()}"
    name, text = ("cpu.cfs_quota_us", "50000") if is_first else ("cpu.max", "50000 100000")
    words = " ".join(SMALL_PLAIN).replace("--workers 0", "--synthetic 16 --batch-size 8 --epochs 1").split()
    try:
        (group / "inner").mkdir(parents=True)
        (group / name).write_text(text)
        words += ["--output-dir", str(tmp_path / "out")]
        run_ranks(in_half_a_core, 1, group / "inner", words, log_folder=tmp_path).check()
    except OSError:
        pytest.skip("needs root, and control groups that can be written")
    finally:
        for folder in filter(Path.is_dir, (group / "inner", group)):
            folder.rmdir()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["args"]["workers"] == record["environment"]["threads"] == 1
    assert record["processor"].startswith("1 cores of")
