"""The few collectives that the rest of the package needs, typed, each saying who joins.

Tensors travel in the group's backend; objects and verdicts always travel on the CPU.
"""

import datetime
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megagrpo.parallel import platform
from megagrpo.parallel.context import ParallelContext

T = TypeVar("T")


class RankFailure(RuntimeError):
    """Another rank could not go on; the message is that rank's."""


def sum_over(group: dist.ProcessGroup, sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add up scalars by name over `group` in one all-reduce of float64.

    All ranks of `group` join and must hold the same names; a rank without data passes zeros.
    Returns float64 scalars on the CPU. Counts up to 2**53 stay exact.
    """
    names = sorted(sums)
    if not names:
        return {}
    stacked = torch.stack([sums[name].detach().double().reshape(()).cpu() for name in names])
    stacked = stacked.to(platform.device())
    # All ranks of `group`.
    dist.all_reduce(stacked, group=group)
    return dict(zip(names, stacked.cpu().unbind(), strict=True))


def max_over(
    group: dist.ProcessGroup, peaks: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The largest value by name over `group` in one all-reduce of float64; as `sum_over`."""
    names = sorted(peaks)
    if not names:
        return {}
    stacked = torch.stack([peaks[name].detach().double().reshape(()).cpu() for name in names])
    stacked = stacked.to(platform.device())
    # All ranks of `group`.
    dist.all_reduce(stacked, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, stacked.cpu().unbind(), strict=True))


def broadcast_object_from_last_stage(value: T, context: ParallelContext) -> T:
    """The last stage's `value` on every stage; all stages of one pipeline join."""
    if context.layout.pp == 1:
        return value
    box = [value]
    # All stages of one pipeline (same tp and dp coordinates).
    dist.broadcast_object_list(box, src=context.last_stage_rank, group=context.pp_group)
    return box[0]


def broadcast_from_last_stage(tensor: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """The last stage's `tensor` on every stage; elsewhere `tensor` gives shape and dtype only.

    All stages of one pipeline join. The argument is not changed.
    """
    if context.layout.pp == 1:
        return tensor
    buffer = tensor.to(platform.device(), copy=True).contiguous()
    # All stages of one pipeline (same tp and dp coordinates).
    dist.broadcast(buffer, src=context.last_stage_rank, group=context.pp_group)
    return buffer


def gather_objects(value: T, context: ParallelContext) -> list[T]:
    """Every rank's `value` in rank order, on every rank.

    All ranks of the world join; values are pickled and travel on the CPU.
    """
    gathered: list[T | None] = [None] * context.layout.world
    # All ranks of the world.
    dist.all_gather_object(gathered, value, group=context.cpu_group)
    return gathered  # type: ignore[return-value]


def gather_from_replicas(value: T, context: ParallelContext) -> list[T]:
    """The `value` of one rank of every data-parallel place, in rank order, on every rank.

    For what tensor ranks and stages of a replica hold alike. All ranks of the world join; values
    are pickled and travel on the CPU.
    """
    counts = context.coords.tp == 0 and context.coords.pp == 0
    parts = gather_objects((value,) if counts else None, context)
    return [part[0] for part in parts if part is not None]


def patient_gather(timeout_s: float) -> Callable[[Any], list[Any]]:
    """A gather of objects over the world on a gloo group with a time limit of its own.

    For the end of a rollout: replicas finish at different times, and the wait for the slowest must
    neither be cut by the trainer's timeout nor sit in an NCCL call. All ranks of the world join,
    here and in every call; a rank that never comes ends the others with an error after
    `timeout_s`.
    """
    # All ranks of the world.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def gather(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        # All ranks of the world, on the CPU.
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    return gather


def any_rank(flag: bool, context: ParallelContext) -> bool:
    """Whether `flag` is set on at least one rank of the world; all ranks join."""
    verdict = torch.tensor(int(flag), dtype=torch.int32)
    # All ranks of the world, on the CPU.
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=context.cpu_group)
    return bool(verdict.item())


def agree(ok: bool, message: str, context: ParallelContext) -> None:
    """Return if all ranks are fine, else raise RankFailure with the first failing rank's message.

    All ranks of the world join. `message` is read only where `ok` is false.
    """
    if not any_rank(not ok, context):
        return
    verdicts = gather_objects((ok, message), context)
    rank, said = next((rank, said) for rank, (fine, said) in enumerate(verdicts) if not fine)
    raise RankFailure(f"rank {rank}: {said}")
