"""Optimizers of timm's, and the user's own."""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch

from errors import UserError, did_you_mean
from settings.custom_code import load_function
from settings.options import PrecisionOptions
from settings.packages import require_timm
from settings.rules import split_custom


def find_other(
    opt: str, precision: PrecisionOptions, arguments: Iterable[str]
) -> tuple[Callable[..., torch.optim.Optimizer], Collection[str]]:
    """Return the function of `--opt`, and which of these arguments it takes; UserError for a name that timm lacks."""
    if split_custom(opt):
        build = load_function("opt", opt)
        taken: Collection[str] = inspect.signature(build).parameters
    else:
        optimizers = importlib.import_module(f"{require_timm('--opt', opt).__name__}.optim")
        name = opt.removeprefix("timm/")
        if name.endswith("muon"):
            # Its optimizers have no option for the type in which they orthogonalise. An earlier call may have put a
            # function there too: the keyword given last counts.
            muon: Any = importlib.import_module("timm.optim.muon")
            dtype = torch.float32 if precision.amp_dtype == "float32" else torch.bfloat16
            muon.zeropower_via_newtonschulz = partial(muon.zeropower_via_newtonschulz, dtype=dtype)
        if name not in optimizers.list_optimizers():
            hint = did_you_mean(name, optimizers.list_optimizers(), prefix="timm/")
            raise UserError(f"--opt {opt}: timm has no such optimizer{hint}")
        facts = optimizers.get_optimizer_info(name)
        build = partial(optimizers.create_optimizer_v2, opt=facts.name)
        taken = [argument for argument in arguments if getattr(facts, f"has_{argument}")]
    return build, taken
