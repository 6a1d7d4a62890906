"""Blind comparison: policy and reference answer held-out prompts, side by side for a person.

Every N steps K prompts go to `comparisons/step_N.html` with the sides shuffled per prompt, and who
stands where to `comparisons/step_N.key.json`, which the judge opens last. Both sides sample alike.
The prompts go round in a seeded order, so that a judge of several pages does not know the
reference by an answer that comes back; where the held-out set is used up it begins again.

The reference does not change, so its answers are generated once, before the first page, for all
prompts that the run will show. Random numbers are those of a stream of its own. What a model
wrote is hostile text: it is escaped, and the page may load and run nothing. Left out: collecting
verdicts.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo import log
from megagrpo.hybrid.engine import HybridEngine
from megagrpo.metrics.report_tables import escaped
from megagrpo.rollout.collect import Collector, Draw
from megagrpo.trainer.evaluate import evaluation_settings
from megagrpo.trainer.preflight import Prepared
from megagrpo.trainer.sources import open_source
from megagrpo.types import Prompt, Sample, Sampling, TensorSource

SHOWN_CHARACTERS = 20_000  # of one text


@dataclass(frozen=True)
class ComparisonSettings:
    """When and how; nothing is compared with `every` 0."""

    every: int  # steps
    prompts: int  # of one page
    sampling: Sampling
    seed: int
    steps: int  # of the run
    folder: Path
    writes: bool  # this rank writes the files


class Comparison:
    """Writes the pages; the reference's answers are kept in memory after the first."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        collector: Collector,
        hybrid: HybridEngine,
        reference: Callable[[], TensorSource],
        settings: ComparisonSettings,
    ) -> None:
        self._prompts, self._collector, self._hybrid = prompts, collector, hybrid
        self._reference, self._settings = reference, settings
        self._answers: dict[int, Sample] = {}  # of the reference, by place in `prompts`

    def due(self, step: int) -> bool:
        """Whether step `step` ends with a comparison."""
        return self._settings.every > 0 and step % self._settings.every == 0

    def write(self, step: int) -> None:
        """The page and its key after `step` finished steps; all ranks join."""
        settings = self._settings
        if not self._answers:
            self._answers = self._ask_reference()
        places = self._window(step // settings.every)
        prompts = [self._prompts[place] for place in places]
        with self._hybrid.rollout_mode(step):
            policy = self._ask(prompts, Draw(settings.seed, "compare", step))
        if settings.writes:
            reference = [self._answers[place] for place in places]
            page = write_comparison(settings.folder, step, policy, reference, settings.seed)
            log.info(f"blind comparison: {page}")

    def _ask_reference(self) -> dict[int, Sample]:
        """Answers to every prompt of the run's pages; the same however often it was resumed."""
        pages = self._settings.steps // self._settings.every
        places = sorted({place for page in range(pages) for place in self._window(page + 1)})
        with self._hybrid.serving(self._reference()):
            draw = Draw(self._settings.seed, "compare-reference", 0)
            found = self._ask([self._prompts[place] for place in places], draw)
        return dict(zip(places, found, strict=True))

    def _ask(self, prompts: Sequence[Prompt], draw: Draw) -> list[Sample]:
        samples = self._collector.collect(prompts, draw, self._settings.sampling, 1)
        self._collector.rewards.take_counts()  # failures here are not training's
        return samples

    def _window(self, page: int) -> list[int]:
        """Places of the prompts of the `page`-th page, counted from 1."""
        order = list(range(len(self._prompts)))
        random.Random(f"compare/{self._settings.seed}").shuffle(order)
        start = (page - 1) * self._settings.prompts
        return [order[(start + i) % len(order)] for i in range(self._settings.prompts)]


def build_comparison(prepared: Prepared, collector: Collector, hybrid: HybridEngine) -> Comparison:
    """The comparison of a prepared run, with the sampling of its evaluation."""
    config, evaluation = prepared.config, evaluation_settings(prepared)
    return Comparison(
        prompts=() if prepared.eval is None else prepared.eval.prompts,
        collector=collector,
        hybrid=hybrid,
        reference=lambda: open_source(prepared.origin["path"], prepared.shape),
        settings=ComparisonSettings(
            every=config.eval.compare_every,
            prompts=config.eval.compare_prompts,
            sampling=evaluation.sampling,
            seed=evaluation.seed,
            steps=prepared.length.rollouts,
            folder=Path(config.trainer.run_dir) / "comparisons",
            writes=prepared.rank == 0,
        ),
    )


def write_comparison(
    folder: Path, step: int, policy: Sequence[Sample], reference: Sequence[Sample], seed: int
) -> Path:
    """Write `step_N.html` and `step_N.key.json`; returns the page's path.

    Both lists hold one sample per prompt, in the same order.
    """
    draws = random.Random(f"compare/{seed}/{step}")
    rows, key = [], []
    for number, (ours, theirs) in enumerate(zip(policy, reference, strict=True), 1):
        assert ours.prompt.index == theirs.prompt.index, (
            f"answers to prompts {ours.prompt.index} and {theirs.prompt.index} side by side"
        )
        policy_is_a = draws.random() < 0.5
        left, right = (ours, theirs) if policy_is_a else (theirs, ours)
        rows.append((number, ours.prompt.text, left.text, right.text))
        key.append(
            {
                "number": number,
                "prompt_index": ours.prompt.index,
                "policy": "A" if policy_is_a else "B",
                "reference": "B" if policy_is_a else "A",
                "policy_reward": ours.reward,
                "reference_reward": theirs.reward,
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"step_{step}.html"
    _replace(folder / f"step_{step}.key.json", json.dumps({"step": step, "pairs": key}, indent=1))
    _replace(page, "\n".join(_page(step, rows)))
    return page


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(unfinished, path)


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Blind comparison</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 32px 24px; max-width: 1180px;
  font: 15px/1.5 system-ui, sans-serif; }
section { border-top: 1px solid #8886; padding: 14px 0; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; }
.sides > div, .prompt { min-width: 0; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 monospace; }
.prompt { opacity: .75; margin-bottom: 10px; } h2, h3 { font-size: 15px; margin: 0 0 4px; }
</style>
</head>
<body>"""


def _page(step: int, rows: Sequence[tuple[Any, ...]]) -> Iterator[str]:
    yield _HEAD
    yield f"<h1>Blind comparison at step {step}</h1>"
    yield (
        "<p>Each prompt was answered by the policy and by the reference; which is A is drawn anew "
        "for each. Write down A, B or equal for every number, then open "
        f"step_{step}.key.json.</p>"
    )
    for number, prompt, left, right in rows:
        yield f'<section><h2>{number}</h2><pre class="prompt">{_text(prompt)}</pre>'
        yield f'<div class="sides"><div><h3>A</h3><pre>{_text(left)}</pre></div>'
        yield f"<div><h3>B</h3><pre>{_text(right)}</pre></div></div></section>"
    yield "</body></html>"


def _text(text: str) -> str:
    return escaped(text, SHOWN_CHARACTERS)
