"""Toy T on Megatron ranks, and the same step in plain transformers and torch to compare with.

The reference never sees a shard, a pack or a micro-batch: whole model, one sequence at a time, one
loss over all of them, torch.optim.AdamW.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from megagrpo.model import build, optimizer, schedule
from megagrpo.model.hf_config import read_shape
from megagrpo.model.parity import pack_tokens
from megagrpo.parallel import platform
from megagrpo.parallel.context import ParallelContext, init_parallel
from megagrpo.types import Layout, MicroBatch, ModelShape
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.slices import index
from megagrpo.weights.table import expand, padded_vocab

platform.mask_broken_media_packages()
from transformers import AutoModelForCausalLM  # noqa: E402

# Design 4.4: rounding stays near 1e-6 of a weight, a wrong sign shows as 2e-2.
OPTIM = optimizer.OptimSettings(
    lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01, grad_clip=1.0
)
TEMPERATURE = 0.7
LENGTHS = (7, 12, 1, 9, 3, 12, 5, 8)


@dataclass(frozen=True)
class Toy:
    """One model on one rank."""

    shape: ModelShape
    context: ParallelContext
    chunks: list[torch.nn.Module]


def toy_on_rank(
    folder: str,
    layout: Layout,
    settings: build.ModelSettings | None = None,
    dtype: torch.dtype = torch.float32,
    context: ParallelContext | None = None,
) -> Toy:
    """Build and load the model of an HF folder on this rank."""
    context = context or init_parallel(layout, seed=1)
    shape = read_shape(folder)
    chunks = build.build_model(
        shape,
        context,
        dtype=dtype,
        padded_vocab=padded_vocab(shape.vocab_size, layout.tp),
        settings=settings or build.ModelSettings(),
    )
    build.load_weights_(chunks, HFSource(folder), shape, context)
    return Toy(shape, context, chunks)


def sequences(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random token ids, never 0: transformers freezes the embedding of pad_token_id 0."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]


def trained(ids: Sequence[int]) -> list[bool]:
    """Positions whose label counts: all with a label but the first two, so that some have none."""
    return [1 < at < len(ids) - 1 for at in range(len(ids))]


def packed(batch: Sequence[Sequence[int]]) -> MicroBatch:
    """A pack with the mask of `trained`."""
    mask = torch.tensor([flag for ids in batch for flag in trained(ids)])
    return replace(pack_tokens(batch), mask=mask)


def dealt(batch: Sequence[Sequence[int]], layout: Layout, rank: int, cuts: int) -> list[MicroBatch]:
    """This rank's packs; a pack without a sequence is a dummy token (PAR-22)."""
    mine = batch[layout.coordinates(rank).dp :: layout.dp]
    return [packed(mine[cut::cuts] or [[0]]) for cut in range(cuts)]


def loss_over(batch: Sequence[Sequence[int]]) -> schedule.LossFn:
    """Minus the mean log-prob over all masked positions of `batch`, minus 0.1 x mean entropy."""
    count = sum(sum(trained(ids)) for ids in batch)

    def loss(
        logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert entropy is not None
        terms = -logprobs - 0.1 * entropy
        total = torch.where(micro.mask, terms, 0.0).sum() / count
        return total, {"loss": total.detach(), "tokens": micro.mask.sum()}

    return loss


def forward_backward(
    toy: Toy, trainable: optimizer.Trainable, batch: Sequence[Sequence[int]], cuts: int
) -> list[dict[str, torch.Tensor]]:
    """The schedule over this rank's part of `batch`."""
    context = toy.context
    return schedule.forward_backward(
        trainable,
        dealt(batch, context.layout, context.rank, cuts),
        loss_over(batch),
        context=context,
        temperature=TEMPERATURE,
        valid_vocab=toy.shape.vocab_size,
        with_entropy=True,
    )


@dataclass(frozen=True)
class Reference:
    """What one plain optimizer step did, by HuggingFace name."""

    loss: float
    grad_norm: float
    grads: dict[str, torch.Tensor]  # before clipping
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def reference_steps(
    folder: str, batches: Sequence[Sequence[Sequence[int]]], optim: optimizer.OptimSettings = OPTIM
) -> list[Reference]:
    """One optimizer step per batch with transformers, torch.optim.AdamW and clip_grad_norm_."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).train()
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    steps = []
    for batch in batches:
        before = {name: p.detach().clone() for name, p in named.items()}
        adam.zero_grad()
        loss = _reference_loss(model, batch)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in named.items()}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), optim.grad_clip)
        adam.step()
        after = {name: p.detach().clone() for name, p in named.items()}
        steps.append(Reference(loss.item(), norm.item(), grads, before, after))
    return steps


def _reference_loss(model: torch.nn.Module, batch: Sequence[Sequence[int]]) -> torch.Tensor:
    total, count = torch.zeros(()), 0
    for ids in batch:
        flags = torch.tensor(trained(ids))
        logits = model(torch.tensor([ids]), use_cache=False).logits[0] / TEMPERATURE
        distribution = torch.distributions.Categorical(logits=logits)
        labels = torch.tensor([*ids[1:], 0])
        terms = -distribution.log_prob(labels) - 0.1 * distribution.entropy()
        total = total + terms[flags].sum()
        count += int(flags.sum())
    return total / count


def largest_difference(
    toy: Toy,
    value_of: Callable[[torch.nn.Parameter], torch.Tensor],
    wanted: dict[str, torch.Tensor],
) -> tuple[float, str]:
    """Largest |ours - wanted| / max |wanted| over this rank's boxes, and the parameter it is in."""
    ours = build.local_parameters(toy.chunks)
    found = []
    slices = expand(toy.shape, toy.context.layout, toy.context.coords, build.naming_profile())
    for piece in slices:
        mine = value_of(ours[piece.megatron])[index(piece.megatron_box)]
        theirs = wanted[piece.hf]
        difference = (mine - theirs[index(piece.hf_box)]).abs().max() / theirs.abs().max()
        found.append((difference.item(), piece.megatron))
    return max(found)
