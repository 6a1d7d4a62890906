"""One group before one reward: what is asked, what came back, and who keeps the time.

The rule of every lane: the whole group is asked once; if that raises, each completion is asked
alone, up to 1 + `retries` times, and only its last failure counts (a group of one has had its first
try). A call may take `timeout_s`, a group with all its tries (1 + retries) x that; a call that
hangs is not repeated, since it has cost its time already.

The broad excepts of the lanes are here: what is called is somebody else's code.
"""

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megagrpo.rewards.base import RewardSpec, read_scores

Answers = list[float | None | str]
"""Per completion its score, None, or the complaint about it."""


@dataclass
class Call:
    """One group before one reward; a lane fills `answers` and resolves `done`."""

    spec: RewardSpec
    arguments: Mapping[str, Sequence[Any]]
    size: int
    submitted: float = field(default_factory=time.monotonic)
    started: threading.Event = field(default_factory=threading.Event)
    start_time: float = 0.0
    done: Future[None] = field(default_factory=Future)
    answers: dict[int, float | None | str] = field(default_factory=dict)  # text is a complaint
    complaint: str = ""  # what the whole group met, though each completion alone may pass

    def begin(self) -> None:
        """The clock of `limit` starts."""
        self.start_time = time.monotonic()
        self.started.set()

    @property
    def limit(self) -> float:
        """Seconds for the group with all its tries."""
        return self.spec.timeout_s * (1 + self.spec.retries)

    @property
    def seconds_left(self) -> float:
        """What a try that starts now may take; not positive when the group's time is over."""
        left = self.start_time + self.limit - time.monotonic()
        return min(left, self.spec.timeout_s)

    @property
    def tries_alone(self) -> int:
        """How often one completion is asked by itself after the group raised."""
        return self.spec.retries + (self.size > 1)

    def part(self, place: int | None = None) -> dict[str, Any]:
        """Keyword arguments for the whole group, or for one completion of it; lists of their own.

        Example: size 2, place 1: {"completions": ["b"], ...} of {"completions": ["a", "b"], ...}.
        """
        chosen = slice(None) if place is None else slice(place, place + 1)
        lists = {name: list(values[chosen]) for name, values in self.arguments.items()}
        return {**lists, **self.spec.kwargs}

    def ask(self, place: int | None = None) -> Any:
        """Call the function here and now."""
        return self.spec.function(**self.part(place))

    def note(self, answers: Answers, place: int | None = None) -> None:
        """Keep the answers for the whole group or for one completion."""
        places = range(self.size) if place is None else range(place, place + 1)
        self.answers.update(zip(places, answers, strict=True))

    def raised(self, text: str, place: int | None = None) -> None:
        """Keep a traceback; of a group of one it is that completion's too."""
        if place is None:
            self.complaint = text
        if place is not None or self.size == 1:
            self.answers[place or 0] = text


def attempt(function: Callable[..., Any], arguments: Mapping[str, Any], size: int) -> Answers | str:
    """The function's answers for `size` completions, or the text of what it raised.

    sys.exit inside it must not end the caller either; a plain function may hand back a coroutine.
    """
    try:
        answer = function(**arguments)
        return read_scores(asyncio.run(answer) if inspect.iscoroutine(answer) else answer, size)
    except BaseException:
        return f"raised\n{traceback.format_exc()}"


@contextmanager
def resolving(call: Call) -> Iterator[None]:
    """Resolves `call.done` at the end; a fault of ours in between is raised where it is waited for,
    which would otherwise wait for ever."""
    try:
        yield
    except BaseException as error:
        call.done.set_exception(error)
    else:
        call.done.set_result(None)


def run(call: Call) -> None:
    """Ask a plain function in this thread, by the rule of this module."""
    call.begin()
    if not _asked(call, None, call.size):
        for place in range(call.size):
            for _ in range(call.tries_alone):
                if _asked(call, place, 1):
                    break
    call.done.set_result(None)


def _asked(call: Call, place: int | None, size: int) -> bool:
    answers = attempt(call.spec.function, call.part(place), size)
    if isinstance(answers, str):
        call.raised(answers, place)
        return False
    call.note(answers, place)
    return True


async def run_async(call: Call) -> None:
    """Ask an async function, by the rule of this module; `call.begin` was called.

    What is not answered in time is left out of `answers`.
    """
    if await _asked_async(call, None, call.size) is False:
        await asyncio.gather(*(_alone(call, place) for place in range(call.size)))
    call.done.set_result(None)


async def _alone(call: Call, place: int) -> None:
    for _ in range(call.tries_alone):
        if await _asked_async(call, place, 1) is not False:
            return


async def _asked_async(call: Call, place: int | None, size: int) -> bool | None:
    """True if it answered, False if it raised, None if its time was over."""
    clock = asyncio.timeout(max(call.seconds_left, 0.0))
    try:
        async with clock:
            answer = await call.ask(place)
        call.note(read_scores(answer, size), place)
        return True
    # A CancelledError that is not the clock's is the function's own.
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError):
        if clock.expired():
            # What it raised before stays no answer: it was being asked again.
            if place is not None:
                call.answers.pop(place, None)
            return None
        call.raised(f"raised\n{traceback.format_exc()}", place)
        return False
