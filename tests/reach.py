"""Which test reaches which line, in the test's process and in the ranks that it forks: the map of `tests.mutants`.

A plugin of pytest, `-p tests.reach`. It also hands a mutant to the ranks. What a real torchrun or another Python of its
own runs is not seen.
"""

import json
import marshal
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
FOLDER = REPOSITORY / ".mutants"
MAP = FOLDER / "map.json"
CORE = ["train", "run", "data", "sampler", "transforms", "presets", "randomness", "files", "utils", "errors"]
FOLDERS = ["models", "checkpointing", "distributed", "loading", "metrics", "monitoring", "settings", "scripts", "bench"]


class Marks:
    """What the processes that tests start are told."""

    test = None  # whose lines are recorded; None between tests and in fixtures of the session
    mutant = None
    pids = None  # a file that takes the ids of the ranks


def watch():
    """Start to record this process's lines."""
    import coverage

    patterns = [str(REPOSITORY / f"{name}.py") for name in CORE] + [str(REPOSITORY / name / "*") for name in FOLDERS]
    watcher = coverage.Coverage(data_file=None, config_file=False, include=patterns, messages=False)
    watcher.start()
    return watcher


def note(watcher, test, **facts):
    """Stop to record, and write down what was reached."""
    watcher.stop()
    data = watcher.get_data()
    lines = {str(Path(path).relative_to(REPOSITORY)): sorted(data.lines(path)) for path in data.measured_files()}
    path = FOLDER / "reached" / f"{os.getpid()}.jsonl"
    with suppress(OSError), open(path, "a") as file:  # a test may allow no file of this size
        file.write(json.dumps({"test": test, "lines": lines, **facts}) + "\n")
    watcher.erase()


def enter(marks, target, *arguments):
    """Begin a forked rank: with the mutant, or recording what it reaches up to its end."""
    test, mutant, pids = marks
    if pids:
        with open(pids, "a") as file:
            file.write(f"{os.getpid()}\n")
    if mutant:
        from tests.mutants import plant

        file, codes = mutant
        plant(file, marshal.loads(Path(codes).read_bytes()))
    if test:
        watcher, leave = watch(), os._exit

        def exit_noted(code):
            note(watcher, test)
            leave(code)

        os._exit = exit_noted
    target(*arguments)


def pytest_configure(config):
    """Have every rank begin in `enter`; under xdist this runs in each worker."""
    from tests import ranks

    start = ranks._context.Process

    def process(target, args):
        return start(target=enter, args=((Marks.test, Marks.mutant, Marks.pids), target, *args))

    ranks._context.Process = process
    config.is_mapping = config.getoption("reach_map")


def pytest_addoption(parser):
    parser.addoption("--reach-map", action="store_true", help="record which test reaches which line")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Leave what a fixture of the session reaches to no test: it is made once."""
    test = Marks.test
    if fixturedef.scope == "session":
        Marks.test = None
    try:
        return (yield)
    finally:
        Marks.test = test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Record what a test reaches in this process."""
    if not item.config.is_mapping:
        return (yield)
    Marks.test = item.nodeid
    begin, num_failed = time.monotonic(), item.session.testsfailed
    watcher = watch()
    try:
        return (yield)
    finally:
        is_failed = item.session.testsfailed > num_failed
        note(watcher, item.nodeid, seconds=time.monotonic() - begin, is_failed=is_failed)
        Marks.test = None


def merge():
    """Write the map: tests, their seconds, the texts of the files, and {file: {line: [numbers of tests]}}."""
    texts = [line for path in (FOLDER / "reached").iterdir() for line in path.read_text().splitlines()]
    rows = [json.loads(text) for text in texts if text.endswith("}")]
    seconds = {row["test"]: round(row["seconds"], 3) for row in rows if "seconds" in row and not row["is_failed"]}
    numbers = {test: number for number, test in enumerate(sorted(seconds))}
    reached = defaultdict(lambda: defaultdict(set))
    for row in rows:
        for file, lines in row["lines"].items():
            for line in lines if row["test"] in numbers else []:
                reached[file][line].add(numbers[row["test"]])
    lines = {file: {line: sorted(found) for line, found in rows.items()} for file, rows in reached.items()}
    sources = {file: (REPOSITORY / file).read_text() for file in reached}
    content = {"tests": list(numbers), "seconds": [seconds[test] for test in numbers]}
    MAP.write_text(json.dumps({**content, "lines": lines, "sources": sources}))
    shutil.rmtree(FOLDER / "reached")


def make_map():
    """Run the suite, recording; a test that fails is left out."""
    shutil.rmtree(FOLDER / "reached", ignore_errors=True)
    (FOLDER / "reached").mkdir(parents=True)
    words = "-m pytest -p no:randomly -p tests.reach --reach-map --numprocesses 4 --dist worksteal -q".split()
    subprocess.run([sys.executable, *words, "-m", "not slow and not cluster"], cwd=REPOSITORY, check=False)
    merge()


if __name__ == "__main__":
    make_map()
