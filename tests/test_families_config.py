"""Configs of every family: what transformers makes of them, published sizes, refusals by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.model.hf_config import read_shape
from megagrpo.parallel import platform
from megagrpo.types import ModelShape, RopeScaling
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.table import hf_manifest
from tests.family_toys import TOYS, YARN, make_toy, toy_config, write_config
from tests.tiny_models import hf_config, llama3_rope, make_hf_folder

platform.mask_broken_media_packages()
from transformers import AutoConfig  # noqa: E402

DENSE = {
    "llama3-rope": hf_config("llama", rope_theta=5e5, rope_scaling=llama3_rope()),
    "llama-linear": hf_config("llama", rope_scaling={"type": "linear", "factor": 2.0}),
    "llama-head-dim-null": hf_config("llama", head_dim=None),
    "mistral": hf_config("mistral", rope_theta=1e6),
    "qwen2-tied": hf_config("qwen2", True),
    "qwen3": hf_config("qwen3", head_dim=32),
}
CONFIGS = DENSE | {name: toy_config(name) for name in TOYS}


def shape_of(folder: Path, config: dict[str, Any]) -> ModelShape:
    return read_shape(write_config(folder, config), to_convert=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_spelling_that_transformers_5_writes_gives_the_same_shape(
    name: str, tmp_path: Path
) -> None:
    """CONV-22, 23, 24, 25: rope fields moved into an object (per kind of layer for Gemma 3),
    defaults written out, `dtype` for `torch_dtype`, layer types for window settings."""
    old = write_config(tmp_path / "old", CONFIGS[name])
    AutoConfig.from_pretrained(old).save_pretrained(tmp_path / "new")
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in new and "rope_theta" not in new and "torch_dtype" not in new
    assert read_shape(tmp_path / "new", to_convert=True) == read_shape(old, to_convert=True)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3-yarn", "mixtral", "gemma3"])
def test_rope_base_that_stands_in_the_sub_object_only_is_found(name: str, tmp_path: Path) -> None:
    """CONV-23: 500000 in either place; two different ones are refused."""
    config = toy_config(name)
    section = {"rope_theta": 5e5, "rope_type": "default"} | (config.get("rope_scaling") or {})
    config |= {"rope_theta": None, "rope_scaling": None, "rope_parameters": section}
    if name == "gemma3":
        local = {"rope_theta": 2e4, "rope_type": "default"}
        config["rope_local_base_freq"] = None
        config["rope_parameters"] = {"full_attention": section, "sliding_attention": local}
    shape = shape_of(tmp_path, config)
    assert shape.rope_theta == 5e5
    assert shape.gemma is None or shape.gemma.local_rope_theta == 2e4
    with pytest.raises(ValueError, match="rope_theta is given with different values"):
        shape_of(tmp_path, config | {"rope_theta": 1e4})


@pytest.mark.parametrize(("name", "base"), [("mixtral", 1e6), ("gemma3", 1e6), ("gemma2", 1e4)])
def test_a_rope_base_that_is_left_out_is_the_documented_default_and_said(
    name: str, base: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONV-23: as transformers fills it in, never silently."""
    said: list[str] = []
    monkeypatch.setattr("megagrpo.log.warn", said.append)
    config = {key: value for key, value in toy_config(name).items() if "rope" not in key}
    shape = shape_of(tmp_path, config)
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert shape.rope_theta == base == theirs.get("full_attention", theirs)["rope_theta"]
    assert said and all("rope_theta" in line for line in said)
    if shape.gemma is not None and name == "gemma3":
        assert shape.gemma.local_rope_theta == theirs["sliding_attention"]["rope_theta"]


def test_yarn_is_read_for_latent_attention_and_refused_elsewhere(tmp_path: Path) -> None:
    """CONV-24: every number carried; forms that megatron-core computes differently are refused."""
    shape = shape_of(tmp_path, toy_config("deepseek-v3-yarn"))
    assert shape.rope_scaling == RopeScaling(
        kind="yarn",
        factor=8.0,
        original_max_positions=32,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=0.8,
        mscale_all_dim=1.1,
    )
    for change in ({"attention_factor": 1.0}, {"truncate": False}, {"mscale": None}):
        with pytest.raises(ValueError, match="yarn"):
            shape_of(tmp_path, toy_config("deepseek-v3", rope_scaling=YARN | change))
    for name in ("mixtral", "qwen3-moe", "gemma2", "gemma3"):
        with pytest.raises(ValueError, match="rope type 'yarn' is not supported"):
            shape_of(tmp_path, toy_config(name, rope_scaling=YARN))
    for kind in ("dynamic", "longrope", "llama4"):
        with pytest.raises(ValueError, match=f"rope type '{kind}'"):
            shape_of(tmp_path, toy_config("deepseek-v3", rope_scaling={"type": kind, "factor": 2}))


# Fields of the published configs that decide the number of weights, and that number in billions.
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "DeepSeek-V3": (
        "deepseek-v3-yarn",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_nextn_predict_layers": 1,
        },
        671.0,
    ),
    "DeepSeek-V2-Lite": (
        "deepseek-v2",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        15.7,
    ),
    "Qwen3-30B-A3B": (
        "qwen3-moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        30.5,
    ),
    "Mixtral-8x7B": (
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
        },
        46.7,
    ),
    "Gemma-2-9B": (
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
        },
        9.24,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_weights(name: str, tmp_path: Path) -> None:
    """The table's shapes on the configs people have, to three digits; no weight is made."""
    toy, fields, billions = PUBLISHED[name]
    shape = shape_of(tmp_path, toy_config(toy) | fields)
    total = sum(math.prod(info.shape) for info in hf_manifest(shape, torch.bfloat16))
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama-linear", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("llama-linear", {"qkv_bias": True}, "qkv_bias=True"),
        ("llama-linear", {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ("llama-linear", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama-linear", {"rotary_pct": 0.25}, "rotary_pct=0.25"),
        ("llama-linear", {"n_routed_experts": 8}, "n_routed_experts=8"),
        ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
        ("qwen3", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ("qwen3", {"architectures": ["Qwen2MoeForCausalLM"]}, "'Qwen2MoeForCausalLM'"),
        ("qwen3", {"architectures": ["Llama4ForCausalLM"]}, "'Llama4ForCausalLM'"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3-moe", {"num_local_experts": 8}, "experts is given with different values"),
        ("qwen3-moe", {"num_experts": None}, "num_local_experts=None"),
        ("qwen3-moe", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is over the 4"),
        ("qwen3-moe", {"attention_bias": True}, "attention_bias"),
        ("mixtral", {"sliding_window": 128}, "sliding_window=128"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave=false"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek-v3", {"first_k_dense_replace": 4}, "first_k_dense_replace=4"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek-v3", {"n_group": 3}, "n_group=3"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=true"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "ConditionalGeneration"),
    ],
)
def test_a_field_that_changes_the_model_in_a_way_that_is_not_built_is_refused_by_name(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """CONV-21, 24, 37 and rule 11: never read past in silence."""
    with pytest.raises(ValueError, match=message) as caught:
        shape_of(tmp_path, CONFIGS[name] | change)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama-linear", {"use_qk_norm": False, "num_experts": 0, "rotary_pct": 1.0}),
        ("qwen3", {"hidden_act": "swish"}),
        ("qwen3", {"tie_word_embeddings": None}),
        ("qwen3-moe", {"num_experts": None, "num_local_experts": 4}),
        ("qwen3-moe", {"mlp_only_layers": None, "router_aux_loss_coef": 0.1}),
        ("mixtral", {"output_router_logits": True}),
        ("deepseek-v3", {"num_nextn_predict_layers": 1, "ep_size": 4, "topk_method": "noaux_tc"}),
        ("deepseek-v3", {"n_routed_experts": None, "num_local_experts": 8}),
        ("gemma2", {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}),
    ],
)
def test_another_spelling_and_fields_without_effect_give_the_same_shape(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    assert shape_of(tmp_path, CONFIGS[name] | change) == shape_of(tmp_path, CONFIGS[name])


def test_gemma_s_head_is_tied_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    """CONV-10: transformers' default differs by family."""
    for name, tied in (("gemma2", True), ("gemma3", True), ("mixtral", False)):
        config = toy_config(name)
        del config["tie_word_embeddings"]
        assert shape_of(tmp_path, config).tied is tied
        assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings is tied


def test_which_layers_have_a_window_is_read_as_transformers_does(tmp_path: Path) -> None:
    """Gemma: every second layer, all but every n-th, or as listed; a null switches all off."""
    for name, change in (
        ("gemma2", {}),
        ("gemma3", {"sliding_window_pattern": 3}),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ):
        shape = shape_of(tmp_path, toy_config(name) | change)
        kinds = AutoConfig.from_pretrained(tmp_path).layer_types
        assert shape.gemma is not None
        assert shape.gemma.windows == tuple(8 if k == "sliding_attention" else None for k in kinds)
        assert len(set(shape.gemma.windows)) == 2


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_an_unknown_field_travels_to_the_export_unchanged(name: str, tmp_path: Path) -> None:
    """CONV-37: and so does every known one; the config is copied, never written anew."""
    hf = make_toy(tmp_path / "hf", name, a_field_nobody_knows={"deep": [1, 2.5, None]})
    shape = read_shape(hf, to_convert=True)
    hf_to_megatron(hf, tmp_path / "megatron", shape)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shape, tmp_path / "megatron" / "hf")
    one, other = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("hf", "back"))
    assert one == other and one["a_field_nobody_knows"] == {"deep": [1, 2.5, None]}


def test_norms_of_queries_over_all_heads_are_refused_by_name_and_shape(tmp_path: Path) -> None:
    """CONV-21: a norm over the full width is another function than one per head."""
    hf = Path(make_hf_folder(tmp_path / "hf", "qwen3"))
    tensors = load_file(hf / "model.safetensors")
    name = "model.layers.1.self_attn.q_norm.weight"
    save_file(tensors | {name: torch.ones(64)}, hf / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has shape \[64\], expected \[16\]"):
        hf_to_megatron(hf, tmp_path / "megatron", read_shape(hf))


def test_adapters_are_refused_by_name(tmp_path: Path) -> None:
    """CONV-40: no base is ever merged; neither a folder of an adapter nor its tensors convert."""
    hf = Path(make_hf_folder(tmp_path / "hf", "qwen3"))
    tensors = load_file(hf / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name: torch.ones(8, 64)}, hf / "model.safetensors")
    with pytest.raises(ValueError, match=rf"unknown \[{name}\]"):
        hf_to_megatron(hf, tmp_path / "megatron", read_shape(hf))
    (hf / "config.json").rename(hf / "adapter_config.json")
    with pytest.raises(ValueError, match="has no config.json"):
        read_shape(hf)


def test_training_refuses_what_only_converts_by_name(tmp_path: Path) -> None:
    """Families without invariance tests: the message says what is possible instead."""
    for name in TOYS:
        config = toy_config(name)
        with pytest.raises(ValueError, match=f"{config['architectures'][0]}.*does not train"):
            read_shape(write_config(tmp_path, config))
