"""What Gemma 2 and 3 need beyond megatron-core's own layers, as parts of a layer spec.

megatron-core has zero-centred norms in Transformer Engine only, and neither norms behind attention
and MLP, nor soft-capping, nor a window and a rotary base by layer on the CPU; these parts have, so
that logits can be compared. Weights are named as Megatron-Bridge names them. Left out: training,
Transformer Engine, bidirectional attention.

Letters: N sequences, H heads, S positions, D head size.
"""

from typing import Any

import torch

from megagrpo.parallel import mcore_cpu

mcore_cpu.install()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttention  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.utils import sharded_state_dict_default  # noqa: E402

from megagrpo.model.torch_spec import TorchCoreAttention, TorchRMSNorm  # noqa: E402
from megagrpo.parallel import mcore_compat  # noqa: E402
from megagrpo.types import GemmaTraits, ModelShape  # noqa: E402


class GemmaRMSNorm(TorchRMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Any [..., hidden] -> the same shape and dtype."""
        scale = 1 + self.weight.float()
        normed = torch.nn.functional.rms_norm(
            values.float(), self.normalized_shape, scale, self.eps
        )
        return normed.type_as(values)


class PostNormLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear with a norm behind it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = GemmaRMSNorm(config, output_size)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As RowParallelLinear, which has no bias here."""
        output, _ = super().forward(values)
        return self.post_layernorm(output), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        """As RowParallelLinear, the norm included."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | mcore_compat.call(
            sharded_state_dict_default,
            self.post_layernorm,
            f"{prefix}post_layernorm.",
            sharded_offsets,
            metadata,
            tp_group=self.tp_group,
        )


class GemmaCoreAttention(TorchCoreAttention):
    """Causal attention within a window, scores soft-capped."""

    def __init__(
        self, *args: Any, window: int | None, softcap: float | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.window, self.softcap = window, softcap

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        masked: torch.Tensor | None,
    ) -> torch.Tensor:
        length, groups = query.shape[2], query.shape[1] // key.shape[1]
        at = torch.arange(length, device=query.device)
        behind = at.unsqueeze(1) - at
        hidden = behind < 0 if masked is None else masked
        if self.window is not None:
            hidden = hidden | (behind >= self.window)
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = query @ key.mT * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.float().masked_fill(hidden, float("-inf"))
        return scores.softmax(-1).type_as(value) @ value


class GemmaSelfAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention with a rotary base of its own."""

    def __init__(self, *args: Any, rope_theta: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dim = self.config.kv_channels
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        self.frequencies = 1.0 / (rope_theta**exponents)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As SelfAttention, with other angles of the same positions [S, 1, 1, D]."""
        steps = torch.arange(len(rotary_pos_emb)).float()
        half = torch.outer(steps, self.frequencies)
        angles = torch.cat((half, half), dim=-1)[:, None, None].to(rotary_pos_emb.device)
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=angles, **kwargs)


def block_spec(shape: ModelShape, start: int, stop: int) -> TransformerBlockSubmodules:
    """Layers [start, stop) of a Gemma."""
    specs = [_layer_spec(shape, layer) for layer in range(start, stop)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=GemmaRMSNorm)


def _layer_spec(shape: ModelShape, number: int) -> ModuleSpec:
    assert shape.gemma is not None, f"{shape.architecture} is no Gemma"
    window = shape.gemma.windows[number]
    layer = mcore_compat.call(
        get_gpt_layer_local_spec, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = GemmaRMSNorm
    parts.mlp.submodules.linear_fc2 = PostNormLinear
    attention = parts.self_attention.submodules
    attention.linear_proj = PostNormLinear
    attention.core_attention = ModuleSpec(
        module=GemmaCoreAttention,
        params={"window": window, "softcap": shape.gemma.attention_softcap},
    )
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = GemmaRMSNorm
    if window is not None and shape.gemma.local_rope_theta != shape.rope_theta:
        parts.self_attention.module = GemmaSelfAttention
        parts.self_attention.params["rope_theta"] = shape.gemma.local_rope_theta
    return layer


def scale_ends_(model: Any, hidden_size: int, traits: GemmaTraits) -> None:
    """Make the model multiply embeddings by sqrt(hidden), rounded to their dtype as transformers
    does, and soft-cap its logits."""

    def scale(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.tensor(hidden_size**0.5, dtype=output.dtype, device=output.device)

    def cap(_module: object, _inputs: object, output: Any) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        return limit * torch.tanh(logits / limit), bias

    if model.pre_process:
        model.embedding.register_forward_hook(scale)
    limit = traits.logit_softcap
    if model.post_process and limit is not None:
        model.output_layer.register_forward_hook(cap)
