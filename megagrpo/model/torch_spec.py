"""Norm and core attention of a GPT layer without Transformer Engine, for the CPU and for bare GPUs.

Upstream's local spec has a norm that refuses sequence parallelism and an attention that refuses
packed sequences; these two replace them, the rest of the layer stays megatron-core's. Left out:
context parallelism, dropout inside attention, attention biases.

Letters: T packed tokens, H heads, D head size, N sequences of a part, S its longest sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megagrpo.parallel import mcore_cpu

mcore_cpu.install()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from megagrpo.parallel import mcore_compat  # noqa: E402
from megagrpo.types import ModelShape  # noqa: E402

_MAX_PADDING = 4  # one padded batch as long as it is at most this many times the real tokens


@dataclass(frozen=True)
class Part:
    """Sequences of similar length, as one right-padded batch.

    Example: lengths 2 and 3 behind one another: gather [0, 1, 0, 2, 3, 4] (the pad repeats token
    0), scatter [0, 1, 3, 4, 5], tokens [0, 1, 2, 3, 4], count 2, longest 3.
    """

    gather: torch.Tensor  # [N * S] int64: packed token at each place of the batch
    scatter: torch.Tensor  # [T of this part] int64: place in the batch of each token
    tokens: torch.Tensor  # [T of this part] int64: packed token each of them is
    count: int  # N
    longest: int  # S


@dataclass
class PaddedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Packed sequences with the way to and from padded batches, computed once per micro-batch."""

    parts: tuple[Part, ...] = ()


def padded_params(lengths: list[int], device: torch.device) -> PaddedSeqParams:
    """Packing parameters of sequences of these lengths, in order; lengths of 0 are allowed."""
    cumulative = torch.tensor([0, *lengths]).cumsum(0)
    longest = max(lengths)
    one_batch = len(lengths) * longest <= _MAX_PADDING * sum(lengths)
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            groups.setdefault(0 if one_batch else length.bit_length(), []).append(index)
    starts = cumulative.tolist()
    cu_seqlens = cumulative.int().to(device)
    return PaddedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        parts=tuple(
            _part([starts[i] for i in members], [lengths[i] for i in members], device)
            for members in groups.values()
        ),
    )


def _part(starts: list[int], lengths: list[int], device: torch.device) -> Part:
    longest = max(lengths)
    within = torch.arange(longest).expand(len(lengths), longest)
    real = within < torch.tensor(lengths).unsqueeze(1)
    token = torch.tensor(starts).unsqueeze(1) + within
    return Part(
        gather=torch.where(real, token, 0).flatten().to(device),
        scatter=real.flatten().nonzero().squeeze(1).to(device),
        tokens=token[real].to(device),
        count=len(lengths),
        longest=longest,
    )


class _Pad(torch.autograd.Function):
    """Packed rows [T, ...] -> batch rows [N * S, ...].

    Pads repeat some row; behind a causal mask nothing real sees them and their gradient is zero, so
    the backward pass reads the real places only, which is cheaper than adding all of them up.
    """

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, part: Part) -> torch.Tensor:
        ctx.part, ctx.shape = part, packed.shape
        return packed.index_select(0, part.gather)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        part: Part = ctx.part
        real = grad.index_select(0, part.scatter)
        if part.tokens.numel() == ctx.shape[0]:
            return real, None  # one part holds all tokens, in order
        return grad.new_zeros(ctx.shape).index_copy_(0, part.tokens, real), None


class _Unpad(torch.autograd.Function):
    """Batch rows [N * S, ...] -> the real ones [T of the part, ...]."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, part: Part) -> torch.Tensor:
        ctx.part, ctx.shape = part, batch.shape
        return batch.index_select(0, part.scatter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.part.scatter, grad), None


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension that also works under sequence parallelism.

    Under sequence parallelism each tensor rank sees its own tokens; the flag on the weight makes
    finalize_model_grads add the gradients of all tensor ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentRMSNorm(TorchRMSNorm):
    """The norm of a low-rank query or key, whose epsilon transformers takes from no config."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(config, hidden_size, **kwargs)
        self.eps = 1e-6


class TorchCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention, packed (THD) or not (SBHD)."""

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size={config.context_parallel_size} is not in this version; "
                "use 1"
            )
        self.layer_number = layer_number
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PaddedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Packed: query [T, H, D], key and value [T, HKV, D] -> [T, H * D].

        Otherwise [S, B, H, D] -> [S, B, H * D]; attention_mask [B, 1, S, S] bool, True is masked,
        replaces the causal mask.
        """
        if packed_seq_params is None:
            return self._batched(query, key, value, attention_mask)
        outputs = [self._part(query, key, value, part) for part in packed_seq_params.parts]
        if len(outputs) == 1:
            return outputs[0]
        order = torch.cat([part.tokens for part in packed_seq_params.parts])
        return torch.cat(outputs).index_select(0, order.argsort())

    def _part(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part
    ) -> torch.Tensor:
        batch = [
            _Pad.apply(x, part).view(part.count, part.longest, *x.shape[1:]).transpose(1, 2)
            for x in (query, key, value)
        ]
        out = self._attend(*batch, None)
        return _Unpad.apply(out.transpose(1, 2).reshape(part.count * part.longest, -1), part)

    def _batched(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        batch = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = self._attend(*batch, attention_mask)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        masked: torch.Tensor | None,
    ) -> torch.Tensor:
        """[N, H, S, D] each, fewer heads in key and value -> [N, H, S, D of value]; causal unless
        `masked` (True is masked)."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if masked is None else ~masked,
            is_causal=masked is None,
            scale=self.scale,
            enable_gqa=True,
        )


def block_spec(shape: ModelShape, start: int, stop: int) -> TransformerBlockSubmodules:
    """Layers [start, stop) of the model, those of one pipeline stage: megatron-core's local spec
    with our norm and attention."""
    dense = 0 if shape.experts is None else shape.experts.dense_layers
    plain = _layer_spec(shape, None)
    mixed = None if shape.experts is None else _layer_spec(shape, shape.experts.count)
    specs = [plain if mixed is None or layer < dense else mixed for layer in range(start, stop)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchRMSNorm)


def _layer_spec(shape: ModelShape, experts: int | None) -> Any:
    layer = mcore_compat.call(
        get_gpt_layer_local_spec,
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        multi_latent_attention=shape.latent is not None,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = TorchRMSNorm
    layer.submodules.pre_mlp_layernorm = TorchRMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchCoreAttention
    if shape.latent is not None:
        attention.q_layernorm = LatentRMSNorm
        attention.kv_layernorm = LatentRMSNorm
    elif shape.qk_norm:
        attention.q_layernorm = TorchRMSNorm
        attention.k_layernorm = TorchRMSNorm
    return layer
