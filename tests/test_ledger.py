"""bench/ledger.py and report.py: records without a trace of the machine and their tables, and the page of a run."""

import getpass
import itertools
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
from contextlib import nullcontext
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from PIL import Image

from bench import ledger
from errors import UserError
from files import read_json
from scripts import report
from tests import tiny
from tests.ranks import REPOSITORY
from tests.runs import run_forked
from tests.started import SMALL_ANYWHERE, run_train


@pytest.fixture
def root(tmp_path):
    (tmp_path / "repository" / "records").mkdir(parents=True)
    for page in ("README.md", "records/README.md"):
        (tmp_path / "repository" / page).write_text(f"before\n{ledger.BEGIN}old\n{ledger.END}after\n")
    return tmp_path / "repository"


def as_committed(out):
    content = read_json(out / "run.json")
    content["environment"]["revision"] = "a" * 40
    (out / "run.json").write_text(json.dumps(content))
    return out


@pytest.fixture
def finished(started, tmp_path):
    return as_committed(started.copy(tmp_path / "runs" / "a"))


def add(finished, root, seed, acc1, date=86_400):
    content = read_json(finished / "run.json")
    content["args"]["seed"], content["started"] = seed, date
    content["command"] += ["--recipe", "digits"]
    (finished / "run.json").write_text(json.dumps(content))
    *before, last = (finished / "metrics.jsonl").read_text().splitlines()
    text = "\n".join([*before, json.dumps(json.loads(last) | {"acc1": acc1}), ""])
    (finished / "metrics.jsonl").write_text(text)
    return ledger.add_record(finished, f"digits, {date // 86_400} days", root / "records")


def test_a_record_is_the_run_without_its_machine(finished, root):
    out = add(finished, root, 3, 50.0)
    assert out.name == "digits-1-days-seed3"
    record, run = read_json(out / "record.json"), read_json(finished / "run.json")
    assert (record["seed"], record["date"]) == (3, "1970-01-02")
    assert [record[name] for name in ("environment", "processor")] == [run["environment"], run["processor"]]
    assert (record["results"]["val"]["acc1"], record["results"]["val"]["n"]) == (50.0, 7)
    assert record["hours"] > 0
    text = "".join(path.read_text() for path in out.iterdir())
    assert str(finished.parent.parent) not in text
    assert "--data-path images" in (out / "log.txt").read_text()


def test_a_row_holds_the_mean_and_the_range_of_its_seeds_and_the_newest_is_first(finished, root):
    for seed, acc1, date in ((0, 50.0, 86_400), (1, 60.0, 86_400), (2, 70.0, 86_400), (0, 10.0, 2 * 86_400)):
        add(finished, root, seed, acc1, date)
    ledger.write_tables(root)
    text = (root / "README.md").read_text()
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| digits")]
    assert rows == [
        ["| digits, 2 days", "10.00 (n=7)"], ["| digits, 1 days", "60.00 (50.00 to 70.00, 3 seeds, n=7)"],
    ]  # fmt: skip
    assert text.startswith(f"before\n{ledger.BEGIN}| run")
    assert text.endswith(f"{ledger.END}after\n")
    links = re.findall(r"\]\((.*?)\)", (root / "records" / "README.md").read_text())
    assert [(root / "records" / link).is_file() for link in links] == 4 * [True]


@pytest.mark.parametrize(("values", "least"), [
    ((50.0, 60.0, 70.0), 60 - 6.964557 * 10 / 3**0.5), ((5.0, 7.0, 5.0, 7.0), 6 - 4.540703 * (4 / 3) ** 0.5 / 2),
])  # fmt: skip
def test_a_claim_to_send_is_a_folder_with_a_page_of_its_lever_and_its_bound(finished, root, values, least, capsys):
    """Quantiles of Student's t at 0.99, of two and three degrees of freedom, from a printed table."""
    sent = root / "sent"
    for seed, acc1 in enumerate(values):
        add(finished, root, seed, acc1)  # into the run's own files
        ledger.add_record(finished, "digits, sent", sent, "a lever")
        if seed < 2:
            with pytest.raises(UserError, match=r"digits, sent: .* a claim needs 3 seeds at least"):
                ledger.write_claim(sent)
    (shown,) = ledger.write_claim(sent).splitlines()
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    count = len(values)
    assert shown.startswith(f"digits, sent: mean {mean:.2f}, deviation {deviation:.2f}, {count} seeds: above ")
    assert float(re.search(r"above ([\d.]+) with p < 0.01$", shown)[1]) == pytest.approx(least, abs=0.006)
    page = (sent / "README.md").read_text()
    accuracies = f"{mean:.2f} ({min(values):.2f} to {max(values):.2f}, {count} seeds, n=7)"
    assert f"| digits, sent | {accuracies} | a lever | " in page
    assert page.endswith(f"\n{shown}\n")
    assert len([*sent.glob("digits-sent-seed*/record.json")]) == count


def test_runs_of_one_claim_differ_in_the_seed_alone(finished, root):
    add(finished, root, 0, 50.0)
    edit(finished, "recipe.toml", "lr = 0.05", "lr = 0.06")
    with pytest.raises(UserError, match="seed0 and digits-1-days-seed1 differ in more than the seed"):
        add(finished, root, 1, 60.0)
    assert [path.parent.name for path in (root / "records").glob("*/record.json")] == ["digits-1-days-seed0"]


def test_each_kind_of_processor_is_a_row_and_each_claim_a_folder(finished, root):
    add(finished, root, 0, 50.0)
    edit(finished, "run.json", '"cpu": "', '"cpu": "AVX1 ')
    for acc1 in (60.0, 70.0):  # the second replaces the first
        assert add(finished, root, 0, acc1).name.startswith("digits-1-days-seed0-")
    edit(finished, "metrics.jsonl", '"acc1": 70.0', '"map": 70.0')  # as of several labels
    ledger.add_record(finished, "digits: 1 days", root / "records")
    ledger.write_tables(root)
    lines = (root / "records" / "README.md").read_text().splitlines()
    rows = sorted([*line.split(" | ")[1:2], "AVX1" in line] for line in lines if line.startswith("| digits"))
    assert rows == [["50.00 (n=7)", False], ["70.00 (n=7)", True], ["mAP 70.00 (n=7)", True]]


@pytest.mark.parametrize("change", [
    lambda out: shutil.rmtree(out) or out.mkdir(), lambda out: (out / "status.json").write_text('{"state": "running"}'),
    lambda out: edit(out, "run.json", "a" * 40, "a" * 40 + "-dirty"),
    lambda out: (out / "metrics.jsonl").write_text(""),
    lambda out: (out / "log.txt").write_text("versions that changed: revision a in the checkpoint, b now\n"),
])  # fmt: skip
def test_what_is_no_finished_run_of_a_commit_is_no_record(finished, root, change):
    change(finished)
    with pytest.raises(UserError):
        ledger.add_record(finished, "digits", root / "records")
    assert not list((root / "records").glob("*/*"))


def write_log(path, command, *results):
    path.write_text("\n".join([f"$ {command}", "Epoch: [0] Total time: 0:00:10", *results]))
    return path


@pytest.fixture
def committed(monkeypatch):
    monkeypatch.setattr("checkpointing.guard.describe_revision", lambda folder: "b" * 40)


def test_logs_of_evaluations_and_of_other_scripts_are_rows_of_the_page_alone(root, tmp_path, committed):
    evaluation = write_log(
        tmp_path / "a.log", "python train.py --test-only --data-path /home/me/photos",
        "Test: Acc@1 1.000 Acc@5 2.000 loss 9.000 n=5", "Test: Acc@1 90.500 Acc@5 98.000 loss 0.756 n=400",
    )  # fmt: skip
    out = ledger.add_record(evaluation, "Lite", root / "records")
    record = read_json(out / "record.json")
    assert record["results"] == {"val": {"acc1": 90.5, "acc5": 98.0, "n": 400.0}}
    assert (record["command"][-1], record["hours"], out.name) == ("photos", None, "lite-seed0")
    for seed, acc1 in ((0, 50.0), (1, 52.0)):
        command = f"python -c 'torch.manual_seed({seed})' --lr 0.1 --output-dir /tmp/out{seed}"
        theirs = [f"Test:  Acc@1 {acc1} Acc@5 99.0", f"Training time 1:0{seed}:00"]
        ledger.add_record(write_log(tmp_path / f"{seed}.log", command, *theirs), "theirs", root / "records")
    ledger.write_tables(root)
    rows = [line.split(" | ")[:4] for line in (root / "records" / "README.md").read_text().splitlines()]
    assert ["| Lite", "90.50 (n=400)", "", ""] in rows
    assert ["| theirs", "51.00 (50.00 to 52.00, 2 seeds)", "", "1h00m"] in rows
    assert "Lite" not in (root / "README.md").read_text()
    other = write_log(tmp_path / "b.log", "python -c 'torch.manual_seed(2)' --lr 0.2", "Test:  Acc@1 9.0 Acc@5 9.0")
    with pytest.raises(UserError, match="differ in more than the seed"):
        ledger.add_record(other, "theirs", root / "records")


@pytest.mark.parametrize(("text", "words"), [
    ("", "expected `$ COMMAND`"), ("Test: Acc@1 1.0 Acc@5 2.0", "expected `$ COMMAND`"),
    ("$ a 'b\nTest: Acc@1 5.0", "No closing"), ("$ a\nTest: Acc@1 1.2.3", "1.2.3"),
    ("$ a\nTest: Acc@1 500", "0 to 100"), (f"$ a\nTest: Acc@1 {'9' * 400}", "inf"), ("claim |", "a table"),
    ("claim \n", "a table"), ("claim \x1b", "a table"), ("claim <img src=x>", "a table"),
    ("$ a\n" + "Test: Acc@1 1 " * 60_000, "a line"),  # which took minutes
])  # fmt: skip
def test_a_log_or_a_claim_that_no_row_can_show_leaves_no_record(root, tmp_path, committed, text, words):
    (tmp_path / "a.log").write_text("$ a\nTest: Acc@1 5.0" if text.startswith("claim") else text)
    with pytest.raises(UserError, match=re.escape(words)):
        ledger.add_record(tmp_path / "a.log", text, root / "records")
    assert not list((root / "records").glob("*/*"))


@pytest.mark.parametrize("change", [
    {}, {"claim": "a\n| b"}, {"command": None}, {"seed": "<b>"}, {"processor": "a|b"}, {"hours": "x"},
    {"results": {"val": {"acc1": float("nan")}}}, {"environment": {}},
])  # fmt: skip
def test_a_record_of_another_form_is_named_in_one_line(finished, root, change):
    path = add(finished, root, 0, 50.0) / "record.json"
    path.write_text(json.dumps(change and read_json(path) | change))
    with pytest.raises(UserError, match=r"digits-1-days-seed0/record\.json cannot be a row of the tables: "):
        ledger.write_tables(root)
    assert "old" in (root / "README.md").read_text()


def start_python(words, env, **options):
    """Stand for Popen of train.py or torchrun: fork it, but for threads, which a Python counts while it starts."""
    if env["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] != "1":
        return subprocess.Popen(words, env=env, **options)
    done = run_forked(words, env)
    options["stdout"].write(done.stdout.encode())
    return nullcontext(SimpleNamespace(poll=lambda: done.returncode, terminate=list))


@pytest.fixture(scope="module")
def made(image_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    command = ["--data-path", image_folder, "--output-dir", folder / "run", "--print-freq", 2, "--epochs", 2]
    run_train(folder, *SMALL_ANYWHERE, *command, "--batch-size", 8, "--seed", 5).check()
    as_committed(folder / "run")
    return ledger.add_record(folder / "run", "made", folder)


@pytest.fixture
def record(made, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "subprocess", SimpleNamespace(Popen=start_python, STDOUT=subprocess.STDOUT))
    return shutil.copytree(made, tmp_path / "records" / "made-seed5")


def edit(record, name, old, new):
    before, _, after = (record / name).read_text().partition(old)
    (record / name).write_text(f"{before}{new}{after}")


def first_loss(record):
    return repr(json.loads((record / "metrics.jsonl").read_text().splitlines()[0])["loss"])


CHANGES = {
    "the seed of the recipe": (lambda record: edit(record, "recipe.toml", "seed = 5", "seed = 6"), 1, "seed is 5"),
    "the rate": (lambda record: edit(record, "recipe.toml", "lr = 0.1", "lr = 0.2"), 1, "step 2: loss is"),
    "the photographs": (lambda record: None, 1, "other photographs than the record's"),
    "the threads": (lambda record: None, 0, "equal in 4 steps: every bit"),
    "another torch": (lambda record: edit(record, "record.json", '"torch": "', '"torch": "1'), 2, "has no tolerance"),
    "no environment": (lambda record: edit(record, "record.json", '"environment"', '"x"'), 2, "not as bench.ledger"),
    "no metrics": (lambda record: (record / "metrics.jsonl").unlink(), 2, "no record of a training run"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_is_run_again_and_compared_in_every_bit(record, image_folder, tmp_path, monkeypatch, capsys, change):
    do, code, words = CHANGES[change]
    do(record)
    data = image_folder
    if change == "the photographs":
        data = shutil.copytree(image_folder, tmp_path / "data")
        with open(min((data / "train").rglob("*.jpg")), "ab") as file:
            file.write(b"more")
    if change == "the threads":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the record's count instead
    assert ledger.verify(record, 3, {"data-path": str(data), "weights": "none.pth"}) == code
    assert words in capsys.readouterr().out


def test_elsewhere_a_records_losses_are_compared_within_its_measured_tolerance(record, image_folder, capsys):
    criterion = "tests/tiny.py:rise_by_threads"
    edit(record, "recipe.toml", "[optimization]", f'[optimization]\ncriterion = "{criterion}"')
    place = {"data-path": str(image_folder), "criterion": criterion}
    assert ledger.measure(record, 2, place) == 0
    tolerance, loss = read_json(record / "record.json")["tolerance"], first_loss(record)
    assert tolerance == pytest.approx(2 * 3 * tiny.RISE, rel=0.1)  # of 4 threads
    ways = [set(re.findall(r"'(\w+)': '(\w+)'", line)) for line in capsys.readouterr().out.splitlines()]
    assert ways == [set(ledger._AVX2.items()), *({("OMP_NUM_THREADS", count)} for count in "124")]
    edit(record, "record.json", '"cpu": "', '"cpu": "another ')
    assert ledger.verify(record, 3, place) == 2  # it was measured in two steps
    edit(record, "record.json", f'"tolerance": {tolerance}', '"tolerance": 0.01')
    for factor, code in ((1.009, 0), (1.02, 1)):
        edit(record, "metrics.jsonl", first_loss(record), repr(float(loss) * factor))
        assert ledger.verify(record, 2, place) == code
    assert "within rounding, 1.0e-02 of a loss; other: cpu" in capsys.readouterr().out
    edit(record, "record.json", '"seed": 5', '"seed": 6')
    edit(record, "record.json", '"tolerance": 0.01', '"tolerance": 9.0')
    edit(record, "recipe.toml", "seed = 5", "seed = 6")
    assert ledger.verify(record, 2, place) == 1
    assert "the first step's loss is" in capsys.readouterr().out
    content = read_json(record / "record.json")
    content["environment"]["cpu"] = "DEFAULT"  # which has no other instructions
    (record / "record.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="differs: other weights than the record's; the first step's loss is"):
        ledger.measure(record, 2, place)


def test_the_tables_are_those_of_the_records_and_no_record_names_a_machine(tmp_path):
    shutil.copytree(REPOSITORY / "records", tmp_path / "records")
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    ledger.write_tables(tmp_path)
    for page in ("README.md", "records/README.md"):
        assert (tmp_path / page).read_text() == (REPOSITORY / page).read_text(), "run python -m bench.ledger"
    for path in (REPOSITORY / "records").rglob("*.*"):
        text = path.read_text()
        assert ledger.without_paths(text) == text
        assert f" {socket.gethostname()}," not in text
        assert f"/{getpass.getuser()}/" not in text


@pytest.mark.dist
def test_a_record_of_several_processes_that_cannot_run_again_is_answered_with_the_cause(record, tmp_path, capsys):
    edit(record, "record.json", '"world_size": 1', '"world_size": 2')
    assert ledger.verify(record, 2, {"data-path": tmp_path / "nowhere"}) == 2
    (line,) = capsys.readouterr().out.splitlines()[1:]
    cause = f"train.py: error: --data-path {tmp_path / 'nowhere'} is not a folder"
    assert line.startswith(f"{record}: cannot be compared here: {cause}")


HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\"'"
COUNTS = {
    "kind": "val", "step": 20, "classes": ["cat", "dog"], "confusion": [[3, 1, 0], [0, 4, 0]], "best": None,
    "mistakes": [["dog/b.jpg", "dog", "cat", 0.75]],
}  # fmt: skip


class Cells(HTMLParser):
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
            self.rows[-1][-1] += text.replace("\xa0", " ")


def write_run(folder, seed=0, lr=0.1, factor=1.0, fold=0, weights=""):
    folder.mkdir()
    values = [(step, 100 / step * factor) for step in (1, 10, 11, 20)]
    records = [{"kind": "train", "step": step, "loss": loss, "lr": lr} for step, loss in values]
    records += [{"kind": "epoch", "step": step, "loss": loss} for step, loss in [(10, 30.0), (20, 7.0)]]
    for step, kind in itertools.product((10, 20), ("val", "val_ema")):
        records += [{"kind": kind, "step": step, "loss": 2.0, "acc1": step * factor, "n": 50}]
    for record in records:
        record |= {"epoch": (record["step"] - 1) // 10, "hours": record["step"] / 8, "time": 1.0}
    records.sort(key=lambda record: record["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "recipe.toml").write_text(f'title = "t"\n[optimization]\nlr = {lr}\nseed = {seed}\n')
    (folder / "status.json").write_text('{"state": "finished"}')
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
    path = report.write_report([run])
    assert path == run / "report.html"
    assert not re.search(r"https?:|url\(|<link", path.read_text())
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
        ["Acc@1, validation, last", "20.0 % (10 of 50; 95 %: 11 to 33), after step 20"],
        ["Acc@1, validation, best", "20.0 % (10 of 50; 95 %: 11 to 33), after step 20 (2 epochs), chosen on this set"],
    ]  # fmt: skip
    for row in (["state", "finished"], ["environment.torch", "9.9"]):
        assert row in page.rows
    pictures = {attrs["alt"] for tag, attrs in page.tags if tag == "img" and "curves" not in attrs["alt"]}
    assert pictures == {"picture-counts-00000010.json", "picture-mistakes-00000010.png", "picture.png"}
    place = page.rows.index(["file", "class", "predicted", "confidence"])
    assert page.rows[place + 1] == ["a<b.jpg", "cat", "dog", "87.5%"]
    assert "validation, after step 10: best.pth" in path.read_text()
    loaded = [attrs[name] for _, attrs in page.tags for name in ("src", "href") if name in attrs]
    assert all(address.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,")) for address in loaded)
    assert not [tag for tag, _ in page.tags if tag == "script"]


def test_the_result_is_by_the_metric_that_chose_the_best(tmp_path):
    run = write_run(tmp_path / "run")
    records = (run / "metrics.jsonl").read_text().replace('"val"', '"minival"')
    for name, shown in (
        ("map", "mean average precision, minival, best"),
        ("brier", "brier, minival, last"),
    ):
        (run / "metrics.jsonl").write_text(records.replace('"acc1"', f'"map": 3.0, "{name}"'))
        (run / "recipe.toml").write_text(f'title = "t"\n[optimization]\nbest-metric = "{name}"\n')
        rows = Cells(report.write_report([run]).read_text()).rows
        assert [row for row in rows if row and row[0].startswith(shown)], rows[:4]


def test_confusion_is_that_of_the_counts():
    (confusion,) = report.draw_confusion(["cat", "dog"], [[3, 1, 0], [0, 4, 0]], "title").axes
    assert confusion.images[0].get_array().tolist() == [[0.75, 0.25], [0.0, 1.0]]  # no column without a count
    (confusion,) = report.draw_confusion(["cat", "dog"], [[2, 1, 1], [0, 4, 0]], "title").axes
    assert confusion.images[0].get_array().tolist() == [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]
    assert [text.get_text() for text in confusion.get_xticklabels()] == ["cat", "dog", "other"]


def test_whatever_a_run_holds_is_escaped(tmp_path):
    run = write_run(tmp_path / HOSTILE.replace("/", "|"))
    (run / "recipe.toml").write_text(f"title = '''{HOSTILE}'''\n[data]\ndata-path = '''{HOSTILE}'''\n")
    (run / "run.json").write_text(json.dumps({"command": [HOSTILE], HOSTILE: 1}))
    (run / f"picture-{HOSTILE.replace('/', '|')}.png").write_bytes(b"no picture")
    (run / "picture-counts-00000020.json").write_text(json.dumps({**COUNTS, "classes": [HOSTILE, "$\\frac{"]}))
    other = write_run(tmp_path / "other")
    for path in (report.write_report([run]), report.write_report([run, other], tmp_path / "comparison.html")):
        tags = Cells(path.read_text()).tags
        assert not [attrs for _, attrs in tags if "onerror" in attrs]
        assert "script" not in [tag for tag, _ in tags]


def test_seeds_are_one_band_and_differing_options_are_named(tmp_path):
    factors = [1.0, 2.0, 4.0]
    runs = [write_run(tmp_path / f"s{i}", seed=i, factor=factor) for i, factor in enumerate(factors)]
    runs = [report.LoggedRun(run) for run in [*runs, write_run(tmp_path / "other", lr=0.2)]]
    groups = report.group_seeds(runs)
    figures = report.draw_curves(groups)
    losses, accuracies = (figures[name].axes[0] for name in ("loss", "acc1"))
    assert list(losses.lines[0].get_xdata()) == [0.1, 1, 1.1, 2]  # epochs of training
    assert [[run.folder.name for run in group] for group in groups.values()] == [["s0", "s1", "s2"], ["other"]]
    mean, deviation = statistics.fmean(factors) * 20, statistics.stdev(factors) * 20
    assert accuracies.lines[0].get_xydata()[1] == pytest.approx([2, mean])
    assert accuracies.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(mean + deviation)
    ranked = Cells(report.rank_runs(runs, "acc1")).rows
    title = "best Acc@1, chosen on this set"
    assert ranked[0] == ["run", "last Acc@1", "state", "of", title, "its epoch", "time", "lr", "seed"]
    assert [[row[0], row[1].partition(" (")[0], *row[2:]] for row in ranked[1:]] == [  # the best first
        ["s2", "80.0 %", "finished", "val_ema", "80", "2", "2h30m", "0.1", "2"],
        ["s1", "40.0 %", "finished", "val_ema", "40", "2", "2h30m", "0.1", "1"],
        ["s0", "20.0 %", "finished", "val_ema", "20", "2", "2h30m", "0.1", "0"],
        ["other", "20.0 %", "finished", "val_ema", "20", "2", "2h30m", "0.2", "0"],
    ]  # fmt: skip
    three = f"{mean:.5g} \u00b1 {deviation:.2g} (n=50)"
    one = ["20.0 % (10 of 50; 95 %: 11 to 33)", 1, "val_ema"]
    assert [row[1:] for row in report.rank(groups, "acc1")] == [[three, 3, "val_ema"], one]
    assert ["val acc1", three, "3"] in [row[1:] for row in Cells(report.compare_runs(groups)).rows]


def test_an_unfinished_run_is_marked_and_runs_are_ranked_by_their_last_evaluation(tmp_path):
    steady, fell = write_run(tmp_path / "steady"), write_run(tmp_path / "fell", lr=0.2)
    text = (fell / "metrics.jsonl").read_text().replace('"acc1": 10.0', '"acc1": 60.0')  # the best epoch is the first
    (fell / "metrics.jsonl").write_text(text.replace('"acc1": 20.0', '"acc1": 4.0'))
    (fell / "status.json").write_text('{"state": "preempted"}')
    with open(fell / "recipe.toml", "a") as file:
        file.write("epochs = 8\n")
    rows = Cells(report.write_report([fell, steady], tmp_path / "page.html").read_text()).rows
    assert [row[:2] for row in rows[:3]] == [
        ["setting", "last Acc@1, mean \u00b1 standard deviation"], ["steady", "20.0 % (10 of 50; 95 %: 11 to 33)"],
        ["fell [1 unfinished]", "4.0 % (2 of 50; 95 %: 1 to 13)"],
    ]  # fmt: skip
    assert [row[::2][:3] for row in rows[4:6]] == [
        ["steady", "finished", "20"], ["fell", "unfinished: preempted, 2 of 8 epochs", "60"],
    ]  # fmt: skip


def test_training_is_drawn_from_the_epochs_where_it_has_fewer_records_than_these(tmp_path):
    run = report.LoggedRun(write_run(tmp_path / "run"))
    assert list(report.draw_curves({"run": [run]})["loss"].axes[0].lines[0].get_ydata()) == [100, 10, 100 / 11, 5]
    run.records = [each for each in run.records if each["kind"] != "train" or each["step"] == 20]
    line = report.draw_curves({"run": [run]})["loss"].axes[0].lines[0]
    assert line.get_xydata().tolist() == [[1, 30], [2, 7]]


def test_the_block_to_paste_names_what_a_run_depends_on_and_a_seed_for_each_command(tmp_path):
    runs = [write_run(tmp_path / f"a_{seed}", seed, factor=1 + seed) for seed in range(2)]
    environment = {"torch": "2.9", "revision": "ab12", "threads": 2, "world_size": 2}
    for run, words in zip(runs, ([], ["--seed", "1"]), strict=True):
        about = {"command": ["train.py", "--lr", "a b", *words], "processor": "a\nCPU", "environment": environment}
        (run / "run.json").write_text(json.dumps(about | {"hashes": {"data": run.name}}))
    page = report.write_report(runs, tmp_path / "page.html").read_text()
    row, block = map(unescape, re.findall("<pre>(.*?)</pre>", page.partition("<h2>Reproduce</h2>")[2], re.DOTALL))
    facts = "processor a CPU, torch 2.9, revision ab12, threads 2, world_size 2, hashes.data"
    assert [*block.splitlines(), ""] == [
        line for seed in (0, 1) for line in (
            f"# a_{seed}: {facts} a_{seed}",
            f"OMP_NUM_THREADS=2 torchrun --nproc_per_node=2 train.py --lr 'a b' --seed {seed}", "",
        )
    ]  # fmt: skip
    (tmp_path / "b").mkdir()
    runs = [runs[0], write_run(tmp_path / "b" / "a_0")]
    rows = Cells(report.write_report(runs, tmp_path / "page.html").read_text()).rows
    assert {row[0] for row in rows} >= {"a_0", "b/a_0"}  # of one name, in two folders
    assert row == "a (2 runs) & 30 \u00b1 14 (n=50) & 2 & val\\_ema \\\\"


def test_folds_are_one_band_whose_weights_are_of_their_own_folds(tmp_path):
    names = [f"tuned-{fold}" for fold in range(3)]
    folds = [{"fold": fold, "weights": f"runs/probe-{fold}/best.pth"} for fold in range(3)]
    runs = [report.LoggedRun(write_run(tmp_path / name, **options)) for name, options in zip(names, folds, strict=True)]
    others = ["IMAGENET1K_V1", "IMAGENET1K_V2", "runs/resnet50/best.pth", "runs/resnet18/best.pth", "runs/lr10/a.pth"]
    runs += [report.LoggedRun(write_run(tmp_path / f"of{n}x", weights=weights)) for n, weights in enumerate(others)]
    found = [[run.folder.name for run in group] for group in report.group_seeds(runs).values()]
    assert found == [names, *([f"of{n}x"] for n in range(len(others)))]


def test_the_shares_of_a_runs_time_are_told_with_the_process_that_the_others_wait_for(tmp_path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert report.where_time_went(report.LoggedRun(run)) == ""  # older runs do not say
    for record in records:  # 2.5 hours, of which half an hour of evaluations
        if record["kind"] == "epoch":
            record |= {"starting_s": [900.0], "waiting_s": [180.0, 900.0], "saving_s": [450.0]}
            record["hours"] = record["step"] / 8 - 0.25
        elif record["kind"] == "train":
            record["hours"] = record["step"] / 8 - 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    told = report.where_time_went(report.LoggedRun(run))
    assert "most for images: rank 1, 30m00s; least: rank 0, 6m00s" in told
    shares = {name.rpartition(" ")[0]: int(name.rpartition(" ")[2][:-1]) for name in told.partition(";")[0].split(", ")}
    assert shares == {"training steps": 42, "evaluating": 17, "starting": 17, "waiting for images": 17, "saving": 8}


def test_runs_are_ranked_on_the_set_that_chooses_the_best_by_one_metric(tmp_path):
    runs = [write_run(tmp_path / name, factor=factor) for name, factor in (("good", 2.5), ("bad", 1.0))]
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write('{"kind": "easy", "step": 20, "epoch": 1, "acc1": 99.0, "loss": 0.1, "time": 1}')
    (runs[1] / "recipe.toml").write_text('[optimization]\nbest-metric = "loss"\n')
    rows = Cells(report.rank_runs([report.LoggedRun(run) for run in runs], "acc1")).rows[1:]
    found = [[row[0], row[1].partition(" (")[0], row[3]] for row in rows]
    assert found == [["good", "50.0 %", "val_ema"], ["bad", "20.0 %", "val_ema"]]


def test_damaged_lines_odd_files_and_what_cannot_be_drawn_are_passed_over_or_cut(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text('{"command": 3}')
    odd = {"kind": "k" * 100_000, "m" * 100_000: 1.0, "$\\frac{": 1.0, "step": 9, "epoch": 0, "time": 1.0}
    odd = [odd, odd | {"kind": "train", "loss": 1.7e308}, odd | {"kind": "train", "loss": -1.7e308}]
    lines = [*(run / "metrics.jsonl").read_bytes().splitlines(), *(json.dumps(each).encode() for each in odd)]
    lines += [b'{"kind": "val", "step": 99, "epoch": 1, "time": 1, "hours": [1]}']
    lines[1:1] = [b"\xff\x00", b"[]", b'{"kind": "val"}', b'{"kind":"train","step":5,"epoch":0,"loss":NaN,"time":1}']
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines) + b'\n{"kind": "tr')
    (run / "recipe.toml").write_bytes(b"\xff = [")
    (run / "status.json").unlink()
    os.mkfifo(run / "status.json")
    (tmp_path / "secret").write_text("==== secret")
    (run / "picture.png").symlink_to(tmp_path / "secret")
    assert set(report.LoggedRun(run).points("train", "loss")) == {1, 10, 11, 20}
    for counts in ("[]", '{"classes": 3}', json.dumps({**COUNTS, "confusion": {}})):
        (run / "picture-counts-00000020.json").write_text(counts)
        assert 'alt="picture' not in (page := report.write_report([run]).read_text())
        assert len(page) < 2e6
    (run / "metrics.jsonl").write_bytes(b"")
    assert "No records yet" in report.write_report([run]).read_text()


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
        report.write_report([run])
    assert not (run / "report.html").exists()
