"""Find the sizes at which a model is evaluated best: `python -m scripts.tune_resize CHECKPOINT --data-path DIR`."""

import argparse
import io
import json
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import config
import data
import models
from errors import UserError, require_package
from loading.forms import check_source
from loading.progress import Progress
from metrics import build_criterion, build_metrics
from options import BY_NAME
from presets import ClassificationPresetEval, build_presets
from sampler import EvalSampler
from scripts.tool import build_parser, run, write_output
from scripts.trained import Trained, add_machine_options, add_options, open_trained, settle
from train import measure

PROG = "python -m scripts.tune_resize"

EPILOG = """\
examples:
  python -m scripts.tune_resize best.pth --data-path /data/imagenet --resize 224-288:16
  python -m scripts.tune_resize resnet50.IMAGENET1K_V1 --data-path /data/imagenet --crop 224,256 --json sweep.json
  python -m scripts.tune_resize best_ema.pth --ema --data-path /data/imagenet --resize 224,232,256 --picture sweep.png

Each cell of the table is Acc@1 on all images of val/: what train.py --test-only gives with --val-resize-size (the
shorter side, rows) and --val-crop-size (columns). Crops larger than the image are left out. Training with random crops
shows objects larger than evaluation does, so that a model is often best at larger crops than it was trained with
(Touvron et al., arXiv 1906.06423). A model that takes one size alone is refused at others.

Sizes that are chosen on the images that they are reported on look better than they are: give --data-path a folder
whose val/ holds other images, such as a part of train/.
"""

_PICTURES = (".pdf", ".png", ".svg")


def sizes(text: str) -> list[int]:
    """Return the sizes that 224-288:16 or 224,256 means, in ascending order; an argparse type."""
    found = set()
    for part in text.split(","):
        bounds, _, step = part.partition(":")
        first, dash, last = bounds.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1, int(step or 1)))
    option = BY_NAME["val_crop_size"]
    if not found or min(found) < option.at_least or max(found) > option.at_most:
        raise ValueError
    return sorted(found)


class SizedImages(data.IndexedImageFolder):
    """The images of a split in several sizes: that of number `i` in size `k` of `N` images has the key `k * N + i`.

    So one group of loader processes, started once, is enough.

    Args:
        root: as for `IndexedImageFolder`.
        presets: one of each size.
    """

    def __init__(self, root: Path, presets: list[ClassificationPresetEval]) -> None:
        super().__init__(root, presets[0])
        self.presets = presets

    def load(self, key: int) -> tuple[Any, int]:
        """Return one image as (3, crop, crop) uint8, and its class."""
        size, number = divmod(key, len(self))
        self.transform = self.presets[size]
        return super().load(number)


class SizeSampler(EvalSampler):
    """The batches of a set in one size.

    Args:
        num_images: the size of the set.
        batch_size: images in a batch.
        size: the number of the preset.
    """

    def __init__(self, num_images: int, batch_size: int, size: int) -> None:
        super().__init__(num_images, batch_size)
        self.first = num_images * size

    def __iter__(self) -> Iterator[int]:
        return (self.first + number for number in super().__iter__())


def check_images(trained: Trained, images: data.IndexedImageFolder, is_file: bool, num_outputs: int) -> None:
    """Refuse images of other classes than the model's.

    Raises:
        UserError: they are.
    """
    if len(images.classes) != num_outputs:
        raise UserError(f"{images.root} has {len(images.classes)} classes, and the model {num_outputs}")
    if is_file and trained.classes is not None and trained.classes != images.classes:  # published names are words
        ours, theirs = next(pair for pair in zip(images.classes, trained.classes, strict=True) if pair[0] != pair[1])
        raise UserError(f"{images.root} has other classes than the checkpoint, such as {ours} in place of {theirs}")


def sweep(trained: Trained, args: config.Record, cells: list[tuple[int, int]], is_file: bool) -> list[dict[str, Any]]:
    """Return the results of an evaluation at each (resize, crop).

    Raises:
        UserError: the model does not take a size, or the images are not there.
    """
    largest = max(crop for _, crop in cells)
    for crop in sorted({crop for _, crop in cells}):
        models.check_sizes(trained.model, args.replaced(val_crop_size=crop))
    trained.model.eval()
    folder = Path(args.data_path) / "val"
    check_source(folder)
    presets = [build_presets(args.replaced(val_resize_size=resize, val_crop_size=crop))[1] for resize, crop in cells]
    images = SizedImages(folder, presets)
    with torch.inference_mode():
        num_outputs = trained.model(torch.zeros(1, 3, largest, largest)).size(1)
    check_images(trained, images, is_file, num_outputs)
    args = args.replaced(val_crop_size=largest)  # for which loaders reserve memory
    (started,) = data.start_loaders([images], args)  # before there are other threads
    device = models.set_up_device(args)
    model = models.place_model(trained.model, args, device)
    model = models.FlipAverage(model) if args.eval_flip else model
    progress, results = Progress("evaluating", len(images) * len(cells), "images"), []

    def count(_: Tensor, target: Tensor, *__: Any) -> None:
        progress.update(len(target))

    for number, (resize, crop) in enumerate(cells):
        sampler = SizeSampler(len(images), args.batch_size, number)
        loader = data.build_device_loader(args, images, sampler, device, num_outputs, started)
        with redirect_stdout(io.StringIO()), models.autocast(args, device):
            found = measure(
                model, build_criterion(args), loader, device, metrics=build_metrics(num_outputs), observe=count
            )
        results.append({"resize": resize, "crop": crop, **found})
    progress.finish()
    return results


def best_of(results: list[dict]) -> dict:
    """Return the result of the highest Acc@1; of equal ones that of the smallest sizes."""
    return min(results, key=lambda result: (-result["acc1"], result["crop"], result["resize"]))


def table(results: list[dict]) -> str:
    """Return Acc@1 by resize (rows) and crop (columns), the best one with a star."""
    best, crops = best_of(results), sorted({result["crop"] for result in results})
    found = {(result["resize"], result["crop"]): result["acc1"] for result in results}
    lines = ["resize " + "".join(f"{f'crop {crop}':>12}" for crop in crops)]
    for resize in sorted({result["resize"] for result in results}):
        cells = []
        for crop in crops:
            mark = "*" if (resize, crop) == (best["resize"], best["crop"]) else " "
            cells.append(f"{found[resize, crop]:>11.3f}{mark}" if (resize, crop) in found else f"{'-':>11} ")
        lines.append(f"{resize:>6} " + "".join(cells).rstrip())
    return "\n".join(lines)


def draw(results: list[dict], title: str, path: Path) -> None:
    """Write a picture of Acc@1 over the resize, a curve for each crop."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for crop in sorted({result["crop"] for result in results}):
        points = sorted((result["resize"], result["acc1"]) for result in results if result["crop"] == crop)
        axis.plot(*zip(*points, strict=True), label=f"crop {crop} px", marker="o", markersize=4)
    best = best_of(results)
    axis.plot(best["resize"], best["acc1"], marker="*", markersize=14, color="black", linestyle="", label="best")
    axis.set(xlabel="shorter side, px", ylabel="Acc@1, %", title=title)
    axis.grid(alpha=0.3)
    axis.legend()
    write_output("--picture", path, lambda file: figure.savefig(file, format=path.suffix[1:].lower(), dpi=100))
    pyplot.close(figure)


def check_files(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before an hour is spent.

    Raises:
        UserError: one cannot.
    """
    for option in ("json", "picture"):
        path = getattr(options, option)
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise UserError(f"--{option} {path}: expected a file in a folder that can be written to")
    if options.picture is None:
        return
    if options.picture.suffix.lower() not in _PICTURES:
        raise UserError(f"--picture {options.picture}: expected a name that ends in {', '.join(_PICTURES)}")
    require_package("matplotlib", "--picture")


def work(options: argparse.Namespace) -> None:
    """Print the table, and write the files that are asked for.

    Raises:
        UserError: something that was given cannot be used.
    """
    check_files(options)
    trained = open_trained(options.checkpoint, model=options.model, is_average=options.ema)
    args = settle(trained, options)
    crops = options.crop or [args.val_crop_size]
    resizes = options.resize or sorted({*range(min(crops), min(crops) + 65, 16), args.val_resize_size})
    cells = [(resize, crop) for resize in resizes for crop in crops if crop <= resize]
    if not cells:
        raise UserError(f"--crop {min(crops)} is larger than --resize {max(resizes)}; give a crop within the image")
    results = sweep(trained, args, cells, Path(options.checkpoint).is_file())
    best = best_of(results)
    if options.json:
        content = {"checkpoint": options.checkpoint, "weights": trained.kind, "best": best, "results": results}
        write_output("--json", options.json, lambda file: file.write(json.dumps(content, indent=1).encode() + b"\n"))
    if options.picture:
        draw(results, options.checkpoint, options.picture)
    print(table(results))
    print(
        f"best: --val-resize-size {best['resize']} --val-crop-size {best['crop']}: Acc@1 {best['acc1']:.3f} "
        f"n={best['n']} (the checkpoint's own: {args.val_resize_size}, {args.val_crop_size})"
    )


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    usage = "CHECKPOINT --data-path DIR [options]"
    parser = build_parser(PROG, usage, "Evaluate at several sizes: a table of Acc@1.", EPILOG)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file, or published weights")
    add_options(parser)
    parser.add_argument("--data-path", metavar="DIR", required=True, help="as train.py's; its val/ is read")
    parser.add_argument(
        "--resize",
        metavar="PX",
        type=sizes,
        help="224-288:16 or 224,256 (default: from the crop on, 64 px in steps of 16)",
    )
    parser.add_argument("--crop", metavar="PX", type=sizes, help="likewise (default: the checkpoint's own)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all results there")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the curves there (needs matplotlib)")
    add_machine_options(parser)
    return parser


def main() -> None:
    """Sweep as the command line says."""
    run(PROG, lambda: work(get_args_parser().parse_args()), "interrupted; start it again: nothing is kept")


if __name__ == "__main__":
    main()
