"""Records of equal windows of steps, all that loggers and others make of them, and pictures, read back by readers."""

import errno
import functools
import io
import itertools
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.modules.module import register_module_forward_pre_hook

import data
import sampler
from checkpointing.folder import OWN_FILES, PICTURES
from errors import UserError
from files import own_temporary_folder
from loading.forms import open_source
from loading.on_device import Normalize
from monitoring import loggers, monitor, pictures
from monitoring.events import NOT_DRAWN
from monitoring.gauges import slow_rank
from monitoring.monitor import read_records
from presets import ClassificationPresetTrain
from scripts.report import write_report
from settings import config
from tests.endings import MACHINE_FIELDS, exact
from tests.exports import run_tool
from tests.faults import at_step
from tests.ranks import run_ranks, start_ranks, train_rank, wait_for
from tests.runs import set_variables
from tests.started import SMALL, refused, run_train
from transforms import RandomCutMix, pack_box

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


def points_of(records):
    points = {}
    for record in records:
        for name in record.keys() - NOT_DRAWN if record["kind"] != "epoch" else ():
            points.setdefault(f"{record['kind']}/{name}", []).append((record["step"], record[name]))
    return points


@pytest.mark.dist
def test_records_are_of_equal_windows_and_the_same_over_kills_and_on_any_processes(finished, image_folder, tmp_path):
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
    expected = points_of(ours)
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
def test_a_lost_metrics_file_is_opened_anew_or_the_end_says_its_lack(is_for_ever, finished, image_folder, tmp_path):
    outcome = train_in(tmp_path, image_folder, prepare=(lose_the_file, is_for_ever)).check()
    expected = read_records(finished)
    lacking = f"metrics.jsonl in {tmp_path / 'run'} lacks its last {len(expected) - 1} records" if is_for_ever else ""
    assert exact(read_records(tmp_path / "run")) == exact(expected[:1] if is_for_ever else expected)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["reason"] == lacking
    assert outcome.output.count("is not written: Stale file handle; ") == 1
    assert outcome.output.count(f"warning: {lacking}\n") == is_for_ever


def test_windows_are_means_of_steps_and_an_epochs_loss_is_one_number_everywhere(finished, image_folder, tmp_path):
    train_in(tmp_path, image_folder, "--print-freq", 1).check()
    each_step = [record for record in read_records(tmp_path / "run") if record["kind"] == "train"]
    assert [record["step"] for record in each_step] == list(range(1, 13))
    before = 0
    for record in read_records(finished):
        if record["kind"] == "train":
            steps = each_step[before : record["step"]]
            for name in ("loss", "acc1"):
                assert record[name] == pytest.approx(statistics.fmean(step[name] for step in steps), rel=1e-12)
            for name in ("lr", "grad_norm", "weight_norm", "epoch"):
                assert record[name] == steps[-1][name]
            before = record["step"]
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

    log_in(tmp_path, image_folder, names, "--resume", "", "--overwrite", "--epochs", 1, "--lr", 0.2).check()
    *_, (new, *_) = (line for line in lines_of(tmp_path / "run" / "lines.jsonl") if isinstance(line, list))
    assert new != starts[0][0]  # another run


def fill_the_disk(numbers):
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


@pytest.mark.parametrize(("name", "read_points"), [("wandb", points_of_wandb), ("mlflow", points_of_mlflow)])
def test_a_resumed_run_is_the_same_one_elsewhere_too(name, read_points, image_folder, tmp_path, wandb):
    if name == "mlflow":
        pytest.importorskip("mlflow")
    tracked = set_variables, {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    outcome = log_in(tmp_path, image_folder, [name], faults=[(0, KILL, 9, "before")], prepare=tracked)
    assert outcome.codes == [-9], outcome.output
    log_in(tmp_path, image_folder, [name], prepare=tracked).check()
    expected = points_of(read_records(tmp_path / "run"))
    ids, points = read_points(tmp_path)
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


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_the_numbers_are_those_of_scikit_learn():
    generator = numpy.random.default_rng(0)
    target = generator.integers(0, 29, 3000)  # the last of 30 classes has no images
    near = (target + generator.geometric(0.4, 3000) * generator.choice([-1, 1], 3000)) % 30
    predicted = numpy.where(generator.random(3000) < 0.6, target, near)
    found = pictures.Predictions(numpy.arange(3000), target, predicted, generator.integers(1, 301, 3000) / 300)
    confusion_matrix = pytest.importorskip("sklearn.metrics").confusion_matrix
    whole = confusion_matrix(found.target, found.predicted, labels=range(30))
    chosen = pictures.find_confused(found, 30)
    counts = pictures.count_confusion(found, chosen, 30)
    assert numpy.array_equal(counts[:, :-1], whole[numpy.ix_(chosen, chosen)])
    assert numpy.array_equal(counts.sum(axis=1), whole.sum(axis=1)[chosen])


def cell(sheet, place, side):
    left, top = pictures.corner_of(place, side)
    return numpy.asarray(sheet)[top : top + side, left : left + side]


@pytest.mark.parametrize(("size", "shown"), [(32, 160), (120, 120)])
def test_a_mixed_batch_is_shown_pixel_for_pixel_with_its_shares(size, shown):
    image = torch.randint(0, 256, (6, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names = ["cat", "dog", "a\nname\udc80"]
    batch = Normalize(MEAN, STD, torch.device("cpu"))(image)
    half = pack_box((0, 0, size // 4, size), size, size)
    mixed, target = RandomCutMix(3).mix(batch, torch.tensor([0, 1, 2, 0, 0, 1]), half)
    sheet = pictures.draw_batch("title", mixed, target, names, MEAN, STD)
    for place in range(6):
        expected = image[place].clone()
        expected[:, :, : size // 4] = image[place - 1][:, :, : size // 4]
        expected = expected.permute(1, 2, 0).numpy().repeat(shown // size, 0).repeat(shown // size, 1)
        assert numpy.array_equal(cell(sheet, place, shown), expected)
    captions = [
        ["75% cat", "25% dog"], ["75% dog", "25% cat"], ["75% a?name?", "25% dog"], ["75% cat", "25% a?name?"],
        ["cat"], ["75% dog", "25% cat"],
    ]  # fmt: skip
    squares = [Image.fromarray(cell(sheet, place, shown)) for place in range(6)]
    assert sheet.tobytes() == pictures.draw_grid("title", squares, captions).tobytes()
    captions[4] = ["99% cat"]
    assert sheet.tobytes() != pictures.draw_grid("title", squares, captions).tobytes()


def pictures_of(folder, images, *, step=3, bests=None):
    run = SimpleNamespace(is_resumed=False, is_evaluated=True, parts={}, step=step, steps_per_epoch=3)
    run.bests = {"best": bests}
    run.best_now = ["best"] if bests and bests["step"] == step else []
    index = open_source(images)
    return pictures.Pictures(folder, run, None, SimpleNamespace(index=index, classes=index.classes, transform=None))


def scores_of(numbers):  # of images, without a model
    return torch.stack([torch.randn(3, generator=torch.Generator().manual_seed(int(each))) for each in numbers])


def evaluate(drawing):
    index = drawing.val.index
    for batch in torch.arange(len(index)).split(3):
        labels = torch.tensor([index.label(number) for number in batch.tolist()])
        drawing.observe("val", scores_of(batch), labels, batch)
    drawing.draw()


def test_the_images_of_the_surest_mistakes_are_shown(image_folder, tmp_path):
    index = open_source(image_folder / "val")
    evaluate(pictures_of(tmp_path, image_folder / "val"))
    scores = scores_of(range(7)).softmax(1)
    wrong = [number for number in range(7) if int(scores[number].argmax()) != index.label(number)]
    wrong.sort(key=lambda number: -float(scores[number].max()))
    assert len(wrong) > 2
    counts = json.loads((tmp_path / "picture-counts-00000003.json").read_text())
    for number, (*words, share) in zip(wrong, counts["mistakes"], strict=True):
        names = [f"class{label}" for label in (index.label(number), int(scores[number].argmax()))]
        assert words == [index.path(number), *names]
        assert share == pytest.approx(float(scores[number].max()))
    sheet = Image.open(tmp_path / "picture-mistakes-00000003.png")
    for place, number in enumerate(wrong):
        with Image.open(io.BytesIO(index.read(number))) as image:
            square = image.crop((4, 0, 36, 32)).resize((160, 160), Image.Resampling.BICUBIC)  # of 40 x 32 pixels
        inner = slice(10, -10)  # at its edges the crop lacks its neighbours
        shown = cell(sheet, place, 160)[inner, inner].astype(int)
        assert abs(shown - numpy.asarray(square)[inner, inner]).max() <= 1


def test_pictures_of_a_long_run_are_few(image_folder, tmp_path):
    best = None
    for epoch in range(1, 13):
        if epoch in (1, 2, 4, 8):
            best = {"step": 3 * epoch}
        evaluate(pictures_of(tmp_path, image_folder / "val", step=3 * epoch, bests=best))
    names = [path.name for path in tmp_path.glob("picture-*")]
    assert {int(PICTURES.fullmatch(name)["step"]) for name in names} == {3 * 8, 3 * 12}
    assert all(OWN_FILES.fullmatch(name) for name in names)  # which --overwrite removes
    files = [json.loads((tmp_path / f"picture-counts-{step:08d}.json").read_text())["best"] for step in (24, 36)]
    assert files == ["best.pth", None]


def test_the_first_batch_is_what_the_model_sees(image_folder, finished):
    images = data.IndexedImageFolder(image_folder / "train", ClassificationPresetTrain(crop_size=32))
    order = sampler.TrainSampler(29, sampler.VirtualShards(8, 2)).epoch_order()[:8:2].tolist()
    loaded = [images.load(sampler.SampleKey(number, 0)) for number in order]
    squares = [Image.fromarray(image.permute(1, 2, 0).numpy()).resize((160, 160), 0) for image, *_ in loaded]
    captions = [[f"class{label}"] for _, label in loaded]
    expected = pictures.draw_grid("first batch of 4 as the model sees it", squares, captions)
    assert Image.open(finished / "picture-first-batch-00000000.png").tobytes() == expected.tobytes()


def test_tensorboards_file_shows_the_pictures_and_few_however_many_evaluations_there_are(image_folder, tmp_path):
    out = tmp_path / "out"
    argv = ["--data-path", image_folder, "--output-dir", out, *SMALL, "--batch-size", 8, "--lr", 0]
    run_train(tmp_path, *argv, "--epochs", 10).check()
    run_train(tmp_path, *argv, "--epochs", 16, "--resume", "auto", "--allow-change", "epochs").check()
    found = EventAccumulator(str(out), size_guidance={"images": 0, "scalars": 0}).Reload()
    assert [event.step for event in found.Scalars("val/loss")] == list(range(3, 51, 3))
    assert sorted(found.Tags()["images"]) == ["first-batch", "mistakes"]
    (first,), (*others, newest) = found.Images("first-batch"), found.Images("mistakes")
    assert first.encoded_image_string == (out / "picture-first-batch-00000000.png").read_bytes()
    assert newest.encoded_image_string == (out / "picture-mistakes-00000048.png").read_bytes()
    assert (newest.step, len(others) < 12) == (48, True), others
    with Image.open(io.BytesIO(newest.encoded_image_string)) as image:
        assert image.size == (newest.width, newest.height)
    assert len(list(out.glob("events.*"))) == 1


def renew_often():
    """Have the file renewed so often that a test need not wait, and the system asked for memory in every step."""
    from checkpointing import status

    status.RENEWAL_S = 0.2
    register_module_forward_pre_hook(lambda *_: bytearray(1 << 26) and None)


@pytest.fixture
def running(image_folder, tmp_path):
    argv = ["--data-path", image_folder, *SMALL, "--batch-size", 8, "--epochs", 100_000, "--print-freq", 1]
    argv = [str(word) for word in [*argv, "--output-dir", tmp_path / "runs" / "a"]]
    (process,), _ = start_ranks(train_rank, [{}], (argv, (), (renew_often,)), tmp_path)
    wait_for(lambda: read(tmp_path / "runs" / "a").get("step", 0) > 2)
    yield process
    process.kill()
    process.join()


def read(folder: Path) -> dict:
    path = folder / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def told(tmp_path, *argv, code):
    _, output = run_tool(tmp_path, "status", tmp_path / "runs", "--json", *argv, code=code)
    return {Path(each["run"]).name: each for each in json.loads(output)}


def test_a_living_run_is_told_from_a_stopped_a_killed_and_a_preempted_one(running, tmp_path):
    status = read(tmp_path / "runs" / "a")
    assert status["state"] == "running"
    assert (status["pid"], status["host"]) == (running.pid, os.uname().nodename)
    assert time.time() - 60 < status["progress"] <= status["heartbeat"] + 0.01 < time.time() + 1
    assert status["steps"] > 100_000
    assert status["left_s"] == pytest.approx((status["steps"] - status["step"]) * 8 / status["images_per_s"])
    wait_for(lambda: read(tmp_path / "runs" / "a")["step"] > status["step"])
    alive = told(tmp_path, code=0)["a"]
    assert alive["state"] == "running"
    assert alive["result"].split()[1] in ("acc1", "loss")
    os.kill(running.pid, signal.SIGSTOP)
    time.sleep(1.2)
    assert told(tmp_path, "--stale", 1, code=1)["a"]["reason"].endswith("is there")
    os.kill(running.pid, signal.SIGCONT)
    wait_for(lambda: time.time() - read(tmp_path / "runs" / "a")["heartbeat"] < 0.5)
    running.kill()
    running.join()
    time.sleep(1.2)
    stale = told(tmp_path, "--stale", 1, code=1)["a"]
    assert (stale["state"], stale["reason"].endswith("is gone")) == ("stale", True)


def test_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for pid in (gone.pid, os.getpid(), os.getppid()):
        (tmp_path / f"it-{pid}-a").mkdir()
    own = Path(own_temporary_folder("it")).name
    assert {path.name for path in tmp_path.iterdir()} == {own, f"it-{os.getpid()}-a", f"it-{os.getppid()}-a"}
    monkeypatch.setattr(Path, "glob", lambda *_: [tmp_path / f"it-{gone.pid}-b"])  # which another rank has removed
    own_temporary_folder("it")


def test_a_run_that_is_preempted_or_out_of_memory_says_so(running, tmp_path):
    resource.prlimit(running.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    running.join(60)
    time.sleep(1.2)
    assert told(tmp_path, "--stale", 1, code=1)["a"]["state"] in ("failed", "stale")
    for status, state, code in (
        ({"state": "running", "heartbeat": time.time(), "progress": time.time() - 700}, "stuck", 1),
        ({"state": "preempted", "requeue": True, "heartbeat": 1}, "preempted", 0),
        ({"state": "finished"}, "finished", 0), ({"state": "stopped"}, "stopped", 0),
        ({"state": "running"}, "stale", 1), ({"state": "running", "heartbeat": "x", "pid": 10**30}, "stale", 1),
        ([], "unknown", 1), ({"state": "failed", "reason": "x\x1b[2J"}, "failed", 1),
    ):  # fmt: skip
        (tmp_path / "runs" / "a" / "status.json").write_text(json.dumps(status))
        assert told(tmp_path, code=code)["a"]["state"] == state
    _, output = run_tool(tmp_path, "status", tmp_path / "runs", code=1)
    assert output.splitlines()[0].split()[:4] == ["run", "state", "heartbeat", "step"]
    assert "\x1b" not in output


def be_slow():
    """Have rank 1 take its time in the loss."""
    cross_entropy = torch.nn.functional.cross_entropy
    if os.environ["RANK"] == "1":
        torch.nn.functional.cross_entropy = lambda *args, **kwargs: time.sleep(0.4) or cross_entropy(*args, **kwargs)


@pytest.mark.dist
@pytest.mark.parametrize("argv", [[], ["--global-batch-size", 8, "--use-deterministic-algorithms"]])
def test_a_rank_that_computes_longer_than_the_others_is_named(image_folder, tmp_path, argv):
    folder = tmp_path / "runs" / "a"
    options = ["--data-path", image_folder, *SMALL, "--batch-size", 2, "--epochs", 1, "--output-dir", folder, *argv]
    run_ranks(train_rank, 2, [str(word) for word in options], (), (be_slow,), log_folder=tmp_path).check()
    (record,) = (each for each in read_records(folder) if each["kind"] == "epoch")
    fast, slow = record["computing_s"]  # in 6 or 7 forward passes on each rank, whose gradients the other one awaits
    assert slow > max(2.4, fast + 2)
    told_on = re.findall(r"rank \d computes .*", (folder / "log.txt").read_text())
    assert told_on == [f"rank 1 computes {slow / ((slow + fast) / 2) - 1:.0%} longer than the median: "
                       f"{slow:.1f} s for {(slow + fast) / 2:.1f} s"]  # fmt: skip
    status = read(folder)
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "heartbeat": time.time()}))
    found = told(tmp_path, code=0)["a"]
    assert (found["computing_s"], found["reason"]) == ([fast, slow], told_on[0])


@pytest.mark.parametrize(("seconds", "words"), [
    ([1.0], ""), ([0.1, 0.9], ""), ([100.0, 100.0, 109.0], ""), ([10.0, 10.0, 10.9], ""), ([0.0, 0.0, 2.0], "rank 2"),
    ([100.0, 111.0, 100.0, 90.0], "rank 1 computes 11% longer than the median: 111.0 s for 100.0 s"),
])  # fmt: skip
def test_one_rank_above_the_median_by_a_tenth_and_a_second_is_slow(seconds, words):
    assert slow_rank(seconds)[: len(words) or None] == words


def test_a_status_file_with_a_number_that_is_none_spoils_no_other_run(tmp_path):
    for name, number in {"a": "3", "b": "NaN", "c": "-Infinity", "d": "1e999", "e": "9" * 400}.items():
        path = tmp_path / "runs" / name / "status.json"
        path.parent.mkdir(parents=True)
        path.write_text(f'{{"state": "finished", "step": 3, "heartbeat": {number}}}')
    _, output = run_tool(tmp_path, "status", tmp_path / "runs", "--json", code=1)
    found = json.loads(output, parse_constant=pytest.fail)  # which JSON does not have
    assert [each["state"] for each in found] == ["finished", *["unknown"] * 4]
    assert {each["reason"] for each in found[1:]} == {"status.json has no usable number as heartbeat"}


def test_a_refused_start_says_so_where_no_run_is(image_folder, tmp_path):
    argv = ["--data-path", image_folder, *SMALL, "--batch-size", 8, "--epochs", 1]
    out = ["--output-dir", tmp_path / "runs" / "b"]
    for words in ("has no such class", "has no such thing"):
        (tmp_path / "mine.py").write_text(f"raise ValueError({words!r})")
        refused(run_train(tmp_path, *argv, *out, "--criterion", f"{tmp_path / 'mine.py'}:loss"), words)
        status = read(tmp_path / "runs" / "b")
        assert (status["state"], words in status["reason"]) == ("refused", True)
        assert told(tmp_path, code=1)["b"]["state"] == "refused"
    run_train(tmp_path, *argv, *out).check()
    before = read(tmp_path / "runs" / "b")
    assert before["state"] == "finished"
    refused(run_train(tmp_path, *argv, *out), "already holds a run")
    assert read(tmp_path / "runs" / "b") == before
    code = ["--criterion", f"{tmp_path / 'mine.py'}:loss", "--output-dir", tmp_path / "runs" / "c"]
    for quiet in (["--dry-run"], ["--test-only", "--weights", tmp_path / "runs" / "b" / "checkpoint.pth"]):
        refused(run_train(tmp_path, *argv, *code, *quiet), "mine.py")
        assert not (tmp_path / "runs" / "c").exists()
