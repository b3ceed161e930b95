"""What a run takes from the machine that it starts on: the device, the decoder of JPEGs, the precision, the folder."""

import functools
import importlib
from importlib.metadata import version

from errors import UserError
from settings.options import DataOptions, short_name
from settings.stages import Parsed

# Versions of TorchCodec and Pillow that decode JPEGs to the same bits: tests/test_decode.py compares them.
PROVEN_DECODERS = {("0.17", "13.0")}


def find_device(device: str) -> str:
    """Return the device of `--device`, by default this machine's accelerator or the CPU; UserError if it is missing."""
    import torch  # not above: help need not wait for it

    from distributed import collectives

    accelerator = collectives.find_accelerator()
    device = device or accelerator or "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device}: not a device; give cpu, cuda, cuda:1 ...") from error
    if kind not in ("cpu", accelerator):
        where = f"torch {torch.__version__} finds no such device on this machine"
        raise UserError(f"--device {device}: {where}; try --device cpu")
    return device


def default_folder(name: str) -> str:
    """Return the output folder of a run that was given none."""
    return f"runs/{short_name(name)}"


@functools.cache
def find_torchcodec() -> str:
    """Return the version of TorchCodec, if it and Pillow are installed in a pair of `PROVEN_DECODERS`; else nothing."""
    try:
        codec = version("torchcodec")
        releases = (codec.rpartition(".")[0], version("pillow").rpartition(".")[0])
        # An unproven version is not even imported: its libraries may fail to load beside this torch.
        if releases in PROVEN_DECODERS:
            importlib.import_module("torchcodec.decoders")
            return codec
    except Exception:
        pass  # It is missing, or was built for another torch.
    return ""


def fast_decoder(data_options: DataOptions) -> str:
    """Return `find_torchcodec` where loader processes use it: for Pillow's pixels resized by our own way."""
    # Its C library writes about each shortened file to standard error, which goes nowhere in loader processes alone.
    is_used = data_options.workers and data_options.backend is None and data_options.synthetic is None
    return find_torchcodec() if is_used else ""


def slow_type(args: Parsed) -> str:
    """Say that a run computes in bfloat16, as timm's Muon does by itself, on a CPU that is slow in it; else empty."""
    from distributed import collectives  # not above: help need not wait for torch

    name = args.optimization.opt
    is_muon = name.startswith("timm/") and name.endswith("muon") and not args.checkpoint.test_only
    is_autocast = args.precision.amp and args.precision.amp_dtype == "bfloat16"
    is_used = is_autocast or (is_muon and args.precision.amp_dtype != "float32")
    on_cpu = args.distributed.device is not None and args.distributed.device.startswith("cpu")
    # The processor's capability decides and no timing, so that the same machine always gives the same numbers.
    if not is_used or not on_cpu or collectives.has_fast_bfloat16():
        return ""
    return "this processor has no bfloat16 instructions, and is 2 to 12 times slower in bfloat16 than in float32"
