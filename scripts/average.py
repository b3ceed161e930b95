"""Average the weights of several checkpoints of a run: `python -m scripts.average RUN --last 5 --output FILE`."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from checkpointing.finder import numbered
from checkpointing.published import recorded
from checkpointing.weights import as_checkpoint, average_checkpoints, options_of, take_weights, write_weights
from errors import UserError, counted
from loading.progress import Progress
from scripts.tool import build_parser, check_inputs, given_path, output_file, positive, run

PROG = "python -m scripts.average"

EPILOG = """\
examples:
  python -m scripts.average runs/resnet50 --last 5 --output averaged.pth
  python -m scripts.average a.pth b.pth c.pth --output averaged.pth

The mean of each weight is taken in float64; a mean of integers, such as BatchNorm's count of batches, is rounded down.
All checkpoints must be of one model with the same classes: of one run, or of several that began with the same weights
(Wortsman et al., arXiv 2203.05482). A run keeps its newest checkpoints, as many as train.py's --keep-last says.

FILE holds the weights, the model's name, its classes and the options of the first checkpoint. All tools open it, and so
does train.py --weights FILE; no run resumes from it. BatchNorm's statistics do not fit the averaged weights:
python -m scripts.reestimate_bn re-estimates them.
"""


def choose(sources: list[Path], last: int | None) -> list[Path]:
    """Return the checkpoints that the command line names; UserError if there are fewer than it asks for."""
    if last is None:
        for number, path in enumerate(sources):
            if not path.is_file():
                raise UserError(f"{path} is no file; give checkpoints, or the folder of a run with --last N")
            if any(os.path.samefile(path, other) for other in sources[:number]):
                raise UserError(f"{path} is the same file as another one, and would count twice; give it once")
        return sources
    folder, *others = sources
    if others or not folder.is_dir():
        raise UserError("--last chooses from one folder, that of a run; leave it out to average files")
    found = numbered(folder)
    if len(found) < last:
        raise UserError(f"{folder} holds {counted(len(found), 'numbered checkpoint')}, fewer than --last {last}")
    return found[:last]


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
    paths = choose(options.sources, options.last)
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
    names = ", ".join(path.name for path in paths)
    print(f"{options.output}: the mean of {counted(len(paths), 'checkpoint')}: {names}")
    if any(name.endswith(".running_mean") for name in weights):
        print(
            "its BatchNorm statistics are means too, which do not fit the mean of the weights; re-estimate them: "
            f"python -m scripts.reestimate_bn {shlex.quote(str(options.output))} --data-path DIR --output FILE"
        )


def main() -> None:
    """Average the checkpoints of the command line."""
    usage = "RUN --last N --output FILE | CHECKPOINT... --output FILE"
    parser = build_parser(PROG, usage, "Average the weights of several checkpoints.", EPILOG)
    parser.add_argument(
        "sources", metavar="RUN-OR-CHECKPOINT", nargs="+", type=given_path, help="a run's output folder, or checkpoints"
    )
    parser.add_argument("--last", metavar="N", type=positive, help="the N newest numbered checkpoints of the run")
    parser.add_argument("--output", metavar="FILE", type=output_file(), required=True, help="the file to write")
    run(PROG, lambda: average(parser.parse_args()), "interrupted; nothing was written")


if __name__ == "__main__":
    main()
