"""More than one loop over one set of weights: a teacher, layers frozen at first, two kinds of weights or of outputs."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checkpointing.archive import load_checkpoint
from errors import UserError
from models.auxiliary_loss import AuxiliaryLoss
from models.build import build_model
from models.losses import build_loss
from models.teacher import Distillation, build_teacher
from settings import config
from tests.endings import differing, read_metrics
from tests.exports import run_tool
from tests.images import write_images
from tests.ranks import REPOSITORY
from tests.runs import FLAG, OPTIONS, Runs, assert_same
from tests.started import SMALL, refused, run_train

NUM_CLASSES = 5


def expected_loss(first, second, taught, target, *, is_soft, alpha, temperature, smoothing):
    """(1 - alpha) CE(first, target) + alpha CE(second, argmax taught), or alpha T^2 KL(taught / T || second / T)."""
    first, second, taught = first.double(), second.double(), taught.double()
    shares = (target if target.ndim == 2 else nn.functional.one_hot(target, first.size(1))).double()
    base = -((shares * (1 - smoothing) + smoothing / first.size(1)) * first.softmax(1).log()).sum(1)
    if is_soft:
        p, q = (second / temperature).softmax(1), (taught / temperature).softmax(1)
        extra = temperature**2 * (q * (q / p).log()).sum(1)
    else:
        extra = -second.softmax(1).log()[range(len(taught)), taught.max(1).indices]
    return ((1 - alpha) * base + alpha * extra).mean().item()


def two_heads():
    """One block of DeiT's tiny model, with a distillation token, on images of a patch."""
    sizes = {"img_size": 4, "patch_size": 4, "depth": 1, "embed_dim": 12}
    return timm.create_model("deit_tiny_distilled_patch16_224", num_classes=NUM_CLASSES, **sizes)


def one_head():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, NUM_CLASSES))


@pytest.mark.parametrize(("is_mixed", "smoothing"), [(False, 0.0), (True, 0.1)])
@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("rule", [(False, 0.5, 3.0), (True, 0.1, 3.0), (True, 0.7, 1.0)])
def test_the_loss_is_deits_and_an_evaluation_knows_no_teacher(rule, has_token, is_mixed, smoothing):
    torch.manual_seed(0)
    student, teacher = (two_heads() if has_token else one_head()), one_head().eval()
    base = nn.CrossEntropyLoss(label_smoothing=smoothing)
    rule = dict(zip(("is_soft", "alpha", "temperature"), rule, strict=True))
    criterion = Distillation(base, teacher, student, **rule)
    image = torch.randn(6, 3, 4, 4)
    target = torch.rand(6, NUM_CLASSES).softmax(1) if is_mixed else torch.tensor([0, 1, 2, 3, 4, 0])
    output = student(image)
    first, second = output if has_token else (output, output)
    expected = expected_loss(first, second, teacher(image), target, **rule, smoothing=smoothing)
    loss = criterion(output, target)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    teacher.register_forward_hook(lambda *_: pytest.fail("the teacher is asked"))
    with torch.inference_mode():
        output = student.eval()(image)
        assert torch.equal(criterion(output, target), base(output, target))


def test_a_compiled_student_is_taught_on_its_own_images():
    torch.manual_seed(0)
    student, teacher = one_head(), one_head().eval()
    criterion = Distillation(nn.CrossEntropyLoss(), teacher, student)
    student.compile(backend="eager", dynamic=False)
    for number in range(3):
        image, target = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 3])
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            output = student(image)
        expected = (cross_entropy(output, target) + cross_entropy(output, teacher(image).argmax(1))) / 2
        torch.testing.assert_close(criterion(output, target), expected)


def test_an_auxiliary_classifier_learns_the_targets_alone():
    torch.manual_seed(0)
    main, auxiliary, image = torch.randn(4, NUM_CLASSES), torch.randn(4, NUM_CLASSES), torch.randn(4, 3, 4, 4)
    teacher, target, student = one_head().eval(), torch.tensor([0, 1, 2, 3]), nn.Identity()
    criterion = Distillation(AuxiliaryLoss(nn.CrossEntropyLoss(), 0.3), teacher, student, alpha=0.25)
    student(image)
    expected = 0.75 * (cross_entropy(main, target) + 0.3 * cross_entropy(auxiliary, target))
    expected += 0.25 * cross_entropy(main, teacher(image).argmax(1))
    torch.testing.assert_close(criterion((main, auxiliary), target), expected)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = Runs(write_images(folder / "images", {"train": [10, 10, 9], "val": [2, 2, 3]}), folder)
    # The statistics of the student's images, which timm configures otherwise for the teacher.
    imagenet = ["--mean", 0.485, 0.456, 0.406, "--std", 0.229, 0.224, 0.225]
    runs.run("teacher", 1, "--model", "timm/test_resnet", "--epochs", 2, *imagenet).check()
    runs.teacher = folder / "teacher" / "best.pth"
    return runs


def test_the_teacher_changes_the_weights_and_is_not_saved(taught):
    for name, argv in (("taught", ["--teacher", taught.teacher]), ("alone", [])):
        taught.run(name, 1, FLAG, "--epochs", 2, *argv).check()
    state = load_checkpoint(taught.folder / "taught" / "checkpoint.pth", "it")
    assert state["model"].keys() == timm.create_model("test_efficientnet", num_classes=3).state_dict().keys()
    assert differing(taught.final("alone"), taught.final("taught")) != []
    output = (taught.folder / "taught-logs" / "rank0.log").read_text()
    assert f"--teacher {taught.teacher}: the raw weights of timm/test_resnet" in output


def test_the_options_of_the_loss_reach_it_and_an_evaluation_builds_no_teacher(taught):
    words = ["--teacher", str(taught.teacher), "--distillation", "soft", "--label-smoothing", "0.1"]
    words += ["--distillation-alpha", "0.7", "--distillation-temperature", "2"]
    args = config.parse_args(["--synthetic", *SMALL, *words])
    student, images = build_model(args, 3), SimpleNamespace(classes=["class0", "class1", "class2"])
    criterion, image, target = build_loss(args, student, None, images), torch.randn(4, 3, 32, 32), torch.arange(4) % 3
    output, rule = student(image), {"is_soft": True, "alpha": 0.7, "temperature": 2.0, "smoothing": 0.1}
    expected = expected_loss(output, output, criterion.teacher(image), target, **rule)
    assert criterion(output, target).item() == pytest.approx(expected, rel=1e-5)
    assert not isinstance(build_loss(args.replaced(test_only=True), student, None, images), Distillation)


def test_a_teacher_that_cannot_be_used_is_one_line(taught, tmp_path):
    def refuse(name, words, content=None, *, more=()):
        if content is not None:
            torch.save(content, tmp_path / name)
        teacher = str(tmp_path / name) if name.endswith(".pth") else name
        args = config.parse_args(["--synthetic", *SMALL, "--teacher", teacher, *more])
        with pytest.raises(UserError, match=words) as refusal:
            build_teacher(args, ["class0", "class1", "class2"])
        assert "\n" not in str(refusal.value)

    refuse("none.pth", "no such file")
    refuse("resnet5O", "did you mean resnet50")
    refuse("timm/nothing", "timm has no weights of that name")
    refuse("bare.pth", "does not name its model", timm.create_model("test_resnet").state_dict())
    state = torch.load(taught.teacher, weights_only=True)
    refuse("swapped.pth", "class 1 is class2", {**state, "data": {"classes": ["class0", "class2", "class1"]}})
    refuse("code.pth", "the command line names it", {**state, "args": {"model": f"{REPOSITORY}/models/build.py:build"}})
    seven = {"model": timm.create_model("test_resnet", num_classes=7).state_dict(), "arch": "timm/test_resnet"}
    refuse(str(taught.teacher), "with --mean 0.485 0.456 0.406", more=["--mean", "0.4", "0.4", "0.4"])
    refuse("seven.pth", "has 7 classes, but the data has 3", seven)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=1).state_dict()
    vit = {"model": vit, "args": {"model": "timm/vit_tiny_patch16_224", "model_kwargs": ["depth=1"]}}
    sizes = ["--epochs", "9", "--crop-ramp-epochs", "0", "4", "--train-crop-size", "160", "--train-crop-size-min"]
    refuse("vit.pth", "96", vit, more=[*sizes, "96"])


PLAIN_OPTIONS = " ".join(OPTIONS).replace("--layer-decay 0.9", "").split()


def compare(runs, *argv, step):
    runs.run("undisturbed", 1, FLAG, *argv).check()
    for world_size, number in [(1, 2), (2, 4)]:  # of that process
        argv_of_start = [FLAG, *argv, "--resume", "auto", "--checkpoint-steps", 1]
        killed = runs.run("killed", world_size, *argv_of_start, faults=[(0, step, number, "after")])
        assert -9 in killed.codes, killed.output
    runs.run("killed", 1, FLAG, *argv, "--resume", "auto").check()
    assert_same(runs, "killed")


def model_of(path):
    return load_checkpoint(path, str(path))["model"]


def test_the_classifier_trains_first_and_then_everything(image_folder, tmp_path):
    runs = Runs(image_folder, tmp_path, PLAIN_OPTIONS)
    argv = ["--freeze-epochs", 1, "--model", "timm/tiny_test"]
    compare(runs, *argv, step="torch.optim.SGD.step")
    args = config.parse_args(runs.argv("x", *argv))
    first = build_model(args, 3).state_dict()
    runs.run("first", 1, FLAG, *argv, "--stop-epoch", 1).check()
    after = model_of(tmp_path / "first" / "checkpoint.pth")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, first[name])}
    assert moved == {"fc.weight", "fc.bias"}  # neither weights nor statistics below it
    last = model_of(tmp_path / "undisturbed" / "checkpoint.pth")
    assert all(not torch.equal(tensor, after[name]) for name, tensor in last.items())
    runs.run("frozen", 1, FLAG, "--model", "timm/tiny_test", "--freeze", "--stop-epoch", 1).check()
    assert differing(after, model_of(tmp_path / "frozen" / "checkpoint.pth")) == []
    records = [[each for each in runs.metrics(name) if each["step"] <= 3] for name in ("undisturbed", "frozen")]
    for ours, theirs in zip(*records, strict=True):
        assert (ours.get("loss"), ours.get("grad_norm")) == (theirs.get("loss"), theirs.get("grad_norm"))


SCHEDULE_FREE = """
import schedulefree

def adamw(params, lr, weight_decay):
    return schedulefree.AdamWScheduleFree(params, lr=lr, weight_decay=weight_decay, warmup_steps=2)
"""


def test_a_schedule_free_optimizer_evaluates_its_average_and_trains_its_own_weights(image_folder, tmp_path):
    pytest.importorskip("schedulefree")
    (tmp_path / "own.py").write_text(SCHEDULE_FREE)
    runs = Runs(image_folder, tmp_path, [*PLAIN_OPTIONS, "--opt", f"{tmp_path / 'own.py'}:adamw", "--lr", "0.01"])
    argv = ["--model", "timm/tiny_test", "--lr-scheduler", "steplr", "--no-model-ema", "--lr-warmup-epochs", 0]
    compare(runs, *argv, step="schedulefree.adamw_schedulefree.AdamWScheduleFree.step")  # saved more often, too
    state = load_checkpoint(tmp_path / "undisturbed" / "checkpoint.pth", "it")
    optimizer = state["optimizer"]
    names = [name for name, _ in build_model(config.parse_args(runs.argv("x", *argv)), 3).named_parameters()]
    order = [number for group in optimizer["param_groups"] for number in group["params"]]
    assert sorted(order) == [*range(len(names))]
    model, trained = state["model"], state["trained_weights"]
    assert trained.keys() == set(names)
    zs = [optimizer["state"][number]["z"] for number in order]
    for name in names:
        like = [z for z in zs if z.shape == model[name].shape]
        assert min((0.1 * z + 0.9 * model[name] - trained[name]).abs().max() for z in like) < 1e-5
        assert not torch.equal(model[name], trained[name])
    best = tmp_path / "undisturbed" / "checkpoint.pth"
    argv = ["--test-only", "--resume", best, "--data-path", image_folder, "--device", "cpu", "--workers", 0]
    said = run_train(tmp_path, *argv).check().output
    recorded = [each for each in runs.metrics("undisturbed") if each["kind"] == "val"][-1]
    assert f"Test: Acc@1 {recorded['acc1']:.3f}" in said
    assert f"loss {recorded['loss']:.3f}" in said


DEEP = """
from torch import nn
from torch.nn import functional as F

class Deep(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.early, self.fc = nn.Linear(8, num_classes), nn.Linear(8, num_classes)

    def forward(self, images):
        features = self.stem(images)
        return self.fc(features.mean((2, 3))), self.early(features.amax((2, 3))), {"features": features}

net = Deep

def loss():
    def compute(output, target):
        if not isinstance(output, tuple):  # in evaluation
            return F.cross_entropy(output, target)
        scores, early, more = output
        return F.cross_entropy(scores, target) + 0.5 * F.cross_entropy(early, target)
    return compute

scores_only = lambda: F.cross_entropy
"""


def test_a_model_of_several_outputs_trains_by_a_loss_of_ones_own_alone(image_folder, tmp_path):
    mine, out, images = tmp_path / "own.py", tmp_path / "out", image_folder / "val"
    mine.write_text(DEEP)
    argv = [*SMALL, *"--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --batch-size 8 --epochs 2 --print-freq 1".split(), FLAG]
    argv += ["--data-path", image_folder, "--model", f"{mine}:net", "--output-dir", out]
    refused(run_train(tmp_path, *argv), "its output is a tuple of 3, which needs a loss of your own: give --criterion")
    outcome = run_train(tmp_path, *argv, "--criterion", f"{mine}:scores_only")
    refused(outcome, "--criterion", "a tuple of 3, as the model returns in training")
    run_train(tmp_path, *argv, "--criterion", f"{mine}:loss").check()
    exec(DEEP, defined := {})
    torch.manual_seed(0)
    assert not torch.equal(model_of(out / "checkpoint.pth")["early.weight"], defined["net"](3).early.weight)
    val = [each for each in read_metrics(out / "metrics.jsonl") if each["kind"] == "val"][-1]
    model = ["--model", f"{mine}:net"]
    _, output = run_tool(tmp_path, "predict", out / "checkpoint.pth", images, *model, "--json")
    formats = ["--format", "onnx", "torch-export", "--output", tmp_path]
    run_tool(tmp_path, "export", out / "checkpoint.pth", *model, *formats)
    expected = json.loads(output)["images"]
    # The loss of an evaluation is that of the scores alone, which tools give.
    shares = [{top["class"]: top["probability"] for top in each["top"]} for each in expected]
    truths = [Path(each["file"]).parent.name for each in expected]
    losses = [-math.log(share[truth]) for share, truth in zip(shares, truths, strict=True)]
    assert val["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-2)
    for file in ("net.onnx", "net.pt2"):
        found = json.loads(run_tool(tmp_path, "predict", tmp_path / file, images, "--json")[1])["images"]
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours["file"], ours["class"]) == (theirs["file"], theirs["class"])
            assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-4)
    _, text = run_tool(tmp_path, "evaluate", out / "checkpoint.pth", *model, "--set", f"val={images}", "--workers", 0)
    assert f"{val['acc1']:.3f}" in text
    said = run_train(tmp_path, *argv, "--test-only", "--resume", out / "checkpoint.pth").check().output
    assert f"Test: Acc@1 {val['acc1']:.3f}" in said
