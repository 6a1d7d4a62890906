"""Where rewards run inside this process: a thread per plain function, an event loop per async one.

A lane takes calls at once (`submit`) and finishes them one by one (`wait`), giving up on what does
not end. Neither a thread nor a blocked loop can be ended: it stays behind as a daemon until the
process exits, and what waited behind it goes on elsewhere. A function that hangs inside C without
releasing the interpreter lock stops everything here; it belongs into `process_lane.py`.
"""

import asyncio
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from megagrpo.rewards.base import RewardSpec
from megagrpo.rewards.calls import Call, run, run_async

_GRACE = 1.0  # seconds a loop may take to answer, or a cancelled function to let go


class Lane(Protocol):
    """How one reward is run."""

    def submit(self, call: Call) -> None:
        """Take a call; returns at once."""

    def wait(self, call: Call) -> None:
        """Return when the call is done or its time is over; calls are waited for in the order of
        submission."""

    def close(self) -> None:
        """End what is idle."""

    @property
    def replaced(self) -> int:
        """Worker processes that hung or died so far and have a successor."""


class ThreadLane:
    """One plain function: its calls in turn on one daemon thread."""

    replaced = 0

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._spawn(self._work, self._waiting)

    def submit(self, call: Call) -> None:
        """Put it behind the others."""
        self._waiting.put(call)

    def wait(self, call: Call) -> None:
        """Until it is done or over its limit; then its thread is left behind."""
        call.started.wait(call.limit)
        left = (call.start_time or time.monotonic()) + call.limit - time.monotonic()
        try:
            call.done.result(max(left, 0.0))
        except TimeoutError:
            self._abandon()

    def _abandon(self) -> None:
        """Leave the hung thread behind; what waited behind it starts at once, so that a function
        that always hangs costs two time limits a step and not one per group."""
        left_behind, self._waiting = self._waiting, queue.SimpleQueue()
        self._spawn(self._work, self._waiting)
        with suppress(queue.Empty):  # the hung thread may come back and take one meanwhile
            while True:
                waiting = left_behind.get_nowait()
                if waiting is not None:
                    self._spawn(run, waiting)
        left_behind.put(None)

    def close(self) -> None:
        """End the idle thread."""
        self._waiting.put(None)

    @staticmethod
    def _work(waiting: "queue.SimpleQueue[Call | None]") -> None:
        while (call := waiting.get()) is not None:
            run(call)

    @staticmethod
    def _spawn(target: Any, argument: Any) -> None:
        threading.Thread(target=target, args=(argument,), name="reward", daemon=True).start()


class LoopLane:
    """One async function: up to `concurrency` groups at once on an event loop in a daemon thread.

    A group that was asked and raised keeps its slot while its completions are asked alone. Time
    limits are the loop's own; one that blocks it, or holds on to its cancellation, gets the loop
    replaced, and the groups that had not begun move over.
    """

    replaced = 0

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._open: dict[int, _Booking] = {}  # calls that were not waited for, by their id
        self._moving = threading.Lock()
        self._loop = _Loop(spec.concurrency)

    def submit(self, call: Call) -> None:
        """Let it begin as soon as a slot is free."""
        self._place(call)

    def _place(self, call: Call) -> None:
        booking = self._open[id(call)] = _Booking(call, self._loop)
        running = self._run(booking)
        booking.task = asyncio.run_coroutine_threadsafe(running, self._loop.events)

    async def _run(self, booking: "_Booking") -> None:
        async with booking.home.slots:
            with self._moving:
                if self._open.get(id(booking.call)) is not booking:
                    return  # it begins elsewhere
                booking.call.begin()
            await run_async(booking.call)

    def wait(self, call: Call) -> None:
        """Until it is done or over its limit; see the class for what happens then."""
        while not call.started.wait(_GRACE):
            # Calls before it were waited for, so a slot comes free unless the loop is blocked.
            home = self._open[id(call)].home
            if not home.answers(max(call.limit, _GRACE)):
                self._replace(home)
        home = self._open[id(call)].home
        late = _not_done(call.done, call.start_time + call.limit - time.monotonic())
        if late and (not home.answers(_GRACE) or _not_done(call.done, _GRACE)):
            self._replace(home)
        del self._open[id(call)]

    def _replace(self, hung: "_Loop") -> None:
        if hung is not self._loop:
            return  # its successor works already
        self._loop = _Loop(self._spec.concurrency)
        with self._moving:
            for booking in list(self._open.values()):
                if not booking.call.started.is_set():
                    self._place(booking.call)

    def close(self) -> None:
        """End the idle loop."""
        self._loop.events.call_soon_threadsafe(self._loop.events.stop)


class _Loop:
    """An event loop in a daemon thread and its slots."""

    def __init__(self, concurrency: int) -> None:
        self.events = asyncio.new_event_loop()
        self.slots = asyncio.Semaphore(concurrency)
        threading.Thread(target=self.events.run_forever, name="reward", daemon=True).start()

    def answers(self, seconds: float) -> bool:
        """Whether the loop gets to a new task within that time."""
        alive = threading.Event()
        self.events.call_soon_threadsafe(alive.set)
        return alive.wait(seconds)


@dataclass
class _Booking:
    """A call on a loop; another loop means another booking."""

    call: Call
    home: _Loop
    task: "Future[None] | None" = None  # held, since a loop holds its tasks weakly


def _not_done(done: "Future[None]", seconds: float) -> bool:
    try:
        done.result(max(seconds, 0.0))
    except TimeoutError:
        return True
    return False
