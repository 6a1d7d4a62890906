"""Repairs to single megatron-core modules, applied by the import hook right after each loads.

What each is for and when it may go stands in parallel/mcore_cpu.py. Measured on 0.16.1.
"""

import atexit
import ctypes
import functools
import multiprocessing
import os
import signal
import types
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

import torch

from megagrpo.parallel import platform

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def disable_jit_fuser(module: types.ModuleType) -> None:
    """`megatron.core.jit`: no torch.compile on CPU, where it costs minutes and saves nothing."""
    if not platform.is_cuda():
        module.disable_jit_fuser()


def define_te_general_gemm(module: types.ModuleType) -> None:
    """`moe_utils`: define the name that 0.16 forgets when TE is missing."""
    module.__dict__.setdefault("te_general_gemm", None)


def deny_missing_te(module: types.ModuleType) -> None:
    """`multi_latent_attention`: do not claim a TE whose linear layers are stand-ins."""
    if not isinstance(module.__dict__.get("TELinear"), type):
        module.__dict__["HAVE_TE"] = False


class _ForkedQueue:
    """One queue served by a forked manager process per rank process, ended at exit."""

    def __init__(self) -> None:
        self._owner = -1  # pid, because a forked test rank inherits this object
        self._manager: SyncManager | None = None
        self._queue: Any = None

    def get(self, mp_mode: str = "fork") -> Any:
        """The queue of this process; `mp_mode` is upstream's argument from 0.17 on."""
        if self._owner != os.getpid():
            self._manager = SyncManager(ctx=multiprocessing.get_context("fork"))
            self._manager.start(initializer=_end_with_parent, initargs=(os.getpid(),))
            self._queue = self._manager.Queue()
            self._owner = os.getpid()
            atexit.register(self.shutdown)
        return self._queue

    def shutdown(self) -> None:
        """End the manager process; it would keep inherited pipes open."""
        if self._manager is not None and self._owner == os.getpid():
            self._manager.shutdown()
            self._manager = None
            self._owner = -1


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process when the thread that forked it ends, even by SIGKILL: it
    holds copies of the rank's sockets, which would keep the other ranks waiting for a dead one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _bound_to_parent(write: Callable[..., None]) -> Callable[..., None]:
    """A forked process's body that ends with its parent."""

    @functools.wraps(write)
    def bound(*args: Any, **kwargs: Any) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            _end_with_parent(parent.pid)
        write(*args, **kwargs)

    return bound


WRITE_QUEUE = _ForkedQueue()


def fork_write_queue(module: types.ModuleType) -> None:
    """`filesystem_async`: results queue from a forked manager. Forking is unsafe under CUDA, so a
    GPU machine keeps upstream's. The writers that upstream forks die with their rank."""
    writer = module.FileSystemWriterAsync
    writer.write_preloaded_data = staticmethod(_bound_to_parent(writer.write_preloaded_data))
    if platform.is_cuda():
        return
    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if name in module.__dict__:
            setattr(module, name, WRITE_QUEUE.get)


class _PackedRope:
    """Rotary embedding of packed tokens with the cosines of a micro-batch computed once.

    Upstream slices the frequencies sequence by sequence in Python and takes cosines and sines of
    all tokens again for queries and keys of every layer. The numbers are the same, bit for bit.
    """

    def __init__(self, upstream: Callable[..., torch.Tensor]) -> None:
        self._upstream = upstream
        self._key: tuple[torch.Tensor, torch.Tensor, torch.dtype] | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Rotate t [T, H, D]; anything but plain whole-head rotation goes to upstream."""
        plain = not options.get("rotary_interleaved") and not options.get("multi_latent_attention")
        plain = plain and options.get("mscale", 1.0) == 1.0 and options["cp_group"].size() == 1
        if not plain or freqs.shape[-1] != t.shape[-1]:
            return self._upstream(t, cu_seqlens, freqs, **options)
        cos, sin = self._cos_sin(cu_seqlens, freqs, t.dtype)
        first, second = t.chunk(2, dim=-1)
        return t * cos + torch.cat((-second, first), dim=-1) * sin

    def _cos_sin(
        self, cu_seqlens: torch.Tensor, freqs: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, D] each; kept while the same packing and frequencies come again."""
        known = self._key
        if (
            known is None
            or self._tables is None
            or known[0] is not cu_seqlens
            or known[1] is not freqs
            or known[2] != dtype
        ):
            lengths = cu_seqlens.diff()
            starts = cu_seqlens[:-1].repeat_interleave(lengths)
            positions = torch.arange(len(starts), device=starts.device) - starts
            angles = freqs[positions].squeeze(1)
            self._key = (cu_seqlens, freqs, dtype)
            self._tables = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self._tables


def vectorise_packed_rope(module: types.ModuleType) -> None:
    """`rope_utils`: one gather instead of a Python loop over the sequences of a pack."""
    if not platform.is_cuda():
        name = "_apply_rotary_pos_emb_thd"
        module.__dict__[name] = _PackedRope(module.__dict__[name])


def repair_distributed_optimizer(module: types.ModuleType) -> None:
    """`DistributedOptimizer` over torch.optim.AdamW, which keeps one "step" tensor per parameter.

    Upstream expects the per-group step of TE's and apex's Adam. Without them (a) saving and loading
    parameter state trips over "step" and over in-place writes on leaves, (b) preparing a load
    asserts on empty state, (c) after a load all parameters share ONE step tensor, which then
    advances once per parameter: training diverges without a word.
    """
    if module.HAVE_APEX_OR_TE:
        return
    cls = module.DistributedOptimizer
    cls._get_main_param_and_optimizer_states = _without_step(
        cls._get_main_param_and_optimizer_states
    )
    cls._set_main_param_and_optimizer_states = _set_states
    cls._init_optimizer_states_with_dummy_values = _with_rate_zero(
        cls._init_optimizer_states_with_dummy_values
    )
    cls.sharded_state_dict = _with_state_allocated(cls.sharded_state_dict)
    cls.load_state_dict = _with_own_steps(cls.load_state_dict)


def _without_step(get: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def get_states(self: Any, model_param: Any) -> dict[str, Any]:
        return {key: value for key, value in get(self, model_param).items() if key != "step"}

    return get_states


@torch.no_grad()
def _set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    for key, value in self._get_main_param_and_optimizer_states(model_param).items():
        value.copy_(tensors[key])


def _with_rate_zero(init: Callable[[Any], None]) -> Callable[[Any], None]:
    """The dummy step that allocates moments must neither decay the weights nor count."""

    def init_states(self: Any) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        init(self)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self.optimizer.state.values():
            state["step"].zero_()

    return init_states


def _with_state_allocated(sharded: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
    ) -> Any:
        if not self.optimizer.state:  # before a load, or a save before the first step
            self._init_optimizer_states_with_dummy_values()
        return sharded(self, model_sharded_state_dict, is_loading, **kwargs)

    return sharded_state_dict


def _with_own_steps(load: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict
