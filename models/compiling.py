"""Compile a model, in place so that its state dict keeps its names."""

import importlib
import os
from typing import Any

import torch
from torch import nn

from distributed.lending import at_end
from errors import UserError
from files import own_temporary_folder


def compile_in_place(model: nn.Module, args: Any) -> None:
    """Compile a model as `--compile` says.

    Each size of image is compiled separately. Kernels for any size would be slower, and torch would choose them by the
    sizes that the process has met, so a resumed run would compute with other kernels.

    Raises:
        UserError: the mode cannot be used with gradient accumulation.
    """
    is_graphed = args.compile in ("reduce-overhead", "max-autotune") and torch.device(args.device).type == "cuda"
    if is_graphed and not args.test_only and args.num_shards > args.world_size:
        raise UserError(
            f"--compile {args.compile} records CUDA graphs, which overwrite accumulated gradients; use --compile "
            "default, or as many processes as micro-batches"
        )
    smallest = args.train_crop_size if args.train_crop_size_min is None else args.train_crop_size_min
    # Sizes of training crops, mostly 32 px apart; full and last batches of evaluation, by the model and its average.
    num_graphs = (args.train_crop_size - smallest) // 32 + 3 + 2 * 2
    dynamo = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    at_end(torch.compiler.reset)  # graphs of this run would count against the limit in the next one
    # The masks of dropout and stochastic depth are those of an uncompiled model.
    importlib.import_module("torch._inductor.config").fallback_random = True
    caches = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    if torch.device(args.device).type == "cpu" and caches.cache_dir() == os.path.abspath(caches.default_cache_dir()):
        # A process that is killed while the linker writes leaves half a library in a folder that others use.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own_temporary_folder("touchstone-compiled")
    model.compile(mode=args.compile, dynamic=False)
