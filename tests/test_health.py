"""Warnings on crafted runs: each fires on what it names, once, and stays silent on noise.

The noisy runs are what a healthy run looks like; thresholds are the defaults.
"""

import json
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megagrpo.config import HealthConfig
from megagrpo.config_file import load_config
from megagrpo.metrics.health import ADVICE, Finding, Health, findings_of
from megagrpo.metrics.report_html import write_report

Line = dict[str, Any]
SETTINGS = HealthConfig()


def healthy(step: int, noise: random.Random) -> Line:
    """A run that learns: reward and KL rise, lengths wander, half of the groups are flat."""
    return {
        "step": step,
        "reward/mean": 0.3 + 0.001 * step + noise.gauss(0, 0.03),
        "advantage/clipped_share": max(0.0, noise.gauss(0.02, 0.02)),
        "kl/ref_k3": 0.0005 * step * noise.uniform(0.5, 1.5),
        "actor/grad_norm": noise.lognormvariate(0, 0.7),
        "response_length/mean": 200 * noise.uniform(0.7, 1.3),
        "reward/zero_variance_share": noise.uniform(0.3, 0.75),
        "rollout/repetition_share": noise.uniform(0.02, 0.12),
    }


def run_of(steps: int, change: Callable[[int, Line], Line] | None = None, seed: int = 0) -> list:
    noise = random.Random(seed)
    lines = [healthy(step, noise) for step in range(1, steps + 1)]
    return [line if change is None else {**line, **change(line["step"], line)} for line in lines]


def found(lines: list[Line], settings: HealthConfig = SETTINGS) -> list[Finding]:
    return findings_of(lines, settings)


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_learns_gives_no_warning(seed: int) -> None:
    """500 noisy steps, with evaluations of 100 prompts that rise and waver."""
    noise = random.Random(seed)

    def evaluated(step: int, line: Line) -> Line:
        if step % 25:
            return {}
        score = sum(noise.random() < 0.4 + 0.0004 * step for _ in range(12)) / 100
        return {"val/set/mean@1": score, "val/set/count": 100.0}

    assert found(run_of(500, evaluated, seed)) == []


@pytest.mark.parametrize("seed", range(12))
def test_held_out_scores_that_only_waver_give_no_warning(seed: int) -> None:
    """The true score stays while the reward rises; 20 evaluations of 64 prompts, 4 samples each."""
    noise = random.Random(seed)

    def evaluated(step: int, line: Line) -> Line:
        if step % 25:
            return {}
        score = sum(noise.random() < 0.5 for _ in range(64)) / 64  # samples of a prompt agree
        return {"val/set/mean@4": score, "val/set/count": 256.0}

    assert found(run_of(500, evaluated, seed)) == []


FAULTS: dict[str, Callable[[int, Line], Line]] = {
    "clipped_share": lambda s, line: {"advantage/clipped_share": 0.08 if s > 50 else 0.01},
    "kl": lambda s, line: {"kl/ref_k3": 0.7 if s > 50 else 0.01},
    "kl_rise": lambda s, line: {"kl/ref_k3": 0.003 * s},
    "grad_norm": lambda s, line: {"actor/grad_norm": 8.0 if s > 50 else 1.0},
    "length_factor": lambda s, line: {
        "response_length/mean": 200.0 * (1 + s / 50),
        "reward/mean": 0.4 + 0.01 * (s % 3),
    },
    "flat_share": lambda s, line: {"reward/zero_variance_share": 0.9 if s > 50 else 0.5},
    "repetition_rise": lambda s, line: {"rollout/repetition_share": 0.05 + 0.002 * s},
    "held_out_drop": lambda s, line: (
        {"val/set/mean@1": 0.9 - 0.003 * s, "val/set/count": 500.0} if s % 20 == 0 else {}
    ),
}


@pytest.mark.parametrize("key", FAULTS)
def test_each_fault_gives_its_warning_once_and_nothing_else(key: str) -> None:
    health, said = Health(SETTINGS), []
    for line in run_of(150, FAULTS[key]):
        said += health.see(line["step"], line)
    assert [finding.key for finding in said] == [key]
    (finding,) = said
    assert finding.last is None and finding.first > 10
    limit = getattr(SETTINGS, key)
    assert finding.line.endswith(f"(health.{key}={limit:g}): {ADVICE[key]}")
    assert "\n" not in finding.line
    # Null switches it off, and so does a limit that is not reached.
    assert found(run_of(150, FAULTS[key]), replace(SETTINGS, **{key: None})) == []


@pytest.mark.parametrize("key", ["kl", "grad_norm", "flat_share", "clipped_share"])
def test_a_level_counts_after_a_window_and_one_spike_does_not(key: str) -> None:
    name = {
        "kl": "kl/ref_k3",
        "grad_norm": "actor/grad_norm",
        "flat_share": "reward/zero_variance_share",
        "clipped_share": "advantage/clipped_share",
    }[key]
    limit = getattr(SETTINGS, key)
    high, low = 1.1 * limit, 0.5 * limit
    always = found([{"step": s, name: high} for s in range(1, 30)])
    assert [(f.key, f.first) for f in always] == [(key, SETTINGS.window)]
    spike = [{"step": s, name: 5 * limit if s == 15 else low} for s in range(1, 40)]
    assert found(spike) == []  # mean of ten: (5 + 9 * 0.5) / 10 < 1 limits
    at_limit = [{"step": s, name: limit} for s in range(1, 40)]
    assert found(at_limit) == []  # "above" is strict


def test_a_warning_comes_again_only_after_it_was_over_for_a_window() -> None:
    def norm(step: int) -> float:
        return 20.0 if 20 < step <= 30 or 33 < step <= 40 or step > 80 else 1.0

    health, said = Health(SETTINGS), {}
    for step in range(1, 101):
        for finding in health.see(step, {"actor/grad_norm": norm(step)}):
            said[step] = finding
    # The mean of ten passes 5 with the third high value (1 + 19 * 3 / 10 = 6.7) and falls to 5 or
    # below with the second left (1 + 19 * 2 / 10 = 4.8): steps 23 to 47, the gap in between kept.
    assert sorted(said) == [23, 83]
    assert [(f.first, f.last) for f in health.findings] == [(23, 47), (83, None)]


def test_flickering_around_the_limit_is_said_once() -> None:
    lines = [{"step": s, "actor/grad_norm": 5.0 + (0.2 if s % 7 < 4 else -0.2)} for s in
             range(1, 300)]  # fmt: skip
    assert [(f.key, f.last) for f in found(lines)] == [("grad_norm", None)]


@pytest.mark.parametrize("cut", [0, 12, 55, 120])
def test_a_resumed_run_says_what_the_run_would_have_said(cut: int) -> None:
    """The state comes back from the lines before the checkpoint; nothing is said twice."""
    lines = run_of(150, lambda s, line: {**FAULTS["kl"](s, line), **FAULTS["flat_share"](s, line)})
    whole = Health(SETTINGS)
    said = [(line["step"], f.key) for line in lines for f in whole.see(line["step"], line)]
    resumed = Health(SETTINGS)
    stored = [json.loads(json.dumps(line)) for line in lines[:cut]]
    for line in stored:
        resumed.see(line["step"], line)
    after = [(line["step"], f.key) for line in lines[cut:] for f in resumed.see(line["step"], line)]
    assert after == [(step, key) for step, key in said if step > cut]
    assert resumed.findings == whole.findings


def test_longer_responses_with_more_reward_are_no_fault() -> None:
    grows = lambda s, line: {"response_length/mean": 100.0 + 10 * s}  # noqa: E731
    gains = lambda s, line: {**grows(s, line), "reward/mean": 0.3 + 0.003 * s}  # noqa: E731
    assert found(run_of(150, gains)) == []
    assert [f.key for f in found(run_of(150, lambda s, li: {**grows(s, li), "reward/mean": 0.3}))]


def test_kl_that_levels_off_or_pauses_does_not_rise_for_long() -> None:
    level = lambda s, line: {"kl/ref_k3": min(0.2, 0.004 * s)}  # noqa: E731
    assert found(run_of(400, level)) == []
    slow = lambda s, line: {"kl/ref_k3": 0.0009 * s}  # noqa: E731
    assert found(run_of(400, slow)) == []


def test_a_falling_held_out_score_with_a_falling_reward_is_no_over_optimisation() -> None:
    both = lambda s, li: {**FAULTS["held_out_drop"](s, li), "reward/mean": 0.8 - 0.003 * s}  # noqa: E731
    assert found(run_of(150, both)) == []


def test_missing_and_infinite_numbers_are_skipped() -> None:
    lines = [
        {"step": s, "actor/grad_norm": [None, float("nan"), float("inf"), 9.0][s % 4]}
        for s in range(0, 60)
    ]
    (finding,) = found(lines)
    assert finding.first == 39  # the tenth finite value: 3, 7, ... 39


def test_every_threshold_has_a_check_and_an_advice() -> None:
    keys = {item.name for item in fields(HealthConfig)} - {"window", "span"}
    assert keys == set(ADVICE)
    assert keys == {key for key in FAULTS}


def test_a_span_below_the_window_is_refused(tmp_path: Path) -> None:
    needed = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]"]
    with pytest.raises(ValueError, match="health.span=5 is less than health.window=10"):
        load_config(None, [*needed, "health.span=5"])


def test_the_report_repeats_warnings_with_the_run_s_own_thresholds(tmp_path: Path) -> None:
    lines = run_of(90, lambda s, line: {"actor/grad_norm": 8.0 if 20 < s <= 40 else 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(tmp_path).read_text()
    # Six of ten at 8 and the rest at 1 make 5.2: from step 26 (21 to 26) to step 44 (35 to 40).
    (warning,) = [line for line in page.splitlines() if ADVICE["grad_norm"] in line]
    assert "steps 26 to 44" in warning and "health.grad_norm=5" in warning
    (tmp_path / "config.yaml").write_text("health:\n  grad_norm: 20.0\n  window: 10\n")
    assert ADVICE["grad_norm"] not in write_report(tmp_path).read_text()
    (tmp_path / "config.yaml").write_text("health: [1\n")
    assert ADVICE["grad_norm"] in write_report(tmp_path).read_text()
