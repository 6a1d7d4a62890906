"""The `torch_dist` file format of Megatron-Core, read without megatron.

It is torch's distributed checkpoint: `.metadata` (a pickle of names, sizes and chunks), `*.distcp`
(one blob per chunk, see `blobs.py`), and Megatron's own `metadata.json` and `common.pt`. Pickles
are untrusted (`dist_metadata.py`). Written by `torch_dist_write.py`. Left out: what the keys mean
(`megatron_io.py`), reading objects, optimizer state, and legacy per-rank files.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megagrpo.types import Box
from megagrpo.weights.arrays import ArrayReader, BoxIndex, StoredArray, inside_of
from megagrpo.weights.blobs import BlobReader
from megagrpo.weights.dist_metadata import read_metadata
from megagrpo.weights.slices import cast, check_cover, extent, index, translate, whole

# Other state of a training checkpoint: never model weights, by exact prefix.
OTHER_STATE = re.compile(r"^(chained_\d+\.)?optimizer\.|^rng_state|^rerun_state_machine_state")


@dataclass(frozen=True, eq=False)  # each is its own key
class _Chunk:
    """A stored box and where its blob lies."""

    box: Box
    path: Path
    offset: int  # bytes
    length: int  # bytes


class StoredTensors:
    """Every tensor of a `torch_dist` folder under its stored key, read box by box.

    Raises ValueError naming file or key if the folder is incomplete, a class is not allowed, or the
    chunks of a tensor do not cover it exactly once. Only the bytes of the box are read, full rows
    of chunks, as long as blobs are as torch writes them.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        metadata = read_metadata(self._folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._chunks: dict[str, BoxIndex[_Chunk]] = {}
        self._paths: dict[str, Path] = {}  # one object for every file
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not OTHER_STATE.match(key):
                self._add(key, entry, metadata.storage_data)
        self.arrays = ArrayReader()
        self._blobs = BlobReader(self.arrays)
        self._found: dict[_Chunk, StoredArray] = {}
        self._odd: tuple[_Chunk, torch.Tensor] | None = None  # the last one not in row-major order

    def fill_(self, out: torch.Tensor, key: str, box: Box) -> None:
        """Copy that region of a stored tensor into `out`, cast to its dtype."""
        for common, _, chunk in self._chunks[key].meeting(box):
            target = inside_of(out, box, common)
            inside = translate(common, chunk.box, whole(extent(chunk.box)))
            found = self._find(key, chunk)
            if isinstance(found, StoredArray):
                self.arrays.fill_(target, found, inside, key)
            else:
                target.copy_(cast(found[index(inside)], out.dtype, key))

    def read(self, key: str, box: Box) -> torch.Tensor:
        """That region of a stored tensor, in the stored dtype."""
        result = torch.empty(extent(box), dtype=self.dtypes[key])
        self.fill_(result, key, box)
        return result

    def chunk_count(self, key: str) -> int:
        """In how many pieces a tensor is stored."""
        return len(self._chunks[key])

    def _find(self, key: str, chunk: _Chunk) -> StoredArray | torch.Tensor:
        if chunk in self._found:
            return self._found[chunk]
        if self._odd is not None and self._odd[0] is chunk:
            return self._odd[1]
        self._odd = None  # at most one is held
        found = self._blobs.find(chunk.path, chunk.offset, chunk.length)
        if tuple(found.shape) != extent(chunk.box) or found.dtype != self.dtypes[key]:
            expected = f"{self.dtypes[key]} of {extent(chunk.box)}"
            raise ValueError(f"{chunk.path}: blob at {chunk.offset} is no {expected}")
        if isinstance(found, StoredArray):
            self._found[chunk] = found
        else:
            self._odd = (chunk, found)
        return found

    def _add(self, key: str, entry: TensorStorageMetadata, storage: dict[Any, Any]) -> None:
        self.shapes[key] = tuple(entry.size)
        self.dtypes[key] = entry.properties.dtype
        chunks: list[_Chunk] = []
        for stored in entry.chunks:
            where = storage.get(MetadataIndex(key, stored.offsets))
            if where is None:
                raise ValueError(f"{self._folder}: {key} has no data at {list(stored.offsets)}")
            if Path(where.relative_path).name != where.relative_path:
                raise ValueError(f"{self._folder}: {where.relative_path!r} is no plain file name")
            pairs = zip(stored.offsets, stored.sizes, strict=True)
            box = tuple((start, start + size) for start, size in pairs)
            name = where.relative_path
            path = self._paths.setdefault(name, self._folder / name)
            chunks.append(_Chunk(box, path, where.offset, where.length))
        check_cover(whole(entry.size), [chunk.box for chunk in chunks], f"{self._folder}: {key}")
        self._chunks[key] = BoxIndex([(chunk.box, chunk) for chunk in chunks])
