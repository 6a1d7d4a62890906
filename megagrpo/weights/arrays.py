"""Arrays that lie in files in row-major order: boxes of them are read into tensors that exist.

Every format here comes down to that: safetensors, the blobs of a distributed checkpoint, the
records of a torch.save file. Nothing is mapped and nothing is allocated per read, since both cost
more than the copy itself. Left out: finding the arrays, which each format's reader does.
"""

import itertools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from megagrpo.types import Box
from megagrpo.weights.slices import (
    cast,
    corner,
    extent,
    index,
    intersect,
    translate,
    volume,
    whole,
)

T = TypeVar("T")

SCRATCH_BYTES = 1 << 20  # of rows that are read to take some of their columns, or to be cast
OPEN_FILES = 64


@dataclass(frozen=True)
class StoredArray:
    """A contiguous array in a file, little-endian."""

    path: Path
    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next of every dimension."""
        sizes = [self.dtype.itemsize]
        for length in reversed(self.shape[1:]):
            sizes.append(sizes[-1] * length)
        return tuple(reversed(sizes))

    @cached_property
    def whole(self) -> Box:
        """The box that is all of it."""
        return whole(self.shape)


class BoxIndex(Generic[T]):
    """Boxes that together make a tensor, each with what is stored there, found by their place in
    the leading dimensions (layer, expert) of which every box holds a single element."""

    def __init__(self, items: Sequence[tuple[Box, T]]) -> None:
        self._items, self._lead = list(items), 0
        sizes = zip(*(extent(box) for box, _ in items), strict=True)
        for _ in itertools.takewhile(lambda lengths: set(lengths) == {1}, sizes):
            self._lead += 1
        self._by_place: dict[tuple[int, ...], list[tuple[Box, T]]] = {}
        for box, item in items:
            self._by_place.setdefault(corner(box[: self._lead]), []).append((box, item))

    def __len__(self) -> int:
        """How many boxes there are."""
        return len(self._items)

    def meeting(self, box: Box) -> Iterator[tuple[Box, Box, T]]:
        """(common box, whole box, what is stored there) of every box that meets this one."""
        lead = box[: self._lead]
        near: Iterable[tuple[Box, T]] = self._items
        if volume(lead) <= len(self._by_place):
            places = itertools.product(*(range(start, stop) for start, stop in lead))
            near = (item for place in places for item in self._by_place.get(place, ()))
        for other, item in near:
            common = intersect(box, other)
            if common is not None:
                yield common, other, item


class ArrayReader:
    """Reads boxes of arrays; keeps files open and one buffer of about SCRATCH_BYTES."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._scratch = np.empty(0, dtype=np.uint8)
        self.bytes_read = 0  # of arrays, since the start
        weakref.finalize(self, _close, self._open)

    def descriptor(self, path: Path) -> int:
        """The open file; ValueError if it is missing."""
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                raise ValueError(f"{path} is missing") from None
        return self._open[path]

    def fill_(self, out: torch.Tensor, array: StoredArray, box: Box, name: str) -> None:
        """Copy that box of the array into `out` (on the CPU), of the same shape, cast to its dtype.

        Raises ValueError if the file ends before, or if a value is beyond the range of the dtype;
        `name` stands in that message.
        """
        assert len(box) == len(array.shape) == out.dim(), f"{name}: {box} of {array}"
        if not out.numel():
            return
        dim, at = 0, array.offset  # leading dimensions of which the box takes one element each
        while dim < len(box) - 1 and box[dim][1] - box[dim][0] == 1:
            at += box[dim][0] * array.strides[dim]
            dim += 1
        start, stop = box[dim]
        row, inner = array.strides[dim], box[dim + 1 :]
        at += start * row
        if inner == array.whole[dim + 1 :] and out.is_contiguous() and out.dtype == array.dtype:
            self._read(_bytes(out), array.path, at)
            return
        target, shape = out[(0,) * dim], array.shape[dim + 1 :]
        step = max(1, SCRATCH_BYTES // row)
        for first in range(0, stop - start, step):
            count = min(step, stop - start - first)
            if self._scratch.size < count * row:
                self._scratch = np.empty(count * row, dtype=np.uint8)
            rows = self._scratch[: count * row]
            self._read(rows.data, array.path, at + first * row)
            part = target[first : first + count]
            if len(shape) == 1 and out.dtype == array.dtype and part.stride(1) == 1:
                left, right = (edge * array.dtype.itemsize for edge in inner[0])
                np.copyto(part.view(torch.uint8).numpy(), rows.reshape(count, row)[:, left:right])
                continue
            found = torch.from_numpy(rows).view(array.dtype).view(count, *shape)
            part.copy_(cast(found[(slice(None), *index(inner))], out.dtype, name))

    def read(self, array: StoredArray, box: Box, name: str) -> torch.Tensor:
        """That box as a new tensor of the array's dtype."""
        result = torch.empty(extent(box), dtype=array.dtype)
        self.fill_(result, array, box, name)
        return result

    def _read(self, view: memoryview, path: Path, offset: int) -> None:
        descriptor, self.bytes_read = self.descriptor(path), self.bytes_read + len(view)
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise ValueError(f"{path} ended while it was read")
            view, offset = view[count:], offset + count


class ArrayWriter:
    """Writes numbers to places in files, in any order; `close` when done."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close, self._open)

    def write(self, path: Path, offset: int, data: bytes | memoryview) -> None:
        """All of the bytes; OSError naming the file if the disk refuses.

        The file is made where there is none.
        """
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        descriptor, rest = self._open[path], memoryview(data)
        while rest:
            try:
                count = os.pwrite(descriptor, rest, offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
            rest, offset = rest[count:], offset + count

    def close(self) -> None:
        """Close the files; OSError if the disk refuses only now."""
        _close(self._open)


def inside_of(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of `tensor`, which holds `box` of another, that is `part` of that other."""
    if part == box:
        return tensor
    return tensor[index(translate(part, box, whole(tensor.shape)))]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _close(files: dict[Path, int]) -> None:
    for descriptor in files.values():
        os.close(descriptor)
    files.clear()
