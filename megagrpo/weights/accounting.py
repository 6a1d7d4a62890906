"""Two-way accounting: every HuggingFace element and every Megatron element exactly once.

These checks are pure arithmetic over slices and names; they run before anything is read or written,
and each failure names the tensor or lists both sets of names. Left out: comparing values.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from megagrpo.types import Box, Coordinates, Layout, ModelShape, TensorInfo
from megagrpo.weights.rows import EMBEDDING, HEAD, HF_EMBEDDING, rows
from megagrpo.weights.slices import Slice, check_cover, whole
from megagrpo.weights.table import PAD_MULTIPLE, expand, hf_manifest, local_shapes

LAYER = re.compile(r"\.\d+\.")
# Never weights: state of Transformer Engine, by exact suffix.
EXTRA_STATE = re.compile(r"\._extra_state(/.*)?$")


def check_names(kind: str, expected: Collection[str], found: Collection[str]) -> None:
    """Raise ValueError listing missing and unknown names unless the two sets are equal."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"{kind} keys do not fit the model: missing {_listed(missing)}; "
            f"unknown {_listed(unknown)}"
        )


def _listed(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"[{', '.join(names[:limit])}]{more}"


def check_shapes(
    kind: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError naming the first tensor whose shape is not the expected one."""
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"{kind} {name} has shape {list(found[name])}, expected {list(shape)}")


def check_megatron(
    slices: Iterable[Slice], shapes: Mapping[str, tuple[int, ...]], valid: Mapping[str, Box]
) -> None:
    """Every element of every Megatron tensor is filled exactly once; `valid` gives the box that is
    not vocabulary padding, for tensors that are padded. Raises ValueError naming the element."""
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for piece in slices:
        if piece.megatron not in boxes:
            raise ValueError(f"the table has {piece.megatron}, the model has not")
        boxes[piece.megatron].append(piece.megatron_box)
    for name, shape in shapes.items():
        check_cover(valid.get(name, whole(shape)), boxes[name], f"Megatron {name}")


def valid_boxes(
    shape: ModelShape, shapes: Mapping[str, tuple[int, ...]], tp_rank: int
) -> dict[str, Box]:
    """The box without padding rows of the vocabulary tensors that are among `shapes`."""
    boxes: dict[str, Box] = {}
    for name in (EMBEDDING, HEAD):
        if name in shapes:
            rows, hidden = shapes[name]
            filled = min(max(shape.vocab_size - tp_rank * rows, 0), rows)
            boxes[name] = ((0, filled), (0, hidden))
    return boxes


def check_layout(
    shape: ModelShape, layout: Layout, profile: str = "local", *, multiple: int = PAD_MULTIPLE
) -> None:
    """Both directions over all tensor and pipeline ranks of one replica.

    Each rank's Megatron elements exactly once; each HuggingFace element on exactly one tensor rank
    (on every one where the parameter is replicated) of exactly one stage, but for the tied
    embedding, which the last stage holds once more. Raises ValueError naming the tensor.
    """
    holders: dict[str, dict[str, dict[int, list[Box]]]] = {}
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            coords = Coordinates(tp=tp, pp=pp, dp=0)
            slices = expand(shape, layout, coords, profile, multiple=multiple)
            shapes = local_shapes(shape, layout, coords, profile, multiple=multiple)
            check_megatron(slices, shapes, valid_boxes(shape, shapes, tp))
            for piece in slices:
                ranks = holders.setdefault(piece.hf, {}).setdefault(f"{pp}/{piece.megatron}", {})
                ranks.setdefault(tp, []).append(piece.hf_box)
    manifest = {info.name: info for info in hf_manifest(shape, shape.dtype)}
    copies = (row for row in rows(shape) if row.under(profile).kind == "replicated")
    copied = {hf for row in copies for hf in row.hf}
    check_names("HuggingFace", manifest, holders)
    for name, tensors in holders.items():
        wanted = 2 if shape.tied and layout.pp > 1 and name == HF_EMBEDDING else 1
        if len(tensors) != wanted:
            raise ValueError(f"{name} is held by {sorted(tensors)}, expected {wanted} holder(s)")
        for ranks in tensors.values():
            everywhere = LAYER.sub(".{i}.", name, count=1) in copied
            _check_holder(manifest[name], ranks, layout.tp, everywhere)


def _check_holder(
    info: TensorInfo, ranks: Mapping[int, list[Box]], tp: int, everywhere: bool
) -> None:
    full = whole(info.shape)
    if everywhere:
        if len(ranks) != tp or any(boxes != [full] for boxes in ranks.values()):
            raise ValueError(f"{info.name} is replicated on ranks {sorted(ranks)} of {tp}")
        return
    check_cover(full, [box for boxes in ranks.values() for box in boxes], info.name)
