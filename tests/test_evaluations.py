"""When a run is evaluated, on which images, and when it ends because nothing gets better."""

import json
import shutil

import pytest

from loading.forms import open_source
from loading.source import first_of_each_class
from tests.endings import differing, differing_results, read_metrics
from tests.runs import FLAG, Runs, assert_same
from tests.started import SMALL, refused, run_train


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("runs"))
    runs.run("undisturbed", 4, *HELD).check()  # for three batches of the held-out images
    return runs


# 23 images are left, in two steps an epoch; epochs 1 and 3 and, as the last one, 4 are evaluated.
HELD = [FLAG, "--minival", 0.2, "--eval-every", 2, "--epochs", 5, "--print-freq", 4]


def test_every_second_epoch_and_the_last_one_are_evaluated(runs):
    kinds = {}
    for record in runs.metrics("undisturbed"):
        kinds.setdefault(record["kind"], []).append((record["epoch"], record["step"]))
    assert kinds.keys() == {"train", "minival", "minival_ema"}
    assert kinds["minival"] == kinds["minival_ema"] == [(1, 4), (3, 8), (4, 10)]
    final = runs.final("undisturbed")
    assert final["/best/metric"] == "minival/acc1"
    assert final["/best/step"] in (4, 8, 10)
    assert final["/data/val/num_images"] == 6
    assert (runs.folder / "undisturbed" / "best_ema.pth").is_file()


def test_a_run_that_stops_after_an_epoch_goes_on_as_if_it_had_not(runs):
    again = ["--resume", "auto"]
    for extra, status, step in [
        (["--stop-epoch", 3], "stopped", 6), ([*again, "--stop-epoch", 3], "stopped", 6), (again, "finished", 10),
        ([*again, "--stop-epoch", 3], "finished", 10),
    ]:  # fmt: skip
        output = runs.run("stopped", 2 - len(extra) // 4, *HELD, *extra).check().output
        found = runs.status("stopped")
        assert (found["state"], found["step"], found["requeue"]) == (status, step, False)
        assert (f"--stop-epoch {extra[-1]} of --epochs 5: " in output) is (status == "stopped")
    assert_same(runs, "stopped")
    # Drawn by 2 and by 4 processes.
    folders = [(runs.folder / name).glob("picture-*") for name in ("stopped", "undisturbed")]
    pictures = [{path.name: path.read_bytes() for path in paths} for paths in folders]
    assert pictures[0] == pictures[1]
    assert any("mistakes" in name for name in pictures[0])


def test_more_sets_are_evaluated_by_their_names_and_choose_nothing(runs, image_folder):
    twice = image_folder / "val"
    more = ["--eval-data", f"held.out={twice}", f"v2={image_folder / 'train'}", "--epochs", 1, "--lr-warmup-epochs", 0]
    output = runs.run("more", 2, FLAG, *more).check().output
    records = {record.pop("kind"): record for record in runs.metrics("more")}
    assert (records["held.out"], records["held.out_ema"]) == (records["val"], records["val_ema"])
    assert (records["val"]["n"], records["v2"]["n"]) == (7, 29)
    assert f"Test: held.out Acc@1 {records['val']['acc1']:.3f} " in output
    runs.run("without", 1, FLAG, *more[3:]).check()
    final = {name: value for name, value in runs.final("more").items() if not name.startswith("/eval_data/")}
    assert differing(final, runs.final("without")) == []
    argv = ["--test-only", "--resume", runs.folder / "more" / "checkpoint.pth", "--device", "cpu", "--workers", 0]
    alone = run_train(runs.folder, "--data-path", image_folder, *argv, "--batch-size", 2, "--eval-data", more[2])
    assert f"Test: v2 Acc@1 {records['v2']['acc1']:.3f} " in alone.check().output


def test_more_sets_must_be_there_and_have_the_same_classes(image_folder, tmp_path):
    few = shutil.copytree(image_folder / "val", tmp_path / "few")
    shutil.rmtree(few / "class1")
    argv = ["--data-path", image_folder, *SMALL, "--output-dir", tmp_path / "out", "--eval-data"]
    refused(run_train(tmp_path, *argv, f"few={few}"), "has 2 classes", "has 3", "(class1)")
    refused(run_train(tmp_path, *argv, f"few={few}er"), "--eval-data few=", "fewer holds no images")


def test_when_to_evaluate_may_change_in_a_resumed_run(started, tmp_path):
    outcome = started.go_on(tmp_path, started.copy(tmp_path / "out"), "--resume=auto", "--eval-every=0", "--epochs=4")
    assert "eval-every 1 in the checkpoint, 0 now" in outcome.check().output
    assert [record["step"] for record in evaluated(tmp_path)] == [3, 6, 12]


def test_a_minival_and_the_validation_set_are_both_evaluated_afterwards(runs, image_folder, tmp_path):
    best = ["--test-only", "--resume", runs.folder / "undisturbed" / "best.pth", "--device", "cpu", "--workers", 0]
    best += ["--data-path", image_folder, "--batch-size", 4]
    held = run_train(tmp_path, *best, "--minival", 0.2).check().output
    step = runs.final("undisturbed")["/best/step"]
    record = next(r for r in runs.metrics("undisturbed") if (r["kind"], r["step"]) == ("minival", step))
    assert f"Test: minival Acc@1 {record['acc1']:.3f} " in held
    on_val = run_train(tmp_path, *best).check().output
    assert " n=7" in on_val
    assert "more or fewer images" not in on_val  # it is another set, and none that has changed


# The mean size of the scores grows as a model trains, so the first evaluation stays the best.
GROWS = """
import metrics

class Size(metrics.Metric):
    curves = {"size": metrics.Curve(title="mean size of the scores", is_lower_better=True)}
    num_sums = 1

    def batch_sums(self, output, target, index):
        return [output.abs().mean(1).sum()]

    def compute(self, sums, count):
        return {"size": sums[0] / count}

size = lambda num_classes: Size()
"""


@pytest.fixture(scope="module")
def early(started, tmp_path_factory):
    """The folder of a run that stopped early."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "mine.py").write_text(GROWS)
    run_early(started, folder, folder).check()
    return folder


def run_early(started, early, folder, *argv, faults=()):
    options = ["--epochs", 9, "--patience", 2, "--metrics", f"{early / 'mine.py'}:size", "--best-metric", "size"]
    return run_train(folder, *started.argv, "--output-dir", folder / "out", *options, *argv, faults=faults)


def evaluated(folder):
    return [record for record in read_metrics(folder / "out" / "metrics.jsonl") if record["kind"] == "val"]


def test_a_run_ends_after_evaluations_without_a_new_best(early):
    records = evaluated(early)
    assert len(records) == 3
    assert records[0]["size"] < min(record["size"] for record in records[1:])
    status = json.loads((early / "out" / "status.json").read_text())
    first, last = records[0]["step"], records[-1]["step"]
    assert (status["state"], status["step"], status["requeue"]) == ("finished", last, False)
    expected = f"stopped early after step {last}: no new best size in 2 evaluations since step {first} (--patience 2)"
    assert status["reason"] == expected


@pytest.mark.parametrize("fault", [
    ("train.evaluate_all", 3, "before"), ("checkpointing.status.StatusFile.finish", 1, "before"),
])  # fmt: skip
def test_evaluations_are_counted_over_restarts(started, early, tmp_path, fault):
    assert run_early(started, early, tmp_path, faults=[(0, *fault)]).codes == [-9]
    assert "stopped early after step" in run_early(started, early, tmp_path, "--resume", "auto").check().output
    assert differing_results(tmp_path / "out", early / "out") == []


def test_a_run_that_stopped_early_is_finished_and_goes_on_with_more_patience(started, early, tmp_path):
    again = shutil.copytree(early / "out", tmp_path / "out", symlinks=True)
    assert "stopped early after step" in run_early(started, early, tmp_path, "--resume", "auto").check().output
    assert (again / "metrics.jsonl").read_bytes() == (early / "out" / "metrics.jsonl").read_bytes()
    longer = run_early(started, early, tmp_path, "--resume", "auto", "--patience", 3).check()
    assert "patience 2 in the checkpoint, 3 now" in longer.output
    assert len(evaluated(tmp_path)) == 4


def test_a_trial_takes_the_first_images_of_each_class_in_turn(image_folder, tmp_path):
    trial = "--limit-train-images 8 --limit-val-images 5 --epochs 1 --eval-batch-size 3 --batch-size 4".split()
    argv = [*SMALL, "--data-path", image_folder, *trial, "--output-dir", tmp_path / "out", "--lr-warmup-epochs", 0]
    output = run_train(tmp_path, *argv).check().output
    for split, number, sizes in (("train", 8, [11, 10, 8]), ("val", 5, [3, 2, 2])):
        turns = sorted((turn, label) for label, size in enumerate(sizes) for turn in range(size))[:number]
        expected = sorted(sum(sizes[:label]) + turn for turn, label in turns)
        assert first_of_each_class(open_source(image_folder / split), number).tolist() == expected
    assert "--limit-train-images 8: a trial on 8 of 29 images" in output
    assert " n=5" in output
    described = json.loads((tmp_path / "out" / "run.json").read_bytes())["data"]
    assert (described["num_images"], described["val"]["num_images"]) == (8, 5)
