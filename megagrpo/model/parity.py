"""Logits of the Megatron model against transformers' on the same tokens.

The one check that sees every conversion, flag and rotary fault at once. transformers runs one
sequence at a time, unpacked and unsharded, so that it shares nothing with what is checked.
`check_checkpoint` also says at which layer the two part.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megagrpo.model.build import Chunks, ModelSettings, bare, build_model, load_weights_
from megagrpo.model.schedule import forward_logits
from megagrpo.parallel import platform
from megagrpo.parallel.context import ParallelContext, init_parallel
from megagrpo.types import Layout, MicroBatch, ModelShape, TensorSource
from megagrpo.weights.table import padded_vocab


@dataclass(frozen=True)
class ParityReport:
    """How far two models' logits are apart."""

    max_abs_diff: float  # NaN if either has NaN
    max_abs_logit: float  # of the reference, to judge the difference by
    tokens: int
    sequence: int  # where the largest difference is
    position: int  # within that sequence


@dataclass(frozen=True)
class LayerDifference:
    """How far one layer's output is from transformers'."""

    layer: int
    max_abs_diff: float  # NaN if either has NaN
    max_abs_value: float  # of the reference

    @property
    def relative(self) -> float:
        """Difference over size, infinite for NaN."""
        ratio = self.max_abs_diff / max(self.max_abs_value, 1e-30)
        return math.inf if math.isnan(ratio) else ratio


class LayerOutputs:
    """Keeps what each layer of a model puts out, all calls behind one another, as [tokens, H]."""

    def __init__(self) -> None:
        self._found: dict[int, list[torch.Tensor]] = {}

    def watch(self, layers: Iterable[torch.nn.Module]) -> None:
        """Record from now on."""
        for number, layer in enumerate(layers):
            self._found[number] = []
            layer.register_forward_hook(partial(self._keep, number))

    def layers(self) -> list[torch.Tensor]:
        """One tensor per layer."""
        return [torch.cat(self._found[number]) for number in sorted(self._found)]

    def _keep(self, number: int, _module: object, _inputs: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._found[number].append(hidden.detach().reshape(-1, hidden.shape[-1]).float().cpu())


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


def hf_logits(
    folder: str, sequences: Sequence[Sequence[int]], outputs: LayerOutputs | None = None
) -> list[torch.Tensor]:
    """transformers' logits [length, V] float32 of every sequence, computed in float32 on the CPU.

    `outputs` records the layers. Loads the whole model in this process; eager attention, no cache.
    """
    platform.mask_broken_media_packages()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if outputs is not None:
        outputs.watch(model.model.layers)
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


def check_checkpoint(
    hf: str, source: TensorSource, shape: ModelShape, sequences: Sequence[Sequence[int]]
) -> tuple[ParityReport, list[LayerDifference]]:
    """The Megatron model with the weights of `source` against transformers with those of the folder
    `hf`: logits, and the output of every layer. One process, float32; holds both models in turn.
    """
    reference_layers, our_layers = LayerOutputs(), LayerOutputs()
    reference = hf_logits(hf, sequences, reference_layers)
    platform.init_process_group(timeout_s=1800)
    context = init_parallel(Layout(world=1), seed=1)
    chunks = build_model(
        shape,
        context,
        dtype=torch.float32,
        padded_vocab=padded_vocab(shape.vocab_size, 1),
        settings=ModelSettings(),
    )
    load_weights_(chunks, source, shape, context)
    our_layers.watch(bare(chunks[0]).decoder.layers)
    ours = megatron_logits(chunks, sequences, shape=shape, context=context)
    pairs = zip(our_layers.layers(), reference_layers.layers(), strict=True)
    differences = [
        LayerDifference(
            layer=number,
            max_abs_diff=float((mine - theirs).abs().max()),
            max_abs_value=float(theirs.abs().max()),
        )
        for number, (mine, theirs) in enumerate(pairs)
    ]
    return compare(ours, reference), differences
