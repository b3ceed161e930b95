"""Every process is as rank 0, or none trains: for every option of the table rank 1 alone differs, and in all else."""

import json
import os
import random
import re
import shlex
import shutil
import sys
from functools import partial

import pytest

import data
from checkpointing import agreement
from errors import UserError
from settings import config
from settings.choices import TABLES
from settings.options import BY_NAME
from settings.rules import AS_TYPED, OWN, SAME
from settings.stages import Resolved
from tests.endings import differing_results
from tests.images import pack_shards, run_pack
from tests.ranks import run_check, run_ranks, some_slow, train_rank
from tests.started import SMALL, refused

# Two steps and an evaluation, in which each micro-batch is one process's.
BOTH = f"""
    {" ".join(SMALL)} --batch-size 4 --global-batch-size 8 --epochs 2 --print-freq 1 --lr 0.05 --limit-train-images 16
    --use-deterministic-algorithms
""".split()

# What rank 1 alone gives, where an entry does not tell it; and the words of both ranks, each with its own RANK.
WORDS = {
    "recipe": "{folder}/same.toml", "list_recipes": "", "data_path": "{folder}/node-1", "cache": "{folder}/cache",
    "workers": "2", "output_dir": "{folder}/elsewhere", "device": "cpu:0", "dist_url": "tcp://127.0.0.1:9",
    "multi_label": ",", "extensions": ".avif", "mean": "0.5 0.5 0.5", "std": "0.5 0.5 0.5", "model": "resnet18",
    "model_kwargs": "depth=2", "weights": "{folder}/weights.pth", "freeze_below": "fc", "opt_betas": "0.25 0.5",
    "class_weights": "{folder}/weights.csv", "teacher": "{folder}/weights.pth", "resume": "auto", "allow_change": "lr",
    "best_metric": "acc5", "train_crop_size_min": "20", "lr_warmup_epochs": "1", "lr_cooldown_epochs": "2",
}  # fmt: skip
NEEDED = {
    "eval_data": "--eval-data more={folder}/node-RANK/val", "workers": "--workers 1", "multi_label": "--bce-loss",
    "train_crop_size_min": "--train-crop-size-min 16 --crop-ramp-epochs 1 3",
    "crop_ramp_epochs": "--train-crop-size-min 16 --crop-ramp-epochs 1 3",
    "lr_scaling": "--lr-scaling linear --lr-scaling-batch 16",
    "lr_scaling_batch": "--lr-scaling linear --lr-scaling-batch 16",
    "lr_milestones": "--lr-scheduler multisteplr --lr-milestones 1",
    "lr_cooldown_epochs": "--lr-scheduler wsd --lr-cooldown-epochs 1",
    "test_only": "--weights {folder}/weights.pth", "ema": "--weights {folder}/weights.pth",
}  # fmt: skip
# Those by which rank 1 ends before it joins, or is refused alone for what its model, data or device cannot do.
ALONE = {"list_recipes", "dry_run", "sync_bn", "multi_label", "grad_checkpointing"}
SHOWN = {"list_recipes": "no --list-recipes from the command"}


def words_of_both(folder):
    return [*BOTH, "--data-path", f"{folder}/node-0"]


def words_of(name, folder):
    option, both = BY_NAME[name], words_of_both(folder)
    needed, _, values = option.needs.partition("=")
    if name in NEEDED:
        both += NEEDED[name].format(folder=folder).split()
    elif "without" in option.why_idle(config.parse_args(both).flat()):
        first = needed.split("|")[0]
        both += [BY_NAME[first].flag, values.split("|")[0]] if values else words_of(first, folder)[1]
    if name == "eval_data":
        return both, []
    if name in WORDS:
        return both, [option.flag, *WORDS[name].format(folder=folder).split()]
    default, kind = config.parse_args(both).flat()[name], option.type if isinstance(option.type, type) else str
    if kind is bool:
        return both, [f"--no-{option.name}" if default else option.flag]
    values = [value for value in option.choices or TABLES.get(name, ("", ()))[1] if value not in (default, [default])]
    for value in values or [kind(number) for number in (48, 3, 2, 1, 0.25)]:
        words = [option.flag, str(value), *([str(value + 1)] if option.nargs == 2 else [])]
        try:
            if config.parse_args([*both, *words]).flat()[name] != default:
                return both, words
        except UserError:
            continue
    raise AssertionError(name)


@pytest.fixture(scope="module")
def folder(image_folder, started, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    for name in ("node-0", "node-1"):
        shutil.copytree(image_folder, folder / name)
    shutil.copy(started.out / "checkpoint.pth", folder / "weights.pth")
    (folder / "weights.csv").write_text("class,weight\nclass0,1\nclass1,2\nclass2,3\n")
    (folder / "same.toml").write_text("[optimization]\nlr = 0.05\n")
    return folder


def argv_of(both, mine, rank):
    return [word.replace("RANK", str(rank)) for word in [*both, *(mine if rank else [])]]


def compare_each(rank, world_size, check, cases, out):
    """Note the refusal of each case by its name: words of both, words of rank 1, and rank 1's change of the machine."""
    texts, real = dict.fromkeys(cases, ""), agreement.describe_environment
    for name, (both, mine, change) in cases.items():
        args = config.parse_args(argv_of(both, mine, rank))
        args = Resolved.of(args.flat() | {"rank": rank, "world_size": 2, "is_launched": True, "gpu": 0})
        other = change if rank else {}
        agreement.describe_environment = lambda *groups, other=other: {**real(*groups), **other}
        try:
            check(args)
        except UserError as error:
            texts[name] = str(error)
    (out / f"{rank}.json").write_text(json.dumps(texts))


def compare(cases, tmp_path, check=agreement.check_processes):
    output = run_check(2, compare_each, tmp_path, check, cases, tmp_path).outputs[0]
    texts, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert texts == theirs
    return texts, output


def test_each_option_of_the_table_is_refused_by_name_or_may_differ(folder, tmp_path):
    cases = {name: (*words_of(name, folder), {}) for name in BY_NAME}
    texts, _ = compare(cases, tmp_path)
    follow = {"criterion": 2, "multi_label": 2, "lr_scaling_batch": 2, "in_chans": 3, "class_weights": 2, "teacher": 2}
    for name, (_, mine, _) in cases.items():
        text = texts[name]
        if BY_NAME[name].ranks == OWN:
            assert text == "", text
            continue
        assert text.startswith("rank 1 differs from rank 0: "), name
        assert f"{SHOWN.get(name, f'{shlex.join(mine)} (rank 0: ')}" in text, text
        assert text.count("(rank 0:") == follow.get(name, 1), text  # nothing else, but what follows from it
    assert {option.ranks for option in BY_NAME.values()} == {SAME, OWN, AS_TYPED}


def test_a_line_names_several_options_and_where_they_are_from_and_machines_choose_some(folder, tmp_path):
    both = words_of_both(folder)
    for name, kind in [("slow", "bfloat16"), ("other", "float32")]:
        (folder / f"{name}.toml").write_text(f'[precision]\namp = true\namp-dtype = "{kind}"\n')
    slow, other = (["--recipe", str(folder / f"{name}.toml")] for name in ("slow", "other"))
    several = "--hflip-prob 0.0 (rank 0: --hflip-prob 0.5), --seed 5 (rank 0: --seed 0), --amp (rank 0: --no-amp);"
    cases = {
        several: (both, "--seed 5 --hflip-prob 0.0 --amp".split(), {}),
        "--seed 0 from the command line (rank 0: --seed 0 by default)": (both, ["--seed", "0"], {}),
        ", and ": (both, ["--recipe", "resnet50-v2"], {}),  # more than a line names
        "--amp (rank 0: --no-amp), --amp-dtype from the recipe (rank 0: --amp-dtype by default)": (both, slow, {}),
    }
    allowed = {
        # As where one processor has no instructions for bfloat16: rank 0's counts.
        "a processor's": ([*both, *slow], other, {}),
        "threads": ([*both, "--resume", "auto", "--allow-change", "threads"], [], {"threads": 7}),
        "no promise of bits": ([*both, "--no-use-deterministic-algorithms"], [], {"threads": 5, "cpu": "AVX1"}),
    }
    texts, output = compare(cases | allowed, tmp_path)
    for words, text in texts.items():
        assert text == "" if words in allowed else words in text, (words, text)
    assert "rank 1 computes otherwise than rank 0: 7 threads (OMP_NUM_THREADS) (rank 0: 1 threads" in output
    lines = [line for line in output.splitlines() if "computes otherwise" in line and "cpu AVX1 (rank 0: " in line]
    assert [" 5 threads " in line for line in lines] == [True]


def test_each_version_is_refused_and_each_machine_is_said_once(folder, tmp_path):
    both = words_of_both(folder)
    args = config.parse_args(both)
    known = agreement.describe_environment(args.data, args.distributed)
    assert {"torch", "torchvision", "decoder", "timm", "revision", "touchstone"} <= known.keys()
    texts, output = compare({name: (both, [], {name: "another"}) for name in [*known, "new"]}, tmp_path)
    machine = {"cpu", "gpu", "python"}
    for name in texts:
        shown = "another threads" if name == "threads" else f"{name} another"
        assert (texts[name] == "") == (name in machine), texts[name]
        assert f" {shown}" in (output if name in machine else texts[name])
    assert output.count("computes otherwise than rank 0") == len(machine & known.keys())


def rank_of(both, mine, places=None, prepare=()):
    rank = int(os.environ["RANK"])
    if places:
        os.chdir(places[rank])
    train_rank(argv_of(both, mine, rank), (), prepare if rank else ())


def train_differing(tmp_path, both, mine, *more):
    return run_ranks(rank_of, 2, ["--output-dir", str(tmp_path / "out"), *both], mine, *more, log_folder=tmp_path)


SAMPLE = {*random.Random(56).sample(sorted(BY_NAME), 2), "dry_run", "output_dir"}


@pytest.mark.dist
@pytest.mark.parametrize("name", some_slow(BY_NAME, BY_NAME.keys() - SAMPLE))
def test_a_run_whose_rank_1_has_another_option_is_refused_or_has_the_same_bits(folder, tmp_path, name):
    both, mine = words_of(name, folder)
    outcome = train_differing(tmp_path, both + ["--dist-timeout", "0.05"] * (name in ALONE), mine)
    if name in ALONE:
        assert outcome.codes[0] in (1, -15), outcome.output  # it has waited for the other, or was ended with it
    elif BY_NAME[name].ranks == OWN:
        train_differing(tmp_path, [*both, "--output-dir", str(tmp_path / "plain")], []).check()
        assert outcome.codes == [0, 0], outcome.output
        assert differing_results(tmp_path / "out", tmp_path / "plain") == []
        return
    else:
        refused(outcome, "rank 1 differs from rank 0: ", SHOWN.get(name, shlex.join(mine)))
    assert {path.name for path in tmp_path.glob("out/*")} <= {"status.json"}  # which says that it was refused


OWN_CODE = """
import os
from helper import FACTOR, SHIFT
from tests.tiny import Tiny
from torch.nn import functional

def loss():
    return lambda output, target: FACTOR * functional.cross_entropy(output, target)

class Model(Tiny):
    def __init__(self, **options):
        super().__init__(**options)
        self.fc.bias.data[1] += SHIFT * int(os.environ["RANK"])
"""


@pytest.fixture
def places(tmp_path):  # as of two nodes
    places = [tmp_path / f"node{rank}" for rank in range(2)]
    for place in places:
        place.mkdir()
        (place / "own.py").write_text(OWN_CODE)
        (place / "helper.py").write_text("FACTOR, SHIFT = 1, 0\n")
    return places


def replace_versions():
    for name in ("torch", "torchvision", "PIL"):
        sys.modules[name].__version__ = "0.9"


@pytest.mark.dist
def test_other_own_code_or_what_it_imports_or_libraries_are_refused(folder, places, tmp_path):
    both = [*words_of_both(folder), "--criterion", "own.py:loss"]
    train_differing(tmp_path, both, [], places).check()
    (places[1] / "helper.py").write_text("FACTOR, SHIFT = 2, 0\n")
    refused(train_differing(tmp_path, both, [], places), "rank 1 differs from", "the module helper of --criterion ")
    (places[1] / "own.py").write_text(OWN_CODE + "\n")
    outcome = train_differing(tmp_path, both, [], places, (replace_versions,))
    refused(outcome, "the file of --criterion ", "the module helper of ", " torch 0.9 ", " torchvision 0.9 ", "0.9 3")


@pytest.mark.dist
def test_other_first_weights_are_refused_before_the_folder_is_claimed(folder, places, tmp_path):
    for place in places:
        (place / "helper.py").write_text("FACTOR, SHIFT = 1, 1\n")
    both = [*words_of_both(folder), "--model", "own.py:Model", "--model-ema"]
    words = "rank 1 starts from other weights than rank 0: Model.fc.bias ", "(rank 0: Model.fc.bias "
    refused(train_differing(tmp_path, both, [], places), *words)
    assert not (tmp_path / "out" / "run.json").exists()


CHANGED, VAL = "train/class1/image003.jpg", "val/class0/image001.jpg"


def alter(place, path=CHANGED, kept=None):
    (place / path).write_bytes((place / path).read_bytes()[:kept] + bytes(4))


def rename_class(place):
    for path in [*place.glob("*/class1")]:
        path.rename(f"{path}0")


def change_checksums(place):
    path = place / "manifest.json"
    path.write_text(re.sub(r'"sha256": "\w+"', f'"sha256": "{"0" * 64}"', path.read_text()))


def as_tars(place):
    pack_shards(place / "train", place)
    shutil.rmtree(place / "train")


def as_pack(place):
    made = place.parent / "pack"
    run_pack(place.parent, made, "--data-path", place, "--short-side", 32, "--workers", 1).check()
    shutil.rmtree(place)
    made.rename(place)


# What rank 1 alone does, the form into which both then bring their images, what rank 1 does then, and the refusal.
IMAGES = {
    "another size": (alter, None, None, f"bytes of {CHANGED[6:]} "),
    "an image of val": (partial(alter, path=VAL), None, None, f"data of val: bytes of {VAL[4:]} "),
    "a missing image": (lambda place: (place / CHANGED).unlink(), None, None, "data of train: fingerprint "),
    "a class": (rename_class, None, None, "train: classes "),
    "the form": (None, None, as_tars, "data of train: form tars (rank 0: data of train: form folder)"),
    "another size in a tar": (alter, as_tars, None, "data of train: sizes "),
    "a checksum in a pack": (None, as_pack, change_checksums, "data of train: checksums "),
    "the content alone, which nobody sees": (partial(alter, kept=-4), None, None, ""),
    "nothing": (None, as_pack, None, ""),
}


def check_loaded(args):
    datasets = data.start_loading(args).datasets
    assert agreement.check_images(datasets) is datasets


def test_other_images_are_refused_by_what_is_known_of_them(image_folder, tmp_path):
    cases = {}
    for name, (before, form, after, _) in IMAGES.items():
        places = [shutil.copytree(image_folder, tmp_path / name / str(rank)) for rank in range(2)]
        for place, change in [(places[1], before), (places[0], form), (places[1], form), (places[1], after)]:
            if change:
                change(place)
        ours, theirs = [["--data-path", str(place)] for place in places]
        cases[name] = [*BOTH, *ours, "--output-dir", str(tmp_path / "out")], theirs, {}
    texts, _ = compare(cases, tmp_path, check_loaded)
    for name, (*_, words) in IMAGES.items():
        assert words in texts[name], (name, texts[name])
        assert texts[name].startswith("rank 1 reads different images than rank 0: ") == (words != "")


@pytest.mark.dist
def test_a_run_on_other_images_is_refused_in_evaluation_too(folder, image_folder, tmp_path):
    other = shutil.copytree(image_folder, tmp_path / "other")
    alter(other, VAL)
    both = [*words_of_both(folder), "--test-only", "--weights", f"{folder}/weights.pth"]
    outcome = train_differing(tmp_path, both, ["--data-path", str(other)])
    refused(outcome, "rank 1 reads different images than rank 0: data of val: bytes of class0/image001.jpg ")
    both, theirs = [["--eval-data", f"{name}={folder}/node-1/val"] for name in ("more", "again")]
    outcome = train_differing(tmp_path, [*words_of_both(folder), *both], theirs)
    refused(outcome, "rank 1 reads different images than rank 0: sets val more again (rank 0: sets val more); ")
