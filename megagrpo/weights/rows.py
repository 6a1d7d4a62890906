"""The rows of the table between HuggingFace and Megatron weights: which parameters there are.

Names and kinds only; sizes and cuts are in `table.py`. Left out: layers that predict further tokens
(DeepSeek's MTP), which sources may hold and conversion leaves out, and gated shared experts.
"""

import re
from dataclasses import dataclass, replace

from megagrpo.types import Experts, LatentAttention, ModelShape

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"


# (block, gate, up, down) under a layer of HuggingFace's files
MOE_NAMES = dict.fromkeys(
    ("qwen3_moe", "deepseek_v2", "deepseek_v3"), ("mlp", "gate_proj", "up_proj", "down_proj")
)
MOE_NAMES["mixtral"] = ("block_sparse_moe", "w1", "w3", "w2")


@dataclass(frozen=True)
class Row:
    """One kind of parameter; "{i}" stands for the layer (global in HF, of the stage in Megatron).

    Kinds: replicated; column and qkv (fused rows cut evenly); row (columns cut evenly); vocab
    (rows cut evenly after padding); gate_up (each half cut evenly).
    """

    kind: str
    megatron: str  # canonical name: norms under the linear that follows them (fused, as TE)
    hf: tuple[str, ...]
    where: str = "layer"  # "first" stage, "layer", "last" stage
    local: str | None = None  # name in the local spec where it differs from the canonical one
    grouped: str | None = None  # name in Transformer Engine's grouped experts where it differs
    local_kind: str | None = None  # kind in the local spec where it differs
    layers: tuple[int, int | None] = (0, None)  # global layers [start, stop) that have it

    def on(self, layer: int) -> bool:
        """Whether that global layer has the parameter."""
        start, stop = self.layers
        return start <= layer and (stop is None or layer < stop)

    def under(self, profile: str) -> "Row":
        """The row with its kind in that naming profile."""
        if profile != "local" or self.local_kind is None:
            return self
        return replace(self, kind=self.local_kind)

    def name(self, profile: str) -> str:
        """The Megatron name in that naming profile."""
        return {"local": self.local, "te_grouped": self.grouped}.get(profile) or self.megatron


def _layer(
    kind: str, megatron: str, *hf: str, local: str | None = None, local_kind: str | None = None
) -> Row:
    base, hf_base = "decoder.layers.{i}.", "model.layers.{i}."
    return Row(
        kind,
        base + megatron,
        tuple(hf_base + name for name in hf),
        local=base + local if local else None,
        local_kind=local_kind,
    )


def _qkv(leaf: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{letter}_proj.{leaf}" for letter in "qkv")


EMBEDDING_ROW = Row("vocab", EMBEDDING, (HF_EMBEDDING,), where="first")
INPUT_NORM = "input_layernorm.weight"
POST_NORM = "post_attention_layernorm.weight"
FUSED_MLP_NORM, MLP_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
ATTENTION_ROWS = (
    _layer(
        "replicated", "self_attention.linear_qkv.layer_norm_weight", INPUT_NORM, local=INPUT_NORM
    ),
    _layer("qkv", "self_attention.linear_qkv.weight", *_qkv("weight")),
    _layer("qkv", "self_attention.linear_qkv.bias", *_qkv("bias")),
    _layer("replicated", "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("replicated", "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    _layer("row", "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
MLP_ROWS = (
    _layer("gate_up", "mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _layer("row", "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
FINAL_ROW = Row("replicated", "decoder.final_layernorm.weight", ("model.norm.weight",), "last")
HEAD_ROW = Row("vocab", HEAD, (HF_HEAD,), where="last")
TIED_HEAD_ROW = Row("vocab", HEAD, (HF_EMBEDDING,), where="last")


def _latent_rows(latent: LatentAttention) -> list[Row]:
    """Latent attention. Transformer Engine keeps the projections down whole on every tensor rank,
    megatron-core's local spec cuts them; the norms behind them belong to the projections up."""
    here, hf = "self_attention.linear_", "self_attn."
    if latent.query_rank is None:
        query = [_layer("column", f"{here}q_proj.weight", f"{hf}q_proj.weight")]
    else:
        query = _low_rank("q", f"{hf}q_a_proj.weight", f"{hf}q_a_layernorm.weight", f"{hf}q_b_proj")
    return [
        _layer("replicated", INPUT_NORM, INPUT_NORM),
        *query,
        *_low_rank(
            "kv", f"{hf}kv_a_proj_with_mqa.weight", f"{hf}kv_a_layernorm.weight", f"{hf}kv_b_proj"
        ),
        _layer("row", f"{here}proj.weight", f"{hf}o_proj.weight"),
    ]


def _low_rank(which: str, down: str, norm: str, up: str) -> list[Row]:
    here = f"self_attention.linear_{which}"
    return [
        _layer("replicated", f"{here}_down_proj.weight", down, local_kind="column"),
        _layer(
            "replicated",
            f"{here}_up_proj.layer_norm_weight",
            norm,
            local=f"self_attention.{which}_layernorm.weight",
        ),
        _layer("column", f"{here}_up_proj.weight", f"{up}.weight"),
    ]


def _gemma_rows() -> list[Row]:
    """The norms around a plain MLP and the one behind attention, named as Megatron-Bridge does."""
    return [
        _layer("replicated", "self_attention.linear_proj.post_layernorm.weight", POST_NORM),
        _layer("replicated", FUSED_MLP_NORM, "pre_feedforward_layernorm.weight", local=MLP_NORM),
        *MLP_ROWS,
        _layer(
            "replicated",
            "mlp.linear_fc2.post_layernorm.weight",
            "post_feedforward_layernorm.weight",
        ),
    ]


def _expert_rows(experts: Experts, family: str) -> list[Row]:
    """Norm, router and one pair of matrices per expert, in place of the MLP of a layer.

    Every expert has rows of its own, numbered in all of the model; the norm belongs to no linear.
    """
    block, gate, up, down = MOE_NAMES[family]
    result = [
        _layer("replicated", MLP_NORM, POST_NORM),
        _layer("replicated", "mlp.router.weight", f"{block}.gate.weight"),
    ]
    if experts.router_bias:
        bias = f"{block}.gate.e_score_correction_bias"
        result.append(_layer("replicated", "mlp.router.expert_bias", bias))
    for number in range(experts.count):
        one, hf = f"mlp.experts.local_experts.{number}", f"{block}.experts.{number}"
        for row in _mlp_pair(one, hf, (gate, up, down)):
            linear = "linear_fc1" if row.kind == "gate_up" else "linear_fc2"
            grouped = f"decoder.layers.{{i}}.mlp.experts.{linear}.weight{number}"
            result.append(replace(row, grouped=grouped))
    if experts.shared_ffn:
        names = (gate, up, down)
        result += _mlp_pair("mlp.shared_experts", f"{block}.shared_experts", names)
    return result


def _mlp_pair(megatron: str, hf: str, leaves: tuple[str, str, str]) -> list[Row]:
    gate, up, down = (f"{hf}.{leaf}.weight" for leaf in leaves)
    return [
        _layer("gate_up", f"{megatron}.linear_fc1.weight", gate, up),
        _layer("row", f"{megatron}.linear_fc2.weight", down),
    ]


def rows(shape: ModelShape, stages: int = 1) -> list[Row]:
    """The rows that this model has on `stages` pipeline stages, in HuggingFace order.

    A tied head is a tensor of its own only where the last stage is not the first.
    """
    head = [] if shape.tied and stages == 1 else [TIED_HEAD_ROW if shape.tied else HEAD_ROW]
    return [EMBEDDING_ROW, *_attention_rows(shape), *_mlp_rows(shape), FINAL_ROW, *head]


def _attention_rows(shape: ModelShape) -> list[Row]:
    if shape.latent is not None:
        return _latent_rows(shape.latent)
    absent = [] if shape.qkv_bias else ["linear_qkv.bias"]
    absent += [] if shape.qk_norm else ["q_layernorm.weight", "k_layernorm.weight"]
    return [row for row in ATTENTION_ROWS if not row.megatron.endswith(tuple(absent))]


def _mlp_rows(shape: ModelShape) -> list[Row]:
    if shape.gemma is not None:
        return _gemma_rows()
    dense = [_layer("replicated", FUSED_MLP_NORM, POST_NORM, local=MLP_NORM), *MLP_ROWS]
    if shape.experts is None:
        return dense
    first = shape.experts.dense_layers
    experts = _expert_rows(shape.experts, shape.family)
    return [
        *(replace(row, layers=(0, first)) for row in dense if first),
        *(replace(row, layers=(first, None)) for row in experts),
    ]


def ignored(shape: ModelShape, name: str) -> bool:
    """Whether a source may hold this tensor though the model has no use for it: rotary buffers of
    old files, and the layers behind the last one that predict further tokens (DeepSeek's MTP)."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return shape.latent is not None and layer is not None and int(layer[1]) >= shape.num_layers
