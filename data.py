"""From files to batches on the device: loader processes decode and crop images, the device transforms batches."""

import os
import random
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import transforms
from distributed import collectives
from distributed.launch import read_launch
from distributed.signals import at_end
from distributed.watch import watchdog
from errors import BadImageError, ImageError, UserError, counted, in_one_line, one_line
from files import read_bytes, retry
from loading.child import in_child
from loading.decode import Decoding, decode_plainly
from loading.forms import check_source, find_sources, open_named, open_source, open_split, remote_options
from loading.loader import BatchLoader, check_workers, largest_batch_bytes
from loading.source import (
    Source,
    Subset,
    alike_classes,
    count_classes,
    first_of_each_class,
    is_remote,
    labels_of,
    minival_numbers,
    without,
)
from presets import ClassificationPresetEval, ClassificationPresetTrain, ProgressivePreset, build_presets
from randomness import AUGMENTATION, ERASING, FLIP, MIXING, Draws, fold_seed, seed_host
from sampler import EvalSampler, SampleKey, TrainSampler, VirtualShards
from settings import config
from settings.config import Assigned, Resolved
from settings.options import WITH_DEFAULT, fit_statistics, split_custom

LOOK_S = 10.0  # within which a start looks at some images of each set


class IndexedImageFolder(Dataset):
    """The images of a split in any form of `loading.forms`; indexed by number or by `SampleKey`.

    Scripts may use it as torchvision's `ImageFolder`; our own loader calls `load`. All draws for a `SampleKey` are
    addressed by it; those for a plain number come from the process's generators.

    Args:
        root: the data path and the split's name; `forms.find_sources` looks for its files there.
        transform: a preset; or, for `dataset[number]` alone, a function of a PIL image, or None.
        seed: the run's seed, the first part of the address of every draw.
        source: the open source of the images; by default that of the whole split.

    Raises:
        UserError: the split is not there, or its files are not divided into classes.
    """

    target_transform = None

    def __init__(
        self,
        root: str | Path,
        transform: ClassificationPresetTrain | ClassificationPresetEval | ProgressivePreset,
        seed: int = 0,
        source: Source | None = None,
    ) -> None:
        self.root, self.transform, self.seed = Path(root), transform, seed
        self.index = open_source(self.root) if source is None else source
        self.classes = self.index.classes

    @staticmethod
    def loader(path: str | Path) -> Image.Image:
        """Return the RGB image in a file."""
        return decode_plainly(read_bytes(Path(path)))

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The numbers of the classes."""
        return {name: label for label, name in enumerate(self.classes)}

    @cached_property
    def samples(self) -> list[tuple[str, int]]:
        """The (path, class) of each image, made on first use; an image in a tar has its name in messages as path."""
        return [(self.index.path(number), self.index.label(number)) for number in range(len(self))]

    imgs = property(attrgetter("samples"))

    @cached_property
    def targets(self) -> list[int]:
        """The class of each image."""
        return [label for _, label in self.samples]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: int) -> tuple[Any, int]:
        """Return one image, by a preset (3, H, W) normalised floats, and its class; ImageError names a bad one."""
        key = key if isinstance(key, SampleKey) else range(len(self))[key]
        image, label = self.load(key)
        label = label if self.target_transform is None else self.target_transform(label)
        preset = self._preset(key)
        if not hasattr(preset, "load"):
            return image, label
        if isinstance(key, SampleKey) and preset.random_erase_prob > 0:
            seed_host(ERASING, self.seed, key.epoch, key, key.repetition)
        return preset.finish(image), label

    def _preset(self, key: int) -> Any:
        """Return the preset of a key's epoch, or of epoch 0 for a plain number; any other transform unchanged."""
        is_one = not hasattr(self.transform, "at")
        return self.transform if is_one else self.transform.at(key.epoch if isinstance(key, SampleKey) else 0)

    def error(self, number: int, reason: str) -> ImageError:
        """Return the error for an image that cannot be read, with the reason."""
        name = self.index.class_name(number)
        return ImageError(one_line(f"cannot read image {self.index.path(number)} (class {name}): {reason}"))

    def load(self, key: int) -> tuple[Any, int]:
        """Return one image, by a preset (3, H, W) uint8, and its class.

        Raises:
            ImageError: its bytes are no image or a damaged one, or the disk or memory failed at every try.
        """
        payload = None
        try:
            payload = retry(partial(self.index.read, key))
            return retry(partial(self._transform, key, payload)), self.index.label(key)
        except (MemoryError, OSError) as error:
            reason = "out of memory" if isinstance(error, MemoryError) else error.strerror or error
            remedy = "the file itself may be intact: check the disk and the memory, and start again"
            raise self.error(key, f"{reason} (tried 4 times); {remedy}") from error
        except BadImageError as error:
            raise self.error(key, f"{error}; replace the file, or leave it out of the data") from error
        except ImageError:
            raise
        except Exception as error:  # a bug of ours: keep its traceback
            if payload is None:  # of the user's own
                raise self.error(key, f"its source's read failed: {type(error).__name__}: {error}") from error
            error.add_note(f"in {self.index.path(key)}")
            raise

    def _transform(self, key: int, payload: bytes) -> Any:
        preset, draws = self._preset(key), None
        if isinstance(key, SampleKey):
            address = (AUGMENTATION, self.seed, key.epoch, key, key.repetition)
            if getattr(preset, "takes_draws", False):
                draws = Draws(*address)
            else:
                seed_host(*address)
        try:
            if not hasattr(preset, "load"):
                image = decode_plainly(payload)
                return image if preset is None else preset(image)
            pixels = preset.load(payload, draws)
            return pixels.flip(-1) if self._is_flipped(preset, key) else pixels
        except RuntimeError as error:
            if "you tried to allocate" in str(error):  # torch's message for lack of memory
                raise MemoryError from error
            raise

    def _is_flipped(self, preset: Any, key: int) -> bool:
        """Tell whether `--hflip-mode alternating` flips an image: a random half in epoch 0, the others in epoch 1, ...

        Of Jordan's "94% on CIFAR-10 in 3.29 seconds" (arXiv 2404.00498): in two epochs a run then sees
        each image both ways, where random flips show half of the images the same way twice.
        """
        if getattr(preset, "hflip_mode", "random") == "random":
            return False
        showing = key.epoch + key.repetition if isinstance(key, SampleKey) else 0
        return (fold_seed(FLIP, self.seed, key) + showing) % 2 == 1


class SyntheticSource(Source):
    """Images from a fixed pool of noise, so that loading costs next to nothing; labels cycle through the classes."""

    POOL = 64
    form = "synthetic"

    def __init__(self, num_images: int, size_px: int, num_classes: int, in_chans: int = 3) -> None:
        super().__init__(Path())
        self.num_images, self.classes = num_images, [f"class{label:04d}" for label in range(num_classes)]
        generator = torch.Generator().manual_seed(0)
        pool = torch.randint(0, 256, (self.POOL, in_chans, size_px, size_px), dtype=torch.uint8, generator=generator)
        self.pool = pool.contiguous(memory_format=torch.channels_last)  # the order of a batch, into which it is copied

    def __len__(self) -> int:
        return self.num_images

    def label(self, number: int) -> int:
        """Return the class of an image: always the same for the same pixels."""
        return number % self.POOL % len(self.classes)

    def name(self, number: int) -> str:
        """Return a name such as a file of the image could have."""
        return f"{self.classes[self.label(number)]}/{number:09d}.png"

    def fingerprint(self) -> str:
        """Return the fingerprint of these images for checkpoints."""
        return f"synthetic-{self.num_images}-{len(self.classes)}"

    def identity(self) -> dict[str, str | None]:
        """Return the format; there are no files."""
        return {**super().identity(), "path": ""}


class SyntheticImages(IndexedImageFolder):
    """Made-up uint8 images with sides of `size_px`, for runs without data: see `SyntheticSource`."""

    def __init__(self, num_images: int, size_px: int, num_classes: int = 1000, in_chans: int = 3) -> None:
        source = SyntheticSource(num_images, size_px, num_classes, in_chans)
        mean, std = (fit_statistics(values, in_chans) for values in (config.IMAGENET_MEAN, config.IMAGENET_STD))
        super().__init__(source.root, ClassificationPresetEval(crop_size=size_px, mean=mean, std=std), source=source)

    def load(self, key: int) -> tuple[Tensor, int]:
        """Return one image as (in_chans, size_px, size_px) uint8, and its class; equal pixels have equal classes."""
        return self.index.pool[key % self.index.POOL], self.index.label(key)


def build_datasets(traindir: str | None, valdir: str | None, args: Resolved) -> tuple[Dataset | None, Dataset]:
    """Return the training set (None with `--test-only`) and the validation set.

    Raises:
        UserError: a split is missing or is no set of images, or the two differ in their classes.
    """
    preset_train, preset_eval = build_presets(args)
    if args.synthetic is not None:
        train = None
        if not args.test_only:
            train = SyntheticImages(args.synthetic, args.train_crop_size, in_chans=args.in_chans)
        return train, SyntheticImages(max(args.synthetic // 10, 1), args.val_crop_size, in_chans=args.in_chans)
    valdir = traindir if args.minival else valdir
    for folder in [valdir] if args.test_only else [traindir, valdir]:
        if not split_custom(args.data_path or "") and not is_remote(args.data_path):
            check_source(Path(folder))
    source_test, rest = hold_out(open_split(valdir, args), args.minival, args.minival_fold)
    source_test = limit_images(source_test, args.limit_val_images, "--limit-val-images")
    dataset_test = IndexedImageFolder(valdir, preset_eval, args.seed, source_test)
    if args.test_only:
        return None, dataset_test
    source = open_split(traindir, args) if rest is None else rest
    source = limit_images(source, args.limit_train_images, "--limit-train-images")
    if rest is None and os.path.realpath(traindir) == os.path.realpath(valdir):
        print(f"train and val are the same folder, {valdir}: the model is evaluated on its training images")
    if "list" in (source.form, source_test.form):
        from loading.lists import check_disjoint

        check_disjoint(source, source_test)
    dataset = IndexedImageFolder(traindir, preset_train, args.seed, source)
    check_classes(dataset, dataset_test)
    return dataset, dataset_test


def check_classes(dataset: Dataset, dataset_test: Dataset) -> None:
    """Raise UserError if the classes of two sets differ."""
    here, there = dataset.classes, dataset_test.classes
    if here != there:
        names = ", ".join(sorted(set(here) ^ set(there))[:3]) or "the same names in another order"
        raise UserError(
            f"{dataset.root} has {len(here)} classes and {dataset_test.root} has {len(there)}, and they differ "
            f"({names}); both need a folder for every class; for lists that lack a class, write a classes.txt"
        )


def build_more_sets(args: Resolved, dataset_test: Dataset) -> dict[str, Dataset]:
    """Return the sets of `--eval-data` by their names; UserError if one has other classes than the validation set."""
    sets = {}
    for text in args.eval_data or () if args.synthetic is None else ():
        name, source = open_named("--eval-data", text, args.multi_label, args.extensions, **remote_options(args))
        sets[name] = IndexedImageFolder(source.root, dataset_test.transform, args.seed, source)
        with in_one_line(f"--eval-data {name}"):
            check_classes(sets[name], dataset_test)
        print(f"--eval-data {text}: {counted(len(source), 'image')}")
    return sets


def hold_out(source: Source, fraction: float | None, fold: int = 0) -> tuple[Source, Source | None]:
    """Return the images that `--minival` holds out, and the others; without it all, and None. UserError if too few."""
    if not fraction:
        return source, None
    held = minival_numbers(source, fraction, fold)
    if not held:
        raise UserError(f"--minival {fraction}: {source.where} has too few images in each class to hold out")
    part = f"minival, fold {fold}" if fold else "minival"
    print(f"{part}: {len(held):,} of {len(source):,} training images are held out, and evaluated in place of val/")
    return Subset(source, held), without(source, held)


def limit_images(source: Source, num_images: int | None, flag: str) -> Source:
    """Return the first images of each class in turn, `num_images` in all; all of the source without a number."""
    if num_images is None or num_images >= len(source):
        return source
    print(f"{flag} {num_images}: a trial on {num_images:,} of {len(source):,} images, the first of each class in turn")
    return Subset(source, first_of_each_class(source, num_images))


def load_data(traindir: str, valdir: str, args: Any) -> tuple[Dataset, Dataset, TrainSampler, EvalSampler]:
    """Return both sets and their samplers for plain loaders; `args` are a parser's options, or those of `main`.

    A pass over the training sampler without a `set_epoch` before it is the next epoch. Under `--test-only` training
    images may be missing; the training set and its sampler are then None.

    Raises:
        UserError: the folders cannot be used; the message gives the reason.
    """
    if not isinstance(args, Assigned):
        args = _assign_plain(traindir, args)
    dataset, dataset_test = build_datasets(traindir, valdir, args)
    train_sampler = build_train_sampler(dataset, args)
    if train_sampler is not None:
        train_sampler.advances_itself = True
    return dataset, dataset_test, train_sampler, build_eval_sampler(dataset_test, args)


def _assign_plain(traindir: str, args: Any) -> Assigned:
    """Return the options of a script around `load_data`, such as torchvision's, as those of a run."""
    options = Namespace(**{**vars(args), "data_path": os.path.dirname(traindir)})
    parsed = config.resolve(options, foreign=("model", "weights", "test_only"))
    rank, world_size = collectives.get_rank(), collectives.get_world_size()
    args = Resolved(**{**vars(parsed), "rank": rank, "world_size": world_size, "given": []})
    if args.test_only and args.weights:
        from checkpointing.first_weights import choose_published_options, is_stored

        if not is_stored(args.weights):
            args, _ = choose_published_options(args)
    return config.assign(args.replaced(test_only=args.test_only and not find_sources(Path(traindir))), None)


def build_loader(dataset: Dataset, sampler: Any, args: Resolved) -> BatchLoader:
    """Return a loader of uint8 batches in the sampler's order; its processes live as long as the loader."""
    options = {"num_workers": args.workers, "pin_memory": torch.device(args.device).type != "cpu"}
    return BatchLoader(dataset, sampler, batch_bytes=largest_batch_bytes(args), **options)


class Loading(NamedTuple):
    """The sets of a run, and the loaders that have begun to load them."""

    args: Resolved  # with which the sets were opened
    datasets: tuple[Dataset | None, Dataset, dict[str, Dataset]]  # of training, of validation, of `--eval-data`
    loaders: dict[str, BatchLoader | None]  # `train` and the evaluated sets; without samplers

    @property
    def num_classes(self) -> int:
        """The number of classes of every set."""
        return len(self.datasets[1].classes)

    def serves(self, args: Resolved) -> bool:
        """Tell whether these options, perhaps completed from a checkpoint, prepare images as those of the sets do."""
        names = ["train_crop_size", "val_crop_size", "val_resize_size", "interpolation", *WITH_DEFAULT]
        if (args.auto_augment or "").startswith("timm/"):  # which fills gaps with the mean
            names.append("mean")
        return all(getattr(self.args, name) == getattr(args, name) for name in names)


def start_loading(args: Resolved) -> Loading:
    """Open the sets and start to load them.

    Raises:
        UserError: the data cannot be used, or this machine has too little memory or too few cores for it.
    """
    watchdog.beat("opening the data")
    check_workers(args.workers)
    start = time.perf_counter()
    dataset, dataset_test = sets = build_datasets(*config.split_dirs(args), args)
    if found := config.fast_decoder(args):
        print(f"JPEGs are decoded by TorchCodec {found}, to the same pixels as by Pillow")
    if dataset is not None:
        print(
            f"{len(dataset)} training and {len(dataset_test)} validation images of "
            f"{counted(len(dataset.classes), 'class')} ({time.perf_counter() - start:.1f} s)"
        )
        if words := alike_classes(dataset.classes):
            print(words)
        warn_of_uneven(dataset, args)
    if is_remote(args.data_path) and not args.test_only and read_launch().local_rank == 0:
        from loading.fill import start_filling

        splits = ["train"] if args.minival else ["train", "val"]
        dataset.filler = start_filling({"url": args.data_path, "splits": splits, **remote_options(args)})
        at_end(dataset.filler.communicate)  # which closes its standard input, and so ends it
    more = build_more_sets(args, dataset_test)
    loaded = dict(zip(["train", config.evaluated_set(args), *more], [*sets, *more.values()], strict=True))
    for name, each in loaded.items():
        if each is not None:
            note_files(name, each.index, args, args.train_crop_size if name == "train" else args.val_resize_size)
    return Loading(args, (*sets, more), dict(zip(loaded, start_loaders(loaded.values(), args), strict=True)))


def note_files(name: str, source: Source, args: Resolved, px: int) -> None:
    """Print remarks about a set's files: stored turned, of few grey levels, or a pack's, of training if too small.

    `px` is the size to which they are resized. UserError for a pack that cannot serve the options.
    """
    pack = source.pack if isinstance(source.pack, dict) else None
    if pack is not None and args.exif and not pack.get("exif"):
        raise UserError(
            f"--exif: {source.where} is a pack without the orientations of its images; pack again with this version"
        )
    if pack is not None and pack.get("grey_range") != args.grey_range:
        written, given = ("none" if each is None else str(each) for each in (pack.get("grey_range"), args.grey_range))
        raise UserError(
            one_line(f"--grey-range {given}: {source.where} is a pack written with {written}; give that, or pack again")
        )
    if args.synthetic is None and args.rank == 0:
        how = Decoding(exif=args.exif, grey_range=args.grey_range)
        watchdog.beat(extra_s=LOOK_S)
        with suppress(TimeoutError):  # of a disk that hangs, which the watchdog names
            found = in_child(partial(_look, source, how), LOOK_S)
            for words in filter(None, found.decode().splitlines()):
                print(one_line(f"{name}: {source.where}: {words}"))
    side = pack.get("px") if pack else None
    if type(side) is int and (name != "train" or px > side):
        enlarged = f"; they are enlarged to {px} pixels" if px > side else ""
        print(
            f"{name}: a pack of images resized to short side {side}, not the originals: accuracy may differ "
            f"(docs/data.md){enlarged}"
        )


def _look(source: Source, how: Decoding) -> bytes:
    from loading.remarks import remarks  # in the child alone

    return remarks(source, how).encode()


def warn_of_uneven(dataset: IndexedImageFolder, args: Resolved) -> None:
    """Print a line if a class has at most a tenth as many images as most classes, and no option is about that."""
    counts = count_classes(dataset.index)
    if len(counts) == 1 and dataset.index.label_sets is None:
        print(f"there is only one class, {dataset.classes[0]}: accuracy is 100 %, whatever the model learns")
    smallest, median = int(counts.argmin()), int(numpy.median(counts))
    is_uneven = 10 * counts[smallest] <= median and args.synthetic is None
    if is_uneven and not (args.balanced_sampler or args.class_weights):
        print(
            f"the classes are imbalanced: {dataset.classes[smallest]} has {counted(int(counts[smallest]), 'image')}, "
            f"the median class {median:,}; see --balanced-sampler, --class-weights and --metrics balanced_acc"
        )


def build_train_sampler(dataset: Dataset | None, args: Assigned) -> TrainSampler | None:
    """Return the sampler of the training set; None if there is no such set."""
    if dataset is None:
        return None
    shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)
    shards.check(needs_same_bits=False)
    repetitions = args.ra_reps if args.ra_sampler else 1
    if args.ra_sampler and args.num_shards == 1:
        print("--ra-sampler repeats images within the one micro-batch of a step; torchvision ignores it on one process")
    labels = torch.from_numpy(labels_of(dataset.index)) if args.balanced_sampler else None
    sampler = TrainSampler(len(dataset), shards, args.seed, repetitions, labels)
    print(f"{shards.arithmetic}; {counted(sampler.steps_per_epoch, 'step')} per epoch")
    return sampler


def build_eval_sampler(dataset: Dataset, args: Resolved) -> EvalSampler:
    """Return the sampler of a set to evaluate."""
    return EvalSampler(len(dataset), args.eval_batch_size or args.batch_size, args.rank, args.world_size)


def start_loaders(datasets: Iterable[Dataset | None], args: Resolved) -> list[BatchLoader | None]:
    """Return a loader without a sampler for each set, or None; the same processes load all sets, one at a time.

    Processes that are forked start now, before there are other threads.

    Raises:
        StorageError: the processes cannot be started.
    """
    first, *others = [dataset for dataset in datasets if dataset is not None]
    loader = build_loader(first, None, args)
    loaders = iter([loader, *map(loader.sharing_workers, others)])
    loader.start()
    return [None if dataset is None else next(loaders) for dataset in datasets]


def build_batch_transforms(
    args: Resolved, num_classes: int, device: torch.device | None = None
) -> tuple[transforms.BatchTransform, transforms.BatchTransform]:
    """Return the transforms of a batch on the device (by default `--device`) for training and for evaluation."""
    device = device or torch.device(args.device)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    normalize = transforms.Normalize(args.mean, args.std, device, memory_format)
    training = transforms.BatchTransform(normalize, mix_off_epoch=args.mixup_off_epoch)
    if args.augment and args.random_erase > 0:
        training.erase = transforms.RandomErasing(args.random_erase, is_noisy=args.random_erase_fill == "pixel")
    alphas = {"mixup_alpha": args.mixup_alpha, "cutmix_alpha": args.cutmix_alpha}
    odds = {"prob": args.mixup_prob, "switch_prob": args.mixup_switch_prob}
    training.mix = transforms.get_mixup_cutmix(**alphas, num_classes=num_classes, mode=args.mixup_mode, **odds)
    return training, transforms.BatchTransform(normalize)


class DeviceLoader:
    """Iterate over a loader's uint8 batches as batches that are ready for the model.

    Targets are (B,) classes, or (B, num_classes) zeros and ones for images of several labels.
    On an accelerator with streams one of its own copies and transforms a batch while the model works on the last one.
    A training batch's draws are addressed by the run's seed, the step and the micro-batch.
    """

    def __init__(
        self, loader: BatchLoader, device: torch.device, transform: transforms.BatchTransform, seed: int = 0
    ) -> None:
        self.loader, self.device, self.transform, self.seed = loader, device, transform, seed
        self.dataset = dataset = getattr(loader, "dataset", None)
        sets = dataset.index.label_sets if isinstance(dataset, IndexedImageFolder) else None
        self.label_sets = None if sets is None else torch.from_numpy(sets).to(device)
        self.streams = torch.get_device_module(device)
        self.stream = self.streams.Stream(device) if device.type != "cpu" and hasattr(self.streams, "Stream") else None

    def __len__(self) -> int:
        return len(self.loader)

    def numbers(self) -> Iterator[Tensor]:
        """Yield the numbers in the set of each batch's images, in the order of the batches."""
        for keys in self.loader.batch_sampler:
            yield torch.tensor(keys)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._batches(iter(self.loader))
        return batches if self.stream is None else self._one_ahead(batches)

    def _batches(self, loaded: Iterator[tuple]) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = self.loader.sampler
        is_training = isinstance(sampler, TrainSampler)
        addresses = sampler.addresses() if is_training else [(0, 0)] * len(self.loader)
        for (image, target), (step, shard) in zip(loaded, addresses, strict=True):
            watchdog.beat("" if is_training else "evaluating")
            rng = random.Random(fold_seed(MIXING, self.seed, step, shard))
            image = image.to(self.device, non_blocking=True)
            target = target.to(self.device, non_blocking=True)
            target = target if self.label_sets is None else self.label_sets[target].float()
            yield self.transform(image, target, rng, sampler.epoch if is_training else 0)

    def _one_ahead(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each batch once the stream has begun to prepare the next one."""
        ready = None
        while True:
            current = self.streams.current_stream(self.device)
            # The next batch may reuse the memory of a dropped one, so wait until the model, on another stream, is done
            # with all batches so far. `record_stream` would do too, but a host that runs ahead would take more and
            # more memory.
            self.stream.wait_stream(current)
            with self.streams.stream(self.stream):
                following, is_prepared = next(batches, None), self.stream.record_event()
            if ready is not None:
                yield ready
            if following is None:
                return
            self.streams.current_stream(self.device).wait_event(is_prepared)
            ready = following


def build_device_loader(
    args: Resolved, loader: BatchLoader | None, sampler: Any, device: torch.device, num_classes: int
) -> DeviceLoader | None:
    """Return a loader's batches on the device, with the training transform for a `TrainSampler`; None for no loader.

    `num_classes` is the model's. Without a sampler the whole set is evaluated.
    """
    if loader is None:
        return None
    train_transform, eval_transform = build_batch_transforms(args, num_classes, device)
    loader.sampler = sampler = sampler or build_eval_sampler(loader.dataset, args)
    transform = train_transform if isinstance(sampler, TrainSampler) else eval_transform
    return DeviceLoader(loader, device, transform, args.seed)


def build_device_loaders(
    args: Resolved, loading: Loading, sampler: TrainSampler | None, device: torch.device
) -> tuple[DeviceLoader | None, dict[str, DeviceLoader]]:
    """Return the loader of the training batches, or None, and those of the evaluated sets by their names."""
    loaders = {
        name: build_device_loader(args, loader, sampler if name == "train" else None, device, loading.num_classes)
        for name, loader in loading.loaders.items()
    }
    return loaders.pop("train"), loaders
