"""Blobs against torch.save and torch.load; boxes of arrays; the benchmark of the converter."""

import io
import math
import pickle
import runpy
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.weights.arrays import ArrayReader, StoredArray
from megagrpo.weights.blobs import BlobReader, frame
from megagrpo.weights.slices import index

REPO = Path(__file__).resolve().parent.parent


def saved(value: object) -> bytes:
    blob = io.BytesIO()
    torch.save(value, blob)
    return blob.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3,), (1, 4, 6), (0, 4)])
def test_a_framed_tensor_loads_with_torch_load(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What surrounds the numbers is what torch.save writes."""
    tensor = torch.randn(shape).to(dtype)
    before, after = frame(tensor.shape, dtype)
    blob = before + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + after
    loaded = torch.load(io.BytesIO(blob), weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, tensor)


def test_reader_gives_what_torch_load_gives_whatever_came_before(tmp_path: Path) -> None:
    """Blobs of one length: equal surroundings, another dtype, a transposed view, checksums or
    none; each read twice, in both orders."""
    square = torch.randn(8, 8)
    tensors = [square, torch.randn(8, 8), square.t(), torch.randn(4, 16), square.to(torch.int32)]
    parts = [saved(tensor) for tensor in tensors]
    before, after = frame(square.shape, square.dtype)
    tensors.append(square * 2)
    parts.append(before + tensors[-1].view(torch.uint8).numpy().tobytes() + after)
    longest = max(map(len, parts))
    (tmp_path / "file").write_bytes(b"".join(parts))
    starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
    assert sum(len(part) == longest for part in parts) > 2, "lengths must collide"
    reader = BlobReader(ArrayReader())
    for at in [*range(len(parts)), *reversed(range(len(parts)))]:
        found = reader.read(tmp_path / "file", starts[at], len(parts[at]))
        assert found.dtype == tensors[at].dtype
        assert torch.equal(found, tensors[at]), at


def test_a_hostile_or_cut_blob_is_refused_also_after_good_ones(tmp_path: Path) -> None:
    """Nothing is unpickled outside torch's allow-list; the message names file and place."""
    good = saved(torch.ones(8))
    bad = pickle.dumps(print).ljust(len(good), b"\0")
    (tmp_path / "file").write_bytes(good + good + bad + saved([1]) + good[: len(good) // 2])
    reader, size = BlobReader(ArrayReader()), len(good)
    for at in (0, size):
        assert reader.read(tmp_path / "file", at, size).equal(torch.ones(8))
    with pytest.raises(ValueError, match=f"file: blob at {2 * size} is refused"):
        reader.read(tmp_path / "file", 2 * size, size)
    with pytest.raises(ValueError, match=f"blob at {3 * size} is no tensor"):
        reader.read(tmp_path / "file", 3 * size, len(saved([1])))
    with pytest.raises(ValueError, match="ends before its blob"):
        reader.read(tmp_path / "file", 3 * size + len(saved([1])), size)
    with pytest.raises(ValueError, match="none is missing"):
        reader.read(tmp_path / "none", 0, size)


def test_benchmark_prints_both_directions_next_to_the_plain_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peak memory of the converter is below three largest tensors; the plain copy holds all."""
    main = runpy.run_path(str(REPO / "tools" / "bench_convert.py"))["main"]
    assert main(["--gigabytes", "0.17", "--repeats", "1", "--scratch", str(tmp_path)]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "0.17 GB of weights, largest tensor 67 MB"
    peaks = {row[:14].strip(): float(row.split()[-1]) for row in rows}
    assert list(peaks) == ["plain copy", "hf2megatron", "megatron2hf"]
    assert peaks["plain copy"] > 2
    assert 0 < max(peaks["hf2megatron"], peaks["megatron2hf"]) < 3
    assert list(tmp_path.iterdir()) == []
    assert main(["--gigabytes", "0.1"]) == 2
    assert "at least 0.17" in capsys.readouterr().err


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_any_box_of_an_array_in_a_file_is_what_indexing_gives(
    data: st.DataObject, shape: list[int], cast: bool
) -> None:
    """Whatever dimensions the box takes one element of, into tensors with gaps too."""
    values = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    box = tuple(
        (start, data.draw(st.integers(start + 1, size)))
        for size in shape
        for start in (data.draw(st.integers(0, size - 1)),)
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"before" + values.numpy().tobytes())
        file.flush()
        array = StoredArray(Path(file.name), 6, tuple(shape), torch.float32)
        found = torch.full(shape, -1.0, dtype=torch.float64 if cast else torch.float32)
        ArrayReader().fill_(found[index(box)], array, box, "x")
    wanted = torch.full(shape, -1.0)
    wanted[index(box)] = values[index(box)]
    assert torch.equal(found.float(), wanted)
