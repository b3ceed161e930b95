"""Every process is as rank 0, or none trains: for every option of the table rank 1 alone differs, and in all else."""

import json
import os
import random
import shlex
import shutil
import sys

import pytest
import torch

import data
from checkpointing import agreement
from errors import UserError
from settings import config
from settings.choices import TABLES
from settings.options import AS_TYPED, BY_NAME, OWN, SAME
from tests.endings import differing_results
from tests.images import pack_shards, run_pack
from tests.ranks import run_check, run_ranks, train_rank
from tests.started import SMALL, refused

# Two steps and an evaluation, in which each micro-batch is one process's.
BOTH = f"""
    {" ".join(SMALL)} --batch-size 4 --global-batch-size 8 --epochs 2 --print-freq 1 --lr 0.05 --limit-train-images 16
    --use-deterministic-algorithms
""".split()

# The words of rank 1 alone, where an entry does not tell them; and those of both ranks, each with its own RANK.
WORDS = {
    "recipe": "--recipe {folder}/same.toml", "list_recipes": "--list-recipes", "eval_data": "",
    "data_path": "--data-path {folder}/node-1", "cache": "--cache {folder}/cache", "workers": "--workers 2",
    "output_dir": "--output-dir {folder}/elsewhere", "device": "--device cpu:0", "cache_gib": "--cache-gib 3.0",
    "dist_url": "--dist-url tcp://127.0.0.1:9", "synthetic": "--synthetic 64", "multi_label": "--multi-label ,",
    "extensions": "--extensions .avif", "mean": "--mean 0.5 0.5 0.5", "std": "--std 0.5 0.5 0.5",
    "crop_ramp_epochs": "--crop-ramp-epochs 1 2", "model": "--model resnet18", "model_kwargs": "--model-kwargs depth=2",
    "weights": "--weights {folder}/weights.pth", "freeze_below": "--freeze-below fc", "global_batch_size":
    "--global-batch-size 16", "class_weights": "--class-weights {folder}/weights.csv", "teacher":
    "--teacher {folder}/weights.pth", "resume": "--resume auto", "allow_change": "--allow-change lr", "best_metric":
    "--best-metric acc5", "logger": "--logger none", "blur_prob": "--blur-prob 0.25", "opt_betas":
    "--opt-betas 0.25 0.5", "batch_size": "--batch-size 8", "auto_augment": "--auto-augment ta_wide",
    "minival": "--minival 0.25", "limit_train_images": "--limit-train-images 8", "limit_val_images":
    "--limit-val-images 3", "criterion": "--criterion focal", "lr_scaling": "--lr-scaling sqrt",
    "train_crop_size_min": "--train-crop-size-min 20", "lr_warmup_epochs": "--lr-warmup-epochs 1",
    "lr_cooldown_epochs": "--lr-cooldown-epochs 2",
}  # fmt: skip
NEEDED = {
    "eval_data": "--eval-data more={folder}/node-RANK/val", "workers": "--workers 1", "bce_target_thresh": "--bce-loss",
    "train_crop_size_min": "--train-crop-size-min 16 --crop-ramp-epochs 1 3",
    "crop_ramp_epochs": "--train-crop-size-min 16 --crop-ramp-epochs 1 3",
    "lr_scaling": "--lr-scaling linear --lr-scaling-batch 16",
    "lr_scaling_batch": "--lr-scaling linear --lr-scaling-batch 16",
    "lr_milestones": "--lr-scheduler multisteplr --lr-milestones 1",
    "lr_cooldown_epochs": "--lr-scheduler wsd --lr-cooldown-epochs 1",
    "allow_change": "--resume auto", "test_only": "--weights {folder}/weights.pth", "multi_label": "--bce-loss",
    "ema": "--weights {folder}/weights.pth", "distillation_temperature": "--teacher {folder}/weights.pth",
    "amp_dtype": "--amp --amp-dtype bfloat16", "minival_fold": "--minival 0.25",
}  # fmt: skip
# Those by which rank 1 ends before it joins, or is refused alone for what its model, data or device cannot do.
ALONE = {"list_recipes", "dry_run", "sync_bn", "multi_label", "grad_checkpointing"}

# Of options that no word of rank 1 shows.
SHOWN = {"list_recipes": "no --list-recipes from the command", "world_size": "--world-size 2 from the command"}


def words_of_both(folder, is_test=False):
    evaluation = ["--test-only", "--weights", f"{folder}/weights.pth"] * is_test
    return [*BOTH, "--data-path", f"{folder}/node-0", *evaluation]


def words_of(name, folder):
    """Return the words of both ranks, and those of rank 1, by the entry of an option and the two tables."""
    option, both = BY_NAME[name], words_of_both(folder)
    needed, _, values = option.needs.partition("=")
    if name in NEEDED:
        both += shlex.split(NEEDED[name].format(folder=folder))
    elif "without" in option.why_idle(config.parse_args(both)):
        first = needed.split("|")[0]
        both += [BY_NAME[first].flag, values.split("|")[0]] if values else words_of(first, folder)[1]
    if name in WORDS:
        return both, shlex.split(WORDS[name].format(folder=folder))
    default, kind = getattr(config.parse_args(both), name), option.type if isinstance(option.type, type) else str
    if kind is bool:
        return both, [f"--no-{option.name}" if default else option.flag]
    values = [value for value in option.choices or TABLES.get(name, ("", ()))[1] if value not in (default, [default])]
    for value in values or [kind(number) for number in (48, 3, 2, 1, 0.25)]:
        words = [option.flag, str(value), *([str(value + 1)] if option.nargs == 2 else [])]
        try:
            if getattr(config.parse_args([*both, *words]), name) != default:
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
    texts, real = {}, agreement.describe_environment
    for name, (both, mine, change) in cases.items():
        args = config.parse_args(argv_of(both, mine, rank))
        args = config.Resolved(**vars(args) | {"rank": rank, "world_size": 2, "distributed": True, "gpu": 0})
        other = change if rank else {}
        agreement.describe_environment = lambda args, other=other: {**real(args), **other}
        texts[name] = ""
        try:
            check(args)
        except UserError as error:
            texts[name] = str(error)
    (out / f"{rank}.json").write_text(json.dumps(texts))


def compare(cases, tmp_path, check=agreement.check_processes):
    """Return the refusal of each case, the same on both ranks, and rank 0's lines."""
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
    several = "--seed 5 --random-erase 0.5 --hflip-prob 0.0 --label-smoothing 0.3 --eval-flip --val-resize-size 40"
    several += " --lr 0.1 --weight-decay 0.5 --amp --epochs 7 --print-freq 2"
    recipe = folder / "slow.toml"
    recipe.write_text('[precision]\namp = true\namp-dtype = "bfloat16"\n')
    cases = {
        "several": (both, several.split(), {}),
        "given": (both, ["--seed", "0"], {}),
        "everything": (both, ["--recipe", "resnet50-v2"], {}),
        "its recipe's": (both, ["--recipe", str(recipe)], {}),
        # As where one processor has no instructions for bfloat16: rank 0's counts.
        "a processor's": ([*both, "--recipe", str(recipe)], ["--recipe", str(folder / "other.toml")], {}),
        "threads": (both, [], {"threads": 7}),
        "threads allowed": ([*both, "--resume", "auto", "--allow-change", "threads"], [], {"threads": 7}),
        "threads free": ([*both, "--no-use-deterministic-algorithms"], [], {"threads": 9}),
    }
    (folder / "other.toml").write_text('[precision]\namp = true\namp-dtype = "float32"\n')
    texts, output = compare(cases, tmp_path)
    shown = texts["several"].partition("rank 0: ")[2].partition(";")[0].split("), ")
    flags = [word for word in several.split() if word.startswith("--")]
    assert sorted(text.split()[0] for text in shown) == sorted(flags)
    assert "--seed 5 (rank 0: --seed 0), " in texts["several"]
    assert "--seed 0 from the command line (rank 0: --seed 0 by default)" in texts["given"]
    assert ", and " in texts["everything"]
    words = "--amp (rank 0: --no-amp), --amp-dtype from the recipe (rank 0: --amp-dtype by default)"
    assert words in texts["its recipe's"]
    assert (texts["a processor's"], texts["threads allowed"], texts["threads free"]) == ("", "", "")
    assert "7 threads (OMP_NUM_THREADS) (rank 0: 1 threads" in texts["threads"]
    said = [line for line in output.splitlines() if line.startswith("rank 1 computes otherwise than rank 0: ")]
    assert [line.split(" threads ")[0][-1] for line in said] == ["7", "9"]


def test_each_version_is_refused_and_each_machine_is_said_once(folder, tmp_path):
    both = words_of_both(folder)
    known = agreement.describe_environment(config.parse_args(both))
    assert {"torch", "torchvision", "decoder", "timm", "revision", "touchstone"} <= known.keys()
    texts, output = compare({name: (both, [], {name: "another"}) for name in [*known, "new"]}, tmp_path)
    machine = {"cpu", "gpu", "python"}
    for name in texts:
        shown = "another threads" if name == "threads" else f"{name} another"
        assert (texts[name] == "") == (name in machine), texts[name]
        assert f" {shown}" in (output if name in machine else texts[name])
    assert output.count("computes otherwise than rank 0") == len(machine & known.keys())


def rank_of(both, mine, places=None, prepare=()):
    """Train; rank 1 with more words, in a folder of its own, or after a call."""
    rank = int(os.environ["RANK"])
    if places:
        os.chdir(places[rank])
    train_rank(argv_of(both, mine, rank), (), prepare if rank else ())


def train_differing(tmp_path, both, mine, *more):
    return run_ranks(rank_of, 2, [*both, "--output-dir", str(tmp_path / "out")], mine, *more, log_folder=tmp_path)


SAMPLE = {*random.Random(56).sample(sorted(BY_NAME), 5), "dry_run", "output_dir"}


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SAMPLE)) for name in BY_NAME]
)
def test_a_run_whose_rank_1_has_another_option_is_refused_or_has_the_same_bits(folder, tmp_path, name):
    both, mine = words_of(name, folder)
    both += ["--dist-timeout", "0.05"] * (name in ALONE)
    outcome = train_differing(tmp_path, both, mine)
    if name in ALONE:
        assert outcome.codes[0] in (1, -15), outcome.output  # it has waited for the other, or was ended with it
    elif BY_NAME[name].ranks == OWN:
        plain = tmp_path / "plain"
        run_ranks(train_rank, 2, argv_of([*both, "--output-dir", str(plain)], [], 0), log_folder=tmp_path).check()
        assert outcome.codes == [0, 0], outcome.output
        assert differing_results(tmp_path / "out", plain) == []
        return
    else:
        refused(outcome, "rank 1 differs from rank 0: ", SHOWN.get(name, shlex.join(mine)))
    assert {path.name for path in tmp_path.glob("out/*")} <= {"status.json"}  # which says that it was refused


LOSS = """
from torch.nn import functional
from helper import FACTOR

def loss():
    return lambda output, target: FACTOR * functional.cross_entropy(output, target)

class Model(__import__("tests.tiny").tiny.Tiny):
    def __init__(self, **options):
        super().__init__(**options)
        if OWN:
            self.fc.bias.data[1] += int(__import__("os").environ["RANK"])
"""


def replace_version(name):
    sys.modules[name].__version__ = "0.9"


def on_another_machine(num_threads):
    torch.set_num_threads(num_threads)
    torch.backends.cpu.get_cpu_capability = lambda: "AVX1"


@pytest.fixture
def places(folder, tmp_path):
    """Two folders, as of two nodes, each with a file of own code and a module that it imports."""
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / "own.py").write_text(LOSS.replace("OWN", "False"))
        (tmp_path / f"node{rank}" / "helper.py").write_text("FACTOR = 1\n")
    return [tmp_path / f"node{rank}" for rank in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize("is_test", [False, True])
def test_another_version_of_own_code_or_of_what_it_imports_is_refused(folder, places, tmp_path, is_test):
    both = [*words_of_both(folder, is_test), "--criterion", "own.py:loss"]
    train_differing(tmp_path, both, [], places).check()
    (places[1] / "helper.py").write_text("FACTOR = 2\n")
    refused(train_differing(tmp_path, both, [], places), "rank 1 differs from", "the module helper of --criterion ")
    (places[1] / "own.py").write_text((places[1] / "own.py").read_text() + "\n")
    refused(train_differing(tmp_path, both, [], places), "the file of --criterion ", "the module helper of --criterion")


@pytest.mark.dist
def test_other_first_weights_are_refused_before_the_folder_is_claimed(folder, places, tmp_path):
    both = [*words_of_both(folder), "--model", "own.py:Model", "--model-ema"]
    for place in places:
        (place / "own.py").write_text(LOSS.replace("OWN", "True"))
    words = "rank 1 starts from other weights than rank 0: Model.fc.bias ", "(rank 0: Model.fc.bias "
    refused(train_differing(tmp_path, both, [], places), *words)
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.dist
@pytest.mark.parametrize("is_test", [False, True])
@pytest.mark.parametrize("name", ["torch", "torchvision", "PIL"])
def test_another_version_of_a_library_is_refused(folder, tmp_path, is_test, name):
    outcome = train_differing(tmp_path, words_of_both(folder, is_test), [], None, (replace_version, name))
    refused(outcome, "rank 1 differs from rank 0: ", "0.9")


@pytest.mark.dist
def test_another_machine_is_said_once_and_its_threads_are_refused_where_bits_are_promised(folder, tmp_path):
    both, other = words_of_both(folder), (on_another_machine, 2)
    refused(train_differing(tmp_path, both, [], None, other), "2 threads (OMP_NUM_THREADS) (rank 0: 1 threads")
    outcome = train_differing(tmp_path, [*both, "--no-use-deterministic-algorithms"], [], None, other).check()
    lines = [line for line in outcome.output.splitlines() if "computes otherwise than" in line]
    assert [("cpu AVX1 (rank 0: " in line, " 2 threads " in line) for line in lines] == [(True, True)]


def replace_image(place, path):
    shutil.copy(place / "train" / "class0" / "image000.jpg", place / path)


def change_content(place):
    """Change an image, but not its size, which shows in no name."""
    path = place / "train" / "class1" / "image003.jpg"
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))


def change_checksum(place):
    """Let a pack be one of other bytes, of the same sizes."""
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (place / "manifest.json").write_text(json.dumps(manifest))


def as_tars(place):
    pack_shards(place / "train", place)
    shutil.rmtree(place / "train")


def as_pack(place):
    run_pack(place, place / "pack", "--data-path", place, "--short-side", 32, "--workers", 1).check()
    for split in ("train", "val"):
        shutil.rmtree(place / split)
    for path in (place / "pack").iterdir():
        path.rename(place / path.name)


CHANGED, VAL = "train/class1/image003.jpg", "val/class0/image001.jpg"
# What rank 1 alone does, the form into which both then bring their images, what rank 1 does then, and the refusal.
IMAGES = {
    "an image of another size": (lambda place: replace_image(place, CHANGED), None, None, f"bytes of {CHANGED[6:]} "),
    "an image of val": (lambda place: replace_image(place, VAL), None, None, f"data of val: bytes of {VAL[4:]} "),
    "a missing image": (lambda place: (place / CHANGED).unlink(), None, None, "data of train: fingerprint "),
    "a class": (
        lambda place: [each.rename(f"{each}0") for each in place.glob("*/class1")],
        None,
        None,
        "train: classes ",
    ),
    "the form": (None, None, as_tars, "data of train: form tars (rank 0: data of train: form folder)"),
    "another size in a tar": (lambda place: replace_image(place, CHANGED), as_tars, None, "data of train: sizes "),
    "a checksum in a pack": (None, as_pack, change_checksum, "data of train: checksums "),
    "the content alone, which nobody sees": (change_content, None, None, ""),
    "nothing": (None, as_pack, None, ""),
}


def check_loaded(args):
    datasets = data.start_loading(args).datasets
    assert agreement.check_images(datasets) is datasets


def test_other_images_are_refused_by_what_is_known_of_them(image_folder, tmp_path):
    cases = {}
    for name, (before, form, after, _) in IMAGES.items():
        for rank in range(2):
            place = shutil.copytree(image_folder, tmp_path / name / str(rank))
            for change in (rank and before, form, rank and after):
                if change:
                    change(place)
        cases[name] = [*BOTH, "--data-path", f"{tmp_path}/{name}/RANK", "--output-dir", f"{tmp_path}/out"], [], {}
    texts, _ = compare(cases, tmp_path, check_loaded)
    for name, (*_, words) in IMAGES.items():
        assert words in texts[name], (name, texts[name])
        assert texts[name].startswith("rank 1 reads different images than rank 0: ") == (words != "")


@pytest.mark.dist
@pytest.mark.parametrize("is_test", [False, True])
def test_a_run_on_other_images_is_refused_in_evaluation_too(folder, image_folder, tmp_path, is_test):
    other = shutil.copytree(image_folder, tmp_path / "other")
    replace_image(other, VAL)
    both = words_of_both(folder, is_test)
    outcome = train_differing(tmp_path, both, ["--data-path", str(other)])
    refused(outcome, "rank 1 reads different images than rank 0: data of val: bytes of class0/image001.jpg ")
    more = ["--eval-data", f"more={folder}/node-1/val"]
    outcome = train_differing(tmp_path, [*both, *more], ["--eval-data", f"again={folder}/node-1/val"])
    refused(outcome, "rank 1 reads different images than rank 0: sets val more again (rank 0: sets val more); ")
