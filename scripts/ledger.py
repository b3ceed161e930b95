"""Add finished runs to records/, and write the tables of results that are made from it.

A record is a folder: record.json (the claim, the command, the commit, versions, the processor and the last results),
recipe.toml, metrics.jsonl and log.txt of the run. Paths are cut to their last part, and no name of a host stands in it.
An evaluation, or another script's run, has a log.txt alone, whose first line is `$ COMMAND`.

Examples:
  python -m scripts.ledger runs/imagenette --claim "imagenette, 5 epochs"
  python -m scripts.ledger lite0.log --claim "Lite0, published weights"
  python -m scripts.ledger                       writes the tables again

Runs of one claim may differ in --seed alone. Those on one kind of processor are one row: their mean, and the smallest
and largest result.
"""

import re
import shlex
import statistics
import tempfile
import time
import zlib
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpointing.guard import describe_environment, describe_processor
from errors import UserError, counted, duration, in_one_line
from files import make_folder, read_bytes, read_json, write_atomically
from scripts import tool
from scripts.report import LoggedRun, group_seeds
from settings.choices import CURVES

PROG = "python -m scripts.ledger"
BEGIN, END = "<!-- results: python -m scripts.ledger -->\n", "<!-- end of results -->\n"
HEAD = "| run | Acc@1 | time | on |\n|---|---|---|---|\n"
PAGE = """# Records

Each row is made by `python -m scripts.ledger` from the folders that it names, the newest first; the command that made a
run is in its `record.json`. A number, and a range of seeds, is of one kind of processor and its instructions.

"""
# An absolute path; what comes before its last part is this machine's.
_PATH = re.compile(r"(?<![\w.~/-])/(?:[^\s/:;,'\"]+/)*(?=[^\s/])")
# The result of an evaluation in a log: ours, and torchvision's. And what of the commands of one claim may differ.
_RESULT = re.compile(r"Test: +Acc@1 (?P<acc1>[\d.]+)(?: Acc@5 (?P<acc5>[\d.]+))?(?:.{,999} n=(?P<n>\d+))?$", re.M)
_SEED = re.compile(r"(seed[( ]+)(\d+)|--output-dir \S+")


def without_paths(text: str) -> str:
    """Return text whose absolute paths are cut to their last part: /home/me/runs/a becomes a."""
    return _PATH.sub("", text)


def describe_record(folder: Path) -> dict[str, Any]:
    """Return the content of record.json for a run's output folder; UserError if the run has not finished."""
    status, run, records = read_json(folder / "status.json"), read_json(folder / "run.json"), LoggedRun(folder).records
    if status.get("state") != "finished" or not run:
        raise UserError(f"{folder}: state {status.get('state', 'unknown')}; only a finished run is a record")
    last = {record["kind"]: record for record in records}
    results = {
        kind: {name: last[kind][name] for name in (*CURVES, "n", "step", "epoch") if name in last[kind]}
        for kind in ("val", "val_ema") if kind in last
    }  # fmt: skip
    if "val" not in results:
        raise UserError(f"{folder} holds no evaluation in metrics.jsonl; a run without one is no record")
    with in_one_line(f"{folder}/run.json is not as train.py writes it"):
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime(run["started"])),
            "command": [without_paths(word) for word in run["command"]],
            "seed": int(run["args"]["seed"]),
            "processor": run.get("processor"),
            "environment": dict(run.get("environment", {})),
            "results": results,
            "hours": records[-1]["hours"],
        }


def describe_log(path: Path, text: str) -> dict[str, Any]:
    """Return the content of record.json for the text of a command's log from here; UserError if it is none."""
    found = list(_RESULT.finditer(text))
    if not text.startswith("$ ") or not found:
        raise UserError(f"{path}: expected `$ COMMAND` in its first line, and a line `Test: Acc@1 ...`")
    command = without_paths(text[2:].splitlines()[0])
    seed, took = _SEED.search(command), re.search(r"^Training time (\d+):(\d+):(\d+)", text, flags=re.M)
    with in_one_line(f"{path}: its command or its last result cannot be read"):
        results = {name: float(value) for name, value in found[-1].groupdict().items() if value}
        hours = sum(int(part) / unit for part, unit in zip(took.groups(), (1, 60, 3600), strict=True)) if took else None
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime)),
            "command": shlex.split(command),
            "seed": int(seed[2] or 0) if seed else 0,
            "processor": describe_processor(),
            "environment": describe_environment(Namespace(device="cpu", world_size=1)),
            "results": {"val": results},
            "hours": hours,
        }


def add_record(path: Path, claim: str, records: Path) -> Path:
    """Write a record of a run's folder or of a log, and return its folder, named by the claim and the seed.

    Nothing is written if the tables could not be made of it and the other records: UserError.
    """
    if path.is_dir():
        content, log = describe_record(path), read_bytes(path / "log.txt").decode(errors="replace")
        if re.search("^(versions|options) that changed: (?!output-dir)", log, flags=re.M):
            raise UserError(f"{path}: options, versions or the commit changed between its starts; run it again")
        log = re.sub(r"^(==== \S+ \S+, )\S+, ", r"\1", log, flags=re.M)  # without the host
        recipe = without_paths(read_bytes(path / "recipe.toml").decode(errors="replace")).encode()
        files = {"metrics.jsonl": read_bytes(path / "metrics.jsonl"), "recipe.toml": recipe}
    else:
        log, files = read_bytes(path).decode(errors="replace"), {}
        content = describe_log(path, log)
    if "dirty" in str(content["environment"].get("revision") or "dirty") or not content["processor"]:
        raise UserError(f"{path}: files had changed since the commit; commit them, and run it again")
    out = records / f"{re.sub('[^a-z0-9]+', '-', claim.lower()).strip('-')}-seed{content['seed']}"
    with in_one_line(f"{path} or {out / 'record.json'} cannot be read"):
        # record.json comes last: a folder without it is no record.
        files |= {"log.txt": without_paths(log).encode(), "record.json": tool.as_json({"claim": claim, **content})}
        held, of = read_json(out / "record.json"), (claim, kind_of(content))
        if held and (held["claim"], kind_of(held)) != of:
            out = out.with_name(f"{out.name}-{zlib.crc32(repr(of).encode()):08x}")
    with tempfile.TemporaryDirectory() as staged:
        others = [each for each in records.glob("*/record.json") if each.parent != out]
        for place in (Path(staged) / out.name, out):
            make_folder(place)
            for name, payload in files.items():
                write_atomically(place / name, payload)
            list(map(row, read_groups([*others, place / "record.json"])))
    return out


def kind_of(record: dict) -> str:
    """Return the kind of processor that a record is of."""
    return f"{record['processor']}, {record['environment'].get('gpu') or record['environment'].get('cpu')}"


def read_groups(paths: Iterable[Path]) -> list[list[dict]]:
    """Return the records of each claim on each kind of processor, the newest first; UserError for what is none."""
    claims: dict[str, list[dict]] = {}
    groups: dict[tuple[str, str], list[dict]] = {}
    for path in sorted(paths, key=lambda path: path.parent.name):
        content = read_json(path) | {"folder": path.parent}
        with in_one_line(f"records/{path.parent.name}/record.json cannot be a row of the tables"):
            row([content])
            content["same"] = _SEED.sub(r"\1", " ".join(content["command"]))
            claims.setdefault(content["claim"], []).append(content)
            groups.setdefault((content["claim"], kind_of(content)), []).append(content)
    for group in claims.values():
        folders = [record["folder"] for record in group]
        runs = [LoggedRun(folder) for folder in folders if (folder / "recipe.toml").is_file()]
        if len(group_seeds(runs)) > 1 or (len(runs) < len(group) and len({record["same"] for record in group}) > 1):
            listed = " and ".join(folder.name for folder in folders)
            raise UserError(f"records/{listed} differ in more than the seed; one is of another claim")
    return sorted(groups.values(), key=lambda group: max(record["date"] for record in group), reverse=True)


def row(group: list[dict]) -> str:
    """Return one row of the table: runs of one claim. UserError for text that a table cannot show."""
    name = "acc1" if "acc1" in group[0]["results"]["val"] else "map"  # of several labels
    values = [record["results"]["val"][name] for record in group]
    if not all(0 <= value <= 100 for value in values):
        raise UserError(f"{name} is {values[0]}; expected 0 to 100")
    shown = f"{'mAP ' * (name == 'map')}{statistics.fmean(values):.2f}"
    if len(group) > 1:
        shown += f" ({min(values):.2f} to {max(values):.2f}, {len(group)} seeds)"
    hours = [record["hours"] for record in group]
    took = "" if None in hours else duration(3600 * statistics.fmean(hours))
    places = dict.fromkeys(
        f"{kind_of(record)}, {counted(record['environment']['world_size'], 'process')}, "
        f"torch {record['environment']['torch'].split('+')[0]}"
        for record in group
    )
    cells = [group[0]["claim"], shown, took, "; ".join(places)]
    text = "".join([*cells, *(f"{each['seed']:d} {each['folder'].name} " + each["date"] for each in group)])
    if not text.isprintable() or set(text) & set("|<>[]`"):
        raise UserError(f"{text!r:.90} breaks a table; leave out line ends, control characters and | < > [ ] `")
    return f"| {' | '.join(cells)} |\n"


def write_tables(root: Path) -> None:
    """Write records/README.md, and the recipes' rows into README.md between its two marks."""
    groups = read_groups((root / "records").glob("*/record.json"))
    of_recipes = [group for group in groups if "--recipe" in group[0]["command"]]
    tool.replace_between(root / "README.md", BEGIN, END, HEAD + "".join(map(row, of_recipes)))
    text = HEAD + "".join(map(row, groups))
    for group in groups:
        links = ", ".join(f"[seed {record['seed']}]({record['folder'].name}/record.json)" for record in group)
        text += f"\n{group[0]['claim']}: {links}\n"
    write_atomically(root / "records" / "README.md", (PAGE + text).encode())


def main() -> None:
    """Add the runs that the command line names, and write the tables."""
    parser = tool.build_parser(PROG, "[RUN ... --claim TEXT]", __doc__)
    text = "output folder of a finished run, or a log"
    parser.add_argument("runs", metavar="RUN", type=tool.as_path, nargs="*", help=text)
    parser.add_argument("--claim", metavar="TEXT", help="what the runs show, such as 'imagenette, 5 epochs'")

    def work() -> None:
        options = parser.parse_args()
        if bool(options.runs) != bool(options.claim):
            raise UserError("a run needs --claim TEXT, and --claim needs a run; give both, or none to write the tables")
        for folder in options.runs:
            print(f"wrote {add_record(folder, options.claim, tool.ROOT / 'records')}")
        write_tables(tool.ROOT)

    tool.run(PROG, work, "interrupted; the same command writes the record again")


if __name__ == "__main__":
    main()
