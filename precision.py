"""Number formats: TF32, mixed precision, and the scaling of the loss that float16 needs."""

from typing import Any

import torch

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def set_tf32(*, is_allowed: bool | None) -> None:
    """Let float32 convolutions and matrix products of NVIDIA GPUs round their inputs to TF32, or forbid both.

    Args:
        is_allowed: None leaves torch's own default, and so torchvision's numbers and speed: convolutions only.
    """
    if is_allowed is None:
        return
    # The newer `fp32_precision` would do, but inductor before torch 2.15 still reads these and then refuses to compile
    # (pytorch/pytorch#166387); writing these sets the newer ones too.
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def autocast(args: Any, device: torch.device) -> torch.amp.autocast:
    """Return a context, to be entered as often as wanted, that computes in `--amp-dtype` under `--amp`."""
    return torch.amp.autocast(device.type, dtype=AMP_DTYPES[args.amp_dtype or "float16"], enabled=args.amp)


def build_scaler(args: Any, device: torch.device) -> torch.amp.GradScaler:
    """Return what scales the loss under float16, whose gradients vanish without; elsewhere it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=args.amp and args.amp_dtype != "bfloat16")
