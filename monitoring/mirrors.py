"""Log a run's records to Weights & Biases and MLflow as they are written."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import UserError
from files import read_json, write_atomically
from monitoring.attempts import Attempts
from monitoring.events import changed_options, drawn


class WandbMirror:
    """A run of Weights & Biases; that service's variables (WANDB_PROJECT, WANDB_MODE ...) name the project.

    The argument `key` is the service's identifier of the run, None at the first start; the attribute is never None.
    """

    def __init__(self, folder: Path, key: str | None) -> None:
        import wandb

        options = {"config": changed_options(folder), "name": folder.resolve().name, "dir": str(folder)}
        self.run = wandb.init(id=key, resume=key and "allow", **options)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.key = self.run.id

    def add(self, values: dict[str, float], step: int) -> None:
        """Log the points of one record."""
        self.run.log({**values, "step": step})

    def close(self, is_finished: bool | None) -> None:
        """Record how the run has ended; None means that it will be resumed."""
        self.run.finish(exit_code=0 if is_finished else 1)


class MlflowMirror:
    """A run of MLflow; that service's variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME ...) name the server.

    Arguments and attributes are those of `WandbMirror`.
    """

    def __init__(self, folder: Path, key: str | None) -> None:
        import mlflow

        self.mlflow = mlflow
        self.key = mlflow.start_run(run_id=key, run_name=folder.resolve().name).info.run_id
        if not key:
            mlflow.log_params(changed_options(folder))

    def add(self, values: dict[str, float], step: int) -> None:
        """Log the points of one record."""
        self.mlflow.log_metrics(values, step=step)

    def close(self, is_finished: bool | None) -> None:
        """Record how the run has ended; None means that it will be resumed."""
        self.mlflow.end_run({True: "FINISHED", False: "FAILED", None: "KILLED"}[is_finished])


KINDS = {"wandb": WandbMirror, "mlflow": MlflowMirror}


def check_mirrors(args: Any) -> None:
    """Raise UserError if `--log-to` names a service that is not known, or whose package is missing."""
    for name in _names(args.log_to):
        if name not in KINDS:
            raise UserError(f"--log-to {name}: expected names with commas between them, of {', '.join(KINDS)}")
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # wandb leaves folders that look like a package without origin
            raise UserError(f"--log-to {name} needs the package {name}; pip install {name}, or leave it out")


def _names(log_to: str | None) -> list[str]:
    return [name.strip() for name in (log_to or "").split(",") if name.strip()]


class Mirrors:
    """All mirrors of one run, as `--log-to` names them; `mirrors.json` in its folder keeps their keys.

    A mirror that fails once gets no more records. A record that a start before a kill has logged beyond the checkpoint
    is logged again by the start that resumes the run.
    """

    def __init__(self, folder: Path | None, log_to: str | None) -> None:
        self.folder = folder
        self._attempt = Attempts()
        self._mirrors = dict.fromkeys(_names(log_to))

    def open(self) -> None:
        """Start the services' runs, or resume them."""
        self._each(self._open)

    def _open(self, name: str) -> None:
        path = self.folder / "mirrors.json"
        keys = read_json(path)
        self._mirrors[name] = KINDS[name](self.folder, keys.get(name))
        write_atomically(path, json.dumps({**keys, name: self._mirrors[name].key}).encode())

    def add(self, record: dict) -> None:
        """Log the points of one record to each service."""
        if values := drawn(record):
            self._each(lambda name: self._mirrors[name].add(values, record["step"]))

    def close(self, is_finished: bool | None) -> None:
        """Close the services' runs; `is_finished` as `WandbMirror.close`."""
        self._each(lambda name: self._mirrors[name].close(is_finished))
        self._mirrors.clear()

    def _each(self, work: Callable[[str], None]) -> None:
        """Do work for each service, and drop services for which it fails."""
        for name in list(self._mirrors):
            if not self._attempt(f"nothing more is sent to {name}", work, name):
                del self._mirrors[name]
