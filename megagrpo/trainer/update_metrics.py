"""Metrics of an update: sums and peaks of micro-batches, reduced once, turned into names.

A micro-batch gives (sum) and (largest value) scalars; they are added up over micro-batches and
data-parallel ranks of the last stage, sent to the other stages, and divided by global counts.
Shares and token means run over all optimizer steps of the rollout; losses, gradient norm are means
over its optimizer steps. Every rank ends with the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megagrpo.algo.corrections import (
    Correction,
    SumsAndPeaks,
    correction_metrics,
    mismatch_metrics,
    mismatch_sums,
)
from megagrpo.algo.losses import LossOutput
from megagrpo.parallel import collectives
from megagrpo.parallel.context import ParallelContext

Scalars = dict[str, torch.Tensor]
PEAK = "peak/"  # prefix of scalars of which the largest counts; all others add up


def micro_batch_sums(
    output: LossOutput,
    correction: Correction,
    *,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
) -> Scalars:
    """Everything one micro-batch has to say, by names "loss/...", "weight/...", "mismatch/..."."""
    found = {f"loss/{name}": value for name, value in output.sums.items()}
    found["loss/loss"] = output.loss.detach()
    found |= _named("weight", correction.stats)
    found |= mismatch_scalars(
        old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask
    )
    return found


def mismatch_scalars(
    *, old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor
) -> Scalars:
    """The "mismatch/..." scalars of one micro-batch; all three [T]."""
    sums = mismatch_sums(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    return _named("mismatch", sums)


def _named(prefix: str, part: SumsAndPeaks) -> Scalars:
    found = {f"{prefix}/{name}": value for name, value in part.sums.items()}
    return found | {f"{PEAK}{prefix}/{name}": value for name, value in part.peaks.items()}


def reduce_sums(micro_batches: Sequence[Scalars], context: ParallelContext) -> dict[str, float]:
    """The scalars of one optimizer step over all its micro-batches, the same on every rank.

    Not every micro-batch has every scalar, but every rank has the same kinds of micro-batches. All
    ranks of the world join; only the last stage has micro-batch scalars.
    """
    totals: dict[str, float] = {}
    if context.is_last_stage:
        # All data-parallel ranks of the last stage; each has at least one micro-batch.
        totals = _reduce_over_data_parallel(micro_batches, context)
    return collectives.broadcast_object_from_last_stage(totals, context)


def _reduce_over_data_parallel(
    micro_batches: Sequence[Scalars], context: ParallelContext
) -> dict[str, float]:
    names = dict.fromkeys(name for part in micro_batches for name in part)
    stacked = {
        name: torch.stack([part[name].double() for part in micro_batches if name in part])
        for name in names
    }
    sums = {name: value.sum() for name, value in stacked.items() if not name.startswith(PEAK)}
    peaks = {name: value.max() for name, value in stacked.items() if name.startswith(PEAK)}
    sums = collectives.sum_over(context.dp_group, sums)
    peaks = collectives.max_over(context.dp_group, peaks)
    return {name: float(value) for name, value in {**sums, **peaks}.items()}


@dataclass
class UpdateMetrics:
    """Collects the optimizer steps of one rollout."""

    kl_coef: float = 0.0
    bc_coef: float | None = None  # None: nothing is imitated
    totals: dict[str, float] = field(default_factory=dict)
    losses: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    skipped: int = 0

    def add(self, reduced: Mapping[str, float], grad_norm: float, lr: float, skipped: bool) -> None:
        """One optimizer step's reduced scalars."""
        for name, value in reduced.items():
            old = self.totals.get(name, 0.0)
            self.totals[name] = max(old, value) if name.startswith(PEAK) else old + value
        imitation = reduced.get("demonstration/loss", 0.0)
        self.losses.append(
            {"loss": reduced["loss/loss"] + imitation, "pg_loss": reduced["loss/pg_loss"]}
        )
        for name, source in (("kl_loss", "loss/kl_loss"), ("bc_loss", "demonstration/bc_loss")):
            if source in reduced:
                self.losses[-1][name] = reduced[source]
        self.grad_norms.append(grad_norm)
        self.lrs.append(lr)
        self.skipped += skipped

    def as_metrics(self) -> dict[str, float]:
        """Names of conventions.md; a metric without data is left out."""
        found = {"actor/kl_coef": self.kl_coef}
        if self.bc_coef is not None:
            found["actor/bc_coef"] = self.bc_coef
        if not self.losses:
            return found
        for name in dict.fromkeys(name for part in self.losses for name in part):
            found[f"actor/{name}"] = _mean([part[name] for part in self.losses if name in part])
        found["actor/grad_norm"] = _mean(self.grad_norms)
        found["actor/lr"] = self.lrs[-1]
        tokens = self.totals["loss/tokens"]
        for name, source in (
            ("actor/entropy", "entropy"),
            ("actor/clip_low_share", "clip_low"),
            ("actor/clip_high_share", "clip_high"),
            ("actor/ppo_kl", "ppo_kl"),
            ("kl/ref_k1", "ref_k1"),
            ("kl/ref_k3", "ref_k3"),
            ("actor/entropy_kept_share", "entropy_kept_tokens"),
            ("rollout_corr/off_policy_share", "off_policy_tokens"),
        ):
            if f"loss/{source}" in self.totals and tokens:
                found[name] = self.totals[f"loss/{source}"] / tokens
        sequences = self.totals["loss/sequences"]
        if "loss/off_policy_sequences" in self.totals and sequences:
            dropped = self.totals["loss/off_policy_sequences"]
            found["rollout_corr/off_policy_sequence_share"] = dropped / sequences
        found.update(mismatch_metrics(self._part("mismatch")))
        found.update(correction_metrics(self._part("weight")))
        return found

    def _part(self, prefix: str) -> SumsAndPeaks:
        return part_of(self.totals, prefix)


def part_of(totals: Mapping[str, float], prefix: str) -> SumsAndPeaks:
    """The reduced scalars of one source as algo.corrections takes them."""

    def named(start: str) -> Scalars:
        chosen = {name: value for name, value in totals.items() if name.startswith(start)}
        return {
            name.removeprefix(start): torch.tensor(value, dtype=torch.float64)
            for name, value in chosen.items()
        }

    return SumsAndPeaks(named(f"{prefix}/"), named(f"{PEAK}{prefix}/"))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
