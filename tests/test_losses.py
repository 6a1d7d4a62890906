"""Losses against golden numbers, closed forms and finite differences."""

import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algo.corrections import correction_weights, off_policy_keep, resolve_correction
from megagrpo.algo.kl import kl_estimate
from megagrpo.algo.logprobs import vocab_parallel_logprobs
from megagrpo.algo.losses import LossCounts, LossOutput, policy_loss
from megagrpo.algo.settings import (
    AGGREGATIONS,
    LOSS_DEFAULTS,
    OPTIONAL,
    LossSettings,
    resolve_loss_defaults,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
F1 = GOLDEN["fixture"]
LENGTHS = F1["lengths"]
COUNTS = LossCounts(total_tokens=10, total_sequences=4, max_response_length=F1["limit"])
ADVANTAGES = torch.tensor(GOLDEN["advantages"]["eps_1e-4"]["group"], dtype=torch.float64)


def _flat(rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def _sequence(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _golden_settings(row) -> LossSettings:
    clip = {key: row[key] for key in ("eps_low", "eps_high", "delta", "cap") if key in row}
    return resolve_loss_defaults(
        row["objective"],
        aggregation=row["aggregation"],
        level=row["level"],
        beta=row["beta"],
        unbiased_kl=row.get("unbiased_kl", False),
        **clip,
    )


def _golden_call(row, logprobs) -> LossOutput:
    old, rollout = _flat(F1["old_logprobs"]), _flat(F1["rollout_logprobs"])
    place = {
        "mask": torch.ones(10, dtype=torch.bool),
        "sequence": _sequence(LENGTHS),
        "num_sequences": 4,
    }
    weights = keep = None
    if "rollout_is" in row:
        settings = resolve_correction(row["rollout_is"], cap=row["clip_max"], low=row["clip_min"])
        if row["clip_min"] is None:  # null means no bound in the golden rows
            settings = type(settings)(settings.mode, None, settings.high)
        weights = correction_weights(
            old_logprobs=old, rollout_logprobs=rollout, settings=settings, **place
        ).weights
    if "off_policy_threshold" in row:
        keep = off_policy_keep(
            logprobs=logprobs,
            rollout_logprobs=rollout,
            advantages=ADVANTAGES,
            threshold=row["off_policy_threshold"],
            **place,
        )
    return policy_loss(
        name=row["objective"],
        logprobs=logprobs,
        old_logprobs=old,
        advantages=ADVANTAGES,
        ref_logprobs=_flat(F1["ref_logprobs"]),
        rollout_weights=weights,
        keep=keep,
        counts=COUNTS,
        settings=_golden_settings(row),
        **place,
    )


@pytest.mark.parametrize("row", GOLDEN["losses"], ids=lambda row: row["name"])
def test_loss_and_gradient_equal_the_golden_row(row):
    logprobs = _flat(F1["logprobs"]).requires_grad_()
    loss = _golden_call(row, logprobs).loss
    loss.backward()
    assert loss.item() == pytest.approx(row["loss"], abs=1e-9)
    torch.testing.assert_close(logprobs.grad, _flat(row["grad"]), atol=1e-9, rtol=0)


def test_no_golden_row_has_a_field_that_the_test_does_not_read():
    """Else a row could pass without the option that it is about."""
    read = {"name", "objective", "level", "aggregation", "beta", "unbiased_kl", "loss", "grad"}
    read |= {"eps_low", "eps_high", "delta", "cap"}
    read |= {"rollout_is", "clip_min", "clip_max", "off_policy_threshold"}
    assert {key for row in GOLDEN["losses"] for key in row} == read
    assert len(GOLDEN["losses"]) == 133


LOSSES = list(LOSS_DEFAULTS)
CLIPPED = ["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo"]
STOPPED = ["cispo", "cispo_relative", "vespo"]  # gradient is not the derivative of the value
FORMS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# The fifth form, prompt-mean, needs to know prompts: its tests stand at the end of the file, its
# cuts and gradients in test_algo_invariance.py and test_algo_gradients.py.


def _row(objective, **changes):
    """A golden row's fields for `_golden_call`; eps 0.2 / 0.2 where the loss has them."""
    defaults = LOSS_DEFAULTS[objective]
    row = {"objective": objective, "level": "token", "aggregation": objective, "beta": 0.0}
    row |= {key: 0.2 for key in ("eps_low", "eps_high") if key in defaults.reads}
    return row | changes


def _one(name, logprobs, old=None, advantages=(1.0,), mask=None, sequence=None, **options):
    """A small call in float64; settings are the loss's own unless given."""
    logprobs = torch.as_tensor(logprobs, dtype=torch.float64)
    count = len(advantages)
    mask = torch.ones_like(logprobs) if mask is None else torch.as_tensor(mask)
    sequence = torch.zeros_like(logprobs, dtype=torch.int64) if sequence is None else sequence
    counts = options.pop("counts", None) or LossCounts(int(mask.sum()), count, 8)
    return policy_loss(
        name=name,
        logprobs=logprobs,
        old_logprobs=None if old is None else torch.as_tensor(old, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=mask,
        sequence=sequence,
        num_sequences=count,
        counts=counts,
        settings=options.pop("settings", None) or resolve_loss_defaults(name),
        **options,
    )


def _leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# One micro-batch of F1: rows in some order, each padded with masked garbage.


def _f1_part(name, rows, logprobs, settings, counts=COUNTS, pad=0, pad_value=math.nan, **options):
    """The loss of some rows of F1; `logprobs` is the list of the four rows' leaves."""

    def packed(values):
        return torch.cat([torch.cat([values[row], _garbage(pad, pad_value)]) for row in rows])

    tables = {
        key: [torch.tensor(row, dtype=torch.float64) for row in F1[key]]
        for key in ("old_logprobs", "ref_logprobs")
    }
    lengths = [LENGTHS[row] + pad for row in rows]
    mask = torch.cat([torch.arange(LENGTHS[row] + pad) < LENGTHS[row] for row in rows])
    return policy_loss(
        name=name,
        logprobs=packed(logprobs),
        old_logprobs=packed(tables["old_logprobs"]),
        ref_logprobs=packed(tables["ref_logprobs"]),
        advantages=ADVANTAGES[rows],
        mask=mask,
        sequence=_sequence(lengths),
        num_sequences=len(rows),
        counts=counts,
        settings=settings,
        **options,
    )


def _garbage(size, value):
    return torch.full((size,), value, dtype=torch.float64)


def _f1_in_parts(name, parts, settings, **options):
    """(sum of losses, gradient of all ten log-probs, summed metric sums) over micro-batches."""
    leaves = [_leaf(row) for row in F1["logprobs"]]
    outputs = [_f1_part(name, part, leaves, settings, **options) for part in parts]
    loss = sum(output.loss for output in outputs)
    loss.backward()
    sums = {key: sum(output.sums[key] for output in outputs) for key in outputs[0].sums}
    return loss.item(), torch.cat([leaf.grad for leaf in leaves]), sums


WHOLE = [[0, 1, 2, 3]]
CUTS = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0], [1], [2], [3]],
    [[3, 1, 0], [2]],
    [[2, 3, 1, 0]],
]


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", LOSSES)
def test_cut_order_and_padding_of_micro_batches_change_nothing(name, beta):
    """LOSS-1, LOSS-4, LOSS-5, LOSS-7: loss, gradient and every sum, for every loss; masked padding
    may hold NaN."""
    settings = resolve_loss_defaults(name, beta=beta)
    loss, grad, sums = _f1_in_parts(name, WHOLE, settings)
    for cut in CUTS:
        for pad, value in ((0, 0.0), (3, math.nan), (12, math.inf)):
            other = _f1_in_parts(name, cut, settings, pad=pad, pad_value=value)
            assert other[0] == pytest.approx(loss, abs=1e-12)
            torch.testing.assert_close(other[1], grad, atol=1e-12, rtol=0)
            for key in sums:
                assert other[2][key].item() == pytest.approx(sums[key].item(), abs=1e-12), key


@pytest.mark.parametrize("cut", [*CUTS, WHOLE])
def test_dapo_on_f1_has_the_published_value_and_gradient_norm_for_every_cut(cut):
    """LOSS-1, LOSS-4: 0.029128 and 0.196892, never the mean of means; LOSS-7 with beta."""
    settings = resolve_loss_defaults("dapo", eps_high=0.2)
    loss, grad, _ = _f1_in_parts("dapo", cut, settings)
    assert loss == pytest.approx(0.029128, abs=1e-6)
    assert grad.norm().item() == pytest.approx(0.196892, abs=1e-6)
    with_kl = resolve_loss_defaults("dapo", eps_high=0.2, beta=0.04)
    assert _f1_in_parts("dapo", cut, with_kl)[0] == pytest.approx(0.029769, abs=1e-6)


def test_counts_belong_to_one_optimizer_step():
    """LOSS-3: F1 in two optimizer steps."""
    settings = resolve_loss_defaults("dapo", eps_high=0.2)
    for rows, tokens, expected in (([0, 1], 6, -0.214815), ([2, 3], 4, 0.395042)):
        leaves = [_leaf(row) for row in F1["logprobs"]]
        output = _f1_part("dapo", rows, leaves, settings, counts=LossCounts(tokens, 2, 8))
        assert output.loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_dr_grpo_divides_by_the_limit_whatever_the_padded_width(width):
    """LOSS-5, in the [B, S] form."""
    padded = torch.zeros(4, width, dtype=torch.float64)
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    tables = {}
    for key in ("logprobs", "old_logprobs"):
        tables[key] = padded.masked_scatter(mask, _flat(F1[key]))
    output = policy_loss(
        name="dr_grpo",
        advantages=ADVANTAGES,
        mask=mask,
        sequence=torch.arange(4)[:, None].expand(4, width),
        num_sequences=4,
        counts=COUNTS,
        settings=resolve_loss_defaults("dr_grpo"),
        **tables,
    )
    assert output.loss.item() == pytest.approx(0.009102, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"), [("grpo", 0.073404), ("dr_grpo", 0.009102), ("dapo", 0.029128)]
)
def test_a_row_without_tokens_counts_nowhere(name, expected):
    """LOSS-6: an all-masked fifth row of NaN; ADV-4: its advantage acts on nothing."""
    settings = resolve_loss_defaults(name, eps_high=0.2)
    output = policy_loss(
        name=name,
        logprobs=torch.cat([_flat(F1["logprobs"]), _garbage(3, math.nan)]),
        old_logprobs=torch.cat([_flat(F1["old_logprobs"]), _garbage(3, math.nan)]),
        advantages=torch.cat([ADVANTAGES, torch.tensor([math.nan])]),
        mask=torch.arange(13) < 10,
        sequence=_sequence([*LENGTHS, 3]),
        num_sequences=5,
        counts=COUNTS,
        settings=settings,
    )
    assert output.loss.item() == pytest.approx(expected, abs=1e-6)
    assert (output.sums["tokens"].item(), output.sums["sequences"].item()) == (10, 4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_no_token_anywhere_gives_loss_zero_and_gradients_zero(name, form):
    """LOSS-8."""
    leaf = _leaf([-1.0, math.nan])
    settings = resolve_loss_defaults(name, aggregation=form)
    output = _one(name, leaf, [-1.0, 2.0], mask=[0, 0], settings=settings,
                  counts=LossCounts(0, 0, 8))  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == 0.0 and leaf.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_nan_at_a_masked_position_reaches_neither_value_nor_gradient(name, form):
    """LOSS-9: every loss and aggregation, in every per-token tensor; LOSS-24's slope -c A."""
    leaf, bad = _leaf([-1.0, math.nan]), torch.tensor([-1.0, math.nan], dtype=torch.float64)
    settings = resolve_loss_defaults(name, aggregation=form, beta=0.1, entropy_coef=0.1)
    output = _one(
        name, leaf, bad, mask=[1, 0], settings=settings, ref_logprobs=bad,
        rollout_weights=torch.tensor([1.0, math.inf], dtype=torch.float64), entropy=bad,
    )  # fmt: skip
    output.loss.backward()
    scale = 1 / 8 if form == "seq-mean-token-sum-norm" else 1.0
    value = {"sapo": -2.0, "cispo": 1.0, "cispo_relative": 1.0, "vespo": 1.0}.get(name, -1.0)
    assert output.loss.item() == pytest.approx(scale * (value + 0.1), abs=1e-12)
    assert leaf.grad.tolist() == pytest.approx([-scale, 0.0], abs=1e-12)
    assert leaf.grad[1] == 0.0


def test_token_and_sequence_means_are_different_names():
    """LOSS-10, first two numbers: 10 tokens of 1 and 2 tokens of 2, then 4 tokens of 4."""
    advantages, lengths = (-1.0, -2.0, -4.0), [10, 2, 4]
    for form, expected in (("token-mean", 30 / 16), ("seq-mean-token-mean", 7 / 3)):
        output = _one("grpo", torch.zeros(16), advantages=advantages, sequence=_sequence(lengths),
                      settings=resolve_loss_defaults("grpo", aggregation=form))  # fmt: skip
        assert output.loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_on_policy_gradient_is_minus_c_times_a(name, form):
    """LOSS-24 for every loss and aggregation, with c from the definition of the form."""
    leaves = _flat(F1["old_logprobs"]).requires_grad_()
    output = policy_loss(
        name=name,
        logprobs=leaves,
        old_logprobs=leaves,
        advantages=ADVANTAGES,
        mask=torch.ones(10),
        sequence=_sequence(LENGTHS),
        num_sequences=4,
        counts=COUNTS,
        settings=resolve_loss_defaults(name, aggregation=form),
    )
    output.loss.backward()
    share = {"token-mean": 1 / 10, "seq-mean-token-sum": 1 / 4, "seq-mean-token-sum-norm": 1 / 32}
    expected = [
        -share.get(form, 1 / (4 * length)) * advantage
        for length, advantage in zip(LENGTHS, ADVANTAGES.tolist(), strict=True)
        for _ in range(length)
    ]
    assert leaves.grad.tolist() == pytest.approx(expected, abs=1e-12)


def test_on_policy_dapo_gradient_equals_the_golden_one():
    """LOSS-24 by the printed numbers."""
    leaf = _flat(F1["logprobs"]).requires_grad_()
    _one("dapo", leaf, advantages=ADVANTAGES.tolist(), sequence=_sequence(LENGTHS)).loss.backward()
    golden = _flat(GOLDEN["on_policy_dapo_grad_when_logp_is_old"])
    torch.testing.assert_close(leaf.grad, golden, atol=1e-9, rtol=0)


def test_advantage_of_a_sequence_is_never_broadcast_over_positions():
    """ADV-31: B = T = 3."""
    leaf = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(3)[:, None].expand(3, 3)
    call = {
        "name": "dapo",
        "logprobs": leaf,
        "old_logprobs": None,
        "mask": torch.ones(3, 3),
        "sequence": rows,
        "num_sequences": 3,
        "counts": LossCounts(9, 3, 3),
        "settings": resolve_loss_defaults("dapo"),
    }
    policy_loss(advantages=torch.tensor([1.0, 2.0, 3.0]), **call).loss.backward()
    expected = -torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None].expand(3, 3) / 9
    torch.testing.assert_close(leaf.grad, expected)
    with pytest.raises(ValueError, match=r"advantages has shape \(3, 3\), expected \(3,\)"):
        policy_loss(advantages=torch.ones(3, 3), **call)
    for name in ("mask", "sequence"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(3,\), expected \(3, 3\)"):
            policy_loss(advantages=torch.ones(3), **(call | {name: torch.zeros(3).long()}))
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(3, 1\)"):
        policy_loss(advantages=torch.ones(3), ref_logprobs=torch.zeros(3, 1), **call)


def test_advantages_in_the_place_of_the_mask_are_refused():
    """CFG-10."""
    with pytest.raises(ValueError, match=r"mask holds 0\.75"):
        _one("grpo", [0.0, 0.0], mask=torch.tensor([0.75, -0.75]), counts=LossCounts(2, 1, 8))
    with pytest.raises(TypeError):
        policy_loss("grpo", torch.zeros(1), torch.zeros(1))


# KL


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", 0.148721, -0.648721),
     ("low_var_kl", 0.148721, -0.648721)],
)  # fmt: skip
def test_kl_estimators_have_their_own_value_and_gradient(estimator, value, slope):
    """LOSS-11: ref - logp = 0.5."""
    leaf = _leaf([-1.0])
    kl = kl_estimate(logprobs=leaf, ref_logprobs=leaf.detach() + 0.5, estimator=estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert leaf.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_estimators_equal_the_golden_table(estimator):
    table = GOLDEN["tables"]["kl"]
    delta = torch.tensor(table["ref_minus_logp"], dtype=torch.float64)
    kl = kl_estimate(logprobs=-delta, ref_logprobs=torch.zeros_like(delta), estimator=estimator)
    assert kl.tolist() == pytest.approx(table[estimator], abs=1e-11)


def test_unbiased_kl_carries_the_gradient_of_the_ratio():
    """LOSS-12: on-policy, value 0.148721, gradient -0.5."""
    leaf = _leaf([-1.0])
    settings = resolve_loss_defaults("dapo", beta=1.0, unbiased_kl=True)
    ref = leaf.detach() + 0.5
    output = _one("dapo", leaf, advantages=(0.0,), ref_logprobs=ref, settings=settings)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.148721, abs=1e-6)
    assert leaf.grad.item() == pytest.approx(-0.5, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_gets_no_gradient(estimator):
    current, ref = (torch.tensor([value], requires_grad=True) for value in (-1.0, -0.5))
    kl_estimate(logprobs=current, ref_logprobs=ref, estimator=estimator).sum().backward()
    assert current.grad is not None and ref.grad is None


@pytest.mark.parametrize("delta", [25.0, 3.0, 100.0, 1e30, -1e30, -25.0])
def test_an_active_kl_clamp_has_no_gradient(delta):
    """LOSS-13: 25 is over both clamps, 3 only over the output's."""
    leaf = torch.zeros(1, requires_grad=True)
    kl = kl_estimate(logprobs=leaf, ref_logprobs=torch.tensor([delta]))
    kl.sum().backward()
    assert kl.item() == 10.0 and leaf.grad.item() == 0.0


def test_a_rollout_weight_or_a_dropped_sequence_never_touches_kl():
    """LOSS-14: 0.005949 whether the weight is 0 or the sequence is dropped."""
    ref = torch.tensor([-0.5], dtype=torch.float64)
    settings = resolve_loss_defaults("dapo", beta=0.04)
    for change in (
        {"rollout_weights": torch.zeros(1, dtype=torch.float64)},
        {"keep": torch.tensor([False])},
    ):
        output = _one("dapo", [-1.0], [-1.0], ref_logprobs=ref, settings=settings, **change)
        assert output.loss.item() == pytest.approx(0.005949, abs=1e-6)
        assert output.sums["kl_loss"].item() == pytest.approx(0.148721, abs=1e-6)


def test_reference_sums_are_the_golden_means_whatever_beta_is():
    golden = GOLDEN["metrics"]["kl_to_reference"]
    for beta in (0.0, 0.04):
        row = _row("grpo", beta=beta)
        sums = _golden_call(row, _flat(F1["logprobs"])).sums
        assert sums["ref_k1"].item() / 10 == pytest.approx(golden["k1"], abs=1e-11)
        assert sums["ref_k3"].item() / 10 == pytest.approx(golden["k3"], abs=1e-11)


def test_entropy_bonus_lowers_the_loss_and_flattens_the_logits():
    """LOSS-15."""
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, torch.tensor([0]), group=None, valid_vocab=2, with_entropy=True
    )
    settings = resolve_loss_defaults("dapo", entropy_coef=0.1)
    output = _one("dapo", logprobs, advantages=(0.0,), entropy=entropy, settings=settings)
    output.loss.backward()
    assert output.sums["entropy"].item() == pytest.approx(0.582203, abs=1e-6)
    assert output.loss.item() == pytest.approx(-0.058220, abs=1e-6)
    assert logits.grad[0].tolist() == pytest.approx([0.019661, -0.019661], abs=1e-6)


# The terms


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "low", "moves"),
    [(1.5, -1, 1.5, 0, True), (1.25, 1, -1.25, 0, True), (0.7, -1, 0.8, 1, False)],
)
def test_clip_bounds_and_counters_know_the_sign_of_the_advantage(
    ratio, advantage, expected, low, moves
):
    """LOSS-16: eps 0.2 / 0.28."""
    leaf = _leaf([math.log(ratio)])
    output = _one("dapo", leaf, [0.0], advantages=(float(advantage),))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)
    assert (output.sums["clip_low"].item(), output.sums["clip_high"].item()) == (low, 0)
    assert bool(leaf.grad.item() != 0) == moves


def test_clip_counters_equal_the_golden_counts():
    golden = GOLDEN["metrics"]["clip_counts_eps_0_2"]
    sums = _golden_call(_row("grpo"), _flat(F1["logprobs"])).sums
    counts = {"low": sums["clip_low"], "high": sums["clip_high"], "tokens": sums["tokens"]}
    assert {key: value.item() for key, value in counts.items()} == golden
    drift = sum(_flat(F1["old_logprobs"]) - _flat(F1["logprobs"])).item()
    assert sums["ppo_kl"].item() == pytest.approx(drift, abs=1e-12)


@pytest.mark.parametrize(("bound", "expected", "slope"), [(3.0, 3.0, 0.0), (None, 10.0, 10.0)])
def test_dual_clip_bounds_the_loss_of_bad_samples(bound, expected, slope):
    """LOSS-17; positive advantages are left alone."""
    settings = resolve_loss_defaults("dapo", dual_clip=bound)
    leaf = _leaf([math.log(10.0)])
    output = _one("dapo", leaf, [0.0], advantages=(-1.0,), settings=settings)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)
    assert leaf.grad.item() == pytest.approx(slope, abs=1e-12)
    good = _one("dapo", [math.log(10.0)], [0.0], settings=settings)
    assert good.loss.item() == pytest.approx(-1.28, abs=1e-12)


def test_sequence_ratio_is_the_geometric_mean():
    """LOSS-18: log-ratios 0.1 and 0.3 give 1.221403 for both tokens, in gspo too."""
    settings = resolve_loss_defaults("grpo", level="sequence", eps_high=0.3)
    output = _one("grpo", [0.1, 0.3], [0.0, 0.0], settings=settings)
    assert output.loss.item() == pytest.approx(-1.221403, abs=1e-6)
    gspo = resolve_loss_defaults("gspo", eps_high=0.3)
    assert _one("gspo", [0.1, 0.3], [0.0, 0.0], settings=gspo).loss.item() == output.loss.item()


def test_cispo_cap_is_absolute_and_its_relative_form_has_its_own_name():
    """LOSS-19."""
    leaf = _leaf([-0.7])
    old = [-0.7 - math.log(5.5)]
    output = _one("cispo", leaf, old)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(3.5, abs=1e-9)
    assert leaf.grad.item() == pytest.approx(-5.0, abs=1e-9)
    relative = resolve_loss_defaults("cispo_relative", eps_high=5.0)
    value = _one("cispo_relative", [-0.7], old, settings=relative).loss.item()
    assert value == pytest.approx(3.85, abs=1e-9)


@pytest.mark.parametrize(("advantage", "counted"), [(1.0, 1), (-1.0, 0)])
def test_cispo_counts_a_capped_ratio_where_it_lowers_the_gain(advantage, counted):
    """LOSS-16's counter for the capped losses."""
    sums = _one("cispo", [-0.7, -0.7], [-7.0, -0.7], advantages=(advantage,)).sums
    assert (sums["clip_low"].item(), sums["clip_high"].item()) == (0, counted)


@pytest.mark.parametrize(("table", "advantage"), [("tau_1", 1.0), ("tau_1_05", -1.0)])
def test_sapo_gate_equals_the_golden_table(table, advantage):
    """LOSS-20."""
    golden = GOLDEN["tables"]["sapo_gate"]
    for at, ratio in enumerate(golden["w"]):
        leaf = _leaf([math.log(ratio)])
        output = _one("sapo", leaf, [0.0], advantages=(advantage,))
        output.loss.backward()
        assert output.loss.item() == pytest.approx(-advantage * golden[table][at], abs=1e-9)
        if advantage > 0:  # d loss / d logprob = -slope * w
            slope = -golden["tau_1_slope"][at] * ratio
            assert leaf.grad.item() == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize(("table", "advantage"), [("positive", 1.0), ("negative", -1.0)])
def test_vespo_weight_equals_the_golden_table_and_has_no_gradient(table, advantage):
    """LOSS-21: the product over two tokens is W."""
    golden = GOLDEN["tables"]["vespo_phi"]
    for weight, phi in zip(golden["W"], golden[table], strict=True):
        leaf = _leaf([-1.0, -2.0])
        old = [-1.0 - 0.3, -2.0 - math.log(weight) + 0.3]
        _one("vespo", leaf, old, advantages=(advantage,)).loss.backward()
        assert leaf.grad.tolist() == pytest.approx([-phi * advantage / 2] * 2, abs=1e-9)


def test_luspo_sums_tokens_and_ignores_padding():
    """LOSS-22; the padded forms are those of the metamorphic test above."""
    for level, beta, expected in (
        ("token", 0.0, 0.072820),
        ("sequence", 0.0, 0.005976),
        ("sequence", 0.04, 0.007580),
    ):
        settings = resolve_loss_defaults("luspo", level=level, beta=beta)
        for pad in (0, 5):
            loss, _, _ = _f1_in_parts("luspo", WHOLE, settings, pad=pad)
            assert loss == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "level"), [(name, level) for name in LOSSES for level in LOSS_DEFAULTS[name].levels]
)
def test_gradients_equal_finite_differences(name, level):
    """Every loss with dual clip, delta and KL where it has them; stop-gradient losses move old
    along, which keeps what they must not differentiate."""
    extra = {"dual_clip": 1.7, "delta": 1.6} if name in CLIPPED else {}
    beta = 0.0 if name in STOPPED else 0.1
    settings = resolve_loss_defaults(name, level=level, beta=beta, entropy_coef=0.0, **extra)
    generator = torch.Generator().manual_seed(11)
    logprobs, old, ref = (
        -torch.rand(9, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    sequence, advantages = _sequence([4, 3, 2]), (0.8, -1.3, -0.2)

    def value(moved, at=None, step=0.0):
        shifted = old.clone()
        if at is not None and name in STOPPED:
            shifted[at] += step
        return _one(name, moved, shifted, advantages, sequence=sequence, ref_logprobs=ref,
                    settings=settings).loss  # fmt: skip

    leaf = logprobs.clone().requires_grad_()
    value(leaf).backward()
    for at in range(9):
        ends = []
        for step in (1e-6, -1e-6):
            moved = logprobs.clone()
            moved[at] += step
            ends.append(value(moved, at, step).item())
        assert leaf.grad[at].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_an_exploded_log_ratio_gives_finite_numbers(name):
    """LOSS-13's kind in the policy term: e^200 overflows float32 and its branch is not taken."""
    leaf = torch.tensor([0.0, -1.0], requires_grad=True)
    output = policy_loss(
        name=name,
        logprobs=leaf,
        old_logprobs=torch.tensor([-200.0, -1.0]),
        advantages=torch.tensor([1.0]),
        mask=torch.ones(2),
        sequence=torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
        counts=LossCounts(2, 1, 8),
        settings=resolve_loss_defaults(name),
    )
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert output.loss.isfinite() and leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_within_its_rounding_of_float64(name):
    settings = resolve_loss_defaults(name)
    wide, _, _ = _f1_in_parts(name, WHOLE, settings)
    narrow = policy_loss(
        name=name,
        logprobs=_flat(F1["logprobs"]).float(),
        old_logprobs=_flat(F1["old_logprobs"]).float(),
        advantages=ADVANTAGES,
        mask=torch.ones(10),
        sequence=_sequence(LENGTHS),
        num_sequences=4,
        counts=COUNTS,
        settings=settings,
    ).loss
    assert narrow.dtype == torch.float32
    assert narrow.item() == pytest.approx(wide, abs=1e-6)


# Names and defaults


@pytest.mark.parametrize(
    ("name", "form", "eps", "normalize"),
    [
        ("grpo", "seq-mean-token-mean", (0.2, 0.2), "std"),
        ("dapo", "token-mean", (0.2, 0.28), "std"),
        ("bnpo", "token-mean", (0.2, 0.2), "std"),
        ("dr_grpo", "seq-mean-token-sum-norm", (0.2, 0.2), "none"),
        ("gspo", "seq-mean-token-mean", (3e-4, 4e-4), "std"),
        ("luspo", "seq-mean-token-sum", (0.2, 0.2), "std"),
    ],
)
def test_a_null_setting_takes_the_losss_own_default(name, form, eps, normalize):
    settings = resolve_loss_defaults(name)
    assert settings.aggregation == form and settings.normalize == normalize
    assert (settings.eps_low, settings.eps_high) == eps
    assert settings.level == ("sequence" if name in ("gspo", "luspo") else "token")
    given = resolve_loss_defaults(name, eps_low=0.11, aggregation="token-mean", normalize="batch")
    assert (given.eps_low, given.eps_high) == (0.11, eps[1])
    assert (given.aggregation, given.normalize) == ("token-mean", "batch")


@pytest.mark.parametrize("name", LOSSES)
def test_resolved_settings_resolve_to_themselves(name):
    """A config file written with every default filled in must start the same run again."""
    settings = resolve_loss_defaults(name, beta=0.1, entropy_coef=0.01)
    fields = ("aggregation", "level", "normalize", "beta", "kl_estimator", "unbiased_kl")
    fields += ("entropy_coef", *OPTIONAL)
    again = resolve_loss_defaults(name, **{field: getattr(settings, field) for field in fields})
    assert again == settings


def test_cispo_has_the_absolute_cap_of_five():
    assert resolve_loss_defaults("cispo").cap == 5.0
    assert resolve_loss_defaults("cispo", cap=3.0).cap == 3.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such", {}, "loss 'no_such' is unknown; use one of .*'grpo'.*'vespo'"),
        ("grpo", {"aggregation": "no_such"}, "aggregation 'no_such' is unknown; .*'token-mean'"),
        ("sapo", {"eps_low": 0.1}, "eps_low=0.1 has no effect on loss 'sapo'"),
        ("grpo", {"cap": 2.0}, "cap=2.0 has no effect on loss 'grpo'"),
        ("cispo", {"eps_high": 0.3}, "eps_high=0.3 has no effect"),
        ("gspo", {"level": "token"}, "level='token' is not of loss 'gspo'"),
        ("vespo", {"correction": "sequence_mask"}, "'sequence_mask' cannot enter loss 'vespo'"),
        ("grpo", {"eps_low": 1.5}, "eps_low=1.5 is outside"),
        ("grpo", {"dual_clip": 0.5}, "dual_clip=0.5 is outside"),
        ("grpo", {"beta": -0.1}, "beta=-0.1 is outside"),
        ("grpo", {"kl_estimator": "k4"}, "KL estimator 'k4' is unknown"),
        ("grpo", {"normalize": "group"}, "normalize='group' is unknown"),
        ("grpo", {"tau_positive": 1.0}, "tau_positive=1.0 has no effect on loss 'grpo'"),
        ("vespo", {"tau_negative": 1.0}, "tau_negative=1.0 has no effect on loss 'vespo'"),
        ("sapo", {"gamma_positive": (2.0, 3.0)}, r"gamma_positive=\(2.0, 3.0\) has no effect"),
        ("sapo", {"tau_negative": 0.0}, "tau_negative=0 switches the policy term off"),
        ("grpo", {"delta": 0.0}, "delta=0 switches the policy term off"),
        ("cispo", {"cap": 0.0}, "cap=0 switches the policy term off"),
        ("sapo", {"tau_positive": -1.0}, "tau_positive=-1.0 is outside"),
        ("vespo", {"gamma_negative": [2.0]}, r"gamma_negative=\[2.0\] must be two numbers"),
        ("vespo", {"gamma_negative": 2.0}, "gamma_negative=2.0 must be two numbers"),
        ("vespo", {"gamma_positive": [2.0, -1.0]}, "gamma_positive=.* is outside"),
        ("grpo", {"unbiased_kl": True}, "unbiased_kl=True has no effect with beta=0"),
        ("grpo", {"entropy_coef": math.nan}, "entropy_coef=nan is outside"),
        ("grpo", {"beta": math.inf}, "beta=inf is outside"),
    ],
)
def test_wrong_names_and_settings_without_effect_are_refused(name, options, message):
    """CFG-11 and style rule 10."""
    with pytest.raises(ValueError, match=message):
        resolve_loss_defaults(name, **options)


def test_unknown_names_are_refused_by_the_functions_too():
    """CFG-11."""
    good = resolve_loss_defaults("grpo")
    with pytest.raises(ValueError, match="loss 'no_such' is unknown"):
        _one("no_such", [0.0], settings=good)
    with pytest.raises(ValueError, match="KL estimator 'no_such' is unknown"):
        kl_estimate(logprobs=torch.zeros(1), ref_logprobs=torch.zeros(1), estimator="no_such")
    with pytest.raises(ValueError, match="beta=0.1 needs ref_logprobs"):
        _one("grpo", [0.0], settings=resolve_loss_defaults("grpo", beta=0.1))
    with pytest.raises(ValueError, match="entropy_coef=0.1 needs entropy"):
        _one("grpo", [0.0], settings=resolve_loss_defaults("grpo", entropy_coef=0.1))


def test_every_loss_has_its_own_value_on_f1():
    """CFG-11: no name falls into another's branch; bnpo is dapo with other bounds by rule."""
    values = {name: _f1_in_parts(name, WHOLE, resolve_loss_defaults(name))[0] for name in LOSSES}
    assert len({round(value, 9) for value in values.values()}) == len(LOSSES)


def test_a_temperature_or_a_gamma_that_is_given_reaches_the_term():
    """LOSS-20, LOSS-21 with other numbers than the published ones."""
    for advantage, tau in ((1.0, 0.5), (-1.0, 2.0)):
        given = resolve_loss_defaults("sapo", tau_positive=0.5, tau_negative=2.0)
        loss = _one("sapo", [math.log(1.5)], [0.0], advantages=(advantage,), settings=given).loss
        gate = 4 / tau / (1 + math.exp(-tau * 0.5))
        assert loss.item() == pytest.approx(-advantage * gate, abs=1e-12)
    for advantage, (k, lam) in ((1.0, (1.5, 0.5)), (-1.0, (0.25, 2.0))):
        given = resolve_loss_defaults(
            "vespo", gamma_positive=[1.5, 0.5], gamma_negative=(0.25, 2.0)
        )
        leaf = _leaf([-0.3])
        old = [-0.3 - math.log(1.7)]
        _one("vespo", leaf, old, advantages=(advantage,), settings=given).loss.backward()
        phi = math.exp(lam + k * math.log(1.7) - lam * 1.7)
        assert leaf.grad.item() == pytest.approx(-phi * advantage, abs=1e-12)


# Prompt means, and what the masks drop


def _prompts(form, order=(0, 1, 2), given=(12, 12, 4), prompts=2):
    """Prompt p: 10 tokens of loss 1 and 2 of loss 2; prompt q: 4 tokens of loss 4."""
    lengths, losses = [10, 2, 4], (1.0, 2.0, 4.0)
    chosen = [lengths[row] for row in order]
    return _one(
        "grpo",
        torch.zeros(sum(chosen)),
        advantages=tuple(-losses[row] for row in order),
        sequence=_sequence(chosen),
        settings=resolve_loss_defaults("grpo", aggregation=form),
        counts=LossCounts(16, 3, 8, total_prompts=prompts),
        prompt_tokens=torch.tensor([given[row] for row in order]),
    ).loss.item()


def test_token_sequence_and_prompt_means_are_three_names():
    """LOSS-10: 1.875, 2.333333, 2.583333."""
    assert _prompts("token-mean") == pytest.approx(1.875, abs=1e-12)
    assert _prompts("seq-mean-token-mean") == pytest.approx(7 / 3, abs=1e-12)
    assert _prompts("prompt-mean") == pytest.approx(31 / 12, abs=1e-12)


def test_rows_of_one_prompt_may_lie_in_different_micro_batches():
    """LOSS-10 with LOSS-1: prompt_tokens are those of the whole optimizer step."""
    parts = sum(_prompts("prompt-mean", order) for order in ((2, 0), (1,)))
    assert parts == pytest.approx(31 / 12, abs=1e-12)


def test_a_prompt_without_a_trained_token_counts_nowhere():
    """LOSS-6: a third prompt whose only row is masked; with total_prompts 3 it would dilute."""
    leaf = _leaf([0.0] * 16 + [math.nan])
    output = _one(
        "grpo",
        leaf,
        advantages=(-1.0, -2.0, -4.0, 9.0),
        mask=[1] * 16 + [0],
        sequence=_sequence([10, 2, 4, 1]),
        settings=resolve_loss_defaults("grpo", aggregation="prompt-mean"),
        counts=LossCounts(16, 3, 8, total_prompts=2),
        prompt_tokens=torch.tensor([12, 12, 4, 0]),
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(31 / 12, abs=1e-12)
    wanted = [1 / 24] * 10 + [2 / 24] * 2 + [4 / 8] * 4 + [0.0]
    assert leaf.grad.tolist() == pytest.approx(wanted, abs=1e-12)


def test_a_prompt_mean_without_its_numbers_is_refused():
    settings = resolve_loss_defaults("grpo", aggregation="prompt-mean")
    with pytest.raises(ValueError, match="prompt_tokens=None and total_prompts=1; give both"):
        _one("grpo", [0.0], settings=settings, counts=LossCounts(1, 1, 8, 1))
    with pytest.raises(ValueError, match="prompt_tokens=given and total_prompts=0; give both"):
        _one("grpo", [0.0], settings=settings, prompt_tokens=torch.ones(1))
    with pytest.raises(ValueError, match=r"prompt_tokens has shape \(2,\), expected \(1,\)"):
        _one("grpo", [0.0], settings=settings, prompt_tokens=torch.ones(2))
    with pytest.raises(ValueError, match="aggregation 'prompt' is unknown; .*'prompt-mean'"):
        resolve_loss_defaults("grpo", aggregation="prompt")


@pytest.mark.parametrize("name", LOSSES)
def test_a_removed_row_leaves_the_numerator_and_every_denominator(name):
    """ADV-26: a truncated sample of 100 tokens that is masked, and one of 2 tokens: the loss is the
    second's alone, for every aggregation."""
    for form in sorted(set(AGGREGATIONS.values())):
        settings = resolve_loss_defaults(name, aggregation=form, beta=0.1)
        logprobs, old = [-3.0] * 100 + [-1.0, -0.5], [-0.1] * 100 + [-1.2, -0.6]
        both = _one(
            name,
            logprobs,
            old,
            advantages=(2.0, -1.0),
            mask=[0] * 100 + [1, 1],
            sequence=_sequence([100, 2]),
            settings=settings,
            counts=LossCounts(2, 1, 8, 1),
            prompt_tokens=torch.tensor([2, 2]),
            ref_logprobs=torch.tensor(old, dtype=torch.float64),
        )
        alone = _one(
            name,
            logprobs[100:],
            old[100:],
            advantages=(-1.0,),
            settings=settings,
            counts=LossCounts(2, 1, 8, 1),
            prompt_tokens=torch.tensor([2]),
            ref_logprobs=torch.tensor(old[100:], dtype=torch.float64),
        )
        assert both.loss.item() == pytest.approx(alone.loss.item(), abs=1e-12)
        assert both.sums["sequences"] == 1 and both.sums["tokens"] == 2


@pytest.mark.parametrize("name", LOSSES)
def test_without_any_signal_only_kl_acts(name):
    """ADV-9: advantages exactly 0: loss and gradient exactly 0, with KL the KL's own."""
    leaf, old = _leaf([-1.0, -0.5]), [-1.4, -0.3]
    _one(name, leaf, old, advantages=(0.0,)).loss.backward()
    assert leaf.grad.tolist() == [0.0, 0.0]
    leaf.grad = None
    ref = torch.tensor([-1.1, -0.2], dtype=torch.float64)
    settings = resolve_loss_defaults(name, aggregation="token-mean", beta=0.5)
    _one(name, leaf, old, (0.0,), ref_logprobs=ref, settings=settings).loss.backward()
    slope = 0.25 * (1 - (ref - leaf.detach()).exp())  # beta / N (1 - e^delta)
    torch.testing.assert_close(leaf.grad, slope, atol=1e-15, rtol=0)


def test_what_the_off_policy_mask_drops_is_counted():
    """OFF-8, OFF-9: sequences and tokens; a dropped row without tokens is no sequence."""
    output = policy_loss(
        name="dapo",
        logprobs=torch.zeros(6),
        old_logprobs=None,
        advantages=-torch.ones(4),
        mask=torch.tensor([1, 1, 0, 1, 0, 1]),
        sequence=torch.tensor([0, 0, 0, 1, 2, 3]),
        num_sequences=4,
        counts=LossCounts(4, 3, 8),
        settings=resolve_loss_defaults("dapo"),
        keep=torch.tensor([False, True, False, True]),
    )
    sums = {key: output.sums[key].item() for key in ("off_policy_sequences", "off_policy_tokens")}
    assert sums == {"off_policy_sequences": 1, "off_policy_tokens": 2}
    assert (output.sums["tokens"], output.sums["sequences"]) == (4, 3), "denominators stay"
    assert output.loss.item() == pytest.approx(2 / 4)
