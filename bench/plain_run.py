"""What one plain run imports and enters: class folders, a torchvision model, SIGTERM, resume, `--test-only`.

It trains on two processes under coverage.py (pip install coverage), and prints the lines of code of each module that
was imported, and those of the functions that were entered and that were not.
"""

import argparse
import ast
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.make_digits import write_digits
from settings.packages import require_package

ROOT = Path(__file__).parent.parent
CONFIG = """
[run]
parallel = true
patch = _exit
data_file = {folder}/reached
include = {root}/*
omit =
    {root}/tests/*
    {root}/bench/*
    {root}/scripts/*
    {root}/.venv/*
"""
# Small and few images, since the lines that are entered do not depend on their number.
OPTIONS = ["--model", "shufflenet_v2_x0_5", "--epochs", "2", "--print-freq", "5", "--device", "cpu", "--workers", "1"]
OPTIONS += ["--batch-size", "16", "--train-crop-size", "32", "--val-resize-size", "32", "--val-crop-size", "32"]


def run(folder: Path, *more: str, stop_s: float | None = None) -> None:
    """Start train.py on two processes; with `stop_s` send SIGTERM once its status says that it trains so long."""
    python = [sys.executable, "-m", "coverage", "run", f"--rcfile={folder / 'config'}"]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python", *python, "train.py"]
    data = ["--data-path", str(folder / "digits"), "--output-dir", str(folder / "run")]
    process = subprocess.Popen([sys.executable, *command, *OPTIONS, *data, *more], cwd=ROOT)
    if stop_s is not None:
        while process.poll() is None and not (folder / "run" / "metrics.jsonl").exists():
            time.sleep(0.1)
        time.sleep(stop_s)
        process.send_signal(signal.SIGTERM)
    process.wait()


def count_lines(node: ast.AST, rows: list[str]) -> int:
    """Return the lines of a module or a statement without docstrings, comments and blank ones."""
    owners = ast.Module | ast.ClassDef | ast.FunctionDef
    inside = [each for each in ast.walk(node) if isinstance(each, owners) and ast.get_docstring(each) is not None]
    texts = {number for each in inside for number in range(each.body[0].lineno, each.body[0].end_lineno + 1)}
    numbers = range(getattr(node, "lineno", 1), getattr(node, "end_lineno", len(rows)) + 1)
    code = [rows[number - 1].strip() for number in numbers if number not in texts]
    return sum(line != "" and not line.startswith("#") for line in code)


def functions_of(tree: ast.AST) -> list[ast.FunctionDef]:
    """Return the functions and methods of a module; those inside others belong to them."""
    found, left = [], list(ast.iter_child_nodes(tree))
    while left:
        node = left.pop(0)
        if isinstance(node, ast.FunctionDef):
            found.append(node)
        else:
            left += ast.iter_child_nodes(node)
    return found


def main() -> None:
    """Train, and print the figures."""
    argparse.ArgumentParser(prog="python -m bench.plain_run", description=__doc__).parse_args()
    coverage = require_package("coverage", "bench.plain_run")
    folder = Path(tempfile.mkdtemp(prefix="plain-run-"))
    (folder / "config").write_text(CONFIG.format(folder=folder, root=ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"
    write_digits(folder / "digits")
    run(folder, stop_s=1.0)
    run(folder, "--resume", "auto")
    run(folder, "--test-only", "--resume", str(folder / "run" / "checkpoint.pth"))
    reached = coverage.Coverage(config_file=str(folder / "config"), data_file=str(folder / "reached"))
    reached.combine()
    data = reached.get_data()
    imported = entered = passed = 0
    for path in sorted(map(Path, data.measured_files())):
        text = path.read_text()
        lines = {*data.lines(str(path))}
        tree, rows = ast.parse(text), text.splitlines()
        functions = [(count_lines(each, rows), each) for each in functions_of(tree)]
        # By their bodies: the line of `def` runs at the import.
        runs = [size for size, each in functions if lines & {*range(each.body[0].lineno, each.end_lineno + 1)}]
        size = count_lines(tree, rows)
        imported += size
        entered += sum(runs)
        passed += sum(size for size, _ in functions) - sum(runs)
        print(f"{size:6,} lines, {sum(runs):5,} of functions entered  {path.relative_to(ROOT)}")
    print(f"imported {imported:,}; of functions entered {entered:,}, and of those never entered {passed:,}")


if __name__ == "__main__":
    main()
