"""Corrections for the gap between the engine that sampled and the trainer that scores.

They exist because vLLM and Megatron give the same weights slightly different log-probs, which makes
every sample slightly off-policy. A correction multiplies the policy term of a token, it never
touches token counts, sequence counts or group statistics, and it is computed once per rollout.
Left out: the alarm (trainer/), corrections that need other sequences (quantiles, ranks).

Letters: B sequences, T packed tokens, diff = old_logprobs - rollout_logprobs, r = e^diff.
"""

from dataclasses import dataclass

import torch

from megagrpo.algo.segments import (
    check_sequence_shapes,
    check_token_shapes,
    flat_mask,
    segment_sum,
)

DIFF_CLAMP = 20.0  # nats; keeps r and the products finite


@dataclass(frozen=True)
class CorrectionSettings:
    """Which weight, and its inclusive bounds; made by `resolve_correction`."""

    mode: str  # a key of CORRECTION_BOUNDS
    low: float | None  # None is no bound
    high: float | None


CORRECTION_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_truncate": (None, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_truncate": (None, 3.0),
    "sequence_mask": (None, 3.0),
    "geometric_mask": (0.99, 1.01),
}
"""Default (low, high) of every mode: TIS 2.0, IcePop 0.5-5.0."""


@dataclass(frozen=True)
class SumsAndPeaks:
    """Detached float64 scalars: `sums` add up over micro-batches and ranks, of `peaks` the largest
    counts."""

    sums: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Correction:
    """Weights of a micro-batch and what they did."""

    weights: torch.Tensor  # shape of old_logprobs; without gradient; 1 at masked positions
    stats: SumsAndPeaks  # see `correction_weights`


def resolve_correction(
    mode: str, cap: float | None = None, low: float | None = None
) -> CorrectionSettings:
    """The settings of a mode: its default bounds, replaced by `cap` (above) and `low` (below).

    Raises ValueError for an unknown mode, bounds with "none", bounds that are not 0 <= low < cap.
    Truncated importance sampling: Yao et al. 2025 ("Your efficient RL framework secretly brings you
    off-policy training"); token_mask is IcePop, arXiv 2510.18855.
    """
    if mode not in CORRECTION_BOUNDS:
        raise ValueError(f"correction {mode!r} is unknown; use one of {list(CORRECTION_BOUNDS)}")
    if mode == "none" and not (cap is None and low is None):
        raise ValueError(f"correction cap={cap}, low={low} have no effect with mode none")
    default_low, default_high = CORRECTION_BOUNDS[mode]
    settings = CorrectionSettings(
        mode=mode,
        low=default_low if low is None else low,
        high=default_high if cap is None else cap,
    )
    _check_bounds(settings)
    return settings


def _check_bounds(settings: CorrectionSettings) -> None:
    low, high = settings.low, settings.high
    if settings.mode == "none":
        return
    if low is None and high is None:
        raise ValueError(f"correction {settings.mode!r} needs a bound; set cap")
    if (low is not None and low < 0) or (high is not None and high <= (low or 0.0)):
        raise ValueError(
            f"correction {settings.mode!r} has bounds low={low}, cap={high}; choose 0 <= low < cap"
        )


@torch.no_grad()
def correction_weights(
    *,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
    settings: CorrectionSettings,
    advantages: torch.Tensor | None = None,
) -> Correction:
    """Weight of every token's policy term, fixed at rollout time, without gradient.

        token_*: r = e^diff      sequence_*: r = e^(sum diff)      geometric_mask: r = e^(mean diff)
        *_truncate: r moved into [low, high]      *_mask: 0 outside of [low, high], else r

    old_logprobs, rollout_logprobs, mask (bool or 0/1), sequence (int64) of one shape, [T] or
    [B, S]. Bounds are inclusive, up to the rounding of r. A token whose diff is not finite gets 0,
    and with a sequence mode so does its sequence. stats: tokens, sequences (with a token), weight
    (sum over tokens), zeroed_tokens, zeroed_sequences (every token 0), cut_sequences (any token 0),
    nonfinite_tokens; peak weight. advantages [num_sequences] splits two of them by their sign:
    tokens_positive, tokens_negative (of sequences with A > 0, A < 0), zeroed_tokens_positive and
    zeroed_tokens_negative. Raises ValueError for shapes that differ or a mask not 0/1.
    """
    shape = old_logprobs.shape
    check_token_shapes(shape, rollout_logprobs=rollout_logprobs, mask=mask, sequence=sequence)
    check_sequence_shapes(num_sequences, advantages=advantages)
    _check_bounds(settings)
    flat, index = flat_mask(mask), sequence.reshape(-1)
    diff, finite = _masked_diff(old_logprobs, rollout_logprobs, flat)
    lengths = segment_sum(flat.to(diff.dtype), index, num_sequences)
    if settings.mode.startswith(("sequence", "geometric")):
        total = segment_sum(diff, index, num_sequences)
        if settings.mode == "geometric_mask":
            total = total / lengths.clamp(min=1)
        diff = total.clamp(-DIFF_CLAMP, DIFF_CLAMP)[index]
        finite = (segment_sum((~finite).to(diff.dtype), index, num_sequences) == 0)[index]
    weights = torch.ones_like(diff) if settings.mode == "none" else _bounded(diff.exp(), settings)
    weights = torch.where(flat, torch.where(finite, weights, 0.0), 1.0)
    zeroed = flat & (weights == 0)
    zeros = segment_sum(zeroed.to(diff.dtype), index, num_sequences)
    trained = lengths > 0
    wide = torch.where(flat, weights, 0.0).double()
    sums = {
        "tokens": flat.sum().double(),
        "sequences": trained.sum().double(),
        "weight": wide.sum(),
        "zeroed_tokens": zeroed.sum().double(),
        "zeroed_sequences": (trained & (zeros == lengths)).sum().double(),
        "cut_sequences": (zeros > 0).sum().double(),
        "nonfinite_tokens": (flat & ~finite).sum().double(),
    }
    if advantages is not None:
        for sign, side in (("positive", advantages > 0), ("negative", advantages < 0)):
            sums[f"tokens_{sign}"] = (flat & side[index]).sum().double()
            sums[f"zeroed_tokens_{sign}"] = (zeroed & side[index]).sum().double()
    peaks = {"weight": wide.max() if len(wide) else wide.new_zeros(())}
    return Correction(weights=weights.view(shape), stats=SumsAndPeaks(sums, peaks))


def _masked_diff(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(diff clamped and 0 where masked or not finite, where it is finite), both [T]."""
    diff = old_logprobs.detach().reshape(-1) - rollout_logprobs.detach().reshape(-1)
    finite = torch.isfinite(diff) | ~mask
    return torch.where(finite & mask, diff, 0.0).clamp(-DIFF_CLAMP, DIFF_CLAMP), finite


def _bounded(ratio: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """The mode's truncation or mask."""
    if settings.mode.endswith("truncate"):
        return ratio.clamp(settings.low, settings.high)
    # A ratio that is the bound but for the rounding of exp and of the log-probs is inside.
    slack = 16 * torch.finfo(ratio.dtype).eps  # log-probs down to -16 nats
    low = -torch.inf if settings.low is None else settings.low * (1 - slack)
    high = torch.inf if settings.high is None else settings.high * (1 + slack)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@torch.no_grad()
def off_policy_keep(
    *,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
    threshold: float,
) -> torch.Tensor:
    """Which sequences keep their policy term: all but A < 0 with mean(rollout - current) > limit.

    Per token: logprobs (current, not old), rollout_logprobs, mask, sequence of one shape; a
    difference that is not finite says nothing and counts as 0. advantages [num_sequences];
    threshold in nats. Returns [num_sequences] bool for `losses.policy_loss`, which counts what is
    dropped. DeepSeek-V3.2, arXiv 2512.02556, sec. 3.1.
    """
    check_token_shapes(
        logprobs.shape, rollout_logprobs=rollout_logprobs, mask=mask, sequence=sequence
    )
    check_sequence_shapes(num_sequences, advantages=advantages)
    flat, index = flat_mask(mask), sequence.reshape(-1)
    drift = rollout_logprobs.reshape(-1) - logprobs.reshape(-1)
    drift = torch.where(flat & torch.isfinite(drift), drift, 0.0)
    lengths = segment_sum(flat.to(drift.dtype), index, num_sequences)
    mean = segment_sum(drift, index, num_sequences) / lengths.clamp(min=1)
    return ~((advantages < 0) & (mean > threshold))


@torch.no_grad()
def mismatch_sums(
    *, old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor
) -> SumsAndPeaks:
    """How far trainer and engine are apart on these tokens, whether or not a correction is on.

    All three of one shape; float64 inside. sums over tokens with mask 1 and finite diff: tokens,
    abs (|diff|), k1 (-diff), k3 (e^diff - diff - 1), ratio (r), ratio_square (r^2), abs_ratio
    (e^|diff|); nonfinite_tokens beside them. Peak: abs.
    """
    check_token_shapes(old_logprobs.shape, rollout_logprobs=rollout_logprobs, mask=mask)
    flat = flat_mask(mask)
    diff, finite = _masked_diff(old_logprobs.double(), rollout_logprobs.double(), flat)
    used = (flat & finite).double()
    size = diff.abs()
    ratio = diff.exp()
    columns = torch.stack(
        [used, size, -diff, torch.expm1(diff) - diff, used * ratio, used * ratio.square()]
        + [used * size.exp(), (~finite).double()]
    )
    names = ("tokens", "abs", "k1", "k3", "ratio", "ratio_square", "abs_ratio", "nonfinite_tokens")
    sums = dict(zip(names, columns.sum(1).unbind(), strict=True))
    return SumsAndPeaks(sums, {"abs": size.max() if len(size) else size.new_zeros(())})


def mismatch_metrics(mismatch: SumsAndPeaks) -> dict[str, float]:
    """The metrics of reduced `mismatch_sums`.

    ess = (sum r)^2 / (tokens sum r^2), chi2 = mean r^2 - 1, token_mult_prob_error = mean e^|diff|,
    the others are means over tokens. Without a token 0 and ess 1; infinite differences if every
    token's is not finite, so that broken weights cannot look perfect.
    """
    sums = {name: float(value) for name, value in mismatch.sums.items()}
    tokens = sums["tokens"]
    broken = tokens == 0 and sums["nonfinite_tokens"] > 0
    mean = {name: value / max(tokens, 1.0) for name, value in sums.items()}
    share = sums["ratio"] ** 2 / (tokens * sums["ratio_square"]) if tokens else 1.0
    return {
        "rollout_corr/mean_abs_logprob_diff": float("inf") if broken else mean["abs"],
        "rollout_corr/max_abs_logprob_diff": float("inf")
        if broken
        else float(mismatch.peaks["abs"]),
        "rollout_corr/k1_kl": mean["k1"],
        "rollout_corr/k3_kl": mean["k3"],
        "rollout_corr/ess": share,
        "rollout_corr/chi2": mean["ratio_square"] - 1.0 if tokens else 0.0,
        "rollout_corr/nonfinite_tokens": sums["nonfinite_tokens"],
        "token_mult_prob_error": mean["abs_ratio"] if tokens else 1.0,
    }


def correction_metrics(stats: SumsAndPeaks) -> dict[str, float]:
    """The metrics of reduced `Correction.stats`: mean and max weight, shares of what is zeroed.

    masked_share_positive and masked_share_negative, where the stats are split by sign, are zeroed
    tokens over the tokens of sequences with that sign of A.
    """
    sums = {name: float(value) for name, value in stats.sums.items()}
    tokens, sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    found = {
        "rollout_corr/weight_mean": sums["weight"] / tokens,
        "rollout_corr/weight_max": float(stats.peaks["weight"]),
        "rollout_corr/masked_share": sums["zeroed_tokens"] / tokens,
        "rollout_corr/masked_sequence_share": sums["zeroed_sequences"] / sequences,
        "rollout_corr/cut_sequence_share": sums["cut_sequences"] / sequences,
    }
    for sign in ("positive", "negative"):
        if f"tokens_{sign}" in sums:
            share = sums[f"zeroed_tokens_{sign}"] / max(sums[f"tokens_{sign}"], 1.0)
            found[f"rollout_corr/masked_share_{sign}"] = share
    return found
