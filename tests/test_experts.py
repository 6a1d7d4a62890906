"""Mixtures of experts, weights only: names, fused sources, real megatron-core at EP x TP x PP."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.model import torch_spec
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel import platform
from megagrpo.parallel.mcore_repairs import WRITE_QUEUE
from megagrpo.types import Coordinates, Layout, ModelShape
from megagrpo.weights.accounting import check_layout
from megagrpo.weights.convert import hf_to_megatron, load_rank_, megatron_to_hf
from megagrpo.weights.experts import open_hf
from megagrpo.weights.table import local_shapes
from megagrpo.weights.verify import verify
from tests.pool import run_ranks
from tests.tiny_models import hf_config, write_tokenizer

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # isort: skip
from megatron.core.dist_checkpointing.validation import StrictHandling  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

platform.mask_broken_media_packages()

EXPERT_FFN = 48
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", "mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("MixtralForCausalLM", "block_sparse_moe", ("w1", "w3", "w2")),
}


def moe_config(family: str, experts: int = 4, **overrides: Any) -> dict[str, Any]:
    """Toy T-moe: toy T with `experts` experts of 48 in every layer, two a token."""
    config = hf_config("qwen3" if family == "qwen3_moe" else "mistral", vocab_size=131)
    config |= {"architectures": [FAMILIES[family][0]], "model_type": family}
    config["num_experts_per_tok"] = 2
    if family == "qwen3_moe":
        config |= {"num_experts": experts, "moe_intermediate_size": EXPERT_FFN}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    else:
        config |= {"num_local_experts": experts, "intermediate_size": EXPERT_FFN}
    return config | overrides


def moe_tensors(family: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of such a model, in plain loops, values by name."""
    _, block, (gate, up, down) = FAMILIES[family]
    experts = config.get("num_experts") or config["num_local_experts"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (131, 64)}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{base}{name}.weight"] = (64,)
        for letter, rows in (("q", 64), ("k", 32), ("v", 32)):
            shapes[f"{base}self_attn.{letter}_proj.weight"] = (rows, 64)
        shapes[base + "self_attn.o_proj.weight"] = (64, 64)
        if family == "qwen3_moe":
            shapes[base + "self_attn.q_norm.weight"] = (16,)
            shapes[base + "self_attn.k_norm.weight"] = (16,)
        shapes[f"{base}{block}.gate.weight"] = (experts, 64)
        if config.get("moe_router_enable_expert_bias"):
            shapes[f"{base}{block}.gate.e_score_correction_bias"] = (experts,)
        for expert in range(experts):
            for leaf in (gate, up):
                shapes[f"{base}{block}.experts.{expert}.{leaf}.weight"] = (EXPERT_FFN, 64)
            shapes[f"{base}{block}.experts.{expert}.{down}.weight"] = (64, EXPERT_FFN)
    shapes |= {"model.norm.weight": (64,), "lm_head.weight": (131, 64)}
    tensors = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensors[name] = torch.randn(shape, generator=generator)
    return tensors


def make_moe_folder(folder: Path, family: str, experts: int = 4, **overrides: Any) -> Path:
    folder.mkdir()
    config = moe_config(family, experts, **overrides)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(moe_tensors(family, config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shape_of(folder: Path) -> ModelShape:
    return read_shape(folder, to_convert=True)


def assert_equal_bits(left: Path, right: Path) -> None:
    one, other = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


CASES = [("qwen3_moe", 4, False), ("qwen3_moe", 12, True), ("mixtral", 4, False)]


@pytest.mark.parametrize(("family", "experts", "bias"), CASES)
def test_round_trip_is_bit_equal(family: str, experts: int, bias: bool, tmp_path: Path) -> None:
    """CONV-2 (router bias), CONV-15 (12 experts), CONV-34; both kinds of checkpoint, every
    naming profile, tensor and pipeline cuts."""
    hf = make_moe_folder(tmp_path / "hf", family, experts, moe_router_enable_expert_bias=bias)
    shape = shape_of(hf)
    for number, (profile, layout) in enumerate(
        [
            ("te", None),
            ("local", None),
            ("local", Layout(world=2, tp=2)),
            ("te_grouped", Layout(world=4, tp=2, pp=2)),
        ]
    ):
        out, back = tmp_path / f"m{number}", tmp_path / f"b{number}"
        hf_to_megatron(hf, out, shape, profile=profile, legacy=layout)
        verify(hf, out, shape)
        megatron_to_hf(out, back, shape, out / "hf")
        assert_equal_bits(back, hf)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_give_the_same_checkpoint_as_single_ones(family: str, tmp_path: Path) -> None:
    """CONV-16: [E, 2f, h] and [E, h, f] under the names of transformers 5; a tensor with another
    shape, and one that is there twice, are refused by name."""
    hf = make_moe_folder(tmp_path / "hf", family, experts=12)
    _, block, (gate, up, down) = FAMILIES[family]
    tensors = load_file(hf / "model.safetensors")
    for layer in range(4):
        base = f"model.layers.{layer}."
        parts = {
            leaf: torch.stack(
                [tensors.pop(f"{base}{block}.experts.{e}.{leaf}.weight") for e in range(12)]
            )
            for leaf in (gate, up, down)
        }
        tensors[base + "mlp.experts.gate_up_proj"] = torch.cat([parts[gate], parts[up]], dim=1)
        tensors[base + "mlp.experts.down_proj"] = parts[down]
        tensors[base + "mlp.gate.weight"] = tensors.pop(f"{base}{block}.gate.weight")
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_text((hf / "config.json").read_text())
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    for folder in (hf, fused):
        hf_to_megatron(folder, tmp_path / f"from_{folder.name}", shape_of(folder))
    one, other = (tmp_path / f"from_{name}" / "__0_0.distcp" for name in ("hf", "fused"))
    assert one.read_bytes() == other.read_bytes()
    verify(fused, tmp_path / "from_hf", shape_of(hf))
    twice = tensors | {f"model.layers.0.{block}.experts.3.{gate}.weight": torch.ones(48, 64)}
    save_file(twice, fused / "model.safetensors")
    with pytest.raises(ValueError, match=rf"experts.3.{gate}.weight is in"):
        open_hf(fused, shape_of(hf))
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name].mT.contiguous()}, fused / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} have shape \[12, 48, 64\], expected"):
        open_hf(fused, shape_of(hf))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_comes_back_and_loads_there(family: str, tmp_path: Path) -> None:
    """CONV-34: the exported names are those of its own files, and it misses none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = make_moe_folder(tmp_path / "toy", family)
    write_tokenizer(source)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).eval()
    model.save_pretrained(tmp_path / "hf")
    shape = shape_of(tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron", shape)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shape, tmp_path / "hf")
    assert_equal_bits(tmp_path / "back", tmp_path / "hf")
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)


def by_hand(
    tensors: dict[str, torch.Tensor], layer: int, expert: int, tp: int, rank: int
) -> dict[str, torch.Tensor]:
    """An expert's matrices on one tensor rank: [its gate rows; its up rows], its down columns."""
    base = f"model.layers.{layer}.mlp.experts.{expert}."
    halves = [tensors[f"{base}{leaf}_proj.weight"].chunk(tp)[rank] for leaf in ("gate", "up")]
    down = tensors[base + "down_proj.weight"].chunk(tp, dim=1)[rank]
    return {"linear_fc1.weight": torch.cat(halves), "linear_fc2.weight": down}


def test_table_cuts_each_expert_s_gate_and_up_apart(tmp_path: Path) -> None:
    """CONV-16 at TP 2, and the accounting over all ranks at TP 1, 2, 4 and PP 2."""
    hf = make_moe_folder(tmp_path / "hf", "qwen3_moe", experts=12)
    shape, tensors = shape_of(hf), load_file(hf / "model.safetensors")
    for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2)):
        for profile in ("local", "te", "te_grouped"):
            check_layout(shape, Layout(world=tp * pp, tp=tp, pp=pp), profile)
    layout = Layout(world=2, tp=2)
    for rank in range(2):
        coords = layout.coordinates(rank)
        sizes = local_shapes(shape, layout, coords)
        found = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
        load_rank_(found, open_hf(hf, shape), shape, layout, coords)
        for expert in (0, 1, 9, 10, 11):
            for name, value in by_hand(tensors, 2, expert, 2, rank).items():
                key = f"decoder.layers.2.mlp.experts.local_experts.{expert}.{name}"
                assert torch.equal(found[key], value), key
        router = tensors["model.layers.2.mlp.gate.weight"]
        assert torch.equal(found["decoder.layers.2.mlp.router.weight"], router)


def test_golden_names_of_a_layer_in_every_profile(tmp_path: Path) -> None:
    """As megatron-core 0.16 and Transformer Engine name the modules of two experts."""
    shape = shape_of(make_moe_folder(tmp_path / "hf", "mixtral", experts=2))
    prefix = "decoder.layers.0."
    names = {
        profile: {
            name.removeprefix(prefix)
            for name in local_shapes(shape, Layout(world=1), Coordinates(0, 0, 0), profile)
            if name.startswith(prefix)
        }
        for profile in ("local", "te", "te_grouped")
    }
    common = {
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
    }
    single = {
        f"mlp.experts.local_experts.{expert}.linear_fc{number}.weight"
        for expert in (0, 1)
        for number in (1, 2)
    }
    grouped = {f"mlp.experts.linear_fc{n}.weight{e}" for e in (0, 1) for n in (1, 2)}
    fused_norm = "self_attention.linear_qkv.layer_norm_weight"
    assert names["local"] == common | single | {"input_layernorm.weight"}
    assert names["te"] == common | single | {fused_norm}
    assert names["te_grouped"] == common | grouped | {fused_norm}


def moe_model(shape: ModelShape, tp: int, pp: int, ep: int) -> GPTModel:
    """megatron-core's own model with sequential experts; all ranks of the world join."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        order="tp-cp-ep-dp-pp",
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    assert shape.experts is not None
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=shape.qk_norm,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        pipeline_dtype=torch.float32,
        num_moe_experts=shape.experts.count,
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_router_topk=shape.experts.top_k,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=shape.experts.router_bias,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts.count, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = torch_spec.TorchCoreAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=144,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def megatron_core_loads_and_saves(
    rank: int, layout: tuple[int, int, int], hf: Path, checkpoint: Path, out: Path
) -> int:
    """Strict load of ours, every expert compared with a cut by hand, and megatron-core's own save;
    returns how many matrices were compared."""
    ep, tp, pp = layout
    shape = shape_of(hf)
    model = moe_model(shape, tp, pp, ep)
    metadata = {"singleton_local_shards": False}
    loaded = dist_checkpointing.load(
        model.sharded_state_dict(metadata=metadata),
        str(checkpoint),
        strict=StrictHandling.RAISE_ALL,
    )
    model.load_state_dict(loaded, strict=False)
    tensors, state, compared = load_file(hf / "model.safetensors"), model.state_dict(), 0
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    cut = parallel_state.get_expert_tensor_parallel_rank()
    cuts = parallel_state.get_expert_tensor_parallel_world_size()
    assert shape.experts is not None
    mine = shape.experts.count // ep
    for local_layer in range(shape.num_layers // pp):
        layer = stage * (shape.num_layers // pp) + local_layer
        base = f"decoder.layers.{local_layer}.mlp."
        bias = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert torch.equal(state[base + "router.expert_bias"], bias)
        for local in range(mine):
            for name, value in by_hand(tensors, layer, ep_rank * mine + local, cuts, cut).items():
                assert torch.equal(state[f"{base}experts.local_experts.{local}.{name}"], value)
                compared += 1
    if rank == 0:
        out.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(out))
    WRITE_QUEUE.shutdown()
    return compared


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)])
def test_megatron_core_loads_ours_and_its_save_exports_the_same(
    layout: tuple[int, int, int], tmp_path: Path
) -> None:
    """CONV-14, CONV-15 (12 experts: local 3 of rank 1 is global 9), CONV-27 at (EP, TP, PP); the
    router bias included (CONV-2)."""
    ep, tp, pp = layout
    hf = make_moe_folder(tmp_path / "hf", "qwen3_moe", 12, moe_router_enable_expert_bias=True)
    shape = shape_of(hf)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    hf_to_megatron(hf, ours, shape, profile="local")
    world = ep * tp * pp
    compared = run_ranks(world, megatron_core_loads_and_saves, layout, hf, ours, theirs)
    assert compared == [4 // pp * (12 // ep) * 2] * world
    verify(hf, theirs, shape)
    megatron_to_hf(theirs, tmp_path / "back", shape, hf)
    assert_equal_bits(tmp_path / "back", hf)


def test_training_refuses_experts_and_odd_mixtures_are_refused_everywhere(tmp_path: Path) -> None:
    """By name; a dense architecture with experts in its config too."""
    hf = make_moe_folder(tmp_path / "hf", "qwen3_moe")
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM.*not in this version"):
        read_shape(hf)
    for change in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}):
        (hf / "config.json").write_text(json.dumps(moe_config("qwen3_moe") | change))
        with pytest.raises(ValueError, match="only experts in every layer"):
            shape_of(hf)
    (hf / "config.json").write_text(json.dumps(hf_config("qwen3") | {"num_experts": 4}))
    with pytest.raises(ValueError, match="num_experts=4"):
        shape_of(hf)
