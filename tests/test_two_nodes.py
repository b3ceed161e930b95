"""Two torchruns that train one run, as on two nodes; one of them is lost with its processes, and is started again."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.endings import differing_results
from tests.ranks import REPOSITORY, free_port, run_ranks, train_rank, wait_for
from tests.started import SMALL_PLAIN

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# 29 images in batches of 8: three steps an epoch, each of them saved, and time enough to strike in the middle.
OPTIONS = f"""
    --batch-size 4 --global-batch-size 8 --epochs 16 --print-freq 1 --lr 0.05 --checkpoint-steps 1 --dist-timeout 1
    --use-deterministic-algorithms --resume auto {" ".join(SMALL_PLAIN)}
""".split()


def descendants(pid):
    found = []
    with suppress(OSError):
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [*found, *itertools.chain(*map(descendants, found))]


def kill(agent):
    with suppress(ProcessLookupError):
        os.kill(agent.pid, signal.SIGSTOP)
    for pid in [*descendants(agent.pid), agent.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait(20)


def test_a_node_that_is_lost_and_comes_back_resumes_with_the_same_bits(image_folder, tmp_path):
    port, out, logs = free_port(), tmp_path / "out", [tmp_path / "node1.log", tmp_path / "node2.log"]
    # Without it the new torchrun waits for an address that the other one has published once only (torch 2.14).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv-id=1"
    command = f"{command} --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} {REPOSITORY / 'train.py'}".split()

    def start(log):
        with open(log, "a") as file:
            options = ["--data-path", image_folder, "--output-dir", out, *OPTIONS]
            return subprocess.Popen([*command, *options], stdout=file, stderr=file, env=environment)

    agents = [start(logs[0])]
    try:
        wait_for(lambda: socket.socket().connect_ex(("localhost", port)) == 0, 60)  # it holds the rendezvous
        agents.append(start(logs[1]))
        wait_for(lambda: any(int(path.stem[11:]) >= 4 for path in out.glob("checkpoint-*.pth")), 60)
        kill(agents[1])
        agents[1] = start(logs[1])
        wait_for(lambda: all(agent.poll() is not None for agent in agents), 75)
    finally:
        for agent in agents:
            kill(agent)
    assert [agent.returncode for agent in agents] == [0, 0]
    assert re.search(r"resumed step \d", logs[0].read_text())
    words = ["--data-path", str(image_folder), "--output-dir", str(tmp_path / "undisturbed"), *OPTIONS]
    run_ranks(train_rank, 1, words, log_folder=tmp_path).check()
    assert differing_results(out, tmp_path / "undisturbed") == []
