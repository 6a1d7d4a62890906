"""Runs the rewards of finished groups while other groups still generate.

Every plain function has one daemon thread that takes its groups in turn, so it need not be
thread-safe; async functions share one event loop, all groups at once. What a reward does wrong
costs samples, never the run:

- it raises: it is asked again one completion at a time, and those that raise again are failed;
- it answers another number of scores, or something that is no finite number: those are failed
  (None and NaN mean "not rated" and are not failures);
- it takes longer than `timeout_s`: what it has not scored yet is failed. A thread cannot be ended,
  so a function that hangs keeps its daemon thread until the process exits; the groups that waited
  behind it go on at once on threads of their own.

The first traceback of a reward is logged, all failures are counted. Left out: processes of their
own (a reward that hangs inside C without releasing the interpreter lock, e.g. a runaway regular
expression, still stops everything) and reward models.
"""

import asyncio
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megagrpo import log
from megagrpo.rewards.base import RewardSpec, accepted_arguments, check_columns, read_scores


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
        self._calls: dict[Hashable, list[_Call]] = {}
        self._columns: frozenset[str] | None = None  # those that `_wanted` was made for
        self._wanted: list[set[str]] = []  # arguments of every reward
        self._errors, self._timeouts, self._waited = 0, 0, 0.0

    def submit(
        self,
        group_key: Hashable,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        """Start scoring one group; returns at once.

        Every argument has one entry per completion; `columns` may hold `completion_ids` and
        `finished`. Raises ValueError on lists of other lengths or a column that a reward lacks.
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
            calls.append(_Call(spec, arguments, len(completions)))
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
        counts = RewardCounts(self._errors, self._timeouts, self._waited)
        self._errors, self._timeouts, self._waited = 0, 0, 0.0
        return counts

    def close(self) -> None:
        """End the idle threads; whatever hangs stays behind as a daemon."""
        for lane in self._lanes:
            lane.close()

    def _read_signatures(self, columns: Mapping[str, Any]) -> None:
        check_columns(self.specs, set(columns) - {"completion_ids", "finished"})
        offered = {*columns, "prompts", "completions"}
        self._wanted = [
            accepted_arguments(spec.function, offered) - set(spec.kwargs) for spec in self.specs
        ]
        self._columns = frozenset(columns)

    def _await(self, call: "_Call", lane: "_ThreadLane | _LoopLane") -> list[float | None | str]:
        """Its scores, or per completion the complaint; counts and reports the complaints."""
        limit = call.spec.timeout_s
        call.started.wait(limit)
        left = (call.start_time or time.monotonic()) + limit - time.monotonic()
        try:
            call.done.result(max(left, 0.0))
        except TimeoutError:
            lane.abandon(call)
        answers = dict(call.answers)  # a late worker may still write into the original
        late = [place for place in range(call.size) if place not in answers]
        self._timeouts += len(late)
        self._errors += sum(isinstance(answer, str) for answer in answers.values())
        answers |= dict.fromkeys(late, f"did not answer within {limit} s")
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


@dataclass
class _Call:
    """One group before one reward; a worker fills `answers` and resolves `done`."""

    spec: RewardSpec
    arguments: Mapping[str, Sequence[Any]]
    size: int
    started: threading.Event = field(default_factory=threading.Event)
    start_time: float = 0.0
    done: Future[None] = field(default_factory=Future)
    task: Future[None] | None = None  # of an async function
    answers: dict[int, float | None | str] = field(default_factory=dict)  # text is a complaint
    complaint: str = ""  # what the whole group met, though each completion alone may pass

    def begin(self) -> None:
        self.start_time = time.monotonic()
        self.started.set()

    def ask(self, place: int | None = None) -> Any:
        """Call the function with the whole group, or with one completion of it."""
        part = slice(None) if place is None else slice(place, place + 1)
        arguments = {name: list(values[part]) for name, values in self.arguments.items()}
        return self.spec.function(**arguments, **self.spec.kwargs)

    def note(self, answer: Any, place: int | None = None) -> None:
        """Read an answer for the whole group or for one completion."""
        places = range(self.size) if place is None else range(place, place + 1)
        self.answers.update(zip(places, read_scores(answer, len(places)), strict=True))

    def raised(self, place: int | None = None) -> None:
        """Keep the traceback of the exception that is being handled."""
        complaint = f"raised\n{traceback.format_exc()}"
        if place is None:
            self.complaint = complaint
        else:
            self.answers[place] = complaint


def _lane(spec: RewardSpec) -> "_ThreadLane | _LoopLane":
    return _LoopLane() if inspect.iscoroutinefunction(spec.function) else _ThreadLane()


class _ThreadLane:
    """One plain function: its calls in turn on one daemon thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._spawn(self._work, self._waiting)

    def submit(self, call: _Call) -> None:
        self._waiting.put(call)

    def abandon(self, call: _Call) -> None:
        """Leave the hung thread behind; what waited behind it starts at once, so that a function
        that always hangs costs two time limits a step and not one per group."""
        left_behind, self._waiting = self._waiting, queue.SimpleQueue()
        self._spawn(self._work, self._waiting)
        while not left_behind.empty():
            waiting = left_behind.get()
            if waiting is not None:
                self._spawn(_run, waiting)
        left_behind.put(None)

    def close(self) -> None:
        self._waiting.put(None)

    @staticmethod
    def _work(waiting: "queue.SimpleQueue[_Call | None]") -> None:
        while (call := waiting.get()) is not None:
            _run(call)

    @staticmethod
    def _spawn(target: Any, argument: Any) -> None:
        threading.Thread(target=target, args=(argument,), name="reward", daemon=True).start()


def _run(call: _Call) -> None:
    call.begin()
    try:
        call.note(_settled(call.ask()))
    except BaseException:  # somebody else's code; sys.exit in it must not end the thread either
        call.raised()
        for place in range(call.size):
            try:
                call.note(_settled(call.ask(place)), place)
            except BaseException:
                call.raised(place)
    call.done.set_result(None)


def _settled(answer: Any) -> Any:
    """The answer itself; a plain function may hand back a coroutine of somebody's."""
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


class _LoopLane:
    """One async function: all calls at once on an event loop in a daemon thread."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="reward", daemon=True).start()

    def submit(self, call: _Call) -> None:
        call.task = asyncio.run_coroutine_threadsafe(_run_async(call), self._loop)

    def abandon(self, call: _Call) -> None:
        """Cancel the call; a loop that does not answer is blocked and gets a successor."""
        assert call.task is not None, "an async call without a task"
        call.task.cancel()
        alive = threading.Event()
        self._loop.call_soon_threadsafe(alive.set)
        if not alive.wait(1.0):
            self._start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _run_async(call: _Call) -> None:
    async def alone(place: int) -> None:
        try:
            call.note(await call.ask(place), place)
        except Exception:
            call.raised(place)

    call.begin()
    try:
        call.note(await call.ask())
    except Exception:
        call.raised()
        await asyncio.gather(*(alone(place) for place in range(call.size)))
    call.done.set_result(None)
