"""Gloo ranks for tests: forked from this process, which has paid for the imports once.

`run_ranks(world, fn, *args)` forks `world` children, joins them to one gloo group and returns what
`fn(rank, *args)` returned on each, in rank order. The first failing rank's traceback becomes the
test's failure. A child that hangs is killed at the time limit; only own children are ever ended.
"""

import datetime
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_FORK = get_context("fork")


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `fn(rank, *args)` on `world` forked gloo ranks; closures work, results are pickled."""
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        pipes, children = [], []
        for rank in range(world):
            ours, theirs = _FORK.Pipe(duplex=False)
            body = (rank, world, folder, theirs, timeout, fn, args)
            child = _FORK.Process(target=_rank_body, args=body)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        try:
            return _collect(pipes, timeout)
        finally:
            for child in children:
                child.join(timeout=2.0)
                if child.is_alive():
                    child.kill()
                    child.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    """Wait for every rank; raise with the first failure seen."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankError(f"ranks {missing} did not finish within {timeout} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]


def _rank_body(
    rank: int,
    world: int,
    folder: str,
    pipe: Connection,
    timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The child: join the group, run, answer, leave without running the parent's exit handlers."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        answer = (True, fn(rank, *args))
        dist.barrier()
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    os._exit(0)
