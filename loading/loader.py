"""Batches of uint8 images, loaded in the sampler's order by this process or by worker processes."""

import copy
import itertools
import math
import mmap
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from distributed.collectives import count_cores
from distributed.lending import at_end
from distributed.signals import start_worker
from errors import StorageError, UserError
from loading.decode import use_torchcodec
from settings.options import AugmentationOptions, OptimizationOptions

# Batches that each worker loads ahead.
_PREFETCH_FACTOR = 2
# Slots beyond those that workers fill: one for the batch in use, and one more.
_SPARE_SLOTS = 2
# Most loader processes per core, since they may wait for a slow disk; and the number that every machine allows.
_MOST_PER_CORE, _MOST_ANYWHERE = 32, 64


def check_workers(num_workers: int) -> None:
    """Raise UserError for more workers than this machine can use."""
    cores = count_cores()
    # Without a bound `scripts.check --workers 100000` started as many processes.
    most = max(_MOST_PER_CORE * cores, _MOST_ANYWHERE)
    if num_workers > most:
        found = f"--workers {num_workers}: this process has {cores} cores"
        raise UserError(f"{found}, enough for {most} at most; give about {cores}")


def largest_batch_bytes(optimization: OptimizationOptions, augmentation: AugmentationOptions, in_chans: int) -> int:
    """Return the bytes of the pixels of the largest batch, in training or in evaluation."""
    evaluated = optimization.eval_batch_size or optimization.batch_size
    pixels = max(optimization.batch_size * augmentation.train_crop_size**2, evaluated * augmentation.val_crop_size**2)
    return pixels * in_chans


def collate(samples: list[tuple[Tensor, int]], memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Put samples into one batch.

    Args:
        samples: (C, H, W) uint8 image, best in channels-last order, and its class.
        memory: (bytes,) uint8 to copy the images into; by default new memory.

    Returns:
        (B, C, H, W) uint8 in channels-last order, and (B,) int64 classes.
    """
    images, labels = zip(*samples, strict=True)
    shape = (len(samples), *images[0].shape[1:], len(images[0]))
    batch = torch.empty(shape, dtype=torch.uint8) if memory is None else _view(memory, shape)
    # By numpy, because torch would copy each image with all its threads. Channels-last, as decoders leave images: 8 us
    # of each image in a batch of 64, where (C, H, W) takes 45.
    for slot, image in zip(batch.numpy(), images, strict=True):
        numpy.copyto(slot, image.permute(1, 2, 0).numpy())
    return batch.permute(0, 3, 1, 2), torch.tensor(labels)


def _view(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)


class _Tasks:
    """The batches to load, for a `DataLoader`: each one's set, slot, keys, and those that the same worker loads next.

    The slots of the shared memory take turns; without it the slot is None.
    """

    def __init__(self, num_slots: int, num_workers: int) -> None:
        self.num_slots, self.num_workers = num_slots, max(num_workers, 1)
        self.number = 0
        self.begun: Iterator[list[int]] = iter(())  # the keys of each batch once more, for who takes the batches
        self.choose(0, None)

    def choose(self, set_number: int, sampler: Any) -> int:
        """Use the keys of a sampler from now on, for the set of this number, and return the number of this choice."""
        self.set_number = set_number
        self.sampler = sampler
        self.number += 1
        return self.number

    def __iter__(self) -> Iterator[tuple[int, int | None, list[int], list[int]]]:
        slots = itertools.cycle(range(self.num_slots) or [None])
        batches, ahead, self.begun = itertools.tee(batches_of(self.sampler), 3)
        # The DataLoader deals batches to its workers in turn, so a worker's next one is as many batches later.
        following = itertools.chain(itertools.islice(ahead, self.num_workers, None), itertools.repeat([]))
        return zip(itertools.repeat(self.set_number), slots, batches, following, strict=False)


def batches_of(sampler: Any) -> BatchSampler | tuple[()]:
    """Return a sampler's keys in batches; none of None."""
    return () if sampler is None else BatchSampler(sampler, sampler.batch_size, drop_last=False)


class _TaskDataset(Dataset):
    """The data set of a worker process, whose keys are tasks: it loads a batch at a time, into its slot, if any."""

    def __init__(self, sets: list[Any], slots: list[Tensor], num_workers: int) -> None:
        self.sets = sets
        self.slots = slots
        # What each worker loads: its pid, the set's number, the image's. In shared memory, since a worker that a
        # decoder's crash or the system's lack of memory ends can say no more.
        self.loading = numpy.frombuffer(mmap.mmap(-1, 24 * max(num_workers, 1)), numpy.int64).reshape(-1, 3)

    # torch's fetcher prefers this method to one call of `__getitem__` for each key, and passes on what the sampler
    # yields whatever its type: so a worker can be told the slot and its next keys together with those of the batch.
    def __getitems__(self, task: tuple[int, int | None, list[int], list[int]]) -> tuple:
        """Return a batch; for one in a slot, the slot's number, the images' shape, and the classes."""
        set_number, slot, keys, following = task
        source = getattr(self.sets[set_number], "index", None)
        if source is not None:
            source.expect([*keys, *following])
        samples = [self._load(set_number, key) for key in keys]
        if slot is None:
            return collate(samples)
        image, labels = collate(samples, self.slots[slot])
        # Plain numbers, labels included: torch would move a tensor to the parent through a file of /dev/shm, which a
        # container may have no room for.
        return slot, image.permute(0, 2, 3, 1).shape, labels.tolist()

    def _load(self, set_number: int, key: Any) -> tuple[Tensor, Any]:
        """Load a sample, and let the parent know which, in case a decoder ends this process."""
        worker = get_worker_info()
        if worker is not None:
            self.loading[worker.id] = os.getpid(), set_number, key
        return self.sets[set_number].load(key)


def start_loader(worker: int) -> None:
    """Prepare a loader process, as `start_worker`; it may decode by TorchCodec."""
    start_worker(worker)
    use_torchcodec()


class BatchLoader:
    """Load batches of uint8 images and their classes, as `collate`, in this process or in worker processes.

    A `DataLoader` only manages its processes; each item that it loads is a whole batch (`_Tasks`).

    Workers put images into shared memory and reuse it: a later batch overwrites it, so copy images that are to stay. A
    fresh page of shared memory would cost more than the copy into it. The batches take
    (num_workers x 2 + 2) x batch_bytes at most, in anonymous memory: none of it lies in /dev/shm.

    Args:
        dataset: its `load` makes a sample of a key, as `collate` takes them.
        sampler: yields keys one at a time, and has the `batch_size`; it may be set later.
        num_workers: processes; 0 loads in this process.
        batch_bytes: bytes of the images of the largest batch.
        pin_memory: copy the images into pinned memory, from which a GPU copies without blocking the host.

    Raises:
        StorageError: there is no memory for the batches.
    """

    def __init__(
        self, dataset: Dataset, sampler: Any = None, *, num_workers: int, batch_bytes: int, pin_memory: bool = False
    ) -> None:
        self.dataset, self.sampler, self.pin_memory = dataset, sampler, pin_memory
        self.keys: list[int] = []  # of the batch that was yielded last
        num_slots = num_workers * _PREFETCH_FACTOR + _SPARE_SLOTS if num_workers else 0
        # Anonymous memory: no file in /dev/shm, which containers keep small (Docker: 64 MiB). A page takes room once it
        # is written to. Slots are reused: a fresh shared batch each time took 127 us of an image where these take 5.
        try:
            memory = mmap.mmap(-1, max(num_slots * batch_bytes, 1))
        except (OSError, OverflowError) as error:
            found = f"no memory for {num_slots} prefetched batches of {batch_bytes / 2**20:.0f} MiB"
            reason = f"{found} from {num_workers} loader processes ({error})"
            raise StorageError(f"{reason}; use fewer --workers, or a smaller --batch-size", exit_code=2) from error
        self.slots = list(torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, -1)) if num_slots else []
        self._sets: list[Any] = [dataset]  # each has a `load`, and those of a `Source` an `index`
        self._set_number = 0
        self._tasks = _Tasks(num_slots, num_workers)
        self._task_set = _TaskDataset(self._sets, self.slots, num_workers)
        self.loader = DataLoader(
            self._task_set,
            batch_sampler=self._tasks,  # type: ignore[arg-type]  # torch's annotation wants lists, its code anything
            num_workers=num_workers,
            prefetch_factor=_PREFETCH_FACTOR if num_workers else None,
            # Else torch would fork others in each epoch, beside gloo's threads, whose locks they would inherit.
            persistent_workers=num_workers > 0,
            # Forked processes end with their parent, however it ends; a fork server and its children would stay.
            multiprocessing_context="fork" if num_workers else None,
            collate_fn=tuple,  # a batch is one already
            worker_init_fn=start_loader,
        )
        at_end(self.close)

    def sharing_workers(self, dataset: Dataset) -> "BatchLoader":
        """Return a loader of another set that shares the processes of this one: only one of them loads at a time.

        Call it before the processes start.
        """
        # With a pool for each set, --workers 2 started four processes, two of which waited at about 100 MiB each.
        other = copy.copy(self)
        other.dataset, other.sampler = dataset, None
        other._set_number = len(self._sets)
        self._sets.append(dataset)
        return other

    def start(self) -> None:
        """Start the processes, if any, which otherwise start with the first epoch.

        Best called before there are other threads: a process that is forked while one of them holds a lock of libc, or
        initialises a static of C++, inherits that state for ever, and may wait for its end.

        Raises:
            StorageError: the processes cannot be started.
        """
        self._tasks.choose(0, None)  # nothing is loaded yet
        try:
            self._start_epoch()
        except (OSError, RuntimeError) as error:
            found = f"cannot start {self.loader.num_workers} loader processes ({error})"
            remedy = "use fewer --workers, or raise the limits: `ulimit -n`, `ulimit -u`, the size of /dev/shm"
            raise StorageError(f"{found}; {remedy}", exit_code=2) from error

    def close(self) -> None:
        """End the processes, if any, which the frames of an error would keep alive in a notebook."""
        if isinstance(self.loader._iterator, _MultiProcessingDataLoaderIter):
            self.loader._iterator._shutdown_workers()

    @property
    def batch_sampler(self) -> BatchSampler | tuple[()]:
        """The keys of an epoch in batches."""
        return batches_of(self.sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Begin to load, and return the batches; those of an earlier call, of any of the sets, are lost."""
        number = self._tasks.choose(self._set_number, self.sampler)
        # The processes start here, and not with the first batch: they end with the thread that starts them.
        loaded = self._start_epoch()
        return self._batches(loaded, number, self._tasks.begun)

    def _start_epoch(self) -> Iterator[tuple]:
        """Return the DataLoader's iterator, for which it may fork processes.

        They inherit a blocked SIGTERM: torch may start threads in them before `start_worker` blocks it, and a launcher
        that signals the whole process group would kill them.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return iter(self.loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _batches(self, loaded: Iterator[tuple], number: int, keys: Iterator) -> Iterator[tuple[Tensor, Tensor]]:
        while (batch := self._next(loaded)) is not None:
            # Two iterators at once would load into the same slots.
            assert number == self._tasks.number or not self.slots
            if self.slots:
                slot, shape, labels = batch
                image = _view(self.slots[slot], shape).permute(0, 3, 1, 2)
                target = torch.tensor(labels)
            else:
                image, target = batch
            self.keys = next(keys)
            # Not by the DataLoader's `pin_memory`, through which only the numbers of slots pass. The copy frees the
            # slot, too: a worker may overwrite it while the device still reads the pinned memory.
            yield image.pin_memory() if self.pin_memory else image, target

    def _next(self, loaded: Iterator[tuple]) -> tuple | None:
        """Return the next batch, or None after the last; if a worker was killed, the error names its image."""
        try:
            return next(loaded, None)
        except RuntimeError as error:
            # torch's message has the process's id and no more.
            for pid, set_number, number in self._task_set.loading.tolist():
                if re.search(rf"worker \(pid.*\b{pid}\b", str(error)) and hasattr(self._sets[set_number], "index"):
                    name = self._sets[set_number].index.name(number)
                    raise RuntimeError(f"{error} It was loading {name}.") from error
            raise
