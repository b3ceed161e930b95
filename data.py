"""From files to batches on the device: decode and transform in loader processes, finish on the device."""

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.models import WeightsEnum

import collectives
import transforms
from checkpointing.preemption import start_worker
from errors import BadImageError, ImageError, UserError
from loading.encoded import EncodedBatch, EncodedCrop, UndecodableError
from loading.forms import check_source, open_source
from loading.index import RETRY_WAITS_S, with_retries
from loading.loader import ProcessLoader, ThreadLoader, check_workers, collate
from loading.synthetic import SyntheticSource
from models import resolve_weights
from presets import ClassificationPresetEval, ClassificationPresetTrain, ProgressivePreset, build_presets
from randomness import AUGMENTATION, MIXING, Draws, fold_seed, seed_host
from sampler import EvalSampler, RASampler, SampleKey, TrainSampler, VirtualShards


class IndexedImageFolder(Dataset):
    """The images of a split, one folder or tar a class, as uint8 samples; indexed by number or by `SampleKey`.

    Args:
        root: the data path and the split's name; `forms.find_sources` says which files there are its images.
        transform: a preset, whose `load` makes a (3, H, W) uint8 tensor of a file's bytes; where keys are `SampleKey`s,
            its `at` gives the preset of an epoch. It draws from what it is given or from the process's generators.
        seed: the run's, the first part of the address of every draw.

    Raises:
        UserError: there are no such images, or they are in no classes.
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
        self.index = open_source(self.root)
        self.classes = self.index.classes

    def fingerprint(self) -> str:
        """Return a hash of the names and labels of all images; another one means another data set."""
        return self.index.fingerprint()

    def identity(self) -> dict[str, str | None]:
        """Return what tells changed files of the same names apart: see `Source.identity`."""
        return self.index.identity()

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: int | SampleKey) -> tuple[Tensor, int]:
        """Return one image, transformed, and its class.

        Raises:
            ImageError: the image cannot be read; names it.
        """
        try:
            return self._load(key)
        except BadImageError as error:
            raise self.error(_number_of(key), f"{error}; {self._advise(key)}") from error

    def _advise(self, key: int | SampleKey) -> str:
        """Return what to do about a bad image."""
        if not isinstance(key, SampleKey):
            return "replace it: an evaluation leaves none out"
        if self.transform.at(key.epoch).leaves_decoding:  # with which --bad-images skip is refused
            return "replace it, and --resume auto goes on"
        return (
            "replace it, or give the same command with --resume auto --bad-images skip, which goes on without it. This "
            "is the first one met, and others were not looked for; with skip each epoch ends with their number"
        )

    def error(self, number: int, reason: str) -> ImageError:
        """Return the error that says why an image cannot be read."""
        name = self.classes[self.index.label(number)]
        return ImageError(f"cannot read image {self.index.path(number)} (class {name}): {reason}")

    def _load(self, key: int | SampleKey) -> tuple[Tensor, int]:
        """Return one image and its class.

        Raises:
            BadImageError: its bytes are no image, or a damaged one.
            ImageError: the disk or memory failed, several times.
        """
        number = _number_of(key)
        try:
            payload = with_retries(partial(self.index.read, number))
            return with_retries(partial(self._transform, key, payload)), self.index.label(number)
        except (MemoryError, OSError) as error:
            reason = "out of memory" if isinstance(error, MemoryError) else error.strerror or error
            raise self.error(
                number,
                f"{reason} (tried {len(RETRY_WAITS_S) + 1} times); its bytes are not at fault, so that no other image "
                "takes its place: mend that and start again",
            ) from error
        except (BadImageError, ImageError):
            raise
        except Exception as error:  # our fault, which needs its traceback
            error.add_note(f"in {self.index.path(number)}")
            raise

    def _transform(self, key: int | SampleKey, payload: bytes) -> Tensor | EncodedCrop:
        transform, draws = self.transform, None
        if isinstance(key, SampleKey):
            transform = transform.at(key.epoch)
            address = (AUGMENTATION, self.seed, key.epoch, key.index, key.repetition)
            if transform.takes_draws:
                draws = Draws(*address)
            else:
                seed_host(*address)
        try:
            image = transform.load(payload, draws)
        except RuntimeError as error:
            if "you tried to allocate" in str(error):  # torch's way to say it
                raise MemoryError from error
            raise
        return image._replace(number=_number_of(key)) if isinstance(image, EncodedCrop) else image


def _number_of(key: int | SampleKey) -> int:
    return key.index if isinstance(key, SampleKey) else key


class LenientImageFolder(IndexedImageFolder):
    """An `IndexedImageFolder` that takes another image where the bytes of one are bad: `--bad-images skip`.

    It is the next one that can, with its own class and draws: always the same, whoever loads it.
    """

    MAX_TRIES = 100

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, int, int]:
        """Return one image, transformed, its class, and the number of the one that it replaces, or -1.

        Raises:
            ImageError: the next ninety-nine images are bad too, the disk or memory failed, or a tar has changed.
        """
        try:
            return *self._load(key), -1
        except BadImageError as error:
            return *self._replacement(key, error), key.index

    def _replacement(self, key: SampleKey, error: BadImageError) -> tuple[Tensor, int]:
        num_tries = min(self.MAX_TRIES, len(self))
        for step in range(1, num_tries):
            with suppress(BadImageError):  # the next one may be good
                return self._load(key._replace(index=(key.index + step) % len(self)))
        raise self.error(key.index, f"{error}; nor is any of the next {num_tries - 1} good: are these the images?")


class SyntheticImages(IndexedImageFolder):
    """Made-up uint8 images, for runs without data: see `SyntheticSource`.

    Args:
        num_images: the size of the set.
        size_px: side of an image.
        num_classes: labels go round them.
    """

    POOL = SyntheticSource.POOL

    def __init__(self, num_images: int, size_px: int, num_classes: int = 1000) -> None:
        self.index = SyntheticSource(num_images, size_px, num_classes)
        self.classes = self.index.classes

    def __getitem__(self, key: int | SampleKey) -> tuple[Tensor, int]:
        """Return one image and its class, the same class for the same image."""
        number = _number_of(key)
        return self.index.pixels(number), self.index.label(number)


def build_datasets(traindir: str | None, valdir: str | None, args: Any) -> tuple[Dataset | None, Dataset]:
    """Return the training set (None with `--test-only`) and the validation set.

    Raises:
        UserError: a folder is missing or is no image folder, or the two differ in their classes.
    """
    preset_train, preset_eval = build_presets(args)
    if args.synthetic is not None:
        train = None if args.test_only else SyntheticImages(args.synthetic, args.train_crop_size)
        return train, SyntheticImages(max(args.synthetic // 10, 1), args.val_crop_size)
    for folder in [valdir] if args.test_only else [traindir, valdir]:
        check_source(Path(folder))
    dataset_test = IndexedImageFolder(valdir, preset_eval, args.seed)
    # Here, since loader processes may be forked any time from now on.
    dataset_test.index.watch(is_strict=not args.test_only)
    if args.test_only:
        return None, dataset_test
    kind = LenientImageFolder if args.bad_images == "skip" else IndexedImageFolder
    dataset = kind(traindir, preset_train, args.seed)
    dataset.index.watch(is_strict=True)
    if dataset.classes != dataset_test.classes:
        here, there = set(dataset.classes), set(dataset_test.classes)
        which = [f"{name} only in train/" for name in sorted(here - there)[:1]]
        which += [f"{name} only in val/" for name in sorted(there - here)[:1]]
        raise UserError(
            f"{traindir} has {len(here)} classes and {valdir} has {len(there)}, and they differ ({', '.join(which)}); "
            "both need one folder for each class"
        )
    return dataset, dataset_test


def take_published_options(args: Any) -> tuple[Any, list[str]]:
    """Return the options with those that published weights are evaluated with, and a line about each.

    Raises:
        UserError: `--weights` names none.
    """
    if not args.weights or Path(args.weights).is_file():
        return args, []
    weights = resolve_weights(args)  # whose name may be wrong, in training too
    if not args.test_only:
        return args, []
    published = options_of_weights(weights)
    changes = {name: value for name, value in published.items() if name not in args.given}
    lines = [f"{name.replace('_', '-')} {value}: as {args.weights} was published" for name, value in changes.items()]
    return args.replaced(**changes), lines


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


def collate_lenient(
    samples: list[tuple[Tensor, int, int]], *empty: Callable[[tuple[int, ...]], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Put the samples of a `LenientImageFolder` into one batch.

    Returns:
        As `collate`, and (R,) int64: the images that were replaced.
    """
    replaced = torch.tensor([number for _, _, number in samples if number >= 0], dtype=torch.int64)
    return *collate([(image, label) for image, label, _ in samples], *empty), replaced


def collate_encoded(samples: list[tuple[Tensor | EncodedCrop, int]], *_: Callable) -> tuple[EncodedBatch, Tensor]:
    """Put images that the device decodes, and those that it cannot, into one batch."""
    return EncodedBatch([image for image, _ in samples]), torch.tensor([label for _, label in samples])


def build_loader(dataset: Dataset, batch_sampler: Any, args: Any) -> DataLoader | ProcessLoader | ThreadLoader:
    """Return a loader of uint8 batches, or encoded ones, in the sampler's order; its processes live as long as it."""
    is_encoded = args.decode_device != "cpu"
    common = {
        "collate_fn": collate_lenient if isinstance(dataset, LenientImageFolder) else collate,
        "pin_memory": torch.device(args.device).type == "cuda",
    }
    if is_encoded:
        common = {"collate_fn": collate_encoded}
    if not args.workers:
        return DataLoader(dataset, batch_sampler=batch_sampler, **common)
    common |= {"num_workers": args.workers, "prefetch_factor": args.prefetch_factor}
    if args.worker_type == "thread":
        return ThreadLoader(dataset, batch_sampler, **common)
    if _is_forked(args):
        largest = args.batch_size * 3 * max(args.train_crop_size, args.val_crop_size) ** 2
        return ProcessLoader(dataset, batch_sampler, **common, batch_bytes=largest, worker_init_fn=start_worker)
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        persistent_workers=True,
        worker_init_fn=start_worker,
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        **common,
    )


def start_loading(args: Any) -> tuple[tuple[Dataset | None, Dataset], list[ProcessLoader | None]]:
    """Return the training and validation sets, and their loaders where those are processes, which start now.

    Raises:
        UserError: the data cannot be used, or there is not enough of this machine for it.
    """
    check_workers(args.workers)
    start = time.perf_counter()
    sets = build_datasets(*(os.path.join(args.data_path or "", split) for split in ("train", "val")), args)
    dataset, dataset_test = sets
    if dataset is not None:
        print(
            f"{len(dataset)} training and {len(dataset_test)} validation images of {len(dataset.classes)} classes "
            f"({time.perf_counter() - start:.1f} s)"
        )
    return sets, start_loaders(sets, args)


def build_samplers(
    dataset: Dataset | None, dataset_test: Dataset, args: Any
) -> tuple[TrainSampler | None, EvalSampler]:
    """Return the samplers of the training set's batches (None for no set) and of the validation set's."""
    test_sampler = EvalSampler(len(dataset_test), args.batch_size, args.rank, args.world_size)
    if dataset is None:
        return None, test_sampler
    shards = VirtualShards(args.global_batch_size, args.num_shards, args.rank, args.world_size)
    if args.ra_sampler:
        train_sampler = RASampler(len(dataset), shards, args.seed, repetitions=args.ra_reps)
    else:
        train_sampler = TrainSampler(len(dataset), shards, args.seed)
    print(
        f"global batch {args.global_batch_size} = {shards.num_shards} shards x {shards.batch_size} images, "
        f"{shards.num_local} a process; {train_sampler.steps_per_epoch} steps an epoch"
    )
    return train_sampler, test_sampler


def start_loaders(datasets: Iterable[Dataset | None], args: Any) -> list[ProcessLoader | None]:
    """Start the processes that will load the batches of sets, where they are forked: before there are other threads.

    Returns:
        Loaders that lack their samplers, for `build_device_loader`; None for one that has nothing to start.

    Raises:
        LimitError: they cannot be started.
    """
    if not _is_forked(args):
        return [None for _ in datasets]
    loaders = [None if dataset is None else build_loader(dataset, (), args) for dataset in datasets]
    for loader in loaders:
        if loader is not None:
            loader.start()
    return loaders


def _is_forked(args: Any) -> bool:
    """Tell whether batches come from a `ProcessLoader`, which those that are encoded, of any size, do not fit."""
    is_process = args.workers and args.worker_type == "process"
    return bool(is_process and sys.platform == "linux" and args.decode_device == "cpu")


def build_batch_transforms(
    args: Any, num_classes: int, device: torch.device | None = None
) -> tuple[transforms.BatchTransform, transforms.BatchTransform]:
    """Return what is done to each batch on the device (by default `--device`) in training and in evaluation."""
    device = device or torch.device(args.device)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    normalize = transforms.Normalize(args.mean, args.std, device, memory_format)
    mix = transforms.get_mixup_cutmix(
        mixup_alpha=args.mixup_alpha,
        cutmix_alpha=args.cutmix_alpha,
        num_classes=num_classes,
        prob=args.mixup_prob,
        switch_prob=args.mixup_switch_prob,
    )
    erase = transforms.RandomErasing(args.random_erase) if args.random_erase > 0 else None
    # Of no use on a CPU, and not in the thread that decodes: the model is compiled at the same time.
    is_compiled = args.compile is not None and device.type == "cuda" and args.decode_device == "cpu"
    backend = "inductor" if is_compiled else None
    return (
        transforms.BatchTransform(normalize, erase, mix, args.mixup_off_epoch, backend=backend),
        transforms.BatchTransform(normalize, backend=backend),
    )


class _AtOnce(Executor):
    """Does what is submitted to it before anything else."""

    def submit(self, function: Callable, *args: Any) -> Future:
        done = Future()
        done.set_result(function(*args))
        return done


class DeviceLoader:
    """Iterate over a loader's uint8 batches as batches that are ready for the model.

    On an NVIDIA GPU the next batch is copied and transformed on a stream of its own, while the model works on the one
    before it. Encoded batches are decoded in a thread of their own, one ahead as well, since that keeps the host busy.

    Args:
        loader: yields (B, 3, H, W) uint8 or an `EncodedBatch`, and (B,) int64 on the CPU.
        device: where the batches go.
        transform: what is done to them there.
        seed: the run's; a training batch's draws are addressed by it, the step and the shard.
        is_encoded: the batches are encoded ones.

    Attributes:
        replaced: the images that others stood in for, of the batches of this epoch that were taken so far.
        refused: those that the device could not decode, likewise.
    """

    def __init__(
        self,
        loader: DataLoader | ProcessLoader | ThreadLoader,
        device: torch.device,
        transform: transforms.BatchTransform,
        seed: int = 0,
        *,
        is_encoded: bool = False,
    ) -> None:
        self.loader = loader
        self.device = device
        self.transform = transform
        self.seed = seed
        self.is_encoded = is_encoded
        self.replaced, self.refused = [], []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def dataset(self) -> Dataset:
        """What the loader loads."""
        return self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def numbers(self) -> Iterator[Tensor]:
        """Yield the numbers in the set of each batch's images, in the order of the batches."""
        for keys in self.loader.batch_sampler:
            yield torch.tensor([_number_of(key) for key in keys])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Here and not in the thread that decodes: loader processes end with the thread that has started them.
        batches = self._batches(iter(self.loader))
        return batches if self.stream is None and not self.is_encoded else self._one_ahead(batches)

    def _batches(self, loaded: Iterator[tuple]) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = self.loader.batch_sampler
        is_training = isinstance(sampler, TrainSampler)
        epoch = sampler.epoch if is_training else 0
        addresses = sampler.addresses() if is_training else [(0, 0)] * len(self.loader)
        self.replaced, self.refused = [], []
        for (image, target, *replaced), (step, shard) in zip(loaded, addresses, strict=True):
            # Not where they are loaded: loader processes run ahead, and into steps that are never made.
            self.replaced += [number for numbers in replaced for number in numbers.tolist()]
            rng = random.Random(fold_seed(MIXING, self.seed, step, shard))
            image = self._decode(image) if self.is_encoded else image.to(self.device, non_blocking=True)
            target = target.to(self.device, non_blocking=True)
            yield self.transform(image, target, rng, epoch)

    def _decode(self, batch: EncodedBatch) -> Tensor:
        try:
            image = batch.decode(self.device)
        except UndecodableError as error:
            raise self.dataset.error(error.number, str(error)) from error
        self.refused += batch.refused
        return image

    def _prepare(self, batches: Iterator) -> tuple[tuple[Tensor, Tensor] | None, torch.cuda.Event | None]:
        """Return the next batch, or None, and when it will be ready on the device."""
        if self.stream is None:
            return next(batches, None), None
        with torch.cuda.stream(self.stream):
            return next(batches, None), self.stream.record_event()

    def _one_ahead(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each batch once the device, or a thread, has been given the next one to prepare."""
        ready = None
        with ThreadPoolExecutor(1, "decoder") if self.is_encoded else _AtOnce() as executor:
            while True:
                if self.stream is not None:
                    # The next batch may take memory of a batch that was dropped: not before the model, which works on
                    # another stream, is done with all that it was given until then. `record_stream` would do that too,
                    # but a host that runs ahead would take more and more memory.
                    self.stream.wait_stream(torch.cuda.current_stream(self.device))
                following = executor.submit(self._prepare, batches)
                if ready is not None:
                    yield ready
                ready, is_prepared = following.result()
                if ready is None:
                    return
                if is_prepared is not None:
                    torch.cuda.current_stream(self.device).wait_event(is_prepared)


def build_device_loader(
    args: Any,
    dataset: Dataset | None,
    sampler: Any,
    device: torch.device,
    num_classes: int,
    started: ProcessLoader | None = None,
) -> DeviceLoader | None:
    """Return what iterates over a set, transformed for training if the sampler is a training one; None for no set.

    Args:
        args: the options.
        dataset: the set.
        sampler: of its batches.
        device: where the batches go.
        num_classes: of the model.
        started: what `start_loaders` returned for the set.
    """
    if dataset is None:
        return None
    train_transform, eval_transform = build_batch_transforms(args, num_classes, device)
    transform = train_transform if isinstance(sampler, TrainSampler) else eval_transform
    if started is None:
        started = build_loader(dataset, sampler, args)
    else:
        started.batch_sampler = sampler
    return DeviceLoader(started, device, transform, args.seed, is_encoded=args.decode_device != "cpu")


def build_device_loaders(
    args: Any,
    datasets: tuple[Dataset | None, Dataset],
    samplers: tuple[Any, Any],
    device: torch.device,
    started: list[ProcessLoader | None],
) -> list[DeviceLoader | None]:
    """Return what iterates over the training set (None for no set) and over the validation set."""
    num_classes = len(datasets[1].classes)
    each = zip(datasets, samplers, started, strict=True)
    return [
        build_device_loader(args, dataset, sampler, device, num_classes, loader) for dataset, sampler, loader in each
    ]


def report_images(data_loader: DeviceLoader, epoch: int) -> None:
    """Say which images of an epoch others stood in for, and which ones the device could not decode.

    Collective: every rank must call it.
    """
    if isinstance(data_loader.dataset, LenientImageFolder):
        _report(data_loader, epoch, data_loader.replaced, "could not be read and were replaced")
    if data_loader.is_encoded:
        what = (
            f"were not decoded on {data_loader.device.type} but by Pillow, and the others of their batches one by one"
        )
        _report(data_loader, epoch, data_loader.refused, what)


def _report(data_loader: DeviceLoader, epoch: int, numbers: list[int], what: str) -> None:
    samples = torch.cat(collectives.all_gather(torch.tensor(numbers, dtype=torch.int64)))
    images = samples.unique().tolist()
    if not images:
        return
    first_step = data_loader.loader.batch_sampler.start_step
    since = f" since step {first_step}" if first_step else ""
    index = data_loader.dataset.index
    paths = ", ".join(index.path(number) for number in images[:3]) + (", ..." if len(images) > 3 else "")
    print(f"Epoch: [{epoch}] {len(images)} images {what}{since} ({len(samples)} samples): {paths}")
