"""Every option of torchvision's train.py does here what it does there, on one process and on two, or the pages say it.

torchvision_options.json is the table: each command's result there, from running torchvision's script (release 0.21),
and `here` where ours differs, with words of the page that states it. `python -m tests.torchvision_options` writes it.
"""

import os
import re
from pathlib import Path

import pytest

import train
from tests import torchvision_options
from tests.ranks import REPOSITORY
from tests.torchvision_options import TABLE, differences

COMMANDS = TABLE["commands"]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *REPOSITORY.glob("docs/*.md")]


def test_the_table_has_each_option_on_one_process_and_on_two():
    options = {flag: action.dest for action in train.get_args_parser()._actions for flag in action.option_strings}
    assert len(TABLE["options"]) > 50
    assert options.keys() >= {*TABLE["options"]}
    for processes in "12":
        words = [word for name in COMMANDS if name[0] == processes for word in re.split("[ =]", name[3:])]
        given = {options.get(word) for word in words}  # beside those of BASE
        assert [flag for flag in TABLE["options"] if options[flag] not in given] == []


def test_each_difference_is_stated_and_what_is_drawn_has_a_test_of_its_own():
    pages = " ".join(" ".join(page.read_text() for page in PAGES).split())
    for name, row in COMMANDS.items():
        assert ("here" in row) == ("stated" in row), name
        assert row.get("stated", "") in pages, name
        file, _, function = row.get("draws", "").partition("::")
        assert not file or f"def {function}(" in Path(__file__).with_name(file).read_text(), name


@pytest.mark.parametrize("processes", [1, 2])
def test_options_do_what_the_table_says(tmp_path, processes):
    found = torchvision_options.run_all(REPOSITORY, tmp_path, (processes,))
    for name, runs in found.items():
        here = COMMANDS[name].get("here", [{}] * len(runs))
        pairs = zip(COMMANDS[name]["there"], here, strict=True)
        expected = [ours if "refused" in {*there, *ours} and ours else {**there, **ours} for there, ours in pairs]
        assert differences(runs, expected, COMMANDS[name]) == [{}] * len(runs), name


def test_the_table_is_torchvisions(tmp_path):
    folder = os.environ.get("TORCHVISION_REFERENCES")
    if not folder:
        pytest.skip("TORCHVISION_REFERENCES names no folder references/classification of torchvision")
    assert torchvision_options.read_options(folder) == TABLE["options"]
    for name, runs in torchvision_options.run_all(Path(folder), tmp_path).items():
        assert differences(runs, COMMANDS[name]["there"], COMMANDS[name]) == [{}] * len(runs), name
