"""data.py: the same images as torchvision's ImageFolder, and the same batches whoever loads them."""

import hashlib

import pytest
import torch
from torchvision import datasets, transforms

import config
import data
from errors import UserError
from presets import ClassificationPresetEval, ClassificationPresetTrain
from sampler import EvalSampler, RASampler, SampleKey, TrainSampler, VirtualShards
from tests.conftest import write_images


def arguments(folder, *argv):
    return config.parse_args(["--data-path", str(folder), "--device", "cpu", *argv])


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    """Nested folders, unusual names and files that are no images."""
    root = write_images(tmp_path_factory.mktemp("odd"), {"train": [3, 2]}) / "train"
    (root / "class0" / "nested" / "deeper").mkdir(parents=True)
    (root / "class0" / "image001.jpg").rename(root / "class0" / "nested" / "deeper" / "B.JPEG")
    (root / "class0" / "image002.jpg").rename(root / "class0" / "nested" / "a b.jpg")
    (root / "class1" / "notes.txt").write_text("no image")
    (root / "stray.jpg").write_bytes(b"in no class")
    (root / "Class2").mkdir()
    (root / "class1" / "image001.jpg").rename(root / "Class2" / "ünïcode.png")
    return root


def test_classes_order_and_files_are_image_folders(odd_folder):
    ours, theirs = data.IndexedImageFolder(odd_folder, None), datasets.ImageFolder(odd_folder)
    assert ours.classes == theirs.classes
    assert [(str(odd_folder / path), label) for path, label in ours.samples] == theirs.samples


def test_evaluated_images_are_those_of_image_folder(image_folder):
    oracle = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32), transforms.PILToTensor()])
    theirs = datasets.ImageFolder(image_folder / "val", oracle)
    ours = data.IndexedImageFolder(
        image_folder / "val", ClassificationPresetEval(crop_size=32, resize_size=32, backend="pil")
    )
    for index in range(7):
        assert torch.equal(ours[index][0], theirs[index][0])
        assert ours[index][1] == theirs[index][1]


POLICY = ["--auto-augment", "ta_wide"]


def epoch_hashes(folder, workers, start_step=0, sampler_class=TrainSampler, loading=POLICY, **options):
    """Return a hash of every batch of an epoch, as the model would get it."""
    batch = ["--random-erase", "0.5", "--mixup-alpha", "0.2", "--cutmix-alpha", "1.0", "--batch-size", "4"]
    args = arguments(folder, "--workers", str(workers), "--train-crop-size", "24", *batch, *loading)
    dataset, _ = data.build_datasets(str(folder / "train"), str(folder / "val"), args)
    sampler = sampler_class(len(dataset), VirtualShards(8, 2), seed=3, **options)
    sampler.set_epoch(1, start_step)
    transform, _ = data.build_batch_transforms(args, num_classes=3)
    loader = data.DeviceLoader(data.build_loader(dataset, sampler, args), torch.device("cpu"), transform, seed=3)
    return [hashlib.sha256(image.numpy().tobytes() + target.numpy().tobytes()).hexdigest() for image, target in loader]


def test_workers_and_the_place_of_a_restart_change_no_pixel(image_folder):
    torch.manual_seed(1)
    expected = epoch_hashes(image_folder, workers=0)
    assert len(set(expected)) == 6
    torch.manual_seed(2)
    for workers in [0, 1, 3]:
        assert epoch_hashes(image_folder, workers) == expected
    assert epoch_hashes(image_folder, workers=2, start_step=2) == expected[4:]


def test_threads_load_the_same_pixels_as_processes(image_folder):
    expected = epoch_hashes(image_folder, workers=0, loading=[])
    assert len(set(expected)) == 6
    assert epoch_hashes(image_folder, workers=2, loading=["--prefetch-factor", "1"]) == expected
    for workers in [1, 3]:
        assert epoch_hashes(image_folder, workers, loading=["--worker-type", "thread"]) == expected
    assert epoch_hashes(image_folder, 2, start_step=2, loading=["--worker-type", "thread"]) == expected[4:]


def test_repetitions_of_an_image_are_augmented_differently(image_folder):
    dataset = data.IndexedImageFolder(image_folder / "train", ClassificationPresetTrain(crop_size=24), seed=3)
    first, second, again = (dataset[SampleKey(5, 1, repetition)][0] for repetition in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, dataset[SampleKey(5, 2, 0)][0])
    assert len(epoch_hashes(image_folder, 0, sampler_class=RASampler, repetitions=3)) == 6


def test_the_loader_of_a_rank_yields_its_share_of_the_fixed_batches(image_folder):
    args = arguments(image_folder, "--workers", "0", "--val-crop-size", "16", "--val-resize-size", "16")
    _, dataset = data.build_datasets(str(image_folder / "train"), str(image_folder / "val"), args)
    _, transform = data.build_batch_transforms(args, num_classes=3)

    def batches(rank, world_size):
        loader = data.build_loader(dataset, EvalSampler(7, 2, rank, world_size), args)
        return list(data.DeviceLoader(loader, torch.device("cpu"), transform))

    whole = batches(0, 1)
    assert [len(target) for _, target in whole] == [2, 2, 2, 1]
    for rank in range(3):
        for ours, expected in zip(batches(rank, 3), whole[rank::3], strict=True):
            assert torch.equal(ours[0], expected[0])
            assert torch.equal(ours[1], expected[1])


def test_a_fingerprint_tells_data_sets_apart(image_folder, odd_folder):
    first = data.IndexedImageFolder(image_folder / "train", None)
    assert first.fingerprint() == data.IndexedImageFolder(image_folder / "train", None).fingerprint()
    assert first.fingerprint() != data.IndexedImageFolder(odd_folder, None).fingerprint()


def test_synthetic_images_are_the_same_each_time_and_have_a_class_each():
    ours, again = data.SyntheticImages(100, 8, 10), data.SyntheticImages(100, 8, 10)
    assert len(ours) == 100
    image, label = ours[SampleKey(13, 2, 0)]
    assert image.dtype == torch.uint8
    assert image.shape == (3, 8, 8)
    assert torch.equal(image, again[13][0])
    assert 0 <= label < 10


def test_a_missing_split_is_named(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="has no val/"):
        data.build_datasets(str(tmp_path / "train"), str(tmp_path / "val"), arguments(tmp_path))
