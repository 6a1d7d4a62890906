"""Several rewards: summed and then normalised, or normalised and then summed."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algo.advantages import combined_advantages, group_advantages

NAN = math.nan
BOTH = ("sum_then_normalize", "normalize_then_sum")


def _run(columns, groups=None, weights=None, valid=None, **options):
    """`columns`: one list per reward."""
    rewards = torch.tensor(columns, dtype=torch.float64).T
    count = len(rewards)
    return combined_advantages(
        rewards=rewards,
        weights=torch.tensor(weights or [1.0] * len(columns), dtype=torch.float64),
        groups=torch.tensor(groups or [0] * count),
        valid=torch.tensor(valid or [True] * count),
        **options,
    )


@pytest.mark.parametrize("combine", BOTH)
@pytest.mark.parametrize("level", [3.0, 0.1, 1e6 / 3])
def test_a_flat_reward_adds_exactly_nothing(combine, level):
    """ADV-18: r1 [1, 0], r2 flat: [0.707106, -0.707106] in both orders; not whitened again."""
    result = _run([[1, 0], [level, level]], combine=combine)
    assert result.advantages.tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)
    assert result.flat.tolist() == [False, False] and result.zero_variance_count == 0
    if combine == "normalize_then_sum":
        alone = _run([[1, 0]], combine=combine)
        assert torch.equal(result.advantages, alone.advantages)


def test_the_order_of_sum_and_normalisation_matters():
    """ADV-18: a reward on a scale of 100 drowns the other one only if the sum comes first."""
    columns = [[1, 0, 0, 1], [100, 0, 100, 0]]
    first = _run(columns, combine="sum_then_normalize").advantages
    total = [101, 0, 100, 1]
    spread, centre = statistics.stdev(total), statistics.fmean(total)
    assert first.tolist() == pytest.approx([(t - centre) / spread for t in total], abs=1e-7)
    second = _run(columns, combine="normalize_then_sum").advantages
    unit = 0.5 / statistics.stdev([0, 0, 1, 1])
    assert second.tolist() == pytest.approx([2 * unit, -2 * unit, 0, 0], abs=1e-5)


@pytest.mark.parametrize("combine", BOTH)
def test_weights_act_on_the_total(combine):
    """ADV-19: 0.7 and 0.3; a negative weight turns its reward round, a zero one switches it off."""
    columns = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]]
    plain = {"combine": combine, "normalize": "none"}
    result = _run(columns, weights=[0.7, 0.3], **plain).advantages
    totals = [0.7, 0.3, 0.0, 1.0]
    assert result.tolist() == pytest.approx([t - 0.5 for t in totals], abs=1e-12)
    turned = _run(columns, weights=[-0.7, -0.3], **plain).advantages
    assert turned.tolist() == pytest.approx((-result).tolist(), abs=1e-12)
    off = _run([columns[0], [5.0, 5.0, 9.0, 1.0]], weights=[1.0, 0.0], combine=combine)
    assert torch.equal(off.advantages, _run(columns[:1], combine=combine).advantages)
    silent = _run([[2.0, 2.0], [1.0, 0.0]], weights=[1.0, 0.0], combine=combine)
    assert silent.advantages.tolist() == [0.0, 0.0] and silent.flat.all()
    assert silent.zero_variance_count == 1


@pytest.mark.parametrize("combine", BOTH)
def test_a_reward_may_rate_only_some_rows_and_none_is_not_zero(combine):
    """ADV-5, ADV-6: the second reward says nothing of rows 1 and 3; row 3 has no reward at all."""
    result = _run([[1, 0, 0, NAN], [0.5, NAN, 0.1, NAN]], combine=combine)
    assert result.missing_count == 1 and result.advantages[3] == 0.0
    if combine == "sum_then_normalize":
        wanted = group_advantages(
            rewards=torch.tensor([1.5, 0.0, 0.1], dtype=torch.float64),
            groups=torch.zeros(3, dtype=torch.int64),
            valid=torch.ones(3, dtype=torch.bool),
        ).advantages
        assert torch.equal(result.advantages[:3], wanted)
        return
    one = [1.154699, -0.577349, -0.577349]
    two = [0.4 / 2 / statistics.stdev([0.5, 0.1])]
    wanted = [one[0] + two[0], one[1], one[2] - two[0]]
    assert result.advantages[:3].tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_group_is_flat_if_every_reward_is():
    """ADV-20: one reward without variance does not drop a group; singletons per reward add 0."""
    columns = [[1, 1, 2, 2, 1, 0], [3, 3, 5, 7, 4, NAN]]
    result = _run(columns, groups=[0, 0, 1, 1, 2, 2], combine="normalize_then_sum")
    assert result.flat.tolist() == [True, True, False, False, False, False]
    assert (result.zero_variance_count, result.group_count) == (1, 3)
    assert result.advantages[:2].tolist() == [0.0, 0.0]
    wanted = [-0.707106, 0.707106, 0.707106, -0.707106]
    assert result.advantages[2:].tolist() == pytest.approx(wanted, abs=1e-5)
    assert result.zero_variance_share == pytest.approx(1 / 3)


def test_rejected_rows_leave_every_reward_and_the_clip_bounds_the_sum():
    """ADV-1."""
    columns = [[1, 1, 0, 0], [1, 9, 0, 0]]
    result = _run(columns, valid=[True, False, True, True], combine="normalize_then_sum")
    wanted = [2 * 1.154699, 0, -2 * 0.577349, -2 * 0.577349]
    assert result.advantages.tolist() == pytest.approx(wanted, abs=1e-5)
    clipped = _run(columns, valid=[True, False, True, True], combine="normalize_then_sum", clip=2.0)
    assert clipped.advantages[0] == 2.0 and clipped.clipped_share == pytest.approx(1 / 3)
    assert torch.equal(clipped.advantages[1:], result.advantages[1:])


_VALUE = st.one_of(st.just(NAN), st.integers(-3, 3).map(float))
_ROWS = st.lists(
    st.tuples(st.integers(0, 2), _VALUE, _VALUE, st.booleans()), min_size=1, max_size=10
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(_ROWS, st.sampled_from(["std", "none", "batch"]), st.sampled_from(["mean", "leave_one_out"]))
def test_normalize_then_sum_is_the_weighted_sum_of_single_rewards(rows, normalize, baseline):
    """ADV-13, ADV-18: any rows, groups, gaps; and any order of the rows."""
    groups, first, second, valid = (list(column) for column in zip(*rows, strict=True))
    options = {"normalize": normalize, "baseline": baseline}
    call = {"groups": groups, "valid": valid, "weights": [0.7, -0.3], **options}
    result = _run([first, second], combine="normalize_then_sum", **call)
    parts = [
        group_advantages(
            rewards=torch.tensor(column, dtype=torch.float64),
            groups=torch.tensor(groups),
            valid=torch.tensor(valid),
            **options,
        )
        for column in (first, second)
    ]
    wanted = 0.7 * parts[0].advantages - 0.3 * parts[1].advantages
    torch.testing.assert_close(result.advantages, wanted, atol=1e-12, rtol=0)
    assert result.flat.tolist() == (parts[0].flat & parts[1].flat).tolist()
    turned = _run(
        [first[::-1], second[::-1]],
        combine="normalize_then_sum",
        **call | {"groups": groups[::-1], "valid": valid[::-1]},
    )
    torch.testing.assert_close(turned.advantages.flip(0), wanted, atol=1e-9, rtol=0)
    single = _run([first], combine="normalize_then_sum", groups=groups, valid=valid, **options)
    for field in ("group_count", "zero_variance_count", "singleton_count", "missing_count"):
        assert getattr(single, field) == getattr(parts[0], field), field


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"combine": "sum"}, "combine='sum' is unknown; use one of .*'normalize_then_sum'"),
        ({"rewards": torch.zeros(2, dtype=torch.float64)}, r"expected float64 \[B, R\]"),
        ({"rewards": torch.zeros(2, 1)}, "rewards are torch.float32"),
        ({"weights": torch.ones(2, dtype=torch.float64)}, "must be 1 finite numbers"),
        ({"weights": torch.tensor([NAN])}, "must be 1 finite numbers"),
        ({"normalize": "group"}, "normalize='group' is unknown"),
    ],
)
def test_wrong_names_and_shapes_are_refused(change, message):
    """CFG-11."""
    call = {
        "rewards": torch.zeros(2, 1, dtype=torch.float64),
        "weights": torch.ones(1, dtype=torch.float64),
        "groups": torch.zeros(2, dtype=torch.int64),
        "valid": torch.ones(2, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        combined_advantages(**call | change)


@pytest.mark.parametrize("combine", BOTH)
def test_the_clip_bounds_the_result_of_either_order_and_only_rated_rows_count(combine):
    """Advantages of (3, 0, 0, 0) are (1.5, -0.5, -0.5, -0.5); the fifth row is rejected."""
    result = _run(
        [[3, 0, 0, 0, 9], [0, 0, 0, 0, 9]],
        groups=[0, 0, 0, 0, 0],
        valid=[True] * 4 + [False],
        combine=combine,
        clip=1.0,
    )
    assert result.advantages.tolist() == pytest.approx([1.0, -0.5, -0.5, -0.5, 0.0], abs=1e-6)
    assert result.clipped_share == 0.25
