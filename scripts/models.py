"""List the models that can be trained here, with their sizes and published accuracy: `python -m scripts.models`."""

import argparse
import math
from typing import Any

import torchvision

from config import RECIPES_DIR, read_recipe
from errors import UserError, aligned, did_you_mean
from scripts.tool import as_json, build_parser, run

PROG = "python -m scripts.models"

EPILOG = """\
examples:
  python -m scripts.models                                    # torchvision's, by name
  python -m scripts.models resnet                             # those with this word in their names
  python -m scripts.models --min-acc1 80 --max-params 30 --sort flops
  python -m scripts.models vit --json                         # with all published weights and full recipe names

Accuracy, GFLOPs (multiply-adds, in billions) and file size are those that torchvision publishes with a model's
default weights, at their own image size. `recipes` are the endings of --recipe MODEL-ENDING of train.py; those with
another name are written out. timm.list_models() lists the models that --model timm/NAME trains.
"""

# The columns that models can be sorted by, and whether the largest value comes first.
SORTS = {"name": False, "acc1": True, "params": False, "flops": False, "size": False}


def list_models(word: str) -> list[dict[str, Any]]:
    """Return the facts about all models whose names hold a word, by name; UserError if there is none."""
    known = torchvision.models.list_models(module=torchvision.models)
    names = [name for name in known if word.lower() in name.lower()]
    if not names:
        raise UserError(f"{word}: no model has this word in its name{did_you_mean(word, known)}")
    recipes = {}
    for path in sorted(RECIPES_DIR.glob("*.toml")):
        recipes.setdefault(read_recipe(path).get("model", {}).get("model"), []).append(path.stem)
    return [{**describe(name), "recipes": recipes.get(name, [])} for name in sorted(names)]


def describe(name: str) -> dict[str, Any]:
    """Return the numbers that torchvision publishes for a model's default weights, and for each of its weights."""
    known = torchvision.models.get_model_weights(name)
    weights = {member.name: _published(member) for member in known}
    return {"name": name, **weights[known.DEFAULT.name], "weights": known.DEFAULT.name, "all_weights": weights}


def _published(member: torchvision.models.WeightsEnum) -> dict[str, float | None]:
    meta = member.meta
    metrics = meta["_metrics"]["ImageNet-1K"]
    facts = {
        "params": meta["num_params"], "flops": meta["_ops"], "acc1": metrics["acc@1"], "acc5": metrics["acc@5"],
        "size": meta["_file_size"],
    }  # fmt: skip
    # Weights for features alone have NaN for an accuracy, which is no JSON.
    return {name: None if math.isnan(value) else value for name, value in facts.items()}


def table(rows: list[dict]) -> list[str]:
    """Return the lines of a table; recipes are written by their endings, those of another name in full."""
    head = ["model", "params M", "GFLOPs", "Acc@1", "MiB", "weights", "recipes"]
    cells = [
        [
            row["name"], f"{row['params'] / 1e6:.1f}", f"{row['flops']:.2f}", f"{row['acc1']:.3f}",
            f"{row['size']:,.1f}", row["weights"].removeprefix("IMAGENET1K_"),
            " ".join(recipe.removeprefix(f"{row['name']}-") for recipe in row["recipes"]),
        ]
        for row in rows
    ]  # fmt: skip
    return aligned([head, *cells], (0, 5, 6))


def show(options: argparse.Namespace) -> None:
    """Print the models that the options choose; UserError if there is none."""
    rows = [row for row in list_models(options.word) if options.min_acc1 <= row["acc1"]]
    rows = [row for row in rows if row["params"] <= options.max_params * 1e6]
    if not rows:
        raise UserError("no model is within --min-acc1 and --max-params; give wider bounds")
    rows.sort(key=lambda row: row[options.sort], reverse=SORTS[options.sort])
    print(as_json(rows).decode().rstrip() if options.json else "\n".join(table(rows)))


def main() -> None:
    """List the models that the command line asks for."""
    parser = build_parser(PROG, "[WORD] [options]", "List the models that can be trained here.", EPILOG)
    parser.add_argument("word", metavar="WORD", nargs="?", default="", help="only models with WORD in their names")
    parser.add_argument("--sort", choices=SORTS, default="name", help="acc1: the best first (default: name)")
    parser.add_argument("--min-acc1", metavar="X", type=float, default=0.0, help="at least this published Acc@1")
    parser.add_argument("--max-params", metavar="M", type=float, default=math.inf, help="at most this many millions")
    parser.add_argument("--json", action="store_true", help="print a list of objects, with every number unrounded")
    run(PROG, lambda: show(parser.parse_args()), "interrupted")


if __name__ == "__main__":
    main()
