"""Optimizer steps on Megatron ranks against plain transformers and torch, and what they promise."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megagrpo.model import build, optimizer, schedule
from megagrpo.model.parity import hf_logits
from megagrpo.parallel.context import init_parallel
from megagrpo.types import Layout, MicroBatch
from tests.megatron_toys import (
    OPTIM,
    TEMPERATURE,
    Reference,
    Toy,
    dealt,
    forward_backward,
    largest_difference,
    packed,
    reference_steps,
    sequences,
    toy_on_rank,
)
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

MODELS = {
    "qwen3": ("qwen3", False, {}),
    "qwen3-tied": ("qwen3", True, {"vocab_size": 131}),
    "qwen2": ("qwen2", False, {}),
    "one-kv-head": ("llama", False, {"num_key_value_heads": 1}),
}
LAYOUTS = {
    "111": (Layout(1), False),
    "211": (Layout(2, tp=2), False),
    "211-sp": (Layout(2, tp=2), True),
    "121": (Layout(2, pp=2), False),
    "112": (Layout(2), False),
    "212": (Layout(4, tp=2), False),
    "221-sp": (Layout(4, tp=2, pp=2), True),
}
BATCHES = [sequences(128, seed=1), sequences(128, (4, 30, 11, 6, 12), seed=2)]
RELATIVE = 1e-5  # design 4.4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("models")
    return {
        name: make_hf_folder(root / name, family, tied, **overrides)
        for name, (family, tied, overrides) in MODELS.items()
    }


@pytest.fixture(scope="module")
def references(folders: dict[str, str]) -> dict[str, list[Reference]]:
    return {name: reference_steps(folder, BATCHES) for name, folder in folders.items()}


def relative(ours: float, wanted: float) -> float:
    return abs(ours - wanted) / abs(wanted)


def total_loss(sums: list[dict[str, torch.Tensor]], toy: Toy) -> float:
    """Summed over micro-batches and data-parallel ranks; NaN on stages without a loss."""
    if not toy.context.is_last_stage:
        assert sums == []
        return math.nan
    total = torch.stack([micro["loss"] for micro in sums]).sum()
    dist.all_reduce(total, group=toy.context.dp_group)
    return total.item()


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed-optimizer"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_two_optimizer_steps_equal_plain_torch_at_every_layout(
    layout_name: str,
    distributed: bool,
    folders: dict[str, str],
    references: dict[str, list[Reference]],
) -> None:
    """Loss, gradients, gradient norm and weights, tied and untied: LOSS-25, LOSS-26, LP-21, PAR-22,
    PAR-24, PAR-25."""
    layout, sequence_parallel = LAYOUTS[layout_name]
    settings = build.ModelSettings(sequence_parallel=sequence_parallel)

    def check(rank: int) -> dict[str, float]:
        context = init_parallel(layout, seed=1)
        worst: dict[str, float] = {}
        for name, folder in folders.items():
            toy = toy_on_rank(folder, layout, settings, context=context)
            optim = replace(OPTIM, use_distributed_optimizer=distributed)
            trainable = optimizer.wrap_and_build(toy.chunks, context, optim)
            for number, (batch, cuts) in enumerate(zip(BATCHES, (3, 2), strict=True)):
                wanted = references[name][number]
                loss = total_loss(forward_backward(toy, trainable, batch, cuts), toy)
                found = {"loss": 0.0 if math.isnan(loss) else relative(loss, wanted.loss)}
                if not distributed:
                    gradient = largest_difference(toy, lambda p: p.main_grad, wanted.grads)
                    found[f"gradient of {gradient[1]}"] = gradient[0]
                optimizer.set_lr(trainable, OPTIM.lr)
                result = optimizer.step(trainable, context)
                assert not result.skipped
                found["grad norm"] = relative(result.grad_norm, wanted.grad_norm)
                weight = largest_difference(toy, lambda p: p.detach(), wanted.after)
                found[f"weight {weight[1]}"] = weight[0]
                worst |= {f"{name} step {number} {what}": value for what, value in found.items()}
        return worst

    for steps in references.values():
        for step in steps:
            assert step.grad_norm > OPTIM.grad_clip, "clipping would go unseen"
            moved = [(step.after[n] - step.before[n]).abs().max() for n in step.after]
            assert min(moved) > 1e-3, "a step this small would hide a wrong gradient"
    for rank, found in enumerate(run_ranks(layout.world, check)):
        wrong = {what: value for what, value in found.items() if not value < RELATIVE}
        assert not wrong, f"rank {rank}: {wrong}"


def test_both_copies_of_a_tied_embedding_stay_equal_over_pipeline_stages(
    folders: dict[str, str],
) -> None:
    """PAR-25."""

    def copy(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        toy = toy_on_rank(folders["qwen3-tied"], Layout(2, pp=2))
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)
        forward_backward(toy, trainable, BATCHES[0], cuts=2)
        name = "embedding.word_embeddings.weight" if rank == 0 else "output_layer.weight"
        weight = build.local_parameters(toy.chunks)[name]
        gradient = weight.main_grad.clone()
        optimizer.step(trainable, toy.context)
        return gradient, weight.detach().clone()

    (first_grad, first), (last_grad, last) = run_ranks(2, copy)
    assert first_grad.abs().max() > 0
    assert torch.equal(first_grad, last_grad)
    assert torch.equal(first, last)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_gradients_are_equal_on_all_tensor_ranks(
    sequence_parallel: bool, folders: dict[str, str]
) -> None:
    """PAR-24: input, MLP, final, q and k norms; equality with one rank is checked above."""
    settings = build.ModelSettings(sequence_parallel=sequence_parallel)

    def norms(rank: int) -> dict[str, torch.Tensor]:
        toy = toy_on_rank(folders["qwen3"], Layout(2, tp=2), settings)
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)
        forward_backward(toy, trainable, BATCHES[0], cuts=2)
        named = build.local_parameters(toy.chunks)
        return {n: p.main_grad.clone() for n, p in named.items() if "norm" in n}

    first, second = run_ranks(2, norms)
    assert len(first) == 4 * 4 + 1
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("cuts", [1, 3])
def test_gradients_are_reduced_once_per_optimizer_step(cuts: int, folders: dict[str, str]) -> None:
    """LOSS-26: not once per micro-batch."""

    def reductions(rank: int) -> int:
        toy = toy_on_rank(folders["qwen3"], Layout(2))
        optim = replace(OPTIM, use_distributed_optimizer=False)
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, optim)
        reduced: list[int] = []
        all_reduce = dist.all_reduce

        def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reduced.append(tensor.numel())
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = counting
        forward_backward(toy, trainable, BATCHES[0], cuts)
        count = sum(p.numel() for p in toy.chunks[0].parameters())
        return sum(numel >= count for numel in reduced)

    assert run_ranks(2, reductions) == [1, 1]


def test_a_loss_of_another_form_or_a_dividing_schedule_is_an_error(folders: dict[str, str]) -> None:
    """PAR-14: a loss alone, a triple, one value per token; and the flag under which megatron-core
    divides by the number of micro-batches."""
    wrong: list[Callable[[torch.Tensor], Any]] = [
        lambda logprobs: logprobs.sum(),
        lambda logprobs: (logprobs.sum(), torch.tensor(3), {}),
        lambda logprobs: (logprobs, {}),
    ]

    def refusals(rank: int) -> list[str]:
        toy = toy_on_rank(folders["qwen3"], Layout(1))
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)
        said = []
        for per_token, loss in [*((True, loss) for loss in wrong), (False, wrong[2])]:
            build.bare(trainable.chunks[0]).config.calculate_per_token_loss = per_token
            with pytest.raises((TypeError, ValueError, AssertionError)) as caught:
                schedule.forward_backward(
                    trainable,
                    [packed(BATCHES[0][:2])],
                    lambda logprobs, entropy, micro, of=loss: of(logprobs),
                    context=toy.context,
                    temperature=1.0,
                    valid_vocab=toy.shape.vocab_size,
                    with_entropy=False,
                )
            said.append(str(caught.value))
        return said

    (said,) = run_ranks(1, refusals)
    assert "one number" in said[2] and "divide" in said[3], said


def test_a_neighbour_in_the_pack_leaves_the_gradient_alone(folders: dict[str, str]) -> None:
    """PAR-7: only the second sequence is trained; another first one of equal length."""
    first, other, second = sequences(128, (9, 9, 12), seed=5)

    def gradients(rank: int) -> list[dict[str, torch.Tensor]]:
        toy = toy_on_rank(folders["qwen3"], Layout(1))
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)

        def loss(logprobs: torch.Tensor, _: Any, micro: MicroBatch) -> Any:
            return -logprobs[len(first) : -1].sum(), {}

        found = []
        for neighbour in (first, other):
            schedule.forward_backward(
                trainable,
                [packed([neighbour, second])],
                loss,
                context=toy.context,
                temperature=1.0,
                valid_vocab=128,
                with_entropy=False,
            )
            named = build.local_parameters(toy.chunks)
            found.append({n: p.main_grad.clone() for n, p in named.items()})
        return found

    beside_first, beside_other = run_ranks(1, gradients)[0]
    assert all(grad.abs().max() > 0 for grad in beside_first.values())
    # Sums over the tokens of both sequences contain exact zeros of the first.
    for name, grad in beside_first.items():
        torch.testing.assert_close(beside_other[name], grad, rtol=0, atol=1e-7 * grad.abs().max())


def logprobs_of(toy: Toy, packs: list[MicroBatch], temperature: float) -> list[torch.Tensor]:
    return schedule.forward_logprobs(
        toy.chunks,
        packs,
        context=toy.context,
        temperature=temperature,
        valid_vocab=toy.shape.vocab_size,
    )


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2), Layout(2, pp=2), Layout(2)])
def test_log_probs_reach_every_stage_and_equal_a_dense_log_softmax(
    layout: Layout, folders: dict[str, str]
) -> None:
    """LP-12 on the trainer's side, LP-3 for the padded vocabulary of 131."""
    folder = folders["qwen3-tied"]
    batch = sequences(131, seed=3)
    wanted = {}
    for ids, logits in zip(batch, hf_logits(folder, batch), strict=True):
        scaled = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
        wanted[tuple(ids)] = scaled.gather(1, torch.tensor([[*ids[1:], 0]]).T).squeeze(1)

    def worst(rank: int) -> float:
        toy = toy_on_rank(folder, layout)
        packs = dealt(batch, layout, rank, cuts=2)
        found = []
        for micro, logprobs in zip(packs, logprobs_of(toy, packs, TEMPERATURE), strict=True):
            lengths = micro.cu_seqlens.diff().tolist()
            pairs = zip(micro.tokens.split(lengths), logprobs.split(lengths), strict=True)
            for ids, row in pairs:
                found.append((row - wanted[tuple(ids.tolist())]).abs().max().item())
        return max(found)

    assert max(run_ranks(layout.world, worst)) < 1e-5


def test_log_prob_passes_run_without_dropout_and_restore_the_mode(folders: dict[str, str]) -> None:
    """LP-18, CKPT-16 for weights and gradients."""

    def passes(rank: int) -> None:
        toy = toy_on_rank(folders["qwen3"], Layout(1))
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)
        model = build.bare(trainable.chunks[0])
        for layer in model.decoder.layers:
            layer.hidden_dropout = 0.5
        packs = [packed(BATCHES[0])]
        tokens, positions = packs[0].tokens[None, :12], packs[0].positions[None, :12]
        noisy = [model(tokens, positions, None) for _ in range(2)]
        assert not torch.equal(*noisy), "dropout is not on, the test would prove nothing"
        random_before = torch.get_rng_state()
        for mode in (True, False):
            trainable.chunks[0].train(mode)
            first, second = (logprobs_of(toy, packs, 1.0)[0] for _ in range(2))
            assert torch.equal(first, second)
            assert not first.requires_grad
            assert {m.training for m in trainable.chunks[0].modules()} == {mode}
        assert torch.equal(torch.get_rng_state(), random_before)

    run_ranks(1, passes)


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, tp=2), Layout(2, pp=2)])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(
    layout: Layout, distributed: bool, folders: dict[str, str]
) -> None:
    """LOSS-27, rule 14: the step after a skipped one is what it would have been without it."""

    def check(rank: int) -> tuple[bool, bool, bool]:
        toy = toy_on_rank(folders["qwen3"], layout)
        optim = replace(OPTIM, use_distributed_optimizer=distributed)
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, optim)
        named = build.local_parameters(toy.chunks)
        forward_backward(toy, trainable, BATCHES[0], cuts=1)
        optimizer.step(trainable, toy.context)
        before = {n: p.detach().clone() for n, p in named.items()}

        forward_backward(toy, trainable, BATCHES[0], cuts=1)
        if rank == 1:  # on one rank's gradient only, after the reduction
            shards = [buffer.grad_data for buffer in trainable.chunks[0].buffers]
            shards[0][shards[0].numel() // 2 :] = math.nan
        result = optimizer.step(trainable, toy.context)
        untouched = all(torch.equal(p.detach(), before[n]) for n, p in named.items())

        forward_backward(toy, trainable, BATCHES[1], cuts=1)
        optimizer.step(trainable, toy.context)
        after = {n: p.detach().clone() for n, p in named.items()}
        fresh = toy_on_rank(folders["qwen3"], layout, context=toy.context)
        again = optimizer.wrap_and_build(fresh.chunks, fresh.context, optim)
        for batch in BATCHES:
            forward_backward(fresh, again, batch, cuts=1)
            optimizer.step(again, fresh.context)
        straight = build.local_parameters(fresh.chunks)
        same = all(torch.equal(after[n], p.detach()) for n, p in straight.items())
        return result.skipped, untouched, same

    assert run_ranks(layout.world, check) == [(True, True, True)] * layout.world


def test_masters_follow_weights_that_were_loaded_later(folders: dict[str, str]) -> None:
    """CKPT-1 in bf16: wrap, load, refresh, one step at lr 0; without the refresh it is undone."""

    def check(rank: int) -> tuple[bool, bool]:
        kept = []
        context = init_parallel(Layout(1), seed=1)
        for refresh in (True, False):
            toy = toy_on_rank(folders["qwen3"], Layout(1), dtype=torch.bfloat16, context=context)
            trainable = optimizer.wrap_and_build(toy.chunks, context, OPTIM)
            named = build.local_parameters(toy.chunks)
            with torch.no_grad():
                for parameter in named.values():
                    parameter.mul_(1.5)
            loaded = {n: p.detach().clone() for n, p in named.items()}
            if refresh:
                trainable.refresh_masters()
            forward_backward(toy, trainable, BATCHES[0], cuts=1)
            optimizer.set_lr(trainable, 0.0)
            assert not optimizer.step(trainable, context).skipped
            kept.append(all(torch.equal(p.detach(), loaded[n]) for n, p in named.items()))
        return kept[0], kept[1]

    assert run_ranks(1, check) == [(True, False)]


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("cosine", {0: 0.0, 1: 5e-4, 2: 1e-3, 6: 5.5e-4, 10: 1e-4, 50: 1e-4}),
        ("linear", {0: 0.0, 1: 5e-4, 2: 1e-3, 4: 7.75e-4, 6: 5.5e-4, 10: 1e-4, 50: 1e-4}),
        ("constant", {0: 0.0, 1: 5e-4, 2: 1e-3, 10: 1e-3, 50: 1e-3}),
    ],
)
def test_a_schedule_equals_its_closed_form(kind: str, rates: dict[int, float]) -> None:
    """CKPT-8."""
    rate = optimizer.LRSchedule(kind, 1e-3, min_lr=1e-4, warmup_steps=2, total_steps=10)
    assert {k: rate.at(k) for k in rates} == pytest.approx(rates, rel=1e-12)


def test_a_schedule_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        optimizer.LRSchedule("step", 1e-3)
    with pytest.raises(ValueError, match="warmup_steps=5 leaves no step of the run's 5"):
        optimizer.LRSchedule("linear", 1e-3, warmup_steps=5, total_steps=5)
    assert optimizer.LRSchedule("constant", 1e-3, warmup_steps=5, total_steps=5).at(7) == 1e-3


def test_the_learning_rate_and_betas_reach_the_optimizer(folders: dict[str, str]) -> None:
    """CFG-2: live parameter groups; weight decay of matrices only."""

    def groups(rank: int) -> list[tuple[float, tuple[float, float], float, set[int]]]:
        toy = toy_on_rank(folders["qwen3"], Layout(1))
        optim = replace(OPTIM, betas=(0.5, 0.6), use_distributed_optimizer=False)
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, optim)
        optimizer.set_lr(trainable, 0.125)
        return [
            (g["lr"], g["betas"], g["weight_decay"], {p.ndim for p in g["params"]})
            for g in trainable.optimizer.param_groups
        ]

    found = sorted(run_ranks(1, groups)[0], key=lambda group: group[2])
    assert found == [(0.125, (0.5, 0.6), 0.0, {1}), (0.125, (0.5, 0.6), 0.01, {2})]


@pytest.mark.parametrize(
    "run", [forward_backward, lambda toy, *_: logprobs_of(toy, [packed([[1]])] * 2, 1.0)]
)
def test_unequal_numbers_of_micro_batches_are_refused_on_every_rank(
    run: Callable[..., Any], folders: dict[str, str]
) -> None:
    """PAR-11: a message instead of a hang."""

    def message(rank: int) -> str:
        toy = toy_on_rank(folders["qwen3"], Layout(2))
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)
        with pytest.raises(ValueError, match="1 to 2 micro-batches") as caught:
            if rank == 0:
                schedule.forward_logprobs(
                    toy.chunks,
                    [packed([[1]])],
                    context=toy.context,
                    temperature=1.0,
                    valid_vocab=128,
                )
            else:
                run(toy, trainable, BATCHES[0], 2)
        return str(caught.value)

    assert all("pad with dummies" in said for said in run_ranks(2, message))


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "multiple"),
    [(1, 1, False, 1), (2, 1, True, 2), (2, 1, False, 1), (2, 2, True, 4), (4, 2, True, 8)]
    + [(3, 2, True, 12)],
)
def test_the_pad_multiple_follows_its_rule(
    tp: int, cp: int, sequence_parallel: bool, multiple: int
) -> None:
    """PAR-4."""
    assert schedule.pad_multiple(tp=tp, cp=cp, sequence_parallel=sequence_parallel) == multiple
