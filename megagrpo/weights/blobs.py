"""One tensor as torch.save writes it, many times over: the blobs of a distributed checkpoint.

A blob is an uncompressed zip: a pickle (dtype, shape), the numbers, a directory. Around the numbers
of tensors of one shape and dtype it is all the same, so it is made once, and known again when read:
then the numbers are an array in the file (`arrays.py`). Every blob whose surroundings are not known
byte for byte goes through torch.load(weights_only=True) once.
"""

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from megagrpo.weights.arrays import ArrayReader, StoredArray
from megagrpo.weights.slices import whole

# What torch.load raises over broken files: its unpickler trusts the order of instructions.
BROKEN = (
    *(RuntimeError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile),
    *(AttributeError, IndexError, KeyError, TypeError, AssertionError, OverflowError, MemoryError),
)
LOCAL_HEADER = 30  # bytes of a zip entry before its name
CHECKSUM = 14  # where in it the CRC of the numbers stands


def first_line(error: BaseException) -> str:
    """What an error says, short; its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.load never looks at a blob's CRC, which takes half the time of writing one."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What a blob holds before and after the numbers of any tensor of this shape and dtype."""
    blob = io.BytesIO()
    with _without_checksums():
        torch.save(torch.zeros(shape, dtype=dtype), blob)
    _, start, size = _numbers(blob)
    view = blob.getbuffer()
    return bytes(view[:start]), bytes(view[start + size :])


def _numbers(blob: BinaryIO | io.RawIOBase) -> tuple[int, int, int]:
    """(start of the zip entry, start of the data, bytes) of a blob's only tensor, or ValueError."""
    with zipfile.ZipFile(blob) as archive:
        entries = archive.infolist()
    data = [entry for entry in entries if "/data/" in entry.filename]
    if len(data) != 1 or not entries[0].filename.endswith("/data.pkl"):
        raise ValueError("not one tensor behind its pickle")
    if data[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed")
    at = data[0].header_offset
    blob.seek(at)
    name, extra = struct.unpack_from("<HH", blob.read(LOCAL_HEADER) or b"", 26)
    return at, at + LOCAL_HEADER + name + extra, data[0].file_size


class Window(io.RawIOBase):
    """A stretch of an open file as a file of its own."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length
        self._at = 0

    def readable(self) -> bool:
        """It is read only."""
        return True

    def seekable(self) -> bool:
        """The directory of a zip stands at its end."""
        return True

    def tell(self) -> int:
        """Position from the start of the stretch."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the stretch goes."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = os.preadv(self._descriptor, [view], self._start + self._at) if view else 0
        self._at += count
        return count


@dataclass(frozen=True)
class _Known:
    """A blob that torch.load has read before."""

    head: bytes  # up to the numbers, its pickle included
    checksum: int  # where the CRC of the numbers stands, which may differ
    shape: tuple[int, ...]
    dtype: torch.dtype


class BlobReader:
    """Finds the numbers of blobs; remembers what surrounded them, by the blob's length."""

    def __init__(self, arrays: ArrayReader) -> None:
        self._arrays = arrays
        self._known: dict[int, list[_Known]] = {}

    def find(self, path: Path, offset: int, length: int) -> StoredArray | torch.Tensor:
        """Where the numbers lie; the tensor itself if they do not lie in row-major order.

        Raises ValueError if the blob is refused, broken or no tensor.
        """
        descriptor = self._arrays.descriptor(path)
        if os.fstat(descriptor).st_size < offset + length:
            raise ValueError(f"{path} ends before its blob at {offset} does; it was cut off")
        window = Window(descriptor, offset, length)
        candidates = self._known.setdefault(length, [])
        known = next((known for known in candidates if _same_head(known, window)), None)
        if known is None:
            # On no device torch reads the pickle and leaves the numbers where they are.
            known = _surroundings(window, _load(path, window, offset, "meta"))
            if known is None:
                return _load(path, window, offset)
            candidates.append(known)
        return StoredArray(path, offset + len(known.head), known.shape, known.dtype)

    def read(self, path: Path, offset: int, length: int) -> torch.Tensor:
        """The tensor on the CPU."""
        found = self.find(path, offset, length)
        if isinstance(found, torch.Tensor):
            return found
        return self._arrays.read(found, whole(found.shape), f"{path}: blob at {offset}")


def _load(path: Path, window: Window, offset: int, device: str = "cpu") -> torch.Tensor:
    window.seek(0)
    try:
        tensor = torch.load(cast(IO[bytes], window), weights_only=True, map_location=device)
    except BROKEN as error:
        reason = first_line(error)
        raise ValueError(f"{path}: blob at {offset} is refused: {reason}") from None
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{path}: blob at {offset} is no tensor")
    return tensor


def _surroundings(window: Window, tensor: torch.Tensor) -> _Known | None:
    """What stands before the numbers, if they are all there as they are in memory."""
    try:
        entry, start, size = _numbers(window)
    except (ValueError, zipfile.BadZipFile, NotImplementedError):
        return None  # a format that torch.load knows and zipfile does not
    if not tensor.is_contiguous() or size != tensor.nbytes or not size:
        return None
    window.seek(0)
    head = window.read(start) or b""
    return _Known(head, entry + CHECKSUM, tuple(tensor.shape), tensor.dtype)


def _same_head(known: _Known, window: Window) -> bool:
    window.seek(0)
    head, at = window.read(len(known.head)) or b"", known.checksum
    return head[:at] == known.head[:at] and head[at + 4 :] == known.head[at + 4 :]
