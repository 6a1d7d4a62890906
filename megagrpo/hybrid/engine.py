"""Policy and engine taking turns: who is awake, whose weights are served, what a sync moved.

One state machine per rank, the same on all: training -> rollout_mode() -> training. Entering it
moves the weights; leaving it puts the engine to sleep. Generation itself is the engine's and is
refused by it unless a sync completed since it woke up. Left out: syncing while the engine stays
awake for several updates (design 7).
"""

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megagrpo import log
from megagrpo.hybrid.memory import Offload, Resident
from megagrpo.hybrid.plan import BUCKET_BYTES, Plan, plan_transfers
from megagrpo.hybrid.source_check import check_and_digest, owned_regions
from megagrpo.hybrid.transfer import Sources, Transfer
from megagrpo.parallel import platform
from megagrpo.parallel.collectives import gather_objects
from megagrpo.parallel.context import ParallelContext
from megagrpo.rollout.engine import RolloutEngine
from megagrpo.types import TensorInfo, TensorSource
from megagrpo.weights.slices import Slice

FOREIGN_VERSION = -2  # of weights that are not the trainer's; -1 is before the first sync


class HybridEngine:
    """Trainer's shard and engine of one rank; built on all ranks together.

    `version` is that of the weights of the last completed sync, as the trainer counts its steps.
    `stats` holds the metrics of the last sync by their names; `extra_bytes_peak` is this rank's.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        haves: Sequence[Slice],
        parameters: Mapping[str, torch.Tensor],
        manifest: Sequence[TensorInfo],
        context: ParallelContext,
        prepare: Callable[[], None],
        *,
        offload: Offload | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`prepare` makes the parameters whole (a pending parameter gather). The engine sleeps.
        Raises ValueError if trainer, manifest and engine name different tensors."""
        self.engine = engine
        self.version = -1
        self.stats: dict[str, float] = {}
        self._parameters, self._context, self._prepare = parameters, context, prepare
        self._offload: Offload = Resident() if offload is None else offload
        self._in_rollout = False
        self._sources = Sources(haves, parameters)
        # Haves and wants of all ranks travel once; enough for hundreds of ranks (see plan.py).
        everyone = gather_objects(
            (
                self._sources.boxes(),
                self._sources.dtypes(),
                engine.record_wants(manifest),
                socket.gethostname(),
            ),
            context,
        )
        self._manifest, dtypes = _in_held_dtypes(manifest, [dtypes for _, dtypes, _, _ in everyone])
        hosts = [host for _, _, _, host in everyone]
        self.plan = plan_transfers(
            [have for have, _, _, _ in everyone],
            [want for _, _, want, _ in everyone],
            self._manifest,
            context.rank,
            hosts=[hosts.index(host) for host in hosts],
            bucket_bytes=bucket_bytes,
        )
        _check_same_plan(self.plan, context)
        self._owned = owned_regions([have for have, _, _, _ in everyone], context.rank)
        self._transfer = Transfer(
            self.plan, self._sources, dtypes, _communicator(), platform.device()
        )

    def sync(self, version: int) -> None:
        """Move the trainer's weights into the engine, whose weights must be awake.

        All ranks join. Raises ValueError on all of them, before anything moves, if a weight is not
        finite. `version` is taken over only when every weight has been written.
        """
        start = time.perf_counter()
        self._prepare()
        digest = check_and_digest(
            self._sources, self._owned, self._parameters, self._context.cpu_group
        )
        self.engine.load(self._transfer.feed(self._manifest), self._transfer.fetch)
        self.engine.check_written()
        self.engine.reset_prefix_cache()
        platform.synchronize()
        self.version = version
        self.engine.version = self.version
        self.stats = {
            "sync/seconds": time.perf_counter() - start,
            "sync/bytes_received_max": float(max(self.plan.received_bytes)),
            "sync/lower_bound_bytes": float(max(self.plan.lower_bound_bytes)),
            "sync/extra_bytes_peak": float(self._transfer.peak_bytes),
            "sync/version": float(self.version),
            "sync/digest": float(digest),
        }

    @contextmanager
    def rollout_mode(self, version: int) -> Iterator[RolloutEngine]:
        """Inside, the engine serves the current weights as `version`, the trainer's number of
        finished steps; afterwards it sleeps and training may go on. All ranks join; raises
        RuntimeError inside another rollout."""
        with self._awake(lambda: self.sync(version)) as engine:
            yield engine

    @contextmanager
    def serving(self, source: TensorSource) -> Iterator[RolloutEngine]:
        """Inside, the engine serves the tensors of `source` instead of the trainer's; each rank
        reads its boxes from the files. Version and stats stay those of the last sync. All ranks
        join; raises as `rollout_mode`."""

        def load() -> None:
            self.engine.load(self._manifest, source.read)
            self.engine.check_written()
            self.engine.reset_prefix_cache()
            platform.synchronize()
            self.engine.version = FOREIGN_VERSION

        with self._awake(load) as engine:
            yield engine

    @contextmanager
    def _awake(self, load: Callable[[], None]) -> Iterator[RolloutEngine]:
        self.check_training()
        self._in_rollout = True
        try:
            self._prepare()
            self._offload.release_optimizer()
            platform.synchronize()
            self.engine.wake_weights()
            load()
            self._offload.release_parameters()
            self.engine.wake_kv_cache()
            yield self.engine
        finally:
            self._in_rollout = False
            self.engine.sleep()
        # Not in `finally`: after a failure the run ends, and restoring would hide its cause.
        self._offload.restore_parameters()
        self._offload.restore_optimizer()

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Asserts that the engine is not awake meanwhile; raises RuntimeError in a rollout."""
        self.check_training()
        yield

    def check_training(self) -> None:
        """Raises RuntimeError unless memory belongs to training."""
        if self._in_rollout:
            raise RuntimeError("the engine is awake: leave rollout_mode() first")


def _in_held_dtypes(
    manifest: Sequence[TensorInfo], by_rank: Sequence[Mapping[str, torch.dtype]]
) -> tuple[list[TensorInfo], dict[str, torch.dtype]]:
    """The manifest in the dtypes that the trainer holds, which are the ones that travel."""
    dtypes: dict[str, torch.dtype] = {}
    for rank, held in enumerate(by_rank):
        for name, dtype in held.items():
            first = dtypes.setdefault(name, dtype)
            assert dtype == first, f"{name} is {dtype} on rank {rank}, {first} before"
    missing = sorted({info.name for info in manifest} - set(dtypes))
    if missing:
        raise ValueError(f"no rank of the trainer holds {missing}")
    return [dataclasses.replace(info, dtype=dtypes[info.name]) for info in manifest], dtypes


def _check_same_plan(plan: Plan, context: ParallelContext) -> None:
    digests = gather_objects(plan.digest, context)
    assert len(set(digests)) == 1, f"ranks planned different transfers: {digests}"
    log.info(
        f"weight sync: at most {max(plan.received_bytes)} bytes received by a rank, "
        f"{len(plan.buckets)} buckets"
    )


def _communicator() -> dist.ProcessGroup:
    """A communicator for the transfers alone, connected before the first sync: point-to-point
    calls on a cold one would each build their own under NCCL. All ranks of the world join."""
    group = dist.new_group()
    assert group is not None, "every rank is a member of a group of the whole world"
    dist.all_reduce(torch.zeros(1, device=platform.device()), group=group)
    return group
