"""The weight sync over gloo ranks with stub engines; the real one is in test_vllm_engine.py."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megagrpo.hybrid.engine import HybridEngine
from megagrpo.hybrid.memory import DeviceOffload, TrainingState
from megagrpo.hybrid.plan import plan_transfers
from megagrpo.hybrid.source_check import MODULUS, bit_sum, name_weight, non_finite
from megagrpo.hybrid.transfer import Sources, Transfer
from megagrpo.model.hf_config import read_shape
from megagrpo.types import Layout, ModelShape, TensorInfo
from megagrpo.weights.slices import Slice, index, whole
from megagrpo.weights.table import hf_manifest
from tests.pool import RankError, run_ranks
from tests.sync_stubs import StubEngine, context, fill_, shard
from tests.tiny_models import hf_config, hf_tensors


def shape_of(tmp_path: Path, config: dict[str, Any]) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_shape(tmp_path)


def nothing() -> None:
    """The parameters are whole already."""


def hybrid(
    rank: int, shape: ModelShape, layout: Layout, full: dict[str, torch.Tensor], **options: Any
) -> tuple[HybridEngine, StubEngine, dict[str, torch.Tensor], list[Slice]]:
    """Trainer of `layout` and a stub engine; `options` for both by name."""
    own = {"bucket_bytes", "offload", "prepare"}
    for_stub = {k: v for k, v in options.items() if k not in own | {"rollout_tp"}}
    engine = StubEngine(rank, layout.world, options.get("rollout_tp", 1), **for_stub)
    slices, local = shard(shape, layout, rank, full)
    built = HybridEngine(
        engine=engine,
        haves=slices,
        parameters=local,
        manifest=hf_manifest(shape, torch.float32),
        context=context(rank, layout),
        **({"prepare": nothing} | {k: v for k, v in options.items() if k in own}),
    )
    return built, engine, local, slices


def expect_weights(engine: StubEngine, full: dict[str, torch.Tensor]) -> None:
    assert set(engine.weights) == set(full)
    for name, tensor in full.items():
        part = tensor[index(engine.box(TensorInfo(name, tuple(tensor.shape), tensor.dtype)))]
        assert torch.equal(engine.weights[name], part), name


def digest_of(full: dict[str, torch.Tensor]) -> int:
    """The digest's definition, element by element in Python integers."""
    total = 0
    for name, tensor in full.items():
        bits = tensor.contiguous().view(torch.int32).flatten().tolist()
        total += name_weight(name) * sum(bits)
    return total % MODULUS


LAYOUTS = [  # training layout, rollout TP, whether some rank lacks what it wants
    (Layout(1), 1, False),
    (Layout(2, tp=2), 1, True),
    (Layout(2, tp=2), 2, True),  # 144 padded rows in halves against 131 rows in halves
    (Layout(2, pp=2), 1, True),
    (Layout(2), 2, False),
    (Layout(4, tp=2, pp=2), 2, True),
    (Layout(4, tp=4), 2, True),
    (Layout(4, tp=2), 4, True),
]


@pytest.mark.parametrize(("layout", "rollout_tp", "moves"), LAYOUTS)
@pytest.mark.parametrize("bucket_bytes", [2**26, 5000])
def test_two_syncs_deliver_two_different_sets_of_weights_bit_equal(
    tmp_path: Path, layout: Layout, rollout_tp: int, moves: bool, bucket_bytes: int
) -> None:
    """SYNC-13, SYNC-22, SYNC-23, SYNC-31: every second sync is exact; PP ranks have buckets without
    their own boxes; vocabulary 131 arrives as 131 rows although the trainer pads."""
    config = hf_config("qwen3", vocab_size=131, num_hidden_layers=2)
    shape = shape_of(tmp_path, config)
    first, second = hf_tensors(config, seed=1), hf_tensors(config, seed=2)

    def body(rank: int) -> tuple[list[float], int, int, int]:
        both, engine, local, slices = hybrid(
            rank, shape, layout, first, rollout_tp=rollout_tp, bucket_bytes=bucket_bytes
        )
        digests = []
        for full in (first, second):
            fill_(local, slices, full)
            with both.rollout_mode(1):
                expect_weights(engine, full)
                digests.append(both.stats["sync/digest"])
        moved = both._transfer.received_bytes
        peak = int(both.stats["sync/extra_bytes_peak"])
        return digests, moved, both.plan.lower_bound_bytes[rank], peak

    answers = run_ranks(layout.world, body)
    for digests, moved, bound, _ in answers:
        assert digests == [digest_of(first), digest_of(second)]  # the same at every layout
        assert moved <= 1.05 * bound
    largest_module = 3 * 64 * 176 * 4  # gate, up and down of one layer
    assert all(peak <= 3 * bucket_bytes + largest_module for *_, peak in answers)
    assert any(moved for _, moved, *_ in answers) == moves


def test_a_tied_model_needs_no_head_and_pipeline_ends_agree_on_the_embedding(
    tmp_path: Path,
) -> None:
    """First and last stage hold the same rows; each want has one source."""
    config = hf_config("qwen2", tied=True, num_hidden_layers=2)
    shape, full = shape_of(tmp_path, config), hf_tensors(config, seed=3)

    def body(rank: int) -> float:
        both, engine, _, _ = hybrid(rank, shape, Layout(2, pp=2), full)
        with both.rollout_mode(1):
            expect_weights(engine, full)
        return both.stats["sync/digest"]

    assert run_ranks(2, body) == [digest_of(full)] * 2


def test_weights_arrive_and_are_versioned_whenever_generation_is_possible(tmp_path: Path) -> None:
    """SYNC-1, SYNC-2, SYNC-17, SYNC-19, SYNC-32: sync belongs to every wake-up; order of the
    phases; one prefix cache reset per sync; the engine's version counts the updates it has seen."""
    config = hf_config(num_hidden_layers=1)
    shape = shape_of(tmp_path, config)
    order: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: order.append(name)

    def body(rank: int) -> list[str]:
        full = hf_tensors(config, seed=0)
        both, engine, local, slices = hybrid(
            rank, shape, Layout(1), full, offload=Recorder(), prepare=lambda: order.append("gather")
        )
        engine.events = order
        seen = []
        for step in range(1, 4):
            full = hf_tensors(config, seed=step)
            fill_(local, slices, full)
            with both.rollout_mode(step) as served:
                assert served is engine and engine.version == both.version == step
                seen.append(both.stats["sync/digest"])
                assert seen[-1] == digest_of(engine.weights) == digest_of(full)
                with pytest.raises(RuntimeError, match="leave rollout_mode"), both.train_mode():
                    pass
                with pytest.raises(RuntimeError, match="leave rollout_mode"), both.rollout_mode(1):
                    pass
            with both.train_mode():
                assert not engine.awake
        assert len(set(seen)) == 3
        return order[: len(order) // 3]

    assert run_ranks(1, body)[0] == [
        "gather",
        "release_optimizer",
        "wake_weights",
        "gather",
        "load",
        "check_written",
        "reset_prefix_cache",
        "release_parameters",
        "wake_kv_cache",
        "sleep",
        "restore_parameters",
        "restore_optimizer",
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_on_all_ranks_by_name(tmp_path: Path, bad: float) -> None:
    """SYNC-25: one value on one rank; nothing has moved, the version stands."""
    config = hf_config(num_hidden_layers=2)
    shape, full = shape_of(tmp_path, config), hf_tensors(config)

    def body(rank: int) -> str:
        both, engine, local, _ = hybrid(rank, shape, Layout(2, tp=2), full)
        if rank == 1:
            local["decoder.layers.1.mlp.linear_fc2.weight"][3, 5] = bad
        with pytest.raises(ValueError) as refusal, both.rollout_mode(1):
            pass
        assert (both.version, engine.version, engine.weights) == (-1, -1, {})
        return str(refusal.value)

    for message in run_ranks(2, body):
        assert "1: ['decoder.layers.1.mlp.linear_fc2.weight']" in message


def test_large_finite_weights_are_not_mistaken_for_infinite_ones() -> None:
    huge = torch.full((8,), 3e38)
    assert non_finite({"huge": huge, "fine": torch.ones(2), "ids": torch.arange(3)}) == []
    assert non_finite({"huge": huge, "bad": torch.tensor([1.0, float("nan")])}) == ["bad"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_sums_of_tensors_longer_than_a_stretch_are_those_of_numpy(dtype: torch.dtype) -> None:
    whole_tensor = torch.randn(3000, 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    for tensor in (whole_tensor, whole_tensor[:, 7:301], whole_tensor.flatten()):
        wanted = tensor.contiguous().view(integers).numpy().astype("int64").sum()
        assert bit_sum(tensor).item() == wanted
    assert bit_sum(torch.ones(0, dtype=dtype)).item() == 0


def test_a_loader_with_a_name_more_or_less_is_refused_before_training(tmp_path: Path) -> None:
    """SYNC-11: both directions, named."""
    config = hf_config(num_hidden_layers=1)
    shape, full = shape_of(tmp_path, config), hf_tensors(config)

    def more(manifest: list[TensorInfo]) -> list[TensorInfo]:
        return [*manifest, TensorInfo("model.extra.weight", (4,), torch.float32)]

    def less(manifest: list[TensorInfo]) -> list[TensorInfo]:
        return [info for info in manifest if info.name != "model.norm.weight"]

    for knows, name in ((more, "model.extra.weight"), (less, "model.norm.weight")):
        with pytest.raises(RankError, match=f"ValueError.*{name}"):
            run_ranks(1, lambda rank, k: hybrid(rank, shape, Layout(1), full, extra=k), knows)


@pytest.mark.parametrize("option", [{"fail_at": "model.norm.weight"}, {"skip": "lm_head.weight"}])
def test_a_sync_that_breaks_off_leaves_no_version_and_names_the_tensor(
    tmp_path: Path, option: dict[str, str]
) -> None:
    """SYNC-16: the loader dies after most buckets, or forgets one weight."""
    config = hf_config(num_hidden_layers=1)
    shape, full = shape_of(tmp_path, config), hf_tensors(config)

    def body(rank: int) -> None:
        both, engine, _, _ = hybrid(rank, shape, Layout(1), full, **option)
        (name,) = option.values()
        with pytest.raises((OSError, RuntimeError), match=name), both.rollout_mode(1):
            pytest.fail("generation was possible")
        assert (both.version, engine.version, engine.awake, both.stats) == (-1, -1, False, {})
        assert "reset_prefix_cache" not in engine.events

    run_ranks(1, body)


def test_boxes_that_the_engine_keeps_survive_the_next_sync_and_nothing_else_stays(
    tmp_path: Path,
) -> None:
    """SYNC-4: views of round 1 keep their values. SYNC-24: the live tensors stop growing."""
    config = hf_config(num_hidden_layers=2)
    shape = shape_of(tmp_path, config)
    versions = [hf_tensors(config, seed=seed) for seed in range(5)]

    def body(rank: int) -> None:
        both, engine, local, slices = hybrid(
            rank, shape, Layout(2, pp=2), versions[0], keep=True, bucket_bytes=6000
        )
        elsewhere = [
            name for name in versions[0] if name not in {one.hf for one in slices}
        ]  # held pieces are views of the trainer's own weights
        counts = []
        gc.freeze()  # what lives already is not looked through
        for number, full in enumerate(versions):
            fill_(local, slices, full)
            with both.rollout_mode(1):
                pass
            if number == 0:
                kept = {name: engine.weights[name] for name in elsewhere}
            gc.collect()
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
        for name, tensor in kept.items():
            assert torch.equal(tensor, versions[0][name]), name
        assert not both._transfer._arrived
        assert counts[2] == counts[3] == counts[4], counts

    run_ranks(2, body)


def test_strided_tiny_empty_and_mixed_sources_arrive_equal() -> None:
    """SYNC-3: t.T and t[:, ::2]. SYNC-5, 7: a bucket filled to the last byte, one byte over it,
    nothing, a scalar, bf16 x 3 then fp32 x 2. An unplanned region is an error, never garbage."""
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "turned.weight": base.t(),
        "strided.weight": base[:, ::2],
        "exact.weight": torch.arange(16, dtype=torch.uint8),
        "over.weight": torch.arange(17, dtype=torch.uint8),
        "empty.weight": torch.empty(0, 3),
        "scalar.weight": torch.tensor(2.5),
        "half.weight": torch.tensor([1, 2, 3], dtype=torch.bfloat16),
        "full.weight": torch.tensor([4.0, 5.0]),
    }
    manifest = [TensorInfo(n, tuple(t.shape), t.dtype) for n, t in tensors.items()]
    boxes = {info.name: [whole(info.shape)] for info in manifest}
    dtypes = {info.name: info.dtype for info in manifest}

    def body(rank: int, bucket_bytes: int) -> None:
        haves, wants = [boxes, {}], [{}, boxes]
        plan = plan_transfers(haves, wants, manifest, rank, hosts=[0, 0], bucket_bytes=bucket_bytes)
        slices = [Slice(n, b[0], f"local.{n}", b[0]) for n, b in boxes.items()] if rank == 0 else []
        local = {f"local.{name}": tensor for name, tensor in tensors.items()}
        group = dist.group.WORLD
        assert group is not None
        moves = Transfer(plan, Sources(slices, local), dtypes, group, torch.device("cpu"))
        for info in moves.feed(manifest):
            if rank == 1:
                found = moves.fetch(info.name, boxes[info.name][0])
                assert found.dtype == info.dtype
                assert torch.equal(found, tensors[info.name]), info.name
                assert torch.equal(moves.fetch(info.name, boxes[info.name][0]), found)
                with pytest.raises(KeyError, match=f"{info.name} is not in the plan"):
                    moves.fetch(info.name, ((0, 1), (0, 1), (0, 1)))
        if rank == 1:
            with pytest.raises(KeyError, match="dropped"):
                moves.fetch("full.weight", ((0, 2),))

    for bucket_bytes in (16, 48, 2**20):
        run_ranks(2, body, bucket_bytes)


def training_state() -> tuple[dict[str, torch.Tensor], TrainingState]:
    """Two parameters in one flat buffer, one outside; gradients in another; moments appear late."""
    flat, grads = torch.arange(10.0), torch.full((10,), 7.0)
    tensors = {
        "a": flat[:6].view(2, 3),
        "b": flat[6:],
        "outside": torch.tensor([3.0, 4.0], dtype=torch.float64),
        "grad_a": grads[:6].view(2, 3),
        "grad_b": grads[6:],
    }
    state = TrainingState(
        parameters=lambda: [tensors["a"], tensors["b"], tensors["outside"]],
        gradients=lambda: [tensors["grad_a"], tensors["grad_b"]],
        # The main parameter of `outside` is the parameter itself: it may move once only.
        optimizer=lambda: [t for n, t in tensors.items() if "moment" in n] + [tensors["outside"]],
    )
    return tensors, state


def offload_hosts(offload: DeviceOffload) -> list[torch.Tensor]:
    kinds = (offload._parameters, offload._optimizer, offload._gradients)
    return [host for storages in kinds for host in storages.hosts.values()]


def test_offload_releases_every_storage_once_and_restores_values_and_views() -> None:
    """SYNC-33, 34: ten cycles; sizes 0 in between, equal values, dtypes and host buffers after."""
    tensors, state = training_state()
    offload = DeviceOffload(state)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    hosts: set[int] = set()
    for cycle in range(10):
        if cycle == 1:
            tensors["moment"] = torch.rand(5)
            before["moment"] = tensors["moment"].clone()
        tensors["grad_a"].fill_(float(cycle))
        offload.release_optimizer()
        assert tensors["grad_a"].untyped_storage().nbytes() == 0
        assert torch.equal(tensors["a"], before["a"]), "the engine reads these until they go"
        offload.release_parameters()
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors.values())
        offload.restore_parameters()
        offload.restore_optimizer()
        for name, tensor in tensors.items():
            wanted = torch.zeros_like(tensor) if name.startswith("grad") else before[name]
            assert torch.equal(tensor, wanted), name
        tensors["a"][0, 0] = before["a"][0, 0] = 100.0 + cycle
        assert tensors["b"].untyped_storage()._cdata == tensors["a"].untyped_storage()._cdata
        if cycle == 2:
            hosts = {host.data_ptr() for host in offload_hosts(offload)}
    assert {host.data_ptr() for host in offload_hosts(offload)} == hosts
    assert len(hosts) == 3  # flat, outside, moment; gradients have no copy


def test_offload_out_of_order_is_refused() -> None:
    """SYNC-35: nothing is restored that was not released, nothing released twice."""
    offload = DeviceOffload(training_state()[1])
    with pytest.raises(RuntimeError, match="'resident'"):
        offload.release_parameters()
    offload.release_optimizer()
    with pytest.raises(RuntimeError, match="'optimizer released'"):
        offload.release_optimizer()
    offload.restore_optimizer()
    with pytest.raises(RuntimeError, match="'resident'"):
        offload.restore_parameters()
