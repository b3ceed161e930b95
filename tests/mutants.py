"""Plant small faults, one at a time, and see whether a test notices: `python -m tests.mutants [FILE ...]`.

Each fault is put into the functions of a process that has imported and collected everything and forks, and into the
ranks that its tests fork; the tests that reach the line run, the fastest first, until one fails. `--map` first makes
the map of what reaches what, by a run of the whole suite under coverage.py (`pip install coverage`); it is not in git.

Known tools were tried on paper: cosmic-ray starts a Python for each mutant (15 s here), mutmut's map sees the test's
own process alone, and half of this suite is ranks.
"""

import argparse
import ast
import functools
import gc
import importlib
import itertools
import json
import marshal
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

from _pytest import runner

from tests import reach

REPOSITORY = reach.REPOSITORY
WORKERS = 2
KNOWN = REPOSITORY / "tests" / "survivors.txt"
JOBS, RESULTS = reach.FOLDER / "jobs.json", reach.FOLDER / "results.jsonl"
KILLERS = reach.FOLDER / "killers.json"  # the test that noticed a fault the last time, which runs first
# What decides numbers and safety. Of the first three, whose tests are whole runs, at least ten are drawn.
FIRST = ["run.py", "distributed/decision.py", "models/ema.py"]
WEIGHED = """
    train.py run.py data.py metrics/*.py sampler.py transforms.py presets.py randomness.py files.py
    models/*.py checkpointing/*.py distributed/*.py settings/*.py
    loading/decode.py loading/growing_crops.py loading/on_device.py loading/repeats.py
""".split()

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.USub: ast.UAdd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LEFT = ("print", "super().__init__")  # a message; and a function whose cells would be others
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LIMIT_S = 150  # of tests for a mutant, by the times of the map: the quickest run


class Place(NamedTuple):
    """Where something may be changed."""

    function: str
    statement: ast.stmt
    node: ast.AST
    fault: str


def faults_of(node):
    """Return what may be done to a node."""
    operator = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
    if isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
        return ["delete"]
    if type(operator) in SWAPS:
        return ["swap"]
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return ["constant"]
    if isinstance(node, (ast.If, ast.IfExp)):
        return ["negate"]
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        return ["delete"]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) not in LEFT:
        return ["delete"]
    is_plain = isinstance(node, ast.Call) and not any(isinstance(each, ast.Starred) for each in node.args[:2])
    return ["arguments"] if is_plain and len(node.args) > 1 else []


def places_in(node, function="", statement=None, is_inside=False):
    """Yield every place in the functions of a module: no texts, annotations, defaults, nor what an error says."""
    if isinstance(node, NAMED):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.JoinedStr):
        return
    if is_inside:
        yield from (Place(function, statement, node, fault) for fault in faults_of(node))
    if isinstance(node, ast.Raise):
        return
    is_function = isinstance(node, FUNCTIONS)
    for field, value in ast.iter_fields(node):
        is_strict = isinstance(node, ast.keyword) and node.arg == "strict"  # holds what is so anyway
        if field == "annotation" or is_strict or (is_function and field != "body"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from places_in(child, function, statement, is_inside or is_function)


def change(node, fault):
    """Change a node where it stands."""
    if fault == "swap" and isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif fault == "swap":
        node.op = SWAPS[type(node.op)]()
    elif fault == "negate":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif fault == "arguments":
        node.args[:2] = node.args[1::-1]
    elif isinstance(node.value, bool):
        node.value = not node.value
    else:
        node.value = node.value + 1 if isinstance(node.value, int) or not node.value else node.value * 2


class Delete(ast.NodeTransformer):
    """Puts `pass` in the place of a statement."""

    def __init__(self, statement):
        self.statement = statement

    def visit(self, node):
        return ast.copy_location(ast.Pass(), node) if node is self.statement else self.generic_visit(node)


def first_line(statement):
    return ast.unparse(statement).splitlines()[0]


class Mutant(NamedTuple):
    """The number-th fault of a file."""

    file: str
    number: int

    def build(self):
        """Return the module's tree, the changed one, the lines of the statement, and the change in one line."""
        text = read(self.file)
        tree, changed = ast.parse(text), ast.parse(text)
        place = list(places_in(changed))[self.number]
        before = first_line(place.statement)
        lines = [place.statement.lineno, place.statement.end_lineno]
        if getattr(place.statement, "body", None):
            lines[1] = max(place.statement.body[0].lineno - 1, lines[0])
        if place.fault == "delete":
            Delete(place.node).visit(changed)
            after = "pass"
        else:
            change(place.node, place.fault)
            after = first_line(place.statement)
        changed = ast.fix_missing_locations(changed)
        return tree, changed, lines, f"{self.file} {place.function}: {before} -> {after}"

    def codes(self):
        """Return the functions' code objects that differ, by name and first line, for `plant`."""
        tree, changed, _, _ = self.build()
        path = str(REPOSITORY / self.file)
        return dict(differing(compile(tree, path, "exec"), compile(changed, path, "exec")))


def differing(old, new):
    for each, other in zip(old.co_consts, new.co_consts, strict=False):
        if isinstance(each, types.CodeType) and isinstance(other, types.CodeType) and each != other:
            yield (each.co_qualname, each.co_firstlineno), other
            yield from differing(each, other)


def parts_of(each, module):
    """Return what an object of a module holds: functions may stand in classes, tables, wrappers and closures."""
    if isinstance(each, types.FunctionType):
        return [each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)]
    if isinstance(each, (dict, types.MappingProxyType)):
        return each.values()
    if isinstance(each, (list, tuple, set, frozenset)):
        return each
    if isinstance(each, type):
        return [vars(each)] if each.__module__ == module else []
    if isinstance(each, types.CellType):
        return gc.get_referents(each)
    names = ("__func__", "__wrapped__", "fget", "func", "args", "keywords")
    own = [vars(each)] if type(each).__module__ == module and hasattr(each, "__dict__") else []
    cached = [each.__wrapped__] if isinstance(each, functools._lru_cache_wrapper) else []
    return [getattr(each, name) for name in names if hasattr(type(each), name)] + cached + own


def plant(file, codes):
    """Put a fault into the functions of this process; return into how many."""
    module = importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    path, seen, planted = str(REPOSITORY / file), {}, 0
    left = [vars(module)]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each  # kept, for ids are used again
        left.extend(parts_of(each, module.__name__))
        if isinstance(each, types.FunctionType) and each.__code__.co_filename == path:
            code = codes.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
            if code is not None:
                each.__code__ = code
                planted += 1
    return planted


# A plugin of pytest, in a process that has collected all tests and runs them only in its children.


def attempt(session, items, job, folder):
    """Run the tests of a mutant in this process, a child, up to the first that fails; those of a control all."""
    os.setpgid(0, 0)
    forkserver._forkserver.ensure_running = lambda: None  # it is there, though no child of this process
    folder.mkdir(parents=True)
    session.config._tmp_path_factory._basetemp = folder
    reach.Marks.pids, is_planted = str(folder / "pids"), True
    if job["mutant"] is not None:
        codes = Mutant(*job["mutant"]).codes()
        (folder / "codes").write_bytes(marshal.dumps(codes))
        reach.Marks.mutant = (job["mutant"][0], str(folder / "codes"))
        is_planted = plant(job["mutant"][0], codes) > 0
    tests = [items[test] for test in job["tests"] if test in items]
    failed = []
    for item, following in zip(tests, [*tests[1:], None], strict=True):
        reports = runner.runtestprotocol(item, nextitem=following, log=False)
        if any(report.failed for report in reports):
            failed.append(item.nodeid)
            if job["mutant"] is not None:
                break
    (folder / "result.json").write_text(json.dumps({"killed_by": failed, "is_planted": is_planted}))
    os._exit(0)


def finish(pid, job, folder):
    """Return what became of a mutant, and end what it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    pids = folder / "pids"
    for rank in pids.read_text().split() if pids.exists() else []:
        with suppress(OSError):
            if b"forkserver" in Path(f"/proc/{rank}/cmdline").read_bytes():
                os.kill(int(rank), signal.SIGKILL)
    result = {"killed_by": ["its end, or its time"], "is_planted": True}
    with suppress(OSError):
        result = json.loads((folder / "result.json").read_text())
    shutil.rmtree(folder, ignore_errors=True)
    return {**job, **result}


def run_jobs(session, jobs, root):
    """Yield what became of each job, in the order of their ends; some are under way at a time."""
    items = {item.nodeid: item for item in session.items}
    running, numbers = {}, itertools.count()
    while jobs or running:
        while jobs and len(running) < WORKERS:
            job, folder = jobs.pop(0), root / str(next(numbers))
            pid = os.fork()
            if not pid:
                attempt(session, items, job, folder)
            running[pid] = (job, folder, time.monotonic() + 60 + 4 * job["seconds"])
        time.sleep(0.02)
        for pid, (job, folder, end) in list(running.items()):
            if time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, os.WNOHANG)[0]:
                del running[pid]
                yield finish(pid, job, folder)


def pytest_runtestloop(session):
    """Try all mutants, and then, as a control, whether the tests that killed them pass without any."""
    warm = next(item for item in session.items if "started" in item.fixturenames)
    other = next(item for item in session.items if item.path != warm.path)
    runner.runtestprotocol(warm, nextitem=other, log=False)  # makes the fixtures of the session, and ends its module's
    forkserver._forkserver.ensure_running()
    root = Path(tempfile.mkdtemp(prefix="mutants-"))
    killers = set()
    for name in ("mutants", "control"):
        jobs = json.loads(JOBS.read_text())
        if name == "control":
            tests = sorted(killers & {item.nodeid for item in session.items})
            jobs = [{"mutant": None, "tests": tests[k::20], "seconds": 900} for k in range(20)]
        for result in run_jobs(session, jobs, root / name):
            killers.update(result["killed_by"])
            with open(RESULTS, "a") as file:
                file.write(json.dumps(result) + "\n")
    shutil.rmtree(root, ignore_errors=True)
    return True


# The command.


def files_of(patterns):
    return sorted({str(path.relative_to(REPOSITORY)) for each in patterns for path in REPOSITORY.glob(each)})


def draw(files, number, seed):
    """Return mutants by weight: each place is as likely, but for those of which at least ten are to be there."""
    generator = random.Random(seed)
    numbers = {file: len(list(places_in(ast.parse(read(file))))) for file in files}
    pools = {file: generator.sample(range(count), count) for file, count in numbers.items()}
    drawn = [Mutant(file, pools[file].pop()) for file in files if file in FIRST for _ in range(min(10, numbers[file]))]
    rest = [Mutant(file, each) for file, pool in pools.items() for each in pool]
    return [*drawn, *generator.sample(rest, min(len(rest), max(0, number - len(drawn))))][:number]


def jobs_of(mutants, found):
    """Return the jobs of the mutants, and those that no test reaches."""
    seconds = dict(enumerate(found["seconds"]))
    killers = read_killers()
    for mutant in mutants:
        *_, (first, last), text = mutant.build()
        if text.rpartition(" -> ")[0].endswith(": " + text.rpartition(" -> ")[2]):
            continue  # two arguments that are the same
        rows = found["lines"].get(mutant.file, {})
        tests = {test for line in range(first, last + 1) for test in rows.get(str(line), [])}
        killer = killers.get(text)
        tests = sorted(tests, key=lambda test: (found["tests"][test] != killer, seconds[test], test))
        used, number = 0.0, 0
        while number < len(tests) and used < LIMIT_S:
            used += seconds[tests[number]]
            number += 1
        names = [found["tests"][test] for test in tests[:number]]
        yield {"mutant": mutant, "text": text, "tests": names, "seconds": used, "left": len(tests) - number}


def report(results, explained):
    """Print the score by file, and the survivors that no reason is known of."""
    unsound = {test for result in results if result["mutant"] is None for test in result["killed_by"]}
    results = [result for result in results if result["mutant"] is not None]
    lives = [result for result in results if not set(result["killed_by"]) - unsound]
    drawn, alive = (Counter(result["mutant"][0] for result in each) for each in (results, lives))
    for file in sorted(drawn):
        print(f"{drawn[file] - alive[file]:4} of {drawn[file]:4} killed  {file}")
    print(f"{len(results) - len(lives)} of {len(results)} killed")
    for test in sorted(unsound):
        print(f"fails without a fault too, and is not counted: {test}")
    new = [result for result in lives if result["text"] not in explained]
    for result in new:
        reason = f"  ({result['left']} tests not run)" if result["left"] else ""
        reason = reason if result["tests"] else "  (no test reaches it)"
        print(f"survived: {result['text']}{reason if result['is_planted'] else '  (not planted)'}")
    return len(new)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="modules to change (default: what decides numbers)")
    parser.add_argument("--number", type=int, default=500, help="how many faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which faults are drawn (default: %(default)s)")
    parser.add_argument("--map", action="store_true", help="first run the suite and note which test reaches which line")
    args = parser.parse_args()
    if args.map or not reach.MAP.exists():
        reach.make_map()
    mutants = draw(args.files or files_of([*FIRST, *WEIGHED]), args.number, args.seed)
    found = json.loads(reach.MAP.read_text())
    old = [file for file in {mutant.file for mutant in mutants} if found["sources"].get(file, read(file)) != read(file)]
    if old:
        sys.exit(f"the map knows another {', '.join(sorted(old))}: make it anew with --map")
    jobs = list(jobs_of(mutants, found))
    explained = read_explained()
    left = [job for job in jobs if job["tests"] and job["text"] not in explained]
    print(f"{len(jobs) - len(left)} of {len(jobs)} are not tried: no test reaches them, or {KNOWN.name} explains them")
    RESULTS.write_text("")
    JOBS.write_text(json.dumps(left))
    words = [sys.executable, *"-m pytest -p tests.reach -p tests.mutants -p no:randomly -q -m".split(), "not slow"]
    process = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(10)
        print(f"{RESULTS.read_text().count(chr(10))} of {len(left)}", file=sys.stderr, flush=True)
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    killers = {each["text"]: each["killed_by"][0] for each in results if each["mutant"] and each["killed_by"]}
    KILLERS.write_text(json.dumps({**read_killers(), **killers}))
    results += [{**job, "killed_by": [], "is_planted": True} for job in jobs if job not in left]
    return 1 if report(results, explained) else 0


def read(file):
    return (REPOSITORY / file).read_text()


def read_explained():
    """Return the survivors that are known, with why no test need notice them."""
    return dict(line.rsplit("  # ", 1) for line in KNOWN.read_text().splitlines() if "  # " in line)


def read_killers():
    return json.loads(KILLERS.read_text()) if KILLERS.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
