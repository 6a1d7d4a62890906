"""What becomes of every generated sample, and which groups are worth training on.

A sample has exactly one fate, so the counts of a step add up: generated = trained + filtered +
failed + truncated + surplus + buffered. What is wrong with the sample itself comes first (failed,
truncated), then what became of its group. Nothing is carried over to a later step, so `buffered`
is always 0.
"""

from collections.abc import Callable, Sequence

from megagrpo.rollout.storage import SURPLUS, Rollout
from megagrpo.trainer.batch import AdvantageSettings, sample_advantages, trainable
from megagrpo.types import Sample

Useful = Callable[[Sequence[Sample]], set[int]]


def groups_with_signal(settings: AdvantageSettings) -> Useful:
    """Judges by the advantages' own rule: a group that is flat, single or empty has no signal."""

    def useful(samples: Sequence[Sample]) -> set[int]:
        flat = sample_advantages(samples, settings).flat.tolist()
        return {sample.group for sample, none in zip(samples, flat, strict=True) if not none}

    return useful


def groups_with_a_rating(settings: AdvantageSettings) -> Useful:
    """Judges by whether any member counts and was rated."""

    def useful(samples: Sequence[Sample]) -> set[int]:
        return {s.group for s in samples if trainable(s, settings) and s.reward is not None}

    return useful


def fates(rollout: Rollout, settings: AdvantageSettings) -> list[str]:
    """One of `metrics.records.FATES` for every sample, in order."""
    return [
        _fate(sample, rollout.dropped.get(sample.group), settings) for sample in rollout.samples
    ]


def _fate(sample: Sample, dropped: str | None, settings: AdvantageSettings) -> str:
    if sample.failed:
        return "failed"
    if not trainable(sample, settings):
        return "truncated"
    if dropped is not None:
        return "surplus" if dropped == SURPLUS else "filtered"
    return "filtered" if sample.reward is None or not sample.completion.ids else "trained"
