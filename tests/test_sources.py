"""The digest that ties a run to its reference sees every tensor, in either kind of folder."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megagrpo.model.hf_config import read_shape
from megagrpo.trainer.sources import digest_of
from megagrpo.weights.convert import hf_to_megatron
from tests.tiny_models import make_hf_folder


@pytest.mark.parametrize("megatron", [False, True])
def test_digest_changes_with_any_one_tensor_and_with_nothing_else(
    tmp_path: Path, megatron: bool
) -> None:
    """CKPT-like identity: a fine-tuned copy with the same norms is another model."""
    hf = Path(make_hf_folder(tmp_path / "hf", "qwen2", num_hidden_layers=1))
    shape, tensors = read_shape(hf), load_file(hf / "model.safetensors")

    def digest(number: int) -> str:
        if not megatron:
            return digest_of(hf, shape)
        hf_to_megatron(hf, tmp_path / f"megatron{number}", shape)
        return digest_of(tmp_path / f"megatron{number}", shape)

    seen = [digest(0)]
    assert digest(1) == seen[0]
    for number, name in enumerate(tensors):
        changed = {**tensors, name: tensors[name] * 1.01}
        save_file(changed, hf / "model.safetensors", metadata={"format": "pt"})
        seen.append(digest(2 + number))
    assert len(set(seen)) == 1 + len(tensors)
