"""Which tokens are uncertain enough to be learned from: a quantile of the whole optimizer step.

It stands apart because a quantile taken inside a micro-batch or a rank would make the update depend
on the cut (LOSS-23). The caller gathers the entropies of all valid tokens of all ranks; a rank
without tokens joins that gather with an empty tensor. Left out: the gather itself, top-k per
sequence.

"Beyond the 80/20 rule", arXiv 2506.01939; TRL calls 1 - quantile `top_entropy_quantile`.
"""

import torch

ROUNDING = 64  # eps; a log-softmax over a large vocabulary loses no more


def entropy_threshold(entropies: torch.Tensor, quantile: float) -> float:
    """The `quantile` of the entropies, linearly interpolated in float64.

    entropies [n] nats of all valid tokens of the whole optimizer step, all ranks, in any order;
    n is not limited (torch.quantile is, to 2^24). Entries that are not finite are left out. Returns
    -inf for none, so that nothing is dropped. Raises ValueError for a quantile outside of 0..1.
    Keeping the upper fifth is quantile 0.8.
    """
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"entropy quantile {quantile} is outside 0..1; 0.8 keeps the upper fifth")
    values = entropies.detach().reshape(-1)
    values = values[torch.isfinite(values)]
    if len(values) == 0:
        return -torch.inf
    place = quantile * (len(values) - 1)
    below = min(int(place), len(values) - 1)
    # A sort, because torch's selection (kthvalue) takes quadratic time on descending values.
    low, high = values.sort().values[[below, min(below + 1, len(values) - 1)]].tolist()
    return low + (place - below) * (high - low)


def high_entropy_tokens(
    *, entropies: torch.Tensor, mask: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Which tokens keep their policy term: valid ones at or over the threshold; ties are kept.

    entropies [...] nats, mask of its shape (bool or 0/1); returns bool of that shape. First tokens
    of one prompt have equal entropies but for rounding, which differs between layouts, so what is
    below the threshold by rounding only (64 eps of the entropies' dtype) counts as a tie.
    """
    slack = ROUNDING * torch.finfo(entropies.dtype).eps * max(1.0, abs(threshold))
    return (entropies.detach().double() >= threshold - slack) & mask.bool()
