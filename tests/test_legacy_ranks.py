"""Per-rank checkpoints with expert ranks and virtual stages: round trips, megatron-core, names."""

import runpy
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.model.hf_config import read_shape
from megagrpo.types import Layout
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.verify import verify
from tests.family_toys import TOYS, make_toy
from tests.pool import run_ranks
from tests.test_experts import by_hand, make_moe_folder, moe_model, shape_of
from tests.tiny_models import make_hf_folder

from megatron.core import parallel_state  # isort: skip; after the import hook
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # isort: skip

REPO = Path(__file__).resolve().parent.parent
FILE = "model_optim_rng.pt"


def content(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def assert_round_trip(hf: Path, out: Path, **layout: Any) -> list[str]:
    """There, verify, back, bit for bit; returns the names of the rank folders."""
    shape = shape_of(hf)
    hf_to_megatron(hf, out, shape, **layout)
    verify(hf, out, shape)
    megatron_to_hf(out, out.with_name(f"{out.name}_back"), shape, hf)
    back, source = (
        load_file(folder / "model.safetensors")
        for folder in (out.with_name(f"{out.name}_back"), hf)
    )
    assert back.keys() == source.keys()
    for name, tensor in source.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    return sorted(path.name for path in (out / "release").iterdir())


@pytest.mark.parametrize("profile", ["local", "te_grouped"])
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 2), (2, 1, 4), (1, 2, 3), (2, 2, 2)])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_over_ranks_round_trip_bit_equal(
    family: str, tp: int, pp: int, ep: int, profile: str, tmp_path: Path
) -> None:
    """CONV-14, CONV-15: 12 experts, so that number 10 is not taken for 1; no flag on the way back:
    whether a single number behind the tensor rank is a stage or an expert rank is seen inside."""
    hf = make_moe_folder(tmp_path / "hf", family, 12)
    layout = Layout(world=tp * pp, tp=tp, pp=pp)
    names = assert_round_trip(hf, tmp_path / "m", legacy=layout, ep=ep, profile=profile)
    assert len(names) == tp * pp * ep
    last = f"mp_rank_{tp - 1:02d}" + (f"_{pp - 1:03d}" if pp > 1 else "") + f"_{ep - 1:03d}"
    assert names[-1] == last


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen2", True), ("llama", True)])
def test_virtual_stages_round_trip_bit_equal(
    family: str, tied: bool, pp: int, vpp: int, tmp_path: Path
) -> None:
    """CONV-9: tied embeddings with virtual stages, padded vocabulary, TP above the KV heads."""
    hf = Path(
        make_hf_folder(tmp_path / "hf", family, tied, vocab_size=131, num_hidden_layers=pp * vpp)
    )
    layout = Layout(world=4 * pp, tp=4, pp=pp)
    names = assert_round_trip(hf, tmp_path / "m", legacy=layout, vpp=vpp)
    assert len(names) == 4 * pp
    assert [key for key in content(tmp_path / "m/release" / names[0] / FILE) if "model" in key] == [
        f"model{chunk}" for chunk in range(vpp)
    ]


@pytest.mark.parametrize("toy", TOYS)
def test_every_family_round_trips_with_all_kinds_of_ranks_at_once(toy: str, tmp_path: Path) -> None:
    """CONV-5, 9, 14, 20: TP 2, PP 2 and two virtual stages each where the layers divide, EP 2
    where there are experts; tied and untied, vocabulary 131, plain layers before expert layers."""
    hf = make_toy(tmp_path / "hf", toy)
    shape = shape_of(hf)
    pp, vpp = (2, 2) if shape.num_layers % 4 == 0 else (1, 1)
    ep = 1 if shape.experts is None else 2
    layout = Layout(world=2 * pp, tp=2, pp=pp)
    for profile in ("te", "local"):
        names = assert_round_trip(
            hf, tmp_path / profile, legacy=layout, vpp=vpp, ep=ep, profile=profile
        )
        assert len(names) == 2 * pp * ep


def chunk_offsets(pp: int, vpp: int, layers: int, rank: int, chunk: int) -> int:
    """megatron-core's own word for the first layer of a virtual stage."""
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
    )
    return int(get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=rank))


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 3), (3, 2)])
def test_virtual_stages_hold_the_layers_that_megatron_core_gives_them(
    pp: int, vpp: int, tmp_path: Path
) -> None:
    """CONV-27: every local layer is the global one of megatron-core's own arithmetic; embedding
    and head stand in the first and last chunk only."""
    layers = 2 * pp * vpp
    hf = Path(make_hf_folder(tmp_path / "hf", num_hidden_layers=layers))
    layout = Layout(world=pp, pp=pp)
    hf_to_megatron(hf, tmp_path / "m", read_shape(hf), legacy=layout, vpp=vpp, profile="local")
    source = load_file(hf / "model.safetensors")
    for rank in range(pp):
        file = content(tmp_path / "m" / "release" / f"mp_rank_00_{rank:03d}" / FILE)
        assert file["args"].virtual_pipeline_model_parallel_size == vpp
        for chunk in range(vpp):
            model, first = file[f"model{chunk}"], chunk_offsets(pp, vpp, layers, rank, chunk)
            for local in range(2):
                norm = model[f"decoder.layers.{local}.input_layernorm.weight"]
                assert torch.equal(
                    norm, source[f"model.layers.{first + local}.input_layernorm.weight"]
                )
            assert "decoder.layers.2.input_layernorm.weight" not in model
            assert ("embedding.word_embeddings.weight" in model) == (rank == chunk == 0)
            assert ("output_layer.weight" in model) == (rank == pp - 1 and chunk == vpp - 1)


def core_loads(rank: int, place: tuple[int, int, int], hf: Path, checkpoint: Path) -> int:
    """megatron-core's own model takes its rank's file, strictly; experts against a cut by hand."""
    ep, tp, pp = place
    shape = shape_of(hf)
    model = moe_model(shape, tp, pp, ep)
    numbers = [parallel_state.get_pipeline_model_parallel_rank()] if pp > 1 else []
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    numbers += [expert_rank] if ep > 1 else []
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    folder = f"mp_rank_{tp_rank:02d}" + "".join(f"_{number:03d}" for number in numbers)
    state = content(checkpoint / "release" / folder / FILE)["model"]
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in state:  # the model is built with the padding of TP 2
            state[name] = torch.cat([state[name], torch.zeros(144 // tp, 64)])[: 144 // tp]
    model.load_state_dict(state, strict=True)
    tensors, found, compared = load_file(hf / "model.safetensors"), model.state_dict(), 0
    stage = parallel_state.get_pipeline_model_parallel_rank()
    assert shape.experts is not None
    mine, layers = shape.experts.count // ep, shape.num_layers // pp
    for layer in range(layers):
        base = f"decoder.layers.{layer}.mlp.experts.local_experts."
        for local in range(mine):
            expected = by_hand(
                tensors, stage * layers + layer, expert_rank * mine + local, tp, tp_rank
            )
            for name, value in expected.items():
                assert torch.equal(found[f"{base}{local}.{name}"], value)
                compared += 1
    return compared


@pytest.mark.parametrize("place", [(2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_megatron_core_loads_the_file_of_an_expert_rank_strictly(
    place: tuple[int, int, int], tmp_path: Path
) -> None:
    """CONV-14, CONV-15: rank 1's expert 3 is number 9 of 12; no key missing or left over."""
    ep, tp, pp = place
    hf = make_moe_folder(tmp_path / "hf", "qwen3_moe", 12, moe_router_enable_expert_bias=True)
    layout = Layout(world=tp * pp, tp=tp, pp=pp)
    hf_to_megatron(hf, tmp_path / "m", shape_of(hf), legacy=layout, ep=ep, profile="local")
    compared = run_ranks(ep * tp * pp, core_loads, place, hf, tmp_path / "m")
    assert compared == [2 * 6 * 4 // pp] * (ep * tp * pp)


def test_copies_on_expert_ranks_that_differ_are_refused_by_key(tmp_path: Path) -> None:
    """A router that is not the same on all expert ranks belongs to a broken run."""
    hf = make_moe_folder(tmp_path / "hf", "mixtral", 4)
    hf_to_megatron(hf, tmp_path / "m", shape_of(hf), legacy=Layout(world=1), ep=2)
    path = tmp_path / "m" / "release" / "mp_rank_00_001" / FILE
    found = content(path)
    found["model"]["decoder.layers.1.mlp.router.weight"][0, 0] += 1
    torch.save(found, path)
    with pytest.raises(ValueError, match="layers.1.mlp.router.weight of tensor rank 0, expert"):
        megatron_to_hf(tmp_path / "m", tmp_path / "back", shape_of(hf), hf)
    shutil.rmtree(path.parent)
    with pytest.raises(ValueError, match=r"holds 2 experts|missing \["):
        megatron_to_hf(tmp_path / "m", tmp_path / "back", shape_of(hf), hf)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ep": 5}, "ep=5 does not divide the model's 12 experts"),
        ({"vpp": 2}, "vpp=2 needs pipeline stages"),
        ({"vpp": 3, "legacy": Layout(world=2, pp=2)}, "does not divide the model's 4 layers"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_is_written(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """CFG-13: both numbers are named; experts over ranks in a model without experts too."""
    hf = make_moe_folder(tmp_path / "hf", "qwen3_moe", 12)
    with pytest.raises(ValueError, match=said):
        hf_to_megatron(hf, tmp_path / "m", shape_of(hf), **({"legacy": Layout(world=1)} | options))
    plain = make_hf_folder(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no experts"):
        hf_to_megatron(Path(plain), tmp_path / "m", read_shape(plain), legacy=Layout(world=1), ep=2)
    assert not (tmp_path / "m").exists()


def test_the_command_writes_inspects_and_reads_them_without_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CONV-30: nothing but the rank folders and a config is needed on the way back."""
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    hf = make_moe_folder(tmp_path / "hf", "qwen3_moe", 4)
    out = tmp_path / "m"
    words = ["hf2megatron", "--hf", f"{hf}", "--out", f"{out}"]
    assert main([*words, "--ep", "2"]) == 2
    assert "--ep has no effect with --format torch_dist" in capsys.readouterr().err
    layout = ["--tp", "2", "--pp", "2", "--vpp", "2", "--ep", "2"]
    assert main([*words, "--format", "torch", *layout]) == 0
    assert main(["inspect", f"{out}"]) == 0
    said = capsys.readouterr().out
    assert "per-rank checkpoint, tp 2 pp 2 vpp 2 ep 2" in said
    assert "  mp_rank_*: model1: decoder.layers.*.mlp.router.weight  [4, 64]" in said
    shutil.rmtree(out / "hf")
    back = ["megatron2hf", "--megatron", f"{out}", "--out", f"{tmp_path}/back"]
    assert main(back) == 2
    assert "--hf-template" in capsys.readouterr().err
    assert main([*back, "--config", f"{hf}/config.json"]) == 0
    assert main(["verify", "--hf", f"{tmp_path}/back", "--megatron", f"{out}"]) == 0
