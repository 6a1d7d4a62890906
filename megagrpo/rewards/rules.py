"""Rewards that a rule decides: exact text, and mathematically equal answers.

Both read the true answer from column `answer`, or from verl's `reward_model.ground_truth`. Left
out: partial credit and format rewards, which are a few lines in a file of one's own.
"""

import importlib
import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


def exact_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    finished: Sequence[bool],
    answer: Sequence[Any] | None = None,
    reward_model: Sequence[Mapping[str, Any]] | None = None,
) -> list[float | None]:
    """1.0 where the completion ended by itself and is the answer, character by character, else 0.0.

    None where the row has no answer. `check_columns` makes sure that there is an answer column.
    """
    answers = _answers(answer, reward_model)
    return [
        None if truth is None else float(ended and text == truth)
        for text, ended, truth in zip(completions, finished, answers, strict=True)
    ]


def math_answer(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[Any] | None = None,
    reward_model: Sequence[Mapping[str, Any]] | None = None,
) -> list[float | None]:
    """1.0 where the completion's answer equals the true one mathematically, else 0.0.

    Both are read by the math-verify library: LaTeX (boxed first) or plain expressions. An answer in
    GSM8K's form counts from its last `####`. None where the row has no answer or the true answer
    cannot be read. Raises ValueError without the library.
    """
    math_verify = _math_verify()
    rewards: list[float | None] = []
    for text, truth in zip(completions, _answers(answer, reward_model), strict=True):
        gold = [] if truth is None else _parse(math_verify, truth.rpartition("####")[2].strip())
        if not gold:
            rewards.append(None)
            continue
        # Its own time limits need the main thread; the runner's timeout stands in for them.
        guess = math_verify.parse(text, parsing_timeout=None)
        rewards.append(float(math_verify.verify(gold, guess, timeout_seconds=None)))
    return rewards


def _parse(math_verify: ModuleType, truth: str) -> list[Any]:
    """The true answer; bare LaTeX such as \\frac{1}{2} is only recognised between dollars."""
    if "$" not in truth and "\\boxed" not in truth:
        truth = f"${truth}$"
    return math_verify.parse(truth, parsing_timeout=None)


def _math_verify() -> ModuleType:
    try:
        module = importlib.import_module("math_verify")
    except ImportError as error:
        raise ValueError(
            f"reward math_answer needs the math-verify package ({error}); pip install math-verify"
        ) from error
    for part in ("parser", "grader"):  # both warn once that we switched their time limits off
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    return module


def _answers(
    answer: Sequence[Any] | None, reward_model: Sequence[Mapping[str, Any]] | None
) -> list[str | None]:
    """The true answers as text."""
    if answer is None:
        assert reward_model is not None, "neither column 'answer' nor 'reward_model' was passed"
        answer = [row.get("ground_truth") for row in reward_model]
    return [None if truth is None else str(truth) for truth in answer]
