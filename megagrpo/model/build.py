"""Builds this rank's part of a GPTModel from a ModelShape, and fills it from a TensorSource.

Flags are those under which megatron-core's logits equal transformers' (fused rotary embedding and
fused bias-activation stay off: they widen the gap between training and rollout). Layers come from
Transformer Engine where it and a GPU exist, else from torch_spec. Parameters start as NaN, so that
a weight nobody loaded cannot hide. Left out, and refused: virtual pipeline stages, context and
expert parallelism.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megagrpo.parallel import mcore_cpu, platform

mcore_cpu.install()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megagrpo.model import torch_spec  # noqa: E402
from megagrpo.parallel import mcore_compat  # noqa: E402
from megagrpo.parallel.context import ParallelContext  # noqa: E402
from megagrpo.types import ModelShape, TensorSource  # noqa: E402
from megagrpo.weights.convert import load_rank_  # noqa: E402
from megagrpo.weights.table import check_tp  # noqa: E402

Chunks = Sequence[torch.nn.Module]
"""The model chunks of one rank, bare or wrapped; one chunk without virtual stages."""

_RECOMPUTE: dict[str, dict[str, Any]] = {
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


def build_model(
    shape: ModelShape,
    context: ParallelContext,
    *,
    dtype: torch.dtype,
    padded_vocab: int,
    settings: ModelSettings,
) -> list[torch.nn.Module]:
    """This rank's GPTModel chunks, in training mode, parameters NaN; all ranks of the world join.

    `padded_vocab` is weights.table.padded_vocab(shape.vocab_size, tp). Raises ValueError for a
    shape or a setting that the layout cannot have.
    """
    _refuse(shape, context, settings)
    config = _transformer_config(shape, context, dtype, settings)
    start, stop = context.layout.stage_layers(shape.num_layers)[context.coords.pp]
    if platform.has_transformer_engine():
        spec = mcore_compat.call(
            get_gpt_layer_with_transformer_engine_spec, qk_layernorm=shape.qk_norm
        )
    else:
        spec = torch_spec.block_spec(stop - start, shape.qk_norm)
    model = mcore_compat.call(
        GPTModel,
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab,
        max_sequence_length=shape.max_positions,
        pre_process=context.is_first_stage,
        post_process=context.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=shape.rope_theta,
    )
    model.rotary_pos_emb.inv_freq = inverse_frequencies(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    return [model]


def load_weights_(
    chunks: Chunks, source: TensorSource, shape: ModelShape, context: ParallelContext
) -> None:
    """Fill every parameter from the HuggingFace tensors of `source`; padding rows become zero.

    Reads only this rank's boxes and does not communicate. With an optimizer built before, call
    `Trainable.refresh_masters` afterwards. Raises ValueError for a missing or misshapen tensor.
    """
    load_rank_(
        local_parameters(chunks), source, shape, context.layout, context.coords, naming_profile()
    )


def local_parameters(chunks: Chunks) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters under the names of weights.table (profile `naming_profile()`)."""
    assert len(chunks) == 1, f"{len(chunks)} model chunks, virtual stages are not in this version"
    return dict(bare(chunks[0]).named_parameters())


def naming_profile() -> str:
    """The naming profile of weights.table that models built here have: "te" or "local"."""
    return "te" if platform.has_transformer_engine() else "local"


def bare(chunk: torch.nn.Module) -> Any:
    """The GPTModel inside a wrapper of megatron-core."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Rotary frequencies [head_dim / 2] float32 on the CPU, bit-equal to transformers'.

    theta ** (-2i / head_dim); "linear" divides all by factor; "llama3" divides wavelengths over
    original / low_freq_factor, keeps those under original / high_freq_factor, and blends between.
    transformers modeling_rope_utils.py (_compute_llama3_parameters).
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    plain = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    assert scaling.kind == "llama3", f"rope scaling {scaling.kind!r} passed hf_config"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_positions
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > original / low, plain / scaling.factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(between, blended, scaled)


def _refuse(shape: ModelShape, context: ParallelContext, settings: ModelSettings) -> None:
    """The ValueErrors of `build_model`."""
    for name in ("vpp", "cp", "ep"):
        size = getattr(settings, name)
        if size != 1:
            raise ValueError(f"parallel.{name}={size} is not in this version; use 1")
    if settings.recompute not in _RECOMPUTE:
        raise ValueError(
            f"parallel.recompute={settings.recompute!r} is unknown; use none, selective or full"
        )
    tp = context.layout.tp
    if settings.sequence_parallel and tp == 1:
        raise ValueError("parallel.sequence_parallel=true has no effect with parallel.tp=1")
    check_tp(shape, tp)
    context.layout.stage_layers(shape.num_layers)
    declared = (context.layout.first_stage_layers, context.layout.last_stage_layers)
    if context.layout.pp == 1 and declared != (None, None):
        raise ValueError(
            f"parallel.first_stage_layers / last_stage_layers={declared} have no effect with "
            "parallel.pp=1"
        )


def _left_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    """Initialisation that draws nothing: every weight is loaded."""
    return weight


def _transformer_config(
    shape: ModelShape, context: ParallelContext, dtype: torch.dtype, settings: ModelSettings
) -> Any:
    layout = context.layout
    return mcore_compat.call(
        TransformerConfig,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        ffn_hidden_size=shape.ffn_hidden_size,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
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
        **_RECOMPUTE[settings.recompute],
    )
