"""The exponential moving average of a model's weights, `--model-ema`."""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from errors import counted
from models.build import compile_model


class ExponentialMovingAverage(AveragedModel):
    """An exponential moving average of a model's weights and buffers.

    Its state dict is that of torch's `AveragedModel`, as torchvision's reference script saves it. The count stays on
    the CPU, so that reading it waits for no GPU, and integer buffers are copied: an average of counts means nothing.

    Args:
        model: the model, whose copy is the first average.
        decay: the weight of the old average in each update.
        device: the device of the average; None for the model's.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device | str | None = "cpu") -> None:
        super().__init__(model, device, use_buffers=True)
        self.requires_grad_(False)
        self.decay = decay
        self.n_averaged = torch.tensor(0, device="cpu")

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards `model`; copy `model` the first time, and after `n_averaged.fill_(0)`."""
        states = ([*each.parameters(), *each.buffers()] for each in (self.module, model))
        pairs = [(own, new.to(own.device)) for own, new in zip(*states, strict=True)]
        has_begun = bool(self.n_averaged)
        averaged = [pair for pair in pairs if has_begun and pair[0].is_floating_point()]
        copied = [pair for pair in pairs if not (has_begun and pair[0].is_floating_point())]
        if averaged:
            torch._foreach_lerp_(*map(list, zip(*averaged, strict=True)), 1.0 - self.decay)
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied, strict=True)))
        self.n_averaged += 1

    def reset(self) -> None:
        """Reset: the next update copies the model. torchvision does so throughout the warm-up."""
        self.n_averaged.zero_()

    def restart(self, model: nn.Module) -> None:
        """Reset to a copy of `model`."""
        self.reset()
        self.module.load_state_dict(model.state_dict())


def ema_decay(args: Any) -> float:
    """Return the decay of each update of the average of `--model-ema`.

    By torchvision's adjustment the average spans the same share of a run at any batch size, interval and run length:
    1 - decay = (1 - `--model-ema-decay`) x (global batch x steps between updates / epochs), at most 1. Under
    `--no-model-ema-adjust` each update has the decay of `--model-ema-decay`.
    """
    adjust = args.global_batch_size * args.model_ema_steps / args.epochs if args.model_ema_adjust else 1.0
    return 1.0 - min(1.0, (1.0 - args.model_ema_decay) * adjust)


def describe_ema(args: Any) -> str:
    """Return a line with the decay of `--model-ema`, its origin, and whether the average is a copy of the weights."""
    decay = ema_decay(args)
    line = f"--model-ema: decay {decay:.6g} every {counted(args.model_ema_steps, 'step')}"
    if args.model_ema_adjust:
        line += f", --model-ema-decay {args.model_ema_decay} adjusted for global batch and --epochs as in torchvision"
    is_copy = decay == 0 or args.lr_warmup_epochs >= args.epochs
    return f"{line}; the average is a copy of the weights" if is_copy else line


def build_ema(args: Any, model: nn.Module) -> ExponentialMovingAverage | None:
    """Return the average that `--model-ema` asks for, or None."""
    if not args.model_ema or args.test_only:
        return None
    print(describe_ema(args))
    model_ema = ExponentialMovingAverage(model, ema_decay(args), device=None)
    compile_model(model_ema.module, args)
    return model_ema
