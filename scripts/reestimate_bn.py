"""Re-estimate BatchNorm's statistics: `python -m scripts.reestimate_bn CHECKPOINT --data-path DIR --output FILE`."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpointing.weights import Weights, as_checkpoint, write_weights
from data import DeviceLoader, IndexedImageFolder
from errors import UserError, counted
from loading.progress import Progress
from scripts.tool import build_parser, check_inputs, output_file, positive, run
from scripts.trained import Evaluation, Trained, add_machine_options, add_options, open_given, settle

PROG = "python -m scripts.reestimate_bn"

EPILOG = """\
examples:
  python -m scripts.reestimate_bn averaged.pth --data-path /data/imagenet --output published.pth
  python -m scripts.reestimate_bn best_ema.pth --ema --data-path /data/imagenet --output published.pth --images 50000

The running means and variances in a file of averaged weights were measured with other weights. This tool re-estimates
each as the mean of its values in batches of training images, as torch.optim.swa_utils.update_bn does. It reads no
labels and no validation images.

The images are prepared as for evaluation, resized and cropped at the centre at the checkpoint's own sizes: random crops
show objects larger than evaluation does (Touvron et al., arXiv 1906.06423), so their statistics do not fit it. Dropout
and stochastic depth stay off, as in evaluation. The tool takes the same images in the same order each time; with the
same device, --batch-size and number of threads the result is the same in every bit.
"""


def choose_images(num_images: int, number: int, batch_size: int) -> list[int]:
    """Return the places of `number` images in a set of `num_images`, or of all; full batches alone, if there is one.

    Their order is random and fixed, so that neighbours in a batch are of different classes.
    """
    number = min(num_images, number)
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(0))
    # In the mean of all batches a small one would count as much as a full one.
    return order[: number // batch_size * batch_size or number].tolist()


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers that normalise by running statistics in evaluation."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Tensor], autocast: AbstractContextManager) -> None:
    """Set the running statistics of a model to their means over batches; all else stays in evaluation mode.

    A layer that no image reaches, such as those of an auxiliary classifier, keeps its statistics.
    """
    layers = find_layers(model)
    kept = [(layer, layer.momentum, {name: buffer.clone() for name, buffer in layer.named_buffers()})
            for layer in layers]  # fmt: skip
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # so that torch takes the mean over all batches
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


def work(options: argparse.Namespace) -> None:
    """Write the checkpoint with new statistics."""
    check_inputs(options.output, [options.checkpoint])
    trained = open_given(options)
    layers = find_layers(trained.model)
    if not layers:
        raise UserError(f"{options.checkpoint}: {trained.args.model} has no BatchNorm; it needs no new statistics")
    args = settle(trained, options).replaced(eval_flip=False)
    images = IndexedImageFolder(Path(args.data_path) / "train", trained.preset)
    chosen = choose_images(len(images), options.images, args.batch_size)
    evaluation = Evaluation(trained, args, [images])
    progress = Progress("re-estimating", len(chosen), "images")
    try:
        reestimate(evaluation.model, _counted(evaluation.load(0, chosen), progress), evaluation.autocast)
    except ValueError as error:  # torch's, about a batch of one image
        raise UserError(f"--batch-size {args.batch_size}, --images {len(chosen)}: {error}; give more") from error
    progress.finish()
    if not all(buffer.isfinite().all() for layer in layers for buffer in layer.buffers()):
        raise UserError(f"{options.checkpoint}: its statistics are not finite; look at its weights")
    content = as_checkpoint(updated(trained, images.classes), reestimated={"images": len(chosen)})
    write_weights(options.output, content)
    print(
        f"{options.output}: {trained.kind}, statistics of {counted(len(layers), 'BatchNorm layer')} re-estimated on "
        f"{counted(len(chosen), 'training image', ',')}"
    )


def _counted(loader: DeviceLoader, progress: Progress) -> Iterator[Tensor]:
    for image, target in loader:
        yield image
        progress.update(len(target))


def updated(trained: Trained, classes: list[str]) -> Weights:
    """Return the model's weights as they are now, with its classes and options."""
    state = trained.model.cpu().state_dict()
    weights = Weights((name, tensor.contiguous()) for name, tensor in state.items())
    weights._metadata = state._metadata
    weights.options = {**trained.trained_with, "model": trained.args.model}
    weights.classes = trained.classes
    # Published weights name their classes in English, and folders are named otherwise.
    if trained.is_published and len(classes) == len(trained.classes or ()):
        weights.classes = list(classes)
    return weights


def main() -> None:
    """Re-estimate the statistics of the command line's checkpoint."""
    usage = "CHECKPOINT --data-path DIR --output FILE [options]"
    parser = build_parser(PROG, usage, "Re-estimate BatchNorm's running statistics.", EPILOG)
    add_options(parser)
    parser.add_argument("--data-path", metavar="DIR", required=True, help="as train.py's; its train/ is read")
    parser.add_argument("--output", metavar="FILE", type=output_file(), required=True, help="the file to write")
    parser.add_argument(
        "--images", metavar="N", type=positive, default=16384, help="how many training images (default: 16,384)"
    )
    add_machine_options(parser)
    run(PROG, lambda: work(parser.parse_args()), "interrupted; nothing was written")


if __name__ == "__main__":
    main()
