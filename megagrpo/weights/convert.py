"""Converts checkpoint folders and fills the parameters of one rank.

Everything walks the slices of `table.py`; nothing needs a process group, a model or megatron.
`hf_to_megatron` and `megatron_to_hf` work on folders: what goes where is planned from headers, then
`workers.py` moves the numbers. `load_rank_` and `load_local_` work on parameters. Left out: reading
configs (the caller passes a `ModelShape`), comparing (`verify.py`), optimizer state.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from megagrpo.types import Coordinates, Layout, ModelShape, TensorInfo, TensorSource
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
from megagrpo.weights.legacy_file import HF_DTYPES
from megagrpo.weights.legacy_write import LegacyWriter, with_virtual_stages
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.moves import Job, Place, collector_paused
from megagrpo.weights.rows import EMBEDDING, HEAD
from megagrpo.weights.safetensors_io import HFFolder
from megagrpo.weights.slices import (
    Part,
    Slice,
    by_megatron,
    from_hf,
    index,
    uncovered,
    volume,
    whole,
)
from megagrpo.weights.summary import Summary, summarize
from megagrpo.weights.table import PAD_MULTIPLE, expand, fused_shape, local_shapes
from megagrpo.weights.torch_dist_write import TorchDistWriter
from megagrpo.weights.verify import check_source
from megagrpo.weights.workers import Progress, run_jobs


def unseen(done: int, total: int) -> None:
    """A Progress that nobody looks at."""


@collector_paused()
def hf_to_megatron(
    hf: Path,
    out: Path,
    shape: ModelShape,
    dtype: torch.dtype | None = None,
    progress: Progress = unseen,
    *,
    profile: str = "te",
    legacy: Layout | None = None,
    vpp: int = 1,
    ep: int = 1,
    workers: int = 1,
) -> Summary:
    """Write `out`, a torch_dist checkpoint (per-rank files for the layout `legacy`, each of `vpp`
    virtual stages, experts over `ep` ranks), from the HuggingFace folder `hf`; side files go to
    out/hf.

    `profile` names parameters as the layers that will load them: of Transformer Engine ("te",
    "te_grouped") or of megatron-core ("local"); in torch_dist it matters to models with experts.
    Every tensor keeps its dtype unless `dtype` is given: a fused tensor is stored in a dtype that
    holds all of its parts exactly, and parts that were narrower are noted. Raises ValueError before
    anything is written if the source does not fit `shape`.
    """
    source = open_hf(hf, shape)
    stages = None if legacy is None else with_virtual_stages(shape, legacy, vpp, ep)
    if stages is not None:
        check_layout(shape, stages, profile)
    check_layout(shape, FUSED[0], "te", multiple=1)
    infos = {info.name: info for info in check_source(source, shape)}
    parts = by_megatron(fused_slices(shape))
    wanted = {name: dtype or info.dtype for name, info in infos.items()}
    dtypes, noted = _stored_dtypes(shape, parts, wanted)
    with staged(out, hf) as folder:
        if stages is None:
            writer = TorchDistWriter(folder)
            places = _torch_dist_places(writer, shape, dtypes, profile)
        else:
            ranks = LegacyWriter(folder, shape, stages, profile, dtypes, vpp=vpp, ep=ep)
            ranks.create({HF_DTYPES: noted})
            places = ranks.places
        jobs = [
            Job(name, fused_shape(shape, row), dtypes[key], from_hf(parts[name]), places[name])
            for name, row in fused_rows(shape)
            for key, _ in (stored_key(name, shape),)
        ]
        nans = run_jobs(jobs, source, workers, progress)
        files = copy_side_files(hf, folder / "hf", dtype)
        if stages is None:
            content = {"singleton_local_shards": False}
            writer.close({HF_DTYPES: dict(noted), "content_metadata": content})
        else:
            ranks.close()
    left_out = {info.name for info in source.tensors()} - set(infos)
    return summarize(list(infos.values()), dtype, left_out, files, nans)


@collector_paused()
def megatron_to_hf(
    megatron: Path,
    out: Path,
    shape: ModelShape,
    template: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress = unseen,
    *,
    workers: int = 1,
) -> Summary:
    """Write `out`, a HuggingFace folder, from the checkpoint `megatron` of either format; side
    files come from the folder `template`, which needs no weights; it may be a config file alone.

    Tensors keep the dtype that they came with unless `dtype` is given. Raises ValueError before
    anything is written if the checkpoint does not fit `shape`.
    """
    source = MegatronSource(megatron, shape)
    infos = check_source(source, shape)
    planned = [TensorInfo(info.name, info.shape, dtype or info.dtype) for info in infos]
    with staged(out, megatron, template) as folder:
        writer = HFFolder(folder, planned, shard_bytes)
        writer.create()
        jobs = []
        for info in planned:
            full = whole(info.shape)
            place = Place(full, *writer.places[info.name])
            part = Part(full, info.name, full)
            jobs.append(Job(info.name, info.shape, info.dtype, [part], [place]))
        nans = run_jobs(jobs, source, workers, progress)
        files = copy_side_files(template, folder, dtype)
        writer.close()
    left_out = {info.name for info in source.tensors()} - {info.name for info in infos}
    return summarize(infos, dtype, left_out, files, nans)


def _torch_dist_places(
    writer: TorchDistWriter, shape: ModelShape, dtypes: Mapping[str, torch.dtype], profile: str
) -> dict[str, list[Place]]:
    """The stored pieces of every fused tensor."""
    local, places = local_keys(shape), {}
    for name, row in fused_rows(shape):
        key, place = stored_key(name, shape)
        full = stacked_shape(shape, key, fused_shape(shape, row))
        kept = local.get(key, key) if profile == "local" else key
        places[name] = [
            Place(box, *writer.place(kept, full, stacked_box(place, box), dtypes[key]))
            for box in stored_boxes(shape, row)
        ]
    for module, counts in empty_states(shape):
        writer.write_empty_states(module, counts)
    return places


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
