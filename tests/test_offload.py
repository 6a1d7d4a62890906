"""Offload of a real model, optimizer and reference: what `trainer/setup.py` wires on a GPU, here
with megatron-core's own buffers as CPU tensors, whose storages shrink and grow alike.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.hybrid.memory import DeviceOffload, Parked, TrainingState
from megagrpo.model.build import local_parameters
from megagrpo.model.optimizer import StepResult, Trainable, step, wrap_and_build
from megagrpo.types import Layout
from tests.megatron_toys import OPTIM, Toy, forward_backward, sequences, toy_on_rank
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder


def state_by_search(trainable: Trainable) -> Iterator[torch.Tensor]:
    """What hangs on the parameters and in the optimizer, found without the lists under test."""
    for chunk in trainable.chunks:
        for parameter in chunk.parameters():
            yield from (parameter, parameter.main_grad)
    for part in trainable.optimizer.chained_optimizers:
        for main, moments in part.optimizer.state.items():
            yield main
            yield from (value for value in moments.values() if isinstance(value, torch.Tensor))


def train_once(toy: Toy, trainable: Trainable, number: int) -> StepResult:
    batch = sequences(toy.shape.vocab_size, seed=number)
    forward_backward(toy, trainable, batch, cuts=2)
    return step(trainable, toy.context)


CASES = [  # layout, dtype, distributed optimizer
    (Layout(1), torch.float32, True),
    (Layout(2), torch.bfloat16, True),
    (Layout(2, tp=2), torch.bfloat16, False),
    (Layout(2, pp=2), torch.float32, False),
]


@pytest.mark.parametrize(("layout", "dtype", "distributed"), CASES)
def test_steps_with_offload_between_them_equal_those_without_bit_for_bit(
    tmp_path: Path, layout: Layout, dtype: torch.dtype, distributed: bool
) -> None:
    """SYNC-33, 34: flat buffers, masters, and moments that appear at step 1; offloaded before the
    first step too; no storage stays on the device."""
    folder = make_hf_folder(tmp_path / "hf", "qwen3", num_hidden_layers=2, dtype=dtype)
    settings = replace(OPTIM, use_distributed_optimizer=distributed)

    def body(rank: int) -> None:
        toy = toy_on_rank(folder, layout, dtype=dtype)
        plain = wrap_and_build(toy.chunks, toy.context, settings)
        other = toy_on_rank(folder, layout, dtype=dtype, context=toy.context)
        moved = wrap_and_build(other.chunks, toy.context, settings)
        offload = DeviceOffload(
            TrainingState(moved.parameter_tensors, moved.gradient_tensors, moved.optimizer_tensors)
        )
        start = [p.detach().clone() for p in local_parameters(plain.chunks).values()]
        for number in range(3):
            offload.release_optimizer()
            offload.release_parameters()
            left = [t.shape for t in state_by_search(moved) if t.untyped_storage().nbytes()]
            assert not left, f"still on the device: {left}"
            offload.restore_parameters()
            offload.restore_optimizer()
            assert train_once(toy, plain, number) == train_once(other, moved, number)
            for wanted, found in zip(state_by_search(plain), state_by_search(moved), strict=True):
                assert torch.equal(wanted, found)
        ends = local_parameters(moved.chunks).values()
        assert all(not torch.equal(*pair) for pair in zip(start, ends, strict=True))

    run_ranks(layout.world, body)


def test_parked_weights_take_memory_only_where_they_are_used() -> None:
    """A reference: the same values every time, storages of 0 bytes in between."""
    whole = torch.arange(12.0)
    weights = [whole[:8].view(2, 4), whole[8:], torch.ones(3, dtype=torch.bfloat16)]
    values = [weight.clone() for weight in weights]
    parked = Parked(weights)
    for _ in range(2):
        assert [weight.untyped_storage().nbytes() for weight in weights] == [0, 0, 0]
        with parked.on_device():
            assert all(torch.equal(*pair) for pair in zip(weights, values, strict=True))
    with pytest.raises(KeyError), parked.on_device():
        raise KeyError
    assert not any(weight.untyped_storage().nbytes() for weight in weights)
    parked.restore()
    assert all(torch.equal(*pair) for pair in zip(weights, values, strict=True))
