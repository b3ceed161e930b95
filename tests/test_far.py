"""On the rehearsal device of far.py: training, evaluation, resumes and tools where tensors do not lie on the host."""

import json
import os
import subprocess
import sys

import pytest
import torch

import run
import train
import transforms
from checkpointing import archive
from tests import far
from tests.endings import differing
from tests.ranks import REPOSITORY, module_rank, run_ranks
from tests.runs import FLAG, OPTIONS, Runs
from tests.started import refused

# Without --clip-grad-norm and its number. The CPU has other kernels for depthwise convolutions that nobody will
# differentiate, as those below the device seem to be; this model has none.
CLIP = OPTIONS.index("--clip-grad-norm")
BASE = [*OPTIONS[:CLIP], *OPTIONS[CLIP + 2 :], "--model", "timm/test_resnet", FLAG]
ONCE = ["--epochs", "1", "--lr-warmup-epochs", "0"]
REGISTER = (far.register,)


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    return Runs(image_folder, tmp_path_factory.mktemp("far"), BASE)


def run_on_both(runs, name, *argv):
    for device, prepare in (("cpu", ()), ("far", REGISTER)):
        runs.run(f"{name}-{device}", 1, *argv, "--device", device, prepare=prepare).check()
    return f"{name}-far", f"{name}-cpu"


# All with dropout, mixing, erasing, repeated augmentation and an average of the weights.
CASES = {
    "sgd": "--clip-grad-norm 1",
    "adamw": "--opt adamw --opt-eps 1e-6 --norm-weight-decay 0.01",
    "no decay of 1-d": "--opt adamw --no-decay-1d",
    "rmsprop": "--opt rmsprop --bce-loss",
    "lamb": "--opt timm/lamb",
    "muon": "--amp --amp-dtype float32 --opt timm/muon",
    "adaptive clipping": "--clip-agc 0.05",
    "cut off": "--clip-grad-value 0.01 --lr-scheduler polylr --lr-power 2",
    "noise": "--random-erase-fill pixel --mixup-mode elem",
    "nhwc": "--channels-last",
    "frozen": "--freeze",
    "partly frozen": "--freeze-below layer2",
    "frozen at first": "--freeze-epochs 1",
    "mirrored": "--eval-flip",
    "growing": "--train-crop-size-min 32 --train-crop-size 64 --crop-ramp-epochs 0 1",
    "own": "--model-kwargs zero_init_last=False --stochastic-depth 0.2",
    "workers": "--workers 2",
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_on_the_cpu(runs, case):
    found, expected = run_on_both(runs, case.replace(" ", "-"), *ONCE, *CASES[case].split())
    assert differing(runs.final(found), runs.final(expected)) == []
    assert runs.metrics(found) == runs.metrics(expected)


@pytest.mark.dist
def test_the_same_bits_on_two_processes_of_torchrun(runs, tmp_path):
    far.write_entry_point(tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    argv = runs.argv("torchrun", *ONCE, "--device", "far")
    subprocess.run([*command, *argv], cwd=REPOSITORY, env=environment, check=True)
    runs.run("one", 1, *ONCE).check()
    assert differing(runs.final("torchrun"), runs.final("one")) == []


@pytest.mark.parametrize("device", ["far", "cpu"])
def test_the_same_bits_when_killed_and_resumed_on_the_device(runs, device):
    name, kill = f"killed-{device}", [(0, "torch.optim.SGD.step", 5, "after")]
    killed = runs.run(name, 1, "--device", device, faults=kill, prepare=REGISTER)
    assert killed.codes == [-9], killed.output
    runs.run(name, 1, "--device", "far", "--resume", "auto", prepare=REGISTER).check()
    runs.run("whole", 1, "--overwrite").check()
    assert differing(runs.final(name), runs.final("whole")) == []
    assert runs.metrics(name) == runs.metrics("whole")


# bfloat16 has 8 bits of fraction, float16 11. The CPU has other kernels for attention without a gradient, too.
ROUNDED = {
    "--amp --amp-dtype bfloat16": 4e-2,
    "--amp --amp-dtype float16": 5e-3,
    "--model timm/test_vit2 --grad-checkpointing": 1e-5,
}


@pytest.mark.parametrize("argv", ROUNDED)
def test_nearly_the_loss_of_the_cpu(runs, argv):
    argv, tolerance = [*ONCE, "--print-freq", "1", *argv.split()], ROUNDED[argv]
    name = argv[-1]
    runs.run(f"{name}-far", 1, *argv, "--device", "far", prepare=REGISTER).check()
    runs.run(f"{name}-cpu", 1, *(word for word in argv if word not in ("--amp", "--amp-dtype", name))).check()
    losses = [runs.metrics(f"{name}-{device}")[0]["loss"] for device in ("far", "cpu")]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def test_distillation(runs, tmp_path):
    runs.run("teacher", 1, *ONCE).check()
    teacher = ["--teacher", runs.folder / "teacher" / "best.pth", "--distillation", "soft"]
    found, expected = run_on_both(runs, "distilled", *ONCE, *teacher)
    assert differing(runs.final(found), runs.final(expected)) == []


TOOLS = {
    "evaluate": "--set val={images}/val --json {out}.json",
    "predict": "{images}/val --json",
    "average": "--reestimate-bn {images} --output {out}.pth",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_give_the_numbers_of_the_cpu(runs, tmp_path, tool):
    runs.run("trained", 1, *ONCE, "--overwrite").check()
    found = []
    for device, prepare in (("cpu", ()), ("far", REGISTER)):
        words = TOOLS[tool].format(images=runs.images, out=tmp_path / device).split()
        argv, stdout = [runs.folder / "trained" / "best.pth", *words, "--device", device], tmp_path / f"{device}.txt"
        run_ranks(module_rank, 1, f"scripts.{tool}", argv, prepare, None, stdout, log_folder=tmp_path).check()
        if tool == "average":
            found.append(archive.load_checkpoint(tmp_path / f"{device}.pth", device)["model"])
        else:
            found.append(json.loads((stdout if tool == "predict" else tmp_path / f"{device}.json").read_text()))
    assert differing(*found) == [] if tool != "evaluate" else found[0]["sets"] == found[1]["sets"]


# The host's waits for the device. A line reads the sums of the metrics, the norm of the gradients, and that of the
# weights; a record that is due before it waits for it.


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
    argv = [*ONCE, "--print-freq", "10", "--checkpoint-steps", "1000", "--device", "far", *argv]
    return runs.run(folder.name, 1, *argv, prepare=(watch, folder / "waits.json", sabotage))


WATCHED = {
    **CASES,
    "gradient checkpointing": "--grad-checkpointing --model timm/test_vit2",
    "bfloat16": "--amp --amp-dtype bfloat16",
    "float16": "--amp --amp-dtype float16",
    "accumulation": "--batch-size 2 --global-batch-size 4",
    "no average": "--no-model-ema",
    "cutmix alone": "--mixup-alpha 0",
    "a constant rate": "--lr-scheduler steplr --no-lr-per-step",
    "hard targets": "--mixup-alpha 0 --cutmix-alpha 0 --label-smoothing 0",
}


@pytest.mark.parametrize("case", WATCHED)
def test_no_step_between_two_lines_waits_for_the_device(runs, tmp_path, case):
    batch = ["--batch-size", "2", "--global-batch-size", "2", "--lr-scheduler", "cosineannealinglr"]
    run_watched(runs, tmp_path, *batch, *WATCHED[case].split()).check()
    (_, first), *steps = json.loads((tmp_path / "waits.json").read_text())
    assert first  # the model's way to the device, and the first line
    assert len(steps) == (6 if case == "accumulation" else 13)
    # With float16 an optimizer looks at the loss scaler's verdict unless it is fused, as those of test_gpu.py.
    assert {len(waits) for is_due, waits in steps if not is_due} == {int(case == "float16")}
    lines = [waits for is_due, waits in steps if is_due]
    assert all(0 < len(waits) <= 6 for waits in lines), lines


def test_an_evaluation_waits_at_its_lines_alone(runs, tmp_path):
    counts = []
    for batch in ("3", "1"):  # 3 and 7 batches, of which the first and the last have a line
        argv = ["--batch-size", batch, "--global-batch-size", "6", "--no-ra-sampler", "--print-freq", "100"]
        run_watched(runs, tmp_path, *argv, "--overwrite", "--model", "timm/test_vit2").check()
        counts.append(len(json.loads((tmp_path / "evaluation.json").read_text())))
    assert counts[0] == counts[1] > 0


# Each sabotage that the device is to show; on the CPU none does.


def read_in_a_step():
    original = transforms.Normalize.__call__

    def reading(self, image):
        image.sum().item()
        return original(self, image)

    transforms.Normalize.__call__ = reading


def leave_a_buffer_on_the_host():
    original = transforms.Normalize.__init__

    def build(self, mean, std, device, memory_format):
        original(self, mean, std, torch.device("cpu"), memory_format)

    transforms.Normalize.__init__ = build


def wait_for_no_stream():
    far.Stream.wait_event = lambda self, event: None


def load_the_optimizer_to_the_host():
    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(lambda _, value, *__, **___: value)


def test_negative_control_a_read_in_a_step(runs, tmp_path):
    run_watched(runs, tmp_path, sabotage=read_in_a_step).check()
    steps = json.loads((tmp_path / "waits.json").read_text())
    assert all("reading" in " ".join(waits) for _, waits in steps)


def test_negative_control_a_buffer_on_the_host(runs, tmp_path):
    assert "found far:0 and cpu" in run_watched(runs, tmp_path, sabotage=leave_a_buffer_on_the_host).output


def test_negative_control_a_missing_wait(runs, tmp_path):
    ended = run_watched(runs, tmp_path, sabotage=wait_for_no_stream)
    assert ended.codes != [0]
    assert "is not finite" in ended.output


def test_negative_control_a_checkpoint_on_the_wrong_device(runs, tmp_path):
    argv = ["--checkpoint-steps", "1", "--print-freq", "1"]
    runs.run(tmp_path.name, 1, *ONCE, *argv, faults=[(0, "torch.optim.SGD.step", 2, "after")])
    resumed = run_watched(runs, tmp_path, *argv, "--resume", "auto", sabotage=load_the_optimizer_to_the_host)
    assert "found far:0 and cpu" in resumed.output


def register_two():
    far.register()
    torch.get_device_module("far").device_count = lambda: 2
    torch.accelerator.device_count = lambda: 2


def test_more_processes_than_devices_are_refused(runs):
    """Two of them would share a device, each at half the speed, without a word."""
    argv = [*ONCE, "--device", "far", "--use-deterministic-algorithms"]
    refused(runs.run("crowded", 4, *argv, prepare=(register_two,)), "4 processes were started on this machine")
