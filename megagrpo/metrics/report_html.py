"""`report.html`: what a run did, on one page that needs nothing but itself.

Four curves (reward, KL to the reference, response length, advantage spread), held-out scores where
there are any, what went wrong, some completions, the config and all final numbers. Whatever comes
from the run is text here: it is escaped, and characters that steer a terminal or turn the writing
direction are spelled out. Left out: comparing runs, editing, anything that loads from elsewhere.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megagrpo.metrics import report_tables
from megagrpo.metrics.held_out import headline_scores
from megagrpo.metrics.report_data import Run, ends_of, finite, read_run
from megagrpo.metrics.report_page import PAGE
from megagrpo.metrics.report_tables import escaped
from megagrpo.metrics.svg_chart import Series, chart, number, thinning, window_of


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into the run folder from its metrics, config and newest rollout.

    Works on a run that is still going. Raises ValueError if the folder holds no metrics.
    """
    run = read_run(Path(run_dir))
    steps = run.steps
    body = {
        "title": escaped(run.name),
        "subtitle": _subtitle(run),
        "tiles": "".join(_tiles(run)),
        "cards": "".join(_cards(run)) if steps else "<p>No training step has been logged yet.</p>",
        "health": "".join([*report_tables.warnings(run), *report_tables.health(run)]),
        "samples": report_tables.samples(run),
        "numbers": "".join(report_tables.numbers(run)),
        "config": "".join(report_tables.config(run)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: body[place[1]], PAGE)
    path = Path(run_dir) / "report.html"
    unfinished = path.with_name("report.html.tmp")
    unfinished.write_bytes(page.encode("utf-8", "backslashreplace"))
    os.replace(unfinished, path)
    return path


def _subtitle(run: Run) -> str:
    last = run.lines[-1]
    parts = [f"{last['step']:,} steps", f"{last.get('optimizer_step', 0):,} optimizer steps"]
    names = {"algorithm.loss": "", "parallel.tp": "TP ", "parallel.pp": "PP ", "model.path": ""}
    parts += [
        f"{label}{escaped(run.config[key])}" for key, label in names.items() if key in run.config
    ]
    return " &middot; ".join(parts)


def _held_out(run: Run) -> list[str]:
    return headline_scores(sorted({name for line in run.lines for name in line}))


def _tiles(run: Run) -> Iterator[str]:
    """The numbers somebody asks for first."""
    for name in _held_out(run):
        found = [line[name] for line in run.lines if finite(line.get(name)) is not None]
        if found:
            yield _tile(f"held-out {name[4:]}", found[0], found[-1], "first and last evaluation")
    ends = f"means of the first and last {ends_of(len(run.steps))} steps"
    for title, name in (
        ("reward", "reward/mean"),
        ("KL to the reference", "kl/ref_k3"),
        ("response length", "response_length/mean"),
        ("seconds per step", "perf/step_seconds"),
    ):
        pair = run.ends(name)
        if pair is not None:
            yield _tile(title, *pair, ends)


def _tile(title: str, first: float, last: float, note: str) -> str:
    return (
        f'<div class="tile"><h2>{escaped(title)}</h2><p class="big"><span>{number(first, 3)} &rarr;'
        f"</span> {number(last, 3)}</p><p>{note}</p></div>"
    )


def _cards(run: Run) -> Iterator[str]:
    """The four curves, and the held-out one."""
    yield _card(run, "Reward", "mean total reward per sample", "reward", ["reward/mean"])
    no_reference = (
        "No KL curve: no reference was scored in this run. With reference.use=always it is "
        "measured even where it is not in the loss."
    )
    text = "k3 estimate, mean over trained tokens"
    yield _card(run, "KL to the reference", text, "nats per token", ["kl/ref_k3"], no_reference)
    text = "sampled tokens per completion, end of sequence included"
    yield _card(run, "Response length", text, "tokens", ["response_length/mean"])
    text = "standard deviation and largest absolute advantage of a step"
    yield _card(run, "Advantage spread", text, "advantage", ["advantage/std", "advantage/abs_max"])
    for name in _held_out(run):
        scored = [line for line in run.lines if finite(line.get(name)) is not None]
        if scored:
            line = Series(
                name[4:],
                "a",
                [point[name] for point in scored],
                smoothed=False,
                dots=len(scored) <= 60,
            )
            steps = [point["step"] for point in scored]
            unit = "share of prompts" if "/pass@" in name else "mean reward"
            drawing = chart(steps, [line], unit, f"Held-out {name}")
            text = f"{escaped(name)}, {len(scored)} evaluations"
            yield _frame("Held-out score", text, "", drawing)


def _card(
    run: Run, title: str, text: str, unit: str, names: Sequence[str], empty: str | None = None
) -> str:
    steps = [line["step"] for line in run.steps]
    series = []
    for name, colour in zip(names, "ab", strict=False):
        values = run.column(name)
        if any(value is not None for value in values):
            series.append(Series(name.split("/")[-1].replace("_", " "), colour, values))
    if not series:
        reason = empty or f"No curve: metrics.jsonl has no {' or '.join(names)}."
        return _frame(title, text, "", f'<p class="empty">{reason}</p>')
    window = window_of(len(steps))
    keys = "".join(f'<span class="key {line.colour}">{line.label}</span>' for line in series)
    if window > 1:
        bin_size = thinning(len(steps))
        thin = "every step" if bin_size <= 2 else f"lowest and highest of {bin_size} steps"
        keys += f"<span>thin: {thin}; thick: mean of {window} steps</span>"
    gaps = sum(value is None for line in series for value in line.values)
    if gaps:
        keys += f"<span>{gaps} steps without a finite value</span>"
    return _frame(title, text, keys, chart(steps, series, unit, f"{title} over steps"))


def _frame(title: str, text: str, keys: str, drawing: str) -> str:
    return (
        f'<section class="card"><h2>{title}</h2><p class="what">{text}</p>'
        f'<p class="keys">{keys}</p>{drawing}</section>'
    )
