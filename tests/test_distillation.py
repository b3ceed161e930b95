"""Learning from a teacher: DeiT's formulas, and both heads; test_promises.py has the same bits whatever happens."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checkpointing.archive import load_checkpoint
from errors import UserError
from models.build import build_model
from models.losses import AuxiliaryLoss
from models.teacher import Distillation, build_loss, build_teacher
from settings import config
from tests.endings import differing
from tests.images import write_images
from tests.ranks import REPOSITORY
from tests.runs import FLAG, Runs
from tests.started import SMALL

NUM_CLASSES = 5


def expected_loss(first, second, taught, target, *, is_soft, alpha, temperature, smoothing):
    """Return DeiT's loss in float64.

    (1 - alpha) CE(first, target) + alpha CE(second, argmax taught), or alpha T^2 KL(taught / T || second / T).
    """
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
