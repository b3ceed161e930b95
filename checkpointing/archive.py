"""Read files of checkpoints and weights: check every byte, and run none of their code."""

import argparse
import io
import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpointing.schema import MOST_PICKLE_BYTES, check_schema, unfold
from errors import StorageError, UserError
from files import memory_bytes, read_bytes, retry_read

# Bytes of a refused file that are searched for code to name in the message.
_MOST_OLD_BYTES = 1 << 20

# Bytes of an element of each storage type that `torch.save` writes; and all names that it writes for plain data.
_ITEM_BYTES = {
    "torch BFloat16Storage": 2, "torch BoolStorage": 1, "torch ByteStorage": 1, "torch CharStorage": 1,
    "torch DoubleStorage": 8, "torch FloatStorage": 4, "torch HalfStorage": 2, "torch IntStorage": 4,
    "torch LongStorage": 8, "torch ShortStorage": 2, "torch.storage UntypedStorage": 1,
}  # fmt: skip
_PLAIN_GLOBALS = {
    "collections OrderedDict", "torch Size", "torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", *_ITEM_BYTES,
    *(f"torch {name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
}  # fmt: skip


class Found(NamedTuple):
    """A checkpoint that has been verified."""

    path: Path
    payload: bytes
    state: dict


def read_checkpoint(path: Path, name: str) -> Found:
    """Return the checkpoint in a file that errors call `name`, verified; check its claims before reading it.

    Raises:
        UserError: the file is damaged, or no checkpoint of this script.
        StorageError: the disk does not answer, or memory is short.
    """

    def check() -> None:
        with open(path, "rb") as file:
            if not check_archive(file, name):
                file.seek(0)
                raise UserError(_explain(name, _find_code(file.read(_MOST_OLD_BYTES))))

    if path.is_file():  # anything else is refused by `read_bytes`
        retry_read(check, path)
    try:
        payload = read_bytes(path)
        return Found(path, payload, check_schema(load_checkpoint(payload, name), name))
    except MemoryError as error:
        raise StorageError(f"{name} does not fit into the memory that is free now") from error


def load_checkpoint(source: Path | bytes, name: str, *, takes_namespace: bool = False) -> dict:
    """Load a file of tensors and plain values, or its bytes; check every byte and run none of its code.

    `torch.load` accepts flipped bits in a tensor; the archive's checksums do not.
    An `argparse.Namespace`, as checkpoints of torchvision and timm hold, is refused unless `takes_namespace`.

    Raises:
        UserError: it is damaged, no checkpoint, too deeply nested, or needs code to load; the message says which.
        MemoryError: it is larger than the free memory.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    # A script may have allowed the class for itself; leaving the context would forbid it again.
    is_new = takes_namespace and argparse.Namespace not in torch.serialization.get_safe_globals()
    with stream, torch.serialization.safe_globals([argparse.Namespace]) if is_new else nullcontext():
        try:
            if check_archive(stream, name):
                bad = find_bad_record(stream)
                if bad is not None:
                    raise UserError(f"{name} is damaged (record {bad.split('/', 1)[-1]} fails its CRC)")
                check_pickle(stream, name, takes_namespace=takes_namespace)
            else:
                stream.seek(0)
                begin = stream.read(_MOST_OLD_BYTES)
                if begin[:2] != b"\x80\2":  # the protocol of pickles that torch wrote before version 1.6
                    raise _find_code(begin)
            stream.seek(0)
            content = torch.load(stream, map_location="cpu", weights_only=True)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # bad bytes raise anything from EOFError to AssertionError
            if "allocate" in str(error):
                raise MemoryError(f"{name} does not fit into memory") from error
            raise UserError(_explain(name, error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{name} holds a {type(content).__name__}, not a checkpoint")
    for _ in unfold(content, name):
        pass
    return content


def check_archive(file: Any, name: str) -> bool:
    """Tell whether an open file is an archive, and check that its directory accounts for all its bytes.

    Nothing loaded is then larger than the file, since `torch.save` compresses nothing.

    Raises:
        UserError: it is no archive of `torch.save`, or larger than this machine's memory.
    """
    size = file.seek(0, os.SEEK_END)
    if size > memory_bytes():
        raise UserError(f"{name} has {size / 1e9:,.1f} GB, and this machine {memory_bytes() / 1e9:,.1f} GB of memory")
    file.seek(0)
    if file.read(4) != b"PK\3\4":  # torch too tells archives from files of versions before 1.6 by these bytes
        return False
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise UserError(f"{name} is damaged or no checkpoint ({str(error)[:160]})") from error
    # Torch's reader is blind to case.
    names = {record.filename.lower() for record in records}
    roots = {record.filename.split("/")[0] for record in records}
    # Headers, and room that torch.save may leave free so that records begin at whole pages.
    gaps = size - sum(record.compress_size for record in records)
    is_stored = all(record.compress_type == 0 and record.compress_size == record.file_size for record in records)
    if not is_stored or len(names) < len(records) or len(roots) != 1 or not 0 < gaps <= 8192 * (len(records) + 1):
        raise UserError(f"{name} is damaged or no checkpoint (its records are not laid out as torch.save does it)")
    return True


def check_pickle(file: Any, name: str, *, takes_namespace: bool = False) -> None:
    """Check, without unpickling, that an archive's pickle names plain data only, in storages of their records' sizes.

    Torch believes the size that a pickle gives, and would read beyond the record.

    Raises:
        UserError: a storage has another size than its record, or the pickle is too large for a checkpoint.
        ValueError: the pickle names anything but plain data.
    """
    with zipfile.ZipFile(file) as archive:
        root = archive.infolist()[0].filename.split("/")[0]
        sizes = {record.filename.removeprefix(f"{root}/data/"): record.file_size for record in archive.infolist()}
        if archive.getinfo(f"{root}/data.pkl").file_size > MOST_PICKLE_BYTES:
            raise UserError(f"{name} is no checkpoint: its pickle is larger than {MOST_PICKLE_BYTES >> 20} MiB")
        pickled = archive.read(f"{root}/data.pkl")
    for kind, key, numel in _storages(pickled, _PLAIN_GLOBALS | ({"argparse Namespace"} if takes_namespace else set())):
        if sizes.get(key) != _ITEM_BYTES[kind] * numel:
            raise UserError(f"{name} is damaged (record data/{key} is not as large as its tensors)")


def _storages(pickled: bytes, plain_globals: set[str]) -> Iterator[tuple[str, str, int]]:
    """Yield the type, the key and the number of elements of each storage in a pickle; ValueError as `check_pickle`."""
    literals, stack, named = {}, [], None
    for opcode, argument, _ in pickletools.genops(pickled):
        _check_opcode(opcode.name, argument, plain_globals)
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            literals[argument] = stack[-1] if stack else None
            continue
        if opcode.name == "MARK":
            stack = []
        elif opcode.name == "TUPLE":
            stack, named = [], stack
            continue
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(literals.get(argument))
        elif opcode.name in ("GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(argument)
        elif opcode.name == "BINPERSID":
            is_storage = named is not None and len(named) == 5 and named[0] == "storage" and named[1] in _ITEM_BYTES
            if not is_storage or type(named[2]) is not str or type(named[4]) is not int:
                raise ValueError("Unsupported operand: not a storage of torch.save")
            yield named[1], named[2], named[4]
            stack = [None]
        else:
            stack = [None]
        named = None


def _check_opcode(name: str, argument: Any, plain_globals: set[str]) -> None:
    if name == "GLOBAL" and argument not in plain_globals:
        raise ValueError(f"GLOBAL {argument.replace(' ', '.')}")
    if name in ("INST", "STACK_GLOBAL"):
        raise ValueError("Unsupported operand: not of torch.save")


def _find_code(content: bytes) -> Exception:
    """Return why a file that is no archive is refused: code in the pickles at its beginning, if they have any.

    Older versions of torch wrote several pickles in a row, and then the tensors.
    """
    stream = io.BytesIO(content)
    try:
        while stream.tell() < len(content):
            for opcode, argument, _ in pickletools.genops(stream):
                _check_opcode(opcode.name, argument, _PLAIN_GLOBALS)
    except Exception as error:  # pickletools raises a dozen kinds where there is no pickle
        if re.match("GLOBAL|Unsupported operand", str(error)):
            return error
    return ValueError("not an archive of torch.save; nothing in it was run" if content else "it is empty")


def find_bad_record(file: Any) -> str | None:
    """Return the name of the first damaged record of a zip archive, a path or a binary file; None if all are good.

    Raises:
        zipfile.BadZipFile: the archive as a whole is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        # One flipped bit of the index turns a record into a folder. Python still reads the record and finds it good;
        # torch reads nothing and returns uninitialised memory.
        folders = (record.filename for record in archive.infolist() if record.external_attr & 0x10)
        return next(folders, None) or archive.testzip()


def _explain(name: str, error: Exception) -> str:
    """Say in one line why a file could not be loaded."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found and found[1] == "argparse.Namespace":
        return (
            f"{name} is a checkpoint of another script, such as torchvision's: it holds an argparse.Namespace; to "
            "start from its weights, pass it to --weights"
        )
    if found:
        return (
            f"{name} contains code ({found[1]}) and was refused; nothing in it was run. A file of the model's "
            "state_dict() is read"
        )
    if "Unsupported operand" in str(error):
        return f"{name} is damaged or no checkpoint (a pickle that torch.save did not write; nothing in it was run)"
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
    return f"{name} is damaged or no checkpoint ({reason[:160]})"
