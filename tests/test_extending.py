"""docs/extending.md: examples/ is run, own code has the bits of the library's own, and two runs share a process."""

import builtins
import gc
import importlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms

import train
from checkpointing.archive import load_checkpoint
from errors import PreemptedError, UserError
from examples.grad_cam import heat_map
from settings import config
from settings.choices import TABLES
from settings.options import BY_NAME
from tests.archives import tar_of
from tests.endings import Ending, differing, read_metrics
from tests.images import encoded, picture
from tests.ranks import REPOSITORY, run_ranks
from tests.started import SMALL_PLAIN, refused, run_train
from tests.test_resume import check_same_weights
from tests.tiny import Tiny

PARTS = (REPOSITORY / "examples" / "parts.py").read_text()
SAME = """
import os
import random
import sys
import numpy
import torch
from pathlib import Path
from torch import nn
from loading.source import Source
from metrics import Curve, Metric
from tests.tiny import Tiny

def sgd(parameters, lr, weight_decay, momentum):
    return torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, foreach=True)

class Smooth(nn.Module):
    def forward(self, output, target):
        log = output.log_softmax(1)
        return (-0.9 * log.gather(1, target[:, None])[:, 0] - 0.1 * log.mean(1)).mean()

smooth = Smooth

class Noisy(torch.optim.Optimizer):
    def __init__(self, parameters, lr, weight_decay, generator=None):
        super().__init__(parameters, {"lr": lr})
        self.generator = generator
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn(p.shape, generator=self.generator), alpha=0.01).sub_(p.grad, alpha=0.01)
            p.mul_(1 + 0.001 * numpy.random.rand() * random.random())

class Counting(Tiny):
    def __init__(self, num_classes, assigns=False):
        super().__init__(num_classes)
        self.register_buffer("count", torch.zeros(()))
        self.assigns = assigns
    def forward(self, image):
        self.count = self.count + 1 if self.assigns else self.count.add_(self.training)
        return super().forward(image)

class Moving(Smooth):
    def __init__(self, is_trained=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=is_trained)
    def forward(self, output, target):
        self.mean = self.mean + (not self.scale.requires_grad)
        return super().forward(output, target) * self.scale

def noisy_loss():
    prior = torch.rand(3)
    return lambda output, target: nn.functional.cross_entropy(output + prior + torch.randn(3), target)

def fails_later():
    seen = []
    def augment(image):
        seen.append(1)
        return image if len(seen) < 20 else 1 / 0
    return augment

ends_later = lambda: lambda output, target: sys.exit(0) if len(target) > 6 else output.mean()
apart = lambda parameters, lr, weight_decay: Noisy(parameters, lr, 0, torch.Generator().manual_seed(os.getpid()))
line = lambda epoch, epochs: 1 - epoch / epochs
tensor_line = lambda epoch, epochs: torch.tensor(1 - epoch / epochs, dtype=torch.float64)
numbers = numpy.random.default_rng(0)
with_numpy = lambda: lambda image: image.rotate(numpy.random.randint(4) * 90)

class Count(Metric):
    def __init__(self, value=1.0, name="x", sums=1, **methods):
        self.value, self.name, self.sums = value, name, sums
        self.curves = {name: Curve(title="x")}
        vars(self).update(methods)
    def batch_sums(self, output, target, index):
        return [torch.tensor(self.value * len(target))] * self.sums
    def compute(self, sums, count):
        return {self.name: sums[0] / count}

ones = lambda num_classes: Count()
twos = lambda num_classes: Count(2.0)

class Few(Source):
    form, classes = "few", ["a", "b", "c"]
    def __init__(self, split, first=0, **more):
        super().__init__(Path(split))
        self.first = first
        vars(self).update(more)
    def __len__(self):
        return 16
    def label(self, number):
        return self.first + number % 3
    def name(self, number):
        return f"{number}.png"
    def read(self, number):
        return b""

no_bytes_later = lambda split: Few(split, read=lambda number: None if number else b"")
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SAME)
    return tmp_path / "mine.py"


def test_every_part_of_the_examples_trains_is_killed_and_resumes(started, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(PARTS + "\nopen(__file__ + '.ran', 'a').write('x')\n")
    names = {"model": "net", "opt": "Signs", "criterion": "focal", "auto_augment": "quarters",
             "lr_scheduler": "sawtooth", "metrics": "Surest", "logger": "Lines", "data_path": "Stripes"}  # fmt: skip
    own = [word for name, function in names.items() for word in (BY_NAME[name].flag, f"{mine}:{function}")]
    own += "--lr 0.01 --best-metric surest --epochs 3 --batch-size 4 --global-batch-size 8".split()
    started.go_on(tmp_path, tmp_path / "whole", *own).check()
    assert mine.with_name("mine.py.ran").read_text() == "x"  # once for all options
    kill = [(0, "torch.optim.Optimizer.zero_grad", 5, "before")]
    assert -9 in started.go_on(tmp_path, tmp_path / "killed", *own, faults=kill, world_size=2).codes
    started.go_on(tmp_path, tmp_path / "killed", *own, "--resume", "auto").check()
    assert Ending(tmp_path / "killed").differences(Ending(tmp_path / "whole")) == []
    found = load_checkpoint(tmp_path / "killed" / "checkpoint.pth", "it")
    assert re.fullmatch(", ".join(f"{n} [0-9a-f]{{16}}" for n in names), found["args"]["code"])
    assert found["best"]["metric"] == "val/surest"
    records = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [r["lr"] for r in records if r["kind"] == "train"] == pytest.approx([0.01, 0.009, 0.008])
    lines = [(tmp_path / out / "lines.txt").read_text() for out in ("whole", "killed")]
    assert lines[0] == lines[1]
    assert lines[0].count("train") == 3
    assert found["args"]["code"] in (tmp_path / "killed" / "recipe.toml").read_text()


def test_own_code_that_does_the_same_gives_the_same_numbers_and_an_evaluation_says_without_it(started, mine, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    started.go_on(tmp_path, theirs, "--label-smoothing", "0.1", "--lr-scheduler", "linearlr").check()
    own = ["--lr-scheduler", f"{mine}:line", "--opt", f"{mine}:sgd"]
    outcome = started.go_on(tmp_path, ours, *own, "--criterion", f"{mine}:smooth").check()
    found, expected = (load_checkpoint(out / "checkpoint.pth", "it")["model"] for out in (ours, theirs))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert f"--criterion {mine}:smooth" in outcome.output  # the command to evaluate it
    argv = [*started.argv, "--test-only", "--resume", ours / "checkpoint.pth"]
    assert "evaluating with cross-entropy; give --criterion" in run_train(tmp_path, *argv).check().output
    assert "evaluating with" not in run_train(tmp_path, *argv, "--criterion", f"{mine}:smooth").check().output
    exact = tmp_path / "exact"  # an optimizer and a schedule alone have the bits of the library's
    started.go_on(tmp_path, exact, *own, "--label-smoothing", "0.1").check()
    check_same_weights(exact, theirs, "model", "optimizer")


def test_an_own_augmentation_draws_the_same_with_any_number_of_workers(started, mine, tmp_path):
    own = ["--auto-augment", f"{mine}:with_numpy", "--epochs", 1]
    started.go_on(tmp_path, tmp_path / "none", *own).check()
    started.go_on(tmp_path, tmp_path / "two", *own, "--workers", 2).check()
    check_same_weights(tmp_path / "two", tmp_path / "none", "model")
    plain = started.out / "best.pth"  # of as many steps, for its first epoch is its best
    first, other = (load_checkpoint(path, "it")["model"] for path in (tmp_path / "none" / "checkpoint.pth", plain))
    assert differing(first, other) != []


@pytest.mark.parametrize(("option", "num_workers", "words"), [
    *(("--auto-augment {}:fails_later", num_workers, ["--auto-augment has failed: ZeroDivisionError: division by zero"])
      for num_workers in (0, 2)),
    ("--data-path {}:no_bytes_later", 2, ["cannot read image train/", "its source's read failed: TypeError"]),
    ("--criterion {}:ends_later", 0, ["code of your own has raised SystemExit(0); let it raise an Exception"]),
])  # fmt: skip
def test_own_code_that_fails_later_is_blamed_in_one_line(started, mine, tmp_path, num_workers, option, words):
    outcome = started.go_on(tmp_path, tmp_path / "out", *option.format(mine).split(), "--workers", num_workers)
    refused(outcome, *words, code=1)
    assert (".png" in outcome.output.splitlines()[-1]) == (len(words) > 1)  # an image only where it is at fault


def test_a_resumed_window_of_other_metrics_begins_anew(started, mine, tmp_path):
    argv = ["--epochs", 1, "--print-freq", 100, "--metrics"]
    kill = [(0, "torch.optim.SGD.step", 3, "before")]
    started.go_on(tmp_path, tmp_path / "out", *argv, f"{mine}:ones", faults=kill)
    outcome = started.go_on(tmp_path, tmp_path / "out", *argv, f"{mine}:twos", "--resume", "auto").check()
    assert "the checkpoint's record is of other metrics" in outcome.output
    assert {record["x"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")} == {2.0}
    started.go_on(tmp_path, tmp_path / "out", "--epochs", 2, "--resume", "auto").check()  # without any, too


def test_a_changed_file_is_refused_unless_allowed_and_a_moved_one_is_the_same(started, mine, tmp_path):
    own, out = ["--criterion", f"{mine}:smooth"], tmp_path / "out"
    started.go_on(tmp_path, out, *own, "--epochs", 1).check()
    (tmp_path / "elsewhere").mkdir()
    moved = mine.rename(tmp_path / "elsewhere" / "mine.py")
    own = ["--criterion", f"{moved}:smooth", "--resume", "auto", "--epochs", 1]
    started.go_on(tmp_path, out, *own).check()
    moved.write_text(SAME + "\n")
    words = "the file of --criterion has changed since"
    refused(started.go_on(tmp_path, out, *own), words, "give --allow-change code")
    outcome = started.go_on(tmp_path, out, *own, "--allow-change", "code").check()
    assert f"changed as --allow-change says: {words}" in outcome.output


# Options, what is added to the file, and words of the refusal.
UNUSABLE = [
    ("--opt {}:nothing", "", "has no function nothing"), ("--criterion {}:smoth", "", "did you mean smooth"),
    ("--opt {}x.py:sgd", "", "no such file"), ("--criterion smooth", "", "unknown loss"),
    ("--criterion {}:smooth --bce-loss", "", "are different losses; give only one of them"),
    ("--opt {}:sgd --opt-eps 1", "", "has no such option"),
    ("--opt {}:it", "sys.exit(0)", "SystemExit: 0"),
    ("--opt {}:it", "def __getattr__(name): raise OSError('x')", "cannot be run (line 1): OSError: x"),
    ("--opt {}:it", "it = lambda p, lr, weight_decay: [lr]", "returned a list, expected a torch.optim.Optimizer"),
    ("--opt {}:it", "it = lambda p, lr, weight_decay, rho: 0", "missing 1 required positional argument: 'rho'"),
    ("--criterion {}:it", "it = lambda: 3", "returned a int, expected a loss"),
    ("--criterion {}:it", "it = lambda output, target: 3", "missing 2 required positional arguments"),
    ("--criterion {}:it", "it = lambda: nn.CrossEntropyLoss(reduction='none')", "the loss is tensor(["),
    ("--criterion {}:it", "it = lambda: nn.CrossEntropyLoss(reduction='sum')", ", and of three copies tensor("),
    ("--criterion {}:it", "it = lambda: lambda output, target: output.mean() * 1j", "a 0-d tensor with a gradient"),
    ("--criterion {}:it", "it = lambda: lambda output, target: (output > 0).float().mean()", "with a gradient"),
    ("--criterion {}:Moving", "", "a loss's parameters and buffers are not trained or saved"),
    ("--criterion {}:it", "it = lambda: Moving(is_trained=True)", "parameters and buffers are not trained or saved"),
    ("--auto-augment {}:it", "it = lambda: lambda image: image.resize((3, 3))", "returned ((3, 3), 'RGB'), expected a"),
    ("--auto-augment {}:it", "it = lambda: None", "'NoneType' object is not callable"),
    ("--auto-augment {}:it", "it = lambda: lambda image: image.rotate(numbers.integers(4) * 90)", "different pixels"),
    ("--lr-scheduler {}:it", "it = lambda epoch, epochs: -1.0", "its factor in epoch 0 is -1.0; expected 0 or more"),
    ("--lr-scheduler {}:it", "it = lambda epoch, epochs: None", "unsupported operand"),
    ("--lr-scheduler {}:it --lr-per-step", "it = lambda epoch, epochs: -(epoch % 1)", "in epoch 0.0625 is -0.0625;"),
    ("--lr-scheduler {}:it", "it = lambda epoch, epochs: random.random()", "a second call returns different factors"),
    ("--metrics {}:it", "it = lambda num_classes: None", "returned None; expected a metrics.Metric"),
    ("--metrics {}:it", "it = lambda _: Count(name='acc1')", "its curve acc1 has a name that is taken"),
    ("--metrics {}:ones {}:twos", "", "its curve x has a name that is taken"),
    ("--metrics {}:it", "it = lambda _: Count(sums=2)", "batch_sums returns 2 sums, and its num_sums is 1; give"),
    ("--metrics {}:it", "it = lambda _: Count(batch_sums=lambda output, *_: [output.mean()])", "twice over are not"),
    ("--metrics {}:it", "it = lambda _: Count(batch_sums=lambda *_: [1.0])", "returns no list of tensors; leave .item"),
    ("--metrics {}:it --mixup-alpha 0.2", "it = lambda _: Count(batch_sums=lambda o, t, _: [(o.argmax(1) == t).sum()])",
     "targets of shape (2, 3): The size of tensor a (2) must match"),
    ("--metrics {}:it", "it = lambda _: Count(gather=lambda *names: {names[0]: 1.0})", "tuple index out of range"),
    ("--metrics {}:it", "it = lambda _: Count(compute=lambda *_: {'x': [1.0, numpy.float32(1)]})", "a float32 as x"),
    ("--data-path {}:it", "it = lambda split: None", "it returned None for val; expected a Source"),
    ("--data-path {}:it", "it = lambda split: Few(split, -1)", "a label is -1; expected a whole number from 0 to 2"),
    ("--data-path {}:it", "it = lambda split: Few(split, 1)", "a label is 3; expected a whole number from 0 to 2"),
    ("--data-path {}:it", "it = lambda split: Few(split, label=lambda _: False)", "a label is False; expected a whole"),
    ("--data-path {}:it", "it = lambda split: Few(split, read=lambda _: None)", "returned None; expected the bytes of"),
    ("--data-path {}:it", "it = lambda split: Few(split, name=lambda _: chr(0xd800))", "surrogates not allowed"),
    ("--data-path {}:it", "it = lambda _: type('Bare', (Few,), {'__init__': lambda _: None, 'first': 0})()",
     "'Bare' object has no attribute 'root'"),
    ("--data-path {}:it", "it = lambda split: Few(split, classes=['a', 'a', 'b'])", "expected a list of unique names"),
    ("--data-path {}:it", "it = lambda split: Few(split, label_sets=numpy.ones((3, 3), dtype=bool))", "(label_sets)"),
    ("--data-path {}:it --multi-label --bce-loss", "it = lambda split: Few(split)", "val has one label per image"),
]  # fmt: skip


def refuse_each(mine, argv, rows):
    for own, code, words in rows:
        mine.write_text(f"{code}\n" if code.startswith("def ") else f"{SAME}\n{code}\n")
        with pytest.raises(UserError) as refusal:
            train.main(config.parse_args([*argv, *own.replace("{}", str(mine)).split()]))
        assert refusal.value.exit_code == 2
        assert words in str(refusal.value), (own, code, str(refusal.value))


@pytest.mark.parametrize("option", sorted({own.split()[0] for own, *_ in UNUSABLE}))
def test_own_code_that_cannot_be_used_is_refused(started, mine, tmp_path, option):
    rows = [row for row in UNUSABLE if row[0].startswith(option)]
    argv = [*map(str, started.argv), "--epochs", "3", "--output-dir", str(tmp_path / "out")]
    run_ranks(refuse_each, 1, mine, argv, rows, log_folder=tmp_path).check()
    assert not [*tmp_path.glob("out/*.pth")]


@pytest.mark.dist
def test_draws_and_buffers_of_own_code_have_the_same_bits_on_any_ranks_and_after_a_kill(started, mine, tmp_path):
    argv = ["--model", f"{mine}:Counting", "--opt", f"{mine}:Noisy", "--criterion", f"{mine}:noisy_loss"]
    argv += ["--global-batch-size", 8, "--batch-size", 4, "--epochs", 2, "--lr-scheduler", f"{mine}:tensor_line"]
    kill = [(0, "torch.optim.Optimizer.zero_grad", 5, "before")]
    started.go_on(tmp_path, tmp_path / "one", *argv).check()
    started.go_on(tmp_path, tmp_path / "two", *argv, world_size=2).check()
    assert started.go_on(tmp_path, tmp_path / "killed", *argv, world_size=2, faults=kill).codes[0] == -9
    started.go_on(tmp_path, tmp_path / "killed", *argv, "--resume", "auto").check()
    records = read_metrics(tmp_path / "one" / "metrics.jsonl")
    for out in ("two", "killed"):
        found, _ = check_same_weights(tmp_path / out, tmp_path / "one", "model", "optimizer")
        assert read_metrics(tmp_path / out / "metrics.jsonl") == records
    assert found["model"]["count"] == 6  # of six steps of two micro-batches, of which the first counts


@pytest.mark.dist
def test_ranks_whose_weights_differ_end_the_run_before_a_save(started, mine, tmp_path):
    argv = [tmp_path / "out", "--opt", f"{mine}:apart", "--global-batch-size", 8, "--batch-size", 4]
    outcome = started.go_on(tmp_path, *argv, world_size=2)
    refused(outcome, "after step 1 ranks have different weights than rank 0: use only", code=1)
    assert not list((tmp_path / "out").glob("*.pth"))


def test_a_model_that_assigns_new_buffers_is_refused_where_micro_batches_would_move_them(started, mine, tmp_path):
    argv = f"--model {mine}:Counting --model-kwargs assigns=True --epochs 1 --global-batch-size 8 --batch-size".split()
    started.go_on(tmp_path, tmp_path / "one", *argv, 8).check()
    outcome = started.go_on(tmp_path, tmp_path / "two", *argv, 4)
    refused(outcome, "--model replaces a buffer in training; update buffers in place", code=1)


def test_modules_of_own_files_are_known_by_their_content_and_have_one_name_each(started, tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "scale.py").write_text("SCALE = 1")
        (folder / "helper.py").write_text("def scale():\n    from parts.scale import SCALE\n")
        (folder / "mine.py").write_text("from helper import scale\nimport utils\n" + SAME)
        (folder / "utils.py").write_text("")  # this project's own is imported
    own, resumed = ["--epochs", 1, "--opt", tmp_path / "a/mine.py:sgd", "--criterion"], ["--resume", "auto"]
    other = started.go_on(tmp_path, tmp_path / "out", *own, tmp_path / "b/mine.py:smooth")
    refused(other, "b/mine.py:smooth imports a different helper than your other code")
    own += [tmp_path / "a/mine.py:smooth"]
    started.go_on(tmp_path, tmp_path / "out", *own).check()
    (tmp_path / "a" / "utils.py").write_text("1")
    started.go_on(tmp_path, tmp_path / "out", *own, *resumed).check()
    (tmp_path / "a" / "parts" / "scale.py").write_text("SCALE = 2")
    words = "the file of --opt (parts), --criterion (parts) has changed since", "--allow-change code"
    refused(started.go_on(tmp_path, tmp_path / "out", *own, *resumed), *words)


def test_the_heat_map_is_the_sum_of_features_by_the_classifiers_weights(tmp_path):
    """Behind a mean over all places Grad-CAM is CAM (arXiv 1512.04150): features times the weights of the class."""
    torch.manual_seed(3)
    model = torchvision.models.resnet18(num_classes=5).eval()
    options = {"val_resize_size": 64, "val_crop_size": 64, "interpolation": "bilinear", "model": "resnet18"}
    options |= {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    torch.save({"model": model.state_dict(), "args": options}, tmp_path / "x.pth")
    picture(90, 70).save(tmp_path / "x.png")
    heat = heat_map(str(tmp_path / "x.pth"), tmp_path / "x.png", "layer4")
    image = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor()])
    image = (image(Image.open(tmp_path / "x.png"))[None] - 0.5) / 0.25
    features = torch.nn.Sequential(*list(model.children())[:-2])(image).detach()
    best = int(model(image).argmax())
    expected = torch.einsum("c,chw->hw", model.fc.weight[best].detach(), features[0]).relu()[None, None]
    expected = torch.nn.functional.interpolate(expected, size=(64, 64), mode="bilinear")[0, 0]
    assert heat.shape == (64, 64)
    assert (heat - expected / expected.max()).abs().max() < 1e-3


# Two runs in one process, as in a notebook or a sweep: each is as in a process of its own, and leaves no trace.
MORE = '''
import gc, os, signal
from torch import nn
import helper

calls = []

def scaled():
    return lambda output, target: helper.FACTOR * nn.functional.cross_entropy(output, target)

def counting():
    return lambda output, target: calls.append(0) or len(calls) * nn.functional.cross_entropy(output, target)

def stopped(*numbers):
    """Change settings; in the third call of the loss change more, then send signals, or fail for a 0."""
    assert gc.get_freeze_count() > 0
    gc.disable()
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = torch.utils.deterministic.fill_uninitialized_memory = False
    def criterion(output, target):
        calls.append(target)
        if len(calls) == 3:
            torch.set_default_dtype(torch.float64)
            for number in numbers:
                os.kill(os.getpid(), number) if number else 1 / 0
        return nn.functional.cross_entropy(output, target)
    return criterion

def untroubled(): return stopped()
def failing(): return stopped(0)
def term(): return stopped(signal.SIGTERM)
def interrupted(): return stopped(signal.SIGINT)
def interrupted_twice(): return stopped(signal.SIGINT, signal.SIGINT)
'''
MINE = PARTS + MORE
OPTIONS = "--batch-size 4 --epochs 2 --print-freq 1 --lr 0.05 --lr-scheduler steplr --lr-step-size 9 --overwrite"


def data(seed):
    found, generator = {}, numpy.random.default_rng(seed)
    for split, number in (("train", 12), ("val", 3)):
        images = generator.integers(0, 256, (number, 32, 32, 3), dtype=numpy.uint8)
        files = [encoded(Image.fromarray(image), "BMP") for image in images]
        names = [f"{split}/class{image % 3}/{image:02d}.bmp" for image in range(number)]
        found[f"data/{split}.tar"] = tar_of(dict(zip(names, files, strict=True)))
    return found


def weights(seed, more=""):
    torch.manual_seed(seed)
    torch.save(dict(Tiny(3).state_dict()), file := io.BytesIO())
    return f"--weights {{}}/w.pth {more}", {"w.pth": file.getvalue()}


# What changes of all code of one's own: by option, the function, the words before and after.
OWN_CODE = {
    "model": ("net", "width: int = 16", "width=8"),
    "opt": ("Signs", "p.grad.sign()", "p.grad.cos()"),
    "criterion": ("focal", "** 2 * each", "** 3 * each"),
    "auto-augment": ("quarters", "90 * random", "45 * random"),
    "lr-scheduler": ("sawtooth", "% 10 / 10", "% 10 / 5"),
    "metrics": ("Surest", "share > 0.9", "share > 0.4"),
    "logger": ("Lines", 'record.get("loss")', '"again"'),
    "data-path": ("Stripes", "return number % 2", "return 1 - number % 2"),
}
CHANGED = MINE
for _, before, after in OWN_CODE.values():
    assert CHANGED.count(before) == 1
    CHANGED = CHANGED.replace(before, after)


def files(seed):
    texts = {"r.toml": f"[optimization]\nweight-decay = 0.{seed}\n"}
    texts |= {"w.csv": f"class,weight\nclass0,1\nclass1,{seed}\nclass2,1\n"}
    return "--recipe {}/r.toml --class-weights {}/w.csv", {**texts, **data(seed)}


# For each kind of input: the options of two runs, and the files that are written before each.
SCALED = "--criterion {}/own/mine.py:scaled"
OWN_WORDS = " ".join(f"--{option} {{}}/own/mine.py:{name}" for option, (name, *_) in OWN_CODE.items())
KINDS = {
    "own code": ((OWN_WORDS, {}), (OWN_WORDS, {"own/mine.py": CHANGED})),
    "a module that own code imports": ((SCALED, {}), (SCALED, {"own/helper.py": "FACTOR = 2\n"})),
    "the state of a module": (("--criterion {}/own/mine.py:counting", {}),) * 2,
    "a module of the same name": (
        (SCALED, {}), (SCALED.replace("own", "other"), {"other/mine.py": MINE, "other/helper.py": "FACTOR = 2\n"}),
    ),
    "images, recipe and class weights": (files(1), files(2)),
    "weights, once refused": (weights(1, "--test-only"), weights(1), weights(2)),
    "checkpoint": ((f"{SCALED} --epochs 1", {}), (f"{SCALED} --resume auto --no-overwrite", {})),
    "determinism": (("--use-deterministic-algorithms", {}), ("", {})),
}  # fmt: skip


def write(folder, files):
    """Write files, all of one time: Python, and whoever else goes by time and size, takes two contents for one."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, (10**9, 10**9))


def argv_of(folder, out, options):
    words = f"{' '.join(SMALL_PLAIN)} --data-path {{}}/data {OPTIONS} {options} --output-dir {{}}/{out}"
    return words.replace("{}", str(folder)).split()


def run_in_a_row(folder, out, runs, is_one_command=False):
    sys.dont_write_bytecode = False
    if is_one_command:
        sys.path.insert(0, str(folder / "own"))
        helper = importlib.import_module("helper")
    args = config.parse_args(argv_of(folder, out, runs[0][0]))
    given = args.flat()
    for options, files in runs:
        write(folder, files)
        args = args if is_one_command else config.parse_args(argv_of(folder, out, options))
        refusal = pytest.raises(UserError, match="does not say how its images are prepared")
        with refusal if "--test-only" in options else nullcontext():
            train.main(args)
        assert not is_one_command or (args.flat() == given and sys.modules["helper"] is helper)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, {"own/mine.py": MINE, "own/helper.py": "FACTOR = 1\n", "r.toml": "", "w.csv": "", **data(1)})
    return tmp_path


def test_there_is_a_pair_of_runs_for_each_option_that_takes_own_code():
    assert {name for name in TABLES if f"{BY_NAME[name].flag} {{}}/own/mine.py:" in OWN_WORDS} == TABLES.keys()


@pytest.mark.parametrize("kind", [*KINDS, "the same options"])
def test_a_second_run_in_a_process_is_that_of_a_fresh_one(kind, folder):
    is_one_command = kind == "the same options"
    runs = KINDS["a module that own code imports" if is_one_command else kind]
    run_ranks(run_in_a_row, 1, folder, "a", runs, is_one_command, log_folder=folder).check()
    for compiled in [*folder.rglob("__pycache__")]:
        shutil.rmtree(compiled)
    for run in runs if kind == "checkpoint" else runs[-1:]:
        run_ranks(run_in_a_row, 1, folder, "b", [run], log_folder=folder).check()
    assert Ending(folder / "a").differences(Ending(folder / "b")) == []
    codes = [json.loads((folder / out / "run.json").read_text())["args"]["code"] for out in "ab"]
    assert codes[0] == codes[1]
    if kind == "own code":
        lines = [(folder / out / "lines.txt").read_text() for out in "ab"]
        assert lines[0].endswith(lines[1])  # behind those of the first run
        assert lines[0].count("again") == len(lines[1].splitlines())


def settings_of_process():
    return {
        "print": builtins.print, "stdout": sys.stdout, "stderr": sys.stderr, "path": [*sys.path],
        "module": sys.modules.get("helper"), "garbage": (gc.isenabled(), gc.get_freeze_count()),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "threads": torch.get_num_threads(),
        "generators": (random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "signals": [signal.getsignal(number) for number in range(1, 16) if number != signal.SIGCHLD],
        "locks": [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if path.endswith(".lock")],
        "children": [child.pid for child in multiprocessing.active_children()],
    }  # fmt: skip


def run_into_trouble(folder):
    torch.use_deterministic_algorithms(True, warn_only=True)
    gc.unfreeze()  # what tests/warm.py has frozen
    before, errors = settings_of_process(), []  # which hold the frames of what was stopped, as a notebook does
    for options, kind in {
        "untroubled": type(None), "interrupted --test-only --resume {}/a/checkpoint.pth": KeyboardInterrupt,
        "failing": ZeroDivisionError, "term": PreemptedError, "interrupted": PreemptedError,
        "interrupted_twice": KeyboardInterrupt, "interrupted --use-deterministic-algorithms": PreemptedError,
    }.items():  # fmt: skip
        argv = argv_of(folder, "a", "--workers 2 --eval-batch-size 1 --criterion {}/own/mine.py:" + options)
        error = None
        try:
            train.main(config.parse_args(argv))
        except BaseException as caught:
            error = caught
        assert type(error) is kind, (options, error)
        errors.append(error)
        after = settings_of_process()
        changed = [(name, before[name], after[name]) for name in before if after[name] != before[name]]
        assert not changed, (options, changed)


def test_a_run_leaves_its_process_as_it_was_however_it_ends(folder):
    run_ranks(run_into_trouble, 1, folder, log_folder=folder).check()
