"""Names the phase a rank is in and times it, with one decorator on the phase's method.

A failure is reported with the phase's name, and `timing_s/*` comes from the same place.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol


class Phases:
    """Seconds per phase since the last `take`; `current` is the innermost phase that runs.

    Example: after a rollout of 2.1 s and an update of 0.8 s: {"gen": 2.1, "update_actor": 0.8}.
    """

    def __init__(self) -> None:
        self.current = "start"
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that someone else measured, e.g. the engine's sync."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds so far, by phase; starts anew from empty."""
        taken, self._seconds = self._seconds, {}
        return taken


class _HasPhases(Protocol):
    phases: Phases


def phase(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method of an object with `phases`: name it while it runs, add its seconds."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(self: _HasPhases, *args: Any, **kwargs: Any) -> Any:
            phases, outer = self.phases, self.phases.current
            phases.current = name
            start = time.perf_counter()
            answer = method(self, *args, **kwargs)
            phases.add(name, time.perf_counter() - start)
            phases.current = outer  # left as it is when the method raises: the report names it
            return answer

        return timed

    return decorate
