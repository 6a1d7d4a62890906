"""`perf/mfu`: how much of the hardware the trainer's own passes use.

    sum over passes of model FLOPs / (seconds of those passes x ranks x peak FLOP/s of a device)

Passes are the update (forward and backward, 3 forward passes' worth, for every iteration) and the
scoring of old and reference log-probs (1 each, where they were scored); the seconds are those of
the same phases. Generation is in neither: it is bound by memory, and tokens per second judge it.
"""

from collections.abc import Mapping

from megagrpo.metrics.flops import forward_flops
from megagrpo.parallel import platform
from megagrpo.trainer.batch import Batch
from megagrpo.types import MicroBatch, ModelShape

PHASES = ("update_actor", "old_log_prob", "ref")


def step_flops(batch: Batch, shape: ModelShape, iterations: int) -> float:
    """FLOPs of this data-parallel rank's sequences over all passes; 0 where they are not known."""
    total = 0
    for mini in batch.mini_batches:
        scored = set(mini.micro_batches[0].values) if mini.micro_batches else set()
        scorings = len(scored & {"old_logprobs", "ref_logprobs"})
        rolled_out = _forward(mini.micro_batches, shape)
        trained = _forward(mini.all_micro_batches, shape)
        total += 3 * iterations * trained + scorings * rolled_out
    return float(total)


def _forward(micro_batches: tuple[MicroBatch, ...], shape: ModelShape) -> int:
    lengths = [
        length
        for micro in micro_batches
        for length, row in zip(micro.cu_seqlens.diff().tolist(), micro.rows, strict=True)
        if row >= 0  # a dummy keeps a rank busy and is no work
    ]
    return forward_flops(shape, lengths) or 0


def utilization(
    flops: float, seconds: Mapping[str, float], world: int, peak: float | None
) -> dict[str, float]:
    """`perf/mfu` of all ranks' FLOPs; nothing where work, time or the device's peak is unknown."""
    busy = sum(seconds.get(name, 0.0) for name in PHASES)
    if not flops or not busy or peak is None:
        return {}
    return {"perf/mfu": flops / busy / world / peak}


def device_peak(dtype_name: str) -> float | None:
    """Peak FLOP/s of this rank's device for matrices of `model.dtype`; None on a CPU."""
    return platform.peak_flops() if dtype_name == "bfloat16" else None
