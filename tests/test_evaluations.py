"""When a run is evaluated, on how many images at once, and when it ends because nothing gets better."""

import json
import shutil
from types import SimpleNamespace

import pytest

import config
import data
from run import Run, is_evaluated_after
from tests.endings import differing_results, read_metrics
from tests.runs import FLAG, Runs, assert_same
from tests.started import refused, run_train

# Three classes: every evaluation has 100 % of Acc@5, and the first one stays the best.
EARLY = ["--epochs", 9, "--early-stop", 2, "--best-metric", "acc5"]


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("runs"))
    runs.run("undisturbed", 2, *HELD).check()
    return runs


# 23 images are left, in two steps an epoch; epochs 1 and 3 and, as the last one, 4 are evaluated.
HELD = [FLAG, "--minival", 0.2, "--eval-every", 2, "--epochs", 5, "--eval-batch-size", 4]


def evaluations(runs, name, kind):
    return [(record["epoch"], record["step"]) for record in runs.metrics(name) if record["kind"] == kind]


def test_every_second_epoch_and_the_last_one_are_evaluated(runs):
    assert evaluations(runs, "undisturbed", "minival") == [(1, 4), (3, 8), (4, 10)]
    assert evaluations(runs, "undisturbed", "minival_ema") == [(1, 4), (3, 8), (4, 10)]
    assert not evaluations(runs, "undisturbed", "val")
    final = runs.final("undisturbed")
    assert final["/best/metric"] == "minival/acc1"
    assert final["/best/step"] in (4, 8, 10)
    assert final["/data/val/num_images"] == 6
    assert (runs.folder / "undisturbed" / "best_ema.pth").is_file()


@pytest.mark.parametrize(
    ("every", "epochs", "expected"),
    [(1, 3, [0, 1, 2]), (2, 4, [1, 3]), (3, 7, [2, 5, 6]), (0, 4, [3]), (9, 4, [3]), (1, 1, [0])],
)
def test_the_last_epoch_is_always_evaluated(every, epochs, expected):
    args = config.parse_args(["--synthetic", "--epochs", str(epochs), "--eval-every", str(every)])
    assert [epoch for epoch in range(epochs) if is_evaluated_after(epoch, args)] == expected


KILLS = {
    "after the save of an epoch that is not evaluated": ("checkpointing.store.CheckpointManager.save", 1, "after"),
    "during the first evaluation": ("models.ExponentialMovingAverage.forward", 1, "before"),
    "between the result and its save": ("checkpointing.store.CheckpointManager.save", 3, "before"),
}


@pytest.mark.parametrize("place", KILLS)
def test_killed_and_resumed_same_bits_where_not_every_epoch_is_evaluated(runs, place):
    name = place.replace(" ", "-")
    assert runs.run(name, 1, *HELD, faults=[(0, *KILLS[place])]).codes == [-9]
    runs.run(name, 1, *HELD, "--resume", "auto").check()
    assert_same(runs, name)


@pytest.fixture(scope="module")
def early(started, tmp_path_factory):
    """A run that stopped early."""
    folder = tmp_path_factory.mktemp("early")
    run_early(started, folder).check()
    return folder


def run_early(started, folder, *argv, faults=()):
    return run_train(folder, *started.argv, "--output-dir", folder / "out", *EARLY, *argv, faults=faults)


def evaluated_steps(folder):
    return [record["step"] for record in read_metrics(folder / "out" / "metrics.jsonl") if record["kind"] == "val"]


def test_a_run_ends_after_evaluations_without_a_new_best(early):
    assert evaluated_steps(early) == [3, 6, 9]
    status = json.loads((early / "out" / "status.json").read_text())
    assert (status["state"], status["step"], status["requeue"]) == ("finished", 9, False)
    reason = "stopped early after step 9: no new best acc5 in 2 evaluations since step 3 (--early-stop 2)"
    assert status["reason"] == reason


@pytest.mark.parametrize(
    "fault",
    [("train.evaluate_all", 3, "before"), ("checkpointing.status.StatusFile.finish", 1, "before")],
    ids=["before the evaluation that ends it", "when all is saved"],
)
def test_evaluations_are_counted_over_restarts(started, early, tmp_path, fault):
    assert run_early(started, tmp_path, faults=[(0, *fault)]).codes == [-9]
    outcome = run_early(started, tmp_path, "--resume", "auto").check()
    assert "stopped early after step 9" in outcome.output
    assert differing_results(tmp_path / "out", early / "out") == []


def test_a_run_that_stopped_early_is_finished_and_goes_on_only_with_a_larger_number(started, early, tmp_path):
    started_again = shutil.copytree(early / "out", tmp_path / "out", symlinks=True)
    before = (started_again / "metrics.jsonl").read_bytes()
    outcome = run_early(started, tmp_path, "--resume", "auto").check()
    assert "stopped early after step 9" in outcome.output
    assert "finished 3 epochs, 9 steps" in outcome.output
    assert (started_again / "metrics.jsonl").read_bytes() == before
    longer = run_early(started, tmp_path, "--resume", "auto", "--early-stop", 3).check()
    assert "early-stop 2 in the checkpoint, 3 now" in longer.output
    assert evaluated_steps(tmp_path) == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("best", "best_ema", "every", "is_over"),
    [(3, None, 1, True), (3, 9, 1, False), (9, 3, 1, False), (6, 3, 1, True), (6, None, 2, False)],
)
def test_the_newest_best_of_the_weights_and_of_their_average_counts(best, best_ema, every, is_over):
    """After epoch 3, of three steps each."""
    steps = {"best": best, "best_ema": best_ema}
    bests = {name: step and {"metric": "val/acc1", "value": 1.0, "step": step} for name, step in steps.items()}
    args = config.parse_args(["--synthetic", "--early-stop", "2", "--eval-every", str(every)])
    state = SimpleNamespace(bests=bests, is_evaluated=True, epoch=3, step=12, steps_per_epoch=3)
    assert (Run.why_stopped_early(SimpleNamespace(args=args, state=state)) != "") == is_over


def test_an_evaluation_has_a_batch_of_its_own(image_folder):
    argv = ["--batch-size", "4", "--eval-batch-size", "3", "--device", "cpu", "--workers", "0", "--val-crop-size", "32"]
    args = config.Record(**vars(config.parse_args(["--data-path", str(image_folder), *argv])))
    args = config.with_shards(args.replaced(rank=0, world_size=1), None)
    sets = data.build_datasets(*config.split_dirs(args), args)
    train, val = (data.build_loader(*pair, args) for pair in zip(sets, data.build_samplers(*sets, args), strict=True))
    assert [len(image) for image, _ in val] == [3, 3, 1]
    assert {len(image) for image, _ in train} == {4}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--minival", "0.2"], "minival None in the checkpoint, 0.2 now"),
        (["--limit-train-images", "16"], "limit-train-images None in the checkpoint, 16 now"),
        (["--limit-val-images", "4"], "go on all the same, give --allow-change limit-val-images"),
        (["--eval-batch-size", "2"], "go on all the same, give --allow-change eval-batch-size"),
    ],
)
def test_what_changes_numbers_is_refused_in_a_resumed_run(started, tmp_path, argv, words):
    out = started.copy(tmp_path / "out")
    refused(started.go_on(tmp_path, out, "--resume", "auto", *argv), words)


def test_when_to_evaluate_may_change_in_a_resumed_run(started, tmp_path):
    out = started.copy(tmp_path / "out")
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--eval-every", 0, "--epochs", 4).check()
    assert "eval-every 1 in the checkpoint, 0 now" in outcome.output
    assert [r["step"] for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "val"] == [3, 6, 12]


def test_a_minival_and_the_validation_set_are_both_evaluated_afterwards(runs, image_folder, tmp_path):
    best = ["--test-only", "--resume", runs.folder / "undisturbed" / "best.pth", "--device", "cpu", "--workers", 0]
    held = run_train(tmp_path, "--data-path", image_folder, *best, "--minival", 0.2, "--batch-size", 4).check().output
    step = runs.final("undisturbed")["/best/step"]
    record = next(r for r in runs.metrics("undisturbed") if (r["kind"], r["step"]) == ("minival", step))
    assert f"Test: minival Acc@1 {record['acc1']:.3f} " in held
    on_val = run_train(tmp_path, "--val-path", image_folder / "val", *best).check().output
    assert " n=7" in on_val
    assert "more or fewer images" not in on_val  # it is another set, and none that has changed
