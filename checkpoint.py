"""Surviving restarts: the state of a run, files that cannot be torn, and finding the newest good one."""

import errno
import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torchvision

from errors import NoUsableCheckpointError, UserError
from files import sync_folder, write_atomically

FORMAT = 1


class OtherFormatError(UserError):
    """A checkpoint is whole and of a version of this script that writes another format."""


NUMBERED = re.compile(r"checkpoint-(\d{8,})\.pth")

# What a run's state may be in, or in the ruins of; never removed but by `--overwrite`.
STATE_FILES = re.compile(r"(superseded-)?(checkpoint(-\d{8,})?|best)\.pth(\.corrupt)?")

# Every name that a run gives to a file in its output folder; `--overwrite` removes these and nothing else.
OWN_FILES = re.compile(
    rf"({STATE_FILES.pattern}|status\.json|run\.json|metrics\.jsonl|recipe\.toml|curves\.png)(\.tmp\.\d+)?"
    r"|events\.out\.tfevents\..*"
)


class Stateful(Protocol):
    """Whatever can be saved and restored by `RunState`."""

    def state_dict(self) -> dict:
        """Return plain data."""

    def load_state_dict(self, state: dict) -> Any:
        """Restore what `state_dict` returned."""


class RunState:
    """Where a run is, and everything that cannot be computed from that.

    The position is (epoch, steps done in it, whether the epoch has been evaluated), at the end of a step. The loop
    moves it, never an iterator: loader processes work ahead. Order, augmentation, mixing, dropout and learning rate are
    functions of the position, so no generator, sampler or schedule is saved.

    Args:
        steps_per_epoch: steps of an epoch.
        facts: plain values that describe the run, saved beside the state.
        parts: what to save under which name; None for what this run does not have.
    """

    def __init__(self, steps_per_epoch: int, facts: dict, parts: dict[str, Stateful | None]) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.facts = facts
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.epoch, self.steps, self.is_evaluated = 0, 0, False
        self.best = None
        self.is_resumed = False

    @property
    def step(self) -> int:
        """Steps done since the run began."""
        return self.epoch * self.steps_per_epoch + self.steps

    def advance(self) -> None:
        """Count one more step."""
        self.steps += 1

    def start_epoch(self, epoch: int) -> int:
        """Move to an epoch, if not there yet; return the first step to do in it."""
        if epoch != self.epoch:
            self.epoch, self.steps, self.is_evaluated = epoch, 0, False
        return self.steps

    def note_result(self, metric: str, value: float) -> None:
        """Record that the epoch has been evaluated, and whether it is the best so far of its kind."""
        self.is_evaluated = True
        if self.best is None or self.best["metric"] != metric or value > self.best["value"]:
            self.best = {"metric": metric, "value": float(value), "step": self.step}

    @property
    def is_best(self) -> bool:
        """Whether the state is that of the best evaluation so far."""
        return self.best is not None and self.best["step"] == self.step

    def resume(self, state: dict | None, start_epoch: int | None, epochs: int) -> None:
        """Restore a checkpoint, if there is one, or move to `--start-epoch`.

        Raises:
            UserError: `--start-epoch` or `--epochs` contradicts the checkpoint.
        """
        if state is None:
            self.start_epoch(start_epoch or 0)
            return
        self.load_state_dict(state)
        next_epoch = self.epoch + self.is_evaluated
        # The same command again, as a requeued job gives it, is no contradiction.
        if start_epoch not in (None, next_epoch, state["args"]["start_epoch"]):
            raise UserError(f"--start-epoch {start_epoch}, but the checkpoint goes on with {next_epoch}; leave it out")
        if self.epoch >= epochs:
            raise UserError(
                f"--epochs {epochs}, but the checkpoint is in epoch {self.epoch} (from 0); give more epochs"
            )
        print(f"resumed step {self.step} (epoch {self.epoch}, step {self.steps} of {self.steps_per_epoch} in it)")

    def state_dict(self) -> dict:
        """Return plain data: dicts, lists, strings, numbers and tensors, which need no unpickled code to load."""
        is_complete = self.steps == self.steps_per_epoch
        return {
            "format": FORMAT,
            **{name: part.state_dict() for name, part in self.parts.items()},
            "epoch": self.epoch if is_complete else self.epoch - 1,
            "step": self.step,
            "position": {"epoch": self.epoch, "steps": self.steps, "is_evaluated": self.is_evaluated},
            "best": self.best,
            **self.facts,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore every part and the position.

        A part that the checkpoint lacks starts anew, and one that this run lacks is left; both are said.
        """
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])
            else:
                print(f"the checkpoint holds no {name}; it starts anew")
                if name == "model_ema":
                    part.restart(self.parts["model"])
        for name in {"model_ema", "scaler"} & state.keys() - self.parts.keys():
            print(f"the checkpoint's {name} is left out: this run has none")
        self._say_what_changed(state["args"])
        position = state["position"]
        self.epoch, self.steps, self.is_evaluated = position["epoch"], position["steps"], position["is_evaluated"]
        self.best = state["best"]
        self.is_resumed = True

    def is_finished(self, epochs: int) -> bool:
        """Tell whether nothing is left to do."""
        return self.epoch == epochs - 1 and self.is_evaluated

    def _say_what_changed(self, theirs: dict) -> None:
        """Name the options of the run that are others than the checkpoint's: those of the command line count."""
        ours = self.facts["args"]
        silent = {"given", "recipe", "resume", "overwrite", "output_dir", "start_epoch"}
        silent |= {"rank", "gpu", "world_size", "distributed", "workers"}
        changed = [
            f"{name} {theirs[name]} in the checkpoint, {value} now"
            for name, value in ours.items()
            if name not in silent and name in theirs and theirs[name] != value
        ]
        if changed:
            print(f"options that changed: {'; '.join(changed)}")


class OptimizerState:
    """An optimizer whose restored state does not bring back old hyper-parameters: those are the command line's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict:
        """Return the optimizer's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Restore momenta and the like.

        Raises:
            UserError: the parameters are grouped otherwise.
        """
        own = self.optimizer.state_dict()
        sizes = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], own["param_groups"])]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"the checkpoint's optimizer has parameter groups of {sizes[0]} tensors and this run's of {sizes[1]}; "
                "resume with the same weight-decay options"
            )
        self.optimizer.load_state_dict({**own, "state": state["state"]})


def load_checkpoint(source: Path | bytes, name: str) -> dict:
    """Load a file of tensors and plain values; check every byte of it and run nothing that is in it.

    `torch.load` accepts flipped bits in a tensor; the archive's checksums do not (docs/research/RELIABILITY.md, 2.1).

    Args:
        source: a path, or a file's bytes.
        name: what to call it in an error.

    Raises:
        UserError: damaged, not a checkpoint, or one that needs code to load; says which.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    with stream:
        try:
            if zipfile.is_zipfile(stream):
                stream.seek(0)
                bad = zipfile.ZipFile(stream).testzip()
                if bad is not None:
                    raise UserError(f"{name} is damaged: record {bad.split('/', 1)[-1]} fails its checksum")
            stream.seek(0)
            content = torch.load(stream, map_location="cpu", weights_only=True)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # bad bytes raise anything from EOFError to AssertionError (same place)
            if "allocate" in str(error):
                raise MemoryError(f"{name} does not fit into memory") from error
            raise UserError(_explain(name, error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{name} holds a {type(content).__name__}, not a checkpoint")
    return content


def _explain(name: str, error: Exception) -> str:
    """Say in one line why a file could not be loaded."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found and found[1] == "argparse.Namespace":
        command = (
            "import argparse, torch; torch.serialization.add_safe_globals([argparse.Namespace]); "
            f"torch.save(torch.load({name!r}, weights_only=True)['model'], 'weights.pth')"
        )
        return (
            f"{name} is a checkpoint of torchvision's reference script: it holds an argparse.Namespace, which this "
            f"script does not unpickle; to start from its weights, run `python -c {shlex.quote(command)}` and pass "
            "--weights weights.pth"
        )
    if found:
        return f"{name} contains code ({found[1]}) and was refused; nothing in it was run"
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
    return f"{name} is damaged or no checkpoint ({reason[:160]})"


def check_schema(state: dict, name: str) -> dict:
    """Return the state if it is a checkpoint of this script.

    Raises:
        UserError: it is not.
        OtherFormatError: it is one of another version of this script.
    """
    expected = {"format", "model", "optimizer", "epoch", "step", "position", "best", "args", "shards", "data"}
    missing = sorted(expected - state.keys())
    if missing:
        raise UserError(
            f"{name} is no checkpoint of this script: it lacks {', '.join(missing)}; "
            "to start from the weights that it holds, pass it to --weights"
        )
    if state["format"] != FORMAT:
        raise OtherFormatError(
            f"{name} has format {state['format']} and this script reads {FORMAT}; use the version that wrote it"
        )
    return state


def describe_data(dataset: Any) -> dict:
    """Return what identifies a training set in a checkpoint."""
    return {"num_images": len(dataset), "num_classes": len(dataset.classes), "fingerprint": dataset.fingerprint()}


def run_facts(args: Any, dataset: Any) -> dict:
    """Return the plain values that describe a run in its checkpoints and in run.json."""
    return {
        "args": dict(vars(args)),
        "shards": {"global_batch_size": args.global_batch_size, "num_shards": args.num_shards},
        "data": describe_data(dataset),
        "environment": describe_environment(args.world_size),
    }


def check_fits(state: dict, args: Any, num_classes: int, dataset: Any | None) -> None:
    """Check that a checkpoint is one of this run: its model and classes, and to train on, all that decides a step.

    Raises:
        UserError: it is not; names what differs.
    """
    theirs, source = state["args"], f"the checkpoint of --resume {args.resume}"
    if theirs["model"] != args.model:
        raise UserError(
            f"{source} holds a {theirs['model']}, but --model is {args.model}; give that one, or another file"
        )
    if state["data"]["num_classes"] != num_classes:
        raise UserError(
            f"{source} holds {state['data']['num_classes']} classes but {args.data_path} has {num_classes}; "
            "pass it to --weights to fine-tune instead"
        )
    if dataset is None:
        return
    pairs = {name: (theirs.get(name), getattr(args, name)) for name in ("seed", "opt", "sync_bn")}
    there, here = state["environment"], describe_environment(args.world_size)
    is_compiled = args.compile is not None and args.use_deterministic_algorithms
    if args.sync_bn or is_compiled:  # statistics over all images that the processes compute at once
        pairs["world size"] = (there["world_size"], here["world_size"])
    if args.use_deterministic_algorithms:
        pairs["CPU threads (OMP_NUM_THREADS)"] = (there["threads"], here["threads"])
    pairs |= {f"data {name}": (state["data"][name], value) for name, value in describe_data(dataset).items()}
    differing = [
        f"{name} {there} in the checkpoint, {here} now" for name, (there, here) in pairs.items() if there != here
    ]
    if differing:
        raise UserError(f"cannot resume from {args.resume}: {'; '.join(differing)}")
    if there["world_size"] != here["world_size"]:
        same = "same bits" if args.use_deterministic_algorithms else "rounding may differ"
        print(f"{there['world_size']} -> {here['world_size']} processes: same samples and augmentation; {same}")
    if args.use_deterministic_algorithms and there["torch"] != here["torch"]:
        print(f"torch {there['torch']} wrote this checkpoint, this is {here['torch']}: equal bits not promised")


def describe_environment(world_size: int) -> dict[str, Any]:
    """Return what a run's numbers may depend on beside its options: versions, code revision, threads, processes."""
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    return {
        "torch": str(torch.__version__),  # a TorchVersion would be code to unpickle
        "torchvision": str(torchvision.__version__),
        "python": platform.python_version(),
        "revision": revision or None,
        "threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def load_weights(path: Path) -> dict:
    """Return the state dict in a file that holds one, or in a checkpoint's `model`, with its version notes.

    Raises:
        UserError: there is none in it.
    """
    content = load_checkpoint(path, str(path))
    weights = content.get("model", content)
    if not isinstance(weights, dict) or not weights or not all(isinstance(key, str) for key in weights):
        raise UserError(
            f"--weights {path} holds no weights: expected a state dict, or a checkpoint with one as `model`"
        )
    if not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise UserError(
            f"--weights {path} holds more than weights: expected a state dict, or a checkpoint with `model`"
        )
    plain = OrderedDict((name.removeprefix("module."), tensor) for name, tensor in weights.items())
    if hasattr(weights, "_metadata"):
        plain._metadata = weights._metadata  # by which modules load what older versions of them saved
    return plain


def _verify_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise OSError(f"{path} reads back otherwise than it was written (record {bad})")


class CheckpointManager:
    """The checkpoints in an output folder; its methods are called on rank 0 of the whole run only.

    `checkpoint-00012510.pth` is the state after that many steps; `checkpoint.pth` is always the newest and `best.pth`
    the best evaluated, both hard links. What is to be known about the folder is read from the folder.

    Args:
        folder: the output folder.
        keep_last: how many numbered files to keep.
    """

    def __init__(self, folder: Path, keep_last: int = 3) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.damaged = []  # what `read` found so, renamed by `open`

    def numbered(self) -> list[Path]:
        """Return the numbered checkpoints, newest first."""
        found = [(int(match[1]), path) for path in self._own_files() if (match := NUMBERED.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def _own_files(self, pattern: re.Pattern = OWN_FILES) -> list[Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else []
        return [path for path in paths if pattern.fullmatch(path.name)]

    def _path_of(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step:08d}.pth"

    def is_elsewhere(self, resume: str) -> bool:
        """Tell whether `--resume` names a file outside this folder."""
        return resume not in ("", "auto") and Path(resume).resolve().parent != self.folder.resolve()

    def read(self, resume: str) -> bytes | None:
        """Return the bytes of the checkpoint that `--resume` means, verified, or None for a fresh start.

        Changes nothing on the disk.

        Raises:
            UserError: PATH is missing or no good checkpoint.
            NoUsableCheckpointError: `auto` found damaged ones only.
        """
        if not resume:
            return None
        if resume == "auto":
            return self._read_newest()
        path = Path(resume)
        if not path.is_file():
            raise UserError(
                f"--resume {resume} is not a file; give a checkpoint, or auto for the newest in --output-dir"
            )
        payload = read_bytes(path)
        check_schema(load_checkpoint(payload, resume), resume)
        return payload

    def _read_newest(self) -> bytes | None:
        """Return the newest checkpoint that verifies; one that does not is named and remembered."""
        self.damaged = []
        # The two linked names hold what is left where somebody removed the numbered ones.
        for path in [*self.numbered(), self.folder / "checkpoint.pth", self.folder / "best.pth"]:
            if not path.exists():
                continue
            try:
                if not path.is_file():
                    raise UserError(f"{path} is not a file")
                payload = read_bytes(path)
                check_schema(load_checkpoint(payload, str(path)), str(path))
            except OtherFormatError:
                raise
            except UserError as error:
                self.damaged.append(path)
                print(f"{error}; kept as {path.name}.corrupt")
                continue
            if self.damaged:
                print(f"resuming from {path} instead of {self.damaged[0].name}")
            return payload
        if self._own_files(STATE_FILES):
            raise NoUsableCheckpointError(
                f"there are checkpoints in {self.folder}, and none can be used. Not starting over: "
                "use --overwrite to begin again"
            )
        print(f"--resume auto: no checkpoint in {self.folder} yet, starting afresh")
        return None

    def check(self, resume: str, overwrite: bool) -> None:
        """Check that the options say what is to become of a run that is in the folder. Changes nothing.

        Raises:
            UserError: they do not.
        """
        if overwrite and resume and not self.is_elsewhere(resume):
            raise UserError(
                f"--overwrite would remove {resume} itself, which --resume is to go on from; give one of them"
            )
        if self._own_files(STATE_FILES) and not overwrite and (not resume or self.is_elsewhere(resume)):
            raise UserError(
                f"--output-dir {self.folder} holds a run already; --resume auto goes on with it, --overwrite removes "
                "it, or choose another folder"
            )

    def open(self, resume: str, payload: bytes | None, run: RunState) -> None:
        """Make the folder ready for a run to write to, when nothing else can go wrong.

        Args:
            resume: `--resume`, as `check` accepted it.
            payload: what `read` returned; None for a fresh start.
            run: the state of the run.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self._own_files():
                if re.search(r"\.tmp\.\d+$", path.name):  # what a killed process left half written
                    path.unlink()
            if payload is None or self.is_elsewhere(resume):
                self._erase()
            if payload is not None:
                self._adopt(payload, run, Path(resume).parent if self.is_elsewhere(resume) else self.folder)
            write_atomically(self.folder / "status.json", lambda file: file.write(b'{"state": "running"}\n'))
        except OSError as error:
            raise UserError(f"--output-dir {self.folder} cannot be written: {error.strerror or error}") from error

    def _adopt(self, payload: bytes, run: RunState, source: Path) -> None:
        """Make the checkpoint that is gone on from the newest of this folder, under all its names."""
        for path in self.damaged:
            if path.exists():
                os.replace(path, path.with_name(f"{path.name}.corrupt"))
        for path in self.numbered():
            if int(NUMBERED.fullmatch(path.name)[1]) > run.step:
                self._set_aside(path)
        path = self._path_of(run.step)
        if not path.exists():
            write_atomically(path, lambda file: file.write(payload), _verify_archive)
        self.link(path, "checkpoint.pth")
        self._adopt_best(path, run, source / "best.pth")

    def _set_aside(self, path: Path) -> None:
        """Keep what is newer than what is resumed under another name, so that going on is not undone."""
        os.replace(path, path.with_name(f"superseded-{path.name}"))
        print(f"{path.name} is newer than what is resumed; kept as superseded-{path.name}")

    def _adopt_best(self, path: Path, run: RunState, candidate: Path) -> None:
        """See to it that best.pth is what the resumed state says is best, or else that it says nothing is."""
        best = self.folder / "best.pth"
        if run.is_best:
            self.link(path, best.name)
            return
        step = _step_of(candidate)
        if run.best is not None and step == run.best["step"]:
            if candidate != best:
                shutil.copyfile(candidate, best)
            return
        if candidate == best and best.exists():
            self._set_aside(best) if step is not None else os.replace(best, best.with_name("best.pth.corrupt"))
        if run.best is None:
            return
        if self._path_of(run.best["step"]).exists():
            self.link(self._path_of(run.best["step"]), best.name)
        else:
            print(f"the best so far, of step {run.best['step']}, is not there any more: best.pth starts anew")
            run.best = None

    def _erase(self) -> None:
        """Remove a run's files, and nothing else that may be in the folder.

        Checkpoints go first, newest first: whatever is left after a kill must not look like a run to go on with.
        """
        paths = [*self.numbered(), self.folder / "checkpoint.pth", self.folder / "best.pth", *self._own_files()]
        tensorboard = self.folder / "tb"
        if tensorboard.is_dir():
            paths += [path for path in tensorboard.iterdir() if OWN_FILES.fullmatch(path.name)]
        for path in paths:
            if not path.is_dir():
                path.unlink(missing_ok=True)
        with suppress(OSError):
            tensorboard.rmdir()

    def save(self, state: dict, is_best: bool) -> None:
        """Write the state of a step, read it back, and only then give it its names and delete what is too old."""
        path = self._path_of(state["step"])
        # Through a file object, so that a full disk is an OSError with its cause and not a bare RuntimeError.
        write_atomically(path, lambda file: torch.save(state, file), _verify_archive)
        self.link(path, "checkpoint.pth")
        if is_best:
            self.link(path, "best.pth")
        for old in self.numbered()[self.keep_last :]:
            old.unlink(missing_ok=True)

    def link(self, path: Path, name: str) -> None:
        """Give a checkpoint a second name, in place of what bears it now."""
        target, temporary = self.folder / name, self.folder / f"{name}.tmp.{os.getpid()}"
        if target.exists() and os.path.samefile(path, target):
            return  # and a rename of one link onto another of the same file would leave both
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
                raise
            shutil.copyfile(path, temporary)  # a file system without hard links
        os.replace(temporary, target)
        sync_folder(self.folder)


def read_bytes(path: Path, tries: int = 3) -> bytes:
    """Return a file's content; a failing read is tried again, as network file systems have hiccups.

    Raises:
        UserError: it cannot be read. Not a reason to fall back to an older checkpoint.
    """
    for left in reversed(range(tries)):
        try:
            return path.read_bytes()
        except OSError as error:
            if not left:
                raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
            time.sleep(1)
    raise AssertionError("unreachable")


def _step_of(path: Path) -> int | None:
    """Return the step of a good checkpoint, or None."""
    try:
        return check_schema(load_checkpoint(path, path.name), path.name)["step"]
    except (UserError, OSError):
        return None
