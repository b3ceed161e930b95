"""This process as its process group, torchrun, mpirun, srun or variables describe it; no other module reads these."""

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from distributed.variables import MOST_PROCESSES, read_number

# Launchers other than torchrun: a variable that tells of one, and the function that reads its others, whose module is
# imported only then; it returns fields of `Launch`, or None where it has started no other process. The order counts:
# the processes of an mpirun in an allocation have Slurm's variables too, and the tasks of an srun may have PMI's.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "distributed.mpi:read_process"),
    ("PMI_SIZE", "distributed.mpi:read_process"),
    ("SLURM_STEP_NUM_TASKS", "distributed.slurm:read_task"),
    ("PMIX_RANK", "distributed.mpi:check_alone"),
    ("PMI_RANK", "distributed.mpi:check_alone"),
)

# Variables of the launchers that end all processes when one has failed.
_END_ALL = {"TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}


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
    num_restarts: int = 0  # how often torchrun has restarted the processes
    num_nodes: int = 1  # machines that torchrun uses
    cores: int | None = None  # of its own, by `srun --cpus-per-task`
    job: str | None = None  # Slurm's number
    address: Mapping[str, str] = {}  # MASTER_ADDR and MASTER_PORT, where the processes meet, if set

    def environment(self) -> dict[str, str]:
        """Return the variables by which torch finds the other processes."""
        if not self.is_launched:
            return {}
        ranks = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        return {name: str(number) for name, number in ranks.items()} | dict(self.address)


def read_launch(environ: Mapping[str, str] | None = None, world_size: int = 1) -> Launch:
    """Read the launcher's environment variables; a process group that is there already has the last word.

    Args:
        environ: the variables; by default those of this process, and its process group.
        world_size: the number of processes where only RANK is set (`--world-size`).

    Raises:
        UserError: a variable is no number, or is missing.
    """
    if environ is None:
        environ = _own_variables()
    if "RANK" in environ:
        ranks = _read_ranks(environ, world_size)
    else:
        answers = (read(environ) for read in find_readers(environ))
        ranks = next((answer for answer in answers if answer is not None), {})
    # An mpirun has told how many processes the machine has; Slurm's cores are not theirs.
    node = {} if "num_local" in ranks else _read_node(environ)
    launch = Launch(
        is_launched="rank" in ranks, is_torchrun="TORCHELASTIC_RUN_ID" in environ,
        is_by_hand=_END_ALL.isdisjoint(environ), job=environ.get("SLURM_JOB_ID"),
        num_restarts=read_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        num_nodes=read_number(environ, "GROUP_WORLD_SIZE", 1, least=1), **ranks, **node,
    )  # fmt: skip
    read_number(launch.address, "MASTER_PORT", 0, most=65535)
    if launch.is_torchrun:
        import socket  # not above: the script watches signals before it imports more than it must

        # Restarted processes have the same agent; another torchrun on this machine has another process id.
        launch = launch._replace(agent=f"{environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
        if launch.cores:  # of the task that torchrun is, shared by its processes
            launch = launch._replace(cores=max(launch.cores // launch.num_local, 1))
    return launch


def find_readers(environ: Mapping[str, str]) -> list[Callable]:
    """Import what reads the variables of the launchers that are found, and return the functions."""
    return [pkgutil.resolve_name(reader) for variable, reader in _LAUNCHERS if variable in environ]


def _own_variables() -> Mapping[str, str]:
    """Return the variables of this process, and the ranks of a process group, such as one that Ray has made."""
    dist = sys.modules.get("torch.distributed")
    # torch may be half imported, where a signal's handler calls this: then it has no such function yet.
    if not getattr(dist, "is_initialized", bool)():
        return os.environ
    return {**os.environ, "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}


def _read_ranks(environ: Mapping[str, str], world_size: int) -> dict:
    """Return the fields of the `Launch` that torchrun's variables, or the same ones set by hand, tell."""
    world_size = read_number(environ, "WORLD_SIZE", world_size, least=1)
    # A rank beyond `--world-size` is refused by `collectives.read_rank`, which names the option.
    rank = read_number(environ, "RANK", most=world_size - 1 if "WORLD_SIZE" in environ else MOST_PROCESSES)
    local_rank = read_number(environ, "LOCAL_RANK", rank)
    address = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
    return {"rank": rank, "world_size": world_size, "local_rank": local_rank, "address": address}


def _read_node(environ: Mapping[str, str]) -> dict:
    """Return the processes on this machine and the cores of each, or of their torchrun, as fields of the `Launch`."""
    # Of a torchrun that srun has started: its processes are no tasks of the step.
    counted = "LOCAL_WORLD_SIZE"
    if not environ.get(counted):
        counted = "SLURM_STEP_TASKS_PER_NODE"
    num_local = read_number(environ, counted, 1, least=1)
    cores = None
    if "SLURM_STEP_NUM_TASKS" in environ:
        from distributed.slurm import task_cores

        cores = task_cores(environ)
    return {"num_local": num_local, "cores": cores}
