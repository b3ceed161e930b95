"""Bad input is one clear line and exit code 2, before any training and printed once, under torchrun too."""

import json
import re

import pytest
import torch

from tests.endings import differing_results
from tests.images import write_images
from tests.started import SMALL, refused, run_train


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    write_images(root / "good", {"train": [4, 4], "val": [1, 1]})
    write_images(root / "other_classes", {"train": [1, 1, 1], "val": [1, 1]})
    (root / "file").write_text("a file")
    return root


CASES = {
    "archive": (["--data-path", "{root}/images.tar.gz"], ["is not a folder", "unpack it first"]),
    "other classes": (["--data-path", "{root}/other_classes"], ["has 3 classes", "has 2", "(class2)"]),
    "unwritable output": (
        ["--data-path", "{root}/good", "--output-dir", "{root}/file/out", "--batch-size", "4"],
        ["--output-dir", "cannot be written"],
    ),
    "too large a batch": (["--data-path", "{root}/good", "--batch-size", "100"], ["8 images", "smaller --batch-size"]),
    "no such weights": (
        ["--model", "shufflenet_v2_x0_5", "--data-path", "{root}/good", "--weights", "V9"],
        ["V9", "did you mean shufflenet_v2_x0_5.DEFAULT?"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(folders, tmp_path, case):
    argv, words = ([word.format(root=folders) for word in part] for part in CASES[case])
    outcome = run_train(tmp_path, "--output-dir", tmp_path / "out", *SMALL, *argv)
    refused(outcome, *words)
    assert "Epoch:" not in outcome.output


def test_a_run_that_a_bad_image_ended_resumes_once_it_is_replaced(tmp_path):
    images = write_images(tmp_path / "images", {"train": [5, 4], "val": [1, 1]})
    # The one of nine that the first epoch leaves out.
    bad = sorted((images / "train").rglob("*.jpg"))[torch.randperm(9, generator=torch.Generator().manual_seed(0))[8]]
    bad = bad.rename(bad.with_name(f"{bad.stem}\n.jpg"))
    good = bad.read_bytes()
    argv = ["--data-path", images, *SMALL, "--epochs", 2, "--batch-size", 2, "--workers", 1]
    argv += ["--checkpoint-steps", 1, "--use-deterministic-algorithms", "--output-dir"]
    run_train(tmp_path, *argv, tmp_path / "whole").check()

    out = tmp_path / "out"
    bad.write_bytes(b"")
    refused(run_train(tmp_path, *argv, out), f"cannot read image {bad}".replace("\n", " "), "the file is empty", code=1)
    assert json.loads((out / "status.json").read_text())["state"] == "failed"
    bad.write_bytes(good)
    run_train(tmp_path, *argv, out, "--resume", "auto").check()
    assert differing_results(out, tmp_path / "whole") == []


@pytest.mark.dist
def test_a_command_that_torchrun_starts_again_is_refused_before_torch_is_imported(folders, torchrun, monkeypatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = torchrun(2, "--data-path", str(folders / "nowhere"))
    assert done.stderr.count("train.py: error: --data-path") == 2, done.stderr
    assert not re.search(r"\|\s+torch$", done.stderr, flags=re.M)
