"""Loggers besides metrics.jsonl: real runs that are killed and resumed, and what their loggers hold then."""

import errno
import itertools
import json
import os
import sys
import threading
from importlib.util import find_spec

import pytest

from errors import UserError
from monitoring import loggers
from monitoring.events import curves
from monitoring.monitor import read_records
from settings import config
from tests.endings import MACHINE_FIELDS, exact
from tests.ranks import run_ranks, train_rank
from tests.runs import set_variables
from tests.started import SMALL

OWN = """
import json, os

class Lines:
    def __init__(self, folder, facts):
        self.file = open(folder / "lines.jsonl", "a")
        self.add([facts["id"], facts["args"]["epochs"], os.environ.get("RANK", "0")])
    def add(self, value):
        self.file.write(json.dumps(value) + "\\n")
        self.file.flush()
    def write(self, record):
        self.add(record)
        record.clear()  # is its own copy
    def close(self):
        self.add("closed")

class Falls(Lines):
    def __init__(self, folder, facts):
        self.file = open(folder / "falls.jsonl", "a")
    def write(self, record):
        if record["step"] == 2 and not record["kind"] == "epoch":
            raise ValueError("a bad\\nrecord")
        self.add(record)

def refuses(folder, facts):
    raise ConnectionError("no network")

def leaves(folder, facts):
    raise SystemExit(3)
"""


def train_in(folder, images, names, *argv, world_size=1, faults=(), prepare=()):
    words = [
        "--data-path", images, "--output-dir", folder / "run", *SMALL, "--batch-size", 4,
        "--epochs", 4, "--global-batch-size", 8, "--print-freq", 1, "--checkpoint-steps", 4,
        "--use-deterministic-algorithms", "--resume", "auto", *(["--logger", *names] if names else []), *argv,
    ]  # fmt: skip
    arguments = [str(word) for word in words]
    return run_ranks(train_rank, world_size, arguments, list(faults), prepare, log_folder=folder)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


KILL = "torch.optim.SGD.step"


@pytest.mark.dist
def test_an_own_logger_gets_each_record_once_over_kills_and_the_failures_of_others_end_no_run(image_folder, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    names = [f"{own}:{name}" for name in ("Lines", "refuses", "leaves", "Falls")]
    first = train_in(tmp_path, image_folder, names, world_size=2, faults=[(0, KILL, 7, "before")])
    assert first.codes[0] == -9
    # Without it, then with another content of its file and only one process.
    assert train_in(tmp_path, image_folder, [], world_size=2, faults=[(0, KILL, 4, "before")]).codes[0] == -9
    assert not list((tmp_path / "run").glob("*.tmp.*"))
    own.write_text(OWN + "\n# another content\n")
    last = train_in(tmp_path, image_folder, ["TensorBoard", *names]).check()

    records = read_records(tmp_path / "run")
    assert [each["step"] for each in records if each["kind"] == "train"] == list(range(1, 13))
    lines = lines_of(tmp_path / "run" / "lines.jsonl")
    starts = [line for line in lines if isinstance(line, list)]
    assert starts == 2 * [[starts[0][0], 4, "0"]]  # one run, on rank 0 alone
    assert lines[-1] == "closed"
    assert exact(line for line in lines if isinstance(line, dict)) == exact(records)
    falls = [line for line in lines_of(tmp_path / "run" / "falls.jsonl") if line != "closed"]
    assert exact(falls) == exact(records[:1])  # it falls at step 2 in both starts, and is off from there on
    for outcome, shown in [(first, "metrics.jsonl"), (last, "metrics.jsonl, tensorboard")]:
        assert outcome.output.count(f"records go to {shown}, {', '.join(names)}\n") == 1
        for off, why in [("refuses", "no network"), ("leaves", "SystemExit: 3"), ("Falls", "ValueError: a bad")]:
            assert outcome.output.count(f"warning: logger own.py:{off} is off until the next start: {why}; ") == 1
    assert "own.py" not in (tmp_path / "run" / "recipe.toml").read_text()

    assert "already holds a run" in train_in(tmp_path, image_folder, names, "--resume", "").output
    train_in(tmp_path, image_folder, names, "--resume", "", "--overwrite", "--epochs", 1, "--lr", 0.2).check()
    *_, (new, *_) = (line for line in lines_of(tmp_path / "run" / "lines.jsonl") if isinstance(line, list))
    assert new != starts[0][0]  # another run


def fill_the_disk(numbers):
    """Have the n-th writes to loggers.jsonl find the disk full."""
    write, calls = os.write, itertools.count(1)

    def full(descriptor, content):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("loggers.jsonl") and next(calls) in numbers:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    os.write = full


def test_a_disk_that_is_full_for_a_moment_turns_no_logger_off_and_repeats_no_record(image_folder, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    names, full = [f"{tmp_path / 'own.py'}:Lines"], (fill_the_disk, [3, 4])  # the first line is the run's id
    first = train_in(tmp_path, image_folder, names, "--stop-epoch", 2, prepare=full).check()
    assert "warning: loggers.jsonl is not written: No space left on device; training continues" in first.output
    for _ in range(2):  # it was not off, and gets the rest at the next start
        lines = lines_of(tmp_path / "run" / "lines.jsonl")
        assert exact(line for line in lines if isinstance(line, dict)) == exact(read_records(tmp_path / "run"))
        train_in(tmp_path, image_folder, names).check()


# W&B as far as a run needs it: a row that is written stays as it is.
WANDB = """
import json, types

Settings = dict

def init(id, dir, resume, **_):
    path = dir / "wandb" / id / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    file, written = open(path, "a", buffering=1), {json.loads(line)[0] for line in open(path)}

    def log(points, step, commit):
        step in written or file.write(json.dumps([step, points]) + "\\n")

    return types.SimpleNamespace(log=log, define_metric=lambda *_, **__: None, finish=file.close)
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    (tmp_path / "lib" / "wandb").mkdir(parents=True)
    (tmp_path / "lib" / "wandb" / "__init__.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def test_no_link_of_wandbs_name_in_the_folder_is_followed(image_folder, tmp_path, wandb):
    for name in ("elsewhere", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "wandb").symlink_to(tmp_path / "elsewhere")
    outcome = train_in(tmp_path, image_folder, ["wandb"], "--epochs", 1).check()
    assert f"the next start: {tmp_path / 'run' / 'wandb'} is a link, which may lead anywhere" in outcome.output
    assert not list((tmp_path / "elsewhere").iterdir())


def points_of_wandb(folder):
    paths, points = list(folder.glob("run/wandb/*/rows.jsonl")), {}
    rows = [row for path in paths for row in lines_of(path)]
    assert [number for number, _ in rows] == sorted({number for number, _ in rows})
    for _, values in rows:
        for name, value in values.items():
            points.setdefault(name, []).append((values["step"], value))
    del points["step"]
    return {path.parent.name for path in paths}, points


def points_of_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("touchstone").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert runs[0].data.params["print_freq"] == "1"
    points = {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for run in runs
        for name in run.data.metrics
    }
    return {run.info.run_id for run in runs}, points


@pytest.mark.parametrize(("name", "points_of"), [("wandb", points_of_wandb), ("mlflow", points_of_mlflow)])
def test_a_resumed_run_is_the_same_one_elsewhere_too(name, points_of, image_folder, tmp_path, wandb):
    if name == "mlflow":
        pytest.importorskip("mlflow")
    tracked = set_variables, {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    outcome = train_in(tmp_path, image_folder, [name], faults=[(0, KILL, 9, "before")], prepare=tracked)
    assert outcome.codes == [-9], outcome.output
    train_in(tmp_path, image_folder, [name], prepare=tracked).check()
    expected = {}
    for record in read_records(tmp_path / "run"):
        for tag, value in curves(record).items():
            expected.setdefault(tag, []).append((record["step"], value))
    ids, points = points_of(tmp_path)
    assert len(ids) == 1
    assert points.keys() == expected.keys()
    for tag, pairs in expected.items():
        assert [step for step, _ in points[tag]] == [step for step, _ in pairs]
        if tag.partition("/")[2] not in MACHINE_FIELDS:
            assert [value for _, value in points[tag]] == pytest.approx([value for _, value in pairs], rel=1e-12)


def test_a_logger_that_never_answers_makes_nothing_wait(monkeypatch, capsys):
    monkeypatch.setattr(loggers, "CLOSE_S", 0.1)
    feed = loggers.Feed("dead", lambda: threading.Event().wait(), list, None)
    feed.put({"kind": "train", "step": 1})
    feed.close()
    assert "logger dead has not ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    "names",
    [
        ["wandbb"],
        ["none", "tensorboard"],
        ["tensorboard", "tensorboard"],
        ["a/own.py:Lines", "b/own.py:Lines"],
        *([name] for name in ("wandb", "mlflow") if find_spec(name) is None),
    ],
)
def test_names_that_cannot_be_used_are_refused_before_anything_is_done(names):
    with pytest.raises(UserError, match="--logger") as caught:
        config.parse_args(["--synthetic", "8", "--logger", *names])
    assert caught.value.exit_code == 2
    if names in (["wandb"], ["mlflow"]):
        assert f"pip install {names[0]}" in str(caught.value)
