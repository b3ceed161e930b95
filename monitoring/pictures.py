"""Draw pictures of a run: its first batch, and after evaluations its mistakes, confusions, classes and calibration."""

import io
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from checkpointing.checkpoint import BEST_NAMES, RunState
from checkpointing.finder import PICTURES, CheckpointFinder
from distributed.collectives import all_gather
from distributed.decision import LoaderAround
from files import write_atomically
from loading.decode import decode_plainly
from monitoring.attempts import Attempts
from transforms import one_hot

# A grid: number of images, columns, smallest and largest side of an image, and the least width of a cell; px.
NUM_IMAGES, NUM_COLUMNS, SMALLEST_PX, LARGEST_PX, CELL_PX = 16, 4, 96, 160, 132

# A confusion matrix: the most classes that it shows, and the side of its cells, px.
NUM_CLASSES, MATRIX_PX = 16, 34

NUM_BINS = 15  # bins of confidence in a calibration
NUM_NAMED = 8  # most named classes, each of the best and of the worst

HEAD_PX, LINE_PX, GAP_PX = 24, 14, 8
PLOT_PX = (480, 240)  # width and height of the area that bars are in
INK, BLUE, RED, GREY = (40, 40, 40), (66, 113, 178), (200, 60, 50), (210, 210, 210)


class Predictions(NamedTuple):
    """A model's prediction for each image of a set, in the order of the set."""

    index: numpy.ndarray
    target: numpy.ndarray
    predicted: numpy.ndarray
    confidence: numpy.ndarray  # of the prediction: its softmax, float64

    @property
    def is_wrong(self) -> numpy.ndarray:
        """Which images were mistaken."""
        return self.predicted != self.target


def find_mistakes(found: Predictions) -> list[int]:
    """Return the rows of the mistakes that the model was surest of, the surest first and equal ones in their order."""
    rows = numpy.flatnonzero(found.is_wrong)
    return rows[numpy.lexsort((found.index[rows], -found.confidence[rows]))][:NUM_IMAGES].tolist()


def find_confused(found: Predictions, num_classes: int) -> list[int]:
    """Return the classes of the pairs that are mistaken for each other most often; all if there are few classes.

    A pair's classes are neighbours, unless an earlier pair has one. If mistakes name too few, the first others follow.
    """
    if num_classes <= NUM_CLASSES:
        return [*range(num_classes)]
    target, predicted = found.target[found.is_wrong], found.predicted[found.is_wrong]
    pairs = numpy.minimum(target, predicted) * num_classes + numpy.maximum(target, predicted)
    pairs, counts = numpy.unique(pairs, return_counts=True)
    chosen = {}
    for pair in pairs[numpy.lexsort((pairs, -counts))].tolist():
        chosen |= dict.fromkeys(divmod(pair, num_classes))
        if len(chosen) >= NUM_CLASSES:
            break
    return [*(chosen | dict.fromkeys(range(NUM_CLASSES)))][:NUM_CLASSES]


def count_confusion(found: Predictions, chosen: list[int], num_classes: int) -> numpy.ndarray:
    """Return a matrix of counts: rows are the chosen true classes, columns the same predicted, then all others."""
    places = numpy.full(num_classes, len(chosen))
    places[chosen] = range(len(chosen))
    rows, columns = places[found.target], places[found.predicted]
    size = len(chosen) + 1
    return numpy.bincount(rows * size + columns, minlength=size * size).reshape(size, size)[:-1]


def rank_classes(found: Predictions, num_classes: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the classes that have images, the worst first and equal ones in their order, and their accuracies."""
    images = numpy.bincount(found.target, minlength=num_classes)
    hits = numpy.bincount(found.target[~found.is_wrong], minlength=num_classes)
    classes = numpy.flatnonzero(images)
    shares = hits[classes] / images[classes]
    order = numpy.argsort(shares, kind="stable")
    return classes[order], shares[order]


class Calibration(NamedTuple):
    """The images, accuracy and mean confidence of a model in bins of equal width of its confidence."""

    counts: numpy.ndarray
    accuracy: numpy.ndarray  # NaN in an empty bin
    confidence: numpy.ndarray  # likewise
    error: float  # the expected calibration error (Guo et al., arXiv 1706.04599)


def calibrate(found: Predictions) -> Calibration:
    """Return the calibration of a model; a bin holds its upper edge."""
    bins = numpy.searchsorted(numpy.linspace(0, 1, NUM_BINS + 1)[1:-1], found.confidence)
    counts, hits, sure = (
        numpy.bincount(bins, weights, minlength=NUM_BINS) for weights in (None, ~found.is_wrong, found.confidence)
    )
    with numpy.errstate(invalid="ignore"):
        return Calibration(counts, hits / counts, sure / counts, float(abs(hits - sure).sum() / counts.sum()))


@cache
def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(11)


def _fit(text: str, width: float) -> str:
    """Return a text cut to a width, px; question marks replace characters that cannot be shown."""
    text = "".join(sign if sign.isprintable() else "?" for sign in text[:80])
    if _font().getlength(text) <= width:
        return text
    while text and _font().getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


class Sheet:
    """An empty picture with a title above it; width and height are in px and without the title."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.image = Image.new("RGB", (width, HEAD_PX + height), "white")
        self.draw = ImageDraw.Draw(self.image)
        self.text(GAP_PX, 5, title, width - GAP_PX)

    def text(
        self, left: float, top: float, text: str, width: float = 1000, anchor: str = "la", fill: Any = INK
    ) -> None:
        """Write one line."""
        self.draw.text((left, top), _fit(text, width), fill=fill, font=_font(), anchor=anchor)

    def axes(self, left: int, top: int, width: int, height: int) -> None:
        """Draw lines at each quarter from 0 to 100 %."""
        for quarter in range(5):
            y = top + height - height * quarter // 4
            self.draw.line((left, y, left + width, y), fill=GREY)
            self.text(left - 4, y, f"{25 * quarter}%", anchor="rm")


def corner_of(place: int, side: int) -> tuple[int, int]:
    """Return the left and top of the image at a place in a grid, px."""
    width, height = max(side, CELL_PX) + GAP_PX, side + 2 * LINE_PX + GAP_PX
    return GAP_PX + place % NUM_COLUMNS * width, HEAD_PX + place // NUM_COLUMNS * height


def draw_grid(title: str, images: list[Image.Image], captions: list[list[str]]) -> Image.Image:
    """Draw squares of one size, each with up to two lines below it."""
    side = images[0].width
    width, _ = corner_of(NUM_COLUMNS - 1, side)
    _, height = corner_of((len(images) - 1) // NUM_COLUMNS * NUM_COLUMNS + NUM_COLUMNS, side)
    sheet = Sheet(width + max(side, CELL_PX) + GAP_PX, height - HEAD_PX, title)
    for place, (image, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = corner_of(place, side)
        sheet.image.paste(image, (left, top))
        for number, line in enumerate(lines):
            sheet.text(left, top + side + number * LINE_PX, line, max(side, CELL_PX))
    return sheet.image


def draw_confusion(title: str, found: Predictions, names: list[str]) -> Image.Image:
    """Draw how often a model took one class for another: rows are the true classes, columns the predicted."""
    chosen = find_confused(found, len(names))
    counts = count_confusion(found, chosen, len(names))
    heads = [str(number + 1) for number in range(len(chosen))] + ["other"] * (len(chosen) < len(names))
    rows = [_fit(f"{row + 1}  {names[label]}", 200) for row, label in enumerate(chosen)]
    left, top = 2 * GAP_PX + round(max(map(_font().getlength, rows))), HEAD_PX + LINE_PX
    sheet = Sheet(left + MATRIX_PX * len(heads) + GAP_PX, LINE_PX + MATRIX_PX * len(chosen) + GAP_PX, title)
    for row, text in enumerate(rows):
        y = top + MATRIX_PX * row
        sheet.text(GAP_PX, y + MATRIX_PX // 2, text, anchor="lm")
        for column in range(len(heads)):
            count = counts[row, column]
            share = count / max(counts[row].sum(), 1)
            colour = BLUE if column == row else RED
            x = left + MATRIX_PX * column
            shade = tuple(round(255 - (255 - part) * share) for part in colour)
            sheet.draw.rectangle((x, y, x + MATRIX_PX - 2, y + MATRIX_PX - 2), fill=shade)
            if count:
                ink = "white" if share > 0.5 else INK
                sheet.text(x + MATRIX_PX // 2 - 1, y + MATRIX_PX // 2 - 1, f"{count}", anchor="mm", fill=ink)
    for column, head in enumerate(heads):
        sheet.text(left + MATRIX_PX * column + MATRIX_PX // 2, HEAD_PX, head, anchor="ma")
    return sheet.image


def draw_classes(title: str, found: Predictions, names: list[str]) -> Image.Image:
    """Draw each class's accuracy as a bar, the worst first, and name the worst and the best."""
    classes, shares = rank_classes(found, len(names))
    (width, height), left = PLOT_PX, 44
    listed = min(NUM_NAMED, (len(classes) + 1) // 2)
    top = HEAD_PX + GAP_PX
    sheet = Sheet(left + width + GAP_PX, height + 3 * GAP_PX + LINE_PX * (listed + 1), title)
    sheet.axes(left, top, width, height)
    for x in range(width):
        bar = x * len(classes) // width
        if len(classes) > width // 4 or (x + 1) * len(classes) // width == bar:  # leave gaps between wide bars
            sheet.draw.line((left + x, top + height, left + x, top + height - round(height * shares[bar])), fill=BLUE)
    below = top + height + GAP_PX
    for x, head, rows in [
        (left, "worst", range(listed)),
        (left + width // 2, "best", range(len(classes) - 1, len(classes) - 1 - listed, -1)),
    ]:
        sheet.text(x, below, head, fill=RED if head == "worst" else BLUE)
        for line, row in enumerate(rows):
            text = f"{shares[row]:6.1%}  {names[classes[row]]}"
            sheet.text(x, below + LINE_PX * (line + 1), text, width // 2 - GAP_PX)
    return sheet.image


def draw_calibration(title: str, found: Predictions) -> Image.Image:
    """Draw a model's accuracy at each confidence, beside the diagonal on which it would be calibrated."""
    bins = calibrate(found)
    side, left, top = PLOT_PX[1], 44, HEAD_PX + GAP_PX
    sheet = Sheet(left + side + 200, side + 2 * GAP_PX + 2 * LINE_PX, title)
    sheet.axes(left, top, side, side)
    width = side // len(bins.counts)
    for number in numpy.flatnonzero(bins.counts).tolist():
        x, y = left + number * width, top + side - round(side * bins.accuracy[number])
        sheet.draw.rectangle((x, y, x + width - 2, top + side), fill=BLUE)
        y = top + side - round(side * bins.confidence[number])
        sheet.draw.line((x, y, x + width - 2, y), fill=RED, width=2)
    sheet.draw.line((left, top + side, left + side, top), fill=INK)
    sheet.text(left, top + side + GAP_PX, "confidence (softmax) from 0 to 100%", side)
    lines = [
        f"ECE {bins.error:.2%}, {len(bins.counts)} bins",
        f"accuracy {float((~found.is_wrong).mean()):.2%}",
        f"mean confidence {float(found.confidence.mean()):.2%}",
        f"{len(found.index)} images",
    ]
    for line, text in enumerate(lines):
        sheet.text(left + side + GAP_PX, top + LINE_PX * line, text)
    sheet.text(left + side + GAP_PX, top + LINE_PX * (len(lines) + 1), "bars: how often it is right", fill=BLUE)
    sheet.text(left + side + GAP_PX, top + LINE_PX * (len(lines) + 2), "red: how sure it is", fill=RED)
    return sheet.image


def draw_batch(
    title: str, image: Tensor, target: Tensor, names: list[str], mean: list[float], std: list[float]
) -> Image.Image:
    """Draw normalised images (B, 3, H, W) with the class of each, or the shares of its two classes."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    pixels = image.float().mul(std).add(mean).mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    target = target if target.ndim == 2 else one_hot(target, len(names)).float()
    captions = []
    for shares in target.tolist():
        classes = sorted(range(len(names)), key=lambda label, shares=shares: -shares[label])[:2]
        captions.append([f"{shares[label]:.0%} {names[label]}" for label in classes if shares[label] > 0])
    return draw_grid(title, [_shown(Image.fromarray(each.numpy())) for each in pixels], captions)


def _shown(image: Image.Image) -> Image.Image:
    """Return an image at the size for a grid: enlarge the pixels of a small one, shrink a large one."""
    factor = max(SMALLEST_PX // image.width, 1)
    side = min(image.width * factor, LARGEST_PX)
    return image.resize((side, side), Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BICUBIC)


class FirstBatch(LoaderAround):
    """A loader that shows its first batch to `take` before it yields it."""

    def __init__(self, loader: Any, take: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(loader)
        self.take = take

    def __iter__(self) -> Iterator:
        batches = iter(self.loader)
        for image, target in islice(batches, 1):
            self.take(image, target)
            yield image, target
        yield from batches


class Pictures:
    """Draws pictures of a run into its folder, the same after any restart; none of synthetic images.

    A picture that fails prints one warning and ends no run. Pictures of the evaluations after epochs 1, 2, 4, 8 and so
    on, of the best and of the newest one are kept: a dozen of each kind, about 5 MB in all, in 600 epochs.

    Args:
        folder: the output folder; None for a process that draws nothing.
        run: the state of the run.
        args: options with `mean` and `std`.
        val: the validation set.
        evaluated: the validation set's name in the log.
    """

    def __init__(self, folder: Path | None, run: RunState, args: Any, val: Any, evaluated: str = "val") -> None:
        self.folder, self.run, self.args, self.val = folder, run, args, val
        self.is_active = val.index.form != "synthetic"
        # One set of pictures is enough: that of the averaged weights, if the run has them.
        self.kind = evaluated + ("_ema" if "model_ema" in run.parts else "")
        self._is_new = self.is_active and folder is not None and not run.is_resumed
        self._batches, self._attempt = [], Attempts()

    def open(self) -> None:
        """Remove pictures that an earlier process drew beyond the state that the run goes on from."""
        if self.folder is not None and self.run.is_resumed:
            self._keep_only(lambda step: step < self.run.step + self.run.is_evaluated)

    def watched(self, data_loader: Any) -> Any:
        """Return the loader of training batches; in a new run one from which rank 0 draws the first batch."""
        is_new, self._is_new = self._is_new, False
        take = partial(self._attempt, "pictures, first-batch", self._draw_batch)
        return FirstBatch(data_loader, take) if is_new else data_loader

    def observe(self, kind: str, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor) -> None:
        """Take a batch of the evaluation `kind`, without a host sync; other arguments as `metrics.Metric.update`."""
        if self.is_active and kind == self.kind:
            output = output if isinstance(output, Tensor) else output[0]
            confidence, predicted = output.float().softmax(dim=1).max(dim=1)
            self._batches.append((index, target, predicted, confidence))

    def draw(self) -> None:
        """Draw the evaluation whose batches `observe` took, once the run knows its results. Collective."""
        if not self.is_active:
            return
        found = self.gather()
        if self.folder is None:
            return
        names, head = self.val.classes, f"{self.kind} after step {self.run.step}"
        for tag, picture in {
            "mistakes": lambda: self._draw_mistakes(f"{head}: mistakes, the surest first", found),
            "confusion": lambda: draw_confusion(f"{head}: true class (rows), predicted (columns)", found, names),
            "classes": lambda: draw_classes(f"{head}: accuracy of {len(names)} classes", found, names),
            "calibration": lambda: draw_calibration(f"{head}: calibration", found),
        }.items():
            self._attempt(f"pictures, {tag}", self._write, tag, picture)
        best = self.run.bests[BEST_NAMES[self.kind]] or {}
        kept = {self.run.step, best.get("step")}
        self._keep_only(lambda step: step in kept or (step // self.run.steps_per_epoch).bit_count() == 1)

    def gather(self) -> Predictions:
        """Return the predictions of all processes in the order of the images. Collective: every rank must call it."""
        columns = [torch.cat(parts).cpu().double() for parts in zip(*self._batches, strict=True)]
        self._batches.clear()
        rows = torch.cat(all_gather(torch.stack(columns, dim=1) if columns else torch.zeros(0, 4).double()))
        rows = rows[rows[:, 0].argsort(stable=True)]
        return Predictions(*rows[:, :3].long().numpy().T, rows[:, 3].numpy())

    def _draw_mistakes(self, title: str, found: Predictions) -> Image.Image | None:
        rows, names = find_mistakes(found), self.val.classes
        payloads = map(self.val.index.read, found.index[rows].tolist())
        images = [ImageOps.fit(decode_plainly(payload), (SMALLEST_PX, SMALLEST_PX)) for payload in payloads]
        captions = [
            [f"{found.confidence[row]:.1%} {names[found.predicted[row]]}", f"is {names[found.target[row]]}"]
            for row in rows
        ]
        return draw_grid(title, images, captions) if rows else None

    def _draw_batch(self, image: Tensor, target: Tensor) -> None:
        num_images = len(image)
        image, target = image[:NUM_IMAGES].cpu(), target[:NUM_IMAGES].cpu()
        args, title = self.args, f"first batch of {num_images} as the model sees it"
        self._write("first-batch", lambda: draw_batch(title, image, target, self.val.classes, args.mean, args.std))

    def _write(self, tag: str, draw: Callable[[], Image.Image | None]) -> None:
        picture, content = draw(), io.BytesIO()
        if picture is not None:
            picture.save(content, "PNG")
            path = self.folder / f"picture-{tag}-{self.run.step:08d}.png"
            write_atomically(path, content.getvalue())

    def _keep_only(self, is_kept: Callable[[int], bool]) -> None:
        """Remove the pictures of evaluations, except those after steps that `is_kept` accepts."""

        def remove_others() -> None:
            for tag, step, path in list(self.folder):
                if tag != "first-batch" and not is_kept(step):
                    path.unlink(missing_ok=True)

        self._attempt("pictures, old pictures", remove_others)


def list(folder: Path) -> list[tuple[str, int, Path]]:
    """Return (tag, step, path) of each picture of a run, sorted by tag and step."""
    paths = CheckpointFinder(folder).own_files(PICTURES)
    named = [(PICTURES.fullmatch(path.name), path) for path in paths]
    return sorted((match["tag"], int(match["step"]), path) for match, path in named if path.is_file())
