"""Every family of the converter: its tensors are transformers', round trips are bit-equal, and
megatron-core's own models take the names.

The toys are made and saved by transformers (`family_toys.py`); nothing here is read from the table.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.model import build
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.context import init_parallel
from megagrpo.parallel.mcore_repairs import WRITE_QUEUE
from megagrpo.types import Coordinates, Layout, ModelShape
from megagrpo.weights.accounting import check_layout
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.describe import plan
from megagrpo.weights.table import hf_manifest, local_shapes, padded_vocab
from megagrpo.weights.verify import verify
from tests.family_toys import TOYS, make_toy, toy_config, write_config
from tests.pool import run_ranks

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.validation import StrictHandling  # isort: skip

HERE = Coordinates(tp=0, pp=0, dp=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_toy(root / name, name) for name in TOYS}


def shape_of(folder: Path) -> ModelShape:
    return read_shape(folder, to_convert=True)


def assert_equal_bits(left: Path, right: Path) -> None:
    one, other = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("toy", TOYS)
def test_manifest_is_the_list_of_tensors_that_transformers_saves(
    toy: str, folders: dict[str, Path]
) -> None:
    """CONV-2 (router bias buffers), CONV-34: names and shapes, none lost and none invented."""
    saved = load_file(folders[toy] / "model.safetensors")
    found = {info.name: info.shape for info in hf_manifest(shape_of(folders[toy]), torch.float32)}
    assert found == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize("toy", TOYS)
def test_round_trip_is_bit_equal_in_every_profile_and_layout(
    toy: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """CONV-2, 5, 10, 16, 20, 34: the layout-free checkpoint and per-rank files, vocabulary 131, TP
    above the KV heads, plain layers before those with experts, tied and untied."""
    hf, shape = folders[toy], shape_of(folders[toy])
    pp = 1 if shape.num_layers % 2 else 2
    for number, (profile, layout) in enumerate(
        [
            ("te", None),
            ("local", None),
            ("te_grouped", None),
            ("local", Layout(world=2 * pp, tp=2, pp=pp)),
            ("te_grouped", Layout(world=4, tp=4)),
        ]
    ):
        check_layout(shape, layout or Layout(world=1), profile)
        out, back = tmp_path / f"m{number}", tmp_path / f"b{number}"
        hf_to_megatron(hf, out, shape, profile=profile, legacy=layout)
        verify(hf, out, shape)
        megatron_to_hf(out, back, shape, out / "hf")
        assert_equal_bits(back, hf)


def rank_loads_and_saves(
    rank: int, layout: Layout, jobs: list[tuple[Path, Path, Path]]
) -> list[int]:
    """megatron-core's strict load of ours into its own model, then its own save; returns the
    number of tensors of each model."""
    context = init_parallel(layout, seed=1)
    counts = []
    for hf, checkpoint, out in jobs:
        shape = shape_of(hf)
        (model,) = build.build_model(
            shape,
            context,
            dtype=torch.float32,
            padded_vocab=padded_vocab(shape.vocab_size, layout.tp),
            settings=build.ModelSettings(),
        )
        metadata = {"singleton_local_shards": False}
        state = dist_checkpointing.load(
            model.sharded_state_dict(metadata=metadata),
            str(checkpoint),
            strict=StrictHandling.RAISE_ALL,
        )
        model.load_state_dict(state, strict=False)
        parameters = build.local_parameters([model])
        assert not any(bool(value.isnan().any()) for value in parameters.values())
        if rank == 0:
            out.mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(out))
        counts.append(len(parameters))
    WRITE_QUEUE.shutdown()
    return counts


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2), Layout(2, pp=2)])
def test_megatron_core_loads_ours_strictly_and_its_own_save_exports(
    layout: Layout, folders: dict[str, Path], tmp_path: Path
) -> None:
    """CONV-14, 26, 27, 29: at another layout than it was written for, with a key per layer where
    layers differ; nothing missing and nothing left over on either side."""
    names = [name for name in TOYS if shape_of(folders[name]).num_layers % layout.pp == 0]
    jobs = []
    for name in names:
        hf_to_megatron(folders[name], tmp_path / name, shape_of(folders[name]), profile="local")
        jobs.append((folders[name], tmp_path / name, tmp_path / f"{name}-saved"))
    counts = run_ranks(layout.world, rank_loads_and_saves, layout, jobs)
    assert all(len(found) == len(names) and min(found) > 15 for found in counts)
    for hf, _, saved in jobs:
        verify(hf, saved, shape_of(hf))
        megatron_to_hf(saved, saved.with_name(f"{saved.name}-back"), shape_of(hf), hf)
        assert_equal_bits(saved.with_name(f"{saved.name}-back"), hf)


ATTENTION = {"self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"}
LATENT = {
    "self_attention.linear_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.weight",
    "input_layernorm.weight",
}
LATENT_NORMS = {
    "local": {"self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight"},
    "te": {
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    },
}
QK_NORMS = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
MLP = {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
POST_NORMS = {
    "self_attention.linear_proj.post_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight",
}
INPUT_NORM = {"local": "input_layernorm.weight"}
INPUT_NORM["te"] = "self_attention.linear_qkv.layer_norm_weight"
MLP_NORM = {"local": "pre_mlp_layernorm.weight", "te": "mlp.linear_fc1.layer_norm_weight"}
SHARED = {f"mlp.shared_experts.linear_fc{n}.weight" for n in (1, 2)}


def experts(profile: str, count: int) -> set[str]:
    if profile == "te_grouped":
        return {f"mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(count)}
    base = "mlp.experts.local_experts"
    return {f"{base}.{e}.linear_fc{n}.weight" for n in (1, 2) for e in range(count)}


def golden(toy: str, profile: str) -> tuple[set[str], set[str]]:
    """Names of the first and of the last layer, as megatron-core 0.16 builds its local and TE
    specs (`gpt_layer_specs`, `moe_module_specs`): with experts the norm before the MLP stands
    alone in either, and latent attention keeps its input norm apart in either."""
    kind = "local" if profile == "local" else "te"
    plain = {INPUT_NORM[kind], *ATTENTION}
    router = {"pre_mlp_layernorm.weight", "mlp.router.weight"}
    if toy == "gemma3":
        layer = plain | QK_NORMS | {MLP_NORM[kind]} | MLP | POST_NORMS
        return layer, layer
    if toy == "gemma2":
        layer = plain | {MLP_NORM[kind]} | MLP | POST_NORMS
        return layer, layer
    if toy == "qwen3-moe":
        layer = plain | QK_NORMS | router | experts(profile, 4)
        return layer, layer
    if toy == "mixtral":
        layer = plain | router | experts(profile, 4)
        return layer, layer
    latent = LATENT | LATENT_NORMS[kind]
    mixed = latent | router | experts(profile, 8) | SHARED
    bias = {"mlp.router.expert_bias"} if toy == "deepseek-v3" else set()
    return latent | {MLP_NORM[kind]} | MLP, mixed | bias


@pytest.mark.parametrize("profile", ["local", "te", "te_grouped"])
@pytest.mark.parametrize(
    "toy", ["qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3", "gemma2", "gemma3"]
)
def test_golden_names_of_the_first_and_last_layer_in_every_profile(
    toy: str, profile: str, folders: dict[str, Path]
) -> None:
    shape = shape_of(folders[toy])
    names = local_shapes(shape, Layout(world=1), HERE, profile)
    for number, expected in zip((0, 3), golden(toy, profile), strict=True):
        prefix = f"decoder.layers.{number}."
        found = {n.removeprefix(prefix) for n in names if n.startswith(prefix)}
        assert found == expected


@pytest.mark.parametrize("toy", ["deepseek-v3", "qwen3-moe", "gemma3"])
def test_the_plan_names_every_kind_of_tensor_once(toy: str, folders: dict[str, Path]) -> None:
    """The first layer and expert of a kind speak for all, also where layers differ."""
    shape = shape_of(folders[toy])
    said = "\n".join(plan(shape, Layout(world=2, pp=2))).split("tp 0 pp 0")[0]
    sources = [
        name for line in said.splitlines() for name in line.partition(", from ")[2].split(", ")
    ]
    found = [name for name in sources if name]
    saved = load_file(folders[toy] / "model.safetensors")
    kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in saved}
    norm = "model.layers.*.post_attention_layernorm.weight"
    twice = [norm] if toy == "deepseek-v3" else []  # before plain layers and before experts
    assert sorted(found) == sorted([*kinds, *twice])


def test_projections_down_are_whole_under_te_and_cut_in_the_local_spec(
    folders: dict[str, Path],
) -> None:
    """megatron-core builds them "duplicated" with TELinear and column-parallel without."""
    shape, layout = shape_of(folders["deepseek-v3"]), Layout(world=2, tp=2)
    name = "decoder.layers.2.self_attention.linear_kv_down_proj.weight"
    for profile, rows in (("te", 32), ("te_grouped", 32), ("local", 16)):
        assert local_shapes(shape, layout, HERE, profile)[name] == (rows, 64)
    assert shape.latent is not None
    assert shape.latent.kv_rank + shape.latent.rope_dim == 32


def test_layers_that_predict_further_tokens_are_left_out_and_said(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """CONV-1: DeepSeek-V3's files hold its MTP layer behind the last one; it is on the list of what
    is left out, by name, and a layer behind the last of another family is an error."""
    hf = tmp_path / "hf"
    hf.mkdir()
    shape = shape_of(folders["deepseek-v3"])
    tensors = load_file(folders["deepseek-v3"] / "model.safetensors")
    extra = {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | extra, hf / "model.safetensors")
    (hf / "config.json").write_text((folders["deepseek-v3"] / "config.json").read_text())
    summary = hf_to_megatron(hf, tmp_path / "megatron", shape)
    assert "model.layers.4.eh_proj.weight" in str(summary)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shape, hf)
    assert_equal_bits(tmp_path / "back", folders["deepseek-v3"])
    tensors = load_file(folders["mixtral"] / "model.safetensors")
    save_file(tensors | extra, hf / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown \[model.layers.4.eh_proj.weight\]"):
        hf_to_megatron(hf, tmp_path / "other", shape_of(folders["mixtral"]))


def test_scales_of_quantised_weights_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """CONV-38: fp8 tensors with weight_scale_inv, with and without the config saying so."""
    tensors = load_file(folders["deepseek-v3"] / "model.safetensors")
    config = toy_config("deepseek-v3")
    name = "model.layers.0.self_attn.o_proj.weight"
    hf = write_config(tmp_path / "hf", config)
    small = tensors | {name: tensors[name].to(torch.float8_e4m3fn)}
    scaled = tensors | {f"{name}_scale_inv": torch.zeros(1, 1)}
    for weights, said in ((small, f"{name} has dtype F8_E4M3"), (scaled, f"{name}_scale_inv")):
        save_file(weights, hf / "model.safetensors")
        with pytest.raises(ValueError, match=said):
            hf_to_megatron(hf, tmp_path / "megatron", shape_of(hf))
    write_config(hf, config | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ValueError, match="quantization_config is set"):
        shape_of(hf)
    assert not (tmp_path / "megatron").exists()
