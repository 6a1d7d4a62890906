"""The model families that are known, and what a config of each may leave out or say.

Only what transformers' own config classes document is filled in, and a field that would change the
model in a way that is not built is refused by name; any other field is nobody's business here and
travels with the checkpoint. Left out: everything that is computed from several fields.
"""

from dataclasses import dataclass
from typing import Any

from megagrpo.model.hf_fields import Fields, names


@dataclass(frozen=True)
class Family:
    """What transformers assumes for one architecture where its config is silent."""

    name: str  # its model type
    trains: bool = True  # False: converts, and its logits can be checked, but it does not train
    rope_theta: float = 1e4
    head_dim: int | None = None  # None: hidden / heads
    sliding_window: int | None = None
    window_always: bool = False  # the window needs no switch
    tied: bool = False
    activation: str = "hidden_act"  # the field that names it
    activations: tuple[str, ...] = ("silu", "swish")  # swish is another name of the same function
    ffn: str = "intermediate_size"
    says: tuple[str, ...] = ()  # fields of NEUTRAL that this family is read with


LATENT = ("n_routed_experts", "n_shared_experts", "num_experts", "num_local_experts")
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
TANH_GELU = ("gelu_pytorch_tanh",)
FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", sliding_window=4096, window_always=True),
    "Qwen2ForCausalLM": Family("qwen2", says=("attention_bias",)),
    "Qwen3ForCausalLM": Family("qwen3", head_dim=128),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        trains=False,
        ffn="moe_intermediate_size",
        says=("num_experts", "num_local_experts"),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        trains=False,
        rope_theta=1e6,
        window_always=True,
        says=("num_experts", "num_local_experts"),
    ),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", trains=False, says=LATENT),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", trains=False, says=LATENT),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        trains=False,
        head_dim=256,
        tied=True,
        activation="hidden_activation",
        activations=TANH_GELU,
        says=SOFTCAPS,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        trains=False,
        rope_theta=1e6,
        head_dim=256,
        tied=True,
        activation="hidden_activation",
        activations=TANH_GELU,
        says=("final_logit_softcapping",),
    ),
}

# Fields that change a model where their value is none of these (nor null).
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias"), (False,)),
    **dict.fromkeys(("attention_out_bias", "lm_head_bias"), (False,)),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), (False,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("moe_num_experts", "n_shared_experts", "num_shared_experts"), (0,)),
    **dict.fromkeys(("shared_expert_intermediate_size",), (0,)),
    **dict.fromkeys((*SOFTCAPS, "clip_qkv", "attention_chunk_size"), ()),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rotary_percent"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (1,)),
    **dict.fromkeys(("attention_multiplier", "scale_emb", "scale_depth", "logit_scale"), ()),
    **dict.fromkeys(("use_bidirectional_attention", "alibi"), (False,)),
}


def family_of(config: Fields, to_convert: bool) -> tuple[str, Family]:
    """(architecture, its family); families that do not train only `to_convert`.

    Raises ValueError naming an architecture that is unknown or that is not for training.
    """
    found = config.get("architectures")
    allowed = ", ".join(name for name, family in FAMILIES.items() if to_convert or family.trains)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ValueError(f"architectures={found!r}; exactly one of {allowed} is needed")
    name = found[0]
    if name not in FAMILIES:
        raise ValueError(f"architecture {name!r} is not supported; use {allowed}")
    if not FAMILIES[name].trains and not to_convert:
        raise ValueError(
            f"architecture {name!r} does not train: not in this version; tools/convert_hf.py "
            f"converts it and checks its logits; training has {allowed}"
        )
    return name, FAMILIES[name]


def refuse_unsupported(config: Fields, family: Family) -> None:
    """Raise ValueError naming the first field that asks for what is not built."""
    if config.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; quantised weights are not supported")
    activation = config.get(family.activation, family.activations[0])
    if activation not in family.activations:
        raise ValueError(
            f"{family.activation}={activation!r} is not supported for {family.name}; only "
            f"{family.activations[0]!r} is"
        )
    for key, harmless in NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in harmless and key not in family.says:
            raise ValueError(f"{key}={value!r} is not supported for {family.name}")


def refuse_sliding_window(config: Fields, family: Family, layers: int) -> None:
    """A window that no position can leave is harmless; an active one changes attention."""
    other = [kind for kind in names(config, "layer_types") if kind != "full_attention"]
    if other:
        raise ValueError(f"layer_types contains {other[0]!r}; only 'full_attention' is supported")
    window = config.get("sliding_window", family.sliding_window)
    switched = family.window_always or bool(config.get("use_sliding_window", False))
    if family.name == "llama" or not switched or window is None:
        return
    if not family.window_always and config.get("max_window_layers", 0) >= layers:
        return  # Qwen: layers below max_window_layers attend fully
    if not isinstance(window, int) or window < config.get("max_position_embeddings", 0):
        raise ValueError(
            f"sliding_window={window} is below max_position_embeddings="
            f"{config['max_position_embeddings']}; sliding attention is not supported"
        )
