"""Draw the learning curves of a run into curves.png: loss, accuracy and learning rate over steps."""

import io
from pathlib import Path

from errors import require_package
from scripts.report import KINDS, LoggedRun
from scripts.tool import build_parser, given_path, run, write_output

PROG = "python -m scripts.plot_curves"
EPILOG = "example:\n  python -m scripts.plot_curves runs/digits --over hours"

PANELS = {"loss": "loss", "acc1": "accuracy, %", "lr": "learning rate"}
AXES = ["step", "images", "hours"]


def plot_curves(folder: Path, over: str = "step") -> None:
    """Draw the run in `folder` over one of `AXES`; UserError as `LoggedRun`."""
    records = [record for record in LoggedRun(folder).records if over in record]
    require_package("matplotlib", PROG).use("agg")
    from matplotlib import pyplot

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
    path, picture = folder / "curves.png", io.BytesIO()
    figure.savefig(picture, dpi=100)
    write_output(path, picture.getvalue())
    print(f"wrote {path}")


def main() -> None:
    """Draw the run that the command line names."""
    parser = build_parser(PROG, "RUN [--over AXIS]", __doc__, EPILOG)
    parser.add_argument("folder", metavar="RUN", type=given_path, help="output folder of a run, such as runs/digits")
    parser.add_argument("--over", choices=AXES, default="step", help="horizontal axis (default: step)")
    run(PROG, lambda: plot_curves(**vars(parser.parse_args())), "interrupted; nothing written")


if __name__ == "__main__":
    main()
