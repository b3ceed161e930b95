"""A loss of the user's own, tried before it trains."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from errors import UserError, as_user_error
from metrics.own import example_targets
from models.build import begin_training, score_zeros_on
from settings.rules import split_custom
from settings.stages import Parsed


def build_own(args: Parsed, build: Callable[[], Any], num_classes: int, model: nn.Module | None) -> Any:
    """Return a loss of the user's own, tried on some scores of that many classes; UserError if it is none."""
    with as_user_error(f"--criterion {args.optimization.criterion}"):
        torch.manual_seed(args.optimization.seed)  # in a resumed run too
        criterion = build()
        if not callable(criterion):
            raise UserError(f"returned a {type(criterion).__name__}, expected a loss")
        targets = example_targets(args.augmentation, args.data.multi_label, num_classes) if num_classes else []
        if targets:
            scores = torch.arange(len(targets[0]) * num_classes).view(-1, num_classes).cos()
            outputs: list[Tensor | tuple] = [scores]
            if model is not None and split_custom(args.model.model):
                more = _further_outputs(model, args.data.in_chans, args.augmentation.train_crop_size, len(scores))
                if more:
                    outputs.append((scores, *more))
        for target in targets:
            for output in outputs:
                _check_loss(criterion, output, target)
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(args.distributed.device)
    return criterion


def _check_loss(criterion: Any, output: Tensor | tuple, target: Tensor) -> None:
    """Refuse a loss of the user's own that is no mean, has no gradient, or has numbers that nobody trains or saves."""

    def repeated(part: Any) -> Any:
        if not isinstance(part, Tensor) or part.shape[:1] != target.shape[:1]:
            return part
        part = torch.cat([part] * 3)
        return part.requires_grad_() if part.is_floating_point() else part

    # A copy, since the loss may count its calls or keep sums, and the run shall begin with a new one.
    trial = copy.deepcopy(criterion)
    kind = "scores" if isinstance(output, Tensor) else f"a tuple of {len(output)}, as the model returns in training,"
    with as_user_error(f"{kind} and targets of shape {tuple(target.shape)}"):
        loss = trial(output, target)
        # A mean of three copies of a batch is that of one, while a sum is three times it.
        thrice = trial(tree_map(repeated, output), torch.cat([target] * 3))
    is_loss = isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point() and thrice.requires_grad
    if not is_loss or (loss and thrice.isclose(3 * loss)):
        found = f"{loss!r:.40}, and of three copies {thrice!r:.40}"
        raise UserError(f"the loss is {found}; expected the mean over the batch, a 0-d tensor with a gradient")
    if isinstance(criterion, nn.Module):
        is_trained = any(each.requires_grad for each in criterion.parameters())
        if is_trained or not all(map(torch.equal, criterion.buffers(), trial.buffers())):
            raise UserError("a loss's parameters and buffers are not trained or saved; move them into the model")


def _further_outputs(model: nn.Module, in_chans: int, side: int, num_images: int) -> tuple:
    """Return what a model returns beside the scores in training, for black images; its state stays as it is."""
    begin_training(model)
    output = score_zeros_on(next(model.parameters()).device, model, (num_images, in_chans, side, side))
    if isinstance(output, Tensor):
        return ()
    return tuple(output[1:])
