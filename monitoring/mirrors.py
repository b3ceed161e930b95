"""Log a run's records to Weights & Biases and MLflow as they are written; their own variables name server and project.

WANDB_PROJECT, WANDB_MODE ...; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME ...
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpointing.checkpoint import RunState
from errors import UserError, attempt
from files import read_json, write_json
from monitoring.events import changed_options, drawn

SERVICES = ("wandb", "mlflow")


def check_mirrors(args: Any) -> None:
    """Raise UserError if `--log-to` names a service that is not known, or whose package is missing."""
    for name in _names(args.log_to):
        if name not in SERVICES:
            raise UserError(f"--log-to {name}: expected names with commas between them, of {', '.join(SERVICES)}")
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # wandb leaves folders that look like a package without origin
            raise UserError(f"--log-to {name} needs the package {name}; pip install {name}, or leave it out")


def _names(log_to: str | None) -> list[str]:
    return [name.strip() for name in (log_to or "").split(",") if name.strip()]


class Mirrors:
    """The services of `--log-to`; `mirrors.json` in the run's folder keeps their identifiers of the run.

    A service that fails once gets no more records. A record that a start before a kill has logged beyond the checkpoint
    is logged again by the start that resumes the run.
    """

    def __init__(self, folder: Path | None, run: RunState, log_to: str | None) -> None:
        self.folder, self.run = folder, run
        self._modules = dict.fromkeys(_names(log_to))

    def open(self) -> None:
        """Start the services' runs, or resume them."""
        self._each(self._open)

    def _open(self, name: str) -> None:
        self._modules[name] = module = importlib.import_module(name)
        keys, label = read_json(self.folder / "mirrors.json"), self.folder.resolve().name
        key, options = keys.get(name), changed_options(self.run)
        if name == "wandb":
            run = module.init(id=key, resume=key and "allow", config=options, name=label, dir=str(self.folder))
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            keys[name] = run.id
        else:
            keys[name] = module.start_run(run_id=key, run_name=label).info.run_id
            if not key:
                module.log_params(options)
        write_json(self.folder / "mirrors.json", keys)

    def add(self, record: dict) -> None:
        """Log the points of one record to each service."""
        values, step = drawn(record), record["step"]

        def log(name: str) -> None:
            if name == "wandb":
                self._modules[name].log({**values, "step": step})
            else:
                self._modules[name].log_metrics(values, step=step)

        if values:
            self._each(log)

    def close(self, *, is_finished: bool) -> None:
        """Record at the services how the run has ended."""

        def end(name: str) -> None:
            if name == "wandb":
                self._modules[name].finish(exit_code=0 if is_finished else 1)
            else:
                self._modules[name].end_run("FINISHED" if is_finished else "FAILED")

        self._each(end)

    def _each(self, work: Callable[[str], None]) -> None:
        """Do work for each service, and drop services for which it fails."""
        for name in list(self._modules):
            if not attempt(f"nothing more is sent to {name}", work, name):
                del self._modules[name]
