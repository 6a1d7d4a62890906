"""The high-entropy token mask: a global quantile, and what it leaves alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algo.entropy import entropy_threshold, high_entropy_tokens
from megagrpo.algo.losses import LossCounts, policy_loss
from megagrpo.algo.settings import LOSS_DEFAULTS, resolve_loss_defaults
from tests.pool import run_ranks


def _double(values):
    return torch.tensor(values, dtype=torch.float64)


CUT = ([0.1, 0.2, 0.3, 0.4], [1.1, 1.2, 1.3, 1.4])


def test_the_upper_half_of_two_micro_batches_is_the_second_one():
    """LOSS-23: threshold 0.75 over the optimizer step; inside each it would be 0.25 and 1.25."""
    whole = torch.tensor([*CUT[0], *CUT[1]])
    threshold = entropy_threshold(whole, 0.5)
    assert threshold == pytest.approx(0.75, abs=1e-7)  # 0.4 and 1.1 are float32 numbers
    for part, kept in zip(CUT, (False, True), strict=True):
        entropies = torch.tensor([*part, 99.0])  # a pad of high entropy
        found = high_entropy_tokens(
            entropies=entropies, mask=torch.tensor([1, 1, 1, 1, 0]), threshold=threshold
        )
        assert found.tolist() == [kept] * 4 + [False]


def test_a_rank_without_tokens_joins_with_nothing():
    """LOSS-23 (two gloo ranks): the gathered entropies of one rank are those of both."""
    import torch.distributed as dist

    def threshold(rank):
        mine = torch.tensor([*CUT[0], *CUT[1]]) if rank else torch.zeros(0)
        parts = [None, None]
        dist.all_gather_object(parts, mine)
        return entropy_threshold(torch.cat(parts), 0.5)

    first, second = run_ranks(2, threshold)
    assert first == second == entropy_threshold(torch.tensor([*CUT[0], *CUT[1]]), 0.5)
    assert entropy_threshold(torch.zeros(0), 0.5) == -math.inf


def test_ties_are_kept_even_where_float32_rounds_the_threshold():
    """LOSS-23: 0.1 in float32 lies above 0.1; a threshold that is an element keeps that element."""
    values = torch.full((5,), 0.1)
    threshold = entropy_threshold(values, 0.8)
    kept = high_entropy_tokens(entropies=values, mask=torch.ones(5), threshold=threshold)
    assert kept.all()


def test_tokens_apart_by_rounding_tie_and_tokens_apart_by_more_do_not():
    """LOSS-23 over layouts: first tokens of one prompt have one entropy but for rounding, and which
    of them is kept must not depend on who computed it."""
    near = torch.tensor([4.6392 + 4e-6, 4.6392 - 4e-6, 4.6392, 4.63])
    threshold = entropy_threshold(near, 0.75)
    kept = high_entropy_tokens(entropies=near, mask=torch.ones(4), threshold=threshold)
    assert kept.tolist() == [True, True, True, False]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0, 12, width=32), min_size=1, max_size=40),
    st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])),
)
def test_the_threshold_is_the_linear_quantile_of_torch_in_any_order(values, quantile):
    entropies = torch.tensor(values, dtype=torch.float64)
    wanted = torch.quantile(entropies, quantile, interpolation="linear").item()
    assert entropy_threshold(entropies, quantile) == pytest.approx(wanted, abs=1e-12)
    assert entropy_threshold(entropies.flip(0), quantile) == entropy_threshold(entropies, quantile)
    padded = torch.cat([entropies, torch.tensor([math.nan, math.inf])])
    assert entropy_threshold(padded, quantile) == entropy_threshold(entropies, quantile)


def test_more_tokens_than_torch_quantile_takes():
    """2^24 + 9 values: torch.quantile refuses them."""
    count = 2**24 + 9
    values = torch.arange(count, dtype=torch.float32).flip(0)  # the upper nine may round
    wanted = 0.8 * (count - 1)
    assert entropy_threshold(values, 0.8) == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.8)


@pytest.mark.parametrize("quantile", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_of_zero_to_one_is_refused(quantile):
    with pytest.raises(ValueError, match="outside 0..1"):
        entropy_threshold(torch.zeros(3), quantile)


@pytest.mark.parametrize("name", LOSS_DEFAULTS)
def test_the_mask_zeroes_the_policy_term_alone(name):
    """Rule 4: denominators, KL and entropy bonus stay. A ratio of the whole sequence carries the
    gradient of its kept terms to every token (as in TRL); a ratio per token only to its own."""
    level = LOSS_DEFAULTS[name].settings.level

    def loss(advantage, **options):
        leaf = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
        output = policy_loss(
            name=name,
            logprobs=leaf,
            old_logprobs=None,
            advantages=torch.tensor([advantage]),
            mask=torch.ones(3),
            sequence=torch.zeros(3, dtype=torch.int64),
            num_sequences=1,
            counts=LossCounts(3, 1, 8),
            settings=resolve_loss_defaults(name, beta=0.3, entropy_coef=0.2),
            ref_logprobs=torch.tensor([-1.2, -0.4, -2.5], dtype=torch.float64),
            entropy=torch.tensor([0.3, 0.2, 0.9], dtype=torch.float64),
            **options,
        )
        output.loss.backward()
        return output, leaf.grad

    keep = torch.tensor([True, False, True])
    masked, grad = loss(1.0, token_keep=keep)
    plain, full = loss(1.0)
    rest, aside = loss(0.0)  # KL and entropy alone
    share = _double([1.0, 0.0, 1.0] if level == "token" else [2 / 3] * 3)
    torch.testing.assert_close(grad, aside + share * (full - aside), atol=1e-14, rtol=0)
    assert masked.sums["kl_loss"] == plain.sums["kl_loss"]
    assert masked.sums["tokens"] == 3 and masked.sums["entropy_kept_tokens"] == 2
    assert "entropy_kept_tokens" not in plain.sums
    none, grad = loss(1.0, token_keep=torch.zeros(3, dtype=torch.bool))
    assert none.loss.item() == pytest.approx(rest.loss.item(), abs=1e-15)
    torch.testing.assert_close(grad, aside, atol=1e-15, rtol=0)


def test_a_mask_of_another_shape_or_of_numbers_is_refused():
    """ADV-31, CFG-10."""
    call = {
        "name": "grpo",
        "logprobs": torch.zeros(2),
        "old_logprobs": None,
        "advantages": torch.ones(1),
        "mask": torch.ones(2),
        "sequence": torch.zeros(2, dtype=torch.int64),
        "num_sequences": 1,
        "counts": LossCounts(2, 1, 8),
        "settings": resolve_loss_defaults("grpo"),
    }
    with pytest.raises(ValueError, match=r"token_keep has shape \(1,\), expected \(2,\)"):
        policy_loss(token_keep=torch.ones(1), **call)
    with pytest.raises(ValueError, match=r"mask holds 0\.3"):
        policy_loss(token_keep=torch.tensor([0.3, 1.0]), **call)
