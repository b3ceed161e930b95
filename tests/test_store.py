"""The checkpoints of a folder: how they are written, what stays, what a failing disk does, and who may write."""

import errno
import itertools
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from checkpointing import folder as folders
from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import RunState
from checkpointing.folder import CheckpointFolder
from checkpointing.status import StatusFile
from checkpointing.store import CheckpointManager
from errors import StorageError
from monitoring.events import EventFile
from monitoring.monitor import Monitor
from settings import config
from tests.chaos import flip_bits
from tests.endings import differing_results, read_points
from tests.faults import EACH_STEP, OPTIONS, FaultyRuns
from tests.ranks import REPOSITORY, free_port, run_ranks, torchrun_environment, train_rank, wait_for
from tests.runs import FixedRun, state_at
from tests.started import SMALL_PLAIN, damage_flipped, refused, run_train, state_of


@pytest.fixture
def folder(tmp_path):
    files = folders.CheckpointFolder(tmp_path / "out")
    files.acquire()
    files.take_over("", None, FixedRun(0))
    return files


def test_the_clock_asks_after_its_minutes_and_counts_from_the_last_save(tmp_path, monkeypatch):
    argv = ["--synthetic", "--checkpoint-minutes", "2", "--output-dir", str(tmp_path / "a")]
    manager = CheckpointManager.of_options(config.parse_args(argv).checkpoint)

    def is_due(now_s, manager=manager):
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        return manager.is_due()

    assert not is_due(1000.0, CheckpointManager(tmp_path / "b"))
    manager.lock()
    manager.take_over("", FixedRun(0))
    assert list(map(is_due, (1000.0, 1119.0, 1120.0, 1500.0))) == [False, False, True, True]
    manager.save(FixedRun(1))
    assert manager.wait_for_save()
    assert list(map(is_due, (1500.0, 1619.0, 1620.0))) == [False, False, True]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("results", "step"), [
    ([("acc1", 10.0, 3.0), ("acc1", 30.0, 3.0), ("acc1", 20.0, 3.0)], 1),
    ([("loss", 3.0, 3.0), ("loss", 1.0, 1.0), ("loss", 2.0, 2.0)], 1),
    ([("loss", NAN, NAN), ("loss", 5.0, 5.0), ("loss", 6.0, 6.0)], 1),
    ([("loss", INF, INF), ("loss", 5.0, 5.0)], 1),
    ([("acc1", 36.0, 11.5), ("acc1", 36.0, 2.78)], 1),
    ([("acc1", 36.0, 2.78), ("acc1", 36.0, 11.5)], 0),
    ([("acc1", 36.0, 2.78), ("acc1", 36.0, 2.78)], 0),
    ([("acc1", 36.0, NAN), ("acc1", 36.0, 2.78)], 1),
    ([("acc1", 36.0, 2.78), ("acc1", 36.0, NAN)], 0),
    ([("acc1", 99.0, 1.0), ("loss", 3.0, 3.0)], 1),
])  # fmt: skip
def test_best_is_the_highest_but_of_a_loss_the_lowest(results, step):
    for kind, name in (("val", "best"), ("val_ema", "best_ema")):
        run = RunState(1, {}, {})
        for epoch, (metric, value, loss) in enumerate(results):
            run.start_epoch(epoch)
            run.note_results({kind: {metric: value, "loss": loss}}, metric)
        assert (run.bests[name]["step"], run.bests[name]["metric"]) == (step, f"{kind}/{results[step][0]}")


def test_a_file_that_reads_back_otherwise_gets_no_name(folder, monkeypatch):
    folder.save(state_at(1))
    sync = os.fsync

    def corrupt(descriptor):
        sync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if ".tmp." in path:
            content = bytearray(Path(path).read_bytes())
            content[content.index(struct.pack("<f", 7.0))] ^= 1
            Path(path).write_bytes(content)

    monkeypatch.setattr(os, "fsync", corrupt)
    failure = folder.save(state_at(2, 7.0))
    assert re.search("differs from what was written when read back.*still available: checkpoint-00000001.pth", failure)
    assert {path.name for path in folder.folder.glob("*.pth*")} == {"checkpoint-00000001.pth", "checkpoint.pth"}


def failing_with(number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_the_names_are_copies(folder, number, monkeypatch):
    monkeypatch.setattr(os, "link", failing_with(number))
    for step in range(1, 6):
        assert folder.save(state_at(step), ["best"] * (step == 1)) is None
    assert load_checkpoint(folder.folder / "checkpoint.pth", "newest")["step"] == 5
    assert load_checkpoint(folder.folder / "best.pth", "best")["step"] == 1
    assert folder.read("auto").path.name == "checkpoint-00000005.pth"


def test_the_best_of_elsewhere_comes_along_though_its_number_is_deleted(folder, tmp_path):
    for step in range(1, 6):
        assert folder.save(state_at(step), ["best"] * (step == 1)) is None
    own, resume = CheckpointFolder(tmp_path / "own"), str(folder.folder / "checkpoint.pth")
    own.folder.mkdir()
    own.take_over(resume, own.read(resume), FixedRun(5, best={"step": 1}))
    assert load_checkpoint(own.folder / "best.pth", "best")["step"] == 1


@pytest.mark.parametrize("times", [3, 99])
def test_a_read_that_fails_is_tried_again_and_then_stops(folder, times, monkeypatch):
    for step in (1, 2):
        folder.save(state_at(step))
    before, original, tries = state_of(folder.folder), os.open, []

    def failing(path, flags, *mode, **options):
        if Path(path).name == "checkpoint-00000002.pth":
            tries.append(path)
            if len(tries) <= times:
                failing_with(errno.ESTALE)()
        return original(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", failing)
    monkeypatch.setattr("files.RETRY_S", 0.0)
    if times == 3:
        assert folder.read("auto").state["step"] == 2
    else:
        with pytest.raises(StorageError, match=r"checkpoint-00000002.pth cannot be read"):
            folder.read("auto")
    assert len(tries) == 4
    assert state_of(folder.folder) == before


def opened(folder, state):
    monitor = Monitor(folder, state, {"tensorboard": EventFile})
    monitor.open()
    return monitor


def test_records_on_a_full_disk_end_no_run_and_are_written_later(tmp_path, monkeypatch, capsys):
    state = RunState(2, {}, {})
    monkeypatch.setattr("files.RETRY_S", 0.0)
    with opened(tmp_path, state) as monitor:
        monitor.write("train", 1, 0, loss=1.0)
        (feed,) = monitor._feeds
        wait_for(lambda: feed._logger)
        with monkeypatch.context() as patch:
            full = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
            feed._logger._file, file = RecordWriter(full), monitor._file
            monitor._file = full
            patch.setattr("checkpointing.status.write_json", failing_with(errno.ENOSPC))
            monitor.write("train", 2, 0, loss=2.0)
            monitor.sync()
            monitor.write("train", 3, 0, loss=3.0)
            status = StatusFile(tmp_path, state)
            status.write("running")
            with pytest.raises(StorageError, match=r"everything is saved, but status.json was not written: disk full"):
                status.finish()
            monitor._file = file
        monitor.write("train", 4, 0, loss=4.0)
    assert read_points(tmp_path) == {"train/loss": [(step, float(step)) for step in range(1, 5)]}
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    said = re.findall("^warning: (?:logger )?([a-z]+)", capsys.readouterr().out, re.M)
    assert sorted(said) == ["metrics", "status", "tensorboard"]


def test_curves_that_were_lost_are_drawn_again_at_the_next_start_even_if_the_clock_is_set_back(tmp_path, monkeypatch):
    run = RunState(2, {}, {})
    with opened(tmp_path, run) as monitor:
        for step in (1, 2, 3):
            monitor.write("train", step, 0, loss=float(step))
    run.epoch, run.steps, run.is_resumed = 1, 0, True
    yesterday = time.time() - 86_400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    with opened(tmp_path, run) as monitor:
        monitor.write("train", 3, 1, loss=30.0)
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert read_points(tmp_path) == {"train/loss": [(1, 1.0), (2, 2.0), (3, 30.0)]}


def node_rank(argv, faults=()):
    train_rank([word.replace("RANK", os.environ["RANK"]) for word in argv], faults)


def run_nodes(started, tmp_path, out, *argv, faults=()):
    words = [*started.argv, "--batch-size", 4, "--global-batch-size", 8, "--output-dir", tmp_path / out, *argv]
    words += ["--save-per-node", "--epochs", 2, "--keep-last", 2]
    arguments, alone = [list(map(str, words)), list(faults)], {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    nodes = lambda *rank: torchrun_environment(*rank) | alone  # noqa: E731
    return run_ranks(node_rank, 2, *arguments, log_folder=tmp_path, launcher=nodes)


def contents(out):
    return {path.name: path.read_bytes() for path in out.glob("*.pth")}


@pytest.mark.dist
def test_each_node_keeps_a_copy_and_the_newest_good_one_of_all_is_resumed(started, tmp_path):
    first, second = tmp_path / "out0", tmp_path / "out1"
    killed = [(0, "checkpointing.store.CheckpointManager.save", 6, "before")]  # when the one before is made
    assert run_nodes(started, tmp_path, "outRANK", faults=killed).codes[0] == -9
    assert contents(first) == contents(second)
    names = {"best.pth", "checkpoint-00000003.pth", "checkpoint-00000004.pth", "checkpoint.pth"}
    assert contents(first).keys() == names
    for name in names:
        (first / name).unlink()
    damage_flipped(second / "checkpoint-00000004.pth")
    (second / "checkpoint.pth").unlink()
    outcome = run_nodes(started, tmp_path, "outRANK", "--resume", "auto").check()
    assert "the newest checkpoint is the copy of rank 1" in outcome.output
    assert "resumed step 3 " in outcome.output
    assert contents(first) == contents(second)
    assert list(second.glob("*.corrupt"))
    argv = [*started.argv, "--batch-size", 4, "--global-batch-size", 8, "--epochs", 2]
    run_train(tmp_path, *argv, "--output-dir", tmp_path / "alone").check()
    assert differing_results(tmp_path / "alone", first) == []


@pytest.mark.dist
def test_nodes_that_share_a_folder_have_one_writer(started, tmp_path):
    outcome = run_nodes(started, tmp_path, "shared", "--resume", "auto", "--stop-epoch", 1).check()
    assert "2 nodes use 1 folders, with one writer each" in outcome.output
    assert [name for name in os.listdir(tmp_path / "shared") if name.startswith(".")] == [".lock"]
    assert load_checkpoint(tmp_path / "shared" / "checkpoint.pth", "it")["step"] == 3


def hold(out):
    folders.CheckpointFolder(Path(out)).acquire()
    time.sleep(60)


def hasty_rank(argv, wait_s):
    folders.LOCK_WAIT_S = wait_s
    train_rank(argv)


def test_a_second_run_is_refused_by_the_name_of_the_first_or_waits_for_its_end(started, tmp_path):
    out, logs = started.copy(tmp_path / "out"), tmp_path / "holder"
    logs.mkdir()
    (out / ".lock").unlink()
    thread = threading.Thread(target=run_ranks, args=(hold, 1, str(out)), kwargs={"log_folder": logs})
    thread.start()
    wait_for(lambda: (out / ".lock").exists() and "started" in (out / ".lock").read_text())
    pid = int(re.search(r"pid (\d+)", (out / ".lock").read_text())[1])
    before, argv = state_of(out), list(map(str, [*started.argv, "--output-dir", out, "--epochs", 3]))
    for extra in (["--resume", "auto"], ["--overwrite"], []):
        outcome = run_ranks(hasty_rank, 1, [*argv, *extra], 0.3, log_folder=tmp_path)
        refused(outcome, f"pid {pid},", "host ", "started ", code=6)
    assert state_of(out) == before
    threading.Timer(3.0, os.kill, (pid, signal.SIGKILL)).start()
    outcome = run_ranks(hasty_rank, 1, [*argv, "--resume", "auto"], 60.0, log_folder=tmp_path).check()
    assert "resumed step 6 " in outcome.output
    thread.join()


@pytest.mark.parametrize("names", [[".lock"], ["metrics.jsonl", "log.txt", "status.json", "run.json", "recipe.toml"]])
def test_no_link_in_the_output_folder_is_written_through(started, tmp_path, names):
    victim, out = tmp_path / "victim", started.copy(tmp_path / "out")
    victim.write_text("mine")
    for name in names:
        (out / name).unlink()
        (out / name).symlink_to(victim)
    outcome = started.go_on(tmp_path, out, "--resume", "auto")
    assert victim.read_text() == "mine"
    if names == [".lock"]:
        refused(outcome, f".lock is a link or not a file in {out}")
    else:
        assert "log.txt is a link or not a file; training continues" in outcome.check().output


def small_checkpoint(tmp_path):
    state = state_at(3, args={"lr": 0.1, "given": ["lr"]}, best={"metric": "val/acc1", "value": 50.0, "step": 3})
    state["model"] = {f"layer{index}": torch.arange(100.0 * index, 100.0 * index + 60) for index in range(4)}
    assert folders.CheckpointFolder(tmp_path).save(state) is None
    return (tmp_path / "checkpoint.pth").read_bytes()


def test_a_record_that_a_flipped_bit_makes_a_folder_is_refused(tmp_path):
    """To Python's zipfile it is whole, and torch reads uninitialised memory in its place."""
    content = small_checkpoint(tmp_path)
    bits = [8 * (each.start() + 38) + 4 for each in re.finditer(rb"PK\x01\x02", content)]
    refusals, accepted = flip_bits(content, bits)
    assert accepted == []
    assert refusals >= 4 + 2  # four layers, the pickle and the byte order among the records


@pytest.mark.slow
def test_wrong_data_is_accepted_at_no_bit_at_all(tmp_path):
    content = small_checkpoint(tmp_path)
    refusals, accepted = flip_bits(content, range(8 * len(content)))
    assert accepted == []
    assert refusals > 10_000


pytestmark = [pytest.mark.dist, pytest.mark.slow]

# 29 images in batches of 8: three steps an epoch, each of them saved, and time enough to strike in the middle.
TWO_NODES = f"""
    --batch-size 4 --global-batch-size 8 --epochs 16 --print-freq 1 --lr 0.05 --checkpoint-steps 1 --dist-timeout 1
    --use-deterministic-algorithms --resume auto {" ".join(SMALL_PLAIN)}
""".split()


def descendants(pid):
    found = []
    with suppress(OSError):
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [*found, *itertools.chain(*map(descendants, found))]


def kill(agent):
    with suppress(ProcessLookupError):
        os.kill(agent.pid, signal.SIGSTOP)
    for pid in [*descendants(agent.pid), agent.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait(20)


def test_a_node_that_is_lost_and_comes_back_resumes_with_the_same_bits(image_folder, tmp_path):
    port, out, logs = free_port(), tmp_path / "out", [tmp_path / "node1.log", tmp_path / "node2.log"]
    # Without it the new torchrun waits for an address that the other one has published once only (torch 2.14).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv-id=1"
    command = f"{command} --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} {REPOSITORY / 'train.py'}".split()

    def start(log):
        with open(log, "a") as file:
            options = ["--data-path", image_folder, "--output-dir", out, *TWO_NODES]
            return subprocess.Popen([*command, *options], stdout=file, stderr=file, env=environment)

    agents = [start(logs[0])]
    try:
        wait_for(lambda: socket.socket().connect_ex(("localhost", port)) == 0, 60)  # it holds the rendezvous
        agents.append(start(logs[1]))
        wait_for(lambda: any(int(path.stem[11:]) >= 4 for path in out.glob("checkpoint-*.pth")), 60)
        kill(agents[1])
        agents[1] = start(logs[1])
        wait_for(lambda: all(agent.poll() is not None for agent in agents), 75)
    finally:
        for agent in agents:
            kill(agent)
    assert [agent.returncode for agent in agents] == [0, 0]
    assert re.search(r"resumed step \d", logs[0].read_text())
    words = ["--data-path", str(image_folder), "--output-dir", str(tmp_path / "undisturbed"), *TWO_NODES]
    run_ranks(train_rank, 1, words, log_folder=tmp_path).check()
    assert differing_results(out, tmp_path / "undisturbed") == []


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
