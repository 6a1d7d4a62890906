"""The plan against brute force: numbered elements, random layouts, boolean masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.hybrid.plan import Plan, Region, plan_transfers
from megagrpo.types import Box, TensorInfo
from megagrpo.weights.slices import extent, index, volume, whole

Boxes = dict[str, list[Box]]


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The tensor cut into a random grid of disjoint boxes."""
    grid: list[Box] = [()]
    for size in shape:
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
        edges = [0, *sorted(cuts), size]
        ranges = list(zip(edges, edges[1:], strict=False))
        grid = [(*box, part) for box in grid for part in ranges]
    return grid


@st.composite
def part_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    found = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        found.append((start, draw(st.integers(start + 1, size))))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Boxes], list[Boxes], list[TensorInfo], list[int], int]:
    world = draw(st.integers(1, 5))
    manifest, haves, wants = [], [{} for _ in range(world)], [{} for _ in range(world)]
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        info = TensorInfo(f"t{number}.weight", shape, dtype)
        manifest.append(info)
        # Two cuts of the tensor, e.g. of two layouts: each box on one or more ranks.
        for grid in draw(st.lists(cut(shape), min_size=1, max_size=2)):
            for box in grid:
                for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                    boxes = haves[rank].setdefault(info.name, [])
                    if box not in boxes:
                        boxes.append(box)
        wants[draw(st.integers(0, world - 1))][info.name] = [whole(shape)]
        for want in wants:
            boxes = want.setdefault(info.name, [])
            boxes += draw(st.lists(part_of(shape), max_size=3))
    hosts = draw(st.lists(st.integers(0, 1), min_size=world, max_size=world))
    bucket = draw(st.sampled_from([1, 16, 64, 2**20]))
    return haves, wants, manifest, hosts, bucket


def plans(case: tuple[list[Boxes], list[Boxes], list[TensorInfo], list[int], int]) -> list[Plan]:
    haves, wants, manifest, hosts, bucket = case
    return [
        plan_transfers(haves, wants, manifest, rank, hosts=hosts, bucket_bytes=bucket)
        for rank in range(len(hosts))
    ]


def mask(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    found = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        found[index(box)] = True
    return found


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_want_is_put_together_exactly_and_nothing_else_travels(
    case: tuple[list[Boxes], list[Boxes], list[TensorInfo], list[int], int],
) -> None:
    """Bytes: received = wanted and not held, counted by boolean masks (bound 1.0 <= 1.05)."""
    haves, wants, manifest, _, bucket = case
    everyone = plans(case)
    assert len({plan.digest for plan in everyone}) == 1
    full = {
        i.name: torch.arange(math.prod(i.shape), dtype=torch.int64).view(i.shape) for i in manifest
    }
    sizes = {info.name: info.dtype.itemsize for info in manifest}
    for rank, plan in enumerate(everyone):
        arrived: dict[Region, torch.Tensor] = {}
        for number, one in enumerate(plan.buckets):
            for peer, regions in one.receives.items():
                assert everyone[peer].buckets[number].sends[rank] == regions
                for region in regions:
                    held = haves[peer][region.name]
                    assert any(
                        volume(region.box)
                        and mask(full[region.name].shape, [box])[index(region.box)].all()
                        for box in held
                    ), f"rank {peer} does not hold {region} in one piece"
                    arrived[region] = full[region.name][index(region.box)]
                    assert number <= plan.last_bucket[region.name]
            for traffic in (one.sends, one.receives):
                moved = [r for regions in traffic.values() for r in regions]
                total = sum(volume(r.box) * sizes[r.name] for r in moved)
                assert total <= bucket or len(moved) == 1 == volume(moved[0].box)
        _check_rank(plan, rank, haves[rank], wants[rank], full, arrived, sizes)


def _check_rank(
    plan: Plan,
    rank: int,
    have: Boxes,
    want: Boxes,
    full: dict[str, torch.Tensor],
    arrived: dict[Region, torch.Tensor],
    sizes: dict[str, int],
) -> None:
    bound = 0
    for name, tensor in full.items():
        need = mask(tensor.shape, want.get(name, [])) & ~mask(tensor.shape, have.get(name, []))
        bound += int(need.sum()) * sizes[name]
        for box in want.get(name, []):
            found = torch.full(tensor.shape, -1)
            for piece in plan.pieces[Region(name, box)]:
                assert (found[index(piece.box)] == -1).all(), "pieces overlap"
                if piece.held:
                    assert piece.source in have[name]
                else:
                    assert Region(name, piece.source) in arrived
                assert mask(tensor.shape, [piece.source])[index(piece.box)].all()
                found[index(piece.box)] = tensor[index(piece.box)]
            assert torch.equal(found[index(box)], tensor[index(box)])
            assert int((found != -1).sum()) == volume(box)
    received = sum(tensor.numel() * sizes[region.name] for region, tensor in arrived.items())
    assert received == bound == plan.received_bytes[rank] == plan.lower_bound_bytes[rank]


def info(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorInfo:
    return TensorInfo(name, shape, dtype)


def test_the_nearest_holder_sends_and_equal_holders_share_the_load() -> None:
    """Ranks 0-3 on host 0, 4-7 on host 1; 0, 1 and 4 hold everything, the others want it."""
    names = [f"t{i}.weight" for i in range(6)]
    everything: Boxes = {name: [((0, 4),)] for name in names}
    haves = [everything if rank in (0, 1, 4) else {} for rank in range(8)]
    wants = [everything] * 8
    manifest = [info(name, 4) for name in names]
    sent = [0] * 8
    for rank in range(8):
        plan = plan_transfers(haves, wants, manifest, rank, hosts=[0] * 4 + [1] * 4)
        for bucket in plan.buckets:
            for peer, regions in bucket.receives.items():
                assert (peer < 4) == (rank < 4), "a holder on the same host was passed over"
                sent[peer] += len(regions)
    assert sent == [6, 6, 0, 0, 18, 0, 0, 0]  # host 0: ranks 2, 3 want 12; host 1: 5, 6, 7 want 18


ALL, MOST, HALF = [((0, 4),)], [((0, 3),)], [((0, 2),)]


@pytest.mark.parametrize(
    ("have", "want", "message"),
    [
        ({"a.weight": ALL}, {"a.weight": ALL, "b.weight": ALL}, "engine.*b.weight"),
        ({"a.weight": ALL, "b.weight": ALL}, {"a.weight": ALL}, "trainer.*b.weight"),
        ({"a.weight": ALL}, {}, "engine.*a.weight"),
        ({}, {"a.weight": ALL}, "trainer.*a.weight"),
        ({"a.weight": MOST}, {"a.weight": ALL}, "trainer.*a.weight.*3, 4"),
        ({"a.weight": ALL}, {"a.weight": HALF}, "engine.*a.weight.*2, 4"),
    ],
)
def test_a_tensor_too_many_or_too_few_on_either_side_is_refused_by_name(
    have: Boxes, want: Boxes, message: str
) -> None:
    """SYNC-11: engine with one name more, one less; trainer likewise; parts are not enough."""
    with pytest.raises(ValueError, match=message):
        plan_transfers([have], [want], [info("a.weight", 4)], 0, hosts=[0])


def test_sizes_at_the_edge_are_cut_to_the_bucket_and_a_scalar_travels() -> None:
    """SYNC-7: bucket 16 bytes; 17 one-byte elements, nothing, a 0-dim tensor, bf16 then fp32."""
    manifest = [
        info("big.weight", 17, dtype=torch.uint8),
        info("empty.weight", 0, 3),
        info("scalar.weight"),
        info("half.weight", 3, dtype=torch.bfloat16),
        info("full.weight", 2),
    ]
    boxes = {i.name: [whole(i.shape)] for i in manifest}
    plan = plan_transfers([boxes, {}], [{}, boxes], manifest, 1, hosts=[0, 0], bucket_bytes=16)
    arriving = [r for b in plan.buckets for regions in b.receives.values() for r in regions]
    assert [(r.name, extent(r.box)) for r in arriving] == [
        ("big.weight", (16,)),
        ("big.weight", (1,)),
        ("scalar.weight", ()),
        ("half.weight", (3,)),
        ("full.weight", (2,)),
    ]
    assert plan.received_bytes == (0, 17 + 4 + 6 + 8)
    assert plan.last_bucket["empty.weight"] == -1
