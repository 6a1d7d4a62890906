"""Group advantages against the numbers of the fault kinds and a plain reference."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algo.advantages import AdvantageResult, group_advantages

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
NAN = float("nan")


def _run(rewards, groups=None, valid=None, **options) -> AdvantageResult:
    return group_advantages(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups or [0] * len(rewards)),
        valid=torch.tensor(valid or [True] * len(rewards)),
        **options,
    )


def _close(result: AdvantageResult, expected, tolerance=1e-6):
    assert result.advantages.dtype == torch.float64
    assert result.advantages.tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.154699, 0, -0.577349, -0.577349]),
        ({"normalize": "none"}, [2 / 3, 0, -1 / 3, -1 / 3]),
        ({"normalize": "none", "baseline": "leave_one_out"}, [1, 0, -0.5, -0.5]),
    ],
)
def test_a_rejected_row_does_not_shift_its_group(options, expected):
    """ADV-1."""
    result = _run([1, 1, 0, 0], valid=[True, False, True, True], **options)
    _close(result, expected)
    assert result.missing_count == 0


@pytest.mark.parametrize("placeholder", [0.0, 1e9, NAN, math.inf])
def test_the_placeholder_of_a_failed_row_is_never_read(placeholder):
    """ADV-2: whatever stands there."""
    _close(
        _run([2, 1, placeholder, 0], valid=[True, True, False, True]), [0.999999, 0, 0, -0.999999]
    )


def test_a_group_whose_members_all_failed_is_counted_and_empty():
    """ADV-2."""
    result = _run([5, 7, 1, 0], [3, 3, 8, 8], [False, False, True, True])
    _close(result, [0, 0, 0.707106, -0.707106])
    assert (result.group_count, result.empty_count) == (1, 1)
    assert result.flat.tolist() == [True, True, False, False]


def test_missing_rewards_leave_the_group_and_are_counted():
    """ADV-5: one missing, then all; never NaN."""
    result = _run([1, NAN, 0, 0])
    _close(result, [1.154699, 0, -0.577349, -0.577349])
    assert result.missing_count == 1
    infinite = _run([1, math.inf, 0, 0])
    _close(infinite, result.advantages.tolist(), 0)
    assert infinite.missing_count == 1
    nothing = _run([NAN, NAN])
    assert nothing.advantages.tolist() == [0.0, 0.0]
    assert (nothing.missing_count, nothing.empty_count, nothing.group_count) == (2, 1, 0)
    assert nothing.group_std_mean == 0.0 and nothing.clipped_share == 0.0


def test_a_reward_of_zero_is_not_missing():
    """ADV-6."""
    result = _run([0.0, 1.0])
    _close(result, [-0.707106, 0.707106])
    assert result.missing_count == 0


def test_small_spreads_on_large_rewards_survive():
    """ADV-7: two passes in float64."""
    result = _run([1.0, 1.00001, 2.0, 2.00001], [0, 0, 1, 1])
    _close(result, [-0.619497, 0.619497, -0.619497, 0.619497])
    far = _run([1e6 + 1, 1e6, 1e6 + 1, 1e6])
    _close(far, _run([1, 0, 1, 0]).advantages.tolist(), 1e-9)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 10])
@pytest.mark.parametrize("value", [0.1, -0.3, 1e6 / 3])
@pytest.mark.parametrize("normalize", ["std", "none"])
def test_equal_rewards_give_exactly_zero_and_are_counted(size, value, normalize):
    """ADV-8."""
    result = _run([value] * size, normalize=normalize)
    assert result.advantages.tolist() == [0.0] * size
    assert result.zero_variance_count == 1 and result.zero_variance_share == 1.0
    assert result.flat.all()


def test_flatness_is_relative_to_the_rewards():
    """ADV-8, rule 1: max - min <= 1e-8 max(1, max |r|)."""
    assert _run([0.0, 0.9e-8]).zero_variance_count == 1
    assert _run([0.0, 1.1e-8]).zero_variance_count == 0
    assert _run([-1000.0, -1000.0 + 0.9e-5]).zero_variance_count == 1
    assert _run([-1000.0, -1000.0 + 1.1e-5]).zero_variance_count == 0


def test_a_singleton_gets_zero_and_its_own_counter():
    """ADV-10; ADV-15 for leave-one-out."""
    for baseline in ("mean", "leave_one_out"):
        result = _run([5, 1, 2], valid=[True, False, False], baseline=baseline)
        assert result.advantages.tolist() == [0.0, 0.0, 0.0]
        assert (result.singleton_count, result.zero_variance_count) == (1, 0)
        assert (result.group_count, result.group_std_mean) == (1, 0.0)


def test_groups_are_ids_not_positions():
    """ADV-11: equal prompts with two ids; ADV-13: interleaved order."""
    assert _run([0, 0, 1, 1], [7, 7, 4, 4]).advantages.tolist() == [0.0] * 4
    assert _run([1, 2, 1, 2], [1, 2, 1, 2]).advantages.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("normalize", "expected"), [("none", [-1, 1]), ("std", [-1.414212, 1.414212])]
)
def test_leave_one_out_of_two(normalize, expected):
    """ADV-15."""
    _close(_run([0, 1], normalize=normalize, baseline="leave_one_out"), expected)


def test_std_is_unbiased_and_epsilon_stands_outside_of_the_root():
    """ADV-16."""
    _close(_run([0, 1, 2, 3]), [-1.161894, -0.387298, 0.387298, 1.161894])


@pytest.mark.parametrize("eps", [1e-4, 1e-6])
@pytest.mark.parametrize(("mode", "golden"), [("std", "group"), ("batch", "batch"), ("none",) * 2])
def test_scaling_modes_equal_the_golden_numbers(eps, mode, golden):
    """ADV-17."""
    expected = GOLDEN["advantages"][f"eps_{'1e-4' if eps == 1e-4 else '1e-6'}"][golden]
    fixture = GOLDEN["fixture"]
    _close(_run(fixture["rewards"], fixture["groups"], normalize=mode, eps=eps), expected, 1e-11)


def test_flat_rows_are_told_apart_for_the_filter():
    """ADV-20: (0.5, 0.5) is dropped, (0.5, 0.5001) is kept."""
    assert _run([0.5, 0.5, 0.5, 0.5001], [0, 0, 1, 1]).flat.tolist() == [True, True, False, False]


def test_clip_bounds_the_advantages_and_reports_the_share():
    rewards = [1, 0, 0, 0, 0, 0, 0, 0]
    plain = _run(rewards).advantages
    assert plain[0] > 2 and plain[1] > -0.4
    result = _run(rewards, clip=2.0)
    assert result.advantages[0] == 2.0 and torch.equal(result.advantages[1:], plain[1:])
    assert result.clipped_share == 1 / 8
    pair = _run(rewards, clip=(-0.1, 3.0))
    assert pair.advantages[1] == -0.1 and pair.advantages[0] == plain[0]
    assert pair.clipped_share == 7 / 8


def test_group_std_mean_is_over_groups_that_have_one():
    result = _run([1, 0, 3, 3, 9], [0, 0, 1, 1, 2])
    assert result.group_std_mean == pytest.approx((math.sqrt(0.5) + 0.0) / 2, abs=1e-12)
    assert result.zero_variance_share == pytest.approx(1 / 3)


_ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(st.just(NAN), st.floats(-5, 5).map(lambda value: round(value, 2))),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(_ROWS, st.sampled_from(["std", "none", "batch"]), st.sampled_from(["mean", "leave_one_out"]))
def test_any_rows_equal_the_plain_reference_in_any_order(rows, normalize, baseline):
    """ADV-13 and the whole formula, by python's statistics module; reversed rows give the same."""
    expected = _reference(rows, normalize, baseline)
    groups, rewards, valid = (list(column) for column in zip(*rows, strict=True))
    result = _run(rewards, [10 - group for group in groups], valid, normalize=normalize,
                  baseline=baseline)  # fmt: skip
    assert result.advantages.tolist() == pytest.approx(expected, abs=1e-9)
    turned = _run(rewards[::-1], groups[::-1], valid[::-1], normalize=normalize, baseline=baseline)
    assert turned.advantages.flip(0).tolist() == pytest.approx(expected, abs=1e-9)
    assert turned.flat.flip(0).tolist() == result.flat.tolist()


def _reference(rows, normalize, baseline):
    """One row at a time, by the words of the rules."""
    present = [value for _, value, ok in rows if ok and not math.isnan(value)]
    answer = []
    for at, (group, value, ok) in enumerate(rows):
        peers = [
            (other, peer)
            for other, (peer_group, peer, peer_ok) in enumerate(rows)
            if peer_group == group and peer_ok and not math.isnan(peer)
        ]
        values = [peer for _, peer in peers]
        if not ok or math.isnan(value) or len(values) < 2 or max(values) == min(values):
            answer.append(0.0)
            continue
        base = [peer for other, peer in peers if baseline == "mean" or other != at]
        spread = {"none": 1 - 1e-6, "std": statistics.stdev(values)}
        spread["batch"] = statistics.stdev(present)
        answer.append((value - statistics.fmean(base)) / (spread[normalize] + 1e-6))
    return answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalize": "group"}, "normalize='group' is unknown"),
        ({"baseline": "median"}, "baseline='median' is unknown"),
        ({"rewards": torch.zeros(2)}, "rewards is torch.float32"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, r"groups is torch.int64 \(3,\)"),
        ({"valid": torch.ones(2)}, "valid is torch.float32"),
    ],
)
def test_wrong_names_dtypes_and_shapes_are_refused(change, message):
    call = {
        "rewards": torch.zeros(2, dtype=torch.float64),
        "groups": torch.zeros(2, dtype=torch.int64),
        "valid": torch.ones(2, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        group_advantages(**(call | change))


def test_tensors_are_keyword_only():
    """CFG-10."""
    with pytest.raises(TypeError):
        group_advantages(torch.zeros(2), torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize(("spread", "flat"), [(1e-8, True), (1.1e-8, False)])
@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_a_spread_of_exactly_the_tolerance_is_flat_and_a_larger_one_is_not(spread, flat, scale):
    """ADV-8, rule 1: max - min <= 1e-8 * max(1, max |r|); the largest |r| is the scale here."""
    rewards = [-scale, spread * scale - scale] if scale > 1 else [0.0, spread]
    if scale > 1 and flat:  # the difference of two large numbers is not exactly the tolerance
        rewards[1] = math.nextafter(rewards[1], -math.inf)
    result = group_advantages(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.zeros(2, dtype=torch.int64),
        valid=torch.ones(2, dtype=torch.bool),
    )
    assert result.flat.tolist() == [flat, flat]
    assert result.zero_variance_count == int(flat)
    assert (result.advantages == 0).all() == flat


def test_the_clipped_share_is_of_rows_with_a_reward():
    """Of three rated rows one is over the bound; a missing and a rejected one do not count."""
    result = group_advantages(
        rewards=torch.tensor([3.0, 0.0, 0.0, math.nan, 5.0], dtype=torch.float64),
        groups=torch.zeros(5, dtype=torch.int64),
        valid=torch.tensor([True] * 4 + [False]),
        clip=1.0,
    )
    assert result.advantages.tolist() == pytest.approx([1, -0.57735, -0.57735, 0, 0], abs=1e-5)
    assert result.clipped_share == pytest.approx(1 / 3, abs=1e-15)
