"""Rewards that a rule decides: exact text, mathematically equal answers, the letter of a choice.

All read the true answer from column `answer`, or from verl's `reward_model.ground_truth`. Left out:
partial credit, which is a few lines in a file of one's own.
"""

import importlib
import logging
import re
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


def multiple_choice(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[Any] | None = None,
    reward_model: Sequence[Mapping[str, Any]] | None = None,
    choices: str = "ABCDEFGHIJ",
) -> list[float | None]:
    """1.0 where the last choice that the completion states is the true letter, else 0.0.

    `stated_choice` says how a completion is read. The true answer is one of `choices`, also as "b",
    "(B)" or "B."; None where the row has none. Raises ValueError on any other.
    """
    rewards: list[float | None] = []
    for text, truth in zip(completions, _answers(answer, reward_model), strict=True):
        if truth is None:
            rewards.append(None)
            continue
        letter = truth.strip().strip("().:").strip().upper()
        if len(letter) != 1 or letter not in choices:
            raise ValueError(f"true answer {truth!r} is none of the choices {choices}")
        rewards.append(float(stated_choice(text, choices) == letter))
    return rewards


def check_choices(choices: str = "ABCDEFGHIJ") -> None:
    """ValueError unless the choices are capital letters or digits in one text."""
    sound = isinstance(choices, str) and choices.isascii() and choices.isalnum()
    if not sound or choices != choices.upper():
        raise ValueError(f"kwargs.choices is {choices!r}; give capital letters as text, e.g. ABCD")


def stated_choice(text: str, choices: str = "ABCDEFGHIJ") -> str | None:
    """The letter that a completion settles on, or None.

    Read are, the last one counting: `\\boxed{B}`, also as `\\text{B}`, `(B)` or in lower case; a
    capital after "answer", "choice" or "option" with "is", ":" or nothing between, also in brackets
    or asterisks; and "is (B)". Only without any of these: a last line that is the letter alone or
    begins with it and one of `) . :`. A capital that merely begins a word, or an "A" or "I" in a
    sentence, is no choice.
    """
    letters = re.escape(choices)
    both = letters + re.escape(choices.lower())
    wrapped = r"[\s(\[*_`\"']*"
    stated = re.compile(
        rf"\\boxed\s*\{{\s*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{{)?\s*\(?\s*([{both}])\b"
        rf"|\b(?i:answer|choice|option)\b\s*(?:(?i:is)\b)?\s*:?{wrapped}([{letters}])(?![\w'])"
        rf"|\b(?i:is)\b{wrapped}\(\s*([{letters}])\s*\)"
    )
    # One space for many: the pattern may try every way to share out a long run of them.
    flat = re.sub(r"\s+", " ", text)
    found = [next(filter(None, match.groups())) for match in stated.finditer(flat)]
    if found:
        return found[-1].upper()
    lines = [line.strip(" \t*_`\"'") for line in text.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    alone = re.fullmatch(rf"[(\[]?([{letters}])[)\].:]?", last)
    begins = re.match(rf"[(\[]?([{letters}])[)\].:](?:\s|\*)", last)
    match = alone or begins
    return match.group(1) if match else None


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
