"""On the rehearsal device of far.py: training, evaluation, resumes and tools where tensors do not lie on the host."""

import json
import os
import re

import pytest
import torch

import run
import train
from checkpointing import archive
from tests import far
from tests.endings import differing
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
    """Write for each step whether its line is due, and the waits since the step before; and those of an evaluation."""
    far.register()
    waits, steps, end_step, measure = far.device.waits, [], run.Run.end_step, train.measure

    def end_watched(self, metric_logger, grad_norm):
        end_step(self, metric_logger, grad_norm)
        steps.append((metric_logger.is_line_due, waits[:]))
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
    (_, first), *steps = json.loads((tmp_path / "waits.json").read_text())
    assert first  # the model's way to the device, and the first line
    assert len(steps) == (13 if case == "hard targets" else 2)
    # With float16 an optimizer looks at the loss scaler's verdict unless it is fused, as those of test_gpu.py.
    assert {len(waits) for is_due, waits in steps if not is_due} == {int(case == "float16")}
    lines = [waits for is_due, waits in steps if is_due]  # of the metrics' sums, and of two norms
    assert all(0 < len(waits) <= 6 for waits in lines), lines


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


@pytest.mark.parametrize(("sabotage", "words"), [
    (wait_for_no_stream, "is not finite"), (load_the_optimizer_to_the_host, "found far:0 and cpu"),
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
