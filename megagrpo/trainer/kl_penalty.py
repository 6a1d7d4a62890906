"""KL to the reference taken from the reward instead of added to the loss.

Every sequence pays beta times the sum of its tokens' KL, estimated from the log-probs before the
update; then advantages are taken anew within the groups. Metrics of rewards stay those of the
reward functions; what was paid has a metric of its own.

Letters: B sequences of the rollout (all ranks).
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megagrpo.algo.kl import kl_sequence_sums
from megagrpo.algo.kl_control import KLController
from megagrpo.parallel import collectives
from megagrpo.parallel.context import ParallelContext
from megagrpo.trainer.batch import AdvantageSettings, Batch, sample_advantages
from megagrpo.trainer.objective import sequence_index


class RewardCharge(Protocol):
    """Something that changes advantages once log-probs are known."""

    def charge(self, batch: Batch) -> Batch:
        """The batch to train on; all ranks join."""


class NoCharge:
    """KL stands in the loss, or nowhere."""

    def charge(self, batch: Batch) -> Batch:
        """The batch as it is."""
        return batch


@dataclass(frozen=True)
class KLCharge:
    """r - beta * sum over tokens of the KL estimate; needs old and reference log-probs."""

    controller: KLController
    estimator: str
    advantage: AdvantageSettings
    context: ParallelContext

    def charge(self, batch: Batch) -> Batch:
        """The batch with advantages of the reduced rewards; all ranks of the world join."""
        sums = torch.zeros(len(batch.samples), dtype=torch.float64)
        for part in collectives.gather_from_replicas(self._own_sums(batch), self.context):
            for row, value in part.items():
                sums[row] = value
        beta = self.controller.beta
        result = sample_advantages(batch.samples, self.advantage, kl_sums=sums, beta=beta)
        trained = batch.trained.double()
        mean_paid = beta * float((sums * trained).sum() / trained.sum().clamp(min=1))
        return replace(batch.with_advantages(result), kl_paid_mean=mean_paid)

    def _own_sums(self, batch: Batch) -> dict[int, float]:
        """Sample -> sum of its tokens' KL in nats, for the samples of this rank's packs."""
        found: dict[int, float] = {}
        for micro in batch.micro_batches:
            sequence, count = sequence_index(micro)
            sums = kl_sequence_sums(
                logprobs=micro.values["old_logprobs"].cpu(),
                ref_logprobs=micro.values["ref_logprobs"].cpu(),
                mask=micro.mask,
                sequence=sequence,
                num_sequences=count,
                estimator=self.estimator,
            )
            pairs = zip(micro.rows, sums.tolist(), strict=True)
            found.update({row: value for row, value in pairs if row >= 0})
        return found
