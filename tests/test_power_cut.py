"""What tools leave where the power fails (tests/power_loss.py): the next start ends as any other."""

import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from scripts import pack, prepare
from tests.archives import jpeg, tar_of
from tests.calls import CHANGING, Call, Trouble, Watch, read_log
from tests.images import write_images
from tests.power_loss import Disk, write_image
from tests.ranks import run_ranks

IMAGES = {f"n01440764_{number}.JPEG": jpeg(number) for number in range(3)}


def run_prepare(sources: Path) -> dict:
    prepare.prepare(prepare.get_args_parser().parse_args([str(sources), "out", "--skip-md5", "--splits", "train"]))
    return {str(path): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def write_pack(sources: Path) -> dict:
    plan = pack.plan_shards
    sys.argv = f"pack --data-path {sources} out --short-side 16 --workers 1".split()
    pack.plan_shards = lambda splits, _: plan(splits, 3000)
    pack.work()
    pack.plan_shards = plan
    return {str(path): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def record(disk: Path, log: Path, work, source) -> None:
    os.chdir(disk)
    Watch(disk, log, Trouble(), CHANGING)
    work(source)


@pytest.mark.parametrize("work", [run_prepare, write_pack])
def test_a_power_cut_at_any_moment_changes_nothing(work, tmp_path, monkeypatch):
    """Watch work on a disk, then do it again on a disk of each moment at which the power may fail."""
    source, disk = write_images(tmp_path / "sources", {"train": [4, 3]}), tmp_path / "disk"
    disk.mkdir()
    (source / prepare.TRAIN_TAR).write_bytes(tar_of({"n01440764.tar": tar_of(IMAGES)}))
    shutil.copytree(disk, tmp_path / "before")
    run_ranks(record, 1, disk, tmp_path / "log", work, source, log_folder=tmp_path).check()
    monkeypatch.chdir(disk)
    monkeypatch.setattr(sys, "argv", sys.argv)  # which work changes
    expected, now, rng, num_odd = work(source), Disk(tmp_path / "before"), random.Random(0), 0
    for call in [*read_log(tmp_path / "log"), None]:
        images = list(now.images())
        zeros = [image for image in images if any(file and file[0] and not any(file[0]) for file in image.values())]
        image = rng.choice(rng.choice([zeros, images]) or images)  # files of the right length as often as all others
        write_image(image, disk)
        os.chdir(disk)
        assert work(source) == expected, call
        num_odd += image != images[0]
        if isinstance(call, Call):
            now.apply(call)
    assert num_odd > 5
