"""The rows of the table between HuggingFace and Megatron weights: which parameters there are.

Names and kinds only; sizes and cuts are in `table.py`. Left out: latent attention, shared experts.
"""

from dataclasses import dataclass, replace

from megagrpo.types import Experts, ModelShape

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"


# (block, gate, up, down) under a layer of HuggingFace's files
MOE_NAMES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


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


def _layer(kind: str, megatron: str, *hf: str, local: str | None = None) -> Row:
    base, hf_base = "decoder.layers.{i}.", "model.layers.{i}."
    return Row(
        kind,
        base + megatron,
        tuple(hf_base + name for name in hf),
        local=base + local if local else None,
    )


def _qkv(leaf: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{letter}_proj.{leaf}" for letter in "qkv")


EMBEDDING_ROW = Row("vocab", EMBEDDING, (HF_EMBEDDING,), where="first")
LAYER_ROWS = (
    _layer(
        "replicated",
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
        local="input_layernorm.weight",
    ),
    _layer("qkv", "self_attention.linear_qkv.weight", *_qkv("weight")),
    _layer("qkv", "self_attention.linear_qkv.bias", *_qkv("bias")),
    _layer("replicated", "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("replicated", "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    _layer("row", "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _layer(
        "replicated",
        "mlp.linear_fc1.layer_norm_weight",
        "post_attention_layernorm.weight",
        local="pre_mlp_layernorm.weight",
    ),
    _layer("gate_up", "mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _layer("row", "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
FINAL_ROW = Row("replicated", "decoder.final_layernorm.weight", ("model.norm.weight",), "last")
HEAD_ROW = Row("vocab", HEAD, (HF_HEAD,), where="last")
TIED_HEAD_ROW = Row("vocab", HEAD, (HF_EMBEDDING,), where="last")


def _expert_rows(experts: Experts, family: str) -> list[Row]:
    """Norm, router and one pair of matrices per expert, in place of the MLP of a layer.

    Every expert has rows of its own, numbered in all of the model; the norm belongs to no linear.
    """
    block, gate, up, down = MOE_NAMES[family]
    norm, bias = "pre_mlp_layernorm.weight", "mlp.router.expert_bias"
    result = [
        _layer("replicated", norm, "post_attention_layernorm.weight"),
        _layer("replicated", "mlp.router.weight", f"{block}.gate.weight"),
    ]
    if experts.router_bias:
        result.append(_layer("replicated", bias, f"{block}.gate.e_score_correction_bias"))
    for number in range(experts.count):
        one, hf = f"mlp.experts.local_experts.{number}", f"{block}.experts.{number}"
        for kind, linear, leaves in (
            ("gate_up", "linear_fc1", (gate, up)),
            ("row", "linear_fc2", (down,)),
        ):
            names = [f"{hf}.{leaf}.weight" for leaf in leaves]
            row = _layer(kind, f"{one}.{linear}.weight", *names)
            grouped = f"decoder.layers.{{i}}.mlp.experts.{linear}.weight{number}"
            result.append(replace(row, grouped=grouped))
    return result


def rows(shape: ModelShape, stages: int = 1) -> list[Row]:
    """The rows that this model has on `stages` pipeline stages, in HuggingFace order.

    A tied head is a tensor of its own only where the last stage is not the first.
    """
    absent = set()
    if not shape.qkv_bias:
        absent.add("linear_qkv.bias")
    if not shape.qk_norm:
        absent |= {"q_layernorm.weight", "k_layernorm.weight"}
    layer = [row for row in LAYER_ROWS if not row.megatron.endswith(tuple(absent))]
    if shape.experts is not None:
        dense = (
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        )
        layer = [row for row in layer if not row.megatron.endswith(dense)]
        layer += _expert_rows(shape.experts, shape.family)
    head = [] if shape.tied and stages == 1 else [TIED_HEAD_ROW if shape.tied else HEAD_ROW]
    return [EMBEDDING_ROW, *layer, FINAL_ROW, *head]
