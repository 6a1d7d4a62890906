"""Who sends which box to whom in a weight sync, as a pure function of what ranks have and want.

A rank copies from itself what it holds, gets the rest from the same host where somebody there holds
it, else from another; among equal holders the one that has sent least sends. Boxes that do not
match are cut by intersection, so no rank receives a number that it holds or receives already.

Every rank computes the same global list of moves from everybody's haves and wants, gathered once
at start-up, and keeps its own lines; time and memory grow with the number of ranks. Left out:
expanding only one's own lines from one canonical replica (for thousands of ranks).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megagrpo.types import Box, TensorInfo
from megagrpo.weights.slices import intersect, subtract, uncovered, volume, whole

BUCKET_BYTES = 64 * 2**20
Boxes = Mapping[str, Sequence[Box]]
"""Boxes of one rank by HuggingFace name."""


@dataclass(frozen=True)
class Region:
    """A box of a HuggingFace tensor."""

    name: str
    box: Box


@dataclass(frozen=True)
class Bucket:
    """What one rank exchanges at one time, by peer; both sides list a pair's regions in the same
    order. Neither direction exceeds the plan's bucket size."""

    sends: Mapping[int, tuple[Region, ...]]
    receives: Mapping[int, tuple[Region, ...]]


@dataclass(frozen=True)
class Piece:
    """Part `box` of a want is found inside box `source`, held by this rank or received."""

    box: Box
    source: Box
    held: bool


@dataclass(frozen=True)
class Plan:
    """One rank's part of a sync.

    Example: rank 1 wants rows 0-7 and holds 4-7: it receives ((0, 4), ...) and its want is put
    together from that and its own ((4, 8), ...).
    """

    rank: int
    buckets: tuple[Bucket, ...]  # every rank has the same number and runs them in this order
    last_bucket: Mapping[str, int]  # tensor is complete on all ranks after it; -1: nothing moves
    pieces: Mapping[Region, tuple[Piece, ...]]  # disjoint parts that make up each want
    received_bytes: tuple[int, ...]  # by rank, from other ranks
    lower_bound_bytes: tuple[int, ...]  # by rank: wanted and not held
    digest: str  # of the global list of moves: equal on all ranks or the plans differ


@dataclass(frozen=True)
class Move:
    """One box on its way; `bucket` counts over the whole plan."""

    region: Region
    source: int
    target: int
    bucket: int


def plan_transfers(
    haves: Sequence[Boxes],
    wants: Sequence[Boxes],
    manifest: Sequence[TensorInfo],
    rank: int,
    *,
    hosts: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """The part of `rank` in moving everybody's wants.

    `haves` and `wants` by rank; `manifest` gives order, shape and the dtype that is moved; `hosts`
    the host of every rank. Raises ValueError naming tensors that nobody holds, nobody reads, reads
    only in part, or that the manifest does not know.
    """
    _check_names(haves, wants, manifest)
    itemsize = {info.name: info.dtype.itemsize for info in manifest}
    needs = [[_needed(have, want, info.name) for info in manifest]
             for have, want in zip(haves, wants, strict=True)]  # fmt: skip
    router = _Router(hosts)
    packer = _Packer(len(hosts), bucket_bytes)
    moves: list[Move] = []
    last_bucket: dict[str, int] = {}
    for position, info in enumerate(manifest):
        holders = _holders(haves, info.name)
        size = itemsize[info.name]
        last_bucket[info.name] = -1
        for target, need in enumerate(needs):
            for box, source in router.route(need[position], holders, target, info.name):
                for piece in _cut(box, max(1, bucket_bytes // size)):
                    router.sent[source] += volume(piece) * size
                    bucket = packer.place(source, target, volume(piece) * size)
                    last_bucket[info.name] = bucket
                    moves.append(Move(Region(info.name, piece), source, target, bucket))
    received = [0] * len(hosts)
    for move in moves:
        received[move.target] += volume(move.region.box) * itemsize[move.region.name]
    bound = [
        sum(volume(box) * itemsize[info.name] for boxes, info in zip(need, manifest, strict=True)
            for box in boxes)
        for need in needs
    ]  # fmt: skip
    return Plan(
        rank=rank,
        buckets=_own_buckets(moves, rank),
        last_bucket=last_bucket,
        pieces=_pieces(haves[rank], wants[rank], [m for m in moves if m.target == rank]),
        received_bytes=tuple(received),
        lower_bound_bytes=tuple(bound),
        digest=hashlib.sha256(repr(moves).encode()).hexdigest(),
    )


def _check_names(
    haves: Sequence[Boxes], wants: Sequence[Boxes], manifest: Sequence[TensorInfo]
) -> None:
    """Both sides speak of exactly the manifest's tensors, and the engine reads all of each."""
    known = {info.name for info in manifest}
    for side, boxes in (("trainer holds", haves), ("engine reads", wants)):
        strangers = {name for rank in boxes for name in rank} - known
        if strangers:
            raise ValueError(f"the {side} tensors that the model lacks: {sorted(strangers)}")
    for side, boxes in (("trainer holds", haves), ("engine reads", wants)):
        for info in manifest:
            present = {box for rank in boxes for box in rank.get(info.name, ())}
            gaps = (
                uncovered(whole(info.shape), sorted(present)) if volume(whole(info.shape)) else []
            )
            if gaps:
                raise ValueError(f"no rank of the {side} {info.name} at {gaps[0]}")


def _needed(have: Boxes, want: Boxes, name: str) -> list[Box]:
    """Disjoint boxes that this rank wants and does not hold."""
    held = list(have.get(name, ()))
    found: list[Box] = []
    for box in want.get(name, ()):
        if volume(box):
            found += [piece for rest in uncovered(box, held) for piece in uncovered(rest, found)]
    return found


def _holders(haves: Sequence[Boxes], name: str) -> list[tuple[Box, list[int]]]:
    """The distinct boxes of the tensor and who holds each."""
    found: dict[Box, list[int]] = {}
    for rank, have in enumerate(haves):
        for box in have.get(name, ()):
            found.setdefault(box, []).append(rank)
    return sorted(found.items())


class _Router:
    """Chooses senders; remembers how many bytes each has sent."""

    def __init__(self, hosts: Sequence[int]) -> None:
        self._hosts = hosts
        self.sent = [0] * len(hosts)

    def route(
        self, need: list[Box], holders: list[tuple[Box, list[int]]], target: int, name: str
    ) -> Iterator[tuple[Box, int]]:
        """Boxes that make up `need`, each with its sender, nearest first."""
        here = self._hosts[target]
        for same_host in (True, False):
            for box, ranks in holders:
                near = [r for r in ranks if (self._hosts[r] == here) == same_host]
                if not (near and need):
                    continue
                rest = []
                for piece in need:
                    common = intersect(piece, box)
                    if common is not None:
                        yield common, self._least_busy(near, target)
                    rest += subtract(piece, box)
                need = rest
        assert not need, f"{name}: nobody holds {need} for rank {target}"

    def _least_busy(self, ranks: list[int], target: int) -> int:
        # Ties go round from the receiver upwards, so that rank 0 does not serve everybody.
        return min(ranks, key=lambda rank: (self.sent[rank], (rank - target) % len(self.sent)))


class _Packer:
    """Numbers buckets so that no rank sends or receives more than the limit in one."""

    def __init__(self, world: int, limit: int) -> None:
        self._limit = limit
        self._bucket = 0
        self._sending, self._receiving = [0] * world, [0] * world

    def place(self, source: int, target: int, size: int) -> int:
        """The bucket of the next move of `size` bytes."""
        if self._sending[source] + size > self._limit or (
            self._receiving[target] + size > self._limit
        ):
            # A single element larger than the limit still travels, alone.
            if any(self._sending):
                self._bucket += 1
            self._sending = [0] * len(self._sending)
            self._receiving = [0] * len(self._receiving)
        self._sending[source] += size
        self._receiving[target] += size
        return self._bucket


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """The box in pieces of at most `limit` elements, cut along its first long dimension."""
    if volume(box) <= limit:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, limit * (stop - start) // volume(box))
    for first in range(start, stop, step):
        yield from _cut((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), limit)


def _own_buckets(moves: Sequence[Move], rank: int) -> tuple[Bucket, ...]:
    count = max((move.bucket + 1 for move in moves), default=0)
    sends: list[dict[int, list[Region]]] = [{} for _ in range(count)]
    receives: list[dict[int, list[Region]]] = [{} for _ in range(count)]
    for move in moves:
        if move.source == rank:
            sends[move.bucket].setdefault(move.target, []).append(move.region)
        if move.target == rank:
            receives[move.bucket].setdefault(move.source, []).append(move.region)
    return tuple(
        Bucket({p: tuple(r) for p, r in out.items()}, {p: tuple(r) for p, r in into.items()})
        for out, into in zip(sends, receives, strict=True)
    )


def _pieces(have: Boxes, want: Boxes, incoming: Sequence[Move]) -> dict[Region, tuple[Piece, ...]]:
    """What each want is put together from: first what is held, then what arrives."""
    arriving: dict[str, list[Box]] = {}
    for move in incoming:
        arriving.setdefault(move.region.name, []).append(move.region.box)
    found: dict[Region, tuple[Piece, ...]] = {}
    for name, boxes in want.items():
        sources = [(box, True) for box in sorted(set(have.get(name, ())))]
        sources += [(box, False) for box in arriving.get(name, ())]
        for box in boxes:
            rest, pieces = [box] if volume(box) else [], []
            for source, held in sources:
                common = [c for part in rest if (c := intersect(part, source)) is not None]
                pieces += [Piece(part, source, held) for part in common]
                rest = [left for part in rest for left in subtract(part, source)]
            assert not rest, f"{name}: {rest} of {box} neither held nor received"
            found[Region(name, box)] = tuple(pieces)
    return found
