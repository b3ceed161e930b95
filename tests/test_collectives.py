"""What processes tell each other."""

import os

import pytest
import torch

from distributed import collectives
from errors import UserError
from tests.ranks import run_check


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
