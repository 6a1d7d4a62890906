"""What one rank of Megatron-LM holds once experts are spread over ranks as well.

The table (`table.py`) knows tensor and pipeline ranks; expert parallelism only leaves experts out
and renumbers the rest: rank e of `ep` has the experts from e * count / ep, counted from 0 in its
names. All else is the same on every expert rank.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megagrpo.types import Coordinates, Layout, ModelShape
from megagrpo.weights.rows import Row
from megagrpo.weights.table import PAD_MULTIPLE, local_shapes, placed_rows

EXPERT = re.compile(r"(?<=\.local_experts\.)(\d+)(?=\.)")
GROUPED = re.compile(r"(?<=\.weight)(\d+)$")


@dataclass(frozen=True)
class RankParameter:
    """One parameter of one rank."""

    name: str  # the rank's own
    fused: str  # of the uncut tensor, numbered in all of the model
    row: Row
    shape: tuple[int, ...]
    expert: bool  # of an expert that this rank has and other expert ranks have not


def check_expert_ranks(shape: ModelShape, ep: int) -> None:
    """Raise ValueError unless the experts divide by `ep`."""
    count = 1 if shape.experts is None else shape.experts.count
    if shape.experts is None and ep > 1:
        raise ValueError(f"ep={ep}, but {shape.architecture} has no experts; leave it out")
    if ep < 1 or count % ep:
        raise ValueError(f"ep={ep} does not divide the model's {count} experts; use a divisor")


def rank_parameters(
    shape: ModelShape,
    layout: Layout,
    coords: Coordinates,
    profile: str,
    experts: tuple[int, int] = (0, 1),
    *,
    multiple: int = PAD_MULTIPLE,
) -> Iterator[RankParameter]:
    """The parameters of a rank, in order; `experts` is (its expert rank, number of those)."""
    rank, size = experts
    shapes = local_shapes(shape, layout, coords, profile, multiple=multiple)
    each = 1 if shape.experts is None else shape.experts.count // size
    for row, name, layer in placed_rows(shape, layout, coords, profile):
        found, local = EXPERT.search(row.megatron), name
        if found is not None:
            number = int(found[1])
            if number // each != rank:
                continue
            pattern = EXPERT if EXPERT.search(name) else GROUPED
            local = pattern.sub(str(number % each), name)
        fused = row.megatron.format(i=layer)
        yield RankParameter(local, fused, row, shapes[name], found is not None)
