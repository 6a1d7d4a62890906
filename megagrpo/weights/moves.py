"""Moves tensors block by block from a source to their planned places in files.

What is written where is known before the first number is read (`Job`), so jobs may run in any order
and in several processes. One buffer takes a block of rows, which is read, checked for NaN and
written while it is in the processor's cache. Left out: planning, which each format's writer does.
"""

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from megagrpo.types import Box, TensorSource
from megagrpo.weights.arrays import ArrayWriter, inside_of
from megagrpo.weights.slices import (
    Part,
    check_cover,
    extent,
    intersect,
    row_blocks,
    translate,
    volume,
    whole,
)
from megagrpo.weights.summary import count_nans

BLOCK_BYTES = 2 << 20  # small enough to stay in the processor's cache


class FillSource(TensorSource, Protocol):
    """A TensorSource that reads into tensors that exist."""

    def fill_(self, out: torch.Tensor, name: str, box: Box) -> None:
        """Copy that region into `out`, of its shape and on the CPU, cast to its dtype."""


@dataclass(frozen=True)
class Place:
    """Where a box of a wanted tensor belongs: an array in a file, in row-major order."""

    box: Box
    path: Path
    offset: int  # bytes


@dataclass(frozen=True)
class Job:
    """A wanted tensor: what it is made of, and every place where a box of it is stored.

    `parts` cover it exactly once, names are the source's. Places may overlap (copies).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[Part]
    places: Sequence[Place]

    @property
    def nbytes(self) -> int:
        """Size of its numbers, once."""
        return volume(whole(self.shape)) * self.dtype.itemsize


class Mover:
    """Runs jobs with one pair of buffers."""

    def __init__(self, source: FillSource, written: Callable[[int], object]) -> None:
        """`written` is told the bytes of every block."""
        self._source, self._written = source, written
        self._writer = ArrayWriter()
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._piece = np.empty(0, dtype=np.uint8)
        self.nans = 0

    def run(self, job: Job) -> None:
        """Move one tensor. Raises ValueError naming it if its parts do not cover it."""
        check_cover(whole(job.shape), [part.at for part in job.parts], job.name)
        size = job.dtype.itemsize
        row = volume(whole(job.shape[1:])) * size
        places = [_Target(place, job.shape, size) for place in job.places]
        for box in row_blocks(job.shape, size, BLOCK_BYTES):
            start, stop = box[0]
            nbytes = (stop - start) * row
            if self._block.numel() < nbytes:
                self._block = torch.empty(nbytes, dtype=torch.uint8)
            taken = self._block[:nbytes]
            block = taken.view(job.dtype).view(extent(box))
            fill_parts_(block, box, job.parts, self._source)
            self.nans += count_nans(block)
            rows = taken.numpy().reshape(stop - start, row)
            for place in places:
                if place.start < stop and start < place.stop:
                    self._store(rows, start, place)
            self._written(nbytes)

    def close(self) -> None:
        """Close the files; OSError if the disk refuses only now."""
        self._writer.close()

    def _store(self, rows: np.ndarray, start: int, place: "_Target") -> None:
        """Write what of the block's rows (their first is `start`) belongs to the place."""
        first = max(start, place.start)
        rows = rows[first - start : place.stop - start]
        if place.columns is not None:
            cut = rows[:, place.columns]
            if self._piece.size < cut.size:
                self._piece = np.empty(cut.size, dtype=np.uint8)
            rows = self._piece[: cut.size].reshape(cut.shape)
            np.copyto(rows, cut)
        at = place.offset + (first - place.start) * place.row
        self._writer.write(place.path, at, rows.reshape(-1).data)


class _Target:
    """A place in numbers of bytes."""

    def __init__(self, place: Place, shape: Sequence[int], size: int) -> None:
        (self.start, self.stop), *inner = place.box
        self.path, self.offset = place.path, place.offset
        self.row = volume(tuple(inner)) * size
        self.columns: slice | None = None  # bytes of a row; None is all of it
        if tuple(inner) != whole(shape[1:]):
            ((left, right),) = inner  # what is cut by columns is a matrix
            self.columns = slice(left * size, right * size)


def fill_parts_(out: torch.Tensor, box: Box, parts: Sequence[Part], source: FillSource) -> None:
    """Fill `out` with `box` of a wanted tensor, whose parts are in the source."""
    start, stop = box[0]
    for part in parts:
        if part.at[0][0] >= stop or start >= part.at[0][1]:
            continue
        common = intersect(box, part.at)
        if common is not None:
            target = inside_of(out, box, common)
            source.fill_(target, part.name, translate(common, part.at, part.box))


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection within: a plan is many small objects without circles, and the
    collector would look through all of torch's as often."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def shares(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """The jobs in `count` stretches of about equal bytes, in order; none is empty."""
    total, cuts = sum(job.nbytes for job in jobs), [0]
    for number, done in enumerate(itertools.accumulate(job.nbytes for job in jobs), 1):
        if done * count >= total * len(cuts) and len(cuts) < count:
            cuts.append(number)
    cuts.append(len(jobs))
    return [list(jobs[a:b]) for a, b in itertools.pairwise(cuts) if a < b]
