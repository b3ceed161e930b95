"""The console: one live line on a real terminal, plain lines elsewhere, log.txt, and what is said first and last."""

import contextlib
import fcntl
import json
import os
import re
import resource
import shlex
import signal
import struct
import sys
import termios
import threading

import pytest

import errors
import run
from loading import progress
from monitoring import console, records
from tests.ranks import run_ranks, train_rank
from tests.started import SMALL_ANYWHERE

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Screen:
    """The lines of a terminal that is wide enough for what is written to it, which may rewrite the last one."""

    def __init__(self, text):
        self.lines, self.column = [""], 0
        for part in re.findall(r"\x1b\[J|\r|\n|[^\x1b\r\n]+", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.lines.append("")
                self.column = 0
            else:
                kept = self.lines[-1][: self.column]
                after = "" if part == "\x1b[J" else part + self.lines[-1][self.column + len(part) :]
                self.lines[-1] = kept + after
                self.column += len(after and part)


class Terminal:
    """A pseudo-terminal of some width, and all that is written to it; `RESIZE` says in it from where on it has another.

    Args:
        columns: its width.
    """

    def __init__(self, columns):
        self.master, self.slave = os.openpty()
        self.path, self.columns, self.content = os.ttyname(self.slave), columns, b""
        set_columns(self.slave, columns)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        with contextlib.suppress(OSError):  # nobody has it open any more
            while True:
                self.content += os.read(self.master, 1 << 16)

    def close(self):
        """Wait for all that was written."""
        os.close(self.slave)
        self.reader.join(10)
        os.close(self.master)

    @property
    def written(self):
        """All texts, each with the width that the terminal had then."""
        first, *others = self.content.decode().split(RESIZE[0])
        return [(self.columns, first), *((int(other[:3]), other[len("090t") :]) for other in others)]

    @property
    def live(self):
        """The live lines, each with the width that the terminal had then."""
        return [
            (columns, line)
            for columns, text in self.written
            for line in re.findall(r"\x1b\[J([^\x1b\r\n]+)\r(?!\n)", text)
        ]

    @property
    def lines(self):
        """The lines that stay; each live line leaves the cursor at its beginning, wherever a terminal breaks it."""
        return [line.rstrip() for line in Screen("".join(text for _, text in self.written)).lines]


# How xterm is asked to be of another width.
RESIZE = "\x1b[8;24;", "{:03}t"


def set_columns(descriptor, columns):
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def train_on_terminal(path, argv, narrower, faults):
    """Run train.py on a terminal that becomes narrower ahead of the 15th step; a new session, which is told of that."""
    os.setsid()
    descriptor = os.open(path, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(descriptor, number)
    os.environ["TERM"] = "xterm"
    progress._LIVE_S = 0.01  # no slower than the steps are, on any machine
    begin_step, steps = run.Run.begin_step, []

    def resized(self, *place):
        steps.append(place)
        if len(steps) == 15:
            os.write(1, "".join(RESIZE).format(narrower).encode())
            set_columns(1, narrower)
        begin_step(self, *place)

    run.Run.begin_step = resized
    train_rank(argv, faults)


class OnTerminals:
    """A run that is stopped in its second epoch on a terminal of 80 columns, and ends on one of 200."""

    def __init__(self, folder):
        self.out = folder / "runs" / "a"
        argv = ["--synthetic", "240", *SMALL_ANYWHERE]
        argv += "--batch-size 8 --epochs 3 --print-freq 5 --lr 0.01".split()
        argv += ["--output-dir", str(self.out), "--resume", "auto", "--model-ema"]
        stop = [(0, "run.Run.end_step", 41, "before", signal.SIGTERM)]
        self.first = self.train(folder, Terminal(80), argv, 70, stop)
        self.status = json.loads((self.out / "status.json").read_text())
        self.second = self.train(folder, Terminal(200), argv, 90, [])
        self.log = (self.out / "log.txt").read_text()

    def train(self, folder, terminal, *arguments):
        outcome = run_ranks(train_on_terminal, 1, terminal.path, *arguments, log_folder=folder)
        terminal.close()
        assert outcome.codes == [0], terminal.content.decode()
        return terminal


@pytest.fixture(scope="module")
def on_terminals(tmp_path_factory):
    return OnTerminals(tmp_path_factory.mktemp("terminals"))


def test_a_live_line_says_all_and_fits_the_terminal_at_any_width(on_terminals):
    for terminal in (on_terminals.first, on_terminals.second):
        assert len({columns for columns, _ in terminal.live}) == 2
        assert all(len(line) < columns for columns, line in terminal.live)
    number = r"[\d.,]+"
    whole = rf"Epoch: \[1\] \d+/30  ETA \S+s, run \S+s  loss {number}  Acc@1 {number}  {number} img/s  wait \d+%"
    assert any(re.fullmatch(whole, line) for columns, line in on_terminals.second.live if columns == 200)
    narrow = rf"Epoch: \[[01]\] \d+/30 +ETA \S+s, run \S+s +loss {number} +Acc@1 {number} +{number} img/s"
    assert any(re.match(narrow, line) for columns, line in on_terminals.first.live if columns == 70)
    assert any(re.match(r"Test: EMA 1/3  ETA", line) for _, line in on_terminals.first.live)


def test_finished_lines_remain_and_nothing_of_the_live_line(on_terminals):
    first, second = (log.splitlines()[1:] for log in on_terminals.log.split("==== ")[1:])
    assert first[-1].startswith("PreemptedError: SIGTERM: the run stopped after step 41, saved in ")
    first[-1] = first[-1].removeprefix("PreemptedError: ") + "; --resume auto continues"
    for terminal, log in [(on_terminals.first, first), (on_terminals.second, second)]:
        said = [line for line in log if not re.match(r"(Epoch|Test):.*( eta: | Total time: )", line)]
        assert [line for line in terminal.lines if line != "SIGTERM: stopping after this step"] == [*said, ""]
        assert len(terminal.lines) == len(said) + 1 + (terminal is on_terminals.first)
    lines = [re.match(r"Epoch: \[(\d)\] in \S+s  loss (\S+)  Acc@1 (\S+)  wait \d+%$", line) for line in first + second]
    written = [json.loads(line) for line in (on_terminals.out / "metrics.jsonl").read_text().splitlines()]
    expected = [(str(r["epoch"]), f"{r['loss']:.3f}", f"{r['acc1']:.2f}") for r in written if r["kind"] == "epoch"]
    assert [match.groups() for match in lines if match] == expected  # of all steps, also of the interrupted epoch


def test_the_log_keeps_torchvisions_lines_of_all_starts_without_control_characters(on_terminals):
    assert CONTROL.search(on_terminals.log) is None
    assert on_terminals.log.count("\n==== ") == 1  # of the second start
    starts = re.findall(r"^Epoch: \[\d\] +\[ ?\d+/30\]  eta: \d:\d\d:\d\d  lr: 0.01  loss: ", on_terminals.log, re.M)
    assert len(starts) >= 3 * 6
    assert len(re.findall(r"^Epoch: \[\d\] Total time: \d:\d\d:\d\d$", on_terminals.log, flags=re.M)) == 3
    assert on_terminals.log.count("\nTest: Acc@1 ") == on_terminals.log.count("\nTest: EMA Acc@1 ") == 3


def test_the_end_tells_the_time_of_all_starts_and_commands_that_work(on_terminals, tmp_path):
    lines = on_terminals.log.splitlines()
    done = next(line for line in lines if line.startswith("finished "))
    first_s = on_terminals.status["time"] - on_terminals.status["start"]["began"]
    minutes, seconds = re.fullmatch(r"finished 3 epochs, 90 steps in (\d+m)?(\d+)s; all in .*/runs/a", done).groups()
    assert 60 * int((minutes or "0m")[:-1]) + int(seconds) > first_s
    words = shlex.split(next(line for line in lines if line.startswith("evaluate")))
    assert words[1] == "python" or os.path.samefile(words[1], sys.executable)
    outcome = run_ranks(train_rank, 1, words[3:], log_folder=tmp_path).check()
    assert CONTROL.search(outcome.output) is None
    step = json.loads((on_terminals.out / "metrics.jsonl").read_text().splitlines()[-1])
    assert "n=24" in outcome.output
    assert step["kind"] == "val_ema"


def test_a_log_that_cannot_be_written_is_said_once_and_goes_on_when_it_can(tmp_path, capsys):
    log = console.LogFile()
    log.keep()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        print("kept before there is a folder")
        log.open(tmp_path)
        size = (tmp_path / "log.txt").stat().st_size
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
    said = (tmp_path / "log.txt").read_text().splitlines()
    assert said[0].startswith("==== ")
    assert said[1:] == ["kept before there is a folder", "first", warning, "second", "third", "ValueError: ours"]


def test_a_log_is_continued_in_plain_text(tmp_path, capsys):
    (tmp_path / "log.txt").write_text("cut by a ki")
    log = console.LogFile()
    log.keep()
    log.open(tmp_path)
    print("\x1b[1mbold\x1b[0m", end="\r\n")
    print("10%\r20%\r", end="", file=sys.stderr)
    print("done", file=sys.stderr)
    log.close()
    first, start, *rest = (tmp_path / "log.txt").read_text().splitlines()
    assert (first, start[:5], rest) == ("cut by a ki", "==== ", ["bold", "done"])


@pytest.mark.parametrize(
    ("fields", "width", "expected"),
    [
        (["one", "two", "three"], 15, "one  two  three"),
        (["one", "two", "three"], 14, "one two three"),
        (["one", "two", "three"], 12, "one  two"),
        (["one", "two"], 2, "on"),
        (["\u56fe\u7247/train"], 6, "\u56fe\u7247/t"),
    ],
)
def test_a_line_takes_as_many_fields_as_fit(fields, width, expected):
    assert progress.fit(fields, width) == expected


def test_numbers_are_said_with_their_units():
    assert [errors.counted(number, "class") for number in (0, 1, 2)] == ["0 classes", "1 class", "2 classes"]
    assert [errors.duration(s) for s in (0.4, 59.6, 754, 66120, 360000, float("nan"))] == [
        "0s", "1m00s", "12m34s", "18h22m", "4d04h", "--",
    ]  # fmt: skip


def test_a_scan_says_how_far_it_is_every_few_seconds_or_on_a_live_line(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PROGRESS_S", 0.0)
    work = progress.Progress("scanning", 4, "class folders", first=1)
    work.update()
    work.close()
    assert re.fullmatch(r"scanning: 2 of 4 class folders \(50.0%\), 0:00:0\d left\n", capsys.readouterr().err)
    terminal = Terminal(40)
    with open(terminal.path, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        work = progress.Progress("packing", total_bytes=3 << 30, unit="images")
        for _ in range(3):
            work.update(num_bytes=1 << 30)
            print("a warning", file=sys.stderr)
        work.finish()
        assert sys.stderr is stream
    terminal.close()
    assert [line for _, line in terminal.live] == ["packing: 1 images, 1.0 GiB of 3.0 GiB ("]
    last = "packing: 3 images, 3.0 GiB of 3.0 GiB (100.0%), 0:00:00 left"
    assert terminal.lines == [*["a warning"] * 3, last, ""]


def test_the_time_of_an_epoch_has_no_pause_between_starts():
    """The second start, at 1000 s by the clock, resumes within epoch 1."""
    found = records.read_epochs(
        {"kind": kind, "step": step, "epoch": epoch, "time": float(at_s), "hours": s / 3600}
        for kind, step, epoch, at_s, s in [
            ("train", 3, 0, 10, 8), ("epoch", 4, 0, 12, 10), ("val", 4, 0, 20, 18), ("train", 5, 1, 30, 28),
            ("train", 8, 1, 1030, 58), ("epoch", 8, 1, 1032, 60), ("val", 8, 1, 1060, 88), ("val_ema", 8, 1, 1062, 90),
            ("epoch", 12, 2, 1142, 170), ("val", 12, 2, 1172, 200),
        ]
    )  # fmt: skip
    assert [(epoch.number, epoch.step, round(epoch.took_s)) for epoch in found] == [
        (0, 4, 18),
        (1, 8, 72),
        (2, 12, 110),
    ]
    assert {kind: record["hours"] * 3600 for kind, record in found[1].last.items()}["val_ema"] == pytest.approx(90)
