"""A process of an mpirun: of Open MPI's, or of MPICH's, Intel MPI's and the like."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from distributed.variables import port_of, read_number
from errors import UserError

# Rank, number of processes, rank on the machine and processes on it: of Open MPI, and of MPICH, Intel MPI and the like.
_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def read_process(environ: Mapping[str, str]) -> dict | None:
    """Return the fields of the `Launch` of one of several processes of an mpirun; None elsewhere.

    Raises:
        UserError: a variable is no number, or several machines have no address to meet at.
    """
    names = _find_names(environ)
    if names is None or read_number(environ, names[1], least=1) == 1:
        return None
    num_local = read_number(environ, names[3], 1, least=1)
    rank, world_size, local_rank = (read_number(environ, name) for name in names[:3])
    address = _address(environ, is_one_node=num_local == world_size)
    return {
        "rank": rank, "world_size": world_size, "local_rank": local_rank, "num_local": num_local, "address": address,
    }  # fmt: skip


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise UserError if a launcher has started this process that does not tell what its others are."""
    if _find_names(environ) is not None or environ.get("SLURM_JOB_ID"):  # one process; a task of a batch script
        return
    lacking = min({"PMIX_RANK", "PMI_RANK"} & environ.keys())
    raise UserError(
        f"{lacking} is set by a launcher that does not tell how many processes a machine has; use torchrun, "
        "or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process"
    )


def _find_names(environ: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    return next((names for names in _NAMES if {*names} <= environ.keys()), None)


def _address(environ: Mapping[str, str], *, is_one_node: bool) -> dict[str, str]:
    """Return the address at which the processes of an mpirun meet: that which is given, or on one machine its own."""
    given = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    if not is_one_node and "MASTER_ADDR" not in given:
        raise UserError(
            "MASTER_ADDR is not set, and mpirun uses several machines; give them the name of rank 0's: mpirun -x "
            "MASTER_ADDR=NODE (Open MPI) or mpirun -genv MASTER_ADDR NODE (MPICH)"
        )
    port = "29500"  # torchrun's own default
    if is_one_node:
        # Two mpiruns on a machine must not meet; only Open MPI has a name for each.
        port = port_of(environ.get("PMIX_NAMESPACE") or str(_mpirun()))
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **given}


def _mpirun() -> int:
    """Return the number of the process that started those of an mpirun on this machine, perhaps by a script each."""
    pid = os.getppid()
    with suppress(OSError):  # another user's process, or a system without /proc
        while b"PMI_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    return pid
