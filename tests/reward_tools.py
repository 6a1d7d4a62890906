"""What the tests of rewards share."""

from collections.abc import Sequence

import torch

from megagrpo.config import RewardConfig
from megagrpo.rewards.base import RewardSpec
from megagrpo.rewards.entries import make_spec
from megagrpo.rewards.runner import SampleScore


def totals(scores: Sequence[SampleScore]) -> list[float | None]:
    """The total of every sample of a group."""
    return [score.total for score in scores]


def cpu_spec(config: RewardConfig) -> RewardSpec:
    """The reward of an entry, as a run on a CPU has it."""
    return make_spec(config, device=lambda: torch.device("cpu"), release=lambda: None)
