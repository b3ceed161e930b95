"""Print the size of the project, and fail where a figure is far above its ceiling in .ci/ceilings.json.

Lines of code are counted without docstrings, comments and blank lines; nodes are those of the syntax tree, so that two
plain lines cost what one full line does. A ceiling has 2 % of room, so that a small change passes;
it only falls, unless the commit that raises it says why. `python .ci/size.py --lower` lowers those that can be.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CEILINGS = ROOT / ".ci" / "ceilings.json"
ROOM = 1.02

OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # of docstrings
BLOCKS = (*OWNERS[1:], ast.If, ast.For, ast.While, ast.With, ast.Try)  # whose bodies are counted by themselves


def count_code(text: str) -> int:
    """Return the number of a module's lines of code: those of a statement or an expression, docstrings apart."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = [node.body[0] for node in nodes if isinstance(node, OWNERS) and ast.get_docstring(node) is not None]
    ignored = {id(each) for docstring in docstrings for each in (docstring, docstring.value)}
    numbers = set()
    for node in nodes:
        if hasattr(node, "lineno") and id(node) not in ignored:
            numbers.update(range(node.lineno, 1 + (node.lineno if isinstance(node, BLOCKS) else node.end_lineno)))
    rows = text.splitlines()
    return sum(not rows[number - 1].strip().startswith("#") and rows[number - 1].strip() != "" for number in numbers)


def measure() -> dict[str, int]:
    """Return the figures of the tracked files."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    files = [path for path in files if path and (ROOT / path).is_file()]
    python = [path for path in files if path.endswith(".py")]
    tests = [path for path in python if path.startswith("tests/")]
    pages = [path for path in files if path == "README.md" or (path.startswith("docs/") and path.endswith(".md"))]
    sys.path.insert(0, str(ROOT))
    from settings.options import BY_NAME

    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in python if path not in tests}
    code = {path: count_code(text) for path, text in texts.items()}
    nodes = {path: sum(1 for _ in ast.walk(ast.parse(text))) for path, text in texts.items()}
    tools = [path for path in code if path.startswith(("scripts/", "bench/", ".ci/"))]
    examples = [path for path in code if path.startswith("examples/")]
    core = [path for path in code if path not in [*tools, *examples]]
    return {
        "core, lines of code": sum(code[path] for path in core),
        "core, nodes": sum(nodes[path] for path in core),
        "tools, lines of code": sum(code[path] for path in tools),
        "tools, nodes": sum(nodes[path] for path in tools),
        "examples, lines of code": sum(code[path] for path in examples),
        "tests, lines": sum((ROOT / path).read_bytes().count(b"\n") for path in tests),
        "README.md and docs/, bytes": sum((ROOT / path).stat().st_size for path in pages),
        "options": len(BY_NAME),
        "error classes": len(re.findall(r"^class \w+Error\(", (ROOT / "errors.py").read_text(), flags=re.M)),
    }


def main() -> int:
    """Print a table; return 1 if a figure is above its ceiling and the room."""
    found, ceilings = measure(), json.loads(CEILINGS.read_text())
    too_large = [name for name, value in found.items() if value > ceilings[name] * ROOM]
    for name, value in found.items():
        print(f"{name:28} {value:>9,} of {ceilings[name]:>9,}{'  TOO LARGE' if name in too_large else ''}")
    if "--lower" in sys.argv:
        lower = {name: min(value, ceilings[name]) for name, value in found.items()}
        CEILINGS.write_text(json.dumps(lower, indent=2) + "\n")
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
