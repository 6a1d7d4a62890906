"""HuggingFace folders whose experts are fused, read as if each expert had tensors of its own.

transformers 5 holds the experts of a layer as gate_up_proj [E, 2f, h] and down_proj [E, h, f] and
may save them so; older files, and those written here, have a tensor per expert and matrix. The
names of transformers' modules ("mlp") are taken for those of Mixtral's files ("block_sparse_moe").
"""

import re
from pathlib import Path

import torch

from megagrpo.types import Box, ModelShape, TensorInfo
from megagrpo.weights.moves import FillSource
from megagrpo.weights.rows import MOE_NAMES
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.table import expert_ffn

FUSED = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(\.weight)?")
ROUTER = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate\..*)")


def open_hf(folder: Path, shape: ModelShape) -> FillSource:
    """The folder's tensors under the names of the table."""
    source = HFSource(folder)
    return source if shape.experts is None else SplitExperts(source, shape)


class SplitExperts:
    """TensorSource over another whose experts may be fused.

    Raises ValueError if a fused tensor has another shape than the config's.
    """

    def __init__(self, source: FillSource, shape: ModelShape) -> None:
        assert shape.experts is not None, "a model without experts has nothing to split"
        self._source = source
        block, gate, up, down = MOE_NAMES[shape.family]
        count, ffn, hidden = shape.experts.count, expert_ffn(shape), shape.hidden_size
        self._infos: list[TensorInfo] = []
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}  # name: (stored, corner)
        for info in source.tensors():
            fused, router = FUSED.fullmatch(info.name), ROUTER.fullmatch(info.name)
            if fused is None:
                name = f"{router.group(1)}.{block}.{router.group(2)}" if router else info.name
                self._add(TensorInfo(name, info.shape, info.dtype), info.name, ())
                continue
            both = fused.group(2) == "gate_up_proj"
            full = (count, 2 * ffn, hidden) if both else (count, hidden, ffn)
            if info.shape != full:
                found = f"fused experts {info.name} have shape {list(info.shape)}"
                raise ValueError(f"{found}, expected {list(full)}")
            for expert in range(count):
                base = f"{fused.group(1)}.{block}.experts.{expert}"
                for at, leaf in enumerate((gate, up) if both else (down,)):
                    size = (ffn, hidden) if both else (hidden, ffn)
                    part = TensorInfo(f"{base}.{leaf}.weight", size, info.dtype)
                    self._add(part, info.name, (expert, at * ffn))

    def tensors(self) -> list[TensorInfo]:
        """Every tensor, fused ones as their parts."""
        return list(self._infos)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That region, contiguous, on CPU, in the stored dtype."""
        stored, inside = self._find(name, box)
        region = self._source.read(stored, inside)
        return region[0] if len(inside) > len(box) else region

    def fill_(self, out: torch.Tensor, name: str, box: Box) -> None:
        """Copy that region into `out`, cast to its dtype."""
        stored, inside = self._find(name, box)
        self._source.fill_(out[None] if len(inside) > len(box) else out, stored, inside)

    def _find(self, name: str, box: Box) -> tuple[str, Box]:
        """(stored tensor, box of it)."""
        if name not in self._places:
            raise KeyError(f"the source has no tensor {name}")
        stored, place = self._places[name]
        if not place:
            return stored, box
        expert, row = place
        (start, stop), columns = box
        return stored, ((expert, expert + 1), (row + start, row + stop), columns)

    def _add(self, info: TensorInfo, stored: str, place: tuple[int, ...]) -> None:
        if info.name in self._places:
            raise ValueError(f"{info.name} is in {stored} and in {self._places[info.name][0]}")
        self._infos.append(info)
        self._places[info.name] = (stored, place)
