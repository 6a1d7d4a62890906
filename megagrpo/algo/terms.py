"""The per-token terms x(w, A) of the losses, by name.

They stand apart because each is one formula of one paper: weights, masks, KL and denominators are
the same for all of them and live in losses.py. Left out: everything that needs more than one
micro-batch.

Letters: B sequences of this micro-batch, T packed tokens, A advantage, w ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megagrpo.algo.segments import segment_sum
from megagrpo.algo.settings import LossSettings

LOG_RATIO_CLAMP = 20.0  # nats
RATIO_FLOOR = 1e-8  # vespo: smallest rollout weight and product


@dataclass(frozen=True)
class Tokens:
    """Flat [T] tensors whose masked entries are 0 (rollout weights: 1)."""

    logprobs: torch.Tensor
    log_ratio: torch.Tensor  # logprobs - old, clamped; carries the gradient
    ratio: torch.Tensor  # w at the asked level; carries the gradient
    advantages: torch.Tensor  # of the token's sequence
    weights: torch.Tensor | None  # rollout weights
    mask: torch.Tensor  # bool
    sequence: torch.Tensor  # int64
    lengths: torch.Tensor  # [B], tokens with mask 1


Term = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(x, clipped low, clipped high), each [T]; the flags are bool and know the sign of A."""


def _clipped_term(tokens: Tokens, settings: LossSettings) -> Term:
    """-min(min(w, delta) A, clip(w) A), for A < 0 at most -dual_clip A.

    PPO arXiv 1707.06347; two bounds DAPO 2503.14476; dual clip 1912.09729.
    """
    ratio, advantages = tokens.ratio, tokens.advantages
    assert settings.eps_low is not None and settings.eps_high is not None, settings
    low, high = 1.0 - settings.eps_low, 1.0 + settings.eps_high
    first = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    term = -torch.minimum(first * advantages, ratio.clamp(low, high) * advantages)
    if settings.dual_clip is not None:
        bounded = torch.minimum(term, -settings.dual_clip * advantages)
        term = torch.where(advantages < 0, bounded, term)
    return term, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)


def _capped_term(tokens: Tokens, cap: float) -> Term:
    """-stopgrad(min(w, cap)) A logprobs; there is no lower bound. CISPO arXiv 2506.13585."""
    ratio = tokens.ratio.detach()
    term = -ratio.clamp(max=cap) * tokens.advantages * tokens.logprobs
    return term, torch.zeros_like(tokens.mask), (ratio > cap) & (tokens.advantages > 0)


def _cispo_term(tokens: Tokens, settings: LossSettings) -> Term:
    assert settings.cap is not None, settings
    return _capped_term(tokens, settings.cap)


def _cispo_relative_term(tokens: Tokens, settings: LossSettings) -> Term:
    assert settings.eps_high is not None, settings
    return _capped_term(tokens, 1.0 + settings.eps_high)


def _sapo_term(tokens: Tokens, settings: LossSettings) -> Term:
    """-(4 / tau) sigmoid(tau (w - 1)) A, a gate of slope 1 at w = 1. SAPO arXiv 2511.20347."""
    advantages = tokens.advantages
    assert settings.tau_positive is not None and settings.tau_negative is not None, settings
    positive = advantages.new_tensor(settings.tau_positive)  # a number would become float32
    negative = advantages.new_tensor(settings.tau_negative)
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau)
    never = torch.zeros_like(tokens.mask)
    return -gate * advantages, never, never


def _vespo_term(tokens: Tokens, settings: LossSettings) -> Term:
    """-stopgrad(phi(W)) A logprobs, log phi = lambda + k log W - lambda W.

    W is the product over the sequence of ratio and rollout weight, floored at 1e-8.
    """
    log_w = tokens.log_ratio.detach()
    if tokens.weights is not None:
        log_w = log_w + tokens.weights.clamp(min=RATIO_FLOOR).log().clamp(max=LOG_RATIO_CLAMP)
    log_w = segment_sum(log_w, tokens.sequence, len(tokens.lengths))[tokens.sequence]
    log_w = log_w.clamp(math.log(RATIO_FLOOR), LOG_RATIO_CLAMP)
    assert settings.gamma_positive is not None and settings.gamma_negative is not None, settings
    k_up, lambda_up = settings.gamma_positive
    k_down, lambda_down = settings.gamma_negative
    up = lambda_up + k_up * log_w - lambda_up * log_w.exp()
    down = lambda_down + k_down * log_w - lambda_down * log_w.exp()
    phi = torch.where(tokens.advantages >= 0, up, down).exp()
    never = torch.zeros_like(tokens.mask)
    return -phi * tokens.advantages * tokens.logprobs, never, never


TERMS: dict[str, Callable[[Tokens, LossSettings], Term]] = {
    **dict.fromkeys(("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo"), _clipped_term),
    "cispo": _cispo_term,
    "cispo_relative": _cispo_relative_term,
    "sapo": _sapo_term,
    "vespo": _vespo_term,
}
WEIGHTS_INSIDE = frozenset({"vespo"})  # the rollout weight is part of the term already


def find_term(name: str) -> Callable[[Tokens, LossSettings], Term]:
    """The term of loss `name`; raises ValueError listing the names."""
    if name not in TERMS:
        raise ValueError(f"loss {name!r} is unknown; use one of {list(TERMS)}")
    return TERMS[name]
