"""Files of distributed checkpoints: several of them, and metadata that says odd things."""

import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from megagrpo.model.hf_config import read_shape
from megagrpo.weights import convert
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.torch_dist import StoredTensors
from megagrpo.weights.torch_dist_write import TorchDistWriter
from tests.tiny_models import make_hf_folder

KEY = "decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf and megatron; tests leave both alone."""
    folder = tmp_path_factory.mktemp("files")
    hf = make_hf_folder(folder / "hf", vocab_size=131, num_hidden_layers=2)
    hf_to_megatron(Path(hf), folder / "megatron", read_shape(hf))
    return folder


def test_a_checkpoint_in_many_files_is_the_one_in_a_single_file(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models fill files of 4 GiB, here of 50 kB: torch's own reader and ours find every
    number, no file is much larger, and nothing lies between the blobs."""
    several = partial(TorchDistWriter, file_bytes=50_000)
    monkeypatch.setattr(convert, "TorchDistWriter", several)
    shape, megatron = read_shape(place / "hf"), tmp_path / "megatron"
    hf_to_megatron(place / "hf", megatron, shape)
    files = {path.name: path.stat().st_size for path in megatron.glob("*.distcp")}
    assert len(files) > 5 and max(files.values()) < 100_000
    metadata = pickle.loads((megatron / ".metadata").read_bytes())
    ends = dict.fromkeys(files, 0)
    for info in metadata.storage_data.values():
        assert info.offset == ends[info.relative_path]
        ends[info.relative_path] += info.length
    assert ends == files
    stored = StoredTensors(place / "megatron")
    found = {
        key: torch.empty(full, dtype=stored.dtypes[key]) for key, full in stored.shapes.items()
    }
    dcp.load(found, checkpoint_id=megatron, no_dist=True)
    for key, full in stored.shapes.items():
        assert torch.equal(found[key], stored.read(key, tuple((0, size) for size in full))), key
    megatron_to_hf(megatron, tmp_path / "back", shape, megatron / "hf")
    one, two = (load_file(at / "model.safetensors") for at in (place / "hf", tmp_path / "back"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"


def flat(metadata: Any) -> None:
    (chunk, *_) = metadata.state_dict_metadata[KEY].chunks
    chunk.sizes = torch.Size(chunk.sizes[1:])


def twice(metadata: Any) -> None:
    entry = metadata.state_dict_metadata[KEY]
    entry.chunks.append(entry.chunks[0])


def moved(metadata: Any) -> None:
    found = [index for index in metadata.storage_data if index.fqn == KEY]
    del metadata.storage_data[found[3]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (elsewhere, r"'\.\./__0_0\.distcp' is no plain file name"),
        (flat, f"{KEY} has a chunk of other dimensions"),
        (twice, rf"{KEY}: element .* is written twice"),
        (moved, rf"{KEY} has no data at \["),
    ],
)
def test_metadata_that_leads_elsewhere_or_contradicts_itself_is_refused_by_name(
    change: Callable[[Any], None], said: str, place: Path, tmp_path: Path
) -> None:
    """Files from strangers: a path out of the folder is never opened."""
    folder = Path(shutil.copytree(place / "megatron", tmp_path / "below" / "megatron"))
    shutil.copy(folder / "__0_0.distcp", tmp_path / "below")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=said):
        megatron_to_hf(folder, tmp_path / "back", read_shape(place / "hf"), place / "hf")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor", None])
def test_another_back_end_of_distributed_checkpoints_is_refused_by_its_name(
    backend: str | None, place: Path, tmp_path: Path
) -> None:
    """What older or newer versions of megatron-core write otherwise."""
    folder = Path(shutil.copytree(place / "megatron", tmp_path / "megatron"))
    said = json.loads((folder / "metadata.json").read_text()) | {"sharded_backend": backend}
    (folder / "metadata.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"sharded_backend is {backend!r}; only 'torch_dist' is"):
        megatron_to_hf(folder, tmp_path / "back", read_shape(place / "hf"), place / "hf")
