"""Compile a model, in place so that its state dict keeps its names."""

import importlib
import os
from typing import Any

import torch
from torch import nn

from distributed.lending import at_end
from errors import UserError
from files import own_temporary_folder
from settings.options import AugmentationOptions, PrecisionOptions


def check_accumulation(mode: str, device: str) -> None:
    """Raise UserError if a mode of `--compile` cannot be used with gradient accumulation."""
    if mode in ("reduce-overhead", "max-autotune") and torch.device(device).type == "cuda":
        advice = "use --compile default, or as many processes as micro-batches"
        raise UserError(f"--compile {mode} records CUDA graphs, which overwrite accumulated gradients; {advice}")


def compile_in_place(model: nn.Module, precision: PrecisionOptions, augmentation: AugmentationOptions) -> None:
    """Compile a model as `--compile` says.

    Each size of image is compiled separately. Kernels for any size would be slower, and torch would choose them by the
    sizes that the process has met, so a resumed run would compute with other kernels.
    """
    smallest = augmentation.train_crop_size_min or augmentation.train_crop_size
    # Sizes of training crops, mostly 32 px apart; full and last batches of evaluation, by the model and its average.
    num_graphs = (augmentation.train_crop_size - smallest) // 32 + 3 + 2 * 2
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    at_end(torch.compiler.reset)  # graphs of this run would count against the limit in the next one
    # The masks of dropout and stochastic depth are those of an uncompiled model.
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.fallback_random = True
    device = next(model.parameters(), torch.empty(0)).device
    caches = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    if device.type == "cpu" and caches.cache_dir() == os.path.abspath(caches.default_cache_dir()):
        # Kernels of GPUs are renamed into place, so that only those of CPUs need a folder of their own.
        # A process that is killed while the linker writes leaves half a library in a folder that others use.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own_temporary_folder("touchstone-compiled")
    model.compile(mode=precision.compile, dynamic=False)
