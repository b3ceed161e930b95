"""docs/extending.md: each example is run, and own code gives the bits of the library's own where it does the same."""

import re

import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms

from checkpointing.archive import load_checkpoint
from settings import config, custom_code
from settings.options import BY_NAME
from tests.endings import read_metrics
from tests.images import picture
from tests.ranks import REPOSITORY
from tests.started import refused, run_train
from tests.test_resume import check_same_weights

SAME = """
import os
import random
import sys
import numpy
import torch
import torchvision
from PIL import Image
from torchvision import transforms
from torch import nn
from tests.tiny import Tiny

def sgd(parameters, lr, weight_decay, momentum):
    return torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, foreach=True)

class Smooth(nn.Module):
    def forward(self, output, target):
        log = output.log_softmax(1)
        return (-0.9 * log.gather(1, target[:, None])[:, 0] - 0.1 * log.mean(1)).mean()

def smooth():
    return Smooth()

def no_loss():
    return 3

def no_optimizer(parameters, lr, weight_decay):
    return [lr]

def needs_more(parameters, lr, weight_decay, rho):
    return None

def smaller():
    return lambda image: image.resize((3, 3))

def line(epoch, epochs):
    return 1 - epoch / epochs

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

apart = lambda parameters, lr, weight_decay: Noisy(parameters, lr, 0, torch.Generator().manual_seed(os.getpid()))
trained = lambda: Moving(is_trained=True)
summed = lambda: nn.CrossEntropyLoss(reduction="sum")
error_rate = lambda: lambda output, target: (output.argmax(1) != target).float().mean()
exits_later = lambda: lambda output, target: sys.exit(0) if len(target) > 6 else smooth()(output, target)
drawn = lambda epoch, epochs: random.random()
tensor_line = lambda epoch, epochs: torch.tensor(1 - epoch / epochs, dtype=torch.float64)

def noisy_loss():
    prior = torch.rand(3)
    return lambda output, target: nn.functional.cross_entropy(output + prior + torch.randn(3), target)

numbers = numpy.random.default_rng(0)
forgetful = lambda: lambda image: image.rotate(numbers.integers(4) * 90)

def below_zero(epoch, epochs):
    return -1.0

def nothing_at_all(*_):
    return None

def fails_later():
    seen = []
    def augment(image):
        seen.append(1)
        return image if len(seen) < 20 else 1 / 0
    return augment

def half_negative(epoch, epochs):
    return 1.0 if epoch == int(epoch) else -1.0

def loss_itself(output, target):
    return torch.nn.functional.cross_entropy(output, target)

def each_image():
    return lambda output, target: torch.nn.functional.cross_entropy(output, target, reduction="none")

from metrics import Curve, Metric

class Count(Metric):
    curves = {"x": Curve(title="x")}
    def __init__(self, value=1.0, name="x", sums=1):
        self.value, self.name, self.sums = value, name, sums
        self.curves = {name: Curve(title="x")}
    def batch_sums(self, output, target, index):
        return [torch.tensor(self.value * len(target))] * self.sums
    def compute(self, sums, count):
        return {self.name: sums[0] / count}

def ones(num_classes):
    return Count()

def twos(num_classes):
    return Count(2.0)

def named_acc1(num_classes):
    return Count(name="acc1")

def two_sums(num_classes):
    return Count(sums=2)

class Items(Count):
    def batch_sums(self, output, target, index):
        return [1.0]

def items(num_classes):
    return Items()

class Hard(Count):
    def batch_sums(self, output, target, index):
        return [(output.argmax(1) == target).sum()]

def hard(num_classes):
    return Hard()

class Mean(Hard):
    def batch_sums(self, output, target, index):
        return [(output.argmax(1) == target).float().mean()]

mean = lambda num_classes: Mean()

class Ungathered(Count):
    def gather(self, *names):
        return {names[0]: 1.0}

def ungathered(num_classes):
    return Ungathered()

class Numpy(Count):
    def compute(self, sums, count):
        import numpy
        return {"x": [1.0, numpy.float32(1)]}

def numpys(num_classes):
    return Numpy()

from pathlib import Path
from loading.source import Source

class Few(Source):
    form, classes = "few", ["a", "b", "c"]
    def __init__(self, root, first=0, **more):
        super().__init__(root)
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

def no_bytes(split):
    return Few(Path(split), read=lambda number: None)

def no_bytes_later(split):
    return Few(Path(split), read=lambda number: None if number else b"")

def booleans(split):
    return Few(Path(split), label=lambda number: number % 2 == 1)

def bare(split):
    return type("Bare", (Few,), {"__init__": lambda self: None, "first": 0})()

def below(split):
    return Few(Path(split), -1)

def beyond(split):
    return Few(Path(split), 1)

def surrogates(split):
    return Few(Path(split), name=lambda number: f"\\ud800{number}")

complex_loss = lambda: lambda output, target: output.mean() * 1j

def alike(split):
    return Few(Path(split), classes=["a", "a", "b"])

def many_labels(split):
    import numpy
    return Few(Path(split), label_sets=numpy.ones((3, 3), dtype=bool))

def with_numpy():
    import numpy
    return lambda image: image.rotate(numpy.random.randint(4) * 90)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SAME)
    return tmp_path / "mine.py"


def go_on(started, tmp_path, out, *argv):
    """Train the second epoch of the finished run again."""
    argv = ["--epochs", 2, "--resume", started.out / "checkpoint-00000003.pth", *argv]
    return started.go_on(tmp_path, tmp_path / out, *argv)


def test_every_example_of_the_page_trains_is_killed_and_resumes(started, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), flags=re.S)
    assert len(blocks) == 10
    mine = tmp_path / "mine.py"
    mine.write_text("\n".join(blocks))
    names = {"model": "net", "opt": "signs", "criterion": "focal", "auto_augment": "quarters",
             "lr_scheduler": "sawtooth", "metrics": "surest", "logger": "Lines", "data_path": "stripes"}  # fmt: skip
    own = [word for name, function in names.items() for word in (BY_NAME[name].flag, f"{mine}:{function}")]
    own += ["--lr", "0.01", "--best-metric", "surest", "--epochs", "3"]
    started.go_on(tmp_path, tmp_path / "whole", *own).check()
    kill = [(0, "torch.optim.Optimizer.zero_grad", 5, "before")]
    assert started.go_on(tmp_path, tmp_path / "killed", *own, faults=kill).codes != [0]
    started.go_on(tmp_path, tmp_path / "killed", *own, "--resume", "auto").check()
    found, _ = check_same_weights(tmp_path / "killed", tmp_path / "whole", "model", "optimizer")
    assert re.fullmatch(", ".join(f"{n} [0-9a-f]{{16}}" for n in names), found["args"]["code"])
    assert found["best"]["metric"] == "val/surest"
    records = [read_metrics(tmp_path / out / "metrics.jsonl") for out in ("whole", "killed")]
    assert records[0] == records[1]
    assert [r["lr"] for r in records[0] if r["kind"] == "train"] == pytest.approx([0.01, 0.009, 0.008])
    lines = [(tmp_path / out / "lines.txt").read_text() for out in ("whole", "killed")]
    assert lines[0] == lines[1]
    assert lines[0].count("train") == 3
    assert found["args"]["code"] in (tmp_path / "killed" / "recipe.toml").read_text()


def test_a_file_of_several_options_is_run_once(mine):
    mine.write_text(SAME + "\nopen(__file__ + '.ran', 'a').write('x')\n")
    args = config.parse_args(["--synthetic", "--opt", f"{mine}:sgd", "--criterion", f"{mine}:smooth"])
    custom_code.check_code(args)
    assert custom_code.load_function("opt", args).__module__ == custom_code.load_function("criterion", args).__module__
    assert mine.with_name("mine.py.ran").read_text() == "x"


def test_own_code_that_does_the_same_gives_the_same_numbers(started, mine, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    started.go_on(tmp_path, theirs, "--label-smoothing", "0.1").check()
    outcome = started.go_on(tmp_path, ours, "--opt", f"{mine}:sgd", "--criterion", f"{mine}:smooth").check()
    found, expected = (load_checkpoint(out / "checkpoint.pth", "it")["model"] for out in (ours, theirs))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert f"--criterion {mine}:smooth" in outcome.output  # the command to evaluate it


def test_an_own_optimizer_and_schedule_have_the_bits_of_the_librarys(started, mine, tmp_path):
    started.go_on(tmp_path, tmp_path / "theirs", "--lr-scheduler", "linearlr").check()
    started.go_on(tmp_path, tmp_path / "ours", "--lr-scheduler", f"{mine}:line", "--opt", f"{mine}:sgd").check()
    check_same_weights(tmp_path / "ours", tmp_path / "theirs", "model", "optimizer")


def test_an_own_augmentation_draws_the_same_with_any_number_of_workers(started, mine, tmp_path):
    own = ["--auto-augment", f"{mine}:with_numpy", "--epochs", 1]
    started.go_on(tmp_path, tmp_path / "none", *own).check()
    started.go_on(tmp_path, tmp_path / "two", *own, "--workers", 2).check()
    check_same_weights(tmp_path / "two", tmp_path / "none", "model")
    started.go_on(tmp_path, tmp_path / "plain", "--epochs", 1).check()
    first, other = (load_checkpoint(tmp_path / out / "checkpoint.pth", "it")["model"] for out in ("none", "plain"))
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_augmentation_that_fails_is_one_line_and_blames_no_image(started, mine, tmp_path, num_workers):
    argv = ["--auto-augment", f"{mine}:fails_later", "--workers", num_workers]
    outcome = started.go_on(tmp_path, tmp_path / "out", *argv)
    refused(outcome, "--auto-augment has failed: ZeroDivisionError: division by zero", code=1)
    assert ".png" not in outcome.output.splitlines()[-1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_own_data_set_that_reads_nothing_later_is_one_line_that_names_the_image(
    started, mine, tmp_path, num_workers
):
    outcome = started.go_on(
        tmp_path, tmp_path / "out", "--data-path", f"{mine}:no_bytes_later", "--workers", num_workers
    )
    refused(outcome, "cannot read image train/", "its source's read failed: TypeError", code=1)


def test_a_resumed_window_of_other_metrics_begins_anew(started, mine, tmp_path):
    argv = ["--epochs", 1, "--print-freq", 100, "--metrics"]
    kill = [(0, "torch.optim.SGD.step", 3, "before")]
    started.go_on(tmp_path, tmp_path / "out", *argv, f"{mine}:ones", faults=kill)
    outcome = started.go_on(tmp_path, tmp_path / "out", *argv, f"{mine}:twos", "--resume", "auto").check()
    assert "the checkpoint's record is of other metrics" in outcome.output
    assert {record["x"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")} == {2.0}


def test_metrics_may_come_and_go(started, mine, tmp_path):
    out, own = tmp_path / "out", ["--metrics", f"{mine}:ones", "--best-metric", "x"]
    started.go_on(tmp_path, out, *own, "--epochs", 1).check()
    started.go_on(tmp_path, out, "--resume", "auto", "--epochs", 1).check()


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


@pytest.mark.parametrize(("own", "words"), [
    ("--opt {}:nothing", "has no function nothing"), ("--criterion {}:smoth", "did you mean smooth"),
    ("--criterion {}:no_loss", "returned a int, expected a loss"),
    ("--opt {}:no_optimizer", "returned a list, expected a torch.optim.Optimizer"),
    ("--opt {}:needs_more", "missing 1 required positional argument: 'rho'"),
    ("--opt {}x.py:sgd", "no such file"), ("--criterion smooth", "unknown loss"),
    ("--criterion {}:smooth --bce-loss", "are different losses; give only one of them"),
    ("--auto-augment {}:smaller", "--auto-augment returned ((3, 3), 'RGB'), expected a PIL image of (32, 32)"),
    ("--auto-augment {}:nothing_at_all", "'NoneType' object is not callable"),
    ("--lr-scheduler {}:below_zero", "its factor in epoch 0 is -1.0; expected 0 or more"),
    ("--lr-scheduler {}:nothing_at_all", "unsupported operand"),
    ("--metrics {}:nothing_at_all", "returned None; expected a metrics.Metric"),
    ("--criterion {}:each_image", "the loss is tensor(["),
    ("--lr-scheduler {}:half_negative --lr-per-step", "its factor in epoch 0.0625 is -1.0; expected 0 or more"),
    ("--metrics {}:named_acc1", "its curve acc1 has a name that is taken"),
    ("--metrics {}:ones {}:twos", "its curve x has a name that is taken"),
    ("--metrics {}:two_sums", "batch_sums returns 2 sums, and its num_sums is 1; give num_sums"),
    ("--criterion {}:exits_later", "code of your own has raised SystemExit(0); let it raise an Exception"),
    ("--criterion {}:complex_loss", "; expected the mean over the batch, a 0-d tensor with a gradient"),
    ("--data-path {}:surrogates", "surrogates not allowed"),
    ("--opt {}.hides.py:sgd", "cannot be run (line 1): OSError: x"),
    ("--opt {}.exits.py:sgd", "cannot be run (line 2): SystemExit: 0"),
    ("--metrics {}:mean", "batch_sums of a batch twice over are not twice its own"),
    ("--criterion {}:summed", ", and of three copies tensor("),
    ("--criterion {}:error_rate", "; expected the mean over the batch, a 0-d tensor with a gradient"),
    ("--criterion {}:Moving", "a loss's parameters and buffers are not trained or saved"),
    ("--criterion {}:trained", "a loss's parameters and buffers are not trained or saved"),
    ("--lr-scheduler {}:drawn", "a second call returns different factors"),
    ("--auto-augment {}:forgetful", "different pixels with the same seed"),
    ("--metrics {}:items", "batch_sums returns no list of tensors; leave .item() out"),
    ("--metrics {}:hard --mixup-alpha 0.2", "targets of shape (2, 3): The size of tensor a (2) must match"),
    ("--metrics {}:ungathered", "tuple index out of range"),
    ("--criterion {}:loss_itself", "loss_itself: loss_itself() missing 2 required positional arguments"),
    ("--metrics {}:numpys", "compute returns a float32 as x; expected a float"),
    ("--data-path {}:below", "a label is -1; expected a whole number from 0 to 2"),
    ("--data-path {}:beyond", "a label is 3; expected a whole number from 0 to 2"),
    ("--data-path {}:booleans", "a label is False; expected a whole number from 0 to 2"),
    ("--data-path {}:no_bytes", "read returned None; expected the bytes of an image's file"),
    ("--data-path {}:bare", "'Bare' object has no attribute 'root'"),
    ("--data-path {}:alike", "classes: expected a list of unique names"),
    ("--data-path {}:many_labels", "several labels (label_sets); give --multi-label"),
    ("--data-path {}:below --multi-label --bce-loss", "a pack of it, or label_sets; val has one label per image"),
    ("--data-path {}:nothing_at_all", "it returned None for val; expected a Source"),
    ("--opt {}:sgd --opt-eps 1", "has no such option"),
])  # fmt: skip
def test_own_code_that_cannot_be_used_is_one_line(started, mine, tmp_path, own, words):
    mine.with_name("mine.py.exits.py").write_text("import sys\nsys.exit(0)\n")
    mine.with_name("mine.py.hides.py").write_text("def __getattr__(name): raise OSError('x')\n")
    outcome = started.go_on(tmp_path, tmp_path / "out", *own.replace("{}", str(mine)).split())
    refused(outcome, words, code=1 if "later" in own else 2)


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
    argv = ["--opt", f"{mine}:apart", "--global-batch-size", 8, "--batch-size", 4]
    outcome = started.go_on(tmp_path, tmp_path / "out", *argv, world_size=2)
    refused(outcome, "after step 1 ranks have different weights than rank 0: use only", code=1)
    assert not list((tmp_path / "out").glob("*.pth"))


def test_a_model_that_assigns_new_buffers_is_refused_where_micro_batches_would_move_them(started, mine, tmp_path):
    argv = ["--model", f"{mine}:Counting", "--model-kwargs", "assigns=True", "--epochs", 1]
    argv += ["--global-batch-size", 8, "--batch-size"]
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


def test_an_evaluation_without_the_loss_says_so(started, mine, tmp_path):
    started.go_on(tmp_path, tmp_path / "out", "--criterion", f"{mine}:smooth", "--epochs", 1).check()
    argv = [*started.argv, "--test-only", "--resume", tmp_path / "out" / "checkpoint.pth"]
    assert "evaluating with cross-entropy; give --criterion" in run_train(tmp_path, *argv).check().output
    assert "evaluating with" not in run_train(tmp_path, *argv, "--criterion", f"{mine}:smooth").check().output


def test_the_heat_map_of_the_page_is_the_sum_of_features_by_the_classifiers_weights(tmp_path):
    """Behind a mean over all places Grad-CAM is CAM (arXiv 1512.04150): features times the weights of the class."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), flags=re.S)
    page = {}
    exec(next(block for block in blocks if "def heat_map" in block), page)
    torch.manual_seed(3)
    model = torchvision.models.resnet18(num_classes=5).eval()
    options = {"val_resize_size": 64, "val_crop_size": 64, "interpolation": "bilinear", "model": "resnet18"}
    options |= {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    torch.save({"model": model.state_dict(), "args": options}, tmp_path / "x.pth")
    picture(90, 70).save(tmp_path / "x.png")
    heat = page["heat_map"](str(tmp_path / "x.pth"), tmp_path / "x.png", "layer4")
    image = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor()])
    image = (image(Image.open(tmp_path / "x.png"))[None] - 0.5) / 0.25
    features = torch.nn.Sequential(*list(model.children())[:-2])(image).detach()
    best = int(model(image).argmax())
    expected = torch.einsum("c,chw->hw", model.fc.weight[best].detach(), features[0]).relu()[None, None]
    expected = torch.nn.functional.interpolate(expected, size=(64, 64), mode="bilinear")[0, 0]
    assert heat.shape == (64, 64)
    assert (heat - expected / expected.max()).abs().max() < 1e-3
