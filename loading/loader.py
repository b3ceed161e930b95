"""Batches of uint8 images from worker processes or threads, in the sampler's order and without a copy too many."""

import itertools
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from collectives import count_cores
from errors import LimitError, UserError
from files import memory_bytes

# Batches that a loader of processes has room for beyond those being filled: the one that is used, and one more.
_SPARE_SLOTS = 2
# Loader processes that a core can be of use to, where they wait for a slow disk, and those that are allowed anywhere.
_MOST_PER_CORE, _MOST_ANYWHERE = 32, 64

_empty_bytes = partial(torch.empty, dtype=torch.uint8)


def _empty_shared(shape: tuple[int, ...]) -> Tensor:
    """Return memory that the main process sees too, where this is a worker, which spares a second copy."""
    if get_worker_info() is None:
        return _empty_bytes(shape)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return _empty_bytes(0).set_(storage, 0, shape)


def check_workers(num_workers: int) -> None:
    """Refuse more workers than this machine can have any use for.

    Raises:
        UserError: there are too many.
    """
    cores = count_cores()
    most = max(_MOST_PER_CORE * cores, _MOST_ANYWHERE)
    if num_workers > most:
        raise UserError(
            f"--workers {num_workers}: this process has {cores} cores, of use to {most} at most; give about {cores}"
        )


def check_memory(args: Any) -> None:
    """Refuse batches that no memory of this machine holds.

    Raises:
        UserError: they are larger.
    """
    side = max(args.train_crop_size, args.val_crop_size)
    needed = args.batch_size * 3 * side**2
    if needed > memory_bytes():
        raise UserError(
            f"--batch-size {args.batch_size} of {side} px are {needed / 1e9:,.0f} GB of pixels, more than this "
            "machine's memory; use fewer or smaller ones"
        )


def collate(
    samples: list[tuple[Tensor, int]], empty: Callable[[tuple[int, ...]], Tensor] = _empty_shared
) -> tuple[Tensor, Tensor]:
    """Put (3, H, W) uint8 images and their classes into one batch.

    Args:
        samples: the images, best in channels-last order, and their classes.
        empty: from a shape to the uint8 memory that the images are copied into.

    Returns:
        (B, 3, H, W) uint8 in channels-last order, and (B,) int64.
    """
    height, width = samples[0][0].shape[1:]
    batch = empty((len(samples), height, width, 3))
    # numpy, because torch would copy with threads of its own in each loader thread.
    for place, (image, _) in zip(batch.numpy(), samples, strict=True):
        numpy.copyto(place, image.permute(1, 2, 0).numpy())
    return batch.permute(0, 3, 1, 2), torch.tensor([label for _, label in samples])


class _SlotSampler:
    """A batch sampler that gives each batch a slot, round and round."""

    def __init__(self, batch_sampler: Any, num_slots: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_slots = num_slots

    def __iter__(self) -> Iterator[tuple[int, list]]:
        return zip(itertools.cycle(range(self.num_slots)), self.batch_sampler, strict=False)

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _SlotFiller(Dataset):
    """What a worker process loads: a batch at a time, into the slot that it is told."""

    def __init__(self, dataset: Dataset, collate_fn: Callable, slots: list[Tensor]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.slots = slots

    def __getitems__(self, slot_and_keys: tuple[int, list]) -> tuple[int, tuple[int, ...], list[list[int]]]:
        """Fill a slot; return its number, the shape of what is in it, and what else the samples hold."""
        slot, keys = slot_and_keys
        empty = partial(_view, self.slots[slot])
        image, *numbers = self.collate_fn([self.dataset[key] for key in keys], empty)
        return slot, (len(keys), *image.permute(0, 2, 3, 1).shape[1:]), [column.tolist() for column in numbers]


def _view(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)


def _as_it_is(batch: Any) -> Any:
    return batch


class ProcessLoader:
    """Load batches in forked worker processes, into memory that is shared with them and used over and over.

    A batch's images are overwritten some batches later: take a copy of what is to stay. Each fresh page of shared
    memory costs more than the copy into it (docs/research/LOADING.md, 5).

    Args:
        dataset: yields (image, class) samples.
        batch_sampler: yields lists of the data set's keys; may be set later.
        num_workers: processes.
        prefetch_factor: batches each worker is ahead.
        batch_bytes: the images of the largest batch.
        collate_fn: from samples and an allocator to a batch.
        pin_memory: copy the images into pinned memory, from where a GPU takes them without waiting.
        worker_init_fn: called first in each process, with its number.

    Raises:
        LimitError: there is no memory for the batches.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_sampler: Any,
        *,
        num_workers: int,
        prefetch_factor: int,
        batch_bytes: int,
        collate_fn: Callable = collate,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self.pin_memory = pin_memory
        num_slots = num_workers * prefetch_factor + _SPARE_SLOTS
        # Nameless memory: no file in /dev/shm, which containers keep small. A page takes room once it is written to.
        try:
            memory = mmap.mmap(-1, num_slots * batch_bytes)
        except (OSError, OverflowError) as error:
            raise LimitError(
                f"no memory for {num_slots} batches of {batch_bytes / 2**20:.0f} MiB on their way from {num_workers} "
                f"loader processes ({error}); use fewer --workers, or a smaller --batch-size or --prefetch-factor"
            ) from error
        self.slots = list(torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, batch_bytes))
        self._slot_sampler = _SlotSampler(batch_sampler, num_slots)
        self.loader = DataLoader(
            _SlotFiller(dataset, collate_fn, self.slots),
            batch_sampler=self._slot_sampler,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=True,
            # Forked, the processes end with their parent, however it ends; a fork server and its children would stay.
            multiprocessing_context="fork",
            collate_fn=_as_it_is,
            worker_init_fn=worker_init_fn,
        )

    @property
    def batch_sampler(self) -> Any:
        """What the batches are made of, from the next epoch on."""
        return self._slot_sampler.batch_sampler

    @batch_sampler.setter
    def batch_sampler(self, batch_sampler: Any) -> None:
        self._slot_sampler.batch_sampler = batch_sampler

    def start(self) -> None:
        """Start the processes, which else begin with the first epoch.

        A process that is forked while another thread holds a lock of libc's or is in the middle of a first call into
        C++ inherits both for ever, and may wait for them: so best before there are other threads.

        Raises:
            LimitError: they cannot be started.
        """
        batch_sampler, self.batch_sampler = self.batch_sampler, ()  # nothing is loaded yet
        try:
            iter(self.loader)
        except (OSError, RuntimeError) as error:
            raise LimitError(
                f"cannot start {self.loader.num_workers} loader processes ({error}); use fewer --workers, or raise "
                "what limits them: `ulimit -n`, `ulimit -u`, the room in /dev/shm"
            ) from error
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for slot, shape, numbers in self.loader:
            image = _view(self.slots[slot], shape).permute(0, 3, 1, 2)
            if self.pin_memory:
                image = image.pin_memory()
            yield image, *(torch.tensor(column, dtype=torch.int64) for column in numbers)


class ThreadLoader:
    """Load batches in threads of this process, each straight into its place.

    For data sets that make draws of their own and decoders that let go of the interpreter.

    Args:
        dataset: yields (image, class) samples.
        batch_sampler: yields lists of the data set's keys.
        num_workers: threads.
        prefetch_factor: batches each worker is ahead.
        collate_fn: from samples and an allocator to a batch.
        pin_memory: put the images into pinned memory, from where a GPU takes them without waiting.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_sampler: Any,
        *,
        num_workers: int,
        prefetch_factor: int,
        collate_fn: Callable = collate,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.num_ahead = num_workers * prefetch_factor
        self.collate_fn = collate_fn
        self.empty = partial(_empty_bytes, pin_memory=pin_memory)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def _load(self, keys: list) -> tuple[Tensor, ...]:
        return self.collate_fn([self.dataset[key] for key in keys], self.empty)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        keys = iter(self.batch_sampler)
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="loader")
        try:
            pending = deque(pool.submit(self._load, batch) for batch in itertools.islice(keys, self.num_ahead))
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(self._load, batch) for batch in itertools.islice(keys, 1))
                yield batch
        finally:
            # Also where the epoch is left in its middle: what has begun ends, and nothing more begins.
            pool.shutdown(cancel_futures=True)
