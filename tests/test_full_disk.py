"""A disk that is full, and a limit on the size of a file: they cost saves, and never a file that was good.

The calls fail where they fail on a real disk: in `torch.save` where one tensor fills it, in a flush before or after.
"""

import os
import re
import resource
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

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


def leave_room(disk: str | None, num_bytes: float) -> None:
    """Fill a disk but for some bytes; without a disk, limit the size of each file that this process writes."""
    if disk is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return
    kept = int(num_bytes) // PAGE * PAGE
    with open(Path(disk) / "filling", "wb") as file:  # and so empty
        while (excess := shutil.disk_usage(disk).free - kept) > 0:
            with suppress(OSError):  # the run has taken a page since
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, excess)


def fill(disk: str | None, rooms: dict[int, float], noted: str) -> None:
    """Have little room while the n-th saves are written, if it is none for good; note failures of torch.save."""
    save, torch_save, numbers = CheckpointFolder.save, torch.save, iter(range(1, 100))

    def save_into(folder, *args):
        number = next(numbers)
        if number not in rooms:
            return save(folder, *args)
        size = max(path.stat().st_size for path in folder.folder.glob("checkpoint-*.pth"))
        leave_room(disk, max(size * rooms[number], 0 if disk else LEAST))
        try:
            return save(folder, *args)
        finally:
            if rooms[number]:
                leave_room(disk, AMPLE)

    def noting(*args):
        try:
            torch_save(*args)
        except RuntimeError:
            Path(noted).touch()
            raise

    CheckpointFolder.save, torch.save = save_into, noting


@pytest.fixture
def disk(tmp_path):
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    if os.geteuid() or (mounted := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip("only root may mount" if os.geteuid() else mounted.stderr)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module", params=MODELS)
def undisturbed(request, image_folder, tmp_path_factory):
    """Runs of a model, one of which had room for each save."""
    folder = tmp_path_factory.mktemp(request.param)
    runs = FaultyRuns(image_folder, folder, [*OPTIONS, *MODELS[request.param], *EACH_STEP])
    runs.run("undisturbed", 1).check()
    return runs


@pytest.mark.parametrize("kind", ["ulimit -f", "a full file system"])
def test_saves_without_room_cost_no_good_file_and_a_resumed_run_has_the_same_bits(undisturbed, request, tmp_path, kind):
    disk, words, noted = None, "ulimit -f or the file system does not allow a file this large", tmp_path / "noted"
    if kind != "ulimit -f":
        disk, words = request.getfixturevalue("disk"), "disk full"
    runs = FaultyRuns(undisturbed.images, (disk or tmp_path) / undisturbed.folder.name, undisturbed.options)

    def run(name, rooms=None):
        prepare = (fill, disk and str(disk), rooms, str(noted)) if rooms else ()
        outcome = run_ranks(train_rank, 1, runs.argv(name), [], prepare, log_folder=tmp_path)
        assert "Traceback" not in outcome.output, outcome.output
        return outcome

    outcome = run("passing", PASSING).check()
    newest = re.findall(rf"not saved: {words} \(needs .* free\); still available: (\S+); training", outcome.output)
    assert newest == [f"checkpoint-0000000{step}.pth" for step in (1, 3, 4)], outcome.output
    assert runs.status("passing")["state"] == "finished"
    assert differing_results(runs.folder / "passing", undisturbed.folder / "undisturbed") == []

    outcome = run("lasting", LASTING)
    lost = "two checkpoints in a row could not be saved: checkpoint-00000006.pth was not saved: "
    rest = "still available: checkpoint-00000004.pth; make room for it and give --resume auto"
    refused(outcome, f"{lost}{words} (needs ", rest, code=1)
    kept = {path.name: load_checkpoint(path, "it")["step"] for path in (runs.folder / "lasting").glob("checkpoint*")}
    assert kept == {"checkpoint.pth": 4, **{f"checkpoint-0000000{step}.pth": step for step in (1, 3, 4)}}
    assert noted.exists()  # torch.save itself failed
    if disk:
        leave_room(disk, AMPLE)
    run("lasting").check()
    assert differing_results(runs.folder / "lasting", undisturbed.folder / "undisturbed") == []


@pytest.mark.parametrize("undisturbed", ["small"], indirect=True)
@pytest.mark.parametrize(("kind", "code", "state"), [("ulimit -f", 2, "refused"), ("a full file system", 1, None)])
def test_a_start_without_room_is_one_line_and_no_running_run(undisturbed, request, tmp_path, kind, code, state):
    """There is room for status.json, and not for run.json or recipe.toml."""
    disk = request.getfixturevalue("disk") if kind != "ulimit -f" else None
    runs = FaultyRuns(undisturbed.images, (disk or tmp_path) / "starts", undisturbed.options)
    room = (leave_room, disk and str(disk), 3 * PAGE if disk else 4000)
    outcome = run_ranks(train_rank, 1, runs.argv("start"), [], room, log_folder=tmp_path)
    if disk:
        leave_room(disk, AMPLE)
    refused(outcome, f"--output-dir {runs.folder / 'start'} cannot be written: ", "MB free)", code=code)
    assert runs.status("start").get("state") == state
    run_ranks(train_rank, 1, runs.argv("start"), [], log_folder=tmp_path).check()
    assert differing_results(runs.folder / "start", undisturbed.folder / "undisturbed") == []
