"""Megatron-LM's per-rank checkpoints: mp_rank_TT[_PPP]/model_optim_rng.pt, one file per rank.

Each holds {"model": that rank's parameters, "args": argparse.Namespace, "checkpoint_version": 3.0}.
The layout comes from the folder names and from the layers that each file holds, the naming profile
("te", "te_grouped" or "local") from the names; `args` is for Megatron-LM and never read. Pickles
are untrusted: tensors, plain values and the few classes below load, the rest is refused by name.
Written by `legacy_write.py`. Left out, and refused: virtual pipeline stages, expert parallelism.
"""

import re
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import safe_globals

from megagrpo.types import Box, Layout, ModelShape
from megagrpo.weights.accounting import EXTRA_STATE, check_names, check_shapes
from megagrpo.weights.blobs import BROKEN, first_line
from megagrpo.weights.fused import stacked_box, stacked_shape, stored_key
from megagrpo.weights.rows import EMBEDDING, HEAD
from megagrpo.weights.safetensors_io import read_into
from megagrpo.weights.slices import (
    Part,
    extent,
    gather,
    index,
    intersect,
    translate,
    volume,
    whole,
)
from megagrpo.weights.table import fused_shape, local_shapes, placed_rows, rank_cuts

HF_DTYPES = "megagrpo_hf_dtypes"  # dtypes of tensors stored wider than they were, as noted
FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
GROUPED = re.compile(r"\.mlp\.experts\.linear_fc1\.weight\d+$")
FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")


class _Setting:
    """Stands for an enum of megatron's arguments, whose value nobody asks for."""

    def __init__(self, value: object) -> None:
        self.value = value


# numpy's share: the states of random number generators, which a training run saves beside "model".
ALLOWED: list[Any] = [
    Namespace,
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
    (np.zeros(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
    (np.zeros(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
    (_Setting, "megatron.core.transformer.enums.AttnBackend"),
    (_Setting, "megatron.core.enums.ModelType"),
]


def is_legacy(folder: Path) -> bool:
    """Whether the folder, or the iteration that its tracker file names, has per-rank folders."""
    return any(FOLDER.fullmatch(path.name) for path in _iteration(folder).glob("mp_rank_*"))


def _iteration(folder: Path) -> Path:
    """Where the rank folders are: the folder itself or what its tracker names."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    said = tracker.read_text().strip()
    if said != "release" and not said.isdigit():
        raise ValueError(f"{tracker} says {said!r}, neither 'release' nor a number")
    return folder / (said if said == "release" else f"iter_{int(said):07d}")


def rank_folder(tp_rank: int, pp_rank: int, pp: int) -> str:
    """Megatron-LM's name for one rank's folder."""
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")


class RankFile:
    """The parameters of one rank: where they lie in the file, read when asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = _content(path)
        tensors = _places(path, content)
        self.noted = noted_dtypes(content, path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._starts: dict[str, int] = {}
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"{path}: {name} is stored as a strided view; save it contiguous")
            begin = tensor.untyped_storage()._checkpoint_offset
            assert begin is not None, f"torch noted no place of {name} in {path}"
            self._starts[name] = begin + int(tensor.storage_offset()) * tensor.dtype.itemsize

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That region; full rows are read from the file."""
        shape, dtype = self.shapes[name], self.dtypes[name]
        row = volume(whole(shape[1:])) * dtype.itemsize
        rows = torch.empty((box[0][1] - box[0][0], *shape[1:]), dtype=dtype)
        read_into(rows, self._path, self._starts[name] + box[0][0] * row)
        return rows[(slice(None), *index(box[1:]))]


def noted_dtypes(content: object, path: Path) -> dict[str, torch.dtype]:
    """The dtypes that the converter noted in a loaded file; a file from elsewhere has none."""
    noted = content.get(HF_DTYPES, {}) if isinstance(content, dict) else {}
    if not isinstance(noted, dict) or not all(isinstance(d, torch.dtype) for d in noted.values()):
        raise ValueError(f"{path} is broken: {HF_DTYPES} holds no dtypes")
    return dict(noted)


def _content(path: Path) -> dict[str, Any]:
    """The file without the tensors' numbers; torch notes where in the file those are."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is cut off, or no file of torch.save since torch 1.6")
    try:
        with FakeTensorMode(), safe_globals(ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN as error:
        raise ValueError(f"{path} is refused: {_reason(error)}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        virtual = isinstance(content, dict) and "model0" in content
        what = "virtual pipeline stages (model0, ...)" if virtual else "no entry 'model'"
        raise ValueError(f"{path} has {what}; only a single model per rank is read")
    return content


def _places(path: Path, content: dict[str, Any]) -> dict[str, torch.Tensor]:
    named = content["model"].items()
    tensors = {name: value for name, value in named if not EXTRA_STATE.search(str(name))}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{path}: {name} is a {type(value).__name__}, no tensor")
    return tensors


def _reason(error: BaseException) -> str:
    """The class that torch refused, else the first line of its message."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if refused:
        return f"it refers to {refused.group(1)}, which is not allowed"
    return first_line(error)


class LegacyTensors:
    """Per-rank files as whole fused tensors, under the keys and with the methods of StoredTensors.

    Raises ValueError naming file or key if a rank is missing, if names or shapes are not the
    model's, or if something is not read here.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        home = _iteration(folder)
        self._files = rank_files(folder)
        self.noted = {name: d for file in self._files.values() for name, d in file.noted.items()}
        self.layout = _layout(home, self._files, shape)
        self.profile = _profile(self._files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[Part]] = {}
        self._at: dict[str, tuple[tuple[int, int], str]] = {}
        for rank in range(self.layout.world):
            self._add(shape, rank, home)

    def chunk_count(self, key: str) -> int:
        """In how many pieces a tensor is stored."""
        return len(self._parts[key])

    def row_cuts(self, key: str, place: tuple[int, ...]) -> set[int]:
        """First rows of the parts of the tensor at `place` (layer, expert) of a stored key."""
        dim = len(place)
        return {
            part.at[dim][0]
            for part in self._parts[key]
            if all(a <= at < b for at, (a, b) in zip(place, part.at, strict=False))
        }

    def read(self, key: str, box: Box) -> torch.Tensor:
        """That region of a stored tensor, contiguous, in the stored dtype."""
        return gather(box, self._parts[key], self._read_local, self.dtypes[key])

    def _read_local(self, place: str, box: Box) -> torch.Tensor:
        coords, name = self._at[place]
        rank = len(self._files[coords].shapes[name])
        region = self._files[coords].read(name, box[len(box) - rank :])
        return region.reshape(extent(box))

    def _add(self, shape: ModelShape, rank: int, home: Path) -> None:
        coords = self.layout.coordinates(rank)
        place = (coords.tp, coords.pp)
        file, where = self._files[place], f"{home / rank_folder(*place, self.layout.pp)}:"
        rows = next((file.shapes[name][0] for name in (EMBEDDING, HEAD) if name in file.shapes), 1)
        expected = local_shapes(shape, self.layout, coords, self.profile, multiple=rows)
        check_names(where, expected, file.shapes)
        check_shapes(where, expected, file.shapes)
        placed = placed_rows(shape, self.layout, coords, self.profile)
        for row, name, layer in placed:
            key, number = stored_key(row.megatron.format(i=layer), shape)
            full = fused_shape(shape, row)
            size = stacked_shape(shape, key, full)
            if self.shapes.setdefault(key, size) != size:
                raise ValueError(f"{where} {name} does not fit the other ranks")
            self.dtypes[key] = torch.promote_types(
                self.dtypes.get(key, file.dtypes[name]), file.dtypes[name]
            )
            if row.kind == "replicated" and coords.tp:
                self._check_copy(name, place)
                continue
            self._at[f"{rank}/{name}"] = (place, name)
            for fused, local in rank_cuts(shape, row, self.layout.tp, coords.tp, rows):
                inside = intersect(fused, whole(full))  # the rest is vocabulary padding
                if inside is not None:
                    source = translate(inside, fused, local)
                    one = stacked_box((0,) * len(number), source)
                    part = Part(stacked_box(number, inside), f"{rank}/{name}", one)
                    self._parts.setdefault(key, []).append(part)

    def _check_copy(self, name: str, place: tuple[int, int]) -> None:
        """A tensor that all tensor ranks hold must be the same on all of them."""
        first, file = self._files[0, place[1]], self._files[place]
        box = whole(file.shapes[name])
        one, other = first.read(name, box), file.read(name, box)
        if not one.view(torch.uint8).equal(other.view(torch.uint8)):
            raise ValueError(f"{name} of tensor rank {place[0]} differs from that of rank 0")


def rank_files(folder: Path) -> dict[tuple[int, int], RankFile]:
    """The parameters of every (tensor, pipeline) rank of a checkpoint folder."""
    folders = _rank_folders(_iteration(folder))
    return {place: RankFile(path / FILE) for place, path in folders.items()}


def _rank_folders(home: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for path in sorted(home.glob("mp_rank_*")):
        match = FOLDER.fullmatch(path.name)
        if match is None or match.group(3):
            raise ValueError(f"{path}: experts cut over ranks are not read; only mp_rank_TT[_PPP]")
        found[int(match.group(1)), int(match.group(2) or 0)] = path
    if not found:
        raise ValueError(f"{home} has no folders mp_rank_TT[_PPP]")
    return found


def _layout(home: Path, files: Mapping[tuple[int, int], RankFile], shape: ModelShape) -> Layout:
    tp, pp = (1 + max(place[axis] for place in files) for axis in (0, 1))
    for place in ((t, p) for t in range(tp) for p in range(pp)):
        if place not in files:
            raise ValueError(f"{home} lacks {rank_folder(*place, pp)}; other ranks are there")
    layer = re.compile(r"decoder\.layers\.(\d+)\.")
    counts = []
    for stage in range(pp):
        matches = [layer.match(name) for name in files[0, stage].shapes]
        counts.append(1 + max((int(m.group(1)) for m in matches if m), default=-1))
    if sum(counts) != shape.num_layers:
        raise ValueError(f"{home} holds {sum(counts)} layers, the config has {shape.num_layers}")
    if len(set(counts)) == 1:
        return Layout(world=tp * pp, tp=tp, pp=pp)
    if len(set(counts[1:-1])) > 1:
        raise ValueError(f"{home} has stages of {counts} layers; only the ends may differ")
    first, last = counts[0], counts[-1]
    return Layout(world=tp * pp, tp=tp, pp=pp, first_stage_layers=first, last_stage_layers=last)


def _profile(files: Mapping[tuple[int, int], RankFile]) -> str:
    names = [name for file in files.values() for name in file.shapes]
    if any(GROUPED.search(name) for name in names):
        return "te_grouped"
    return "te" if any(name.endswith(".layer_norm_weight") for name in names) else "local"
