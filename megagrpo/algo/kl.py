"""Estimators of KL(current || reference) from one sampled token each.

They stand apart from the losses because the value and the gradient of an estimator are different
questions: k1 has the right mean and a gradient of zero mean, k3 the right mean and the gradient of
another divergence. Left out: controllers of the coefficient, KL over the full vocabulary.

delta = ref_logprobs - logprobs. Schulman, "Approximating KL divergence" (2020).
"""

from collections.abc import Callable

import torch

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
