"""loader.py: the samples in the sampler's order, whoever loads them, and memory that is used again."""

import ctypes
import gc
import multiprocessing
import os
import shutil
import subprocess

import pytest
import torch
from torch.utils.data import Dataset

from errors import ImageError, UserError
from loading.loader import BatchLoader, check_workers
from tests.ranks import run_ranks


class Numbers(Dataset):
    """Images whose every pixel is their number; some cannot be read."""

    def __init__(self, bad=()):
        self.bad = bad

    def load(self, key):
        if key in self.bad:
            raise ImageError(f"cannot read image {key}")
        # Of two sizes, as where crops grow.
        return torch.full((3, 4, 6 + key // 51), key, dtype=torch.uint8), key


class Keys:
    """The keys of batches of three, the last of one."""

    batch_size = 3

    def __init__(self, num_batches):
        self.keys = range(3 * num_batches - 2)

    def __len__(self):
        return len(self.keys)

    def __iter__(self):
        return iter(self.keys)


def batches_of(num_batches):
    return [[first] if first == 3 * num_batches - 3 else [first, first + 1, first + 2]
            for first in range(0, 3 * num_batches, 3)]  # fmt: skip


def build(dataset, num_batches, num_workers=2):
    return BatchLoader(dataset, Keys(num_batches), num_workers=num_workers, batch_bytes=3 * 3 * 4 * 7)


KINDS = pytest.mark.parametrize("num_workers", [0, 2])


@KINDS
def test_batches_come_in_the_samplers_order_epoch_after_epoch(num_workers):
    loader = build(Numbers(), 20, num_workers)  # more than there is memory for at once
    assert len(loader) == 20
    for _ in range(2):
        seen = 0
        for (image, label), keys in zip(loader, batches_of(20), strict=True):
            assert label.tolist() == keys
            assert image.shape == (len(keys), 3, 4, 6 + keys[0] // 51)
            assert image.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(image, label.to(torch.uint8).view(-1, 1, 1, 1).expand_as(image))
            seen += 1
        assert seen == 20


def test_more_workers_than_any_use_are_refused():
    cores = len(os.sched_getaffinity(0))
    check_workers(64)  # which waits for a slow disk
    with pytest.raises(UserError, match=f"--workers {250 * cores}: this process has {cores} cores"):
        check_workers(250 * cores)


class Negatives(Numbers):
    """Images whose class is the negative of their number."""

    def load(self, key):
        image, label = super().load(key)
        return image, -label


def test_the_same_processes_load_several_sets_in_turn():
    before = set(multiprocessing.active_children())
    loader = build(Numbers(), 20)
    other = loader.sharing_workers(Negatives())
    other.sampler = Keys(5)
    loader.start()
    workers = set(multiprocessing.active_children()) - before
    for _ in range(2):
        assert [label.tolist() for _, label in loader] == batches_of(20)
        found = [(-label).tolist() for _, label in other]
        assert found == batches_of(5)
    assert next(iter(loader))[1].tolist() == [0, 1, 2]  # left early
    assert [(-label).tolist() for _, label in other] == batches_of(5)
    assert set(multiprocessing.active_children()) - before == workers


@KINDS
def test_an_image_that_cannot_be_read_is_raised_in_its_turn(num_workers):
    loader = build(Numbers(bad={7, 31}), 20, num_workers)
    batches = iter(loader)
    assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ImageError, match="cannot read image 7") as caught:
        next(batches)
    assert str(caught.value) == "cannot read image 7"


def test_a_loader_process_ends_when_its_parent_says_so_and_not_when_another_does():
    before = set(multiprocessing.active_children())
    torch.set_num_threads(2)  # so that torch starts a thread in the process before we prepare it
    loader = build(Numbers(), 20, num_workers=1)
    batches = iter(loader)
    torch.set_num_threads(1)
    next(batches)
    (process,) = set(multiprocessing.active_children()) - before
    for _ in range(20):
        subprocess.run(["kill", "-TERM", str(process.pid)], check=True)  # as a launcher does to all
    assert sum(1 for _ in batches) == 19
    assert process.is_alive()
    # Of a loader that is collected as a part of a cycle torch says so by SIGTERM alone, five seconds later.
    cycle = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    gc.collect()
    process.join(10)
    assert process.exitcode == 0


class Large(Dataset):
    """Images of 12 MiB, whose every pixel is their number."""

    def load(self, key):
        return torch.full((3, 2048, 2048), key, dtype=torch.uint8), key


def load_with_shared_memory_of(size, stdout):
    """Load in a process whose /dev/shm is that small."""
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", "/dev/shm"], check=True)
    loader = BatchLoader(Large(), Keys(3), num_workers=2, batch_bytes=3 * 3 * 2048**2)
    loader.start()
    with open(stdout, "w") as file:
        for image, label in loader:
            assert torch.equal(image.amax((1, 2, 3)), label.to(torch.uint8))
            print(label.tolist(), file=file)


HAS_NAMESPACES = shutil.which("unshare") and subprocess.run(
    ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True, check=False
).returncode == 0  # fmt: skip


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, for a /dev/shm of its own")
def test_batches_take_no_room_in_dev_shm(tmp_path):
    size = "1m"  # less than a batch
    done = run_ranks(load_with_shared_memory_of, 1, size, tmp_path / "stdout", log_folder=tmp_path)
    assert (done.codes, done.output) == ([0], "")
    assert (tmp_path / "stdout").read_text() == "[0, 1, 2]\n[3, 4, 5]\n[6]\n"
