"""Estimate a run's memory, work, time and disk, before it starts or when memory ran out, by a step on fake tensors."""

import math
import warnings
import weakref
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

import collectives
import config
import models
import optim
from errors import LimitError, StorageError
from files import free_bytes, memory_bytes, read_json
from launch import read_launch
from loading.progress import size_text
from monitoring.monitor import read_records

# Share of a device's memory that tensors can fill: fragmentation, libraries and their workspaces take the rest.
USABLE = 0.9

# Steps that are traced in search of the largest batch, beside one of `--batch-size`.
MOST_TRACES = 3

# Bytes of a line of the log in metrics.jsonl and in TensorBoard's scalars together.
LINE_BYTES = 700


class Needs(NamedTuple):
    """Bytes that a process holds at the peak of a step with shards of `batch_size` images."""

    batch_size: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self[1:])


class StorageCount(TorchDispatchMode):
    """Counts the bytes of all storages that are made and freed while it is active.

    Attributes:
        now: bytes of the present storages.
        peak: most bytes at a time since `restart`.
        numbers: numbers of the present storages in the order in which they were made, by their addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self._made = self._made_at_peak = 0
        self.numbers = {}

    def restart(self) -> None:
        """Look for a new peak."""
        self.peak, self._made_at_peak = self.now, self._made

    def was_there(self, tensor: Tensor) -> bool:
        """Tell whether a present tensor existed at the peak."""
        return self.numbers[tensor.untyped_storage()._cdata] <= self._made_at_peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.numbers:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._made += 1
        self.numbers[storage._cdata] = self._made
        self.now += storage.nbytes()
        if self.now > self.peak:
            self.restart()
        weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, address: int, num_bytes: int) -> None:
        del self.numbers[address]
        self.now -= num_bytes


class _WeightsOnMeta(TorchFunctionMode):
    """Puts weights and statistics that layers allocate on the meta device; other tensors are computed as usual."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if function in (torch.empty, torch.zeros, torch.ones) and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def build_without_memory(args: Any, num_classes: int) -> nn.Module:
    """Build the model on the meta device, also where a model computes while it is built (RegNet)."""
    try:
        with _WeightsOnMeta():
            return models.build_model(args, num_classes).to("meta")
    except RuntimeError:  # it computes with its weights
        return models.build_model(args, num_classes).to("meta")


def count_flops(args: Any, num_classes: int) -> int:
    """Return the floating-point operations of an image's forward and backward pass; a multiply-add counts as two."""
    # MFU counts the model's operations, without recomputation.
    args = Namespace(**{**vars(args), "compile": None, "grad_checkpointing": False})
    # A model in evaluation mode computes the same, and a batch of one is enough for it.
    model = build_without_memory(args, num_classes).eval()
    image = torch.empty(1, 3, args.train_crop_size, args.train_crop_size, device=next(model.parameters()).device)
    mapping = {torch.ops.aten.convolution_backward: _backward_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(image).sum().backward()
    return counter.get_total_flops()


def _backward_flops(grad: Any, image: Any, weight: Any, *options: Any, out_shape: Any = None) -> int:
    """Return the operations of a convolution's two gradients; torch's own count ignores groups."""
    is_transposed, (needs_input, needs_weight, _) = options[4], options[-1]
    return (needs_input + needs_weight) * conv_flop_count(image, weight, grad, is_transposed)


def trace(args: Any, num_classes: int, device: torch.device, batch_size: int) -> Needs:
    """Return the needs of a step with shards of `batch_size` images on a device of this machine, by fake tensors."""
    model = build_without_memory(args, num_classes)
    with FakeTensorMode(allow_non_fake_inputs=True), StorageCount() as count, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copying the model reads data pointers, of which fake tensors warn
        model.to_empty(device=device)
        models.set_training_mode(model)
        average = models.build_ema(args, model)
        optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # makes its state
        held = _held_gradients(args)
        optimizer.zero_grad(set_to_none=not held)
        count.restart()
        _trace_shard(args, model, device, batch_size)
        optimizer.step()  # with some options it holds another copy of the gradients
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        fixed = {
            "weights": _num_bytes([*model.parameters(), *model.buffers()]),
            "gradients": _num_bytes(gradient for gradient in gradients if count.was_there(gradient)),
            "optimizer": _num_bytes(value for state in optimizer.state.values() for value in state.values()),
            "average": 0 if average is None else _num_bytes([*average.parameters(), *average.buffers()]),
        }
        # A GPU copies and prepares the next batches beside a step.
        ahead = 2 * batch_size * 3 * args.train_crop_size**2 * 4 if device.type == "cuda" else 0
        activations = count.peak - sum(fixed.values()) + ahead
        fixed["gradients"] += max(held - 1, 0) * _num_bytes(gradients)
    return Needs(batch_size, activations=activations, **fixed)


def _held_gradients(args: Any) -> int:
    """Return the number of copies of the gradients when the last shard begins: sums, and DDP's buckets."""
    num_local = args.num_shards // args.world_size
    is_sent, is_deterministic = args.world_size > 1, args.use_deterministic_algorithms
    sums = int(math.log2(num_local)) if is_deterministic else num_local > 1 and not is_sent
    return sums + is_sent + (is_deterministic and args.world_size > 2)


def _trace_shard(args: Any, model: nn.Module, device: torch.device, batch_size: int) -> None:
    order = torch.channels_last if args.channels_last else torch.contiguous_format
    image = torch.empty(batch_size, 3, args.train_crop_size, args.train_crop_size, device=device)
    image = image.contiguous(memory_format=order)
    target = torch.zeros(batch_size, dtype=torch.int64, device=device)
    with models.autocast(args, device):
        output = model(image)
        outputs = [output] if isinstance(output, Tensor) else [scores for scores in output if scores is not None]
        loss = sum(functional.cross_entropy(scores, target) for scores in outputs)
    loss.backward()


def _num_bytes(tensors: Any) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Limit(NamedTuple):
    """Memory that the tensors of a process can fill."""

    num_bytes: int
    name: str


def find_limit(device: torch.device) -> Limit:
    """Return the memory that a process can fill: a GPU's, or its part of this machine's."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        name = torch.cuda.get_device_name(device)
        return Limit(int(USABLE * total), f"{USABLE:.0%} of the {size_text(total)} of {name}")
    total, processes = memory_bytes(), read_launch().num_local
    shared = f", which {processes} processes share" if processes > 1 else ""
    return Limit(int(USABLE * total / processes), f"{USABLE:.0%} of this machine's {size_text(total)}{shared}")


def find_largest(args: Any, num_classes: int, device: torch.device, limit: int) -> tuple[Needs, int]:
    """Return the needs of shards of `--batch-size` images, and the most images whose needs fit a limit in bytes, or 0.

    The search extrapolates linearly from two sizes until one comes near the limit; it takes several tries, since the
    peak of small batches is elsewhere in the step than that of large ones.
    """
    here = near = trace(args, num_classes, device, args.batch_size)
    largest = max(int(here.batch_size * min(limit / here.total, 1e4)), 1)
    for _ in range(MOST_TRACES):
        if largest in (0, near.batch_size) or abs(near.total / limit - 1) < 0.02:
            break
        there = trace(args, num_classes, device, largest)
        slope = max((there.total - near.total) / (there.batch_size - near.batch_size), 1)
        largest = max(int(there.batch_size + (limit - there.total) / slope), 0)
        near = there
    return here, largest


def describe(args: Any, num_classes: int, steps_per_epoch: int) -> list[str]:
    """Return lines about the memory, work, time and disk that a run will need."""
    device = torch.device(args.device or collectives.find_accelerator() or "cpu")
    if device.type not in ("cpu", collectives.find_accelerator()):
        device = torch.device("cpu")
    try:
        limit = find_limit(device)
        needs, largest = find_largest(args, num_classes, device, limit.num_bytes)
        flops = count_flops(args, num_classes)
    except Exception as error:  # a layer may need values, or a kernel that does not support fake tensors
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return [f"no estimate of memory and work: {args.model} cannot be traced ({type(error).__name__}: {reason})"]
    fits = "fits" if needs.total <= limit.num_bytes else "does not fit"
    lines = [
        f"memory of a process at its peak, an estimate of a step traced for {device.type}: {split(needs)}",
        f"that {fits} {limit.name}; the largest --batch-size that should: {largest:,}",
        f"a step: {flops * args.global_batch_size / 1e12:,.3g} TFLOP, {flops / 1e9:,.3g} GFLOP an image, forward and "
        "backward",
    ]
    if args.teacher is not None:
        lines.append(f"--teacher {args.teacher} comes on top: its weights, and the memory and work of a forward pass")
    folder = Path(args.output_dir or config.default_folder(args))
    return [*lines, *_time_lines(args, folder, steps_per_epoch), *_disk_lines(args, needs, folder, steps_per_epoch)]


def split(needs: Needs) -> str:
    """Return the total of the memory and the parts of which it is the sum, as text."""
    names = ("weights", "gradients", "optimizer state", "average of the weights", "activations")
    parts = zip(names, needs[1:], strict=True)
    terms = " + ".join(f"{name} {size_text(part)}" for name, part in parts if part)
    return f"{size_text(needs.total)} = {terms}"


def _time_lines(args: Any, folder: Path, steps_per_epoch: int) -> list[str]:
    """Return a line about the run's time at the rate of a like run with as many processes in its folder, or none."""
    before = read_json(folder / "run.json").get("args")
    names = ("model", "batch_size", "global_batch_size", "train_crop_size", "amp", "compile")
    if not isinstance(before, dict) or any(before.get(name) != getattr(args, name) for name in names):
        return []
    records = []
    with suppress(OSError, StorageError):
        records = read_records(folder)
    rates = [r.get("images_per_s") for r in records if r["kind"] == "train" and r.get("world_size") == args.world_size]
    rates = sorted(rate for rate in rates[-20:] if isinstance(rate, float) and rate > 0)
    if not rates:
        return []
    rate = rates[len(rates) // 2]
    epoch_s = steps_per_epoch * args.global_batch_size / rate
    return [
        f"at the {rate:,.4g} images/s of {folder}: {epoch_s / 3600:,.3g} hours an epoch, "
        f"{epoch_s * args.epochs / 3600:,.3g} in all, an estimate without evaluations"
    ]


def _disk_lines(args: Any, needs: Needs, folder: Path, steps_per_epoch: int) -> list[str]:
    """Return a line about the most disk that checkpoints and records take."""
    saved = needs.weights + needs.optimizer + needs.average
    # Beside the numbered checkpoints: the best of the weights and of the average, and one that is being written.
    files = args.keep_last + 2 + args.model_ema + (args.epochs // args.keep_every if args.keep_every else 0)
    records = args.epochs * (steps_per_epoch // args.print_freq + 3) * LINE_BYTES
    there = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    return [
        f"disk, an estimate: {files} checkpoints at most of {size_text(saved)} = {size_text(files * saved)}, and "
        f"{size_text(records)} of metrics and TensorBoard's curves; {size_text(free_bytes(there))} are free"
    ]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error means that the device has no memory for one more tensor."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def explain_out_of_memory(args: Any, num_classes: int, device: torch.device) -> LimitError:
    """Return an error in one line for a run out of memory: the parts of its needs, and a batch that should fit."""
    begin = f"out of memory on {device} at --batch-size {args.batch_size}"
    try:
        limit = find_limit(device)
        needs, largest = find_largest(args, num_classes, device, limit.num_bytes)
    except Exception:  # the run is over: a line without an estimate must do
        return LimitError(f"{begin}; use a smaller one, or --grad-checkpointing")
    advice = f"--batch-size {largest} should fit" if largest else "use --grad-checkpointing or a smaller model"
    if largest >= args.batch_size:
        advice = "which should fit if nothing else used that memory: end it, or use a smaller batch"
    return LimitError(f"{begin}: a process needs about {split(needs)}, of {limit.name}; {advice}")
