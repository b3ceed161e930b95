"""`--dry-run`: the resolved options, the batch arithmetic and the learning rates, without the run."""

import contextlib
import sys
from pathlib import Path

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
from sampler import TrainSampler, VirtualShards
from settings import config
from settings.checks import remarks
from settings.machine import find_device
from settings.options import DataOptions, OptimizationOptions
from settings.rules import split_custom
from settings.stages import Parsed, Resolved

# ImageNet-1k, which a preview without data assumes.
IMAGENET_IMAGES, IMAGENET_CLASSES = 1_281_167, 1000


def print_preview(args: Parsed) -> None:
    """Print the text of `--dry-run`."""
    text = preview(args)  # after which only the first of several processes prints
    print(text)


def preview(args: Parsed) -> str:
    """Return the text of `--dry-run`. It reads no image, writes to no output folder and needs no particular device.

    If a launcher started several processes, only the first can print afterwards. UserError for options that contradict.
    """
    # Only to find out whether what they name exists.
    build_presets(args.data, args.augmentation)
    build_metrics(args, IMAGENET_CLASSES)
    optim.check_schedule(args.schedule, args.optimization.lr)
    find_device(args.distributed.device)
    if args.checkpoint.resume not in ("", "auto") and not Path(args.checkpoint.resume).is_file():
        raise UserError(f"--resume {args.checkpoint.resume} is not a file")
    launch = collectives.read_rank(args.distributed.world_size, args.distributed.dist_url)
    collectives.setup_for_distributed(launch.rank == 0)
    alone = Resolved.of({**args.flat(), "world_size": launch.world_size, "is_launched": False})
    args, notes = choose_published_options(config.assign(alone, state=None))
    num_shards, world_size = args.distributed.num_shards, args.distributed.world_size
    batch = args.optimization.global_batch_size
    shards = VirtualShards(batch, num_shards, 0, world_size)
    # A single process may preview a run of many.
    is_short = args.model.sync_bn and world_size == 1 < num_shards
    is_synchronised = args.model.sync_bn and not is_short
    shards.check(needs_same_bits=args.precision.use_deterministic_algorithms, is_synchronised=is_synchronised)
    num_images, num_classes, about = count_images(args.data)
    steps_per_epoch = TrainSampler(num_images, shards).steps_per_epoch
    check_model(args)
    model = build_without_memory(args, num_classes)
    _check_weights(args, num_classes)
    groups = optim.build_parameter_groups(args.optimization, model)
    optimizer = optim.build_optimizer(args.optimization, args.precision, args.model.model, groups)
    scheduler = optim.LRScheduler(args.schedule, optimizer)
    num_epochs = args.schedule.epochs
    epochs = [num_epochs * part // 12 for part in range(12)]
    rates = []
    for epoch in sorted({*epochs, min(args.schedule.lr_warmup_epochs, num_epochs - 1), num_epochs - 1}):
        scheduler.set_position(epoch, 0, steps_per_epoch)
        rates.append(f"{epoch}: {optim.current_lr(optimizer):.3g}")
    more = []
    if is_short:
        more.append(f"--sync-bn: needs {num_shards} processes, one for each micro-batch")
    more += remarks(args)
    if args.model.model_ema:
        more.append(describe_ema(args.model, args.schedule, batch))
    if args.optimization.reference_global_batch:
        more.append(reference_line(args.optimization))
    lines = [
        about,
        *notes,
        f"{args.model.model}: {describe_size(model)}, in {counted(len(groups), 'group')}",
        shards.arithmetic,
        f"counted for {counted(world_size, 'process')}: torchrun --nproc_per_node=N in place of python counts for N",
        f"{steps_per_epoch:,} steps per epoch, {steps_per_epoch * num_epochs:,} in total; "
        f"{num_images % batch} images left out of each epoch, different ones each time",
        *more,
        f"learning rate at the start of epoch {', '.join(rates)}",
    ]
    # As comments, so that the whole text is a recipe.
    return "\n".join([*(f"# {line}" for line in lines), "", config.write_recipe(args)])


def _check_weights(args: Parsed, num_classes: int) -> None:
    """Raise UserError if the names or shapes in the file of `--weights` are not those of the model."""
    if args.model.weights and not args.checkpoint.resume and Path(args.model.weights).is_file():
        weights = read_weights(args.model.weights, is_average=args.model.ema)
        # Without data the number of classes is assumed.
        is_known = args.data.data_path is not None or args.data.synthetic is not None
        with contextlib.redirect_stdout(sys.stderr):
            build_without_memory(args.replaced(test_only=args.checkpoint.test_only and is_known), num_classes, weights)


def count_images(data_options: DataOptions) -> tuple[int, int, str]:
    """Return the number of training images and of classes, and a line about their source."""
    if data_options.synthetic is not None:
        return data_options.synthetic, IMAGENET_CLASSES, f"{data_options.synthetic:,} synthetic training images"
    traindir = Path(config.split_dirs(data_options.data_path)[0])
    is_folder = not (is_remote(data_options.data_path) or split_custom(data_options.data_path or ""))
    if data_options.data_path is None or (is_folder and not list_folder(Path(data_options.data_path))):
        num_images, num_classes = IMAGENET_IMAGES, IMAGENET_CLASSES
        num_held = round(num_images * (data_options.minival or 0))
        where = f"no data in {data_options.data_path}" if data_options.data_path else "no --data-path"
        about = f"{where}: assuming {num_images:,} images of 1,000 classes"
    else:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is a recipe
            images = open_split(str(traindir), data_options)
            for words in (alike_classes(images.classes), turned_share(images, Decoding(exif=data_options.exif))):
                if words:
                    print(words)
        num_images, num_classes = len(images), len(images.classes)
        held = data_options.minival, data_options.minival_fold
        num_held = len(minival_numbers(images, *held)) if data_options.minival else 0
        root = images.root if images.form == "folder" else traindir  # class folders may lie in the data path itself
        about = f"{root}: {num_images:,} images in {num_classes:,} classes"
    num_images -= num_held
    if num_held:
        about += f", {num_held:,} of them held out"
    limit = data_options.limit_train_images
    if limit is not None and limit < num_images:
        return limit, num_classes, f"{about}; a trial on {limit:,} of them"
    return num_images, num_classes, about


def reference_line(optimization: OptimizationOptions) -> str:
    """Return a line that compares the global batch and the learning rate with those of the reference."""
    reference = optimization.reference_global_batch
    share = optimization.global_batch_size / reference
    scaled = f"--lr-scaling {optimization.lr_scaling}: {optimization.lr:g} -> {optim.scaled_lr(optimization):g}"
    return f"--lr is meant for a global batch of {reference}, this run has {share:g} of it; {scaled}"
