"""Distillation: learn from a teacher as well as from the labels."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpointing.class_order import find_disorder
from checkpointing.guard import compare_classes
from checkpointing.published import fetch_by_name
from checkpointing.weights import HUB, Weights, fetch_from_hub, load_weights
from errors import UserError, as_user_error
from models.build import move_to_device
from models.of_weights import build_evaluated
from settings.options import WHY_TYPED, is_same_model
from settings.packages import find_timm_config
from settings.rules import OwnCode, split_custom
from settings.stages import Parsed


class Distillation(nn.Module):
    """Learn from a teacher as well as from the targets (Touvron et al., arXiv 2012.12877, section 4).

    The loss is (1 - alpha) x the targets' loss + alpha x the teacher's: the cross-entropy with the teacher's best
    class, or temperature squared x the KL divergence of both models' softened probabilities, a mean over images (DeiT's
    own code divides it by the number of classes too). A student with a second head, for its distillation token, learns
    the targets by the first and the teacher by the second. The teacher sees the student's images, augmented and mixed.

    Args:
        criterion: the loss of the targets, and the whole loss in evaluation.
        teacher: maps the student's images to scores, in evaluation mode.
        student: the bare model; a hook notes its images in training.
        is_soft: learn the teacher's probabilities, not its best class.
        alpha: the teacher's share of the loss.
        temperature: softens the probabilities; scores are divided by it.
    """

    def __init__(
        self, criterion: nn.Module, teacher: nn.Module, student: nn.Module, *,
        is_soft: bool = False, alpha: float = 0.5, temperature: float = 3.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.criterion = criterion
        self.teacher = teacher
        self.is_soft = is_soft
        self.alpha = alpha
        self.temperature = temperature
        set_distilled = getattr(student, "set_distilled_training", None)
        self.has_token = set_distilled is not None
        if self.has_token:
            set_distilled(True)  # return both heads' scores in training; their mean otherwise
        # A loss is given scores and targets alone, so that a hook takes the images on their way into the student.
        self._image: Tensor | None = None
        student.register_forward_pre_hook(self._note)

    def _note(self, student: nn.Module, inputs: tuple[Tensor]) -> None:
        if student.training:
            self._image = inputs[0]

    def forward(self, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Return the loss, a 0-d tensor, for the images that the student has just seen."""
        if not torch.is_grad_enabled():  # in evaluation
            return self.criterion(output, target)
        image = self._image
        self._image = None
        # Not inference mode, whose tensors autograd refuses in the loss.
        with torch.no_grad():
            taught = self.teacher(image).float()
        if self.has_token:
            output, learned = output
        else:
            learned = output if isinstance(output, Tensor) else output[0]
        if self.is_soft:
            ours = F.log_softmax(learned.float() / self.temperature, dim=1)
            theirs = F.log_softmax(taught / self.temperature, dim=1)
            # Softened scores have gradients smaller by the square of the temperature (Hinton et al., arXiv 1503.02531).
            loss = F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * self.temperature**2
        else:
            loss = F.cross_entropy(learned.float(), taught.argmax(dim=1))
        return (1 - self.alpha) * self.criterion(output, target) + self.alpha * loss


def distil(args: Parsed, student: nn.Module, criterion: nn.Module, classes: list[str]) -> Distillation:
    """Return the loss of training with `--teacher`, around that of the targets; UserError for a misfit."""
    teacher = move_to_device(build_teacher(args, classes), args.precision, next(student.parameters()).device)
    return Distillation(
        criterion, teacher, student, is_soft=args.optimization.distillation == "soft",
        alpha=args.optimization.distillation_alpha, temperature=args.optimization.distillation_temperature,
    )  # fmt: skip


def build_teacher(args: Parsed, classes: list[str]) -> nn.Module:
    """Return the model of `--teacher` on the CPU; UserError if it is not found, or is of other classes or images."""
    source = f"--teacher {args.optimization.teacher}"
    size = args.augmentation.train_crop_size
    weights = _load_teacher(args.optimization.teacher, source)
    name = weights.options.get("model")
    if name is None:
        raise UserError(f"{source} does not name its model; give a checkpoint, whose `args` name it")
    is_custom = split_custom(name) is not None
    if is_custom:
        # Code runs if the command line itself names it, as the student's; a checkpoint's word is not enough.
        if not (isinstance(args.model.model, OwnCode) and is_same_model(name, args.model.model)):
            raise UserError(f"{source} is a model of {name}, {WHY_TYPED}")
        name = args.model.model
    with as_user_error(source):
        given = {"val_crop_size": size, "val_resize_size": size}
        model, own, _ = build_evaluated(args.optimization.teacher, name, weights, given, is_typed=is_custom)
        for side in (args.augmentation.train_crop_size_min or size, size):
            num_classes = model(torch.zeros(2, own.data.in_chans, side, side)).shape[1]
    if num_classes != len(classes):
        raise UserError(
            f"{source} has {num_classes} classes, but the data has {len(classes)}; give a teacher with the same classes"
        )
    # Published weights may have other names for the same classes.
    if Path(args.optimization.teacher).is_file() and weights.classes is not None:
        differences = compare_classes(weights.classes, classes)
    else:
        differences = find_disorder(weights.script, classes)
    if differences:
        raise UserError(f"{source} has different classes: {differences[0]}; give a teacher with the same classes")
    print(f"{source}: {weights.kind}")
    if (own.augmentation.mean, own.augmentation.std) != (args.augmentation.mean, args.augmentation.std):
        mean, std = (" ".join(map(str, values)) for values in (own.augmentation.mean, own.augmentation.std))
        origin = f"--mean {mean} --std {std} --in-chans {own.data.in_chans}"
        raise UserError(f"{source} was trained with {origin}; give the student the same")
    return model.eval().requires_grad_(False)


def _load_teacher(name: str, source: str) -> Weights:
    """Return the weights of a file, of timm's tag on the Hugging Face hub, or of torchvision's name."""
    if name.startswith("timm/"):
        found = find_timm_config(name)
        if found is None or not found.hf_hub_id:
            raise UserError(f"{source}: timm has no weights of that name; give timm/NAME.TAG, or a checkpoint")
        weights = load_weights(fetch_from_hub(f"{HUB}{found.hf_hub_id}", source), name=source)
        weights.options["model"] = name
        return weights
    if Path(name).is_file():
        return load_weights(Path(name), name=source)
    with as_user_error("--teacher"):
        return fetch_by_name(name)
