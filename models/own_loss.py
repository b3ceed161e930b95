"""A loss of the user's own, tried before it trains."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from errors import UserError, in_one_line
from metrics import example_targets
from models.build import further_outputs
from settings.options import split_custom


def build_own(args: Any, build: Callable[[], Any], num_classes: int, model: nn.Module | None) -> Any:
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
