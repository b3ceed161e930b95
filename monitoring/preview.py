"""`--dry-run`: the resolved options, the batch arithmetic and the learning rates, without the run."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from checkpointing.first_weights import choose_published_options, read_weights
from distributed import collectives
from errors import UserError, counted
from loading.decode import Decoding
from loading.forms import open_split
from loading.remarks import turned_share
from loading.source import alike_classes, is_remote, list_folder
from loading.subset import minival_numbers
from metrics import build_metrics
from models import optim
from models.build import build_without_memory, check_model
from models.ema import describe_ema
from monitoring.console import describe_size
from presets import build_presets
from sampler import VirtualShards
from settings import config
from settings.checks import remarks
from settings.machine import find_device
from settings.options import split_custom

# ImageNet-1k, which a preview without data assumes.
IMAGENET_IMAGES, IMAGENET_CLASSES = 1_281_167, 1000


def print_preview(args: Any) -> None:
    """Print the text of `--dry-run`."""
    text = preview(args)  # after which only the first of several processes prints
    print(text)


def preview(args: Any) -> str:
    """Return the text of `--dry-run`. It reads no image, writes to no output folder and needs no particular device.

    If a launcher started several processes, only the first can print afterwards. UserError for options that contradict.
    """
    # Only to find out whether what they name exists.
    build_presets(args)
    build_metrics(args, IMAGENET_CLASSES)
    optim.check_schedule(args)
    find_device(args)
    if args.resume not in ("", "auto") and not Path(args.resume).is_file():
        raise UserError(f"--resume {args.resume} is not a file")
    launch = collectives.read_rank(args.world_size, args.dist_url)
    collectives.setup_for_distributed(launch.rank == 0)
    args = args.replaced(world_size=launch.world_size, distributed=False)
    args, notes = choose_published_options(config.assign(args, state=None))
    shards = VirtualShards(args.global_batch_size, args.num_shards, 0, args.world_size)
    # A single process may preview a run of many.
    is_short = args.sync_bn and args.world_size == 1 < args.num_shards
    shards.check(needs_same_bits=args.use_deterministic_algorithms, is_synchronised=args.sync_bn and not is_short)
    num_images, num_classes, about = count_images(args)
    if num_images < args.global_batch_size:
        raise UserError(f"{num_images} training images are fewer than one global batch of {args.global_batch_size}")
    check_model(args)
    model = build_without_memory(args, num_classes)
    _check_weights(args, num_classes)
    groups = optim.build_parameter_groups(args, model)
    optimizer = optim.build_optimizer(args, groups)
    scheduler = optim.LRScheduler(args, optimizer)
    steps_per_epoch = num_images // args.global_batch_size
    last = args.epochs - 1
    epochs = {*(args.epochs * part // 12 for part in range(12)), min(args.lr_warmup_epochs, last), last}
    rates = []
    for epoch in sorted(epochs):
        scheduler.set_position(epoch, 0, steps_per_epoch)
        rates.append(f"{epoch}: {optim.current_lr(optimizer):.3g}")
    more = []
    if is_short:
        more.append(f"--sync-bn: needs {args.num_shards} processes, one for each micro-batch")
    more += remarks(args)
    if args.model_ema:
        more.append(describe_ema(args))
    if args.reference_global_batch:
        more.append(reference_line(args))
    lines = [
        about,
        *notes,
        f"{args.model}: {describe_size(model)}, in {counted(len(groups), 'group')}",
        shards.arithmetic,
        f"{steps_per_epoch:,} steps per epoch, {steps_per_epoch * args.epochs:,} in total; "
        f"{num_images % args.global_batch_size} images left out of each epoch, different ones each time",
        *more,
        f"learning rate at the start of epoch {', '.join(rates)}",
    ]
    # As comments, so that the whole text is a recipe.
    return "\n".join([*(f"# {line}" for line in lines), "", config.write_recipe(args)])


def _check_weights(args: Any, num_classes: int) -> None:
    """Raise UserError if the names or shapes in the file of `--weights` are not those of the model."""
    if args.weights and not args.resume and Path(args.weights).is_file():
        weights = read_weights(args.weights, is_average=args.ema)
        # Without data the number of classes is assumed.
        is_known = args.data_path is not None or args.synthetic is not None
        with contextlib.redirect_stdout(sys.stderr):
            build_without_memory(args.replaced(test_only=args.test_only and is_known), num_classes, weights)


def count_images(args: Any) -> tuple[int, int, str]:
    """Return the number of training images and of classes, and a line about their source."""
    if args.synthetic is not None:
        return args.synthetic, IMAGENET_CLASSES, f"{args.synthetic:,} synthetic training images"
    traindir = Path(config.split_dirs(args)[0])
    is_folder = not (is_remote(args.data_path) or split_custom(args.data_path or ""))
    if args.data_path is None or (is_folder and not list_folder(Path(args.data_path))):
        num_images, num_classes = IMAGENET_IMAGES, IMAGENET_CLASSES
        num_held = round(num_images * (args.minival or 0))
        where = f"no data in {args.data_path}" if args.data_path else "no --data-path"
        about = f"{where}: assuming {num_images:,} images of 1,000 classes"
    else:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is a recipe
            images = open_split(str(traindir), args)
            for words in (alike_classes(images.classes), turned_share(images, Decoding(exif=args.exif))):
                if words:
                    print(words)
        num_images, num_classes = len(images), len(images.classes)
        num_held = len(minival_numbers(images, args.minival, args.minival_fold)) if args.minival else 0
        about = f"{traindir}: {num_images:,} images in {num_classes:,} classes"
    num_images -= num_held
    if num_held:
        about += f", {num_held:,} of them held out"
    if args.limit_train_images is not None and args.limit_train_images < num_images:
        return args.limit_train_images, num_classes, f"{about}; a trial on {args.limit_train_images:,} of them"
    return num_images, num_classes, about


def reference_line(args: Any) -> str:
    """Return a line that compares the global batch and the learning rate with those of the reference."""
    reference = args.reference_global_batch
    share = args.global_batch_size / reference
    scaled = f"--lr-scaling {args.lr_scaling}: {args.lr:g} -> {optim.scaled_lr(args):g}"
    return f"--lr is meant for a global batch of {reference}, this run has {share:g} of it; {scaled}"
