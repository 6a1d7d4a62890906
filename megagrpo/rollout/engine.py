"""What the trainer's side asks of a generation engine, whatever engine it is.

The hybrid engine and the collector know this protocol and no engine library. Left out: engines in
other processes, partial rollouts, adapters (design 7).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megagrpo.types import Box, Completion, Fetch, Request, Sampling, TensorInfo

Wants = dict[str, tuple[Box, ...]]
"""For every HuggingFace tensor the regions that one rank reads."""


@dataclass(frozen=True)
class EngineSettings:
    """What the engine is built from; everything that it may not take from the model's folder."""

    model_folder: str  # holds config.json; no weights and no tokenizer are read
    dtype: torch.dtype
    tp: int  # ranks per replica
    max_model_len: int  # prompt + completion, tokens
    kv_cache_gb: float | None  # KV cache of this rank, GiB; None: by memory utilization (GPU)
    gpu_memory_utilization: float  # share of the device for weights + KV where kv_cache_gb is None
    max_num_seqs: int  # sequences decoded together
    valid_vocab: int  # ids from here on are never sampled and have probability 0
    seed: int  # equal on all ranks
    timeout_s: int = 1800  # seconds a collective of a replica waits for a lost rank


class RolloutEngine(Protocol):
    """One tensor-parallel rank of a colocated engine; its replica holds `tp` consecutive ranks.

    Order of a rollout: wake_weights, load, check_written, reset_prefix_cache, wake_kv_cache,
    generate (any number of times), sleep. All ranks of a replica make the same calls in the same
    order; construction is a collective of the whole world and leaves the engine asleep.
    """

    tp: int  # ranks per replica
    replicas: int  # world / tp
    replica: int  # which one this rank belongs to
    tp_rank: int  # place inside it
    version: int  # of the weights that are served; written by the hybrid engine; -1 before

    def record_wants(self, manifest: Sequence[TensorInfo]) -> Wants:
        """The regions that this rank's loader reads, nothing written; no communication."""

    def load(self, manifest: Iterable[TensorInfo], fetch: Fetch) -> None:
        """Write every weight, asking `fetch` for the regions of each tensor when `manifest` yields
        it; raises RuntimeError while the weights sleep."""

    def check_written(self) -> None:
        """Third accounting: raises RuntimeError naming weights that no load has written since the
        last sleep; a load followed by this check is a completed sync."""

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back; their content is lost."""

    def wake_weights(self) -> None:
        """Take the memory of the weights; their content is undefined until a load."""

    def wake_kv_cache(self) -> None:
        """Take the memory of the KV cache."""

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes: they were computed with other weights."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """One completion per request, in request order.

        `on_done(index, completion)` is called as each ends. All ranks of a replica pass the same
        requests. Raises RuntimeError before a sync completed after the wake-up, ValueError for a
        request that does not fit.
        """
