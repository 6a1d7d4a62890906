"""AdamW around megatron-core's DDP and (distributed) optimizer, and the learning-rate schedule.

One optimizer step is `set_lr`, then `step`. A step with a gradient that is not finite changes
nothing on any rank. Weight decay follows megatron-core's default grouping: matrices decay,
vectors (norms, biases) do not. Gradients are accumulated and reduced in float32; bf16 models have
float32 masters inside the optimizer. Left out: loss scaling (fp16), overlap of communication with
computation, offload (hybrid/memory.py owns storage).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megagrpo.parallel import mcore_cpu, platform

mcore_cpu.install()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

from megagrpo.model.build import Chunks, bare  # noqa: E402
from megagrpo.parallel import mcore_compat  # noqa: E402
from megagrpo.parallel.collectives import any_rank  # noqa: E402
from megagrpo.parallel.context import ParallelContext  # noqa: E402


@dataclass(frozen=True)
class OptimSettings:
    """AdamW; the learning rate of a step is set by `set_lr`."""

    lr: float  # until the first `set_lr`
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01  # of matrices only
    grad_clip: float = 1.0  # bound on the global gradient norm; 0 is off
    use_distributed_optimizer: bool = True  # state cut over data-parallel ranks


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float  # global, before clipping; not finite if the step was skipped
    skipped: bool  # a gradient was not finite: weights and moments are untouched


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate as a pure function of the number of finished optimizer steps.

    Example: max 1e-3, min 1e-4, warm-up 2, total 10, cosine: after 0, 1, 2, 6, 10 steps 0, 5e-4,
    1e-3, 5.5e-4, 1e-4. The caller keeps the position (skipped steps do not count) and saves it.
    """

    kind: str  # "constant", "linear" or "cosine"
    max_lr: float
    min_lr: float = 0.0  # at `total_steps` and after; unused by "constant"
    warmup_steps: int = 0
    total_steps: int = 0  # last step of the decay; unused by "constant"

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"optim.schedule={self.kind!r} is unknown; use constant, linear or cosine"
            )
        if self.kind != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} leaves no step of the run's "
                f"{self.total_steps} for the {self.kind} decay; use fewer"
            )

    def at(self, finished: int) -> float:
        """Rate of the step that follows `finished` steps.

        max * k / warmup while k < warmup; then with x = (k - warmup) / (total - warmup), at most 1:
        linear max - (max - min) x; cosine min + (max - min) (1 + cos(pi x)) / 2.
        """
        if finished < self.warmup_steps:
            return self.max_lr * finished / self.warmup_steps
        if self.kind == "constant":
            return self.max_lr
        share = min(1.0, (finished - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        if self.kind == "linear":
            return self.max_lr - (self.max_lr - self.min_lr) * share
        return self.min_lr + (self.max_lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Trainable:
    """Model chunks inside DDP, and their optimizer."""

    chunks: list[torch.nn.Module]
    optimizer: Any  # megatron-core's ChainedOptimizer
    settings: OptimSettings

    def apply_settings(self) -> None:
        """Write betas, epsilon and weight decay into the optimizer's parameter groups.

        Upstream leaves `wd_mult` (0 for vectors) to a scheduler of its own, and a loaded optimizer
        brings the groups of the run that saved it.
        """
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = self.settings.betas, self.settings.eps

    def refresh_masters(self) -> None:
        """Copy the model's weights into the optimizer's float32 masters.

        Needed after weights were written from outside (load, restore without optimizer state),
        else the next step undoes them.
        """
        self.optimizer.reload_model_params()

    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """All that holds weights on the device: flat buffers, and parameters in them or not."""
        for chunk in self.chunks:
            for buffer in _flat_buffers(chunk):
                if buffer.param_data is not None:  # only with the distributed optimizer
                    yield buffer.param_data
            yield from chunk.parameters()

    def gradient_tensors(self) -> Iterator[torch.Tensor]:
        """The flat buffers that every `main_grad` is a view of."""
        for chunk in self.chunks:
            yield from (buffer.grad_data for buffer in _flat_buffers(chunk))

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Masters (views of the parameters where those are float32) and Adam's moments, which
        appear at the first step; step counters that stay on the CPU are not among them."""
        here = platform.device().type
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
                yield from (tensor for tensor in tensors if tensor.device.type == here)

    def finish_param_sync(self) -> None:
        """Make sure that every parameter is whole on every rank before somebody reads weights.

        Data-parallel ranks join. Nothing is pending here as long as the gather is not overlapped
        with the forward pass.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:  # type: ignore[union-attr]
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def wrap_and_build(chunks: Chunks, context: ParallelContext, optim: OptimSettings) -> Trainable:
    """Wrap `chunks` into DDP (which moves their storage into flat buffers) and build AdamW.

    All ranks of the world join. Load weights before, or call `refresh_masters` after loading.
    """
    config = bare(chunks[0]).config
    ddp_config = mcore_compat.call(
        DistributedDataParallelConfig,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optim.use_distributed_optimizer,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # `step` looks, and skips instead of dying
    )
    wrapped = [
        mcore_compat.call(
            DistributedDataParallel, config=config, ddp_config=ddp_config, module=chunk
        )
        for chunk in chunks
    ]
    optimizer_config = mcore_compat.call(
        OptimizerConfig,
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.grad_clip,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=optim.use_distributed_optimizer,
    )
    optimizer = mcore_compat.call(
        get_megatron_optimizer, config=optimizer_config, model_chunks=wrapped
    )
    trainable = Trainable(chunks=wrapped, optimizer=optimizer, settings=optim)
    trainable.apply_settings()
    return trainable


def _flat_buffers(chunk: Any) -> list[Any]:
    """Parameter and gradient buffers of one DDP-wrapped chunk."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def set_lr(trainable: Trainable, lr: float) -> None:
    """Learning rate of the following steps, for every parameter group."""
    for group in trainable.optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]


@torch.no_grad()
def step(trainable: Trainable, context: ParallelContext) -> StepResult:
    """Clip the accumulated gradients to settings.grad_clip and update the weights.

    All ranks of the world join. If the gradient norm is not finite on any rank, every rank leaves
    weights and moments as they are and says so. Clipping multiplies by clip / (norm + 1e-6) where
    that is below 1, as torch.nn.utils.clip_grad_norm_.
    """
    optimizer = trainable.optimizer
    result = _step(optimizer, trainable.settings.grad_clip, context)
    # Without the distributed optimizer p.grad is main_grad itself by now; a backward pass that
    # found it there would add it to itself.
    optimizer.zero_grad(set_to_none=True)
    return result


def _step(optimizer: Any, clip: float, context: ParallelContext) -> StepResult:
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if any_rank(found_inf or not math.isfinite(norm), context):
        return StepResult(grad_norm=norm, skipped=True)
    if clip > 0.0 and clip / (norm + 1e-6) < 1.0:
        parts = optimizer.chained_optimizers
        grads = [p.grad for part in parts for p in part.get_parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, clip / (norm + 1e-6))
    optimizer.step_with_ready_grads()
    return StepResult(grad_norm=norm, skipped=False)
