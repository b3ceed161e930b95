"""Losses: by name, weighted by class, of auxiliary classifiers, and of the user's own."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from errors import UserError, counted, did_you_mean, in_one_line
from loading.lists import read_table
from loading.source import count_classes
from metrics import example_targets
from models.build import AUXILIARY_WEIGHTS, further_outputs
from settings.choices import LOSSES
from settings.custom_code import load_function
from settings.options import split_custom
from transforms import one_hot


def soften(output: Tensor, target: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return scores and their soft targets, smoothed, in float32 at least.

    Not in the dtype of autocast, which rounds 0.2005 to 0.2, no longer above a threshold of 0.2.
    """
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    target = one_hot(target, output.size(1)) if target.ndim == 1 else target
    return output, target.to(output.dtype) * (1.0 - label_smoothing) + label_smoothing / output.size(1)


class BinaryCrossEntropy(nn.Module):
    """One binary decision for each class (Wightman et al., ResNet strikes back, arXiv 2110.00476).

    Args:
        label_smoothing: the share of the target that is spread over all classes.
        bce_target_thresh: targets above it become 1, others 0; None leaves targets as they are.
        weight: (num_classes,) factors of the terms of positive targets in training, torch's `pos_weight`, or None.
    """

    def __init__(
        self, label_smoothing: float = 0.0, bce_target_thresh: float | None = None, weight: Tensor | None = None
    ) -> None:
        super().__init__()
        self.label_smoothing, self.target_threshold, self.weight = label_smoothing, bce_target_thresh, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images and classes of (B, num_classes) logits, for (B,) classes or soft targets."""
        output, target = soften(output, target, self.label_smoothing)
        if self.target_threshold is not None:
            target = target.gt(self.target_threshold).to(output.dtype)
        weight = self.weight if torch.is_grad_enabled() else None  # losses of evaluations are comparable
        return F.binary_cross_entropy_with_logits(output, target, pos_weight=weight)


class CrossEntropy(nn.Module):
    """Cross-entropy, whose terms may be weighted by their classes in training.

    A weighted one is the mean over images, as torch's for targets that are probabilities, whose sum over a set does not
    depend on how the set is cut into batches; torch's for class indices divides by the sum of a batch's weights.
    """

    def __init__(self, label_smoothing: float = 0.0, weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing, self.weight = label_smoothing, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images of (B, num_classes) scores and (B,) classes or (B, num_classes) soft targets."""
        weight = self.weight if torch.is_grad_enabled() else None  # losses of evaluations are comparable
        if target.ndim == 1 and weight is not None:
            output, target = soften(output, target, 0.0)
        return F.cross_entropy(output, target, weight, label_smoothing=self.label_smoothing)


class FocalLoss(nn.Module):
    """The focal loss of the softmax (Lin et al., arXiv 1708.02002): each term of the cross-entropy times (1 - p)^gamma.

    p is the probability of the term's class, so that images which are classified well count less. Targets may be soft,
    and are smoothed first. Terms may be weighted by their classes in training. The result is the mean over images.
    """

    def __init__(self, label_smoothing: float = 0.0, focal_gamma: float = 2.0, weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing, self.focal_gamma, self.weight = label_smoothing, focal_gamma, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images of (B, num_classes) scores and (B,) classes or (B, num_classes) soft targets."""
        output, target = soften(output, target, self.label_smoothing)
        log_probability = output.log_softmax(dim=1)
        # A power below 1 has no slope at zero, where an image is certain.
        doubt = torch.expm1(log_probability).neg().clamp(min=torch.finfo(log_probability.dtype).tiny)
        terms = -target * doubt.pow(self.focal_gamma) * log_probability
        if self.weight is not None and torch.is_grad_enabled():  # losses of evaluations are comparable
            terms = terms * self.weight
        return terms.sum(dim=1).mean()


def class_weights(args: Any, dataset: Dataset) -> Tensor:
    """Return (num_classes,) float32 on the device: the weights of `--class-weights` for a training set.

    Balanced ones are images / (classes x images of the class), as scikit-learn's; with `--bce-loss` negatives /
    positives, as torch's page on `BCEWithLogitsLoss` has it.

    Raises:
        UserError: the file cannot be read, or does not give one weight above 0 to each class.
    """
    if args.class_weights == "balanced":
        counts = count_classes(dataset.index).clip(min=1)
        others = (len(dataset) - counts).clip(min=1) if args.bce_loss else len(dataset) / len(counts)
        return torch.tensor(others / counts, dtype=torch.float32, device=args.device)
    found = {}
    with in_one_line(f"--class-weights {args.class_weights}"):
        for line, row in read_table(Path(args.class_weights), ("class", "weight")):
            name, weight = str(row["class"]), float(row["weight"])
            if name not in dataset.classes or name in found:
                reason = "listed twice" if name in found else f"no class{did_you_mean(name, dataset.classes)}"
                raise UserError(f"line {line}: {name} is {reason}")
            if not 1e-6 <= weight <= 1e6:
                raise UserError(f"line {line}: the weight is {weight:g}; expected 0.000001 to 1,000,000")
            found[name] = weight
        if missing := [name for name in dataset.classes if name not in found]:
            raise UserError(f"{counted(len(missing), 'class')} missing, such as {missing[0]}; give each class a weight")
    return torch.tensor([found[name] for name in dataset.classes], dtype=torch.float32, device=args.device)


class AuxiliaryLoss(nn.Module):
    """Add the losses of auxiliary classifiers, whose scores GoogLeNet and Inception v3 return after the main ones.

    `criterion` is the loss of one classifier, and `weight` that of each auxiliary one's loss.
    """

    def __init__(self, criterion: nn.Module, weight: float) -> None:
        super().__init__()
        self.criterion, self.weight = criterion, weight

    def forward(self, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Return the loss of (B, num_classes) scores, or of a tuple of main and auxiliary scores."""
        if isinstance(output, Tensor):  # in evaluation
            return self.criterion(output, target)
        main, *auxiliary = output
        losses = [self.criterion(scores, target) for scores in auxiliary if scores is not None]
        return self.criterion(main, target) + self.weight * torch.stack(losses).sum()


def build_criterion(args: Any, train: Dataset | None = None, model: nn.Module | None = None) -> nn.Module:
    """Return the loss of the options; `--class-weights` weighs the classes of `train`. UserError if it is none.

    A loss of the user's own is tried on outputs of the `model`, which may be tuples that begin with the scores.
    """
    name = args.criterion or ("bce" if args.bce_loss else "cross_entropy")
    build = load_function("criterion", args, name)
    if split_custom(name):
        criterion = _build_own(args, build, 0 if train is None else len(train.classes), model)
    else:
        weight = class_weights(args, train) if args.class_weights and train is not None else None
        criterion = build(**{option: getattr(args, option) for option in LOSSES[name].options}, weight=weight)
    weight = AUXILIARY_WEIGHTS.get(args.model)
    return criterion if weight is None else AuxiliaryLoss(criterion, weight)


def _build_own(args: Any, build: Callable[[], Any], num_classes: int, model: nn.Module | None) -> Any:
    """Return a loss of the user's own, tried on some scores of that many classes; UserError if it is none."""
    with in_one_line(f"--criterion {args.criterion}"):
        torch.manual_seed(args.seed)  # in a resumed run too
        criterion = build()
        if not callable(criterion):
            raise UserError(f"returned a {type(criterion).__name__}, expected a loss")
        targets = example_targets(args, num_classes) if num_classes else []
        if targets:
            scores = torch.arange(len(targets[0]) * num_classes).view(-1, num_classes).cos()
            more = further_outputs(model, args, len(scores)) if model is not None and split_custom(args.model) else ()
            outputs = [scores, (scores, *more)] if more else [scores]
        for target in targets:
            for output in outputs:
                _check_loss(criterion, output, target)
    return criterion.to(args.device) if isinstance(criterion, nn.Module) else criterion


def _check_loss(criterion: Any, output: Tensor | tuple, target: Tensor) -> None:
    """Refuse a loss of the user's own that is no mean, has no gradient, or has numbers that nobody trains or saves."""

    def repeated(part: Any) -> Any:
        is_batch = isinstance(part, Tensor) and part.shape[:1] == target.shape[:1]
        part = torch.cat([part] * 3) if is_batch else part
        return part.requires_grad_() if is_batch and part.is_floating_point() else part

    trial = copy.deepcopy(criterion)
    kind = "scores" if isinstance(output, Tensor) else f"a tuple of {len(output)}, as the model returns in training,"
    with in_one_line(f"{kind} and targets of shape {tuple(target.shape)}"):
        loss, thrice = trial(output, target), trial(tree_map(repeated, output), torch.cat([target] * 3))
    is_loss = isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point() and thrice.requires_grad
    if not is_loss or (loss and thrice.isclose(3 * loss)):
        found = f"{loss!r:.40}, and of three copies {thrice!r:.40}"
        raise UserError(f"the loss is {found}; expected the mean over the batch, a 0-d tensor with a gradient")
    if isinstance(criterion, nn.Module):
        is_trained = any(each.requires_grad for each in criterion.parameters())
        if is_trained or not all(map(torch.equal, criterion.buffers(), trial.buffers())):
            raise UserError("a loss's parameters and buffers are not trained or saved; move them into the model")
