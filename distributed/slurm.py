"""A task of a Slurm step, as srun's variables describe it."""

import re
from collections.abc import Mapping

from distributed.variables import MOST_PROCESSES, port_of, read_number


def read_task(environ: Mapping[str, str]) -> dict | None:
    """Return the fields of the `Launch` of one of several tasks that srun has started; None elsewhere.

    Raises:
        UserError: a variable is no number, or is missing.
    """
    # A batch script has SLURM_PROCID too, though its other tasks were not started; only srun sets the step's variables.
    world_size = read_number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if world_size <= 1:
        return None
    address = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
    if not address.get("MASTER_ADDR"):
        address = _step_address(environ) | {name: value for name, value in address.items() if value}
    rank, local_rank = (read_number(environ, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    return {"rank": rank, "world_size": world_size, "local_rank": local_rank, "address": address}


def task_cores(environ: Mapping[str, str]) -> int | None:
    """Return the cores of the Slurm task that this process is or that torchrun is; None without --cpus-per-task.

    A step that was given no such option has the variable of its batch script: so at most its share of the node's cores.
    """
    if not {"SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK"} <= environ.keys():
        return None
    num_tasks = read_number(environ, "SLURM_STEP_TASKS_PER_NODE", 1, least=1)
    share = read_number(environ, "SLURM_CPUS_ON_NODE", MOST_PROCESSES) // num_tasks
    return max(min(read_number(environ, "SLURM_CPUS_PER_TASK"), share), 1)


def _step_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the address at which the tasks of a step meet; each step has a port of its own."""
    step = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    # Without either `collectives.read_rank` says that there is no address.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return {"MASTER_ADDR": first_slurm_host(nodes), "MASTER_PORT": port_of(step)}


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[007-010,12],login1`."""
    # Each bracket stands for its first number; a comma outside brackets begins another host.
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", nodelist).split(",")[0]
