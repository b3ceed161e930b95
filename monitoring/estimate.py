"""Estimate the memory of a training step for `--dry-run`, by a step on fake tensors."""

import math
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import models
import optim
from distributed import collectives
from errors import one_line
from loading.progress import size_text


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


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are made and freed while it is active: `now`, and `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self._counted = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._counted:
                storage = tensor.untyped_storage()
                self._counted.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())
        return result

    def _remove(self, address: int, num_bytes: int) -> None:
        self._counted.remove(address)
        self.now -= num_bytes


def trace(args: Any, num_classes: int, device: torch.device) -> dict[str, int]:
    """Return the bytes that a process's tensors take at the peak of a step, by what they are for."""
    model = build_without_memory(args, num_classes)
    with FakeTensorMode(allow_non_fake_inputs=True), PeakBytes() as count, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copying the model reads data pointers, of which fake tensors warn
        model.to_empty(device=device)
        models.set_training_mode(model)
        average = models.build_ema(args, model)
        optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
        _trace_micro_batch(args, model, device)
        optimizer.step()  # makes its state
        num_held, gradients = _count_held_gradients(args), _num_bytes(p.grad for p in model.parameters())
        optimizer.zero_grad(set_to_none=not num_held)
        count.peak = count.now
        _trace_micro_batch(args, model, device)
        optimizer.step()  # with some options it holds another copy of the gradients
        parts = {
            "weights": _num_bytes([*model.parameters(), *model.buffers()]),
            "optimizer state": _num_bytes(value for state in optimizer.state.values() for value in state.values()),
            "average of the weights": _num_bytes([*average.parameters(), *average.buffers()]) if average else 0,
        }
    # Beside a step, a GPU prepares the next batches.
    ahead = 2 * args.batch_size * 3 * args.train_crop_size**2 * 4 if device.type == "cuda" else 0
    rest = count.peak - sum(parts.values()) + max(num_held - 1, 0) * gradients + ahead
    return {**parts, "gradients and activations": rest}


def _count_held_gradients(args: Any) -> int:
    """Return the number of copies of the gradients when the last micro-batch begins: sums, and DDP's buckets."""
    num_local = args.num_shards // args.world_size
    is_sent, is_deterministic = args.world_size > 1, args.use_deterministic_algorithms
    sums = int(math.log2(num_local)) if is_deterministic else num_local > 1 and not is_sent
    return sums + is_sent + (is_deterministic and args.world_size > 2)


def _trace_micro_batch(args: Any, model: nn.Module, device: torch.device) -> None:
    image = torch.empty(args.batch_size, 3, args.train_crop_size, args.train_crop_size, device=device)
    target = torch.zeros(args.batch_size, dtype=torch.int64, device=device)
    with models.autocast(args, device):
        output = model(image.to(memory_format=torch.channels_last) if args.channels_last else image)
        outputs = [output] if isinstance(output, Tensor) else [scores for scores in output if scores is not None]
        sum(functional.cross_entropy(scores, target) for scores in outputs).backward()


def _num_bytes(tensors: Any) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def describe(args: Any, num_classes: int) -> str:
    """Return a line about the memory that a run will need."""
    device = torch.device("cpu" if args.device == "cpu" else collectives.find_accelerator() or "cpu")
    try:
        parts = trace(args, num_classes, device)
    except Exception as error:  # a layer may need values, or a kernel that does not support fake tensors
        reason = one_line(f"{type(error).__name__}: {error}")[:200]
        return f"no estimate of memory: {args.model} cannot be traced ({reason})"
    terms = " + ".join(f"{name} {size_text(part)}" for name, part in parts.items() if part)
    more = "; the teacher comes on top" if args.teacher is not None else ""
    total = size_text(sum(parts.values()))
    return f"tensors of a process at their peak, an estimate for {device.type}: {total} = {terms}{more}"
