"""Average checkpoints, and re-estimate BatchNorm's statistics.

Examples:
  python -m scripts.average runs/resnet50 --last 5 --reestimate-bn /data/imagenet --output averaged.pth
  python -m scripts.average a.pth b.pth c.pth --output averaged.pth
  python -m scripts.average best_ema.pth --ema --reestimate-bn /data/imagenet --output published.pth --images 50000

The mean of each weight is taken in float64; a mean of integers, such as BatchNorm's count of batches, is rounded down.
All checkpoints must be of one model with the same classes: of one run, or of several that began with the same weights
(Wortsman et al., arXiv 2203.05482). A run keeps its newest checkpoints, as many as train.py's --keep-last says.

FILE holds the weights, the model's name, its classes and the options of the first checkpoint. All tools open it, and so
does train.py --weights FILE; no run resumes from it.

The running means and variances of averaged weights were measured with other weights. --reestimate-bn replaces each by
the mean of its values in batches of training images, as torch.optim.swa_utils.update_bn does. It reads no labels and no
validation images. The images are prepared as for evaluation, resized and cropped at the centre at the checkpoint's own
sizes: random crops show objects larger than evaluation does (Touvron et al., arXiv 1906.06423), so their statistics do
not fit it. Dropout and stochastic depth stay off. The same images are taken in the same order each time; with the same
device, --batch-size and number of threads the result is the same in every bit.
"""

import argparse
import copy
import io
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from checkpointing.averaging import as_checkpoint, average_weights
from checkpointing.folder import numbered
from checkpointing.preprocessing import usable_preprocessing
from checkpointing.weights import Weights, read_content
from data import IndexedImageFolder
from errors import UserError, counted
from loading.forms import open_source
from loading.progress import Progress
from models.build import autocast, move_to_device, set_up_device
from scripts.predict import load_batches
from scripts.tool import add_train_option, as_path, build_parser, output_file, positive, run, write_output
from scripts.trained import (
    add_machine_options,
    add_options,
    build_trained,
    choose_extensions,
    read_weights,
    show_preprocessing,
    tool_options,
)
from settings.options import PREPROCESSING

PROG = "python -m scripts.average"


def choose(sources: list[str], last: int | None) -> list[str]:
    """Return the weights that the command line names; UserError if there are fewer than it asks for."""
    if last is None:
        for number, source in enumerate(sources):
            earlier = filter(os.path.exists, sources[:number])
            if os.path.exists(source) and any(os.path.samefile(source, other) for other in earlier):
                raise UserError(f"{source} is the same file as another one, and would count twice; give it once")
        return sources
    folder, *others = map(Path, sources)
    if others or not folder.is_dir():
        raise UserError("--last chooses from one folder, that of a run; leave it out to average files")
    found = numbered(folder)
    if len(found) < last:
        raise UserError(f"{folder} holds {counted(len(found), 'numbered checkpoint')}, fewer than --last {last}")
    return list(map(str, found[:last]))


def read_mean(sources: list[str], *, is_average: bool) -> Weights:
    """Return the mean of weights of one model; UserError if their models, classes or images differ."""
    progress, first = Progress("averaging", len(sources), "checkpoints"), {}

    def read(source: str) -> Weights:
        weights = read_weights(source, is_average=is_average)
        facts = {"model": weights.options.get("model"), "classes": weights.classes}
        facts["preprocessing"] = usable_preprocessing(weights.options) or None
        for name, value in facts.items():
            other = first.setdefault(name, value)
            if None not in (value, other) and value != other:
                raise UserError(f"{source} differs from {sources[0]} in its {name}; give checkpoints of one model")
        progress.update()
        return weights

    try:
        return average_weights(sources, read)
    except KeyError as error:
        raise UserError(f"{error.args[0]}; give checkpoints of one model") from error


def choose_images(num_images: int, number: int, batch_size: int) -> list[int]:
    """Return the places of `number` images in a set of `num_images`, or of all; full batches alone, if there is one.

    Their order is random and fixed, so that neighbours in a batch are of different classes.
    """
    number = min(num_images, number)
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(0))
    # In the mean of all batches a small one would count as much as a full one.
    return order[: number // batch_size * batch_size or number].tolist()


def find_layers(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the BatchNorm layers that normalise by running statistics in evaluation."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Tensor], precision: AbstractContextManager) -> None:
    """Set the running statistics of a model to their means over batches; all else stays in evaluation mode.

    A layer that no image reaches, such as those of an auxiliary classifier, keeps its statistics.
    """
    layers = find_layers(model)
    kept = [(layer, layer.momentum, copy.deepcopy(layer.state_dict())) for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # so that torch takes the mean over all batches
        layer.train()
    for image in batches:
        with precision:
            model(image)
    for layer, momentum, state in kept:
        layer.momentum = momentum
        layer.eval()
        if not layer.num_batches_tracked:
            layer.load_state_dict(state)


def with_new_statistics(weights: Weights, options: argparse.Namespace) -> tuple[Weights, int]:
    """Return weights with statistics re-estimated on training images, and how many images these are."""
    source = options.checkpoint[0]
    given = {name: value for name in PREPROCESSING if (value := getattr(options, name)) is not None}
    trained = build_trained(source, weights, options.model, given)
    show_preprocessing(trained)
    layers = find_layers(trained.model)
    if not layers:
        raise UserError(f"{source}: {trained.args.model.model} has no BatchNorm; leave out --reestimate-bn")
    args = tool_options(trained, options)
    root = Path(options.reestimate_bn) / "train"
    extensions = choose_extensions(trained, options.extensions)
    images = IndexedImageFolder(root, trained.preset, source=open_source(root, args.data.multi_label, extensions))
    size = args.optimization.batch_size
    chosen = choose_images(len(images), options.images, size)
    device = set_up_device(args.precision, args.distributed, args.checkpoint.test_only)
    model = move_to_device(trained.model, args.precision, device)
    batches = map(default_collate, load_batches(images.__getitem__, chosen, size, "re-estimating"))
    try:
        reestimate(model, (image.to(device) for image, _ in batches), autocast(args.precision, device))
    except ValueError as error:  # torch's, about a batch of one image
        raise UserError(f"--batch-size {size}, --images {len(chosen)}: {error}; give more") from error
    if not all(buffer.isfinite().all() for layer in layers for buffer in layer.buffers()):
        raise UserError(f"{source}: its statistics are not finite; look at its weights")
    state = model.cpu().state_dict()
    updated = Weights((name, tensor.contiguous()) for name, tensor in state.items())
    updated._metadata = getattr(state, "_metadata", {})
    updated.options = {**trained.trained_with, "model": trained.args.model.model}
    updated.classes = trained.classes
    # Published weights name their classes in English, and folders are named otherwise.
    if not trained.script and len(images.classes) == len(trained.classes or ()):
        updated.classes = list(images.classes)
    return updated, len(chosen)


def average(parser: argparse.ArgumentParser) -> None:
    """Write the average of the checkpoints that the command line names."""
    options = parser.parse_args()
    names = ("model", *PREPROCESSING, "images", "batch_size", "device")
    idle = [name for name in names if getattr(options, name) != parser.get_default(name)]
    if idle and options.reestimate_bn is None:
        raise UserError(f"--{idle[0].replace('_', '-')} has no effect without --reestimate-bn DATA_PATH; leave it out")
    sources = choose(options.checkpoint, options.last)
    if options.output.exists() and any(options.output.samefile(path) for path in sources if os.path.exists(path)):
        raise UserError(f"--output {options.output} is one of the files that it is made from; give another one")
    weights, more = read_mean(sources, is_average=options.ema), {}
    kind = weights.kind
    if options.reestimate_bn is not None:
        weights, num_images = with_new_statistics(weights, options)
        more = {"reestimated": {"images": num_images}}
        print(f"BatchNorm's statistics are re-estimated on {counted(num_images, 'training image', ',')}")
    stream = io.BytesIO()
    torch.save(as_checkpoint(weights, averaged=sources, **more), stream)
    write_output(options.output, stream.getvalue(), "--output", read_content)
    print(f"{options.output}: the mean of {counted(len(sources), 'file')} ({kind}): {', '.join(sources)}")
    if not more and any(name.endswith(".running_mean") for name in weights):
        print("its BatchNorm statistics are means too, which do not fit the mean of the weights; re-estimate them by "
              "the same command with --reestimate-bn DATA_PATH")  # fmt: skip


def main() -> None:
    """Average the checkpoints of the command line."""
    usage = "RUN --last N --output FILE [options] | CHECKPOINT... --output FILE [options]"
    parser = build_parser(PROG, usage, __doc__)
    add_options(parser, "checkpoints, or with --last the output folder of a run", nargs="+")
    parser.add_argument("--last", metavar="N", type=positive, help="the N newest numbered checkpoints of the run")
    parser.add_argument("--output", metavar="FILE", type=output_file(), required=True, help="the file to write")
    text = "re-estimate BatchNorm's statistics on its train/; as train.py's --data-path"
    parser.add_argument("--reestimate-bn", metavar="DATA_PATH", type=as_path, help=text)
    add_train_option(parser, "extensions", "further extensions of images in folders and tars (default: as in training)")
    text = "how many training images (default: 16,384)"
    parser.add_argument("--images", metavar="N", type=positive, default=16384, help=text)
    add_machine_options(parser)
    run(PROG, lambda: average(parser), "interrupted; nothing was written")


if __name__ == "__main__":
    main()
