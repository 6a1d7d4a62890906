"""Behaviour cloning on reference answers, for rewards too sparse to start from.

It exists because a group without one correct answer has advantage 0 everywhere: a few steps towards
known answers make the first reward possible. Its weight goes to exactly 0, so the end of a run is
plain policy optimisation. Left out: where the answers come from and how they are packed.
"""

import torch

from megagrpo.algo.losses import LossOutput
from megagrpo.algo.segments import check_token_shapes, flat_mask


def cold_start_loss(
    *, logprobs: torch.Tensor, mask: torch.Tensor, total_tokens: int, weight: float
) -> LossOutput:
    """This micro-batch's share of the cross-entropy on reference answers.

        loss = weight * sum over answer tokens of -logprob / total_tokens

    logprobs [...] float32 or float64 with gradient; mask of its shape, 1 on tokens of reference
    answers; masked entries may hold anything, NaN included. total_tokens (the denominator): tokens
    of all reference answers in the whole optimizer step, all ranks. Sums: bc_loss (without the
    weight) and bc_tokens. Raises ValueError for shapes that differ or a mask not 0/1. Mixed with
    the policy loss as in DAPG, arXiv 1709.10087, sec. IV.
    """
    check_token_shapes(logprobs.shape, mask=mask)
    flat = flat_mask(mask)
    nats = -torch.where(flat, logprobs.reshape(-1), 0.0).sum() / max(total_tokens, 1)
    return LossOutput(loss=weight * nats, sums={"bc_loss": nats.detach(), "bc_tokens": flat.sum()})


def annealed_weight(*, weight: float, steps_total: int, done: int) -> float:
    """The weight after `done` steps: linear from `weight` to exactly 0 at `steps_total`.

    Raises ValueError for a negative weight, steps_total < 1 or done < 0.
    """
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"cold-start weight {weight} must be a number from 0")
    if steps_total < 1 or done < 0:
        raise ValueError(
            f"cold-start weight is annealed over steps_total={steps_total} steps, done={done}; "
            "choose steps_total >= 1 and done >= 0"
        )
    return weight * max(steps_total - done, 0) / steps_total
