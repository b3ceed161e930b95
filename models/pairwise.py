"""Sums of gradients in one order, whichever process computed which micro-batch."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from distributed import collectives
from sampler import VirtualShards


class PairwiseGradientSum:
    """Sum the micro-batches' gradients in one fixed order, whichever process computed which micro-batch.

    Floating-point addition is not associative: an all-reduce sums in another order at another world size, and training
    amplifies the difference from 1e-7 to 3e-2 in eight steps of a ResNet-18 (measured). Here gradients are summed
    pairwise, as a binary counter carries: push a sum; while the last two cover equally many micro-batches, add them.
    A process does so with its consecutive micro-batches. During the backward pass of the last one, each DDP bucket goes
    through an all-to-all (every process gets its part of everyone's sum), is summed alike over the processes, and
    returns by an all-gather. These only move bytes, so backend and topology cannot change a bit, and the volume is that
    of a ring all-reduce. Two processes need only an all-reduce, since addition commutes. The bits are those of a single
    process if the number of micro-batches per process is a power of two. A division by V comes last.

    A process holds at most log2(V / W) + 1 copies of the gradients at a time.

    Args:
        model: the model, in DDP or, on one process, bare.
        shards: all micro-batches of a step, and this process's share of them.
    """

    def __init__(self, model: nn.Module, shards: VirtualShards) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.shards = shards
        self._places: dict[Tensor, int] = {parameter: place for place, parameter in enumerate(self.parameters)}
        self._sums = []  # (number of micro-batches, their gradients' sum), as the digits of a binary counter
        self._exchanges = []  # of this step's buckets under way
        # DDP's own all-reduce sums in an order that depends on an element's place in its bucket, and packs its buckets
        # anew after its first backward pass: at three processes or more a resumed run would differ in its first step.
        self.is_overlapped = isinstance(model, DistributedDataParallel)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._sum_bucket)

    def add_shard(self) -> None:
        """Move the gradients of the micro-batch just computed from the parameters into the sum."""
        if self.is_overlapped and sum(count for count, _ in self._sums) == len(self.shards.local) - 1:
            # This is the last micro-batch, whose buckets DDP's hook has added as the backward pass filled them.
            return
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        _push(self._sums, gradients)

    def finish(self) -> None:
        """Set every parameter's gradient to the mean over all micro-batches. Collective: every rank must call it."""
        if self.is_overlapped:
            self._sums.clear()
            return
        for parameter, gradient in zip(self.parameters, _fold(self._sums), strict=True):
            if gradient is not None:
                # Dividing the sum once gives the same bits at any number of processes. To divide by W, and by V / W
                # before it, is exact for powers of two alone.
                gradient.div_(self.shards.num_shards)
            parameter.grad = gradient

    def _sum_bucket(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return a future of a bucket's mean over all micro-batches; DDP calls this hook for each bucket in turn."""
        parameters = bucket.parameters()
        # A bucket holds gradients in the memory order of their parameters, which may be NHWC, and shows them as NCHW.
        gradients = [
            gradient.as_strided(parameter.shape, parameter.stride())
            for gradient, parameter in zip(bucket.gradients(), parameters, strict=True)
        ]
        # V / W is a power of two, so the last micro-batch carries through all digits: the newest sum is added first.
        for _, sums in reversed(self._sums):
            addends = [sums[self._places[parameter]] for parameter in parameters]
            pairs = [pair for pair in zip(gradients, addends, strict=True) if pair[1] is not None]
            torch._foreach_add_(*zip(*pairs, strict=True))
        flat = bucket.buffer()
        if self.shards.world_size == 2:
            # Addition commutes, so two addends have one sum in any order: one collective does, in place of two.
            # Over gloo, of 44 MiB on four processes, it takes 57 ms, and the other two 78.
            work = dist.all_reduce(flat, group=collectives.world_group(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0].div_(self.shards.num_shards))
        exchange = _Exchange(flat, self.shards)
        # A bucket's parts travel while the backward pass fills the next one: only then are they waited for.
        if self._exchanges:
            self._exchanges[-1].send_back()
        self._exchanges.append(exchange)
        if bucket.is_last():
            exchange.send_back()
            for each in self._exchanges:
                each.finish()
            self._exchanges.clear()
        return exchange.mean


class _Exchange:
    """One bucket under way: every process sums its part of all processes' buckets, and all gather the parts.

    The thread of the backward pass takes all steps, since all ranks must begin their collectives in the same order.
    """

    def __init__(self, flat: Tensor, shards: VirtualShards) -> None:
        self.flat = flat
        self.shards = shards
        self.mean: Future[Tensor] = Future(devices=None if flat.device.type == "cpu" else [flat.device])
        # The collectives take parts of one size.
        rest = -flat.numel() % shards.world_size
        self.padded = nn.functional.pad(flat, (0, rest)) if rest else flat
        self.parts = torch.empty_like(self.padded)
        self.group = collectives.world_group()
        self.work = dist.all_to_all_single(self.parts, self.padded, group=self.group, async_op=True)

    def send_back(self) -> None:
        """Wait for this process's part, sum it, and begin to gather all parts."""
        self.work.wait()
        sums = []
        for part in self.parts.chunk(self.shards.world_size):
            _push(sums, [part])
        mean = _fold(sums)[0].div_(self.shards.num_shards)
        self.work = dist.all_gather_into_tensor(self.padded, mean, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait for all parts, and fulfil the future `mean`."""
        self.work.wait()
        if self.padded is not self.flat:
            self.flat.copy_(self.padded[: self.flat.numel()])
        self.mean.set_result(self.flat)


def _push(sums: list[tuple[int, list]], addend: list[Tensor | None]) -> None:
    """Add the gradients of a micro-batch to the counter, whose last two digits carry while they are equal."""
    count = 1
    while sums and sums[-1][0] == count:
        addend = _add(sums.pop()[1], addend)
        count *= 2
    sums.append((count, addend))


def _fold(sums: list[tuple[int, list]]) -> list[Tensor | None]:
    """Add the remaining sums from the first to the last, and empty the counter."""
    total = sums[0][1]
    for _, addend in sums[1:]:
        total = _add(total, addend)
    sums.clear()
    return total


def _add(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Add lists of gradients in place; a parameter that a micro-batch did not use has None."""
    total = []
    for one, other in zip(left, right, strict=True):
        if one is None:
            total.append(other)
        elif other is None:
            total.append(one)
        else:
            total.append(one.add_(other))
    return total
