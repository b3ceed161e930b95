"""data.py: the same images as torchvision's ImageFolder, and the same batches whoever loads them."""

import ctypes
import gc
import hashlib
import multiprocessing
import shutil
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

import data
import train
from distributed.collectives import count_cores
from errors import ImageError, UserError
from files import read_json
from loading.forms import open_source
from loading.loader import BatchLoader, check_workers
from loading.subset import Subset, minival_numbers, without
from monitoring import preview
from presets import ClassificationPresetTrain
from sampler import EvalSampler, SampleKey, TrainSampler, VirtualShards
from settings import config
from settings.parser import get_args_parser
from tests.endings import differing_results
from tests.images import pack_classes, write_images
from tests.ranks import run_ranks
from tests.started import DAMAGES, SMALL, damage_folder, refused, run_train


def sets_of(folder, *argv):
    args = config.parse_args(["--data-path", str(folder), "--device", "cpu", *map(str, argv)])
    return data.build_datasets(*config.split_dirs(args.data.data_path), args)


def test_a_set_is_an_image_folder(image_folder, tmp_path):
    folder = image_folder / "train"
    theirs, ours = datasets.ImageFolder(folder), data.IndexedImageFolder(folder, None)
    assert ours.samples == theirs.samples == ours.imgs
    assert (ours.targets, ours.classes, ours.class_to_idx) == (theirs.targets, theirs.classes, theirs.class_to_idx)
    assert ours.loader(ours.samples[0][0]).mode == "RGB"
    for (image, label), (expected, their_label) in zip(ours, theirs, strict=True):
        assert (image.tobytes(), label) == (expected.tobytes(), their_label)
    ours.transform = theirs.transform = transforms.Compose([transforms.Resize(8), transforms.ToTensor()])
    assert torch.equal(ours[-1][0], theirs[len(theirs) - 1][0])
    pack_classes(folder, tmp_path)
    tars = data.IndexedImageFolder(tmp_path / "train", None)
    assert (tars.targets, tars.class_to_idx) == (theirs.targets, theirs.class_to_idx)
    assert tars.samples[0] == (tars.index.path(0), 0)


@pytest.mark.parametrize("backend", ["pil", "tensor"])
def test_a_sample_is_that_of_an_image_folder_for_the_same_draws(image_folder, backend):
    preset = ClassificationPresetTrain(crop_size=24, auto_augment_policy="ra", random_erase_prob=0.5, backend=backend)
    sets = [build(image_folder / "train", preset) for build in (datasets.ImageFolder, data.IndexedImageFolder)]
    for number in range(6):
        torch.manual_seed(number)
        expected, expected_label = sets[0][number]
        torch.manual_seed(number)
        image, label = sets[1][number]
        assert torch.equal(image, expected)
        assert (image.dtype, label) == (torch.float32, expected_label)


@pytest.mark.parametrize("erase", [0.0, 1.0])
@pytest.mark.parametrize("policy", [None, "ra"])
def test_draws_of_a_key_are_those_of_its_address(image_folder, policy, erase):
    preset = ClassificationPresetTrain(crop_size=24, auto_augment_policy=policy, random_erase_prob=erase)
    dataset = data.IndexedImageFolder(image_folder / "train", preset, seed=3)
    torch.manual_seed(1)
    first, other = dataset[SampleKey(5, 1)][0], dataset[SampleKey(5, 2)][0]
    torch.manual_seed(2)
    assert torch.equal(dataset[SampleKey(5, 1)][0], first)
    assert not torch.equal(first, other)
    assert not torch.equal(first, dataset[SampleKey(5, 1, 1)][0])
    expected = preset.finish.transforms[1](preset.finish.transforms[0](dataset.load(SampleKey(5, 1))[0]))
    assert torch.equal(first, expected) == (erase == 0)
    assert ((first == expected) | (first == 0)).all()


@pytest.mark.parametrize("others", ["", "--backend pil", "--auto-augment ra"])
def test_alternating_flips_show_each_image_both_ways_in_two_epochs(image_folder, others):
    def load(mode, epoch, repetition=0, seed=1):
        given = f"--train-crop-size 24 --hflip-mode {mode} --seed {seed} {others}".split()
        dataset, _ = sets_of(image_folder, *given, *["--hflip-prob", 0] * (mode == "random"))
        return [dataset.load(SampleKey(number, epoch, repetition))[0] for number in range(len(dataset))]

    def flips(*address, **seed):
        """Return for each image whether it is flipped; all else must be what it is without flips."""
        pairs = list(zip(load("alternating", *address, **seed), load("random", *address, **seed), strict=True))
        assert all(torch.equal(flipped, plain) or torch.equal(flipped.flip(-1), plain) for flipped, plain in pairs)
        return [not torch.equal(flipped, plain) for flipped, plain in pairs]

    first = flips(0)
    assert 0.2 < sum(first) / len(first) < 0.8
    assert flips(1) == flips(7) == flips(6, 1) == [not flipped for flipped in first]
    assert flips(2) == flips(1, 1) == first != flips(0, seed=2)


DAMAGED = {
    "no image": lambda path: path.write_bytes(b"<html>404</html>" * 50),
    "bomb": lambda path: path.write_bytes(b"P6 20000 20000 255\n" + bytes(99)),  # 400 million pixels
    "vanished": Path.unlink,
    "a folder": damage_folder,
    **{name: DAMAGES[name] for name in ("truncated", "empty")},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_an_image_that_cannot_be_read_is_named(tmp_path, monkeypatch, kind):
    root = write_images(tmp_path, {"train": [1], "val": [1]})
    monkeypatch.setattr("files.RETRY_S", 0.0)
    for split, dataset, key in zip(["train", "val"], sets_of(root), [SampleKey(0, 0, 0), 0], strict=True):
        DAMAGED[kind](root / split / "class0" / "image000.jpg")
        with pytest.raises(ImageError, match=rf"{split}/class0/image000.jpg \(class class0\): .") as caught:
            dataset[key]
        assert len(str(caught.value).splitlines()) == 1
        assert ("replace the file" in str(caught.value)) == (kind not in ("vanished", "a folder"))


def test_a_failure_of_the_system_is_tried_again_with_the_same_draws_and_ends_the_run_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("files.RETRY_S", 0.0)
    errors = []

    def fail_or(work, *arguments):
        drawn = torch.rand(())
        if errors:
            raise errors.pop()
        return work(*arguments), drawn

    preset = SimpleNamespace(load=lambda payload, _: fail_or(bytes, payload))
    dataset = data.IndexedImageFolder(write_images(tmp_path, {"train": [3]}) / "train", preset)
    expected = dataset.load(SampleKey(1, 0, 0))
    words = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    errors += [MemoryError(), RuntimeError(words), OSError(12, "Cannot allocate memory")]
    assert dataset.load(SampleKey(1, 0, 0)) == expected
    errors += [MemoryError()] * 4
    with pytest.raises(ImageError, match=r"image001.jpg .*: out of memory \(tried 4 times\)"):
        dataset.load(SampleKey(1, 0, 0))
    read = dataset.index.read
    dataset.index.read = lambda number: fail_or(read, number)[0]
    errors += [OSError(5, "Input/output error"), FileNotFoundError(2, "No such file")]
    assert dataset.load(SampleKey(1, 0, 0)) == expected


@pytest.mark.parametrize("argv", [[], ["--ra-sampler", "--auto-augment", "ta_wide", "--train-crop-size", "64"]])
def test_a_plain_loader_of_the_sets_and_samplers_yields_our_loaders_batches(image_folder, argv):
    folders = [str(image_folder / split) for split in ("train", "val")]
    argv = ["--data-path", str(image_folder), "--device", "cpu", "--batch-size", "3", "--workers", "0", *argv]
    args = get_args_parser().parse_args(argv)
    train.utils.init_distributed_mode(args)
    *theirs, train_sampler, test_sampler = train.load_data(*folders, args)
    args = config.parse_args(argv)
    ours = data.build_datasets(*folders, args)
    repeated = TrainSampler(29, VirtualShards(3, 1, 0, 1), repetitions=3 if args.augmentation.ra_sampler else 1)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        repeated.set_epoch(epoch)
        for dataset, sampler, own, own_sampler in (
            (theirs[0], train_sampler, ours[0], repeated), (theirs[1], test_sampler, ours[1], EvalSampler(7, 3)),
        ):  # fmt: skip
            loader = DataLoader(dataset, batch_size=3, sampler=sampler, num_workers=epoch)
            batches = data.build_loader(
                own, own_sampler, args.data, args.augmentation, args.optimization, args.distributed.device
            )
            batches = data.build_device_loader(args, batches, own_sampler, torch.device("cpu"), 3)
            torch.testing.assert_close(list(loader), list(batches), rtol=0, atol=0)


def test_sets_of_options_that_a_parser_made_are_checked_in_one_line(image_folder, tmp_path):
    def load(folder, *argv):
        return train.load_data(str(folder / "train"), str(folder / "val"), get_args_parser().parse_args(argv))

    shutil.copytree(image_folder / "val", tmp_path / "val")
    with pytest.raises(UserError, match="29 images, fewer than one global batch of 32"):
        load(image_folder)
    argv = ["--test-only", "--model", "resnet18", "--weights", "IMAGENET1K_V1", "--val-crop-size", "32", "-b", "8"]
    assert [len(each) for each in load(image_folder, *argv)] == [29, 7, 24, 7]
    train_set, val_set, train_sampler, _ = load(tmp_path, *argv)
    assert train_set is train_sampler is None
    assert val_set[0][0].shape == (3, 224, 224)  # the weights' own, as there


def names_of(source):
    return [source.name(number) for number in range(len(source))]


def held_out(folder, fraction):
    held = set()
    for directory in folder.iterdir():
        names = [f"{directory.name}/{path.name}" for path in directory.iterdir()]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        held |= set(names[: max(int(fraction * len(names) + 0.5), 1)])
    return held


@pytest.mark.parametrize("fraction", [0.02, 0.2, 0.45])
def test_a_minival_is_the_images_of_smallest_hashes_of_each_class(image_folder, fraction):
    train, minival = sets_of(image_folder, "--minival", fraction)
    assert set(names_of(minival.index)) == held_out(image_folder / "train", fraction)
    whole = {str(path.relative_to(image_folder / "train")) for path in (image_folder / "train").rglob("*.jpg")}
    assert sorted(names_of(train.index) + names_of(minival.index)) == sorted(whole)
    assert train.classes == minival.classes == ["class0", "class1", "class2"]


def test_training_images_that_are_evaluated_are_told(image_folder, capsys):
    args = config.parse_args(["--data-path", str(image_folder), "--batch-size", "8"])
    for val, is_told in (("val", False), ("train", True)):
        data.load_data(image_folder / "train", image_folder / val, args)
        assert ("train and val are the same folder" in capsys.readouterr().out) is is_told
    sets_of(image_folder, "--minival", 0.2)
    assert "the same folder" not in capsys.readouterr().out


def test_each_class_has_at_least_one_image_on_either_side_where_it_has_two(tmp_path):
    source = open_source(write_images(tmp_path, {"train": [1, 2, 3, 40]}) / "train")
    for fraction in (0.2, 0.25, 0.5):  # each image is in one fold, but for a class of one image
        folds = [minival_numbers(source, fraction, fold) for fold in range(round(1 / fraction))]
        assert folds[0] == minival_numbers(source, fraction)
        assert sorted(number for held in folds for number in held) == [*range(1, len(source))]
    held = minival_numbers(source, 0.01)
    assert sorted(source.label(number) for number in held) == [1, 2, 3]
    assert len(minival_numbers(source, 0.5)) == 0 + 1 + 2 + 20
    assert set(held) < set(minival_numbers(source, 0.1)) < set(minival_numbers(source, 0.5))
    write_images(tmp_path / "single", {"train": [1, 1]})
    with pytest.raises(UserError, match="has too few images in each class to hold out"):
        sets_of(tmp_path / "single", "--minival", "0.5")


def test_a_part_has_the_images_of_the_whole_under_new_numbers(image_folder):
    whole = open_source(image_folder / "train")
    part = Subset(whole, [20, 3, 11])
    for ours, theirs in enumerate([3, 11, 20]):
        for fact in ("name", "label", "read", "path"):
            assert getattr(part, fact)(ours) == getattr(whole, fact)(theirs)
        assert part.size(ours) == len(whole.read(theirs))
    smaller = Subset(part, [0, 2])
    assert names_of(smaller) == names_of(without(part, [1])) == [whole.name(3), whole.name(20)]
    assert len({part.fingerprint(), whole.fingerprint(), smaller.fingerprint()}) == 3
    assert smaller.fingerprint() == Subset(whole, [3, 20]).fingerprint()


def test_without_val_there_is_a_validation_part_and_a_preview_counts_the_others(image_folder, tmp_path):
    (tmp_path / "train").symlink_to(image_folder / "train")
    assert list(map(len, sets_of(tmp_path, "--minival", 0.1))) == [26, 3]
    assert sets_of(tmp_path, "--minival", 0.1, "--test-only", "--weights", "DEFAULT")[0] is None
    args = config.parse_args(["--data-path", str(tmp_path), "--device", "cpu", "--minival", "0.2", "--batch-size", "4"])
    assert "5 steps per epoch" in preview.preview(args)  # of 23 images


class Numbers(Dataset):
    """Images whose every pixel is their number."""

    def __init__(self, side):
        self.side = side

    def load(self, key):
        return torch.full((3, self.side, self.side), key, dtype=torch.uint8), key


def test_more_workers_than_any_use_are_refused():
    cores = count_cores()
    check_workers(64)  # which waits for a slow disk
    with pytest.raises(UserError, match=f"--workers {250 * cores}: this process has {cores} cores"):
        check_workers(250 * cores)


def test_a_loader_process_ends_when_its_parent_says_so_and_not_when_another_does(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    before = set(multiprocessing.active_children())
    torch.set_num_threads(2)  # so that torch starts a thread in the process before we prepare it
    loader = BatchLoader(Numbers(4), EvalSampler(58, 3), num_workers=1, batch_bytes=3 * 3 * 4 * 4)
    batches = iter(loader)
    torch.set_num_threads(1)
    next(batches)
    (process,) = set(multiprocessing.active_children()) - before
    for _ in range(20):
        subprocess.run(["kill", "-TERM", str(process.pid)], check=True)  # as a launcher does to all
    assert sum(1 for _ in batches) == 19
    assert process.is_alive()
    # Of a loader that is collected as a part of a cycle torch says so by SIGTERM alone, that interval later.
    cycle = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    gc.collect()
    process.join(10)
    assert process.exitcode == 0


def load_with_shared_memory_of(size):
    """Load images of 12 MiB in a process whose /dev/shm is that small."""
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", "/dev/shm"], check=True)
    loader = BatchLoader(Numbers(2048), EvalSampler(7, 3), num_workers=2, batch_bytes=3 * 3 * 2048**2)
    loader.start()
    batches = [(image.amax((1, 2, 3)).tolist(), label.tolist()) for image, label in loader]
    assert batches == [([0, 1, 2],) * 2, ([3, 4, 5],) * 2, ([6],) * 2]


HAS_NAMESPACES = shutil.which("unshare") and subprocess.run(
    ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True, check=False
).returncode == 0  # fmt: skip


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, for a /dev/shm of its own")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_numbers_of_batches_are_their_images_whose_keys_are_computed_once_a_step(workers):
    sampler, computed = TrainSampler(62, VirtualShards(6, 2)), []
    sampler._keys = lambda *args: computed.append(args[1:3]) or TrainSampler._keys(sampler, *args)
    loader = BatchLoader(Numbers(4), sampler, num_workers=workers, batch_bytes=3 * 3 * 4 * 4)
    device_loader = data.DeviceLoader(loader, torch.device("cpu"), lambda image, *_: (image, _))
    for epoch, start in [(0, 0), (1, 3), (1, 4)]:
        sampler.set_epoch(epoch, start)
        numbers = device_loader.numbers()
        for _, (image, _) in zip(range(5), device_loader, strict=False):  # and leave the pass before its end
            assert next(numbers).tolist() == image[:, 0, 0, 0].tolist()
        computed.clear()
        pairs = list(zip(device_loader, device_loader.numbers(), strict=True))
        assert [number for (image, _), each in pairs for number in each.tolist()] == [int(key) for key in [*sampler]]
        assert computed == 2 * [(step, shard) for step in range(start, 10) for shard in (0, 1)]  # once by the test
    for _ in device_loader:
        assert device_loader._keys is None
    loader.close()


def test_batches_take_no_room_in_dev_shm(tmp_path):
    done = run_ranks(load_with_shared_memory_of, 1, "1m", log_folder=tmp_path)  # less than a batch
    assert (done.codes, done.output) == ([0], "")


def train_once(images, folder, *argv, **how):
    argv = [*SMALL, "--data-path", images, "--batch-size", 8, "--epochs", 1, "--output-dir", folder / "out", *argv]
    folder.mkdir(exist_ok=True)
    return run_train(folder, *argv, **how)


def test_a_decoder_that_crashes_is_one_line_that_names_the_image(image_folder, tmp_path):
    crash = [(0, "loading.decode.ImageFile.decode", 3, "before", signal.SIGSEGV)]  # the third of a loader process
    done = train_once(image_folder, tmp_path, "--workers", 1, faults=crash)
    refused(done, "a loader process was killed", "It was loading class", ".jpg", "remove it", code=1)


def test_torchcodec_changes_no_number_and_is_said(image_folder, tmp_path):
    pytest.importorskip("torchcodec")
    ours = train_once(image_folder, tmp_path / "codec", "--workers", 1).check()
    plain = train_once(image_folder, tmp_path / "pillow").check()
    assert [done.output.count("JPEGs are decoded by TorchCodec") for done in (ours, plain)] == [1, 0]
    assert "extraneous" not in ours.output  # what its C library writes of shortened files
    folders = [tmp_path / name / "out" for name in ("codec", "pillow")]
    assert differing_results(*folders) == []
    decoders = [read_json(folder / "run.json")["environment"]["decoder"] for folder in folders]
    assert decoders[0] == f"torchcodec {version('torchcodec')}, {decoders[1]}"
