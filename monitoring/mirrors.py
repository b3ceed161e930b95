"""Mirror a run's records to services. Each service is a class with the methods of `WandbMirror`."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import UserError
from files import read_json, write_json
from monitoring.attempts import Attempts
from monitoring.events import changed_options, drawn


class WandbMirror:
    """A run of Weights & Biases; that service's variables (WANDB_PROJECT, WANDB_MODE ...) say where.

    The argument `key` is the service's identifier of the run, None at the first start; the attribute is never None.
    """

    def __init__(self, folder: Path, key: str | None) -> None:
        import wandb

        options = {"config": changed_options(folder), "name": folder.resolve().name, "dir": str(folder)}
        self.run = wandb.init(id=key, resume=key and "allow", **options)
        self.key = self.run.id

    def last_step(self, kind: str) -> int:
        """Return the step of the last record of a kind that the service knows, or -1."""
        self.run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        return int(self.run.summary.get(f"{kind}/step", -1))

    def add(self, values: dict[str, float], step: int) -> None:
        """Send the points of one record; they include KIND/step."""
        self.run.log(values)

    def close(self, is_finished: bool | None) -> None:
        """Send the rest, and tell how the run has ended; None means that it will go on."""
        self.run.finish(exit_code=0 if is_finished else 1)


class MlflowMirror:
    """A run of MLflow; that service's variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME ...) say where.

    Arguments and attributes are those of `WandbMirror`.
    """

    def __init__(self, folder: Path, key: str | None) -> None:
        import mlflow

        self.mlflow = mlflow
        self.key = mlflow.start_run(run_id=key, run_name=folder.resolve().name).info.run_id
        self.known = mlflow.get_run(self.key).data.metrics
        if not key:
            mlflow.log_params(changed_options(folder))

    def last_step(self, kind: str) -> int:
        """Return the step of the last record of a kind that the service knows, or -1."""
        return int(self.known.get(f"{kind}/step", -1))

    def add(self, values: dict[str, float], step: int) -> None:
        """Send the points of one record."""
        self.mlflow.log_metrics(values, step=step)

    def close(self, is_finished: bool | None) -> None:
        """Send the rest, and tell how the run has ended."""
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

    A mirror that fails once gets no more records.
    """

    def __init__(self, folder: Path | None, log_to: str | None) -> None:
        self.folder = folder
        self._attempt = Attempts()
        self._mirrors = dict.fromkeys(_names(log_to))
        self._sent = {}  # the step of the last record, by the names of mirror and kind

    def open(self, records: list[dict]) -> None:
        """Begin or go on, and send records that a service lacks, as after a failure."""
        self._each(self._open)
        for record in records:
            self.add(record)

    def _open(self, name: str) -> None:
        path = self.folder / "mirrors.json"
        keys = read_json(path)
        self._mirrors[name] = KINDS[name](self.folder, keys.get(name))
        keys[name] = self._mirrors[name].key
        write_json(path, keys)

    def add(self, record: dict) -> None:
        """Send the points of one record to each service that does not have them from an earlier process."""
        self._each(self._add, record)

    def _add(self, name: str, record: dict) -> None:
        kind, step = record["kind"], record["step"]
        if (name, kind) not in self._sent:
            self._sent[name, kind] = self._mirrors[name].last_step(kind)
        if step > self._sent[name, kind]:
            self._mirrors[name].add({**drawn(record), f"{kind}/step": step}, step)
            self._sent[name, kind] = step

    def close(self, is_finished: bool | None) -> None:
        """Send the rest; `is_finished` tells whether the run has ended well, None that it will go on."""
        self._each(lambda name: self._mirrors[name].close(is_finished))
        self._mirrors.clear()

    def _each(self, work: Callable[..., None], *args: Any) -> None:
        """Do work for each service, and drop services for which it fails."""
        for name in list(self._mirrors):
            if not self._attempt(f"nothing more is sent to {name}", work, name, *args):
                del self._mirrors[name]
