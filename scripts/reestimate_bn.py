"""Compute BatchNorm's statistics anew: `python -m scripts.reestimate_bn CHECKPOINT --data-path DIR --output FILE`."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

import config
import data
import models
from checkpointing.weights import Weights, as_checkpoint, check_output, write_weights
from errors import UserError, counted
from loading.forms import check_source
from loading.progress import Progress
from scripts.tool import build_parser, positive, run
from scripts.trained import Trained, add_machine_options, add_options, open_trained, settle

PROG = "python -m scripts.reestimate_bn"

EPILOG = """\
examples:
  python -m scripts.reestimate_bn averaged.pth --data-path /data/imagenet --output published.pth
  python -m scripts.reestimate_bn best_ema.pth --ema --data-path /data/imagenet --output published.pth --images 50000

Averaged weights have never seen an image: the running means and variances that came with them belong to others. Here
they are computed anew, each the mean of its values in batches of training images, as torch.optim.swa_utils.update_bn
does it. Labels are not looked at; validation images are not touched.

The images are prepared as for evaluation, resized and cropped at the centre at the checkpoint's own sizes: a random
crop shows objects larger than they are in evaluation (Touvron et al., arXiv 1906.06423), and statistics of such crops
do not fit it. Dropout and stochastic depth stay off, as in evaluation. Which images are taken, and their order, is the
same each time; with the same device, --batch-size and number of threads the result is the same in every bit.
"""


class SomeImages(Sampler):
    """Yield images of a set in a fixed random order: neighbours in a batch are of different classes.

    Args:
        num_images: the size of the set.
        number: how many to take; rounded down to full batches, if there is one.
        batch_size: images in a batch.
    """

    def __init__(self, num_images: int, number: int, batch_size: int) -> None:
        self.batch_size = batch_size
        number = min(num_images, number)
        order = torch.randperm(num_images, generator=torch.Generator().manual_seed(0))
        # In the mean of all batches a small one would count as much as a full one.
        self.numbers = order[: number // batch_size * batch_size or number].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that normalise by running statistics in evaluation."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Tensor], autocast: AbstractContextManager) -> None:
    """Set the running statistics of a model to their means over batches; all else stays in evaluation mode.

    A layer that no image passes, such as those of an auxiliary classifier, keeps its statistics.
    """
    layers = find_layers(model)
    kept = [(layer, layer.momentum, {name: buffer.clone() for name, buffer in layer.named_buffers()})
            for layer in layers]  # fmt: skip
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # by which torch takes the mean of all batches
        layer.train()
    for image in batches:
        with autocast:
            model(image)
    for layer, momentum, buffers in kept:
        layer.momentum = momentum
        layer.eval()
        if not layer.num_batches_tracked:
            for name, buffer in layer.named_buffers():
                buffer.copy_(buffers[name])


def load_images(trained: Trained, args: config.Record, number: int) -> tuple[data.IndexedImageFolder, SomeImages]:
    """Return the training images, as for evaluation, and the sampler of those that are taken.

    Raises:
        UserError: there are none.
    """
    folder = Path(args.data_path) / "train"
    check_source(folder)
    images = data.IndexedImageFolder(folder, trained.preset)
    return images, SomeImages(len(images), number, args.batch_size)


def work(options: argparse.Namespace) -> None:
    """Write the checkpoint with new statistics.

    Raises:
        UserError: something that was given cannot be used, or the file cannot be written.
    """
    check_output(options.output, [options.checkpoint])
    trained = open_trained(options.checkpoint, model=options.model, is_average=options.ema)
    layers = find_layers(trained.model)
    if not layers:
        raise UserError(f"{options.checkpoint}: {trained.args.model} has no BatchNorm; it needs no new statistics")
    args = settle(trained, options)
    images, sampler = load_images(trained, args, options.images)
    (started,) = data.start_loaders([images], args)  # before there are other threads
    device = models.set_up_device(args)
    model = models.place_model(trained.model, args, device)
    loader = data.build_device_loader(args, images, sampler, device, len(images.classes), started)
    progress = Progress("re-estimating", len(sampler), "images")
    reestimate(model, _counted(loader, progress), models.autocast(args, device))
    progress.finish()
    if not all(buffer.isfinite().all() for layer in layers for buffer in layer.buffers()):
        raise UserError(f"{options.checkpoint}: its statistics are not finite; look at its weights")
    content = as_checkpoint(updated(trained, options, images.classes), reestimated={"images": len(sampler)})
    write_weights(options.output, content)
    print(
        f"{options.output}: {trained.kind}, statistics of {counted(len(layers), 'BatchNorm layer')} computed anew on "
        f"{counted(len(sampler), 'training image', ',')}"
    )


def _counted(loader: data.DeviceLoader, progress: Progress) -> Iterator[Tensor]:
    for image, target in loader:
        yield image
        progress.update(len(target))


def updated(trained: Trained, options: argparse.Namespace, classes: list[str]) -> Weights:
    """Return the model's weights as they are now, and all that is known of them."""
    state = trained.model.cpu().state_dict()
    weights = Weights((name, tensor.contiguous()) for name, tensor in state.items())
    weights._metadata = state._metadata
    weights.options = {**trained.trained_with, "model": trained.args.model}
    weights.classes = trained.classes
    # Published weights name their classes in English, and folders are named otherwise.
    if not Path(options.checkpoint).is_file() and len(classes) == len(trained.classes or ()):
        weights.classes = list(classes)
    return weights


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    usage = "CHECKPOINT --data-path DIR --output FILE [options]"
    parser = build_parser(PROG, usage, "Compute BatchNorm's running statistics anew.", EPILOG)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of any of the scripts that --weights reads")
    add_options(parser)
    parser.add_argument("--data-path", metavar="DIR", required=True, help="as train.py's; its train/ is read")
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--images", metavar="N", type=positive, default=16384, help="how many training images (default: 16,384)"
    )
    add_machine_options(parser)
    return parser


def main() -> None:
    """Re-estimate what the command line names."""
    run(PROG, lambda: work(get_args_parser().parse_args()), "interrupted; nothing was written")


if __name__ == "__main__":
    main()
