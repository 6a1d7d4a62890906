"""The border between our requests and an engine's: checked going in, checked coming out.

No engine library is imported: what an engine answers is described by the attributes that are read.
Memory pages and random numbers, which an engine must hand back as well, are here too.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from megagrpo.parallel import platform
from megagrpo.types import Completion, Request, Sampling

MIN_TEMPERATURE = 0.01  # vLLM raises lower ones to it in silence (0.32, SamplingParams)
_MADV_DONTNEED = 4


class Entry(Protocol):
    """What an engine says of one id at one position."""

    logprob: float  # nats


class Answer(Protocol):
    """A finished completion as vLLM returns it (`CompletionOutput`)."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Entry]] | None  # per position, by id
    finish_reason: str | None  # "stop" or "length"


def check_requests(
    requests: Sequence[Request], sampling: Sampling, max_model_len: int, valid_vocab: int
) -> None:
    """Raises ValueError for a request that vLLM would refuse with its whole batch, cut short in
    silence, or stumble over: its top-k expects all columns of the model's vocabulary."""
    if sampling.top_k > valid_vocab:
        raise ValueError(
            f"top_k={sampling.top_k} exceeds the {valid_vocab} ids of the tokenizer; use 0 (off)"
        )
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature={sampling.temperature} is below vLLM's least {MIN_TEMPERATURE}; use 0 "
            "(greedy) or a higher one"
        )
    for index, request in enumerate(requests):
        total = len(request.prompt_ids) + sampling.max_tokens
        if not request.prompt_ids or total > max_model_len:
            raise ValueError(
                f"request {index}: prompt of {len(request.prompt_ids)} tokens + "
                f"{sampling.max_tokens} new ones must be 1 .. {max_model_len} (max_model_len)"
            )


def to_completion(answer: Answer, index: int, stop_ids: Sequence[int]) -> Completion:
    """The engine's answer to request `index` as ours, log-probs looked up by the sampled id.

    Raises RuntimeError if one is absent or if numbers of ids and log-probs differ.
    """
    ids, entries = list(answer.token_ids), answer.logprobs
    if entries is None or len(entries) != len(ids):
        count = "no" if entries is None else len(entries)
        raise RuntimeError(f"request {index}: {len(ids)} token ids but {count} log-probs")
    logprobs = []
    for position, token in enumerate(ids):
        entry = entries[position].get(token)
        if entry is None:
            raise RuntimeError(
                f"request {index}: no log-prob of sampled id {token} at position {position}"
            )
        logprobs.append(float(entry.logprob))
    stopped = answer.finish_reason == "stop"
    if stopped and (not ids or ids[-1] not in stop_ids):
        raise RuntimeError(f"request {index} stopped at {ids[-1:]}, not at one of {stop_ids}")
    return Completion(ids=tuple(ids), logprobs=tuple(logprobs), stopped=stopped)


def release_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Give the pages of these CPU storages to the kernel; they read 0 and return when written."""
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for address, size in storages.items():
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED):
            code = ctypes.get_errno()
            raise OSError(code, f"madvise on the KV cache failed: {os.strerror(code)}")


@contextmanager
def rng_kept() -> Iterator[None]:
    """Sampling draws from the default generators even when every request has its seed."""
    state = platform.rng_snapshot()
    try:
        yield
    finally:
        platform.rng_restore(state)
