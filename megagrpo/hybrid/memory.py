"""Who holds the device's memory: training state leaves while the engine works, and comes back.

Each unique storage (flat DDP buffers, parameters outside them, main parameters, moments) is
released and restored exactly once, by resizing it to nothing and back, so that every view of it
stays a view. Host copies are persistent. On CPU training and rollout share one memory and nothing
moves: `Resident`. The device form is written for CUDA and tested on CPU tensors; not run on a GPU.
Left out: the optimizer's own offload, which rebinds `p.data`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megagrpo.parallel import platform


class Offload(Protocol):
    """What the hybrid engine asks for; the order is release_optimizer, release_parameters, and
    back restore_parameters, restore_optimizer."""

    def release_optimizer(self) -> None:
        """Gradients (their values are lost) and optimizer state leave the device."""

    def release_parameters(self) -> None:
        """Parameters leave the device; called after the engine has read them."""

    def restore_parameters(self) -> None:
        """Parameters are back, bit-equal."""

    def restore_optimizer(self) -> None:
        """Optimizer state is back, bit-equal; gradients are zero."""


class Resident:
    """Nothing moves: host and device memory are one."""

    def release_optimizer(self) -> None:
        """Nothing to do."""

    def release_parameters(self) -> None:
        """Nothing to do."""

    def restore_parameters(self) -> None:
        """Nothing to do."""

    def restore_optimizer(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class TrainingState:
    """Tensors of this rank by kind; views of one storage may appear many times, anywhere."""

    parameters: Callable[[], Iterable[torch.Tensor]]
    gradients: Callable[[], Iterable[torch.Tensor]]
    optimizer: Callable[[], Iterable[torch.Tensor]]  # main parameters and moments; grows at step 1


class DeviceOffload:
    """Moves a rank's training state to pinned host memory and back.

    A storage that several kinds share belongs to the first of parameters, optimizer, gradients.
    Raises RuntimeError when called out of order.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._phase = "resident"
        self._parameters, self._optimizer, self._gradients = _Storages(), _Storages(), _Storages()

    def release_optimizer(self) -> None:
        """See `Offload`; the storages are looked up anew, for moments appear at step 1."""
        self._enter("resident", "optimizer released")
        seen: set[int] = set()
        self._parameters.find(self._state.parameters(), seen)
        self._optimizer.find(self._state.optimizer(), seen)
        self._gradients.find(self._state.gradients(), seen)
        self._optimizer.copy_out()
        self._optimizer.shrink()
        self._gradients.shrink()

    def release_parameters(self) -> None:
        """See `Offload`."""
        self._enter("optimizer released", "released")
        self._parameters.copy_out()
        self._parameters.shrink()

    def restore_parameters(self) -> None:
        """See `Offload`."""
        self._enter("released", "optimizer released")
        self._parameters.copy_in()

    def restore_optimizer(self) -> None:
        """See `Offload`."""
        self._enter("optimizer released", "resident")
        self._optimizer.copy_in()
        self._gradients.grow_zeroed()

    def _enter(self, expected: str, following: str) -> None:
        if self._phase != expected:
            raise RuntimeError(f"offload: {following!r} asked for while {self._phase!r}")
        self._phase = following


class Parked:
    """Tensors that nobody changes, on the host until they are used; parked from the start.

    The one host copy is made at construction, so that leaving the device costs nothing later.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = _Storages()
        self._storages.find(tensors, set())
        self._storages.copy_out()
        self._storages.shrink()

    def restore(self) -> None:
        """Back on the device for good."""
        self._storages.copy_in()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the tensors may be read."""
        self._storages.copy_in()
        try:
            yield
        finally:
            self._storages.shrink()


class _Storages:
    """The distinct storages behind some tensors, and their host copies."""

    def __init__(self) -> None:
        self.hosts: dict[int, torch.Tensor] = {}  # by address of the storage object
        self._flats: dict[int, torch.Tensor] = {}  # all bytes of each storage

    def find(self, tensors: Iterable[torch.Tensor], seen: set[int]) -> None:
        """Hold each storage that is not in `seen`, which grows; others are forgotten."""
        known, self._flats = self._flats, {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in seen or storage.nbytes() == 0:
                continue
            seen.add(key)
            flat = known.get(key)
            if flat is None:  # holding it keeps the address from being given away
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                flat.set_(storage, 0, (storage.nbytes(),), (1,))
            self._flats[key] = flat
        self.hosts = {key: host for key, host in self.hosts.items() if key in self._flats}

    def copy_out(self) -> None:
        """To the host; the device keeps its memory."""
        pinned = platform.is_cuda()
        for key, flat in self._flats.items():
            if key not in self.hosts:
                self.hosts[key] = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=pinned)
            self.hosts[key].copy_(flat, non_blocking=pinned)
        platform.synchronize()

    def shrink(self) -> None:
        """Give the device's memory back; the content is lost there."""
        for flat in self._flats.values():
            flat.untyped_storage().resize_(0)
        platform.empty_cache()

    def copy_in(self) -> None:
        """Take memory on the device and the content from the host."""
        for key, flat in self._flats.items():
            flat.untyped_storage().resize_(flat.numel())
            flat.copy_(self.hosts[key], non_blocking=platform.is_cuda())
        platform.synchronize()

    def grow_zeroed(self) -> None:
        """Take memory on the device, all bytes zero."""
        for flat in self._flats.values():
            flat.untyped_storage().resize_(flat.numel())
            flat.zero_()
