"""The policy and its update.

The update is one loss per optimizer step over all ranks: every rank sums its micro-batches, the
counts are global, and nothing is averaged (design 4.4). Where one rollout makes exactly one
optimizer step, old log-probs are the current ones without gradient and need no pass of their own
(conventions.md); the very first step scores them all the same, so that the mismatch alarm has an
independent look before anything is learned.

Letters: T packed tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megagrpo import log
from megagrpo.algo.corrections import mismatch_metrics
from megagrpo.algo.kl_control import KLController
from megagrpo.model.optimizer import LRSchedule, Trainable, set_lr, step
from megagrpo.model.schedule import forward_backward
from megagrpo.trainer.batch import Batch, MiniBatch
from megagrpo.trainer.objective import Objective
from megagrpo.trainer.phases import Phases, phase
from megagrpo.trainer.scoring import Scoring, score, score_high_entropy
from megagrpo.trainer.update_metrics import (
    UpdateMetrics,
    mismatch_scalars,
    part_of,
    reduce_sums,
)
from megagrpo.types import MicroBatch


class MismatchStop(RuntimeError):
    """Trainer and engine disagree for too long: they do not hold the same policy."""


@dataclass(frozen=True)
class PolicySettings:
    """The objective, how often it is stepped on, and its guards."""

    objective: Objective
    mismatch_warn: float  # nats, mean |old - rollout|
    mismatch_stop: float
    mismatch_patience: int
    iterations: int = 1  # mu: passes over the rollout
    top_entropy_share: float = 1.0  # of an optimizer step's tokens, those that have a policy term
    always_score_old: bool = False  # something before the update reads old log-probs


class Policy:
    """The trained shards, their optimizer, the position of the schedule and the KL coefficient."""

    def __init__(
        self,
        trainable: Trainable,
        scoring: Scoring,
        settings: PolicySettings,
        schedule: LRSchedule,
        kl: KLController,
        phases: Phases,
    ) -> None:
        self.trainable = trainable
        self.scoring = scoring
        self.settings = settings
        self.schedule = schedule
        self.kl = kl
        self.phases = phases
        self.optimizer_steps = 0  # finished ones; skipped steps do not count
        self.skipped_steps = 0
        self.steps_over_stop = 0  # consecutive steps over mismatch_stop

    @phase("old_log_prob")
    def score_old(self, batch: Batch, step: int) -> Batch:
        """The batch with `old_logprobs`, unless the update can take them from its own pass.

        All ranks join. Needed at the first step, wherever a rollout makes several optimizer steps,
        and where the batch is marked or charged by them before the update.
        """
        share = self.settings.top_entropy_share
        if share < 1.0:
            return score_high_entropy(self.trainable.chunks, batch, self.scoring, share)
        alone = len(batch.mini_batches) * self.settings.iterations == 1
        if alone and step > 1 and not self.settings.always_score_old:
            return batch
        return batch.with_values("old_logprobs", score(self.trainable.chunks, batch, self.scoring))

    @phase("update_actor")
    def update(self, batch: Batch) -> UpdateMetrics:
        """All optimizer steps of the rollout and their metrics (update_metrics.py says which are
        means and which sums). All ranks join. Raises MismatchStop before the optimizer moves."""
        metrics = UpdateMetrics(kl_coef=self.kl.beta, bc_coef=batch.imitation_weight)
        scored = all("old_logprobs" in micro.values for micro in batch.micro_batches)
        if scored:
            self._alarm(reduce_sums(_mismatch(batch.micro_batches), self.scoring.context))
        for _ in range(self.settings.iterations):
            for mini in batch.mini_batches:
                self._optimizer_step(mini, metrics, alarm=not scored)
        self.kl.update(metrics.as_metrics().get("kl/ref_k3"))
        return metrics

    def _optimizer_step(self, mini: MiniBatch, metrics: UpdateMetrics, *, alarm: bool) -> None:
        if mini.is_empty:
            log.warn("no sample can be trained on, each failed or was not rated: update skipped")
            metrics.skipped += 1  # every rank sees the same counts, so all of them skip
            self.skipped_steps += 1
            return
        objective = self._objective()

        def loss(
            logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return objective.of(logprobs, entropy, micro, mini)

        context = self.scoring.context
        sums = forward_backward(
            self.trainable,
            mini.all_micro_batches,
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

    def _objective(self) -> Objective:
        """The objective with the KL coefficient of this step."""
        objective = self.settings.objective
        if not objective.kl_in_loss:
            return objective
        return replace(objective, settings=replace(objective.settings, beta=self.kl.beta))

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
