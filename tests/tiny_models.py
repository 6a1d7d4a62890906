"""Tiny random HuggingFace folders for everybody's tests, written tensor by tensor.

The names and shapes stand here in plain loops, on purpose not taken from `weights/table.py`, so
that the table has something to be compared with. Nothing of transformers is imported.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PAD_ID, EOS_ID, BOS_ID = 0, 1, 2
CHARACTERS = [chr(code) for code in range(32, 127)]  # ids 3 .. 97

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def hf_config(family: str = "qwen3", tied: bool = False, **overrides: Any) -> dict[str, Any]:
    """`config.json` of toy T (fault-kinds): 4 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16,
    ffn 176, vocab 128; `overrides` replace or add fields under their HuggingFace names."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    return config | overrides


def llama3_rope(factor: float = 8.0, original: int = 64) -> dict[str, Any]:
    """`rope_scaling` of Llama 3, short enough that 64 positions feel it."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor name and shape that transformers has for this config."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        shapes[base + "input_layernorm.weight"] = (hidden,)
        shapes[base + "post_attention_layernorm.weight"] = (hidden,)
        for letter, count in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{base}self_attn.{letter}_proj.weight"] = (count * head_dim, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{base}self_attn.{letter}_proj.bias"] = (count * head_dim,)
        shapes[base + "self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if config["model_type"] == "qwen3":
            shapes[base + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[base + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[base + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[base + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[base + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def hf_tensors(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random values that depend on (name, seed) only: norms 0.5 .. 1.5, the rest 0.08 * normal."""
    tensors = {}
    for name, shape in hf_shapes(config).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}".encode()))
        if "norm" in name:
            value = 0.5 + torch.rand(shape, generator=generator)
        else:
            value = 0.08 * torch.randn(shape, generator=generator)
        tensors[name] = value.to(dtype)
    return tensors


def write_tokenizer(path: str | Path, chat_template: bool = False) -> None:
    """A character tokenizer (ids: pad 0, eos 1, bos 2, then printable ASCII) for AutoTokenizer; it
    adds no special token by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<eos>", "<bos>"]
    vocab = {token: index for index, token in enumerate(specials + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    folder = Path(path)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def make_hf_folder(
    path: str | Path,
    family: str = "qwen3",
    tied: bool = False,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_tokenizer: bool = False,
    chat_template: bool = False,
    **overrides: Any,
) -> str:
    """Write config.json, generation_config.json, model.safetensors (and a tokenizer); returns path.

    `overrides` go to `hf_config`. E.g. make_hf_folder(tmp_path / "hf", "llama", vocab_size=131).
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    dtype_name = str(dtype).removeprefix("torch.")
    config = hf_config(family, tied, **({"torch_dtype": dtype_name} | overrides))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(
        hf_tensors(config, seed, dtype), folder / "model.safetensors", metadata={"format": "pt"}
    )
    if with_tokenizer:
        write_tokenizer(folder, chat_template)
    return str(folder)
