"""Writes Megatron-LM's per-rank checkpoints: files with room for the numbers, and their places.

torch.save wants all tensors of a file at once, so it writes each file without the numbers
(skip_data); every HuggingFace tensor is then read once and goes to all ranks that hold a part.
Format and reader: `legacy.py`.
"""

import zipfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from megagrpo.types import Layout, ModelShape
from megagrpo.weights.accounting import valid_boxes
from megagrpo.weights.arrays import ArrayWriter, StoredArray
from megagrpo.weights.blobs import first_line
from megagrpo.weights.folders import TRACKER
from megagrpo.weights.fused import stored_key
from megagrpo.weights.legacy_file import FILE, Rank, rank_folder
from megagrpo.weights.legacy_ranks import RankParameter, check_expert_ranks, rank_parameters
from megagrpo.weights.moves import Place
from megagrpo.weights.rows import EMBEDDING, EMBEDDING_ROW, HEAD
from megagrpo.weights.slices import intersect, volume, whole
from megagrpo.weights.table import PAD_MULTIPLE, expert_ffn, fused_shape, rank_cuts

ZEROS = 1 << 20  # bytes of padding written at a time


def with_virtual_stages(shape: ModelShape, layout: Layout, vpp: int, ep: int) -> Layout:
    """The layout in which each of `vpp` virtual stages of a pipeline rank is a stage.

    Raises ValueError, naming the number, if the model cannot be spread so over `ep` expert ranks.
    """
    if vpp < 1 or ep < 1:
        raise ValueError(f"vpp={vpp}, ep={ep}: both count from 1")
    if vpp > 1 and layout.pp == 1:
        raise ValueError(f"vpp={vpp} needs pipeline stages, but pp is 1")
    check_expert_ranks(shape, ep)
    return replace(layout, world=layout.tp * layout.pp * vpp, pp=layout.pp * vpp)


class LegacyWriter:
    """release/mp_rank_* and the tracker file: `create` the files, write the numbers at `places`,
    then `close`.

    `layout` has a stage for every virtual one; `dtypes` gives the dtype of every fused key.
    """

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        layout: Layout,
        profile: str,
        dtypes: Mapping[str, torch.dtype],
        *,
        vpp: int = 1,
        ep: int = 1,
    ) -> None:
        self._folder, self._shape, self._layout = folder, shape, layout
        self._profile, self._dtypes, self._vpp, self._ep = profile, dtypes, vpp, ep
        self._pp = layout.pp // vpp
        self.places: dict[str, list[Place]] = {}  # of every fused tensor

    def create(self, extra: Mapping[str, Any]) -> None:
        """Write all files but for the numbers; `extra` goes beside "model" in each."""
        writer = ArrayWriter()
        for rank in (
            Rank(tp, pp, ep)
            for tp in range(self._layout.tp)
            for pp in range(self._pp)
            for ep in range(self._ep)
        ):
            models = [self._parameters(rank, chunk) for chunk in range(self._vpp)]
            path = self._folder / "release" / rank_folder(rank, self._pp, self._ep) / FILE
            path.parent.mkdir(parents=True)
            empty = [
                {i.name: torch.empty(i.shape, dtype=self._dtype(i)) for i in m} for m in models
            ]
            arguments = _arguments(self._shape, self._layout, empty, self._vpp, self._ep)
            _reserve(path, empty, {**extra, "args": arguments})
            items = [item for model in models for item in model]
            for item, start in zip(items, _starts(path, len(items)), strict=True):
                self._place(rank, item, StoredArray(path, start, item.shape, self._dtype(item)))
                self._pad(rank, item, start, path, writer)
        writer.close()

    def close(self) -> None:
        """Write the tracker file."""
        (self._folder / TRACKER).write_text("release")

    def _parameters(self, rank: Rank, chunk: int) -> list[RankParameter]:
        stage = chunk * self._pp + rank.pp
        coords = self._layout.coordinates(rank.tp + self._layout.tp * stage)
        experts = (rank.ep, self._ep)
        return list(rank_parameters(self._shape, self._layout, coords, self._profile, experts))

    def _dtype(self, item: RankParameter) -> torch.dtype:
        return self._dtypes[stored_key(_origin(item), self._shape)[0]]

    def _place(self, rank: Rank, item: RankParameter, array: StoredArray) -> None:
        full = whole(fused_shape(self._shape, item.row))
        row = volume(whole(item.shape[1:])) * array.dtype.itemsize
        cuts = rank_cuts(self._shape, item.row, self._layout.tp, rank.tp, PAD_MULTIPLE)
        for fused, local in cuts:  # full rows of the local tensor each
            inside = intersect(fused, full)
            if inside is not None:
                place = Place(inside, array.path, array.offset + local[0][0] * row)
                self.places.setdefault(_origin(item), []).append(place)

    def _pad(
        self, rank: Rank, item: RankParameter, start: int, path: Path, writer: ArrayWriter
    ) -> None:
        """Zeros where the vocabulary has ended."""
        boxes = valid_boxes(self._shape, {item.name: item.shape}, rank.tp)
        if item.name not in boxes:
            return
        row = item.shape[1] * self._dtype(item).itemsize
        at, end = start + boxes[item.name][0][1] * row, start + item.shape[0] * row
        while at < end:
            count = min(ZEROS, end - at)
            writer.write(path, at, bytes(count))
            at += count


def _origin(item: RankParameter) -> str:
    """The fused tensor that the numbers come from; a tied head holds the embedding's."""
    return EMBEDDING if item.row.hf == EMBEDDING_ROW.hf else item.fused


def _reserve(path: Path, empty: list[dict[str, torch.Tensor]], extra: Mapping[str, Any]) -> None:
    """Write the file but for the numbers; the tensors' memory is never touched."""
    models = [
        {**model, **{f"{n.rpartition('.')[0]}._extra_state": None for n in model if _has(n)}}
        for model in empty
    ]
    several = len(models) > 1
    content = {
        **{f"model{n}" if several else "model": model for n, model in enumerate(models)},
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


def _arguments(
    shape: ModelShape, layout: Layout, models: list[dict[str, torch.Tensor]], vpp: int, ep: int
) -> Namespace:
    """What Megatron-LM checks and what --use-checkpoint-args takes from a checkpoint."""
    rows = [m[name].shape[0] for m in models for name in (EMBEDDING, HEAD) if name in m]
    return Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp // vpp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_per_virtual_pipeline_stage=shape.num_layers // layout.pp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=layout.tp,
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
