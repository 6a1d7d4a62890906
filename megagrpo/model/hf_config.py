"""Reads HuggingFace model folders: `config.json` becomes a `ModelShape`, once, in one place.

Both spellings of transformers (version 4 and 5) are understood. Whatever the model code here does
not do (experts, quantised weights, sliding windows, other rotary scalings, extra biases) is refused
by name, because a silently ignored field means silently wrong numbers. Weights are not read here.
"""

import json
from pathlib import Path
from typing import Any

import torch

from megagrpo import log
from megagrpo.types import Experts, ModelShape, RopeScaling

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MOE_FAMILIES = {"Qwen3MoeForCausalLM": "qwen3_moe", "MixtralForCausalLM": "mixtral"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# transformers documents these for a config that leaves the field out
DEFAULT_ROPE_THETA = dict.fromkeys([*FAMILIES.values(), "qwen3_moe"], 10000.0)
DEFAULT_ROPE_THETA["mixtral"] = 1e6
DEFAULT_HEAD_DIM = {"qwen3": 128}
FFN_KEY = {"qwen3_moe": "moe_intermediate_size"}
EXPERT_KEY = "num_local_experts"
DEFAULT_SLIDING_WINDOW = {"mistral": 4096}


def hf_folder(path: str | Path) -> Path:
    """The folder that holds `config.json`: `path` itself, or its subfolder `hf` in a converted
    checkpoint. Raises ValueError if neither does."""
    folder = Path(path)
    for candidate in (folder, folder / "hf"):
        if (candidate / "config.json").is_file():
            return candidate
    if not folder.is_dir():
        raise ValueError(f"model folder {str(folder)!r} does not exist")
    raise ValueError(f"{str(folder)!r} has no config.json, neither itself nor in its folder 'hf'")


def is_megatron_checkpoint(path: str | Path) -> bool:
    """Whether the folder is a Megatron-Core distributed checkpoint (torch_dist)."""
    folder = Path(path)
    return (folder / ".metadata").is_file() and (folder / "metadata.json").is_file()


def read_shape(folder: str | Path, *, with_experts: bool = False) -> ModelShape:
    """The model shape that `config.json` of this folder (or of its subfolder `hf`) describes;
    `folder` may also be that file itself.

    Models with experts are refused unless `with_experts`: they convert but do not train here.
    Raises ValueError, naming field and value, for anything that is missing or not supported.
    """
    path = Path(folder) if Path(folder).is_file() else hf_folder(folder) / "config.json"
    config = _read_json(path)
    try:
        return _shape(config, with_experts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def end_of_sequence_ids(
    folder: str | Path, tokenizer_eos_id: int | None, vocab_size: int
) -> tuple[int, ...]:
    """Union of the end-of-sequence ids of config, generation config and tokenizer, ascending.

    Raises ValueError if there is none, or for one that is no row of the model.
    """
    home = hf_folder(folder)
    found = {} if tokenizer_eos_id is None else {tokenizer_eos_id: "the tokenizer"}
    for name in ("config.json", "generation_config.json"):
        if (home / name).is_file():
            value = _read_json(home / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            for item in ids:
                if not isinstance(item, int) or isinstance(item, bool):
                    raise ValueError(f"{home / name}: eos_token_id={value!r} is no id or ids")
                found.setdefault(item, name)
    if not found:
        raise ValueError(f"{home}: neither config, generation config nor tokenizer has an eos id")
    for item, name in found.items():
        if not 0 <= item < vocab_size:
            raise ValueError(
                f"{home}: end-of-sequence id {item} of {name} is no row of the model's "
                f"{vocab_size}; correct eos_token_id"
            )
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _shape(config: dict[str, Any], with_experts: bool) -> ModelShape:
    architecture, family = _architecture(config, with_experts)
    _refuse_unsupported(config, family)
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    kv_heads = config.get("num_key_value_heads", heads if family == "llama" else 0)
    kv_heads = heads if kv_heads is None else kv_heads
    if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads={kv_heads} must be given and divide num_attention_heads={heads}"
        )
    return ModelShape(
        architecture=architecture,
        family=family,
        num_layers=_integer(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=_integer(config, FFN_KEY.get(family, "intermediate_size")),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden, heads),
        vocab_size=_integer(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        norm_eps=_number(config, "rms_norm_eps"),
        rope_theta=_rope_theta(config, family),
        rope_scaling=_rope_scaling(config),
        max_positions=_integer(config, "max_position_embeddings"),
        dtype=_dtype(config),
        experts=_experts(config, family),
    )


def _experts(config: dict[str, Any], family: str) -> Experts | None:
    """Experts in every layer, or none at all; ValueError for a mixture of both kinds of layers."""
    if family not in MOE_FAMILIES.values():
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"mlp_only_layers={config.get('mlp_only_layers')!r}, decoder_sparse_step="
            f"{config.get('decoder_sparse_step')!r}: only experts in every layer are supported"
        )
    key = "num_experts" if family == "qwen3_moe" and "num_experts" in config else EXPERT_KEY
    return Experts(
        count=_integer(config, key),
        top_k=_integer(config, "num_experts_per_tok"),
        router_bias=bool(config.get("moe_router_enable_expert_bias", False)),
    )


def _architecture(config: dict[str, Any], with_experts: bool) -> tuple[str, str]:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"architectures={names!r}; exactly one of {', '.join(FAMILIES)} is needed")
    if names[0] in MOE_FAMILIES and not with_experts:
        raise ValueError(
            f"architecture {names[0]!r} has experts: not in this version; tools/convert_hf.py "
            "converts it"
        )
    families = FAMILIES | MOE_FAMILIES if with_experts else FAMILIES
    if names[0] not in families:
        raise ValueError(f"architecture {names[0]!r} is not supported; use {', '.join(families)}")
    return names[0], families[names[0]]


def _refuse_unsupported(config: dict[str, Any], family: str) -> None:
    if config.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; quantised weights are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={config['hidden_act']!r} is not supported; only 'silu' is")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and (family, key) != ("qwen2", "attention_bias"):
            raise ValueError(f"{key}=true is not supported for {family}")
    experts = [key for key in ("num_experts", "num_local_experts") if config.get(key)]
    if experts and family not in MOE_FAMILIES.values():
        raise ValueError(f"{experts[0]}={config[experts[0]]}: mixtures of experts not supported")
    if config.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={config['partial_rotary_factor']} not supported")
    _refuse_sliding_window(config, family)


def _refuse_sliding_window(config: dict[str, Any], family: str) -> None:
    """A window that no position can leave is harmless; an active one changes attention."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types={kinds!r} is not a list")
    other = [kind for kind in kinds if kind != "full_attention"]
    if other:
        raise ValueError(f"layer_types contains {other[0]!r}; only 'full_attention' is supported")
    window = config.get("sliding_window", DEFAULT_SLIDING_WINDOW.get(family))
    switched = family in ("mistral", "mixtral") or bool(config.get("use_sliding_window", False))
    if family == "llama" or not switched or window is None:
        return
    if family not in ("mistral", "mixtral") and config.get("max_window_layers", 0) >= _integer(
        config, "num_hidden_layers"
    ):
        return  # Qwen: layers below max_window_layers attend fully
    if not isinstance(window, int) or window < config.get("max_position_embeddings", 0):
        raise ValueError(
            f"sliding_window={window} is below max_position_embeddings="
            f"{config['max_position_embeddings']}; sliding attention is not supported"
        )


def _head_dim(config: dict[str, Any], family: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    if "head_dim" not in config and family in DEFAULT_HEAD_DIM:
        return DEFAULT_HEAD_DIM[family]
    if hidden % heads:
        raise ValueError(
            f"head_dim is not given and hidden_size={hidden} is no multiple of "
            f"num_attention_heads={heads}"
        )
    return hidden // heads


def _rope_sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The rotary sub-objects that are present: transformers 4 and 5 name them differently."""
    sections = []
    for key in ("rope_scaling", "rope_parameters"):
        section = config.get(key)
        if section is None:
            continue
        if not isinstance(section, dict) or any(isinstance(v, dict) for v in section.values()):
            raise ValueError(f"{key}={section!r}: rotary settings per layer type not supported")
        if section.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"{key}.partial_rotary_factor is not supported")
        sections.append(section)
    return sections


def _rope_theta(config: dict[str, Any], family: str) -> float:
    places = [config, *_rope_sections(config)]
    found = {
        _number(place, "rope_theta") for place in places if place.get("rope_theta") is not None
    }
    if len(found) > 1:
        raise ValueError(f"rope_theta is given with different values: {sorted(found)}")
    if found:
        return found.pop()
    default = DEFAULT_ROPE_THETA[family]
    log.warn(f"config.json has no rope_theta; {family}'s documented default {default} is used")
    return default


def _rope_scaling(config: dict[str, Any]) -> RopeScaling | None:
    scalings = []
    for section in _rope_sections(config):
        kind = section.get("rope_type", section.get("type", "default"))
        if kind in ("default", None):
            continue
        if kind == "linear":
            scalings.append(RopeScaling(kind="linear", factor=_number(section, "factor")))
        elif kind == "llama3":
            scalings.append(
                RopeScaling(
                    kind="llama3",
                    factor=_number(section, "factor"),
                    low_freq_factor=_number(section, "low_freq_factor"),
                    high_freq_factor=_number(section, "high_freq_factor"),
                    original_max_positions=_integer(section, "original_max_position_embeddings"),
                )
            )
        else:
            raise ValueError(
                f"rope type {kind!r} is not supported; 'default', 'linear' and 'llama3' are"
            )
    if len(set(scalings)) > 1:
        raise ValueError("rope_scaling and rope_parameters contradict each other")
    return scalings[0] if scalings else None


def _dtype(config: dict[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; use {', '.join(DTYPES)}")
    return DTYPES[name]


def _integer(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}={value!r}; a positive integer is needed")
    return value


def _number(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{key}={value!r}; a positive number is needed")
    return float(value)
