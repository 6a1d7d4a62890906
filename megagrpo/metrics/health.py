"""Warnings about a run from its metrics lines alone, each with what to try.

Nothing here is saved: fed with the lines of metrics.jsonl in order, a resumed run and the report
come to the same findings as the run did. A level is the mean over the last `health.window` steps
that have the metric, and nothing is said before there are as many; slow trends compare it with the
window `health.span` steps earlier, or with the run's first one while the run is shorter. A warning
is given when it starts and again only after its condition was absent for a whole window.
Left out: stopping a run (only the mismatch alarm does), checks that need more than these numbers.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megagrpo.config import HealthConfig

PARTS = 5  # of the span in which KL has to rise without a pause
REWARD = "reward/mean"

ADVICE = {
    "clipped_share": "look for rewards far from the rest, or raise algorithm.advantage_clip",
    "kl": "raise algorithm.kl.beta or lower optim.lr",
    "kl_rise": "raise algorithm.kl.beta or lower optim.lr before the policy is far away",
    "grad_norm": "lower optim.lr, check optim.grad_clip and look for rewards far from the rest",
    "length_factor": "read completions; add a length penalty or lower rollout.max_response_tokens",
    "flat_share": "use prompts of middling difficulty, raise rollout.group_size, or drop flat "
    "groups (algorithm.filter_flat_groups)",
    "repetition_rise": "read completions; add a repetition penalty to the rewards, lower optim.lr",
    "held_out_drop": "read completions for a way around the reward; stop at the best checkpoint",
}
"""What to try, by key of the `health` section."""


@dataclass
class Finding:
    """One warning: from its first step to its last, None while it lasts."""

    key: str  # of the `health` section
    first: int
    what: str  # as it was when it started
    limit: float
    last: int | None = None

    @property
    def line(self) -> str:
        """The warning as it is logged."""
        return f"{self.what} (health.{self.key}={self.limit:g}): {ADVICE[self.key]}"


@dataclass
class _Evaluation:
    """One held-out score and the training reward around it."""

    score: float
    error: float  # standard error; 0 where it is not known
    reward: float


@dataclass
class Health:
    """Looks at one step after the other; `findings` holds every warning so far."""

    settings: HealthConfig
    findings: list[Finding] = field(default_factory=list)
    _values: dict[str, deque[float]] = field(default_factory=dict)
    _held_out: dict[str, list[_Evaluation]] = field(default_factory=dict)
    _absent: dict[str, int] = field(default_factory=dict)  # steps since the condition was seen

    def see(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take the numbers of `step` (0 is before training); returns the warnings that start."""
        for name in _WATCHED:
            value = _finite(metrics.get(name))
            if value is not None and step > 0:
                most = self.settings.span + self.settings.window
                self._values.setdefault(name, deque(maxlen=most)).append(value)
        self._see_held_out(metrics)
        started = []
        for key, check in _CHECKS.items():
            limit = getattr(self.settings, key)
            what = None if limit is None else check(self, limit)
            started += self._turn(step, key, what, limit)
        return started

    def _turn(self, step: int, key: str, what: str | None, limit: float) -> list[Finding]:
        """Starts a finding, goes on with it or ends it."""
        running = next((f for f in self.findings if f.key == key and f.last is None), None)
        if what is None:
            self._absent[key] = self._absent.get(key, 0) + 1
            if running is not None and self._absent[key] >= self.settings.window:
                running.last = step - self.settings.window
            return []
        self._absent[key] = 0
        if running is not None:
            return []
        self.findings.append(Finding(key, step, what, limit))
        return self.findings[-1:]

    def _see_held_out(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            score = _finite(value)
            stem, _, k = name.rpartition("/mean@")
            if not stem.startswith("val/") or not k.isdecimal() or score is None:
                continue
            prompts = (_finite(metrics.get(f"{stem}/count")) or 0.0) / max(int(k), 1)
            # The variance of a score in [0, 1] is at most that of a coin.
            spread = score * (1 - score) if 0 < score < 1 else 0.0
            recent = list(self._values.get(REWARD, ()))[-self.settings.window :]
            reward = _mean(recent) if recent else -math.inf
            error = math.sqrt(spread / prompts) if prompts else 0.0
            self._held_out.setdefault(name, []).append(_Evaluation(score, error, reward))

    def _level(self, name: str) -> float | None:
        """Mean over the last window."""
        values = list(self._values.get(name, ()))
        size = self.settings.window
        return _mean(values[-size:]) if len(values) >= size else None

    def _change(self, name: str) -> tuple[float, float, float] | None:
        """Mean over the earlier window, over the last one, standard error of their difference."""
        values, size = list(self._values.get(name, ())), self.settings.window
        if len(values) < 2 * size:
            return None
        early, late = values[:size], values[-size:]
        return _mean(early), _mean(late), _error(early, late)


def findings_of(lines: Sequence[Mapping[str, Any]], settings: HealthConfig) -> list[Finding]:
    """Every warning of a run from its metrics lines in order of steps."""
    health = Health(settings)
    for line in lines:
        health.see(line["step"], line)
    return health.findings


def _finite(value: Any) -> float | None:
    real = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if real else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _error(one: Sequence[float], two: Sequence[float]) -> float:
    """Standard error of the difference of two means of independent values (Welch)."""
    total = 0.0
    for part in (one, two):
        centre = _mean(part)
        squares = math.fsum((value - centre) ** 2 for value in part)
        total += squares / max(len(part) - 1, 1) / len(part)
    return math.sqrt(total)


def _above(name: str, text: str) -> Callable[[Health, float], str | None]:
    def check(health: Health, limit: float) -> str | None:
        level = health._level(name)
        return None if level is None or level <= limit else text.format(level)

    return check


def _kl_rises(health: Health, limit: float) -> str | None:
    """The means of the span's fifths rise one above the other, from first to last by more than
    `limit` nats and two standard errors."""
    values, span = list(health._values.get("kl/ref_k3", ())), health.settings.span
    if len(values) < span + health.settings.window:
        return None
    cuts = [len(values) * part // PARTS for part in range(PARTS + 1)]
    parts = [values[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    means = [_mean(part) for part in parts]
    rises = all(later > earlier for earlier, later in zip(means, means[1:], strict=False))
    if not rises or means[-1] - means[0] <= limit + 2 * _error(parts[0], parts[-1]):
        return None
    return f"KL to the reference rose from {means[0]:.3g} to {means[-1]:.3g} nats in {span} steps"


def _length_without_reward(health: Health, limit: float) -> str | None:
    """Longer by the factor `limit`, and the reward higher by at most two standard errors."""
    length, reward = health._change("response_length/mean"), health._change(REWARD)
    if length is None or reward is None or length[1] < limit * length[0]:
        return None
    if reward[1] - reward[0] > 2 * reward[2]:
        return None
    return (
        f"responses grew from {length[0]:.0f} to {length[1]:.0f} tokens, the reward went from "
        f"{reward[0]:.3g} to {reward[1]:.3g}"
    )


def _repeats_more(health: Health, limit: float) -> str | None:
    change = health._change("rollout/repetition_share")
    if change is None or change[1] - change[0] <= limit:
        return None
    return f"repeated n-grams rose from {change[0]:.0%} to {change[1]:.0%}"


def _held_out_falls(health: Health, limit: float) -> str | None:
    """The mean of the last two evaluations is below that of the two before by more than `limit` and
    three standard errors (two are passed by chance once in a run), while the reward rose."""
    for name, found in health._held_out.items():
        if len(found) < 4:
            continue
        before, after = found[-4:-2], found[-2:]
        drop = (before[0].score + before[1].score - after[0].score - after[1].score) / 2
        error = math.sqrt(sum(one.error**2 for one in found[-4:])) / 2
        early, late = before[1].reward, after[1].reward
        if math.isfinite(early) and late > early and drop > limit + 3 * error:
            return (
                f"the reward rose from {early:.3g} to {late:.3g} while {name} fell by {drop:.3g} "
                "over the last four evaluations"
            )
    return None


_CHECKS: dict[str, Callable[[Health, float], str | None]] = {
    "clipped_share": _above(
        "advantage/clipped_share", "{:.0%} of the advantages are at the clip bound"
    ),
    "kl": _above("kl/ref_k3", "KL to the reference is {:.3g} nats"),
    "kl_rise": _kl_rises,
    "grad_norm": _above("actor/grad_norm", "the gradient norm is {:.3g}"),
    "length_factor": _length_without_reward,
    "flat_share": _above(
        "reward/zero_variance_share", "{:.0%} of the groups have equal rewards and teach nothing"
    ),
    "repetition_rise": _repeats_more,
    "held_out_drop": _held_out_falls,
}
_WATCHED = (
    REWARD,
    "advantage/clipped_share",
    "kl/ref_k3",
    "actor/grad_norm",
    "response_length/mean",
    "reward/zero_variance_share",
    "rollout/repetition_share",
)
