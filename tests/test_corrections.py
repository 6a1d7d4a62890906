"""Rollout corrections and mismatch metrics against golden numbers and closed forms."""

import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algo.corrections import (
    CORRECTION_BOUNDS,
    CorrectionSettings,
    SumsAndPeaks,
    correction_metrics,
    correction_weights,
    mismatch_metrics,
    mismatch_sums,
    off_policy_keep,
    resolve_correction,
)
from megagrpo.algo.losses import LossCounts, policy_loss
from megagrpo.algo.settings import LOSS_DEFAULTS, resolve_loss_defaults

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
F1 = GOLDEN["fixture"]
MODES = [mode for mode in CORRECTION_BOUNDS if mode != "none"]


def _flat(rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


OLD, ROLLOUT, CURRENT = (_flat(F1[key]) for key in ("old_logprobs", "rollout_logprobs", "logprobs"))
SEQUENCE = torch.repeat_interleave(torch.arange(4), torch.tensor(F1["lengths"]))
ADVANTAGES = torch.tensor(GOLDEN["advantages"]["eps_1e-4"]["group"], dtype=torch.float64)


def _weigh(diffs, settings, mask=None, sequence=None, dtype=torch.float64):
    """Weights for given old - rollout; one sequence unless told."""
    diffs = torch.tensor(diffs, dtype=dtype)
    sequence = torch.zeros(len(diffs), dtype=torch.int64) if sequence is None else sequence
    return correction_weights(
        old_logprobs=torch.full_like(diffs, -1.0),
        rollout_logprobs=-1.0 - diffs,
        mask=torch.ones(len(diffs)) if mask is None else torch.tensor(mask),
        sequence=sequence,
        num_sequences=int(sequence.max()) + 1,
        settings=settings,
    )


def _f1(settings, sequence=SEQUENCE, rows=slice(None)):
    return correction_weights(
        old_logprobs=OLD[rows],
        rollout_logprobs=ROLLOUT[rows],
        mask=torch.ones(len(OLD[rows])),
        sequence=sequence[rows],
        num_sequences=4,
        settings=settings,
    )


def test_unbounded_weights_are_the_golden_ratios():
    wide = {"low": 0.0, "high": 1e9}
    token = _f1(CorrectionSettings("token_mask", **wide)).weights
    golden = _flat(GOLDEN["metrics"]["rollout_ratio_token"])
    torch.testing.assert_close(token, golden, atol=1e-9, rtol=0)
    product = _f1(CorrectionSettings("sequence_mask", **wide)).weights
    golden = torch.tensor(GOLDEN["metrics"]["rollout_ratio_sequence"], dtype=torch.float64)
    torch.testing.assert_close(product, golden[SEQUENCE], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("mode", "low", "expected"),
    [
        ("token_truncate", None, 0.019345),
        ("token_mask", None, 0.039411),
        ("token_mask", 0.95, -0.056025),
        ("sequence_truncate", None, 0.025111),
        ("sequence_mask", None, 0.074877),
    ],
)
def test_every_mode_does_what_its_name_says(mode, low, expected):
    """OFF-1: F1, dapo, cap 1.05."""
    output = policy_loss(
        name="dapo",
        logprobs=CURRENT,
        old_logprobs=OLD,
        advantages=ADVANTAGES,
        mask=torch.ones(10),
        sequence=SEQUENCE,
        num_sequences=4,
        counts=LossCounts(10, 4, 8),
        settings=resolve_loss_defaults("dapo", eps_high=0.2),
        rollout_weights=_f1(CorrectionSettings(mode, low, 1.05)).weights,
    )
    assert output.loss.item() == pytest.approx(expected, abs=1e-6)


def test_sequence_modes_multiply_and_the_geometric_one_averages():
    """OFF-2: 100 tokens of 0.012, cap 3."""
    product = _weigh([0.012] * 100, CorrectionSettings("sequence_truncate", None, 4.0))
    assert product.weights[0].item() == pytest.approx(3.320117, abs=1e-6)
    masked = _weigh([0.012] * 100, resolve_correction("sequence_mask", cap=3.0))
    assert masked.weights.eq(0).all()
    assert masked.stats.sums["zeroed_sequences"] == 1
    kept = _weigh([0.012] * 100, resolve_correction("geometric_mask", cap=3.0))
    assert kept.weights.tolist() == pytest.approx([1.012072] * 100, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_inclusive(mode, dtype):
    """OFF-3: diff ln 2 with cap 2 stays at 2; so does ln 1/2 at the lower bound."""
    for diff, ratio in ((math.log(2), 2.0), (-math.log(2), 0.5)):
        weights = _weigh([diff], CorrectionSettings(mode, 0.5, 2.0), dtype=dtype).weights
        assert weights.item() == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask", "geometric_mask"])
def test_a_ratio_that_is_a_bound_but_for_rounding_stays_and_one_beyond_goes(mode, dtype):
    """OFF-3 at other numbers: every bound b of 1.01, 1.02, ... 5, log-probs down to -14 nats."""
    bounds = torch.arange(101, 501, dtype=torch.float64) / 100
    for old in (-0.1, -1.0, -3.3, -14.0):
        for bound in bounds.tolist():
            for settings, diff in (
                (CorrectionSettings(mode, None, bound), math.log(bound)),
                (CorrectionSettings(mode, 1 / bound, None), -math.log(bound)),
            ):
                kept = []
                for beyond in (1.0, 1.0 + 1e-3):
                    pair = torch.tensor([old, old - beyond * diff], dtype=torch.float64).to(dtype)
                    found = correction_weights(
                        old_logprobs=pair[:1],
                        rollout_logprobs=pair[1:],
                        mask=torch.ones(1),
                        sequence=torch.zeros(1, dtype=torch.int64),
                        num_sequences=1,
                        settings=settings,
                    )
                    kept.append(found.weights.item() > 0)
                assert kept == [True, False], (old, bound, settings)


def test_an_absent_lower_bound_is_no_bound():
    """OFF-3: None is not 0, and neither bound is invented."""
    for mode in MODES:
        weights = _weigh([-9.0], CorrectionSettings(mode, None, 2.0)).weights
        assert weights.item() == pytest.approx(math.exp(-9.0), rel=1e-9)
    weights = _weigh([9.0], CorrectionSettings("token_mask", 0.5, None)).weights
    assert weights.item() == pytest.approx(math.exp(9.0), rel=1e-9)


def test_truncation_moves_and_masking_drops():
    settings = [CorrectionSettings(mode, 0.9, 1.1) for mode in ("token_truncate", "token_mask")]
    diffs = [-0.5, 0.0, 0.5]
    assert _weigh(diffs, settings[0]).weights.tolist() == [0.9, 1.0, 1.1]
    assert _weigh(diffs, settings[1]).weights.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("mode", [*MODES, "none"])
def test_weights_have_no_gradient_and_do_not_depend_on_the_update(mode):
    """OFF-4: they read the log-probs of before the update only."""
    old = OLD.clone().requires_grad_()
    correction = correction_weights(
        old_logprobs=old,
        rollout_logprobs=ROLLOUT,
        mask=torch.ones(10),
        sequence=SEQUENCE,
        num_sequences=4,
        settings=resolve_correction(mode),
    )
    assert not correction.weights.requires_grad
    leaf = CURRENT.clone().requires_grad_()
    weights = (2 * leaf).detach().requires_grad_()
    policy_loss(
        name="grpo",
        logprobs=leaf,
        old_logprobs=old,
        advantages=ADVANTAGES,
        mask=torch.ones(10),
        sequence=SEQUENCE,
        num_sequences=4,
        counts=LossCounts(10, 4, 8),
        settings=resolve_loss_defaults("grpo"),
        rollout_weights=weights,
    ).loss.backward()
    assert weights.grad is None and old.grad is None and leaf.grad is not None


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("mode", [*MODES, "none"])
def test_a_log_prob_that_is_not_finite_gives_weight_zero_and_is_counted(mode, bad):
    """OFF-5: that token, or in a sequence mode its sequence; the loss stays finite."""
    rollout = torch.tensor([-1.0, bad, -1.0])
    sequence = torch.tensor([0, 0, 1])
    correction = correction_weights(
        old_logprobs=torch.full((3,), -1.0),
        rollout_logprobs=rollout,
        mask=torch.ones(3),
        sequence=sequence,
        num_sequences=2,
        settings=resolve_correction(mode),
    )
    whole = mode.startswith(("sequence", "geometric"))
    assert correction.weights.tolist() == [0.0 if whole else 1.0, 0.0, 1.0]
    assert correction.stats.sums["nonfinite_tokens"] == (2 if whole else 1)
    mismatch = mismatch_sums(
        old_logprobs=torch.full((3,), -1.0), rollout_logprobs=rollout, mask=torch.ones(3)
    )
    metrics = mismatch_metrics(mismatch)
    assert metrics["rollout_corr/mean_abs_logprob_diff"] == 0.0
    assert metrics["rollout_corr/nonfinite_tokens"] == 1


def test_overflow_of_a_finite_ratio_is_truncated_not_dropped():
    """OFF-5: e^200 is infinite in both dtypes, yet the difference is a number."""
    for dtype in (torch.float32, torch.float64):
        for mode in ("token_truncate", "sequence_truncate"):
            weights = _weigh([200.0], resolve_correction(mode, cap=2.0), dtype=dtype).weights
            assert weights.item() == 2.0


def test_broken_log_probs_everywhere_do_not_look_perfect():
    """OFF-10: nothing finite to average."""
    bad = torch.full((2,), math.nan)
    sums = mismatch_sums(old_logprobs=bad, rollout_logprobs=bad, mask=torch.ones(2))
    metrics = mismatch_metrics(sums)
    assert metrics["rollout_corr/mean_abs_logprob_diff"] == math.inf
    assert metrics["rollout_corr/max_abs_logprob_diff"] == math.inf


def test_mismatch_metrics_equal_the_golden_numbers():
    """OFF-6 (direction of k1), OFF-7 (no correction involved), OFF-13 (ess and chi2)."""
    sums = mismatch_sums(old_logprobs=OLD, rollout_logprobs=ROLLOUT, mask=torch.ones(10))
    metrics = mismatch_metrics(sums)
    golden = GOLDEN["metrics"]["rollout_mismatch"]
    names = {
        "rollout_corr/mean_abs_logprob_diff": "mean_abs",
        "rollout_corr/max_abs_logprob_diff": "max_abs",
        "rollout_corr/k1_kl": "k1",
        "rollout_corr/k3_kl": "k3",
        "rollout_corr/chi2": "chi2",
        "rollout_corr/ess": "ess_share",
        "token_mult_prob_error": "mean_exp_abs",
    }
    for name, key in names.items():
        assert metrics[name] == pytest.approx(golden[key], abs=1e-9), name


def _added(parts: list[SumsAndPeaks]) -> SumsAndPeaks:
    """What a sum and a maximum over ranks make of it."""
    return SumsAndPeaks(
        {key: sum(part.sums[key] for part in parts) for key in parts[0].sums},
        {key: max(part.peaks[key] for part in parts) for key in parts[0].peaks},
    )


def test_metrics_of_parts_add_up_to_those_of_the_whole():
    """Rule 16: any cut into ranks and micro-batches, an empty one and a masked one included."""
    cut = [slice(0, 4), slice(4, 6), slice(6, 9), slice(9, 10), slice(0, 0)]
    ones = torch.ones(10)
    parts = [
        mismatch_sums(old_logprobs=OLD[at], rollout_logprobs=ROLLOUT[at], mask=ones[at])
        for at in cut
    ]
    bad = torch.full((3,), math.nan)
    parts.append(mismatch_sums(old_logprobs=bad, rollout_logprobs=bad, mask=torch.zeros(3)))
    whole = mismatch_sums(old_logprobs=OLD, rollout_logprobs=ROLLOUT, mask=ones)
    assert mismatch_metrics(_added(parts)) == pytest.approx(mismatch_metrics(whole), abs=1e-12)
    for mode in MODES:
        settings = CorrectionSettings(mode, 0.97, 1.04)
        stats = [_f1(settings, rows=at).stats for at in cut]
        expected = correction_metrics(_f1(settings).stats)
        assert correction_metrics(_added(stats)) == pytest.approx(expected, abs=1e-12)


def test_masked_shares_count_tokens_and_sequences():
    """OFF-8: 10 tokens, 3 masked; 4 sequences, 1 masked."""
    diffs, settings = [0.0] * 10, CorrectionSettings("token_mask", None, 1.05)
    for token in (0, 4, 5):  # one of the first sequence, all of the second
        diffs[token] = 1.0
    metrics = correction_metrics(_weigh(diffs, settings, sequence=SEQUENCE).stats)
    assert metrics["rollout_corr/masked_share"] == pytest.approx(0.3)
    assert metrics["rollout_corr/masked_sequence_share"] == 0.25
    assert metrics["rollout_corr/cut_sequence_share"] == 0.5
    assert metrics["rollout_corr/weight_mean"] == pytest.approx(0.7)
    assert metrics["rollout_corr/weight_max"] == 1.0


def test_masked_shares_are_split_by_the_sign_of_the_advantage():
    """OFF-8: of the 4 + 1 tokens of A > 0 one is masked, of the 2 of A < 0 both; the sequence with
    A = 0 is on neither side; parts of a step add up."""
    diffs, settings = [0.0] * 10, CorrectionSettings("token_mask", None, 1.05)
    for token in (0, 4, 5, 7):
        diffs[token] = 1.0
    advantages = torch.tensor([1.0, -2.0, 0.0, 0.5])

    def weigh(rows):
        part = torch.tensor(diffs, dtype=torch.float64)[rows]
        return correction_weights(
            old_logprobs=part,
            rollout_logprobs=torch.zeros_like(part),
            mask=torch.ones(len(part)),
            sequence=SEQUENCE[rows],
            num_sequences=4,
            settings=settings,
            advantages=advantages,
        ).stats

    whole = correction_metrics(weigh(slice(None)))
    assert whole["rollout_corr/masked_share_positive"] == pytest.approx(1 / 5)
    assert whole["rollout_corr/masked_share_negative"] == 1.0
    assert whole["rollout_corr/masked_share"] == pytest.approx(4 / 10)
    parts = _added([weigh(slice(0, 4)), weigh(slice(4, 10)), weigh(slice(0, 0))])
    assert correction_metrics(parts) == pytest.approx(whole, abs=1e-15)
    assert "rollout_corr/masked_share_positive" not in correction_metrics(
        _weigh(diffs, settings, sequence=SEQUENCE).stats
    )
    with pytest.raises(ValueError, match=r"advantages has shape \(10,\), expected \(4,\)"):
        correction_weights(
            old_logprobs=torch.zeros(10),
            rollout_logprobs=torch.zeros(10),
            mask=torch.ones(10),
            sequence=SEQUENCE,
            num_sequences=4,
            settings=settings,
            advantages=torch.ones(10),
        )


def test_one_masked_token_that_silences_vespo_is_reported():
    """OFF-11: every sequence of F1 is cut."""
    correction = _f1(CorrectionSettings("token_mask", None, 1.05))
    assert correction_metrics(correction.stats)["rollout_corr/cut_sequence_share"] == 1.0


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.0, [True, False, False, True]), (0.1, [True] * 4)]
)
def test_off_policy_mask_compares_the_engine_with_the_current_policy(threshold, expected):
    """OFF-9: drops only A < 0. The mean of sampled - current is (-0.05, -0.025, 0.0567, 0.35): with
    old in the place of current every mean is below 0.06."""
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    shifted = torch.cat([CURRENT[:4], CURRENT[4:6] - 0.05, CURRENT[6:]])
    keep = off_policy_keep(
        logprobs=shifted,
        rollout_logprobs=ROLLOUT,
        advantages=advantages,
        mask=torch.ones(10),
        sequence=SEQUENCE,
        num_sequences=4,
        threshold=threshold,
    )
    assert keep.tolist() == expected


def test_a_mean_of_exactly_the_threshold_keeps_the_sequence():
    """OFF-9: dropped is what is over it; binary fractions, so nothing is rounded."""
    call = {
        "logprobs": torch.tensor([-1.0, -1.5]),
        "rollout_logprobs": torch.tensor([-1.0, -1.0]),
        "advantages": torch.tensor([-1.0]),
        "mask": torch.ones(2),
        "sequence": torch.zeros(2, dtype=torch.int64),
        "num_sequences": 1,
    }
    assert off_policy_keep(threshold=0.25, **call).tolist() == [True]
    assert off_policy_keep(threshold=0.2421875, **call).tolist() == [False]


def test_off_policy_mask_reads_neither_masked_tokens_nor_empty_sequences():
    """OFF-9, OFF-14."""
    keep = off_policy_keep(
        logprobs=torch.tensor([-1.0, -9.0, math.nan]),
        rollout_logprobs=torch.tensor([-1.0, -1.0, -1.0]),
        advantages=torch.tensor([-1.0, -1.0]),
        mask=torch.tensor([1, 0, 0]),
        sequence=torch.tensor([0, 0, 1]),
        num_sequences=2,
        threshold=0.1,
    )
    assert keep.tolist() == [True, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_the_engine_could_not_score_drops_no_sequence(bad):
    """OFF-5 in the off-policy mask: the other tokens decide, 0.3 / 2 nats here."""
    call = {
        "logprobs": torch.tensor([-1.0, -1.0]),
        "rollout_logprobs": torch.tensor([-0.7, bad]),
        "advantages": torch.tensor([-1.0]),
        "mask": torch.ones(2),
        "sequence": torch.zeros(2, dtype=torch.int64),
        "num_sequences": 1,
    }
    assert off_policy_keep(threshold=0.2, **call).tolist() == [True]
    assert off_policy_keep(threshold=0.1, **call).tolist() == [False]


def test_unsampled_tokens_do_not_enter_the_product():
    """OFF-14: mask [1, 0, 1], diffs [0.1, 5, 0.1]; the masked one may be NaN."""
    for middle in (5.0, math.nan, math.inf):
        settings = CorrectionSettings("sequence_mask", None, 3.0)
        correction = _weigh([0.1, middle, 0.1], settings, mask=[1, 0, 1])
        expected = pytest.approx([1.221403, 1.0, 1.221403], abs=1e-6)
        assert correction.weights.tolist() == expected
        assert correction.stats.sums["nonfinite_tokens"] == 0
        assert correction.stats.sums["weight"].item() == pytest.approx(2.442806, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(LOSS_DEFAULTS))
def test_every_correction_acts_on_every_loss_or_the_pair_is_refused(name, mode):
    """OFF-12."""
    if name == "vespo" and not mode.startswith("token_"):
        with pytest.raises(ValueError, match=f"'{mode}' cannot enter loss 'vespo'"):
            resolve_loss_defaults(name, correction=mode)
        return
    losses = []
    for weights in (None, _f1(CorrectionSettings(mode, None, 1.03)).weights):
        output = policy_loss(
            name=name,
            logprobs=CURRENT,
            old_logprobs=OLD,
            advantages=ADVANTAGES,
            mask=torch.ones(10),
            sequence=SEQUENCE,
            num_sequences=4,
            counts=LossCounts(10, 4, 8),
            settings=resolve_loss_defaults(name, correction=mode),
            rollout_weights=weights,
        )
        losses.append(output.loss.item())
    assert abs(losses[0] - losses[1]) > 1e-4


def test_padded_batches_give_the_weights_of_the_pack():
    """The [B, S] form; padding may hold anything."""
    mask = torch.arange(6) < torch.tensor(F1["lengths"])[:, None]
    nan = torch.full((4, 6), math.nan, dtype=torch.float64)
    for mode in MODES:
        settings = CorrectionSettings(mode, 0.97, 1.04)
        padded = correction_weights(
            old_logprobs=nan.masked_scatter(mask, OLD),
            rollout_logprobs=nan.masked_scatter(mask, ROLLOUT),
            mask=mask,
            sequence=torch.arange(4)[:, None].expand(4, 6),
            num_sequences=4,
            settings=settings,
        )
        packed = _f1(settings)
        assert padded.weights.shape == (4, 6)
        torch.testing.assert_close(padded.weights[mask], packed.weights, atol=1e-12, rtol=0)
        assert correction_metrics(padded.stats) == pytest.approx(correction_metrics(packed.stats))


def test_defaults_are_tis_two_and_icepop():
    assert resolve_correction("token_truncate") == CorrectionSettings("token_truncate", None, 2.0)
    assert resolve_correction("token_mask") == CorrectionSettings("token_mask", 0.5, 5.0)
    assert resolve_correction("token_truncate", cap=3.0).high == 3.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"mode": "tis"}, "correction 'tis' is unknown; use one of .*'token_truncate'"),
        ({"mode": "none", "cap": 2.0}, "cap=2.0, low=None have no effect with mode none"),
        ({"mode": "token_mask", "cap": 0.4}, "bounds low=0.5, cap=0.4"),
        ({"mode": "token_truncate", "cap": 0.0}, "bounds low=None, cap=0.0"),
        ({"mode": "token_mask", "low": 5.0}, "bounds low=5.0, cap=5.0"),
    ],
)
def test_unknown_modes_and_impossible_bounds_are_refused(call, message):
    """OFF-3, CFG-11."""
    with pytest.raises(ValueError, match=message):
        resolve_correction(**call)


def test_a_mode_without_any_bound_is_refused():
    """OFF-3."""
    with pytest.raises(ValueError, match="'token_truncate' needs a bound"):
        _weigh([0.0], CorrectionSettings("token_truncate", None, None))


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"rollout_logprobs has shape \(1,\), expected \(3,\)"):
        mismatch_sums(
            old_logprobs=torch.zeros(3), rollout_logprobs=torch.zeros(1), mask=torch.ones(3)
        )
