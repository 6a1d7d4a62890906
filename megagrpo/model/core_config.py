"""megatron-core's TransformerConfig for a ModelShape, and what of a shape megatron-core cannot run.

Flags are those under which megatron-core's logits equal transformers' (fused rotary embedding and
fused bias-activation stay off: they widen the gap between training and rollout). Left out: layer
specs and weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megagrpo.parallel import mcore_cpu, platform

mcore_cpu.install()

from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)

from megagrpo.parallel import mcore_compat  # noqa: E402
from megagrpo.types import Layout, ModelShape  # noqa: E402
from megagrpo.weights.table import expert_ffn  # noqa: E402

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass(frozen=True)
class ModelSettings:
    """How the model runs; none of it changes a number beyond rounding.

    vpp, cp and ep exist to be refused by name until they are built.
    """

    sequence_parallel: bool = False  # norms and residuals cut over tokens between tensor ranks
    recompute: str = "none"  # "none", "selective" (core attention) or "full" (every layer)
    vpp: int = 1
    cp: int = 1
    ep: int = 1


def _left_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    """Initialisation that draws nothing: every weight is loaded."""
    return weight


def transformer_config(
    shape: ModelShape, layout: Layout, dtype: torch.dtype, settings: ModelSettings
) -> Any:
    """The configuration of this rank's model; raises ValueError for what cannot run."""
    refuse_unrunnable(shape)
    return mcore_compat.call(
        TransformerConfig if shape.latent is None else MLATransformerConfig,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        ffn_hidden_size=shape.ffn_hidden_size,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu if shape.gemma is None else tanh_gelu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        softmax_scale=None if shape.gemma is None else shape.gemma.query_scale,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Also what marks the cut parameters; without the marks the gradient norm loses shards.
        perform_initialization=True,
        init_method=_left_as_it_is,
        output_layer_init_method=_left_as_it_is,
        embedding_init_method=_left_as_it_is,
        use_cpu_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        sequence_parallel=settings.sequence_parallel,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        # Losses arrive divided by global counts; neither Megatron nor DDP may divide again.
        calculate_per_token_loss=True,
        # gloo may still be sending from an output that this would free (wrong numbers).
        deallocate_pipeline_outputs=platform.is_cuda(),
        batch_p2p_comm=True,
        overlap_p2p_comm=False,
        # Packs differ in length; upstream ties that to this dispatcher even for dense models.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        **RECOMPUTE[settings.recompute],
        **_experts(shape),
        **_latent(shape),
    )


def tanh_gelu(values: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, transformers' "gelu_pytorch_tanh"."""
    return F.gelu(values, approximate="tanh")


def _experts(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:
        return {}
    plain, mixed = experts.dense_layers, shape.num_layers - experts.dense_layers
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": expert_ffn(shape),
        "moe_layer_freq": [0] * plain + [1] * mixed if plain else 1,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalized,
        "moe_router_topk_scaling_factor": None if experts.scale == 1 else experts.scale,
        "moe_router_num_groups": None if experts.groups == 1 else experts.groups,
        "moe_router_group_topk": None if experts.groups == 1 else experts.groups_kept,
        "moe_router_enable_expert_bias": experts.router_bias,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def _latent(shape: ModelShape) -> dict[str, Any]:
    latent, scaling = shape.latent, shape.rope_scaling
    if latent is None:
        return {}
    keywords: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": shape.rope_theta,
        "rope_type": "rope",
    }
    if scaling is not None and scaling.kind == "yarn":
        keywords |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return keywords


def refuse_unrunnable(shape: ModelShape) -> None:
    """Raise ValueError naming what megatron-core has no equal of; such a model only converts."""
    experts, name = shape.experts, f"megatron-core cannot run this {shape.architecture}: "
    if experts is None:
        return
    if experts.router_bias and experts.score != "sigmoid":
        raise ValueError(
            f"{name}it has a router bias only with sigmoid scores, not {experts.score}"
        )
    if experts.score == "sigmoid" and not experts.normalized and experts.top_k > 1:
        raise ValueError(f"{name}norm_topk_prob=false; with sigmoid scores it always normalizes")
    if experts.score == "softmax" and experts.normalized and experts.top_k == 1:
        raise ValueError(f"{name}one expert a token with a weight that is always 1")
    summed = experts.top_k // experts.groups_kept
    if experts.groups > 1 and summed != experts.group_score_top:
        raise ValueError(
            f"{name}it ranks a group by its best num_experts_per_tok // topk_group = {summed} "
            f"experts, the model by its best {experts.group_score_top}"
        )
