"""Write what a run was and did into one HTML file, or compare several runs in one.

The file holds all it shows and the library that draws it: it opens without a server and loads nothing.
"""

import argparse
import base64
import json
import math
import re
import statistics
import time
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from errors import UserError
from files import open_to_read, read_json, write_atomically
from monitoring.monitor import read_records
from scripts import tool

EXAMPLES = """examples:
  python -m scripts.report runs/digits                      writes runs/digits/report.html
  python -m scripts.report runs/a runs/b                    compares two runs in comparison.html
  python -m scripts.report runs/seed* --out seeds.html      runs that differ in --seed alone are one band

Loss, accuracies, learning rate, images/s and waiting for data are curves over steps or epochs. The page of one run also
has its table of epochs, pictures, verdicts, starts, recipe and environment; that of several, the options that differ.
"""

KINDS = {"train": "training", "val": "validation", "val_ema": "validation, averaged weights"}
PANELS = {
    "loss": "loss", "lr": "learning rate", "acc1": "Acc@1, %", "images_per_s": "images/s", "acc5": "Acc@5, %",
    "data_wait": "share of time waiting for data", "grad_norm": "norm of the gradients", "memory_gib": "memory, GiB",
}  # fmt: skip
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"]

# Lines of log.txt: what limited an epoch, and the head of each start.
VERDICT = re.compile(r"verdict|Epoch: \[\d+\] (bound by|balanced)")
START = re.compile(r"==== ")
_LARGEST = 32 << 20

# The browser itself refuses whatever a page that breaks its promise would load.
HEAD = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; margin: 0.6em 0 }} td, th {{ border: 1px solid #ddd; padding: 2px 9px }}
th {{ background: #f4f4f4; text-align: left }} td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
pre {{ background: #f7f7f7; overflow: auto; padding: 0.8em }} img {{ max-width: 100%; display: block; margin: 0.6em 0 }}
</style></head><body><h1>{title}</h1>
"""


class LoggedRun:
    """What is in the folder of a run.

    Raises:
        UserError: there is none.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.records = read_records(folder)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise UserError(f"{folder} holds no metrics.jsonl; give the --output-dir of a run") from error
        self.folder, self.name = folder, str(folder)
        self.facts, self.status = read_json(folder / "run.json"), read_json(folder / "status.json")
        self.recipe_text, self.log = self.text("recipe.toml"), self.text("log.txt").splitlines()
        self.options = {}
        with suppress(ValueError):
            recipe = tomllib.loads(self.recipe_text)
            for table in recipe.values():
                self.options |= table if isinstance(table, dict) else {}
        # An evaluation comes after the last step of its epoch.
        ends = [record for record in self.records if record["kind"] in ("val", "val_ema")] or self.records
        self.steps_per_epoch = max((record["step"] / (record["epoch"] + 1) for record in ends), default=1) or 1

    def text(self, name: str) -> str:
        """Return a text file of the run; nothing if it is not there."""
        return self.content(self.folder / name).decode(errors="replace")

    def content(self, path: Path) -> bytes:
        """Return a file's content, unless it is missing, enormous or a link out of the folder; then nothing."""
        with suppress(OSError), open_to_read(path, follows_links=False) as file:
            content = file.read(_LARGEST + 1)
            return content if len(content) <= _LARGEST else b""
        return b""

    def points(self, kind: str, name: str) -> dict[int, float]:
        """Return the values of one curve by their steps."""
        return {
            record["step"]: record[name]
            for record in self.records
            if record["kind"] == kind and isinstance(record.get(name), float | int) and math.isfinite(record[name])
        }


def group_seeds(runs: list[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Return runs by a label, those together that are equal but for the seed."""
    groups = {}
    for run in runs:
        options = {name: value for name, value in run.options.items() if name != "seed"}
        groups.setdefault(json.dumps(options, sort_keys=True, default=str) if options else run.name, []).append(run)
    return {", ".join(run.name for run in group): group for group in groups.values()}


def spread(values: list[float]) -> float:
    """Return the standard deviation of a sample; zero for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw_curves(groups: dict[str, list[LoggedRun]]) -> str:
    """Return a division of HTML with curves, whose x axis is the step or the epoch; the library is in it."""
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise UserError("plotly, which draws the curves, is missing; pip install -r requirements-dev.txt") from error

    runs = [run for group in groups.values() for run in group]
    panels = [name for name in PANELS if any(run.points(kind, name) for run in runs for kind in KINDS)]
    if not panels:
        return "<p>No records yet.</p>"
    num_rows = (len(panels) + 1) // 2
    gap = min(0.06, 0.4 / num_rows)
    titles = [PANELS[name] for name in panels]
    figure = make_subplots(num_rows, 2, subplot_titles=titles, vertical_spacing=gap, horizontal_spacing=0.07)
    axes, seen = ([], []), set()  # the x of each trace in steps and in epochs

    def add(panel: int, label: str, xs: list[int], group: list[LoggedRun], ys: list[float], **style: Any) -> None:
        axes[0].append(xs)
        axes[1].append([x / group[0].steps_per_epoch for x in xs])
        is_first = label not in seen and "fill" not in style
        seen.update([label] if is_first else [])
        trace = graph_objects.Scatter(
            x=xs, y=ys, name=escape(label), legendgroup=escape(label), showlegend=is_first, **style
        )
        figure.add_trace(trace, panel // 2 + 1, panel % 2 + 1)

    for panel, name in enumerate(panels):
        for number, (label, group) in enumerate(groups.items()):
            for at, kind in enumerate(KINDS):
                curves = [run.points(kind, name) for run in group]
                by_step = {
                    step: [c[step] for c in curves if step in c] for step in sorted({s for c in curves for s in c})
                }
                if not by_step:
                    continue
                color = COLORS[(number if len(groups) > 1 else at) % len(COLORS)]
                line = {"color": color, "dash": ["dot", "solid", "dash"][at] if len(groups) > 1 else "solid"}
                steps, means = list(by_step), [statistics.fmean(values) for values in by_step.values()]
                title = f"{label}: {KINDS[kind]}" if len(groups) > 1 else KINDS[kind]
                mode = "lines" if kind == "train" else "lines+markers"
                add(panel, title, steps, group, means, line=line, mode=mode)
                if len(group) > 1:
                    spreads = [spread(values) for values in by_step.values()]
                    ys = [m + s for m, s in zip(means, spreads, strict=True)]
                    ys += [m - s for m, s in zip(means[::-1], spreads[::-1], strict=True)]
                    band = {"fill": "toself", "fillcolor": color, "opacity": 0.2, "line": {"width": 0}}
                    add(panel, title, steps + steps[::-1], group, ys, mode="lines", hoverinfo="skip", **band)
    names = ["step", "epoch"]
    buttons = [
        {"label": f"x: {n}", "method": "restyle", "args": [{"x": xs}]} for n, xs in zip(names, axes, strict=True)
    ]
    scales = [
        {"label": f"loss: {scale}", "method": "relayout", "args": [{"yaxis.type": scale}]}
        for scale in ("log", "linear")
    ]
    menu = {
        "type": "buttons",
        "direction": "left",
        "showactive": True,
        "xanchor": "left",
        "yanchor": "bottom",
        "y": 1.04,
    }
    figure.update_layout(
        updatemenus=[{**menu, "x": 0, "buttons": buttons}, {**menu, "x": 0.2, "buttons": scales[: 2 * (panels[0] == "loss")]}],
        height=300 * num_rows + 150, template="plotly_white", hovermode="x unified",
        legend={"orientation": "h", "yanchor": "top", "y": -0.05}, margin={"t": 110},
    )  # fmt: skip
    if panels[0] == "loss":  # one evaluation far off would flatten everything else on a straight scale
        figure.update_yaxes(type="log", row=1, col=1)
    return figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True})


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table; whatever is in it is escaped."""
    text = "".join(f"<th>{escape(name)}</th>" for name in head)
    for row in rows:
        text += "</tr><tr>" + "".join(f"<td{' class=number' * _is_number(v)}>{escape(_text(v))}</td>" for v in row)
    return f"<table><tr>{text}</tr></table>"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 500 else f"{text[:500]} ..."


def epochs_table(run: LoggedRun) -> str:
    """Return the table of a run's epochs: of training, the mean over the epoch's records by the steps of each."""
    columns = [(kind, name) for kind in KINDS for name in ("loss", "acc1", "acc5") if run.points(kind, name)]
    rows, before = {}, 0
    for record in run.records:
        row, steps = rows.setdefault(record["epoch"], {}), max(record["step"] - before, 1)
        for kind, name in [*columns, ("train", "lr"), ("train", "images_per_s")]:
            if record["kind"] == kind and _is_number(record.get(name)):
                row.setdefault((kind, name), []).append((record[name], steps if kind == "train" else 1))
        row["step"] = record["step"]
        before = record["step"]

    def cell(values: list, how: str) -> float | None:
        if not values:
            return None
        return values[-1][0] if how == "last" else sum(v * n for v, n in values) / sum(n for _, n in values)

    columns += [("train", "lr"), ("train", "images_per_s")]
    hows = ["last" if name == "lr" or kind != "train" else "mean" for kind, name in columns]
    body = [
        [epoch, row["step"], *(cell(row.get(c), how) for c, how in zip(columns, hows, strict=True))]
        for epoch, row in sorted(rows.items())
    ]
    return table(["epoch", "step", *(" ".join(column) for column in columns)], body)


def pictures(run: LoggedRun) -> str:
    """Return the pictures in a run's folder; of those that it drew again and again, the newest."""
    newest = {
        re.sub(r"-?\d+$", "", p.stem): p for p in [*sorted(run.folder.glob("picture*.png")), run.folder / "curves.png"]
    }
    contents = {path.name: run.content(path) for path in newest.values()}
    return "".join(
        f'<h3>{escape(name)}</h3><img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in contents.items()
        if data
    )


def flat(content: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values in nested tables with dotted names."""
    rows = []
    for name, value in content.items():
        rows += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return rows


def describe_run(run: LoggedRun) -> str:
    """Return the page of one run, without its head."""
    starts, verdicts = ([line for line in run.log if kind.match(line)] for kind in (START, VERDICT))
    facts = [(name, value) for name, value in flat(run.facts) if not name.startswith("args.")]
    parts = {
        "Status": table(["", ""], flat(run.status)),
        "Curves": draw_curves({run.name: [run]}),
        "Epochs": epochs_table(run),
        "Verdicts": verdicts and f"<pre>{escape(chr(10).join(verdicts))}</pre>",
        "Starts": starts and f"<pre>{escape(chr(10).join(starts))}</pre>",
        "Pictures": pictures(run),
        "Environment": table(["", ""], facts),
        "Recipe": f"<pre>{escape(run.recipe_text)}</pre>",
    }
    return "".join(f"<h2>{title}</h2>{content}" for title, content in parts.items() if content)


def compare_runs(runs: list[LoggedRun]) -> str:
    """Return the page of several runs, without its head."""
    groups = group_seeds(runs)
    names = dict.fromkeys(name for run in runs for name in run.options)
    differing = [n for n in names if len({json.dumps(run.options.get(n), default=str) for run in runs}) > 1]
    options = [[run.name, *(run.options.get(name) for name in differing)] for run in runs]
    curves = [(kind, name) for kind in KINDS for name in ("loss", "acc1", "acc5")]
    results = []
    for label, group in groups.items():
        for kind, name in curves:
            last = [list(points.values())[-1] for run in group if (points := run.points(kind, name))]
            if last:
                best = None if kind == "train" else (min if name == "loss" else max)
                bests = (
                    [best(run.points(kind, name).values()) for run in group if run.points(kind, name)] if best else []
                )
                results.append([label, f"{kind} {name}", len(last), *mean_and_spread(last), *mean_and_spread(bests)])
    head = ["runs", "measure", "number", "last: mean", "spread", "best: mean", "spread"]
    return (
        f"<h2>Options that differ</h2>{table(['run', *differing], options)}<h2>Curves</h2>{draw_curves(groups)}"
        "<p>Runs that are equal but for the seed are one line: their mean, in a band of one standard deviation.</p>"
        f"<h2>Results</h2>{table(head, results)}"
    )


def mean_and_spread(values: list[float]) -> tuple[float | None, float | None]:
    """Return the mean, and the standard deviation where there are several values."""
    return statistics.fmean(values) if values else None, spread(values) if len(values) > 1 else None


def write_report(folders: list[Path], out: Path | None) -> Path:
    """Write the page of one run or of several and return its path.

    Raises:
        UserError: a folder holds no run, plotly is missing, or the page's folder is.
    """
    runs = [LoggedRun(folder) for folder in dict.fromkeys(folders)]
    path = out or (Path("comparison.html") if len(runs) > 1 else runs[0].folder / "report.html")
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(f"--out {path} is no file in a folder that is there")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = describe_run(runs[0]) if len(runs) == 1 else compare_runs(runs)
    page = f"{HEAD.format(title=escape(title))}{body}<p>Written {time.strftime('%Y-%m-%d %H:%M')}</p></body></html>\n"
    write_atomically(path, lambda file: file.write(page.encode(errors="backslashreplace")))
    return path


def main() -> None:
    """Write what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="output folder of a run, such as runs/digits")
    parser.add_argument(
        "--out", metavar="FILE", type=Path,
        help="the page (default: report.html in the run's folder; of several runs, comparison.html in this one)",
    )  # fmt: skip
    args = parser.parse_args()
    tool.run(
        parser.prog, lambda: print(f"wrote {write_report(args.runs, args.out)}"), "interrupted; nothing was written"
    )


if __name__ == "__main__":
    main()
