import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from PIL import Image

from errors import UserError
from scripts.report import (
    LoggedRun,
    compare_runs,
    describe_settings,
    draw_confusion,
    draw_curves,
    group_seeds,
    rank_runs,
    where_time_went,
    write_report,
)
from tests.ranks import REPOSITORY

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\"'"
COUNTS = {
    "kind": "val", "step": 20, "classes": ["cat", "dog"], "confusion": [[3, 1, 0], [0, 4, 0]], "best": None,
    "mistakes": [["dog/b.jpg", "dog", "cat", 0.75]],
}  # fmt: skip


class Cells(HTMLParser):
    """The cells of all tables by rows, and the tags outside of scripts."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.tags = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, text):
        if self.rows and self.rows[-1] and self.get_starttag_text()[1:3] in ("td", "th"):
            self.rows[-1][-1] += text


def write_run(folder, seed=0, lr=0.1, factor=1.0, fold=0, weights=""):
    folder.mkdir()
    values = [(step, 100 / step * factor) for step in (1, 10, 11, 20)]
    records = [{"kind": "train", "step": step, "loss": loss, "lr": lr} for step, loss in values]
    records += [{"kind": "epoch", "step": step, "loss": loss} for step, loss in [(10, 30.0), (20, 7.0)]]
    for step, kind in itertools.product((10, 20), ("val", "val_ema")):
        records += [{"kind": kind, "step": step, "loss": 2.0, "acc1": step * factor}]
    for record in records:
        record |= {"epoch": (record["step"] - 1) // 10, "hours": record["step"] / 8, "time": 1.0}
    records.sort(key=lambda record: record["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "recipe.toml").write_text(f'title = "t"\n[optimization]\nlr = {lr}\nseed = {seed}\n')
    if weights:
        with open(folder / "recipe.toml", "a") as file:
            file.write(f'minival = 0.2\nminival-fold = {fold}\n[model]\nweights = "{weights}"\n')
    return folder


def test_page_has_the_epochs_the_pictures_and_the_files(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("picture-mistakes-00000010.png", "picture-mistakes-00000020.png", "picture.png"):
        Image.new("RGB", (3, 3)).save(run / name)
    best = {**COUNTS, "step": 10, "best": "best.pth", "mistakes": [["cat/a<b.jpg", "cat", "dog", 0.875]]}
    (run / "picture-counts-00000010.json").write_text(json.dumps(best))
    (run / "picture-counts-00000020.json").write_text(json.dumps(COUNTS))
    (run / "status.json").write_text('{"state": "finished", "step": 20}')
    (run / "run.json").write_text('{"host": "h1", "environment": {"torch": "9.9"}, "args": {"lr": 1}}')
    path = write_report([run])
    assert path == run / "report.html"
    assert not re.search(r"https?:|url\(|<link", path.read_text())
    # It can be read on a telephone, and in the dark.
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in path.read_text()
    assert "prefers-color-scheme: dark" in path.read_text()
    page = Cells(path.read_text())
    head = next(row for row in page.rows if row[0] == "epoch")
    body = [row for row in page.rows if len(row) == len(head) and row != head]
    found = [dict(zip(head, row, strict=True)) for row in body]
    assert [(row["epoch"], row["step"], row["time"], row["val acc1"], row["train loss"]) for row in found] == [
        ("[0]", "10", "1h15m", "10", "30"), ("[1]", "20", "1h15m", "20", "7"),
    ]  # fmt: skip
    assert [row for row in page.rows if row][:2] == [
        ["Acc@1, validation, best", "20.000 %, after step 20 (2 epochs)"],
        ["Acc@1, validation, last", "20.000 %, after step 20"],
    ]  # fmt: skip
    for row in (["state", "finished"], ["environment.torch", "9.9"]):
        assert row in page.rows
    pictures = {attrs["alt"] for tag, attrs in page.tags if tag == "img" and "curves" not in attrs["alt"]}
    # Of best.pth, not the newest.
    assert pictures == {"picture-counts-00000010.json", "picture-mistakes-00000010.png", "picture.png"}
    place = page.rows.index(["file", "class", "predicted", "confidence"])
    assert page.rows[place + 1] == ["cat/a<b.jpg", "cat", "dog", "87.5%"]
    assert "validation, after step 10: best.pth" in path.read_text()
    loaded = [attrs[name] for _, attrs in page.tags for name in ("src", "href") if name in attrs]
    assert all(address.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,")) for address in loaded)
    assert not [tag for tag, _ in page.tags if tag == "script"]


def test_the_result_is_by_the_metric_that_chose_the_best(tmp_path):
    run = write_run(tmp_path / "run")
    records = (run / "metrics.jsonl").read_text().replace('"val"', '"minival"')
    for name, shown in (
        ("map", "mean average precision, minival, best"),
        ("brier", "brier, which chooses best.pth, minival, last"),
    ):
        (run / "metrics.jsonl").write_text(records.replace('"acc1"', f'"map": 3.0, "{name}"'))
        (run / "recipe.toml").write_text(f'title = "t"\n[optimization]\nbest-metric = "{name}"\n')
        rows = Cells(write_report([run]).read_text()).rows
        assert [row for row in rows if row and row[0].startswith(shown)], rows[:4]


def test_confusion_is_that_of_the_counts():
    (confusion,) = draw_confusion(["cat", "dog"], [[3, 1, 0], [0, 4, 0]], "title").axes
    assert confusion.images[0].get_array().tolist() == [[0.75, 0.25], [0.0, 1.0]]  # no column without a count
    (confusion,) = draw_confusion(["cat", "dog"], [[2, 1, 1], [0, 4, 0]], "title").axes
    assert confusion.images[0].get_array().tolist() == [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]
    assert [text.get_text() for text in confusion.get_xticklabels()] == ["cat", "dog", "other"]


def test_whatever_a_run_holds_is_escaped(tmp_path):
    run = write_run(tmp_path / HOSTILE.replace("/", "|"))
    (run / "recipe.toml").write_text(f"title = '''{HOSTILE}'''\n[data]\ndata-path = '''{HOSTILE}'''\n")
    (run / "run.json").write_text(json.dumps({"command": [HOSTILE], HOSTILE: 1}))
    (run / f"picture-{HOSTILE.replace('/', '|')}.png").write_bytes(b"no picture")
    (run / "picture-counts-00000020.json").write_text(json.dumps({**COUNTS, "classes": [HOSTILE, "$\\frac{"]}))
    other = write_run(tmp_path / "other")
    for path in (write_report([run]), write_report([run, other], tmp_path / "comparison.html")):
        tags = Cells(path.read_text()).tags
        assert not [attrs for _, attrs in tags if "onerror" in attrs]
        assert "script" not in [tag for tag, _ in tags]


def test_seeds_are_one_band_and_differing_options_are_named(tmp_path):
    factors = [1.0, 2.0, 4.0]
    runs = [write_run(tmp_path / f"s{i}", seed=i, factor=factor) for i, factor in enumerate(factors)]
    runs = [LoggedRun(run) for run in [*runs, write_run(tmp_path / "other", lr=0.2)]]
    groups = group_seeds(runs)
    figures = draw_curves(groups)
    losses, accuracies = (figures[name].axes[0] for name in ("loss", "acc1"))
    assert list(losses.lines[0].get_xdata()) == [0.1, 1, 1.1, 2]  # epochs of training
    assert [[run.folder.name for run in group] for group in groups.values()] == [["s0", "s1", "s2"], ["other"]]
    mean, deviation = statistics.fmean(factors) * 20, statistics.stdev(factors) * 20
    assert accuracies.lines[0].get_xydata()[1] == pytest.approx([2, mean])
    assert accuracies.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(mean + deviation)
    ranked = Cells(rank_runs(runs)).rows
    assert ranked[0] == ["run", "best Acc@1", "of", "epoch", "time", "lr", "seed"]
    assert [row[1:] for row in ranked[1:]] == [  # the best first
        ["80", "val", "2", "2h30m", "0.1", "2"], ["40", "val", "2", "2h30m", "0.1", "1"],
        ["20", "val", "2", "2h30m", "0.1", "0"], ["20", "val", "2", "2h30m", "0.2", "0"],
    ]  # fmt: skip
    page = Cells("".join([describe_settings(groups), *compare_runs(groups).values()]))
    assert page.rows[1][1:3] == ["3", f"{mean:.3f} \u00b1 {deviation:.3f}"]
    assert page.rows[2][2] == "20.000"  # one run has no deviation; the best setting comes first
    assert next(row[2:] for row in page.rows if row[1:2] == ["val acc1"]) == ["3", f"{mean:.5g}", f"{deviation:.2g}"]


def test_folds_are_one_band_whose_weights_are_of_their_own_folds(tmp_path):
    names = [f"tuned-{fold}" for fold in range(3)]
    folds = [{"fold": fold, "weights": f"runs/probe-{fold}/best.pth"} for fold in range(3)]
    runs = [LoggedRun(write_run(tmp_path / name, **options)) for name, options in zip(names, folds, strict=True)]
    others = ["IMAGENET1K_V1", "IMAGENET1K_V2", "runs/resnet50/best.pth", "runs/resnet18/best.pth", "runs/lr10/a.pth"]
    runs += [LoggedRun(write_run(tmp_path / f"of{n}x", weights=weights)) for n, weights in enumerate(others)]
    found = [[run.folder.name for run in group] for group in group_seeds(runs).values()]
    assert found == [names, *([f"of{n}x"] for n in range(len(others)))]


def test_the_shares_of_a_runs_time_are_told_with_the_process_that_the_others_wait_for(tmp_path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert where_time_went(LoggedRun(run)) == ""  # older runs do not say
    for record in records:  # 2.5 hours, of which half an hour of evaluations
        if record["kind"] == "epoch":
            record |= {"starting_s": [900.0], "waiting_s": [180.0, 900.0], "saving_s": [450.0]}
            record["hours"] = record["step"] / 8 - 0.25
        elif record["kind"] == "train":
            record["hours"] = record["step"] / 8 - 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    told = where_time_went(LoggedRun(run))
    assert "most for images: rank 1, 30m00s; least: rank 0, 6m00s" in told
    shares = {name.rpartition(" ")[0]: int(name.rpartition(" ")[2][:-1]) for name in told.partition(";")[0].split(", ")}
    assert shares == {"training steps": 42, "evaluating": 17, "starting": 17, "waiting for images": 17, "saving": 8}


def test_runs_are_ranked_on_the_set_that_chooses_the_best_by_one_metric(tmp_path):
    runs = [write_run(tmp_path / name, factor=factor) for name, factor in (("good", 2.5), ("bad", 1.0))]
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write('{"kind": "easy", "step": 20, "epoch": 1, "acc1": 99.0, "loss": 0.1, "time": 1}')
    (runs[1] / "recipe.toml").write_text('[optimization]\nbest-metric = "loss"\n')
    rows = Cells(rank_runs([LoggedRun(run) for run in runs])).rows[1:]
    assert [row[:3] for row in rows] == [[str(runs[0]), "50", "val"], [str(runs[1]), "20", "val"]]


def test_numbers_and_names_that_cannot_be_drawn_are_left_out_or_cut(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text('{"command": 3}')
    odd = {"kind": "k" * 100_000, "m" * 100_000: 1.0, "$\\frac{": 1.0, "step": 9, "epoch": 0, "time": 1.0}
    with open(run / "metrics.jsonl", "a") as file:
        for record in (odd, odd | {"kind": "train", "loss": 1.7e308}, odd | {"kind": "train", "loss": -1.7e308}):
            file.write(json.dumps(record) + "\n")
    assert write_report([run]).stat().st_size < 2e6


def test_damaged_lines_and_odd_files_are_passed_over(tmp_path):
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    lines += [b'{"kind": "val", "step": 99, "epoch": 1, "time": 1, "hours": [1]}']
    lines[1:1] = [b"\xff\x00", b"[]", b'{"kind": "val"}', b'{"kind":"train","step":5,"epoch":0,"loss":NaN,"time":1}']
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines) + b'\n{"kind": "tr')
    (run / "recipe.toml").write_bytes(b"\xff = [")
    os.mkfifo(run / "status.json")
    (tmp_path / "secret").write_text("==== secret")
    (run / "picture.png").symlink_to(tmp_path / "secret")
    assert set(LoggedRun(run).points("train", "loss")) == {1, 10, 11, 20}
    for counts in ("[]", "{", '{"classes": 3}', json.dumps({**COUNTS, "confusion": {}})):
        (run / "picture-counts-00000020.json").write_text(counts)
        assert 'alt="picture' not in write_report([run]).read_text()
    (run / "metrics.jsonl").write_bytes(b"")
    assert "No records yet" in write_report([run]).read_text()


def test_a_folder_without_a_run_is_one_line(tmp_path):
    # Of all tools this one alone is started as users do, in a Python of its own, and with closed streams.
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-m", "scripts.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=REPOSITORY)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "holds no metrics.jsonl" in done.stderr


def test_without_matplotlib_a_line_says_so(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"scripts\.report needs matplotlib, .*: pip install matplotlib"):
        write_report([run])
    assert not (run / "report.html").exists()
