"""Records of equal windows of steps, and all that is made of them, read back by its own readers."""

import errno
import functools
import io
import json
import os
import re
import statistics
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monitoring import monitor
from monitoring.events import NOT_DRAWN
from monitoring.monitor import read_records
from scripts.report import write_report
from tests.endings import exact
from tests.faults import at_step
from tests.ranks import run_ranks, train_rank
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
