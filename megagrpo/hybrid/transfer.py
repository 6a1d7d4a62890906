"""Carries out a plan: buckets between ranks, boxes for the engine's loader.

`feed` runs the buckets while the loader walks through the manifest, so that no more is in flight
than the loader needs; `fetch` hands out planned boxes and never communicates. Buffers are fresh in
every bucket: what was handed out is never overwritten. Left out: shared memory within a host.

A tensor's module is its name without the last two parts: its tensors may be read late together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from megagrpo.hybrid.plan import Bucket, Piece, Plan, Region
from megagrpo.types import Box, TensorInfo
from megagrpo.weights.slices import Slice, extent, index, intersect, translate, volume, whole


class Sources:
    """This rank's shard, read by HuggingFace name and box.

    Parameters are looked up anew at every read; names and places are kept, never their data.
    """

    def __init__(self, slices: Sequence[Slice], parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._by_name: dict[str, list[Slice]] = {}
        for piece in slices:
            self._by_name.setdefault(piece.hf, []).append(piece)
        self._places: dict[tuple[str, Box], tuple[str, tuple[slice, ...]]] = {}

    def boxes(self) -> dict[str, list[Box]]:
        """What this rank holds."""
        return {name: [piece.hf_box for piece in held] for name, held in self._by_name.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every tensor that this rank holds."""
        return {
            name: self._parameters[held[0].megatron].dtype for name, held in self._by_name.items()
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view of the region, which must lie in one held box; KeyError otherwise."""
        if (name, box) not in self._places:
            self._places[name, box] = self._locate(name, box)
        parameter, place = self._places[name, box]
        return self._parameters[parameter].detach()[place]

    def _locate(self, name: str, box: Box) -> tuple[str, tuple[slice, ...]]:
        for piece in self._by_name.get(name, ()):
            if intersect(box, piece.hf_box) == box:
                return piece.megatron, index(translate(box, piece.hf_box, piece.megatron_box))
        raise KeyError(f"{name} {box} is not held by this rank")


class Transfer:
    """Moves one rank's boxes; `group` is a communicator of the whole world that nobody else uses.

    With NCCL the group has been warmed by a collective; point-to-point messages of a bucket are
    started as one batch in ascending order of the peers.
    """

    def __init__(
        self,
        plan: Plan,
        sources: Sources,
        dtypes: Mapping[str, torch.dtype],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._plan, self._sources, self._dtypes = plan, sources, dtypes
        self._group, self._device = group, device
        self._stacked = {want: _stacked_along(want.box, p) for want, p in plan.pieces.items() if p}
        self._arrived: dict[Region, torch.Tensor] = {}
        self._next_bucket = 0
        self.received_bytes = 0  # of the current sync, from other ranks
        self.peak_bytes = 0  # buffers alive at one time in the current sync

    def feed(self, manifest: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
        """The manifest, each entry after its boxes have arrived; all ranks of the group walk
        through it together. Boxes of a module are dropped when the next module begins."""
        self._arrived.clear()
        self._next_bucket = self.received_bytes = self.peak_bytes = 0
        module, fed = "", list[str]()
        for info in manifest:
            if _module(info.name) != module:
                self._drop(fed)
                module, fed = _module(info.name), []
            fed.append(info.name)
            while self._next_bucket <= self._plan.last_bucket[info.name]:
                self._run(self._plan.buckets[self._next_bucket])
                self._next_bucket += 1
            yield info
        self._arrived.clear()
        assert self._next_bucket == len(self._plan.buckets), (
            f"{self._next_bucket} of {len(self._plan.buckets)} buckets ran: manifest cut short"
        )

    def fetch(self, name: str, box: Box) -> torch.Tensor:
        """The planned region `box` of tensor `name`; a view of this rank's shard where it holds it.

        Raises KeyError for a region that is not in the plan or whose module has passed.
        """
        pieces = self._plan.pieces.get(Region(name, box))
        if pieces is None:
            raise KeyError(f"region {box} of {name} is not in the plan of the weight sync")
        if len(pieces) == 1:
            return self._part(name, pieces[0])
        dim = self._stacked.get(Region(name, box))
        if dim is not None:
            return torch.cat([self._part(name, piece) for piece in pieces], dim)
        found = torch.empty(extent(box), dtype=self._dtypes[name], device=self._device)
        for piece in pieces:
            place = translate(piece.box, box, whole(extent(box)))
            found[index(place)] = self._part(name, piece)
        return found

    def _part(self, name: str, piece: Piece) -> torch.Tensor:
        if piece.held:
            return self._sources.read(name, piece.box)
        arrived = self._arrived.get(Region(name, piece.source))
        if arrived is None:
            raise KeyError(f"region {piece.source} of {name} has not arrived or was dropped")
        if piece.box == piece.source:
            return arrived
        return arrived[index(translate(piece.box, piece.source, whole(arrived.shape)))]

    def _run(self, bucket: Bucket) -> None:
        """One bucket; every rank that sends or receives in it joins."""
        operations, staged = [], 0
        for peer in sorted({*bucket.sends, *bucket.receives}):
            for regions in _by_dtype(bucket.sends.get(peer, ()), self._dtypes):
                parts = [self._sources.read(r.name, r.box).reshape(-1) for r in regions]
                flat = torch.cat(parts)
                staged += flat.nbytes
                operations.append(dist.P2POp(dist.isend, flat, group=self._group, peer=peer))
            for regions in _by_dtype(bucket.receives.get(peer, ()), self._dtypes):
                sizes = [volume(r.box) for r in regions]
                dtype = self._dtypes[regions[0].name]
                flat = torch.empty(sum(sizes), dtype=dtype, device=self._device)
                self.received_bytes += flat.nbytes
                operations.append(dist.P2POp(dist.irecv, flat, group=self._group, peer=peer))
                for region, part in zip(regions, flat.split(sizes), strict=True):
                    self._arrived[region] = part.view(extent(region.box))
        # The ranks of this bucket, pairwise; a pair's messages are in the same order on both.
        work = dist.batch_isend_irecv(operations) if operations else []
        for handle in work:
            handle.wait()
        alive = {part.untyped_storage().data_ptr(): part for part in self._arrived.values()}
        buffers = sum(part.untyped_storage().nbytes() for part in alive.values())
        self.peak_bytes = max(self.peak_bytes, staged + buffers)

    def _drop(self, names: Sequence[str]) -> None:
        passed = set(names)
        for region in [region for region in self._arrived if region.name in passed]:
            del self._arrived[region]


def _module(name: str) -> str:
    return name.rsplit(".", 2)[0]


def _by_dtype(
    regions: Iterable[Region], dtypes: Mapping[str, torch.dtype]
) -> Iterator[list[Region]]:
    """One message holds one dtype, so that no slice can be misaligned."""
    groups: dict[torch.dtype, list[Region]] = {}
    for region in regions:
        groups.setdefault(dtypes[region.name], []).append(region)
    yield from groups.values()


def _stacked_along(box: Box, pieces: Sequence[Piece]) -> int | None:
    """The dimension along which the pieces, in order, follow one another to make up `box`."""
    for dim, (start, stop) in enumerate(box):
        ranges = [piece.box[dim] for piece in pieces]
        ends = [start, *(end for _, end in ranges)]
        begins = [*(begin for begin, _ in ranges), stop]
        same_elsewhere = all(
            piece.box[:dim] == box[:dim] and piece.box[dim + 1 :] == box[dim + 1 :]
            for piece in pieces
        )
        if same_elsewhere and ends == begins:
            return dim
    return None
