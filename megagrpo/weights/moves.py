"""Moves tensors block by block from a source to their planned places in files.

What is written where is known before the first number is read (`Job`), so jobs may run in any order
and in several processes. A block of rows is read, checked for NaN and written while it is in the
processor's cache. Left out: planning, which each format's writer does.
"""

import gc
import itertools
import queue
import threading
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
BUFFERS = 3  # one is filled, one is written, one waits


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
    """Runs jobs: this thread reads, another one writes, and a few buffers go round between them.

    Use it in a `with` block; leaving it waits for what is not written. Raises what either thread
    raises, ValueError or OSError.
    """

    def __init__(self, source: FillSource, written: Callable[[int], object]) -> None:
        """`written` is told the bytes of every block that was handed to the writing thread."""
        self._source, self._written = source, written
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(torch.empty(BLOCK_BYTES, dtype=torch.uint8))
        self._filled: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self.nans = 0

    def __enter__(self) -> "Mover":
        """Start the writing thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait until everything is written; after an error, for the block at hand only."""
        if kind is not None:
            self._failure = self._failure or InterruptedError("the reader failed")
        self._filled.put(None)
        self._thread.join()
        if kind is None and self._failure is not None:
            raise self._failure

    def run(self, job: Job) -> None:
        """Move one tensor. Raises ValueError naming it if its parts do not cover it."""
        check_cover(whole(job.shape), [part.at for part in job.parts], job.name)
        size = job.dtype.itemsize
        row = volume(whole(job.shape[1:])) * size
        targets = [_Target(place, job.shape, size) for place in job.places]
        for box in row_blocks(job.shape, size, BLOCK_BYTES):
            start, stop = box[0]
            nbytes = (stop - start) * row
            buffer = self._free.get()
            if self._failure is not None:
                raise self._failure
            if buffer.numel() < nbytes:
                buffer = torch.empty(nbytes, dtype=torch.uint8)
            taken = buffer[:nbytes]
            values = taken.view(job.dtype).view(extent(box))
            fill_parts_(values, box, job.parts, self._source)
            self.nans += count_nans(values)
            rows = taken.numpy().reshape(stop - start, row)
            self._filled.put(_Block(buffer, rows, start, targets))
            self._written(nbytes)

    def _write_all(self) -> None:
        """The writing thread: until it is told to end."""
        writer, piece = ArrayWriter(), np.empty(0, dtype=np.uint8)
        while (block := self._filled.get()) is not None:
            try:
                if self._failure is None:
                    piece = block.store(writer, piece)
            except OSError as error:
                self._failure = error
            self._free.put(block.buffer)
        try:
            writer.close()
        except OSError as error:
            self._failure = self._failure or error


@dataclass(frozen=True)
class _Block:
    """Rows of a tensor on their way to a file."""

    buffer: torch.Tensor  # which holds them
    rows: np.ndarray  # [rows, bytes of a row]
    start: int  # the first row's number
    targets: Sequence["_Target"]

    def store(self, writer: ArrayWriter, piece: np.ndarray) -> np.ndarray:
        """Write the rows wherever they belong; `piece` is scratch, the return value the next."""
        stop = self.start + len(self.rows)
        for target in self.targets:
            if target.start >= stop or self.start >= target.stop:
                continue
            first = max(self.start, target.start)
            rows = self.rows[first - self.start : target.stop - self.start]
            if target.columns is not None:
                cut = rows[:, target.columns]
                piece = piece if piece.size >= cut.size else np.empty(cut.size, dtype=np.uint8)
                rows = piece[: cut.size].reshape(cut.shape)
                np.copyto(rows, cut)
            at = target.offset + (first - target.start) * target.row
            writer.write(target.path, at, rows.reshape(-1).data)
        return piece


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
