"""Log-probs of a batch without gradients: of the policy before its update, and of the reference.

Both use one `Scoring`, so that temperature and vocabulary cannot differ between the passes. Left
out: the pass with gradients (policy.py).

Letters: T packed tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megagrpo.algo.entropy import entropy_threshold, high_entropy_tokens
from megagrpo.model.schedule import forward_logprobs, forward_logprobs_and_entropies
from megagrpo.parallel import collectives
from megagrpo.parallel.context import ParallelContext
from megagrpo.trainer.batch import Batch, MiniBatch
from megagrpo.trainer.phases import Phases, phase


@dataclass(frozen=True)
class Scoring:
    """How logits become log-probs; the same for policy, reference and engine."""

    context: ParallelContext
    temperature: float
    valid_vocab: int


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


def score_high_entropy(
    chunks: Sequence[torch.nn.Module], batch: Batch, scoring: Scoring, share: float
) -> Batch:
    """The batch with `old_logprobs` and `high_entropy` [T] bool; all ranks of the world join.

    True marks the `share` of an optimizer step's sampled tokens, over all ranks, whose entropy is
    highest before the update; tokens at the threshold count. arXiv 2506.01939.
    """
    pairs = forward_logprobs_and_entropies(
        chunks,
        batch.micro_batches,
        context=scoring.context,
        temperature=scoring.temperature,
        valid_vocab=scoring.valid_vocab,
    )
    entropies = iter([pair[:, 1] for pair in pairs])
    marks = []
    for mini in batch.mini_batches:
        own = [next(entropies) for _ in mini.micro_batches]
        threshold = entropy_threshold(_of_all_ranks(own, mini, scoring.context), 1.0 - share)
        marks += [
            high_entropy_tokens(
                entropies=entropy, mask=micro.mask.to(entropy.device), threshold=threshold
            )
            for entropy, micro in zip(own, mini.micro_batches, strict=True)
        ]
    scored = batch.with_values("old_logprobs", [pair[:, 0] for pair in pairs])
    return scored.with_values("high_entropy", marks)


def _of_all_ranks(
    own: Sequence[torch.Tensor], mini: MiniBatch, context: ParallelContext
) -> torch.Tensor:
    """Entropies of the optimizer step's sampled tokens, [N]; all ranks of the world join."""
    sampled = [
        values[micro.mask.to(values.device)].cpu()
        for values, micro in zip(own, mini.micro_batches, strict=True)
    ]
    return torch.cat(collectives.gather_from_replicas(torch.cat(sampled), context))
