"""Meeting the other processes at rank 0's store: in one time limit, and with a line each minute on who is missing."""

import os
import socket
import threading
import time
import urllib.parse
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from distributed.launch import Launch
from distributed.watch import watchdog
from errors import UserError, counted, say

# Seconds between two lines on who is missing, the longest between two looks, and for the last one to be reported.
_LINE_S, _LOOK_S, _GRACE_S = 60.0, 1.0, 6.0


class Meeting:
    """How this process meets the others.

    Args:
        launch: this process among the others, as its launcher says.
        url: env://, or another address of `--dist-url`.
        timeout: longest time to wait, from now on.
    """

    def __init__(self, launch: Launch, url: str, timeout: timedelta) -> None:
        self.launch, self.url, self.timeout = launch, url, timeout
        self.deadline_s = time.monotonic() + timeout.total_seconds()
        self._next_line_s = time.monotonic() + _LINE_S
        self._pause_s = 0.02
        self._note = ""

    def open_store(self) -> dist.Store:
        """Return the store at which all processes have met.

        Raises:
            UserError: rank 0 cannot be reached, processes are missing, or launchers tell of different numbers of them.
        """
        # In a thread: torch's client waits without an end, and deaf to signals, for the answer of a process that is
        # stopped, or that is no store.
        found = Future()
        threading.Thread(target=self._meet_into, args=(found,), daemon=True, name="meeting").start()
        try:
            return found.result(self.timeout.total_seconds() + _GRACE_S)
        except TimeoutError:
            limit = f"{self.timeout.total_seconds() / 60:g} min (--dist-timeout)"
            why = "it is stopped, or its port is another program's"
            raise _alone(f"rank 0 has not answered rank {self.launch.rank} within {limit}: {why}") from None

    def _meet_into(self, found: Future) -> None:
        try:
            found.set_result(self._meet())
        except BaseException as error:  # the main thread's to report
            found.set_exception(error)

    def _meet(self) -> dist.Store:
        launch = self.launch
        parts = urllib.parse.urlsplit(self.url)
        if self.url == "env://":
            host, port = launch.address["MASTER_ADDR"], int(launch.address["MASTER_PORT"])
        elif parts.scheme == "tcp":
            host, port = parts.hostname, parts.port
        else:
            return next(dist.rendezvous(self.url, launch.rank, launch.world_size, timeout=self.timeout))[0]
        has_agent = self.url == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if launch.rank == 0 and not has_agent:
            store = self._serve(host, port)
        else:
            self._reach(host, port)
            store = dist.TCPStore(host, port, is_master=False, timeout=self.timeout, wait_for_workers=False)
        # torchrun's store outlives a restart and keeps the addresses of dead processes, so each attempt has its own
        # keys. Not on several nodes: each torchrun counts its own restarts there, so the numbers may differ.
        if launch.num_nodes == 1:
            store = dist.PrefixStore(f"attempt{launch.attempt}", store)
        self._await_all(store)
        return store

    def _serve(self, host: str, port: int) -> dist.Store:
        """Return the store, served by this process, which need not reach itself by the address of the others."""
        if not _is_local(host):
            self._note = f"; MASTER_ADDR {host} is no address of this machine, where rank 0 runs"
        keeping = {"timeout": self.timeout, "wait_for_workers": False, "multi_tenant": True}
        try:
            return dist.TCPStore("localhost", port, is_master=True, **keeping)
        except dist.DistError as error:
            reason = "it is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
            raise UserError(f"rank 0 cannot listen on port {port}: {reason}; give another MASTER_PORT") from error

    def _reach(self, host: str, port: int) -> None:
        """Wait until somebody listens at rank 0's address, whose name may be known later, as a pod's."""
        while True:
            try:
                socket.create_connection((host, port), timeout=5.0).close()
                return
            except socket.gaierror:
                why = f"the name {host} cannot be resolved"
            except OSError as error:
                why = str(error.strerror or error)
            where = f"rank 0 at {host}:{port}: {why}"
            if time.monotonic() > self.deadline_s:
                remedy = "check that it has started and that the port is open, or raise --dist-timeout"
                raise _alone(f"rank {self.launch.rank} cannot reach {where}; {remedy}")
            self._wait(f"waiting for {where}")

    def _await_all(self, store: dist.Store) -> None:
        """Wait until all processes have come to the store, and check that they count as many of them."""
        rank, world_size = self.launch.rank, self.launch.world_size
        store.set(f"joined/{rank}", str(world_size))
        keys = [f"joined/{each}" for each in range(world_size)]
        # Rank 0 looks at each of them, the others at rank 0 alone: a thousand ranks would ask a million times.
        seen = range(world_size) if rank == 0 else [0]
        while True:
            is_complete = store.check(keys)
            here = [each for each in seen if store.check([keys[each]])]
            for each in here:
                _compare_sizes(rank, world_size, each, int(store.get(keys[each])))
            if is_complete:
                return
            missing = [each for each in seen if each not in here]
            told = "not all processes have joined"
            if rank == 0:
                told = f"{len(here)} of {counted(world_size, 'process')} have joined"
            if time.monotonic() > self.deadline_s:
                names = ", ".join(map(str, missing[:8]))
                who = f"; no word from rank {names}" if missing else ""
                limit = f"after {self.timeout.total_seconds() / 60:g} min (--dist-timeout)"
                raise UserError(f"{told} {limit}{who}{self._note}", exit_code=1)
            self._wait(told + self._note)

    def _wait(self, line: str) -> None:
        """Wait a little, and print the line each minute on one process of each machine."""
        watchdog.beat()
        if time.monotonic() > self._next_line_s:
            self._next_line_s += _LINE_S
            if self.launch.local_rank == 0:
                say(line)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LOOK_S)


def _is_local(host: str) -> bool:
    """Tell whether a name is an address of this machine; an unknown name may become one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except socket.gaierror:
        return True
    except OSError:
        return False
    return True


def _compare_sizes(rank: int, world_size: int, other: int, theirs: int) -> None:
    if theirs != world_size:
        raise _alone(
            f"rank {rank} is one of {counted(world_size, 'process')}, but rank {other} one of {theirs} (WORLD_SIZE); "
            "start all with the same number",
            exit_code=UserError.exit_code,
        )


def _alone(line: str, exit_code: int = 1) -> UserError:
    """Return an error that each rank prints, since rank 0 may not be there to do so."""
    return UserError(line, exit_code=exit_code, is_of_one_rank=True)
