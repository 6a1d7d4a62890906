"""From an entry of the config's `rewards` list to a reward that can run, and its limits.

Settings that an entry's kind of reward never reads are refused: `concurrency` belongs to async
functions, `workers` to isolated ones, and a reward model takes none of these.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from megagrpo.config import RewardConfig
from megagrpo.rewards.base import (
    BUILT_IN,
    DEFAULT_CONCURRENCY,
    DEFAULT_WORKERS,
    RewardFunction,
    RewardSpec,
    load_reward,
    reward_name,
)
from megagrpo.rewards.code_tests import code_tests, warn_of_open_doors
from megagrpo.rewards.model import DEFAULT_MAX_TOKENS, RewardModel
from megagrpo.rewards.sandbox import Limits
from megagrpo.types import Sample


def make_spec(
    config: RewardConfig,
    *,
    device: Callable[[], torch.device],
    release: Callable[[], None],
) -> RewardSpec:
    """The reward of an entry; a folder as `path` is a reward model, which computes on `device()`
    and calls `release` afterwards.

    Raises ValueError for what cannot be loaded and for settings without effect.
    """
    if config.path not in BUILT_IN and Path(config.path).is_dir():
        return _model_spec(config, device, release)
    function, known = load_reward(config.path), BUILT_IN.get(config.path)
    if function is code_tests:
        _check_code_entry(config)
    isolate = _isolation(config, function)
    is_async = inspect.iscoroutinefunction(function)
    if config.concurrency is not None and (isolate or not is_async):
        _refuse(config, "concurrency", "the function is not async; use isolate and workers")
    if config.workers is not None and not isolate:
        _refuse(config, "workers", "the reward has no processes; set isolate: true")
    return RewardSpec(
        name=config.name or reward_name(config.path),
        function=function,
        weight=config.weight,
        timeout_s=config.timeout_s,
        kwargs=dict(config.kwargs),
        path=config.path,
        isolate=isolate,
        workers=config.workers or DEFAULT_WORKERS,
        concurrency=config.concurrency or DEFAULT_CONCURRENCY,
        retries=config.retries,
        alone=known is not None and known.alone,
    )


def _check_code_entry(config: RewardConfig) -> None:
    """The limits of unit tests against that of the call, and what this host cannot keep out."""
    seconds = config.kwargs.get("seconds", Limits().seconds)
    if isinstance(seconds, int | float) and seconds + 1 > config.timeout_s:
        raise ValueError(
            f"rewards: timeout_s={config.timeout_s} of {config.path} ends its worker before its "
            f"kwargs.seconds={seconds} are over; raise timeout_s to {seconds + 1} or more"
        )
    if config.kwargs.get("allow_code_execution") is True:
        warn_of_open_doors()


def _isolation(config: RewardConfig, function: RewardFunction) -> bool:
    """Whether the function runs in processes of its own."""
    known = BUILT_IN.get(config.path)
    if known is not None and known.forced and config.isolate is False:
        raise ValueError(
            f"rewards: {config.path} always runs in processes of its own; remove isolate: false"
        )
    isolate = config.isolate
    if isolate is None:
        isolate = known is not None and known.isolate
    if isolate and inspect.iscoroutinefunction(function):
        raise ValueError(
            f"rewards: isolate of {config.path} is for plain functions, this one is async; make it "
            "plain or remove isolate"
        )
    return isolate


def _model_spec(
    config: RewardConfig, device: Callable[[], torch.device], release: Callable[[], None]
) -> RewardSpec:
    """A reward model; its one extra argument is `max_tokens`."""
    for item in fields(config):
        default = item.default if item.default is not MISSING else {}
        if item.name in _CALLS and getattr(config, item.name) != default:
            _refuse(config, item.name, "a reward model runs in this process without a time limit")
    unknown = set(config.kwargs) - {"max_tokens"}
    max_tokens = config.kwargs.get("max_tokens", DEFAULT_MAX_TOKENS)
    if unknown or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(
            f"rewards: kwargs of reward model {config.path} are {dict(config.kwargs)}; it takes "
            "max_tokens, the tokens of one batch, at least 1"
        )
    folder = Path(config.path)
    model = RewardModel(folder, max_tokens=max_tokens, device=device, release=release)
    name = config.name or folder.resolve().name
    return RewardSpec(name, model, weight=config.weight, path=config.path, is_model=True)


_CALLS = ("timeout_s", "isolate", "workers", "concurrency", "retries")


def _refuse(config: RewardConfig, name: str, why: str) -> None:
    value = getattr(config, name)
    raise ValueError(f"rewards: {name}={value} of {config.path} has no effect: {why}")


def check_failed_share(
    samples: Sequence[Sample],
    limit: float,
    tracebacks: Callable[[], Sequence[Mapping[str, str]]],
) -> None:
    """RuntimeError if more than `limit` of the samples failed, with the first traceback.

    `samples` are those of the whole step, the same on every rank, so that all ranks agree whether
    `tracebacks` is called: it gathers every rank's first failure by reward, and all ranks join.
    """
    failed = sum(sample.failed for sample in samples)
    if not samples or failed <= limit * len(samples):
        return
    first: tuple[str, Any] = next(
        ((name, text) for part in tracebacks() for name, text in part.items()),
        ("", "no reward said why"),
    )
    raise RuntimeError(
        f"{failed} of {len(samples)} samples failed, over rollout.max_failed_share={limit}; mend "
        f"the reward or raise it; first failure: reward {first[0]!r} {first[1]}"
    )
