"""Evaluate one checkpoint on several sets at once: `python -m scripts.evaluate CHECKPOINT --set NAME=DIR ...`."""

import argparse
import csv
import importlib
import io
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

import collectives
import data
import models
from errors import (
    ImageError,
    InterruptedRunError,
    LimitError,
    LoaderKilledError,
    NonFiniteError,
    UserError,
    counted,
    end_by,
    one_line,
    require_timm,
)
from files import open_to_read, read_bytes
from launch import read_launch
from loading.forms import find_sources, open_source
from loading.index import check_num_bytes
from loading.progress import Progress
from loading.source import Source, list_folder
from loading.subset import labels_of
from metrics import bootstrap_interval, calibration_error, numbers_of, rank_classes
from monitoring.estimate import is_out_of_memory
from options import INTERPOLATIONS
from presets import build_presets
from sampler import EvalSampler
from scripts.check import NUM_VAL
from scripts.tool import build_parser, positive, run, write_output
from scripts.trained import Trained, add_machine_options, add_options, open_trained, settle

PROG = "python -m scripts.evaluate"

EPILOG = f"""\
examples:
  {PROG} runs/resnet50/best.pth --set val=/data/imagenet/val
  {PROG} resnet50.IMAGENET1K_V2 --set val=/data/imagenet/val --real real.json \\
      --set v2=/data/imagenetv2-matched-frequency --set a=/data/imagenet-a --json results.json
  {PROG} best.pth --set flat=/data/images,labels.csv --predictions predictions.csv
  torchrun --nproc_per_node=8 -m scripts.evaluate runs/resnet50/best_ema.pth --ema --set val=/data/imagenet/val

sets:
  NAME=DIR        class folders, tars or a pack, as train.py reads them. A class folder bears the name of a class of
                  the checkpoint, or its number (ImageNetV2). Where the checkpoint knows no names, the folders in
                  alphabetical order are its classes, or synsets are looked up in a set that has them all or in timm.
                  If there are folders of some classes alone (ImageNet-A, -R), the scores of all other classes are
                  left out before anything is computed, as the papers of these sets do.
  NAME=DIR,LIST   images below DIR, and a list of them: `file label` a line, or CSV with the same two columns.
                  A label is the name or the number of a class; no classes are left out.
  --minival F     of the set called minival, only the images that train.py --minival F has held out: the set is
                  minival=DIR/train, with the same images as in training.
  --real FILE     ReaL labels (real.json of Beyer et al., arXiv 2006.07159) for each set whose files are named
                  ILSVRC2012_val_00000001.JPEG and so on, also where they lie in DIR without class folders: the share
                  of images whose best class is among their labels; images without labels are left out.

Acc@k, in percent, counts the images whose class is among the k best; of equal scores that of the lower class is better.
NLL is the mean of the negative logarithm of the probability of an image's class, ECE the expected calibration error
with 15 bins of equal width. The 95% interval is that of Acc@1, by a bootstrap over the images with a fixed seed.

Preprocessing and precision are those of the checkpoint's training or publication. The result is the same in every bit
on any number of processes, with the same --batch-size and OMP_NUM_THREADS (1, if it is not set).
"""

# How many of the pairs that are confused most often are reported.
_NUM_CONFUSED = 10

_INTERRUPTED = "interrupted; start it again: nothing is kept of what was evaluated"

_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_SYNSET = re.compile(r"n\d{8}")
_HEADERS = {"file", "filename", "file_name", "image", "path", "name"}
_MOST_LIST_BYTES = 1 << 28


class ListedImages(Source):
    """Images at given paths below a folder.

    Args:
        root: the folder.
        names: the paths.
        words: the class of each image, a name or a number; none where they are not known.
    """

    form = "list"

    def __init__(self, root: Path, names: list[str], words: list[str]) -> None:
        super().__init__(root)
        self.names, self.classes = names, sorted(set(words))
        labels = {word: label for label, word in enumerate(self.classes)}
        self.labels = [labels[word] for word in words] or [0] * len(names)

    def __len__(self) -> int:
        return len(self.names)

    def label(self, number: int) -> int:
        """Return the class of an image; 0 where it is not known."""
        return self.labels[number]

    def name(self, number: int) -> str:
        """Return an image's path below the folder."""
        return self.names[number]

    def path(self, number: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.root, self.names[number])

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file; raises as `Source.read`."""
        with open_to_read(self.path(number), buffering=0) as file:
            check_num_bytes(os.fstat(file.fileno()).st_size)
            return file.read()


class ImageSet:
    """A set to evaluate on.

    Args:
        name: the set's.
        source: its images; its classes are names or numbers of classes of the model.
        is_folder: there is a folder for each class.

    Attributes:
        words: the names or numbers.
        labels: (N,) int64: the number of each image's class in the model; -1 if none is known.
        columns: the numbers of the set's classes, where the model has others too; else None.
        found_by: how the classes were found.
        real: the ReaL labels of each image, or None.
    """

    real: list[list[int]] | None = None

    def __init__(self, name: str, source: Source, *, is_folder: bool) -> None:
        self.name, self.source, self.words, self.is_folder = name, source, source.classes, is_folder

    def number_classes(self, numbers: list[int], num_classes: int, found_by: str) -> None:
        """Say which classes of the model the set's are."""
        table = numpy.array(numbers or [-1], dtype=numpy.int64)
        self.labels = table[labels_of(self.source)]
        self.found_by = found_by
        is_part = self.is_folder and len(numbers) < num_classes
        self.columns = torch.tensor(sorted(numbers)) if is_part else None


def open_part(text: str, options: argparse.Namespace) -> ImageSet:
    """Open the part of a `--set` that is to be evaluated; raises as `open_set`."""
    each = open_set(text, has_real=options.real is not None)
    source = each.source
    if each.name == "minival":
        source, _ = data.hold_out(source, options.minival)
    source = data.limit_images(source, options.limit, each.name)
    return each if source is each.source else ImageSet(each.name, source, is_folder=each.is_folder)


def open_set(text: str, *, has_real: bool) -> ImageSet:
    """Open the whole set that a `--set` means.

    Raises:
        UserError: there are no such images, or the list is not one of them.
    """
    name, equals, place = text.partition("=")
    if not name or not equals or not place:
        raise UserError(f"--set {text}: expected NAME=DIR or NAME=DIR,LIST, such as val=/data/imagenet/val")
    folder, comma, table = place.rpartition(",")
    if comma and not find_sources(Path(place)):
        return open_list(f"--set {text}", name, Path(folder), Path(table))
    root = Path(place) if Path(place).name not in ("", "..") else Path(os.path.abspath(place))
    if not find_sources(root):
        raise UserError(
            f"--set {text}: {place} holds no images; give a folder with one folder for each class, the path of tars or "
            "of a pack without their ending, or DIR,LIST"
        )
    flat = [] if not root.is_dir() else list_folder(root)
    images = [each for each in flat if each.lower().endswith(IMG_EXTENSIONS)]
    if images and not any(os.path.isdir(root / each) for each in flat):
        if has_real:
            return ImageSet(name, ListedImages(root, images, []), is_folder=False)
        raise UserError(
            f"--set {text}: {place} holds {counted(len(images), 'image')} and no class folders; give "
            f"{name}={place},LIST with a list of their classes, or --real FILE"
        )
    return ImageSet(name, open_source(root), is_folder=True)


def open_list(given: str, name: str, folder: Path, table: Path) -> ImageSet:
    """Return the set of the images in a list; raises as `open_set`."""
    if not folder.is_dir():
        raise UserError(f"{given}: {folder} is not a folder; give the one that holds the images of the list")
    files, words = [], []
    here = set(list_folder(folder))
    for line, (file, word) in read_list(given, table):
        if file not in here and not os.path.isfile(folder / file):
            raise UserError(f"{given}: line {line} of {table} names {file}, which is not in {folder}")
        files.append(file)
        words.append(word)
    if not files:
        raise UserError(f"{given}: {table} is empty; expected `file label` a line")
    if len(set(files)) < len(files):
        twice = next(file for file in files if files.count(file) > 1)
        raise UserError(f"{given}: {table} names {twice} twice; an image is evaluated once")
    return ImageSet(name, ListedImages(folder, files, words), is_folder=False)


def read_list(given: str, table: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line of a list, and its file and label.

    Raises:
        UserError: it cannot be read, or is no list.
    """
    try:
        lines = read_bytes(table, _MOST_LIST_BYTES).decode("utf-8-sig", "surrogateescape").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{given}: the list {table} cannot be read: {reason}") from error
    is_csv = table.suffix.lower() == ".csv" or bool(lines and "," in lines[0])
    for number, line in enumerate(lines, 1):
        try:
            words = next(csv.reader([line]), []) if is_csv else line.rsplit(None, 1)
        except csv.Error:
            words = []
        words = [word.strip() for word in words]
        if not line.strip() or (number == 1 and words[:1] and words[0].lower() in _HEADERS):
            continue
        if len(words) < 2 or not words[0] or not words[1]:
            raise UserError(f"{given}: line {number} of {table} is {line[:80]!r}; expected a file and its label")
        yield number, words[:2]


class ClassNumbers:
    """Which class of the model a word means.

    Args:
        names: of the model's classes, or None.
        num_classes: of the model.
        sets: all that are evaluated; one that has all classes may name them.
        is_published: the names are English words, and sets may name the classes by synsets.
    """

    def __init__(
        self, names: list[str] | None, num_classes: int, sets: list[ImageSet], *, is_published: bool = False
    ) -> None:
        self.names, self.num_classes = names, num_classes
        self.has_folder_names = names is not None and not is_published
        known = names or []
        self.by_name = {name: number for number, name in enumerate(known) if known.count(name) == 1}
        whole = [each.words for each in sets if each.is_folder and len(each.words) == num_classes]
        self.whole = next((words for words in whole if not self._are_numbers(words)), None)

    def _are_numbers(self, words: list[str]) -> bool:
        return all(re.fullmatch("[0-9]{1,9}", word) and int(word) < self.num_classes for word in words)

    def find(self, each: ImageSet) -> tuple[list[int], str]:
        """Return the numbers of a set's classes, and how they were found.

        Raises:
            UserError: they are not the model's.
        """
        words = each.words
        if all(word in self.by_name for word in words):
            return [self.by_name[word] for word in words], "name"
        if self._are_numbers(words):
            numbers = [int(word) for word in words]
            if each.is_folder and len(set(numbers)) < len(numbers):
                raise UserError(f"{each.name}: two of its class folders are of one number")
            return numbers, "number"
        if not self.has_folder_names:
            if each.is_folder and len(words) == self.num_classes:
                return list(range(self.num_classes)), "order"
            order = self._synsets(each)
            if all(word in order for word in words):
                return [order[word] for word in words], "synset"
            self._refuse(each, order)
        return self._refuse(each, self.by_name)

    def _synsets(self, each: ImageSet) -> dict[str, int]:
        words = self.whole
        if words is None and self.num_classes == 1000 and all(map(_SYNSET.fullmatch, each.words)):
            require_timm("without a set of all 1000 classes, the order", "of the synsets")
            words = importlib.import_module("timm.data").ImageNetInfo().label_names()
        return {word: number for number, word in enumerate(words or [])}

    def _refuse(self, each: ImageSet, known: dict[str, int]) -> None:
        unknown = [word for word in each.words if word not in known]
        more = f" (and {len(unknown) - 1:,} more)" if len(unknown) > 1 else ""
        names = list(known)
        of_model = f", such as {', '.join(names[:2])}" if names else ", whose names are not known"
        raise UserError(
            f"--set {each.name}: {unknown[0]}{more} is none of the {self.num_classes:,} classes of the checkpoint"
            f"{of_model}, and no number from 0 to {self.num_classes - 1}; is it a checkpoint of another data set?"
        )


def read_real(path: Path, sets: list[ImageSet], num_classes: int) -> None:
    """Give each set of ILSVRC2012's val its ReaL labels.

    Raises:
        UserError: the file does not hold them, or there is no such set.
    """
    given = f"--real {path}"
    try:
        real = json.loads(read_bytes(path, _MOST_LIST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{given} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(real, list) or not all(isinstance(labels, list) for labels in real):
        raise UserError(f"{given} is no list of lists of labels, as the published real.json is")
    if any(type(label) is not int or not 0 <= label < num_classes for labels in real for label in labels):
        raise UserError(f"{given} holds labels that are no numbers of the {num_classes:,} classes of the checkpoint")
    found = False
    for each in sets:
        matches = [_VAL_NAME.search(each.source.name(number)) for number in range(len(each.source))]
        if all(matches):
            found = True
            numbers = [int(match[1]) for match in matches]
            if len(real) not in (NUM_VAL, len(numbers)) or not 1 <= min(numbers) <= max(numbers) <= len(real):
                raise UserError(
                    f"{given} holds the labels of {counted(len(real), 'image', ',')}, and --set {each.name} has "
                    f"{len(numbers):,}, up to ILSVRC2012_val_{max(numbers):08d}; expected {NUM_VAL:,}"
                )
            each.real = [real[number - 1] for number in numbers]
        elif not each.words:
            raise UserError(f"--set {each.name}: its files are not named ILSVRC2012_val_*, by which --real finds them")
    if not found:
        raise UserError(f"{given}: there is no --set whose files are named ILSVRC2012_val_00000001.JPEG and so on")


class _JoinedSource(Source):
    """The images of all sets, one set behind the other; a label is the number of a class of the model, or -1."""

    form = "sets"

    def __init__(self, sets: list[ImageSet]) -> None:
        super().__init__(Path())
        self.sets, self.classes = sets, []
        self.starts = numpy.cumsum([0, *(len(each.source) for each in sets)]).tolist()

    def _find(self, number: int) -> tuple[ImageSet, int]:
        place = int(numpy.searchsorted(self.starts, number, side="right")) - 1
        return self.sets[place], number - self.starts[place]

    def __len__(self) -> int:
        return self.starts[-1]

    def label(self, number: int) -> int:
        each, number = self._find(number)
        return int(each.labels[number])

    def name(self, number: int) -> str:
        each, number = self._find(number)
        return each.source.name(number)

    def path(self, number: int) -> str:
        each, number = self._find(number)
        return each.source.path(number)

    def read(self, number: int) -> bytes:
        each, number = self._find(number)
        return each.source.read(number)


class _JoinedImages(data.IndexedImageFolder):
    """The images of all sets as one data set, so that one group of loader processes is enough."""

    def __init__(self, sets: list[ImageSet], preset: Any) -> None:
        self.index, self.transform, self.seed = _JoinedSource(sets), preset, 0
        self.classes = []

    def error(self, number: int, reason: str) -> ImageError:
        """Return the error that says why an image cannot be read."""
        return ImageError(f"cannot read image {self.index.path(number)}: {reason}")


class _SetSampler(EvalSampler):
    """This process's share of the fixed batches of some images: see `EvalSampler`."""

    def __init__(self, numbers: Sequence[int], batch_size: int, rank: int, world_size: int) -> None:
        super().__init__(len(numbers), batch_size, rank, world_size)
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return (self.numbers[place] for place in super().__iter__())


def score_set(each: ImageSet, model: Any, loader: data.DeviceLoader, k: int, autocast: Any) -> numpy.ndarray:
    """Return for each image its number among those of all sets and what `rank_classes` says of it, in their order.

    Collective: every rank must call it.

    Raises:
        NonFiniteError: the model's scores are not finite.
    """
    rows = [torch.zeros(0, 3 + 2 * k, dtype=torch.float64)]
    progress = Progress(f"evaluating on {each.name}", len(loader.loader.sampler), "images")
    with torch.inference_mode(), autocast:
        for (image, target), index in zip(loader, numbers_of(loader), strict=True):
            output = model(image)
            rows.append(_rows(each, output, target, index, k))
            progress.update(len(index))
    progress.close()
    gathered = gather(torch.cat([part.cpu() for part in rows])).numpy()
    gathered = gathered[numpy.argsort(gathered[:, 0], kind="stable")]
    if not numpy.isfinite(gathered).all():
        raise NonFiniteError(
            f"the scores of the checkpoint on --set {each.name} are not finite: its weights are broken"
        )
    return gathered


def gather(rows: Tensor) -> Tensor:
    """Return the rows of all processes. Collective: every rank must call it.

    Raises:
        UserError: another process has ended.
    """
    try:
        return torch.cat(collectives.all_gather(rows))
    except RuntimeError as error:
        time.sleep(10)  # a launcher ends this process meanwhile, and the other one has said why
        raise UserError("another process has ended, for a reason that stands above or in its log") from error


def _rows(each: ImageSet, output: Any, target: Tensor, index: Tensor, k: int) -> Tensor:
    """Return what is kept of a batch, on its device."""
    output = output if isinstance(output, Tensor) else output[0]
    if each.columns is None:
        ranked = rank_classes(output, target.clamp(min=0), k)
    else:
        columns = each.columns.to(output.device)
        ranked = rank_classes(output[:, columns], torch.searchsorted(columns, target), k)
        ranked[:, 2 : 2 + k] = columns.to(ranked.device)[ranked[:, 2 : 2 + k].long()].double()
    return torch.cat([index[:, None].to(ranked.device), ranked], dim=1)


class Scored(NamedTuple):
    """The records of a set's images, in order.

    Attributes:
        labels: (n,) the class, or -1.
        places: (n,) the place of the class among all, from 0.
        nll: (n,) the negative logarithm of its probability.
        best: (n, k) the best classes.
        probabilities: (n, k) theirs.
    """

    labels: numpy.ndarray
    places: numpy.ndarray
    nll: numpy.ndarray
    best: numpy.ndarray
    probabilities: numpy.ndarray

    @classmethod
    def of(cls, each: ImageSet, rows: numpy.ndarray) -> "Scored":
        """Return the records in the rows of `score_set`."""
        k = (rows.shape[1] - 3) // 2
        best = rows[:, 3 : 3 + k].astype(numpy.int64)
        return cls(each.labels, rows[:, 1].astype(numpy.int64), rows[:, 2], best, rows[:, 3 + k :])


def summarize(each: ImageSet, scored: Scored, topk: list[int], names: list[str]) -> dict[str, Any]:
    """Return the results of a set, for JSON."""
    classes = len(each.words) if each.is_folder else len(set(scored.labels.tolist()) - {-1})
    found = {
        "images": len(scored.labels), "classes": classes, "classes_found_by": each.found_by,
        "is_restricted_to_its_classes": each.columns is not None,
    }  # fmt: skip
    if each.words:
        num_images, is_hit = len(scored.labels), scored.places == 0
        found |= {f"acc{k}": 100 * int((scored.places < k).sum()) / num_images for k in topk}
        found["acc1_interval"] = [100 * share for share in bootstrap_interval(int(is_hit.sum()), num_images)]
        found["nll"] = math.fsum(scored.nll) / num_images
        found["ece"] = calibration_error(scored.probabilities[:, 0], is_hit)
        found["confused"] = most_confused(scored, names)
    if each.real is not None:
        hits = [best in real for best, real in zip(scored.best[:, 0].tolist(), each.real, strict=True) if real]
        found["real"] = {"images": len(hits), "acc1": None, "acc1_interval": None}
        if hits:
            interval = [100 * share for share in bootstrap_interval(sum(hits), len(hits))]
            found["real"] |= {"acc1": 100 * sum(hits) / len(hits), "acc1_interval": interval}
    return found


def most_confused(scored: Scored, names: list[str]) -> list[dict[str, Any]]:
    """Return the pairs of a class and another one for which its images are taken most often."""
    predicted, is_miss = scored.best[:, 0], scored.places > 0
    pairs = numpy.stack([scored.labels[is_miss], predicted[is_miss]], axis=1)
    pairs, counts = numpy.unique(pairs, axis=0, return_counts=True)  # in order of the numbers
    order = numpy.argsort(-counts, kind="stable")[:_NUM_CONFUSED]
    return [
        {
            "class": names[pairs[place, 0]], "taken_for": names[pairs[place, 1]],
            "images": int(counts[place]), "of": int((scored.labels == pairs[place, 0]).sum()),
        }
        for place in order
    ]  # fmt: skip


def per_class_lines(each: ImageSet, scored: Scored, topk: list[int], names: list[str]) -> Iterator[list]:
    """Yield the lines of `--per-class`."""
    for label in numpy.unique(scored.labels[scored.labels >= 0]).tolist():
        places = scored.places[scored.labels == label]
        hits = [100 * int((places < k).sum()) / len(places) for k in topk]
        yield [each.name, label, names[label], len(places), *hits]


def prediction_lines(each: ImageSet, scored: Scored, names: list[str]) -> Iterator[list]:
    """Yield the lines of `--predictions`."""
    pairs = zip(scored.best.tolist(), scored.probabilities.tolist(), strict=True)
    for number, (label, (best, probabilities)) in enumerate(zip(scored.labels.tolist(), pairs, strict=True)):
        words = [word for pair in zip((names[one] for one in best), probabilities, strict=True) for word in pair]
        yield [each.name, each.source.name(number), names[label] if label >= 0 else "", *words]


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file of results; raises as `write_output`."""
    write_output(option, path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))


def csv_text(header: list[str], lines: Iterator[list]) -> str:
    """Return a table as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([header, *lines])
    return stream.getvalue()


def show(report: dict[str, Any], topk: list[int]) -> None:
    """Print the results as tables."""
    print(f"{report['checkpoint']}: {report['weights']}")
    rows = [["set", "images", "classes", *(f"Acc@{k}" for k in topk), "95% of Acc@1", "NLL", "ECE", "ReaL"]]
    for name, found in report["sets"].items():
        numbers = [f"{found[f'acc{k}']:.3f}" if "nll" in found else "-" for k in topk]
        if "nll" in found:
            low, high = found["acc1_interval"]
            numbers += [f"{low:.2f} to {high:.2f}", f"{found['nll']:.4f}", f"{found['ece']:.4f}"]
        else:
            numbers += ["-"] * 3
        real = found.get("real", {}).get("acc1")
        words = f"{found['classes']:,}{'*' if found['is_restricted_to_its_classes'] else ''}"
        rows.append([name, f"{found['images']:,}", words, *numbers, "-" if real is None else f"{real:.3f}"])
    show_table(rows)
    if any(found["is_restricted_to_its_classes"] for found in report["sets"].values()):
        print("* the scores of the model's other classes were left out")
    for name, found in report["sets"].items():
        if found.get("confused"):
            print(f"\n{name}: most often taken for another class")
            pairs = [
                [each["class"], each["taken_for"], f"{each['images']:,} of {each['of']:,}"]
                for each in found["confused"]
            ]
            show_table([["class", "taken for", "images"], *pairs])


def show_table(rows: list[list[str]]) -> None:
    """Print rows in columns, the first of which is aligned to the left."""
    rows = [[one_line(word) for word in row] for row in rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            word.rjust(width) if place else word.ljust(width)
            for place, (word, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(["", first, *others]))


def topk_type(text: str) -> list[int]:
    """Return numbers of classes such as 1,5; an argparse type."""
    return sorted({positive(word) for word in text.split(",")} | {1})


def fraction(text: str) -> float:
    """Return a fraction that train.py's --minival takes; an argparse type."""
    number = float(text)
    if not 0 < number <= 0.5:
        raise ValueError
    return number


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    usage = "CHECKPOINT --set NAME=DIR ... [options]"
    parser = build_parser(PROG, usage, "Evaluate a checkpoint on one set or on several.", EPILOG)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file, or published weights: resnet50.IMAGENET1K_V2")
    add_options(parser)
    parser.add_argument(
        "--set", metavar="NAME=DIR[,LIST]", action="extend", nargs="+", required=True, dest="sets",
        help="a set; give as many as you like",
    )  # fmt: skip
    parser.add_argument("--real", metavar="FILE", type=Path, help="ReaL labels of ILSVRC2012's val")
    parser.add_argument(
        "--minival", metavar="FRACTION", type=fraction,
        help="take of --set minival=DIR/train only the images that training with this --minival has held out",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the results there; - for standard output, alone")
    parser.add_argument("--per-class", metavar="FILE", type=Path, help="write the accuracy of each class there, as CSV")
    parser.add_argument(
        "--predictions", metavar="FILE", type=Path, help="write the best classes of each image there, as CSV"
    )
    parser.add_argument("--topk", metavar="K,K", type=topk_type, default=[1, 5], help="each k of Acc@k (default: 1,5)")
    parser.add_argument(
        "--limit", metavar="N", type=positive, help="only N images of each set, the first of each class in turn"
    )
    add_machine_options(parser)
    for name in ("--val-resize-size", "--val-crop-size"):
        parser.add_argument(name, metavar="PX", type=positive, help="in place of the checkpoint's own")
    parser.add_argument("--interpolation", choices=INTERPOLATIONS, help="in place of the checkpoint's own")
    return parser


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that could not be written, before time is spent.

    Raises:
        UserError: one could not.
    """
    paths = {
        "--json": None if options.json in (None, "-") else Path(options.json),
        "--per-class": options.per_class,
        "--predictions": options.predictions,
    }
    given = {option: path for option, path in paths.items() if path is not None}
    for option, path in given.items():
        if (path.exists() and not path.is_file()) or not path.parent.is_dir():
            raise UserError(f"{option} {path}: {'is no file' if path.exists() else 'its folder is not there'}")
    if len({os.path.abspath(path) for path in given.values()}) < len(given):
        raise UserError(f"{' and '.join(given)} name one file; give each its own")


def open_sets(options: argparse.Namespace, trained: Trained, num_classes: int) -> tuple[list[ImageSet], list[str]]:
    """Return the sets, and the names of the model's classes for the reader.

    Raises:
        UserError: one cannot be used.
    """
    given = [text.partition("=")[0] for text in options.sets]
    if len(set(given)) < len(given):
        raise UserError(f"--set: two sets are called {next(name for name in given if given.count(name) > 1)}")
    if (options.minival is not None) != ("minival" in given):
        raise UserError("--minival FRACTION and --set minival=DIR/train, the training images, are given together")
    seen = trained.trained_with.get("minival")
    if options.minival is not None and not (isinstance(seen, float) and options.minival <= seen):
        print(f"--minival {options.minival}: the checkpoint was trained on these images, or on some of them")
    sets = [open_part(text, options) for text in options.sets]
    is_published = not Path(options.checkpoint).is_file()
    classes = ClassNumbers(trained.classes, num_classes, sets, is_published=is_published)
    for each in sets:
        numbers, found_by = classes.find(each) if each.words else ([], "none")
        each.number_classes(numbers, num_classes, found_by)
    if options.real is not None:
        read_real(options.real, sets, num_classes)
    return sets, classes.names or classes.whole or list(map(str, range(num_classes)))


def evaluate(options: argparse.Namespace) -> dict[str, Any] | None:
    """Write the files that were asked for, and return the report on rank 0. Collective: every rank must call it.

    Raises:
        UserError: something that was given cannot be used.
    """
    check_outputs(options)
    trained = open_trained(options.checkpoint, model=options.model, is_average=options.ema)
    args = settle(trained, options)
    with torch.inference_mode():
        num_classes = trained.model(torch.zeros(1, 3, args.val_crop_size, args.val_crop_size)).size(1)
    sets, names = open_sets(options, trained, num_classes)
    models.set_up_threads(args.replaced(use_deterministic_algorithms=True))
    # Before there are other threads, as those of the process group: see `BatchLoader.start`.
    images = _JoinedImages(sets, build_presets(args)[1])
    (started,) = data.start_loaders([images], args)
    collectives.join_processes(args)
    device = models.set_up_device(args)
    model = models.place_model(trained.model, args, device).eval()
    model = models.FlipAverage(model) if args.eval_flip else model
    report = {
        "checkpoint": options.checkpoint, "weights": trained.kind, "model": args.model,
        **{name: getattr(args, name) for name in ("val_resize_size", "val_crop_size", "interpolation", "batch_size")},
        "sets": {},
    }  # fmt: skip
    per_class, predictions = [], []
    k = min(max(options.topk), num_classes)
    for each, start in zip(sets, images.index.starts, strict=False):
        numbers = range(start, start + len(each.source))
        sampler = _SetSampler(numbers, args.batch_size, args.rank, args.world_size)
        loader = data.build_device_loader(args, images, sampler, device, num_classes, started)
        most = k if each.columns is None else min(k, len(each.columns))
        rows = score_set(each, model, loader, most, models.autocast(args, device))
        assert rows[:, 0].astype(numpy.int64).tolist() == list(numbers)
        if args.rank == 0:
            scored = Scored.of(each, rows)
            report["sets"][each.name] = summarize(each, scored, options.topk, names)
            per_class += per_class_lines(each, scored, options.topk, names) if options.per_class else []
            predictions += prediction_lines(each, scored, names) if options.predictions else []
    if args.rank == 0:
        write_files(options, report, per_class, predictions, k)
    collectives.shut_down()
    return report if args.rank == 0 else None


def write_files(options: argparse.Namespace, report: dict, per_class: list, predictions: list, k: int) -> None:
    """Write the files that were asked for, the report last: if it is there, so are the others."""
    if options.per_class:
        header = ["set", "class", "name", "images", *(f"acc{each}" for each in options.topk)]
        write_text("--per-class", options.per_class, csv_text(header, per_class))
    if options.predictions:
        header = ["set", "file", "label", *(f"{word}{place}" for place in range(1, k + 1) for word in ("class", "p"))]
        write_text("--predictions", options.predictions, csv_text(header, predictions))
    if options.json not in (None, "-"):
        write_text("--json", Path(options.json), json.dumps(report, indent=1) + "\n")


def work() -> None:
    """Evaluate on this process, alone or among others; all but rank 0 are silent."""
    launch = read_launch()
    if launch.is_launched:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which a launcher ends it, in the middle of a collective too
    collectives.setup_for_distributed(launch.rank == 0)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere) if launch.rank else nullcontext():
            options = get_args_parser().parse_args()
            with redirect_stdout(sys.stderr) if options.json == "-" else nullcontext():
                report = evaluate(options)
        if report is not None and options.json == "-":
            print(json.dumps(report, indent=1))
        elif report is not None:
            show(report, options.topk)
    except BaseException as error:
        if is_out_of_memory(error):
            error = LimitError(f"out of memory; use a smaller --batch-size than {options.batch_size}")
        if not launch.is_launched:
            raise error
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
            error = LoaderKilledError(str(error))
        is_interrupted = isinstance(error, KeyboardInterrupt)
        end_by(InterruptedRunError(_INTERRUPTED) if is_interrupted else error, launch, PROG)


def main() -> None:
    """Evaluate as the command line says."""
    run(PROG, work, _INTERRUPTED)


if __name__ == "__main__":
    main()
