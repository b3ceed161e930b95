"""This process as torchrun, srun or variables set by hand describe it. No other module reads these variables."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from errors import UserError

_MOST = 1 << 20  # processes


class Launch(NamedTuple):
    """This process among the others that its launcher started."""

    rank: int = 0  # this process's number, from 0
    world_size: int = 1  # number of processes
    local_rank: int = 0  # its number on its machine
    num_local: int = 1  # processes on its machine
    is_launched: bool = False  # whether a launcher started it; else it is alone
    is_torchrun: bool = False
    agent: str | None = None  # name of the torchrun that starts and restarts it
    attempt: int = 0  # how often torchrun has restarted the processes
    num_nodes: int = 1  # machines that torchrun uses
    job: str | None = None  # Slurm's number
    address: Mapping[str, str] = {}  # MASTER_ADDR and MASTER_PORT, where the processes meet, if set

    def environment(self) -> dict[str, str]:
        """Return the variables by which torch finds the other processes."""
        ranks = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        return {name: str(number) for name, number in ranks.items()} | dict(self.address) if self.is_launched else {}


def read_launch(environ: Mapping[str, str] | None = None, world_size: int = 1) -> Launch:
    """Read the launcher's environment variables.

    Args:
        environ: the variables; by default those of this process.
        world_size: the number of processes where only RANK is set (`--world-size`).

    Raises:
        UserError: a variable is no number, or is missing.
    """
    environ = os.environ if environ is None else environ
    address = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
    on_node = "LOCAL_WORLD_SIZE" if environ.get("LOCAL_WORLD_SIZE") else "SLURM_STEP_TASKS_PER_NODE"
    launch = Launch(
        num_local=_read(environ, on_node, 1, least=1),
        is_torchrun="TORCHELASTIC_RUN_ID" in environ,
        attempt=_read(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        num_nodes=_read(environ, "GROUP_WORLD_SIZE", 1, least=1),
        job=environ.get("SLURM_JOB_ID"),
    )
    if launch.is_torchrun:
        import socket  # not above: the script watches signals before it imports more than it must

        launch = launch._replace(agent=f"{environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
    if "RANK" in environ:
        size = _read(environ, "WORLD_SIZE", world_size, least=1)
        rank = _read(environ, "RANK", most=size - 1 if "WORLD_SIZE" in environ else _MOST)
        local_rank = _read(environ, "LOCAL_RANK", rank)
    # A batch script has SLURM_PROCID too, though its other tasks were not started; only srun sets the step's variables.
    elif _read(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        rank, size, local_rank = (_read(environ, f"SLURM_{name}") for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        if not address.get("MASTER_ADDR"):
            address = _slurm_address(environ) | {name: value for name, value in address.items() if value}
    else:
        return launch
    _read(address, "MASTER_PORT", 0, most=65535)
    return launch._replace(rank=rank, world_size=size, local_rank=local_rank, is_launched=True, address=address)


def _read(environ: Mapping[str, str], name: str, default: int | None = None, least: int = 0, most: int = _MOST) -> int:
    """Return the number that a variable holds, or that an entry of Slurm's such as 8(x2) begins with."""
    text = environ.get(name, "missing" if default is None else str(default))
    found = re.match(r"\d{1,9}" if "PER_NODE" in name else r"\d{1,9}\Z", text, re.ASCII)
    if not found or not least <= int(found[0]) <= most:
        raise UserError(f"{name} is {text or 'empty'}, expected {least} to {most}; unset it, or use torchrun or srun")
    return int(found[0])


def _slurm_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the address at which the tasks of a Slurm step meet; each step has a port of its own."""
    import hashlib  # see above

    step = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    port = 20000 + int(hashlib.sha256(step.encode()).hexdigest(), 16) % 12000
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")  # missing: `place` says so
    return {"MASTER_ADDR": first_slurm_host(nodes), "MASTER_PORT": str(port)}


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[007-010,12],login1`."""
    # Each bracket stands for its first number; a comma outside brackets begins another host.
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", nodelist).split(",")[0]
