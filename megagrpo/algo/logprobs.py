"""Log-probs and entropy of vocab-parallel logits, with the analytic gradient of both.

It exists because log_softmax over gathered logits needs the full [T, V] in fp32 several times over,
and because entropy and log-prob share every reduction. Left out: top-p and top-k (the trainer has
no filters, so the rollout may not use any), label smoothing, second derivatives, and the form that
fuses the output projection.

Letters: T packed tokens, V valid vocabulary, P columns of one rank (padded vocabulary / TP size),
z = logits / temperature, m = max z, d = z - m, S = sum e^d.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    valid_vocab: int,
    temperature: float = 1.0,
    chunk: int = 4096,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each label, and if wanted the entropy, under softmax(logits / temperature).

        logprob = d[label] - log S          d logprob / dz_j = [j = label] - p_j
        entropy = log S - sum_j p_j d_j     d entropy / dz_j = -p_j (d_j - sum_i p_i d_i)

    logits [..., P] bf16, fp32 or fp64, this rank's columns [rank * P, (rank + 1) * P); unchanged.
    labels [...] int64 global ids; group: the tensor-parallel group, None for a whole vocabulary.
    Columns with a global id >= valid_vocab carry no probability and get gradient exactly 0.
    chunk: tokens that are upcast at a time. Returns ([...], [...] or None) in nats, float32
    (float64 for float64 logits). Every rank of the group joins, with the same T, and must build the
    same loss from the results: the backward pass does not communicate.
    Raises ValueError for a temperature <= 0, shapes that do not fit, or a label outside [0, V).
    Megatron-LM, arXiv 1909.08053, sec. 3.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    _check(logits, labels, size, valid_vocab, temperature)
    columns = logits.shape[-1]
    start = rank * columns
    valid = min(max(valid_vocab - start, 0), columns)
    logprobs, entropy = _VocabParallelLogprobs.apply(
        logits.reshape(-1, columns),
        labels.reshape(-1) - start,
        (group if size > 1 else None, valid, temperature, chunk, with_entropy),
    )
    return logprobs.view(labels.shape), entropy.view(labels.shape) if with_entropy else None


def _check(
    logits: torch.Tensor, labels: torch.Tensor, size: int, valid_vocab: int, temperature: float
) -> None:
    """The ValueErrors of `vocab_parallel_logprobs`."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be > 0 for log-probs; 1.0 is no scaling")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, labels {tuple(labels.shape)}; expected one "
            "label for each row of logits"
        )
    if not 0 < valid_vocab <= size * logits.shape[-1]:
        raise ValueError(
            f"valid_vocab={valid_vocab} is outside 1..{size * logits.shape[-1]}, the columns that "
            f"{size} ranks hold; pass this rank's shard and the unpadded vocabulary"
        )
    inside = ((labels >= 0) & (labels < valid_vocab)).all()
    if labels.is_cpu:
        if not bool(inside):
            raise ValueError(
                f"labels reach from {labels.min().item()} to {labels.max().item()}, valid ids are "
                f"0..{valid_vocab - 1}; use 0 where there is no label"
            )
    else:  # a host check would wait for the device in every forward pass
        torch._assert_async(inside)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Rows [T, P] and labels relative to this rank's first column -> log-probs and entropy [T]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        settings: tuple[dist.ProcessGroup | None, int, float, int, bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        group, valid, temperature, chunk, with_entropy = settings
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # Padding is the tail of a rank's columns: without it there is nothing left to mask.
        shard = logits[:, :valid]
        peak = _row_max(shard, dtype, temperature)
        if group is not None:  # all TP ranks of one pipeline stage
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        sums = torch.zeros(
            3 if with_entropy else 2, logits.shape[0], dtype=dtype, device=peak.device
        )
        owned = (labels >= 0) & (labels < valid)
        index = labels.clamp(0, max(valid - 1, 0)).unsqueeze(1)
        for rows in _row_slices(logits.shape[0], chunk):
            shifted = _shifted(shard[rows], peak[rows], dtype, temperature)
            if valid:
                picked = shifted.gather(1, index[rows]).squeeze(1)
                sums[1, rows] = torch.where(owned[rows], picked, 0.0)
            if not with_entropy:
                torch.sum(shifted.exp_(), 1, out=sums[0, rows])
                continue
            _bound_(shifted)
            weights = shifted.exp()
            torch.sum(weights, 1, out=sums[0, rows])
            torch.sum(weights.mul_(shifted), 1, out=sums[2, rows])
        if group is not None:  # all TP ranks of one pipeline stage
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        log_sum = sums[0].log()
        mean_shifted = sums[2] / sums[0] if with_entropy else None
        # The statistics are neither input nor output, a few numbers per token: only the logits are
        # worth what saved-tensor hooks (offload, recompute) do to them.
        ctx.save_for_backward(logits)
        ctx.statistics = (index, owned, peak, log_sum, mean_shifted)
        ctx.settings = (valid, temperature, chunk)
        ctx.set_materialize_grads(False)
        return sums[1] - log_sum, None if mean_shifted is None else log_sum - mean_shifted

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        (logits,) = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None
        index, owned, peak, log_sum, mean_shifted = ctx.statistics
        valid, temperature, chunk = ctx.settings
        shard = logits[:, :valid]
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad[:, valid:] = 0.0
        direct = None if grad_logprobs is None else (grad_logprobs / temperature).unsqueeze(1)
        spread = None if grad_entropy is None else (grad_entropy / -temperature).unsqueeze(1)
        for rows in _row_slices(logits.shape[0], chunk if valid else 0):
            shifted = _shifted(shard[rows], peak[rows], peak.dtype, temperature)
            probs = (shifted - log_sum[rows, None]).exp_()
            if spread is not None:
                slope = _bound_(shifted).sub_(mean_shifted[rows, None]).mul_(spread[rows])
                probs.mul_(slope if direct is None else slope.sub_(direct[rows]))
            elif direct is not None:
                probs.mul_(-direct[rows])
            if direct is not None:
                hits = torch.where(owned[rows, None], direct[rows], 0.0)
                probs.scatter_add_(1, index[rows], hits)
            grad[rows, :valid] = probs
        return grad, None, None


def _row_slices(rows: int, chunk: int) -> list[slice]:
    """Consecutive slices of at most `chunk` rows; none for chunk 0."""
    return [slice(at, at + chunk) for at in range(0, rows, chunk)] if chunk else []


def _row_max(shard: torch.Tensor, dtype: torch.dtype, temperature: float) -> torch.Tensor:
    """max z per row; -inf for a rank that holds only padding.

    The maximum of the stored dtype is exact and division by a positive number keeps the order, so
    nothing has to be upcast here.
    """
    if shard.shape[1] == 0:
        return torch.full((shard.shape[0],), -torch.inf, dtype=dtype, device=shard.device)
    peak = shard.amax(1).to(dtype)
    return peak if temperature == 1.0 else peak.div_(temperature)


def _shifted(
    rows: torch.Tensor, peak: torch.Tensor, dtype: torch.dtype, temperature: float
) -> torch.Tensor:
    """d = z - m of one chunk, a new tensor of `dtype`."""
    if temperature == 1.0 and rows.dtype == dtype:
        return rows - peak.unsqueeze(1)
    upcast = rows.to(dtype, copy=True)
    if temperature != 1.0:
        upcast.div_(temperature)
    return upcast.sub_(peak.unsqueeze(1))


def _bound_(shifted: torch.Tensor) -> torch.Tensor:
    """In place: e^d is 0 in every dtype below -1e4, and 0 * -inf would be NaN in e^d d."""
    return shifted.clamp_(min=-1e4)
