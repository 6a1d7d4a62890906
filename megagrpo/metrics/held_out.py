"""Held-out scores: mean@k, pass@k and maj@k of k completions per prompt.

Every number is a mean over prompts, so that a prompt whose samples failed in part weighs as much as
any other. A sample without a reward leaves all of them; what has no data is left out, never 0.
Completions are taken in the order of submission, whatever order they ended in.

The answer that votes in maj@k is the text that the rewards read, or what `answer_pattern` finds in
it; texts that differ vote apart, however equal their mathematics. Left out: confidence intervals.

Letters: n rated completions of a prompt, c solved ones among them, k.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from megagrpo.types import Sample


@dataclass(frozen=True)
class Scoring:
    """How held-out completions are judged."""

    solved_at: float = 1.0  # rewards from here on count as solved
    answer_pattern: str | None = None  # its last match's group 1 votes; None: the whole text


def held_out_metrics(
    samples: Sequence[Sample], name: str, k: int, scoring: Scoring
) -> dict[str, float]:
    """All `val/NAME/...` of one evaluation with k completions per prompt.

    `mean@k`: mean of each prompt's mean reward. `pass@j` for j = 1, 2, 4, ... and k: mean of
    `pass_at` over the prompts with at least j rated completions. `maj@k`: mean of
    `majority_reward`. Denominators are prompts; `count` and `failed` count samples.
    """
    by_prompt: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.group, sample.member)):
        if not sample.failed and sample.reward is not None:
            by_prompt.setdefault(sample.group, []).append(sample)
    groups = list(by_prompt.values())
    rewards = [[_reward(sample) for sample in group] for group in groups]
    rated = sum(map(len, groups))
    prefix = f"val/{name}"
    found = {f"{prefix}/count": float(rated), f"{prefix}/failed": float(len(samples) - rated)}
    if not groups:
        return found
    found[f"{prefix}/mean@{k}"] = _mean([_mean(values) for values in rewards])
    solved = [(len(v), sum(reward >= scoring.solved_at for reward in v)) for v in rewards]
    for j in attempts(k):
        enough = [pass_at(n, c, j) for n, c in solved if n >= j]
        if enough:
            found[f"{prefix}/pass@{j}"] = _mean(enough)
    if k > 1:
        answer = answer_reader(scoring.answer_pattern)
        won = [majority_reward([answer(s.text) for s in group], values)
               for group, values in zip(groups, rewards, strict=True)]  # fmt: skip
        found[f"{prefix}/maj@{k}"] = _mean(won)
    return found


def headline_scores(names: Collection[str]) -> list[str]:
    """Those of `names` that a reader wants first: every mean@k, and maj@k and pass@k of the same k
    where there are several completions. Example: mean@4, maj@4, pass@4; not pass@1, pass@2."""
    shown = []
    for name in names:
        found = re.fullmatch(r"(val/.+/)mean@(\d+)", name)
        if found:
            several = found[2] != "1"
            others = [f"{found[1]}{kind}@{found[2]}" for kind in ("maj", "pass")] if several else []
            shown += [name, *others]
    return [name for name in shown if name in names]


def attempts(k: int) -> Iterator[int]:
    """1, 2, 4, ... below k, then k itself."""
    j = 1
    while j < k:
        yield j
        j *= 2
    yield k


def pass_at(n: int, c: int, k: int) -> float:
    """Chance that at least one of k completions drawn without replacement from n is solved.

    1 - C(n - c, k) / C(n, k), unbiased for the chance that one of k new ones is; k <= n. Exact
    integers and one division, so nothing cancels or overflows (arXiv 2107.03374, eq. 1).
    """
    assert 0 <= c <= n and 1 <= k <= n, f"n={n}, c={c}, k={k}"
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


def majority_reward(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Reward of the first completion that gave the most frequent answer.

    Of answers that are equally frequent the one that came first wins. An answer of None does not
    vote; where nobody votes the first completion counts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return rewards[0]
    winner = votes.most_common(1)[0][0]  # equal counts keep the order of first occurrence
    return rewards[answers.index(winner)]


def answer_reader(pattern: str | None) -> Callable[[str], str | None]:
    """Text to the answer that votes, without white space at its ends; None where there is none.

    `pattern` has one group, as `config_checks` makes sure; a dot matches line breaks too.
    """
    if pattern is None:
        return str.strip
    compiled = re.compile(pattern, re.DOTALL)

    def read(text: str) -> str | None:
        found = None
        for match in compiled.finditer(text):
            found = match
        return None if found is None or found[1] is None else found[1].strip()

    return read


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, "rated samples only"
    return sample.reward


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
