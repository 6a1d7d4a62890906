"""The uncut side of the table: every Megatron tensor whole, named by its global layer.

That is what a distributed checkpoint holds. Left out: how it is cut into ranks (`table.py`).
"""

import re

from megagrpo.types import Box, Coordinates, Layout, ModelShape
from megagrpo.weights.slices import Slice, whole
from megagrpo.weights.table import Row, cut_axis, expand, fused_shape, placed_rows

LAYER_KEY = re.compile(r"^decoder\.layers\.(\d+)\.")
FUSED = (Layout(world=1), Coordinates(tp=0, pp=0, dp=0))


def fused_slices(shape: ModelShape) -> list[Slice]:
    """Slices of the uncut, unpadded Megatron tensors, named by global layer."""
    return expand(shape, *FUSED, "te", multiple=1)


def fused_rows(shape: ModelShape) -> list[tuple[str, Row]]:
    """(name by global layer, row) of every uncut Megatron tensor, in order."""
    return [(name, row) for row, name, _ in placed_rows(shape, *FUSED, "te")]


def stored_boxes(shape: ModelShape, row: Row, count: int = 8) -> list[Box]:
    """The fused tensor in up to `count` pieces along the axis of tensor parallelism, for storage:
    a reader of a distributed checkpoint loads whole stored pieces."""
    full = fused_shape(shape, row)
    if row.kind == "replicated":
        return [whole(full)]
    dim, halves = cut_axis(row)
    size = full[dim] // halves
    step = -(-size // count)
    boxes = []
    for half in range(halves):
        for start in range(half * size, (half + 1) * size, step):
            box = list(whole(full))
            box[dim] = (start, min(start + step, (half + 1) * size))
            boxes.append(tuple(box))
    return boxes


def stored_key(name: str) -> tuple[str, int | None]:
    """(stored key, layer) of a fused tensor's name; layers share one stacked key."""
    match = LAYER_KEY.match(name)
    if match is None:
        return name, None
    return "decoder.layers." + name[match.end() :], int(match.group(1))
