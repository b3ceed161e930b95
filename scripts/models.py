"""List the models that can be trained here, with their sizes and published accuracy: `python -m scripts.models`."""

import argparse
import math
from contextlib import suppress
from typing import Any

import torch
import torchvision
from torch.utils.flop_counter import FlopCounterMode

from config import RECIPES_DIR, read_recipe
from errors import UserError, aligned, did_you_mean, require_timm
from loading.progress import Progress
from scripts.tool import as_json, build_parser, run

PROG = "python -m scripts.models"

EPILOG = """\
examples:
  python -m scripts.models                                    # torchvision's, by name
  python -m scripts.models resnet                             # those with this word in their names
  python -m scripts.models --min-acc1 80 --max-params 30 --sort flops
  python -m scripts.models vit --json                         # with all published weights and full recipe names
  python -m scripts.models convnextv2 --timm

Accuracy, GFLOPs (multiply-adds, in billions) and file size are those that torchvision publishes with a model's
default weights, at their own image size. `recipes` are the endings of --recipe MODEL-ENDING of train.py; those with
another name are written out. timm's package holds no accuracies: here its models are built without memory, to count
their parameters, the GFLOPs at their default image size, and the size of their float32 weights.
"""

# The columns that models can be sorted by, and whether the largest value comes first.
SORTS = {"name": False, "acc1": True, "params": False, "flops": False, "size": False}


def recipes_by_model() -> dict[str, list[str]]:
    """Return the names of the recipes that train each model."""
    found = {}
    for path in sorted(RECIPES_DIR.glob("*.toml")):
        found.setdefault(read_recipe(path).get("model", {}).get("model"), []).append(path.stem)
    return found


def torchvision_facts(name: str) -> dict[str, Any]:
    """Return the numbers that torchvision publishes for a model's default weights, and for each of its weights."""
    known = torchvision.models.get_model_weights(name)
    weights = {member.name: _published(member) for member in known}
    default = known.DEFAULT.name if len(known) else None
    facts = weights.get(default) or dict.fromkeys(("params", "flops", "acc1", "acc5", "size"))
    return {"name": name, **facts, "weights": default, "all_weights": weights}


def _published(member: torchvision.models.WeightsEnum) -> dict[str, float | None]:
    meta = member.meta
    metrics = meta["_metrics"]["ImageNet-1K"]
    facts = {
        "params": meta["num_params"], "flops": meta["_ops"], "acc1": metrics["acc@1"], "acc5": metrics["acc@5"],
        "size": meta["_file_size"],
    }  # fmt: skip
    # Weights for features alone have NaN for an accuracy, which is no JSON.
    return {name: None if math.isnan(value) else value for name, value in facts.items()}


def timm_facts(name: str) -> dict[str, Any]:
    """Return the sizes of a model of timm's, counted without its weights; None for each that cannot be counted."""
    timm = require_timm("--timm", name)
    facts = {"name": f"timm/{name}", **dict.fromkeys(("params", "flops", "acc1", "acc5", "size", "weights"))}
    # A model that cannot be built or run without memory raises an error of its own.
    with suppress(Exception), torch.device("meta"), torch.no_grad():
        model = timm.create_model(name).eval()
        facts["params"] = sum(parameter.numel() for parameter in model.parameters())
        facts["size"] = sum(tensor.nbytes for tensor in model.state_dict().values()) / 2**20
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, *model.default_cfg["input_size"]))
        facts["flops"] = counter.get_total_flops() / 2e9  # two operations each multiply-add
    return facts


def list_facts(word: str, *, is_timm: bool) -> list[dict[str, Any]]:
    """Return the facts of all models whose names hold a word; UserError if there is none."""
    if is_timm and not word:
        raise UserError("--timm has more than a thousand models, which are built to be counted; give a WORD of theirs")
    owner = require_timm("--timm", word) if is_timm else torchvision.models
    known = owner.list_models() if is_timm else owner.list_models(module=owner)
    names = [name for name in known if word.lower() in name.lower()]
    if not names:
        raise UserError(f"{word}: no model has this word in its name{did_you_mean(word, known)}")
    progress, rows = Progress("counting", len(names), "models"), []
    for name in names:
        rows.append(timm_facts(name) if is_timm else torchvision_facts(name))
        progress.update()
    recipes = recipes_by_model()
    return [{**row, "recipes": recipes.get(row["name"], [])} for row in rows]


def select(rows: list[dict], *, sort: str, min_acc1: float | None, max_params: float | None) -> list[dict]:
    """Return the rows within bounds, sorted; a model whose number is not known is last, or beyond a bound."""
    if min_acc1 is not None:
        rows = [row for row in rows if row["acc1"] is not None and row["acc1"] >= min_acc1]
    if max_params is not None:
        rows = [row for row in rows if row["params"] is not None and row["params"] <= max_params * 1e6]
    rows = sorted(rows, key=lambda row: row["name"])
    sign = -1 if SORTS[sort] else 1
    return rows if sort == "name" else sorted(rows, key=lambda row: (row[sort] is None, sign * (row[sort] or 0)))


def table(rows: list[dict]) -> list[str]:
    """Return the lines of a table; recipes are written by their endings, those of another name in full."""
    head = ["model", "params M", "GFLOPs", "Acc@1", "MiB", "weights", "recipes"]
    cells = [
        [
            row["name"], _number(row["params"] and row["params"] / 1e6, 1), _number(row["flops"], 2),
            _number(row["acc1"], 3), _number(row["size"], 1), (row["weights"] or "-").removeprefix("IMAGENET1K_"),
            " ".join(recipe.removeprefix(f"{row['name'].removeprefix('timm/')}-") for recipe in row["recipes"]),
        ]
        for row in rows
    ]  # fmt: skip
    return aligned([head, *cells], (0, 5, 6))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def finite(text: str) -> float:
    """Return a number that others can be compared with; an argparse type."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def show(options: argparse.Namespace) -> None:
    """Print the models that the options choose; UserError if there is none."""
    rows = list_facts(options.word, is_timm=options.timm)
    rows = select(rows, sort=options.sort, min_acc1=options.min_acc1, max_params=options.max_params)
    if options.json:
        print(as_json(rows).decode(), end="")
        return
    if not rows:
        raise UserError("no model is within --min-acc1 and --max-params; give wider bounds")
    print("\n".join(table(rows)))


def main() -> None:
    """List the models that the command line asks for."""
    parser = build_parser(PROG, "[WORD] [options]", "List the models that can be trained here.", EPILOG)
    parser.add_argument("word", metavar="WORD", nargs="?", default="", help="only models with WORD in their names")
    parser.add_argument("--sort", choices=SORTS, default="name", help="acc1: the best first (default: name)")
    parser.add_argument("--min-acc1", metavar="X", type=finite, help="only those with at least this Acc@1 published")
    parser.add_argument("--max-params", metavar="M", type=finite, help="only those of at most this many millions")
    parser.add_argument("--json", action="store_true", help="print a list of objects, with every number unrounded")
    parser.add_argument("--timm", action="store_true", help="timm's models, which --model timm/NAME trains")
    run(PROG, lambda: show(parser.parse_args()), "interrupted")


if __name__ == "__main__":
    main()
