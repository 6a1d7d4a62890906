"""HuggingFace safetensors folders: read box by box, written as a stream.

Headers are read and checked by the `safetensors` library. Full rows are read straight into their
tensor, any other region through one short-lived map, so that no pages of the file stay in memory.
Writing is done here, because the library wants all tensors of a
file at once: the header is known from names, shapes and dtypes, the data follows tensor by tensor.
Left out: the older `pytorch_model.bin` files, and any dtype that carries scales.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from megagrpo.types import Box, TensorInfo
from megagrpo.weights.slices import extent, index, whole

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
        self._offsets: dict[str, int] = {}  # bytes from the start of the file
        index_path = self._folder / INDEX
        if index_path.is_file():
            self._open_indexed(index_path)
        elif (self._folder / SINGLE).is_file():
            self._read_header(self._folder / SINGLE)
        else:
            raise ValueError(f"{self._folder} holds neither {SINGLE} nor {INDEX}")

    def tensors(self) -> list[TensorInfo]:
        """Every tensor of the files, ordered by name."""
        return [self._infos[name] for name in sorted(self._infos)]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That region, contiguous and owning its memory, on CPU, in the stored dtype."""
        if name not in self._files:
            raise KeyError(f"{self._folder} has no tensor {name}")
        info = self._infos[name]
        if box[1:] == whole(info.shape[1:]):  # full rows follow one another in the file
            result = torch.empty(extent(box), dtype=info.dtype)
            row = _bytes(info) // max(1, info.shape[0])
            read_into(result, self._files[name], self._offsets[name] + box[0][0] * row)
            return result
        with safe_open(self._files[name], framework="pt") as file:
            region = file.get_slice(name)[index(box)]
            return region.clone(memory_format=torch.contiguous_format)

    def _open_indexed(self, path: Path) -> None:
        try:
            weight_map = dict(json.loads(path.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a safetensors index: {error!r}") from None
        if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError(f"{path} is not a safetensors index: it names no files")
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
            self._offsets |= _data_offsets(path)
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


def read_into(tensor: torch.Tensor, path: Path, offset: int) -> None:
    """Fill a contiguous tensor from the file; ValueError if the file has become shorter."""
    rest = tensor.reshape(-1).view(torch.uint8).numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while rest:
            count = file.readinto(rest)
            if not count:
                raise ValueError(f"{path} ended while it was read")
            rest = rest[count:]


class HFWriter:
    """Writes tensors in the order of `infos` into shards of at most `shard_bytes`.

    `write` the rows of every info from first to last, at once or in stretches, then `close`, which
    writes the index last (none for a single shard).
    A tensor larger than `shard_bytes` gets a shard of its own.
    """

    def __init__(
        self, folder: str | Path, infos: Sequence[TensorInfo], shard_bytes: int = 5 << 30
    ) -> None:
        self._folder = Path(folder)
        self._shards = _plan_shards(infos, shard_bytes)
        self._order = [(shard, info) for shard, part in enumerate(self._shards) for info in part]
        self._next = 0  # position in the order
        self._rows = 0  # of that tensor, written
        self._file: IO[bytes] | None = None

    def write(self, name: str, rows: torch.Tensor) -> None:
        """Append the next rows of the next tensor; name, dtype and width must be the planned
        ones."""
        shard, info = self._order[self._next]
        got = TensorInfo(name, (info.shape[0], *rows.shape[1:]), rows.dtype)
        assert got == info, f"writer got {got}, expects {info}"
        if info is self._shards[shard][0] and self._rows == 0:
            self._start(shard)
        assert self._file is not None, "a shard starts with its first tensor"
        self._file.write(rows.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._rows += len(rows)
        assert self._rows <= info.shape[0], f"{self._rows} rows for {info}"
        if self._rows == info.shape[0]:
            self._next, self._rows = self._next + 1, 0

    def close(self) -> None:
        """Finish the last shard and write the index."""
        assert self._next == len(self._order), f"{self._next} of {len(self._order)} tensors written"
        self._finish()
        if len(self._shards) > 1:
            content = {
                "metadata": {"total_size": sum(_bytes(info) for _, info in self._order)},
                "weight_map": {info.name: self._name(shard) for shard, info in self._order},
            }
            (self._folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True))

    def _name(self, shard: int) -> str:
        if len(self._shards) == 1:
            return SINGLE
        return f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _start(self, shard: int) -> None:
        self._finish()
        self._file = (self._folder / self._name(shard)).open("wb")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for info in self._shards[shard]:
            header[info.name] = {
                "dtype": CODES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, offset + _bytes(info)],
            }
            offset += _bytes(info)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
        self._file.write(struct.pack("<Q", len(text)) + text)

    def _finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _bytes(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel() * info.dtype.itemsize


def _plan_shards(infos: Sequence[TensorInfo], shard_bytes: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = []
    filled = 0
    for info in infos:
        if not shards or filled + _bytes(info) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += _bytes(info)
    return shards
