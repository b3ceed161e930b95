"""Loggers that send records elsewhere: Weights & Biases and MLflow."""

import os
from pathlib import Path

from monitoring.events import curves


class Wandb:
    """Weights & Biases: the same run at each start, in the project of WANDB_PROJECT, by default touchstone."""

    def __init__(self, folder: Path, facts: dict) -> None:
        import wandb

        if (folder / "wandb").is_symlink():
            raise OSError(f"{folder / 'wandb'} is a link, which may lead anywhere; remove it")
        name = os.environ.get("WANDB_NAME", folder.name)
        project = os.environ.get("WANDB_PROJECT", "touchstone")
        self._run = wandb.init(
            id=facts["id"], resume="allow", dir=folder, name=name, project=project, config=facts["args"],
            allow_val_change=True, settings=wandb.Settings(console="off"),  # log.txt has the console
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def write(self, record: dict) -> None:
        """Add the points of a record."""
        if points := curves(record):
            # W&B adds nothing to a row once it is written, and an evaluation may be of the start after its training's:
            # so each step has two rows.
            is_train = record["kind"] == "train"
            row = 2 * record["step"] + (not is_train)
            self._run.log({"step": record["step"], **points}, step=row, commit=is_train)

    def close(self) -> None:
        """Send the rest."""
        self._run.finish()


class MLflow:
    """MLflow: the same run at each start, in the experiment of MLFLOW_EXPERIMENT_NAME, by default touchstone."""

    def __init__(self, folder: Path, facts: dict) -> None:
        import mlflow

        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "touchstone")).experiment_id
        self._client = mlflow.MlflowClient()
        self._entities = mlflow.entities
        # MLflow chooses the ids of its runs, so ours is a tag that the next start looks for.
        runs = self._client.search_runs([experiment], f"tags.touchstone = '{facts['id']}'")
        tags = {"touchstone": facts["id"]}
        run = runs[0] if runs else self._client.create_run(experiment, run_name=folder.name, tags=tags)
        self._id = run.info.run_id
        self._client.update_run(self._id, "RUNNING")
        if not runs:  # a parameter cannot change
            params = [mlflow.entities.Param(name, str(value)[:500]) for name, value in facts["args"].items()]
            self._client.log_batch(self._id, params=params)

    def write(self, record: dict) -> None:
        """Add the points of a record."""
        # The record's time and not now: those that an earlier start lacked come late.
        time_ms = round(1000 * record["time"])
        points = [self._entities.Metric(tag, value, time_ms, record["step"]) for tag, value in curves(record).items()]
        self._client.log_batch(self._id, points)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)
