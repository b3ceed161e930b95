"""Say what images show: `python -m scripts.predict CHECKPOINT-OR-EXPORTED-FILE IMAGE...`."""

import argparse
import base64
import csv
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

import collectives
from errors import BadImageError, UserError, counted, in_one_line, one_line
from loading.decode import decode_plainly
from loading.progress import Progress
from presets import ClassificationPresetEval
from scripts.exported import build_preset, is_graph, open_graph, own_stdout
from scripts.tool import build_parser, positive, run, write_output
from scripts.trained import add_options, open_trained

T = TypeVar("T")

PROG = "python -m scripts.predict"

EPILOG = """\
examples:
  python -m scripts.predict runs/a/best.pth cat.jpg
  python -m scripts.predict resnet50.IMAGENET1K_V2 photos --json > predictions.json
  python -m scripts.predict exported/resnet50.onnx photos --csv --topk 3
  find photos -name '*.jpg' | python -m scripts.predict runs/a/best_ema.pth --ema - --html page.html

The first argument is a checkpoint, a file of weights, a file of `python -m scripts.export` in any form, or the name of
published weights. A .pt2 is a program: give only those that you trust. Images are prepared as torchvision's evaluation
does it, with the sizes that the model was evaluated with.

--json prints a list with one object an image and nothing else: file, class, probability, and top, a list of the topk
classes and their probabilities. --csv prints one line an image and class: file, rank, class, probability. A class
without a name is its number.

A path that is not there ends the command before anything is computed, with exit code 2. An image that cannot be read is
named on standard error and left out, the others are predicted, and the exit code is 1.
"""

_THUMBNAIL_PX = 160

_PAGE = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'"><title>{title}</title><style>
body {{font: 14px system-ui, sans-serif; margin: 2em; color: #222; background: #fff}}
main {{display: flex; flex-wrap: wrap; gap: 16px}} figure {{margin: 0; width: 180px}}
img {{max-width: 160px; max-height: 160px}} figcaption {{overflow-wrap: anywhere}}
ol {{margin: 4px 0; padding-left: 20px}} small {{color: #555}}
</style></head><body><h1>{title}</h1><p>{kind}</p><main>
"""


class Predictor(NamedTuple):
    """A model that is ready to use.

    Attributes:
        model: from (B, 3, S, S) normalised floats on the CPU to (B, num_classes) logits, anywhere.
        preset: from a PIL image to (3, S, S) normalised floats.
        classes: the names of the classes, or None.
        kind: which weights these are, as words for a message.
    """

    model: Callable[[Tensor], Tensor]
    preset: ClassificationPresetEval
    classes: list[str] | None
    kind: str


class Prediction(NamedTuple):
    """What an image shows: the likeliest classes and their probabilities, and a small JPEG of it if that is wanted."""

    file: str
    top: list[tuple[str, float]]
    thumbnail: bytes | None

    def as_json(self) -> dict[str, Any]:
        """Return the object of --json."""
        top = [{"class": name, "probability": probability} for name, probability in self.top]
        return {"file": self.file, **top[0], "top": top}


def open_predictor(options: argparse.Namespace) -> Predictor:
    """Open the checkpoint, exported file or published weights of the command line.

    Raises:
        UserError: it cannot be used.
    """
    source, path = options.checkpoint, Path(options.checkpoint)
    if path.is_dir():
        raise UserError(f"{source} is a folder; give a file in it, such as {path / 'checkpoint.pth'}")
    if is_graph(path) and path.is_file():
        return _open_graph(options, path)
    trained = open_trained(source, model=options.model, is_average=options.ema)
    name = options.device or collectives.find_accelerator() or "cpu"
    with in_one_line(f"--device {name} cannot be used"):
        device = torch.device(name)
        model = trained.model.to(device)
    return Predictor(lambda image: model(image.to(device)), trained.preset, trained.classes, trained.kind)


def _open_graph(options: argparse.Namespace, path: Path) -> Predictor:
    for flag, is_given in {"--ema": options.ema, "--model": options.model}.items():
        if is_given:
            raise UserError(f"{path} is an exported graph, which has its weights in it; leave out {flag}")
    if options.device not in (None, "cpu"):
        raise UserError(f"{path} is an exported graph, which runs here on the CPU; leave out --device {options.device}")
    graph = open_graph(path, str(path))
    about = graph.description
    return Predictor(graph.model, build_preset(about), about["classes"], about["weights"])


def find_images(given: Iterable[str]) -> list[Path]:
    """Return the images of files, folders (with all below them, sorted) and, for a -, of lines of standard input.

    Raises:
        UserError: a path is not there, a folder holds no image, or there is no path.
    """
    paths = []
    for name in given:
        names = [line for line in sys.stdin.read().splitlines() if line] if name == "-" else [name]
        for path in map(Path, names):
            paths += _images_of(path)
    if not paths:
        raise UserError("no images: expected files, folders, or paths on standard input for a -")
    return paths


def _images_of(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give images, or folders of them")
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders.sort()
        found += [Path(folder) / name for name in sorted(names) if name.lower().endswith(IMG_EXTENSIONS)]
    if not found:
        raise UserError(f"{path} holds no images ({' '.join(IMG_EXTENSIONS)})")
    return found


def batches_of(things: list[T], size: int) -> Iterator[list[T]]:
    """Yield the things in lists of a size, the last one perhaps shorter."""
    for begin in range(0, len(things), size):
        yield things[begin : begin + size]


def load_images(loads: list[Callable[[], T]]) -> list[T]:
    """Return the results of functions that decode images, in their order, on all cores."""
    with ThreadPoolExecutor(collectives.count_cores()) as pool:
        return list(pool.map(lambda load: load(), loads))


def read_classes(path: Path) -> list[str]:
    """Return the names in a file, one a line.

    Raises:
        UserError: it cannot be read as text.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--classes {path} cannot be read ({error}); give a text file with one name a line") from error


def predict_all(predictor: Predictor, paths: list[Path], options: argparse.Namespace) -> Iterator[Prediction | str]:
    """Yield for each image its prediction, or why it cannot be read."""
    progress = Progress("predicting", len(paths), "images")
    for batch in batches_of(paths, options.batch_size):
        loads = [lambda path=path: _load(predictor.preset, path, has_thumbnail=bool(options.html)) for path in batch]
        loaded = load_images(loads)
        good = [each[0] for each in loaded if not isinstance(each, str)]
        tops = iter(_top(predictor, torch.stack(good), options.topk) if good else [])
        for path, each in zip(batch, loaded, strict=True):
            yield each if isinstance(each, str) else Prediction(str(path), next(tops), each[1])
        progress.update(len(batch))
    progress.finish()


def _load(preset: ClassificationPresetEval, path: Path, *, has_thumbnail: bool) -> tuple[Tensor, bytes | None] | str:
    try:
        image = decode_plainly(path.read_bytes())
        return preset(image), _thumbnail(image) if has_thumbnail else None
    except (BadImageError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"{one_line(str(path))} cannot be read: {one_line(str(reason))}"


def _thumbnail(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image = image.copy()
    image.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    image.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _top(predictor: Predictor, images: Tensor, topk: int) -> list[list[tuple[str, float]]]:
    """Return the likeliest classes of each image.

    Raises:
        UserError: there are not as many names as classes.
    """
    with torch.no_grad():
        logits = predictor.model(images).double().cpu()
    classes, num_classes = predictor.classes, logits.shape[1]
    if classes is not None and len(classes) != num_classes:
        raise UserError(f"{counted(len(classes), 'name')} of classes were given, and the model has {num_classes}")
    # Of equal ones the first, as an argmax has it.
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :topk]
    probabilities = logits.softmax(dim=1).gather(1, order)
    return [
        [(str(label) if classes is None else classes[label], value) for label, value in zip(*row, strict=True)]
        for row in zip(order.tolist(), probabilities.tolist(), strict=True)
    ]


def show(predictions: list[Prediction], options: argparse.Namespace, stream: TextIO) -> None:
    """Write the predictions to standard output, in the form of the command line."""
    if options.json:
        json.dump([each.as_json() for each in predictions], stream, indent=1)
        stream.write("\n")
    elif options.csv:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["file", "rank", "class", "probability"])
        for each in predictions:
            writer.writerows([each.file, rank, *pair] for rank, pair in enumerate(each.top, 1))
    else:
        width = max((len(one_line(each.file)) for each in predictions), default=0)
        for each in predictions:
            words = "  ".join(f"{100 * probability:5.1f}% {one_line(name)}" for name, probability in each.top)
            stream.write(f"{one_line(each.file):<{width}}  {words}\n")


def write_page(path: Path, predictions: list[Prediction], kind: str) -> None:
    """Write a page of the pictures with what they show, which loads nothing from elsewhere.

    Raises:
        UserError: it cannot be written.
    """
    parts = [_PAGE.format(title=f"Predictions for {counted(len(predictions), 'image')}", kind=escape(kind))]
    for each in predictions:
        lines = "".join(f"<li>{escape(name)} <small>{100 * share:.1f}%</small></li>" for name, share in each.top)
        picture = base64.b64encode(each.thumbnail).decode()
        caption = f"<figcaption>{escape(each.file)}<ol>{lines}</ol></figcaption>"
        parts.append(f'<figure><img alt="" src="data:image/jpeg;base64,{picture}">{caption}</figure>\n')
    page = "".join([*parts, "</main></body></html>\n"]).encode(errors="backslashreplace")
    write_output("--html", path, lambda file: file.write(page))


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    parser = build_parser(PROG, "CHECKPOINT IMAGE... [options]", "Say what images show.", EPILOG)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, an exported file, or the name of published weights"
    )
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="files, folders, or - for paths on standard input")
    add_options(parser)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON, and nothing else, to standard output")
    forms.add_argument("--csv", action="store_true", help="print comma-separated values")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page of the pictures there too")
    parser.add_argument("--topk", metavar="K", type=positive, default=5, help="classes of an image (default: 5)")
    parser.add_argument("--batch-size", metavar="N", type=positive, default=32, help="images at once (default: 32)")
    parser.add_argument("--device", help="where to compute (default: the accelerator, if there is one)")
    parser.add_argument("--classes", metavar="FILE", type=Path, help="names of the classes, one a line")
    return parser


def predict(options: argparse.Namespace) -> int:
    """Print what the images show, and return the exit code.

    Raises:
        UserError: the model or the images are not there, or a file cannot be written.
    """
    with own_stdout() as stdout:
        paths = find_images(options.images)
        names = read_classes(options.classes) if options.classes else None
        predictor = open_predictor(options)
        predictor = predictor._replace(classes=names or predictor.classes)
        results = list(predict_all(predictor, paths, options))
        predictions = [each for each in results if isinstance(each, Prediction)]
        if options.html:
            write_page(options.html, predictions, predictor.kind)
        show(predictions, options, stdout)
    unreadable = [each for each in results if isinstance(each, str)]
    for reason in unreadable:
        print(f"{PROG}: {reason}", file=sys.stderr)
    return 1 if unreadable else 0


def main() -> None:
    """Predict what the command line says."""
    logging.disable(logging.WARNING)  # torch's, on opening what it exported
    run(PROG, lambda: predict(get_args_parser().parse_args()), "interrupted")


if __name__ == "__main__":
    main()
