"""Writes the `torch_dist` format of `torch_dist.py`: places for numbers first, metadata last.

Every blob's place in its file is known from shapes and dtypes alone, so the numbers may come in any
order and from several processes.
"""

import io
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

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
from megagrpo.weights.arrays import ArrayWriter
from megagrpo.weights.blobs import frame
from megagrpo.weights.slices import corner, extent, volume


class TorchDistWriter:
    """A `torch_dist` checkpoint: `place` every chunk, write the numbers there, then `close`."""

    def __init__(self, folder: str | Path, file_bytes: int = 4 << 30) -> None:
        self._folder = Path(folder)
        self._file_bytes = file_bytes
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._frames: dict[tuple[torch.Size, torch.dtype], tuple[bytes, bytes]] = {}
        self._writer = ArrayWriter()
        self._paths = [self._folder / "__0_0.distcp"]
        self._end = 0  # of the last file, so far
        self._tail = b""  # belongs there

    def place(
        self, key: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype
    ) -> tuple[Path, int]:
        """(file, byte) where the numbers of one chunk of the stored tensor `key` of full `shape`
        belong, in row-major order; all but these is written."""
        entry = self._tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        )
        assert isinstance(entry, TensorStorageMetadata), f"{key} is an object"
        assert entry.properties.dtype == dtype, f"{key}: chunks of different dtypes"
        offsets, sizes = torch.Size(corner(box)), torch.Size(extent(box))
        entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
        if (sizes, dtype) not in self._frames:
            self._frames[sizes, dtype] = frame(sizes, dtype)
        before, after = self._frames[sizes, dtype]
        info = self._append(before, volume(box) * dtype.itemsize, after)
        self._storage[MetadataIndex(key, offsets)] = info
        return self._paths[-1], info.offset + len(before)

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
        self._flush()
        self._writer.close()
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

    def _append(self, before: bytes, gap: int = 0, after: bytes = b"") -> _StorageInfo:
        start = self._end + len(self._tail)
        if start > self._file_bytes:
            self._flush()
            self._paths.append(self._folder / f"__0_{len(self._paths)}.distcp")
            start, self._end = 0, 0
        self._writer.write(self._paths[-1], self._end, self._tail + before)
        self._end, self._tail = start + len(before) + gap, after
        return _StorageInfo(self._paths[-1].name, start, self._end + len(after) - start)

    def _flush(self) -> None:
        """Write what stands behind the last blob, which else waits for the next one."""
        self._writer.write(self._paths[-1], self._end, self._tail)
        self._tail = b""
