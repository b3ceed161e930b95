"""What a resumed run may change."""

import os
import subprocess
import types
from pathlib import Path

import PIL
import pytest
import torch

import config
import options
from checkpointing import guard
from errors import UserError
from options import BY_NAME

FREE = {name for name, option in BY_NAME.items() if option.resume in (options.FREE, options.SILENT)}


def parse(*argv):
    """Return the options of a command line as a run has them, on one process of a machine without accelerator."""
    args = config.parse_args(["--data-path", "d", "--device", "cpu", "--workers", "0", *map(str, argv)])
    return args.replaced(rank=0, gpu=0, distributed=False, world_size=1, output_dir=args.output_dir or "runs/x")


def state_of(args, **environment):
    """Return what the guard reads of a checkpoint that a run with these options wrote."""
    args = types.SimpleNamespace(**vars(args))
    args.global_batch_size = args.global_batch_size or args.batch_size
    here = guard.describe_environment(args, "pillow")
    return {"args": vars(args), "environment": here | environment, "data": {"num_images": 9, "num_classes": 3}}


def check(theirs, ours, **environment):
    args = parse(*ours, "--resume", "auto")
    guard.check_options(state_of(parse(*theirs), **environment), args, "pillow")


def test_an_option_that_nobody_classified_is_refused(monkeypatch):
    new = options.Option("--workers", help="", type=int)
    monkeypatch.setitem(BY_NAME, "workers", new)
    with pytest.raises(UserError, match=r"workers 0 in the checkpoint, 3 now; .* --allow-change workers"):
        check([], ["--workers", 3])


def test_an_option_younger_than_the_checkpoint_is_refused_where_it_is_used():
    state = state_of(parse())
    del state["args"]["mixup_alpha"]
    guard.check_options(state, parse("--resume", "auto"), "pillow")
    with pytest.raises(UserError, match=r"mixup-alpha unknown in the checkpoint, 0\.2 now"):
        guard.check_options(state, parse("--resume", "auto", "--mixup-alpha", 0.2), "pillow")


def test_everything_that_differs_is_named_in_one_line_with_what_to_do():
    with pytest.raises(UserError) as caught:
        check([], ["--model", "resnet50", "--lr", 0.5, "--batch-size", 64, "--lr-scheduler", "cosineannealinglr"])
    for words in (
        "model resnet18 in the checkpoint, resnet50 now",
        "batch-size 32 in",
        "lr 0.1 in",
        "lr-scheduler steplr",
    ):
        assert words in str(caught.value)
    assert "model, batch-size cannot be changed: give the checkpoint's" in str(caught.value)
    assert str(caught.value).endswith(" give --allow-change lr,lr-scheduler")


@pytest.mark.parametrize("name", sorted(FREE - {"allow_change", "test_only", "list_recipes", "dry_run"}))
def test_what_is_free_may_change(name):
    args = parse("--resume", "auto")
    state = state_of(args)
    state["args"][name] = "another"
    if name == "device":
        state["args"][name] = "mps"
    guard.check_options(state, args, "pillow")


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - FREE))
def test_what_changes_numbers_may_not(name):
    extra = ["--model-ema"] if name == "epochs" else []
    args = parse("--resume", "auto", *extra)
    state = state_of(args)
    if name == "global_batch_size":
        args = args.replaced(global_batch_size=32)
    state["args"][name] = "another"
    if name in ("mean", "std"):  # else they are the checkpoint's
        args.given.append(name)
    with pytest.raises(UserError, match=f"{name.replace('_', '-')} another in the checkpoint"):
        guard.check_options(state, args, "pillow")


def test_more_epochs_are_free_where_no_rate_depends_on_them(capsys):
    check(["--epochs", 10], ["--epochs", 15])
    assert "epochs 10 in the checkpoint, 15 now" in capsys.readouterr().out
    for option in (["--lr-scheduler", "cosineannealinglr"], ["--lr-scheduler", "linearlr"], ["--model-ema"]):
        with pytest.raises(UserError, match=r"epochs 10 in the checkpoint, 15 now .* --allow-change epochs"):
            check(["--epochs", 10, *option], ["--epochs", 15, *option])
        check(["--epochs", 10, *option], ["--epochs", 15, *option, "--allow-change", "epochs"])
    assert "changed as --allow-change says: epochs 10 in the checkpoint, 15 now" in capsys.readouterr().out


def test_another_reference_batch_is_another_learning_rate():
    state = state_of(parse("--recipe", "resnet50-v2", "--lr-scaling", "linear"))
    state["args"]["reference_global_batch"] = 256
    args = parse("--recipe", "resnet50-v2", "--lr-scaling", "linear", "--resume", "auto")
    with pytest.raises(UserError, match=r"lr-scaling linear from 256 in the checkpoint, linear from 1024 now"):
        guard.check_options(state, args, "pillow")


def test_processes_and_threads_matter_where_sums_depend_on_them(capsys):
    check([], [], world_size=4, threads=99)
    assert "4 -> 1 process: same samples and augmentation; rounding may differ" in capsys.readouterr().out
    flag = ["--use-deterministic-algorithms"]
    check(flag, flag, world_size=4)
    assert "4 -> 1 process: same samples and augmentation; same bits" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"CPU threads \(OMP_NUM_THREADS\) 99 in the checkpoint, .* --allow-change thr"):
        check(flag, flag, threads=99)
    check(flag, [*flag, "--allow-change", "threads"], threads=99)
    with pytest.raises(UserError, match=r"world-size 4 in the checkpoint, 1 now; .* --allow-change world-size"):
        check(["--sync-bn"], ["--sync-bn"], world_size=4)


def test_the_packages_and_the_processor_are_recorded_and_their_upgrade_is_said(capsys):
    here = guard.describe_environment(parse(), "pillow")
    assert here["pillow"] == PIL.__version__
    assert here["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert not here.keys() & {"gpu", "cuda", "cudnn"}  # of no influence on --device cpu
    assert all(type(value) in (str, int, type(None)) for value in here.values())
    check([], [], pillow="1.0", cpu="ABACUS")
    assert f"pillow 1.0 wrote this checkpoint, this is {PIL.__version__}; cpu ABACUS" in capsys.readouterr().out
    timm = pytest.importorskip("timm")
    assert here["timm"] == timm.__version__


def test_the_revision_is_read_without_a_lock(tmp_path):
    """A lock that a kill leaves behind stops everybody who works in the repository."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("one")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    os.utime(tmp_path / "file", (0, 0))  # which makes git write its index anew, if it takes the lock
    index = (tmp_path / ".git" / "index").read_bytes()
    revision = guard.describe_revision(tmp_path)
    assert revision == subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    (tmp_path / "file").write_text("two")
    assert guard.describe_revision(tmp_path) == f"{revision}-dirty"
    assert (tmp_path / ".git" / "index").read_bytes() == index
    assert guard.describe_revision(Path("/")) is None


def test_other_versions_and_devices_are_said_and_what_is_not_promised_with_them(capsys):
    check([], [], torch="2.11.0", revision="abc")
    line = capsys.readouterr().out
    assert "torch 2.11.0 wrote this checkpoint, this is 2." in line
    assert "revision abc wrote this checkpoint" in line
    assert "promised" not in line
    flag = ["--use-deterministic-algorithms"]
    check([*flag, "--device", "cuda"], flag)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "options that changed: device cuda in the checkpoint, cpu now",
        "another kind of device: equal bits not promised",
    ]
    check(["--device", "cuda:1"], ["--device", "cuda:0"])
    assert capsys.readouterr().out == ""


class Images:
    classes = ("a", "b", "c")

    def __init__(self, count, fingerprint, **identity):
        self.count, self.print = count, fingerprint
        self.place = {"form": "tars", "path": "/data", "sizes": "s", "times": "t", "checksums": None} | identity

    def __len__(self):
        return self.count

    def fingerprint(self):
        return self.print

    def identity(self):
        return self.place


def check_data(theirs, ours, *argv):
    """Go on from a checkpoint of a (training, validation) pair of sets with another pair."""
    state = state_of(parse())
    state["data"] = guard.describe_data(*theirs)
    guard.check_data(state, parse("--resume", "auto", *argv), *ours)


def test_other_data_is_refused_and_other_names_are_on_request(capsys):
    train, val = Images(9, "aa"), Images(4, "vv")
    check_data((train, val), (train, val))
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match=r"num_images 9 in the checkpoint, 8 now; .* cannot be changed"):
        check_data((train, val), (Images(8, "bb"), val), "--allow-change", "data")
    with pytest.raises(UserError, match=r"data of train: fingerprint aa in .*, bb now: .* give --allow-change data"):
        check_data((train, val), (Images(9, "bb"), val))
    with pytest.raises(UserError, match=r"data of val: num_images 4 in .*, 5 now: .*; .* give --allow-change data"):
        check_data((train, val), (train, Images(5, "ww")))
    check_data((train, val), (Images(9, "bb"), val), "--allow-change", "data")
    assert "changed as --allow-change says: data of train: fingerprint aa" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "here", "outcome"),
    [
        ({}, {"sizes": "other"}, "refused"),
        ({}, {"sizes": "other", "path": "/elsewhere", "times": "other"}, "refused"),
        ({"checksums": "c"}, {"checksums": "other"}, "refused"),
        ({}, {"times": "other"}, "said"),
        ({"form": "folder", "sizes": None}, {"form": "folder", "sizes": None, "times": "other"}, "said"),
        ({}, {"times": "other", "path": "/elsewhere"}, "free"),
        ({"form": "folder", "sizes": None}, {"times": "other"}, "free"),
        ({}, {"form": "class tars", "sizes": "other", "times": "other"}, "free"),
        ({"checksums": "c"}, {}, "free"),
    ],
)
def test_sizes_are_compared_within_a_form_and_times_within_a_path(there, here, outcome, capsys):
    sets = [(Images(9, "aa"), Images(4, "vv", **place)) for place in (there, here)]
    if outcome == "refused":
        with pytest.raises(UserError, match=r"cannot resume .*: data of val: (sizes|checksums) "):
            check_data(*sets)
    else:
        check_data(*sets)
    assert ("data of val: /data: " in capsys.readouterr().out) == (outcome == "said")


def test_a_label_that_stands_for_another_class_is_refused(capsys):
    renamed = Images(9, "aa")
    renamed.classes = ("a", "c", "x")
    words = "2 of 3 classes have other names: class 1 is b in the checkpoint, c now"
    sets = (Images(9, "aa"), Images(4, "vv"))
    for train in (sets[0], None):
        with pytest.raises(UserError, match=words):
            check_data(sets, (train, renamed))
    capsys.readouterr()
    check_data(sets, (None, renamed), "--allow-change", "data")
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr,epoch", "--allow-change epoch: there is no such option; did you mean epochs?"),
        ("model", "--allow-change model: it cannot be changed, since its weights fit no other; another run can start"),
        ("batch-size", "--allow-change batch-size: it cannot be changed, since "),
        ("", "--allow-change is empty"),
    ],
)
def test_a_name_that_cannot_be_allowed_is_refused(text, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        parse("--resume", "auto", "--allow-change", text)


def test_names_are_taken_with_and_without_dashes():
    assert options.parse_allowed("--lr, wd ,lr_gamma,data") == {"lr", "weight_decay", "lr_gamma", "data"}
    assert options.parse_allowed(None) == set()


def test_a_permission_that_is_not_needed_is_said(capsys):
    check(["--lr", 0.3], ["--lr", 0.3, "--allow-change", "lr,workers,data"])
    assert capsys.readouterr().out == "--allow-change lr,workers: as in the checkpoint\n"


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("decode_device", "cpu", False),
        ("decode_device", "cuda", True),
        ("mixup_prob", 0.8, True),
        ("early_stop", 3, False),
    ],
)
def test_a_removed_option_is_refused_where_the_run_computed_other_numbers_with_it(name, value, is_refused):
    state = state_of(parse())
    state["args"][name] = value
    if is_refused:
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}, an option that was removed"):
            guard.check_options(state, parse(), "pillow")
    else:
        guard.check_options(state, parse(), "pillow")
