"""A run in a process that goes on after it, such as a notebook's: how it finds and leaves that process."""

import builtins
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os.path import dirname
from typing import Any

from distributed import signals
from errors import WARNED

_end: ExitStack | None = None  # of the run that `main` is in, in a process that goes on after it


def at_end(work: Callable[..., Any], *args: Any) -> None:
    """Have work done at the end of `main`, the last first: never in the script, and without a `main` around."""
    if _end is not None:
        _end.callback(work, *args)


@contextmanager
def lent_process() -> Iterator[None]:
    """Begin a run as in a fresh process, and leave this one as it was, such as a notebook's; the script's own ends.

    Settings that the run or code of the user's own may change come back, and results that functions keep are forgotten.
    By `at_end` so do the loader processes, modules of the user's own, log.txt and the lock of the folder.
    """
    global _end  # noqa: PLW0603
    with ExitStack() as stack:
        if signals.began_s is None:
            _end = stack
            # The first is the last to be undone: a signal stops the run until all else is as it was.
            stack.callback(_return_signals)
            _keep_settings(stack)
            stack.callback(_clear_caches)
            _clear_caches()
            if gc.get_freeze_count() == 0:  # else who has frozen objects decides about them
                # As `signals.end_imports` for the script: each full collection would look at all that was imported, for
                # 160 ms. First the garbage, such as the last run's tensors on a GPU, which would stay for the run.
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)
        yield


def _return_signals() -> None:
    global _end  # noqa: PLW0603
    signals.stop_signal_handling()
    _end = None


def _clear_caches() -> None:
    """Forget the warnings that were printed, and the results of every cached function of this project."""
    WARNED.clear()
    # A result may be of the last run's files: of a tar that has the same size and time, of weights that were refused.
    project = dirname(dirname(__file__))
    for module in list(sys.modules.values()):
        if dirname(dirname(getattr(module, "__file__", None) or "")) != project:
            continue
        for function in list(vars(module).values()):
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def _keep_settings(stack: ExitStack) -> None:
    """Let the stack restore the settings of Python and torch that a run, or code of the user's own, may change."""
    import random  # not above: `settings.own_code` imports this module before torch

    import numpy
    import torch

    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic
    # `setup_for_distributed` replaces print; the set-up of a run, or own code, sets the others.
    flags = [(builtins, "print"), (cudnn, "benchmark"), (cudnn, "deterministic"), (fill, "fill_uninitialized_memory")]
    for owner, name in flags:
        stack.callback(setattr, owner, name, getattr(owner, name))
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    mode = torch.are_deterministic_algorithms_enabled()
    stack.callback(torch.use_deterministic_algorithms, mode, warn_only=warn_only)
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.callback(gc.enable if gc.isenabled() else gc.disable)
    stack.callback(random.setstate, random.getstate())
    stack.callback(numpy.random.set_state, numpy.random.get_state())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    tf32 = (partial(getattr, cudnn, "allow_tf32"), partial(setattr, cudnn, "allow_tf32"))
    matmul = (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    for read, write in (tf32, matmul):
        with suppress(RuntimeError):  # torch does not read one that was set by its newer names
            stack.callback(_restore, read, write, read())


def _restore(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> None:
    """Set a value only if it has changed: torch would take the older of its names from then on."""
    if read() != value:
        write(value)
