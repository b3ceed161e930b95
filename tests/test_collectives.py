"""What processes tell each other."""

import collections
import json
import os
import resource

import pytest
import torch
import torch.distributed as dist

from distributed import collectives
from errors import UserError
from tests.ranks import run_check, run_ranks, train_rank
from tests.started import SMALL_PLAIN


def check_all(rank, world_size, folder):
    assert (rank, world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert collectives.is_main_process() == (rank == 0)
    print("printed")
    print(f"forced {rank}", force=True)

    # rank 0 has no rows, rank 1 two, rank 2 four
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


def count_calls(folder):
    """Have this rank write how often it calls each collective of torch."""
    counts = collections.Counter()

    def count(name):
        original = getattr(dist, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)

    for name in ("all_reduce", "broadcast", "all_gather", "barrier", "new_group"):
        count(name)
    shut_down = collectives.shut_down

    def write_and_shut_down():
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(counts))
        shut_down()

    collectives.shut_down = write_and_shut_down


def test_the_number_of_collectives_is_that_of_two_processes(tmp_path):
    found = {}
    for size in (2, 5):
        folder = tmp_path / str(size)
        folder.mkdir()
        argv = [*SMALL_PLAIN, "--synthetic", 4 * size, "--batch-size", 2, "--epochs", 1, "--output-dir", folder / "out"]
        run_ranks(train_rank, size, [*map(str, argv)], [], (count_calls, folder), log_folder=folder).check()
        found |= {(size, rank): json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)}
    assert found[2, 0].keys() == {"all_reduce", "broadcast", "all_gather", "barrier", "new_group"}
    assert all(counts == found[2, 0] for counts in found.values()), found


def limit_files(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_limit_of_open_files_is_raised_or_one_line(tmp_path):
    argv = [*SMALL_PLAIN, "--synthetic", "16", "--batch-size", "2", "--epochs", "1", "--output-dir", tmp_path / "out"]
    argv = [*map(str, argv)]
    run_ranks(train_rank, 8, argv, [], (limit_files, 45, 400), log_folder=tmp_path).check()  # needs 54
    done = run_ranks(train_rank, 8, [*argv, "--overwrite"], [], (limit_files, 42, 42), log_folder=tmp_path)
    assert done.codes[0] == 2
    assert done.output.count("8 processes need 44 open files each; `ulimit -Hn` allows 42: raise it") == 1
