"""The file names of a run, and the search for the newest checkpoint that verifies."""

import filecmp
import os
import re
from collections.abc import Callable
from pathlib import Path

from checkpointing.archive import Found, read_checkpoint
from checkpointing.checkpoint import BEST_NAMES
from errors import StorageError, UserError, counted
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

BEST_FILES = [f"{name}.pth" for name in dict.fromkeys(BEST_NAMES.values())]


class CheckpointFinder:
    """The checkpoints in one folder, as one process reads them. Changes nothing.

    `checkpoint-00012510.pth` is the state after that many steps; `checkpoint.pth` is the newest, `best.pth` the one
    with the best weights and `best_ema.pth` the one with the best average, all hard links. The folder's own listing is
    the only record of them.
    """

    def __init__(self, folder: Path, *, say: Callable[[str], None] = print) -> None:
        self.folder, self.say = folder, say
        self.damaged = []  # (path, reason) of each file that `read` passed over
        self.verified = None  # path of the checkpoint that `read` returned

    def numbered(self) -> list[Path]:
        """Return the numbered checkpoints, newest first."""
        return sorted((path for path in self.own_files() if NUMBERED.fullmatch(path.name)), key=step_in, reverse=True)

    def own_files(self, pattern: re.Pattern = OWN_FILES) -> list[Path]:
        """Return the files of a run whose names match."""
        try:
            names = retry_read(lambda: os.listdir(self.folder), self.folder)
        except (FileNotFoundError, NotADirectoryError):  # `acquire` creates it, or raises
            return []
        return [self.folder / name for name in names if pattern.fullmatch(name)]

    def path_of(self, step: int) -> Path:
        """Return the numbered file of a step."""
        return self.folder / f"checkpoint-{step:08d}.pth"

    def is_elsewhere(self, resume: str) -> bool:
        """Tell whether `--resume` names a file outside this folder."""
        real = os.path.realpath  # which a circle of links does not disturb
        return resume not in ("", "auto") and os.path.dirname(real(resume)) != real(self.folder)

    def read(self, resume: str) -> Found | None:
        """Return the checkpoint that `--resume` means, verified, or None for a fresh start.

        Raises:
            UserError: the named file is missing or is no good checkpoint.
            UserError: `auto` found damaged ones only.
            StorageError: the disk does not answer.
        """
        if not resume:
            return None
        found = self._read_newest() if resume == "auto" else self._read_named(resume)
        self.verified = found and found.path
        return found

    def _read_named(self, resume: str) -> Found:
        try:
            return read_checkpoint(Path(resume), resume)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise UserError(
                f"--resume {resume} is not a file; give a checkpoint, or auto for the newest in --output-dir"
            ) from error

    def _read_newest(self) -> Found | None:
        self.damaged = []
        for path in self._candidates():
            try:
                return read_checkpoint(path, str(path))
            except FileNotFoundError:
                if path.is_symlink():
                    self.damaged.append((path, f"{path} is a link to nothing"))
            except IsADirectoryError:
                self.damaged.append((path, f"{path} is not a file"))
            except StorageError:
                raise
            except UserError as error:
                self.damaged.append((path, str(error)))
        unusable = self.own_files(STATE_FILES)
        if unusable:
            reasons = [why for _, why in self.damaged[:3]] + ["more"] * (len(self.damaged) > 3)
            raise UserError(
                f"{counted(len(unusable), 'checkpoint')} in {self.folder}, none usable: "
                f"{'; '.join(reasons) or 'all set aside'}. Not starting over: use --overwrite to begin again",
                exit_code=4,
            )
        return None

    def _candidates(self) -> list[Path]:
        """Return the files to resume from, the newest first; linked names last, in case the numbered ones are gone."""
        numbered, newest = self.numbered(), self.folder / "checkpoint.pth"
        files = [path for path in numbered if path.is_file()]
        if newest.is_file() and not any(os.path.samefile(newest, path) for path in files):
            step = step_of(newest)
            if step is not None and all(step > step_in(path) for path in numbered):
                return [newest, *numbered]
        return [*numbered, newest, *(self.folder / name for name in BEST_FILES)]

    def report_damaged(self, found: Found) -> None:
        """Name each damaged file and the checkpoint that is used in its place."""
        for path, why in self.damaged:
            step, match = found.state["step"], NUMBERED.fullmatch(path.name)
            earlier = f", {counted(int(match[1]) - step, 'step')} earlier" if match and int(match[1]) > step else ""
            self.say(f"checkpoint {why}; resuming from {found.path.name}{earlier}")

    def check(self, resume: str, *, overwrite: bool) -> None:
        """Raise UserError unless the options say whether to resume or to remove a run in the folder."""
        is_here = bool(resume) and not self.is_elsewhere(resume)
        if overwrite and is_here:
            raise UserError(f"--overwrite would remove {resume} itself, which --resume is to read; give one of them")
        if not overwrite and not is_here and self.holds_other_run(resume):
            raise UserError(
                f"--output-dir {self.folder} holds a run already; give --resume auto to resume it, --overwrite to "
                "remove it, or another folder"
            )

    def holds_other_run(self, resume: str) -> bool:
        """Tell whether the folder holds checkpoints other than copies of those that `--resume` names elsewhere."""
        origins = [Path(resume), *(Path(resume).with_name(name) for name in BEST_FILES)] if resume else []
        origins = [path for path in origins if path.is_file()] if self.is_elsewhere(resume) else []
        return not all(
            path.is_file() and any(filecmp.cmp(path, origin, shallow=False) for origin in origins)
            for path in self.own_files(STATE_FILES)
        )

    def find_step(self, path: Path, step: int) -> Path | None:
        """Return a file that holds a step: the given one, or the numbered one; None if neither is good."""
        return next((each for each in (path, self.path_of(step)) if step_of(each) == step), None)


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
