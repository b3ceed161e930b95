"""Records of equal windows of steps, and all that is made of them, by loggers too, read back by its own readers."""

import errno
import functools
import io
import itertools
import json
import os
import re
import statistics
import sys
import threading
import time
from importlib.util import find_spec

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from errors import UserError
from monitoring import loggers, monitor
from monitoring.events import NOT_DRAWN, curves
from monitoring.monitor import read_records
from scripts.report import write_report
from settings import config
from tests.endings import MACHINE_FIELDS, exact
from tests.faults import at_step
from tests.ranks import run_ranks, train_rank
from tests.runs import set_variables
from tests.started import SMALL

# 29 images in steps of 8: 3 steps an epoch, 12 in all; windows of 5 steps reach over the ends of epochs.
ARGV = """
    --batch-size 4 --global-batch-size 8 --epochs 4 --print-freq 5 --lr 0.05 --layer-decay 0.5 --model-ema
    --use-deterministic-algorithms --checkpoint-steps 1
""".split()


def train_in(folder, images, *argv, world_size=1, faults=(), prepare=()):
    words = map(str, ["--data-path", images, "--output-dir", folder / "run", *SMALL, *ARGV, *argv])
    return run_ranks(train_rank, world_size, list(words), list(faults), prepare, log_folder=folder)


@pytest.fixture(scope="module")
def finished(image_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitored")
    train_in(folder, image_folder).check()
    return folder / "run"


@pytest.mark.dist
def test_records_are_of_equal_windows_and_the_same_over_kills_and_other_numbers_of_processes(
    finished, image_folder, tmp_path
):
    records = read_records(finished)
    assert [r["step"] for r in records if r["kind"] == "train"] == [5, 10, 12]  # the last window is the run's rest
    # Killed inside a window, and after one has ended before its record was due to be read, on 1 and on 2 processes.
    for world_size, step in [(1, 4), (2, 2), (1, 4)]:
        faults = [(0, "torch.optim.SGD.step", step, "before")]
        assert train_in(tmp_path, image_folder, "--resume", "auto", world_size=world_size, faults=faults).codes[0] == -9
    train_in(tmp_path, image_folder, "--resume", "auto", world_size=2).check()
    ours = read_records(tmp_path / "run")
    assert exact(ours) == exact(records)

    hours = [record["hours"] for record in ours]
    assert hours == sorted(hours)
    assert hours[0] > 0
    assert [record["images"] for record in ours] == [8 * record["step"] for record in ours]
    # TensorBoard shows each value of metrics.jsonl once, at its step.
    expected = {}
    for record in ours:
        for name in record.keys() - NOT_DRAWN if record["kind"] != "epoch" else ():
            expected.setdefault(f"{record['kind']}/{name}", []).append((record["step"], record[name]))
    points = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    assert set(points.Tags()["scalars"]) == expected.keys()
    for tag, pairs in expected.items():
        found = [(event.step, event.value) for event in points.Scalars(tag)]
        assert [step for step, _ in found] == sorted({step for step, _ in pairs})
        assert [value for _, value in found] == pytest.approx([value for _, value in pairs], rel=1e-6)  # float32 there
    (text,) = points.Tensors("options/text_summary")[0].tensor_proto.string_val
    assert {"| lr | 0.05 |", "| layer-decay | 0.5 |"} < set(text.decode().splitlines())
    assert len(list((tmp_path / "run").glob("events.*"))) == 1


def lose_the_file(is_for_ever):
    """Have each write but the first to metrics.jsonl fail, as on a network disk: to one opening of it, or for ever."""
    written = []

    class Stale(io.FileIO):
        def write(self, content):
            if (0 if is_for_ever else self) in written:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            written.append(0 if is_for_ever else self)
            return super().write(content)

    monitor.open = lambda descriptor, mode, buffering: Stale(descriptor, mode.replace("b", ""))


@pytest.mark.parametrize("is_for_ever", [False, True])
def test_a_metrics_file_that_is_lost_is_opened_anew_or_the_end_says_what_is_missing(
    is_for_ever, finished, image_folder, tmp_path
):
    outcome = train_in(tmp_path, image_folder, prepare=(lose_the_file, is_for_ever)).check()
    expected = read_records(finished)
    lacking = f"metrics.jsonl in {tmp_path / 'run'} lacks its last {len(expected) - 1} records" if is_for_ever else ""
    assert exact(read_records(tmp_path / "run")) == exact(expected[:1] if is_for_ever else expected)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["reason"] == lacking
    assert outcome.output.count("is not written: Stale file handle; ") == 1
    assert outcome.output.count(f"warning: {lacking}\n") == is_for_ever


@pytest.fixture(scope="module")
def each_step(image_folder, tmp_path_factory):
    """The oracle of means: the training records of the same run, one for each step."""
    folder = tmp_path_factory.mktemp("each-step")
    train_in(folder, image_folder, "--print-freq", 1).check()
    records = [record for record in read_records(folder / "run") if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, 13))
    return records


def test_a_window_is_the_mean_over_its_steps_wherever_epochs_end(finished, each_step):
    before = 0
    for record in read_records(finished):
        if record["kind"] == "train":
            steps = each_step[before : record["step"]]
            for name in ("loss", "acc1"):
                assert record[name] == pytest.approx(statistics.fmean(step[name] for step in steps), rel=1e-12)
            for name in ("lr", "grad_norm", "weight_norm", "epoch"):
                assert record[name] == steps[-1][name]
            before = record["step"]


def test_an_epochs_training_loss_is_one_number_everywhere(finished, each_step, tmp_path):
    losses = [statistics.fmean(r["loss"] for r in each_step if r["epoch"] == epoch) for epoch in range(4)]
    recorded = [r for r in read_records(finished) if r["kind"] == "epoch"]
    assert [(r["epoch"], r["step"]) for r in recorded] == [(0, 3), (1, 6), (2, 9), (3, 12)]
    assert [r["loss"] for r in recorded] == pytest.approx(losses, rel=1e-12)
    page = write_report([finished], tmp_path / "report.html").read_text()
    for epoch, loss in enumerate(losses):
        assert re.search(rf"<td>\[{epoch}\]<td>{3 * epoch + 3}<td>[^<]+<td>[^<]+<td>{loss:.5g}<td>", page)


def test_rates_are_of_a_records_own_steps_and_lines_of_all_images_of_an_epoch(image_folder, tmp_path):
    # A slow sixth step is the first of the second record; before that one is begun, a line of the fourth step is shown.
    slow = at_step, functools.partial(time.sleep, 1.5), 6
    train_in(tmp_path, image_folder, prepare=slow).check()
    records = read_records(tmp_path / "run")
    _, second, _ = (5 * 8 / record["images_per_s"] for record in records if record["kind"] == "train")
    assert second >= 1.5  # the slow step lies in it
    argv, faults = ["--metrics", "balanced_acc"], [(0, "torch.optim.SGD.step", 11, "before")]
    output = train_in(tmp_path, image_folder, *argv, "--overwrite", faults=faults).output
    output += train_in(tmp_path, image_folder, *argv, "--resume", "auto").check().output
    records = read_records(tmp_path / "run")
    means = [(str(r["epoch"]), f"{r['balanced_acc']:.4f}") for r in records if r["kind"] == "epoch"]
    assert re.findall(r"Epoch: \[(\d)\]  \[2/3\].* balanced_acc: \S+ \((\S+)\)", output) == means


def test_norms_and_rates_are_those_of_the_checkpoint(finished):
    record = [record for record in read_records(finished) if record["kind"] == "train"][-1]
    state = torch.load(finished / "checkpoint.pth", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    names = dict(zip([group["name"] for group in groups], [group["lr"] for group in groups], strict=True))
    assert len(set(names.values())) == len(names) == 3
    assert {name[3:]: value for name, value in record.items() if name.startswith("lr/")} == names
    trained = range(sum(len(group["params"]) for group in groups))
    weights = [v for name, v in state["model"].items() if "running" not in name and "num_batches" not in name]
    assert len(weights) == len(trained)
    norm = sum(weight.double().square().sum() for weight in weights).sqrt().item()
    assert record["weight_norm"] == pytest.approx(norm, rel=1e-6)


def test_the_loss_scale_is_recorded_under_float16(image_folder, tmp_path):
    train_in(tmp_path, image_folder, "--amp", "--epochs", 2, "--print-freq", 2).check()
    state = torch.load(tmp_path / "run" / "checkpoint.pth", weights_only=True)
    scales = [record["loss_scale"] for record in read_records(tmp_path / "run") if record["kind"] == "train"]
    assert len(scales) == 3
    assert scales[-1] == state["scaler"]["scale"]


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


def log_in(folder, images, names, *argv, **how):
    words = [*"--print-freq 1 --checkpoint-steps 4 --no-model-ema --resume auto".split(), *argv]
    return train_in(folder, images, *words, *(["--logger", *names] if names else []), **how)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


KILL = "torch.optim.SGD.step"


@pytest.mark.dist
def test_an_own_logger_gets_each_record_once_over_kills_and_the_failures_of_others_end_no_run(image_folder, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    names = [f"{own}:{name}" for name in ("Lines", "refuses", "leaves", "Falls")]
    first = log_in(tmp_path, image_folder, names, world_size=2, faults=[(0, KILL, 7, "before")])
    assert first.codes[0] == -9
    # Without it, then with another content of its file and only one process.
    assert log_in(tmp_path, image_folder, [], world_size=2, faults=[(0, KILL, 4, "before")]).codes[0] == -9
    assert not list((tmp_path / "run").glob("*.tmp.*"))
    own.write_text(OWN + "\n# another content\n")
    last = log_in(tmp_path, image_folder, ["TensorBoard", *names]).check()

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

    assert "already holds a run" in log_in(tmp_path, image_folder, names, "--resume", "").output
    log_in(tmp_path, image_folder, names, "--resume", "", "--overwrite", "--epochs", 1, "--lr", 0.2).check()
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
    first = log_in(tmp_path, image_folder, names, "--stop-epoch", 2, prepare=full).check()
    assert "warning: loggers.jsonl is not written: No space left on device; training continues" in first.output
    for _ in range(2):  # it was not off, and gets the rest at the next start
        lines = lines_of(tmp_path / "run" / "lines.jsonl")
        assert exact(line for line in lines if isinstance(line, dict)) == exact(read_records(tmp_path / "run"))
        log_in(tmp_path, image_folder, names).check()


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
    outcome = log_in(tmp_path, image_folder, ["wandb"], "--epochs", 1).check()
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
    outcome = log_in(tmp_path, image_folder, [name], faults=[(0, KILL, 9, "before")], prepare=tracked)
    assert outcome.codes == [-9], outcome.output
    log_in(tmp_path, image_folder, [name], prepare=tracked).check()
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


@pytest.mark.parametrize("names", [
    ["wandbb"], ["none", "tensorboard"], ["tensorboard", "tensorboard"], ["a/own.py:Lines", "b/own.py:Lines"],
    *([name] for name in ("wandb", "mlflow") if find_spec(name) is None),
])  # fmt: skip
def test_names_that_cannot_be_used_are_refused_before_anything_is_done(names):
    with pytest.raises(UserError, match="--logger") as caught:
        config.parse_args(["--synthetic", "8", "--logger", *names])
    assert caught.value.exit_code == 2
    if names in (["wandb"], ["mlflow"]):
        assert f"pip install {names[0]}" in str(caught.value)
