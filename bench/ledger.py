"""Add finished runs to records/, write the tables of results that are made from it, and run records again.

A record is a folder: record.json (the claim, the command, the commit, versions, the processor and the last results),
recipe.toml, metrics.jsonl and log.txt of the run. Paths are cut to their last part, and no name of a host stands in it.
An evaluation, or another script's run, has a log.txt alone, whose first line is `$ COMMAND`.

Examples:
  python -m bench.ledger runs/imagenette --claim "imagenette, 5 epochs"
  python -m bench.ledger lite0.log --claim "Lite0, published weights"
  python -m bench.ledger                       writes the tables again
  python -m bench.ledger runs/seed* --claim "ResNet-50, 16 epochs" --lever "Muon" --send DIR
  python -m bench.ledger --verify records/imagenette-* --data-path data/imagenette2-320

Runs of one claim may differ in --seed or --minival-fold alone. Those on one kind of processor are one row: their mean,
and the smallest and largest result.

--send writes the records into a folder of its own instead, with a page of their row and of what their seeds show:
records/README.md has the rule.

--verify trains the first steps of each record again, by its recipe, and compares what its metrics.jsonl and log.txt
hold of them. On the record's kind of processor, with its versions and threads, every bit must be equal; elsewhere the
first step's loss within 0.2 %, and the later ones within the tolerance of the record, which --measure writes. Exit code
0: equal; 1: something differs; 2: it cannot be compared here.
"""

import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from checkpointing.guard import describe_environment, describe_processor
from errors import UserError, as_user_error, counted, duration
from files import make_folder, read_bytes, read_json, write_atomically
from scripts import tool
from scripts.report import LoggedRun, group_seeds
from settings.choices import CURVES
from settings.machine import slow_type
from settings.options import DataOptions, DistributedOptions
from settings.stages import Parsed

PROG = "python -m bench.ledger"
BEGIN, END = "<!-- results: python -m bench.ledger -->\n", "<!-- end of results -->\n"
HEAD = "| run | Acc@1 | time | on |\n|---|---|---|---|\n"
PAGE_HEAD = "| run | Acc@1 | lever | time | on |\n|---|---|---|---|---|\n"
# Student's t of 2, 3, ... 8 degrees of freedom that one value in a hundred is above; the last one serves for more.
_T = (6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896)
FEWEST = 3  # seeds of a claim that is sent
# An absolute path; what comes before its last part is this machine's.
_PATH = re.compile(r"(?<![\w.~/-])/(?:[^\s/:;,'\"]+/)*(?=[^\s/])")
# The result of an evaluation in a log: ours, and torchvision's. And what of the commands of one claim may differ.
_RESULT = re.compile(r"Test: +Acc@1 (?P<acc1>[\d.]+)(?: Acc@5 (?P<acc5>[\d.]+))?(?:.{,999} n=(?P<n>\d+))?$", re.M)
_SEED = re.compile(r"(seed[( ]+)(\d+)|--output-dir \S+")
# What the bits of a record depend on, beside its recipe.
_OF_BITS = ("torch", "torchvision", "timm", "cpu", "gpu", "threads", "world_size")
# Variables under which torch and oneDNN compute as on a processor without AVX-512.
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
_ROOM = 2  # processors differ in more than instructions and threads
_FIRST = 0.002  # share of the first step's loss, before rounding has grown


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
    with as_user_error(f"{folder}/run.json is not as train.py writes it"):
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime(run["started"])),
            "command": [without_paths(word) for word in run["command"]],
            "seed": int(run["args"]["seed"]),
            "fold": int(run["args"].get("minival_fold", 0)),
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
    with as_user_error(f"{path}: its command or its last result cannot be read"):
        results = {name: float(value) for name, value in found[-1].groupdict().items() if value}
        hours = sum(int(part) / unit for part, unit in zip(took.groups(), (1, 60, 3600), strict=True)) if took else None
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime)),
            "command": shlex.split(command),
            "seed": int(seed[2] or 0) if seed else 0,
            "processor": describe_processor(),
            "environment": describe_environment(DataOptions(), DistributedOptions(device="cpu")),
            "results": {"val": results},
            "hours": hours,
        }


def add_record(path: Path, claim: str, records: Path, lever: str = "") -> Path:
    """Write a record of a run's folder or of a log, and return its folder, named by the claim and the seed.

    `lever` is what made the result better than the one before, in a sentence.

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
    content["lever"] = lever
    out = records / f"{re.sub('[^a-z0-9]+', '-', claim.lower()).strip('-')}-seed{content['seed']}"
    out = out.with_name(f"{out.name}-fold{content['fold']}") if content.get("fold") else out
    with as_user_error(f"{path} or {out / 'record.json'} cannot be read"):
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


class Again(NamedTuple):
    """The first steps of a record, run again."""

    run: dict[str, Any]  # run.json
    here: LoggedRun
    log: bytes


def run_again(folder: Path, record: dict, steps: int, replaced: dict[str, str | None], **environ: str) -> Again:
    """Train the first steps of a record again, by its recipe.

    Args:
        folder: the record's.
        record: the content of its record.json.
        steps: the run is ended once it has logged this step.
        replaced: values in place of those that the recipe has, by their names; None for the recipe's own.
        environ: further variables of the environment.

    Raises:
        UserError: the command failed; the message ends with its first error, or else its last line.
    """
    processes, threads = record["environment"]["world_size"], record["environment"]["threads"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)
    with tempfile.TemporaryDirectory() as temporary, open(Path(temporary) / "log", "w+b") as log:
        out, known = Path(temporary) / "run", LoggedRun(folder).options
        given: dict[str, str | Path] = {name: value for name, value in replaced.items() if value and name in known}
        given |= {"recipe": folder / "recipe.toml", "output-dir": out}
        given |= {"device": "cpu"} if "cpu" in record["environment"] else {}
        options = [word for name, value in given.items() for word in (f"--{name}", value)]
        command: list[str | Path] = [sys.executable, *launcher, tool.ROOT / "train.py", *options]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), **environ}
        with subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                while process.poll() is None and max(losses_of(out), default=0) < steps:
                    time.sleep(0.2)
            finally:
                code = process.poll()
                process.terminate()
        if code:
            log.seek(0)
            text = log.read().decode(errors="replace")
            first = re.findall(r"^(?:train\.py: error|\w+(?:Error|Exception)\b).*", text, re.M)[:1]  # torchrun's follow
            raise UserError((first or text.splitlines() or ["no output"])[-1])
        here = LoggedRun(out)
        return Again(read_json(out / "run.json"), here, here.read("log.txt"))


def losses_of(folder: Path) -> dict[int, float]:
    """Return the losses that a run has logged, by their steps; none before its first line."""
    return LoggedRun(folder).points("train", "loss") if (folder / "metrics.jsonl").is_file() else {}


def first_loss(log: bytes) -> float:
    """Return the loss of a run's first step, of which log.txt has four decimals; NaN if it has not."""
    found = re.search(rb"^Epoch: \[\d+\] +\[ *0/\d+\].* loss: (\d+\.\d+) ", log, flags=re.M)
    return float(found[1]) if found else math.nan


def first_hashes(log: bytes) -> dict[str, bytes]:
    """Return the hashes of photographs and first weights that log.txt names; older ones have none."""
    found = re.search(rb"^hashes: data (?P<photographs>\w+), .* first weights (?P<weights>\w+)$", log, flags=re.M)
    return found.groupdict() if found else {}


def first_steps(folder: Path, least: int) -> tuple[dict, int]:
    """Return a record, and its first logged step from a number on; UserError if it cannot be run again here."""
    record, losses = read_json(folder / "record.json"), losses_of(folder)
    if not record or not losses or math.isnan(first_loss(LoggedRun(folder).read("log.txt"))):
        raise UserError("no record of a training run of train.py; an evaluation is repeated by its command")
    with as_user_error("record.json is not as bench.ledger writes it"):
        row([record | {"folder": folder}])
        # An error where one of these is no number.
        sum((record["environment"]["threads"], record.get("tolerance") or 0, record.get("tolerance_steps", 0)))
    found = LoggedRun(folder).options
    device = "cpu" if "cpu" in record["environment"] else "cuda"
    kind = {name: found.get(name.replace("_", "-")) for name in ("opt", "amp", "amp_dtype")}
    if slow := slow_type(Parsed.of({"device": device, **kind})):
        raise UserError(slow)
    return record, min((step for step in losses if step >= least), default=max(losses))


def differences(folder: Path, record: dict, again: Again, steps: int, tolerance: float | None) -> list[str]:
    """Return what differs between a record and its first steps run again.

    With a tolerance, a share of a loss, these are the options, rates and losses; without one everything, in every bit.
    """
    there, ours = LoggedRun(folder), again.here.options
    log, of_place = there.read("log.txt"), {"data-path", "weights", "workers"}
    found = [f"{name} is {value} in record.json or recipe.toml, {ours[name]} here"
             for name, value in {**there.options, "seed": record["seed"]}.items()
             if ours.get(name, value) != value and name not in of_place]  # fmt: skip
    hashes = first_hashes(again.log)
    found += [f"other {name} than the record's" for name, value in first_hashes(log).items() if hashes[name] != value]
    first, its_first = first_loss(again.log), first_loss(log)
    if not abs(first - its_first) <= _FIRST * its_first:
        found.append(f"the first step's loss is {its_first} in log.txt, {first} here")
    for name in (*CURVES, "lr", "grad_norm", "weight_norm") if tolerance is None else ("lr", "loss"):
        points = again.here.points("train", name)
        for step, value in there.points("train", name).items():
            allowed = abs(value) * (tolerance or 0.0) if name == "loss" else 0.0
            if step <= steps and not abs(points.get(step, math.nan) - value) <= allowed:
                found.append(f"step {step}: {name} is {value!r} in the record, {points.get(step)!r} here")
    return found


def other_places(record: dict, run: dict) -> list[str]:
    """Return what the bits of a run depend on, beside its recipe, and differs from the record's."""
    here, there = run["environment"], record["environment"]
    others = [name for name in _OF_BITS if here.get(name) != there.get(name)]
    # TorchCodec has the pixels of Pillow; and cores that run no thread change nothing.
    decoders = [re.sub("^torchcodec [^,]+, ", "", each.get("decoder", "")) for each in (here, there)]
    processors = [re.sub(r"^\d+ cores of ", "", str(each["processor"])) for each in (run, record)]
    pairs = {"decoder": decoders, "processor": processors}
    return others + [name for name, (ours, theirs) in pairs.items() if ours != theirs]


def verify(folder: Path, least: int, replaced: dict[str, str | None]) -> int:
    """Run the first steps of a record again and print whether they are equal; return the exit code."""
    try:
        record, steps = first_steps(folder, least)
        print(f"{folder}: {counted(steps, 'step')} again ...", flush=True)
        again = run_again(folder, record, steps, replaced)
        others, tolerance = other_places(record, again.run), record.get("tolerance")
        if others and ("gpu" in others or tolerance is None or steps > record.get("tolerance_steps", 0)):
            raise UserError(f"other than the record's: {', '.join(others)}; and it has no tolerance for that")
        found = differences(folder, record, again, steps, tolerance if others else None)
        if found and tolerance is not None and not differences(folder, record, again, steps, tolerance):
            found.insert(0, "all within rounding, as on another model of this processor")
    except UserError as error:
        print(f"{folder}: cannot be compared here: {error}")
        return 2
    how = f"within rounding, {tolerance:.1e} of a loss; other: {', '.join(others)}" if others else "every bit"
    print(f"{folder}: " + (f"differs: {'; '.join(found[:5])}" if found else f"equal in {steps} steps: {how}"))
    return int(bool(found))


def measure(folder: Path, least: int, replaced: dict[str, str | None]) -> int:
    """Write into a record how far its first losses move with other instructions and threads; return the exit code.

    UserError if more than the losses differs from the record.
    """
    record, steps = first_steps(folder, least)
    moved, losses = [0.0], losses_of(folder)
    ways = [{"OMP_NUM_THREADS": str(number)} for number in (1, 2, 4)]
    if record["environment"].get("cpu") != "DEFAULT":  # it may lack AVX2, and draws other first weights
        ways.insert(0, _AVX2)
    for environ in ways:
        again = run_again(folder, record, steps, replaced, **environ)
        if found := differences(folder, record, again, steps, math.inf):
            raise UserError(f"{folder} differs: {'; '.join(found[:5])}")
        points = again.here.points("train", "loss")
        moved.append(max(abs(points[step] / loss - 1) for step, loss in losses.items() if step <= steps))
        print(f"{folder}: {environ}: the losses of {steps} steps move by up to {moved[-1]:.1e}", flush=True)
    content = {**record, "tolerance": float(f"{_ROOM * max(moved):.1e}"), "tolerance_steps": steps}
    write_atomically(folder / "record.json", tool.as_json(content))
    return 0


def kind_of(record: dict) -> str:
    """Return the kind of processor that a record is of."""
    return f"{record['processor']}, {record['environment'].get('gpu') or record['environment'].get('cpu')}"


def read_groups(paths: Iterable[Path]) -> list[list[dict]]:
    """Return the records of each claim on each kind of processor, the newest first; UserError for what is none."""
    claims: dict[str, list[dict]] = {}
    groups: dict[tuple[str, str], list[dict]] = {}
    for path in sorted(paths, key=lambda path: path.parent.name):
        content = read_json(path) | {"folder": path.parent}
        with as_user_error(f"records/{path.parent.name}/record.json cannot be a row of the tables"):
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


def results_of(group: list[dict]) -> tuple[str, list[float]]:
    """Return the name of the metric of runs of one claim, and their results in %."""
    name = "acc1" if "acc1" in group[0]["results"]["val"] else "map"  # of several labels
    return name, [record["results"]["val"][name] for record in group]


def what_seeds_show(group: list[dict]) -> str:
    """Return mean, deviation and what the mean of all such runs is above, by Student's one-sided t-test.

    UserError for fewer seeds than a claim needs.
    """
    _, values = results_of(group)
    if len({record["seed"] for record in group}) < FEWEST:
        raise UserError(f"{group[0]['claim']}: {counted(len(group), 'run')}; a claim needs {FEWEST} seeds at least")
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    least = mean - _T[min(len(values) - FEWEST, len(_T) - 1)] * deviation / math.sqrt(len(values))
    return f"mean {mean:.2f}, deviation {deviation:.2f}, {len(values)} seeds: above {least:.2f} with p < 0.01"


def row(group: list[dict], *, has_lever: bool = False) -> str:
    """Return one row of the table: runs of one claim. UserError for text that a table cannot show."""
    name, values = results_of(group)
    if not all(0 <= value <= 100 for value in values):
        raise UserError(f"{name} is {values[0]}; expected 0 to 100")
    shown, about = f"{'mAP ' * (name == 'map')}{statistics.fmean(values):.2f}", []
    if len(group) > 1:
        kind = "folds" if any(record.get("fold") for record in group) else "seeds"
        about = [f"{min(values):.2f} to {max(values):.2f}", f"{len(group)} {kind}"]
    if counts := {f"{record['results']['val']['n']:,.0f}" for record in group if "n" in record["results"]["val"]}:
        about.append(f"n={' or '.join(sorted(counts))}")
    if about:
        shown += f" ({', '.join(about)})"
    hours = [record["hours"] for record in group]
    took = "" if None in hours else duration(3600 * statistics.fmean(hours))
    places = dict.fromkeys(
        f"{kind_of(record)}, {counted(record['environment']['world_size'], 'process')}, "
        f"torch {record['environment']['torch'].split('+')[0]}"
        for record in group
    )
    lever = group[0].get("lever", "")
    cells = [group[0]["claim"], shown, took, "; ".join(places)]
    if has_lever:
        cells.insert(2, lever)
    text = lever + "".join([*cells, *(f"{each['seed']:d} {each['folder'].name} " + each["date"] for each in group)])
    if not text.isprintable() or set(text) & set("|<>[]`"):
        raise UserError(f"{text!r:.90} breaks a table; leave out line ends, control characters and | < > [ ] `")
    return f"| {' | '.join(cells)} |\n"


def write_tables(root: Path) -> None:
    """Write records/README.md, and the recipes' rows into README.md between its two marks."""
    groups = read_groups((root / "records").glob("*/record.json"))
    of_recipes = [group for group in groups if "--recipe" in group[0]["command"]]
    tool.replace_between(root / "README.md", BEGIN, END, HEAD + "".join(map(row, of_recipes)))
    text = page_table(groups)
    for group in groups:
        links = ", ".join(f"[seed {record['seed']}]({record['folder'].name}/record.json)" for record in group)
        text += f"\n{group[0]['claim']}: {links}\n"
    tool.replace_between(root / "records" / "README.md", BEGIN, END, text)


def page_table(groups: list[list[dict]]) -> str:
    """Return the table of a page of records, with the lever of each."""
    return PAGE_HEAD + "".join(row(group, has_lever=True) for group in groups)


def write_claim(folder: Path) -> str:
    """Write the page of a folder to send, and return what its seeds show; UserError for too few."""
    groups = read_groups(folder.glob("*/record.json"))
    shown = "\n".join(f"{group[0]['claim']}: {what_seeds_show(group)}" for group in groups)
    text = page_table(groups)
    write_atomically(folder / "README.md", f"{text}\n{shown}\n".encode())
    return shown


def main() -> None:
    """Add the runs that the command line names, and write the tables; or run records again."""
    parser = tool.build_parser(PROG, "[RUN ... --claim TEXT | --verify RECORD ...]", __doc__)
    text = "output folder of a finished run, or a log; with --verify a folder of records/"
    parser.add_argument("runs", metavar="RUN", type=tool.as_path, nargs="*", help=text)
    parser.add_argument("--claim", metavar="TEXT", help="what the runs show, such as 'imagenette, 5 epochs'")
    parser.add_argument("--lever", metavar="TEXT", default="", help="what made the result better, in a sentence")
    text = "write the records, and a page of what they show, into this folder: it is what is sent"
    parser.add_argument("--send", metavar="DIR", type=tool.as_path, help=text)
    parser.add_argument("--verify", action="store_true", help="run the first steps of records again, and compare")
    parser.add_argument("--measure", action="store_true", help="measure the tolerance of records, and write it to them")
    text = "with --verify, at least this many, up to the next line of metrics.jsonl (default: 10)"
    parser.add_argument("--steps", metavar="N", type=tool.positive, default=10, help=text)
    for name, text in (("data_path", "photographs of --verify"), ("weights", "file of weights, for --verify")):
        tool.add_train_option(parser, name, text)

    def work() -> int | None:
        options = parser.parse_args()
        if options.verify or options.measure:
            if not options.runs or options.claim or (options.verify and options.measure):
                raise UserError("--verify or --measure takes folders of records/, and no --claim")
            replaced = {"data-path": options.data_path, "weights": options.weights}
            do = measure if options.measure else verify
            codes = [do(folder, options.steps, replaced) for folder in options.runs]
            return 1 if 1 in codes else max(codes)
        if bool(options.runs) != bool(options.claim):
            raise UserError("a run needs --claim TEXT, and --claim needs a run; give both, or none to write the tables")
        if options.send and not options.lever:
            raise UserError("--send needs --lever TEXT: what made the result better, in a sentence")
        for folder in options.runs:
            out = add_record(folder, options.claim, options.send or tool.ROOT / "records", options.lever)
            print(f"wrote {out}")
        if options.send:
            print(write_claim(options.send))
        else:
            write_tables(tool.ROOT)
        return None

    tool.run(PROG, work, "interrupted; the same command writes the record again")


if __name__ == "__main__":
    main()
