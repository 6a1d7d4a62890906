"""The uncut side of the table: every Megatron tensor whole, named by its global layer.

That is what a distributed checkpoint holds, the layers stacked under one key; where layers differ
(plain ones before those with experts), megatron-core keeps a key per layer. Left out: how it is cut
into ranks (`table.py`).
"""

import re

from megagrpo.types import Box, Coordinates, Layout, ModelShape
from megagrpo.weights.rows import Row, rows
from megagrpo.weights.slices import Slice, whole
from megagrpo.weights.table import cut_axis, expand, fused_shape, padded_vocab, placed_rows

EXPERT_KEY = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.")
LAYER_KEY = re.compile(r"^decoder\.layers\.(\d+)\.")
# With experts the norm belongs to no linear; megatron-core's local layers still store it as if it
# did (their sharded_state_dict_keys_map), Transformer Engine's under its own name.
LOCAL_NORM = {
    "decoder.layers.pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight"
}
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
    if ".local_experts." in row.megatron:
        count = 1  # an expert is a piece by itself
    if row.kind == "replicated":
        return [whole(full)]
    dim, halves = cut_axis(row)
    size = full[dim] // halves
    # pieces of a vocabulary end where the ranks' do, whose share includes padding
    step = -(-(padded_vocab(size, count) if row.kind == "vocab" else size) // count)
    boxes = []
    for half in range(halves):
        for start in range(half * size, (half + 1) * size, step):
            box = list(whole(full))
            box[dim] = (start, min(start + step, (half + 1) * size))
            boxes.append(tuple(box))
    return boxes


def stored_key(name: str, shape: ModelShape) -> tuple[str, tuple[int, ...]]:
    """(stored key, place in it) of a fused tensor's name: layers share one stacked key, and so do
    the experts of all layers, under (layer, expert); if layers differ, each has keys of its own."""
    match = LAYER_KEY.match(name)
    if match is None:
        return name, ()
    layer, rest = int(match.group(1)), name[match.end() :]
    differ = layers_differ(shape)
    prefix = f"decoder.layers.{layer}." if differ else "decoder.layers."
    place = () if differ else (layer,)
    expert = EXPERT_KEY.match(rest)
    if expert is None:
        return f"{prefix}{rest}", place
    return f"{prefix}mlp.experts.experts.{rest[expert.end() :]}", (*place, int(expert.group(1)))


def layers_differ(shape: ModelShape) -> bool:
    """Whether some layers have a plain MLP and others experts."""
    return shape.experts is not None and shape.experts.dense_layers > 0


def stacked_shape(shape: ModelShape, key: str, full: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a stored key whose every layer (and expert) has shape `full`."""
    if not key.startswith("decoder.layers."):
        return full
    layers = () if layers_differ(shape) else (shape.num_layers,)
    if ".experts." not in key:
        return (*layers, *full)
    assert shape.experts is not None, f"{key} in a model without experts"
    return (*layers, shape.experts.count, *full)


def local_keys(shape: ModelShape) -> dict[str, str]:
    """Stored key -> what megatron-core's own layers store it as, where that differs."""
    if shape.latent is None:
        return LOCAL_NORM
    return {
        stored_key(name, shape)[0]: stored_key(row.local.format(i=layer), shape)[0]
        for row in rows(shape)
        if row.local is not None
        for layer in range(shape.num_layers)
        if row.on(layer)
        for name in (row.megatron.format(i=layer),)
    }


def empty_states(shape: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    """(module, counts) of the linear layers of megatron-core's local spec, which keep an (empty)
    extra state in checkpoints: one for every layer (and expert)."""
    found = {}
    for row in rows(shape):
        module, _, leaf = row.megatron.rpartition(".")
        if leaf != "weight" or not module.split(".")[-1].startswith("linear_"):
            continue
        for layer in range(shape.num_layers):
            if row.on(layer):
                key = stored_key(f"{module.format(i=layer)}.{leaf}", shape)[0]
                found[key.removesuffix(".weight")] = stacked_shape(shape, key, ()) or (1,)
    return list(found.items())


def stacked_box(place: tuple[int, ...], box: Box) -> Box:
    """The box of a fused tensor inside its stored key."""
    return (*((at, at + 1) for at in place), *box)
