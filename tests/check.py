"""Run the tests that reach what has changed since a commit: `make check`, or `python -m tests.check [BASE]`.

Which they are the map of `tests.reach` tells, which `make map` makes in some minutes; without one, and for what it does
not know, they are the tests of the module's name. Of more than fit into a minute the quickest run.
"""

import difflib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.reach import FOLDER, MAP, REPOSITORY

CHOSEN = FOLDER / "chosen"
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


def pytest_collection_modifyitems(items: list) -> None:
    """Leave the chosen tests: this module is a plugin too, for the map may name tests that are there no longer."""
    chosen = set(CHOSEN.read_text().splitlines())
    items[:] = [item for item in items if not chosen.isdisjoint((item.nodeid, item.nodeid.partition("::")[0]))]


def main() -> int:
    """Run them; return pytest's exit code."""
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    reached = {"tests": [], "seconds": [], "lines": {}, "sources": {}}
    if MAP.exists():
        reached = json.loads(MAP.read_text())
    else:
        print("there is no map of what tests reach (make map); tests are chosen by the names of the modules")
    seconds = Counter()
    for test, each in zip(reached["tests"], reached["seconds"], strict=True):
        seconds[test] = each
        seconds[test.partition("::")[0]] += each
    found = {test for file in changed_files(base) for test in tests_of(file, reached)}
    chosen, total = [], 0.0
    for test in sorted(found, key=lambda test: seconds[test]):
        total += seconds[test]
        if total < BUDGET_S:
            chosen.append(test)
    print(f"{len(found)} tests or files of tests reach what has changed since {base}; {len(chosen)} run")
    if not chosen:
        return 0
    FOLDER.mkdir(exist_ok=True)
    CHOSEN.write_text("\n".join(chosen))
    files = sorted({file for file in (test.partition("::")[0] for test in chosen) if (REPOSITORY / file).exists()})
    command = [sys.executable, *"-m pytest -p tests.check -q -n 2 -m".split(), "not slow", *files]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
