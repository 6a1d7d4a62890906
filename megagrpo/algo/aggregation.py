"""How the terms of tokens become one number: the coefficient of every token.

It stands apart because this is the only place that divides. The global denominator of the whole
optimizer step is in the coefficient, so shares of micro-batches and ranks just add up, and nothing
after it may divide or average. Left out: local means of a micro-batch or a rank.

Letters: B sequences of this micro-batch, T packed tokens.
"""

from dataclasses import dataclass

import torch

from megagrpo.algo.settings import aggregation_name


@dataclass(frozen=True)
class LossCounts:
    """What the whole optimizer step holds, over all ranks and micro-batches."""

    total_tokens: int  # N, tokens with mask 1
    total_sequences: int  # B, sequences with at least one such token
    max_response_length: int  # tokens; the limit, not the longest seen
    total_prompts: int = 0  # prompts with at least one such token; prompt-mean reads it


def token_coefficients(
    *,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    lengths: torch.Tensor,
    counts: LossCounts,
    aggregation: str,
    prompt_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T]: 0 at masked tokens, else 1 / (the global denominator).

        token-mean               total_tokens
        seq-mean-token-mean      total_sequences * tokens of its sequence
        seq-mean-token-sum       total_sequences
        seq-mean-token-sum-norm  total_sequences * max_response_length
        prompt-mean              total_prompts * tokens of all sequences of its prompt

    mask [T] bool; sequence [T] int64; lengths [B] floating, trained tokens of each sequence here;
    prompt_tokens [B], trained tokens in the whole optimizer step of each sequence's prompt.
    Raises ValueError for an unknown name, or prompt-mean without prompt_tokens or total_prompts.
    DAPO arXiv 2503.14476 (token-mean), Dr.GRPO 2503.20783 (norm).
    """
    form = aggregation_name(aggregation)
    if form == "prompt-mean":
        if prompt_tokens is None or counts.total_prompts < 1 <= counts.total_tokens:
            given = None if prompt_tokens is None else "given"
            raise ValueError(
                f"aggregation prompt-mean has prompt_tokens={given} and "
                f"total_prompts={counts.total_prompts}; give both for the whole optimizer step"
            )
        return _spread(mask, sequence, prompt_tokens.to(lengths.dtype), counts.total_prompts)
    if form == "seq-mean-token-mean":
        return _spread(mask, sequence, lengths, counts.total_sequences)
    denominators = {
        "token-mean": counts.total_tokens,
        "seq-mean-token-sum": counts.total_sequences,
        "seq-mean-token-sum-norm": counts.total_sequences * counts.max_response_length,
    }
    return mask.to(lengths.dtype) / max(denominators[form], 1)


def _spread(
    mask: torch.Tensor, sequence: torch.Tensor, tokens: torch.Tensor, total: int
) -> torch.Tensor:
    """1 / (total * tokens of the token's sequence or prompt) where the mask is 1."""
    scale = 1.0 / (tokens.clamp(min=1) * max(total, 1))
    return torch.where(mask, scale[sequence], 0.0)
