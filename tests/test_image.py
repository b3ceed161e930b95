"""The container's image: a mistyped command line is answered in it; test_launching.py has what it holds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def copied():
    """Return the tracked files that scripts/Dockerfile copies and .dockerignore lets through."""
    lines = (ROOT / "scripts/Dockerfile").read_text().splitlines()
    copies = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]

    def holds(patterns, path):
        top = Path(path).parts[0]
        return any(top == pattern or ("/" not in path and Path(path).match(pattern)) for pattern in patterns)

    return [path for path in tracked() if holds(copies, path) and holds(allowed, path)]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    for path in copied():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


@pytest.mark.parametrize(("words", "code", "expected"), [
    ("--modle x", 2, "did you mean --model?"), ("--sched cosine", 2, "--lr-scheduler cosineannealinglr"),
    ("--help lr-b", 0, "--lr-scaling-batch"), ("--help lr", 0, "--lr-scheduler"), ("--list-recipes digits", 0, "title"),
])  # fmt: skip
def test_a_command_line_is_answered_in_the_image(image, words, code, expected):
    command = [sys.executable, "-B", "train.py", *words.split()]
    done = subprocess.run(command, cwd=image, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
