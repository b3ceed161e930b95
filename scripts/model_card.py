"""The model card beside exported files: it describes a model, its training and its accuracy."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import BEST_NAMES
from errors import UserError, counted
from loading.progress import size_text
from metrics import bootstrap_interval
from monitoring.monitor import read_records
from options import ALWAYS, GROUPS, OPTIONS
from scripts.tool import write_output


def write_card(job: Any, source: str, *, is_average: bool, results: Any) -> Path:
    """Write NAME.md beside the files of an export, and return its path.

    Args:
        job: the export, `scripts.export.Export`.
        source: the checkpoint, as the command line gives it.
        is_average: whether the checkpoint's average was exported.
        results: the content of the JSON file of `scripts.evaluate`, or None.
    """
    path, checkpoint = Path(source), {}
    if path.is_file() and path.suffix != ".safetensors":
        with suppress(UserError):  # a checkpoint of another script has none of the facts below
            checkpoint = load_checkpoint(path, source)
    about = job.description
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    lines = [
        f"# {about['model']}", "",
        f"Image classification; {about['weights']}, from `{path.name}`. {num_parameters:,} parameters, "
        f"{counted(about['num_classes'], 'class', ',')}.",
        "", "## Files", "", "| file | form | size | compared with the checkpoint | SHA-256 |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, facts in sorted(job.files.items()):
        row = [f"`{name}`", facts["form"], size_text(facts["bytes"]), facts["compared"], f"`{facts['sha256']}`"]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "A `.pt2` is a program: open it only if you trust its source.", ""]
    lines += _preprocessing(about["preprocessing"])
    lines += _accuracy(path, checkpoint, is_average=is_average, results=results)
    lines += _data(_sets(checkpoint))
    lines += _training(job.trained.trained_with)
    lines += _curves(job, path.parent / "curves.png")
    card = job.folder / f"{job.name}.md"
    write_output(card, "\n".join(lines).rstrip().encode(errors="backslashreplace") + b"\n")
    return card


def _preprocessing(named: dict[str, Any]) -> list[str]:
    size = named["crop_size"]
    return [
        "## Preprocessing", "",
        f"RGB; resize the shorter side to {named['resize_size']} px ({named['interpolation']}, antialiased), cut the "
        f"central {size} x {size} px; values from 0 to 1; subtract the mean {named['mean']} and divide by the standard "
        f"deviation {named['std']} of each channel. Input: `(batch, 3, {size}, {size})`; output: logits.", "",
    ]  # fmt: skip


def _accuracy(path: Path, checkpoint: dict, *, is_average: bool, results: Any) -> list[str]:
    """Return lines on the run's own evaluation of these weights, and on the results of `scripts.evaluate`."""
    lines = []
    record = _find_record(path.parent, checkpoint.get("step"), "best_ema" if is_average else "best")
    for name, key in (("Acc@1", "acc1"), ("Acc@5", "acc5")):
        value, n = (record.get(each) for each in (key, "n"))
        if isinstance(value, float | int) and 0 <= value <= 100:
            line = f"- {name} {value:.3f}% on the run's validation images"
            n = n or _sets(checkpoint).get("val", {}).get("num_images")
            if type(n) is int and n > 0:
                low, high = bootstrap_interval(round(value / 100 * n), n)
                line += f", n={n:,} (95% interval {100 * low:.2f} to {100 * high:.2f}%)"
            lines.append(line)
    if results is not None:
        lines += ["", "Results of `scripts.evaluate`:", "", "```json", json.dumps(results, indent=1)[:20_000], "```"]
    return ["## Accuracy", "", *(lines or ["Not known here."]), ""]


def _sets(checkpoint: dict) -> dict[str, dict]:
    """Return the facts in a checkpoint about its training and validation images, by split."""
    described = checkpoint.get("data")
    sets = {"train": described, "val": described.get("val")} if isinstance(described, dict) else {}
    return {name: facts for name, facts in sets.items() if isinstance(facts, dict)}


def _find_record(folder: Path, step: Any, best: str) -> dict:
    """Return the record of a run's evaluation at a step: of the weights (best) or the average (best_ema); else {}."""
    with suppress(OSError, UserError):
        for record in reversed(read_records(folder)):
            if step is not None and (BEST_NAMES.get(record["kind"]), record["step"]) == (best, step):
                return record
    return {}


def _data(sets: dict[str, dict]) -> list[str]:
    lines = [
        f"- {split}: {facts.get('num_images'):,} images, fingerprint `{facts['fingerprint']}`"
        for split, facts in sets.items()
        if "fingerprint" in facts
    ]
    return ["## Data", "", *lines, ""] if lines else []


def _training(options: dict[str, Any]) -> list[str]:
    """Return the options that the model was trained with, as a recipe; without paths."""
    tables = []
    for group in GROUPS:
        values = {option.name: options.get(option.dest) for option in OPTIONS[group] if option.recipe == ALWAYS}
        lines = [
            f"{name} = {json.dumps(value)}"
            for name, value in values.items()
            if value not in (None, "") and not str(value).startswith(("/", "~", "."))
        ]
        tables += ["\n".join([f"[{group}]", *lines])] if lines else []
    if "epochs" not in options or not tables:
        return []
    return ["## Trained with", "", "```toml", "\n\n".join(tables), "```", ""]


def _curves(job: Any, picture: Path) -> list[str]:
    """Copy the picture of a run's curves, if the run has one, and return lines with a link to it."""
    if not picture.is_file():
        return []
    name = f"{job.name}-curves.png"
    write_output(job.folder / name, picture.read_bytes())
    return ["## Curves", "", f"![learning curves]({name})", ""]
