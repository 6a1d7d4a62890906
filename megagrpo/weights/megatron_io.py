"""Megatron-Core distributed checkpoints under HuggingFace names.

A checkpoint holds the fused Megatron tensors of `table.py`; layers are stacked on a leading axis:
"decoder.layers.mlp.linear_fc2.weight" is [layers, hidden, ffn]. It has no layout: what was saved at
any TP and PP reads the same. The file format is in `torch_dist.py`; per-rank files of `legacy.py`
read the same way.
"""

import pickle
from pathlib import Path

import torch

from megagrpo.types import Box, ModelShape, TensorInfo
from megagrpo.weights.accounting import EXTRA_STATE, check_names
from megagrpo.weights.arrays import inside_of
from megagrpo.weights.blobs import BROKEN, first_line
from megagrpo.weights.fused import (
    fused_rows,
    fused_slices,
    local_keys,
    stacked_box,
    stacked_shape,
    stored_key,
)
from megagrpo.weights.legacy import LegacyTensors
from megagrpo.weights.legacy_file import is_legacy, iteration, noted_dtypes
from megagrpo.weights.rows import HEAD, HEAD_ROW, HF_HEAD
from megagrpo.weights.slices import Slice, extent, from_megatron, intersect, translate, whole
from megagrpo.weights.table import fused_shape, hf_manifest
from megagrpo.weights.torch_dist import StoredTensors

LAYERS = "decoder.layers."


def open_stored(folder: Path, shape: ModelShape) -> StoredTensors | LegacyTensors:
    """The whole fused tensors of a checkpoint of either format."""
    if is_legacy(folder):
        return LegacyTensors(folder, shape)
    home = iteration(folder)
    if not (home / ".metadata").is_file() and any(home.glob("*.safetensors")):
        raise ValueError(f"{folder} is a HuggingFace folder, no Megatron checkpoint")
    return StoredTensors(home)


class MegatronSource:
    """TensorSource over a checkpoint folder under HuggingFace names, saved from any layout.

    Raises ValueError if the model keys do not fit `shape` (missing and unknown ones listed;
    optimizer state and `_extra_state` are not model keys). Vocabulary padding is cut off. A stored
    head of a tied model is listed too, so that the caller can compare it with the embedding.
    """

    def __init__(self, folder: str | Path, shape: ModelShape) -> None:
        self.stored = open_stored(Path(folder), shape)
        self._shape, self._local = shape, local_keys(shape)
        self._keys: dict[str, tuple[str, tuple[int, ...]]] = {}
        fused = fused_rows(shape)
        slices = fused_slices(shape)
        manifest = hf_manifest(shape, shape.dtype)
        if shape.tied and HEAD in self.stored.shapes:
            fused.append((HEAD, HEAD_ROW))
            full = whole(fused_shape(shape, HEAD_ROW))
            slices.append(Slice(HF_HEAD, full, HEAD, full))
            manifest.append(TensorInfo(HF_HEAD, fused_shape(shape, HEAD_ROW), shape.dtype))
        keys = [key for key in self.stored.shapes if not EXTRA_STATE.search(key)]
        check_names(f"{folder}", {self._key(name)[0] for name, _ in fused}, keys)
        for name, row in fused:
            self._check_shape(name, fused_shape(shape, row), row.kind == "vocab")
        by_hf: dict[str, list[Slice]] = {}
        for piece in slices:
            by_hf.setdefault(piece.hf, []).append(piece)
        self._parts = {name: from_megatron(pieces) for name, pieces in by_hf.items()}
        narrow = (
            self.stored.noted
            if isinstance(self.stored, LegacyTensors)
            else _recorded_dtypes(iteration(Path(folder)))
        )
        self._infos = {
            info.name: TensorInfo(
                info.name, info.shape, narrow.get(info.name, self._stored_dtype(info.name))
            )
            for info in manifest
        }

    def tensors(self) -> list[TensorInfo]:
        """Every tensor of the model in HuggingFace order, in the dtype it came with."""
        return list(self._infos.values())

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That region of a HuggingFace tensor, contiguous, on CPU."""
        if name not in self._infos:
            raise KeyError(f"the checkpoint has no tensor {name}")
        result = torch.empty(extent(box), dtype=self._infos[name].dtype)
        self.fill_(result, name, box)
        return result

    def fill_(self, out: torch.Tensor, name: str, box: Box) -> None:
        """Copy that region of a HuggingFace tensor into `out`, cast to its dtype."""
        for part in self._parts[name]:
            common = intersect(box, part.at)
            if common is not None:
                source = translate(common, part.at, part.box)
                self._fill_fused_(inside_of(out, box, common), part.name, source)

    def read_fused(self, name: str, box: Box) -> torch.Tensor:
        """That region of a fused Megatron tensor, in the stored dtype."""
        result = torch.empty(extent(box), dtype=self.fused_dtype(name))
        self._fill_fused_(result, name, box)
        return result

    def fused_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a fused Megatron tensor is stored."""
        return self.stored.dtypes[self._key(name)[0]]

    def _fill_fused_(self, out: torch.Tensor, name: str, box: Box) -> None:
        key, place = self._key(name)
        self.stored.fill_(out[(None,) * len(place)], key, stacked_box(place, box))

    def _key(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(key of this checkpoint, place in it) of a fused tensor.

        A run with megatron-core's `hetereogenous_dist_checkpoint` or `non_homogeneous_layers` keeps
        a key per layer where others stack the layers.
        """
        if name not in self._keys:
            key, place = stored_key(name, self._shape)
            kept = self.kept(key)
            if place and kept not in self.stored.shapes and kept.startswith(LAYERS):
                single = f"{LAYERS}{place[0]}.{key.removeprefix(LAYERS)}"
                other = f"{LAYERS}{place[0]}.{self._local.get(key, key).removeprefix(LAYERS)}"
                for candidate in (single, other):
                    if candidate in self.stored.shapes:
                        kept, place = candidate, place[1:]
                        break
            self._keys[name] = kept, place
        return self._keys[name]

    def kept(self, key: str) -> str:
        """The name under which this checkpoint keeps a stored key."""
        return key if key in self.stored.shapes else self._local.get(key, key)

    def _stored_dtype(self, hf: str) -> torch.dtype:
        return self.fused_dtype(self._parts[hf][0].name)

    def _check_shape(self, name: str, full: tuple[int, ...], vocab: bool) -> None:
        key, place = self._key(name)
        found, stacked = self.stored.shapes[key], self.kept(stored_key(name, self._shape)[0])
        expected = stacked_shape(self._shape, stacked, full)
        expected = expected[len(expected) - len(full) - len(place) :]
        more = vocab and found[0] > expected[0] and found[1:] == expected[1:]
        if found != expected and not more:
            raise ValueError(f"{key} has shape {list(found)}, expected {list(expected)}")


def _recorded_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Dtypes that the converter noted; a checkpoint from elsewhere has none."""
    path = folder / "common.pt"
    if not path.is_file():
        return {}
    try:
        common = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        return {}  # objects of a training run: not ours, and never unpickled here
    except BROKEN as error:
        raise ValueError(f"{path} is broken: {first_line(error)}") from None
    return noted_dtypes(common, path)
