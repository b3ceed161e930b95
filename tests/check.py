"""Run the tests that reach what has changed since a commit: `make check`, or `python -m tests.check [BASE]`.

Which they are the map of `tests.reach` tells, which `make map` makes in some minutes; without one, and for what it does
not know, they are the tests of the module's name. Of more than fit into a minute the quickest run.
"""

import difflib
import json
import subprocess
import sys
from pathlib import Path

from tests.reach import MAP, REPOSITORY

BUDGET_S = 50  # of tests, by two processes, by the times of the map


def changed_files(base: str) -> list[str]:
    """Return the Python files that differ from a commit, new ones too."""
    commands = ["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"]
    texts = [
        subprocess.run(each, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout for each in commands
    ]
    return [file for file in "".join(texts).splitlines() if file.endswith(".py") and (REPOSITORY / file).exists()]


def tests_of(file: str, reached: dict) -> set[str]:
    """Return the tests that reach what a file has other than when the map was made, or those of the module's name."""
    if file.startswith("tests/"):
        return {file} if Path(file).name.startswith("test_") else set()
    rows, found = reached["lines"].get(file, {}), set()
    before, now = reached["sources"].get(file, "").splitlines(), (REPOSITORY / file).read_text().splitlines()
    for kind, begin, end, *_ in difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if kind != "equal":
            found |= {number for line in range(begin, end + 2) for number in rows.get(str(line), [])}
    if found:
        return {reached["tests"][number] for number in found}
    print(f"{file}: no test is known to reach the change; those of its name run")
    return {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").glob(f"test_{Path(file).stem}*.py")}


def main() -> int:
    """Run them; return pytest's exit code."""
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    reached = {"tests": [], "seconds": [], "lines": {}, "sources": {}}
    if MAP.exists():
        reached = json.loads(MAP.read_text())
    else:
        print("there is no map of what tests reach (make map); tests are chosen by the names of the modules")
    seconds = dict(zip(reached["tests"], reached["seconds"], strict=True))
    found = {test for file in changed_files(base) for test in tests_of(file, reached)}
    chosen, total = [], 0.0
    for test in sorted(found, key=lambda test: seconds.get(test, 0.0)):
        total += seconds.get(test, 0.0)
        if total < BUDGET_S:
            chosen.append(test)
    print(f"{len(found)} tests or files of tests reach what has changed since {base}; {len(chosen)} run")
    if not chosen:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", "2", *chosen]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
