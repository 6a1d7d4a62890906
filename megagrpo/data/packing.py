"""Sequences behind one another without padding, and the plan of who packs what.

Packing exists so that a forward pass costs what its tokens cost, whatever their lengths. The plan
is a pure function of the lengths: every rank computes all of it and takes its own line. Left out:
attention cost in the balance (tokens only), and splitting one sequence over passes.

Letters: T packed tokens, B sequences of one pack.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from megagrpo.types import MicroBatch

DUMMY_ROW = -1
DUMMY_SEQUENCE: tuple[tuple[int, ...], tuple[int, ...]] = ((0,), ())
"""One token that nobody sampled: keeps a rank's schedule as long as the others'."""

PerToken = Sequence[float] | torch.Tensor


def pack(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    values: Mapping[str, Sequence[PerToken]],
    rows: Sequence[int],
    pad_to_multiple: int = 1,
) -> MicroBatch:
    """Pack (prompt ids, response ids) pairs in the given order into one micro-batch.

    `values[name][i]` holds one number per response token of `sequences[i]` (lists become float32,
    tensors keep their dtype) and lands on the position that predicts the token, as the mask does;
    elsewhere stands 0. The mask comes from the lengths of the sampled ids, never from their values.
    `rows[i]` names sequence i in the caller's list, -1 a dummy (DUMMY_SEQUENCE). T is brought to a
    multiple of `pad_to_multiple` by one more dummy sequence. Raises ValueError if a sequence has no
    prompt, a dummy has a response, or a value's length differs from the response's.

    Example: prompt (5, 6), response (7,), values {"old_logprobs": [[-0.5]]}: tokens [5, 6, 7],
    labels [6, 7, 0], mask [0, 1, 0], old_logprobs [0, -0.5, 0].
    """
    assert len(sequences) == len(rows), f"{len(sequences)} sequences but {len(rows)} rows"
    prompt_lengths = [len(prompt) for prompt, _ in sequences]
    response_lengths = [len(response) for _, response in sequences]
    _check_sequences(prompt_lengths, response_lengths, rows)
    flat = {name: _flat(name, given, response_lengths, rows) for name, given in values.items()}
    ids = list(chain.from_iterable(chain.from_iterable(sequences)))
    packed_rows = tuple(rows)
    padding = -len(ids) % pad_to_multiple
    if padding:
        ids += [0] * padding
        packed_rows += (DUMMY_ROW,)
        prompt_lengths.append(padding)
        response_lengths.append(0)

    tokens = torch.tensor(ids, dtype=torch.int64)
    prompts, responses = torch.tensor(prompt_lengths), torch.tensor(response_lengths)
    lengths = prompts + responses
    ends = lengths.cumsum(0)
    positions = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
    last = ends - 1
    labels = torch.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[last] = 0
    mask = positions >= (prompts - 1).repeat_interleave(lengths)
    mask[last] = False
    cu_seqlens = torch.zeros(len(packed_rows) + 1, dtype=torch.int32)
    cu_seqlens[1:] = ends
    # A pack's masked positions stand in the order of its response tokens.
    placed = {name: _place(numbers, mask) for name, numbers in flat.items()}
    return MicroBatch(tokens, labels, positions, mask, cu_seqlens, packed_rows, placed)


def _check_sequences(
    prompt_lengths: list[int], response_lengths: list[int], rows: Sequence[int]
) -> None:
    if not rows:
        raise ValueError("a micro-batch needs a sequence; pack DUMMY_SEQUENCE where there is none")
    for prompt, response, row in zip(prompt_lengths, response_lengths, rows, strict=True):
        if not prompt:
            raise ValueError(f"sample {row} has no prompt token, so nothing predicts its response")
        if row < 0 and response:
            raise ValueError(f"a dummy sequence (row {row}) has {response} response tokens, not 0")


def _flat(
    name: str, given: Sequence[PerToken], response_lengths: list[int], rows: Sequence[int]
) -> torch.Tensor:
    """All rows' numbers behind one another, each row as long as its response."""
    assert len(given) == len(rows), f"{name}: values of {len(given)} rows for {len(rows)} rows"
    for row, length, numbers in zip(rows, response_lengths, given, strict=True):
        if len(numbers) != length:
            raise ValueError(
                f"sample {row}: {length} response ids but {len(numbers)} values of {name}"
            )
    dtypes = [numbers.dtype for numbers in given if isinstance(numbers, torch.Tensor)]
    if dtypes:
        return torch.cat([torch.as_tensor(numbers, dtype=dtypes[0]) for numbers in given])
    return torch.tensor(list(chain.from_iterable(given)), dtype=torch.float32)


def _place(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[T]: `flat` where the mask is set, 0 elsewhere."""
    placed = torch.zeros(len(mask), dtype=flat.dtype)
    placed[mask] = flat
    return placed


def unpack(values: torch.Tensor, micro_batch: MicroBatch) -> dict[int, torch.Tensor]:
    """Take [T] values apart: row -> its response tokens' values, rows ascending, dummies left out.

    The inverse of `pack`: merge the dicts of all micro-batches and index them by the caller's rows.
    """
    mask, ends = micro_batch.mask, micro_batch.cu_seqlens.long()
    assert values.shape == mask.shape, f"values {tuple(values.shape)}, T {tuple(mask.shape)}"
    before = torch.zeros(len(mask) + 1, dtype=torch.int64)
    before[1:] = mask.cumsum(0)
    counts = (before[ends[1:]] - before[ends[:-1]]).tolist()
    parts = zip(micro_batch.rows, values[mask.to(values.device)].split(counts), strict=True)
    return dict(sorted((row, part) for row, part in parts if row != DUMMY_ROW))


def plan_micro_batches(
    lengths: Sequence[int], dp: int, max_tokens: int, minimum: int = 1
) -> list[list[list[int]]]:
    """Which rows each data-parallel rank packs: plan[rank][micro_batch] is a list of rows.

    Deterministic; no pack holds more than `max_tokens` tokens (padding to a multiple apart); all
    ranks get equally many packs, at least `minimum`; packs and ranks are balanced by tokens; a pack
    without a row is [-1], a dummy. `lengths` are prompt + response tokens. Raises ValueError if one
    exceeds the budget.

    Example: lengths [8, 8, 1, 1], dp 2, 8 tokens: [[[0], [3]], [[1], [2]]].
    """
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"data.max_tokens_per_microbatch={max_tokens} is too small for sample {row} with "
                f"{length} tokens; raise it to at least {length}"
            )
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    tight = _best_fit(order, lengths, max_tokens)
    per_rank = max(minimum, -(-len(tight) // dp))
    packs = _spread(order, lengths, dp * per_rank)
    if any(sum(lengths[row] for row in rows) > max_tokens for rows in packs):
        packs = tight + [[] for _ in range(dp * per_rank - len(tight))]
    return _deal(packs, lengths, dp)


def _best_fit(order: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Few packs: each row, longest first, goes where the least room is left over."""
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for row in order:
        place = bisect_left(room, (lengths[row], -1))
        if place == len(room):
            packs.append([row])
            insort(room, (max_tokens - lengths[row], len(packs) - 1))
        else:
            left, pack_index = room.pop(place)
            packs[pack_index].append(row)
            insort(room, (left - lengths[row], pack_index))
    return packs


def _spread(order: list[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """`count` even packs: each row, longest first, goes to the lightest pack."""
    packs: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for row in order:
        load, index = heap[0]
        packs[index].append(row)
        heapq.heapreplace(heap, (load + lengths[row], index))
    return packs


def _deal(packs: list[list[int]], lengths: Sequence[int], dp: int) -> list[list[list[int]]]:
    """Give every rank one of the next `dp` packs in turn, the heaviest to who has least so far."""
    loads = [sum(lengths[row] for row in rows) for rows in packs]
    heavy_first = sorted(range(len(packs)), key=lambda index: (-loads[index], index))
    plan: list[list[list[int]]] = [[] for _ in range(dp)]
    held = [0] * dp
    for start in range(0, len(packs), dp):
        light_first = sorted(range(dp), key=lambda rank: (held[rank], rank))
        for rank, index in zip(light_first, heavy_first[start : start + dp], strict=True):
            plan[rank].append(sorted(packs[index]) or [DUMMY_ROW])
            held[rank] += loads[index]
    return plan
