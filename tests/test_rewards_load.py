"""Async rewards under load: exact counts, bounded concurrency, retries, time limits that hold."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megagrpo.rewards.base import DEFAULT_CONCURRENCY, RewardSpec
from megagrpo.rewards.runner import RewardRunner
from tests.reward_tools import totals

Make = Callable[..., RewardRunner]


@pytest.fixture
def make() -> Iterator[Make]:
    runners: list[RewardRunner] = []

    def build(function: Any, **settings: Any) -> RewardRunner:
        runners.append(RewardRunner([RewardSpec(function.__name__, function, **settings)]))
        return runners[-1]

    yield build
    for runner in runners:
        runner.close()


def collected(runner: RewardRunner, *groups: list[str]) -> list[list[float | None]]:
    for key, group in enumerate(groups):
        runner.submit(key, ["p"] * len(group), group, {})
    return [totals(scores) for scores in runner.collect().values()]


def kind(number: int) -> str:
    """5 of a hundred raise, 5 hang."""
    return {3: "raise", 13: "hang"}.get(number % 20, str(number))


@pytest.mark.parametrize("group_size", [1, 8])
def test_a_thousand_async_rewards_with_raising_and_hanging_ones_have_exact_counts(
    make: Make, group_size: int
) -> None:
    """PROC-8 under load: 5 % raise, 5 % hang; what hangs takes its group along (it is one call),
    what raises only itself; all within the time limit of one call and a little."""

    async def judge(prompts: list[str], completions: list[str]) -> list[float]:
        await asyncio.sleep(0.01)
        if "hang" in completions:
            await asyncio.sleep(3600.0)
        if "raise" in completions:
            raise ConnectionError("busy")
        return [float(text) for text in completions]

    texts = [kind(number) for number in range(1000)]
    groups = [texts[start : start + group_size] for start in range(0, 1000, group_size)]
    runner = make(judge, timeout_s=2.0)
    start = time.perf_counter()
    found = collected(runner, *groups)
    assert time.perf_counter() - start < 2.0 + 3.0
    errors = timeouts = 0
    for group, scores in zip(groups, found, strict=True):
        hangs = "hang" in group
        for text, score in zip(group, scores, strict=True):
            assert score == (None if hangs or text == "raise" else float(text))
            timeouts += hangs
            errors += not hangs and text == "raise"
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts) == (errors, timeouts)
    if group_size == 1:
        assert (errors, timeouts) == (50, 50)


@pytest.mark.parametrize(("concurrency", "most"), [(3, 3), (DEFAULT_CONCURRENCY, 40)])
def test_no_more_groups_are_in_flight_than_allowed(make: Make, concurrency: int, most: int) -> None:
    inside, seen = [0], [0]

    async def counts(prompts: list[str], completions: list[str]) -> list[float]:
        inside[0] += 1
        seen[0] = max(seen[0], inside[0])
        await asyncio.sleep(0.05)
        inside[0] -= 1
        return [0.0]

    runner = make(counts, concurrency=concurrency, timeout_s=20.0)
    assert collected(runner, *[["a"]] * 40) == [[0.0]] * 40
    assert seen[0] == most


def test_waiting_for_a_slot_is_not_time_of_the_call(make: Make) -> None:
    """12 calls of 0.2 s one after the other take 2.4 s; none of them is over its 0.6."""

    async def slow(prompts: list[str], completions: list[str]) -> list[float]:
        await asyncio.sleep(0.2)
        return [1.0]

    runner = make(slow, concurrency=1, timeout_s=0.6)
    assert collected(runner, *[["a"]] * 12) == [[1.0]] * 12
    assert runner.take_counts().timeouts == 0


def test_what_hangs_gives_its_slot_back(make: Make) -> None:
    async def hangs(prompts: list[str], completions: list[str]) -> list[float]:
        if completions == ["hang"]:
            await asyncio.sleep(3600.0)
        return [1.0]

    runner = make(hangs, concurrency=1, timeout_s=0.3)
    assert collected(runner, ["hang"], ["a"], ["hang"], ["b"]) == [[None], [1.0], [None], [1.0]]


@pytest.mark.parametrize("how", ["blocks", "holds on"])
def test_what_cannot_be_cancelled_costs_its_group_and_not_those_behind_it(
    make: Make, how: str
) -> None:
    """A call that blocks the loop, and one that swallows its cancellation, with one slot."""

    async def stubborn(prompts: list[str], completions: list[str]) -> list[float]:
        if completions == ["a"]:
            return [1.0]
        end = time.monotonic() + 6.0
        while time.monotonic() < end:
            try:
                time.sleep(6.0) if how == "blocks" else await asyncio.sleep(6.0)
            except asyncio.CancelledError:
                continue
        return [2.0]

    runner = make(stubborn, concurrency=1, timeout_s=0.3)
    start = time.perf_counter()
    assert collected(runner, ["a"], ["hang"], ["a"], ["a"]) == [[1.0], [None], [1.0], [1.0]]
    assert time.perf_counter() - start < 5.0
    assert collected(runner, ["a"]) == [[1.0]]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("size", "retries", "calls", "score"),
    [(1, 0, 1, None), (1, 1, 2, None), (1, 2, 3, 1.0), (1, 5, 3, 1.0), (2, 0, 3, None)],
)
def test_a_raised_error_is_retried_and_only_the_last_failure_counts(
    make: Make, is_async: bool, size: int, retries: int, calls: int, score: float | None
) -> None:
    """The function raises on its first two calls; a group of two is asked together first, then one
    by one."""
    seen: list[list[str]] = []

    def flaky(prompts: list[str], completions: list[str]) -> list[float]:
        seen.append(completions)
        if len(seen) <= 2:
            raise ConnectionError(f"call {len(seen)}")
        return [1.0] * len(completions)

    async def flaky_async(prompts: list[str], completions: list[str]) -> list[float]:
        return flaky(prompts, completions)

    runner = make(flaky_async if is_async else flaky, retries=retries, timeout_s=10.0)
    want = [score] if size == 1 else [None, 1.0]
    assert collected(runner, ["a", "b"][:size]) == [want]
    assert len(seen) == calls
    assert runner.take_counts().errors == want.count(None)
    assert "call 1" in next(iter(runner.tracebacks.values()))


def test_every_try_has_its_own_time_limit(make: Make) -> None:
    """Two tries of 0.4 s fit where a call may take 0.5; a try that hangs is not repeated."""
    seen: list[str] = []

    async def late(prompts: list[str], completions: list[str]) -> list[float]:
        seen.append(completions[0])
        await asyncio.sleep(3600.0 if completions == ["hang"] else 0.4)
        if len(seen) == 1:
            raise ConnectionError("busy")
        return [1.0]

    runner = make(late, retries=3, timeout_s=0.5)
    assert collected(runner, ["a"]) == [[1.0]]
    assert collected(runner, ["hang"]) == [[None]]
    assert seen == ["a", "a", "hang"]
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts) == (0, 1)


def test_sys_exit_in_an_async_reward_fails_its_sample_alone(make: Make) -> None:
    async def leaves(prompts: list[str], completions: list[str]) -> list[float]:
        if "exit" in completions:
            raise SystemExit(3)
        return [1.0] * len(completions)

    runner = make(leaves, timeout_s=20.0)
    assert collected(runner, ["a", "exit"], ["b"]) == [[1.0, None], [1.0]]
    assert runner.take_counts().errors == 1
