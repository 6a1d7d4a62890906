"""Who holds the device's memory: training state leaves while the engine works, and comes back.

Each unique storage (flat DDP buffers, parameters outside them, main parameters, moments) is
released and restored exactly once, by resizing it to nothing and back, so that every view of it
stays a view. Host copies are persistent. On CPU training and rollout share one memory and nothing
moves: `Resident`. The device form is written for CUDA and tested on CPU tensors; not run on a GPU.
Left out: the optimizer's own offload, which rebinds `p.data`.
"""

from collections.abc import Callable, Iterable
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
        self._host: dict[int, torch.Tensor] = {}  # by id of the storage's kept tensor
        self._parameters: list[torch.Tensor] = []
        self._optimizer: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def release_optimizer(self) -> None:
        """See `Offload`; the storages are looked up anew, for moments appear at step 1."""
        self._enter("resident", "optimizer released")
        seen: set[int] = set()
        self._parameters = self._bytes_of(self._state.parameters(), self._parameters, seen)
        self._optimizer = self._bytes_of(self._state.optimizer(), self._optimizer, seen)
        self._gradients = self._bytes_of(self._state.gradients(), self._gradients, seen)
        self._copy_out(self._optimizer)
        self._shrink([*self._optimizer, *self._gradients])

    def release_parameters(self) -> None:
        """See `Offload`."""
        self._enter("optimizer released", "released")
        self._copy_out(self._parameters)
        self._shrink(self._parameters)

    def restore_parameters(self) -> None:
        """See `Offload`."""
        self._enter("released", "optimizer released")
        self._copy_in(self._parameters)

    def restore_optimizer(self) -> None:
        """See `Offload`."""
        self._enter("optimizer released", "resident")
        self._copy_in(self._optimizer)
        for flat in self._gradients:
            flat.untyped_storage().resize_(flat.numel())
            flat.zero_()

    def _enter(self, expected: str, following: str) -> None:
        if self._phase != expected:
            raise RuntimeError(f"offload: {following!r} asked for while {self._phase!r}")
        self._phase = following

    def _bytes_of(
        self, tensors: Iterable[torch.Tensor], known: list[torch.Tensor], seen: set[int]
    ) -> list[torch.Tensor]:
        """One tensor of bytes over each storage that is not in `seen`, in order of appearance.

        The same tensor object is kept over the cycles: host copies are found by it.
        """
        kept = {flat.untyped_storage()._cdata: flat for flat in known}
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in seen or storage.nbytes() == 0:
                continue
            seen.add(storage._cdata)
            flat = kept.get(storage._cdata)
            if flat is None:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                flat.set_(storage, 0, (storage.nbytes(),), (1,))
            found.append(flat)
        return found

    def _copy_out(self, storages: list[torch.Tensor]) -> None:
        pinned = platform.is_cuda()
        for flat in storages:
            host = self._host.get(id(flat))
            if host is None:
                host = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=pinned)
                self._host[id(flat)] = host
            host.copy_(flat, non_blocking=pinned)
        platform.synchronize()

    def _copy_in(self, storages: list[torch.Tensor]) -> None:
        for flat in storages:
            flat.untyped_storage().resize_(flat.numel())
            flat.copy_(self._host[id(flat)], non_blocking=platform.is_cuda())
        platform.synchronize()

    def _shrink(self, storages: list[torch.Tensor]) -> None:
        for flat in storages:
            flat.untyped_storage().resize_(0)
        platform.empty_cache()
