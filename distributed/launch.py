"""This process as its process group, torchrun, mpirun, srun or variables describe it; no other module reads these."""

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from errors import UserError

_MOST = 1 << 20  # processes

# Rank, number of processes, rank on the machine and processes on it: of Open MPI, and of MPICH, Intel MPI and the like.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class Launch(NamedTuple):
    """This process among the others that its launcher started."""

    rank: int = 0  # this process's number, from 0
    world_size: int = 1  # number of processes
    local_rank: int = 0  # its number on its machine
    num_local: int = 1  # processes on its machine
    is_launched: bool = False  # whether a launcher started it; else it is alone
    is_torchrun: bool = False
    is_by_hand: bool = False  # whether variables were set for each process, and nobody ends the others with one
    agent: str | None = None  # name of the torchrun that starts and restarts it
    attempt: int = 0  # how often torchrun has restarted the processes
    num_nodes: int = 1  # machines that torchrun uses
    cores: int | None = None  # of its own, by `srun --cpus-per-task`
    job: str | None = None  # Slurm's number
    address: Mapping[str, str] = {}  # MASTER_ADDR and MASTER_PORT, where the processes meet, if set

    def environment(self) -> dict[str, str]:
        """Return the variables by which torch finds the other processes."""
        ranks = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        return {name: str(number) for name, number in ranks.items()} | dict(self.address) if self.is_launched else {}


def read_launch(environ: Mapping[str, str] | None = None, world_size: int = 1) -> Launch:
    """Read the launcher's environment variables; a process group that is there already has the last word.

    Args:
        environ: the variables; by default those of this process, and its process group.
        world_size: the number of processes where only RANK is set (`--world-size`).

    Raises:
        UserError: a variable is no number, or is missing.
    """
    if environ is None:
        environ, dist = os.environ, sys.modules.get("torch.distributed")
        if getattr(dist, "is_initialized", bool)():  # torch may be half imported, where a signal's handler calls this
            environ = {**environ, "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    address = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
    mpi = next((names for names in _MPI if {*names} <= environ.keys()), None)
    is_mpi = "RANK" not in environ and mpi is not None and _read(environ, mpi[1], least=1) > 1
    on_node = "LOCAL_WORLD_SIZE" if environ.get("LOCAL_WORLD_SIZE") else "SLURM_STEP_TASKS_PER_NODE"
    on_node = mpi[3] if is_mpi else on_node
    launch = Launch(
        num_local=_read(environ, on_node, 1, least=1),
        is_torchrun="TORCHELASTIC_RUN_ID" in environ,
        is_by_hand=not {"TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", _MPI[0][1], _MPI[1][1]} & environ.keys(),
        attempt=_read(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        num_nodes=_read(environ, "GROUP_WORLD_SIZE", 1, least=1),
        cores=None if is_mpi else _task_cores(environ),
        job=environ.get("SLURM_JOB_ID"),
    )
    if launch.is_torchrun:
        import socket  # not above: the script watches signals before it imports more than it must

        launch = launch._replace(cores=launch.cores and max(launch.cores // launch.num_local, 1))
        launch = launch._replace(agent=f"{environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
    if "RANK" in environ:
        size = _read(environ, "WORLD_SIZE", world_size, least=1)
        rank = _read(environ, "RANK", most=size - 1 if "WORLD_SIZE" in environ else _MOST)
        local_rank = _read(environ, "LOCAL_RANK", rank)
    # Before Slurm, whose variables the processes of an mpirun in an allocation have too.
    elif is_mpi:
        rank, size, local_rank = (_read(environ, name) for name in mpi[:3])
        address = _mpi_address(environ, address, launch.num_local == size)
    # A batch script has SLURM_PROCID too, though its other tasks were not started; only srun sets the step's variables.
    elif _read(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        rank, size, local_rank = (_read(environ, f"SLURM_{name}") for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        if not address.get("MASTER_ADDR"):
            address = _slurm_address(environ) | {name: value for name, value in address.items() if value}
    elif lacking := {"PMIX_RANK", "PMI_RANK"} & environ.keys():
        if mpi is not None or environ.get("SLURM_JOB_ID"):  # one process; a task of a batch script
            return launch
        raise UserError(
            f"{min(lacking)} is set by a launcher that does not tell how many processes a machine has; use torchrun, "
            "or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process"
        )
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


def _task_cores(environ: Mapping[str, str]) -> int | None:
    """Return the cores of the Slurm task that this process is or that torchrun is; None without --cpus-per-task.

    A step that was given no such option has the variable of its batch script: so at most its share of the node's cores.
    """
    if not {"SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK"} <= environ.keys():
        return None
    share = _read(environ, "SLURM_CPUS_ON_NODE", _MOST) // _read(environ, "SLURM_STEP_TASKS_PER_NODE", 1, least=1)
    return max(min(_read(environ, "SLURM_CPUS_PER_TASK"), share), 1)


def _mpi_address(environ: Mapping[str, str], given: Mapping[str, str], is_one_node: bool) -> dict[str, str]:
    """Return the address at which the processes of an mpirun meet: that which is given, or on one machine its own."""
    address = {name: value for name, value in given.items() if value}
    if not is_one_node and "MASTER_ADDR" not in address:
        raise UserError(
            "MASTER_ADDR is not set, and mpirun uses several machines; give them the name of rank 0's: mpirun -x "
            "MASTER_ADDR=NODE (Open MPI) or mpirun -genv MASTER_ADDR NODE (MPICH)"
        )
    port = _port_of(environ.get("PMIX_NAMESPACE") or str(_mpirun())) if is_one_node else "29500"
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **address}


def _mpirun() -> int:
    """Return the number of the process that started those of an mpirun on this machine, perhaps by a script each."""
    pid = os.getppid()
    with suppress(OSError):
        while b"PMI_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    return pid


def _slurm_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the address at which the tasks of a Slurm step meet; each step has a port of its own."""
    step = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")  # missing: `place` says so
    return {"MASTER_ADDR": first_slurm_host(nodes), "MASTER_PORT": _port_of(step)}


def _port_of(job: str) -> str:
    """Return a port for the processes of a job, the same in each of them."""
    import hashlib  # see above

    return str(20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 12000)


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[007-010,12],login1`."""
    # Each bracket stands for its first number; a comma outside brackets begins another host.
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", nodelist).split(",")[0]
