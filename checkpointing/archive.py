"""Read files of checkpoints and weights: check every byte, and run none of their code."""

import argparse
import io
import os
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpointing.schema import MOST_PICKLE_BYTES, check_schema, unfold
from errors import StorageError, UserError
from files import memory_bytes, open_to_read, read_at, retry_read


class Found(NamedTuple):
    """A checkpoint that has been verified."""

    path: Path
    payload: bytes
    state: dict


def read_checkpoint(path: Path, name: str) -> Found:
    """Return the checkpoint in a file that errors call `name`, verified. Only an archive is read whole.

    Raises:
        UserError: the file is damaged, or no checkpoint of this script.
        StorageError: the disk does not answer, or memory is short.
    """

    def read() -> bytes:
        with open_to_read(path) as file:
            check_size(file, name)
            # A zip archive ends in a record of 22 bytes: without it the gigabytes of a cut or foreign file stay unread.
            size = os.fstat(file.fileno()).st_size
            end = read_at(file, max(size - 22, 0), 22)
            if end.startswith(b"PK\5\6"):
                # Whole and once: these bytes are verified, loaded, sent to other ranks and copied to another folder.
                return file.read()
            reason = "it lacks the end of a torch.save archive"
            begin = read_at(file, 0, 24)
            if not begin.startswith(b"PK"):
                from checkpointing.damaged import first_bytes

                reason += f"; {first_bytes(begin)}"
            raise UserError(f"{name} is damaged or no checkpoint ({reason})")

    try:
        payload = retry_read(read, path)
        return Found(path, payload, check_schema(load_checkpoint(payload, name), name))
    except MemoryError as error:
        raise StorageError(f"{name} does not fit into the memory that is free now") from error


def load_checkpoint(source: Path | bytes, name: str, *, takes_namespace: bool = False) -> dict:
    """Load a file of tensors and plain values, or its bytes; check every byte and run none of its code.

    `torch.load` accepts flipped bits in a tensor; the archive's checksums do not. It refuses a storage of another size
    than its record (seen in 2.11 and 2.14), but not a compressed one.
    An `argparse.Namespace`, as checkpoints of torchvision and timm hold, is refused unless `takes_namespace`.

    Raises:
        UserError: it is damaged, no checkpoint, too deeply nested, or needs code to load; the message says which.
        MemoryError: it is larger than the free memory.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    allowed: AbstractContextManager = nullcontext()
    # A script may have allowed the class for itself; leaving the context would forbid it again.
    if takes_namespace and argparse.Namespace not in torch.serialization.get_safe_globals():
        allowed = torch.serialization.safe_globals([argparse.Namespace])
    with stream, allowed:
        try:
            check_size(stream, name)
            begin = stream.read(24)
            # Torch too tells archives by these bytes from the pickles of versions before 1.6, all of protocol 2.
            if begin.startswith(b"PK\3\4"):
                check_archive(stream, name)
            elif begin[:2] != b"\x80\2":
                from checkpointing.damaged import first_bytes

                raise ValueError(f"not a torch.save archive; {first_bytes(begin)}")
            stream.seek(0)
            # Said explicitly, since TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD overrides only what a call leaves open.
            content = torch.load(stream, map_location="cpu", weights_only=True)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # bad bytes raise anything from EOFError to AssertionError
            if "allocate" in str(error):
                raise MemoryError(f"{name} does not fit into memory") from error
            from checkpointing.damaged import explain

            raise UserError(explain(name, error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{name} holds a {type(content).__name__}, not a checkpoint")
    for _ in unfold(content, name):
        pass
    return content


def check_size(file: Any, name: str) -> None:
    """Raise UserError if an open file is larger than this machine's memory; continue at its beginning."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size > memory_bytes():
        raise UserError(f"{name} has {size / 1e9:,.1f} GB, and this machine {memory_bytes() / 1e9:,.1f} GB of memory")


def check_archive(file: Any, name: str) -> None:
    """Check that the directory of a zip archive accounts for all its bytes, and every record against its checksum.

    Nothing loaded is then larger than the file, since `torch.save` compresses nothing.

    Raises:
        UserError: it is not as `torch.save` writes it.
        zipfile.BadZipFile: it is damaged.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if not any(each.filename.endswith(("/data.pkl", "/version")) for each in records):  # one may be damaged
            raise UserError(f"{name} is a zip archive of {', '.join(archive.namelist()[:2])}; unpack it")
        # Torch's reader is blind to case: of two such names Python would check one and torch load the other.
        names = {record.filename.lower() for record in records}
        roots = {record.filename.split("/")[0] for record in records}
        # Headers, and room that torch.save may leave free so that records begin at whole pages.
        gaps = size - sum(record.compress_size for record in records)
        is_plain = 0 < gaps <= 8192 * (len(records) + 1) and len(names) == len(records) and len(roots) == 1
        is_stored = all(record.compress_type == 0 and record.compress_size == record.file_size for record in records)
        if not (is_plain and is_stored):
            raise UserError(f"{name} is damaged or no checkpoint (its records are not laid out as by torch.save)")
        if any(each.filename.endswith("/data.pkl") and each.file_size > MOST_PICKLE_BYTES for each in records):
            raise UserError(f"{name} is no checkpoint: its pickle is larger than {MOST_PICKLE_BYTES >> 20} MiB")
        bad = find_bad_record(archive)
        if bad is not None:
            raise UserError(f"{name} is damaged (record {bad.split('/', 1)[-1]} fails its CRC)")


def find_bad_record(archive: zipfile.ZipFile) -> str | None:
    """Return the name of the first damaged record of an archive; None if all are good."""
    # One flipped bit of the index turns a record into a folder. Python still reads the record and finds it good;
    # torch reads nothing and returns uninitialised memory.
    for record in archive.infolist():
        if record.external_attr & 0x10:
            return record.filename
    # torch.load took 2,491 of 3,000 files with one flipped bit, with wrong numbers (pytorch/pytorch#126952); the
    # CRCs told all of them, and take 46 ms for the 205 MB of a ResNet-50 with momentum.
    return archive.testzip()
