"""The loaders that `python -m bench.benchmark loader --against` races, each in a process group of its own.

A loader is a function that takes a job and returns a function that begins a pass: batches of images and their numbers.
A job has train.py's options, `args`; the `paths` of its JPEGs, and their opened `source`; the loader's package,
`module`; and an empty `folder`. What a loader's docstring says is printed.
"""

import importlib.util
import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchvision import transforms

import data
import presets
from distributed.signals import end_with_parent
from errors import UserError, as_user_error
from loading import decode
from loading.subset import Subset
from randomness import Draws
from settings import config

SIZE, MEAN, STD = 224, numpy.array(config.IMAGENET_MEAN), numpy.array(config.IMAGENET_STD)
Pass = Callable[[], Iterator[Sequence[Any]]]  # pairs of images and their numbers
# Packages with another name than their loaders, and with another name for pip.
MODULES = {"ours": "settings", "tf": "tensorflow", "dali": "nvidia.dali"}
PIP = {"nvidia.dali": "nvidia-dali-cuda130 nvidia-nvimgcodec-cu13", "streaming": "mosaicml-streaming"}


def ours(job: Namespace) -> Pass:
    """As train.py loads, by TorchCodec if installed: stops decoding below the crop; antialiased, uint8."""
    images = data.IndexedImageFolder("", data.build_presets(job.args.data, job.args.augmentation)[0], source=job.source)
    sampler = data.TrainSampler(len(job.paths), data.VirtualShards(job.args.optimization.batch_size, 1))
    sampler.advances_itself = True
    decode.use_torchcodec()  # as loader processes do
    return data.build_loader(
        images, sampler, job.args.data, job.args.augmentation, job.args.optimization, job.args.distributed.device
    ).__iter__


def ours_pillow(job: Namespace) -> Pass:
    """The same by Pillow alone."""
    decode.find_torchcodec = cache(str)  # finds nothing
    return ours(job)


def batches(job: Namespace, load: Callable, items: Any = None, collate: Callable = default_collate) -> Pass:
    """Return torch's loader of what `load` makes of JPEGs; items are pairs, or dicts, of one and its number."""

    def load_batch(items: list) -> Any:
        pairs = (item.values() if isinstance(item, dict) else item for item in items)
        return collate([(load(jpeg), int(number)) for jpeg, number in pairs])

    items = [(path, n) for n, path in enumerate(job.paths)] if items is None else items
    num_workers, is_listed = job.args.data.workers, not isinstance(items, IterableDataset)
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return DataLoader(items, job.args.optimization.batch_size, is_listed, collate_fn=load_batch, **workers).__iter__


def by_pillow(steps: Callable) -> Callable:
    """Return a function of a JPEG's path or bytes that decodes it by Pillow."""
    return lambda jpeg: steps(decode.decode_plainly(jpeg if isinstance(jpeg, bytes) else Path(jpeg).read_bytes()))


def crop(job: Namespace, of: Any, *more: Callable) -> Callable:
    """Return torchvision's random crop and flip, of its transforms v1 or v2, and more steps."""
    scale = job.args.augmentation.crop_scale, 1
    return of.Compose([of.RandomResizedCrop(SIZE, scale), of.RandomHorizontalFlip(), *more])


def torchvision(job: Namespace) -> Pass:
    """Its reference's default: Pillow decodes whole images; antialiased; makes floats and normalises."""
    to_float, normalize = transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)
    return batches(job, by_pillow(crop(job, transforms, transforms.PILToTensor(), to_float, normalize)))


def torchvision_uint8(job: Namespace, items: Any = None) -> Pass:
    """Its reference's default without floats: Pillow decodes whole images; antialiased, uint8."""
    return batches(job, by_pillow(crop(job, transforms, transforms.PILToTensor())), items)


def timm(job: Namespace) -> Pass:
    """Its transform without colour jitter, and fast_collate: Pillow decodes whole images; antialiased, uint8."""
    options = {"scale": (job.args.augmentation.crop_scale, 1), "color_jitter": None, "interpolation": "bilinear"}
    steps = job.module.data.create_transform(SIZE, is_training=True, use_prefetcher=True, **options)
    return batches(job, by_pillow(steps), collate=job.module.data.loader.fast_collate)


def torchcodec(job: Namespace) -> Pass:
    """Its decode_jpeg decodes whole images; transforms.v2, antialiased, uint8."""
    steps = crop(job, transforms.v2)
    return batches(job, lambda path: steps(job.module.decoders.decode_jpeg(path)))


def simplejpeg(job: Namespace) -> Pass:
    """It decodes whole images; our random numbers, torch's antialiased resize, uint8."""

    def load(path: str) -> torch.Tensor:
        image = torch.from_numpy(job.module.decode_jpeg(Path(path).read_bytes(), "RGB")).permute(2, 0, 1)
        draws = Draws(time.monotonic_ns())
        shape, scale = image.shape, job.args.augmentation.crop_scale
        top, left, height, width = presets.draw_box(shape[1], shape[2], scale, draws)
        image = presets.resize(image[:, top : top + height, left : left + width], SIZE, SIZE, "bilinear")
        image = image.flip(-1) if draws.uniform() < 0.5 else image
        return image.permute(1, 2, 0)  # as its pixels lie: batches are copied faster

    return batches(job, load)


def dali(job: Namespace) -> Pass:
    """On the CPU: decodes the crop alone; antialiased, uint8; threads of its own."""
    fn, size = job.module.fn, job.args.optimization.batch_size
    with job.module.Pipeline(size, max(job.args.data.workers, 1), None, exec_dynamic=False) as pipe:
        jpeg, number = fn.readers.file(files=job.paths, labels=[*range(len(job.paths))], random_shuffle=True)
        options = {"random_area": [job.args.augmentation.crop_scale, 1.0], "adjust_orientation": False, "device": "cpu"}
        image = fn.resize(fn.decoders.image_random_crop(jpeg, **options), size=[SIZE, SIZE])
        pipe.set_outputs(fn.flip(image, horizontal=fn.random.coin_flip()), number)
    return lambda: ([numpy.asarray(part.as_tensor()) for part in pipe.run()] for _ in range(len(job.paths) // size))


def tf_data(job: Namespace) -> Pass:
    """Its decode_and_crop_jpeg decodes the crop alone; antialiased, by way of floats to uint8; threads of its own."""
    tf, num_threads = job.module, max(job.args.data.workers, 1)
    options = {"area_range": (job.args.augmentation.crop_scale, 1), "min_object_covered": 0}
    options |= {"use_image_if_no_bounding_boxes": True}

    def load(path: Any, number: Any) -> tuple:
        jpeg = tf.io.read_file(path)
        shape = tf.io.extract_jpeg_shape(jpeg)
        corner, size, _ = tf.image.sample_distorted_bounding_box(shape, tf.zeros([1, 0, 4]), **options)
        image = tf.image.decode_and_crop_jpeg(jpeg, tf.concat([corner[:2], size[:2]], 0), channels=3)
        image = tf.image.random_flip_left_right(tf.image.resize(image, [SIZE, SIZE], antialias=True))
        return tf.saturate_cast(tf.round(image), tf.uint8), number

    items = tf.data.Dataset.from_tensor_slices((job.paths, [*range(len(job.paths))])).shuffle(len(job.paths))
    images = items.map(load, num_parallel_calls=num_threads, deterministic=False).batch(
        job.args.optimization.batch_size
    )
    return images.prefetch(2).as_numpy_iterator


def webdataset(job: Namespace) -> Pass:
    """Tars and a shuffle buffer: Pillow decodes whole images, torchvision's transforms, uint8."""
    with job.module.ShardWriter(f"{job.folder}/%d.tar", maxcount=-(-len(job.paths) // 8), verbose=0) as out:
        for number, path in enumerate(job.paths):
            out.write({"__key__": str(number), "jpg": Path(path).read_bytes(), "cls": number})
    tars = list(map(str, Path(job.folder).glob("*.tar")))
    items = job.module.WebDataset(tars, shardshuffle=8, empty_check=False).shuffle(256).to_tuple("jpg", "cls")
    return torchvision_uint8(job, items)


def streaming(job: Namespace) -> Pass:
    """Local MDS shards: Pillow decodes whole images, torchvision's transforms, uint8."""
    with job.module.MDSWriter(out=job.folder, columns={"jpeg": "bytes", "number": "int"}) as out:
        for number, path in enumerate(job.paths):
            out.write({"jpeg": Path(path).read_bytes(), "number": number})
    size = job.args.optimization.batch_size
    return torchvision_uint8(job, job.module.StreamingDataset(local=job.folder, shuffle=True, batch_size=size))


_LOADERS = ours, ours_pillow, torchvision, torchvision_uint8, timm, torchcodec, simplejpeg, dali, tf_data, webdataset
LOADERS = {each.__name__.replace("_", "-"): each for each in (*_LOADERS, streaming)}


def find_module(name: str) -> str:
    """Return a loader's package; UserError if it is not installed."""
    module = MODULES.get(name.partition("-")[0], name.partition("-")[0])
    with suppress(ModuleNotFoundError):  # of the package of a package
        if importlib.util.find_spec(module):
            return module
    raise UserError(f"--against {name}: not installed; pip install {PIP.get(module, module)}, or leave it out")


def make_pass(begin: Pass, num_images: int, earlier: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Make a pass; return each image's number and the mean of a line of its pixels, which tells crops apart.

    Raises:
        ValueError: it did not show each image once, or showed half of them in the crops of an earlier pass.
    """
    found = []
    for images, numbers in begin():
        means = numpy.asarray(images)[:, :, SIZE // 2].mean(axis=(1, 2), dtype=float)
        found += zip(numpy.asarray(numbers).ravel().tolist(), means.tolist(), strict=True)
    if sorted(number for number, _ in found) != list(range(num_images)):
        raise ValueError(f"a pass showed {len(dict(found))} of {num_images} images in {len(found)} crops")
    if 2 * len({*found} & {*earlier}) >= num_images:
        raise ValueError("two passes showed the same crops")
    return found


def measure_psnr(begin: Pass, paths: list[str]) -> Iterable[float]:
    """Yield the PSNR of images, perhaps mirrored, to torchvision's resize of whole ones, dB; 99 for the same pixels.

    Images of other ratios than 3:4 to 4:3 are left out: `RandomResizedCrop` of a scale of 1 shows them in part.
    """
    resize = transforms.Compose([transforms.Resize((SIZE, SIZE)), numpy.asarray])
    for image, number in (pair for images, numbers in begin() for pair in zip(images, numbers, strict=True)):
        image, whole = numpy.asarray(image), by_pillow(lambda each: each)(paths[numpy.asarray(number).item()])
        if 3 / 4 <= whole.width / whole.height <= 4 / 3:
            expected, image = resize(whole), image if image.shape[-1] == 3 else image.transpose(1, 2, 0)
            image = 255 * (image * STD + MEAN) if image.dtype == numpy.float32 else image.astype(float)
            error = min(numpy.square(image - each).mean() for each in (expected, expected[:, ::-1]))
            yield min(10 * numpy.log10(255**2 / max(error, 1e-9)).item(), 99.0)


def serve(name: str, job: Namespace, parent: Any) -> None:
    """Be one loader: say its version and PSNRs, then make a pass at each message; an error is an answer."""
    end_with_parent(signal.SIGKILL)
    for number in (1, 2):  # libraries print as they like
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    try:
        job.module = importlib.import_module(find_module(name))
        whole = Namespace(**{**vars(job), "args": job.args.replaced(crop_scale=1.0), "folder": mkdtemp(dir=job.folder)})
        psnr, job.folder = list(measure_psnr(LOADERS[name](whole), job.paths)), mkdtemp(dir=job.folder)
        begin, found = LOADERS[name](job), []
        parent.recv()
        parent.send((job.module.__version__, numpy.percentile(psnr or [numpy.nan], [50, 10]).tolist()))
        while parent.recv():
            found = make_pass(begin, len(job.paths), found)
            parent.send(len(found))
    except Exception as error:
        parent.send(RuntimeError(f"{type(error).__name__}: {error}"))


class Racer:
    """A loader in a process group of its own, stopped outside its turn. Should this process die, the kernel ends it."""

    def __init__(self, name: str, job: Namespace, stack: ExitStack) -> None:
        self.name, self.about, (self.pipe, theirs) = name, LOADERS[name].__doc__, get_context("fork").Pipe()
        process = get_context("fork").Process(target=serve, args=(name, job, theirs))
        process.start()
        theirs.close()
        self.group = process.pid
        os.setpgid(self.group, self.group)
        stack.callback(process.join)
        stack.callback(os.killpg, self.group, signal.SIGKILL)
        self.version, self.psnr = self()

    def __call__(self) -> Any:
        """Take a turn; return what the loader says: of a pass, the number of images. UserError if it failed."""
        os.killpg(self.group, signal.SIGCONT)
        self.pipe.send(True)
        with as_user_error(f"--against {self.name} failed"):
            if isinstance(found := self.pipe.recv(), Exception):
                raise found
        os.killpg(self.group, signal.SIGSTOP)
        return found


def cpu_seconds(groups: Iterable[int]) -> float:
    """Return the CPU time of process groups: of all threads, and of processes that have ended and were waited for."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups:  # its clock, as clock_getcpuclockid of libc numbers it: stat has hundredths
                ended_s = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
                total += time.clock_gettime(~int(path.parent.name) << 3 | 2) + ended_s
    return total


class _Numbered(Subset):
    """Images whose labels are their numbers."""

    def label(self, number: int) -> int:
        return int(number)


def start(options: Namespace, argv: list[str], stack: ExitStack) -> list[Racer]:
    """Start our loader and others on the first of this process's cores, for evenly spaced JPEGs of the training set."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("--against needs Linux, whose cores and process groups it uses")
    for name in options.against:
        find_module(name)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    words = ["--data-path", options.data_path, "--batch-size", 64, "--workers", options.cores * (options.cores > 1)]
    args = config.parse_args([*map(str, words), "--device", "cpu", *argv])
    source = data.open_split(f"{options.data_path}/train", args.data)
    jpegs = [n for n in range(len(source)) if source.path(n).lower().endswith((".jpg", ".jpeg"))]
    size = args.optimization.batch_size
    num_images = min(options.images, len(jpegs)) // size * size
    if not num_images or not os.path.isfile(source.path(0)):
        raise UserError(f"{options.data_path}/train: expected class folders with {size} JPEGs at least")
    source = _Numbered(source, jpegs[:: len(jpegs) // num_images][:num_images])
    paths, folder = [source.path(n) for n in range(num_images)], stack.enter_context(TemporaryDirectory())
    job = Namespace(args=args, source=source, paths=paths, folder=folder)
    return [Racer(name, job, stack) for name in dict.fromkeys(["ours", *options.against])]
