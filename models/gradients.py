"""The gradients of a step: its micro-batches, the order in which their gradients are summed, and DDP."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed import collectives
from distributed.watch import watchdog
from randomness import FORWARD, UPDATE, seed_device
from sampler import VirtualShards
from settings.options import DistributedOptions


def wrap_model(model: nn.Module, distributed: DistributedOptions, compile_mode: str | None) -> nn.Module:
    """Wrap a model on its device in DDP, if there are several processes. Collective: every rank must call it."""
    if distributed.world_size == 1:
        return model
    # BatchNorm trains with the statistics of its own batch, so that no step reads the running ones: DDP need not
    # broadcast the buffers at each step; `measure` does before an evaluation. torch 2.13 renamed the argument.
    sync_buffers: dict[str, Any] = {"broadcast_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        sync_buffers = {"forward_sync_buffers": False}
    # DDP raises a ValueError if it is given device_ids for a module on the CPU.
    device_ids = None if torch.device(distributed.device).type == "cpu" else [distributed.gpu]
    # A static graph allows unused parameters without a search for them in each step (torch's page on DDP).
    # With gradient accumulation a static graph fails at one of torch's own assertions.
    is_static = distributed.num_shards == distributed.world_size and compile_mode is None
    # Gradients that are views of the buckets need no copy into them, nor the memory of a second one.
    with watchdog.waiting():  # for ranks that still build theirs
        return DistributedDataParallel(
            model, device_ids=device_ids, process_group=collectives.world_group(), gradient_as_bucket_view=True,
            static_graph=is_static, **sync_buffers,
        )  # fmt: skip


def broadcast_from_master(tensors: Sequence[Tensor]) -> None:
    """Overwrite every rank's tensors with rank 0's. Collective: every rank must call it."""
    if dist.is_initialized():
        with watchdog.waiting():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0, group=collectives.world_group())


@dataclass(eq=False)
class ShardedStep:
    """The infrastructure around the forward and backward passes of one optimizer step.

    If `is_deterministic`, gradients are summed pairwise, in one order at any world size, instead of by DDP.
    """

    model: nn.Module
    shards: VirtualShards
    _: KW_ONLY
    device: torch.device
    seed: int = 0
    is_deterministic: bool = False

    def __post_init__(self) -> None:
        self.gradient_sum = None
        if self.is_deterministic:
            from models.pairwise import PairwiseGradientSum

            self.gradient_sum = PairwiseGradientSum(self.model, self.shards)
        # DDP computes a mean over processes, and accumulation a sum over local micro-batches: this factor makes both a
        # mean over all. It is 1 in torchvision's case of one micro-batch per process, so nothing is rounded there.
        # `PairwiseGradientSum` divides by all micro-batches, once and last.
        self.loss_scale = 1.0 if self.is_deterministic else 1.0 / self.shards.num_local
        self.buffers = list(self.model.buffers())
        # The model is built: with deterministic kernels torch fills all new memory, by default, with NaN, so that code
        # which reads it before it writes is found. That costs 4 % of a step on two processes.
        deterministic: Any = torch.utils.deterministic  # a module with a property
        deterministic.fill_uninitialized_memory = False

    @contextmanager
    def shard(self, step: int, shard: int) -> Iterator[None]:
        """Surround the forward and backward pass of one micro-batch of a step of the run.

        Seeds dropout and stochastic depth by (step, micro-batch), keeps DDP from reducing before the last local one,
        and lets only micro-batch 0 move the buffers, as torchvision's rank 0 does, so that running statistics are the
        same at any world size. The wrapped block must not keep the graph.
        """
        seed_device(self.device, FORWARD, self.seed, step, shard)
        # The buffers are put back: a momentum of 0 would not do, since BatchNorm counts its batches all the same.
        saved = [buffer.clone() for buffer in self.buffers if shard != 0]
        passes: AbstractContextManager = nullcontext()
        if isinstance(self.model, DistributedDataParallel) and shard != self.shards.local[-1]:
            passes = self.model.no_sync()
        with passes:
            yield
        if saved:
            torch._foreach_copy_(self.buffers, saved)
        if self.gradient_sum is not None:
            self.gradient_sum.add_shard()

    def finish_gradients(self, step: int) -> None:
        """Make every parameter's gradient the mean over all micro-batches, and seed the draws of the optimizer.

        Collective: every rank must call it.
        """
        if self.gradient_sum is not None:
            self.gradient_sum.finish()
        # Ranks have computed different micro-batches: an optimizer that draws would go on from different generators.
        seed_device(self.device, UPDATE, self.seed, step)
