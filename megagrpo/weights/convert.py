"""Converts checkpoint folders and fills the parameters of one rank, one tensor at a time.

Everything walks the slices of `table.py`; nothing needs a process group, a model or megatron.
`hf_to_megatron` and `megatron_to_hf` work on folders, `load_rank_` and `load_local_` on parameters.
Left out: reading configs (the caller passes a `ModelShape`), comparing (`verify.py`), optimizer
state.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megagrpo.types import Box, Coordinates, Layout, ModelShape, TensorInfo, TensorSource
from megagrpo.weights.accounting import check_layout, check_names, check_shapes, valid_boxes
from megagrpo.weights.experts import open_hf
from megagrpo.weights.folders import copy_side_files, staged
from megagrpo.weights.fused import (
    FUSED,
    empty_states,
    fused_rows,
    fused_slices,
    local_keys,
    stacked_box,
    stacked_shape,
    stored_boxes,
    stored_key,
)
from megagrpo.weights.legacy import HF_DTYPES
from megagrpo.weights.legacy_write import write_legacy
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.rows import EMBEDDING, HEAD, Row
from megagrpo.weights.safetensors_io import HFWriter
from megagrpo.weights.slices import (
    Part,
    Slice,
    by_megatron,
    cast,
    extent,
    from_hf,
    gather,
    index,
    uncovered,
    volume,
    whole,
)
from megagrpo.weights.summary import Summary, count_nans, size_of, summarize
from megagrpo.weights.table import PAD_MULTIPLE, expand, fused_shape, local_shapes
from megagrpo.weights.torch_dist import TorchDistWriter
from megagrpo.weights.verify import check_source

BLOCK_BYTES = 1 << 20  # rows written at a time: small enough to stay in the processor's cache
Progress = Callable[[int, int], object]
"""progress(bytes done, bytes in all) is called after every piece that was written."""


def unseen(done: int, total: int) -> None:
    """A Progress that nobody looks at."""


def hf_to_megatron(
    hf: Path,
    out: Path,
    shape: ModelShape,
    dtype: torch.dtype | None = None,
    progress: Progress = unseen,
    *,
    profile: str = "te",
    legacy: Layout | None = None,
) -> Summary:
    """Write `out`, a torch_dist checkpoint (per-rank files for the layout `legacy`), from the
    HuggingFace folder `hf`; side files go to out/hf.

    `profile` names parameters as the layers that will load them: of Transformer Engine ("te",
    "te_grouped") or of megatron-core ("local"); in torch_dist it matters to models with experts.
    Every tensor keeps its dtype unless `dtype` is given: a fused tensor is stored in a dtype that
    holds all of its parts exactly, and parts that were narrower are noted. Raises ValueError before
    anything is written if the source does not fit `shape`.
    """
    source = open_hf(hf, shape)
    if legacy is not None:
        check_layout(shape, legacy, profile)
    check_layout(shape, FUSED[0], "te", multiple=1)
    infos = {info.name: info for info in check_source(source, shape)}
    parts = by_megatron(fused_slices(shape))
    wanted = {name: dtype or info.dtype for name, info in infos.items()}
    dtypes, noted = _stored_dtypes(shape, parts, wanted)
    done, nans, total = 0, 0, sum(size_of(i, wanted[i.name]) for i in infos.values())
    with staged(out, hf) as folder:
        if legacy is None:
            written = _write_torch_dist(folder, source, shape, dtypes, noted, profile)
        else:
            written = write_legacy(
                folder,
                source,
                shape,
                legacy,
                profile=profile,
                dtypes=dtypes,
                extra={HF_DTYPES: noted},
            )
        for piece in written:
            done, nans = done + piece.nbytes, nans + count_nans(piece)
            progress(done, max(done, total))
        files = copy_side_files(hf, folder / "hf", dtype)
    left_out = {info.name for info in source.tensors()} - set(infos)
    return summarize(list(infos.values()), dtype, left_out, files, nans)


def megatron_to_hf(
    megatron: Path,
    out: Path,
    shape: ModelShape,
    template: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress = unseen,
) -> Summary:
    """Write `out`, a HuggingFace folder, from the torch_dist checkpoint `megatron`; side files come
    from the folder `template`, which needs no weights; it may be a config file alone.

    Tensors keep the dtype that they came with unless `dtype` is given. Raises ValueError before
    anything is written if the checkpoint does not fit `shape`.
    """
    source = MegatronSource(megatron, shape)
    infos = check_source(source, shape)
    planned = [TensorInfo(info.name, info.shape, dtype or info.dtype) for info in infos]
    done, nans, total = 0, 0, sum(size_of(info, info.dtype) for info in planned)
    with staged(out, megatron, template) as folder:
        writer = HFWriter(folder, planned, shard_bytes)
        for info in planned:
            for block in source.row_blocks(info.name, BLOCK_BYTES):
                rows = cast(source.read(info.name, block), info.dtype, info.name)
                writer.write(info.name, rows)
                done, nans = done + rows.nbytes, nans + count_nans(rows)
                progress(done, total)
        writer.close()
        files = copy_side_files(template, folder, dtype)
    left_out = {info.name for info in source.tensors()} - {info.name for info in infos}
    return summarize(infos, dtype, left_out, files, nans)


def _write_torch_dist(
    folder: Path,
    source: TensorSource,
    shape: ModelShape,
    dtypes: Mapping[str, torch.dtype],
    noted: Mapping[str, torch.dtype],
    profile: str,
) -> Iterator[torch.Tensor]:
    """Write the checkpoint, yielding every piece that was written."""
    parts = by_megatron(fused_slices(shape))
    writer, local = TorchDistWriter(folder), local_keys(shape)
    for name, row in fused_rows(shape):
        key, place = stored_key(name, shape)
        full = stacked_shape(shape, key, fused_shape(shape, row))
        kept = local.get(key, key) if profile == "local" else key
        for box, tensor in _pieces(row, shape, from_hf(parts[name]), source, dtypes[key]):
            stacked = stacked_box(place, box)
            writer.write(kept, full, stacked, tensor.view(extent(stacked)))
            yield tensor
    for module, counts in empty_states(shape):
        writer.write_empty_states(module, counts)
    writer.close({HF_DTYPES: dict(noted), "content_metadata": {"singleton_local_shards": False}})


def _pieces(
    row: Row, shape: ModelShape, parts: Sequence[Part], source: TensorSource, dtype: torch.dtype
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The fused tensor as it is stored. Columns are cut from the whole tensor, since a file that is
    stored by rows is read in full for every stretch of columns."""
    if row.kind == "row":
        tensor = gather(whole(fused_shape(shape, row)), parts, source.read, dtype)
        yield from ((box, tensor[index(box)]) for box in stored_boxes(shape, row))
        return
    for box in stored_boxes(shape, row):
        yield box, gather(box, parts, source.read, dtype)


def _stored_dtypes(
    shape: ModelShape, parts: Mapping[str, list[Slice]], wanted: Mapping[str, torch.dtype]
) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """(dtype of every stored key, HuggingFace tensors that are stored wider than they are): a key
    has one dtype, which must hold all of its parts exactly."""
    held: dict[str, set[str]] = {}
    for name, pieces in parts.items():
        held.setdefault(stored_key(name, shape)[0], set()).update(piece.hf for piece in pieces)
    stored: dict[str, torch.dtype] = {}
    noted: dict[str, torch.dtype] = {}
    for key, names in held.items():
        first, *others = sorted(names)
        stored[key] = wanted[first]
        for name in others:
            stored[key] = torch.promote_types(stored[key], wanted[name])
        noted |= {name: wanted[name] for name in names if wanted[name] != stored[key]}
    return stored, noted


def load_rank_(
    named_parameters: Mapping[str, torch.Tensor],
    source: TensorSource,
    shape: ModelShape,
    layout: Layout,
    coords: Coordinates,
    profile: str = "local",
    *,
    multiple: int = PAD_MULTIPLE,
) -> None:
    """Fill all parameters of one rank's GPTModel, in place; names and shapes are checked first.

    Raises ValueError naming the parameter whose name or shape is not the table's, as `check_source`
    for a source that does not fit the model, else as `load_local_`.
    """
    shapes = local_shapes(shape, layout, coords, profile, multiple=multiple)
    check_names("Megatron parameter", shapes, named_parameters)
    check_shapes(
        "Megatron parameter", shapes, {n: tuple(p.shape) for n, p in named_parameters.items()}
    )
    filled = valid_boxes(shape, shapes, coords.tp)
    padding_only = [name for name, box in filled.items() if volume(box) == 0]
    check_source(source, shape)
    slices = expand(shape, layout, coords, profile, multiple=multiple)
    load_local_(named_parameters, source, slices, padding_only=padding_only)


@torch.no_grad()
def load_local_(
    named_parameters: Mapping[str, torch.Tensor],
    source: TensorSource,
    slices: Sequence[Slice],
    *,
    padding_only: Collection[str] = (),
) -> None:
    """Fill a rank's Megatron parameters, in place, from the HuggingFace tensors of `source`.

    `named_parameters` carry the names of `slices` (from `expand`) and may have any float dtype and
    device. Vocabulary padding rows become zero; `padding_only` names parameters that are nothing
    but padding on this rank. Raises ValueError naming the tensor if a parameter has no slices, a
    slice no parameter, an element is not covered, or the source lacks a tensor.
    """
    by_name: dict[str, list[Slice]] = {name: [] for name in padding_only} | by_megatron(slices)
    check_names("Megatron parameter", by_name, named_parameters)
    infos = {info.name for info in source.tensors()}
    for name, parameter in named_parameters.items():
        parts = from_hf(by_name[name])
        rest = uncovered(whole(parameter.shape), [part.at for part in parts])
        if rest and name not in (EMBEDDING, HEAD):
            raise ValueError(f"{name}: box {rest[0]} is not covered by the table")
        for box in rest:
            parameter[index(box)] = 0
        for part in parts:
            if part.name not in infos:
                raise ValueError(f"{name} needs {part.name}, which the source does not hold")
            parameter[index(part.at)].copy_(source.read(part.name, part.box))
