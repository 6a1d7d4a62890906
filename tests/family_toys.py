"""Tiny models of the families that `tiny_models.py` does not write, made and saved by transformers.

What transformers saves is the list of tensors that a real folder of the family has, so that the
weight table has something to be compared with.
"""

import json
from pathlib import Path
from typing import Any

import torch

from megagrpo.parallel import platform

platform.mask_broken_media_packages()
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 1.1,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "rope_theta": 1e4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
V3 = DEEPSEEK | {
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
V2 = DEEPSEEK | {"topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.5}
GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "rope_theta": 1e4}
GEMMA3 = GEMMA | {
    "sliding_window_pattern": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}
MOE = {"num_experts_per_tok": 2, "rope_theta": 1e4}
TOYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        MOE
        | {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True},
    ),
    "qwen3-moe-not-normalized": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        MOE | {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "mixtral",
        MOE | {"num_local_experts": 4, "intermediate_size": 48, "sliding_window": None},
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "deepseek_v3", V3),
    "deepseek-v3-yarn": ("DeepseekV3ForCausalLM", "deepseek_v3", V3 | {"rope_scaling": YARN}),
    "deepseek-v3-no-query-rank": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        V3 | {"q_lora_rank": None, "first_k_dense_replace": 0, "rms_norm_eps": 1e-5},
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "deepseek_v2", V2),
    "deepseek-v2-grouped": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        V2
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3}
        | {"q_lora_rank": None, "rope_scaling": YARN},
    ),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", GEMMA3),
    "gemma3-untied": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        GEMMA3 | {"tie_word_embeddings": False, "rope_scaling": None, "num_hidden_layers": 5},
    ),
}


def toy_config(name: str, **overrides: Any) -> dict[str, Any]:
    """`config.json` of a toy as a hub folder would have it."""
    architecture, kind, fields = TOYS[name]
    return COMMON | {"architectures": [architecture], "model_type": kind} | fields | overrides


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with that config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def toy_model(config_folder: Path) -> torch.nn.Module:
    """The model of that config: random values, norms around what leaves the size as it is."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_folder)).eval()
    generator = torch.Generator().manual_seed(0)
    gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "norm" in name:
                noise = torch.rand(value.shape, generator=generator) - 0.5
                value.copy_(noise if gemma else 1 + noise)
            else:
                value.copy_(0.08 * torch.randn(value.shape, generator=generator))
    return model


def make_toy(folder: Path, name: str, **overrides: Any) -> Path:
    """Write the weights that transformers saves for the toy; config.json is the hub's spelling."""
    config = toy_config(name, **overrides)
    toy_model(write_config(folder, config)).save_pretrained(folder)
    return write_config(folder, config)
