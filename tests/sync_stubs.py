"""A trainer's shard and an engine without vLLM, for tests of the weight sync."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.types import (
    Box,
    Completion,
    Fetch,
    Layout,
    ModelShape,
    Request,
    Sampling,
    TensorInfo,
)
from megagrpo.weights.slices import Slice, index
from megagrpo.weights.table import expand, local_shapes

ROW_CUT = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMN_CUT = ("o_proj.weight", "down_proj.weight")


def context(rank: int, layout: Layout) -> Any:
    """What the hybrid engine reads of a ParallelContext."""
    return SimpleNamespace(rank=rank, layout=layout, cpu_group=dist.group.WORLD)


def shard(
    shape: ModelShape, layout: Layout, rank: int, full: dict[str, torch.Tensor]
) -> tuple[list[Slice], dict[str, torch.Tensor]]:
    """One rank's Megatron parameters, filled from HuggingFace tensors."""
    coords = layout.coordinates(rank)
    slices = expand(shape, layout, coords)
    dtype = next(iter(full.values())).dtype
    local = {
        name: torch.zeros(size, dtype=dtype)
        for name, size in local_shapes(shape, layout, coords).items()
    }
    fill_(local, slices, full)
    return slices, local


def fill_(
    local: dict[str, torch.Tensor], slices: Sequence[Slice], full: dict[str, torch.Tensor]
) -> None:
    """Write new values into a shard, as an optimizer step would."""
    for one in slices:
        local[one.megatron][index(one.megatron_box)] = full[one.hf][index(one.hf_box)]


@dataclass
class StubEngine:
    """Holds HuggingFace tensors cut as vLLM cuts them; `events` lists every call in order.

    `repack` stands for an engine that stores weights in another order than it was given.
    """

    rank: int
    world: int
    tp: int
    extra: Callable[[list[TensorInfo]], list[TensorInfo]] = list  # what its loader knows
    skip: str = ""  # a tensor that its loader forgets
    fail_at: str = ""  # a tensor at which loading dies
    repack: bool = False
    keep: bool = False  # keeps what fetch returned instead of copying
    version: int = -1
    events: list[str] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas = self.world // self.tp
        self.replica, self.tp_rank = divmod(self.rank, self.tp)
        self.awake = False
        self.written: set[str] = set()

    def box(self, info: TensorInfo) -> Box:
        """This rank's part of a tensor."""
        dim = 0 if any(part in info.name for part in ROW_CUT) else 1
        cut = dim == 0 or info.name.endswith(COLUMN_CUT)
        found = [(0, size) for size in info.shape]
        if cut:
            size = info.shape[dim]
            step = -(-size // self.tp)
            found[dim] = (min(size, self.tp_rank * step), min(size, (self.tp_rank + 1) * step))
        return tuple(found)

    def record_wants(self, manifest: Sequence[TensorInfo]) -> dict[str, tuple[Box, ...]]:
        return {info.name: (self.box(info),) for info in self.extra(list(manifest))}

    def load(self, manifest: Iterable[TensorInfo], fetch: Fetch) -> None:
        if not self.awake:
            raise RuntimeError("written while asleep")
        self.events.append("load")
        for info in manifest:
            if info.name == self.fail_at:
                raise OSError(f"transfer of {info.name} failed")
            if info.name == self.skip:
                continue
            part = fetch(info.name, self.box(info))
            self.weights[info.name] = part if self.keep else part.flip(0) if self.repack else +part
            self.written.add(info.name)

    def check_written(self) -> None:
        self.events.append("check_written")
        if self.skip:
            raise RuntimeError(f"unwritten: {self.skip}")

    def sleep(self) -> None:
        self.events.append("sleep")
        self.awake = False

    def wake_weights(self) -> None:
        self.events.append("wake_weights")
        self.awake = True

    def wake_kv_cache(self) -> None:
        self.events.append("wake_kv_cache")

    def reset_prefix_cache(self) -> None:
        self.events.append("reset_prefix_cache")

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        raise NotImplementedError
