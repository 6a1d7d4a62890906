"""The behaviour-cloning term against torch's cross-entropy, and its weight against a line."""

import math

import pytest
import torch

from megagrpo.algo.cold_start import annealed_weight, cold_start_loss
from megagrpo.algo.logprobs import vocab_parallel_logprobs


def test_the_term_is_the_token_mean_cross_entropy_of_the_answers():
    """Value and gradient by torch.nn.functional.cross_entropy, over the answer's tokens alone."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    labels, mask = torch.tensor([1, 8, 0, 3, 3, 5]), torch.tensor([0, 1, 1, 0, 1, 1])
    logprobs, _ = vocab_parallel_logprobs(logits, labels, group=None, valid_vocab=9)
    output = cold_start_loss(logprobs=logprobs, mask=mask, total_tokens=4, weight=0.25)
    output.loss.backward()
    ours, logits.grad = logits.grad, None
    wanted = torch.nn.functional.cross_entropy(logits[mask == 1], labels[mask == 1])
    (0.25 * wanted).backward()
    assert output.loss.item() == pytest.approx(0.25 * wanted.item(), abs=1e-12)
    torch.testing.assert_close(ours, logits.grad, atol=1e-12, rtol=0)
    assert output.sums["bc_loss"].item() == pytest.approx(wanted.item(), abs=1e-12)
    assert output.sums["bc_tokens"] == 4 and not output.sums["bc_loss"].requires_grad


def test_the_denominator_is_global_so_that_parts_add_up():
    """LOSS-7: two micro-batches of 3 and 1 tokens equal one of 4, not the mean of two means."""
    leaf = torch.tensor([-1.0, -2.0, -3.0, -7.0], dtype=torch.float64, requires_grad=True)
    total = torch.zeros(())
    for part in (slice(0, 3), slice(3, 4), slice(4, 4)):
        piece = leaf[part]
        total = (
            total
            + cold_start_loss(
                logprobs=piece, mask=torch.ones(len(piece)), total_tokens=4, weight=1.0
            ).loss
        )
    total.backward()
    assert total.item() == 13 / 4 and leaf.grad.tolist() == [-0.25] * 4


def test_masked_garbage_and_no_answer_at_all_are_harmless():
    """LOSS-8, LOSS-9."""
    leaf = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    output = cold_start_loss(
        logprobs=leaf, mask=torch.tensor([1, 0, 0]), total_tokens=1, weight=0.5
    )
    output.loss.backward()
    assert output.loss.item() == 0.5 and leaf.grad.tolist() == [-0.5, 0.0, 0.0]
    leaf.grad = None
    nothing = cold_start_loss(logprobs=leaf, mask=torch.zeros(3), total_tokens=0, weight=0.5)
    nothing.loss.backward()
    assert nothing.loss.item() == 0.0 and leaf.grad.tolist() == [0.0] * 3


def test_a_mask_of_another_shape_or_of_numbers_is_refused():
    with pytest.raises(ValueError, match=r"mask has shape \(1,\), expected \(2,\)"):
        cold_start_loss(logprobs=torch.zeros(2), mask=torch.ones(1), total_tokens=1, weight=1.0)
    with pytest.raises(ValueError, match=r"mask holds 0\.5"):
        cold_start_loss(
            logprobs=torch.zeros(2), mask=torch.tensor([0.5, 1.0]), total_tokens=1, weight=1.0
        )


@pytest.mark.parametrize("steps", [1, 3, 7, 100])
def test_the_weight_falls_in_equal_steps_to_exactly_zero(steps):
    weights = [annealed_weight(weight=0.3, steps_total=steps, done=at) for at in range(steps + 3)]
    assert weights[0] == 0.3 and weights[steps:] == [0.0] * 3
    falls = [high - low for high, low in zip(weights[:steps], weights[1:], strict=False)]
    assert falls == pytest.approx([0.3 / steps] * steps, abs=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": -1.0}, "weight -1.0"),
        ({"weight": math.nan}, "weight nan"),
        ({"steps_total": 0}, "steps_total=0"),
        ({"done": -1}, "done=-1"),
    ],
)
def test_impossible_annealing_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        annealed_weight(**{"weight": 1.0, "steps_total": 5, "done": 0} | change)
