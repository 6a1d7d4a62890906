"""Builds this rank's part of a GPTModel from a ModelShape, and fills it from a TensorSource.

Layers come from Transformer Engine where it and a GPU exist, else from torch_spec. Parameters start
as NaN, so that a weight nobody loaded cannot hide. Models with experts, latent attention or Gemma's
layers are built to compare logits, without Transformer Engine; training refuses them when it reads
their config. Left out, and refused: virtual pipeline stages, context and expert parallelism.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from megagrpo.parallel import mcore_cpu, platform

mcore_cpu.install()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_with_transformer_engine_spec,
)

from megagrpo.model import gemma_spec, torch_spec  # noqa: E402
from megagrpo.model.core_config import (  # noqa: E402
    RECOMPUTE,
    ModelSettings,
    transformer_config,
)
from megagrpo.parallel import mcore_compat  # noqa: E402
from megagrpo.parallel.context import ParallelContext  # noqa: E402
from megagrpo.types import ModelShape, TensorSource  # noqa: E402
from megagrpo.weights.convert import load_rank_  # noqa: E402
from megagrpo.weights.table import check_tp  # noqa: E402

Chunks = Sequence[torch.nn.Module]
"""The model chunks of one rank, bare or wrapped; one chunk without virtual stages."""


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
    config = transformer_config(shape, context.layout, dtype, settings)
    model = mcore_compat.call(
        GPTModel,
        config=config,
        transformer_layer_spec=_spec(shape, context),
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
    _set_frequencies(model, shape)
    if shape.gemma is not None:
        gemma_spec.scale_ends_(model, shape.hidden_size, shape.gemma)
    with torch.no_grad():
        for parameter in local_parameters([model]).values():
            parameter.fill_(math.nan)
    return [model]


def _spec(shape: ModelShape, context: ParallelContext) -> Any:
    start, stop = context.layout.stage_layers(shape.num_layers)[context.coords.pp]
    special = shape.experts or shape.latent or shape.gemma
    if platform.has_transformer_engine():
        if special:
            raise ValueError(
                f"{shape.architecture} is built without Transformer Engine only; compare its "
                "logits on a machine without a GPU"
            )
        return mcore_compat.call(
            get_gpt_layer_with_transformer_engine_spec, qk_layernorm=shape.qk_norm
        )
    if shape.gemma is not None:
        return gemma_spec.block_spec(shape, start, stop)
    return torch_spec.block_spec(shape, start, stop)


def _set_frequencies(model: Any, shape: ModelShape) -> None:
    """Rotary frequencies bit-equal to transformers', wherever the model keeps them."""
    if shape.latent is None:
        model.rotary_pos_emb.inv_freq = inverse_frequencies(shape)
    elif shape.rope_scaling is None or shape.rope_scaling.kind != "yarn":
        for layer in model.decoder.layers:
            layer.self_attention.rotary_pos_emb.inv_freq = inverse_frequencies(shape)


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
    """This rank's parameters under the names of weights.table (profile `naming_profile()`), and
    the router biases, which are buffers."""
    assert len(chunks) == 1, f"{len(chunks)} model chunks, virtual stages are not in this version"
    model = bare(chunks[0])
    biases = {name: b for name, b in model.named_buffers() if name.endswith(".expert_bias")}
    return dict(model.named_parameters()) | biases


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
    dim = shape.head_dim if shape.latent is None else shape.latent.rope_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
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
    if settings.recompute not in RECOMPUTE:
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
