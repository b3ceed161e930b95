"""Run the tests that reach what has changed since a commit: `make check`, or `python -m tests.check [BASE]`.

Which they are the map of `tests.reach` tells, which `make map` makes in some minutes; without one, and for what it
does not know, they are the tests of the module's name. Of more than fit into a minute the quickest run.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.reach import FOLDER, MAP, REPOSITORY

BUDGET_S = 50  # of tests, by two processes, by the times of the map


def changed_lines(base: str) -> dict[str, set[int]]:
    """Return the numbers of the lines that have changed, by file; of a new file all."""
    diff = subprocess.run(["git", "diff", "-U0", base], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    changed, file = {}, ""
    for line in diff.stdout.splitlines():
        if line.startswith("+++ "):
            file = line[6:]
            changed.setdefault(file, set())
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(found[1]), int(found[2] or 1)
            changed[file].update(range(first, first + max(number, 1)))
    listed = subprocess.run(["git", "ls-files", "--others", "--exclude-standard"], cwd=REPOSITORY, check=True,
                            capture_output=True, text=True).stdout.splitlines()  # fmt: skip
    changed |= {file: set(range(1, 10_000)) for file in listed}
    return {file: lines for file, lines in changed.items() if file.endswith(".py") and (REPOSITORY / file).exists()}


def functions_of(text: str) -> dict[str, range]:
    """Return the lines of each function by its name; of a nested one they are among those of the outer one."""
    found = {}

    def search(node, name):
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{getattr(child, 'name', '')}"
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[inner] = range(child.body[0].lineno, child.end_lineno + 1)
            elif isinstance(child, ast.ClassDef):
                search(child, inner)

    search(ast.parse(text), "")
    return found


def tests_of(file: str, lines: set[int], reached: dict) -> set[str]:
    """Return the tests that reach the functions of these lines; those of the module's name where none is known."""
    if file.startswith("tests/"):
        return {file} if Path(file).name.startswith("test_") else set()
    now = functions_of((REPOSITORY / file).read_text())
    names = {name for name, body in now.items() if lines & {body.start - 1, *body}}
    before = functions_of(reached["sources"].get(file, ""))
    rows = reached["lines"].get(file, {})
    numbers = {number for name in names & before.keys() for line in before[name] for number in rows.get(str(line), [])}
    named = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").glob(f"test_{Path(file).stem}*.py")}
    found = {reached["tests"][number] for number in numbers}
    if not found:
        print(f"{file}: no test is known to reach the change; run are {', '.join(sorted(named)) or 'none'}")
    return found or named


def main() -> int:
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    reached = {"tests": [], "seconds": [], "lines": {}, "sources": {}}
    if MAP.exists():
        reached = json.loads(MAP.read_text())
    else:
        print("there is no map of what tests reach (make map); tests are chosen by the names of the modules")
    seconds = dict(zip(reached["tests"], reached["seconds"], strict=True))
    found = {test for file, lines in changed_lines(base).items() for test in tests_of(file, lines, reached)}
    chosen, total = [], 0.0
    for test in sorted(found, key=lambda test: seconds.get(test, 0.0)):
        total += seconds.get(test, 0.0)
        if total < BUDGET_S:
            chosen.append(test)
    print(f"{len(found)} tests reach what has changed since {base}; run are the {len(chosen)} quickest")
    if not chosen:
        return 0
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "chosen").write_text("\n".join(chosen))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", "2", f"@{FOLDER / 'chosen'}"]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
