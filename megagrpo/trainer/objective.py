"""The loss of one micro-batch: a pack of rollouts or of demonstrations, with its metric sums.

It turns the packed values of `batch.py` into the arguments of the pure functions in algo/. Left
out: what runs the model (policy.py), and where the numbers of a step come from (batch.py).

Letters: T packed tokens, B sequences of one micro-batch.
"""

from dataclasses import dataclass

import torch

from megagrpo.algo.cold_start import cold_start_loss
from megagrpo.algo.corrections import CorrectionSettings, correction_weights, off_policy_keep
from megagrpo.algo.losses import policy_loss
from megagrpo.algo.settings import LossSettings
from megagrpo.trainer.batch import MiniBatch
from megagrpo.trainer.update_metrics import Scalars, micro_batch_sums
from megagrpo.types import MicroBatch


@dataclass(frozen=True)
class Objective:
    """What is minimised over one optimizer step."""

    loss: str
    settings: LossSettings
    correction: CorrectionSettings
    off_policy_threshold: float | None = None  # nats; None keeps every sequence
    kl_in_loss: bool = True  # the coefficient in `settings` follows the controller

    def of(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        micro: MicroBatch,
        mini: MiniBatch,
    ) -> tuple[torch.Tensor, Scalars]:
        """One micro-batch's share of the loss of `mini` and its metric sums, on the last stage."""
        if "demonstration" in micro.values:
            return self._of_demonstrations(logprobs, micro, mini)
        return self._of_rollouts(logprobs, entropy, micro, mini)

    def _of_rollouts(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        micro: MicroBatch,
        mini: MiniBatch,
    ) -> tuple[torch.Tensor, Scalars]:
        values = {name: value.to(logprobs.device) for name, value in micro.values.items()}
        mask = micro.mask.to(logprobs.device)
        sequence, count = sequence_index(micro)
        sequence = sequence.to(logprobs.device)
        old = values.get("old_logprobs", logprobs.detach())
        rollout = values["rollout_logprobs"]
        advantages = per_sequence(values["advantages"], mask, sequence, count)
        correction = correction_weights(
            old_logprobs=old,
            rollout_logprobs=rollout,
            mask=mask,
            sequence=sequence,
            num_sequences=count,
            settings=self.correction,
            advantages=advantages,
        )
        keep = None
        if self.off_policy_threshold is not None:
            keep = off_policy_keep(
                logprobs=logprobs,
                rollout_logprobs=rollout,
                advantages=advantages,
                mask=mask,
                sequence=sequence,
                num_sequences=count,
                threshold=self.off_policy_threshold,
            )
        output = policy_loss(
            name=self.loss,
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            mask=mask,
            sequence=sequence,
            num_sequences=count,
            counts=mini.counts,
            settings=self.settings,
            ref_logprobs=values.get("ref_logprobs"),
            rollout_weights=correction.weights,
            keep=keep,
            token_keep=values.get("high_entropy"),
            prompt_tokens=per_sequence(values["prompt_tokens"], mask, sequence, count),
            entropy=entropy,
        )
        sums = micro_batch_sums(
            output, correction, old_logprobs=old, rollout_logprobs=rollout, mask=mask
        )
        return output.loss, sums

    def _of_demonstrations(
        self, logprobs: torch.Tensor, micro: MicroBatch, mini: MiniBatch
    ) -> tuple[torch.Tensor, Scalars]:
        assert mini.demonstrations is not None, "a pack of demonstrations without their counts"
        output = cold_start_loss(
            logprobs=logprobs,
            mask=micro.mask.to(logprobs.device),
            total_tokens=mini.demonstrations.tokens,
            weight=mini.demonstrations.weight,
        )
        sums = {f"demonstration/{name}": value for name, value in output.sums.items()}
        sums["demonstration/loss"] = output.loss.detach()
        return output.loss, sums


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
