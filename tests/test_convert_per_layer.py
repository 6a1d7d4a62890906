"""Checkpoints with a key per layer, as megatron-core saves them for layers that may differ."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.model.build import ModelSettings, build_model, load_weights_
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.context import init_parallel
from megagrpo.parallel.mcore_repairs import WRITE_QUEUE
from megagrpo.types import Layout
from megagrpo.weights.convert import megatron_to_hf
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.table import padded_vocab
from megagrpo.weights.verify import verify
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

from megatron.core import dist_checkpointing  # isort: skip; after the import hook


def core_saves(rank: int, layout: Layout, hf: Path, out: Path, metadata: dict[str, Any]) -> None:
    """A real GPTModel of that folder, saved by megatron-core."""
    shape = read_shape(hf)
    context = init_parallel(layout, seed=1)
    chunks = build_model(
        shape,
        context,
        dtype=torch.float32,
        padded_vocab=padded_vocab(shape.vocab_size, layout.tp),
        settings=ModelSettings(),
    )
    load_weights_(chunks, HFSource(hf), shape, context)
    if rank == 0:
        out.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(chunks[0].sharded_state_dict(metadata=metadata), str(out))
    WRITE_QUEUE.shutdown()  # the rank leaves without exit handlers


@pytest.mark.parametrize(("tp", "pp", "tied"), [(1, 1, False), (2, 1, True), (1, 2, False)])
def test_a_checkpoint_with_a_key_per_layer_exports_bit_equal(
    tp: int, pp: int, tied: bool, tmp_path: Path
) -> None:
    """CONV-26, CONV-27: layers are numbered in all of the model in these keys as well."""
    hf = Path(make_hf_folder(tmp_path / "hf", "qwen2", tied, vocab_size=131))
    layout, out = Layout(world=tp * pp, tp=tp, pp=pp), tmp_path / "saved"
    metadata = {"singleton_local_shards": False, "non_homogeneous_layers": True}
    run_ranks(layout.world, core_saves, layout, hf, out, metadata)
    keys = pickle.loads((out / ".metadata").read_bytes()).state_dict_metadata
    assert "decoder.layers.3.mlp.linear_fc2.weight" in keys
    assert "decoder.layers.mlp.linear_fc2.weight" not in keys
    verify(hf, out, read_shape(hf))
    megatron_to_hf(out, tmp_path / "back", read_shape(hf), hf)
    back, source = (load_file(f / "model.safetensors") for f in (tmp_path / "back", hf))
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], source[name]) for name in source)


def test_a_layer_that_such_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    """CONV-1: the missing key, and the one that takes its place."""
    hf = Path(make_hf_folder(tmp_path / "hf", "qwen2", vocab_size=131))
    metadata = {"singleton_local_shards": False, "non_homogeneous_layers": True}
    run_ranks(1, core_saves, Layout(world=1), hf, tmp_path / "saved", metadata)
    path = tmp_path / "saved" / ".metadata"
    content = pickle.loads(path.read_bytes())
    tensors, name = content.state_dict_metadata, "decoder.layers.2.mlp.linear_fc2.weight"
    tensors["decoder.layers.9.mlp.linear_fc2.weight"] = tensors.pop(name)
    content.storage_data = {
        type(index)(index.fqn.replace(name, name.replace(".2.", ".9.")), index.offset): info
        for index, info in content.storage_data.items()
    }
    path.write_bytes(pickle.dumps(content))
    shutil.copytree(hf, tmp_path / "saved" / "hf")
    with pytest.raises(
        ValueError, match=r"missing \[decoder.layers.*\]; unknown \[decoder.layers.9"
    ):
        megatron_to_hf(tmp_path / "saved", tmp_path / "back", read_shape(hf), hf)
    assert not (tmp_path / "back").exists()
