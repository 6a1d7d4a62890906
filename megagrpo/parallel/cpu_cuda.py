"""The namespace that megatron-core sees in place of torch.cuda on a machine without CUDA.

Installed by parallel/mcore_cpu.py, for megatron.core.* only; torch itself stays untouched. The one
stream of a CPU is always finished, the one device is the CPU, and the CPU's default generator plays
the GPU's. What is not listed here is the real torch.cuda attribute (classes that are only named,
functions that say that CUDA is missing).
"""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

from megagrpo.parallel import platform

FloatTensor = torch.FloatTensor
HalfTensor = torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor


class Stream:
    """A stream on which everything has already happened; all are equal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing to wait for."""

    def wait_event(self, event: "Event") -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """An event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two events; not measured."""
        return 0.0


class _Generators:
    """torch.cuda.default_generators; indexed by int or by torch.device."""

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()
nvtx = types.SimpleNamespace(
    range_push=lambda *args: None, range_pop=lambda: None, range=contextlib.nullcontext
)


def current_device() -> torch.device:
    """The CPU."""
    return torch.device("cpu")


def device_count() -> int:
    """One device: the CPU."""
    return 1


def set_device(device: object) -> None:
    """There is one device."""


def synchronize(device: object = None) -> None:
    """Nothing to wait for."""


def empty_cache() -> None:
    """There is no cache."""


def memory_allocated(device: object = None) -> int:
    """Device memory is not counted on CPU."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def current_stream(device: object = None) -> Stream:
    """The one stream."""
    return Stream()


default_stream = current_stream


def stream(stream: object) -> contextlib.AbstractContextManager[None]:
    """There is one stream."""
    return contextlib.nullcontext()


def device(device: object) -> contextlib.AbstractContextManager[None]:
    """There is one device."""
    return contextlib.nullcontext()


def is_current_stream_capturing() -> bool:
    """No graph is ever captured."""
    return False


def manual_seed(seed: int) -> None:
    """Seed the CPU's default generator."""
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def get_rng_state(device: object = "cpu") -> torch.Tensor:
    """State of the CPU's default generator."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: object = "cpu") -> None:
    """Set the CPU's default generator."""
    torch.default_generator.set_state(new_state)


random = types.SimpleNamespace(
    get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=manual_seed
)


def _lazy_init() -> None:
    """CUDA's start-up; there is none."""


def _lazy_call(callback: Callable[[], None], **kwargs: Any) -> None:
    """Call at once: the real one queues the call until CUDA starts, which is never."""
    callback()


def to_device(value: Any, *args: Any, **kwargs: Any) -> Any:
    """What `value.cuda(...)` becomes: tensor or module on the CPU."""
    return value.to("cpu") if isinstance(value, torch.Tensor) else value.cpu()


def is_on_device(tensor: torch.Tensor) -> bool:
    """What `tensor.is_cuda` becomes."""
    return tensor.device.type == "cpu"


def record_stream(tensor: torch.Tensor, *args: Any) -> None:
    """What `tensor.record_stream(...)` becomes."""


def __getattr__(name: str) -> Any:
    return platform.cuda_attribute(name)
