"""The gradients of a step: its shards, the order in which they are summed, and DDP."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from randomness import FORWARD, seed_device
from sampler import VirtualShards


def wrap_model(model: nn.Module, args: Any) -> nn.Module:
    """Wrap a model on its device in DDP where gradients are to be summed by DDP's own all-reduce.

    With `--use-deterministic-algorithms`, `PairwiseGradientSum` sums them, and the bare model is returned, with rank
    0's weights. Collective: every rank must call it.
    """
    if args.grad_compression != "none" and args.world_size == 1:
        print(f"--grad-compression {args.grad_compression} has no effect: one process sends no gradients")
    if not args.distributed:
        return model
    if args.use_deterministic_algorithms:
        broadcast_from_master([*model.parameters(), *model.buffers()])
        return model
    # Nothing reads a buffer in training but what shard 0 writes, so no step needs them broadcast; `evaluate`
    # does it. torch 2.13 renamed the switch.
    parameters = inspect.signature(DistributedDataParallel).parameters
    no_buffers = {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}
    device_ids = [args.gpu] if torch.device(args.device).type == "cuda" else None
    # With accumulation torch fails at an assertion of its own.
    is_static = args.num_shards == args.world_size and args.compile is None
    wrapped = DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True, static_graph=is_static, **no_buffers
    )
    if args.grad_compression == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def broadcast_from_master(tensors: Sequence[Tensor]) -> None:
    """Overwrite every rank's tensors with rank 0's. Collective: every rank must call it."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


class PairwiseGradientSum:
    """Sum the shards' gradients in one fixed order, whatever process computed which shard.

    Floating-point addition is not associative: an all-reduce sums in another order at another world size, and training
    amplifies the difference from 1e-7 to 3e-2 in eight steps of a ResNet-18 (docs/research/RELIABILITY.md, 2.6). Here
    shards are summed pairwise, as a binary counter carries: push a sum; while the last two cover equally many shards,
    add them. A process does so with its consecutive shards; then each gradient travels through an all-to-all (every
    process gets its part of everyone's sum), is summed alike over the processes, and returns by an all-gather.
    Collectives only move bytes, so backend and topology cannot change a bit, and the volume is that of a ring
    all-reduce. The result is that of one process wherever a process holds a power of two of shards. One division by V
    comes last.

    At most log2(V / W) + 1 gradients are held at a time.
    """

    # Bytes that travel at once, so that no second copy of all gradients is needed.
    PIECE = 1 << 26

    def __init__(self, parameters: Iterator[nn.Parameter], shards: VirtualShards) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.shards = shards
        self._sums = []  # (number of shards, their gradients' sum), as the digits of a binary counter

    def add_shard(self) -> None:
        """Take the gradients of the shard that has just been computed out of the parameters."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        _push(self._sums, gradients)

    def finish(self) -> None:
        """Set every parameter's gradient to the mean over all shards. Collective: every rank must call it."""
        gradients = _fold(self._sums)
        if self.shards.world_size > 1:
            present = [gradient for gradient in gradients if gradient is not None]
            for piece in torch._utils._take_tensors(present, self.PIECE):  # of one type each
                self._sum_over_processes(piece)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if gradient is None else gradient.div_(self.shards.num_shards)

    def _sum_over_processes(self, gradients: list[Tensor]) -> None:
        world_size = self.shards.world_size
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        length = flat.numel()
        flat = nn.functional.pad(flat, (0, -length % world_size))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        sums = []
        for part in parts.chunk(world_size):
            _push(sums, [part])
        dist.all_gather_into_tensor(flat, _fold(sums)[0].contiguous())
        for gradient, total in zip(gradients, flat[:length].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _push(sums: list[tuple[int, list]], addend: list[Tensor | None]) -> None:
    sums.append((1, addend))
    while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
        (count, right), (_, left) = sums.pop(), sums.pop()
        sums.append((2 * count, _add(left, right)))


def _fold(sums: list[tuple[int, list]]) -> list[Tensor | None]:
    """Add what is left from the first to the last, and empty the counter."""
    total = sums[0][1]
    for _, addend in sums[1:]:
        total = _add(total, addend)
    sums.clear()
    return total


def _add(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Add in place; a parameter that a shard did not use has no gradient there."""
    return [a if b is None else b if a is None else a.add_(b) for a, b in zip(left, right, strict=True)]


class ShardedStep:
    """The infrastructure around the forward and backward passes of one optimizer step.

    Args:
        model: what `wrap_model` returned.
        shards: this process's part of the step.
        device: where the model is.
        seed: the run's.
        is_deterministic: sum gradients pairwise, not as DDP does.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: VirtualShards,
        *,
        device: torch.device,
        seed: int = 0,
        is_deterministic: bool = False,
    ) -> None:
        self.model = model
        self.shards = shards
        self.seed = seed
        self.device = device
        self.gradient_sum = PairwiseGradientSum(model.parameters(), shards) if is_deterministic else None
        # What DDP (a mean over processes) and accumulation (a sum over local shards) make of the shards' mean losses is
        # to be their mean; 1 in torchvision's case of one shard a process, and so nothing is rounded there.
        self.loss_scale = 1.0 if is_deterministic else 1.0 / shards.num_local
        self._buffers = list(model.buffers())

    @contextmanager
    def shard(self, step: int, shard: int) -> Iterator[None]:
        """Surround the forward and backward pass of one shard.

        Seeds dropout and stochastic depth by (step, shard), keeps DDP from reducing before the last local shard, and
        lets only shard 0 move the buffers, as torchvision's rank 0 does, so that running statistics are the same at
        any world size. The wrapped block must not keep the graph.
        """
        seed_device(self.device, FORWARD, self.seed, step, shard)
        is_last = shard == self.shards.local[-1]
        keeps_buffers = shard != 0 and bool(self._buffers)
        saved = [buffer.clone() for buffer in self._buffers] if keeps_buffers else None
        is_ddp = isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync() if is_ddp and not is_last else nullcontext():
            yield
        if keeps_buffers:
            torch._foreach_copy_(self._buffers, saved)
        if self.gradient_sum is not None:
            self.gradient_sum.add_shard()

    def finish_gradients(self) -> None:
        """Make every parameter's gradient the mean over all shards of the step. Collective."""
        if self.gradient_sum is not None:
            self.gradient_sum.finish()


def build_sharded_step(args: Any, model: nn.Module, shards: VirtualShards, device: torch.device) -> ShardedStep:
    """Return what surrounds the passes of each shard of a step."""
    is_deterministic = args.use_deterministic_algorithms
    return ShardedStep(model, shards, device=device, seed=args.seed, is_deterministic=is_deterministic)
