"""Print the size of the project, and fail where a figure has grown past its ceiling in .ci/ceilings.json.

A ceiling only falls, unless the commit that raises it says why. `python .ci/size.py --lower` lowers those that can be.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CEILINGS = ROOT / ".ci" / "ceilings.json"


def count_lines(paths: list[str]) -> int:
    """Return the number of lines, as `wc -l` counts them."""
    return sum((ROOT / path).read_bytes().count(b"\n") for path in paths)


def measure() -> dict[str, int]:
    """Return the figures of the tracked files."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    files = [path for path in files if path and (ROOT / path).is_file()]
    python = [path for path in files if path.endswith(".py")]
    tests = [path for path in python if path.startswith("tests/")]
    pages = [path for path in files if path == "README.md" or (path.startswith("docs/") and path.endswith(".md"))]
    sys.path.insert(0, str(ROOT))
    from settings.options import BY_NAME

    return {
        "lines of code without tests": count_lines([path for path in python if path not in tests]),
        "lines of tests": count_lines(tests),
        "bytes of README.md and docs/": sum((ROOT / path).stat().st_size for path in pages),
        "options": len(BY_NAME),
        "error classes": len(re.findall(r"^class \w+Error\(", (ROOT / "errors.py").read_text(), flags=re.M)),
        "modules at the top": sum("/" not in path for path in python),
        "bytes of the largest tracked file": max((ROOT / path).stat().st_size for path in files),
    }


def main() -> int:
    """Print a table; return 1 if a figure is above its ceiling."""
    found, ceilings = measure(), json.loads(CEILINGS.read_text())
    for name, value in found.items():
        print(f"{name:36} {value:>9,} of {ceilings[name]:>9,}{'  TOO LARGE' if value > ceilings[name] else ''}")
    if "--lower" in sys.argv:
        lower = {name: min(value, ceilings[name]) for name, value in found.items()}
        CEILINGS.write_text(json.dumps(lower, indent=2) + "\n")
    return int(any(value > ceilings[name] for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
