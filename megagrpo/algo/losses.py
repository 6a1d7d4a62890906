"""Policy losses of one packed micro-batch, as sums over global denominators.

They exist as pure functions of tensors and global counts so that the update cannot depend on the
layout, the micro-batch cut or the packing. What differs from PPO and from the papers: no critic; a
log-ratio is clamped to +-20 (as verl) so that no branch overflows; bnpo is the token mean of the
whole optimizer step, which makes it dapo's; the off-policy mask, the rollout weight and the KL term
follow in this order and KL is never weighted. Left out: quantiles and top-k (entropy.py; they need
the whole optimizer step), sequences that several ranks share (context parallelism).

Who divides: the coefficient of every token (aggregation.py) holds the global denominator. Nothing
after it may divide or average: Megatron runs with calculate_per_token_loss=True, without
num_tokens at finalize, and DDP sums.

Letters: B sequences of this micro-batch, T packed tokens, A advantage, w ratio, k KL, H entropy.
"""

from dataclasses import dataclass

import torch

from megagrpo.algo.aggregation import LossCounts, token_coefficients
from megagrpo.algo.kl import kl_estimate
from megagrpo.algo.segments import (
    check_sequence_shapes,
    check_token_shapes,
    flat_mask,
    segment_sum,
)
from megagrpo.algo.settings import LossSettings
from megagrpo.algo.terms import LOG_RATIO_CLAMP, WEIGHTS_INSIDE, Tokens, find_term


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the step's loss; shares add up over micro-batches and ranks."""

    loss: torch.Tensor  # scalar with gradient, already over the global denominator
    sums: dict[str, torch.Tensor]  # detached scalars to be summed; see `policy_loss`


def policy_loss(
    *,
    name: str,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
    counts: LossCounts,
    settings: LossSettings,
    ref_logprobs: torch.Tensor | None = None,
    rollout_weights: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    token_keep: torch.Tensor | None = None,
    prompt_tokens: torch.Tensor | None = None,
) -> LossOutput:
    """The loss `name` of one micro-batch and the sums of its metrics.

        x = term(w, A);  x = x token_keep;  x = x keep;  x = x rollout_weight
        x = x + beta k - entropy_coef H;  loss = sum over tokens of coefficient * x

    The denominator is in aggregation.token_coefficients. Per token, all [T], or [B, S] with
    `sequence` of that shape: logprobs float32 or float64 with gradient; old_logprobs (None:
    stopgrad(logprobs), on-policy), ref_logprobs, rollout_weights; mask and token_keep (False drops
    the policy term alone) bool or 0/1; sequence int64 in [0, num_sequences); entropy with gradient.
    Per sequence [num_sequences]: advantages (any float), keep bool (False drops the policy term),
    prompt_tokens (for prompt-mean). Masked entries may hold anything, NaN included.

    Sums: `_metric_sums`; with their tensors kl_loss (over the loss's denominator, without beta) and
    the sums over tokens ref_k1, ref_k3 and entropy. Raises ValueError for an unknown name, a mask
    that is not 0/1 or a shape that differs.
    """
    term_of = find_term(name)
    optional = {"ref_logprobs": ref_logprobs, "entropy": entropy, "token_keep": token_keep}
    check_token_shapes(logprobs.shape, **optional)
    check_sequence_shapes(
        num_sequences, advantages=advantages, keep=keep, prompt_tokens=prompt_tokens
    )
    tokens = _masked_tokens(
        logprobs=logprobs,
        old_logprobs=logprobs if old_logprobs is None else old_logprobs,
        advantages=advantages,
        mask=mask,
        sequence=sequence,
        rollout_weights=rollout_weights,
        level=settings.level,
    )
    coefficients = _coefficients(tokens, counts, settings.aggregation, prompt_tokens)
    term, clip_low, clip_high = term_of(tokens, settings)
    term = _weighted(_kept(term, tokens, token_keep, keep), tokens, name)
    loss = (coefficients * term).sum()
    sums = _metric_sums(loss, tokens, clip_low, clip_high, token_keep, keep)
    loss = _add_kl(loss, tokens, ref_logprobs, coefficients, settings, sums)
    loss = _add_entropy(loss, tokens, entropy, coefficients, settings, sums)
    return LossOutput(loss=loss, sums=sums)


def _masked_tokens(
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    rollout_weights: torch.Tensor | None,
    level: str,
) -> Tokens:
    """Flatten, and replace masked entries before any arithmetic so that a NaN there is harmless."""
    check_token_shapes(
        logprobs.shape,
        old_logprobs=old_logprobs,
        mask=mask,
        sequence=sequence,
        rollout_weights=rollout_weights,
    )
    mask, sequence = flat_mask(mask), sequence.reshape(-1)
    current = torch.where(mask, logprobs.reshape(-1), 0.0)
    old = torch.where(mask, old_logprobs.detach().reshape(-1), 0.0)
    log_ratio = (current - old).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    lengths = segment_sum(mask.to(current.dtype), sequence, len(advantages))
    if level == "sequence":
        mean = segment_sum(log_ratio, sequence, len(advantages)) / lengths.clamp(min=1)
        ratio = mean.exp()[sequence]
    else:
        ratio = log_ratio.exp()
    return Tokens(
        logprobs=current,
        log_ratio=log_ratio,
        ratio=ratio,
        advantages=torch.where(mask, advantages.detach().to(current.dtype)[sequence], 0.0),
        weights=None
        if rollout_weights is None
        else torch.where(mask, rollout_weights.detach().reshape(-1), 1.0),
        mask=mask,
        sequence=sequence,
        lengths=lengths,
    )


def _coefficients(
    tokens: Tokens, counts: LossCounts, aggregation: str, prompt_tokens: torch.Tensor | None
) -> torch.Tensor:
    """[T], with the global denominator inside."""
    return token_coefficients(
        mask=tokens.mask,
        sequence=tokens.sequence,
        lengths=tokens.lengths,
        counts=counts,
        aggregation=aggregation,
        prompt_tokens=prompt_tokens,
    )


def _kept(
    term: torch.Tensor, tokens: Tokens, token_keep: torch.Tensor | None, keep: torch.Tensor | None
) -> torch.Tensor:
    """0 where the token mask or the off-policy sequence mask says so."""
    if token_keep is not None:
        term = torch.where(flat_mask(token_keep), term, 0.0)
    return term if keep is None else torch.where(keep[tokens.sequence], term, 0.0)


def _weighted(term: torch.Tensor, tokens: Tokens, name: str) -> torch.Tensor:
    """Times the rollout weight, unless that is inside of the term already."""
    return term if tokens.weights is None or name in WEIGHTS_INSIDE else term * tokens.weights


def _metric_sums(
    pg_loss: torch.Tensor,
    tokens: Tokens,
    clip_low: torch.Tensor,
    clip_high: torch.Tensor,
    token_keep: torch.Tensor | None,
    keep: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """pg_loss (over the loss's denominator); counts tokens, sequences (with a token), clip_low and
    clip_high (tokens clipped in the direction of A); ppo_kl (old - current, sum over tokens).

    With token_keep entropy_kept_tokens; with keep what it drops: off_policy_sequences (with a
    token) and off_policy_tokens.
    """
    sums = {
        "pg_loss": pg_loss.detach(),
        "tokens": tokens.mask.sum(),
        "sequences": (tokens.lengths > 0).sum(),
        "clip_low": (clip_low & tokens.mask).sum(),
        "clip_high": (clip_high & tokens.mask).sum(),
        "ppo_kl": -tokens.log_ratio.detach().sum(),
    }
    if token_keep is not None:
        sums["entropy_kept_tokens"] = (flat_mask(token_keep) & tokens.mask).sum()
    if keep is not None:
        sums["off_policy_sequences"] = ((tokens.lengths > 0) & ~keep).sum()
        sums["off_policy_tokens"] = (tokens.mask & ~keep[tokens.sequence]).sum()
    return sums


def _add_kl(
    loss: torch.Tensor,
    tokens: Tokens,
    ref_logprobs: torch.Tensor | None,
    coefficients: torch.Tensor,
    settings: LossSettings,
    sums: dict[str, torch.Tensor],
) -> torch.Tensor:
    """loss + beta KL; its metrics go to `sums` whatever beta is."""
    if ref_logprobs is None:
        if settings.beta:
            raise ValueError(f"beta={settings.beta} needs ref_logprobs; give them or set beta 0")
        return loss
    ref = torch.where(tokens.mask, ref_logprobs.detach().reshape(-1), 0.0)
    with torch.set_grad_enabled(torch.is_grad_enabled() and settings.beta > 0):
        value = kl_estimate(
            logprobs=tokens.logprobs,
            ref_logprobs=ref,
            estimator=settings.kl_estimator,
            ratio=tokens.ratio if settings.unbiased_kl else None,
        )
        kl_loss = (coefficients * value).sum()
    current = tokens.logprobs.detach()
    for estimator in ("k1", "k3"):
        one = kl_estimate(logprobs=current, ref_logprobs=ref, estimator=estimator)
        sums[f"ref_{estimator}"] = one.sum()
    sums["kl_loss"] = kl_loss.detach()
    return loss + settings.beta * kl_loss if settings.beta else loss


def _add_entropy(
    loss: torch.Tensor,
    tokens: Tokens,
    entropy: torch.Tensor | None,
    coefficients: torch.Tensor,
    settings: LossSettings,
    sums: dict[str, torch.Tensor],
) -> torch.Tensor:
    """loss - entropy_coef H; the sum of H goes to `sums` whatever the coefficient is."""
    if entropy is None:
        if settings.entropy_coef:
            raise ValueError(f"entropy_coef={settings.entropy_coef} needs entropy; give it or 0")
        return loss
    masked = torch.where(tokens.mask, entropy.reshape(-1), 0.0)
    sums["entropy"] = masked.detach().sum()
    if not settings.entropy_coef:
        return loss
    return loss - settings.entropy_coef * (coefficients * masked).sum()
