"""A disk that is full, and a limit on the size of a file: they cost saves, and never a file that was good."""

import itertools
import os
import re
import resource
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from checkpointing.archive import load_checkpoint
from checkpointing.folder import CheckpointFolder
from tests.endings import differing_results
from tests.faults import EACH_STEP, OPTIONS, FaultyRuns
from tests.ranks import run_ranks, train_rank
from tests.started import refused

# The last --model counts. The tensors of the first fit into a file's buffer, some of the second do not.
MODELS = {"small": ["--model", "timm/tiny_test"], "large": ["--model", "timm/test_resnet"]}
# Room for the saves that fail, as a share of a checkpoint: of the 8 saves of a run the second, ...
PASSING = {2: 0.3, 4: 0.5, 6: 0.7}
LASTING = {2: 0.6, 4: 0.1, 6: 0.4, 7: 0.0}  # two in a row, and then it stays as full
AMPLE, PAGE, LEAST = 1 << 40, 4096, 8192  # bytes; the log of a run, which has the limit too, is smaller

# What a save says that fails; how a start ends that has room for status.json, and not for run.json or recipe.toml.
LIMITED = "ulimit -f or the file system does not allow a file this large", 4000, 2, "refused"
FULL = "disk full", 3 * PAGE, 1, None


def leave_room(disk: Path | None, num_bytes: float) -> None:
    """Fill a disk but for some bytes; without a disk, limit the size of each file that this process writes."""
    if disk is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return
    kept = int(num_bytes) // PAGE * PAGE
    with open(disk / "filling", "wb") as file:  # and so empty
        while (excess := shutil.disk_usage(disk).free - kept) > 0:
            with suppress(OSError):  # the run has taken a page since
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, excess)


def fill(disk: Path | None, rooms: dict[int, float]) -> None:
    save, numbers = CheckpointFolder.save, itertools.count(1)

    def save_into(folder, *args):
        number = next(numbers)
        if number in rooms:
            size = max(path.stat().st_size for path in folder.folder.glob("checkpoint-*.pth"))
            leave_room(disk, max(size * rooms[number], 0 if disk else LEAST))
        try:
            return save(folder, *args)
        finally:
            if rooms.get(number):
                leave_room(disk, AMPLE)

    CheckpointFolder.save = save_into


@pytest.fixture(params=["ulimit -f", "a full file system"])
def disk(request, tmp_path):
    if request.param == "ulimit -f":
        yield None
        return
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    if os.geteuid() or (mounted := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip("only root may mount" if os.geteuid() else mounted.stderr)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module", params=MODELS)
def undisturbed(request, image_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    runs = FaultyRuns(image_folder, folder, [*OPTIONS, *MODELS[request.param], *EACH_STEP])
    runs.run("undisturbed", 1).check()
    return runs


def test_no_room_costs_no_good_file_and_a_resumed_run_has_the_same_bits(undisturbed, disk, tmp_path):
    words, least, code, state = FULL if disk else LIMITED
    runs = FaultyRuns(undisturbed.images, (disk or tmp_path) / undisturbed.folder.name, undisturbed.options)

    def run(name, *prepare):
        outcome = run_ranks(train_rank, 1, runs.argv(name), [], prepare, log_folder=tmp_path)
        assert "Traceback" not in outcome.output, outcome.output
        if disk:
            leave_room(disk, AMPLE)
        return outcome

    outcome = run("passing", leave_room, disk, least)
    refused(outcome, f"--output-dir {runs.folder / 'passing'} cannot be written: ", "MB free)", code=code)
    assert runs.status("passing").get("state") == state

    passing = run("passing", fill, disk, PASSING).check().output
    newest = re.findall(rf"not saved: {words} \(needs .* free\); still available: (\S+); training", passing)
    assert newest == [f"checkpoint-0000000{step}.pth" for step in (1, 3, 4)], passing
    assert runs.status("passing")["state"] == "finished"
    assert differing_results(runs.folder / "passing", undisturbed.folder / "undisturbed") == []

    outcome = run("lasting", fill, disk, LASTING)
    lost = "two checkpoints in a row could not be saved: checkpoint-00000006.pth was not saved: "
    rest = "still available: checkpoint-00000004.pth; make room for it and give --resume auto"
    refused(outcome, f"{lost}{words} (needs ", rest, code=1)
    kept = {path.name: load_checkpoint(path, "it")["step"] for path in (runs.folder / "lasting").glob("checkpoint*")}
    assert kept == {"checkpoint.pth": 4, **{f"checkpoint-0000000{step}.pth": step for step in (1, 3, 4)}}
    run("lasting").check()
    assert differing_results(runs.folder / "lasting", undisturbed.folder / "undisturbed") == []
