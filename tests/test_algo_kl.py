"""KL in the reward and the controllers of its coefficient, against closed forms."""

import json
import math

import pytest
import torch

from megagrpo.algo.kl import ESTIMATORS, kl_penalized_rewards, kl_sequence_sums
from megagrpo.algo.kl_control import (
    BETA_MAX,
    BETA_MIN,
    ControllerSettings,
    KLController,
    resolve_controller,
)

NAN = math.nan


def _run(settings, values):
    """Every beta that the controller answers to the values."""
    controller = KLController(settings)
    return [controller.update(value) for value in values]


# KL in the reward


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sums_of_a_sequence_add_the_estimator_over_its_trained_tokens(estimator):
    """LOSS-11's values; masked tokens and a row without a token may hold anything."""
    deltas = [0.5, -0.1, NAN, 0.2, math.inf]  # ref - logp
    formula = {
        "k1": lambda d: -d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(d) - d - 1,
        "low_var_kl": lambda d: math.exp(d) - d - 1,
    }[estimator]
    logprobs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    sums = kl_sequence_sums(
        logprobs=logprobs,
        ref_logprobs=-1.0 + torch.tensor(deltas, dtype=torch.float64),
        mask=torch.tensor([1, 1, 0, 1, 0]),
        sequence=torch.tensor([0, 0, 0, 1, 2]),
        num_sequences=3,
        estimator=estimator,
    )
    expected = [formula(0.5) + formula(-0.1), formula(0.2), 0.0]
    assert sums.tolist() == pytest.approx(expected, abs=1e-12)
    assert sums.dtype == torch.float64 and not sums.requires_grad


def test_kl_lowers_the_reward_and_leaves_missing_ones_missing():
    rewards = torch.tensor([1.0, 0.0, NAN, 2.0], dtype=torch.float64)
    sums = torch.tensor([0.5, -0.25, 1.0, NAN], dtype=torch.float64)
    found = kl_penalized_rewards(rewards=rewards, kl_sums=sums, beta=0.2)
    assert found[:2].tolist() == pytest.approx([0.9, 0.05], abs=1e-15)
    assert found[2:].isnan().all()
    assert rewards[0] == 1.0, "the argument changed"


def test_the_reward_kl_refuses_other_shapes_and_signs():
    good = {"rewards": torch.zeros(2, dtype=torch.float64), "kl_sums": torch.zeros(2), "beta": 0.1}
    for change, message in (
        ({"rewards": torch.zeros(2)}, "expected float64"),
        ({"kl_sums": torch.zeros(1)}, r"kl_sums \(1,\)"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"beta": NAN}, "beta=nan"),
    ):
        with pytest.raises(ValueError, match=message):
            kl_penalized_rewards(**good | change)
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(1,\), expected \(2,\)"):
        kl_sequence_sums(
            logprobs=torch.zeros(2),
            ref_logprobs=torch.zeros(1),
            mask=torch.ones(2),
            sequence=torch.zeros(2).long(),
            num_sequences=1,
        )


# Controllers


def test_fixed_never_moves():
    assert resolve_controller("fixed").beta == 0.0
    assert _run(resolve_controller("fixed", beta=0.3), [0.0, 5.0, None]) == [0.3] * 3


def test_adaptive_multiplies_over_half_a_nat_and_divides_under_a_twentieth():
    settings = resolve_controller("adaptive")
    assert settings.beta == 0.01
    assert _run(settings, [0.51]) == pytest.approx([0.015], rel=1e-15)
    assert _run(settings, [0.049]) == pytest.approx([0.01 / 1.5], rel=1e-15)
    # The thresholds themselves belong to the quiet zone.
    assert _run(settings, [0.5]) == [0.01] and _run(settings, [0.05]) == [0.01]
    assert _run(settings, [0.9, 0.01]) == pytest.approx([0.015, 0.015], rel=1e-15)


def test_controllers_read_the_mean_of_the_last_ten_steps():
    """One outlier of 5.1 keeps the mean over 0.5 for exactly ten steps, itself included."""
    betas = _run(resolve_controller("adaptive"), [5.1] + [0.1] * 10)
    ups = [0.01 * 1.5 ** min(step, 10) for step in range(1, 12)]
    # Mean of the n-th step: (5.1 + 0.1 (n - 1)) / n = 0.1 + 5 / n > 0.5 for n <= 10.
    assert betas == pytest.approx(ups, rel=1e-12)
    assert betas[10] == betas[9]


def test_adaptive_refuses_zero_from_which_no_factor_leads_away():
    for beta in (0.0, -0.1, NAN, math.inf):
        with pytest.raises(ValueError, match="beta="):
            resolve_controller("adaptive", beta=beta)
        with pytest.raises(ValueError, match="beta="):
            resolve_controller("proportional", beta=beta, target=0.1)


@pytest.mark.parametrize(("kl", "bound"), [(0.0, BETA_MIN), (9.0, BETA_MAX)])
def test_a_product_never_reaches_zero_or_infinity(kl, bound):
    for settings in (
        resolve_controller("adaptive"),
        resolve_controller("proportional", target=0.1, horizon=1),
    ):
        controller = KLController(settings)
        for _ in range(3000):
            controller.update(kl)
        assert controller.beta == bound
        for _ in range(20):
            controller.update(9.0 - kl)
        assert BETA_MIN < controller.beta < BETA_MAX, "stuck at its bound"


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.11, 1.01), (0.095, 0.995), (5.0, 1.02), (0.0, 0.98), (0.1, 1.0)]
)
def test_proportional_moves_by_the_bounded_relative_error_over_the_horizon(kl, factor):
    """Ziegler et al. sec. 2.2: beta (1 + K clip(KL / target - 1, -0.2, 0.2)), K = 1 / 10 steps."""
    settings = resolve_controller("proportional", beta=0.2, target=0.1)
    assert _run(settings, [kl, kl]) == pytest.approx([0.2 * factor, 0.2 * factor**2], rel=1e-12)
    slow = resolve_controller("proportional", beta=0.2, target=0.1, horizon=1000)
    assert _run(slow, [kl])[0] == pytest.approx(0.2 * (1 + (factor - 1) / 100), rel=1e-12)


def test_pid_is_start_plus_gains_times_error_sum_and_change():
    settings = resolve_controller("pid", beta=0.05, target=0.1, kp=0.2, ki=0.03, kd=0.4)
    values = [0.3, 0.1, 0.5]
    means = [0.3, 0.2, 0.3]  # moving averages
    errors = [mean - 0.1 for mean in means]
    wanted = [
        0.05 + 0.2 * errors[0] + 0.03 * errors[0],
        0.05 + 0.2 * errors[1] + 0.03 * (errors[0] + errors[1]) + 0.4 * (errors[1] - errors[0]),
        0.05 + 0.2 * errors[2] + 0.03 * sum(errors) + 0.4 * (errors[2] - errors[1]),
    ]
    assert _run(settings, values) == pytest.approx(wanted, rel=1e-12)


def test_pid_never_goes_below_zero_and_does_not_wind_up():
    """After 100 steps of KL 0 the sum of errors is bounded by what beta = 0 needs, so beta rises
    with the first positive error; without the bound it would take another hundred steps."""
    settings = resolve_controller("pid", beta=0.01, target=0.1, kp=0.0, ki=0.1)
    controller = KLController(settings)
    betas = [controller.update(0.0) for _ in range(100)]
    assert betas[0] == pytest.approx(0.01 - 0.1 * 0.1, abs=1e-15) and min(betas) == 0.0
    assert controller.state()["integral"] == pytest.approx(-0.1, abs=1e-15)
    controller.load_state(controller.state() | {"recent": []})
    assert controller.update(0.3) == pytest.approx(0.1 * 0.2, abs=1e-15)
    high = KLController(resolve_controller("pid", beta=1.0, target=0.1, kp=0.0, ki=1e4))
    assert [high.update(9.0) for _ in range(3)] == [BETA_MAX] * 3
    high.load_state(high.state() | {"recent": []})
    assert high.update(0.05) == pytest.approx(BETA_MAX - 0.05 * 1e4, rel=1e-12)


@pytest.mark.parametrize("nothing", [None, NAN, math.inf])
@pytest.mark.parametrize(
    "settings",
    [
        resolve_controller("adaptive"),
        resolve_controller("proportional", target=0.1),
        resolve_controller("pid", target=0.1, kd=0.2),
    ],
    ids=lambda settings: settings.kind,
)
def test_a_step_without_a_number_changes_nothing(settings, nothing):
    plain, gappy = KLController(settings), KLController(settings)
    for value in (0.7, 0.02, 0.3):
        plain.update(value)
        gappy.update(value)
        before = gappy.beta
        assert gappy.update(nothing) == before
    assert plain.state() == gappy.state()


@pytest.mark.parametrize(
    "settings",
    [
        resolve_controller("fixed", beta=0.1),
        resolve_controller("adaptive"),
        resolve_controller("proportional", target=0.1, horizon=7),
        resolve_controller("pid", target=0.1, kp=0.3, ki=0.07, kd=0.2),
    ],
    ids=lambda settings: settings.kind,
)
def test_a_resumed_controller_is_bit_equal(settings):
    """Stopped after every number of steps, its state through JSON."""
    values = torch.rand(30, generator=torch.Generator().manual_seed(1)).tolist()
    straight = _run(settings, values)
    for stop in (0, 1, 9, 10, 11, 29):
        first = KLController(settings)
        for value in values[:stop]:
            first.update(value)
        second = KLController(settings)
        second.load_state(json.loads(json.dumps(first.state())))
        assert second.beta == first.beta
        assert [second.update(value) for value in values[stop:]] == straight[stop:]


def test_a_state_of_another_controller_is_refused():
    state = KLController(resolve_controller("adaptive")).state()
    with pytest.raises(ValueError, match="holds KL controller 'adaptive'.*asks for 'fixed'"):
        KLController(resolve_controller("fixed")).load_state(state)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("no_such", {}, "'no_such' is unknown; use one of .*'fixed'.*'pid'"),
        ("fixed", {"target": 0.1}, "target=0.1 has no effect on KL controller 'fixed'"),
        ("adaptive", {"horizon": 3}, "horizon=3 has no effect"),
        ("proportional", {"target": 0.1, "kp": 1.0}, "kp=1.0 has no effect"),
        ("proportional", {}, "target=None .* must be over 0"),
        ("pid", {"target": -0.1}, "target=-0.1 .* must be over 0"),
        ("proportional", {"target": 0.1, "horizon": 0}, "horizon=0 must be at least 1"),
        ("pid", {"target": 0.1, "kp": 0.0, "ki": 0.0}, "a pid without effect"),
        ("pid", {"target": 0.1, "ki": -1.0}, "must be numbers from 0"),
        ("fixed", {"beta": -0.1}, "beta=-0.1 is outside"),
    ],
)
def test_wrong_controllers_and_settings_without_effect_are_refused(kind, options, message):
    """CFG-11 and style rule 10."""
    with pytest.raises(ValueError, match=message):
        resolve_controller(kind, **options)


def test_defaults_of_the_gains_are_those_of_the_docstring():
    assert resolve_controller("pid", target=0.2) == ControllerSettings(
        "pid", 0.01, target=0.2, kp=0.1, ki=0.01, kd=0.0
    )
    assert resolve_controller("proportional", target=0.2).horizon == 10.0
