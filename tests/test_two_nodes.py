"""Two nodes, each a network namespace with a host name, a torchrun and a disk of its own, one of which is lost."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.endings import differing_results
from tests.ranks import REPOSITORY
from tests.started import SMALL_PLAIN, run_train

# CI must not pass without it; who may not make namespaces may still run the other tests.
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        not (sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip")) and "CI" not in os.environ,
        reason="needs Linux, root, and ip of iproute2",
    ),
]

PORT = 29400
# 29 images in batches of 8: three steps an epoch, each of them saved, and time enough to strike in the middle.
OPTIONS = f"""
    --batch-size 4 --global-batch-size 8 --epochs 16 --print-freq 1 --lr 0.05 --checkpoint-steps 1 --dist-timeout 1
    --use-deterministic-algorithms --resume auto {" ".join(SMALL_PLAIN)}
""".split()
_networks = itertools.count()


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            found = [int(word) for word in file.read().split()]
    except OSError:
        return []
    return [*found, *itertools.chain(*map(children, found))]


class Node:
    """A machine, as far as processes on it can tell: a network, a host name, and a disk that is lost with it."""

    def __init__(self, number, tag, folder):
        self.name = self.namespace = f"node{number}-{tag}"
        self.address, self.wire = f"10.213.0.{number}", f"v{number}-{tag}"
        self.hosts, self.disk, self.log = folder / "hosts", folder / f"disk{number}", folder / f"node{number}.log"
        self.agent = None
        ip("netns", "add", self.namespace)

    def connect(self):
        ip("link", "set", self.wire, "netns", self.namespace)
        for words in (["addr", "add", f"{self.address}/24", "dev", self.wire], ["link", "set", self.wire, "up"]):
            ip("-n", self.namespace, *words)
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def start(self, first, options):
        """Start this node's torchrun with an empty disk: whatever an earlier one kept there is gone."""
        shutil.rmtree(self.disk, ignore_errors=True)
        self.disk.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.wire}
        # Without it the new torchrun waits for an address that the other one has published once only (torch 2.14).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        environment |= {"TMPDIR": str(self.disk), "XDG_CACHE_HOME": str(self.disk / "cache")}
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --max-restarts=3"
        torchrun += f" --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint={first.name}:{PORT}"
        enter = f"ip netns exec {self.namespace} unshare --uts --mount sh -c"
        own = f'mount --bind {self.hosts} /etc/hosts && hostname {self.name} && exec "$@"'
        command = [*enter.split(), own, "sh", *torchrun.split(), str(REPOSITORY / "train.py"), *map(str, options)]
        with open(self.log, "a") as log:
            self.agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=REPOSITORY)

    def kill(self):
        """End the agent and all below it at once, so that none of them can still say or save anything."""
        with suppress(ProcessLookupError):
            os.kill(self.agent.pid, signal.SIGSTOP)
        for pid in [*children(self.agent.pid), self.agent.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait(20)


class Nodes:
    """Two nodes joined by a cable, which train one run in a folder that both see."""

    def __init__(self, images, folder):
        tag = f"{os.getpid() % 100000}{next(_networks)}"
        self.out, self.nodes = folder / "out", []
        self.options = ["--data-path", images, "--output-dir", self.out, *OPTIONS]
        try:
            for number in (1, 2):
                self.nodes.append(Node(number, tag, folder))
            ip("link", "add", self.nodes[0].wire, "type", "veth", "peer", "name", self.nodes[1].wire)
            for node in self.nodes:
                node.connect()
            (folder / "hosts").write_text(
                "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in self.nodes)
            )
        except BaseException:
            self.close()
            raise

    def start(self, *nodes):
        for node in nodes or self.nodes:
            node.start(self.nodes[0], self.options)

    def wait(self, condition, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert all(node.agent.poll() in (None, 0) for node in self.nodes), self.logs
            assert time.monotonic() < deadline, self.logs
            time.sleep(0.05)

    def wait_for_step(self, step, timeout_s=60):
        self.wait(lambda: any(int(path.stem[11:]) >= step for path in self.out.glob("checkpoint-*.pth")), timeout_s)

    @property
    def logs(self):
        return "\n".join(node.log.read_text() for node in self.nodes)

    def finish(self, timeout_s=75):
        self.wait(lambda: all(node.agent.poll() is not None for node in self.nodes), timeout_s)
        assert [node.agent.returncode for node in self.nodes] == [0, 0], self.logs

    def close(self):
        for node in self.nodes:
            if node.agent and node.agent.poll() is None:
                node.kill()
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", node.namespace)  # and its end of the cable


@pytest.fixture
def nodes(image_folder, tmp_path):
    nodes = Nodes(image_folder, tmp_path)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def undisturbed(image_folder, tmp_path_factory):
    """A run of the same options on one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_train(folder, "--data-path", image_folder, "--output-dir", folder / "out", *OPTIONS).check()
    return folder / "out"


def test_a_second_node_that_is_lost_and_comes_back_empty_goes_on_with_the_same_bits(nodes, undisturbed):
    first, second = nodes.nodes
    nodes.start()
    nodes.wait_for_step(4)
    second.kill()
    nodes.start(second)
    nodes.finish()
    assert re.search(r"resumed step \d", first.log.read_text()), nodes.logs
    assert differing_results(nodes.out, undisturbed) == []


@pytest.mark.slow
def test_a_run_whose_first_node_is_lost_goes_on_when_both_are_started_again(nodes, undisturbed):
    """The rendezvous is lost with its host, so the other node's torchrun ends, too."""
    first, second = nodes.nodes
    nodes.start()
    nodes.wait_for_step(4)
    first.kill()
    second.agent.wait(60)
    assert second.agent.returncode != 0
    nodes.start()
    nodes.finish()
    assert differing_results(nodes.out, undisturbed) == []
