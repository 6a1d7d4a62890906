"""Group-relative advantages in float64.

It exists apart from the losses because one reward per sequence, and groups that lost members, are
where most silent errors of GRPO start. It differs from GRPO's paper in the order of exceptions:
rejected rows and missing rewards leave first, then flat groups and singletons become exactly 0.
Several rewards are summed before or after this; a sum of normalised rewards is not whitened again
over the batch (TRL and GDPO do). Left out: returns over tokens, critics.

Letters: B sequences of the whole rollout (all ranks), K groups, n rows with a reward in a group, R
rewards.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

FLAT_TOLERANCE = 1e-8  # a group is flat if max - min <= this * max(1, max |reward|)
NORMALIZE_NAMES = ("std", "none", "batch")
BASELINE_NAMES = ("mean", "leave_one_out")
COMBINE_NAMES = ("sum_then_normalize", "normalize_then_sum")


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages and what has to be said about the groups they come from.

    Example: rewards (1, 0), (1, 1), groups (0, 0), (4, 4): advantages (0.7071, -0.7071, 0, 0), flat
    (False, False, True, True), group_count 2, zero_variance_count 1, group_std_mean 0.3536.
    """

    advantages: torch.Tensor  # [B] float64, exactly 0 where there is no signal
    flat: torch.Tensor  # [B] bool, the row's group has no signal (flat, singleton or empty)
    group_count: int  # groups with at least one reward
    zero_variance_count: int  # groups of n >= 2 with equal rewards
    singleton_count: int  # groups of n = 1
    empty_count: int  # groups whose rows were all rejected or without reward
    missing_count: int  # valid rows whose reward is missing (NaN) or not finite
    group_std_mean: float  # mean over groups of n >= 2 of the unbiased std; 0 if there is none
    clipped_share: float  # rows changed by `clip` / rows with a reward

    @property
    def zero_variance_share(self) -> float:
        """Groups without variance / groups with a reward (`reward/zero_variance_share`)."""
        return self.zero_variance_count / max(self.group_count, 1)


@dataclass(frozen=True)
class _Groups:
    """Statistics of the K groups, each [K], over rows with a reward."""

    size: torch.Tensor  # float64
    mean: torch.Tensor
    std: torch.Tensor  # unbiased; 0 where n < 2
    flat: torch.Tensor  # bool; by FLAT_TOLERANCE, so singletons and empty groups too


def group_advantages(
    *,
    rewards: torch.Tensor,
    groups: torch.Tensor,
    valid: torch.Tensor,
    normalize: str = "std",
    baseline: str = "mean",
    clip: float | tuple[float, float] | None = None,
    eps: float = 1e-6,
) -> AdvantageResult:
    """Advantage of every sequence within its group.

        A = (r - baseline) / (std + eps)        baseline: mean of the group, or of its other members

    rewards [B] float64, NaN for a missing one; groups [B] int64 ids from the sampler, in any order;
    valid [B] bool, False for rejected, failed or removed rows. All rows of the rollout, of all
    ranks, must be present: std "batch" is taken over every row with a reward, "std" over the group,
    "none" does not divide. Unbiased std, two passes. clip: c for [-c, c], or (low, high).
    Raises ValueError for unknown names, wrong dtypes or shapes.
    GRPO arXiv 2402.03300 sec. 4.1; Dr.GRPO 2503.20783 ("none"); RLOO 2402.14740.
    """
    _check(rewards, groups, valid, normalize, baseline)
    present = valid & torch.isfinite(rewards)
    ids, group = torch.unique(groups, return_inverse=True)
    stats = _group_statistics(rewards, group, present, len(ids))
    deviation = rewards - stats.mean[group]
    if baseline == "leave_one_out":
        # r - mean of the others = (r - mean) n / (n - 1), without a difference of large sums
        deviation = deviation * (stats.size / (stats.size - 1).clamp(min=1))[group]
    if normalize == "std":
        deviation = deviation / (stats.std[group] + eps)
    elif normalize == "batch":
        deviation = deviation / (_unbiased_std(rewards[present]) + eps)
    flat = stats.flat[group]
    advantages = torch.where(present & ~flat, deviation, 0.0)
    clipped = _clip(advantages, clip)
    several = stats.size >= 2
    return AdvantageResult(
        advantages=clipped,
        flat=flat,
        group_count=int((stats.size > 0).sum()),
        zero_variance_count=int((several & stats.flat).sum()),
        singleton_count=int((stats.size == 1).sum()),
        empty_count=int((stats.size == 0).sum()),
        missing_count=int((valid & ~present).sum()),
        group_std_mean=float(stats.std[several].mean()) if bool(several.any()) else 0.0,
        clipped_share=int((clipped != advantages).sum()) / max(int(present.sum()), 1),
    )


def combined_advantages(
    *,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    groups: torch.Tensor,
    valid: torch.Tensor,
    combine: str = "sum_then_normalize",
    normalize: str = "std",
    baseline: str = "mean",
    clip: float | tuple[float, float] | None = None,
    eps: float = 1e-6,
) -> AdvantageResult:
    """Advantage of every sequence out of several rewards.

        sum_then_normalize   A(sum_r weights[r] * rewards[:, r])
        normalize_then_sum   sum_r weights[r] * A(rewards[:, r]), then clip

    rewards [B, R] float64, NaN where a reward does not rate a row: it adds nothing there, and a row
    without any reward is missing. weights [R] float64; the rest as in `group_advantages`, which is
    A. With normalize_then_sum a reward that is flat in a group adds exactly 0 there; `flat` and
    zero_variance_count mean that every reward of weight != 0 is flat; group_std_mean and the other
    counts are those of the weighted sum. Raises ValueError for unknown names, wrong dtypes or
    shapes. GDPO arXiv 2601.05242 (normalize_then_sum).
    """
    _check_combination(rewards, weights, combine)
    rated = torch.isfinite(rewards)
    total = torch.where(rated, rewards * weights, 0.0).sum(1)
    total = torch.where(rated.any(1), total, torch.nan)
    shared = partial(
        group_advantages,
        groups=groups,
        valid=valid,
        normalize=normalize,
        baseline=baseline,
        eps=eps,
    )
    whole = shared(rewards=total, clip=clip)
    if combine == "sum_then_normalize":
        return whole
    advantages, flat = torch.zeros_like(total), torch.ones_like(valid)
    for column, weight in zip(rewards.unbind(1), weights.tolist(), strict=True):
        if weight != 0:
            one = shared(rewards=column)
            advantages, flat = advantages + weight * one.advantages, flat & one.flat
    clipped = _clip(advantages, clip)
    present = valid & torch.isfinite(total)
    return replace(
        whole,
        advantages=clipped,
        flat=flat,
        zero_variance_count=_flat_groups(groups, present, flat),
        clipped_share=int((clipped != advantages).sum()) / max(int(present.sum()), 1),
    )


def _flat_groups(groups: torch.Tensor, present: torch.Tensor, flat: torch.Tensor) -> int:
    """Groups of at least two rows with a reward that are flat."""
    _, group = torch.unique(groups, return_inverse=True)
    return int((torch.bincount(group[present & flat]) >= 2).sum())


def _clip(advantages: torch.Tensor, clip: float | tuple[float, float] | None) -> torch.Tensor:
    if clip is None:
        return advantages
    low, high = (-clip, clip) if isinstance(clip, int | float) else clip
    return advantages.clamp(low, high)


def _group_statistics(
    rewards: torch.Tensor, group: torch.Tensor, present: torch.Tensor, num_groups: int
) -> _Groups:
    """Two passes over the rows with a reward; the others touch nothing."""
    group, rewards = group[present], rewards[present]
    zeros = rewards.new_zeros(num_groups)
    size = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / size.clamp(min=1)
    squares = zeros.index_add(0, group, (rewards - mean[group]).square())
    high = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    low = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    scale = torch.maximum(high.abs(), low.abs()).clamp(min=1.0)
    return _Groups(
        size=size,
        mean=mean,
        std=(squares / (size - 1).clamp(min=1)).sqrt(),
        flat=high - low <= FLAT_TOLERANCE * scale,
    )


def _unbiased_std(values: torch.Tensor) -> torch.Tensor:
    """0 for fewer than two values, where torch gives NaN."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def _check(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    valid: torch.Tensor,
    normalize: str,
    baseline: str,
) -> None:
    """The ValueErrors of `group_advantages`."""
    if normalize not in NORMALIZE_NAMES:
        raise ValueError(f"normalize={normalize!r} is unknown; use one of {NORMALIZE_NAMES}")
    if baseline not in BASELINE_NAMES:
        raise ValueError(f"baseline={baseline!r} is unknown; use one of {BASELINE_NAMES}")
    wanted = {"rewards": torch.float64, "groups": torch.int64, "valid": torch.bool}
    given = {"rewards": rewards, "groups": groups, "valid": valid}
    for name, dtype in wanted.items():
        tensor = given[name]
        if tensor.dtype != dtype or tensor.shape != (len(rewards),):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} "
                f"({len(rewards)},), one entry per sequence"
            )


def _check_combination(rewards: torch.Tensor, weights: torch.Tensor, combine: str) -> None:
    """The ValueErrors of `combined_advantages` that `group_advantages` does not raise."""
    if combine not in COMBINE_NAMES:
        raise ValueError(f"combine={combine!r} is unknown; use one of {COMBINE_NAMES}")
    if rewards.dim() != 2 or rewards.dtype != torch.float64:
        raise ValueError(
            f"rewards are {rewards.dtype} {tuple(rewards.shape)}, expected float64 [B, R], one "
            "column per reward"
        )
    if weights.shape != rewards.shape[1:] or not bool(torch.isfinite(weights).all()):
        raise ValueError(
            f"weights {weights.tolist()} must be {rewards.shape[1]} finite numbers, one per reward"
        )
