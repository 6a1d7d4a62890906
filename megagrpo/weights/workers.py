"""Runs the jobs of a conversion, in this process or in several forked ones.

Forked processes have everything imported and every header read, so starting one takes
milliseconds; each takes a stretch of the tensors and writes to places of its own. An error in one
ends the others and is raised here; a worker whose parent is gone ends at its next report.
"""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch

from megagrpo.weights.moves import FillSource, Job, Mover, shares

REPORT_BYTES = 8 << 20  # a worker says how far it is this often
Progress = Callable[[int, int], object]
"""progress(bytes done, bytes in all) is called now and then, at the end with both equal."""


def run_jobs(jobs: Sequence[Job], source: FillSource, workers: int, progress: Progress) -> int:
    """Move everything; returns how many elements are not a number.

    Raises what a worker raised, ValueError or OSError; OSError if one was killed.
    """
    total, done = sum(job.nbytes for job in jobs), 0

    def moved(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    parts = shares(jobs, workers)
    forked = len(parts) > 1
    nans = _run_forked(parts, source, moved) if forked else _run_all(jobs, source, moved)
    assert done == total, f"{done} of {total} bytes were moved"
    return nans


def _run_all(jobs: Sequence[Job], source: FillSource, moved: Callable[[int], object]) -> int:
    with Mover(source, moved) as mover:
        for job in jobs:
            mover.run(job)
    return mover.nans


def _run_forked(
    parts: Sequence[Sequence[Job]], source: FillSource, moved: Callable[[int], object]
) -> int:
    context = multiprocessing.get_context("fork")
    pipes: dict[Connection, ForkProcess] = {}
    nans = 0
    try:
        for jobs in parts:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(jobs, source, there), daemon=True)
            process.start()
            there.close()
            pipes[here] = process
        open_pipes = list(pipes)
        while open_pipes:
            for pipe in wait(open_pipes):
                assert isinstance(pipe, Connection), "only pipes are waited for"
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    pipes[pipe].join()
                    raise OSError(_death(pipes[pipe])) from None
                if kind == "failed":
                    raise value
                if kind == "moved":
                    moved(value)
                else:
                    nans += value
                    open_pipes.remove(pipe)
    finally:
        for pipe, process in pipes.items():
            process.terminate()
            process.join()
            pipe.close()
    return nans


def _death(process: ForkProcess) -> str:
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"a worker process {how}; nothing was kept"


def _work(jobs: Sequence[Job], source: FillSource, pipe: Connection) -> None:
    """The whole life of a worker; numbers of bytes, then the count of NaN or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the parent's other threads did not come along
    unsaid = 0

    def moved(nbytes: int) -> None:
        nonlocal unsaid
        unsaid += nbytes
        if unsaid >= REPORT_BYTES:
            pipe.send(("moved", unsaid))
            unsaid = 0

    try:
        nans = _run_all(jobs, source, moved)
    except (ValueError, OSError) as error:
        pipe.send(("failed", error))
        return
    pipe.send(("moved", unsaid))
    pipe.send(("done", nans))
