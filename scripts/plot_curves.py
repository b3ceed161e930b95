"""Draw the learning curves of a run into curves.png: loss, accuracy and learning rate over steps."""

import argparse
import sys
from pathlib import Path

from files import write_atomically
from monitoring.monitor import read_records
from scripts.report import KINDS

PANELS = {"loss": "loss", "acc1": "accuracy, %", "lr": "learning rate"}
AXES = ["step", "images", "hours"]


def plot_curves(folder: Path, over: str = "step") -> Path:
    """Draw the run in `folder` over one of `AXES` and return the picture's path.

    Raises:
        FileNotFoundError: no run has written there.
    """
    import matplotlib as mpl  # a development requirement, never needed to train

    mpl.use("agg")
    from matplotlib import pyplot

    records = [record for record in read_records(folder) if over in record]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(15, 4), layout="constrained")
    for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
        for kind in dict.fromkeys([*KINDS, *(record["kind"] for record in records)]):
            points = [(record[over], record[name]) for record in records if record["kind"] == kind and name in record]
            legend, marker = KINDS.get(kind, kind), "" if kind == "train" else "o"
            if points:
                axis.plot(*zip(*points, strict=True), label=legend, marker=marker, markersize=4)
        axis.set(xlabel=over, ylabel=label)
        axis.grid(alpha=0.3)
        axis.legend()
    # An evaluation early in a run can be far off; on a straight scale it would flatten everything else.
    axes[0].set_yscale("log")
    figure.suptitle(str(folder))
    path = folder / "curves.png"
    write_atomically(path, lambda file: figure.savefig(file, dpi=100))
    return path


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m scripts.plot_curves", description=__doc__)
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run's output folder, such as runs/digits")
    parser.add_argument("--over", choices=AXES, default="step", help="the horizontal axis (default: step)")
    options = parser.parse_args()
    try:
        print(f"wrote {plot_curves(options.folder, options.over)}")
    except FileNotFoundError:
        sys.exit(f"{parser.prog}: error: {options.folder} holds no metrics.jsonl; give the --output-dir of a run")
    except ImportError:
        sys.exit(f"{parser.prog}: error: matplotlib is missing; pip install -r requirements-dev.txt")


if __name__ == "__main__":
    main()
