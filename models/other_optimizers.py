"""Optimizers of timm's, and the user's own."""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch

from errors import UserError, did_you_mean
from settings.custom_code import load_function
from settings.options import split_custom
from settings.packages import require_timm


def find_other(args: Any, arguments: Iterable[str]) -> tuple[Callable[..., torch.optim.Optimizer], Collection[str]]:
    """Return the function of `--opt`, and which of these arguments it takes; UserError for a name that timm lacks."""
    if split_custom(args.opt):
        build = load_function("opt", args)
        taken = inspect.signature(build).parameters
    else:
        optimizers = importlib.import_module(f"{require_timm('--opt', args.opt).__name__}.optim")
        name = args.opt.removeprefix("timm/")
        if name.endswith("muon"):
            set_muon_type(torch.float32 if args.amp_dtype == "float32" else torch.bfloat16)
        if name not in optimizers.list_optimizers():
            hint = did_you_mean(name, optimizers.list_optimizers(), prefix="timm/")
            raise UserError(f"--opt {args.opt}: timm has no such optimizer{hint}")
        facts = optimizers.get_optimizer_info(name)
        build = partial(optimizers.create_optimizer_v2, opt=facts.name)
        taken = [argument for argument in arguments if getattr(facts, f"has_{argument}")]
    return build, taken


def set_muon_type(dtype: torch.dtype) -> None:
    """Set the type in which timm's Muon orthogonalises: its optimizers have no option for this argument."""
    muon = importlib.import_module("timm.optim.muon")
    # Of the function that an earlier call has put there too: the keyword given last counts.
    muon.zeropower_via_newtonschulz = partial(muon.zeropower_via_newtonschulz, dtype=dtype)
