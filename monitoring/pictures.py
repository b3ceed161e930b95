"""Draw a run's first batch and the mistakes of its evaluations; count confusions for its report."""

import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from checkpointing.checkpoint import BEST_NAMES, RunState
from checkpointing.folder import PICTURES, own_files
from distributed.collectives import all_gather
from errors import warn_on_failure
from files import write_atomically, write_json
from loading.decode import AS_STORED, decode_plainly
from loading.on_device import one_hot
from settings.options import AugmentationOptions

# A grid: number of images and of columns, smallest and largest side of an image, and the least width of a cell, which
# leaves room for its words.
NUM_IMAGES, NUM_COLUMNS = 9, 3
SMALLEST_PX, LARGEST_PX, CELL_PX = 160, 176, 176
FONT_PX, HEAD_PX, LINE_PX, GAP_PX = 15, 28, 19, 8
INK = (40, 40, 40)

NUM_CLASSES = 16  # most classes of a confusion matrix


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's prediction for each image of a set, in the order of the set."""

    index: numpy.ndarray
    target: numpy.ndarray
    predicted: numpy.ndarray
    confidence: numpy.ndarray  # of the prediction: its softmax, float64

    @property
    def is_wrong(self) -> numpy.ndarray:
        """Which images were mistaken."""
        return self.predicted != self.target


def find_mistakes(found: Predictions, most: int = NUM_IMAGES) -> list[int]:
    """Return the rows of the mistakes that the model was surest of, the surest first and equal ones in their order."""
    rows = numpy.flatnonzero(found.is_wrong)
    return rows[numpy.lexsort((found.index[rows], -found.confidence[rows]))][:most].tolist()


def find_confused(found: Predictions, num_classes: int, most: int = NUM_CLASSES) -> list[int]:
    """Return the classes that are mistaken for others or others for them most often; all if there are few classes."""
    wrong = numpy.concatenate([found.target[found.is_wrong], found.predicted[found.is_wrong]])
    # Stable, so that of equal counts the same classes are chosen wherever the picture is drawn again.
    order = numpy.argsort(-numpy.bincount(wrong, minlength=num_classes), kind="stable")
    return sorted(order[:most].tolist())


def count_confusion(found: Predictions, chosen: list[int], num_classes: int) -> numpy.ndarray:
    """Return a matrix of counts: rows are the chosen true classes, columns the same predicted, then all others."""
    places = numpy.full(num_classes, len(chosen))
    places[chosen] = range(len(chosen))
    rows, columns = places[found.target], places[found.predicted]
    size = len(chosen) + 1
    return numpy.bincount(rows * size + columns, minlength=size * size).reshape(size, size)[:-1]


# Files of fonts that have more letters than Pillow's own, which the system or matplotlib may have.
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "msyh.ttc")
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont  # the latter is Pillow's own, where it is built without FreeType


@cache
def _fonts() -> list[Font]:
    """Return Pillow's own font, and those of `FONTS` that are there."""
    found = [ImageFont.load_default(FONT_PX)]
    names = [*FONTS]
    # matplotlib is looked up and not imported: of all of it one file is needed.
    matplotlib = find_spec("matplotlib")
    if matplotlib is not None and matplotlib.origin:
        names.append(str(Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / FONTS[0]))
    for name in names:
        try:
            found.append(ImageFont.truetype(name, FONT_PX))
        except OSError:
            continue  # not there
    return found


def _font_of(text: str) -> Font:
    """Return the font that lacks the fewest letters of a text."""

    def count_missing(font: Font) -> int:
        missing = bytes(font.getmask("\uffff"))
        return sum(bytes(font.getmask(sign)) == missing for sign in {*text} if sign.isalpha())

    return min(_fonts(), key=count_missing)


def _write(draw: ImageDraw.ImageDraw, position: tuple[int, int], text: str, width: float) -> None:
    """Write a text, cut to a width, px; question marks replace characters that cannot be shown."""
    text = "".join(sign if sign.isprintable() else "?" for sign in text[:80])
    font = _font_of(text)
    while font.getlength(text) > width:
        text = f"{text[:-4]}..."
    draw.text(position, text, fill=INK, font=font)


def corner_of(place: int, side: int) -> tuple[int, int]:
    """Return the left and top of the image at a place in a grid, px."""
    width, height = max(side, CELL_PX) + GAP_PX, side + 2 * LINE_PX + GAP_PX
    return GAP_PX + place % NUM_COLUMNS * width, HEAD_PX + place // NUM_COLUMNS * height


def draw_grid(title: str, images: list[Image.Image], captions: list[list[str]]) -> Image.Image:
    """Draw squares of one size, each with up to two lines below it."""
    side = images[0].width
    cell = max(side, CELL_PX)
    num_rows = math.ceil(len(images) / NUM_COLUMNS)
    width = GAP_PX + NUM_COLUMNS * (cell + GAP_PX)
    height = corner_of(num_rows * NUM_COLUMNS, side)[1]
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    _write(draw, (GAP_PX, 5), title, width - GAP_PX)
    for place, (image, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = corner_of(place, side)
        sheet.paste(image, (left, top))
        for number, line in enumerate(lines):
            _write(draw, (left, top + side + number * LINE_PX), line, cell)
    return sheet


def draw_batch(
    title: str, image: Tensor, target: Tensor, names: list[str], mean: list[float], std: list[float]
) -> Image.Image:
    """Draw normalised images (B, C, H, W) with the class of each, or the shares of its two classes."""
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    pixels = image.float().mul(scale).add(shift).mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    if target.ndim == 1:
        target = one_hot(target, len(names)).float()
    captions = [_name_shares(shares, names) for shares in target.tolist()]
    return draw_grid(title, [_shown(Image.fromarray(each.squeeze(-1).numpy())) for each in pixels], captions)


def _name_shares(shares: list[float], names: list[str]) -> list[str]:
    """Return a line for each class of an image: MixUp and CutMix make one of two images, so of two classes."""
    labels = sorted(range(len(names)), key=lambda label: -shares[label])[:2]
    parts = [(shares[label], names[label]) for label in labels if shares[label] > 0]
    return [f"{share:.0%} {name}" if share < 1 else name for share, name in parts]


def _shown(image: Image.Image) -> Image.Image:
    """Return an image at the size for a grid: enlarge the pixels of a small one, shrink a large one."""
    factor = max(SMALLEST_PX // image.width, 1)
    side = min(image.width * factor, LARGEST_PX)
    # An enlarged pixel stays a square of one colour, which shows what the model has to go by.
    return image.resize((side, side), Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BICUBIC)


class Pictures:
    """Draws pictures of a run into its folder, the same after any restart.

    A picture that fails prints one warning and ends no run. Those of the first batch, of the best evaluation and of the
    newest one are kept. The counts for confusion are a file beside them. A process without a folder draws nothing.
    """

    def __init__(
        self, folder: Path | None, run: RunState, augmentation: AugmentationOptions, val: Any, evaluated: str = "val"
    ) -> None:
        self.folder, self.run, self.augmentation, self.val = folder, run, augmentation, val
        # One set of pictures is enough: that of the averaged weights, if the run has them.
        self.kind = f"{evaluated}_ema" if "model_ema" in run.parts else evaluated
        self._is_new = folder is not None and not run.is_resumed
        self._batches = []

    def watched(self, data_loader: Iterable) -> Iterator:
        """Yield the training batches; rank 0 draws the first one of a new run."""
        for batch in data_loader:
            if self._is_new:
                self._is_new = False
                warn_on_failure("pictures, first-batch", self._draw_batch, *batch)
            yield batch
            # Otherwise the generator holds the device's memory of a batch while the next one is made.
            del batch

    def observe(self, kind: str, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor) -> None:
        """Take a batch of the evaluation `kind`, without a host sync; other arguments as `Metric.batch_sums`."""
        if kind == self.kind:
            output = output if isinstance(output, Tensor) else output[0]
            confidence, predicted = output.float().softmax(dim=1).max(dim=1)
            # Four numbers of each image and not its scores: 50,000 images x 1,000 classes x 4 bytes = 200 MB.
            self._batches.append((index, target, predicted, confidence))

    def draw(self) -> None:
        """Draw the evaluation whose batches `observe` took, once the run knows its results. Collective."""
        found = self.gather()
        if self.folder is None:
            return
        warn_on_failure("pictures, mistakes", self._draw_mistakes, found)
        warn_on_failure("pictures, counts", self._write_counts, found)
        warn_on_failure("pictures, old pictures", self._remove_old)

    def gather(self) -> Predictions:
        """Return the predictions of all processes in the order of the images. Collective: every rank must call it."""
        columns = [torch.cat(parts).cpu().double() for parts in zip(*self._batches, strict=True)]
        self._batches.clear()
        rows = torch.zeros(0, 4).double()
        if columns:  # a rank may have no batch
            rows = torch.stack(columns, dim=1)
        # float64 holds the numbers of images exactly, so that one gather is enough for all four columns.
        rows = torch.cat(all_gather(rows))
        rows = rows[rows[:, 0].argsort(stable=True)]
        index, target, predicted = rows[:, :3].long().numpy().T
        return Predictions(index, target, predicted, rows[:, 3].numpy())

    def _draw_mistakes(self, found: Predictions) -> None:
        rows = find_mistakes(found)
        if not rows:
            return
        names = self.val.classes
        # As the run decodes them, so that photographs are turned alike, but in colour: people look at these.
        how = getattr(self.val.transform, "decoding", AS_STORED)._replace(mode="RGB")
        images, captions = [], []
        for row in rows:
            image = decode_plainly(self.val.index.read(int(found.index[row])), how=how)
            images.append(ImageOps.fit(image, (SMALLEST_PX, SMALLEST_PX)))
            guess = f"{found.confidence[row]:.1%} {names[found.predicted[row]]}"
            captions.append([guess, f"is {names[found.target[row]]}"])
        title = f"{self.kind} after step {self.run.step}: mistakes, the surest first"
        self._write("mistakes", draw_grid(title, images, captions))

    def _draw_batch(self, image: Tensor, target: Tensor) -> None:
        title = f"first batch of {len(image)} as the model sees it"
        image, target = image[:NUM_IMAGES].cpu(), target[:NUM_IMAGES].cpu()
        how = self.val.classes, self.augmentation.mean, self.augmentation.std
        self._write("first-batch", draw_batch(title, image, target, *how))

    def _write(self, tag: str, picture: Image.Image) -> None:
        content = io.BytesIO()
        picture.save(content, "PNG")
        write_atomically(self.folder / f"picture-{tag}-{self.run.step:08d}.png", content.getvalue())

    def _write_counts(self, found: Predictions) -> None:
        names = self.val.classes
        chosen = find_confused(found, len(names))
        mistakes = []
        for row in find_mistakes(found):
            path = self.val.index.path(int(found.index[row]))
            target = names[found.target[row]]
            mistakes.append([path, target, names[found.predicted[row]], float(found.confidence[row])])
        best = BEST_NAMES[self.kind]
        counts = {
            "kind": self.kind,
            "step": self.run.step,
            "classes": [names[label] for label in chosen],
            "confusion": count_confusion(found, chosen, len(names)).tolist(),
            "best": f"{best}.pth" if best in self.run.best_now else None,
            "mistakes": mistakes,
        }
        write_json(self.folder / f"picture-counts-{self.run.step:08d}.json", counts)

    def _remove_old(self) -> None:
        # An evaluation after each of 300 epochs would leave 300 of them.
        best = self.run.bests[BEST_NAMES[self.kind]]
        kept = {self.run.step} if best is None else {self.run.step, best["step"]}
        for path in own_files(self.folder, PICTURES):
            picture = PICTURES.fullmatch(path.name)
            if picture["tag"] != "first-batch" and int(picture["step"]) not in kept:
                path.unlink()
