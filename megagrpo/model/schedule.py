"""The one place that knows megatron-core's pipeline schedule and what it multiplies and divides.

Who divides: nobody here. A loss function returns, for one micro-batch, a sum already divided by the
counts of the whole optimizer step. `calculate_per_token_loss=True` keeps megatron-core's schedule
(schedules.py, forward_step_calc_loss) and DDP (gradient_scaling_factor 1) from dividing, and
`finalize` passes no token count, so that finalize_model_grads does not divide either. Gradients end
as the plain sum over micro-batches and data-parallel ranks, reduced once per optimizer step.

Left out: virtual pipeline stages, context parallelism, overlap of reduction and backward pass.

Letters: T tokens of a micro-batch, P vocabulary columns of one tensor rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.parallel import mcore_cpu, platform

mcore_cpu.install()

from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from megagrpo.algo.logprobs import vocab_parallel_logprobs  # noqa: E402
from megagrpo.model.build import Chunks, bare  # noqa: E402
from megagrpo.model.optimizer import Trainable  # noqa: E402
from megagrpo.model.torch_spec import padded_params  # noqa: E402
from megagrpo.parallel import mcore_compat  # noqa: E402
from megagrpo.parallel.collectives import broadcast_from_last_stage  # noqa: E402
from megagrpo.parallel.context import ParallelContext  # noqa: E402
from megagrpo.types import MicroBatch  # noqa: E402

Sums = dict[str, torch.Tensor]
"""Named scalars of one micro-batch, detached, to be added up."""

LossFn = Callable[[torch.Tensor, torch.Tensor | None, MicroBatch], tuple[torch.Tensor, Sums]]
"""loss_fn(logprobs [T], entropy [T] or None, micro_batch) -> (scalar sum, sums for metrics)."""


def pad_multiple(*, tp: int, cp: int, sequence_parallel: bool) -> int:
    """Multiple to which a packed length is padded.

    cp * lcm(2, tp) under context parallelism, else tp under sequence parallelism, else 1. Example:
    (tp, cp) = (1, 1), (2, 1), (2, 2), (3, 2) with sequence parallelism: 1, 2, 4, 12.
    """
    if cp > 1:
        return cp * math.lcm(2, tp)
    return tp if sequence_parallel else 1


def forward_backward(
    trainable: Trainable | Chunks,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    context: ParallelContext,
    temperature: float,
    valid_vocab: int,
    with_entropy: bool,
) -> list[Sums]:
    """Gradients of the summed losses over all micro-batches and data-parallel ranks.

    Clears the gradients first. Afterwards `main_grad` of every parameter holds the sum (with the
    distributed optimizer: this rank's shard of it). Returns the sums of `loss_fn` per micro-batch
    on the last stage, [] on the others. All ranks of the world join, with equal numbers of
    micro-batches, else ValueError. log-probs are of softmax(logits / temperature) over the ids
    below `valid_vocab`; entropy comes only with `with_entropy`. A loss must depend on `logprobs` or
    `entropy` even where the mask is empty (times zero), or the backward pass has nothing to do.
    """
    chunks = _chunks(trainable)
    _check_equal_counts(len(micro_batches), context)
    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]

    def loss_of(logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, ...]:
        logprobs, entropy = _logprobs(
            logits, micro, context, temperature, valid_vocab, with_entropy
        )
        loss, sums = loss_fn(logprobs, entropy, micro)
        assert loss.ndim == 0, f"a loss is one number, not {tuple(loss.shape)}"
        # (sum, token count that nobody uses, what the schedule returns)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), sums  # type: ignore

    config = bare(chunks[0]).config
    assert config.calculate_per_token_loss, "megatron-core would divide by the micro-batches"
    config.finalize_model_grads_func = _finalize
    return _run(chunks, micro_batches, loss_of, forward_only=False)


def forward_logprobs(
    chunks: Trainable | Chunks,
    micro_batches: Sequence[MicroBatch],
    *,
    context: ParallelContext,
    temperature: float,
    valid_vocab: int,
) -> list[torch.Tensor]:
    """Log-prob of every label, [T] float32 per micro-batch, without gradients, on every stage.

    Runs in evaluation mode and restores the mode. All ranks of the world join, with equal numbers
    of micro-batches, else ValueError. Positions without a label hold the log-prob of id 0.
    """

    def logprobs_of(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return _logprobs(logits, micro, context, temperature, valid_vocab, False)[0]

    return _forward_values(chunks, micro_batches, logprobs_of, (), context)


def forward_logprobs_and_entropies(
    chunks: Trainable | Chunks,
    micro_batches: Sequence[MicroBatch],
    *,
    context: ParallelContext,
    temperature: float,
    valid_vocab: int,
) -> list[torch.Tensor]:
    """As `forward_logprobs`, [T, 2] per micro-batch: log-prob of the label and the entropy of the
    whole distribution, nats."""

    def both_of(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        logprobs, entropy = _logprobs(logits, micro, context, temperature, valid_vocab, True)
        assert entropy is not None, "it was asked for"
        return torch.stack([logprobs, entropy], dim=1)

    return _forward_values(chunks, micro_batches, both_of, (2,), context)


def _forward_values(
    chunks: Trainable | Chunks,
    micro_batches: Sequence[MicroBatch],
    values_of: Callable[[torch.Tensor, MicroBatch], torch.Tensor],
    width: tuple[int, ...],
    context: ParallelContext,
) -> list[torch.Tensor]:
    """`values_of` gives [T, *width] float32 per micro-batch on the last stage; here on every
    stage."""
    _check_equal_counts(len(micro_batches), context)
    found = _evaluate(_chunks(chunks), micro_batches, values_of)
    lengths = [micro.tokens.numel() for micro in micro_batches]
    if context.is_last_stage:
        packed = torch.cat(found)
    else:
        packed = torch.empty(sum(lengths), *width, device=platform.device())
    return list(broadcast_from_last_stage(packed, context).split(lengths))


def forward_logits(
    chunks: Trainable | Chunks,
    micro_batches: Sequence[MicroBatch],
    *,
    context: ParallelContext,
    valid_vocab: int,
) -> list[torch.Tensor]:
    """Raw logits [T, valid_vocab] float32 per micro-batch on every rank; for parity checks only.

    Full logits of every micro-batch exist at once. All ranks of the world join.
    """

    def logits_of(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        shards = [torch.empty_like(logits) for _ in range(context.layout.tp)]
        # All tensor ranks of the last stage.
        dist.all_gather(shards, logits.contiguous(), group=context.tp_group)
        return torch.cat(shards, dim=1)[:, :valid_vocab].float()

    return _forward_values(chunks, micro_batches, logits_of, (valid_vocab,), context)


def _chunks(trainable: Trainable | Chunks) -> list[torch.nn.Module]:
    return list(trainable.chunks if isinstance(trainable, Trainable) else trainable)


def _logprobs(
    logits: torch.Tensor,
    micro: MicroBatch,
    context: ParallelContext,
    temperature: float,
    valid_vocab: int,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits [T, P] of this tensor rank -> log-probs and entropy [T]; all tensor ranks join."""
    return vocab_parallel_logprobs(
        logits,
        micro.labels.to(logits.device),
        group=context.tp_group,
        valid_vocab=valid_vocab,
        temperature=temperature,
        with_entropy=with_entropy,
    )


@torch.no_grad()
def _evaluate(
    chunks: list[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    result_of: Callable[[torch.Tensor, MicroBatch], torch.Tensor],
) -> list[torch.Tensor]:
    """`result_of(logits, micro_batch)` per micro-batch on the last stage, in evaluation mode."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        return _run(chunks, micro_batches, result_of, forward_only=True)
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)


def _run(
    chunks: list[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    result_of: Callable[[torch.Tensor, MicroBatch], Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """One pass of the schedule; `result_of(logits [T, P], micro_batch)` runs on the last stage."""
    config = bare(chunks[0]).config
    multiple = pad_multiple(
        tp=config.tensor_model_parallel_size,
        cp=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel,
    )

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro = next(batches)
        tokens, positions, packing = _packed_inputs(micro, multiple)
        output = model(tokens, positions, None, packed_seq_params=packing)

        def at_last_stage(logits: torch.Tensor, non_loss_data: bool = False) -> Any:
            return result_of(logits[0, : micro.tokens.numel()], micro)

        return output, at_last_stage

    return mcore_compat.call(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(micro.tokens.numel() for micro in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _packed_inputs(
    micro: MicroBatch, multiple: int
) -> tuple[torch.Tensor, torch.Tensor, PackedSeqParams]:
    """Tokens and positions [1, T padded to `multiple`] on the device, and the packing.

    Tokens outside cu_seqlens and the padding become one more sequence of its own.
    """
    length = micro.tokens.numel()
    padded = -(-length // multiple) * multiple
    lengths = micro.cu_seqlens.diff().tolist()
    rest = padded - sum(lengths)
    assert rest >= 0, f"cu_seqlens end at {sum(lengths)}, the pack has {length} tokens"
    if rest:
        lengths.append(rest)
    device = platform.device()
    tokens = torch.nn.functional.pad(micro.tokens, (0, padded - length)).to(device)
    positions = torch.nn.functional.pad(micro.positions, (0, padded - length)).to(device)
    return tokens.unsqueeze(0), positions.unsqueeze(0), _packing(lengths, device)


def _packing(lengths: list[int], device: torch.device) -> PackedSeqParams:
    if not platform.has_transformer_engine():
        return padded_params(lengths, device)
    cumulative = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _finalize(model: list[Any], num_tokens: Any = None, **keywords: Any) -> None:
    """Reduce gradients over DP, norms over TP, tied embeddings over PP; never divide by tokens."""
    mcore_compat.call(finalize_model_grads, model=model, num_tokens=None, **keywords)


def _check_equal_counts(count: int, context: ParallelContext) -> None:
    """Refuse unequal numbers of micro-batches, which would hang in the middle of the schedule."""
    bounds = torch.tensor([count, -count])
    # All ranks of the world, on the CPU.
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=context.cpu_group)
    most, least = bounds[0].item(), -bounds[1].item()
    if most != least or count == 0:
        raise ValueError(
            f"ranks have {least} to {most} micro-batches, this one {count}; every rank needs the "
            "same number, at least 1: pad with dummies"
        )
