"""HuggingFace folders whose experts are fused, read as if each expert had tensors of its own.

transformers 5 holds the experts of a layer as gate_up_proj [E, 2f, h] and down_proj [E, h, f] and
may save them so; older files, and those written here, have a tensor per expert and matrix. The
names of transformers' modules ("mlp") are taken for those of Mixtral's files ("block_sparse_moe").
"""

import re
from pathlib import Path

import torch

from megagrpo.types import Box, ModelShape, TensorInfo, TensorSource
from megagrpo.weights.rows import MOE_NAMES
from megagrpo.weights.safetensors_io import HFSource

FUSED = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(\.weight)?")
ROUTER = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate\..*)")


def open_hf(folder: Path, shape: ModelShape) -> TensorSource:
    """The folder's tensors under the names of the table."""
    source = HFSource(folder)
    return source if shape.experts is None else SplitExperts(source, shape)


class SplitExperts:
    """TensorSource over another whose experts may be fused.

    Raises ValueError if a fused tensor has another shape than the config's.
    """

    def __init__(self, source: TensorSource, shape: ModelShape) -> None:
        assert shape.experts is not None, "a model without experts has nothing to split"
        self._source = source
        block, gate, up, down = MOE_NAMES[shape.family]
        count, ffn, hidden = shape.experts.count, shape.ffn_hidden_size, shape.hidden_size
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
        if name not in self._places:
            raise KeyError(f"the source has no tensor {name}")
        stored, place = self._places[name]
        if not place:
            return self._source.read(stored, box)
        expert, row = place
        (start, stop), columns = box
        return self._source.read(
            stored, ((expert, expert + 1), (row + start, row + stop), columns)
        )[0]

    def _add(self, info: TensorInfo, stored: str, place: tuple[int, ...]) -> None:
        if info.name in self._places:
            raise ValueError(f"{info.name} is in {stored} and in {self._places[info.name][0]}")
        self._infos.append(info)
        self._places[info.name] = (stored, place)
