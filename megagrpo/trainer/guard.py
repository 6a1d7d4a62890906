"""A run that fails says where and ends at once."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from megagrpo import log
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.run import Run


def run_guarded(build: Callable[[Phases], Run], train: Callable[[Run], None]) -> int:
    """Build and train; on a failure say rank and phase and leave hard; returns 0 when done.

    A rank that fails must not wait in exit handlers: its peers sit in a collective, and the end of
    this process is what wakes them.
    """
    phases, done = Phases(), False
    try:
        train(build(phases))
        done = True
    finally:
        if not done:
            _leave(phases)
    return 0


def _leave(phases: Phases) -> NoReturn:
    """Report the exception in flight and end the process without exit handlers."""
    error = sys.exc_info()[1]
    traceback.print_exception(error)
    reason = " ".join(str(error).split()) or type(error).__name__
    log.error(f"error: failed in phase {phases.current!r}: {reason}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
