"""Writes Megatron-LM's per-rank checkpoints, tensor by tensor.

torch.save wants all tensors of a file at once, so it writes the file with room for the numbers
(skip_data), which are filled in from the source afterwards. Format and reader: `legacy.py`.
"""

import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from megagrpo.types import Box, Layout, ModelShape, TensorSource
from megagrpo.weights.accounting import valid_boxes
from megagrpo.weights.blobs import first_line
from megagrpo.weights.fused import stored_key
from megagrpo.weights.legacy import FILE, TRACKER, rank_folder
from megagrpo.weights.rows import EMBEDDING, EMBEDDING_ROW, HEAD
from megagrpo.weights.slices import (
    Part,
    by_megatron,
    extent,
    from_hf,
    gather,
    index,
    intersect,
    row_blocks,
    translate,
    volume,
    whole,
)
from megagrpo.weights.table import expand, expert_ffn, local_shapes, placed_rows

BLOCK_BYTES = 4 << 20


def write_legacy(
    folder: Path,
    source: TensorSource,
    shape: ModelShape,
    layout: Layout,
    *,
    profile: str,
    dtypes: Mapping[str, torch.dtype],
    extra: Mapping[str, Any],
) -> Iterator[torch.Tensor]:
    """Write release/mp_rank_* and the tracker file into `folder`; yields each piece written.

    `dtypes` gives the dtype of every fused key; `extra` goes beside "model" in every file.
    """
    for rank in range(layout.world):
        coords = layout.coordinates(rank)
        path = folder / "release" / rank_folder(coords.tp, coords.pp, layout.pp) / FILE
        path.parent.mkdir(parents=True)
        shapes = local_shapes(shape, layout, coords, profile)
        empty = {}
        for row, name, layer in placed_rows(shape, layout, coords, profile):
            key, _ = stored_key(row.megatron.format(i=layer), shape)
            dtype = dtypes[EMBEDDING if row.hf == EMBEDDING_ROW.hf else key]  # a tied head too
            empty[name] = torch.empty(shapes[name], dtype=dtype)
        _reserve(path, empty, {**extra, "args": arguments(shape, layout, shapes)})
        slices = by_megatron(expand(shape, layout, coords, profile))
        boxes = valid_boxes(shape, shapes, coords.tp)
        with path.open("r+b") as file:
            for (name, tensor), start in zip(empty.items(), _starts(path, len(empty)), strict=True):
                parts = from_hf(slices.get(name, []))
                filled = boxes.get(name, whole(tensor.shape))
                file.seek(start)
                for box in row_blocks(tensor.shape, tensor.dtype.itemsize, BLOCK_BYTES):
                    rows = _padded(box, filled, parts, source, tensor.dtype)
                    file.write(rows.reshape(-1).view(torch.uint8).numpy().data)
                    yield rows
    (folder / TRACKER).write_text("release")


def _reserve(path: Path, empty: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
    """Write the file but for the numbers; the tensors' memory is never touched."""
    states = {f"{name.rpartition('.')[0]}._extra_state": None for name in empty if _has(name)}
    content = {
        "model": {**empty, **states},
        "checkpoint_version": 3.0,
        "iteration": 0,
        **extra,
    }
    try:
        with skip_data():
            torch.save(content, path)
    except RuntimeError as error:  # how torch's own writer says that the disk is full
        raise OSError(f"{path} cannot be written: {first_line(error)}") from None


def _has(name: str) -> bool:
    """Whether the parameter's module keeps an `_extra_state`: Megatron's and TE's linear layers."""
    linear = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")
    leaf = name.split(".")[-1]
    return leaf in ("weight", "weight0") and name.split(".")[-2] in linear


def _starts(path: Path, count: int) -> list[int]:
    """Where the numbers of each tensor begin in a file of torch.save, in order."""
    with zipfile.ZipFile(path) as archive:
        root = archive.infolist()[0].filename.split("/")[0]
        entries = [archive.getinfo(f"{root}/data/{number}") for number in range(count)]
    with path.open("rb") as file:
        starts = []
        for entry in entries:
            file.seek(entry.header_offset + 26)
            lengths = file.read(4)
            name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
            starts.append(entry.header_offset + 30 + name + extra)
    return starts


def _padded(
    box: Box, filled: Box, parts: list[Part], source: TensorSource, dtype: torch.dtype
) -> torch.Tensor:
    """The box gathered where it is filled, zero in the vocabulary padding."""
    inside = intersect(box, filled)
    if inside == box:
        return gather(box, parts, source.read, dtype)
    result = torch.zeros(extent(box), dtype=dtype)
    if inside is not None and volume(inside):
        place = index(translate(inside, box, whole(extent(box))))
        result[place] = gather(inside, parts, source.read, dtype)
    return result


def arguments(
    shape: ModelShape, layout: Layout, shapes: Mapping[str, tuple[int, ...]]
) -> Namespace:
    """What Megatron-LM checks and what --use-checkpoint-args takes from a checkpoint."""
    rows = [shapes[name][0] for name in (EMBEDDING, HEAD) if name in shapes]
    return Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=None,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        group_query_attention=shape.num_kv_heads != shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        seq_length=shape.max_positions,
        max_position_embeddings=shape.max_positions,
        padded_vocab_size=rows[0] * layout.tp if rows else None,
        untie_embeddings_and_output_weights=not shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rotary_percent=1.0,
        normalization="RMSNorm",
        norm_epsilon=shape.norm_eps,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        num_experts=None if shape.experts is None else shape.experts.count,
        moe_ffn_hidden_size=expert_ffn(shape) or None,
        moe_router_topk=2 if shape.experts is None else shape.experts.top_k,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        iteration=0,
    )
