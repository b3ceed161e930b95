"""Deal images out to ranks and steps by formulas, so that a run can begin at any step at no cost."""

from collections.abc import Iterator, Sized
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from errors import UserError, counted


class SampleKey(int):
    """The number of an image with its epoch and repetition: together the address of the image's random draws."""

    epoch: int
    repetition: int

    def __new__(cls, index: int, epoch: int, repetition: int = 0) -> "SampleKey":  # noqa: D102
        key = super().__new__(cls, index)
        key.epoch = epoch
        key.repetition = repetition
        return key

    # As an int's subclass a key would be pickled on its way to a loader's process without its attributes.
    def __reduce__(self) -> tuple:
        return SampleKey, (int(self), self.epoch, self.repetition)


class VirtualShards(NamedTuple):
    """The fixed micro-batches that make a run's global batch, and the processes that compute them.

    World size is then a detail: BatchNorm batches, mixup partners and the order of images belong to a micro-batch, and
    W processes compute V / W consecutive ones each, one after the other.
    """

    global_batch_size: int
    num_shards: int
    rank: int = 0
    world_size: int = 1

    @property
    def batch_size(self) -> int:
        """Images per micro-batch and step."""
        return self.global_batch_size // self.num_shards

    @property
    def num_local(self) -> int:
        """Shards per process and step."""
        return self.num_shards // self.world_size

    @property
    def arithmetic(self) -> str:
        """The global batch as a product, such as `256 images per step: 2 processes x 4 micro-batches x 32`."""
        each = f"{self.batch_size}"
        if self.num_local > 1:
            each = f"{self.num_local} micro-batches x {each}"
        return f"{counted(self.global_batch_size, 'image')} per step: {counted(self.world_size, 'process')} x {each}"

    @property
    def local(self) -> range:
        """The numbers of this process's shards."""
        # Consecutive ones, so that a process's sum of gradients is one node of the tree of pairwise sums.
        return range(self.rank * self.num_local, (self.rank + 1) * self.num_local)

    def check(self, *, needs_same_bits: bool, is_synchronised: bool = False) -> None:
        """Check that this world size can compute these shards.

        Args:
            needs_same_bits: also require bit-identical sums: V / W a power of two, or W = 1.
            is_synchronised: also require that synchronised BatchNorm sees the whole global batch: W = V.

        Raises:
            UserError: it cannot; the message lists world sizes that can.
        """
        if is_synchronised and self.world_size < self.num_shards:
            why = f"BatchNorm would see {self.world_size} of the {self.num_shards} micro-batches of a global batch"
            raise UserError(f"--sync-bn: {why}; use {self.num_shards} processes, or remove --sync-bn")
        sizes = [size for size in range(1, self.num_shards + 1) if self.num_shards % size == 0]
        to_same_bits = ""
        if needs_same_bits:
            # Gradients are summed pairwise, first within a process: any other W cuts a pair of that tree in two.
            sizes = [size for size in sizes if size == 1 or (self.num_shards // size).bit_count() == 1]
            to_same_bits = " to the same bits (--use-deterministic-algorithms)"
        if self.world_size not in sizes:
            what = f"{counted(self.num_shards, 'micro-batch')} of {counted(self.batch_size, 'image')}"
            where = f"{counted(self.world_size, 'process')}{to_same_bits}"
            raise UserError(f"cannot run {what} on {where}; use one of {', '.join(map(str, sizes))}")


class TrainSampler(Sampler):
    """Yield, one by one, the images that this process trains on in an epoch: micro-batch by micro-batch, step by step.

    The epoch's order is that of torch's `DistributedSampler` for the same seed. Step g takes the g-th slice of
    `global_batch_size` images of it, and micro-batch v takes the images v, v + V, ... of that slice. The last N mod G
    images of the order are left out, other ones in each epoch.

    Args:
        num_images: N, the size of the set.
        shards: the V micro-batches of the global batch of G images, and this process's share of them.
        seed: the run's seed; epoch e is shuffled with seed + e.
        repetitions: times that each image comes in a row, so mostly in different micro-batches (Hoffer et al., arXiv
            1901.09335). An epoch has the usual length: the first N of the repeated order. torchvision also cuts it to
            a multiple of 256 images, which leaves nothing of a small set; that is the only difference. With fewer
            micro-batches than repetitions, some repetitions of an image share one. They are not neighbours there, as
            mixing pairs neighbours, and the last image with the first, unless one image fills more than half of it.
        labels: (N,) the images' classes, to show each class as often; None for each image once. See
            `balanced_order` in `loading/repeats.py`.

    Raises:
        UserError: the set is smaller than one global batch.
    """

    advances_itself = False  # a pass without a `set_epoch` before it is the next epoch, and not the same one again

    def __init__(
        self, num_images: int, shards: VirtualShards, seed: int = 0, repetitions: int = 1, labels: Tensor | None = None
    ) -> None:
        if num_images < shards.global_batch_size:
            few = f"{num_images} images, fewer than one global batch of {shards.global_batch_size}"
            raise UserError(f"the training set has {few}; choose a smaller --batch-size or --global-batch-size")
        self.num_images = num_images
        self.shards = shards
        self.seed = seed
        self.repetitions = repetitions
        self.labels = labels
        self.batch_size = shards.batch_size
        # Rounded down: a last step of fewer images would have a mean gradient, BatchNorm and a weight of its own, and
        # one filled up with other images, as torch's sampler fills it, shows some images twice in an epoch.
        self.steps_per_epoch = num_images // shards.global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the epoch to yield, and its first step."""
        self.epoch = epoch
        self.start_step = start_step
        self._is_chosen = True

    def epoch_order(self) -> Tensor:
        """Return (N,) int64: the images in this epoch's order."""
        generator = torch.Generator()
        # The seed and the call of torch's `DistributedSampler`, and so its order: a run can be compared with one of
        # torchvision's. From a formula of the epoch a resumed run finds any step's images, and saves no state.
        generator.manual_seed(self.seed + self.epoch)
        if self.labels is not None:
            from loading.repeats import balanced_order

            return balanced_order(self.labels, generator)
        return torch.randperm(self.num_images, generator=generator)

    def addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the (step of the run, micro-batch) of each batch, in the order of the batches."""
        first = self.epoch * self.steps_per_epoch
        for step in range(self.start_step, self.steps_per_epoch):
            for shard in self.shards.local:
                yield first + step, shard

    def _keys(self, order: Tensor, step: int, shard: int, earlier: Tensor | None = None) -> list[SampleKey]:
        """Return the images of a micro-batch; `earlier` is how often each position's image has come already."""
        first = step * self.shards.global_batch_size
        # Every V-th image, as `DistributedSampler` deals them out to V processes.
        positions = torch.arange(first + shard, first + self.shards.global_batch_size, self.shards.num_shards)
        # Batch by batch, 17 us each: as Python's integers the whole order would be 1.28 million objects.
        images = order[positions // self.repetitions].tolist()
        repetitions = positions % self.repetitions if earlier is None else earlier[positions]
        # An image that comes again has other draws: the repetition is a part of their address.
        keys = [SampleKey(index, self.epoch, each) for index, each in zip(images, repetitions.tolist(), strict=True)]
        if self.shards.num_shards >= self.repetitions:
            return keys
        from loading.repeats import without_neighbours

        return without_neighbours(keys)

    def indices_at(self, step: int) -> list[int]:
        """Return the images that this process uses in a step of the epoch."""
        order = self.epoch_order()
        return [int(key) for shard in self.shards.local for key in self._keys(order, step, shard)]

    def __iter__(self) -> Iterator[SampleKey]:
        if self.advances_itself and not self._is_chosen:
            self.set_epoch(self.epoch + 1)
        self._is_chosen = False
        # 25 ms for ImageNet's 1.28 million images: a resumed run makes the whole order anew, and skips within it.
        order = self.epoch_order()
        earlier = None
        if self.labels is not None:
            from loading.repeats import count_earlier

            earlier = count_earlier(order)
        for step in range(self.start_step, self.steps_per_epoch):
            for shard in self.shards.local:
                yield from self._keys(order, step, shard, earlier)

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.start_step) * self.shards.num_local * self.batch_size


class RASampler(TrainSampler):
    """torchvision's `RASampler` for your own scripts: deal repeated images out to the processes one by one.

    `num_replicas` and `rank` are those of the process group by default; without `shuffle` all epochs have one order.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        repetitions: int = 3,
    ) -> None:
        is_group = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if is_group else 1
        if rank is None:
            rank = dist.get_rank() if is_group else 0
        # One image a micro-batch: a plain loader makes batches of what a process gets, of whatever size.
        shards = VirtualShards(num_replicas, num_replicas, rank, num_replicas)
        super().__init__(len(dataset), shards, seed, repetitions)
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle

    def epoch_order(self) -> Tensor:
        """Return (N,) int64: the images in this epoch's order."""
        return super().epoch_order() if self.shuffle else torch.arange(self.num_images)


class EvalSampler(Sampler):
    """Yield, one by one, the images of this process's share of a set's fixed batches.

    Batch k holds images kB to kB + B - 1 and belongs to rank k mod W, where B is `batch_size` and W `world_size`. No
    image is added or left out, and every batch, and with it every logit, is the same at any number of processes.
    """

    def __init__(self, num_images: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.num_images = num_images
        self.batch_size = batch_size
        # Whole batches in turn and no single images, or a batch's contents would depend on the number of processes:
        # kernels sum in another order for another batch. Nothing is padded: torch's sampler adds images to give each
        # process as many, and one that counts twice moves the accuracy.
        self.firsts = range(rank * batch_size, num_images, world_size * batch_size)

    def __iter__(self) -> Iterator[int]:
        for first in self.firsts:
            yield from range(first, min(first + self.batch_size, self.num_images))

    def __len__(self) -> int:
        return sum(min(self.batch_size, self.num_images - first) for first in self.firsts)
