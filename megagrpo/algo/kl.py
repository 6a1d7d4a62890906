"""Estimators of KL(current || reference) from one sampled token each.

They stand apart from the losses because the value and the gradient of an estimator are different
questions: k1 has the right mean and a gradient of zero mean, k3 the right mean and the gradient of
another divergence. Left out: controllers of the coefficient (kl_control.py), KL over the full
vocabulary.

delta = ref_logprobs - logprobs. Schulman, "Approximating KL divergence" (2020).
"""

from collections.abc import Callable

import torch

from megagrpo.algo.segments import check_token_shapes, flat_mask, segment_sum

INPUT_CLAMP = 20.0  # nats; |delta| beyond it has no gradient (k3)
OUTPUT_CLAMP = 10.0  # nats; k3 beyond it has no gradient


def _k1(delta: torch.Tensor) -> torch.Tensor:
    return -delta


def _k2(delta: torch.Tensor) -> torch.Tensor:
    return 0.5 * delta.square()


def _k3(delta: torch.Tensor) -> torch.Tensor:
    bounded = delta.clamp(-INPUT_CLAMP, INPUT_CLAMP)
    return (torch.expm1(bounded) - bounded).clamp(max=OUTPUT_CLAMP)


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def kl_estimate(
    *,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: str = "k3",
    ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token KL to the reference, differentiable in `logprobs`.

        k1 = -delta      k2 = delta^2 / 2      k3 = e^delta - delta - 1

    logprobs, ref_logprobs [...] nats of equal shape; the reference gets no gradient. k3 clamps
    delta to +-20 and its value to 10, as verl does (TRL does not); k1 and k2 cannot overflow.
    ratio [...]: e^(logprobs - old_logprobs) with its gradient makes the unbiased form ratio * k.
    Raises ValueError for an unknown estimator or shapes that differ.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"KL estimator {estimator!r} is unknown; use one of {list(ESTIMATORS)}")
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} differ "
            "in shape"
        )
    value = ESTIMATORS[estimator](ref_logprobs.detach() - logprobs)
    return value if ratio is None else ratio * value


@torch.no_grad()
def kl_sequence_sums(
    *,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
    estimator: str = "k1",
) -> torch.Tensor:
    """Sum over the trained tokens of every sequence of the per-token KL, without gradient.

    logprobs (of the policy that sampled: old_logprobs), ref_logprobs, mask (bool or 0/1), sequence
    (int64) of one shape, [T] or [B, S]; masked entries may hold anything. Returns [num_sequences]
    float64 nats, 0 for a sequence without a token. Raises ValueError for shapes that differ.
    """
    check_token_shapes(logprobs.shape, ref_logprobs=ref_logprobs, mask=mask, sequence=sequence)
    flat = flat_mask(mask)
    current, ref = (
        torch.where(flat, values.reshape(-1).double(), 0.0) for values in (logprobs, ref_logprobs)
    )
    value = kl_estimate(logprobs=current, ref_logprobs=ref, estimator=estimator)
    return segment_sum(value, sequence.reshape(-1), num_sequences)


def kl_penalized_rewards(
    *, rewards: torch.Tensor, kl_sums: torch.Tensor, beta: float
) -> torch.Tensor:
    """rewards - beta * kl_sums: the KL in the reward, before any baseline or normalisation.

    rewards [B] float64, NaN for a missing one, which stays NaN; kl_sums [B] nats of
    `kl_sequence_sums`. Returns [B] float64; a KL that is not finite makes its reward missing.
    Raises ValueError for other shapes or dtypes, or beta < 0. Ziegler et al., arXiv 1909.08593.
    """
    if rewards.dtype != torch.float64 or rewards.shape != kl_sums.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards are {rewards.dtype} {tuple(rewards.shape)}, kl_sums {tuple(kl_sums.shape)}; "
            "expected float64 [B] and one sum per sequence"
        )
    if not 0.0 <= beta < float("inf"):
        raise ValueError(f"beta={beta} must be a number from 0")
    penalized = rewards - beta * kl_sums.detach().to(torch.float64)
    return torch.where(torch.isfinite(penalized), penalized, torch.nan)
