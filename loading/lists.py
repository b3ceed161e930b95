"""Read lists of images and their classes: train.csv and val.csv, or images.csv with a column `split`."""

import csv
import functools
import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy

from errors import UserError, counted, did_you_mean, is_printable, one_line
from files import open_to_read
from loading.heic import require_heic
from loading.index import CLASSES, ImageIndex, Location, Scan, encode
from loading.source import HEIC_EXTENSIONS, PHONE_EXTENSIONS, Source, encoded
from settings.choices import FORMS

# By the ending of a list, what separates its columns; each line of .jsonl is an object of its own.
SEPARATORS = dict(zip(FORMS["list"].endings, (",", "\t", None), strict=True))
# Values of the column `split`.
SPLITS = ("train", "val")

# More than any line of a list has.
_MAX_LINE_BYTES = 1 << 24

# How an image's name, class/file, was made from its path, as the sum of these: parts of the path that were cut off.
_SPLIT, _CLASS, _ROOT = 1, 2, 4


class ListIndex(ImageIndex):
    """The images of a list: rows of `path`, relative to the data path or absolute, and `label`, a class's name.

    Images are ordered as in class folders, so a list of class folders' files gives their index, unless all labels are
    numbers, which have their own order. Whole ones are those of the names in classes.txt, from 0, or, without that
    file, all of 0 to N - 1. With a `separator` an image has any number of labels, none included.
    """

    form = "list"
    layout = "{split}.csv with the columns path and label"

    @classmethod
    def find(cls, root: Path) -> list[Source]:
        """Return the lists of this split next to its folder, then those of all splits."""
        names = [root.name, "images"] if root.name in SPLITS else [root.name]
        paths = [root.parent / f"{name}{ending}" for name in names for ending in SEPARATORS]
        return [cls(root, path, [path], root.parent / CLASSES) for path in paths if os.path.lexists(path)]

    def path(self, number: int) -> str:
        """Return the path of an image."""
        path = self.name(number)
        cut = int(self.arrays["locations"][number, 0])
        if not cut & _CLASS:
            path = path.partition("/")[2]
        if cut & _SPLIT:
            path = f"{self.root.name}/{path}"
        return os.path.join("/" if cut & _ROOT else self.root.parent, path)

    def scan(self, scan: Scan) -> list[str]:
        """Add the images of the list, and return the classes."""
        scan.watch(self.where, os.stat(self.where))
        listed = _read_rows(self.files[0], self.root.name, self.separator)
        rows = [(line, with_slashes(path, self.root.parent), label) for line, path, label in listed]
        self._check_paths(rows)
        if not rows:
            raise UserError(f"{self.where} lists no images of {self.root.name}")
        # Refused at the start, and not at the first of them in the middle of an epoch.
        heics = [path for _, path, _ in rows if path.lower().endswith(HEIC_EXTENSIONS)]
        if heics:
            require_heic(f"{self.where} lists {counted(len(heics), 'HEIC file')}, such as {heics[0]!r}")
        texts = [label for _, _, label in rows]
        if self.separator is None:
            classes, labels = number_labels(self, scan, texts)
            folders = classes
            several = [name for name in classes if re.search("[,;|]", name)]
            if several:
                words = f"such as {several[0]!r}, is one label here; --multi-label reads several labels per image"
                print(one_line(f"{self.where}: {counted(len(several), 'class')} with a separator in its name, {words}"))
        else:
            classes, labels, folders = self._number_sets(texts, scan)
        found: dict[tuple, Location] = {}
        for (line, path, _), label, file in zip(rows, labels, self._hash_files(rows), strict=True):
            name, cut = _name(path, folders[label], self.root.name)
            key = (label, *os.path.split(name))
            if key in found:
                raise UserError(f"{self.where}, line {line}: {path} and another image would be {name}; rename one")
            found[key] = (cut, file, 0)
        scan.add_sorted((*key, location) for key, location in found.items())
        return classes

    def _hash_files(self, rows: list[tuple[int, str, str]]) -> list[int]:
        """Return `_hash_file` of each row; UserError for a file that is there twice, also by a link."""
        labels: dict[int, str] = {}
        for line, path, label in rows:
            file = _hash_file(os.path.join(self.root.parent, path))
            if file in labels:
                how = "with two classes; without --multi-label an image has one"
                if labels[file] == label:
                    how = "twice with this class; leave one out"
                raise UserError(f"{self.where}, line {line}: {path} is listed {how}")
            labels[file] = label
        return list(labels)

    def _check_paths(self, rows: list[tuple[int, str, str]]) -> None:
        """Raise UserError if some paths are no image's: the first, why, and the lines of others."""
        # All rows, though the first is enough to refuse the list: whoever corrects it wants to do so once.
        wrong = [(line, path, reason) for line, path, _ in rows if (reason := self._why_no_image(path))]
        if not wrong:
            return
        line, path, reason = wrong[0]
        message = f"{self.where}, line {line}: {path!r} {reason}"
        if len(wrong) > 1:
            lines = ", ".join(str(each[0]) for each in wrong[1:10])
            if len(wrong) > 10:
                lines += ", ..."
            message += f"; {counted(len(wrong) - 1, 'other path')} of this list too: lines {lines}"
        raise UserError(message)

    def _why_no_image(self, path: str) -> str:
        if ".." in path.split("/"):
            return "contains ..; give an absolute path"
        known = (*self.extensions, *PHONE_EXTENSIONS)
        if not path.lower().endswith(known):
            return f"has none of the extensions {' '.join(known)}; write the full file name, or give --extensions"
        if os.path.isfile(os.path.join(self.root.parent, path)):
            return ""
        return f"is not a file; paths are relative to {self.root.parent}, or absolute"

    def _number_sets(self, texts: list[str], scan: Scan) -> tuple[list[str], list[int], list[str]]:
        """Return the classes, the row of each text in `scan.label_sets`, and a folder's name for each row."""
        sets = sorted(set(texts))
        if not any(self.separator in text for text in sets):
            print(one_line(f"{self.where}: no image has two labels that {self.separator!r} separates"))
        parts = [[part for part in text.split(self.separator) if part] for text in sets]
        flat = [part for each in parts for part in each]
        if not flat:
            raise UserError(f"{self.where}: no image has a label")
        classes, numbers = number_labels(self, scan, flat)
        known = dict(zip(flat, numbers, strict=True))
        scan.label_sets = numpy.zeros((len(sets), len(classes)), dtype=bool)
        for row, each in enumerate(parts):
            scan.label_sets[row, [known[part] for part in each]] = True
        rows = {text: row for row, text in enumerate(sets)}
        return classes, [rows[text] for text in texts], [text or "no label" for text in sets]

    def _header(self) -> numpy.ndarray:
        """Return the header of `ImageIndex`, which differs for another separator or data path."""
        return numpy.append(super()._header(), encode([f"labels {self.separator}", os.path.realpath(self.root.parent)]))


def number_labels(
    source: ImageIndex, scan: Scan, labels: Sequence[str], origins: Sequence[str] = ()
) -> tuple[list[str], list[int]]:
    """Return the classes of a source whose labels are names or numbers, as `as_label`, and the number of each label.

    If there is a classes.txt, the scan watches it, and in an evaluation a class may lack images. `origins` name each
    label's source in messages. UserError for labels that classes.txt lacks, or numbers but not all of 0 to N - 1.
    """
    are_numbers = all(map(_is_number, labels))
    if not are_numbers and all(_is_number(label.removeprefix("-")) for label in labels):
        raise UserError(f"{source.where}: label {min(labels)} is negative; the first class is 0")
    if source.class_list:
        scan.watch(str(source.class_list), os.stat(source.class_list))
        source.may_lack_classes = source.root.name != "train"
        classes = _read_classes(source.class_list)
        if are_numbers and max(map(int, labels)) < len(classes) and not any(map(str.isdecimal, classes)):
            return classes, list(map(int, labels))
    elif are_numbers:
        classes = sorted(set(labels), key=int)
        missing = [number for number, name in enumerate(classes) if int(name) != number]
        if missing:
            remedy = f"write all classes into {source.root.parent / CLASSES}, one name per line, starting with class 0"
            found = f"its labels are numbers up to {classes[-1]}, and {missing[0]} has no image"
            raise UserError(f"{source.where}: {found}; {remedy}")
    else:
        classes = sorted(set(labels))
        if all(re.fullmatch(r"-?\d+(\.\d+)?", label) for label in labels):
            classes.sort(key=float)
    if source.class_list is None and classes != sorted(classes):
        print(one_line(f"{source.where}: classes are in numeric order (2, 10), unlike class folders (10, 2)"))
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = sorted(set(labels) - numbers.keys())
    if unknown:
        where = origins[labels.index(unknown[0])] if origins else source.where
        hint = did_you_mean(unknown[0], classes)
        raise UserError(f"{where}: {CLASSES} has no class {unknown[0]}{hint}; it lists {len(classes)}")
    return classes, [numbers[label] for label in labels]


def as_label(value: object) -> str | None:
    """Return a label as text, without spaces around it or zeros in front; None for neither text nor a whole number."""
    if type(value) is int:  # and no bool, which JSON's true becomes
        value = str(value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    return str(int(text)) if _is_number(text) else text


def _is_number(label: str) -> bool:
    # A longer one counts as a name: it might not fit into 64 bits.
    return label.isdecimal() and len(label) < 19


def check_disjoint(train: Source, val: Source) -> None:
    """Raise UserError if both splits, at least one of them a list, hold the same file, also by a link."""
    if not (isinstance(train, ListIndex) or isinstance(val, ListIndex)):
        return
    both = numpy.flatnonzero(numpy.isin(_hashes(train), _hashes(val)))
    if len(both):
        found = f"both hold {counted(len(both), 'image')}, such as {train.path(int(both[0]))}"
        raise UserError(f"{train.where} and {val.where} {found}; remove them from one of the two")


def _hashes(source: Source) -> numpy.ndarray:
    """Return (images,) int64, `_hash_file` of each."""
    if isinstance(source, ListIndex):
        return source.arrays["locations"][:, 1]
    return numpy.array([_hash_file(source.path(number)) for number in range(len(source))])


def _hash_file(path: str) -> int:
    """Return a number for a file, the same by every path and link to it."""
    path = os.path.join(_real_folder(os.path.dirname(path)), os.path.basename(path))
    if os.path.islink(path):
        path = os.path.realpath(path)
    return int.from_bytes(hashlib.sha256(encoded(path)).digest()[:8], signed=True)


# A `realpath` asks for each part of a path: once for a folder, and not for each of its thousand images.
_real_folder = functools.lru_cache(maxsize=4096)(os.path.realpath)


def _name(path: str, class_name: str, split: str) -> tuple[str, int]:
    """Return an image's name, class/file, and what of the path it leaves out or holds as the class."""
    rest = "/".join(part for part in path.split("/") if part not in ("", "."))
    cut = _ROOT if path.startswith("/") else 0
    if not cut and rest.startswith(f"{split}/"):
        rest, cut = rest.removeprefix(f"{split}/"), _SPLIT
    # So a list of class folders' files has their names, and with them their order and fingerprint.
    if rest.startswith(f"{class_name}/"):
        return rest, cut + _CLASS
    return f"{class_name}/{rest}", cut


def _read_classes(path: Path) -> list[str]:
    """Return the names in classes.txt; UserError for none, an unusable one, or one that is there twice."""
    names = [name for name in (line.strip() for _, line in _read_lines(path)) if name]
    for name in names:
        check_class(f"{path}", name)
    if not names:
        raise UserError(f"{path} is empty; write one class per line, or remove it")
    if len(set(names)) < len(names):
        repeated = Counter(names).most_common(1)[0][0]
        raise UserError(f"{path} lists {repeated} twice; each line must be a different class")
    return names


def check_class(where: str, name: str) -> None:
    """Raise UserError for a class that could not be a folder."""
    if not is_printable(name) or "/" in name or name in ("", ".", ".."):
        raise UserError(f"{where}: a class cannot be called {name!r}; give it a valid folder name")


def with_slashes(path: str, folder: Path) -> str:
    """Return a path; one that is no file as it stands with slashes for Windows' backslashes, and a Mac's umlauts."""
    if (path.isascii() and "\\" not in path) or os.path.isfile(folder / path):
        return path
    # An umlaut is one character or two (NFC, NFD), and a list may have another form than the disk.
    slashed = path.replace("\\", "/")
    forms = (slashed, *(unicodedata.normalize(form, slashed) for form in ("NFC", "NFD")))
    return next((each for each in forms if os.path.isfile(folder / each)), slashed)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line; UserError if they are not UTF-8."""
    with open_to_read(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            if len(line) == _MAX_LINE_BYTES:
                raise UserError(f"{path}, line {number}: longer than {_MAX_LINE_BYTES:,} bytes; is it a list?")
            # Spreadsheets write a mark in front of the first line.
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason}); save it as UTF-8") from error


def _read_rows(path: Path, split: str, separator: str | None = None) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the path and the label of each image of a split; with a separator its labels, sorted.

    UserError if a row lacks one of them, or the list does not say of which split its images are.
    """
    is_of_all = path.stem == "images"
    has_splits = split in SPLITS
    allowed = SPLITS if is_of_all else (split,)
    needed = ("path", "label", "split") if is_of_all and split != "train" else ("path", "label")
    for line, row in read_table(path, needed, ("split",) if has_splits else ()):
        where = f"{path}, line {line}"
        labels = _labels_of(row["label"], separator)
        own_split = row.get("split", allowed[0]) if has_splits else split
        _check_row(where, row, own_split, labels, separator)
        if own_split not in allowed:
            raise UserError(f"{where}: split {own_split!r}; expected {' or '.join(allowed)}")
        for label in labels:
            check_class(where, label)
        if own_split == split or not is_of_all:
            yield line, row["path"], (separator or "").join(sorted(set(labels)))


def _check_row(where: str, row: dict, own_split: object, labels: list[str | None], separator: str | None) -> None:
    """Raise UserError for the first value of a row that is no text, or a label that holds the separator."""
    are_texts = {"path": _is_text(row["path"]), "split": _is_text(own_split), "label": all(map(_is_text, labels))}
    for name, is_right in are_texts.items():
        if not is_right:
            expected = "expected one name or number"
            if isinstance(row["label"], list) and not separator:
                expected += " (several labels need --multi-label)"
            raise UserError(f"{where}: {name} is {row[name]!r}; {expected}")
    for label in labels:
        if separator is not None and separator in label:
            raise UserError(f"{where}: label {label!r} contains {separator!r}; give --multi-label another separator")


def _labels_of(value: object, separator: str | None) -> list[str | None]:
    """Return the labels in a value, each as `as_label`; without a separator one, which may be empty."""
    if separator is None:
        return [as_label(value)]
    if isinstance(value, str):
        value = value.split(separator)
    values = value if isinstance(value, list) else [value]
    return [label for label in map(as_label, values) if label != ""]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def read_table(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[int, dict]]:
    """Yield the line and the values by column of each row of a .csv, .tsv or .jsonl file.

    Raises:
        UserError: the file cannot be read, or a row lacks a column that is needed.
    """
    if path.suffix not in SEPARATORS or not path.is_file():
        raise UserError(f"{path} is not an existing {', '.join(SEPARATORS)} file; write one with {', '.join(needed)}")
    separator = SEPARATORS[path.suffix]
    rows = _read_objects(path) if separator is None else _read_columns(path, separator, {*needed, *optional})
    for line, row in rows:
        lacking = [name for name in needed if name not in row]
        if lacking:
            columns = ", ".join(map(str, row)) or "none"
            expected = f"{', '.join(needed)}, separated by {'tabs' if separator == chr(9) else 'commas or semicolons'}"
            found = f"no column {lacking[0]}; line {1 if separator else line} has {columns}"
            raise UserError(f"{path}: {found}; expected {expected}")
        yield line, row


def _read_objects(path: Path) -> Iterator[tuple[int, dict]]:
    for number, line in _read_lines(path):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}); write one object per line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: expected an object with path and label")
        yield number, row


def _read_columns(path: Path, separator: str, read: Collection[str]) -> Iterator[tuple[int, dict]]:
    lines = (f"{line}\n" for _, line in _read_lines(path))
    first = next(lines, "")
    if separator == "," and "," not in first and ";" in first:  # spreadsheets, where the comma is the decimal point
        separator = ";"
    reader = csv.reader(chain([first], lines), delimiter=separator, strict=True, skipinitialspace=True)
    try:
        columns = [name.strip().lower() for name in next(reader, [])]
        if len(set(columns)) < len(columns):
            raise UserError(f"{path}: duplicate column: {', '.join(columns)}")
        unread = [name for name in columns if name not in read]
        if unread:
            print(one_line(f"{path}: {counted(len(unread), 'column')} not read: {', '.join(unread)}"))
        for row in filter(None, reader):
            if len(row) != len(columns):
                found = f"{len(row)} values for {len(columns)} columns; put a value with {separator!r} in quotes"
                raise UserError(f"{path}, line {reader.line_num}: {found}")
            yield reader.line_num, dict(zip(columns, row, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from error
