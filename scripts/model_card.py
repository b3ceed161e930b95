"""The model card that lies beside exported files: what a model is, how it was trained, and how good it is."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import BEST_NAMES
from errors import UserError, counted
from files import read_bytes
from loading.progress import size_text
from options import ALWAYS, GROUPS, OPTIONS

# Two-sided, of a normal distribution.
_Z_95 = 1.959964

_LARGEST_LOG = 1 << 28


def interval_of(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share of hits in n tries (Wilson 1927)."""
    centre = (share + _Z_95**2 / (2 * n)) / (1 + _Z_95**2 / n)
    half = _Z_95 / (1 + _Z_95**2 / n) * math.sqrt(share * (1 - share) / n + _Z_95**2 / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def write_card(job: Any, source: str, *, is_average: bool, results: Any) -> Path:
    """Write NAME.md beside the files of an export, and return its path.

    Args:
        job: the export, `scripts.export.Export`.
        source: the checkpoint, as it was given.
        is_average: its average was exported.
        results: what `scripts.evaluate` wrote, or None.
    """
    path, checkpoint = Path(source), {}
    if path.is_file() and path.suffix != ".safetensors":
        with suppress(UserError):  # of another script, which has none of the facts below
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
    lines += ["", "A `.pt2` is a program: open it only if you trust where you have it from.", ""]
    lines += _preprocessing(about["preprocessing"])
    lines += _accuracy(path, checkpoint, is_average=is_average, results=results)
    lines += _data(checkpoint.get("data"))
    lines += _training(job.trained.trained_with)
    lines += _curves(job, path.parent / "curves.png")
    card = job.folder / f"{job.name}.md"
    job.save(card, "\n".join(lines).rstrip().encode(errors="backslashreplace") + b"\n")
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
    """Return the results of the run's own evaluation of these weights, and those that were given."""
    lines = []
    record = _find_record(path.parent / "metrics.jsonl", checkpoint.get("step"), "best_ema" if is_average else "best")
    for name, key in (("Acc@1", "acc1"), ("Acc@5", "acc5")):
        value, n = (record.get(each) for each in (key, "n"))
        if isinstance(value, float | int) and 0 <= value <= 100:
            line = f"- {name} {value:.3f}% on the run's validation images"
            n = n or _num_images(checkpoint)
            if type(n) is int and n > 0:
                low, high = interval_of(value / 100, n)
                line += f", n={n:,} (95% interval {100 * low:.2f} to {100 * high:.2f}%, Wilson)"
            lines.append(line)
    if results is not None:
        lines += ["", "Results of `scripts.evaluate`:", "", "```json", json.dumps(results, indent=1)[:20_000], "```"]
    return ["## Accuracy", "", *(lines or ["Not known here."]), ""]


def _num_images(checkpoint: dict) -> Any:
    described = checkpoint.get("data")
    val = described.get("val") if isinstance(described, dict) else None
    return val.get("num_images") if isinstance(val, dict) else None


def _find_record(path: Path, step: Any, best: str) -> dict:
    """Return the line of a run's log about the evaluation at a step; an empty one where there is none.

    Args:
        path: of metrics.jsonl.
        step: of the checkpoint.
        best: of `BEST_NAMES`: whether the weights were evaluated, or their average.
    """
    try:
        lines = read_bytes(path, _LARGEST_LOG).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return {}
    for line in reversed(lines if type(step) is int else []):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and (BEST_NAMES.get(record.get("kind")), record.get("step")) == (best, step):
            return record
    return {}


def _data(described: Any) -> list[str]:
    if not isinstance(described, dict):
        return []
    lines = ["## Data", ""]
    for split, facts in (("train", described), ("val", described.get("val"))):
        if isinstance(facts, dict) and "fingerprint" in facts:
            lines.append(f"- {split}: {facts.get('num_images'):,} images, fingerprint `{facts['fingerprint']}`")
    return [*lines, ""] if lines[2:] else []


def _training(options: dict[str, Any]) -> list[str]:
    """Return the options that the model was trained with, as a recipe; without paths, which are nobody's business."""
    known = {}
    for group in GROUPS:
        values = {option.name: options.get(option.dest) for option in OPTIONS[group] if option.recipe == ALWAYS}
        known[group] = {
            name: value for name, value in values.items() if value not in (None, "") and not _is_path(value)
        }
    tables = [
        "\n".join([f"[{group}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())])
        for group, values in known.items()
        if values
    ]
    if "epochs" not in options or not tables:
        return []
    return ["## Trained with", "", "```toml", "\n\n".join(tables), "```", ""]


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "~", "."))


def _curves(job: Any, picture: Path) -> list[str]:
    """Copy the picture of the run's curves, if it has one, and return a link to it."""
    if not picture.is_file():
        return []
    name = f"{job.name}-curves.png"
    job.save(job.folder / name, picture.read_bytes())
    return ["## Curves", "", f"![learning curves]({name})", ""]
