r"""Evaluate a checkpoint on one set or on several.

Examples:
  python -m scripts.evaluate runs/resnet50/best.pth --set val=/data/imagenet/val
  python -m scripts.evaluate resnet50.IMAGENET1K_V2 --set val=/data/imagenet/val \
      --set v2=/data/imagenetv2-matched-frequency --set a=/data/imagenet-a --json results.json
  python -m scripts.evaluate runs/a/best.pth --set val=photos/val --html mistakes.html --confusion confusion.png
  torchrun --nproc_per_node=8 -m scripts.evaluate runs/resnet50/best_ema.pth --ema --set val=/data/imagenet/val

sets:
  NAME=DIR        class folders, tars or a pack, as train.py reads them. A class folder bears the name of a class of
                  the checkpoint, or its number (ImageNetV2). Where the checkpoint knows no names, the folders in
                  alphabetical order are its classes, or synsets are looked up in a set that has them all or in timm;
                  numbers (000 ...), and names if its script may be timm's, only if their natural order is the same.
                  If there are folders of some classes alone (ImageNet-A, -R), the scores of all other classes are
                  left out before anything is computed, as in the papers of these sets.
  --minival F     evaluate --set minival=DIR/train, the training images, only on those that train.py --minival F
                  held out.

Acc@k is the percentage of images whose class is among the k best; classes with equal scores rank by their numbers.
NLL is the mean of the negative logarithm of the probability of an image's class, ECE the expected calibration error
with 15 bins of equal width. The 95% interval is Wilson's, of Acc@1.

A model of --multi-label is evaluated on lists of several labels: mAP is the mean over classes of the average precision,
F1 counts a class whose probability is above a half, BCE is the mean binary cross-entropy of images and classes.

Preprocessing and precision are those of the checkpoint's training or publication, and a line says which. The result is
the same in every bit on any number of processes, with the same --batch-size and OMP_NUM_THREADS (1, if it is not set).
"""

import argparse
import importlib
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import data
from checkpointing.class_order import find_disorder
from checkpointing.held_out import holds_out
from distributed import collectives
from distributed.ending import announce_failure, end_with_error, leave_group
from distributed.launch import read_launch
from errors import UserError, one_line
from loading.decode import Decoding, decode_plainly
from loading.named import open_named
from loading.parts import hold_out
from loading.progress import Progress
from loading.source import Source, labels_of
from metrics import image_numbers
from metrics.per_class import F1
from metrics.ranking import average_precision, rank_classes
from models.build import FlipAverage, autocast, move_to_device, set_up_device, set_up_threads
from monitoring.pictures import Predictions, count_confusion, find_confused, find_mistakes
from scripts.report import draw_confusion, page, saved, show_images, table
from scripts.scores import calibration_error, share_text, wilson_interval
from scripts.tool import add_train_option, build_parser, explain, output_file, positive, run, write_output, write_report
from scripts.trained import (
    Trained,
    add_machine_options,
    add_options,
    check_finite,
    choose_extensions,
    open_from_options,
    tool_options,
)
from settings.packages import require_package, require_timm
from settings.tables import aligned, as_csv

PROG = "python -m scripts.evaluate"

_INTERRUPTED = "interrupted; start it again: no results are kept"


class ImageSet:
    """A set of class folders, tars or a pack to evaluate on.

    Attributes:
        source: its images.
        decoding: how a page shows them.
        given: its name in messages.
        words: the names or numbers of its classes in the model.
        labels: (N,) int64: the number of each image's class in the model; or (N, C) bool: whether it has each class.
        columns: the numbers of the classes whose scores count, if the set has some classes alone; else None.
        found_by: how the classes were found: `name`, `number`, `order` or `synset`.
    """

    labels: numpy.ndarray  # these three are set by `number_classes`
    columns: Tensor | None
    found_by: str

    def __init__(self, name: str, source: Source, decoding: Decoding) -> None:
        self.decoding = decoding._replace(mode="RGB")
        self.name, self.source, self.given, self.words = name, source, f"--set {name}", source.classes


def number_classes(sets: list[ImageSet], trained: Trained, num_classes: int) -> list[str]:
    """Find the classes of all sets among the model's, and return the names of the model's classes."""
    parts = [each.words for each in sets if len(each.words) == num_classes]
    whole = next((words for words in parts if not _are_numbers(words, num_classes)), None)
    for each in sets:
        numbers, each.found_by = find_classes(each, trained, num_classes, whole)
        if each.source.label_sets is None:
            each.labels = numpy.array(numbers, dtype=numpy.int64)[labels_of(each.source)]
        else:
            each.labels = numpy.zeros((len(each.source), num_classes), dtype=bool)
            each.labels[:, numbers] = each.source.label_sets[labels_of(each.source)]
        each.columns = torch.tensor(sorted(numbers)) if len(numbers) < num_classes else None
    return trained.classes or whole or list(map(str, range(num_classes)))


def find_classes(each: ImageSet, trained: Trained, num_classes: int, whole: list[str] | None) -> tuple[list[int], str]:
    """Return the numbers of a set's classes in the model, and how they were found: see `ImageSet`.

    Args:
        each: the set.
        trained: the model with the names of its classes, which are English words where the weights are published.
        num_classes: the number of the model's classes.
        whole: the folders of a set that has all classes, by which synsets are numbered; or None.

    Raises:
        UserError: a class is none of the model's, or cannot be told.
    """
    words, names = each.words, trained.classes
    has_folder_names = names is not None and trained.script
    counts = Counter(names or [])
    known, found_by = {name: number for number, name in enumerate(names or []) if counts[name] == 1}, "name"
    if set(words) <= known.keys():
        pass
    elif _are_numbers(words, num_classes):
        known, found_by = {word: int(word) for word in words}, "number"
        _check_numbers(each, num_classes, has_names=names is not None)
    elif not has_folder_names and len(words) == num_classes:
        if differences := find_disorder(trained.script, words):
            raise UserError(f"{each.given}: the checkpoint: {differences[0]}")
        known, found_by = {word: number for number, word in enumerate(words)}, "order"
    elif not has_folder_names:
        known, found_by = _number_synsets(words, num_classes, whole), "synset"
    unknown = [word for word in words if word not in known]
    if unknown:
        of_model = f", such as {', '.join(list(known)[:2])}" if known else ", whose names are not known"
        raise UserError(
            f"{each.given}: {unknown[0]} is none of the {num_classes:,} classes of the checkpoint{of_model}, and no "
            f"number from 0 to {num_classes - 1}; is it a checkpoint of another data set?"
        )
    return [known[word] for word in words], found_by


def _are_numbers(words: list[str], num_classes: int) -> bool:
    return all(re.fullmatch("[0-9]{1,9}", word) and int(word) < num_classes for word in words)


def _check_numbers(each: ImageSet, num_classes: int, *, has_names: bool) -> None:
    """Refuse folders of one number; and those whose order as text, `ImageFolder`'s, is not that of their numbers."""
    if len(set(map(int, each.words))) < len(each.words):
        raise UserError(f"{each.given}: two of its class folders are of one number")
    has_zeros = len(set(map(len, each.words))) == 1 and any(len(word) > 1 and word[0] == "0" for word in each.words)
    if not has_names and num_classes > 10 and not has_zeros:
        raise UserError(
            f"{each.given}: the alphabetical order of its class folders, torchvision's, is not that of their numbers, "
            "and the checkpoint holds no names; write leading zeros if its order is that of the numbers"
        )


def _number_synsets(words: list[str], num_classes: int, whole: list[str] | None) -> dict[str, int]:
    """Return the numbers of all synsets, in the order of a set that has all classes, else of timm."""
    if whole is None and num_classes == 1000 and all(re.fullmatch(r"n\d{8}", word) for word in words):
        require_timm("without a set of all 1000 classes, the order", "of the synsets")
        whole = importlib.import_module("timm.data").ImageNetInfo().label_names()
    return {word: number for number, word in enumerate(whole or [])}


def score_set(each: ImageSet, model: nn.Module, loader: data.DeviceLoader, k: int) -> numpy.ndarray:
    """Return the rows of `rank_classes` for the images of a set, in order, or with several labels an image its scores.

    The loader has this process's share of the images.

    Collective: every rank must call it.

    Raises:
        UserError: the model's scores are not finite.
    """
    labels = torch.from_numpy(each.labels)
    width = 2 + 2 * k if labels.ndim == 1 else labels.shape[1]
    rows = [torch.zeros(0, 1 + width, dtype=torch.float64)]
    progress = Progress(f"evaluating on {each.name}", len(loader.loader.sampler), "images")
    for (image, _), keys in zip(loader, image_numbers(loader), strict=True):
        output = model(image)
        if labels.ndim == 1:
            ranked = _rank(each.columns, output, labels[keys].to(image.device), k)
        else:
            ranked = (output if output.is_cuda else output.cpu()).double()  # as in `rank_classes`
        rows.append(torch.cat([keys[:, None].to(ranked.device), ranked], dim=1))
        progress.update(len(keys))
    gathered = torch.cat(collectives.all_gather(torch.cat([part.cpu() for part in rows])))
    check_finite(gathered, f"the checkpoint on --set {each.name}")
    ordered = gathered[gathered[:, 0].argsort()].numpy()
    assert ordered[:, 0].tolist() == list(range(len(labels)))
    return ordered[:, 1:]


def _rank(columns: Tensor | None, output: Tensor, target: Tensor, k: int) -> Tensor:
    """Return the rows of `rank_classes` as if there were only the classes of these columns; None means all."""
    if columns is None:
        return rank_classes(output, target, k)
    columns = columns.to(output.device)
    ranked = rank_classes(output[:, columns], torch.searchsorted(columns, target), k)
    ranked[:, 2 : 2 + k] = columns.to(ranked.device)[ranked[:, 2 : 2 + k].long()].double()
    return ranked


class LabelScores:
    """The records of a set's images of several labels, in order: `scores` are (n, C) logits, of the set's classes."""

    columns = ("mAP", "map"), ("F1", "f1"), ("F1 micro", "f1_micro"), ("BCE", "bce")

    def __init__(self, each: ImageSet, rows: numpy.ndarray, names: list[str], _: list[int]) -> None:
        chosen = slice(None) if each.columns is None else each.columns.numpy()
        self.set, self.scores, self.labels = each, rows[:, chosen], each.labels[:, chosen]
        self.names = list(numpy.array(names, dtype=object)[chosen])
        pairs = zip(self.scores.T, self.labels.T, strict=True)
        self.precisions = [100 * average_precision(*pair) if pair[1].any() else None for pair in pairs]

    def summarize(self) -> dict[str, Any]:
        """Return the results of the set, for JSON."""
        each, predicted = self.set, self.scores > 0
        counts = [part.sum(axis=0) for part in (predicted & self.labels, predicted, self.labels)]
        # The binary cross-entropy of a score x and a label y is log(1 + exp(x)) - x y.
        terms = numpy.logaddexp(0, self.scores) - self.scores * self.labels
        precisions = [each for each in self.precisions if each is not None]
        return {
            "images": len(self.labels), "classes": len(each.words), "classes_found_by": each.found_by,
            "is_restricted_to_its_classes": each.columns is not None,
            "map": sum(precisions) / max(len(precisions), 1),
            **F1(len(self.names), is_multi_label=True).compute(numpy.concatenate(counts).tolist(), len(self.labels)),
            "bce": math.fsum(terms.ravel().tolist()) / terms.size,
        }  # fmt: skip

    def predictions(self) -> Iterator[list]:
        """Yield the lines of `--predictions`: the probability of each class by itself, the likeliest first."""
        shares = numpy.exp(-numpy.logaddexp(0, -self.scores))
        order = numpy.argsort(-self.scores, axis=1, kind="stable")
        for number, (row, best) in enumerate(zip(shares, order, strict=True)):
            labels = " ".join(self.names[label] for label in numpy.flatnonzero(self.labels[number]))
            words = [word for label in best for word in (self.names[label], row[label])]
            yield [self.set.name, self.set.source.name(number), labels, *words]

    def sections(self, _: Path) -> dict[str, str]:
        """Return the section of a page: all classes, the worst first."""
        found = zip(self.names, self.labels.sum(axis=0).tolist(), self.precisions, strict=True)
        rows = sorted(([name, number, share] for name, number, share in found if share is not None), key=lambda r: r[2])
        return {f"{self.set.name}: classes": table(["class", "images", "average precision, %"], rows)}


class Scores:
    """The records of a set's images, in order, from the rows of `score_set` and the names of the model's classes.

    Attributes:
        labels: (n,) the class.
        places: (n,) the place of the image's class among all by score, from 0.
        best: (n, k) the best classes.
        probabilities: (n, k) the probabilities of the best classes.
    """

    def __init__(self, each: ImageSet, rows: numpy.ndarray, names: list[str], topk: list[int]) -> None:
        self.set, self.names, self.topk, self.labels = each, names, topk, each.labels
        self.places, self.nll = rows[:, 0].astype(numpy.int64), rows[:, 1]
        best, self.probabilities = numpy.split(rows[:, 2:], 2, axis=1)
        self.best = best.astype(numpy.int64)
        self.found = Predictions(numpy.arange(len(rows)), self.labels, self.best[:, 0], self.probabilities[:, 0])

    def summarize(self) -> dict[str, Any]:
        """Return the results of the set, for JSON."""
        each, is_hit = self.set, self.places == 0
        return {
            "images": len(self.labels), "classes": len(each.words), "classes_found_by": each.found_by,
            "is_restricted_to_its_classes": each.columns is not None,
            **{f"acc{k}": 100 * int((self.places < k).sum()) / len(self.places) for k in self.topk},
            "acc1_interval": wilson_interval(int(is_hit.sum()), len(is_hit)),
            "nll": math.fsum(self.nll) / len(self.nll),
            "ece": calibration_error(self.probabilities[:, 0], is_hit),
        }  # fmt: skip

    def predictions(self) -> Iterator[list]:
        """Yield the lines of `--predictions`."""
        columns = self.labels.tolist(), self.best.tolist(), self.probabilities.tolist()
        for number, (label, best, probabilities) in enumerate(zip(*columns, strict=True)):
            words = [word for one, share in zip(best, probabilities, strict=True) for word in (self.names[one], share)]
            yield [self.set.name, self.set.source.name(number), self.names[label], *words]

    def confusion(self, form: str) -> bytes:
        """Return the content of a .csv of all classes, or of a .png of the 100 that are mistaken most often."""
        is_drawn, num_classes = form == ".png", len(self.names)
        chosen = find_confused(self.found, num_classes, 100 if is_drawn else num_classes)
        names, rows = [self.names[label] for label in chosen], count_confusion(self.found, chosen, num_classes).tolist()
        if is_drawn:
            return saved(draw_confusion(names, rows, f"confusion on {self.set.name}").savefig, "png")
        rows = [[name, *row[:-1]] for name, row in zip(names, rows, strict=True)]
        return as_csv([["true class", *names], *rows])

    def sections(self, folder: Path) -> dict[str, str]:
        """Return the sections of a page in a folder: mistakes, the surest first, and all classes, the worst first."""
        source, name, names, mistakes, rows = self.set.source, self.set.name, self.names, [], []
        for row in find_mistakes(self.found, 60):
            prediction = f"{self.found.confidence[row]:.1%} {names[self.found.predicted[row]]}"
            words = [source.path(row), prediction, f"is {names[self.found.target[row]]}"]
            mistakes.append((row, words))
        for label in numpy.unique(self.labels):
            counts = Counter(self.found.predicted[self.labels == label].tolist())
            n, hits = counts.total(), counts.pop(label, 0)
            others = ", ".join(f"{names[other]} ({count})" for other, count in counts.most_common(3))
            rows.append((hits / n, [names[label], share_text(hits, n), others]))
        rows.sort(key=lambda row: row[0])
        shown = ((decode_plainly(source.read(row), how=self.set.decoding), words, "wrong") for row, words in mistakes)
        images = show_images(shown, folder)
        classes = table(["class", "Acc@1", "most often taken for"], [row for _, row in rows])
        return {f"{name}: mistakes, the surest first": images, f"{name}: classes": classes}


def describe(report: dict[str, Any], topk: list[int]) -> tuple[list[list[str]], list[str]]:
    """Return the results, a head and a row for each set, and lines: on the weights, and on what a star means.

    An Acc@k that is 100 by the number of classes is left out.
    """
    topk = [k for k in topk if k == 1 or any(k < found["classes"] for found in report["sets"].values())]
    rows = [["set", "images", "classes", *(f"Acc@{k}" for k in topk), "95% of Acc@1", "NLL", "ECE"]]
    is_multi_label = any("map" in found for found in report["sets"].values())
    if is_multi_label:
        rows = [["set", "images", "classes", *(title for title, _ in LabelScores.columns)]]
    for name, found in report["sets"].items():
        words = f"{found['classes']:,}{'*' if found['is_restricted_to_its_classes'] else ''}"
        if is_multi_label:
            values = [f"{found[key]:.{4 if key == 'bce' else 3}f}" for _, key in LabelScores.columns]
            rows.append([name, f"{found['images']:,}", words, *values])
            continue
        low, high = found["acc1_interval"]
        numbers = [f"{found[f'acc{k}']:.3f}" for k in topk]
        numbers += [f"{low:.2f} to {high:.2f}", f"{found['nll']:.4f}", f"{found['ece']:.4f}"]
        rows.append([name, f"{found['images']:,}", words, *numbers])
    lines = [f"{report['checkpoint']}: {report['weights']}"]
    if any(found["is_restricted_to_its_classes"] for found in report["sets"].values()):
        lines.append("* the scores of the model's other classes were left out")
    return rows, lines


def numbers(text: str) -> list[int]:
    """Return each k of a text such as 1,5, in ascending order, with 1 always among them; an argparse type."""
    return sorted({positive(word) for word in text.split(",")} | {1})


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    parser = build_parser(PROG, "CHECKPOINT --set NAME=DIR ... [options]", __doc__)
    add_options(parser)
    add, text = parser.add_argument, "a set; give as many as you like"
    add("--set", metavar="NAME=DIR", action="extend", nargs="+", required=True, dest="sets", help=text)
    text = "evaluate --set minival=DIR/train only on the images that training with this --minival held out"
    add_train_option(parser, "minival", text)
    add_train_option(parser, "minival_fold", "the fold of --minival (default: 0)")
    add_train_option(parser, "extensions", "further extensions of images in folders and tars (default: as in training)")
    add("--html", metavar="FILE", type=output_file(".html"), help="show mistakes and classes in a page")
    text = "count true and predicted classes in FILE.csv, or in a picture, a FILE.png that is not there yet"
    add("--confusion", metavar="FILE", type=output_file(".csv"), help=text)
    add("--json", metavar="FILE", type=output_file(".json"), help="write the results to FILE")
    text = "write the best classes of each image to FILE, as CSV"
    add("--predictions", metavar="FILE", type=output_file(".csv"), help=text)
    add("--topk", metavar="K,K", type=numbers, default=[1, 5], help="k of Acc@k, and 1 (default: 1,5)")
    add_train_option(parser, "workers", "loader processes (default: as train.py)")
    add_machine_options(parser)
    return parser


def validate(options: argparse.Namespace) -> None:
    """Raise UserError if two sets have one name, or options contradict each other."""
    names = [text.partition("=")[0] for text in options.sets]
    if len(set(names)) < len(names):
        raise UserError(f"--set: two sets are called {next(name for name in names if names.count(name) > 1)}")
    if options.minival_fold is not None and options.minival is None:
        raise UserError("--minival-fold K is of --minival FRACTION; give both")
    if (options.minival is not None) != ("minival" in names):
        raise UserError("--minival FRACTION and --set minival=DIR/train, the training images, are given together")
    files = [*map(os.path.realpath, filter(None, (options.json, options.html, options.confusion, options.predictions)))]
    if len(set(files)) < len(files):
        raise UserError("two outputs, such as --json and --predictions, name one file; give each its own")
    form = options.confusion and options.confusion.suffix
    if form not in (None, ".csv", ".png") or (form and len(names) > 1):
        raise UserError(f"--confusion {options.confusion}: expected FILE.csv or FILE.png, and a single --set")
    if form == ".png":
        require_package("matplotlib", "--confusion FILE.png")


def open_sets(
    options: argparse.Namespace, trained: Trained, decoding: Decoding, num_classes: int
) -> tuple[list[ImageSet], list[str]]:
    """Return the sets, and the names of the model's classes for the results."""
    part = options.minival, options.minival_fold or 0
    if options.minival is not None and not holds_out(trained.trained_with, *part):
        print(f"--minival {options.minival}: the checkpoint was trained on these images, or on some of them")
    sets, extensions = [], choose_extensions(trained, options.extensions)
    # The data path itself may hold the class folders.
    trained_on = [os.path.realpath(f"{trained.trained_with.get('data_path')}{end}") for end in ("", "/train")]
    for text in options.sets:
        name, source = open_named("--set", text, trained.args.data.multi_label, extensions)
        if name == "minival":
            source, _ = hold_out(source, *part)
        elif os.path.realpath(source.root) in trained_on:
            print(one_line(f"{name}: the checkpoint was trained on these images, unless --minival held some out"))
        sets.append(ImageSet(name, source, decoding))
    return sets, number_classes(sets, trained, num_classes)


def evaluate(options: argparse.Namespace) -> None:
    """Write the files that were asked for, and print the results. Collective: every rank must call it."""
    validate(options)
    trained = open_from_options(options)
    if trained.args.data.multi_label and options.confusion is not None:
        raise UserError("--confusion is of models of one class an image, and this one was trained with --multi-label")
    args = tool_options(trained, options, is_alone=False)
    num_classes = trained.count_classes()
    preset = trained.preset
    sets, names = open_sets(options, trained, preset.decoding, num_classes)
    for each in sets:
        data.note_files(each.name, each.source, args.data, args.distributed.rank, args.augmentation.val_resize_size)
    set_up_threads(args.replaced(use_deterministic_algorithms=True).precision)
    images = [data.IndexedImageFolder(each.source.root, preset, source=each.source) for each in sets]
    # Before other threads start, such as the process group's: see `BatchLoader.start`.
    loaders = data.start_loaders(images, args.data, args.augmentation, args.optimization, args.distributed.device)
    collectives.join_processes(args.distributed, args.monitoring.stall_timeout)
    device = set_up_device(args.precision, args.distributed, args.checkpoint.test_only)
    model = move_to_device(trained.model, args.precision, device).eval()
    model = FlipAverage(model) if args.model.eval_flip else model
    report = {
        "checkpoint": options.checkpoint, "weights": trained.kind, "model": args.model.model,
        "preprocessing": trained.preprocessing, "eval_flip": args.model.eval_flip, "amp": args.precision.amp,
        "batch_size": args.optimization.batch_size, "sets": {},
    }  # fmt: skip
    all_scores = []
    k = min(max(options.topk), num_classes)
    for each, on_host in zip(sets, loaders, strict=True):
        loader = data.build_device_loader(args, on_host, None, device, num_classes)
        with torch.inference_mode(), autocast(args.precision, device):
            rows = score_set(each, model, loader, k if each.columns is None else min(k, len(each.columns)))
        if args.distributed.rank == 0:
            kind = Scores if each.source.label_sets is None else LabelScores
            all_scores.append(kind(each, rows, names, options.topk))
            report["sets"][each.name] = all_scores[-1].summarize()
    if args.distributed.rank == 0:
        write_files(options, report, all_scores, k)
    leave_group()
    if args.distributed.rank == 0:
        results, (weights, *more) = describe(report, options.topk)
        print(weights, *(f"  {line}" for line in aligned(results)), *more, sep="\n")


def write_files(options: argparse.Namespace, report: dict, all_scores: list[Scores | LabelScores], k: int) -> None:
    """Write the files that were asked for, the report last: if it is there, so are the others."""
    first = all_scores[0]
    if options.predictions is not None:
        k = k if isinstance(first, Scores) else max(len(scores.names) for scores in all_scores)
        header = ["set", "file", "label", *(f"{word}{place}" for place in range(1, k + 1) for word in ("class", "p"))]
        rows = chain([header], *(scores.predictions() for scores in all_scores))
        write_output(options.predictions, as_csv(rows), "--predictions")
    if options.confusion is not None and isinstance(first, Scores):
        write_output(options.confusion, first.confusion(options.confusion.suffix), "--confusion")
    if options.html is not None:
        results, lines = describe(report, options.topk)
        head, *values = zip(*results, strict=True)  # a column for each set
        sections = {"Result": table(head, values) + "".join(f"<p>{escape(line)}</p>" for line in lines)}
        sections |= dict(chain.from_iterable(scores.sections(options.html.parent).items() for scores in all_scores))
        write_output(options.html, page(f"{report['model']} on {', '.join(report['sets'])}", sections), "--html")
    if options.json is not None:
        write_report(options.json, report)


def work() -> None:
    """Evaluate on this process, alone or among others; all but rank 0 are silent."""
    launch = read_launch()
    if launch.is_launched:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that a launcher can end it even inside a collective
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere) if launch.rank else nullcontext():
            evaluate(get_args_parser().parse_args())
    except BaseException as error:
        if not launch.is_launched:
            raise
        if isinstance(error, KeyboardInterrupt):
            error = UserError(_INTERRUPTED, exit_code=1)
        end_with_error(announce_failure(explain(error)), launch, PROG)


def main() -> None:
    """Evaluate the checkpoint of the command line."""
    run(PROG, work, _INTERRUPTED)


if __name__ == "__main__":
    main()
