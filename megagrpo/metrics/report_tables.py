"""The tables and lists of the report, and how text of the run becomes text of the page."""

import html
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from megagrpo.config import HealthConfig
from megagrpo.metrics.health import findings_of
from megagrpo.metrics.records import FATES, METRICS
from megagrpo.metrics.report_data import Run, finite
from megagrpo.metrics.svg_chart import number

SHOWN_CHARACTERS = 1200


_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def escaped(value: Any, most: int = 400) -> str:
    """Text for the page; characters that steer a terminal, turn the writing direction or stand
    alone as half a pair are spelled out, e.g. \\u202e."""
    text = str(value)
    text = text if len(text) <= most else text[:most] + f" ... ({len(text):,} characters)"
    spelled = _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return html.escape(spelled, quote=True)


def health(run: Run) -> Iterator[str]:
    """Counts of what went wrong, those that were measured; a zero is said, an unknown is not."""
    steps = len(run.steps)
    for name, what in (
        ("counts/failed", "samples failed"),
        ("reward/errors", "rewards raised or gave no number"),
        ("reward/timeouts", "rewards took too long"),
        ("counts/filtered", "samples were filtered out"),
    ):
        known = [value for value in run.column(name) if value is not None]
        if known:
            amount = math.fsum(known)
            yield _check(amount > 0, f"{number(amount)} {what}")
    yield from _accounts(run)
    skipped = [value for value in run.column("actor/skipped_steps") if value is not None]
    if skipped:
        yield _check(skipped[-1] > 0, f"{number(skipped[-1])} optimizer steps skipped")
    for name, limit, what in (
        ("response_length/clip_ratio", 0.1, "of the completions were cut at the length limit"),
        ("reward/zero_variance_share", 0.5, "of the groups had equal rewards and taught nothing"),
    ):
        pair = run.ends(name)
        if pair is not None:
            yield _check(
                pair[1] > limit, f"{pair[1]:.0%} {what} (last steps; first: {pair[0]:.0%})"
            )
    gaps = [v for v in run.column("rollout_corr/mean_abs_logprob_diff") if v is not None]
    if gaps:
        worst = f"{number(max(gaps))} nats: largest mean |trainer - engine| log-prob of a step"
        yield f"<li>{worst}</li>"
    nulls = {name for line in run.lines for name, value in line.items() if value is None}
    if nulls:
        yield _check(True, f"not finite in some step: {escaped(', '.join(sorted(nulls)))}")
    missing = run.steps[-1]["step"] - run.steps[0]["step"] + 1 - steps if steps else 0
    if missing or run.torn:
        yield _check(True, f"{missing} steps have no line, {run.torn} lines cannot be read")


def _accounts(run: Run) -> Iterator[str]:
    """What became of the generated samples, where not all were trained."""
    sums = {
        name: math.fsum(value for value in run.column(f"counts/{name}") if value is not None)
        for name in ("generated", *FATES)
    }
    if sums["trained"] < sums["generated"]:
        parts = " + ".join(f"{number(sums[fate])} {fate}" for fate in FATES if sums[fate])
        yield f"<li>{number(sums['generated'])} samples generated = {parts}</li>"


def warnings(run: Run) -> Iterator[str]:
    """The warnings that the run gave, with what to try."""
    for finding in findings_of(run.lines, _thresholds(run.config)):
        last = "the last" if finding.last is None else f"{finding.last:,}"
        yield _check(True, f"steps {finding.first:,} to {last}: {escaped(finding.line)}")


def _thresholds(config: Mapping[str, Any]) -> HealthConfig:
    """The run's own; the usual one for a key that its config.yaml does not hold."""
    known: dict[str, Any] = {}
    for item in fields(HealthConfig):
        value = config.get(f"health.{item.name}", item.default)
        number_or_off = value is None or finite(value) is not None
        known[item.name] = value if number_or_off else item.default
    return HealthConfig(**known)


def _check(bad: bool, text: str) -> str:
    return f'<li class="{"bad" if bad else "good"}">{text}</li>'


def samples(run: Run) -> str:
    """A few completions of the newest rollout, as they were sampled."""
    if run.rollout is None or not run.rollout[1]:
        return '<p class="empty">No completions: rollout.dump was off.</p>'
    step, rows = run.rollout
    shown = "".join(
        f"<tr><td><pre>{escaped(row['prompt'], SHOWN_CHARACTERS)}</pre></td>"
        f"<td><pre>{escaped(row['completion'], SHOWN_CHARACTERS)}</pre></td>"
        f'<td class="number">{escaped(_reward(row))}</td></tr>'
        for row in rows
    )
    return (
        f'<p class="what">The first completion of the first {len(rows)} prompts of step {step}, '
        "not chosen by their reward.</p><div class=wide><table><thead><tr><th>prompt</th>"
        "<th>completion</th><th class=number>reward</th></tr></thead>"
        f"<tbody>{shown}</tbody></table></div>"
    )


def _reward(row: Mapping[str, Any]) -> str:
    if row["failed"]:
        return "failed"
    return "none" if row["reward"] is None else number(float(row["reward"]))


def numbers(run: Run) -> Iterator[str]:
    """Every metric: its ends, its last value, and what it means."""
    names = dict.fromkeys(name for line in run.lines for name in line)
    for name in sorted(set(names) - {"step", "optimizer_step"}):
        known = [v for v in (finite(line.get(name)) for line in run.lines) if v is not None]
        if not known:
            continue
        first, last = run.ends(name) or (known[0], known[-1])
        cells = "".join(f'<td class="number">{number(v)}</td>' for v in (first, last, known[-1]))
        yield f"<tr><th>{escaped(name)}</th>{cells}<td>{meaning(name)}</td></tr>"


def meaning(name: str) -> str:
    """Formula and denominator from the table of metrics, empty for a name of somebody else."""
    for pattern, (formula, denominator) in METRICS.items():
        parts = re.split(r"(NAME|PHASE|@k$)", pattern)
        free = {"NAME": ".+", "PHASE": ".+", "@k": r"@\d+"}
        if re.fullmatch("".join(free.get(part, re.escape(part)) for part in parts), name):
            over = "" if denominator == "-" else f" / {denominator}"
            return html.escape(formula + over)
    return ""


def config(run: Run) -> Iterator[str]:
    """Every key of the resolved config."""
    for name, value in run.config.items():
        shown = "null" if value is None else value
        yield f"<tr><th>{escaped(name)}</th><td>{escaped(shown)}</td></tr>"
