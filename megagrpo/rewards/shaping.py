"""Rewards that look at form and length alone: format, length, overlong and repetition.

Lengths are tokens as sampled, the end-of-sequence token included. Each has a `check_...` that
refuses wrong arguments before the run starts.
"""

import math
import re
from collections.abc import Hashable, Sequence

NGRAM = 4  # tokens; of the metric rollout/repetition_share and the penalty's default


def regex_format(
    prompts: Sequence[str], completions: Sequence[str], pattern: str
) -> list[float | None]:
    """1.0 where the whole completion matches the pattern, else 0.0; `.` matches line ends too.

    Python's `re.fullmatch`. A pattern may take forever on some text, so this runs in a worker
    process, where `timeout_s` ends it.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text) is not None) for text in completions]


def check_pattern(pattern: str | None = None) -> None:
    """ValueError without a pattern or with one that does not compile."""
    if not isinstance(pattern, str):
        raise ValueError(f"kwargs.pattern is {pattern!r}; give a regular expression as text")
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"kwargs.pattern {pattern!r} does not compile: {error}") from error


def length_penalty(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    target: int,
    lam: float,
) -> list[float | None]:
    """-lam (tokens - target)^2: 0 at `target` tokens, ever less away from it.

    Example: lam 0.001, target 100, 110 tokens: -0.1.
    """
    return [-lam * float(len(ids) - target) ** 2 for ids in completion_ids]


def check_length_penalty(target: int | None = None, lam: float | None = None) -> None:
    """ValueError unless target >= 0 tokens and lam > 0."""
    _check_number("target", target, at_least=0)
    _check_number("lam", lam, above=0)


def soft_overlong(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    max_length: int,
    buffer: int,
) -> list[float | None]:
    """0 up to max_length - buffer tokens, then falling by 1 / buffer a token, -1 over max_length.

    R = 0 if n <= max_length - buffer, else ((max_length - buffer) - n) / buffer, at least -1. DAPO
    arXiv 2503.14476 eq. 13 (L_max, L_cache).
    """
    free = max_length - buffer
    return [max(-1.0, min(0.0, (free - len(ids)) / buffer)) for ids in completion_ids]


def check_soft_overlong(max_length: int | None = None, buffer: int | None = None) -> None:
    """ValueError unless 0 < buffer <= max_length, in tokens."""
    _check_number("max_length", max_length, above=0)
    _check_number("buffer", buffer, above=0)
    assert max_length is not None and buffer is not None, "_check_number refuses None"
    if buffer > max_length:
        raise ValueError(f"kwargs.buffer={buffer} is over kwargs.max_length={max_length}; lower it")


def repetition_penalty(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    n: int = NGRAM,
    penalty: float = 1.0,
) -> list[float | None]:
    """-penalty x the share of the completion's n-grams of tokens that repeat an earlier one."""
    return [-penalty * repetition_share(ids, n) for ids in completion_ids]


def check_repetition_penalty(n: int = NGRAM, penalty: float = 1.0) -> None:
    """ValueError unless n >= 1 and penalty > 0."""
    _check_number("n", n, at_least=1)
    if not isinstance(n, int):
        raise ValueError(f"kwargs.n is {n!r}; give a whole number")
    _check_number("penalty", penalty, above=0)


def repetition_share(ids: Sequence[Hashable], n: int) -> float:
    """The share of n-grams that repeat an earlier one; 0 below n + 1 tokens.

    Example: 1 2 1 2 1 2 has the 2-grams 12 21 12 21 12: 2 are new, 3 of 5 repeat.
    """
    repeated, total = repeated_ngrams(ids, n)
    return repeated / total if total else 0.0


def repeated_ngrams(ids: Sequence[Hashable], n: int) -> tuple[int, int]:
    """How many n-grams repeat an earlier one, and how many there are."""
    total = max(len(ids) - n + 1, 0)
    return total - len({tuple(ids[start : start + n]) for start in range(total)}), total


def _check_number(
    name: str, value: float | None, *, at_least: float | None = None, above: float | None = None
) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    low = number >= at_least if at_least is not None else above is None or number > above
    if not low or not math.isfinite(number):
        limit = f"at least {at_least}" if above is None else f"over {above}"
        raise ValueError(f"kwargs.{name} is {value!r}; give a number {limit}")
