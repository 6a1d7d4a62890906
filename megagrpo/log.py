"""One logger for the package: rank 0 speaks unless `all_ranks` is asked for."""

import logging
import sys

_LOGGER = logging.getLogger("megagrpo")


def setup(rank: int, level: str = "INFO") -> None:
    """Send the package's messages to stderr; called once per process."""
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: rank == 0 or getattr(record, "all_ranks", False))
    _LOGGER.handlers[:] = [handler]
    _LOGGER.setLevel(level)
    _LOGGER.propagate = False


def info(message: str, *, all_ranks: bool = False) -> None:
    """A line of progress."""
    _LOGGER.info(message, extra={"all_ranks": all_ranks})


def warn(message: str, *, all_ranks: bool = False) -> None:
    """Something the user should look at; the run goes on."""
    _LOGGER.warning(message, extra={"all_ranks": all_ranks})


def error(message: str, *, all_ranks: bool = True) -> None:
    """The run ends; said by the rank that saw it."""
    _LOGGER.error(message, extra={"all_ranks": all_ranks})
