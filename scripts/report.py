"""Write a page about a run, or one that compares several runs, as a single HTML file that loads nothing.

Examples:
  python -m scripts.report runs/digits                      writes runs/digits/report.html
  python -m scripts.report runs/a runs/b                    compares two runs in comparison.html
  python -m scripts.report runs/seed* --out seeds.html      runs that differ in --seed or fold alone are one band

The page of one run begins with its result; then come curves, confusion, pictures, epochs, and options that are no
defaults. That of several runs begins with tables of settings and runs, with the options that differ; then come one plot
of all runs for each measure, and results with their spread. Both end with what repeats the runs. Runs are ranked by
their last evaluation: the best one is chosen on the very images that it is measured on. Needs matplotlib.
"""

import base64
import io
import itertools
import json
import math
import os
import re
import shlex
import statistics
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy
from PIL import Image, ImageOps

from checkpointing.checkpoint import BEST_NAMES
from errors import UserError, duration, one_line
from files import open_to_read, read_json
from monitoring.events import NOT_DRAWN
from monitoring.monitor import OF_TRAINING, read_records
from scripts import tool
from scripts.scores import share_text
from settings.choices import CURVES
from settings.config import IMAGENET_MEAN, IMAGENET_STD
from settings.options import BY_NAME
from settings.packages import require_package

PROG = "python -m scripts.report"

KINDS = {
    "train": "training", "val": "validation", "val_ema": "validation, averaged weights", "minival": "minival",
    "minival_ema": "minival, averaged weights",
}  # fmt: skip
PANELS = {
    **{name: curve.title for name, curve in CURVES.items()}, "lr": "learning rate", "images_per_s": "images/s",
    "data_wait": "share of time waiting for data", "grad_norm": "norm of the gradients", "memory_gib": "memory, GiB",
}  # fmt: skip
_LARGEST = 32 << 20
SPREAD = "mean \u00b1 standard deviation"

# Its policy has the browser itself refuse to load anything from elsewhere.
PAGE = Path(__file__).with_name("page.html")


class LoggedRun:
    """A run, read from the files in its folder; UserError if it has no records."""

    def __init__(self, folder: Path) -> None:
        try:
            self.records = read_records(folder)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise UserError(f"{folder} holds no metrics.jsonl; give the --output-dir of a run") from error
        self.folder, self.name = folder, Path(os.path.abspath(folder)).name
        self.about, self.status = (read_json(folder / name) for name in ("run.json", "status.json"))
        self.recipe, self.options = self.read("recipe.toml").decode(errors="replace"), {}
        with suppress(ValueError):
            for table in tomllib.loads(self.recipe).values():
                self.options |= table if isinstance(table, dict) else {}
        # An evaluation comes after the last step of its epoch.
        ends = [record for record in self.records if record["kind"].startswith(("val", "minival"))] or self.records
        self.steps_per_epoch = max((record["step"] / max(record["epoch"] + 1, 1) for record in ends), default=0) or 1

    @property
    def state(self) -> str:
        """The word of status.json, and how far an unfinished run is."""
        state = str(self.status.get("state", "unknown"))
        done = max((record["step"] for record in self.records), default=0) / self.steps_per_epoch
        so_far = f"unfinished: {state}, {done:.4g} of {self.options.get('epochs', '?')} epochs"
        return state if state == "finished" else so_far

    @property
    def took(self) -> str:
        """The time until the last record, without the pauses between starts; empty if it is not known."""
        hours = self.records[-1].get("hours") if self.records else None
        return duration(3600 * hours) if isinstance(hours, float) else ""

    def read(self, name: str) -> bytes:
        """Return a file's content; b"" if it is missing, enormous, or a link, which could lead out of the run."""
        with suppress(OSError), open_to_read(self.folder / name, follows_links=False) as file:
            content = file.read(_LARGEST + 1)
            return content if len(content) <= _LARGEST else b""
        return b""

    def points(self, kind: str, name: str) -> dict[int, float]:
        """Return the values of one curve by their steps, without those too large to be drawn."""
        records = [r for r in self.records if r["kind"] == kind and isinstance(r.get(name), float | int)]
        return {record["step"]: record[name] for record in records if abs(record[name]) < 1e100}

    def curve(self, kind: str, name: str) -> dict[int, float]:
        """Return `points`; for training the means of the epochs, where these are more."""
        of_epochs = self.points("epoch", name) if kind == "train" else {}
        return max(self.points(kind, name), of_epochs, key=len)

    def result(self, kind: str, name: str, step: int) -> str:
        """Return the value of a metric in an evaluation with its number of images."""
        value, count = self.points(kind, name)[step], int(self.points(kind, "n").get(step, 0))
        if count > 0 and name in ("acc1", "acc5") and 0 <= value <= 100:
            return share_text(round(value * count / 100), count)
        return f"{value:.5g} {PANELS.get(name, name).partition(', ')[2]}".rstrip() + count_text([self], kind)


def count_text(runs: Iterable[LoggedRun], kind: str) -> str:
    """Return the numbers of images of a kind of evaluation, or of a training epoch, in brackets; empty if unknown."""
    counts = {number for run in runs for number in run.points(kind, "n").values()}
    if kind == "train":
        points = [(run.steps_per_epoch, *point) for run in runs for point in run.points("epoch", "images").items()]
        counts = {round(steps * number / max(step, 1)) for steps, step, number in points}
    words = " or ".join(f"{count:,.0f}" for count in sorted(counts))
    return f" (n={words})" if words else ""


def group_seeds(runs: list[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Return groups of runs that differ in their seeds, or folds of a minival, alone, by label.

    For the folds 0 and 1 weights of runs/probe-0 and runs/probe-1 are the same: each begins with its own classifier.
    """
    groups = {}
    for run in runs:
        weights, fold = run.options.get("weights"), run.options.get("minival-fold")
        if "minival" in run.options and isinstance(weights, str):
            weights = re.sub(rf"(?<!\d)[-_.=]?{fold}(?=/)", "", weights)
        options = {**run.options, "seed": None, "minival-fold": None, "weights": weights}
        key = json.dumps(options, sort_keys=True, default=str) if run.options else run.name
        groups.setdefault(key, []).append(run)
    return {name_group(group): group for group in groups.values()}


def name_group(runs: list[LoggedRun]) -> str:
    """Return the name of runs of one setting, and how many are unfinished.

    It is the one that they have without numbers at the end, or all their names.
    """
    names, num_unfinished = [run.name for run in runs], sum(run.state != "finished" for run in runs)
    bases = {re.sub(r"[-_.=]?\d+$", "", name) for name in names}
    is_one = len(names) > 1 and len(bases) == 1 and Path(*bases).name
    label = f"{bases.pop()} ({len(names)} runs)" if is_one else ", ".join(names)
    return f"{label} [{num_unfinished} unfinished]" if num_unfinished else label


def kinds_in(runs: Iterable[LoggedRun]) -> dict[str, str]:
    """Return the titles of all kinds of records with curves; those of `--eval-data` have its names."""
    found = dict.fromkeys(record["kind"] for run in runs for record in run.records if record["kind"] != "epoch")
    return KINDS | {kind: re.sub("_ema$", ", averaged weights", kind) for kind in found if kind not in KINDS}


def results_in(runs: Iterable[LoggedRun]) -> list[str]:
    """Return the names of all metrics, one's own too."""
    records = [record for run in runs for record in run.records if record["kind"] not in ("train", "epoch")]
    found = dict.fromkeys(name for record in records for name, value in record.items() if isinstance(value, float))
    return [name for name in dict.fromkeys([*CURVES, *found]) if name not in NOT_DRAWN | {"lr", "memory_gib"}]


def spread(values: list[float]) -> float:
    """Return the standard deviation of a sample; zero of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw_measure(axis: Any, groups: dict[str, list[LoggedRun]], name: str) -> None:
    """Draw one measure over epochs of training: a line for each group of runs and each kind of record, and a band."""
    axis.grid(alpha=0.3)
    for number, (label, group) in enumerate(groups.items()):
        for place, (kind, title) in enumerate(kinds_in(run for each in groups.values() for run in each).items()):
            curves = [run.curve(kind, name) for run in group]
            steps = sorted({step for curve in curves for step in curve})
            if not steps:
                continue
            values = [[curve[step] for curve in curves if step in curve] for step in steps]
            means, spreads = numpy.array([[statistics.fmean(each), spread(each)] for each in values]).T
            xs = [step / group[0].steps_per_epoch for step in steps]
            style = {"linestyle": "--", "marker": "."} if place or len(steps) == 1 else {"linewidth": 1}
            color = f"C{(number if len(groups) > 1 else place) % 10}"
            title += count_text(group, kind)
            title = f"{label}: {title}" if len(groups) > 1 else title
            axis.plot(xs, means, color=color, label=one_line(title)[:200], **style)
            low = means - spreads
            axis.fill_between(xs, low.clip(0) if means.min() >= 0 else low, means + spreads, color=color, alpha=0.2)
    lowest, highest = (choose(choose(line.get_ydata()) for line in axis.lines) for choose in (min, max))
    if name == "loss" and highest > 5 * lowest > 0:
        axis.set_yscale("log")  # a linear scale would be flat beside an evaluation that is far off
        ticker = require_package("matplotlib.ticker", PROG)
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        return
    axis.ticklabel_format(axis="y", useOffset=False)
    if lowest >= 0:
        # A constant rate would be in the middle of an axis with negative rates; a share begins at zero.
        axis.set_ylim(bottom=0 if name in ("lr", "data_wait") else max(axis.get_ylim()[0], 0))


def draw_curves(groups: dict[str, list[LoggedRun]]) -> dict[str, Any]:
    """Return a figure for each measure by its name, 40 at most."""
    runs = [run for group in groups.values() for run in group]
    titles = {name: plain(PANELS.get(name, name)) for name in dict.fromkeys([*CURVES, *results_in(runs), *PANELS])}
    names = [name for name in titles if any(run.curve(kind, name) for run in runs for kind in kinds_in(runs))][:40]
    figures = {name: new_figure(6.4, 3.2) for name in names}
    for name, figure in figures.items():
        draw_measure(figure.add_subplot(1, 1, 1, title=titles[name], xlabel="epochs of training"), groups, name)
    return figures


def show_curves(figures: dict[str, Any]) -> str:
    """Return HTML that shows figures beside each other, with one legend of all lines above them."""
    lines = {line.get_label(): line for figure in figures.values() for axis in figure.axes for line in axis.lines}
    marks, as_hex = {"-": "&#9473;", "--": "&#9476;"}, require_package("matplotlib.colors", PROG).to_hex
    names = [
        f'<span><i style="color: {as_hex(line.get_color())}">{marks[line.get_linestyle()]}</i> {escape(label)}</span>'
        for label, line in lines.items()
    ]
    shown = "".join(drawn(figure, f"curves of {name}") for name, figure in figures.items())
    return f'<div>{"".join(names)}</div><div class="curves">{shown}</div>'


def draw_confusion(classes: list[str], counts: list[list[int]], title: str) -> Any:
    """Return a figure of counts, rows of true and columns of predicted classes; the last is of others, unless empty."""
    names, cells = [plain(name)[:24] for name in classes[:32]], numpy.array(counts)
    columns = [*names, "other"] if cells[:, -1].any() else names
    shares = (cells / cells.sum(axis=1, keepdims=True).clip(1))[:, : len(columns)]
    figure = new_figure(max(7, 3 + 0.32 * len(names)), max(6, 2 + 0.32 * len(names)))
    axis = figure.add_subplot(1, 1, 1, title=plain(title))
    axis.set_ylabel("true class")
    axis.set_xlabel("predicted class")
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set_yticks(range(len(names)), names)
    axis.set_xticks(range(len(columns)), columns, rotation=90)
    for row, column in itertools.product(range(len(names)), range(len(columns))):
        if count := cells[row, column]:
            ink = "white" if shares[row, column] > 0.5 else "black"
            axis.text(column, row, count, ha="center", va="center", color=ink, fontsize=7)
    return figure


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches; UserError without matplotlib."""
    require_package("matplotlib", PROG)
    return require_package("matplotlib.figure", PROG).Figure(figsize=(width, height), layout="constrained")


def plain(text: str) -> str:
    """Return text in which matplotlib finds no formula and no character that cannot be drawn, the middle cut out."""
    return one_line(text if len(text) <= 200 else f"{text[:100]}...{text[-90:]}").replace("$", r"\$")


def embedded(content: bytes, name: str, form: str) -> str:
    """Return HTML that shows a picture which it contains; no code in it can run."""
    return f'<img alt="{escape(name)}" src="data:image/{form};base64,{base64.b64encode(content).decode()}">'


def drawn(figure: Any, name: str) -> str:
    """Return HTML that shows a figure."""
    return embedded(saved(figure.savefig, "svg"), name, "svg+xml")


def saved(save: Callable, form: str) -> bytes:
    """Return what `save` writes in a form: a method of a figure or of an image."""
    content = io.BytesIO()
    save(content, format=form)
    return content.getvalue()


def show_images(shown: Iterable[tuple[Image.Image, list[str], str]], folder: Path) -> str:
    """Return HTML that shows images small and beside each other, with lines below each; the first is its file's path.

    Each is marked as `right`, `wrong` or nothing. Images link to their files, if they are such, from the folder of the
    page.
    """
    figures = []
    for image, (file, *lines), mark in shown:
        picture = embedded(saved(ImageOps.fit(image, (160, 160)).save, "jpeg"), file, "jpeg")
        if os.path.isfile(file):
            path = os.path.relpath(file, folder)
            address = re.sub(rb"[^\w./~-]", lambda sign: b"%%%02X" % sign[0][0], os.fsencode(path)).decode()
            picture = f'<a href="{escape(address)}">{picture}</a>'
        words = "<br>".join(map(escape, [os.path.basename(file), *lines]))
        figures.append(f'<figure class="{mark}">{picture}<figcaption>{words}</figcaption></figure>')
    return f"<div>{''.join(figures)}</div>"


def page(title: str, sections: dict[str, str]) -> bytes:
    """Return a whole page with a section for each title that has content."""
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections.items() if content)
    template = Template(PAGE.read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body=body).encode(errors="backslashreplace")


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table with all text escaped; no line ends before a sign of percent."""
    lines = [[f"<th>{escape(name)}" for name in head]] + [[f"<td>{escape(_text(v))}" for v in row] for row in rows]
    return f"<table>{''.join('<tr>' + ''.join(line) for line in lines if line)}</table>".replace(" %", "&nbsp;%")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)[:500]


def epochs_table(run: LoggedRun) -> str:
    """Return the table of a run's epochs: means over the training images, and the last result of each evaluation.

    The time is that of training and evaluation, without the pauses between starts.
    """
    kinds = {"epoch": "train", **{kind: kind for kind in kinds_in([run]) if kind != "train"}}
    epochs, columns, rows, end_s = {}, [("epoch", "lr"), *itertools.product(kinds, results_in([run]))], [], 0.0
    for record in run.records:
        epochs.setdefault(record["epoch"], {})[record["kind"]] = record
    columns = [(k, n) for k, n in columns if any(last.get(k, {}).get(n) is not None for last in epochs.values())]
    for number, last in epochs.items():
        final = max(last.values(), key=lambda record: record["step"])
        begin_s, end_s = end_s, 3600 * (final.get("hours") or math.nan)
        values = [last.get(kind, {}).get(name) for kind, name in columns]
        rows.append([f"[{number}]", final["step"], duration(end_s - begin_s), *values])
    heads = (f"{kinds[kind]} {name}" for kind, name in columns)
    counts = (f"{kind}{count_text([run], kind)}" for kind in dict.fromkeys(kinds[k] for k, _ in columns))
    return table(["epoch", "step", "time", *heads], rows) + f"<p>{escape(', '.join(counts))}</p>"


def show_pictures(run: LoggedRun) -> dict[str, str]:
    """Return sections: mistakes and confusion of the best evaluation, or else of the newest, and the first batch."""
    names = sorted(path.name for path in run.folder.glob("picture*.*"))
    shown, about, found, confusion = {re.sub(r"-?\d+$", "", Path(name).stem): name for name in names}, "", "", ""
    for name in sorted((n for n in names if "-counts-" in n), key=lambda n: b'"best": "' in run.read(n))[-1:]:
        shown |= {"picture-counts": "", "picture-mistakes": name.replace("counts", "mistakes").replace("json", "png")}
        with suppress(ValueError, LookupError, TypeError):  # damaged
            counts = json.loads(run.read(name))
            about = f"{KINDS.get(counts['kind'], counts['kind'])}, after step {counts['step']}"
            about += f": {counts['best']}" if counts.get("best") else ""
            confusion = drawn(draw_confusion(counts["classes"], counts["confusion"], about), name)
            rows = [[os.path.basename(path), *words, f"{p:.1%}"] for path, *words, p in counts.get("mistakes", [])]
            found = table(["file", "class", "predicted", "confidence"], rows) if rows else ""
    pictures = {kind: embedded(content, name, "png") for kind, name in shown.items() if (content := run.read(name))}
    if found := pictures.pop("picture-mistakes", "") + found:
        found = f"<p>{escape(about)}</p><div>{found}</div>"
    return {"Mistakes": found, "Confusion": confusion, "First batch": "".join(pictures.values())}


def flat(content: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values in nested tables by dotted names, without the options, which the recipe has."""
    pairs = [(prefix + name, value) for name, value in content.items() if name != "args"]
    return [row for n, v in pairs for row in (flat(v, f"{n}.") if isinstance(v, dict) else [(n, v)])]


def best_step(run: LoggedRun, kind: str, name: str) -> int:
    """Return the step of the best value of a metric in a kind of evaluation, as `RunState.note_results`."""
    points, losses, sign = run.points(kind, name), run.points(kind, "loss"), -1 if CURVES[name].is_lower_better else 1
    return max(points, key=lambda step: (sign * points[step], -losses.get(step, math.inf), -step), default=0)


def best_metric(run: LoggedRun) -> str:
    """Return the metric by which a run is ranked: `--best-metric`, or Acc@1 or mAP where that is one's own."""
    names = [str(run.options.get("best-metric", "acc1")), "acc1", "map"]
    kinds = kinds_in([run]).keys() - {"train"}
    return next((name for name in names if name in CURVES and any(run.points(kind, name) for kind in kinds)), "acc1")


def where_time_went(run: LoggedRun) -> str:
    """Return the shares of a run's time, the largest first, and the processes that waited most and least for images."""
    names = "starting_s", "waiting_s", "saving_s"
    epochs = [[record.get(name) for name in names] for record in run.records if record["kind"] == "epoch"]
    epochs = [each for each in epochs if all(isinstance(row, list) and {*map(type, row)} == {float} for row in each)]
    hours = [(record["kind"], record["hours"]) for record in run.records if isinstance(record.get("hours"), float)]
    if not epochs or not hours:
        return ""
    # In each step all processes wait for the one whose images come last.
    starting, images, saving = (sum(max(row) for row in column) for column in zip(*epochs, strict=True))
    pairs = itertools.pairwise(hours)
    evaluating = 3600 * sum(after - before for (_, before), (kind, after) in pairs if kind not in OF_TRAINING)
    whole = max(3600 * hours[-1][1] + starting, 1e-9)
    parts = {"starting": starting, "waiting for images": images, "saving": saving, "evaluating": evaluating}
    parts["training steps"] = max(whole - sum(parts.values()), 0.0)
    shares = [f"{name} {part / whole:.0%}" for name, part in sorted(parts.items(), key=lambda each: -each[1])]
    waits = [sum(each) for each in zip(*(row for _, row, _ in epochs), strict=False)]
    most, least = waits.index(max(waits)), waits.index(min(waits))
    ranks = f"; most for images: rank {most}, {duration(waits[most])}; least: rank {least}, {duration(waits[least])}"
    return ", ".join(shares) + (ranks if len(waits) > 1 else "")


def describe_result(run: LoggedRun) -> str:
    """Return the table of what a run has reached, and of what it is."""
    rows, metrics = [], dict.fromkeys((str(run.options.get("best-metric", "acc1")), best_metric(run), "acc1"))
    for metric, (kind, title) in itertools.product(metrics, kinds_in([run]).items()):
        steps = list(run.points(kind, metric))
        if kind == "train" or not steps:
            continue
        name = f"{PANELS.get(metric, metric).partition(', ')[0]}, {title}"
        rows.append([f"{name}, last", f"{run.result(kind, metric, steps[-1])}, after step {steps[-1]}"])
        if metric in CURVES:
            step = best_step(run, kind, metric)
            after = f"after step {step} ({step / run.steps_per_epoch:.4g} epochs), chosen on this set"
            rows.append([f"{name}, best", f"{run.result(kind, metric, step)}, {after}"])
    rates = run.points("train", "images_per_s").values()
    rows += [["state", run.state], ["reason", run.status.get("reason")]]
    rows += [["time", run.took], ["of which", where_time_went(run)]]
    rows.append(["images a second", f"{statistics.median(rates):.1f} in training" if rates else ""])
    rows.append(["model", run.options.get("model")])
    rows.append(["data", " ".join(str(run.options.get(name, "")) for name in ("data-path", "synthetic"))])
    return table([], [row for row in rows if any(row[1:]) and str(row[1]).strip()])


def describe_run(run: LoggedRun) -> dict[str, str]:
    """Return the sections of one run by their titles, beside its result and curves."""
    known = {option.name: option.default for option in BY_NAME.values()}
    known |= {"mean": [*IMAGENET_MEAN], "std": [*IMAGENET_STD]}
    changed = [[name, value] for name, value in run.options.items() if value != known.get(name)]
    files = {"state": table([], flat(run.status)), "environment": table([], flat(run.about))}
    files["all options"] = f"<pre>{escape(run.recipe)}</pre>" if run.recipe else ""
    return {
        **show_pictures(run),
        "Epochs": epochs_table(run),
        "Options that are no defaults": table(["option", "value"], changed) if changed else "",
        "More": "".join(f"<details><summary>{name}</summary>{text}</details>" for name, text in files.items()),
    }


def last_result(runs: list[LoggedRun], kind: str, name: str) -> tuple[float, str, int]:
    """Return the mean of the last results of runs of one setting, in words too, and their number; NaN of none."""
    found = [(run, *list(points.items())[-1]) for run in runs if (points := run.points(kind, name))]
    if not found:
        return math.nan, "", 0
    values = [value for *_, value in found]
    mean, text = statistics.fmean(values), found[0][0].result(kind, name, found[0][1])
    if len(found) > 1:
        text = f"{mean:.5g} \u00b1 {spread(values):.2g}{count_text(runs, kind)}"
    return mean, text, len(found)


def rank(groups: dict[Any, list[LoggedRun]], name: str) -> list[list[Any]]:
    """Return a row for each group, the best first: its label, words and number of `last_result`, the evaluations' kind.

    These are on the set that chooses best.pth, never on one of `--eval-data`, and of the averaged weights where a run
    has them: to take the better ones would favour it.
    """
    rows, sign = [], 1 if CURVES[name].is_lower_better else -1
    for label, group in groups.items():
        kinds = ["", *(kind for kind in BEST_NAMES if any(run.points(kind, name) for run in group))]
        mean, *words = last_result(group, kinds[-1], name)
        rows.append((math.isnan(mean), sign * mean, [label, *words, kinds[-1]]))
    return [row for *_, row in sorted(rows, key=lambda row: row[:2])]


def rank_runs(runs: list[LoggedRun], metric: str) -> str:
    """Return the table of several runs with the options that differ, the best last result first."""
    names, rows = dict.fromkeys(name for run in runs for name in run.options), []
    differing = [n for n in names if len({json.dumps(run.options.get(n), default=str) for run in runs}) > 1]
    for run, words, _, kind in rank({run: [run] for run in runs}, metric):
        step = best_step(run, kind, metric)
        best = run.points(kind, metric).get(step), step / run.steps_per_epoch or None
        rows.append([run.name, words, run.state, kind, *best, run.took, *map(run.options.get, differing)])
    title = PANELS[metric].partition(",")[0]
    head = ["run", f"last {title}", "state", "of", f"best {title}, chosen on this set", "its epoch", "time"]
    return table([*head, *differing], rows)


def compare_runs(groups: dict[str, list[LoggedRun]]) -> str:
    """Return the table of all last results of several settings."""
    rows = []
    for label, group in groups.items():
        for kind, name in itertools.product(kinds_in(group), results_in(group)):
            _, words, number = last_result(group, kind, name)
            if number and kind != "train":
                rows.append([label, f"{kind} {name}", words, number])
    note = "<p>Runs that differ only in seed or fold are one line, their mean, in a band of one standard deviation."
    return table(["setting", "measure", f"last, {SPREAD}", "runs"], rows) + note


def reproduce(runs: list[LoggedRun], settings: list[list[Any]]) -> str:
    """Return HTML with rows of a paper's table from those of `rank`, and lines for a shell that repeat the runs."""
    rows = [" & ".join(re.sub(r"([%&#$_])", r"\\\1", str(cell)) for cell in row) + r" \\" for row in settings]
    return "".join(f"<pre>{escape(chr(10).join(lines))}</pre>" for lines in (rows, map(repeat, runs)))


def repeat(run: LoggedRun) -> str:
    """Return a comment on what a run's numbers depend on beside its options, and its command with its seed."""
    facts = dict(flat(run.about))
    found = [f"{n} {value}" for n, value in facts.items() if n.startswith(("processor", "environment.", "hashes."))]
    lines, command = [f"# {run.name}: {', '.join(found)}".replace("environment.", "")], facts.get("command")
    if isinstance(command, list):
        num_processes = facts.get("environment.world_size", 1)
        words = ["python"] if num_processes == 1 else ["torchrun", f"--nproc_per_node={num_processes}"]
        words += map(str, command)
        if not any(word.startswith("--seed") for word in words):
            words += ["--seed", str(run.options.get("seed"))]
        lines.append(shlex.join([f"OMP_NUM_THREADS={facts.get('environment.threads')}", *words]))
    return "\n".join(map(one_line, [*lines, ""]))


def write_report(folders: list[Path], out: Path | None = None) -> Path:
    """Write the page of one run or of several, and return its path; UserError as `LoggedRun`."""
    runs = [LoggedRun(folder) for folder in dict.fromkeys(folders)]
    parent = os.path.commonpath([Path(os.path.abspath(run.folder)).parent for run in runs])
    for run in runs:
        run.name = os.path.relpath(run.folder, parent)
    groups, is_one = group_seeds(runs), len(runs) == 1
    metric = best_metric(runs[0])
    settings = rank(groups, metric)
    figures = draw_curves(groups)
    if is_one:
        first, more = {"Result": describe_result(runs[0])}, describe_run(runs[0])
    else:
        head = ["setting", f"last {PANELS[metric].partition(',')[0]}, {SPREAD}", "runs", "of"]
        first = {"Settings": table(head, settings), "Runs": rank_runs(runs, metric)}
        more = {"Last results": compare_runs(groups)}
    curves = {"Curves": show_curves(figures) if figures else "<p>No records yet.</p>"}
    sections = first | curves | more | {"Reproduce": reproduce(runs, settings)}
    path = out or (runs[0].folder / "report.html" if is_one else Path("comparison.html"))
    tool.write_output(path, page(runs[0].name if is_one else f"{len(runs)} runs", sections), "--out")
    return path


def main() -> None:
    """Write the page about the runs that the command line names."""
    parser = tool.build_parser(PROG, "RUN [RUN ...] [--out FILE]", __doc__)
    text = "output folder of a run, such as runs/digits"
    parser.add_argument("runs", metavar="RUN", type=tool.as_path, nargs="+", help=text)
    text = "the page (default: report.html in the run's folder; of several runs, comparison.html in this folder)"
    parser.add_argument("--out", metavar="FILE", type=tool.output_file(".html", ".htm"), help=text)

    def work() -> None:
        options = parser.parse_args()
        print(f"wrote {write_report(options.runs, options.out)}")

    tool.run(PROG, work, "interrupted; nothing written")


if __name__ == "__main__":
    main()
