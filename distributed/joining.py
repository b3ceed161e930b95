"""Meeting the other processes at rank 0's store: in one time limit, and with a line each minute on who is missing."""

import os
import re
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from distributed.launch import Launch
from distributed.watch import watchdog
from errors import UserError, counted, write_stderr

# Seconds between two lines on who is missing, and the longest between two questions to the store.
_LINE_S = 60.0
_POLL_S = 1.0


class Meeting:
    """How this process meets the others.

    Args:
        launch: this process among the others, as its launcher says.
        url: env://, or another address of `--dist-url`.
        timeout: longest time to wait.
    """

    def __init__(self, launch: Launch, url: str, timeout: timedelta) -> None:
        self.launch, self.url, self.timeout = launch, url, timeout
        self._is_over = threading.Event()
        self._lacking = f"{url} does not answer"

    def open_store(self) -> dist.Store:
        """Return the store at which all processes have met.

        Raises:
            UserError: rank 0 cannot be reached, processes are missing, or launchers tell of different numbers of them.
        """
        found = Future()
        start_s = time.monotonic()
        next_line_s = start_s + _LINE_S
        # In a thread: torch's client waits without an end, deaf to signals, for a process that is stopped or no store.
        threading.Thread(target=self._meet_into, args=(found,), daemon=True, name="meeting").start()
        try:
            while time.monotonic() < start_s + self.timeout.total_seconds():
                watchdog.note_progress()
                try:
                    return found.result(min(self.timeout.total_seconds(), _POLL_S))
                except TimeoutError:
                    if time.monotonic() > next_line_s and self.launch.local_rank == 0:
                        write_stderr(self._lacking)
                        next_line_s += _LINE_S
        finally:
            self._is_over.set()
        line = f"{self._lacking}, after {self.timeout.total_seconds() / 60:g} min (--dist-timeout)"
        line += "; check that all have started and that ports are open, or raise it"
        raise UserError(line, exit_code=1, is_of_one_rank=True)  # rank 0 may not be there to print it

    def _meet_into(self, found: Future) -> None:
        try:
            found.set_result(self._meet())
        except BaseException as error:  # the main thread's to report
            found.set_exception(error)

    def _meet(self) -> dist.Store:
        launch = self.launch
        address = re.match(r"tcp://\[?([^\]?]+)\]?:(\d+)", self.url)
        if self.url == "env://":
            host, port = launch.address["MASTER_ADDR"], int(launch.address["MASTER_PORT"])
        elif address:
            host, port = address[1], int(address[2])
        else:
            return next(dist.rendezvous(self.url, launch.rank, launch.world_size, timeout=self.timeout))[0]
        # Then torchrun itself holds the store at this address, and rank 0 is a client as the others are.
        has_agent = self.url == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if launch.rank == 0 and not has_agent:
            store = self._serve(port)
        else:
            self._reach(host, port)
            store = dist.TCPStore(host, port, is_master=False, timeout=self.timeout, wait_for_workers=False)
        # torchrun's store outlives a restart and keeps the addresses of dead processes, so each attempt has its own
        # keys. Not on several nodes: each torchrun counts its own restarts there, so the numbers may differ.
        if launch.num_nodes == 1:
            store = dist.PrefixStore(f"attempt{launch.num_restarts}", store)
        self._await_all(store)
        return store

    def _serve(self, port: int) -> dist.Store:
        """Return the store, served by this process, which need not reach itself by the address of the others."""
        try:
            # `wait_for_workers` would wait inside torch, which tells how many have joined and not who is missing.
            return dist.TCPStore(
                "localhost", port, is_master=True, timeout=self.timeout, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistError as error:
            reason = "it is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
            raise UserError(f"rank 0 cannot listen on port {port}: {reason}; give another MASTER_PORT") from error

    def _reach(self, host: str, port: int) -> None:
        """Wait until somebody listens at rank 0's address, whose name may be known later, as a pod's."""
        begin = f"rank {self.launch.rank} cannot reach rank 0 at {host}:{port}"
        while not self._is_over.is_set():
            try:
                # Not torch's client, which says neither that a name is unknown nor that nobody listens there.
                socket.create_connection((host, port), timeout=5.0).close()
                break
            except socket.gaierror:
                self._lacking = f"{begin}: the name {host} cannot be resolved"
            except OSError as error:
                self._lacking = f"{begin}: {error.strerror or error}"
            time.sleep(_POLL_S / 4)
        self._lacking = f"{begin}: what listens there does not answer; it is stopped, or another program"

    def _await_all(self, store: dist.Store) -> None:
        """Wait until all processes have come to the store, and check that they count as many of them."""
        rank, world_size = self.launch.rank, self.launch.world_size
        keys = [f"joined/{each}" for each in range(world_size)]
        store.set(keys[rank], str(world_size))
        # Rank 0 looks at each of them, the others at rank 0 alone: a thousand ranks would ask a million times.
        seen = range(world_size) if rank == 0 else [0]
        pause_s = 0.01
        while not self._is_over.is_set():
            # Asked before the ranks are read: what is complete now has been compared when this returns.
            is_complete = store.check(keys)
            here = [each for each in seen if store.check([keys[each]])]
            for each in here:
                told = int(store.get(keys[each]))
                if told != world_size:
                    line = f"rank {rank} is one of {counted(world_size, 'process')}, but rank {each} one of {told}"
                    raise UserError(f"{line} (WORLD_SIZE); start all with the same number", is_of_one_rank=True)
            if is_complete:
                return
            if rank == 0:
                missing = ", ".join(str(each) for each in seen if each not in here)[:60]
                joined = f"{len(here)} of {counted(world_size, 'process')} have joined"
                self._lacking = f"{joined}, no word from rank {missing}"
            else:
                self._lacking = f"rank {rank} waits for others at rank 0's store"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
