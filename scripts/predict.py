"""Name the classes of images.

Examples:
  python -m scripts.predict runs/a/best.pth cat.jpg
  python -m scripts.predict resnet50.IMAGENET1K_V2 photos --json > predictions.json
  python -m scripts.predict exported/resnet50.onnx photos --topk 3
  python -m scripts.predict runs/a/best.pth photos/val.csv --html predictions.html
  python -m scripts.predict runs/a/best_ema.pth --ema photos/*.jpg

The first argument is a checkpoint, a file of weights, a file of `python -m scripts.export` in any form, or the name of
published weights. A .pt2 is a program: give only those that you trust. Images are prepared as in torchvision's
evaluation, at the sizes at which the model was evaluated.

--json prints one object and nothing else: preprocessing, and images, a list with an object per image: file, class,
probability, and top, a list of the topk classes and their probabilities. A class without a name is given by its number.

A list is a .csv, .tsv or .jsonl with the column path and perhaps label. --html shows an image's own class too, where a
list has it or a folder around the image bears its name.

A path that is not there ends the command before anything is computed, with exit code 2. An image that cannot be read is
named on standard error and left out, the others are predicted, and the exit code is 1.
"""

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from PIL import Image
from torch import Tensor

from distributed import collectives
from errors import BadImageError, UserError, counted, did_you_mean, one_line
from files import open_to_read
from loading.decode import AS_STORED, Decoding, decode_plainly
from loading.lists import SEPARATORS, read_table, with_slashes
from loading.progress import Progress
from loading.source import IMG_EXTENSIONS, PHONE_EXTENSIONS
from presets import ClassificationPresetEval
from scripts.report import page, show_images, table
from scripts.scores import share_text
from scripts.tool import as_json, as_path, build_parser, clean_stdout, output_file, positive, run, write_output
from scripts.trained import add_machine_options, add_options, check_finite, open_from_options, tool_options
from settings.tables import as_csv

PROG = "python -m scripts.predict"

_EXTENSIONS = (*IMG_EXTENSIONS, *PHONE_EXTENSIONS)


class Prediction(NamedTuple):
    """The likeliest classes of an image and their probabilities."""

    file: str
    top: list[tuple[str, float]]

    def as_json(self) -> dict[str, Any]:
        """Return the object of --json."""
        top = [{"class": name, "probability": probability} for name, probability in self.top]
        return {"file": self.file, **top[0], "top": top}


def find_images(path: Path, more: Sequence[str] | None) -> Iterable[tuple[Path, str | None]]:
    """Return images, with the class that a list gives: a file, those of a list, or all below a folder, sorted.

    `more` are further extensions of the images in folders.
    """
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give images, or folders of them")
        return _listed_in(path) if path.suffix in SEPARATORS else [(path, None)]
    found, extensions = [], (*_EXTENSIONS, *(more or ()))
    for folder, folders, names in os.walk(path):
        folders.sort()
        found += [(Path(folder) / name, None) for name in sorted(names) if name.lower().endswith(extensions)]
    if not found:
        raise UserError(f"{path} holds no images ({' '.join(extensions)})")
    return found


def _listed_in(path: Path) -> Iterator[tuple[Path, str | None]]:
    for line, row in read_table(path, ("path",), ("label",)):
        name, label = with_slashes(str(row.get("path", "")), path.parent), row.get("label")
        image = path.parent / name
        if not image.is_file():
            raise UserError(f"{path}, line {line}: {image} is no file; the column path is absolute or from the list")
        yield image, None if label in (None, "") else str(label).strip()


def find_truths(images: list[tuple[Path, str | None]], classes: Collection[str]) -> list[str | None]:
    """Return the class of each image: that in its list, else the folder around it that has a class's name, or None."""
    if unknown := [label for _, label in images if label is not None and label not in classes]:
        hint = did_you_mean(unknown[0], classes)
        raise UserError(f"label {unknown[0]!r} is no class's name in the checkpoint; correct or remove it{hint}")
    return [label or next((part for part in path.parts[-2::-1] if part in classes), None) for path, label in images]


def load_batches(load: Callable[[Any], Any], things: list, size: int, work: str) -> Iterator[list]:
    """Apply `load`, which decodes an image, to all things, on all cores; yield results in order, `size` at a time."""
    progress = Progress(work, len(things), "images")
    with ThreadPoolExecutor(collectives.count_cores()) as pool:
        for begin in range(0, len(things), size):
            loaded = list(pool.map(load, things[begin : begin + size]))
            yield loaded
            progress.update(len(loaded))
    progress.finish()


def predict_all(
    preset: ClassificationPresetEval, score: Callable, paths: list[Path], batch_size: int
) -> Iterator[Prediction | str]:
    """Yield for each image its prediction, or why it cannot be read; `score` is `_top` for a batch of images."""
    for loaded in load_batches(partial(_load, preset), paths, batch_size, "predicting"):
        good = [each for path, each in loaded if not isinstance(each, str)]
        tops = iter(score(torch.stack(good)) if good else [])
        for path, each in loaded:
            yield each if isinstance(each, str) else Prediction(str(path), next(tops))


def open_image(path: Path, how: Decoding = AS_STORED) -> Image.Image:
    """Return the image in a file; refuse a pipe instead of waiting for it."""
    with open_to_read(path, buffering=0) as file:
        return decode_plainly(file.read(), how=how)


def _load(preset: ClassificationPresetEval, path: Path) -> tuple[Path, Tensor | str]:
    try:
        return path, preset(open_image(path, preset.decoding))
    except (BadImageError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        return path, f"{one_line(str(path))} cannot be read: {one_line(str(reason))}"


def _top(
    model: Callable, classes: list[str] | None, options: argparse.Namespace, is_multi_label: bool, images: Tensor
) -> list[list[tuple[str, float]]]:
    """Return the likeliest classes of each image; UserError if the scores are not finite.

    Probabilities add up to 1, or with several labels an image are of each class by itself.
    """
    with torch.no_grad():
        logits = model(images).cpu().double()  # Apple's GPUs have no float64
    check_finite(logits, options.checkpoint)
    # Of equal logits the first class is better, as for argmax.
    order = logits.argsort(dim=1, descending=True, stable=True)[:, : options.topk]
    probabilities = (logits.sigmoid() if is_multi_label else logits.softmax(dim=1)).gather(1, order)
    return [
        [(str(label) if classes is None else classes[label], value) for label, value in zip(*row, strict=True)]
        for row in zip(order.tolist(), probabilities.tolist(), strict=True)
    ]


def show(
    predictions: list[Prediction], preprocessing: dict[str, Any], options: argparse.Namespace, stream: TextIO
) -> None:
    """Write the predictions to the stream, in the form that the command line asks for."""
    if options.json:
        images = [each.as_json() for each in predictions]
        stream.write(as_json({"preprocessing": preprocessing, "images": images}).decode())
    else:
        width = max((len(one_line(each.file)) for each in predictions), default=0)
        for each in predictions:
            words = "  ".join(f"{100 * probability:5.1f}% {one_line(name)}" for name, probability in each.top)
            stream.write(f"{one_line(each.file):<{width}}  {words}\n")


def write_page(
    options: argparse.Namespace, predictions: list[tuple[Prediction, str | None]], how: Decoding, *, is_ranked: bool
) -> None:
    """Write `--html` from predictions and the images' own classes, one of which each has if it `is_ranked`."""
    facts, groups = [["weights", options.checkpoint]], {"wrong": [], "": [], "right": []}
    for each, truth in sorted(predictions, key=lambda pair: pair[0].top[0][1]):
        mark = ""
        if is_ranked and truth is not None:
            mark = "right" if truth == each.top[0][0] else "wrong"
        lines = [each.file, *(f"{p:.1%} {name}" for name, p in each.top)]
        if truth:
            lines.append(f"{mark}: is {truth}".removeprefix(": "))
        groups[mark].append((lines, mark))
    groups["wrong"].reverse()
    num_right, num_known = len(groups["right"]), len(groups["right"]) + len(groups["wrong"])
    if num_known > 0:
        facts.append(["right, of images of a known class", share_text(num_right, num_known)])
    shown = list(chain(*groups.values()))[:150]  # a page below 2 MB
    colour, title = how._replace(mode="RGB"), f"{len(shown)} of {counted(len(predictions), 'image')}"
    images = ((open_image(Path(lines[0]), colour), lines, mark) for lines, mark in shown)
    counts = Counter(each.top[0][0] for each, _ in predictions).most_common()
    sections = {
        "Result": table([], facts),
        f"{title}, wrong ones first, then the least sure": show_images(images, options.html.parent),
        "Classes": table(["predicted", "images"], counts),
    }
    write_output(options.html, page("Predictions", sections), "--html")


def predict(options: argparse.Namespace) -> int:
    """Print the classes of the images, and return the exit code."""
    with clean_stdout() as stdout:
        trained = open_from_options(options, is_predicting=True)
        images = [image for path in options.images for image in find_images(path, trained.args.data.extensions)]
        if not images:
            raise UserError("no images: the lists name none")
        is_multi_label = bool(trained.args.data.multi_label)
        truths = [truth for _, truth in images]
        truths = truths if is_multi_label else find_truths(images, dict.fromkeys(trained.classes or ()))
        device = torch.device(tool_options(trained, options).distributed.device)
        model = trained.model if device.type == "cpu" else trained.model.to(device)
        score = partial(_top, lambda image: model(image.to(device)), trained.classes, options, is_multi_label)
        preset = trained.preset
        results = list(predict_all(preset, score, [path for path, _ in images], options.batch_size))
        pairs = [(each, truth) for each, truth in zip(results, truths, strict=True) if isinstance(each, Prediction)]
        if options.html is not None:
            write_page(options, pairs, preset.decoding, is_ranked=not is_multi_label)
        if options.csv is not None:
            rows = [[each.file, truth, *chain(*((name, f"{p:.6g}") for name, p in each.top))] for each, truth in pairs]
            ranks = range(1, max(map(len, rows), default=2) // 2)
            names = ["file", "true class", *chain(*((f"predicted {rank}", f"share {rank}") for rank in ranks))]
            write_output(options.csv, as_csv([names, *rows]), "--csv")
        show([each for each, _ in pairs], trained.preprocessing, options, stdout)
    unreadable = [each for each in results if isinstance(each, str)]
    for reason in unreadable:
        print(f"{PROG}: {reason}", file=sys.stderr)
    return 1 if unreadable else 0


def main() -> None:
    """Predict the classes of the command line's images."""
    parser = build_parser(PROG, "CHECKPOINT IMAGE... [options]", __doc__)
    add_options(parser, "a checkpoint, an exported file, or the name of published weights")
    parser.add_argument("images", metavar="IMAGE", nargs="+", type=as_path, help="files, folders, or lists")
    parser.add_argument("--html", metavar="FILE", type=output_file(".html"), help="show images and classes in a page")
    text = "write the classes of each image to FILE, which spreadsheets open"
    parser.add_argument("--csv", metavar="FILE", type=output_file(".csv"), help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, to standard output")
    parser.add_argument("--topk", metavar="K", type=positive, default=5, help="classes of an image (default: 5)")
    add_machine_options(parser, batch_size=32)
    logging.disable(logging.WARNING)  # torch's, about the programs that it exported itself
    run(PROG, lambda: predict(parser.parse_args()), "interrupted")


if __name__ == "__main__":
    main()
