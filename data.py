"""From files to batches on the device: loader processes decode and crop images, the device transforms batches."""

import os
import random
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sized
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from distributed import collectives
from distributed.launch import read_launch
from distributed.lending import at_end
from distributed.watch import watchdog
from errors import BadImageError, ImageError, UserError, as_user_error, counted, one_line
from files import read_bytes, retry
from loading.child import in_child
from loading.decode import Decoding, decode_plainly
from loading.forms import check_source, find_sources, open_source, open_split, remote_options
from loading.loader import BatchLoader, check_workers, largest_batch_bytes
from loading.on_device import BatchTransform, Normalize
from loading.source import Source, alike_classes, count_classes, is_remote, labels_of
from presets import ClassificationPresetEval, build_presets
from randomness import AUGMENTATION, ERASING, FLIP, MIXING, Draws, fold_seed, seed_host
from sampler import EvalSampler, SampleKey, TrainSampler, VirtualShards
from settings import config
from settings.machine import fast_decoder
from settings.options import (
    WITH_DEFAULT,
    AugmentationOptions,
    DataOptions,
    DistributedOptions,
    OptimizationOptions,
    fit_statistics,
)
from settings.rules import split_custom
from settings.stages import Assigned, Resolved, values_of

LOOK_S = 10.0  # within which a start looks at some images of each set


class IndexedImageFolder(Dataset):
    """The images of a split in any form of `loading.forms`; indexed by number or by `SampleKey`.

    Scripts may use it as torchvision's `ImageFolder`; our own loader calls `load`. All draws for a `SampleKey` are
    addressed by it; those for a plain number come from the process's generators.

    Args:
        root: the data path and the split's name; `forms.find_sources` looks for its files there.
        transform: a preset, or what gives one `at` an epoch; or, for `dataset[number]` alone, a function of a PIL
            image, or None.
        seed: the run's seed, the first part of the address of every draw.
        source: the open source of the images; by default that of the whole split.

    Raises:
        UserError: the split is not there, or its files are not divided into classes.
    """

    target_transform: Callable[[int], Any] | None = None
    filler: Any = None  # the process that fills the machine's cache with a remote training set

    def __init__(self, root: str | Path, transform: Any, seed: int = 0, source: Source | None = None) -> None:
        self.root = Path(root)
        self.transform = transform
        self.seed = seed
        if source is None:
            source = open_source(self.root)
        self.index = source
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

    # ImageFolder's second name for them, by which scripts count the images of each class.
    imgs = property(attrgetter("samples"))

    @cached_property
    def targets(self) -> list[int]:
        """The class of each image."""
        return [label for _, label in self.samples]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: int) -> tuple[Any, int]:
        """Return one image, by a preset (3, H, W) normalised floats, and its class; ImageError names a bad one."""
        if not isinstance(key, SampleKey):
            key = range(len(self))[key]  # as a list takes it: from the end if negative, IndexError if too large
        image, label = self.load(key)
        if self.target_transform is not None:
            label = self.target_transform(label)
        preset = self._preset(key)
        if not hasattr(preset, "load"):
            return image, label
        # An address of its own: the load may have drawn from the same generators or not, and any number of times.
        if isinstance(key, SampleKey) and preset.random_erase_prob > 0:
            seed_host(ERASING, self.seed, key.epoch, key, key.repetition)
        return preset.finish(image), label

    def _preset(self, key: int) -> Any:
        """Return the preset of a key's epoch, or of epoch 0 for a plain number; any other transform unchanged."""
        if not hasattr(self.transform, "at"):
            return self.transform
        return self.transform.at(key.epoch if isinstance(key, SampleKey) else 0)

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
            # Two retries, as one for both would read the file again where memory is short in decoding alone.
            payload = retry(partial(self.index.read, key))
            return retry(partial(self._transform, key, payload)), self.index.label(key)
        except (MemoryError, OSError) as error:
            reason = "out of memory" if isinstance(error, MemoryError) else error.strerror or error
            remedy = "the file itself may be intact: check the disk and the memory, and start again"
            raise self.error(key, f"{reason} (tried 4 times); {remedy}") from error
        except BadImageError as error:
            raise self.error(key, f"{error}; replace the file, or leave it out of the data") from error
        except ImageError:  # it says all that is known: of files that have changed, or a policy of the user's own
            raise
        except Exception as error:
            if payload is None:  # a bug of the user's own source
                raise self.error(key, f"its source's read failed: {type(error).__name__}: {error}") from error
            # A bug of ours: keep its traceback.
            error.add_note(f"in {self.index.path(key)}")
            raise

    def _transform(self, key: int, payload: bytes) -> Any:
        preset = self._preset(key)
        draws = None
        if isinstance(key, SampleKey):
            # By address and not from a stream: which process loads an image, how far ahead and after which others then
            # changes nothing, a second try after a failure draws the same, and a checkpoint holds no generator's state.
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
            if self._is_flipped(preset, key):
                pixels = pixels.flip(-1)
            return pixels
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


class SyntheticImages(IndexedImageFolder):
    """Made-up uint8 images with sides of `size_px`, for runs without data: see `loading/synthetic.py`."""

    def __init__(self, num_images: int, size_px: int, num_classes: int = 1000, in_chans: int = 3) -> None:
        from loading.synthetic import SyntheticSource

        source = SyntheticSource(num_images, size_px, num_classes, in_chans)
        mean, std = (fit_statistics(values, in_chans) for values in (config.IMAGENET_MEAN, config.IMAGENET_STD))
        super().__init__(source.root, ClassificationPresetEval(crop_size=size_px, mean=mean, std=std), source=source)
        self.pixels = source.pixels

    def load(self, key: int) -> tuple[Tensor, int]:
        """Return one image as (in_chans, size_px, size_px) uint8, and its class; equal pixels have equal classes."""
        return self.pixels(key), self.index.label(key)


def build_datasets(
    traindir: str | None, valdir: str | None, args: Resolved
) -> tuple[IndexedImageFolder | None, IndexedImageFolder]:
    """Return the training set (None with `--test-only`) and the validation set.

    Raises:
        UserError: a split is missing or is no set of images, or the two differ in their classes.
    """
    options = args.data
    preset_train, preset_eval = build_presets(options, args.augmentation)
    if options.synthetic is not None:
        return _synthetic_sets(args)
    if options.minival:
        valdir = traindir
    if not split_custom(options.data_path or "") and not is_remote(options.data_path):
        # Both are looked for before one is opened, which for class folders on a network disk takes minutes.
        if not args.checkpoint.test_only:
            check_source(Path(traindir), is_all=options.minival is not None)
        check_source(Path(valdir), is_all=options.minival is not None)
    source = None
    source_test = open_split(valdir, options)
    if options.minival:
        from loading.parts import hold_out

        source_test, source = hold_out(source_test, options.minival, options.minival_fold)
    source_test = _limited(source_test, options.limit_val_images, "--limit-val-images")
    dataset_test = IndexedImageFolder(valdir, preset_eval, args.optimization.seed, source_test)
    if args.checkpoint.test_only:
        return None, dataset_test
    if source is None:
        source = open_split(traindir, options)
    source = _limited(source, options.limit_train_images, "--limit-train-images")
    if not options.minival and os.path.realpath(traindir) == os.path.realpath(valdir):
        print(f"train and val are the same folder, {valdir}: the model is evaluated on its training images")
    if "list" in (source.form, source_test.form):
        from loading.lists import check_disjoint

        check_disjoint(source, source_test)
    dataset = IndexedImageFolder(traindir, preset_train, args.optimization.seed, source)
    check_classes(dataset, dataset_test)
    return dataset, dataset_test


def _synthetic_sets(args: Resolved) -> tuple[SyntheticImages | None, SyntheticImages]:
    """Return a training set, or None with `--test-only`, and a validation set of a tenth as many images."""
    number, in_chans, sizes = args.data.synthetic, args.data.in_chans, args.augmentation
    is_trained = not args.checkpoint.test_only
    train = SyntheticImages(number, sizes.train_crop_size, in_chans=in_chans) if is_trained else None
    return train, SyntheticImages(max(number // 10, 1), sizes.val_crop_size, in_chans=in_chans)


def _limited(source: Source, num_images: int | None, flag: str) -> Source:
    """Return the images of a trial that `flag` limits to a number, or all of the source without a number."""
    if num_images is None:
        return source
    from loading.parts import limit_images

    return limit_images(source, num_images, flag)


def check_classes(dataset: IndexedImageFolder, dataset_test: IndexedImageFolder) -> None:
    """Raise UserError if the classes of two sets differ."""
    here, there = dataset.classes, dataset_test.classes
    # A label is a place among the classes' names: a folder too many in val/ shifts all labels after it.
    if here != there:
        names = ", ".join(sorted(set(here) ^ set(there))[:3]) or "the same names in another order"
        sizes = f"{dataset.root} has {len(here)} classes and {dataset_test.root} has {len(there)}"
        remedy = "both need a folder for every class; for lists that lack a class, write a classes.txt"
        raise UserError(f"{sizes}, and they differ ({names}); {remedy}")


def build_more_sets(
    data_options: DataOptions, seed: int, dataset_test: IndexedImageFolder
) -> dict[str, IndexedImageFolder]:
    """Return the sets of `--eval-data` by their names; UserError if one has other classes than the validation set."""
    sets = {}
    if data_options.synthetic is not None:
        return sets
    for text in data_options.eval_data or ():
        from loading.named import open_named

        how = data_options.multi_label, data_options.extensions
        name, source = open_named("--eval-data", text, *how, **remote_options(data_options))
        sets[name] = IndexedImageFolder(source.root, dataset_test.transform, seed, source)
        with as_user_error(f"--eval-data {name}"):
            check_classes(sets[name], dataset_test)
        print(f"--eval-data {text}: {counted(len(source), 'image')}")
    return sets


def load_data(
    traindir: str, valdir: str, args: Any
) -> tuple[IndexedImageFolder | None, IndexedImageFolder, TrainSampler | None, EvalSampler]:
    """Return both sets and their samplers for plain loaders; `args` are a parser's options, or those of `main`.

    A pass over the training sampler without a `set_epoch` before it is the next epoch. Under `--test-only` training
    images may be missing; the training set and its sampler are then None.

    Raises:
        UserError: the folders cannot be used; the message gives the reason.
    """
    if not isinstance(args, Assigned):
        args = _assign_plain(traindir, args)
    dataset, dataset_test = build_datasets(traindir, valdir, args)
    train_sampler = build_train_sampler(dataset, args.augmentation, args.optimization, args.distributed)
    if train_sampler is not None:
        train_sampler.advances_itself = True
    return dataset, dataset_test, train_sampler, build_eval_sampler(dataset_test, args.optimization, args.distributed)


def _assign_plain(traindir: str, args: Any) -> Assigned:
    """Return the options of a script around `load_data`, such as torchvision's, as those of a run."""
    # torchvision's scripts pass the folders of the splits, and our options are of the folder above them.
    options = Namespace(**{**values_of(args), "data_path": os.path.dirname(traindir)})
    parsed = config.resolve(options, foreign=("model", "weights", "test_only"))
    joined = {"rank": collectives.get_rank(), "world_size": collectives.get_world_size()}
    args = Resolved.of({**parsed.flat(), **joined, "given": []})
    if args.checkpoint.test_only and args.model.weights:
        from checkpointing.first_weights import choose_published_options, is_stored

        if not is_stored(args.model.weights):
            args, _ = choose_published_options(args)
    return config.assign(args.replaced(test_only=args.checkpoint.test_only and not find_sources(Path(traindir))), None)


def build_loader(
    dataset: Dataset,
    sampler: Any,
    data_options: DataOptions,
    augmentation: AugmentationOptions,
    optimization: OptimizationOptions,
    device: str,
) -> BatchLoader:
    """Return a loader of uint8 batches in the sampler's order; its processes live as long as the loader."""
    # From pinned memory a device copies by itself, while the host goes on.
    is_pinned = torch.device(device).type != "cpu"
    num_bytes = largest_batch_bytes(optimization, augmentation, data_options.in_chans)
    return BatchLoader(dataset, sampler, num_workers=data_options.workers, batch_bytes=num_bytes, pin_memory=is_pinned)


class Loading(NamedTuple):
    """The sets of a run, and the loaders that have begun to load them."""

    args: Resolved  # with which the sets were opened
    # Of training, of validation, of `--eval-data`.
    datasets: tuple[IndexedImageFolder | None, IndexedImageFolder, dict[str, IndexedImageFolder]]
    loaders: dict[str, BatchLoader | None]  # `train` and the evaluated sets; without samplers

    @property
    def num_classes(self) -> int:
        """The number of classes of every set."""
        return len(self.datasets[1].classes)

    def serves(self, args: Resolved) -> bool:
        """Tell whether these options, perhaps completed from a checkpoint, prepare images as those of the sets do."""
        # The loaders' processes start before a checkpoint is read, to be forked before there are threads. Where its
        # options then change how images are prepared, they have begun with the wrong ones.
        names = ["train_crop_size", "val_crop_size", "val_resize_size", "interpolation", *WITH_DEFAULT]
        if (args.augmentation.auto_augment or "").startswith("timm/"):  # which fills gaps with the mean
            names.append("mean")
        theirs, ours = self.args.flat(), args.flat()
        return all(theirs[name] == ours[name] for name in names)


def start_loading(args: Resolved) -> Loading:
    """Open the sets and start to load them.

    Raises:
        UserError: the data cannot be used, or this machine has too little memory or too few cores for it.
    """
    options = args.data
    watchdog.note_progress("opening the data")
    check_workers(options.workers)
    start = time.perf_counter()
    dataset, dataset_test = build_datasets(*config.split_dirs(options.data_path), args)
    if decoder := fast_decoder(options):
        print(f"JPEGs are decoded by TorchCodec {decoder}, to the same pixels as by Pillow")
    if dataset is not None:
        print(
            f"{len(dataset)} training and {len(dataset_test)} validation images of "
            f"{counted(len(dataset.classes), 'class')} ({time.perf_counter() - start:.1f} s)"
        )
        if remark := alike_classes(dataset.classes):
            print(remark)
        is_balanced = args.augmentation.balanced_sampler
        warn_of_uneven(dataset, is_balanced, args.optimization.class_weights, options.synthetic)
    # One process on each machine fills the cache that its ranks share; each would else fetch every byte.
    if is_remote(options.data_path) and not args.checkpoint.test_only and read_launch().local_rank == 0:
        from loading.fill import start_filling

        splits = ["train"] if options.minival else ["train", "val"]
        dataset.filler = start_filling({"url": options.data_path, "splits": splits, **remote_options(options)})
        at_end(dataset.filler.communicate)  # which closes its standard input, and so ends it
    more = build_more_sets(options, args.optimization.seed, dataset_test)
    sets = {"train": dataset, config.evaluated_set(options): dataset_test, **more}
    for name, each in sets.items():
        if each is not None:
            px = args.augmentation.train_crop_size if name == "train" else args.augmentation.val_resize_size
            note_files(name, each.index, options, args.distributed.rank, px)
    groups = options, args.augmentation, args.optimization
    loaders = start_loaders(sets.values(), *groups, args.distributed.device)
    return Loading(args, (dataset, dataset_test, more), dict(zip(sets, loaders, strict=True)))


def note_files(name: str, source: Source, data_options: DataOptions, rank: int, px: int) -> None:
    """Print remarks about a set's files: stored turned, of few grey levels, or a pack's, of training if too small.

    `px` is the size to which they are resized. UserError for a pack that cannot serve the options.
    """
    pack = source.pack if isinstance(source.pack, dict) else None
    if pack is not None:
        from loading.packed import check_pack

        check_pack(source.where, pack, exif=data_options.exif, grey_range=data_options.grey_range)
    # By one process: every rank of a large job would read the same files only to have its line suppressed.
    if data_options.synthetic is None and rank == 0:
        how = Decoding(exif=data_options.exif, grey_range=data_options.grey_range)
        # In a child, as nothing ends a read from a disk that hangs, and the start would hang with it.
        watchdog.note_progress(extra_s=LOOK_S)
        try:
            found = in_child(partial(_look, source, how), LOOK_S)
        except TimeoutError:
            found = b""  # of a disk that hangs, which the watchdog names
        for words in filter(None, found.decode().splitlines()):
            print(one_line(f"{name}: {source.where}: {words}"))
    if pack is not None:
        from loading.packed import size_remark

        if remark := size_remark(pack, is_training=name == "train", px=px):
            print(f"{name}: {remark}")


def _look(source: Source, how: Decoding) -> bytes:
    from loading.remarks import remarks  # in the child alone

    return remarks(source, how).encode()


def warn_of_uneven(
    dataset: IndexedImageFolder, balanced_sampler: bool, class_weights: str | None, synthetic: int | None
) -> None:
    """Print a line if a class has at most a tenth as many images as most classes, and no option is about that."""
    counts = count_classes(dataset.index)
    if len(counts) == 1 and dataset.index.label_sets is None:
        print(f"there is only one class, {dataset.classes[0]}: accuracy is 100 %, whatever the model learns")
    smallest, median = int(counts.argmin()), int(numpy.median(counts))
    is_uneven = 10 * counts[smallest] <= median and synthetic is None
    if is_uneven and not (balanced_sampler or class_weights):
        few = f"{dataset.classes[smallest]} has {counted(int(counts[smallest]), 'image')}"
        flags = "--balanced-sampler, --class-weights and --metrics balanced_acc"
        print(f"the classes are imbalanced: {few}, the median class {median:,}; see {flags}")


def build_shards(optimization: OptimizationOptions, distributed: DistributedOptions) -> VirtualShards:
    """Return the micro-batches of a step and this process's share of them."""
    total = optimization.global_batch_size
    return VirtualShards(total, distributed.num_shards, distributed.rank, distributed.world_size)


def check_shards(args: Assigned) -> None:
    """Check that these processes can compute the run's micro-batches; UserError if they cannot."""
    shards = build_shards(args.optimization, args.distributed)
    shards.check(needs_same_bits=args.precision.use_deterministic_algorithms, is_synchronised=args.model.sync_bn)
    if args.precision.compile is not None and shards.num_local > 1:
        from models.compiling import check_accumulation

        check_accumulation(args.precision.compile, args.distributed.device)


def build_train_sampler(
    dataset: IndexedImageFolder | None,
    augmentation: AugmentationOptions,
    optimization: OptimizationOptions,
    distributed: DistributedOptions,
) -> TrainSampler | None:
    """Return the sampler of the training set; None if there is no such set."""
    if dataset is None:
        return None
    shards = build_shards(optimization, distributed)
    # For callers of `load_data`: `main` has checked its processes already, by `check_shards`.
    shards.check(needs_same_bits=False)
    repetitions = augmentation.ra_reps if augmentation.ra_sampler else 1
    if augmentation.ra_sampler and distributed.num_shards == 1:
        print("--ra-sampler repeats images within the one micro-batch of a step; torchvision ignores it on one process")
    labels = torch.from_numpy(labels_of(dataset.index)) if augmentation.balanced_sampler else None
    sampler = TrainSampler(len(dataset), shards, optimization.seed, repetitions, labels)
    print(f"{shards.arithmetic}; {counted(sampler.steps_per_epoch, 'step')} per epoch")
    return sampler


def build_eval_sampler(
    dataset: Sized, optimization: OptimizationOptions, distributed: DistributedOptions
) -> EvalSampler:
    """Return the sampler of a set to evaluate."""
    batch_size = optimization.eval_batch_size or optimization.batch_size
    return EvalSampler(len(dataset), batch_size, distributed.rank, distributed.world_size)


def start_loaders(
    datasets: Collection[Dataset | None],
    data_options: DataOptions,
    augmentation: AugmentationOptions,
    optimization: OptimizationOptions,
    device: str,
) -> list[BatchLoader | None]:
    """Return a loader without a sampler for each set, or None; the same processes load all sets, one at a time.

    Processes that are forked start now, before there are other threads.

    Raises:
        StorageError: the processes cannot be started.
    """
    # One set of processes for all sets, as training waits while one is evaluated: with two sets --workers 2 was four
    # processes, of which two idled in about 100 MiB of memory each.
    first, *others = [dataset for dataset in datasets if dataset is not None]
    loader = build_loader(first, None, data_options, augmentation, optimization, device)
    loaders = iter([loader, *map(loader.sharing_workers, others)])
    loader.start()
    return [None if dataset is None else next(loaders) for dataset in datasets]


def build_batch_transforms(
    augmentation: AugmentationOptions, channels_last: bool, num_classes: int, device: torch.device
) -> tuple[BatchTransform, BatchTransform]:
    """Return the transforms of a batch on the device for training and for evaluation."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    normalize = Normalize(augmentation.mean, augmentation.std, device, memory_format)
    training = BatchTransform(normalize, mix_off_epoch=augmentation.mixup_off_epoch)
    if augmentation.augment and augmentation.random_erase > 0:
        from transforms import RandomErasing

        training.erase = RandomErasing(augmentation.random_erase, is_noisy=augmentation.random_erase_fill == "pixel")
    if augmentation.mixup_alpha > 0 or augmentation.cutmix_alpha > 0:
        from transforms import get_mixup_cutmix

        training.mix = get_mixup_cutmix(
            mixup_alpha=augmentation.mixup_alpha, cutmix_alpha=augmentation.cutmix_alpha, num_classes=num_classes,
            mode=augmentation.mixup_mode, prob=augmentation.mixup_prob, switch_prob=augmentation.mixup_switch_prob,
        )  # fmt: skip
    return training, BatchTransform(normalize)


class DeviceLoader:
    """Iterate over a loader's uint8 batches as batches that are ready for the model.

    Targets are (B,) classes, or (B, num_classes) zeros and ones for images of several labels.
    On an accelerator with streams one of its own copies and transforms a batch while the model works on the last one.
    A training batch's draws are addressed by the run's seed, the step and the micro-batch.
    """

    def __init__(self, loader: BatchLoader, device: torch.device, transform: BatchTransform, seed: int = 0) -> None:
        self.loader = loader
        self.device = device
        self.transform = transform
        self.seed = seed
        self._keys: deque[list[int]] | None = None  # of the next pass, if its `numbers` are asked for
        self.dataset = getattr(loader, "dataset", None)
        self.label_sets = None
        if isinstance(self.dataset, IndexedImageFolder) and self.dataset.index.label_sets is not None:
            # A batch brings a row's number for each image: the rows of zeros and ones are on the device once.
            self.label_sets = torch.from_numpy(self.dataset.index.label_sets).to(device)
        self.streams = torch.get_device_module(device)
        self.stream = None
        if collectives.has_streams(device):
            self.stream = self.streams.Stream(device)

    def __len__(self) -> int:
        return len(self.loader)

    def numbers(self) -> Iterator[Tensor]:
        """Return the numbers in the set of each batch's images, in the order of the batches of the next pass.

        Ask before the pass's first batch, and take each batch before its numbers.
        """
        # Not from the sampler once more, whose keys of 256 images take 0.2 ms; and through the loader's processes they
        # would be a third column of every batch.
        self._keys = keys = deque()
        return (torch.tensor(keys.popleft()) for _ in range(len(self)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._batches(iter(self.loader))
        return batches if self.stream is None else self._one_ahead(batches)

    def _batches(self, loaded: Iterator[tuple]) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = self.loader.sampler
        is_training = isinstance(sampler, TrainSampler)
        # An evaluation draws nothing, and any address does.
        addresses = sampler.addresses() if is_training else [(0, 0)] * len(self.loader)
        keys, self._keys = self._keys, None  # a pass whose numbers nobody asks for keeps none
        for (image, target), (step, shard) in zip(loaded, addresses, strict=True):
            watchdog.note_progress("" if is_training else "evaluating")
            if keys is not None:
                keys.append(self.loader.keys)
            # By the micro-batch and not by the process: the same partners and shares on any number of processes.
            rng = random.Random(fold_seed(MIXING, self.seed, step, shard))
            # As uint8, a quarter of the bytes of floats; it is normalised there, where that costs next to nothing.
            image = image.to(self.device, non_blocking=True)
            target = target.to(self.device, non_blocking=True)
            if self.label_sets is not None:
                target = self.label_sets[target].float()
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
                following = next(batches, None)
                is_prepared = self.stream.record_event()
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
    channels_last = args.precision.channels_last
    of_training, of_evaluation = build_batch_transforms(args.augmentation, channels_last, num_classes, device)
    dataset: Any = loader.dataset  # it has a length
    loader.sampler = sampler or build_eval_sampler(dataset, args.optimization, args.distributed)
    transform = of_training if isinstance(loader.sampler, TrainSampler) else of_evaluation
    return DeviceLoader(loader, device, transform, args.optimization.seed)


def build_device_loaders(
    args: Resolved, loading: Loading, sampler: TrainSampler | None, device: torch.device
) -> tuple[DeviceLoader | None, dict[str, DeviceLoader]]:
    """Return the loader of the training batches, or None, and those of the evaluated sets by their names."""
    loaders = {
        name: build_device_loader(args, loader, sampler if name == "train" else None, device, loading.num_classes)
        for name, loader in loading.loaders.items()
    }
    return loaders.pop("train"), loaders
