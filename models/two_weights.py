"""Optimizers that train other weights than they evaluate, as schedule-free ones (arXiv 2405.15682)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class TrainedWeights:
    """The weights that an optimizer with `train()` and `eval()` trains, while the model has those to evaluate.

    Evaluations see the weights of `eval()`, and checkpoints hold them as `model` and those of training beside them.
    Afterwards the model has its weights of before in every bit, which `train()` alone would not give back: so a save
    changes no number.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:  # torch's class has no train() and eval()
        self.model = model
        self.optimizer = optimizer
        self._kept: dict[str, Tensor] | None = None
        # Schedule-free optimizers refuse a step before it.
        optimizer.train()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Surround an evaluation or a save; inside another such block it does nothing."""
        if self._kept is not None:
            yield
            return
        # A copy, since `eval()` and `train()` interpolate between both kinds: they round, and do not invert each other.
        self._kept = self._copy()
        self.optimizer.eval()
        evaluated = self._copy()
        self.optimizer.train()
        self._set(evaluated)
        try:
            yield
        finally:
            self._set(self._kept)
            self._kept = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights that are trained, by their names."""
        return self._kept or self._copy()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Give the model the weights that are trained; KeyError if one is missing."""
        self._set({name: state[name] for name, _ in self.model.named_parameters()})

    def _copy(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])
