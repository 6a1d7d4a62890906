"""The import hook over the installed megatron-core, its repairs, and the parallel platform."""

import ast
import importlib.metadata
import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megagrpo.model import optimizer
from megagrpo.parallel import collectives, cpu_cuda, mcore_compat, mcore_cpu, platform
from megagrpo.parallel.context import destroy_parallel, init_parallel
from megagrpo.parallel.mcore_repairs import WRITE_QUEUE, _PackedRope
from megagrpo.types import Coordinates, Layout
from tests.megatron_toys import (
    OPTIM,
    Toy,
    forward_backward,
    largest_difference,
    reference_steps,
    sequences,
    toy_on_rank,
)
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

from megatron.core import dist_checkpointing  # isort: skip; the hook came with the model

MCORE = Path(importlib.util.find_spec("megatron.core").origin).parent  # type: ignore


def run_rewritten(source: str, **names: Any) -> dict[str, Any]:
    """Execute a snippet as the hook would load it."""
    namespace = dict(names)
    exec(compile(mcore_cpu.rewrite(source, "snippet.py"), "snippet.py", "exec"), namespace)
    return namespace


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import torch\nx = torch.cuda.current_device()", torch.device("cpu")),
        ("import torch\nx = torch.zeros(2, device='cuda').device", torch.device("cpu")),
        ("import torch\nx = torch.ones(2).type() == 'torch.cuda.FloatTensor'", True),
        ("import torch\nx = torch.ones(2).cuda(non_blocking=True).device", torch.device("cpu")),
        ("import torch\nx = torch.ones(2).is_cuda", True),
        ("import torch\ns = torch.cuda.Stream()\nx = torch.ones(2).record_stream(s)", None),
        ("import torch\nx = torch.tensor([1], pin_memory=True).is_pinned()", False),
        ("from torch.cuda import _lazy_call\nx = []\n_lazy_call(lambda: x.append(1))", [1]),
        ("import torch\nx = torch.cuda.is_available()", False),
        ("import torch\nx = torch.cuda.default_generators[torch.device('cpu')]", "generator"),
        (
            "'''Doc.'''\nfrom __future__ import annotations\nimport torch\nx = torch.cuda.nvtx",
            "nvtx",
        ),
    ],
)
def test_a_line_that_names_cuda_does_its_work_on_the_cpu(source: str, wanted: Any) -> None:
    named = {"generator": torch.default_generator, "nvtx": cpu_cuda.nvtx}
    expected = named.get(wanted, wanted) if isinstance(wanted, str) else wanted
    assert run_rewritten(source)["x"] == expected


def test_a_traceback_keeps_the_line_numbers_of_the_source() -> None:
    source = "'''Doc.'''\nimport torch\n\ntorch.cuda.synchronize()\nraise KeyError(1)\n"
    with pytest.raises(KeyError) as caught:
        run_rewritten(source)
    assert caught.traceback[-1].lineno + 1 == 5


def test_no_module_of_the_installed_version_still_names_cuda_after_the_rewrite() -> None:
    """Every file, also those that nothing imports here: a new upstream form shows here first."""
    left = []
    naming_cuda = [p for p in sorted(MCORE.rglob("*.py")) if b"cuda" in p.read_bytes()]
    for path in naming_cuda:
        for node in ast.walk(mcore_cpu.rewrite(path.read_bytes(), str(path))):
            text = ""
            if isinstance(node, ast.Attribute):
                on_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
                named = node.attr == "is_cuda" or (on_torch and node.attr == "cuda")
                text = ast.unparse(node) if named else ""
            elif isinstance(node, ast.Call):
                method = isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
                text = ast.unparse(node) if method else ""
            elif isinstance(node, ast.Constant) and node.value in (
                "cuda",
                "torch.cuda.FloatTensor",
            ):
                text = node.value
            if text:
                left.append(f"{path.relative_to(MCORE)}:{node.lineno}: {text}")
    assert len(naming_cuda) > 80
    assert not left, left


def test_torch_itself_is_left_alone() -> None:
    assert not torch.cuda.is_available()
    assert torch.cuda.Stream is not cpu_cuda.Stream
    assert not torch.ones(1).is_cuda
    module = sys.modules["megatron.core.tensor_parallel.random"]
    assert vars(module)["_lazy_call"] is cpu_cuda._lazy_call


def test_install_twice_leaves_one_finder_and_install_too_late_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mcore_cpu.install()
    finders = [f for f in sys.meta_path if isinstance(f, mcore_cpu._Finder)]
    assert len(finders) == 1
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f not in finders])
    with pytest.raises(RuntimeError, match="imported already"):
        mcore_cpu.install()


@pytest.mark.parametrize(("version", "fits"), [("0.15.3", False), ("0.16.1", True)])
@pytest.mark.parametrize(("later", "still_fits"), [("0.19.2", True), ("0.20.0rc1", False)])
def test_only_versions_in_the_supported_range_pass(
    version: str, fits: bool, later: str, still_fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, ok in ((version, fits), (later, still_fits)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, text=text: text)
        if ok:
            mcore_compat.check_version()
        else:
            with pytest.raises(ValueError, match=f"{text} is not supported.*>=0.16,<0.20"):
                mcore_compat.check_version()


def test_calls_lose_version_dependent_keywords_only() -> None:
    def upstream(first: int, second: int = 0) -> tuple[int, int]:
        return first, second

    assert mcore_compat.call(upstream, 1, second=2, tp_group="dropped") == (1, 2)
    with pytest.raises(TypeError, match="secnd"):
        mcore_compat.call(upstream, first=1, secnd=2)
    with pytest.raises(TypeError, match="sequence_paralel"):
        mcore_compat.call(optimizer.OptimizerConfig, sequence_paralel=True)


def test_random_numbers_continue_where_the_snapshot_was_taken() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    state = platform.rng_snapshot()
    first = draw()
    assert draw() != first
    platform.rng_restore(state)
    assert draw() == first


def test_the_context_places_every_rank_as_the_layout_says() -> None:
    layout = Layout(4, tp=2, pp=2)

    def place(rank: int) -> tuple[Any, ...]:
        for _ in range(2):  # groups can be made again in the same process
            context = init_parallel(layout, seed=3)
            groups = (context.tp_group, context.pp_group, context.dp_group)
            members = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
            replica = dist.get_process_group_ranks(context.model_parallel_group)
            destroy_parallel()
        ends = (context.is_first_stage, context.is_last_stage, context.last_stage_rank)
        return context.coords, members, ends, sorted(replica)

    everybody = [0, 1, 2, 3]
    assert run_ranks(4, place) == [
        (Coordinates(0, 0, 0), ((0, 1), (0, 2), (0,)), (True, False, 2), everybody),
        (Coordinates(1, 0, 0), ((0, 1), (1, 3), (1,)), (True, False, 3), everybody),
        (Coordinates(0, 1, 0), ((2, 3), (0, 2), (2,)), (False, True, 2), everybody),
        (Coordinates(1, 1, 0), ((2, 3), (1, 3), (3,)), (False, True, 3), everybody),
    ]


def test_a_layout_that_does_not_fit_the_world_is_refused() -> None:
    def message(rank: int) -> str:
        with pytest.raises(ValueError, match="tp=2 x parallel.pp=1 does not fit 1 processes") as e:
            init_parallel(Layout(1, tp=2), seed=1)
        return str(e.value)

    assert "must divide" in run_ranks(1, message)[0]


def test_collectives_say_the_same_on_every_rank() -> None:
    def check(rank: int) -> None:
        context = init_parallel(Layout(2, pp=2), seed=1)
        sums = {"count": torch.tensor(2**40 + rank), "loss": torch.tensor(0.5)}
        total = collectives.sum_over(context.pp_group, sums)
        assert (total["count"].item(), total["loss"].item()) == (2**41 + 1, 1.0)
        mine = torch.tensor([1.0, 2.0]) * (rank + 1)
        last = collectives.broadcast_from_last_stage(mine, context)
        assert last.tolist() == [2.0, 4.0]
        assert mine.tolist() == [1.0 * (rank + 1), 2.0 * (rank + 1)]
        assert collectives.gather_objects({"rank": rank}, context) == [{"rank": 0}, {"rank": 1}]
        assert not collectives.any_rank(False, context)
        assert collectives.any_rank(rank == 1, context)
        collectives.agree(True, "unused", context)
        with pytest.raises(collectives.RankFailure, match="^rank 1: disk full$"):
            collectives.agree(rank == 0, "disk full" if rank else "fine here", context)

    run_ranks(2, check)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_vectorised_packed_rope_is_bit_equal_to_upstream(interleaved: bool) -> None:
    """Two packings in turn, so that a table kept too long would show; and what upstream keeps."""
    rope = sys.modules["megatron.core.models.common.embeddings.rope_utils"].__dict__[
        "_apply_rotary_pos_emb_thd"
    ]

    def check(rank: int) -> None:
        assert isinstance(rope, _PackedRope)
        options = {"rotary_interleaved": interleaved, "cp_group": dist.group.WORLD}
        freqs = torch.outer(torch.arange(9.0), torch.rand(8)).repeat(1, 2)[:, None, None, :]
        for lengths in ([3, 1, 9, 4], [9, 3, 4, 1], [9, 8]):
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
            for heads in (4, 2):
                tokens = torch.randn(sum(lengths), heads, 16, requires_grad=True)
                theirs = rope._upstream(tokens, cu_seqlens, freqs, **options)
                ours = rope(tokens, cu_seqlens, freqs, **options)
                assert torch.equal(ours, theirs)
                weights = torch.randn_like(ours)
                (wanted,) = torch.autograd.grad((theirs * weights).sum(), tokens)
                (found,) = torch.autograd.grad((ours * weights).sum(), tokens)
                assert torch.equal(found, wanted)

    run_ranks(1, check)


METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def sharded_state(toy: Toy, trainable: optimizer.Trainable, is_loading: bool) -> dict[str, Any]:
    model = toy.chunks[0].sharded_state_dict(metadata=METADATA)  # type: ignore[operator]
    optim = trainable.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    return {"model": model, "optimizer": optim}


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "distributed"),
    [
        (Layout(2), Layout(2, tp=2), True),
        (Layout(2, tp=2), Layout(2, pp=2), True),
        (Layout(2, pp=2), Layout(1), False),
    ],
)
def test_training_goes_on_unbroken_after_a_checkpoint_at_another_layout(
    saved_at: Layout, loaded_at: Layout, distributed: bool, tmp_path: Path
) -> None:
    """The repairs of DistributedOptimizer over torch's AdamW; weights of 4 steps in plain torch.

    A step count that all parameters share after a load would show as 3e-3 here.
    """
    batches = [sequences(128, seed=number) for number in range(4)]
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    optim = replace(OPTIM, use_distributed_optimizer=distributed)
    wanted = reference_steps(folder, batches)[-1].after

    def train(toy: Toy, trainable: optimizer.Trainable, some: list[Any]) -> None:
        for batch in some:
            forward_backward(toy, trainable, batch, cuts=1)
            optimizer.step(trainable, toy.context)

    def save(rank: int) -> bool:
        toy = toy_on_rank(folder, saved_at)
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, optim)
        train(toy, trainable, batches[:2])
        dist_checkpointing.save(sharded_state(toy, trainable, False), str(checkpoint))
        forked = WRITE_QUEUE._manager is not None
        WRITE_QUEUE.shutdown()
        return forked

    def resume(rank: int) -> float:
        toy = toy_on_rank(folder, loaded_at)
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, optim)
        loaded = dist_checkpointing.load(sharded_state(toy, trainable, True), str(checkpoint))
        toy.chunks[0].load_state_dict(loaded["model"], strict=False)
        trainable.optimizer.load_state_dict(loaded["optimizer"])
        train(toy, trainable, batches[2:])
        return largest_difference(toy, lambda p: p.detach(), wanted)[0]

    assert any(run_ranks(saved_at.world, save)), "nobody used the forked queue"
    assert max(run_ranks(loaded_at.world, resume)) < 1e-5


def test_preparing_a_load_moves_neither_weights_nor_the_step_count(tmp_path: Path) -> None:
    """Upstream's dummy step would decay the weights and count as a step."""
    folder = make_hf_folder(tmp_path, "qwen3")

    def check(rank: int) -> tuple[bool, set[float]]:
        toy = toy_on_rank(folder, Layout(1))
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)
        before = [p.detach().clone() for p in toy.chunks[0].parameters()]
        sharded_state(toy, trainable, is_loading=True)
        after = list(toy.chunks[0].parameters())
        same = all(torch.equal(a, b.detach()) for a, b in zip(before, after, strict=True))
        (inner,) = trainable.optimizer.chained_optimizers
        steps = {state["step"].item() for state in inner.optimizer.state.values()}
        rates = {group["lr"] for group in trainable.optimizer.param_groups}
        return same and rates == {OPTIM.lr}, steps

    assert run_ranks(1, check) == [(True, {0.0})]


def test_every_stand_in_function_answers_as_megatron_calls_it() -> None:
    """Keyword names are those of torch.cuda: upstream passes `device=`."""
    calls: list[Callable[[], Any]] = [
        lambda: cpu_cuda.get_rng_state(device=torch.device("cpu")),
        lambda: cpu_cuda.set_rng_state(cpu_cuda.get_rng_state(), device="cpu"),
        lambda: cpu_cuda.synchronize(device=None),
        lambda: cpu_cuda.current_stream(device=0).wait_stream(cpu_cuda.Stream(device=0)),
        lambda: cpu_cuda.Stream().record_event().wait(cpu_cuda.current_stream()),
        lambda: cpu_cuda.stream(cpu_cuda.Stream()).__enter__(),
        lambda: cpu_cuda.Event(enable_timing=True).record(cpu_cuda.Stream()),
    ]
    for call in calls:
        call()
    assert cpu_cuda.Stream() == cpu_cuda.current_stream()
    assert cpu_cuda.Event().query() and cpu_cuda.memory_allocated() == 0
    with pytest.raises(AttributeError, match="no_such_name"):
        cpu_cuda.no_such_name  # noqa: B018
