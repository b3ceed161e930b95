"""What tools and caches leave where the power fails (tests/power_loss.py): the next start ends as any other."""

import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from loading import index
from loading.forms import open_source
from loading.remote import RemotePack
from scripts import pack, prepare
from tests.archives import jpeg, tar_of
from tests.calls import CHANGING, Call, Trouble, Watch, read_log
from tests.images import run_pack, write_images
from tests.power_loss import Disk, write_image
from tests.ranks import run_ranks
from tests.servers import RangeServer

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


def find_images(sources: Path) -> dict:
    index.RACY_NS = 0
    if not Path("train").is_symlink():
        Path("train").symlink_to(sources / "train")  # whose times stay
    return dict(enumerate(open_source(Path("train")).names.tolist()))


def read_remote(url: str) -> dict:
    source = RemotePack(url, "train", str(Path.cwd().parent))
    return {number: source.read(number) for number in range(len(source))}


def record(disk: Path, log: Path, work, source) -> None:
    os.chdir(disk)
    Watch(disk, log, Trouble(), CHANGING)
    work(source)


@pytest.mark.parametrize("work", [run_prepare, write_pack, find_images, read_remote])
def test_a_power_cut_at_any_moment_changes_nothing(work, tmp_path, monkeypatch, request):
    """Watch work on a disk, then do it again on a disk of each moment at which the power may fail."""
    source, disk = write_images(tmp_path / "sources", {"train": [4, 3]}), tmp_path / "disk"
    disk.mkdir()
    (source / prepare.TRAIN_TAR).write_bytes(tar_of({"n01440764.tar": tar_of(IMAGES)}))
    if work is read_remote:
        run_pack(tmp_path, "--data-path", source, tmp_path / "pack", "--short-side", 16).check()
        server = RangeServer(tmp_path / "pack")
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)
        source, disk = server.url, RemotePack(server.url, "train", str(tmp_path / "cache")).cache.folder
    shutil.copytree(disk, tmp_path / "before", symlinks=True)
    run_ranks(record, 1, disk, tmp_path / "log", work, source, log_folder=tmp_path).check()
    monkeypatch.chdir(disk)
    for place, name in ((sys, "argv"), (index, "RACY_NS")):
        monkeypatch.setattr(place, name, getattr(place, name))  # which work changes
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
