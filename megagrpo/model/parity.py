"""Logits of the Megatron model against transformers' on the same tokens.

The one check that sees every conversion, flag and rotary fault at once. transformers runs one
sequence at a time, unpacked and unsharded, so that it shares nothing with what is checked. Left
out: which layer differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megagrpo.model.build import Chunks
from megagrpo.model.schedule import forward_logits
from megagrpo.parallel import platform
from megagrpo.parallel.context import ParallelContext
from megagrpo.types import MicroBatch, ModelShape


@dataclass(frozen=True)
class ParityReport:
    """How far two models' logits are apart."""

    max_abs_diff: float  # NaN if either has NaN
    max_abs_logit: float  # of the reference, to judge the difference by
    tokens: int
    sequence: int  # where the largest difference is
    position: int  # within that sequence


def pack_tokens(sequences: Sequence[Sequence[int]]) -> MicroBatch:
    """Token ids behind one another, every next token a label, nothing sampled (mask 0)."""
    tokens = torch.tensor([token for ids in sequences for token in ids])
    labels = torch.tensor([token for ids in sequences for token in (*ids[1:], 0)])
    lengths = torch.tensor([len(ids) for ids in sequences])
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        positions=torch.cat([torch.arange(len(ids)) for ids in sequences]),
        mask=torch.zeros(len(tokens), dtype=torch.bool),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        rows=tuple(range(len(sequences))),
    )


def hf_logits(folder: str, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """transformers' logits [length, V] float32 of every sequence, computed in float32 on the CPU.

    Loads the whole model in this process; eager attention, no cache.
    """
    platform.mask_broken_media_packages()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return [model(torch.tensor([list(ids)]), use_cache=False).logits[0] for ids in sequences]


def megatron_logits(
    chunks: Chunks,
    sequences: Sequence[Sequence[int]],
    *,
    shape: ModelShape,
    context: ParallelContext,
) -> list[torch.Tensor]:
    """The Megatron model's logits [length, V] float32, all sequences in one pack; all ranks join
    and all get them."""
    (packed,) = forward_logits(
        chunks, [pack_tokens(sequences)], context=context, valid_vocab=shape.vocab_size
    )
    return list(packed.split([len(ids) for ids in sequences]))


def compare(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> ParityReport:
    """The largest difference between two lists of logits [length, V]."""
    assert [x.shape for x in ours] == [x.shape for x in reference], (
        f"logits have shapes {[tuple(x.shape) for x in ours]}, the reference "
        f"{[tuple(x.shape) for x in reference]}"
    )
    # NaN counts as the largest difference.
    rows = [(a - b.to(a.device)).abs().amax(1) for a, b in zip(ours, reference, strict=True)]
    worst = torch.cat(rows)
    at = int(worst.nan_to_num(nan=torch.inf).argmax())
    lengths = [len(row) for row in rows]
    sequence = next(i for i in range(len(lengths)) if at < sum(lengths[: i + 1]))
    return ParityReport(
        max_abs_diff=float(worst[at]),
        max_abs_logit=max(float(x.abs().max()) for x in reference),
        tokens=sum(lengths),
        sequence=sequence,
        position=at - sum(lengths[:sequence]),
    )
