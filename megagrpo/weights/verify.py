"""Compares: a source against the model's shape, and two folders byte by byte, both directions.

Comparison is by bytes, so a NaN equals itself and -0.0 differs from 0.0. Left out: logits; those
are `model/parity.py`'s.
"""

from pathlib import Path

import torch

from megagrpo.types import ModelShape, TensorInfo, TensorSource
from megagrpo.weights.accounting import check_names, check_shapes
from megagrpo.weights.experts import open_hf
from megagrpo.weights.fused import fused_rows, fused_slices, stored_boxes
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.rows import HF_EMBEDDING, HF_HEAD, ignored
from megagrpo.weights.slices import by_megatron, cast, from_hf, gather, row_blocks, whole
from megagrpo.weights.table import fused_shape, hf_manifest

BLOCK_BYTES = 32 << 20  # how much of a tensor is compared at a time


class Different(ValueError):
    """Two folders that both fit the model hold different weights."""


def check_source(source: TensorSource, shape: ModelShape) -> list[TensorInfo]:
    """The tensors of the model that `source` holds, after names and shapes were checked.

    Raises ValueError listing missing and unknown names, naming a wrong shape, or naming both keys
    if a tied model comes with a head that differs from its embedding (an equal one is ignored).
    """
    infos = {i.name: i for i in source.tensors() if not ignored(shape, i.name)}
    expected = {info.name: info for info in hf_manifest(shape, shape.dtype)}
    if shape.tied and HF_HEAD in infos and HF_EMBEDDING in infos:
        head = infos.pop(HF_HEAD)
        if not _same(source, head, source, infos[HF_EMBEDDING]):
            raise ValueError(
                f"tie_word_embeddings is true, but {HF_HEAD} differs from {HF_EMBEDDING}"
            )
    check_names("HuggingFace", expected, infos)
    check_shapes(
        "tensor",
        {name: info.shape for name, info in expected.items()},
        {name: info.shape for name, info in infos.items()},
    )
    return [infos[name] for name in expected]


def verify(
    hf: Path, megatron: Path, shape: ModelShape, dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """Compare a HuggingFace folder with a checkpoint of either format, every byte, both directions.

    With `dtype` the HuggingFace side is cast to it first. Returns (HuggingFace tensors, Megatron
    tensors) compared; raises Different naming what differs.
    """
    left, right = open_hf(hf, shape), MegatronSource(megatron, shape)
    wanted = [TensorInfo(i.name, i.shape, dtype or i.dtype) for i in check_source(left, shape)]
    stored = {info.name: info for info in check_source(right, shape)}
    different = [
        info.name
        for info in wanted
        if info.dtype != stored[info.name].dtype or not _same(left, info, right, stored[info.name])
    ]
    different += _different_fused(left, right, shape)
    if different:
        raise Different(
            f"{len(different)} tensors differ between {hf} and {megatron}: "
            f"{', '.join(different[:8])}{' ...' if len(different) > 8 else ''}"
        )
    return len(wanted), len(fused_rows(shape))


def _different_fused(left: TensorSource, right: MegatronSource, shape: ModelShape) -> list[str]:
    """Fused tensors that are not what the HuggingFace side makes them; padding must be zero."""
    parts = by_megatron(fused_slices(shape))
    different = []
    for name, row in fused_rows(shape):
        dtype = right.fused_dtype(name)
        boxes = stored_boxes(shape, row)
        same = all(
            _bits(gather(box, from_hf(parts[name]), left.read, dtype)).equal(
                _bits(right.read_fused(name, box))
            )
            for box in boxes
        )
        full = fused_shape(shape, row)
        rows = right.stored.shapes[name][0] if row.kind == "vocab" else full[0]
        if rows > full[0]:
            padding = right.read_fused(name, ((full[0], rows), *whole(full[1:])))
            same = same and not padding.any()
        if not same:
            different.append(name)
    return different


def _same(one: TensorSource, left: TensorInfo, other: TensorSource, right: TensorInfo) -> bool:
    """Equal bytes, after the first side was cast to the second's dtype."""
    if left.shape != right.shape:
        return False
    return all(
        _bits(cast(one.read(left.name, box), right.dtype, left.name)).equal(
            _bits(other.read(right.name, box))
        )
        for box in row_blocks(left.shape, left.dtype.itemsize, BLOCK_BYTES)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
