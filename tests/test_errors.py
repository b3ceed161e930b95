"""What is said: how an error ends a process, the console, log.txt, progress, and the first and last lines of a run."""

import csv
import io
import json
import os
import re
import resource
import shlex
import signal
import sys
import time

import pytest
import torch
from PIL import Image

import errors
import train
from distributed import ending, launch, signals
from loading import progress
from monitoring import console
from settings import config, tables
from tests.endings import differing_results
from tests.exports import run_tool, write_checkpoint
from tests.images import write_images
from tests.ranks import in_group, run_ranks, tool_rank, train_rank
from tests.started import SMALL, SMALL_ANYWHERE, refused, run_train


def leave_group(rank, world_size, ranks, error):
    if rank in ranks:
        ending.end_with_error(error, launch.read_launch())
    time.sleep(30)


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "error", "where"), [
    ((0, 1), errors.UserError("what you gave"), ""), ((1,), errors.ImageError("what you gave"), " on rank 1"),
    pytest.param((1,), errors.UserError("what you gave"), " on rank 1", marks=pytest.mark.slow),  # ten seconds later
])  # fmt: skip
def test_an_error_is_printed_once_and_names_the_rank_if_it_is_of_one(tmp_path, ranks, error, where):
    outcome = run_ranks(in_group, 2, leave_group, ranks, error, timeout_s=25, log_folder=tmp_path)
    assert outcome.codes[ranks[0]] == error.exit_code
    assert outcome.output.count("what you gave") == 1
    assert f"train.py: error{where}: what you gave\n" in outcome.outputs[ranks[0]]


def test_what_means_that_the_machine_gives_no_more_is_known_by_number_and_by_text():
    for error in [OSError(24, "Too many open files"), RuntimeError("[enforce fail] Too many open files (24)")]:
        assert str(ending.explain_limit(error)).startswith("Too many open files; raise `ulimit -n`")
    # A thread's stack that finds no memory fails by these errors, too.
    for error in [RuntimeError("can't start new thread"), RuntimeError("Resource temporarily unavailable"),
                  BlockingIOError(11, "Resource temporarily unavailable")]:  # fmt: skip
        assert "or no memory for one; raise `ulimit -u` or `ulimit -v`" in str(ending.explain_limit(error))
    assert str(ending.explain_limit(FileNotFoundError(2, "No such file"))).startswith("the current folder was removed")
    lacks = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")]
    for error in [*lacks, RuntimeError("could not create a primitive")]:
        assert "out of memory" in str(ending.explain_limit(error))
    for error in [RuntimeError("shapes differ"), OSError(5, "Input/output error"), ValueError("Too many open files")]:
        assert ending.explain_limit(error) is None


def train_in_ascii(argv):
    sys.stdout.reconfigure(encoding="ascii", errors="strict")
    signals.begin_script()
    train.cli(config.parse_args(argv))


def test_a_name_that_the_terminal_cannot_show_ends_no_run(tmp_path):
    argv = ["--synthetic", "16", *SMALL_ANYWHERE, "--batch-size=8", "--epochs=1", f"--output-dir={tmp_path}/K\xe4fer"]
    assert "/K\\xe4fer" in run_ranks(train_in_ascii, 1, argv, log_folder=tmp_path).check().output


def test_a_long_error_is_cut_and_keeps_its_ends():
    line = ending.error_line("train.py: error", f"--lr {'[' * 10_000}: expected a number; give --lr 0.1")
    assert line.startswith("train.py: error: --lr [[[")
    assert line.endswith("[[[: expected a number; give --lr 0.1")
    assert len(line) < 300


# Names of classes, and their cells: after the one quote that a spreadsheet takes for "this is text".
NAMES = {"=1+1": "'=1+1", "-0.5": "'-0.5", "@x": "'@x", "\x1b[2Jx": "\\x1b[2Jx"}


def test_names_are_no_formulas_in_a_table_and_no_commands_to_a_terminal(tmp_path):
    images = write_images(tmp_path / "images", {"val": [1] * len(NAMES)}, size=(40, 32))
    for number, name in enumerate(sorted(NAMES)):
        (images / "val" / f"class{number}").rename(images / "val" / name)
    described = {"classes": sorted(NAMES), "num_images": len(NAMES)}
    checkpoint = write_checkpoint(tmp_path, data=described)
    files = ["--predictions", tmp_path / "p.csv", "--json", tmp_path / "r.json"]
    outcome, text = run_tool(tmp_path, "evaluate", checkpoint, "--set", f"s={images / 'val'}", *files, "--workers", 0)
    shown = run_tool(tmp_path, "predict", checkpoint, images / "val")[1]
    cells = {cell for row in csv.reader(io.StringIO((tmp_path / "p.csv").read_text())) for cell in row}
    assert set(NAMES.values()) <= cells
    assert not any(cell[:1] in "=+@\t\r" or "\x1b" in cell for cell in cells - {""})
    assert "\x1b" not in outcome.output + text + shown


def test_numbers_in_a_table_stay_numbers():
    content = tables.as_csv([["a, b", -0.5, -3], ["+1", float("-inf"), None]])
    assert content == b'\xef\xbb\xbf"a, b",-0.5,-3\n\'+1,-inf,\n'


def test_the_log_holds_the_output_of_all_starts_and_the_end_names_commands_that_work(tmp_path):
    out = tmp_path / "runs" / "a"
    argv = ["--synthetic", "240", *SMALL_ANYWHERE, "--output-dir", str(out), "--resume", "auto", "--model-ema"]
    argv += "--batch-size 8 --epochs 3 --print-freq 5 --lr 0.01".split()
    stop = [(0, "run.Run.end_step", 41, "before", signal.SIGTERM)]
    first = run_ranks(train_rank, 1, argv, stop, log_folder=tmp_path).check().output
    printed = [first, run_ranks(train_rank, 1, argv, log_folder=tmp_path).check().output]
    log = (out / "log.txt").read_text()
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", log) is None
    starts = [re.split(r"^==== .*\n", log, flags=re.M)[number] for number in (1, 2)]
    assert "\nPreemptedError: SIGTERM: the run stopped after step 41, saved in " in starts[0]
    for start, output in zip(starts, printed, strict=True):
        kept = [line for line in start.splitlines() if line and not line.startswith("PreemptedError")]
        assert [line for line in output.splitlines() if line in kept] == kept
    assert len(re.findall(r"^Epoch: \[\d\]  \[ ?\d+/30\]  eta: \d:\d\d:\d\d  lr: 0.01  loss: ", log, re.M)) >= 18
    assert log.count("\nTest: Acc@1 ") == log.count("\nTest: EMA Acc@1 ") == 3

    done = re.search(r"^finished 3 epochs, 90 steps in (\d+m)?(\d+)s; all in .*/runs/a$", log, re.M)
    hours = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["hours"]
    assert 60 * int((done[1] or "0m")[:-1]) + int(done[2]) == round(3600 * hours) > 0
    words = shlex.split(re.search(r"^evaluate .*", log, re.M)[0])
    assert words[1] == "python" or os.path.samefile(words[1], sys.executable)
    assert "n=24" in run_ranks(train_rank, 1, words[3:], log_folder=tmp_path).check().output
    Image.new("RGB", (40, 40)).save(tmp_path / "black.png")
    for tool in ("report", "predict"):
        words = shlex.split(re.search(rf"^{tool} .*", log, re.M)[0])
        assert words[1:4] == ["python", "-m", f"scripts.{tool}"]
        argv = [str(tmp_path / "black.png") if word == "IMAGES" else word for word in words[4:]]
        run_ranks(tool_rank, 1, tool, argv, log_folder=tmp_path).check()
    assert (out / "report.html").exists()


def test_a_log_that_cannot_be_written_is_one_warning_and_is_completed_later(tmp_path, capsys):
    log = console.LogFile()
    log.keep()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    print("kept before there is a folder")
    log.open(tmp_path)
    size = (tmp_path / "log.txt").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4, before[1]))
        print("first")
        print("second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    print("third", file=sys.stderr)
    log.close(ValueError("ours"))
    print("not in it")
    warning = f"warning: log.txt in {tmp_path} is not written: File too large; training continues"
    assert capsys.readouterr().out.count("warning:") == 1
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[1].startswith("==== ")
    assert lines[2:] == ["kept before there is a folder", "first", warning, "second", "third", "ValueError: ours"]


def test_a_log_is_continued_in_plain_text(tmp_path, capsys):
    (tmp_path / "log.txt").write_text("cut by a ki")
    log = console.LogFile()
    log.keep()
    log.open(tmp_path)
    print("\x1b[1mbold\x1b[0m", end="\r\n")
    print("10%\r20%\rdone", file=sys.stderr)
    log.close()
    first, start, *rest = (tmp_path / "log.txt").read_text().splitlines()
    assert (first, start[:5], rest) == ("cut by a ki", "==== ", ["bold", "done"])


def test_names_from_outside_are_no_commands_to_a_terminal(tmp_path):
    images = write_images(tmp_path, {"train": [10, 10, 1], "val": [1, 1, 1]})
    for split in ("train", "val"):
        (images / split / "class2").rename(images / split / "\x1b[31mred")
    out = tmp_path / "\x1b[32mrun"
    argv = ["--data-path", images, *SMALL_ANYWHERE, "--output-dir", out, "--epochs", 1, "--batch-size", 8]
    run = run_ranks(train_rank, 1, [str(word) for word in argv], log_folder=tmp_path).check().output
    assert "imbalanced: \\x1b[31mred has 1 image" in run
    assert "\x1b" not in run + run_ranks(tool_rank, 1, "report", [out], log_folder=tmp_path).check().output


def test_numbers_have_their_units():
    assert [errors.counted(number, "class") for number in (1, 2)] == ["1 class", "2 classes"]
    assert [errors.duration(s) for s in (0.4, 59.6, 754, 66120, 360000, float("nan"))] == [
        "0s", "1m00s", "12m34s", "18h22m", "4d04h", "--",
    ]  # fmt: skip


def test_long_work_prints_a_line_when_one_is_due(capsys, monkeypatch):
    work = progress.Progress("scanning", 4, "class folders", first=1)
    work.update()
    assert capsys.readouterr().err == ""
    now = progress.time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now + 20)
    work.update()  # half of the work in 20 s
    assert capsys.readouterr().err == "scanning: 3 of 4 class folders (75.0%), 10s left\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    write_images(root / "good", {"train": [4, 4], "val": [1, 1]})
    write_images(root / "other_classes", {"train": [1, 1, 1], "val": [1, 1]})
    (root / "file").write_text("a file")
    return root


CASES = {
    "archive": (["--data-path", "{root}/images.tar.gz"], ["is not a folder", "unpack it first"]),
    "other classes": (["--data-path", "{root}/other_classes"], ["has 3 classes", "has 2", "(class2)"]),
    "unwritable output": (
        ["--data-path", "{root}/good", "--output-dir", "{root}/file/out", "--batch-size", "4"],
        ["--output-dir", "cannot be written"],
    ),
    "too large a batch": (["--data-path", "{root}/good", "--batch-size", "100"], ["8 images", "smaller --batch-size"]),
    "no such weights": (
        ["--model", "shufflenet_v2_x0_5", "--data-path", "{root}/good", "--weights", "V9"],
        ["V9", "did you mean shufflenet_v2_x0_5.DEFAULT?"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(folders, tmp_path, case):
    argv, words = ([word.format(root=folders) for word in part] for part in CASES[case])
    outcome = run_train(tmp_path, "--output-dir", tmp_path / "out", *SMALL, *argv)
    refused(outcome, *words)
    assert "Epoch:" not in outcome.output


def test_a_run_that_a_bad_image_ended_resumes_once_it_is_replaced(tmp_path):
    images = write_images(tmp_path / "images", {"train": [5, 4], "val": [1, 1]})
    # The one of nine that the first epoch leaves out.
    bad = sorted((images / "train").rglob("*.jpg"))[torch.randperm(9, generator=torch.Generator().manual_seed(0))[8]]
    bad = bad.rename(bad.with_name(f"{bad.stem}\n.jpg"))
    good = bad.read_bytes()
    argv = ["--data-path", images, *SMALL, "--epochs", 2, "--batch-size", 2, "--workers", 1]
    argv += ["--checkpoint-steps", 1, "--use-deterministic-algorithms", "--output-dir"]
    run_train(tmp_path, *argv, tmp_path / "whole").check()

    out = tmp_path / "out"
    bad.write_bytes(b"")
    refused(run_train(tmp_path, *argv, out), f"cannot read image {bad}".replace("\n", " "), "the file is empty", code=1)
    assert json.loads((out / "status.json").read_text())["state"] == "failed"
    bad.write_bytes(good)
    run_train(tmp_path, *argv, out, "--resume", "auto").check()
    assert differing_results(out, tmp_path / "whole") == []


@pytest.mark.dist
def test_a_command_that_torchrun_starts_again_is_refused_before_torch_is_imported(folders, torchrun, monkeypatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = torchrun(2, "--data-path", str(folders / "nowhere"))
    assert done.stderr.count("train.py: error: --data-path") == 2, done.stderr
    assert not re.search(r"\|\s+torch$", done.stderr, flags=re.M)
