"""Held-out scores against enumeration and expectation, and evaluation inside whole runs.

Runs are the product's own with `TorchEngine` in vLLM's place.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.config_file import load_config
from megagrpo.metrics.held_out import (
    Scoring,
    answer_reader,
    attempts,
    held_out_metrics,
    majority_reward,
    pass_at,
)
from megagrpo.metrics.report_tables import meaning
from megagrpo.trainer.grpo import train
from megagrpo.trainer.preflight import prepare, prepare_evaluation
from megagrpo.trainer.run import Run
from megagrpo.types import Completion, Prompt, Request, Sample, Sampling
from tests.pool import run_ranks
from tests.torch_engine import build, make_place, numbers, weights, words


def sample(
    group: int, member: int, reward: float | None, text: str = "", failed: bool = False
) -> Sample:
    completion = Completion((1,), (-0.5,), True)
    prompt = Prompt(group, (2,), "?", {})
    return Sample(prompt, group, member, completion, text, {}, reward, failed)


# pass@k, maj@k, mean@k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(n: int) -> None:
    for solved in range(n + 1):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([place < solved for place in range(n)], k))
            want = sum(map(any, draws)) / len(draws)
            assert pass_at(n, solved, k) == pytest.approx(want, rel=1e-15)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.0, 1.0))
def test_pass_at_k_is_unbiased(n: int, k: int, chance: float) -> None:
    """Its mean over binomial counts of solved ones is 1 - (1 - p)^k."""
    k = min(n, k)
    weigh = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    mean = math.fsum(w * pass_at(n, c, k) for c, w in enumerate(weigh))
    assert mean == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(5000, 1, 2500), (4000, 3, 1), (1024, 1000, 512)])
def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels(n: int, c: int, k: int) -> None:
    fail = Fraction(1)
    for i in range(c):  # none of the c solved ones is among the k drawn
        fail *= Fraction(n - k - i, n - i)
    assert pass_at(n, c, k) == pytest.approx(float(1 - fail), rel=1e-15)


def test_k_runs_over_powers_of_two_and_the_number_of_samples() -> None:
    assert [list(attempts(k)) for k in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("answers", "rewards", "want"),
    [
        (["4", "5", "4"], [1.0, 0.0, 1.0], 1.0),
        (["4", "5", "5"], [1.0, 0.0, 0.0], 0.0),
        (["5", "4", "4", "5"], [0.25, 1.0, 1.0, 0.5], 0.25),  # a tie: the first answer's first
        ([None, None, None, "4"], [0.0, 0.0, 0.0, 1.0], 1.0),  # who has no answer does not vote
        ([None, None], [0.3, 0.7], 0.3),
        (["", "", "4"], [0.1, 0.1, 1.0], 0.1),  # an empty text is an answer
    ],
)
def test_the_most_frequent_answer_counts_and_the_first_of_equals(
    answers: list[str | None], rewards: list[float], want: float
) -> None:
    assert majority_reward(answers, rewards) == want


@pytest.mark.parametrize(
    ("pattern", "text", "want"),
    [
        (None, "  12 \n", "12"),
        (r"<answer>(.*?)</answer>", "<answer>1</answer> no: <answer>\n 2 </answer>", "2"),
        (r"####\s*(\S+)", "so 3 * 4\n#### 12", "12"),
        (r"####\s*(\S+)", "twelve", None),
        (r"(-?\d+)(?:\D*)$", "from 3 to -7.", "-7"),
        (r"x(y)?", "x", None),
    ],
)
def test_an_answer_is_the_last_match_of_the_pattern(
    pattern: str | None, text: str, want: str | None
) -> None:
    assert answer_reader(pattern)(text) == want


def test_scores_are_means_over_prompts_of_what_was_rated() -> None:
    """EVAL-1, EVAL-2, EVAL-7: three prompts of four, whatever the order they come in; one sample of
    prompt 0 failed, prompt 2 has one rated sample, prompt 3 none."""
    rows: list[tuple[int, list[float | None]]] = [
        (0, [1.0, None, 0.0, 0.5]),
        (1, [0.0, 0.0, 1.5, 0.0]),
        (2, [None, 1.0, None, None]),
        (3, [None, None, None, None]),
    ]
    texts = ["a", "b", "a", "b"]
    samples = [
        sample(group, member, reward, texts[member], failed=reward is None and member == 1)
        for group, rewards in rows
        for member, reward in enumerate(rewards)
    ]
    found = held_out_metrics(samples[::-1], "set", 4, Scoring())
    thirds = {0: pass_at(3, 1, 2), 1: pass_at(4, 1, 2)}  # prompt 2 has less than 2
    assert found == {
        "val/set/count": 8.0,
        "val/set/failed": 8.0,
        "val/set/mean@4": pytest.approx((0.5 + 0.375 + 1.0) / 3),
        "val/set/pass@1": pytest.approx((1 / 3 + 1 / 4 + 1) / 3),
        "val/set/pass@2": pytest.approx((thirds[0] + thirds[1]) / 2),
        "val/set/pass@4": 1.0,  # prompt 1 alone has 4 rated samples
        # prompt 0: a twice (1.0 first); prompt 1: a tie of a and b, a's first is 0; prompt 2: 1
        "val/set/maj@4": pytest.approx((1.0 + 0.0 + 1.0) / 3),
    }
    strict = held_out_metrics(samples, "set", 4, Scoring(solved_at=1.2))
    assert strict["val/set/pass@1"] == pytest.approx((0 + 1 / 4 + 0) / 3)
    assert all(meaning(name) for name in found)


def test_fewer_samples_than_a_batch_are_scored() -> None:
    """EVAL-1: rewards 1, 1, 0."""
    found = held_out_metrics([sample(g, 0, r) for g, r in enumerate((1.0, 1.0, 0.0))], "set", 1,
                             Scoring())  # fmt: skip
    assert found["val/set/mean@1"] == found["val/set/pass@1"] == pytest.approx(0.666667, abs=1e-6)
    assert found["val/set/count"] == 3 and "val/set/maj@1" not in found


@pytest.mark.parametrize("samples", [[], [sample(0, 0, None), sample(1, 0, 1.0, failed=True)]])
def test_a_set_without_a_rated_sample_leaves_its_scores_out(samples: list[Sample]) -> None:
    """EVAL-4."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = held_out_metrics(samples, "set", 2, Scoring())
    assert found == {"val/set/count": 0.0, "val/set/failed": float(len(samples))}


# Whole runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("evaluate"))


def play(world: int, overrides: list[str], act: Callable[[Run], Any], **engine: Any) -> list[Any]:
    return run_ranks(world, lambda rank: act(build(rank, world, overrides, **engine)))


def trained(run: Run) -> dict[str, Any]:
    train(run)
    return {
        "lines": run.reporter.lines,
        "asked": run.collector.engine.asked,
        "events": run.collector.engine.events,
        "weights": weights(run),
    }


EVALUATION = [
    "eval.every=1",
    "eval.samples=3",
    "eval.temperature=1.3",
    "eval.top_p=0.9",
    "eval.top_k=7",
    "eval.min_p=0.01",
    "eval.seed=77",
    "eval.solved_at=0.5",
]


def test_evaluation_has_its_own_sampling_and_comparison_too_and_training_is_as_without(
    place: Path, tmp_path: Path
) -> None:
    """EVAL-9: filters, temperature, number and seeds of evaluation reach no training request, and
    weights after training are bit-equal to those of a run that never evaluated. EVAL-7: 3 prompts
    on 2 replicas are all scored."""
    held_out = f"data.eval={place}/heldout.jsonl"
    compared = ["eval.compare_every=1", "eval.compare_prompts=2"]
    watched = words(place, tmp_path / "with", held_out, *EVALUATION, *compared)
    with_eval = play(2, watched, trained)
    without = play(2, words(place, tmp_path / "without"), trained)
    own = Sampling(1.3, 5, (1,), top_p=0.9, top_k=7, min_p=0.01)
    plain = Sampling(0.6, 5, (1,))
    asked: dict[Sampling, list[Request]] = {own: [], plain: []}
    for result, want in zip(with_eval, without, strict=True):
        for name, value in want["weights"].items():
            assert torch.equal(result["weights"][name], value), name
        got = [
            {name: value for name, value in numbers(line).items() if not name.startswith("val/")}
            for line in result["lines"][1:]
        ]
        assert got == [numbers(line) for line in want["lines"]]
        assert {sampling for _, sampling, _ in want["asked"]} == {plain}
        for version, sampling, requests in result["asked"]:
            asked[sampling] += requests
            # -2: the reference's weights, read from the files for the comparison
            assert version in ((-2, 0, 1, 2) if sampling == own else (0, 1))
        assert result["events"][-1] == "sleep"
    # held out: 3 evaluations of 3 x 3; compared: 2 x 2, and the reference once for all 3 shown
    assert len(asked[plain]) == 2 * 16 and len(asked[own]) == 3 * 9 + 2 * 2 + 3
    seeds = [request.seed for requests in asked.values() for request in requests]
    assert len(set(seeds)) == len(seeds)
    for line in with_eval[0]["lines"]:
        assert line["val/heldout/count"] == 9 and line["val/heldout/failed"] == 0
        assert {n for n in line if n.startswith("val/") and "@" in n} == {
            f"val/heldout/{name}" for name in ("mean@3", "pass@1", "pass@2", "pass@3", "maj@3")
        }


def test_every_completion_counts_whichever_ends_first(place: Path, tmp_path: Path) -> None:
    """EVAL-10 on the side of evaluation: members differ in length and reward, those asked for last
    end first; all are scored, on one replica and on two."""

    def script(request: Request, sampling: Sampling) -> list[int]:
        length = 1 + request.seed % 4
        return [10] * length + ([70] if length == 4 else [1])

    overrides = [f"data.eval={place}/heldout.jsonl", "eval.samples=4", "eval.temperature=1.0"]
    overrides += ["trainer.steps=1"]

    def act(run: Run) -> tuple[dict[str, float], list[float]]:
        found = run.evaluator.evaluate(0)
        rewards = [
            sum(i < 50 for i in ids) / len(ids)
            for _, _, asked in run.collector.engine.asked
            for request in asked
            for ids in [script(request, Sampling(1.0, 5, (1,)))]
        ]
        return found, rewards

    results = {}
    for world in (1, 2):
        answers = play(world, words(place, tmp_path / str(world), *overrides), act, script=script)
        rewards = [reward for _, part in answers for reward in part]
        assert len(rewards) == 12 and len(set(rewards)) > 1
        results[world] = answers[0][0]
        assert answers[0][0]["val/heldout/mean@4"] == pytest.approx(sum(rewards) / 12)
        assert answers[0][0]["val/heldout/count"] == 12
    assert results[1] == results[2]


def test_filters_of_a_checkpoint_s_evaluation_are_those_of_the_config(
    place: Path, tmp_path: Path
) -> None:
    """EVAL-9: `megagrpo evaluate` reads the same section."""
    from megagrpo.trainer.evaluate import evaluation_settings

    overrides = words(place, tmp_path / "run", f"data.eval={place}/heldout.jsonl", *EVALUATION)
    found = evaluation_settings(prepare_evaluation(load_config(None, overrides), 0, 1))
    assert found.sampling == Sampling(1.3, 5, (1,), top_p=0.9, top_k=7, min_p=0.01)
    assert (found.name, found.samples, found.seed) == ("heldout", 3, 77)
    assert found.scoring == Scoring(0.5, None)


REFUSED = {
    "eval.compare_every=2": "data.eval is not set",
    "eval.compare_prompts=3": "no effect with compare_every=0",
    "eval.top_p=0.9": "no effect on greedy",
    "eval.top_k=5": "no effect on greedy",
    "eval.min_p=0.1": "no effect on greedy",
    "eval.top_p=0": r"outside \(0, 1\]",
    "eval.min_p=1.5": r"outside \[0, 1\]",
    "eval.answer_pattern='(a)'": "nobody votes",
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_setting_of_evaluation_without_effect_is_refused(
    word: str, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=REFUSED[word]):
        load_config(None, words(place, tmp_path / "run", word))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("a", "0 groups"), ("(a)(b)", "2 groups"), ("(a", "no regular expression")],
)
def test_a_pattern_without_one_group_is_refused(
    pattern: str, said: str, place: Path, tmp_path: Path
) -> None:
    sampled = ["eval.samples=2", "eval.temperature=1.0", f"eval.answer_pattern='{pattern}'"]
    with pytest.raises(ValueError, match=said):
        load_config(None, words(place, tmp_path / "run", *sampled))


def test_what_the_held_out_set_or_the_vocabulary_cannot_give_is_refused(
    place: Path, tmp_path: Path
) -> None:
    held_out = f"data.eval={place}/heldout.jsonl"
    for word, said in (
        ("eval.compare_prompts=4", "more than the 3 held-out prompts"),
        ("eval.max_prompts=2", "eval.compare_prompts=3 is more than the 2 held-out"),
        ("eval.top_k=1000", "eval.top_k=1000 is over the 98 ids"),
    ):
        more = [held_out, "eval.compare_every=1", "eval.compare_prompts=3", "eval.temperature=1.0"]
        config = load_config(None, words(place, tmp_path / "run", *more, word))
        with pytest.raises(ValueError, match=said):
            prepare(config, 0, 1)
