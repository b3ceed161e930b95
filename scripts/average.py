"""Average the weights of several checkpoints of a run: `python -m scripts.average RUN --last 5 --output FILE`."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from checkpointing.checkpoint import BEST_NAMES
from checkpointing.finder import numbered, step_in, step_of
from checkpointing.published import recorded
from checkpointing.weights import (
    as_checkpoint,
    average_checkpoints,
    options_of,
    take_weights,
    write_weights,
)
from errors import UserError, counted
from loading.progress import Progress
from monitoring.monitor import read_records
from options import CURVES
from scripts.tool import build_parser, check_inputs, given_path, output_file, positive, run

PROG = "python -m scripts.average"

EPILOG = """\
examples:
  python -m scripts.average runs/resnet50 --last 5 --output averaged.pth
  python -m scripts.average runs/resnet50 --best 3 --metric acc1 --output averaged.pth
  python -m scripts.average a.pth b.pth c.pth --output averaged.pth

The mean of each weight is taken in float64; a mean of integers, such as BatchNorm's count of batches, is rounded down.
All checkpoints must be of one model with the same classes: of one run, or of several that began with the same weights
(Wortsman et al., arXiv 2203.05482). A run keeps its newest checkpoints, as many as train.py's --keep-last says:
--last and --best choose from those that are still there.

FILE holds the weights, the model's name, its classes and the options of the first checkpoint. All tools open it, and so
does train.py --weights FILE; no run resumes from it. BatchNorm's statistics do not fit the averaged weights:
python -m scripts.reestimate_bn re-estimates them.
"""


def choose(sources: list[Path], last: int | None, best: int | None, metric: str) -> list[Path]:
    """Return the checkpoints that the command line names; UserError if there are fewer than it asks for."""
    folders = [path for path in sources if path.is_dir()]
    missing = next((path for path in sources if not path.is_file() and path not in folders), None)
    if missing is not None:
        raise UserError(f"{missing} is no file; give checkpoints, or the folder of a run with --last or --best")
    if not folders:
        if last or best:
            raise UserError("--last and --best choose from the folder of a run, and files were given; leave them out")
        check_different(sources)
        return sources
    if len(sources) > 1 or (last is None) == (best is None):
        raise UserError(f"{folders[0]} is a folder; give it alone, with either --last N or --best N, or give files")
    found = numbered(folders[0])
    if best:
        return find_best(folders[0], found, best, metric)
    if len(found) < last:
        raise UserError(f"{folders[0]} holds {counted(len(found), 'numbered checkpoint')}, fewer than --last {last}")
    return found[:last]


def check_different(paths: list[Path]) -> None:
    """Refuse a checkpoint that is given twice, such as a numbered file and the best.pth that is the same file."""
    seen = {}
    for path in paths:
        about = os.stat(path)
        other = seen.setdefault((about.st_dev, about.st_ino), path)
        if other is not path:
            raise UserError(f"{path} is the same file as {other}, which would count twice; give it once")


def find_best(folder: Path, found: list[Path], number: int, metric: str) -> list[Path]:
    """Return the checkpoints with the best results among those that a run still has, the best first."""
    try:
        records = [record for record in read_records(folder) if BEST_NAMES.get(record["kind"]) == "best"]
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no metrics.jsonl, which --best reads; give the files themselves") from error
    values = {record["step"]: record[metric] for record in records if isinstance(record.get(metric), float | int)}
    if not values:
        names = {name for record in records for name in record if isinstance(record[name], float)} - {"time"}
        raise UserError(f"--metric {metric}: {folder} has only these results: {', '.join(sorted(names)) or 'none'}")
    paths = {step_in(path): path for path in found}
    linked = folder / "best.pth"  # whose numbered file may be gone
    if linked.is_file():
        paths.setdefault(step_of(linked), linked)
    there = [step for step in values if step in paths]
    if len(there) < number:
        raise UserError(
            f"{folder} holds {counted(len(there), 'checkpoint')} of the {len(values)} that were evaluated, fewer than "
            f"--best {number}; train.py --keep-last keeps more"
        )
    sign = 1 if CURVES.get(metric, {}).get("is_lower_better") else -1
    there.sort(key=lambda step: (sign * values[step], -step))
    for step in there[:number]:
        print(f"{paths[step]}: {metric} {values[step]:.3f} after step {step}")
    return [paths[step] for step in there[:number]]


def check_same_kind(path: Path, content: dict[str, Any], first: dict[str, Any]) -> None:
    """Refuse a checkpoint whose model, classes or images differ from the first one's, which `first` keeps."""
    options = options_of(content)
    facts = {"model": options.get("model"), "classes": take_weights(content, str(path)).classes}
    facts["preprocessing"] = recorded(options) or None
    first.setdefault("path", path)
    for name, value in facts.items():
        other = first.setdefault(name, value)
        if None not in (value, other) and value != other:
            more = f" ({value}, {other})" if name == "model" else ""
            raise UserError(f"{path} differs from {first['path']} in its {name}{more}; give checkpoints of one model")


def average(options: argparse.Namespace) -> None:
    """Write the average of the checkpoints that the options name."""
    paths = choose(options.sources, options.last, options.best, options.metric)
    check_inputs(options.output, paths)
    progress, first = Progress("averaging", len(paths), "checkpoints"), {}

    def look(path: Path, content: dict[str, Any]) -> None:
        check_same_kind(path, content, first)
        progress.update()

    try:
        mean = average_checkpoints(paths, look)
    except KeyError as error:
        raise UserError(f"{error.args[0]}; give checkpoints of one model") from error
    weights = take_weights(mean, str(paths[0]))
    write_weights(options.output, as_checkpoint(weights, averaged=list(map(str, paths))))
    print(
        f"{options.output}: the mean of {counted(len(paths), 'checkpoint')}: {', '.join(path.name for path in paths)}"
    )
    if any(name.endswith(".running_mean") for name in weights):
        print(
            "its BatchNorm statistics are means too, which do not fit the mean of the weights; re-estimate them: "
            f"python -m scripts.reestimate_bn {shlex.quote(str(options.output))} --data-path DIR --output FILE"
        )


def main() -> None:
    """Average the checkpoints of the command line."""
    usage = "RUN (--last N | --best N) --output FILE | CHECKPOINT... --output FILE"
    parser = build_parser(PROG, usage, "Average the weights of several checkpoints.", EPILOG)
    parser.add_argument(
        "sources", metavar="RUN-OR-CHECKPOINT", nargs="+", type=given_path, help="a run's output folder, or checkpoints"
    )
    parser.add_argument("--last", metavar="N", type=positive, help="the N newest numbered checkpoints of the run")
    parser.add_argument("--best", metavar="N", type=positive, help="the N that were evaluated best, by metrics.jsonl")
    parser.add_argument("--metric", default="acc1", help="ranks --best; the lowest loss is best (default: acc1)")
    parser.add_argument("--output", metavar="FILE", type=output_file(), required=True, help="the file to write")
    run(PROG, lambda: average(parser.parse_args()), "interrupted; nothing was written")


if __name__ == "__main__":
    main()
