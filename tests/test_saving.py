"""Saves that are written beside the training: what is in them, who hears of them and when, and who waits."""

import errno
import io
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import HostCopy
from checkpointing.store import CheckpointManager
from distributed import collectives
from tests.endings import Ending, differing, differing_results, flatten
from tests.ranks import run_check, run_ranks, train_rank
from tests.runs import FixedRun

# 29 images in 2 shards of 4: 3 steps an epoch, 6 in all; saved after the steps 2, 3, 3, 4, 6 and 6.
OPTIONS = """
    --model timm/tiny_test --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --device cpu --workers 0
    --epochs 2 --print-freq 2 --lr 0.05 --model-ema --model-ema-steps 1 --use-deterministic-algorithms
    --batch-size 4 --global-batch-size 8 --checkpoint-steps 2 --resume auto
""".split()


def slow_rank(argv, notes, num_steps, code, faults=()):
    """Train on a disk that makes the fourth save durable, or fails to, when some more steps have begun.

    Rank 0 notes at which step that was; each rank at which step it heard of a save.
    """
    fsync, step, settle = os.fsync, torch.optim.SGD.step, CheckpointManager.settle
    syncs, steps, rank = [], [], os.environ.get("RANK", "0")

    def note(word):
        with open(Path(notes, rank), "a") as file:
            file.write(f"{word} {len(steps)}\n")

    def slow(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "checkpoint-" in name and ".tmp." in name:
            syncs.append(name)
            if len(syncs) == 4:
                deadline = time.monotonic() + 20
                while len(steps) < 4 + num_steps and time.monotonic() < deadline:
                    time.sleep(0.01)
                note("written")
                if code:
                    raise OSError(code, os.strerror(code))
        fsync(descriptor)

    def counted(self, *args, **options):
        steps.append(1)
        return step(self, *args, **options)

    def noted(manager, **options):
        is_waited_for = manager._saving is not None  # for ranks that write nothing, too
        is_saved = settle(manager, **options)
        if is_waited_for:
            note(f"heard {is_saved}")
        return is_saved

    os.fsync, torch.optim.SGD.step, CheckpointManager.settle = slow, counted, noted
    train_rank(argv, faults)


class Runs:
    """Runs on slow disks, each in a folder of its own."""

    def __init__(self, images, folder):
        self.images, self.folder = images, folder

    def run(self, name, world_size=1, num_steps=0, code=0, faults=()):
        notes = self.folder / f"{name}-notes"
        notes.mkdir(exist_ok=True)
        argv = ["--data-path", str(self.images), "--output-dir", str(self.folder / name), *OPTIONS]
        slowness = str(notes), num_steps, code, list(faults)
        return run_ranks(slow_rank, world_size, argv, *slowness, log_folder=notes)

    def notes(self, name, rank=0):
        return (self.folder / f"{name}-notes" / str(rank)).read_text().splitlines()

    def ending(self, name, *, has_same_saves=True):
        return Ending(self.folder / name, has_same_saves=has_same_saves)


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("saving"))
    runs.run("prompt").check()
    return runs


def test_training_goes_on_beside_a_write_and_what_is_written_is_of_its_step(runs):
    runs.run("slow", num_steps=2).check()
    notes = runs.notes("slow")
    # The fourth save, of step 4, was on its way while steps 5 and 6 were made, and was heard of after them.
    assert notes.index("written 6") + 1 == notes.index("heard True 6")
    assert runs.ending("slow").differences(runs.ending("prompt")) == []


@pytest.mark.dist
def test_all_ranks_hear_of_a_full_disk_after_the_same_step(runs):
    outcome = runs.run("full", 2, num_steps=1, code=errno.ENOSPC).check()
    assert outcome.output.count("warning: checkpoint-00000004.pth was not saved: disk full on") == 1
    heard = [[note for note in runs.notes("full", rank) if note.startswith("heard")] for rank in (0, 1)]
    assert heard[0] == heard[1]
    assert [note.split()[1] for note in heard[0]].count("False") == 1
    assert runs.ending("full", has_same_saves=False).differences(runs.ending("prompt", has_same_saves=False)) == []


def test_a_kill_while_a_save_is_written_leaves_the_one_before(runs):
    killed = runs.run("killed", num_steps=2, faults=[(0, "torch.optim.SGD.step", 5, "after")])
    assert killed.codes == [-signal.SIGKILL], killed.output
    assert load_checkpoint(runs.folder / "killed" / "checkpoint.pth", "newest")["step"] == 3
    assert not (runs.folder / "killed" / "checkpoint-00000004.pth").exists()
    assert "resumed step 3 " in runs.run("killed").check().output
    assert runs.ending("killed").differences(runs.ending("prompt")) == []


def test_a_stop_waits_for_the_save_that_is_under_way(runs):
    stop = [(0, "torch.optim.SGD.step", 5, "after", signal.SIGTERM)]
    outcome = runs.run("stopped", num_steps=1, faults=stop).check()
    assert "SIGTERM: the run stopped after step 5, saved in" in outcome.output
    assert {"written 5", "heard True 5"} <= set(runs.notes("stopped"))
    steps = {f"checkpoint-{step:08d}.pth" for step in (4, 5)}
    assert steps <= {path.name for path in (runs.folder / "stopped").iterdir()}
    assert not list((runs.folder / "stopped").glob("*.tmp.*"))
    runs.run("stopped").check()
    assert differing_results(runs.folder / "stopped", runs.folder / "prompt") == []


def raising_rank(argv, notes, num_steps, code, faults):
    """Train as `slow_rank` until the fifth step raises what nobody expects."""
    from run import Run

    begin = Run.begin_step

    def begin_or_raise(run, epoch, step):
        if run.state.step == 5:
            raise RuntimeError("a surprise")
        begin(run, epoch, step)

    Run.begin_step = begin_or_raise
    slow_rank(argv, notes, num_steps, code, faults)


def test_a_run_that_ends_by_an_error_keeps_the_save_that_is_under_way(runs):
    out, notes = runs.folder / "raised", runs.folder / "raised-notes"
    notes.mkdir()
    argv = ["--data-path", str(runs.images), "--output-dir", str(out), *OPTIONS]
    outcome = run_ranks(raising_rank, 1, argv, str(notes), 1, 0, [], log_folder=notes)
    assert outcome.codes == [1]
    assert "RuntimeError: a surprise" in outcome.output
    assert load_checkpoint(out / "checkpoint.pth", "newest")["step"] == 4


def test_a_copy_has_the_same_bytes_and_shares_no_memory():
    whole = torch.arange(24.0).reshape(2, 3, 2, 2)
    state = {
        "model": torch.nn.BatchNorm2d(3).state_dict(),  # which knows its version
        "tied": [whole, whole[1], whole.t() if whole.dim() == 2 else whole.mT],
        "order": whole.to(memory_format=torch.channels_last),
        "empty": (torch.zeros(0), torch.zeros(0), None, "text", 1, 2.5, True),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    before, after = io.BytesIO(), io.BytesIO()
    torch.save(state, before)
    copy = HostCopy().take(state)
    torch.save(copy, after)
    assert after.getvalue() == before.getvalue()
    whole.zero_()
    assert copy["tied"][0].sum() == 23 * 24 / 2
    assert differing(flatten(copy["model"]), flatten(state["model"])) == []


def test_the_memory_of_a_copy_is_used_again():
    copies, state = HostCopy(), {"a": torch.ones(1000), "b": torch.ones(1000), "c": torch.ones(7)}
    first = {name: tensor.data_ptr() for name, tensor in copies.take(state).items()}
    state["a"].fill_(2)
    state |= {"d": torch.full((3,), 5.0)}  # as an optimizer's, which come with the first step
    second = copies.take(state)
    copies.wait()
    assert {second[name].data_ptr() for name in first} == set(first.values())
    assert len({tensor.data_ptr() for tensor in second.values()}) == 4
    assert differing(flatten(second), flatten(state)) == []


def test_records_are_durable_before_the_checkpoint_that_is_later(tmp_path, monkeypatch):
    manager, order, fsync, replace = CheckpointManager(tmp_path), [], os.fsync, os.replace
    manager.lock()
    manager.adopt("", FixedRun(0))

    def noted(descriptor):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source, target):
        order.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", renamed)
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        manager.save(FixedRun(1), records=file.fileno())
        assert manager.settle()
    assert order.index("metrics.jsonl") < order.index("checkpoint-00000001.pth")


def broadcast(rank, world_size, num_bytes, folder):
    """Give all ranks some bytes, and note by how many more than before this process was at its largest."""
    torch.zeros(1).add_(1)
    collectives.broadcast_bytes(bytes(1000) if rank == 0 else None)
    payload = bytes(range(256)) * (num_bytes // 256) if rank == 0 else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    received = collectives.broadcast_bytes(payload)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert type(received) is bytes
    assert received == bytes(range(256)) * (num_bytes // 256)
    Path(folder, str(rank)).write_text(str(1024 * (after - before)))


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_what_is_broadcast_is_in_memory_once(tmp_path):
    num_bytes = 200_000_000
    run_check(2, broadcast, tmp_path, num_bytes, str(tmp_path))
    assert int((tmp_path / "0").read_text()) < 0.5 * num_bytes
    assert num_bytes / 2 < int((tmp_path / "1").read_text()) < 1.2 * num_bytes
