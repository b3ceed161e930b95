"""loader.py: its processes and their memory; what they load is compared by runs with and without them."""

import ctypes
import gc
import multiprocessing
import shutil
import signal
import subprocess
from importlib.metadata import version

import pytest
import torch
from torch.utils.data import Dataset

from distributed.collectives import count_cores
from errors import UserError
from files import read_json
from loading.loader import BatchLoader, check_workers
from sampler import EvalSampler
from tests.endings import differing_results
from tests.ranks import run_ranks
from tests.started import SMALL, refused, run_train


class Numbers(Dataset):
    """Images whose every pixel is their number."""

    def __init__(self, side):
        self.side = side

    def load(self, key):
        return torch.full((3, self.side, self.side), key, dtype=torch.uint8), key


def test_more_workers_than_any_use_are_refused():
    cores = count_cores()
    check_workers(64)  # which waits for a slow disk
    with pytest.raises(UserError, match=f"--workers {250 * cores}: this process has {cores} cores"):
        check_workers(250 * cores)


def test_a_loader_process_ends_when_its_parent_says_so_and_not_when_another_does(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    before = set(multiprocessing.active_children())
    torch.set_num_threads(2)  # so that torch starts a thread in the process before we prepare it
    loader = BatchLoader(Numbers(4), EvalSampler(58, 3), num_workers=1, batch_bytes=3 * 3 * 4 * 4)
    batches = iter(loader)
    torch.set_num_threads(1)
    next(batches)
    (process,) = set(multiprocessing.active_children()) - before
    for _ in range(20):
        subprocess.run(["kill", "-TERM", str(process.pid)], check=True)  # as a launcher does to all
    assert sum(1 for _ in batches) == 19
    assert process.is_alive()
    # Of a loader that is collected as a part of a cycle torch says so by SIGTERM alone, that interval later.
    cycle = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    gc.collect()
    process.join(10)
    assert process.exitcode == 0


def load_with_shared_memory_of(size):
    """Load images of 12 MiB in a process whose /dev/shm is that small."""
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", "/dev/shm"], check=True)
    loader = BatchLoader(Numbers(2048), EvalSampler(7, 3), num_workers=2, batch_bytes=3 * 3 * 2048**2)
    loader.start()
    batches = [(image.amax((1, 2, 3)).tolist(), label.tolist()) for image, label in loader]
    assert batches == [([0, 1, 2],) * 2, ([3, 4, 5],) * 2, ([6],) * 2]


HAS_NAMESPACES = shutil.which("unshare") and subprocess.run(
    ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True, check=False
).returncode == 0  # fmt: skip


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, for a /dev/shm of its own")
def test_batches_take_no_room_in_dev_shm(tmp_path):
    done = run_ranks(load_with_shared_memory_of, 1, "1m", log_folder=tmp_path)  # less than a batch
    assert (done.codes, done.output) == ([0], "")


def train_once(images, folder, *argv, **how):
    argv = [*SMALL, "--data-path", images, "--batch-size", 8, "--epochs", 1, "--output-dir", folder / "out", *argv]
    folder.mkdir(exist_ok=True)
    return run_train(folder, *argv, **how)


def test_a_decoder_that_crashes_is_one_line_that_names_the_image(image_folder, tmp_path):
    crash = [(0, "loading.decode.ImageFile.decode", 3, "before", signal.SIGSEGV)]  # the third of a loader process
    done = train_once(image_folder, tmp_path, "--workers", 1, faults=crash)
    refused(done, "a loader process was killed", "It was loading class", ".jpg", "remove it", code=1)


def test_torchcodec_changes_no_number_and_is_said(image_folder, tmp_path):
    pytest.importorskip("torchcodec")
    ours = train_once(image_folder, tmp_path / "codec", "--workers", 1).check()
    plain = train_once(image_folder, tmp_path / "pillow").check()
    assert [done.output.count("JPEGs are decoded by TorchCodec") for done in (ours, plain)] == [1, 0]
    assert "extraneous" not in ours.output  # what its C library writes of shortened files
    folders = [tmp_path / name / "out" for name in ("codec", "pillow")]
    assert differing_results(*folders) == []
    decoders = [read_json(folder / "run.json")["environment"]["decoder"] for folder in folders]
    assert decoders[0] == f"torchcodec {version('torchcodec')}, {decoders[1]}"
