"""The weight table against plain torch: cut by hand, put together again, counted twice."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.types import Box, Coordinates, Layout, ModelShape, TensorInfo
from megagrpo.weights.accounting import check_layout, check_megatron
from megagrpo.weights.convert import load_local_, load_rank_
from megagrpo.weights.fused import fused_rows, stored_boxes
from megagrpo.weights.slices import (
    by_megatron,
    check_cover,
    from_megatron,
    gather,
    index,
    subtract,
    uncovered,
    whole,
)
from megagrpo.weights.table import (
    check_tp,
    expand,
    fused_shape,
    hf_manifest,
    local_shapes,
    padded_vocab,
)
from tests.tiny_models import ARCHITECTURES, hf_config, hf_shapes, hf_tensors

HERE = Coordinates(tp=0, pp=0, dp=0)
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (4, 2)]


class DictSource:
    """TensorSource over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> list[TensorInfo]:
        return [TensorInfo(n, tuple(t.shape), t.dtype) for n, t in self._tensors.items()]

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._tensors[name][index(box)].contiguous()


def toy(family: str = "qwen3", tied: bool = False, **overrides: object) -> ModelShape:
    """The shape of a toy, written down here and not read through `hf_config.py`."""
    shape = ModelShape(
        architecture=ARCHITECTURES[family],
        family=family,
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=176,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=128,
        tied=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_positions=512,
        dtype=torch.float32,
    )
    return dataclasses.replace(shape, **overrides)


def toy_tensors(shape: ModelShape) -> dict[str, torch.Tensor]:
    return hf_tensors(
        hf_config(
            shape.family,
            shape.tied,
            num_hidden_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_hidden_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
        )
    )


def loaded(
    shape: ModelShape, layout: Layout, coords: Coordinates, hf: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """That rank's parameters, NaN before they are filled."""
    shapes = local_shapes(shape, layout, coords)
    parameters = {name: torch.full(size, float("nan")) for name, size in shapes.items()}
    load_rank_(parameters, DictSource(hf), shape, layout, coords)
    return parameters


def cut_by_hand(
    shape: ModelShape, hf: dict[str, torch.Tensor], layer: int, local: int, tp: int, rank: int
) -> dict[str, torch.Tensor]:
    """One layer of one tensor rank by reshape, cat and chunk: the reference of these tests."""
    base, prefix = f"model.layers.{layer}.", f"decoder.layers.{local}."
    result = {
        prefix + "input_layernorm.weight": hf[base + "input_layernorm.weight"],
        prefix + "pre_mlp_layernorm.weight": hf[base + "post_attention_layernorm.weight"],
        prefix + "self_attention.linear_proj.weight": hf[base + "self_attn.o_proj.weight"].chunk(
            tp, dim=1
        )[rank],
        prefix + "mlp.linear_fc2.weight": hf[base + "mlp.down_proj.weight"].chunk(tp, dim=1)[rank],
    }
    halves = [hf[base + f"mlp.{name}_proj.weight"].chunk(tp)[rank] for name in ("gate", "up")]
    result[prefix + "mlp.linear_fc1.weight"] = torch.cat(halves)
    for leaf in ("weight", "bias"):
        if base + f"self_attn.q_proj.{leaf}" in hf:
            parts = [hf[base + f"self_attn.{x}_proj.{leaf}"] for x in "qkv"]
            groups = [part.unflatten(0, (shape.num_kv_heads, -1)) for part in parts]
            fused = torch.cat(groups, dim=1).flatten(0, 1)
            result[prefix + f"self_attention.linear_qkv.{leaf}"] = fused.chunk(tp)[rank]
    for letter in "qk":
        if base + f"self_attn.{letter}_norm.weight" in hf:
            norm = hf[base + f"self_attn.{letter}_norm.weight"]
            result[prefix + f"self_attention.{letter}_layernorm.weight"] = norm
    return result


CASES = [
    pytest.param(family, tied, vocab, tp, pp, id=f"{family}-tied{int(tied)}-{vocab}-tp{tp}pp{pp}")
    for family, tied, vocab, (tp, pp) in itertools.product(
        ARCHITECTURES, (False, True), (128, 131), LAYOUTS
    )
]


@pytest.mark.parametrize(("family", "tied", "vocab", "tp", "pp"), CASES)
def test_every_rank_holds_what_cutting_by_hand_gives_and_all_ranks_rebuild_the_source(
    family: str, tied: bool, vocab: int, tp: int, pp: int
) -> None:
    """CONV-5, CONV-6, CONV-8, CONV-9, CONV-12, CONV-17, CONV-20, CONV-21, CONV-27: values, padding,
    copies and names, bit for bit."""
    shape = toy(family, tied, vocab_size=vocab)
    hf = toy_tensors(shape)
    before = {name: tensor.clone() for name, tensor in hf.items()}
    layout = Layout(world=tp * pp, tp=tp, pp=pp)
    check_layout(shape, layout)
    rows = padded_vocab(vocab, tp)
    embedding = torch.zeros(rows, 64)
    embedding[:vocab] = hf["model.embed_tokens.weight"]
    head = torch.zeros(rows, 64)
    head[:vocab] = hf["model.embed_tokens.weight" if tied else "lm_head.weight"]
    rebuilt = {name: torch.full_like(tensor, float("nan")) for name, tensor in hf.items()}
    for rank in range(layout.world):
        coords = layout.coordinates(rank)
        expected: dict[str, torch.Tensor] = {}
        per_stage = 4 // pp
        for local in range(per_stage):
            layer = coords.pp * per_stage + local
            expected |= cut_by_hand(shape, hf, layer, local, tp, coords.tp)
        if coords.pp == 0:
            expected["embedding.word_embeddings.weight"] = embedding.chunk(tp)[coords.tp]
        if coords.pp == pp - 1:
            expected["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not (tied and pp == 1):
                expected["output_layer.weight"] = head.chunk(tp)[coords.tp]
        parameters = loaded(shape, layout, coords, hf)
        assert parameters.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(parameters[name], value), name
        for piece in expand(shape, layout, coords):
            here = parameters[piece.megatron][index(piece.megatron_box)]
            rebuilt[piece.hf][index(piece.hf_box)] = here
    for name, tensor in before.items():
        assert torch.equal(rebuilt[name], tensor), name
        assert torch.equal(hf[name], tensor), f"{name} was changed"


def test_qkv_rows_are_interleaved_per_query_group() -> None:
    """CONV-19: q0 q1 k0 v0 q2 q3 k1 v1, bias in the same order; q2 starts at row 64."""
    shape = toy("qwen2")
    pieces = by_megatron(expand(shape, Layout(world=1), HERE))
    for leaf, rest in (("weight", ((0, 64),)), ("bias", ())):
        found = sorted(
            (piece.megatron_box[0], piece.hf.split(".")[4], piece.hf_box[0], piece.hf_box[1:])
            for piece in pieces[f"decoder.layers.1.self_attention.linear_qkv.{leaf}"]
        )
        assert found == [
            ((0, 32), "q_proj", (0, 32), rest),
            ((32, 48), "k_proj", (0, 16), rest),
            ((48, 64), "v_proj", (0, 16), rest),
            ((64, 96), "q_proj", (32, 64), rest),
            ((96, 112), "k_proj", (16, 32), rest),
            ((112, 128), "v_proj", (16, 32), rest),
        ]


@settings(max_examples=80, deadline=None)
@given(
    kv=st.integers(1, 6),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 8, 6]),
    tp=st.sampled_from([1, 2, 3, 4, 6, 8]),
)
def test_qkv_order_is_the_reference_for_any_heads_or_both_numbers_are_named(
    kv: int, per_group: int, head_dim: int, tp: int
) -> None:
    """CONV-19 and CONV-20 as a property; TP above the KV heads included."""
    heads = kv * per_group
    shape = toy(
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        ffn_hidden_size=24,
        hidden_size=8,
    )
    fits = (kv % tp == 0 or tp % kv == 0) and heads % tp == 0
    fits = fits and (heads + 2 * kv) * head_dim % tp == 0
    if not fits:
        with pytest.raises(ValueError, match=rf"tp={tp}\b.*=\d+"):
            check_tp(shape, tp)
        return
    hf = toy_tensors(shape)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    for rank in range(tp):
        layout = Layout(world=tp, tp=tp)
        got = loaded(shape, layout, layout.coordinates(rank), hf)[name]
        assert torch.equal(got, cut_by_hand(shape, hf, 0, 0, tp, rank)[name])


def test_tp_that_neither_divides_nor_is_divided_by_the_kv_heads_is_refused_naming_both() -> None:
    """CONV-20: never 2 // 4 = 0 rows, and no uneven cut."""
    with pytest.raises(ValueError, match=r"tp=3 and num_key_value_heads=2"):
        expand(toy(), Layout(world=3, tp=3), HERE)
    with pytest.raises(ValueError, match=r"tp=4 does not divide intermediate_size=178"):
        expand(toy(ffn_hidden_size=178), Layout(world=4, tp=4), HERE)


def test_square_weights_are_cut_along_the_axis_of_their_row_kind() -> None:
    """CONV-18: with ffn = hidden no shape tells rows from columns."""
    shape = toy(ffn_hidden_size=64)
    hf = toy_tensors(shape)
    layout = Layout(world=2, tp=2)
    for rank in range(2):
        got = loaded(shape, layout, layout.coordinates(rank), hf)
        for name, value in cut_by_hand(shape, hf, 2, 2, 2, rank).items():
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple", "rows"),
    [(131, 2, 8, 144), (131, 4, 8, 160), (131, 2, 1, 132), (144, 2, 8, 144)],
)
def test_padded_vocab_is_the_least_multiple_and_stays_when_applied_twice(
    vocab: int, tp: int, multiple: int, rows: int
) -> None:
    """CONV-7."""
    assert padded_vocab(vocab, tp, multiple) == rows
    assert padded_vocab(rows, tp, multiple) == rows


def test_a_rank_with_nothing_but_padding_gets_zeros() -> None:
    """CONV-8: vocab 65 at TP 4 leaves the last rank without a single row of its own."""
    shape = toy(vocab_size=65)
    layout = Layout(world=4, tp=4)
    last = loaded(shape, layout, layout.coordinates(3), toy_tensors(shape))
    assert last["output_layer.weight"].shape == (24, 64)
    assert not last["output_layer.weight"].any()
    assert not last["embedding.word_embeddings.weight"].any()


def test_uneven_stages_hold_all_five_layers_under_global_hf_names() -> None:
    """CONV-26 and CONV-27: 3 + 2 layers; local 0 of stage 1 is HuggingFace layer 3."""
    shape = toy(num_layers=5)
    layout = Layout(world=2, pp=2, first_stage_layers=3, last_stage_layers=2)
    check_layout(shape, layout)
    second = by_megatron(expand(shape, layout, Coordinates(tp=0, pp=1, dp=0)))
    names = {piece.hf for piece in second["decoder.layers.0.mlp.linear_fc2.weight"]}
    assert names == {"model.layers.3.mlp.down_proj.weight"}
    everywhere = {
        piece.hf
        for pp in range(2)
        for piece in expand(shape, layout, Coordinates(tp=0, pp=pp, dp=0))
    }
    assert everywhere == {piece.hf for piece in expand(shape, Layout(world=1), HERE)}


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_manifest_is_the_list_of_tensors_of_a_huggingface_model(family: str, tied: bool) -> None:
    """CONV-10, CONV-34: a tied model has no head; names and shapes from an independent list."""
    found = {i.name: i.shape for i in hf_manifest(toy(family, tied), torch.bfloat16)}
    assert found == hf_shapes(hf_config(family, tied))


def test_te_profile_differs_from_the_local_one_by_the_two_fused_norm_names() -> None:
    """Golden key lists of one layer, as megatron-core 0.16 names them."""
    layout = Layout(world=1)
    prefix = "decoder.layers.0."
    names = {
        profile: {
            name.removeprefix(prefix)
            for name in local_shapes(toy(num_layers=1), layout, HERE, profile)
            if name.startswith(prefix)
        }
        for profile in ("local", "te")
    }
    common = {
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    assert names["local"] == common | {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
    assert names["te"] == common | {
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    }
    with pytest.raises(ValueError, match="'tea'"):
        local_shapes(toy(), layout, HERE, "tea")


def test_accounting_names_the_element_that_is_missing_twice_or_outside() -> None:
    """A dropped, a doubled and a shifted slice are each seen."""
    shape = toy()
    slices = expand(shape, Layout(world=1), HERE)
    shapes = local_shapes(shape, Layout(world=1), HERE)
    check_megatron(slices, shapes, {})
    victim = next(
        i for i, s in enumerate(slices) if s.hf == "model.layers.2.self_attn.k_proj.weight"
    )
    name = "decoder.layers.2.self_attention.linear_qkv.weight"
    with pytest.raises(ValueError, match=rf"{name}.*\(32, 0\) is not covered"):
        check_megatron(slices[:victim] + slices[victim + 1 :], shapes, {})
    with pytest.raises(ValueError, match=rf"{name}.*\(32, 0\) is written twice"):
        check_megatron([*slices, slices[victim]], shapes, {})
    with pytest.raises(ValueError, match="the table has .*, the model has not"):
        check_megatron(slices, {k: v for k, v in shapes.items() if k != name}, {})


def test_loading_names_a_parameter_or_a_tensor_that_the_other_side_lacks() -> None:
    """CONV-1, CONV-11, CONV-13: nothing stays at its initial value in silence."""
    shape, layout = toy(), Layout(world=1)
    slices = expand(shape, layout, HERE)
    hf = toy_tensors(shape)
    shapes = local_shapes(shape, layout, HERE)
    parameters = {name: torch.zeros(size) for name, size in shapes.items()}
    with pytest.raises(ValueError, match="unknown .*decoder.extra"):
        load_local_(parameters | {"decoder.extra": torch.zeros(2)}, DictSource(hf), slices)
    short = {name: value for name, value in parameters.items() if "fc2" not in name}
    with pytest.raises(ValueError, match="missing .*layers.0.mlp.linear_fc2.weight"):
        load_local_(short, DictSource(hf), slices)
    messages = set()
    for pp in (1, 2):
        staged = Layout(world=pp, pp=pp)
        extra = hf | {"model.layers.0.surprise": torch.zeros(2)}
        del extra["lm_head.weight"]
        with pytest.raises(ValueError, match=r"missing \[lm_head.weight\].*surprise") as caught:
            loaded(shape, staged, staged.coordinates(0), extra)
        messages.add(str(caught.value))
    assert len(messages) == 1, "the same fault reads the same at PP 1 and PP 2"


def test_stored_pieces_cover_every_fused_tensor_once() -> None:
    """The pieces of a written checkpoint: exact cover; a vocabulary of 131 is padded to 192 at TP
    8, so that ranks own 24 rows each and the rows that exist make 6 pieces."""
    shape = toy("qwen2", vocab_size=131)
    for name, row in fused_rows(shape):
        boxes = stored_boxes(shape, row)
        check_cover(whole(fused_shape(shape, row)), boxes, name)
        assert len(boxes) == {"replicated": 1, "gate_up": 16, "vocab": 6}.get(row.kind, 8), name


@st.composite
def boxes_within(draw: st.DrawFn, region: Box) -> Box:
    """A non-empty box inside `region`."""
    sides = []
    for low, high in region:
        start = draw(st.integers(low, high - 1))
        sides.append((start, draw(st.integers(start + 1, high))))
    return tuple(sides)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_box_algebra_agrees_with_counting_elements(data: st.DataObject, sizes: list[int]) -> None:
    """subtract, uncovered and check_cover against a tensor of counters."""
    region = whole(sizes)
    boxes = data.draw(st.lists(boxes_within(region), max_size=5))
    counts = torch.zeros(sizes, dtype=torch.int64)
    for box in boxes:
        counts[index(box)] += 1
    rest = torch.zeros(sizes, dtype=torch.int64)
    for box in uncovered(region, boxes):
        rest[index(box)] += 1
    assert torch.equal(rest, (counts == 0).long())
    if bool((counts == 1).all()):
        check_cover(region, boxes, "x")
    else:
        with pytest.raises(ValueError, match="x: element"):
            check_cover(region, boxes, "x")
    if len(boxes) > 1:
        alone = torch.zeros(sizes, dtype=torch.int64)
        alone[index(boxes[0])] += 1
        alone[index(boxes[1])] = 0
        left = torch.zeros(sizes, dtype=torch.int64)
        for box in subtract(boxes[0], boxes[1]):
            left[index(box)] += 1
        assert torch.equal(left, alone)


def test_gather_puts_any_box_together_and_refuses_a_gap_and_an_overflow() -> None:
    """A box across four fused tensors' parts; float16 cannot hold 1e6."""
    shape = toy()
    hf = toy_tensors(shape)
    layout = Layout(world=1)
    parameters = loaded(shape, layout, HERE, hf)
    parts = from_megatron(
        [s for s in expand(shape, layout, HERE) if s.hf == "model.layers.3.self_attn.q_proj.weight"]
    )
    read = DictSource(parameters).read
    box = ((20, 50), (3, 61))
    got = gather(box, parts, read, torch.float32)
    assert torch.equal(got, hf["model.layers.3.self_attn.q_proj.weight"][20:50, 3:61])
    with pytest.raises(ValueError, match=r"element \(32, 3\) is not covered"):
        gather(box, parts[:1], read, torch.float32)
    name = parts[0].name
    parameters[name][0, 0] = 1e6
    with pytest.raises(ValueError, match="beyond the range of torch.float16"):
        gather(((0, 1), (0, 64)), parts, read, torch.float16)
