"""From samples to the micro-batches of one step: who is trained, by which rank, in which pack.

Every rank computes the whole plan from the same samples and keeps its own part. The plan depends
on the layout; the update does not (design 4.4), because counts are those of the whole optimizer
step and every value belongs to a token or a sequence.

Letters: B sequences, T packed tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megagrpo.algo.advantages import AdvantageResult, combined_advantages
from megagrpo.algo.kl import kl_penalized_rewards
from megagrpo.algo.losses import LossCounts
from megagrpo.data.packing import DUMMY_SEQUENCE, pack, plan_micro_batches
from megagrpo.types import MicroBatch, Sample


@dataclass(frozen=True)
class AdvantageSettings:
    """Mirror of the config keys of the same names."""

    normalize: str
    baseline: str
    clip: float | None
    truncated: str = "keep"
    combine: str = "sum_then_normalize"
    weights: tuple[tuple[str, float], ...] = ()  # of every reward by name

    @property
    def columns(self) -> tuple[tuple[str, float], ...]:
        """What advantages are taken of: the total that the runner has weighted, or each reward."""
        return (("total", 1.0),) if self.combine == "sum_then_normalize" else self.weights


@dataclass(frozen=True)
class CutSettings:
    """How a step is cut into optimizer steps and packs."""

    minibatch_prompts: int  # prompts of one optimizer step
    max_tokens: int  # tokens of one pack
    min_packs: int  # packs of an optimizer step on each rank; the pipeline wants one per stage
    max_response_tokens: int


@dataclass(frozen=True)
class Demonstrations:
    """Reference answers that one optimizer step imitates beside its rollouts."""

    micro_batches: tuple[MicroBatch, ...]  # this data-parallel rank's
    tokens: int  # answer tokens over all ranks
    weight: float  # of the term in the loss


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this data-parallel rank's packs and everybody's counts."""

    micro_batches: tuple[MicroBatch, ...]
    counts: LossCounts
    demonstrations: Demonstrations | None = None

    @property
    def all_micro_batches(self) -> tuple[MicroBatch, ...]:
        """Packs of rollouts, then those of demonstrations."""
        shown = () if self.demonstrations is None else self.demonstrations.micro_batches
        return self.micro_batches + shown

    @property
    def is_empty(self) -> bool:
        """Whether no token of any rank is trained on."""
        return self.counts.total_tokens == 0 and self.demonstrations is None


@dataclass(frozen=True)
class Batch:
    """One rollout, ready to train on."""

    samples: Sequence[Sample]  # all ranks' samples, (group, member) order
    valid: torch.Tensor  # [B] bool: not failed and with a reward
    advantages: AdvantageResult
    mini_batches: tuple[MiniBatch, ...]
    kl_paid_mean: float | None = None  # beta KL taken from a trained sample's reward, its mean

    @property
    def trained(self) -> torch.Tensor:
        """[B] bool: valid and with at least one token."""
        return self.valid & torch.tensor([bool(s.completion.ids) for s in self.samples])

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

    def with_advantages(self, result: AdvantageResult) -> "Batch":
        """The same packs with other advantages."""
        values = [
            torch.where(micro.mask, result.advantages.float()[_row_of_token(micro)], 0.0)
            for micro in self.micro_batches
        ]
        return replace(self.with_values("advantages", values), advantages=result)

    @property
    def imitation_weight(self) -> float | None:
        """Weight of the demonstrations, None if there are none."""
        shown = [mini.demonstrations for mini in self.mini_batches if mini.demonstrations]
        return shown[0].weight if shown else None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The packs of rollouts of all optimizer steps in order."""
        return [micro for mini in self.mini_batches for micro in mini.micro_batches]


def _row_of_token(micro: MicroBatch) -> torch.Tensor:
    """[T] int64: the sample of every packed token; of a dummy any."""
    lengths = micro.cu_seqlens.diff().long()
    return torch.tensor(micro.rows).clamp(min=0).repeat_interleave(lengths)


def trainable(sample: Sample, settings: AdvantageSettings) -> bool:
    """Whether a sample counts in statistics, tokens and sequences: it has not failed, and it was
    not cut at the length limit where such samples are masked."""
    cut_off = settings.truncated == "mask" and not sample.completion.stopped
    return not sample.failed and not cut_off


def sample_advantages(
    samples: Sequence[Sample],
    settings: AdvantageSettings,
    *,
    kl_sums: torch.Tensor | None = None,
    beta: float = 0.0,
) -> AdvantageResult:
    """Advantages of all samples in float64; rule: samples that are not trainable or not rated are
    out. beta * `kl_sums` [B], nats, is taken from every total reward first."""
    groups = torch.tensor([sample.group for sample in samples])
    valid = torch.tensor([trainable(sample, settings) for sample in samples], dtype=torch.bool)
    rewards = _rewards(samples, settings)
    if kl_sums is not None:
        assert rewards.shape[1] == 1, "KL is taken from one total reward"
        rewards = kl_penalized_rewards(rewards=rewards[:, 0], kl_sums=kl_sums, beta=beta)[:, None]
    return combined_advantages(
        rewards=rewards,
        weights=torch.tensor([weight for _, weight in settings.columns], dtype=torch.float64),
        groups=groups,
        valid=valid,
        combine=settings.combine,
        normalize=settings.normalize,
        baseline=settings.baseline,
        clip=settings.clip,
    )


def _rewards(samples: Sequence[Sample], settings: AdvantageSettings) -> torch.Tensor:
    """[B, R] float64, NaN where there is none: the total, or every reward by itself."""
    if settings.combine == "sum_then_normalize":
        values = [[sample.reward] for sample in samples]
    else:
        values = [[s.rewards.get(name) for name, _ in settings.weights] for s in samples]
    rows = [[float("nan") if value is None else value for value in row] for row in values]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(samples), len(settings.columns))


def make_batch(
    samples: Sequence[Sample],
    advantage: AdvantageSettings,
    cut: CutSettings,
    *,
    dp: int,
    dp_rank: int,
) -> Batch:
    """Advantages, then the packs of every optimizer step for one data-parallel rank.

    The first minibatch_prompts groups make the first optimizer step, and so on. A sample is trained
    if it is valid and has at least one token.
    """
    result = sample_advantages(samples, advantage)
    valid = torch.tensor(
        [trainable(s, advantage) and s.reward is not None for s in samples], dtype=torch.bool
    )
    groups = list(dict.fromkeys(sample.group for sample in samples))  # numbers may have gaps
    mini_batches = []
    for start in range(0, len(groups), cut.minibatch_prompts):
        wanted = set(groups[start : start + cut.minibatch_prompts])
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
    tokens = Counter[int]()  # by group
    for row in rows:
        tokens[samples[row].group] += len(samples[row].completion.ids)
    counts = LossCounts(
        total_tokens=tokens.total(),
        total_sequences=len(rows),
        max_response_length=cut.max_response_tokens,
        total_prompts=len(tokens),
    )
    packs = tuple(
        _pack([-1 if place < 0 else rows[place] for place in places], samples, advantages, tokens)
        for places in plan[dp_rank]
    )
    return MiniBatch(packs, counts)


def _pack(
    rows: list[int],
    samples: Sequence[Sample],
    advantages: torch.Tensor,
    prompt_tokens: Mapping[int, int],
) -> MicroBatch:
    """One pack; a row of -1 is a dummy without trained tokens."""
    sequences: list[tuple[Sequence[int], Sequence[int]]] = []
    values: dict[str, list[Sequence[float]]] = {
        "rollout_logprobs": [],
        "advantages": [],
        "prompt_tokens": [],
    }
    for row in rows:
        if row < 0:
            sequences.append(DUMMY_SEQUENCE)
            for column in values.values():
                column.append(())
            continue
        completion, group = samples[row].completion, samples[row].group
        sequences.append((samples[row].prompt.ids, completion.ids))
        values["rollout_logprobs"].append(completion.logprobs)
        values["advantages"].append([float(advantages[row])] * len(completion.ids))
        values["prompt_tokens"].append([float(prompt_tokens[group])] * len(completion.ids))
    return pack(sequences, values, rows)
