"""Every documented metric is emitted by some run, and every emitted one is documented.

Whole runs with `TorchEngine` in vLLM's place, each with other parts of the program switched on.
"""

import re
from typing import Any

import pytest

from megagrpo.metrics.records import METRICS
from megagrpo.metrics.report_tables import meaning
from megagrpo.trainer import report
from megagrpo.trainer.grpo import train
from tests.pool import run_ranks
from tests.torch_engine import build, make_place, words

RUNS = {
    "evaluation, reference, KL in the loss, exports": [
        "reference.use=always",
        "algorithm.kl.beta=0.01",
        "eval.every=1",
        "eval.samples=2",
        "eval.temperature=1.0",
        "eval.compare_every=1",
        "eval.compare_prompts=2",
        "trainer.save_every=1",
        "trainer.export_hf_every=1",
    ],
    "a reference that is only measured": ["reference.use=always", "trainer.steps=1"],
    "KL in the reward, cut samples masked": [
        "algorithm.kl.beta=0.01",
        "algorithm.kl.place=reward",
        "algorithm.truncated=mask",
        "algorithm.advantage_clip=1.0",
    ],
    "flat groups dropped, spare prompts": [
        "algorithm.filter_flat_groups=true",
        "rollout.oversample_prompts=2",
        "algorithm.num_iterations=2",
    ],
    "sequence mask, high-entropy tokens, imitation": [
        "algorithm.correction.mode=sequence_mask",
        "algorithm.correction.off_policy_threshold=0.5",
        "algorithm.top_entropy_quantile=0.5",
        "algorithm.cold_start.weight=0.1",
        "algorithm.cold_start.steps=4",
        "algorithm.cold_start.column=answer",
    ],
}


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of every run's lines."""
    place = make_place(tmp_path_factory.mktemp("names"))
    found: dict[str, set[str]] = {}
    for number, (title, more) in enumerate(RUNS.items()):
        held_out = [f"data.eval={place}/heldout.jsonl"] if "eval.every=1" in more else []
        overrides = words(place, place / f"run{number}", *held_out, *more)

        def act(rank: int, overrides: list[str] = overrides) -> list[dict[str, Any]]:
            report.device_peak = lambda dtype: 1e12  # type: ignore[assignment]  # no CPU's is known
            run = build(rank, 1, overrides)
            train(run)
            return run.reporter.lines

        (lines,) = run_ranks(1, act)
        found[title] = {name for line in lines for name in line} - {"step", "optimizer_step"}
    return found


def matches(pattern: str, name: str) -> bool:
    free = {"NAME": ".+", "PHASE": ".+", "@k": r"@\d+"}
    parts = re.split(r"(NAME|PHASE|@k$)", pattern)
    return bool(re.fullmatch("".join(free.get(part, re.escape(part)) for part in parts), name))


def test_every_documented_metric_is_emitted(emitted: dict[str, set[str]]) -> None:
    names = set().union(*emitted.values())
    never = [pattern for pattern in METRICS if not any(matches(pattern, name) for name in names)]
    assert never == []


def test_every_emitted_metric_is_documented(emitted: dict[str, set[str]]) -> None:
    for title, names in emitted.items():
        assert names and not [name for name in sorted(names) if not meaning(name)], title


def test_a_metric_is_not_tied_to_its_coefficient(emitted: dict[str, set[str]]) -> None:
    """EVAL-6: entropy with entropy_coef 0, KL to the reference with beta 0."""
    for title, more in RUNS.items():
        assert (
            not any("entropy_coef" in word for word in more) and "actor/entropy" in emitted[title]
        )
    no_kl = emitted["a reference that is only measured"]
    assert {"kl/ref_k3", "kl/ref_k1"} <= no_kl
