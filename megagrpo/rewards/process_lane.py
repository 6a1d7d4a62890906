"""Runs a plain function in worker processes: what hangs is ended, what dies is replaced.

The workers are started by exec, never forked from this process, which holds process groups and an
engine. One daemon thread stands for each worker, hands it one group at a time and keeps the time.

- A worker that dies (a crash inside C, os._exit, out of memory) counts as a raise: the completions
  of its group are asked one at a time and only the one that kills is failed.
- One that hangs is killed by its pid, with what it started; then the completions are asked one at a
  time too, sharing a second time limit, and those that hang again are failed.
- What is no reply to the call (its function, or a fork of it, writes into the pipe) counts as a
  death: a score is never taken for that of another call.
- A function that does nothing but hang is not waited for group by group: after two hung groups per
  worker, those that were waiting already are failed unasked.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megagrpo.rewards.base import RewardSpec
from megagrpo.rewards.calls import Call, resolving
from megagrpo.rewards.worker import frame

_START_S = 120.0  # the reward's module may import slowly
_LONGEST = 16 << 20  # bytes of one answer
_LONGEST_POLL_MS = (1 << 31) - 1
_NONSENSE = "something wrote into the pipe of its answers"


class WorkerHungError(Exception):
    """A worker did not answer in time; it is ended."""


class WorkerDiedError(Exception):
    """A worker ended by itself; the message says how."""


class ProcessLane:
    """One plain function in `workers` processes; they start at the first call."""

    def __init__(self, spec: RewardSpec) -> None:
        self._path = _absolute(spec.path)
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.replaced = 0
        self._hung_in_a_row, self._last_hang = 0, 0.0
        self._threads = spec.workers
        for _ in range(spec.workers):
            threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def submit(self, call: Call) -> None:
        """Put it behind the others."""
        self._waiting.put(call)

    def wait(self, call: Call) -> None:
        """Until it is done; every call ends, since its thread ends what hangs."""
        call.done.result()

    def close(self) -> None:
        """End the workers that are idle, the others after their call."""
        for _ in range(self._threads):
            self._waiting.put(None)

    def _serve(self) -> None:
        seat = _Seat(self._path)
        while (call := self._waiting.get()) is not None:
            with resolving(call):
                if not self._hopeless(call):
                    self._ask(call, seat)
        seat.close()

    def _ask(self, call: Call, seat: "_Seat") -> None:
        ended = seat.ended
        _ask_by_rule(call, seat)
        with self._lock:
            self.replaced += seat.ended - ended
            if call.answers:
                self._hung_in_a_row = 0
            else:
                self._hung_in_a_row += 1
                self._last_hang = time.monotonic()

    def _hopeless(self, call: Call) -> bool:
        many = self._hung_in_a_row >= 2 * self._threads
        return many and call.submitted < self._last_hang


def _ask_by_rule(call: Call, seat: "_Seat") -> None:
    """The rule of calls.py and of this module; the clock starts when a worker stands ready."""
    complaint = seat.ready()
    call.begin()
    if complaint:
        call.complaint = complaint
        call.note([complaint] * call.size)
        return
    if call.spec.alone:
        for place in range(call.size):
            call.begin()
            _until_answered(call, seat, place, 1 + call.spec.retries)
        return
    answered = _asked(call, seat, None, call.seconds_left)
    if answered is False:
        for place in range(call.size):
            _until_answered(call, seat, place, call.tries_alone)
    elif answered is None and call.size > 1:
        call.begin()
        for place in range(call.size):
            _asked(call, seat, place, call.seconds_left / (call.size - place))


def _until_answered(call: Call, seat: "_Seat", place: int, tries: int) -> None:
    for _ in range(tries):
        if _asked(call, seat, place, call.seconds_left) is not False:
            return


def _asked(call: Call, seat: "_Seat", place: int | None, seconds: float) -> bool | None:
    """True if it answered, False if it raised or died, None if its time was over."""
    try:
        if seconds <= 0:
            raise WorkerHungError
        found = seat.ask(call.part(place), call.size if place is None else 1, seconds)
    except WorkerHungError:
        if place is not None:
            call.answers.pop(place, None)  # it was being asked again
        return None
    except WorkerDiedError as error:
        found = f"ended its worker process: {error}"
    if isinstance(found, str):
        call.raised(found, place)
        return False
    call.note(found, place)
    return True


class _Seat:
    """The place of one worker; `ended` counts those that hung or died in it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._worker: Worker | None = None
        self.ended, self._asked = 0, 0

    def ready(self) -> str:
        """Start a worker if there is none; returns what went wrong, or ""."""
        if self._worker is not None:
            return ""
        try:
            self._worker = Worker(self._path)
            self._worker.hear(time.monotonic() + _START_S)
        except (WorkerHungError, WorkerDiedError, OSError) as error:
            self._end()
            return f"could not start its worker process: {error}"
        return ""

    def ask(self, arguments: Mapping[str, Any], size: int, seconds: float) -> Any:
        """The worker's answer; one that hangs or dies is gone afterwards."""
        complaint = self.ready()
        if complaint:
            raise WorkerDiedError(complaint)
        assert self._worker is not None, "ready() left no worker"
        deadline = time.monotonic() + seconds
        try:
            self._asked += 1
            self._worker.tell((self._asked, arguments, size), deadline)
            return _answer(self._worker.hear(deadline), self._asked, size)
        except (WorkerHungError, WorkerDiedError):
            self._end()
            raise

    def _end(self) -> None:
        self.ended += 1
        self.close()

    def close(self) -> None:
        """End the worker, whatever it does."""
        if self._worker is not None:
            self._worker.end()
        self._worker = None


class Worker:
    """One worker process and the two pipes to it."""

    def __init__(self, path: str) -> None:
        program = str(Path(__file__).with_name("worker.py"))
        # -P: the folder of the program holds modules whose names are common.
        self.process = subprocess.Popen(
            [sys.executable, "-P", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the terminal is the trainer's to handle
        )
        assert self.process.stdin is not None and self.process.stdout is not None, "no pipes"
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._heard = b""
        try:
            self.tell((list(sys.path), path), time.monotonic() + _START_S)
        except (WorkerHungError, WorkerDiedError):
            self.end()
            raise

    def tell(self, value: Any, deadline: float) -> None:
        """Send one object; raises WorkerHungError after the deadline, WorkerDiedError if gone."""
        left = memoryview(frame(value))
        while left:
            _await_ready(self._in, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._in, left) :]
            except BrokenPipeError:
                raise WorkerDiedError(self._how()) from None

    def hear(self, deadline: float) -> Any:
        """The next line, parsed; raises as `tell`."""
        while b"\n" not in self._heard:
            _await_ready(self._out, select.POLLIN, deadline)
            chunk = os.read(self._out, 1 << 16)
            if not chunk:
                raise WorkerDiedError(self._how())
            self._heard += chunk
            if len(self._heard) > _LONGEST:
                raise WorkerDiedError(_NONSENSE)
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerDiedError(_NONSENSE) from None

    def end(self) -> None:
        """Kill its process group, what the function started included, and close the pipes."""
        with suppress(ProcessLookupError):  # reaped, and nobody left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None, "no pipes"
        self.process.stdin.close()
        self.process.stdout.close()

    def _how(self) -> str:
        """What became of a worker that closed its pipes."""
        try:
            status = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipes"
        return f"exit status {status}" if status >= 0 else f"signal {-status}"


def _await_ready(descriptor: int, event: int, deadline: float) -> None:
    """Wait until it can be used; raises WorkerHungError after the deadline."""
    waiting = select.poll()  # select() knows no descriptors over 1023
    waiting.register(descriptor, event)
    left = deadline - time.monotonic()
    if left <= 0 or not waiting.poll(min(left * 1000, _LONGEST_POLL_MS)):
        raise WorkerHungError("no answer in time")


def _answer(reply: Any, number: int, size: int) -> Any:
    """What the worker found; raises WorkerDiedError if this is no reply to call `number`.

    The function shares its process with the pipe, so it or a child of it may have written there.
    """
    match reply:
        case [told, str() as found] if told == number:
            return found
        case [told, list() as found] if told == number and len(found) == size:
            if all(item is None or type(item) in (float, str) for item in found):
                return found
    raise WorkerDiedError(_NONSENSE)


def _absolute(path: str) -> str:
    """The reward's path, a file seen from anywhere."""
    module_name, _, function_name = path.rpartition(":")
    if module_name.endswith(".py"):
        return f"{Path(module_name).resolve()}:{function_name}"
    return path
