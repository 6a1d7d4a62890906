"""From samples to the micro-batches of one step: who is trained, by which rank, in which pack.

Every rank computes the whole plan from the same samples and keeps its own part. The plan depends
on the layout; the update does not (design 4.4), because counts are those of the whole optimizer
step and every value belongs to a token or a sequence.

Letters: B sequences, T packed tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megagrpo.algo.advantages import AdvantageResult, group_advantages
from megagrpo.algo.losses import LossCounts
from megagrpo.data.packing import DUMMY_SEQUENCE, pack, plan_micro_batches
from megagrpo.types import MicroBatch, Sample


@dataclass(frozen=True)
class AdvantageSettings:
    """Mirror of the config keys of the same names."""

    normalize: str
    baseline: str
    clip: float | None


@dataclass(frozen=True)
class CutSettings:
    """How a step is cut into optimizer steps and packs."""

    minibatch_prompts: int  # prompts of one optimizer step
    max_tokens: int  # tokens of one pack
    min_packs: int  # packs of an optimizer step on each rank; the pipeline wants one per stage
    max_response_tokens: int


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this data-parallel rank's packs and everybody's counts."""

    micro_batches: tuple[MicroBatch, ...]
    counts: LossCounts


@dataclass(frozen=True)
class Batch:
    """One rollout, ready to train on."""

    samples: Sequence[Sample]  # all ranks' samples, (group, member) order
    valid: torch.Tensor  # [B] bool: not failed and with a reward
    advantages: AdvantageResult
    mini_batches: tuple[MiniBatch, ...]

    def with_values(self, name: str, values: Sequence[torch.Tensor]) -> "Batch":
        """The same batch with one more value per token, given per micro-batch in order."""
        rest = iter(values)
        mini_batches = tuple(
            replace(
                mini,
                micro_batches=tuple(
                    replace(micro, values={**micro.values, name: next(rest)})
                    for micro in mini.micro_batches
                ),
            )
            for mini in self.mini_batches
        )
        return replace(self, mini_batches=mini_batches)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The packs of all optimizer steps in order."""
        return [micro for mini in self.mini_batches for micro in mini.micro_batches]


def sample_advantages(samples: Sequence[Sample], settings: AdvantageSettings) -> AdvantageResult:
    """Advantages of all samples in float64; rule: failed and reward-less samples are out."""
    rewards = [float("nan") if sample.reward is None else sample.reward for sample in samples]
    return group_advantages(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor([sample.group for sample in samples]),
        valid=torch.tensor([not sample.failed for sample in samples]),
        normalize=settings.normalize,
        baseline=settings.baseline,
        clip=settings.clip,
    )


def make_batch(
    samples: Sequence[Sample],
    advantage: AdvantageSettings,
    cut: CutSettings,
    *,
    dp: int,
    dp_rank: int,
) -> Batch:
    """Advantages, then the packs of every optimizer step for one data-parallel rank.

    Groups 0 .. minibatch_prompts-1 make the first optimizer step, and so on. A sample is trained
    if it is valid and has at least one token.
    """
    result = sample_advantages(samples, advantage)
    valid = torch.tensor([not s.failed and s.reward is not None for s in samples], dtype=torch.bool)
    groups = 1 + max((sample.group for sample in samples), default=-1)
    mini_batches = []
    for start in range(0, groups, cut.minibatch_prompts):
        wanted = range(start, start + cut.minibatch_prompts)
        rows = [
            row
            for row, sample in enumerate(samples)
            if sample.group in wanted and valid[row] and sample.completion.ids
        ]
        mini_batches.append(_mini_batch(samples, result.advantages, rows, cut, dp, dp_rank))
    return Batch(samples, valid, result, tuple(mini_batches))


def _mini_batch(
    samples: Sequence[Sample],
    advantages: torch.Tensor,
    rows: list[int],
    cut: CutSettings,
    dp: int,
    dp_rank: int,
) -> MiniBatch:
    lengths = [len(samples[row].prompt.ids) + len(samples[row].completion.ids) for row in rows]
    plan = plan_micro_batches(lengths, dp, cut.max_tokens, cut.min_packs)
    counts = LossCounts(
        total_tokens=sum(len(samples[row].completion.ids) for row in rows),
        total_sequences=len(rows),
        max_response_length=cut.max_response_tokens,
    )
    packs = tuple(
        _pack([-1 if place < 0 else rows[place] for place in places], samples, advantages)
        for places in plan[dp_rank]
    )
    return MiniBatch(packs, counts)


def _pack(rows: list[int], samples: Sequence[Sample], advantages: torch.Tensor) -> MicroBatch:
    """One pack; a row of -1 is a dummy without trained tokens."""
    sequences: list[tuple[Sequence[int], Sequence[int]]] = []
    values: Mapping[str, list[Sequence[float]]] = {"rollout_logprobs": [], "advantages": []}
    for row in rows:
        if row < 0:
            sequences.append(DUMMY_SEQUENCE)
            values["rollout_logprobs"].append(())
            values["advantages"].append(())
            continue
        completion = samples[row].completion
        sequences.append((samples[row].prompt.ids, completion.ids))
        values["rollout_logprobs"].append(completion.logprobs)
        values["advantages"].append([float(advantages[row])] * len(completion.ids))
    return pack(sequences, values, rows)
