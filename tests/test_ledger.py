"""scripts/ledger.py: records of runs without a trace of the machine, and the tables that are made from them."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from torchvision.datasets.folder import is_image_file

from errors import UserError
from files import read_json
from scripts import ledger
from tests import tiny
from tests.ranks import REPOSITORY
from tests.runs import run_forked
from tests.started import SMALL_ANYWHERE, run_train


@pytest.fixture
def root(tmp_path):
    (tmp_path / "repository" / "records").mkdir(parents=True)
    (tmp_path / "repository" / "README.md").write_text(f"before\n{ledger.BEGIN}old\n{ledger.END}after\n")
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
    assert rows == [["| digits, 2 days", "10.00"], ["| digits, 1 days", "60.00 (50.00 to 70.00, 3 seeds)"]]
    assert text.startswith(f"before\n{ledger.BEGIN}| run")
    assert text.endswith(f"{ledger.END}after\n")
    links = re.findall(r"\]\((.*?)\)", (root / "records" / "README.md").read_text())
    assert [(root / "records" / link).is_file() for link in links] == 4 * [True]


def test_runs_of_one_claim_differ_in_the_seed_alone(finished, root):
    add(finished, root, 0, 50.0)
    edit(finished, "recipe.toml", "lr = 0.05", "lr = 0.06")
    with pytest.raises(UserError, match="seed0 and digits-1-days-seed1 differ in more than the seed"):
        add(finished, root, 1, 60.0)
    assert [path.name for path in (root / "records").iterdir()] == ["digits-1-days-seed0"]


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
    assert rows == [["50.00", False], ["70.00", True], ["mAP 70.00", True]]


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
    assert not list((root / "records").iterdir())


def write_log(path, command, *results):
    path.write_text("\n".join([f"$ {command}", "Epoch: [0] Total time: 0:00:10", *results]))
    return path


@pytest.fixture
def committed(monkeypatch):
    """As if this checkout had no changes."""
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
    rows = [line.split(" | ")[:3] for line in (root / "records" / "README.md").read_text().splitlines()]
    assert ["| Lite", "90.50", ""] in rows
    assert ["| theirs", "51.00 (50.00 to 52.00, 2 seeds)", "1h00m"] in rows
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
    assert not list((root / "records").iterdir())


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
    """Stand for Popen of train.py or torchrun: fork it, but for what a Python reads while it starts."""
    is_as_here = all(env.get(name) == os.environ.get(name) for name in ledger._AVX2)
    if not is_as_here or env["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] != "1":
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
    """A copy of it; what runs it again is forked where that makes no difference."""
    monkeypatch.setattr(ledger, "subprocess", SimpleNamespace(Popen=start_python, STDOUT=subprocess.STDOUT))
    return shutil.copytree(made, tmp_path / "records" / "made-seed5")


def edit(record, name, old, new):
    """Replace text in a file of a record, where it comes first."""
    before, _, after = (record / name).read_text().partition(old)
    (record / name).write_text(f"{before}{new}{after}")


def first_loss(record):
    return repr(json.loads((record / "metrics.jsonl").read_text().splitlines()[0])["loss"])


CHANGES = {
    "the seed of the recipe": (lambda record: edit(record, "recipe.toml", "seed = 5", "seed = 6"), 1, "seed is 5"),
    "the rate": (lambda record: edit(record, "recipe.toml", "lr = 0.1", "lr = 0.2"), 1, "step 2: loss is"),
    "a loss": (lambda record: edit(record, "metrics.jsonl", first_loss(record), "0.5"), 1, "step 2: loss is 0.5"),
    "the photographs": (lambda record: None, 1, "other photographs than the record's"),
    "the threads": (lambda record: None, 0, "equal in 4 steps: every bit"),
    "another torch": (lambda record: edit(record, "record.json", '"torch": "', '"torch": "1'), 2, "has no tolerance"),
    "no environment": (lambda record: edit(record, "record.json", '"environment"', '"x"'), 2, "not as scripts.ledger"),
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
    edit(record, "record.json", '"cpu": "', '"cpu": "another ')
    assert ledger.verify(record, 2, place) == 0
    assert ledger.verify(record, 3, place) == 2  # it was measured in two steps
    edit(record, "record.json", f'"tolerance": {tolerance}', '"tolerance": 0.01')
    for factor, code in ((1.009, 0), (1.02, 1)):
        edit(record, "metrics.jsonl", first_loss(record), repr(float(loss) * factor))
        assert ledger.verify(record, 2, place) == code
    assert "within rounding, 1.0e-02 of a loss; other: cpu" in capsys.readouterr().out
    # Another seed, in all its files: however wide the tolerance is, the first step is another.
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
        assert (tmp_path / page).read_text() == (REPOSITORY / page).read_text(), "run python -m scripts.ledger"
    for path in (REPOSITORY / "records").rglob("*.*"):
        text = path.read_text()
        assert ledger.without_paths(text) == text
        assert f" {socket.gethostname()}," not in text
        assert f"/{getpass.getuser()}/" not in text


def test_the_repository_is_small_and_holds_neither_photographs_nor_weights():
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    paths = [REPOSITORY / name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()]
    assert sum(path.stat().st_size for path in paths) < 5e6
    assert {path.parent for path in paths if is_image_file(path.name)} <= {REPOSITORY / "docs"}
    begins = {path.read_bytes()[:4] for path in paths if path.suffix not in {".py", ".md"}}
    # torch.save, JPEG, gzip
    assert not begins & {b"PK\3\4", b"\xff\xd8\xff\xe0", b"\xff\xd8\xff\xe1", b"\x1f\x8b\x08\x00"}


@pytest.mark.dist
def test_a_record_of_several_processes_that_cannot_run_again_is_answered_with_the_cause(record, tmp_path, capsys):
    edit(record, "record.json", '"world_size": 1', '"world_size": 2')
    assert ledger.verify(record, 2, {"data-path": tmp_path / "nowhere"}) == 2
    (line,) = capsys.readouterr().out.splitlines()[1:]
    cause = f"train.py: error: --data-path {tmp_path / 'nowhere'} is not a folder"
    assert line.startswith(f"{record}: cannot be compared here: {cause}")
