"""The `torch_dist` file format of Megatron-Core, read and written without megatron.

It is torch's distributed checkpoint: `.metadata` (a pickle of names, sizes and chunks), `*.distcp`
(one blob per chunk, see `blobs.py`), and Megatron's own `metadata.json` and `common.pt`. Pickles
are untrusted (`dist_metadata.py`). Left out: what the keys mean (`megatron_io.py`), reading
objects, optimizer state, and legacy per-rank files.
"""

import io
import itertools
import json
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # torch 2.x: DCP pickles this one
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megagrpo.types import Box
from megagrpo.weights.blobs import BlobReader, frame
from megagrpo.weights.dist_metadata import read_metadata
from megagrpo.weights.slices import (
    check_cover,
    corner,
    extent,
    index,
    intersect,
    translate,
    volume,
    whole,
)

# Other state of a training checkpoint: never model weights, by exact prefix.
OTHER_STATE = re.compile(r"^(chained_\d+\.)?optimizer\.|^rng_state|^rerun_state_machine_state")


@dataclass(frozen=True, eq=False)  # each is its own key in the cache
class _Chunk:
    """A stored box and where its blob lies."""

    box: Box
    file: str
    offset: int  # bytes
    length: int  # bytes


class StoredTensors:
    """Every tensor of a `torch_dist` folder under its stored key, read box by box.

    Raises ValueError naming file or key if the folder is incomplete, a class is not allowed, or the
    chunks of a tensor do not cover it exactly once. `cache_bytes` bounds the blobs kept, None keeps
    the largest chunk or layer of a stacked tensor: q, k and v come out of one fused tensor.
    """

    def __init__(self, folder: str | Path, cache_bytes: int | None = None) -> None:
        self._folder = Path(folder)
        metadata = read_metadata(self._folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._chunks: dict[str, dict[tuple[int, int], list[_Chunk]]] = {}  # by rows they hold
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not OTHER_STATE.match(key):
                self._add(key, entry, metadata.storage_data)
        self._cache_limit = self._largest() if cache_bytes is None else cache_bytes
        self._blobs = BlobReader()
        self._cached = 0  # bytes
        self._cache: OrderedDict[_Chunk, torch.Tensor] = OrderedDict()

    def read(self, key: str, box: Box) -> torch.Tensor:
        """That region of a stored tensor in the stored dtype, not to be written to: where one blob
        holds it all, it is a view of that."""
        found = []
        for (start, stop), chunks in self._chunks[key].items():
            if start < box[0][1] and box[0][0] < stop:
                found += [(chunk, intersect(box, chunk.box)) for chunk in chunks]
        parts = [(chunk, common) for chunk, common in found if common is not None]
        if len(parts) == 1 and parts[0][1] == box:
            return self._inside(*parts[0])
        result = torch.empty(extent(box), dtype=self.dtypes[key])
        for chunk, common in parts:
            place = translate(common, box, whole(extent(box)))
            result[index(place)] = self._inside(chunk, common)
        return result

    def chunk_count(self, key: str) -> int:
        """In how many pieces a tensor is stored."""
        return sum(map(len, self._chunks[key].values()))

    def row_cuts(self, key: str, place: tuple[int, ...]) -> set[int]:
        """First rows of the chunks of the tensor at `place` (layer, expert) of a stored key."""
        dim = len(place)
        return {
            chunk.box[dim][0]
            for rows, chunks in self._chunks[key].items()
            if not place or rows[0] <= place[0] < rows[1]
            for chunk in chunks
            if all(a <= at < b for at, (a, b) in zip(place, chunk.box, strict=False))
        }

    def _inside(self, chunk: _Chunk, box: Box) -> torch.Tensor:
        return self._blob(chunk)[index(translate(box, chunk.box, whole(extent(chunk.box))))]

    def _largest(self) -> int:
        """Bytes of the largest layer of a stacked tensor, or of the largest chunk."""
        sizes = [0]
        for key, by_rows in self._chunks.items():
            lead = key.startswith("decoder.layers.") + (".experts." in key)
            boxes = [whole(self.shapes[key][lead:])] if lead else []
            boxes += [chunk.box for chunks in by_rows.values() for chunk in chunks]
            sizes += [volume(box) * self.dtypes[key].itemsize for box in boxes]
        return max(sizes)

    def _add(self, key: str, entry: TensorStorageMetadata, storage: dict[Any, Any]) -> None:
        self.shapes[key] = tuple(entry.size)
        self.dtypes[key] = entry.properties.dtype
        chunks = []
        for stored in entry.chunks:
            where = storage.get(MetadataIndex(key, stored.offsets))
            if where is None:
                raise ValueError(f"{self._folder}: {key} has no data at {list(stored.offsets)}")
            if Path(where.relative_path).name != where.relative_path:
                raise ValueError(f"{self._folder}: {where.relative_path!r} is no plain file name")
            pairs = zip(stored.offsets, stored.sizes, strict=True)
            box = tuple((start, start + size) for start, size in pairs)
            chunks.append(_Chunk(box, where.relative_path, where.offset, where.length))
        check_cover(whole(entry.size), [chunk.box for chunk in chunks], f"{self._folder}: {key}")
        by_rows: dict[tuple[int, int], list[_Chunk]] = {}
        for chunk in chunks:
            by_rows.setdefault(chunk.box[0], []).append(chunk)
        self._chunks[key] = by_rows

    def _blob(self, chunk: _Chunk) -> torch.Tensor:
        if chunk in self._cache:
            self._cache.move_to_end(chunk)
            return self._cache[chunk]
        room = self._cache_limit - chunk.length
        while self._cache and self._cached > room:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        path = self._folder / chunk.file
        tensor = self._blobs.read(path, chunk.offset, chunk.length)
        if tuple(tensor.shape) != extent(chunk.box):
            raise ValueError(f"{path}: blob at {chunk.offset} is no tensor of {extent(chunk.box)}")
        self._cache[chunk] = tensor
        self._cached += tensor.nbytes
        return tensor


class TorchDistWriter:
    """Streams a `torch_dist` checkpoint: chunks in any order, `close` writes the metadata last."""

    def __init__(self, folder: str | Path, file_bytes: int = 4 << 30) -> None:
        self._folder = Path(folder)
        self._file_bytes = file_bytes
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._frames: dict[tuple[torch.Size, torch.dtype], tuple[bytes, bytes]] = {}
        self._files = 0
        self._file: IO[bytes] | None = None

    def write(self, key: str, shape: tuple[int, ...], box: Box, tensor: torch.Tensor) -> None:
        """One chunk of the stored tensor `key` of full `shape`."""
        assert tuple(tensor.shape) == extent(box), f"{key}: {tuple(tensor.shape)} for box {box}"
        entry = self._tensors.setdefault(
            key,
            TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), []),
        )
        assert isinstance(entry, TensorStorageMetadata), f"{key} is an object"
        assert entry.properties.dtype == tensor.dtype, f"{key}: chunks of different dtypes"
        offsets = torch.Size(corner(box))
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(extent(box))))
        kind = (tensor.shape, tensor.dtype)
        if kind not in self._frames:
            self._frames[kind] = frame(*kind)
        before, after = self._frames[kind]
        numbers = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._storage[MetadataIndex(key, offsets)] = self._append(before, numbers, after)

    def write_empty_states(self, name: str, counts: tuple[int, ...]) -> None:
        """The empty `_extra_state` of a module of every layer (and expert), which Megatron asks
        for."""
        blob = io.BytesIO()
        torch.save([None], blob)
        for place in itertools.product(*map(range, counts)):
            at, of = (".".join(map(str, numbers)) for numbers in (place, counts))
            key = f"{name}._extra_state/shard_{at}_{of}"
            self._tensors[key] = BytesStorageMetadata()
            self._storage[MetadataIndex(key)] = self._append(blob.getvalue())

    def close(self, common: dict[str, Any]) -> None:
        """Write common.pt, metadata.json and, last, `.metadata`."""
        if self._file is not None:
            self._file.close()
        torch.save(common, self._folder / "common.pt")
        backends = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (self._folder / "metadata.json").write_text(json.dumps(backends))
        metadata = Metadata(
            state_dict_metadata=self._tensors,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version="1.0.0",
        )
        with (self._folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)

    def _append(self, *parts: bytes | memoryview) -> _StorageInfo:
        if self._file is None or self._file.tell() > self._file_bytes:
            if self._file is not None:
                self._file.close()
            self._file = (self._folder / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        start = self._file.tell()
        for part in parts:
            self._file.write(part)
        return _StorageInfo(f"__0_{self._files - 1}.distcp", start, self._file.tell() - start)
