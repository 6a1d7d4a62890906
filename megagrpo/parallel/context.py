"""Which rank this process is and which groups it stands in, as one frozen value.

megatron-core keeps its groups in module globals; `init_parallel` creates them and copies what the
rest of the package needs into a ParallelContext, which is passed around explicitly. Groups follow
types.Layout: tensor fastest, then data, then pipeline. Left out of this version: context, expert
and virtual-pipeline parallelism.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megagrpo.parallel import mcore_compat, mcore_cpu
from megagrpo.types import Coordinates, Layout

mcore_cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place and its process groups.

    Example: Layout(world=4, tp=2, pp=2), rank 3: coords tp 1, pp 1, dp 0; tp_group ranks (2, 3),
    pp_group ranks (1, 3), dp_group rank (3,).
    """

    layout: Layout
    rank: int  # global
    coords: Coordinates
    tp_group: dist.ProcessGroup  # tensor shards of one stage of one replica
    pp_group: dist.ProcessGroup  # stages of one replica, in order
    dp_group: dist.ProcessGroup  # replicas of one shard
    model_parallel_group: dist.ProcessGroup  # all ranks of one replica (TP x PP)
    cpu_group: dist.ProcessGroup  # the world, for CPU tensors and objects
    first_stage_rank: int  # global rank of this pipeline's first stage
    last_stage_rank: int  # global rank of this pipeline's last stage

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the logits."""
        return self.coords.pp == self.layout.pp - 1


def init_parallel(layout: Layout, seed: int, timeout_s: float = 1800.0) -> ParallelContext:
    """Create megatron-core's groups and seed its generators; all ranks of the world join.

    Needs the default process group (platform.init_process_group). `seed` is the same on all ranks;
    megatron-core derives one per tensor rank. `timeout_s` bounds the collectives of its groups,
    which do not take the default group's limit. Raises ValueError if the layout does not divide
    the world.
    """
    mcore_compat.check_version()
    world, rank = dist.get_world_size(), dist.get_rank()
    if layout.world != world or world % (layout.tp * layout.pp):
        raise ValueError(
            f"parallel.tp={layout.tp} x parallel.pp={layout.pp} does not fit {world} processes "
            f"(layout declares {layout.world}); tp x pp must divide the number of processes"
        )
    mcore_compat.call(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    world_group = dist.group.WORLD
    assert world_group is not None, "the default process group exists: get_rank() answered"
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_process_group_ranks(pp_group)
    return ParallelContext(
        layout=layout,
        rank=rank,
        coords=layout.coordinates(rank),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=pp_group,
        dp_group=parallel_state.get_data_parallel_group(),
        model_parallel_group=parallel_state.get_model_parallel_group(),
        cpu_group=world_group,
        first_stage_rank=stages[0],
        last_stage_rank=stages[-1],
    )


def destroy_parallel() -> None:
    """Forget megatron-core's groups, so that `init_parallel` may run again in this process."""
    parallel_state.destroy_model_parallel()


def tracker_states() -> dict[str, Any]:
    """megatron-core's own generators (dropout of a tensor rank) by name, for a checkpoint."""
    return dict(tensor_parallel.get_cuda_rng_tracker().get_states())


def restore_tracker_states(states: dict[str, Any]) -> None:
    """Put the generators of `tracker_states` back."""
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
