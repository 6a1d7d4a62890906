"""Reading config.json: both spellings of transformers, against transformers' own reading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.model.hf_config import (
    end_of_sequence_ids,
    hf_folder,
    is_megatron_checkpoint,
    read_shape,
)
from megagrpo.parallel.platform import mask_broken_media_packages
from megagrpo.types import ModelShape, RopeScaling
from tests.tiny_models import ARCHITECTURES, hf_config, llama3_rope


def shape_of(folder: Path, config: dict[str, Any]) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("spelling", [4, 5])
def test_shape_agrees_with_what_transformers_reads(
    family: str, spelling: int, tmp_path: Path
) -> None:
    """CONV-22, 23, 25: every number as transformers' config class has it, both spellings."""
    mask_broken_media_packages()
    from transformers import AutoConfig

    config = hf_config(family, True, rms_norm_eps=3e-5, rope_theta=5e5, vocab_size=131)
    if family != "qwen2":
        config["head_dim"] = 32
    if spelling == 5:
        config = without(config, "rope_theta", "torch_dtype")
        config |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
        config["dtype"] = "bfloat16"
    shape = shape_of(tmp_path, config)
    theirs = AutoConfig.from_pretrained(tmp_path)
    head_dim = 16 if family == "qwen2" else theirs.head_dim
    assert shape == ModelShape(
        architecture=theirs.architectures[0],
        family=theirs.model_type,
        num_layers=theirs.num_hidden_layers,
        hidden_size=theirs.hidden_size,
        ffn_hidden_size=theirs.intermediate_size,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=theirs.vocab_size,
        tied=theirs.tie_word_embeddings,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"],
        rope_scaling=None,
        max_positions=theirs.max_position_embeddings,
        dtype=theirs.dtype,
    )
    assert shape.norm_eps == 3e-5 and shape.rope_theta == 5e5
    assert shape.dtype == (torch.bfloat16 if spelling == 5 else torch.float32)


def test_head_dim_null_is_hidden_over_heads_and_a_given_one_is_kept(tmp_path: Path) -> None:
    """CONV-22."""
    assert shape_of(tmp_path, hf_config("llama", head_dim=None)).head_dim == 16
    assert shape_of(tmp_path, without(hf_config("llama"), "head_dim")).head_dim == 16
    assert shape_of(tmp_path, hf_config("qwen3", head_dim=32)).head_dim == 32
    with pytest.raises(ValueError, match="hidden_size=66.*num_attention_heads=4"):
        shape_of(tmp_path, hf_config("llama", head_dim=None, hidden_size=66))


def test_head_dim_that_qwen3_leaves_out_is_the_default_of_transformers(tmp_path: Path) -> None:
    """The class documents 128, whatever hidden / heads is."""
    mask_broken_media_packages()
    from transformers import AutoConfig

    shape = shape_of(tmp_path, without(hf_config("qwen3"), "head_dim"))
    assert shape.head_dim == AutoConfig.from_pretrained(tmp_path).head_dim == 128


def test_rope_base_is_found_in_every_place_and_contradictions_are_refused(tmp_path: Path) -> None:
    """CONV-23: 500000 at the top, inside rope_parameters and inside rope_scaling."""
    bare = without(hf_config("llama"), "rope_theta")
    for config in (
        bare | {"rope_theta": 500000},
        bare | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        bare | {"rope_scaling": {"rope_theta": 500000.0, "type": "linear", "factor": 2.0}},
        bare | {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    ):
        assert shape_of(tmp_path, config).rope_theta == 500000.0
    both = bare | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}
    with pytest.raises(ValueError, match="different values.*10000.0, 500000.0"):
        shape_of(tmp_path, both)


def test_absent_rope_base_is_the_documented_default_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONV-23: never silently."""
    said: list[str] = []
    monkeypatch.setattr("megagrpo.log.warn", said.append)
    shape = shape_of(tmp_path, without(hf_config("mistral"), "rope_theta"))
    assert shape.rope_theta == 10000.0
    assert len(said) == 1 and "rope_theta" in said[0] and "10000.0" in said[0]


def test_rope_scaling_is_carried_and_other_types_are_refused_by_name(tmp_path: Path) -> None:
    """CONV-24."""
    linear = {"type": "linear", "factor": 2.0}
    assert shape_of(tmp_path, hf_config("llama", rope_scaling=linear)).rope_scaling == RopeScaling(
        kind="linear", factor=2.0
    )
    carried = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert shape_of(tmp_path, hf_config(rope_scaling=llama3_rope())).rope_scaling == carried
    new = without(hf_config("llama"), "rope_theta")
    new["rope_parameters"] = llama3_rope() | {"rope_theta": 5e5}
    assert shape_of(tmp_path, new).rope_scaling == carried
    assert shape_of(tmp_path, hf_config(rope_scaling=None)).rope_scaling is None
    for kind in ("yarn", "dynamic", "longrope", "mrope"):
        with pytest.raises(ValueError, match=f"rope type '{kind}'"):
            shape_of(tmp_path, hf_config(rope_scaling={"rope_type": kind, "factor": 2.0}))
    with pytest.raises(ValueError, match="low_freq_factor"):
        shape_of(tmp_path, hf_config(rope_scaling={"rope_type": "llama3", "factor": 8.0}))
    per_type = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="per layer type"):
        shape_of(tmp_path, hf_config(rope_parameters=per_type))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported"),
        ("qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}, "'Qwen3MoeForCausalLM'"),
        ("llama", {"architectures": None}, "architectures=None"),
        ("qwen3", {"num_experts": 4}, "num_experts=4"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mistral", {"sliding_window": 256}, "sliding_window=256"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"torch_dtype": "int8"}, "'int8'"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps=None"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("llama", {"vocab_size": 0}, "vocab_size=0"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 makes"),
    ],
)
def test_what_the_model_code_does_not_do_is_refused_by_name(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """CONV-24, 25, 38 and rule 11 of the fault kinds; the file is named too."""
    with pytest.raises(ValueError, match=message) as caught:
        shape_of(tmp_path, hf_config(family) | change)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": 512}),  # no position can leave it
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 28}),
        ("qwen3", {"layer_types": ["full_attention"] * 4}),
        ("llama", {"a_field_nobody_knows": 3}),
    ],
)
def test_fields_without_effect_are_no_reason_to_refuse(
    family: str, change: dict[str, Any], tmp_path: Path
) -> None:
    """A window that is switched off or never reached changes nothing."""
    assert shape_of(tmp_path, hf_config(family) | change) == shape_of(tmp_path, hf_config(family))


def test_end_of_sequence_ids_are_the_union_of_config_generation_config_and_tokenizer(
    tmp_path: Path,
) -> None:
    """Lists and single ids mix; nothing at all is an error."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert end_of_sequence_ids(tmp_path, 3, 10) == (3, 7, 9)
    assert end_of_sequence_ids(tmp_path, None, 10) == (7, 9)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_of_sequence_ids(tmp_path, 0, 10) == (0,)
    with pytest.raises(ValueError, match="eos"):
        end_of_sequence_ids(tmp_path, None, 10)


def test_model_folder_is_the_folder_itself_or_its_hf_subfolder(tmp_path: Path) -> None:
    """A converted checkpoint keeps the HuggingFace files in `hf`."""
    with pytest.raises(ValueError, match="nowhere' does not exist"):
        hf_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no config.json"):
        hf_folder(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{")
    assert hf_folder(tmp_path) == tmp_path / "hf"
    assert hf_folder(tmp_path / "hf") == tmp_path / "hf"
    with pytest.raises(ValueError, match="not valid JSON"):
        read_shape(tmp_path)
    assert not is_megatron_checkpoint(tmp_path)
    (tmp_path / ".metadata").touch()
    (tmp_path / "metadata.json").touch()
    assert is_megatron_checkpoint(tmp_path)
