"""A script written for torchvision's references/classification runs on our folder, and means the same there.

EXPECTED was recorded from torchvision's own folder (release 0.21). Where the environment variable
TORCHVISION_REFERENCES names such a folder, the script runs there as well and is compared with it step by step. On two
processes it cannot: torchvision's folder needs a GPU for each.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data.distributed import DistributedSampler

from tests import torchvision_script
from tests.images import write_images
from tests.ranks import REPOSITORY, run_ranks

# fmt: off
EXPECTED = {
    "parser_defaults": {"parser": True, "model": "resnet18", "batch_size": 32, "epochs": 90, "opt": "sgd", "lr": 0.1,
     "momentum": 0.9, "weight_decay": 0.0001, "norm_weight_decay": None, "bias_weight_decay": None,
     "transformer_embedding_decay": None, "label_smoothing": 0.0, "mixup_alpha": 0.0, "cutmix_alpha": 0.0,
     "lr_scheduler": "steplr", "lr_warmup_epochs": 0, "lr_warmup_method": "constant", "lr_warmup_decay": 0.01,
     "lr_step_size": 30, "lr_gamma": 0.1, "lr_min": 0.0, "print_freq": 10, "resume": "", "start_epoch": 0,
     "cache_dataset": False, "sync_bn": False, "test_only": False, "auto_augment": None, "ra_magnitude": 9,
     "augmix_severity": 3, "random_erase": 0.0, "amp": False, "world_size": 1, "dist_url": "env://", "model_ema":
     False, "model_ema_steps": 32, "model_ema_decay": 0.99998, "use_deterministic_algorithms": False, "interpolation":
     "bilinear", "val_resize_size": 256, "val_crop_size": 224, "train_crop_size": 224, "clip_grad_norm": None,
     "ra_sampler": False, "ra_reps": 3, "weights": None, "use_v2": False, "data_path": "images", "device": "cuda",
     "workers": 16, "output_dir": ".", "backend": "pil"},
    "parser_is_a_parent": ["mine", 7, 0, 0.5, "sgd"],
    "load_data_returns": [28, 12, 28, 12, [True, True], [True, True]],
    "datasets_know_their_images": {"classes": ["class0", "class1", "class2", "class3", "class4", "class5"],
     "class_to_idx": {"class0": 0, "class1": 1, "class2": 2, "class3": 3, "class4": 4, "class5": 5}, "last":
     ["class5/image003.jpg", 5], "samples": [28, "list", "tuple"], "path": "str", "imgs": True, "targets": [[0, 0, 0,
     0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]],
     "root": True, "transform": ["ClassificationPresetTrain", "ClassificationPresetEval"], "target_transform": None},
    "datasets_give_floats": ["torch.float32", [3, 32, 32], "int", 0, True, ["torch.float32", [3, 32, 32], -0.24,
     -0.11], 1],
    "datasets_take_another_transform": [["torch.float32", [3, 32, 40], 0.393, 0.198], "ToTensor"],
    "plain_loader num_workers=0": {"train": [7, "torch.float32", [4, 3, 32, 32], "torch.int64"], "normalised": True,
     "labels": [[0, 6], [1, 5], [2, 5], [3, 4], [4, 4], [5, 4]], "test": [3, [[5, 3, 32, 32], [5, 3, 32, 32], [2, 3,
     32, 32]]], "test_labels": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "test_mean": -0.268},
    "plain_loader num_workers=2": {"train": [7, "torch.float32", [4, 3, 32, 32], "torch.int64"], "normalised": True,
     "labels": [[0, 6], [1, 5], [2, 5], [3, 4], [4, 4], [5, 4]], "test": [3, [[5, 3, 32, 32], [5, 3, 32, 32], [2, 3,
     32, 32]]], "test_labels": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "test_mean": -0.268},
    "training_orders_differ": [True, True],
    "loaders_of_other_kinds": [[[4, 3, 32, 32], 7], [[4, 3, 32, 32], 2], [[2, 3, 32, 32], 2], [[8, 3, 32, 32], 3],
     [[3, 3, 32, 32], 2]],
    "load_data_with_published_weights": [28, ["torch.float32", [3, 224, 224], -0.24, -0.11]],
    "evaluate_returns_a_float": ["float", 16.667, True, [["", True]], False],
    "evaluate_an_image_folder": "float",
    "train_one_epoch_alone": [None, 39.8174, True, ["0", "1", "2"], ["eta", "lr", "loss", "acc1", "acc5", "time",
     "data"], None],
    "train_one_epoch_alone clip_grad_norm=0.1": [None, 39.9219, True, ["0", "1", "2"], ["eta", "lr", "loss", "acc1",
     "acc5", "time", "data"], None],
    "train_one_epoch_alone model_ema=True": [None, 39.8174, True, ["0", "1", "2"], ["eta", "lr", "loss", "acc1",
     "acc5", "time", "data"], [2, 39.9099]],
    "train_one_epoch_alone scaler=disabled": [None, 39.8174, True, ["0", "1", "2"], ["eta", "lr", "loss", "acc1",
     "acc5", "time", "data"], None],
    "train_one_epoch_in_warmup": 0,
    "own_loop": [["float", "float", "float", "float"], 0.0001, {"keys": ["model", "optimizer", "epoch", "args",
     "lr_scheduler", "model_ema"], "epoch": 1, "n_averaged": 2}],
    "smoothed_value": [{"median": 2.0, "avg": 3.75, "global_avg": 4.428571428571429, "max": 8.0, "value": 8.0,
     "total": 31.0, "count": 7}, [1.0, 4.0, 2.0, 8.0], "2.0000 (4.4286)", "8.0 5.00 8"],
    "metric_logger": {"lines": ["Part:  [0/5]  eta: T  lr: 0.1  loss: N (N)  acc1: N (N)  time: N  data: N",
     "Part:  [2/5]  eta: T  lr: 0.1  loss: N (N)  acc1: N (N)  time: N  data: N",
     "Part:  [4/5]  eta: T  lr: 0.1  loss: N (N)  acc1: N (N)  time: N  data: N", "Part: Total time: T"], "meters":
     {"loss": 3.0, "lr": 0.1, "acc1": 36.666666666666664}, "attribute": 36.666666666666664, "names": ["acc1", "loss",
     "lr"], "text": "lr: 0.1  loss: 3.0000 (3.0000)  acc1: 30.0000 (36.6667)", "missing": "AttributeError"},
    "accuracies": ["list", [50.0, 75.0, 50.0, 50.0], ["torch.float32", 0]],
    "mkdirs": True,
    "process_words": [False, 1, [False, 1, 0, True]],
    "init_with_a_small_namespace": False,
    "reductions": [["Tensor", 3], ["Tensor", 2.5], ["Tensor", [1, 2]], ["Tensor", [0.5, 4.0]]],
    "save_on_master": [3, 4],
    "setup_for_distributed": ["plain forced ", "forced "],
    "weight_decays": {"plain": [["params", "weight_decay"], [62, "conv1.weight", "fc.bias", 0.0001]], "norm":
     [["params", "weight_decay"], [22, "conv1.weight", "fc.bias", 0.0001], [40, "bn1.weight", "layer4.1.bn2.bias",
     0.0]], "norm, positional": [["params", "weight_decay"], [22, "conv1.weight", "fc.bias", 0.0001], [40,
     "bn1.weight", "layer4.1.bn2.bias", 0.5]], "bias": [["params", "weight_decay"], [41, "conv1.weight", "fc.weight",
     0.0001], [21, "bn1.bias", "fc.bias", 0.1]], "bias and norm": [["params", "weight_decay"], [21, "conv1.weight",
     "fc.weight", 0.0001], [20, "bn1.weight", "layer4.1.bn2.weight", 0.2], [21, "bn1.bias", "fc.bias", 0.1]], "path":
     [["params", "weight_decay"], [61, "conv1.weight", "fc.bias", 0.0001], [1, "layer1.0.conv1.weight",
     "layer1.0.conv1.weight", 0.3]], "classes": [["params", "weight_decay"], [60, "conv1.weight", "layer4.1.bn2.bias",
     0.0001], [2, "fc.weight", "fc.bias", 0.0]], "frozen": [["params", "weight_decay"], [61, "bn1.weight", "fc.bias",
     0.0001]], "embedding": [["params", "weight_decay"], [21, "conv_proj.weight", "heads.head.bias", 0.3], [10,
     "encoder.layers.encoder_layer_0.ln_1.weight", "encoder.ln.bias", 0.0], [1, "class_token", "class_token", 0.0]]},
    "moving_average": {"values": [[1.0, 1.0, 1], [1.25, 1.25, 2], [2.4375, 2.4375, 3]], "kind": [True, True], "keys":
     ["n_averaged", "module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias", "module.1.running_mean",
     "module.1.running_var", "module.1.num_batches_tracked"], "loaded": 2.4375, "output": [3, 1]},
    "averages": {"keys": [["model", "epoch"], ["weight", "count", "half"]], "epoch": 5, "model": {"weight":
     ["torch.float32", [3.0, 3.0]], "count": ["torch.int64", 7], "half": ["torch.float32", [1.0]]}, "other":
     "KeyError"},
    "stored_weights": {"model": ["str", True, True, ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean",
     "1.running_var", "1.num_batches_tracked", "5.weight", "5.bias"], 237.1172], "model_ema": ["str", True, True,
     ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
     "5.weight", "5.bias"], 39.9502], "aux": ["str", True, True, ["0.weight", "0.bias", "1.weight", "1.bias",
     "1.running_mean", "1.running_var", "1.num_batches_tracked", "5.weight", "5.bias"], 237.1172], "strict":
     "RuntimeError", "same model": True, "files": 4},
    "presets_on_an_image": {"eval": ["torch.float32", [3, 32, 32], -0.139, -0.025], "eval, 224": ["torch.float32", [3,
     224, 224], -0.133, -0.025], "train": ["torch.float32", [3, 24, 24], -0.184, -0.125], "no flip": ["torch.float32",
     [3, 24, 24], -0.184, -0.058], "flip": ["torch.float32", [3, 24, 24], -0.184, -0.125], "bicubic": ["torch.float32",
     [3, 24, 24], -0.184, -0.126], "mean": ["torch.float32", [3, 24, 24], -0.181, -0.106], "pil": ["torch.float32", [3,
     24, 24], -0.184, -0.125], "tensor": ["torch.float32", [3, 24, 24], -0.183, -0.125], "positional": "TypeError",
     "backend": "ValueError"},
    "presets_augment": {"ra": ["torch.float32", [3, 24, 24]], "ta_wide": ["torch.float32", [3, 24, 24]], "augmix":
     ["torch.float32", [3, 24, 24]], "imagenet": ["torch.float32", [3, 24, 24]], "cifar10": ["torch.float32", [3, 24,
     24]], "erased": True},
    "presets_of_version_2": [["torch.float32", [3, 32, 32], -0.139, -0.025], "Tensor", ["torch.float32", [3, 24, 24]],
     "Tensor"],
    "presets_in_an_image_folder": ["torch.float32", [4, 3, 24, 24], True, "torch.int64", [-0.139, -0.473, -0.198,
     -0.24]],
    "modules_of_versions": ["torchvision.transforms", "torchvision.transforms.v2"],
    "mixup": [{"image": ["torch.float32", [4, 3, 16, 16]], "target": ["torch.float32", [4, 6]], "rows": [1.0, 1.0,
     1.0, 1.0], "mixed": "blended", "given": True}, True, 6, 1.0, 0.8,
     "RandomMixUp(num_classes=6, p=1.0, alpha=0.8, inplace=False)"],
    "cutmix": [{"image": ["torch.float32", [4, 3, 16, 16]], "target": ["torch.float32", [4, 6]], "rows": [1.0, 1.0,
     1.0, 1.0], "mixed": "cut", "given": True}, True, 6, 1.0, 1.0,
     "RandomCutMix(num_classes=6, p=1.0, alpha=1.0, inplace=False)"],
    "mixing_never": [[True, True, "torch.float32"], [True, True, "torch.float32"]],
    "mixing_sometimes": [True, 0.5, 1.0],
    "mixing_refuses": {"RandomMixUp": ["ValueError", "ValueError", "ValueError", "ValueError", "TypeError",
     "TypeError"], "RandomCutMix": ["ValueError", "ValueError", "ValueError", "ValueError", "TypeError", "TypeError"]},
    "mixing_in_place": [True, True],
    "mixup_or_cutmix": [["blended", "cut"], [True, ["blended", "cut"], None], ["blended", "cut"], [True, ["blended",
     "cut"], None]],
    "mixed_loader": [7, ["torch.float32", [4, 3, 32, 32]], ["torch.float32", [4, 6]], 4.0],
    "repeated_augmentation": {"rank 0": [256, 256, [172, 172, 137, 235, 235, 159, 195, 195], [168, 168, 179, 433, 433,
     55, 190, 190], ["1e3ededf", "ca1f9888"]], "rank 1": [256, 256, [172, 137, 137, 235, 159, 159, 195, 269], [168,
     179, 179, 433, 55, 55, 190, 176], ["f074e726", "3054a49a"]], "seed": [256, 256, [362, 165, 165, 39, 391, 391, 364,
     80], [355, 125, 125, 9, 323, 323, 90, 216], ["304bc96c", "7a3ede6c"]], "in order": [256, 256, [0, 1, 1, 2, 3, 3,
     4, 5], [0, 1, 1, 2, 3, 3, 4, 5], ["fa596896", "fa596896"]], "twice": [256, 256, [296, 302, 15, 221, 357, 447, 352,
     541], [670, 565, 628, 753, 627, 629, 286, 12], ["fd963118", "7b13ba9f"]], "alone": [256, 256, [172, 55, 225, 105,
     47, 214, 183, 140], [168, 43, 227, 101, 246, 215, 198, 143], ["9877f64c", "307e0ee7"]]},
    "repeated_augmentation_cut": [256, 256, [44, 471, 471, 29, 537, 537, 191, 294], [48, 568, 568, 517, 558, 558, 138,
     229], ["8bde4b71", "fd3bd3cd"]],
    "repeated_augmentation_in_a_loader": [[100, 100, 56], [0, 0, 1, 2, 2, 3, 4, 4, 5], [2, 0, 3, False, 0], True],
    "quantization_aware_training": [["float", "float"], True, 0, ["model", "eval_model", "optimizer", "lr_scheduler",
     "epoch", "args"]],
    "quantization_after_training": ["float", "float"],
    "main_trains": [None, [["", True]], ["0", "0", "7"], {"keys": ["model", "optimizer", "epoch", "args",
     "lr_scheduler"], "epoch": 0}],
    "main_resumes": [["1"], [["", True]], {"keys": ["model", "optimizer", "epoch", "args", "lr_scheduler"], "epoch":
     1}],
    "main_tests_only": [None, [["", True]], False],
    "main_with_much": [[["", True], ["EMA", True], ["", True], ["EMA", True]], {"keys": ["model", "optimizer",
     "epoch", "args", "lr_scheduler", "model_ema"], "epoch": 1, "n_averaged": 4}],
}
# fmt: on

# Where our result is meant to be another one: at which place of a step's result, what it is, and why.
STATED = [
    ("parser_defaults", ["device"], None),  # the accelerator that is there, else the CPU
    ("parser_defaults", ["workers"], None),  # 16, but no more than cores
    ("parser_defaults", ["output_dir"], None),  # runs/<model>, not the current folder
    ("parser_defaults", ["backend"], None),  # a faster way, within one grey level
    # Schedules are functions of the position: nothing of them is saved.
    ("main_trains", [3, "keys"], ["model", "optimizer", "epoch", "args"]),
    ("main_resumes", [2, "keys"], ["model", "optimizer", "epoch", "args"]),
    ("main_with_much", [1, "keys"], ["model", "optimizer", "epoch", "args", "model_ema"]),
    # Equal weights have one name; there it depends on that of a temporary file too.
    ("stored_weights", ["files"], 3),
    # An epoch has as many samples as the set has images: no multiple of 256.
    ("repeated_augmentation_cut", [0], 300),
    ("repeated_augmentation_cut", [1], 300),
]

# Whose numbers are means of pixels: one grey level is 1 / 255 / 0.224.
OF_PIXELS = ("datasets_", "load_data", "plain_loader", "presets_")
GREY_LEVEL = 0.018


def is_same(result, expected, tolerance):
    """Tell whether two results are the same, numbers within the tolerance."""
    if isinstance(expected, float) and isinstance(result, float):
        return result == pytest.approx(expected, rel=1e-4, abs=tolerance)
    if type(result) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(result) == list(expected) and is_same(list(result.values()), list(expected.values()), tolerance)
    if isinstance(expected, list):
        pairs = zip(result, expected, strict=False)
        return len(result) == len(expected) and all(is_same(*pair, tolerance) for pair in pairs)
    return result == expected


def check_step(step, results, expected):
    assert step in results, f"the script did not come to {step}: {list(results)[-1:]}"
    result = results[step]
    if isinstance(result, str) and result.startswith("failed: "):
        pytest.fail(result)
    tolerance = GREY_LEVEL if step.startswith(OF_PIXELS) else 0.0
    assert is_same(result, expected[step], tolerance), f"{result}\nand not\n{expected[step]}"


def read_steps(text):
    """Return the results of a script's steps, by name; text where a step failed."""
    lines = [line.removeprefix("step ").split(": ", 1) for line in text.splitlines() if line.startswith("step ")]
    return {name: result if result.startswith("failed: ") else json.loads(result) for name, result in lines}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """28 training images, seven batches of four, and 12 of validation, of six classes."""
    return write_images(tmp_path_factory.mktemp("six"), {"train": [6, 5, 5, 4, 4, 4], "val": [2] * 6})


def run_script(folder, images, out):
    command = [sys.executable, "-W", "ignore", torchvision_script.__file__, str(folder), str(images), str(out)]
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=out, env=environment)
    return done, read_steps(done.stdout)


@pytest.fixture(scope="module")
def ours(images, tmp_path_factory):
    """The script's process on our folder, and the results of its steps."""
    return run_script(REPOSITORY, images, tmp_path_factory.mktemp("ours"))


def test_script_runs_wholly(ours):
    done, results = ours
    failed = [f"{step}: {text}" for step, text in results.items() if str(text).startswith("failed: ")]
    assert not failed, "\n".join(failed)
    assert (done.returncode, list(results)) == (0, list(EXPECTED)), done.stderr


@pytest.mark.parametrize("step", EXPECTED)
def test_step_means_the_same(step, ours):
    expected = copy.deepcopy(EXPECTED)
    for name, (*path, last), value in STATED:
        place = expected[name]
        for key in path:
            place = place[key]
        assert place[last] != value, f"{name} has no difference to state"
        place[last] = value
    check_step(step, ours[1], expected)


def test_expected_is_torchvisions(images, tmp_path):
    folder = os.environ.get("TORCHVISION_REFERENCES")
    if not folder:
        pytest.skip("TORCHVISION_REFERENCES names no folder references/classification of torchvision")
    done, results = run_script(Path(folder), images, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in EXPECTED:
        check_step(step, results, EXPECTED)


def run_on_two(part, images, tmp_path):
    """Run a part of the script on two processes; return what each reported."""
    arguments = (str(REPOSITORY), str(images), str(tmp_path / "out"), part)
    outcome = run_ranks(torchvision_script.main, 2, *arguments, log_folder=tmp_path)
    return [read_steps(text) for text in outcome.check().outputs]


@pytest.fixture(scope="module")
def two(images, tmp_path_factory):
    """Results of the script's steps on two processes."""
    return run_on_two("ranks", images, tmp_path_factory.mktemp("two"))


def test_two_processes_join_print_and_save_as_there(two):
    for rank, results in enumerate(two):
        assert results["ranks_join"] == [True, 2, True, 2]
        assert results["ranks_print"] == ("plain forced ", "forced ")[rank]
        assert results["ranks_reduce"] == [[3, [1, 20], 0.5, [3.0, 1.0]], [4, 12.0, 3.0], 15.0]
        assert results["ranks_save"] == 0


def test_two_processes_share_an_epoch_as_torchs_sampler_deals_it(two):
    for rank, results in enumerate(two):
        sampled = results["ranks_sample"]
        for epoch, images in enumerate(sampled["epochs"]):
            sampler = DistributedSampler(range(28), num_replicas=2, rank=rank)
            sampler.set_epoch(epoch)
            # Stated: whole steps of 2 x 4, where torchvision's last batch has two images.
            assert images == list(sampler)[:12]
        assert sampled["shapes"] == [[4, 3, 32, 32]] * 3
        folders = [label for label, count in enumerate([6, 5, 5, 4, 4, 4]) for _ in range(count)]
        assert sampled["labels"] == [folders[image] for image in sampled["epochs"][1]]
        assert results["ranks_repeat"][:2] == [2, True]
        assert results["ranks_repeat"][2] == EXPECTED["repeated_augmentation"][f"rank {rank}"][2]


def test_two_processes_evaluate_each_image_once(two):
    # Stated: batch k is rank k mod W's, and so the same as on one process; torchvision deals single images.
    assert [results["ranks_sample"]["test"] for results in two] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    assert [results["ranks_sample"]["test_labels"] for results in two] == [[[0, 0, 1, 1], [4, 4, 5, 5]], [[2, 2, 3, 3]]]


def test_two_processes_train_one_model(two):
    assert [results["ranks_train"] for results in two] == [[True, True, ["float", "float"]]] * 2


def test_two_processes_run_main(images, tmp_path):
    results = run_on_two("ranks_main", images, tmp_path)
    checkpoint = {"keys": ["model", "optimizer", "epoch", "args"], "epoch": 0}
    assert [each["ranks_main"] for each in results] == [[[["", True]], checkpoint], [[], checkpoint]]
