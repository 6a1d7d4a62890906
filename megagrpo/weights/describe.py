"""What a checkpoint folder holds and what a conversion would do, as lines of text.

Reads headers and metadata, never a weight. Left out: whether the weights fit a config; converting
and verifying check that.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from megagrpo.types import Layout, ModelShape
from megagrpo.weights.accounting import valid_boxes
from megagrpo.weights.fused import fused_rows, stacked_shape, stored_boxes, stored_key
from megagrpo.weights.legacy_file import FILE, is_legacy, iteration, rank_files, rank_folder, sizes
from megagrpo.weights.rows import rows
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.slices import volume, whole
from megagrpo.weights.table import PAD_MULTIPLE, fused_shape, local_shapes
from megagrpo.weights.torch_dist import StoredTensors

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
RANK = re.compile(r"mp_rank_\d+(_\d+)*")


@dataclass(frozen=True)
class Entry:
    """One tensor of a folder."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: int = 1

    @property
    def nbytes(self) -> int:
        """Size of its numbers."""
        return volume(whole(self.shape)) * self.dtype.itemsize


def size(nbytes: int) -> str:
    """Bytes for people: 1234567 is "1.23 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


def inspect(folder: Path, every_key: bool = False) -> list[str]:
    """Kind, totals and tensors of a HuggingFace folder or a Megatron checkpoint.

    Tensors that differ by layer only share a line unless `every_key`. Raises ValueError if the
    folder is neither.
    """
    home = iteration(folder)
    if (home / ".metadata").is_file() or (home / "metadata.json").is_file():
        stored = StoredTensors(home)
        entries = [
            Entry(key, shape, stored.dtypes[key], stored.chunk_count(key))
            for key, shape in stored.shapes.items()
        ]
        files = sorted(path.name for path in home.glob("*.distcp"))
        return _report("Megatron-Core torch_dist checkpoint", folder, entries, files, every_key)
    if is_legacy(folder):
        ranks = rank_files(folder)
        tp, pp, ep = sizes(ranks)
        names = {rank: rank_folder(rank, pp, ep) for rank in ranks}
        entries = [
            Entry(f"{names[rank]}: {name}", array.shape, array.dtype)
            for rank, file in ranks.items()
            for name, array in file.tensors()
        ]
        kind = f"Megatron-LM per-rank checkpoint, tp {tp} pp {pp}"
        vpp = max(len(file.models) for file in ranks.values())
        kind += f" vpp {vpp}" * (vpp > 1) + f" ep {ep}" * (ep > 1)
        files = [f"{name}/{FILE}" for name in names.values()]
        return _report(kind, folder, entries, files, every_key)
    if not any(folder.glob("*.safetensors*")):
        raise ValueError(
            f"{folder} is no checkpoint: it holds neither .metadata (torch_dist) nor mp_rank_* "
            "(per rank) nor .safetensors (HuggingFace)"
        )
    entries = [Entry(info.name, info.shape, info.dtype) for info in HFSource(folder).tensors()]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    return _report("HuggingFace folder", folder, entries, files, every_key)


def _report(
    kind: str, folder: Path, entries: list[Entry], files: list[str], every_key: bool
) -> list[str]:
    total = sum(entry.nbytes for entry in entries)
    dtypes = sorted({_name(entry.dtype) for entry in entries})
    lines = [
        f"{folder}: {kind}",
        f"{len(entries)} tensors, {size(total)}, {', '.join(dtypes)}, in {len(files)} files "
        f"({', '.join(files[:4])}{', ...' if len(files) > 4 else ''})",
    ]
    groups: dict[tuple[str, tuple[int, ...], torch.dtype, int], list[Entry]] = {}
    for entry in sorted(entries, key=_order):
        shared = RANK.sub("mp_rank_*", NUMBER.sub("*", entry.name))
        name = entry.name if every_key else shared
        groups.setdefault((name, entry.shape, entry.dtype, entry.chunks), []).append(entry)
    for (name, *_), group in groups.items():
        first = group[0]
        times = f"  x {len(group)}" if len(group) > 1 else ""
        pieces = f"  in {first.chunks} pieces" if first.chunks > 1 else ""
        lines.append(
            f"  {name}  {list(first.shape)}  {_name(first.dtype)}  {size(first.nbytes)}"
            f"{pieces}{times}"
        )
    return lines


def _order(entry: Entry) -> list[tuple[int, str]]:
    """By name, numbers by their value: layer 2 before layer 10."""
    parts = re.split(r"(\d+)", entry.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _shared(name: str) -> str:
    return NUMBER.sub("*", name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan(shape: ModelShape, layout: Layout | None = None) -> list[str]:
    """Which stored tensor is made of which HuggingFace tensors; with a layout also what every rank
    gets of it, in the config's dtype. Raises ValueError if the model cannot be cut that way."""
    lines = [f"{shape.architecture}, {shape.num_layers} layers, {_name(shape.dtype)}"]
    keys: dict[str, set[str]] = {}  # stored keys of all layers and experts
    for name, _ in fused_rows(shape):
        keys.setdefault(_shared(name), set()).add(stored_key(name, shape)[0])
    for name, row in fused_rows(shape):
        alike = keys.pop(_shared(name), None)
        if alike is None:
            continue  # the first layer and expert speak for all
        key, place = stored_key(name, shape)
        stacked = stacked_shape(shape, key, fused_shape(shape, row))
        pieces = len(stored_boxes(shape, row))
        each = " an expert" if ".local_experts." in name else " a layer" * len(place)
        times = f"  x {len(alike)}" if len(alike) > 1 else ""
        lines += [
            f"  {_shared(key)}  {list(stacked)}  "
            f"{size(volume(whole(stacked)) * shape.dtype.itemsize)}{times}",
            f"    {row.kind}, {pieces} piece{'s' if pieces > 1 else ''}{each}, from "
            f"{', '.join(_shared(source.format(i='*')) for source in row.hf)}",
        ]
    return lines + ([] if layout is None else list(_ranks(shape, layout)))


def _ranks(shape: ModelShape, layout: Layout) -> Iterable[str]:
    stages = layout.stage_layers(shape.num_layers)
    kinds = {row.megatron: row.kind for row in rows(shape, layout.pp)}
    for rank in range(layout.tp * layout.pp):
        coords = Layout(world=layout.tp * layout.pp, tp=layout.tp, pp=layout.pp).coordinates(rank)
        shapes = local_shapes(shape, layout, coords, "te")
        nbytes = sum(volume(whole(full)) for full in shapes.values()) * shape.dtype.itemsize
        start, stop = stages[coords.pp]
        yield (
            f"tp {coords.tp} pp {coords.pp}: layers {start} to {stop - 1}, {len(shapes)} tensors, "
            f"{size(nbytes)}"
        )
        if coords.tp == 0:
            filled = valid_boxes(shape, shapes, coords.tp)
            seen: set[str] = set()
            for name, full in shapes.items():
                if _shared(name) not in seen:  # the first layer and expert speak for all
                    seen.add(_shared(name))
                    kind = kinds[NUMBER.sub("{i}", name, count=1)]
                    of = f", vocabulary padded to a multiple of {PAD_MULTIPLE}" * (name in filled)
                    yield f"    {name}  {list(full)}  {kind}{of}"
