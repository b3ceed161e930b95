"""What the tests cost: compare the last run with tests/durations.txt, or write it: `make durations`.

Of each file and of the slowest tests, in seconds of a process among those of `make test`, to two digits. A whole run
that is slower or faster than the recorded one, as another machine is, is no difference.
"""

import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).parent.parent
LAST, RECORDED = REPOSITORY / ".pytest_cache" / "tests.xml", REPOSITORY / "tests" / "durations.txt"
NUM_TESTS, FACTOR, LEAST_S = 30, 1.6, 5.0


def measured() -> dict[str, float]:
    """Return the seconds of each file, and of the slowest tests, all of their parameters together."""
    files, tests = Counter(), Counter()
    for case in xml.etree.ElementTree.parse(LAST).iter("testcase"):
        file = case.get("classname").replace(".", "/") + ".py"
        files[file] += float(case.get("time"))
        tests[f"{file}::{case.get('name').partition('[')[0]}"] += float(case.get("time"))
    slow = {file: seconds for file, seconds in files.most_common() if seconds >= 1}
    return {**slow, **dict(tests.most_common(NUM_TESTS))}


def main() -> None:
    found = measured()
    if sys.argv[1:] == ["--write"]:
        RECORDED.write_text("".join(f"{float(f'{seconds:.2g}'):6g} {name}\n" for name, seconds in found.items()))
        return
    recorded = {name: float(seconds) for seconds, name in map(str.split, RECORDED.read_text().splitlines())}
    both = [name for name in found.keys() & recorded.keys() if recorded[name] >= LEAST_S]
    scale = median([found[name] / recorded[name] for name in both] or [1.0])
    print(f"seconds of tests, by which this run takes {scale:.2f} times as long as the recorded one:")
    for name in sorted(found.keys() | recorded.keys()):
        now, before = found.get(name, 0.0) / scale, recorded.get(name, 0.0)
        is_known = (name in found and name in recorded) or "::" not in name
        if is_known and abs(now - before) >= LEAST_S and max(now, before) > FACTOR * min(now, before):
            print(f"{before:7.1f} -> {now:6.1f}  {name}")


if __name__ == "__main__":
    main()
