"""Moves weights between files and parameters, and converts checkpoints, one tensor at a time."""

from collections.abc import Collection, Mapping, Sequence

import torch

from megagrpo.types import Coordinates, Layout, ModelShape, TensorSource
from megagrpo.weights.accounting import check_names, check_shapes, valid_boxes
from megagrpo.weights.slices import Slice, from_hf, index, uncovered, volume, whole
from megagrpo.weights.table import EMBEDDING, HEAD, PAD_MULTIPLE, expand, local_shapes


def load_rank_(
    named_parameters: Mapping[str, torch.Tensor],
    source: TensorSource,
    shape: ModelShape,
    layout: Layout,
    coords: Coordinates,
    profile: str = "local",
    *,
    multiple: int = PAD_MULTIPLE,
) -> None:
    """Fill all parameters of one rank's GPTModel, in place; names and shapes are checked first.

    Raises ValueError naming the parameter whose name or shape is not the table's, else as
    `load_local_`.
    """
    shapes = local_shapes(shape, layout, coords, profile, multiple=multiple)
    check_names("Megatron parameter", shapes, named_parameters)
    check_shapes(
        "Megatron parameter", shapes, {n: tuple(p.shape) for n, p in named_parameters.items()}
    )
    filled = valid_boxes(shape, shapes, coords.tp)
    padding_only = [name for name, box in filled.items() if volume(box) == 0]
    slices = expand(shape, layout, coords, profile, multiple=multiple)
    load_local_(named_parameters, source, slices, padding_only=padding_only)


@torch.no_grad()
def load_local_(
    named_parameters: Mapping[str, torch.Tensor],
    source: TensorSource,
    slices: Sequence[Slice],
    *,
    padding_only: Collection[str] = (),
) -> None:
    """Fill a rank's Megatron parameters, in place, from the HuggingFace tensors of `source`.

    `named_parameters` carry the names of `slices` (from `expand`) and may have any float dtype and
    device. Vocabulary padding rows become zero; `padding_only` names parameters that are nothing
    but padding on this rank. Raises ValueError naming the tensor if a parameter has no slices, a
    slice no parameter, an element is not covered, or the source lacks a tensor.
    """
    by_name: dict[str, list[Slice]] = {name: [] for name in padding_only}
    for piece in slices:
        by_name.setdefault(piece.megatron, []).append(piece)
    check_names("Megatron parameter", by_name, named_parameters)
    infos = {info.name for info in source.tensors()}
    for name, parameter in named_parameters.items():
        parts = from_hf(by_name[name])
        rest = uncovered(whole(parameter.shape), [part.at for part in parts])
        if rest and name not in (EMBEDDING, HEAD):
            raise ValueError(f"{name}: box {rest[0]} is not covered by the table")
        for box in rest:
            parameter[index(box)] = 0
        for part in parts:
            if part.name not in infos:
                raise ValueError(f"{name} needs {part.name}, which the source does not hold")
            parameter[index(part.at)].copy_(source.read(part.name, part.box))
