"""Numbers in the environment variables of launchers, and a port that a job's processes find without talking."""

import re
from collections.abc import Mapping

from errors import UserError

MOST_PROCESSES = 1 << 20


def read_number(
    environ: Mapping[str, str], name: str, default: int | None = None, least: int = 0, most: int = MOST_PROCESSES
) -> int:
    """Return the number that a variable holds, or that an entry of Slurm's such as 8(x2) begins with.

    Raises:
        UserError: it is missing and has no default, is no number, or is out of bounds.
    """
    text = environ.get(name, "missing" if default is None else str(default))
    # Python refuses to convert more than 4300 digits, with an error that names no variable: so at most nine.
    found = re.match(r"\d{1,9}" if "PER_NODE" in name else r"\d{1,9}\Z", text, re.ASCII)
    if not found or not least <= int(found[0]) <= most:
        raise UserError(f"{name} is {text or 'empty'}, expected {least} to {most}; unset it, or use torchrun or srun")
    return int(found[0])


def port_of(job: str) -> str:
    """Return a port for the processes of a job, the same in each of them."""
    import hashlib  # not above: the script watches signals before it imports more than it must

    # From 20000 to 31999: below the ports that systems hand out, which another connection may hold.
    return str(20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 12000)
