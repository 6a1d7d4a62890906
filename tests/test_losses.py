"""Losses against golden numbers, closed forms and finite differences."""

import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algo.corrections import correction_weights, off_policy_keep, resolve_correction
from megagrpo.algo.losses import LossCounts, LossOutput, policy_loss
from megagrpo.algo.settings import LOSS_DEFAULTS, LossSettings, resolve_loss_defaults

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
