"""The one table between HuggingFace and Megatron weights.

Each `Row` is one kind of parameter. By arithmetic on the model shape it expands to slices for any
layout; import, export, checkpoints and the weight sync all use these slices, and their inverses are
derived, never written. Nothing is inferred from tensor shapes or class names.

A row's *fused* tensor is the Megatron tensor without any cut, as a distributed checkpoint holds it:
QKV per query group [q of the group, k, v], gate rows before up rows. A tensor-parallel rank holds
cuts of the fused tensor. Vocabulary rows beyond the model's own are padding: no slice, zero.

Left out: virtual pipeline stages, expert parallelism.
"""

from collections.abc import Iterable

import torch

from megagrpo.types import Box, Coordinates, Layout, ModelShape, TensorInfo
from megagrpo.weights.rows import EMBEDDING_ROW, Row, rows
from megagrpo.weights.slices import Slice, intersect, translate, whole

PROFILES = ("local", "te", "te_grouped")
PAD_MULTIPLE = 8  # vocabulary rows per tensor-parallel rank are a multiple of this


def padded_vocab(vocab: int, tp: int, multiple: int = PAD_MULTIPLE) -> int:
    """Least multiple of tp * multiple >= vocab (131, 2, 8 gives 144); twice changes nothing."""
    unit = tp * multiple
    return -(-vocab // unit) * unit


def check_tp(shape: ModelShape, tp: int, key: str = "parallel.tp") -> None:
    """Raise ValueError, naming both numbers, if the model cannot be cut into `tp` tensor ranks;
    `key` is where the number was set."""
    kv = shape.num_kv_heads
    if kv % tp and tp % kv:
        raise ValueError(f"{key}={tp} and num_key_value_heads={kv}: one must divide the other")
    for name, size in _cut_sizes(shape):
        if size % tp:
            raise ValueError(f"{key}={tp} does not divide {name}={size}; use a divisor")


def _cut_sizes(shape: ModelShape) -> list[tuple[str, int]]:
    """(name, size) of every dimension that tensor parallelism cuts."""
    heads, latent, experts = shape.num_heads, shape.latent, shape.experts
    sizes = [("num_attention_heads", heads)]
    if latent is None:
        rows = (heads + 2 * shape.num_kv_heads) * shape.head_dim
        sizes.append(("fused QKV rows", rows))
    else:  # the local spec cuts what Transformer Engine keeps whole
        sizes.append(("kv_lora_rank + qk_rope_head_dim", latent.kv_rank + latent.rope_dim))
        sizes.append(("q_lora_rank", latent.query_rank or 0))
    if experts is None or experts.dense_layers:
        sizes.append(("intermediate_size", shape.ffn_hidden_size))
    if experts is not None:
        sizes.append(("size of an expert", expert_ffn(shape)))
        sizes.append(("size of the shared experts", experts.shared_ffn))
    return sizes


def expert_ffn(shape: ModelShape) -> int:
    """Hidden size of one expert; 0 without experts."""
    if shape.experts is None:
        return 0
    return shape.experts.ffn_hidden_size or shape.ffn_hidden_size


def hf_shape(shape: ModelShape, name: str) -> tuple[int, ...]:
    """Shape of one HuggingFace tensor, by the words of its name in the table."""
    hidden, dim = shape.hidden_size, shape.head_dim
    words = name.split(".")
    module, leaf = words[-2:]
    experts = shape.experts
    if experts is not None and "shared_experts" in words:
        ffn = experts.shared_ffn
    else:
        ffn = expert_ffn(shape) if "experts" in words else shape.ffn_hidden_size
    sizes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (shape.vocab_size, hidden),
        "lm_head": (shape.vocab_size, hidden),
        "q_proj": (shape.num_heads * dim, hidden),
        "k_proj": (shape.num_kv_heads * dim, hidden),
        "v_proj": (shape.num_kv_heads * dim, hidden),
        "o_proj": (hidden, shape.num_heads * dim),
        "q_norm": (dim,),
        "k_norm": (dim,),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (ffn, hidden)),
        **dict.fromkeys(("down_proj", "w2"), (hidden, ffn)),
        "gate": (0 if experts is None else experts.count, hidden),  # the router
        "norm": (hidden,),
    } | _latent_shapes(shape)
    full = (hidden,) if module.endswith("layernorm") and module not in sizes else sizes[module]
    return full[:1] if leaf in ("bias", "e_score_correction_bias") else full


def _latent_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """What latent attention has in other sizes, by the word before the last of the name."""
    latent = shape.latent
    if latent is None:
        return {}
    hidden, heads = shape.hidden_size, shape.num_heads
    query = latent.query_rank or 0
    return {
        "q_a_proj": (query, hidden),
        "q_a_layernorm": (query,),
        "q_b_proj": (heads * shape.head_dim, query),
        "kv_a_proj_with_mqa": (latent.kv_rank + latent.rope_dim, hidden),
        "kv_a_layernorm": (latent.kv_rank,),
        "kv_b_proj": (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "o_proj": (hidden, heads * latent.value_dim),
    }


def hf_manifest(shape: ModelShape, dtype: torch.dtype) -> list[TensorInfo]:
    """Every HuggingFace tensor of the model, in file order; a tied head is not among them."""
    table = rows(shape)
    names = list(EMBEDDING_ROW.hf)
    for layer in range(shape.num_layers):
        mine = (row for row in table if row.where == "layer" and row.on(layer))
        names += [name.format(i=layer) for row in mine for name in row.hf]
    names += [name for row in table if row.where == "last" for name in row.hf]
    return [TensorInfo(name, hf_shape(shape, name), dtype) for name in names]


def fused_shape(shape: ModelShape, row: Row) -> tuple[int, ...]:
    """Shape of the row's Megatron tensor before any cut and padding."""
    first = hf_shape(shape, row.hf[0])
    total = sum(hf_shape(shape, name)[0] for name in row.hf)
    return (total, *first[1:])


def _pieces(shape: ModelShape, row: Row) -> list[tuple[str, Box, Box]]:
    """(HF name, HF box, box of the fused tensor) of every stretch of the row."""
    rest = whole(fused_shape(shape, row)[1:])
    if row.kind == "qkv":
        stretches, start, dim = [], 0, shape.head_dim
        queries = shape.num_heads // shape.num_kv_heads * dim
        for group in range(shape.num_kv_heads):
            for name, size in zip(row.hf, (queries, dim, dim), strict=True):
                stretches.append((name, group * size, size, start))
                start += size
    else:
        sizes = [hf_shape(shape, name)[0] for name in row.hf]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        stretches = list(zip(row.hf, [0] * len(sizes), sizes, starts, strict=True))
    return [
        (name, ((at, at + size), *rest), ((start, start + size), *rest))
        for name, at, size, start in stretches
    ]


def rank_cuts(
    shape: ModelShape, row: Row, tp: int, rank: int, multiple: int
) -> list[tuple[Box, Box]]:
    """(box of the fused tensor, box of the local tensor) of every cut that the rank holds."""
    full = fused_shape(shape, row)
    if row.kind == "replicated":
        return [(whole(full), whole(full))]
    dim, halves = cut_axis(row)
    size = padded_vocab(full[0], tp, multiple) if row.kind == "vocab" else full[dim]
    assert size % (tp * halves) == 0, f"{row.megatron}: {size} rows do not divide by tp={tp}"
    share = size // halves // tp
    cuts = []
    for half in range(halves):
        start = half * (size // halves) + rank * share
        fused, local = list(whole(full)), list(whole(full))
        fused[dim] = (start, start + share)
        local[dim] = (half * share, (half + 1) * share)
        cuts.append((tuple(fused), tuple(local)))
    return cuts


def cut_axis(row: Row) -> tuple[int, int]:
    """(dimension that tensor parallelism cuts, how many stretches of it are cut separately)."""
    return (1 if row.kind == "row" else 0), (2 if row.kind == "gate_up" else 1)


def placed_rows(
    shape: ModelShape, layout: Layout, coords: Coordinates, profile: str
) -> Iterable[tuple[Row, str, int]]:
    """(row, local Megatron name, global layer) of everything on the rank's pipeline stage; rows as
    they are under that naming profile."""
    if profile not in PROFILES:
        raise ValueError(f"unknown naming profile {profile!r}; use one of {', '.join(PROFILES)}")
    start, stop = layout.stage_layers(shape.num_layers)[coords.pp]
    stage = {"first": coords.pp == 0, "last": coords.pp == layout.pp - 1}
    table = rows(shape, layout.pp)
    for row in (row for row in table if row.where == "first" and stage["first"]):
        yield row, row.megatron, 0
    for layer in range(start, stop):
        for row in (row for row in table if row.where == "layer" and row.on(layer)):
            yield row.under(profile), row.name(profile).format(i=layer - start), layer
    for row in (row for row in table if row.where == "last" and stage["last"]):
        yield row, row.megatron, 0


def expand(
    shape: ModelShape,
    layout: Layout,
    coords: Coordinates,
    profile: str = "local",
    *,
    multiple: int = PAD_MULTIPLE,
) -> list[Slice]:
    """Slices of one rank's GPTModel, under that rank's own parameter names.

    `profile` "local" names norms as Megatron's local layer spec, "te" as Transformer Engine's fused
    modules, "te_grouped" experts as its grouped linears. Raises ValueError if the model cannot be
    cut that way.
    """
    check_tp(shape, layout.tp)
    slices = []
    for row, name, layer in placed_rows(shape, layout, coords, profile):
        cuts = rank_cuts(shape, row, layout.tp, coords.tp, multiple)
        for hf, hf_box, fused_box in _pieces(shape, row):
            for cut, local in cuts:
                common = intersect(fused_box, cut)
                if common is not None:
                    source = translate(common, fused_box, hf_box)
                    target = translate(common, cut, local)
                    slices.append(Slice(hf.format(i=layer), source, name, target))
    return slices


def local_shapes(
    shape: ModelShape,
    layout: Layout,
    coords: Coordinates,
    profile: str = "local",
    *,
    multiple: int = PAD_MULTIPLE,
) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of that rank's GPTModel, vocabulary padding included."""
    check_tp(shape, layout.tp)
    shapes = {}
    for row, name, _ in placed_rows(shape, layout, coords, profile):
        corners = [local for _, local in rank_cuts(shape, row, layout.tp, coords.tp, multiple)]
        shapes[name] = tuple(stop for _, stop in corners[-1])
    return shapes
