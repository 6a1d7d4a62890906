"""Box algebra: the one arithmetic behind conversion, loading, checkpoints and the weight sync.

A box is a half-open range per dimension. A `Slice` says that a box of a HuggingFace tensor and a
box of a Megatron tensor hold the same numbers. Everything else here is intersection, translation
and coverage. Left out: names, layouts and files; those belong to `table.py` and the readers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megagrpo.types import Box


@dataclass(frozen=True)
class Slice:
    """Box `hf_box` of HuggingFace tensor `hf` equals box `megatron_box` of Megatron tensor
    `megatron`; both boxes have the same shape.

    Example: the second query group's K of toy T: hf "...k_proj.weight" ((16, 32), (0, 64)),
    megatron "...linear_qkv.weight" ((96, 112), (0, 64)).
    """

    hf: str
    hf_box: Box
    megatron: str
    megatron_box: Box

    def __post_init__(self) -> None:
        """A slice never changes a shape."""
        assert extent(self.hf_box) == extent(self.megatron_box), f"boxes differ: {self}"


@dataclass(frozen=True)
class Part:
    """Box `at` of a wanted tensor is found at box `box` of tensor `name` of a source."""

    at: Box
    name: str
    box: Box


def extent(box: Box) -> tuple[int, ...]:
    """Length per dimension."""
    return tuple([stop - start for start, stop in box])


def volume(box: Box) -> int:
    """Number of elements."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor of this shape."""
    return tuple([(0, size) for size in shape])


def index(box: Box) -> tuple[slice, ...]:
    """The box as a tensor index."""
    return tuple([slice(start, stop) for start, stop in box])


def intersect(left: Box, right: Box) -> Box | None:
    """The common box, or None where they do not meet."""
    assert len(left) == len(right), f"boxes of {len(left)} and {len(right)} dimensions"
    common = []
    for (a, b), (c, d) in zip(left, right, strict=True):
        start, stop = (a if a > c else c), (b if b < d else d)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def translate(box: Box, origin: Box, target: Box) -> Box:
    """Move `box` as the corner of `origin` moves onto the corner of `target`."""
    return tuple(
        [
            (start - a + c, stop - a + c)
            for (start, stop), (a, _), (c, _) in zip(box, origin, target, strict=True)
        ]
    )


def subtract(box: Box, hole: Box) -> list[Box]:
    """What is left of `box` without `hole`, as disjoint boxes."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    rest, core = [], list(box)
    for dim, ((start, stop), (a, b)) in enumerate(zip(box, common, strict=True)):
        for piece in ((start, a), (b, stop)):
            if piece[0] < piece[1]:
                rest.append((*core[:dim], piece, *core[dim + 1 :]))
        core[dim] = (a, b)
    return rest


def uncovered(region: Box, boxes: Iterable[Box]) -> list[Box]:
    """The boxes of `region` that no box covers."""
    rest = [region]
    for hole in boxes:
        rest = [piece for box in rest for piece in subtract(box, hole)]
    return rest


def check_cover(region: Box, boxes: Sequence[Box], name: str) -> None:
    """Raise ValueError, naming `name` and an element, unless `boxes` cover `region` exactly once
    and do not leave it."""
    ordered = sorted(boxes)
    for position, box in enumerate(ordered):
        if subtract(box, region):
            raise ValueError(f"{name}: box {box} leaves the tensor {region}")
        for other in ordered[position + 1 :]:
            if other[:1] and box[0][1] <= other[0][0]:
                break  # sorted by the first dimension: nothing later can meet this box
            common = intersect(box, other)
            if common is not None:
                raise ValueError(f"{name}: element {corner(common)} is written twice")
    if sum(map(volume, ordered)) != volume(region):
        gap = uncovered(region, ordered)[0]
        raise ValueError(f"{name}: element {corner(gap)} is not covered")


def row_blocks(shape: Sequence[int], itemsize: int, nbytes: int) -> Iterator[Box]:
    """The tensor in stretches of full rows of at most about `nbytes`, at least one row each."""
    row = volume(whole(shape[1:])) * itemsize
    step = max(1, nbytes // row)
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *whole(shape[1:]))


def corner(box: Box) -> tuple[int, ...]:
    """First element of the box."""
    return tuple(start for start, _ in box)


def by_megatron(slices: Iterable[Slice]) -> dict[str, list[Slice]]:
    """The slices of every Megatron tensor."""
    grouped: dict[str, list[Slice]] = {}
    for piece in slices:
        grouped.setdefault(piece.megatron, []).append(piece)
    return grouped


def from_hf(slices: Iterable[Slice]) -> list[Part]:
    """Parts of one Megatron tensor, to be read from HuggingFace tensors."""
    return [Part(at=s.megatron_box, name=s.hf, box=s.hf_box) for s in slices]


def from_megatron(slices: Iterable[Slice]) -> list[Part]:
    """Parts of one HuggingFace tensor, to be read from Megatron tensors: the same slices turned."""
    return [Part(at=s.hf_box, name=s.megatron, box=s.megatron_box) for s in slices]


def gather(
    box: Box, parts: Sequence[Part], read: Callable[[str, Box], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Box of a wanted tensor put together from the parts of a source.

    Returns a contiguous CPU tensor of `dtype`; raises ValueError if the parts do not cover the box,
    or if a value is beyond the range of `dtype`.
    """
    found = []
    for part in parts:
        common = intersect(box, part.at)
        if common is not None:
            found.append((common, part.name, translate(common, part.at, part.box)))
    if len(found) == 1 and found[0][0] == box:
        return cast(read(found[0][1], found[0][2]), dtype, found[0][1]).contiguous()
    check_cover(box, [common for common, _, _ in found], "gather")
    result = torch.empty(extent(box), dtype=dtype)
    for common, name, source_box in found:
        place = translate(common, box, whole(extent(box)))
        result[index(place)] = cast(read(name, source_box), dtype, name)
    return result


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Change the dtype; a finite number that would become infinite is an error."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if bool((tensor.isfinite() & ~result.isfinite()).any()):
        raise ValueError(f"{name} has values beyond the range of {dtype}; choose a wider dtype")
    return result
