"""A finished run to go on from, the ways to damage its files, and what is to be seen of a run that was refused."""

import os
import shutil

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs

from tests.ranks import REPOSITORY, run_ranks, train_rank
from tests.tiny import Tiny

# As that of timm's test_resnet: the mean and deviation are not ImageNet's.
default_cfgs = generate_default_cfgs({
    "tiny_test.untrained": {
        "input_size": (3, 160, 160), "pool_size": (40, 40), "crop_pct": 0.95, "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "num_classes": 1000, "first_conv": "conv1",
        "classifier": "fc",
    },
})  # fmt: skip


@timm.models.register_model
def tiny_test(pretrained=False, **options):
    return build_model_with_cfg(Tiny, "tiny_test", pretrained, **options)


# The suite trains it 800 times. A Python that has not imported this module knows timm's smallest.
SMALL = """
    --model timm/tiny_test --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --interpolation bilinear
    --device cpu --workers 0
""".split()
SMALL_ANYWHERE = [*SMALL, "--model", "timm/test_resnet"]
# One that needs no timm, whose import is a tenth of the start of such a Python.
PLAIN = f"{REPOSITORY / 'tests' / 'tiny.py'}:Tiny"
SMALL_PLAIN = [*SMALL, "--model", PLAIN]


def run_train(tmp_path, *argv, world_size=1, faults=()):
    arguments = [str(word) for word in argv]
    return run_ranks(train_rank, world_size, arguments, list(faults), log_folder=tmp_path)


class Started:
    """A finished run of two epochs of three steps, and how to go on from it; to be copied, not written to."""

    def __init__(self, images, folder, options=SMALL):
        self.out = folder / "out"
        self.argv = ["--data-path", images, *options, "--batch-size", "8", "--print-freq", "2", "--lr", "0.05"]
        self.argv += ["--checkpoint-steps", "1", "--use-deterministic-algorithms"]
        # With which its first epoch is its best, as with no other numbers that were tried.
        self.argv += "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225".split()
        run_train(folder, *self.argv, "--output-dir", self.out, "--epochs", 2).check()

    def copy(self, folder):
        shutil.copytree(self.out, folder, symlinks=True)
        return folder

    def go_on(self, tmp_path, out, *argv, **options):
        return run_train(tmp_path, *self.argv, "--output-dir", out, "--epochs", 3, *argv, **options)


def refused(outcome, *words, code=2):
    """Check that a run was refused with exactly one line, which says all of `words`."""
    assert outcome.codes[0] == code, outcome.output
    lines = [line for line in outcome.output.splitlines() if line.startswith("train.py: error")]
    assert len(lines) == 1, outcome.output
    assert "Traceback" not in outcome.output
    for word in words:
        assert str(word) in lines[0], lines[0]


def state_of(folder):
    """Return the files of a folder and when each was last written; the lock apart, which names its last holder."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}


def damage_truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_flipped(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = (byte ^ 16 for byte in content[middle : middle + 64])  # at most 63 are padding
    path.write_bytes(content)


class Hostile:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


def hostile(path):
    return {"format": 1, "model": Hostile(path.parent / "executed")}


def damage_folder(path):
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")


DAMAGES = {
    "truncated": damage_truncated,
    "flipped": damage_flipped,
    "empty": lambda path: path.write_bytes(b""),
    "folder": damage_folder,
    "hostile": lambda path: torch.save(hostile(path), path),
}
