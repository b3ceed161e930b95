"""The names of a run's files, and the steps of its checkpoints."""

import os
import re
from pathlib import Path

from checkpointing.archive import read_checkpoint
from checkpointing.checkpoint import BEST_NAMES
from errors import StorageError, UserError
from files import retry_read

NUMBERED = re.compile(r"checkpoint-(\d{8,})\.pth")

# Files with a run's state, whole or damaged; only `--overwrite` removes them.
STATE_FILES = re.compile(r"(superseded-(\d+-)?)?(checkpoint(-\d{8,})?|best|best_ema)\.pth(\.corrupt(-\d+)?)?")

EVENT_FILES = re.compile(r"events\.out\.tfevents\..*")

# Pictures of a run, and the numbers for more: their kind, and the step after which they were drawn.
PICTURES = re.compile(r"picture-(?P<tag>[a-z-]+)-(?P<step>\d{8,18})\.(png|json)")

# Every file that a run writes into its output folder; `--overwrite` removes these, except its lock, and no others.
OWN_FILES = re.compile(
    rf"({STATE_FILES.pattern}|{PICTURES.pattern}|status\.json|run\.json|metrics\.jsonl|mirrors\.json|log\.txt|recipe\.toml"
    r"|curves\.png|report\.html|images\.npz|trace\.json\.gz)(\.tmp\.\d+)?"
    rf"|\.node-\d+-[0-9a-f]+|\.lock|{EVENT_FILES.pattern}"
)

# Files that a killed process left half done.
LEFTOVERS = re.compile(r".*\.tmp\.\d+|\.node-\d+-[0-9a-f]+")

BEST_FILES = [f"{name}.pth" for name in dict.fromkeys(BEST_NAMES.values())]


def own_files(folder: Path, pattern: re.Pattern = OWN_FILES) -> list[Path]:
    """Return the files of a run whose names match; StorageError if the disk does not answer."""
    try:
        names = retry_read(lambda: os.listdir(folder), folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if pattern.fullmatch(name)]


def numbered(folder: Path) -> list[Path]:
    """Return the numbered checkpoints, newest first."""
    return sorted(own_files(folder, NUMBERED), key=step_in, reverse=True)


def step_in(path: Path) -> int:
    """Return the step in the name of a numbered checkpoint."""
    return int(NUMBERED.fullmatch(path.name)[1])


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint, None if it is damaged or missing; StorageError if the disk does not answer."""
    try:
        return read_checkpoint(path, path.name).state["step"]
    except StorageError:
        raise
    except (UserError, OSError):
        return None
