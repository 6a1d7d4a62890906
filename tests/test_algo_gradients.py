"""Gradients by central differences, for every loss, aggregation, level and option.

Values that a loss must not differentiate (cispo's ratio, vespo's phi) are held by moving the old
log-probs along with the current ones; KL and entropy are then differenced with old fixed.
"""

from dataclasses import replace

import pytest
import torch

from megagrpo.algo.losses import LossCounts, policy_loss
from megagrpo.algo.settings import AGGREGATIONS, LOSS_DEFAULTS, resolve_loss_defaults

FORMS = sorted(set(AGGREGATIONS.values()))
CLIPPED = ["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo"]
STOPPED = ["cispo", "cispo_relative", "vespo"]
PAIRS = [(name, level) for name in LOSS_DEFAULTS for level in LOSS_DEFAULTS[name].levels]
STEP = 1e-6

# One row trained, one with a masked token, one without a token, one short.
LENGTHS, MASK = (3, 3, 2, 1), [1, 1, 1, 1, 0, 1, 0, 0, 1]
SEQUENCE = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
COUNTS = LossCounts(total_tokens=17, total_sequences=5, max_response_length=8, total_prompts=2)
PLACE = {
    "mask": torch.tensor(MASK),
    "sequence": SEQUENCE,
    "num_sequences": 4,
    "counts": COUNTS,
    "advantages": torch.tensor([0.8, -1.3, 0.4, -0.2], dtype=torch.float64),
}
OPTIONS = {
    "plain": ({}, ()),
    "k1, weights": ({"beta": 0.3, "kl_estimator": "k1"}, ("rollout_weights",)),
    "k2, entropy, keep": ({"beta": 0.3, "kl_estimator": "k2", "entropy_coef": 0.2}, ("keep",)),
    "k3, token_keep": ({"beta": 0.3, "entropy_coef": -0.1}, ("token_keep",)),
    "unbiased k3": ({"beta": 0.3, "unbiased_kl": True}, ()),
    "unbiased k1": ({"beta": 0.3, "unbiased_kl": True, "kl_estimator": "k1"}, ("rollout_weights",)),
    "delta": ({"delta": 1.1}, ()),
    "dual clip": ({"dual_clip": 1.1}, ()),
    "delta, dual clip, k3": ({"delta": 1.3, "dual_clip": 1.2, "beta": 0.3}, ("rollout_weights",)),
}


def _random(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGPROBS, OLD, REF = (-_random(seed, 9) for seed in (11, 12, 13))
ENTROPY = _random(14, 9)
MASKS = {
    "rollout_weights": 0.5 + _random(15, 9),
    "keep": torch.tensor([True, False, True, True]),
    "token_keep": torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 1]).bool(),
}


def _loss(name, settings, options, logprobs, old, entropy):
    return policy_loss(
        name=name,
        logprobs=logprobs,
        old_logprobs=old,
        entropy=entropy,
        ref_logprobs=REF,
        prompt_tokens=torch.tensor([9, 8, 9, 8]),
        settings=settings,
        **{option: MASKS[option] for option in options},
        **PLACE,
    ).loss


def _numeric(name, settings, options):
    """Central differences for the nine log-probs and the nine entropies."""
    policy_alone = replace(settings, beta=0.0, entropy_coef=0.0, unbiased_kl=False)

    def value(step):
        moved, entropy = LOGPROBS + step[:9], ENTROPY + step[9:]
        whole = _loss(name, settings, options, moved, OLD, entropy)
        if name not in STOPPED:
            return whole
        held = _loss(name, policy_alone, options, moved, OLD + step[:9], entropy)
        return held + whole - _loss(name, policy_alone, options, moved, OLD, entropy)

    steps = STEP * torch.eye(18, dtype=torch.float64)
    return torch.stack([(value(step) - value(-step)) / (2 * STEP) for step in steps])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_every_gradient_equals_its_finite_difference(name, level, form, options):
    """Rounding of the value over the step, 1e-16 / 1e-6, bounds the error."""
    given, masks = OPTIONS[options]
    if not given.keys().isdisjoint({"delta", "dual_clip"}) and name not in CLIPPED:
        with pytest.raises(ValueError, match="has no effect on loss"):
            resolve_loss_defaults(name, **given)
        return
    settings = resolve_loss_defaults(name, aggregation=form, level=level, **given)
    leaf, entropy = LOGPROBS.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
    _loss(name, settings, masks, leaf, OLD, entropy).backward()
    ours = torch.cat([leaf.grad, torch.zeros(9) if entropy.grad is None else entropy.grad])
    torch.testing.assert_close(ours, _numeric(name, settings, masks), atol=2e-9, rtol=0)
    masked = torch.tensor(MASK) == 0
    assert ours[:9][masked].eq(0).all() and ours[9:][masked].eq(0).all()


def test_the_inputs_reach_every_branch_of_clipping():
    """Else the differences above would say nothing about delta, dual clip or either bound."""
    ratio, advantage = (LOGPROBS - OLD).exp(), PLACE["advantages"][SEQUENCE]
    used = torch.tensor(MASK) == 1
    assert (used & (ratio > 1.3) & (advantage < 0)).any(), "delta and dual clip act on none"
    assert (used & (ratio > 1.2) & (advantage > 0)).any(), "the upper bound acts on none"
    assert (used & (ratio < 0.8) & (advantage < 0)).any(), "the lower bound acts on none"
    assert (used & (ratio > 0.8) & (ratio < 1.2)).any(), "no ratio lies between the bounds"
