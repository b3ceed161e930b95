"""The exponential moving average of a model's weights, `--model-ema`."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from errors import counted
from settings.options import ModelOptions, ScheduleOptions


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
        # With the buffers: running statistics of the last weights do not fit averaged ones.
        super().__init__(model, device, use_buffers=True)  # type: ignore[arg-type]  # torch's annotation lacks names
        self.requires_grad_(False)
        self.decay = decay
        self.n_averaged = torch.tensor(0, device="cpu")

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards `model`; copy `model` the first time, and after `n_averaged.fill_(0)`."""
        has_begun = bool(self.n_averaged)
        averaged, copied = ([], []), ([], [])
        own_state = [*self.module.parameters(), *self.module.buffers()]
        for own, new in zip(own_state, [*model.parameters(), *model.buffers()], strict=True):
            kind = averaged if has_begun and own.is_floating_point() else copied
            kind[0].append(own)
            kind[1].append(new.to(own.device))
        # One kernel takes many tensors: a loop over them would launch one for each. torch refuses empty lists.
        if averaged[0]:
            torch._foreach_lerp_(*averaged, 1.0 - self.decay)
        if copied[0]:
            torch._foreach_copy_(*copied)
        self.n_averaged += 1

    def reset(self) -> None:
        """Reset: the next update copies the model. torchvision does so throughout the warm-up."""
        # Weights move far in the warm-up, and an average would keep a share of the first ones for long after it.
        self.n_averaged.zero_()

    def restart(self, model: nn.Module) -> None:
        """Reset to a copy of `model`."""
        self.reset()
        self.module.load_state_dict(model.state_dict())


def ema_decay(model_options: ModelOptions, schedule: ScheduleOptions, global_batch_size: int) -> float:
    """Return the decay of each update of the average of `--model-ema`.

    By torchvision's adjustment the average spans the same share of a run at any batch size, interval and run length:
    1 - decay = (1 - `--model-ema-decay`) x (global batch x steps between updates / epochs), at most 1. Under
    `--no-model-ema-adjust` each update has the decay of `--model-ema-decay`.
    """
    adjust = 1.0
    if model_options.model_ema_adjust:
        adjust = global_batch_size * model_options.model_ema_steps / schedule.epochs
    return 1.0 - min(1.0, (1.0 - model_options.model_ema_decay) * adjust)


def describe_ema(model_options: ModelOptions, schedule: ScheduleOptions, global_batch_size: int) -> str:
    """Return a line with the decay of `--model-ema`, its origin, and whether the average is a copy of the weights."""
    decay = ema_decay(model_options, schedule, global_batch_size)
    line = f"--model-ema: decay {decay:.6g} every {counted(model_options.model_ema_steps, 'step')}"
    if model_options.model_ema_adjust:
        given = f"--model-ema-decay {model_options.model_ema_decay}"
        line += f", {given} adjusted for global batch and --epochs as in torchvision"
    if decay == 0 or schedule.lr_warmup_epochs >= schedule.epochs:
        line += "; the average is a copy of the weights"
    return line
