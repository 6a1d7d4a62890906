"""Runs the rewards of finished groups while other groups still generate.

A plain function has one thread that takes its groups in turn, so it need not be thread-safe; with
`isolate` it has worker processes instead; async functions share one event loop, many groups at
once; a reward model scores when all groups are there. What a reward does wrong costs samples, never
the run:

- it raises: it is asked again one completion at a time, and those that raise again, `retries`
  times over, are failed;
- it answers another number of scores, or something that is no finite number: those are failed
  (None and NaN mean "not rated" and are not failures);
- it takes longer than `timeout_s` (a group with retries: (1 + retries) x that): what it has not
  scored yet is failed;
- its worker process dies: the completion that ended it is failed, the worker is replaced.

The first traceback of a reward is logged, all failures are counted.
"""

import inspect
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megagrpo import log
from megagrpo.rewards.base import RewardSpec, accepted_arguments, check_columns
from megagrpo.rewards.calls import Answers, Call
from megagrpo.rewards.lanes import Lane, LoopLane, ThreadLane
from megagrpo.rewards.model import ModelLane, RewardModel
from megagrpo.rewards.process_lane import ProcessLane


@dataclass(frozen=True)
class SampleScore:
    """What the rewards say about one completion."""

    rewards: Mapping[str, float | None]  # by reward name; None is not rated or failed
    total: float | None  # sum of weight x value over the rated ones; None if there is none
    failed: bool  # a reward raised, hung or answered nonsense: no total


@dataclass(frozen=True)
class RewardCounts:
    """Failures since the last `take_counts`; a sample counts once per reward that failed it."""

    errors: int  # raised or answered nonsense
    timeouts: int
    wait_seconds: float = 0.0  # that `collect` waited; what ran during generation costs nothing
    workers_replaced: int = 0  # processes that hung or died


class RewardRunner:
    """Scores groups in the background; `collect` hands them out in the order of submission.

    Example: submit(7, ["2+2="] * 2, ["4", "5"], {"answer": ["4", "4"], "finished": [True, True]})
    with exact_match of weight 1, then collect() is {7: [SampleScore({"exact_match": 1.0}, 1.0,
    False), SampleScore({"exact_match": 0.0}, 0.0, False)]}.
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards have the same name twice: {names}; name them apart")
        self.specs = tuple(specs)
        self.tracebacks: dict[str, str] = {}  # first failure of every reward
        self._lanes = [_lane(spec) for spec in specs]
        self._calls: dict[Hashable, list[Call]] = {}
        self._columns: frozenset[str] | None = None  # those that `_wanted` was made for
        self._wanted: list[set[str]] = []  # arguments of every reward
        self._errors, self._timeouts, self._waited, self._replaced = 0, 0, 0.0, 0

    def submit(
        self,
        group_key: Hashable,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        """Start scoring one group; returns at once.

        Every argument has one entry per completion; `columns` may hold `completion_ids`,
        `finished` and `messages`. Raises ValueError on lists of other lengths or a column that a
        reward lacks.
        """
        offered = {**columns, "prompts": prompts, "completions": completions}
        for name, values in offered.items():
            if len(values) != len(completions):
                raise ValueError(
                    f"group {group_key}: {len(completions)} completions but {len(values)} {name}"
                )
        assert group_key not in self._calls, f"group {group_key} was submitted twice"
        if self._columns != frozenset(columns):
            self._read_signatures(columns)
        calls = []
        for spec, wanted, lane in zip(self.specs, self._wanted, self._lanes, strict=True):
            arguments = {name: offered[name] for name in offered if name in wanted}
            calls.append(Call(spec, arguments, len(completions)))
            lane.submit(calls[-1])
        self._calls[group_key] = calls

    def collect(self) -> dict[Hashable, list[SampleScore]]:
        """Wait for all groups; scores by group, in the order of submission and of the group."""
        start = time.perf_counter()
        collected, self._calls = self._calls, {}
        scores = {}
        for key, calls in collected.items():
            by_reward = [
                self._await(call, lane) for call, lane in zip(calls, self._lanes, strict=True)
            ]
            scores[key] = [self._score(answers) for answers in zip(*by_reward, strict=True)]
        self._waited += time.perf_counter() - start
        return scores

    def take_counts(self) -> RewardCounts:
        """Failures since the last call; starts anew from 0."""
        replaced = sum(lane.replaced for lane in self._lanes)
        since = replaced - self._replaced
        counts = RewardCounts(self._errors, self._timeouts, self._waited, since)
        self._errors, self._timeouts, self._waited, self._replaced = 0, 0, 0.0, replaced
        return counts

    def close(self) -> None:
        """End idle threads and workers; a thread that hangs stays behind as a daemon."""
        for lane in self._lanes:
            lane.close()

    def _read_signatures(self, columns: Mapping[str, Any]) -> None:
        check_columns(self.specs, set(columns) - {"completion_ids", "finished", "messages"})
        offered = {*columns, "prompts", "completions"}
        self._wanted = [
            accepted_arguments(spec.function, offered) - set(spec.kwargs) for spec in self.specs
        ]
        self._columns = frozenset(columns)

    def _await(self, call: Call, lane: Lane) -> Answers:
        """Its scores, or per completion the complaint; counts and reports the complaints."""
        lane.wait(call)
        answers = dict(call.answers)  # a late worker may still write into the original
        late = [place for place in range(call.size) if place not in answers]
        self._timeouts += len(late)
        self._errors += sum(isinstance(answer, str) for answer in answers.values())
        answers |= dict.fromkeys(late, f"did not answer within {call.spec.timeout_s} s")
        complaint = call.complaint or next((a for a in answers.values() if isinstance(a, str)), "")
        if complaint and call.spec.name not in self.tracebacks:
            self.tracebacks[call.spec.name] = complaint
            log.warn(
                f"reward {call.spec.name!r} {complaint}\n(further failures of it are only counted)",
                all_ranks=True,
            )
        return [answers[place] for place in range(call.size)]

    def _score(self, answers: Sequence[float | None | str]) -> SampleScore:
        """One completion's scores, one per reward in the order of the specs."""
        pairs = list(zip(self.specs, answers, strict=True))
        rewards = {spec.name: None if isinstance(a, str) else a for spec, a in pairs}
        if any(isinstance(answer, str) for answer in answers):
            return SampleScore(rewards, None, failed=True)
        rated = [spec.weight * a for spec, a in pairs if a is not None and not isinstance(a, str)]
        return SampleScore(rewards, sum(rated) if rated else None, failed=False)


def _lane(spec: RewardSpec) -> Lane:
    if isinstance(spec.function, RewardModel):
        return ModelLane(spec.function)
    if spec.isolate:
        return ProcessLane(spec)
    return LoopLane(spec) if inspect.iscoroutinefunction(spec.function) else ThreadLane()
