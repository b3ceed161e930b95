"""loader.py: its processes; what they load is compared by runs with and without them."""

import gc
import multiprocessing
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
from tests.started import SMALL, refused, run_train


class Numbers(Dataset):
    def load(self, key):
        return torch.full((3, 4, 4), key, dtype=torch.uint8), key


def test_more_workers_than_any_use_are_refused():
    cores = count_cores()
    check_workers(64)  # which waits for a slow disk
    with pytest.raises(UserError, match=f"--workers {250 * cores}: this process has {cores} cores"):
        check_workers(250 * cores)


def test_a_loader_process_ends_when_its_parent_says_so_and_not_when_another_does(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    before = set(multiprocessing.active_children())
    torch.set_num_threads(2)  # so that torch starts a thread in the process before we prepare it
    loader = BatchLoader(Numbers(), EvalSampler(58, 3), num_workers=1, batch_bytes=3 * 3 * 4 * 4)
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
