"""Recipes, files of options in TOML: found by name or path, read strictly, and listed.

A run imports this for `--recipe` and `--list-recipes` alone; `config.write_recipe` writes what a run repeats.
"""

import os
import shutil
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from errors import UserError, as_user_error, did_you_mean
from settings.options import GROUPS, OPTIONS
from settings.rules import MOST_COUNT
from settings.tables import aligned

RECIPES_DIR = Path(__file__).parents[1] / "recipes"

# Metadata of a recipe for readers, not options.
RECIPE_FACTS: Collection[str] = {
    "title", "source", "command", "expected-acc1", "expected-acc5", "tolerance", "evaluation",
    "reference-global-batch", "hardware", "hours", "reproduced", "notes",
}  # fmt: skip


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given by name or by path; UserError if there is none."""
    path = Path(name) if name.endswith(".toml") else RECIPES_DIR / f"{name}.toml"
    if not os.path.isfile(path):  # unlike Path.is_file, also takes a name that is too long
        known = sorted(recipe.stem for recipe in RECIPES_DIR.glob("*.toml"))
        raise UserError(f"--recipe {name}: no such recipe{did_you_mean(name, known)} (--list-recipes lists all)")
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's tables and facts; UserError if it is not TOML, or holds an unknown table or fact."""
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of too many digits
        raise UserError(f"recipe {path} is not valid TOML: {error}") from error
    # Strictly, unlike timm's YAML by `parser.set_defaults`: a mistyped key there is taken, and does nothing.
    for name, value in recipe.items():
        known, shown = RECIPE_FACTS, f"fact {name}"
        if isinstance(value, dict):
            known, shown = GROUPS, f"table [{name}]"
        if name not in known:
            hint = did_you_mean(name, known) or f" (known: {', '.join(sorted(known))})"
            raise UserError(f"recipe {path}: unknown {shown}{hint}")
    batch = recipe.get("reference-global-batch")
    # By `type`: TOML's true is an integer to isinstance.
    if batch is not None and (type(batch) is not int or not 1 <= batch < MOST_COUNT):
        raise UserError(f"recipe {path}: reference-global-batch = {batch!r}, expected a positive integer")
    return recipe


def recipe_values(path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a recipe's tables give; UserError for an unknown one, or a value of another type."""
    values = {}
    for group in GROUPS:
        known = {key: option for option in OPTIONS[group] for key in option.keys}
        for key, value in recipe.get(group, {}).items():
            if key not in known:
                raise UserError(f"recipe {path}: unknown option {key} in [{group}]{did_you_mean(key, known)}")
            with as_user_error(f"recipe {path}"):
                values[known[key].dest] = known[key].from_toml(value)
    return values


def list_recipes(word: str = "") -> str:
    """Return the text of the recipe of this name, or a table of those that hold the word; UserError if none does."""
    paths = sorted(RECIPES_DIR.glob("*.toml"), key=lambda path: path.stem)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    if word in texts:
        return texts[word].rstrip()
    rows = [["recipe", "Acc@1", "title"]]
    for path in paths:
        if word.lower() in f"{path.stem}\n{texts[path.stem]}".lower():
            recipe = read_recipe(path)
            rows.append([path.stem, str(recipe.get("expected-acc1", "-")), recipe["title"]])
    if len(rows) == 1:
        raise UserError(f"--list-recipes {word}: no recipe contains this word{did_you_mean(word, texts)}")
    num_columns = shutil.get_terminal_size().columns
    lines = [line[:num_columns] for line in aligned(rows, range(len(rows[0])))]
    return "\n".join([*lines, "", "--list-recipes NAME prints a whole recipe with its source; --recipe NAME uses it"])
