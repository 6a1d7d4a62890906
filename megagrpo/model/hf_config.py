"""Reads HuggingFace model folders: `config.json` becomes a `ModelShape`, once, in one place.

Both spellings of transformers (version 4 and 5) are understood. Whatever the model code here does
not do (quantised weights, sliding windows outside Gemma, other rotary scalings, extra biases) is
refused by name, because a silently ignored field means silently wrong numbers. The families stand
in `hf_families.py`, parts that only some have in `hf_parts.py` and `hf_rope.py`. Weights are not
read.
"""

from pathlib import Path

import torch

from megagrpo.model.hf_families import Family, family_of, refuse_sliding_window, refuse_unsupported
from megagrpo.model.hf_fields import Fields, flag, integer, number, read_json
from megagrpo.model.hf_parts import experts_of, gemma_of, latent_of
from megagrpo.model.hf_rope import rotary, rotary_by_kind
from megagrpo.types import Experts, ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_MODULES = 1_000_000  # layers times experts; the largest model known has 15,616


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


def read_shape(folder: str | Path, *, to_convert: bool = False) -> ModelShape:
    """The model shape that `config.json` of this folder (or of its subfolder `hf`) describes;
    `folder` may also be that file itself.

    Families that do not train here are refused unless `to_convert`: those with experts, latent
    attention or Gemma's layers, whose weights convert and whose logits can be checked.
    Raises ValueError, naming field and value, for anything that is missing or not supported.
    """
    path = Path(folder) if Path(folder).is_file() else hf_folder(folder) / "config.json"
    config = read_json(path)
    try:
        return _shape(config, to_convert)
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
            value = read_json(home / name).get("eos_token_id")
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


def _shape(config: Fields, to_convert: bool) -> ModelShape:
    architecture, family = family_of(config, to_convert)
    refuse_unsupported(config, family)
    layers = integer(config, "num_hidden_layers")
    if family.name not in ("gemma2", "gemma3"):
        refuse_sliding_window(config, family, layers)
    experts = experts_of(config, family, layers)
    _refuse_endless(layers, experts)
    latent = latent_of(config, family)
    heads = integer(config, "num_attention_heads")
    if family.name == "gemma3":
        theta, scaling, local_theta = rotary_by_kind(config, family)
    else:
        theta, scaling = rotary(config, family, yarn=latent is not None)
        local_theta = theta
    return ModelShape(
        architecture=architecture,
        family=family.name,
        num_layers=layers,
        hidden_size=integer(config, "hidden_size"),
        ffn_hidden_size=integer(config, family.ffn),
        num_heads=heads,
        num_kv_heads=heads if latent else _kv_heads(config, family, heads),
        head_dim=latent.nope_dim + latent.rope_dim if latent else _head_dim(config, family, heads),
        vocab_size=integer(config, "vocab_size"),
        tied=flag(config, "tie_word_embeddings", family.tied),
        qkv_bias=family.name == "qwen2",
        qk_norm=family.name in ("qwen3", "qwen3_moe", "gemma3"),
        norm_eps=number(config, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=integer(config, "max_position_embeddings"),
        dtype=_dtype(config),
        experts=experts,
        latent=latent,
        gemma=gemma_of(config, family, layers, local_theta),
    )


def _refuse_endless(layers: int, experts: Experts | None) -> None:
    """A list of names is made of these numbers before any file is looked into."""
    modules = layers * (1 if experts is None else experts.count)
    if modules > MOST_MODULES:
        raise ValueError(
            f"num_hidden_layers={layers} makes {modules} layers or experts, over {MOST_MODULES}; "
            "the config is broken"
        )


def _kv_heads(config: Fields, family: Family, heads: int) -> int:
    found = config.get("num_key_value_heads", heads if family.name == "llama" else 0)
    found = heads if found is None else found
    if not isinstance(found, int) or found < 1 or heads % found:
        raise ValueError(
            f"num_key_value_heads={found} must be given and divide num_attention_heads={heads}"
        )
    return found


def _head_dim(config: Fields, family: Family, heads: int) -> int:
    if config.get("head_dim") is not None:
        return integer(config, "head_dim")
    if "head_dim" not in config and family.head_dim is not None:
        return family.head_dim
    hidden = integer(config, "hidden_size")
    if hidden % heads:
        raise ValueError(
            f"head_dim is not given and hidden_size={hidden} is no multiple of "
            f"num_attention_heads={heads}"
        )
    return hidden // heads


def _dtype(config: Fields) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; use {', '.join(DTYPES)}")
    return DTYPES[name]
