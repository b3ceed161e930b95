"""From files to batches on the device: index, decode and transform in loader processes, finish on the device."""

import hashlib
import math
import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.models import WeightsEnum
from torchvision.transforms import InterpolationMode

import transforms
from errors import ImageError, UserError
from presets import ClassificationPresetEval, ClassificationPresetTrain, ProgressivePreset
from randomness import AUGMENTATION, MIXING, fold_seed, seed_host
from sampler import SampleKey, TrainSampler


def scan_classes(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the classes of an image folder, and the (path relative to it, class index) of every image.

    Classes, order and choice of files are those of torchvision's `ImageFolder`.

    Raises:
        UserError: no such folder, no class folders, or a class without images.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; --data-path must hold train/ and val/, one folder a class in each")
    with os.scandir(root) as entries:
        entries = sorted(entries, key=lambda entry: entry.name)
    classes = [entry.name for entry in entries if entry.is_dir()]
    if not classes:
        num_images = sum(entry.name.lower().endswith(IMG_EXTENSIONS) for entry in entries)
        if not num_images:
            raise UserError(f"{root} holds neither images nor class folders; it needs one folder for each class")
        raise UserError(
            f"{root} holds {num_images} images and no class folders; move every image into a folder of its class"
        )
    samples, empty = [], []
    for label, name in enumerate(classes):
        images = [
            os.path.relpath(os.path.join(folder, file), root)
            for folder, _, files in sorted(os.walk(root / name, followlinks=True))
            for file in sorted(files)
            if file.lower().endswith(IMG_EXTENSIONS)
        ]
        samples += [(path, label) for path in images]
        empty += [name] if not images else []
    if empty:
        more = f" and {len(empty) - 1} more classes" if len(empty) > 1 else ""
        raise UserError(
            f"{root / empty[0]}{more} holds no images ({' '.join(IMG_EXTENSIONS)}); add some, or remove the folder"
        )
    return classes, samples


class IndexedImageFolder(Dataset):
    """An image folder, one folder a class, as uint8 samples; indexed by number or by `SampleKey`.

    Args:
        root: the folder.
        transform: a preset, whose `load` makes a (3, H, W) uint8 tensor of a file's bytes; where keys are `SampleKey`s,
            its `at` gives the preset of an epoch. It draws from the process's CPU generators.
        seed: the run's, the first part of the address of every draw.

    Raises:
        UserError: `root` is no image folder.
    """

    def __init__(
        self,
        root: str | Path,
        transform: ClassificationPresetTrain | ClassificationPresetEval | ProgressivePreset,
        seed: int = 0,
    ) -> None:
        self.root = Path(root)
        self.transform = transform
        self.seed = seed
        self.classes, self.samples = scan_classes(self.root)

    def fingerprint(self) -> str:
        """Return a hash of the names and labels of all images; another one means another data set."""
        lines = "".join(f"{path} {label}\n" for path, label in self.samples)
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: int | SampleKey) -> tuple[Tensor, int]:
        """Return one image, transformed, and its class.

        Raises:
            ImageError: the image cannot be read; names it.
        """
        index = key.index if isinstance(key, SampleKey) else key
        path, label = self.samples[index]
        transform = self.transform
        if isinstance(key, SampleKey):
            seed_host(AUGMENTATION, self.seed, key.epoch, key.index, key.repetition)
            transform = transform.at(key.epoch)
        try:
            with open(os.path.join(self.root, path), "rb", buffering=0) as file:
                payload = file.readall()
            return transform.load(payload), label
        except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error ... on damaged files
            reason = str(error) or type(error).__name__
            raise ImageError(f"cannot read image {self.root / path} (class {self.classes[label]}): {reason}") from error


class SyntheticImages(Dataset):
    """Made-up uint8 images, for runs without data: a fixed pool of noise, so that loading costs next to nothing.

    Args:
        num_images: the size of the set.
        size_px: side of an image.
        num_classes: labels go round them.
    """

    POOL = 64

    def __init__(self, num_images: int, size_px: int, num_classes: int = 1000) -> None:
        self.num_images = num_images
        self.num_classes = num_classes
        self.classes = [f"class{label:04d}" for label in range(num_classes)]
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randint(0, 256, (self.POOL, 3, size_px, size_px), dtype=torch.uint8, generator=generator)

    def fingerprint(self) -> str:
        """Return what stands for these images in a checkpoint."""
        return f"synthetic-{self.num_images}-{self.num_classes}"

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, key: int | SampleKey) -> tuple[Tensor, int]:
        """Return one image and its class, the same class for the same image."""
        slot = (key.index if isinstance(key, SampleKey) else key) % self.POOL
        return self.pool[slot], slot % self.num_classes


def build_datasets(traindir: str | None, valdir: str | None, args: Any) -> tuple[Dataset | None, Dataset]:
    """Return the training set (None with `--test-only`) and the validation set.

    Raises:
        UserError: a folder is missing or is no image folder, or the two differ in their classes.
    """
    preset_train, preset_eval = build_presets(args)
    if args.synthetic is not None:
        train = None if args.test_only else SyntheticImages(args.synthetic, args.train_crop_size)
        return train, SyntheticImages(max(args.synthetic // 10, 1), args.val_crop_size)
    if not Path(args.data_path).is_dir():
        raise UserError(f"--data-path {args.data_path} is not a folder; give the one that holds train/ and val/")
    for folder in [traindir, valdir]:
        if not Path(folder).is_dir():
            raise UserError(f"--data-path {args.data_path} has no {Path(folder).name}/; it must hold train/ and val/")
    dataset_test = IndexedImageFolder(valdir, preset_eval, args.seed)
    if args.test_only:
        return None, dataset_test
    dataset = IndexedImageFolder(traindir, preset_train, args.seed)
    if dataset.classes != dataset_test.classes:
        here, there = set(dataset.classes), set(dataset_test.classes)
        which = [f"{name} only in train/" for name in sorted(here - there)[:1]]
        which += [f"{name} only in val/" for name in sorted(there - here)[:1]]
        raise UserError(
            f"{traindir} has {len(here)} classes and {valdir} has {len(there)}, and they differ ({', '.join(which)}); "
            "both need one folder for each class"
        )
    return dataset, dataset_test


def build_presets(args: Any) -> tuple[ClassificationPresetTrain | ProgressivePreset, ClassificationPresetEval]:
    """Return what is done to each image in training and in evaluation."""
    interpolation = InterpolationMode(args.interpolation)
    build_train = partial(
        ClassificationPresetTrain,
        interpolation=interpolation,
        hflip_prob=args.hflip_prob,
        crop_scale=args.crop_scale,
        auto_augment_policy=args.auto_augment,
        ra_magnitude=args.ra_magnitude,
        augmix_severity=args.augmix_severity,
        random_erase_prob=args.random_erase,
        backend=args.backend,
    )
    train = build_train(crop_size=args.train_crop_size)
    if args.crop_ramp_epochs is not None:
        first, last = args.crop_ramp_epochs
        train = ProgressivePreset(
            build_train,
            smallest=args.train_crop_size_min,
            largest=args.train_crop_size,
            first=first,
            last=last,
        )
    evaluation = ClassificationPresetEval(
        crop_size=args.val_crop_size,
        resize_size=args.val_resize_size,
        interpolation=interpolation,
        backend=args.backend,
    )
    return train, evaluation


def options_of_weights(weights: WeightsEnum) -> dict[str, Any]:
    """Return what published weights are evaluated with, by the names of our options; mean and std are none."""
    preset = weights.transforms()
    return {
        "mean": list(preset.mean),
        "std": list(preset.std),
        "val_resize_size": preset.resize_size[0],
        "val_crop_size": preset.crop_size[0],
        "interpolation": preset.interpolation.value,
    }


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Put (3, H, W) uint8 images and their classes into one batch.

    Returns:
        (B, 3, H, W) uint8 in channels-last order, in which the images come, and (B,) int64.
    """
    rows = [image.permute(1, 2, 0) for image, _ in samples]
    out = None
    if get_worker_info() is not None:
        # Straight into memory that the main process sees, which would else be a second copy.
        shape = (len(rows), *rows[0].shape)
        storage = torch.UntypedStorage._new_shared(math.prod(shape))
        out = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)
    return torch.stack(rows, out=out).permute(0, 3, 1, 2), torch.tensor([label for _, label in samples])


def build_loader(dataset: Dataset, batch_sampler: Any, args: Any) -> DataLoader:
    """Return a loader of uint8 batches in the sampler's order; its processes live as long as it does."""
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=torch.device(args.device).type == "cuda",
        # Forked, the processes end with their parent, however it ends; a fork server and its children would stay.
        multiprocessing_context="fork" if args.workers and sys.platform == "linux" else None,
        collate_fn=collate,
    )


def build_batch_transforms(args: Any, num_classes: int) -> tuple[transforms.BatchTransform, transforms.BatchTransform]:
    """Return what is done to each batch on the device in training and in evaluation."""
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    normalize = transforms.Normalize(args.mean, args.std, torch.device(args.device), memory_format)
    mix = transforms.get_mixup_cutmix(
        mixup_alpha=args.mixup_alpha,
        cutmix_alpha=args.cutmix_alpha,
        num_classes=num_classes,
        prob=args.mixup_prob,
        switch_prob=args.mixup_switch_prob,
    )
    erase = transforms.RandomErasing(args.random_erase) if args.random_erase > 0 else None
    return (
        transforms.BatchTransform(normalize, erase, mix, args.mixup_off_epoch),
        transforms.BatchTransform(normalize),
    )


class DeviceLoader:
    """Iterate over a loader's uint8 batches as batches that are ready for the model.

    On an NVIDIA GPU the next batch is copied and transformed on a stream of its own, while the model works on the one
    before it.

    Args:
        loader: yields (B, 3, H, W) uint8 and (B,) int64 on the CPU.
        device: where the batches go.
        transform: what is done to them there.
        seed: the run's; a training batch's draws are addressed by it, the step and the shard.
    """

    def __init__(
        self, loader: DataLoader, device: torch.device, transform: transforms.BatchTransform, seed: int = 0
    ) -> None:
        self.loader = loader
        self.device = device
        self.transform = transform
        self.seed = seed
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def dataset(self) -> Dataset:
        """What the loader loads."""
        return self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches() if self.stream is None else self._one_ahead()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = self.loader.batch_sampler
        is_training = isinstance(sampler, TrainSampler)
        epoch = sampler.epoch if is_training else 0
        addresses = sampler.addresses() if is_training else [(0, 0)] * len(self.loader)
        for (image, target), (step, shard) in zip(self.loader, addresses, strict=True):
            rng = random.Random(fold_seed(MIXING, self.seed, step, shard))
            image = image.to(self.device, non_blocking=True)
            target = target.to(self.device, non_blocking=True)
            yield self.transform(image, target, rng, epoch)

    def _one_ahead(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each batch once the device has been given the next one to prepare."""
        batches, ready = self._batches(), None
        while True:
            main = torch.cuda.current_stream(self.device)
            # The next batch may take memory of a batch that was dropped: not before the model, which works on another
            # stream, is done with all that it was given until then. `record_stream` would do that too, but a host that
            # runs ahead would take more and more memory.
            self.stream.wait_stream(main)
            with torch.cuda.stream(self.stream):
                following = next(batches, None)
                is_prepared = self.stream.record_event()
            if ready is not None:
                yield ready
            if following is None:
                return
            ready = following
            main.wait_event(is_prepared)


def build_device_loader(
    args: Any, dataset: Dataset | None, sampler: Any, device: torch.device, num_classes: int
) -> DeviceLoader | None:
    """Return what iterates over a set, transformed for training if the sampler is a training one; None for no set."""
    if dataset is None:
        return None
    train_transform, eval_transform = build_batch_transforms(args, num_classes)
    transform = train_transform if isinstance(sampler, TrainSampler) else eval_transform
    return DeviceLoader(build_loader(dataset, sampler, args), device, transform, args.seed)
