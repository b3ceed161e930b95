"""On the rehearsal device of far.py: training, evaluation, resumes and tools where tensors do not lie on the host."""

import functools
import json
import os
import re
import signal

import pytest
import torch

import metrics
import run
import train
from bench import benchmark
from checkpointing import archive
from monitoring.monitor import read_records
from tests import far
from tests.endings import differing, exact
from tests.faults import spoil_a_loss
from tests.ranks import module_rank, run_ranks
from tests.runs import FLAG, OPTIONS, Runs, assert_same
from tests.started import refused

# Without --clip-grad-norm and its number. The CPU has other kernels for depthwise convolutions that nobody will
# differentiate, as those below the device seem to be; this model has none.
CLIP = OPTIONS.index("--clip-grad-norm")
BASE = [*OPTIONS[:CLIP], *OPTIONS[CLIP + 2 :], "--model", "timm/test_resnet", FLAG]
BASE += ["--epochs", "1", "--lr-warmup-epochs", "0", "--print-freq", "10"]
REGISTER = (far.register,)


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("far"), BASE)  # of three steps of four micro-batches
    runs.run("undisturbed", 1).check()
    return runs


def watch(report, sabotage=None):
    """Write for each step whether its line is due, and the waits since the step before; and those of an evaluation.

    Of those for an event, which let the device go on with what it has behind it, only the part of a step behind it.
    """
    far.register()
    waits, steps, end_step, measure = far.device.waits, [], run.Run.end_step, train.measure
    ends = [0]

    def end_watched(self, metric_logger, grad_norm):
        print(f"end of step {self.number}")
        end_step(self, metric_logger, grad_norm)
        ends.append(far.device.stream_now.now)
        behind = [re.search(r"Event.synchronize \((\d+) operations behind", wait) for wait in waits]
        numbers = [int(found[1]) / (ends[-1] - ends[-2]) if found else None for found in behind]
        steps.append((metric_logger.is_line_due, [w if n is None else n for w, n in zip(waits, numbers, strict=True)]))
        waits.clear()
        report.write_text(json.dumps(steps))

    def measure_watched(*args, **kwargs):
        waits.clear()
        results = measure(*args, **kwargs)
        report.with_name("evaluation.json").write_text(json.dumps(waits))
        return results

    run.Run.end_step, train.measure = end_watched, measure_watched
    if sabotage:
        sabotage()


def run_watched(runs, folder, *argv, sabotage=None):
    argv = ["--device", "far", "--checkpoint-steps", "1000", *argv]
    return runs.run(folder.name, 1, *argv, prepare=(watch, folder / "waits.json", sabotage))


def shown(waits):
    """Those behind which the device has nearly a step to go on with."""
    return [wait for wait in waits if isinstance(wait, float) and wait > 0.9]


def blocking(waits):
    return [wait for wait in waits if not isinstance(wait, float) or wait <= 0.9]


# All with dropout, erasing, repeated augmentation and, but for one, an average of the weights and mixing. Those in one
# row meet in no tensor's code.
CASES = {
    "sgd": "--clip-grad-norm 1 --channels-last --eval-flip",
    "adamw": "--opt adamw --opt-eps 1e-6 --norm-weight-decay 0.01 --random-erase-fill pixel --mixup-mode elem",
    "rmsprop": "--opt rmsprop --bce-loss --clip-grad-value 0.01 --lr-scheduler polylr --lr-power 2 --no-decay-1d "
    "--train-crop-size-min 32 --train-crop-size 64 --crop-ramp-epochs 0 1",
    "lamb": "--opt timm/lamb --clip-agc 0.05 --model-kwargs zero_init_last=False --stochastic-depth 0.2",
    "muon": "--amp --amp-dtype float32 --opt timm/muon --workers 2 --mixup-alpha 0 --freeze-below layer2",
    "frozen at first": "--freeze-epochs 1 --teacher {}/undisturbed/best.pth --distillation soft",
    "hard targets": "--global-batch-size 2 --mixup-alpha 0 --cutmix-alpha 0 --label-smoothing 0 --lr-scheduler steplr "
    "--no-lr-per-step --freeze --no-model-ema",
}
# Nearly the loss of another run on the CPU: bfloat16 has 8 bits of fraction, float16 11. The CPU has other kernels for
# attention without a gradient, too.
ROUNDED = {
    "bfloat16": ("--amp --amp-dtype bfloat16", "", 4e-2),
    "float16": ("--amp --amp-dtype float16", "", 5e-3),
    "recomputed": ("--model timm/test_vit2 -b 8 --grad-checkpointing", "--model timm/test_vit2 -b 8", 1e-4),
}


@pytest.mark.parametrize("case", [*CASES, *ROUNDED])
def test_the_numbers_are_the_cpus_and_no_step_between_two_lines_waits_for_the_device(runs, tmp_path, case):
    more, on_cpu, tolerance = ROUNDED.get(case, (CASES.get(case), CASES.get(case), None))
    name, argv = f"{tmp_path.name}-cpu", on_cpu.format(runs.folder).split()
    run_watched(runs, tmp_path, *more.format(runs.folder).split()).check()
    if argv:
        runs.run(name, 1, *argv).check()
    if tolerance:
        names = [tmp_path.name, name if argv else "undisturbed"]
        logs = [(runs.folder / each / "log.txt").read_text() for each in names]
        losses = [float(re.search(r"Epoch: .* loss:? ([\d.]+)", log)[1]) for log in logs]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    else:
        assert_same(runs, tmp_path.name, name)
    epochs = [each for each in read_records(runs.folder / tmp_path.name) if each["kind"] == "epoch"]
    assert [0 < seconds < 60 for each in epochs for seconds in each["computing_s"]] == [True]  # by the device's events
    (_, first), *steps = json.loads((tmp_path / "waits.json").read_text())
    assert first  # the model's way to the device, and the first line
    assert len(steps) == (13 if case == "hard targets" else 2)
    # With float16 an optimizer looks at the loss scaler's verdict unless it is fused, as those of test_gpu.py.
    assert {len(blocking(waits)) for _, waits in steps[:-1]} == {int(case == "float16")}
    assert [len(shown(waits)) for _, waits in steps[:-1]] == [1, *[0] * 9, 1, 0][: len(steps) - 1]
    assert blocking(steps[-1][1])[int(case == "float16") :] == [0.0]  # of the last line


# Seven steps of two micro-batches, with lines at 0, 2, 4 and 6.
LINES = "--batch-size 2 --global-batch-size 4 --clip-grad-norm 1 --print-freq 2".split()
TIMES = r"(eta|time|data|img/s): \S+"


def line_steps(text):
    """Return of each line its step, the step at whose end it was printed, and what it says but for times."""
    found, end = [], None
    for line in text.splitlines():
        if mark := re.match(r"end of step (\d+)", line):
            end = int(mark[1])
        elif mark := re.match(r"Epoch: \[0\]  \[ *(\d+)/", line):
            found.append((int(mark[1]), end, re.sub(TIMES, "", line)))
    return found


def test_a_line_waits_for_nothing_and_is_printed_a_step_later_as_it_was(runs, tmp_path):
    (tmp_path / "at-once").mkdir()
    run_watched(runs, tmp_path, *LINES).check()
    # A save reads all metrics at once, and so the line.
    run_watched(runs, tmp_path / "at-once", *LINES, "--checkpoint-steps", 1).check()
    found, at_once = (line_steps((runs.folder / name / "log.txt").read_text()) for name in (tmp_path.name, "at-once"))
    assert [each[:2] for each in found] == [(0, 1), (2, 3), (4, 5), (6, 6)]
    assert [each[:2] for each in at_once] == [(step, step) for step in (0, 2, 4, 6)]
    assert [text for *_, text in found] == [text for *_, text in at_once]
    assert all(re.search(r"\]  +lr: \S+  loss: \S+ \(\S+\)  acc1: ", text) for *_, text in found)
    assert all_records(runs, tmp_path.name) == all_records(runs, "at-once")
    steps = [waits for _, waits in json.loads((tmp_path / "waits.json").read_text())]
    assert [len(shown(waits)) for waits in steps] == [0, 1, 0, 1, 0, 1, 0]
    assert [len(blocking(waits)) for waits in steps[1:]] == [0] * 5 + [1]


def time_two_turns(report):
    far.register()
    argv = "--device far --model timm/test_resnet --train-crop-size 32 --batch-size 2 --workers 0".split()
    loop = benchmark.OurLoop(benchmark.training_args(argv), 12)
    loop()
    far.device.waits.clear()
    loop()
    report.write_text(json.dumps([far.device.waits, loop.steady_rates, loop.starts_s]))


def test_a_turn_of_the_benchmark_waits_for_its_end_and_for_steps_that_have_one_behind_them(tmp_path):
    report = tmp_path / "turns.json"
    run_ranks(time_two_turns, 1, report, log_folder=tmp_path).check()
    (*waits, last), rates, starts_s = json.loads(report.read_text())
    assert last.startswith("synchronize at benchmark.py")
    behind = [int(re.match(r"Event.synchronize \((\d+) operations behind", wait)[1]) for wait in waits]
    assert len(behind) == 3  # of the lines of the steps 0 and 10, and of the turn before
    assert min(behind) > 100  # operations of a step
    assert all(0 < rate < 1e6 for rate in rates)
    assert len(starts_s) == 2


def all_records(runs, name):
    return exact(map(json.loads, (runs.folder / name / "metrics.jsonl").read_text().splitlines()))


def read_lines_at_once():
    begin_line = run.Run.begin_line

    def begin_and_log(self, metric_logger):
        begin_line(self, metric_logger)
        self.log(metric_logger)

    run.Run.begin_line = begin_and_log


def test_negative_control_a_line_that_is_read_at_once_is_counted(runs, tmp_path):
    run_watched(runs, tmp_path, *LINES, sabotage=read_lines_at_once).check()
    steps = [waits for _, waits in json.loads((tmp_path / "waits.json").read_text())]
    assert [len(blocking(waits)) for waits in steps[1:]] == [0, 1] * 3
    assert {tuple(blocking(waits)) for waits in steps[1:]} == {(), (0.0,)}


@pytest.mark.parametrize("step", [1, 2])
def test_a_loss_that_is_not_finite_is_named_by_its_step_one_after_the_line(runs, tmp_path, step):
    spoil = functools.partial(spoil_a_loss, 0, 2 * step + 1)
    ended = run_watched(runs, tmp_path, *LINES, sabotage=spoil)
    assert ended.codes == [5]
    assert f"the loss of step {step} is not finite" in ended.output
    assert "end of step 3" in ended.output
    assert "end of step 4" not in ended.output


@pytest.fixture(scope="module")
def lined(runs):
    runs.run("lined", 1, *LINES).check()
    return runs


@pytest.mark.dist
@pytest.mark.parametrize(("call", "when", "number", "world_size"), [
    (3, "after", signal.SIGKILL, 1), (4, "before", signal.SIGKILL, 1), (4, "after", signal.SIGKILL, 1),
    (5, "after", signal.SIGKILL, 2), (6, "after", signal.SIGKILL, 1), (3, "before", signal.SIGTERM, 1),
    (4, "before", signal.SIGTERM, 1), (5, "before", signal.SIGTERM, 2),
])  # fmt: skip
def test_a_kill_at_a_line_and_at_the_step_after_it_changes_no_record(lined, tmp_path, call, when, number, world_size):
    argv, strike = [*LINES, "--checkpoint-steps", 4, "--device", "cpu"], (0, "run.Run.end_step", call, when, number)
    ended = lined.run(tmp_path.name, world_size, *argv, faults=[strike])
    assert (ended.codes == [0] * world_size) == (number == signal.SIGTERM), ended.output
    assert "stopped after step" in ended.output or number == signal.SIGKILL
    lined.run(tmp_path.name, 1, *argv, "--resume", "auto").check()
    assert_same(lined, tmp_path.name, "lined")
    assert all_records(lined, tmp_path.name) == all_records(lined, "lined")


@pytest.mark.dist
@pytest.mark.parametrize(("device", "world_size"), [("far", 2), ("cpu", 1)])
def test_the_same_bits_when_killed_on_any_processes_and_resumed_on_the_device(runs, device, world_size):
    name, kill = f"killed-{device}", [(0, "torch.optim.SGD.step", 3, "before")]
    killed = runs.run(name, world_size, "--device", device, faults=kill, prepare=REGISTER)
    assert -9 in killed.codes, killed.output
    runs.run(name, 1, "--device", "far", "--resume", "auto", prepare=REGISTER).check()
    assert_same(runs, name)


TOOLS = {
    "evaluate": "--set val={images}/val --json {out}.json",
    "predict": "{images}/val --json",
    "average": "--reestimate-bn {images} --output {out}.pth",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_give_the_numbers_of_the_cpu(runs, tmp_path, tool):
    found = []
    for device, prepare in (("cpu", ()), ("far", REGISTER)):
        words = TOOLS[tool].format(images=runs.images, out=tmp_path / device).split()
        checkpoint, stdout = runs.folder / "undisturbed" / "best.pth", tmp_path / f"{device}.txt"
        argv = [checkpoint, *words, "--device", device]
        run_ranks(module_rank, 1, f"scripts.{tool}", argv, prepare, None, stdout, log_folder=tmp_path).check()
        if tool == "average":
            found.append(archive.load_checkpoint(tmp_path / f"{device}.pth", device)["model"])
        else:
            found.append(json.loads((stdout if tool == "predict" else tmp_path / f"{device}.json").read_text()))
    assert differing(*found) == [] if tool != "evaluate" else found[0]["sets"] == found[1]["sets"]


def test_an_evaluation_waits_at_its_lines_alone(runs, tmp_path):
    counts = []
    for batch in ("3", "1"):  # 3 and 7 batches, of which the first and the last have a line
        argv = ["--test-only", "--resume", runs.folder / "undisturbed" / "best.pth", "--eval-batch-size", batch]
        run_watched(runs, tmp_path, *argv).check()
        counts.append(len(json.loads((tmp_path / "evaluation.json").read_text())))
    assert counts[0] == counts[1] > 0


def wait_for_no_stream():
    far.Stream.wait_event = lambda self, event: None


def load_the_optimizer_to_the_host():
    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(lambda _, value, *__, **___: value)


def wait_for_no_copy():
    metrics.CopyMark.wait = lambda self: None


@pytest.mark.parametrize(("sabotage", "words"), [
    (wait_for_no_stream, "is not finite"), (wait_for_no_copy, "is not finite"),
    (load_the_optimizer_to_the_host, "found far:0 and cpu"),
])  # fmt: skip
def test_negative_control_the_device_shows(runs, tmp_path, sabotage, words):
    checkpoint = runs.folder / "undisturbed" / "checkpoint-00000002.pth"
    ended = run_watched(runs, tmp_path, "--resume", checkpoint, sabotage=sabotage)
    assert ended.codes != [0]
    assert words in ended.output


def register_two():
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # so that the others end with rank 0, even where its error comes late
    far.register()
    torch.get_device_module("far").device_count = lambda: 2
    torch.accelerator.device_count = lambda: 2


def test_more_processes_than_devices_are_refused(runs):
    outcome = runs.run("crowded", 3, "--device", "far", prepare=(register_two,))
    refused(outcome, "3 processes were started on this machine")
