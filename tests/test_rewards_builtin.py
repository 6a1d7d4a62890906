"""The built-in rewards: what a choice is, formats, lengths and repetition, by hand-made numbers."""

import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.config import RewardConfig, help_text
from megagrpo.metrics.records import render, rollout_metrics
from megagrpo.rewards.base import BUILT_IN, RewardSpec, check_columns, load_reward
from megagrpo.rewards.rules import multiple_choice, stated_choice
from megagrpo.rewards.runner import RewardRunner
from megagrpo.rewards.shaping import (
    length_penalty,
    regex_format,
    repeated_ngrams,
    repetition_penalty,
    repetition_share,
    soft_overlong,
)
from megagrpo.types import Completion, Prompt, Sample
from tests.reward_tools import cpu_spec, totals


def lengths(*counts: int) -> dict[str, Any]:
    return {
        "prompts": [""] * len(counts),
        "completions": ["?"] * len(counts),
        "completion_ids": [list(range(count)) for count in counts],
    }


@pytest.fixture
def runners() -> Iterator[list[RewardRunner]]:
    made: list[RewardRunner] = []
    yield made
    for runner in made:
        runner.close()


# --- multiple choice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("The answer is B.", "B"),
        (r"so \boxed{c}", "C"),
        (r"\boxed{\text{(D)}}", "D"),
        ("Answer: **C**", "C"),
        ("Answer:\n\n(C)", "C"),
        ("the correct option is (B)", "B"),
        ("it is (E)", "E"),
        ("final answer B", "B"),
        ("B", "B"),
        ("(B)", "B"),
        ("B) Paris", "B"),
        ("**B. Paris**", "B"),
        ("A cat is an animal.\nB", "B"),
        ("The answer is (A) because B is wrong.", "A"),
        ("first the answer is A. No, the final answer is: D", "D"),
        (r"The answer is A, or rather \boxed{B}", "B"),
        ("The answer is A.\nC)", "A"),
        ("A cat sat", None),
        ("I think so", None),
        ("B Paris", None),
        ("The answer is Berlin", None),
        ("the answer is a matter of taste", None),
        ("Answer: I'm not sure", None),
        ("The answer is Z", None),
        ("", None),
    ],
)
def test_the_last_choice_that_is_stated_counts(text: str, choice: str | None) -> None:
    assert stated_choice(text) == choice


@pytest.mark.parametrize("head", ["answer", "the answer is", r"\\boxed{", "is (", "answer:("])
def test_a_long_run_of_spaces_does_not_stall_the_reading_of_a_choice(head: str) -> None:
    """A model that has come to nothing but line ends; sharing them out in all ways took hours."""
    start = time.perf_counter()
    assert stated_choice(head + " \n" * 20_000 + "!") is None
    assert stated_choice(head + " \n" * 20_000 + "B)") == "B"
    assert time.perf_counter() - start < 2.0


def test_multiple_choice_scores_letters_and_refuses_answers_that_are_none() -> None:
    texts = ["Answer: B", "Answer: A", "no idea", "Answer: B"]
    assert multiple_choice([""] * 4, texts, answer=["(b)", "B.", "B", None]) == [
        1.0,
        0.0,
        0.0,
        None,
    ]
    verl = [{"ground_truth": "B"}]
    assert multiple_choice([""], texts[:1], reward_model=verl) == [1.0]
    for wrong in ("Paris", "2", "K"):
        with pytest.raises(ValueError, match=f"{wrong!r} is none of the choices ABCDEFGHIJ"):
            multiple_choice([""], ["Answer: B"], answer=[wrong])
    assert multiple_choice([""], ["Answer: 2"], answer=["2"], choices="123") == [1.0]
    with pytest.raises(ValueError, match="needs column 'answer'"):
        check_columns([RewardSpec("multiple_choice", multiple_choice)], ["level"])


# --- format --------------------------------------------------------------------------------------


def test_a_format_is_matched_by_the_whole_completion() -> None:
    pattern = r"<think>.*</think>\s*<answer>\d+</answer>"
    texts = ["<think>a\nb</think>\n<answer>4</answer>", "<answer>4</answer>"]
    texts += ["<think></think><answer>4</answer> so", "<think></think><answer>x</answer>"]
    assert regex_format([""] * 4, texts, pattern=pattern) == [1.0, 0.0, 0.0, 0.0]


def test_a_runaway_pattern_stalls_neither_the_trainer_nor_the_other_completions(
    runners: list[RewardRunner],
) -> None:
    """PROC-8: (a+)+b on 40 a's takes days inside C; its sample is failed, the trainer's threads
    run on, the group's others are scored."""
    kwargs = {"pattern": "(a+)+b"}
    spec = cpu_spec(RewardConfig(path="regex_format", timeout_s=1.0, workers=1, kwargs=kwargs))
    runners.append(RewardRunner([spec]))
    runners[0].submit(0, ["p"] * 3, ["aab", "a" * 40, "b"], {})
    start, beats = time.perf_counter(), 0
    while time.perf_counter() - start < 0.5:
        time.sleep(0.01)
        beats += 1
    assert beats > 10
    assert totals(runners[0].collect()[0]) == [1.0, None, 0.0]
    counts = runners[0].take_counts()
    assert (counts.errors, counts.timeouts) == (0, 1)


# --- lengths -------------------------------------------------------------------------------------


def test_length_penalty_is_the_square_of_the_distance_to_the_target() -> None:
    assert length_penalty(**lengths(100, 110, 90, 0), target=100, lam=0.001) == pytest.approx(
        [0.0, -0.1, -0.1, -10.0]
    )


def test_soft_overlong_is_dapo_equation_13() -> None:
    """L_max 16384 + 4096 with L_cache 4096, the paper's own numbers, and the corners."""
    found = soft_overlong(
        **lengths(0, 16384, 16385, 18432, 20480, 20481), max_length=20480, buffer=4096
    )
    assert found == pytest.approx([0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0])
    assert soft_overlong(**lengths(0, 1, 2, 3), max_length=2, buffer=2) == [0.0, -0.5, -1.0, -1.0]


# --- repetition ----------------------------------------------------------------------------------


def test_repetition_counts_n_grams_that_came_before() -> None:
    assert repeated_ngrams([1, 2, 1, 2, 1, 2], 2) == (3, 5)
    assert repetition_share([1, 2, 1, 2, 1, 2], 2) == 0.6
    assert repetition_share([5] * 10, 1) == 0.9
    assert repetition_share([1, 2, 3], 4) == 0.0 and repeated_ngrams([1, 2, 3], 4) == (0, 0)
    ids = [[1, 2, 1, 2, 1, 2], [1, 2, 3], []]
    found = repetition_penalty([""] * 3, [""] * 3, completion_ids=ids, n=2, penalty=0.5)
    assert found == [-0.3, 0.0, 0.0]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repetition_equals_a_count_by_search(ids: list[int], n: int) -> None:
    """Against the definition, looked up in the list of all earlier n-grams."""
    grams = [ids[start : start + n] for start in range(len(ids) - n + 1)]
    repeated = sum(gram in grams[:place] for place, gram in enumerate(grams))
    assert repeated_ngrams(ids, n) == (repeated, len(grams))
    assert 0.0 <= repetition_share(ids, n) < 1.0


def test_the_repetition_metric_divides_by_the_n_grams_of_all_sampled_tokens() -> None:
    """Not the mean of shares: a long completion counts by its 4-grams; a failed one not at all."""
    random.seed(1)
    rows = [[7] * 13, list(range(8)), [1, 2], [9] * 50]
    samples = [
        Sample(
            prompt=Prompt(0, (1,), "p", {}),
            group=0,
            member=member,
            completion=Completion(tuple(ids), (0.0,) * len(ids), True),
            text="",
            rewards={"r": 1.0},
            reward=1.0,
            failed=member == 3,
        )
        for member, ids in enumerate(rows)
    ]
    found = render(rollout_metrics(samples))["rollout/repetition_share"]
    assert found == pytest.approx(9 / (10 + 5))
    assert "rollout/repetition_share" not in render(rollout_metrics(samples[2:3]))


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("regex_format", {}, "kwargs.pattern is None; give a regular expression"),
        ("regex_format", {"pattern": "("}, "does not compile"),
        ("multiple_choice", {"choices": ["A", "B"]}, "kwargs.choices is ..A., .B..; give capital"),
        ("multiple_choice", {"choices": ""}, "kwargs.choices is ''"),
        ("multiple_choice", {"choices": "abcd"}, "kwargs.choices is 'abcd'"),
        ("repetition_penalty", {"n": 2.5}, "kwargs.n is 2.5; give a whole number"),
        ("length_penalty", {"lam": 1.0}, "kwargs.target is None; give a number at least 0"),
        ("length_penalty", {"target": 5, "lam": 0.0}, "kwargs.lam is 0.0; give a number over 0"),
        ("length_penalty", {"target": 5, "lam": math.nan}, "kwargs.lam is nan"),
        ("length_penalty", {"target": 5, "lam": "1"}, "kwargs.lam is '1'"),
        ("soft_overlong", {"max_length": 5}, "kwargs.buffer is None"),
        ("soft_overlong", {"max_length": 5, "buffer": 6}, "kwargs.buffer=6 is over"),
        ("repetition_penalty", {"n": 0}, "kwargs.n is 0; give a number at least 1"),
        ("repetition_penalty", {"penalty": -1.0}, "kwargs.penalty is -1.0"),
        ("repetition_penalty", {"size": 3}, "has no parameter 'size'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_run(
    path: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_columns([cpu_spec(RewardConfig(path=path, kwargs=kwargs))], ["answer"])


def test_every_built_in_name_loads_and_stands_in_the_help() -> None:
    for name in BUILT_IN:
        function: Any = load_reward(name)
        assert function.__name__ == name and name in help_text(short=False)
