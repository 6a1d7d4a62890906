"""HuggingFace safetensors folders: read box by box, written to places known beforehand.

Headers are read and checked by the `safetensors` library; then tensors are arrays in files
(`arrays.py`). Writing is done here, because the library wants all tensors of a file at once: the
header is known from names, shapes and dtypes, the numbers may come in any order.
Left out: the older `pytorch_model.bin` files, and any dtype that carries scales.
"""

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megagrpo.types import Box, TensorInfo
from megagrpo.weights.arrays import ArrayReader, ArrayWriter, StoredArray
from megagrpo.weights.folders import other_kind, refuse_adapter
from megagrpo.weights.slices import extent

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class HFSource:
    """TensorSource over `model.safetensors` or over the shards that its index names.

    Headers are read at once, data only when asked for. Raises ValueError naming file or tensor if a
    shard is missing or broken, if index and headers disagree, or if a dtype is not a plain float.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._infos: dict[str, TensorInfo] = {}
        self._files: dict[str, Path] = {}
        self._stored: dict[str, StoredArray] = {}
        self._arrays = ArrayReader()
        refuse_adapter(self._folder)
        index_path = self._folder / INDEX
        if index_path.is_file():
            self._open_indexed(index_path)
        elif (self._folder / SINGLE).is_file():
            self._read_header(self._folder / SINGLE)
        else:
            hint = other_kind(self._folder)
            raise ValueError(f"{self._folder} holds neither {SINGLE} nor {INDEX}{hint}")

    def tensors(self) -> list[TensorInfo]:
        """Every tensor of the files, ordered by name."""
        return [self._infos[name] for name in sorted(self._infos)]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That region, contiguous and owning its memory, on CPU, in the stored dtype."""
        result = torch.empty(extent(box), dtype=self._array(name).dtype)
        self.fill_(result, name, box)
        return result

    def fill_(self, out: torch.Tensor, name: str, box: Box) -> None:
        """Copy that region into `out`, cast to its dtype."""
        self._arrays.fill_(out, self._array(name), box, name)

    def _array(self, name: str) -> StoredArray:
        if name not in self._stored:
            raise KeyError(f"{self._folder} has no tensor {name}")
        return self._stored[name]

    def _open_indexed(self, path: Path) -> None:
        try:
            weight_map = dict(json.loads(path.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a safetensors index: {error!r}") from None
        if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError(f"{path} is not a safetensors index: it names no files")
        if (self._folder / SINGLE).exists() and SINGLE not in weight_map.values():
            raise ValueError(
                f"{self._folder} has {SINGLE} and an index of other files: two models, of which "
                "programs read one or the other; remove one"
            )
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise ValueError(f"{path} names {shard!r}, which is not a plain file name")
            if not (self._folder / shard).is_file():
                raise ValueError(f"{path} names {shard}, which does not exist")
            self._read_header(self._folder / shard)
        held = {name: file.name for name, file in self._files.items()}
        if held != weight_map:
            raise ValueError(
                f"{path} and the file headers disagree: "
                f"only in the index {sorted(weight_map.items() - held.items())[:4]}, "
                f"only in the files {sorted(held.items() - weight_map.items())[:4]}"
            )

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    entry = file.get_slice(name)
                    code = entry.get_dtype()
                    if code not in DTYPES:
                        raise ValueError(
                            f"{path}: tensor {name} has dtype {code}; quantised or integer weights "
                            f"are not supported, only {', '.join(DTYPES)}"
                        )
                    if name in self._files:
                        raise ValueError(f"{name} is in {path} and in {self._files[name]}")
                    self._infos[name] = TensorInfo(name, tuple(entry.get_shape()), DTYPES[code])
                    self._files[name] = path
            for name, offset in _data_offsets(path).items():
                info = self._infos[name]
                self._stored[name] = StoredArray(path, offset, info.shape, info.dtype)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


def _data_offsets(path: Path) -> dict[str, int]:
    """Where every tensor's bytes begin; the library has checked the header before."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in entries}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different; of two the library would take one in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is in the header twice")
    return found


def plan_shards(infos: Sequence[TensorInfo], shard_bytes: int) -> list[list[TensorInfo]]:
    """The tensors in order, in shards of at most `shard_bytes`; a larger tensor is a shard."""
    shards: list[list[TensorInfo]] = []
    filled = 0
    for info in infos:
        if not shards or filled + _bytes(info) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += _bytes(info)
    return shards


class HFFolder:
    """The .safetensors files of a folder: `create` them with headers, write the numbers at
    `places`, then `close`, which writes the index (none for a single file)."""

    def __init__(
        self, folder: str | Path, infos: Sequence[TensorInfo], shard_bytes: int = 5 << 30
    ) -> None:
        self._folder = Path(folder)
        self._infos = list(infos)
        self._shards = plan_shards(infos, shard_bytes)
        self.places: dict[str, tuple[Path, int]] = {}  # (file, byte) of each tensor's first number

    def create(self) -> None:
        """Write the headers; the files have their final size from the start."""
        writer = ArrayWriter()
        for number, shard in enumerate(self._shards):
            path, header = self._path(number), _header(shard)
            writer.write(path, 0, header)
            end = len(header)
            for info in shard:
                self.places[info.name] = (path, end)
                end += _bytes(info)
            os.truncate(path, end)
        writer.close()

    def close(self) -> None:
        """Write the index, after reading back that the files hold what was planned."""
        held = {self._path(n).name: [i.name for i in s] for n, s in enumerate(self._shards)}
        weight_map = {name: file for file, names in held.items() for name in names}
        if len(self._shards) > 1:
            content = {
                "metadata": {"total_size": sum(map(_bytes, self._infos))},
                "weight_map": weight_map,
            }
            (self._folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True))
        found = HFSource(self._folder).tensors()
        wanted = sorted(self._infos, key=lambda info: info.name)
        assert found == wanted, f"headers hold {len(found)} tensors, planned were {len(wanted)}"

    def _path(self, shard: int) -> Path:
        if len(self._shards) == 1:
            return self._folder / SINGLE
        name = f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"
        return self._folder / name


def _header(infos: Sequence[TensorInfo]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in infos:
        header[info.name] = {
            "dtype": CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + _bytes(info)],
        }
        offset += _bytes(info)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
    return struct.pack("<Q", len(text)) + text


def _bytes(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel() * info.dtype.itemsize
