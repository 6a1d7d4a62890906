"""Latent attention and uneven mixtures in the table: any sizes and ranks against cuts by hand;
dtypes per tensor, fused sources."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megagrpo.model.hf_config import read_shape
from megagrpo.types import Coordinates, Experts, LatentAttention, Layout, ModelShape
from megagrpo.weights.accounting import check_layout
from megagrpo.weights.convert import hf_to_megatron, load_rank_, megatron_to_hf
from megagrpo.weights.table import check_tp, hf_manifest, local_shapes
from megagrpo.weights.verify import verify
from tests.family_toys import make_toy, toy_config, write_config
from tests.test_table import DictSource

NORM = {"local": "self_attention.{}_layernorm.weight"}
NORM["te"] = "self_attention.linear_{}_up_proj.layer_norm_weight"


def latent_shape(heads: int, latent: LatentAttention, dense: int = 1) -> ModelShape:
    return ModelShape(
        architecture="DeepseekV3ForCausalLM",
        family="deepseek_v3",
        num_layers=3,
        hidden_size=24,
        ffn_hidden_size=48,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.nope_dim + latent.rope_dim,
        vocab_size=11,
        tied=False,
        qkv_bias=False,
        qk_norm=False,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_positions=64,
        dtype=torch.float32,
        experts=Experts(2, 1, True, ffn_hidden_size=24, shared_ffn=24, dense_layers=dense),
        latent=latent,
    )


def by_hand(
    hf: dict[str, torch.Tensor], layer: int, profile: str, tp: int, rank: int
) -> dict[str, torch.Tensor]:
    """Attention of one layer on one tensor rank: heads cut in order, projections down whole under
    Transformer Engine and cut by rows in the local spec."""
    base, here = f"model.layers.{layer}.self_attn.", "self_attention.linear_"
    result = {f"{here}proj.weight": hf[f"{base}o_proj.weight"].chunk(tp, dim=1)[rank]}
    downs = {"kv": ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")}
    if f"{base}q_proj.weight" in hf:
        result[f"{here}q_proj.weight"] = hf[f"{base}q_proj.weight"].chunk(tp)[rank]
    else:
        downs["q"] = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    for which, (down, norm, up) in downs.items():
        whole = hf[f"{base}{down}.weight"]
        cut = whole.chunk(tp)[rank] if profile == "local" else whole
        result[f"{here}{which}_down_proj.weight"] = cut
        result[NORM[profile].format(which)] = hf[f"{base}{norm}.weight"]
        result[f"{here}{which}_up_proj.weight"] = hf[f"{base}{up}.weight"].chunk(tp)[rank]
    return result


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 6),
    query=st.sampled_from([None, 8, 12]),
    kv=st.sampled_from([4, 8, 20]),
    nope=st.sampled_from([2, 6]),
    rope=st.sampled_from([2, 4]),
    value=st.sampled_from([2, 5]),
    tp=st.sampled_from([1, 2, 3, 4]),
    profile=st.sampled_from(["local", "te"]),
)
def test_latent_attention_is_cut_as_by_hand_for_any_sizes_or_a_number_is_named(
    heads: int,
    query: int | None,
    kv: int,
    nope: int,
    rope: int,
    value: int,
    tp: int,
    profile: str,
) -> None:
    """CONV-18, CONV-20 for low-rank queries, keys and values."""
    shape = latent_shape(heads, LatentAttention(query, kv, nope, rope, value))
    if heads % tp or (kv + rope) % tp or (query or 0) % tp:
        with pytest.raises(ValueError, match=rf"tp={tp}\b.*=\d+"):
            check_tp(shape, tp)
        return
    values = itertools.count()
    hf = {
        info.name: torch.tensor(
            [float(next(values)) for _ in range(torch.Size(info.shape).numel())]
        ).view(info.shape)
        for info in hf_manifest(shape, torch.float32)
    }
    layout = Layout(world=tp, tp=tp)
    check_layout(shape, layout, profile)
    for rank in range(tp):
        coords = Coordinates(tp=rank, pp=0, dp=0)
        sizes = local_shapes(shape, layout, coords, profile)
        found = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
        load_rank_(found, DictSource(hf), shape, layout, coords, profile)
        assert not any(bool(tensor.isnan().any()) for tensor in found.values())
        for layer in range(3):
            prefix = f"decoder.layers.{layer}."
            expected = by_hand(hf, layer, profile, tp, rank)
            mine = {n.removeprefix(prefix) for n in found if n.startswith(f"{prefix}self_att")}
            assert mine == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[prefix + name], tensor), name


def test_plain_and_mixed_layers_stay_apart_over_uneven_stages() -> None:
    """CONV-26, 27: two plain layers of five on stages of 3 + 2; each stage names its own."""
    shape = latent_shape(2, LatentAttention(8, 4, 2, 2, 2), dense=2)
    shape = dataclasses.replace(shape, num_layers=5)
    layout = Layout(world=2, pp=2, first_stage_layers=3, last_stage_layers=2)
    check_layout(shape, layout)
    stages = [local_shapes(shape, layout, Coordinates(0, pp, 0)) for pp in range(2)]
    plain = [{n for n in stage if n.endswith("mlp.linear_fc1.weight")} for stage in stages]
    routers = [{n for n in stage if n.endswith("mlp.router.weight")} for stage in stages]
    layers = "decoder.layers.{}.mlp.{}.weight"
    assert plain == [{layers.format(i, "linear_fc1") for i in (0, 1)}, set()]
    assert routers == [
        {layers.format(2, "router")},
        {layers.format(0, "router"), layers.format(1, "router")},
    ]


def test_the_router_s_fp32_bias_stays_fp32_beside_bf16_weights(tmp_path: Path) -> None:
    """CONV-39: as DeepSeek-V3 is published; bits and dtypes come back."""
    hf = make_toy(tmp_path / "hf", "deepseek-v3")
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in load_file(hf / "model.safetensors").items()
    }
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    shape = read_shape(hf, to_convert=True)
    for number, layout in enumerate((None, Layout(world=4, tp=2, pp=2))):
        out, back = tmp_path / f"m{number}", tmp_path / f"b{number}"
        hf_to_megatron(hf, out, shape, legacy=layout)
        verify(hf, out, shape)
        megatron_to_hf(out, back, shape, hf)
        again = load_file(back / "model.safetensors")
        assert again.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name


def test_fused_experts_of_a_mixture_with_plain_layers_give_the_same_checkpoint(
    tmp_path: Path,
) -> None:
    """CONV-16: [E, 2f, h] and [E, h, f] with experts of another size than the plain MLP; the shared
    expert stays as it is."""
    single = make_toy(tmp_path / "single", "deepseek-v3")
    tensors = load_file(single / "model.safetensors")
    for layer in (1, 2, 3):
        base = f"model.layers.{layer}.mlp.experts."
        parts = {
            leaf: torch.stack([tensors.pop(f"{base}{e}.{leaf}_proj.weight") for e in range(8)])
            for leaf in ("gate", "up", "down")
        }
        tensors[f"{base}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        tensors[f"{base}down_proj"] = parts["down"]
    fused = write_config(tmp_path / "fused", toy_config("deepseek-v3"))
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    shape = read_shape(fused, to_convert=True)
    hf_to_megatron(fused, tmp_path / "megatron", shape)
    verify(single, tmp_path / "megatron", shape)
    verify(fused, tmp_path / "megatron", shape)
