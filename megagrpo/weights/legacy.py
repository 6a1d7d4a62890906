"""Megatron-LM's per-rank checkpoints: mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt, a file per rank.

Each holds {"model": that rank's parameters, "args": argparse.Namespace, "checkpoint_version": 3.0};
with virtual pipeline stages "model0", "model1", ... instead: chunk v of stage p holds the layers of
stage v * pp + p of a pipeline that much longer, and is read as that. The layout comes from the
folder names and from what each file holds, the naming profile ("te", "te_grouped" or "local") from
the names; `args` is for Megatron-LM and only explains what does not fit. Written by
`legacy_write.py`. Left out, and refused by their shapes: experts cut otherwise than the rest
(expert tensor ranks other than tp).
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from megagrpo.types import Box, Layout, ModelShape
from megagrpo.weights.accounting import check_names, check_shapes
from megagrpo.weights.arrays import ArrayReader, BoxIndex, StoredArray, inside_of
from megagrpo.weights.fused import LAYER_KEY, stacked_box, stacked_shape, stored_key
from megagrpo.weights.legacy_file import (
    Rank,
    RankFile,
    iteration,
    rank_files,
    rank_folder,
    sizes,
)
from megagrpo.weights.legacy_ranks import RankParameter, check_expert_ranks, rank_parameters
from megagrpo.weights.rows import EMBEDDING, HEAD
from megagrpo.weights.slices import extent, intersect, translate, whole
from megagrpo.weights.table import fused_shape, rank_cuts

GROUPED = re.compile(r"\.mlp\.experts\.linear_fc1\.weight\d+$")
_Parts = dict[str, list[tuple[Box, tuple[StoredArray, Box]]]]
"""By stored key: (box of it, (array of a rank's file, box of that array))."""


class LegacyTensors:
    """Per-rank files as whole fused tensors, under the keys and with the methods of StoredTensors.

    Raises ValueError naming file or key if a rank is missing, if names or shapes are not the
    model's, or if something is not read here.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._home, self._shape = iteration(folder), shape
        self._files = rank_files(folder)
        self.noted = {name: d for file in self._files.values() for name, d in file.noted.items()}
        self.pp, self.ep, self.layout = _layout(self._home, self._files, shape)
        self.profile = _profile(self._files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.arrays = ArrayReader()
        parts: _Parts = {}
        try:
            for expert_rank in range(self.ep):
                for rank in range(self.layout.world):
                    self._add_rank(rank, expert_rank, parts)
        except ValueError as error:
            raise ValueError(f"{error}{self._explained()}") from None
        self._parts = {key: BoxIndex(found) for key, found in parts.items()}

    def fill_(self, out: torch.Tensor, key: str, box: Box) -> None:
        """Copy that region of a stored tensor into `out`, cast to its dtype."""
        for common, stored, (array, source) in self._parts[key].meeting(box):
            inside, depth = translate(common, stored, source), len(box) - len(array.shape)
            target = inside_of(out, box, common)[(0,) * depth]
            self.arrays.fill_(target, array, inside[depth:], key)

    def read(self, key: str, box: Box) -> torch.Tensor:
        """That region of a stored tensor, in the stored dtype."""
        result = torch.empty(extent(box), dtype=self.dtypes[key])
        self.fill_(result, key, box)
        return result

    def chunk_count(self, key: str) -> int:
        """In how many pieces a tensor is stored."""
        return len(self._parts[key])

    def _explained(self) -> str:
        """How the folders differ from the layout that the saved arguments name."""
        vpp = self.layout.pp // self.pp
        found = {"tp": self.layout.tp, "pp": self.pp, "vpp": vpp, "ep": self.ep}
        saved = next(iter(self._files.values())).saved_at
        if all(found[name] == size for name, size in saved.items()):
            return ""
        said, seen = (" ".join(f"{k} {v}" for k, v in sizes.items()) for sizes in (saved, found))
        return f"; it was saved at {said}, the folders here are those of {seen}"

    def _add_rank(self, rank: int, expert_rank: int, parts: _Parts) -> None:
        coords = self.layout.coordinates(rank)
        place, chunk = Rank(coords.tp, coords.pp % self.pp, expert_rank), coords.pp // self.pp
        held = self._files[place].models[chunk]
        where = f"{self._home / rank_folder(place, self.pp, self.ep)}:"
        rows = next((held[name].shape[0] for name in (EMBEDDING, HEAD) if name in held), 1)
        experts = (expert_rank, self.ep)
        found = rank_parameters(
            self._shape, self.layout, coords, self.profile, experts, multiple=rows
        )
        expected = {item.name: item for item in found}
        check_names(where, expected, held)
        check_shapes(
            where,
            {name: item.shape for name, item in expected.items()},
            {name: array.shape for name, array in held.items()},
        )
        for name, item in expected.items():
            self._note(where, item, held[name])
            if (item.row.kind == "replicated" and coords.tp) or (expert_rank and not item.expert):
                if item.row.kind == "replicated":
                    _check_copies(self._files, place, chunk, name, self.arrays)
                continue
            self._add(item, held[name], coords.tp, rows, parts)

    def _note(self, where: str, item: RankParameter, array: StoredArray) -> None:
        """Shape and dtype of the stored tensor that the parameter belongs to."""
        key, _ = stored_key(item.fused, self._shape)
        size = stacked_shape(self._shape, key, fused_shape(self._shape, item.row))
        if self.shapes.setdefault(key, size) != size:
            raise ValueError(f"{where} {item.name} does not fit the other ranks")
        self.dtypes[key] = torch.promote_types(self.dtypes.get(key, array.dtype), array.dtype)

    def _add(
        self, item: RankParameter, array: StoredArray, tp_rank: int, rows: int, parts: _Parts
    ) -> None:
        key, number = stored_key(item.fused, self._shape)
        full = whole(fused_shape(self._shape, item.row))
        for fused, local in rank_cuts(self._shape, item.row, self.layout.tp, tp_rank, rows):
            inside = intersect(fused, full)  # the rest is vocabulary padding
            if inside is not None:
                source = stacked_box((0,) * len(number), translate(inside, fused, local))
                box = stacked_box(number, inside)
                parts.setdefault(key, []).append((box, (array, source)))


def _check_copies(
    files: Mapping[Rank, RankFile], rank: Rank, chunk: int, name: str, arrays: ArrayReader
) -> None:
    """A vector that all tensor and expert ranks hold must be the same on all of them."""
    first, other = (files[place].models[chunk][name] for place in (Rank(0, rank.pp), rank))
    box = whole(first.shape)
    one, two = (arrays.read(array, box, name) for array in (first, other))
    if not one.view(torch.uint8).equal(two.view(torch.uint8)):
        which = f"tensor rank {rank.tp}" + (f", expert rank {rank.ep}" if rank.ep else "")
        raise ValueError(f"{name} of {which} differs from that of rank 0")


def _layout(
    home: Path, files: Mapping[Rank, RankFile], shape: ModelShape
) -> tuple[int, int, Layout]:
    """(pipeline ranks, expert ranks, the layout in which every virtual stage is a stage)."""
    tp, pp, ep = sizes(files)
    check_expert_ranks(shape, ep)
    chunks = {len(file.models) for file in files.values()}
    if len(chunks) > 1:
        raise ValueError(f"{home} has files of {sorted(chunks)} virtual stages; all must agree")
    for rank in (Rank(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)):
        if rank not in files:
            raise ValueError(f"{home} lacks {rank_folder(rank, pp, ep)}; other ranks are there")
    stages = pp * chunks.pop()
    counts = []
    for stage in range(stages):
        held = files[Rank(0, stage % pp)].models[stage // pp]
        matches = [LAYER_KEY.match(name) for name in held]
        counts.append(1 + max((int(m.group(1)) for m in matches if m), default=-1))
    if sum(counts) != shape.num_layers:
        raise ValueError(f"{home} holds {sum(counts)} layers, the config has {shape.num_layers}")
    if len(set(counts)) == 1:
        return pp, ep, Layout(world=tp * stages, tp=tp, pp=stages)
    if len(set(counts[1:-1])) > 1:
        raise ValueError(f"{home} has stages of {counts} layers; only the ends may differ")
    ends = {"first_stage_layers": counts[0], "last_stage_layers": counts[-1]}
    return pp, ep, Layout(world=tp * stages, tp=tp, pp=stages, **ends)


def _profile(files: Mapping[Rank, RankFile]) -> str:
    names = [name for file in files.values() for model in file.models for name in model]
    if any(GROUPED.search(name) for name in names):
        return "te_grouped"
    return "te" if any(name.endswith(".layer_norm_weight") for name in names) else "local"
