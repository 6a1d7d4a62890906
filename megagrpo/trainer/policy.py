"""The policy and the reference: log-probs of a batch, and the update.

The update is one loss per optimizer step over all ranks: every rank sums its micro-batches, the
counts are global, and nothing is averaged (design 4.4). Where one rollout makes exactly one
optimizer step, old log-probs are the current ones without gradient and need no pass of their own
(conventions.md); the very first step scores them all the same, so that the mismatch alarm has an
independent look before anything is learned.

Letters: T packed tokens, B sequences of one micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megagrpo import log
from megagrpo.algo.corrections import CorrectionSettings, correction_weights, mismatch_metrics
from megagrpo.algo.losses import LossCounts, policy_loss
from megagrpo.algo.settings import LossSettings
from megagrpo.model.optimizer import LRSchedule, Trainable, set_lr, step
from megagrpo.model.schedule import forward_backward, forward_logprobs
from megagrpo.parallel.context import ParallelContext
from megagrpo.trainer.batch import Batch, MiniBatch
from megagrpo.trainer.phases import Phases, phase
from megagrpo.trainer.update_metrics import (
    UpdateMetrics,
    micro_batch_sums,
    mismatch_scalars,
    part_of,
    reduce_sums,
)
from megagrpo.types import MicroBatch


class MismatchStop(RuntimeError):
    """Trainer and engine disagree for too long: they do not hold the same policy."""


@dataclass(frozen=True)
class Scoring:
    """How logits become log-probs; the same for policy, reference and engine."""

    context: ParallelContext
    temperature: float
    valid_vocab: int


@dataclass(frozen=True)
class PolicySettings:
    """The loss and its guards."""

    loss: str
    loss_settings: LossSettings
    correction: CorrectionSettings
    mismatch_warn: float  # nats, mean |old - rollout|
    mismatch_stop: float
    mismatch_patience: int


class Policy:
    """The trained shards, their optimizer and the position of the schedule."""

    def __init__(
        self,
        trainable: Trainable,
        scoring: Scoring,
        settings: PolicySettings,
        schedule: LRSchedule,
        phases: Phases,
    ) -> None:
        self.trainable = trainable
        self.scoring = scoring
        self.settings = settings
        self.schedule = schedule
        self.phases = phases
        self.optimizer_steps = 0  # finished ones; skipped steps do not count
        self.skipped_steps = 0
        self.steps_over_stop = 0  # consecutive steps over mismatch_stop

    @phase("old_log_prob")
    def score_old(self, batch: Batch, step: int) -> Batch:
        """The batch with `old_logprobs`, unless the update can take them from its own pass.

        All ranks join. Needed at the first step and wherever a rollout makes several optimizer
        steps.
        """
        if len(batch.mini_batches) == 1 and step > 1:
            return batch
        return batch.with_values("old_logprobs", score(self.trainable.chunks, batch, self.scoring))

    @phase("update_actor")
    def update(self, batch: Batch) -> UpdateMetrics:
        """All optimizer steps of the rollout and their metrics (update_metrics.py says which are
        means and which sums). All ranks join. Raises MismatchStop before the optimizer moves."""
        metrics = UpdateMetrics()
        scored = all("old_logprobs" in micro.values for micro in batch.micro_batches)
        if scored:
            self._alarm(reduce_sums(_mismatch(batch.micro_batches), self.scoring.context))
        for mini in batch.mini_batches:
            self._optimizer_step(mini, metrics, alarm=not scored)
        return metrics

    def _optimizer_step(self, mini: MiniBatch, metrics: UpdateMetrics, *, alarm: bool) -> None:
        if mini.counts.total_tokens == 0:
            log.warn("no sample can be trained on, each failed or was not rated: update skipped")
            metrics.skipped += 1  # every rank sees the same counts, so all of them skip
            self.skipped_steps += 1
            return

        def loss(
            logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self._loss(logprobs, entropy, micro, mini.counts)

        context = self.scoring.context
        sums = forward_backward(
            self.trainable,
            mini.micro_batches,
            loss,
            context=context,
            temperature=self.scoring.temperature,
            valid_vocab=self.scoring.valid_vocab,
            with_entropy=True,
        )
        reduced = reduce_sums(sums, context)
        if alarm:  # the step's only optimizer step: its own pass is the look at old log-probs
            self._alarm(reduced)
        lr = self.schedule.at(self.optimizer_steps)
        set_lr(self.trainable, lr)
        result = step(self.trainable, context)
        self.optimizer_steps += not result.skipped
        self.skipped_steps += result.skipped
        metrics.add(reduced, result.grad_norm, lr, result.skipped)

    def _loss(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        micro: MicroBatch,
        counts: LossCounts,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One micro-batch's share of the loss and its metric sums, on the last stage."""
        values = {name: value.to(logprobs.device) for name, value in micro.values.items()}
        mask = micro.mask.to(logprobs.device)
        sequence, count = sequence_index(micro)
        sequence = sequence.to(logprobs.device)
        old = values.get("old_logprobs", logprobs.detach())
        correction = correction_weights(
            old_logprobs=old,
            rollout_logprobs=values["rollout_logprobs"],
            mask=mask,
            sequence=sequence,
            num_sequences=count,
            settings=self.settings.correction,
        )
        output = policy_loss(
            name=self.settings.loss,
            logprobs=logprobs,
            old_logprobs=old,
            advantages=per_sequence(values["advantages"], mask, sequence, count),
            mask=mask,
            sequence=sequence,
            num_sequences=count,
            counts=counts,
            settings=self.settings.loss_settings,
            ref_logprobs=values.get("ref_logprobs"),
            rollout_weights=correction.weights,
            entropy=entropy,
        )
        sums = micro_batch_sums(
            output,
            correction,
            old_logprobs=old,
            rollout_logprobs=values["rollout_logprobs"],
            mask=mask,
        )
        return output.loss, sums

    def _alarm(self, reduced: Mapping[str, float]) -> None:
        """Warn or stop on the step's mean |old - rollout| in nats, once per step and before the
        optimizer moves; every rank holds the same number."""
        settings = self.settings
        found = mismatch_metrics(part_of(reduced, "mismatch"))
        mean_abs_diff = found["rollout_corr/mean_abs_logprob_diff"]
        if mean_abs_diff <= settings.mismatch_stop:
            self.steps_over_stop = 0
        else:
            self.steps_over_stop += 1
        if self.steps_over_stop >= settings.mismatch_patience:
            raise MismatchStop(
                f"mean |old - rollout| log-prob is {mean_abs_diff:.3g} nats, over "
                f"algorithm.mismatch.stop={settings.mismatch_stop} for {self.steps_over_stop} "
                "steps: trainer and engine do not hold the same policy"
            )
        if not mean_abs_diff <= settings.mismatch_warn:  # also if it is no number
            log.warn(
                f"mean |old - rollout| log-prob is {mean_abs_diff:.3g} nats "
                f"(algorithm.mismatch.warn={settings.mismatch_warn})"
            )


class Reference:
    """The frozen start weights; forward only. Inside `on_device()` they may be read."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        scoring: Scoring,
        phases: Phases,
        on_device: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.chunks = chunks
        self.scoring = scoring
        self.phases = phases
        self.on_device = on_device

    @phase("ref")
    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_logprobs`; all ranks join."""
        with self.on_device():
            return batch.with_values("ref_logprobs", score(self.chunks, batch, self.scoring))


class NoReference:
    """Stands in where no reference is wanted: scores nothing."""

    def score(self, batch: Batch) -> Batch:
        """The batch as it is."""
        return batch


def score(chunks: Sequence[torch.nn.Module], batch: Batch, scoring: Scoring) -> list[torch.Tensor]:
    """Log-probs [T] float32 of every micro-batch's labels, on all stages; all ranks join."""
    return forward_logprobs(
        chunks,
        batch.micro_batches,
        context=scoring.context,
        temperature=scoring.temperature,
        valid_vocab=scoring.valid_vocab,
    )


def _mismatch(micro_batches: Sequence[MicroBatch]) -> list[dict[str, torch.Tensor]]:
    """`mismatch/...` scalars of every pack with `old_logprobs`, as `reduce_sums` takes them."""
    return [
        mismatch_scalars(
            old_logprobs=micro.values["old_logprobs"].to(micro.mask.device),
            rollout_logprobs=micro.values["rollout_logprobs"],
            mask=micro.mask,
        )
        for micro in micro_batches
    ]


def sequence_index(micro: MicroBatch) -> tuple[torch.Tensor, int]:
    """For every packed token the number of its sequence, [T] int64, and how many there are."""
    lengths = micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    return index, len(lengths)


def per_sequence(
    values: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor, count: int
) -> torch.Tensor:
    """[B] from a value that every trained token of a sequence carries; 0 where there is none."""
    first = torch.zeros(count, dtype=values.dtype, device=values.device)
    first[sequence[mask]] = values[mask]
    return first
