"""The `.metadata` of a distributed checkpoint, which is a pickle from who knows whom.

Only the listed classes load, and what they then hold is checked for its types, so that a broken or
hostile file ends in one line. What the entries mean is `torch_dist.py`'s business.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # torch 2.x: DCP pickles this one
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megagrpo.weights.blobs import BROKEN, first_line

SAFE_GLOBALS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "uint8", "bool"}
    | {"int8", "int16", "int32", "int64"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class NotAllowed(ValueError):
    """A pickle refers to a class that no checkpoint needs."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only names of the list above; nothing that could run code of the file's choice."""
        if name not in SAFE_GLOBALS.get(module, ()):
            raise NotAllowed(f".metadata refers to {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The checked metadata of a finished torch_dist folder.

    Raises ValueError naming the file if it is missing or broken, or the class that is not allowed.
    """
    for name in ("metadata.json", ".metadata"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no finished torch_dist checkpoint: {name} is missing")
    path = folder / "metadata.json"
    try:
        backend = dict(json.loads(path.read_text())).get("sharded_backend")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is broken: {error}") from None
    if backend != "torch_dist":
        raise ValueError(f"{folder}: sharded_backend is {backend!r}; only 'torch_dist' is read")
    metadata = _unpickled(folder / ".metadata")
    problem = _problem(metadata)
    if problem:
        raise ValueError(f"{folder / '.metadata'} is broken: {problem}")
    return metadata


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _MetadataUnpickler(file).load()
    except NotAllowed:
        raise
    except (*BROKEN, ImportError) as error:
        raise ValueError(f"{path} is broken: {first_line(error)}") from None


def _problem(metadata: Any) -> str:
    """What is wrong with the types of loaded metadata; "" if nothing."""
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}, not checkpoint metadata"
    try:
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(key, str):
                return f"a key is {key!r}"
            if isinstance(entry, BytesStorageMetadata):
                continue
            if not isinstance(entry, TensorStorageMetadata) or not _is_size(entry.size):
                return f"{key} is no tensor"
            if not isinstance(entry.properties.dtype, torch.dtype):
                return f"{key} has no dtype"
            for chunk in entry.chunks:
                if not (_is_size(chunk.offsets) and _is_size(chunk.sizes)):
                    return f"{key} has a chunk without place"
                if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
                    return f"{key} has a chunk of other dimensions"
        for index, info in (metadata.storage_data or {}).items():
            if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
                return "its storage table holds something else"
            numbers = (info.offset, info.length)
            if not isinstance(info.relative_path, str) or not _is_size(numbers):
                return f"{index.fqn} has no place in a file"
    except (AttributeError, TypeError) as error:  # fields that are missing or of another type
        return str(error)
    return ""


def _is_size(numbers: Any) -> bool:
    """A tuple of integers from 0."""
    return isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)
