"""Write a page about a run, or one that compares several runs, as a single HTML file.

The file contains its data and the library that draws it: it opens without a server and loads nothing.
"""

import base64
import json
import math
import re
import statistics
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from errors import UserError, duration, require_package
from files import open_to_read, read_json
from monitoring.records import read_epochs, read_records
from options import CURVES
from scripts import tool

PROG = "python -m scripts.report"

EXAMPLES = """examples:
  python -m scripts.report runs/digits                      writes runs/digits/report.html
  python -m scripts.report runs/a runs/b                    compares two runs in comparison.html
  python -m scripts.report runs/seed* --out seeds.html      runs that differ in --seed alone are one band

The page of one run has curves over steps, epochs or hours, a table of epochs, pictures, verdicts, starts, recipe and
environment. The page of several runs has the options that differ, one plot of all runs for each measure, and results
with their spread.
"""
KINDS = {
    "train": "training", "val": "validation", "val_ema": "validation, averaged weights", "minival": "minival",
    "minival_ema": "minival, averaged weights",
}  # fmt: skip
RESULTS = list(CURVES)
PANELS = {
    **{name: curve["title"] for name, curve in CURVES.items()}, "lr": "learning rate", "images_per_s": "images/s",
    "data_wait": "share of time waiting for data", "grad_norm": "norm of the gradients", "memory_gib": "memory, GiB",
}  # fmt: skip
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"]

# The beginnings of two kinds of lines in log.txt: the verdict on an epoch, and the head of a start.
VERDICT, START = re.compile(r"verdict|Epoch: \[\d+\] (bound by|balanced)"), re.compile(r"==== ")
_LARGEST = 32 << 20

# With this policy the browser itself refuses to load anything from elsewhere.
HEAD = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ddd; padding: 2px 9px; text-align: left }}
pre {{ background: #f7f7f7; overflow: auto; padding: 0.8em }} img {{ max-width: 100% }}
</style></head><body><h1>{title}</h1>
"""


class LoggedRun:
    """A run, read from the files in its folder; UserError if it has no records."""

    def __init__(self, folder: Path) -> None:
        try:
            self.records = read_records(folder)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise UserError(f"{folder} holds no metrics.jsonl; give the --output-dir of a run") from error
        self.folder, self.name = folder, str(folder)
        self.recipe, self.options = self.read("recipe.toml").decode(errors="replace"), {}
        with suppress(ValueError):
            for table in tomllib.loads(self.recipe).values():
                self.options |= table if isinstance(table, dict) else {}
        # An evaluation comes after the last step of its epoch.
        ends = [record for record in self.records if record["kind"].startswith(("val", "minival"))] or self.records
        self.steps_per_epoch = max((record["step"] / max(record["epoch"] + 1, 1) for record in ends), default=0) or 1

    def read(self, name: str) -> bytes:
        """Return a file's content; b"" if it is missing, enormous, or a link, which could lead out of the run."""
        with suppress(OSError), open_to_read(self.folder / name, follows_links=False) as file:
            content = file.read(_LARGEST + 1)
            return content if len(content) <= _LARGEST else b""
        return b""

    def hours(self, steps: list[int]) -> list[float | None]:
        """Return the hours of training up to each step, without pauses; None where no record has them."""
        known = {r["step"]: r["hours"] for r in self.records if isinstance(r.get("hours"), float | int)}
        return [known.get(step) for step in steps]

    def points(self, kind: str, name: str) -> dict[int, float]:
        """Return the values of one curve by their steps."""
        records = [r for r in self.records if r["kind"] == kind and isinstance(r.get(name), float | int)]
        return {record["step"]: record[name] for record in records if math.isfinite(record[name])}


def group_seeds(runs: list[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Return groups of runs that differ in their seeds alone, by label."""
    groups = {}
    for run in runs:
        key = json.dumps({**run.options, "seed": None}, sort_keys=True, default=str) if run.options else run.name
        groups.setdefault(key, []).append(run)
    return {", ".join(run.name for run in group): group for group in groups.values()}


def spread(values: list[float]) -> float:
    """Return the standard deviation of a sample; zero of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def traces(groups: dict[str, list[LoggedRun]], name: str) -> Iterable[tuple[list[int], LoggedRun, dict]]:
    """Yield each curve of one measure and each band of several seeds: steps, a run with them, plotly's arguments."""
    for number, (label, group) in enumerate(groups.items()):
        for at, kind in enumerate(KINDS):
            curves = [run.points(kind, name) for run in group]
            steps = sorted({step for curve in curves for step in curve})
            if not steps:
                continue
            values = [[curve[step] for curve in curves if step in curve] for step in steps]
            title = escape(f"{label}: {KINDS[kind]}" if len(groups) > 1 else KINDS[kind])
            color, dash = (COLORS[number % 10], at) if len(groups) > 1 else (COLORS[at], 1)
            style = {"name": title, "legendgroup": title, "mode": "lines" if kind == "train" else "lines+markers"}
            means, spreads = [statistics.fmean(v) for v in values], [spread(v) for v in values]
            line = {"color": color, "dash": ["dot", "solid", "dash", "solid", "dash"][dash]}
            yield steps, group[0], {**style, "y": means, "line": line}
            if len(group) > 1:
                ys = [m + s for m, s in zip(means, spreads, strict=True)]
                ys += [m - s for m, s in zip(means, spreads, strict=True)][::-1]
                band = {"fill": "toself", "fillcolor": color, "opacity": 0.2, "line": {"width": 0}, "hoverinfo": "skip"}
                yield steps + steps[::-1], group[0], {**style, "y": ys, **band, "mode": "lines"}


def draw_curves(groups: dict[str, list[LoggedRun]]) -> str:
    """Return HTML with curves and the library that draws them; buttons make steps, epochs or hours the x axis."""
    make_subplots = require_package("plotly.subplots", PROG).make_subplots
    panels = {name: curves for name in PANELS if (curves := list(traces(groups, name)))}
    if not panels:
        return "<p>No records yet.</p>"
    rows, seen, axes = (len(panels) + 1) // 2, set(), {"step": [], "epoch": [], "hours": []}
    titles = [PANELS[name] for name in panels]
    figure = make_subplots(rows, 2, subplot_titles=titles, vertical_spacing=0.25 / rows, horizontal_spacing=0.07)
    for panel, (name, curves) in enumerate(panels.items()):
        for xs, run, style in curves:
            axes["step"].append(xs)
            axes["epoch"].append([x / run.steps_per_epoch for x in xs])
            axes["hours"].append(run.hours(xs))
            is_new, _ = style["name"] not in seen, seen.add(style["name"])
            figure.add_scatter(x=xs, showlegend=is_new, row=panel // 2 + 1, col=panel % 2 + 1, **style)
        if name == "loss":  # a linear scale would be flat beside an evaluation that is far off
            figure.update_yaxes(type="log", row=panel // 2 + 1, col=panel % 2 + 1)
    buttons = [{"label": name, "method": "restyle", "args": [{"x": xs}]} for name, xs in axes.items()]
    menu = {"type": "buttons", "direction": "left", "x": 0, "xanchor": "left", "y": 1 + 0.3 / rows, "buttons": buttons}
    figure.update_layout(
        updatemenus=[menu], height=300 * rows + 150, template="plotly_white", hovermode="x unified", margin={"t": 110},
        legend={"orientation": "h", "x": 0.15, "yanchor": "bottom", "y": 1 + 0.15 / rows},
    )  # fmt: skip
    return figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True})


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table with all text escaped."""
    lines = [[f"<th>{escape(name)}" for name in head]] + [[f"<td>{escape(_text(v))}" for v in row] for row in rows]
    return f"<table>{''.join('<tr>' + ''.join(line) for line in lines)}</table>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)[:500]


def epochs_table(run: LoggedRun) -> str:
    """Return the table of a run's epochs: means over the training images, and the last result of each evaluation."""
    epochs = read_epochs(run.records)
    kinds = {"epoch": "train", **{kind: kind for kind in KINDS if kind != "train"}}
    columns = [("epoch", "lr"), *((kind, name) for kind in kinds for name in RESULTS)]
    columns = [(k, name) for k, name in columns if any(epoch.last.get(k, {}).get(name) is not None for epoch in epochs)]
    rows = [
        [f"[{epoch.number}]", epoch.step, duration(epoch.took_s)]
        + [epoch.last.get(kind, {}).get(name) for kind, name in columns]
        for epoch in epochs
    ]
    return table(["epoch", "step", "time", *(f"{kinds[kind]} {name}" for kind, name in columns)], rows)


def show_pictures(run: LoggedRun) -> str:
    """Return the pictures in a run's folder, the newest of each kind."""
    paths = [*sorted(run.folder.glob("picture*.png")), run.folder / "curves.png"]
    newest = {re.sub(r"-?\d+$", "", path.stem): path.name for path in paths}
    contents = [(escape(name), base64.b64encode(run.read(name)).decode()) for name in newest.values()]
    return "".join(f'<h3>{n}</h3><img alt="{n}" src="data:image/png;base64,{data}">' for n, data in contents if data)


def flat(content: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values in nested tables by dotted names, without the options, which the recipe has."""
    pairs = [(prefix + name, value) for name, value in content.items() if name != "args"]
    return [row for n, v in pairs for row in (flat(v, f"{n}.") if isinstance(v, dict) else [(n, v)])]


def describe_run(run: LoggedRun) -> str:
    """Return the page of one run, without its head."""
    log = run.read("log.txt").decode(errors="replace").splitlines()
    parts = {
        "Status": table(["file", "status.json"], flat(read_json(run.folder / "status.json"))),
        "Curves": draw_curves({run.name: [run]}),
        "Epochs": epochs_table(run),
        "Verdicts": table(["of each epoch"], [[line] for line in log if VERDICT.match(line)]),
        "Starts": table(["from log.txt"], [[line] for line in log if START.match(line)]),
        "Pictures": show_pictures(run),
        "Environment": table(["file", "run.json"], flat(read_json(run.folder / "run.json"))),
        "Recipe": f"<pre>{escape(run.recipe)}</pre>",
    }
    return "".join(f"<h2>{title}</h2>{content}" for title, content in parts.items() if content)


def compare_runs(runs: list[LoggedRun]) -> str:
    """Return the page of several runs, without its head."""
    groups, results = group_seeds(runs), []
    names = dict.fromkeys(name for run in runs for name in run.options)
    differing = [n for n in names if len({json.dumps(run.options.get(n), default=str) for run in runs}) > 1]
    options = [[run.name, *(run.options.get(name) for name in differing)] for run in runs]
    for label, group in groups.items():
        for kind, name in ((kind, name) for kind in KINDS for name in RESULTS):
            last = [list(points.values())[-1] for run in group if (points := run.points(kind, name))]
            if last:
                spreads = f"{spread(last):.2g}" if len(last) > 1 else ""
                results.append([label, f"{kind} {name}", len(last), statistics.fmean(last), spreads])
    return (
        f"<h2>Options that differ</h2>{table(['run', *differing], options)}<h2>Curves</h2>{draw_curves(groups)}"
        "<p>Runs that differ only in their seed are one line, their mean, in a band of one standard deviation each way."
        f"<h2>Last results</h2>{table(['runs', 'measure', 'number', 'mean', 'standard deviation'], results)}"
    )


def write_report(folders: list[Path], out: Path | None) -> Path:
    """Write the page of one run or of several and return its path; UserError as `LoggedRun`."""
    runs = [LoggedRun(folder) for folder in dict.fromkeys(folders)]
    if len(runs) > 1:
        title, path, content = f"{len(runs)} runs", out or Path("comparison.html"), compare_runs(runs)
    else:
        title, path, content = runs[0].name, out or runs[0].folder / "report.html", describe_run(runs[0])
    page = f"{HEAD.format(title=escape(title))}{content}</body></html>\n"
    tool.write_output(path, page.encode(errors="backslashreplace"), "--out")
    return path


def main() -> None:
    """Write the page about the runs that the command line names."""
    parser = tool.build_parser(PROG, "RUN [RUN ...] [--out FILE]", __doc__, EXAMPLES)
    parser.add_argument(
        "runs", metavar="RUN", type=tool.given_path, nargs="+", help="output folder of a run, such as runs/digits"
    )
    where = "the page (default: report.html in the run's folder; of several runs, comparison.html in this folder)"
    parser.add_argument("--out", metavar="FILE", type=tool.output_file(".html", ".htm"), help=where)

    def work() -> None:
        options = parser.parse_args()
        print(f"wrote {write_report(options.runs, options.out)}")

    tool.run(PROG, work, "interrupted; nothing written")


if __name__ == "__main__":
    main()
