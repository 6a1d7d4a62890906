"""Per-rank checkpoints: bit-equal round trips, real megatron-core, files from strangers."""

import pickle
import runpy
import shutil
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.model.build import ModelSettings, build_model, local_parameters
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.context import init_parallel
from megagrpo.types import Layout
from megagrpo.weights.convert import hf_to_megatron, load_rank_, megatron_to_hf
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.table import padded_vocab
from megagrpo.weights.verify import verify
from tests.pool import run_ranks
from tests.test_table import cut_by_hand, toy
from tests.tiny_models import hf_config, hf_tensors, make_hf_folder

REPO = Path(__file__).resolve().parent.parent
FILE = "model_optim_rng.pt"


def write(hf: str | Path, out: Path, tp: int, pp: int, profile: str = "te", **uneven: int) -> Path:
    layout = Layout(world=tp * pp, tp=tp, pp=pp, **uneven)
    hf_to_megatron(Path(hf), out, read_shape(hf), profile=profile, legacy=layout)
    return out


def export(megatron: Path, out: Path) -> dict[str, torch.Tensor]:
    megatron_to_hf(megatron, out, read_shape(megatron), megatron / "hf")
    return load_file(out / "model.safetensors")


def content(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def change(path: Path, **entries: Any) -> None:
    """Add or replace top entries of a rank file."""
    torch.save({**content(path), **entries}, path)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `hf` and its per-rank checkpoint `megatron` at TP 2; tests copy it."""
    place = tmp_path_factory.mktemp("legacy")
    make_hf_folder(place / "hf", vocab_size=131)
    write(place / "hf", place / "megatron", 2, 1)
    return place


@pytest.mark.parametrize("profile", ["te", "local"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen2", True)])
def test_round_trip_is_bit_equal(
    family: str, tied: bool, tp: int, pp: int, profile: str, tmp_path: Path
) -> None:
    """CONV-5, 6, 9, 20 with padded vocabulary, TP above the KV heads, either naming profile; the
    layout is found from the folders."""
    hf = make_hf_folder(tmp_path / "hf", family, tied, vocab_size=131)
    write(hf, tmp_path / "megatron", tp, pp, profile)
    ranks = sorted(path.parent.name for path in tmp_path.glob("megatron/release/*/*.pt"))
    assert len(ranks) == tp * pp and ranks[0] == ("mp_rank_00" if pp == 1 else "mp_rank_00_000")
    verify(Path(hf), tmp_path / "megatron", read_shape(hf))
    source, back = load_file(Path(hf) / "model.safetensors"), export(*paths(tmp_path))
    assert source.keys() == back.keys()
    assert all(torch.equal(source[name], back[name]) for name in source)


def paths(place: Path) -> tuple[Path, Path]:
    return place / "megatron", place / "back"


def test_rank_files_hold_what_cutting_by_hand_gives(tmp_path: Path) -> None:
    """Values, names and dtypes against reshape, cat and chunk; pad rows are zero."""
    hf = make_hf_folder(tmp_path / "hf", vocab_size=131)
    write(hf, tmp_path / "megatron", 2, 2, "local")
    source = hf_tensors(hf_config(vocab_size=131))
    for tp in range(2):
        file = tmp_path / "megatron" / "release" / f"mp_rank_{tp:02d}_001" / FILE
        model = content(file)["model"]
        for local, layer in enumerate((2, 3)):
            for name, value in cut_by_hand(toy(), source, layer, local, 2, tp).items():
                assert torch.equal(model[name], value), name
        head = torch.zeros(144, 64)
        head[:131] = source["lm_head.weight"]
        assert torch.equal(model["output_layer.weight"], head.chunk(2)[tp])
    arguments = content(file)["args"]
    assert (arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size) == (2, 2)
    assert (arguments.padded_vocab_size, arguments.num_query_groups) == (144, 2)
    assert content(file)["checkpoint_version"] == 3.0
    tracker = tmp_path / "megatron" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "release"


def megatron_core_loads(rank: int, layout: Layout, hf: str, checkpoint: Path) -> list[str]:
    """Strictly into a real GPTModel; the parameters that differ from what the table loads."""
    shape = read_shape(hf)
    context = init_parallel(layout, seed=1)
    (chunk,) = build_model(
        shape,
        context,
        dtype=torch.float32,
        padded_vocab=padded_vocab(shape.vocab_size, layout.tp),
        settings=ModelSettings(),
    )
    suffix = f"_{context.coords.pp:03d}" if layout.pp > 1 else ""
    file = checkpoint / "release" / f"mp_rank_{context.coords.tp:02d}{suffix}" / FILE
    chunk.load_state_dict(content(file)["model"], strict=True)
    found = local_parameters([chunk])
    expected = {name: torch.empty_like(p) for name, p in found.items()}
    load_rank_(expected, HFSource(hf), shape, layout, context.coords)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize(("tied", "tp", "pp"), [(False, 2, 1), (True, 1, 2)])
def test_megatron_core_loads_a_rank_file_strictly(
    tied: bool, tp: int, pp: int, tmp_path: Path
) -> None:
    """No key missing or left over, extra states included, with the local layers."""
    hf = make_hf_folder(tmp_path / "hf", "qwen2", tied, vocab_size=131)
    checkpoint = write(hf, tmp_path / "megatron", tp, pp, "local")
    layout = Layout(world=tp * pp, tp=tp, pp=pp)
    different = run_ranks(layout.world, megatron_core_loads, layout, hf, checkpoint)
    assert different == [[]] * layout.world


def test_dtype_is_kept_per_tensor(tmp_path: Path) -> None:
    """CONV-39: one float32 tensor in a bfloat16 model comes back so, and only it."""
    hf = make_hf_folder(tmp_path / "hf", dtype=torch.bfloat16)
    name = "model.layers.2.self_attn.k_proj.weight"
    source = load_file(Path(hf) / "model.safetensors")
    source[name] = source[name].float() + 1e-6
    save_file(source, Path(hf) / "model.safetensors", metadata={"format": "pt"})
    write(hf, tmp_path / "megatron", 2, 2)
    back = export(*paths(tmp_path))
    assert [key for key, value in back.items() if value.dtype == torch.float32] == [name]
    assert all(torch.equal(source[key], back[key]) for key in source)


def test_uneven_stages_are_found_from_the_layers_of_the_files(tmp_path: Path) -> None:
    """CONV-26: 3 + 2 layers."""
    hf = make_hf_folder(tmp_path / "hf", num_hidden_layers=5)
    write(hf, tmp_path / "megatron", 1, 2, first_stage_layers=3, last_stage_layers=2)
    verify(Path(hf), tmp_path / "megatron", read_shape(hf))


def test_a_training_run_s_file_reads_whatever_stands_beside_the_model(
    halves: Path, tmp_path: Path
) -> None:
    """Optimizer tensors, random states with numpy arrays, an iteration folder, extra states of
    Transformer Engine as bytes, vocabulary padded to more rows; no `args` at all (CONV-30)."""
    folder = Path(shutil.copytree(halves / "megatron", tmp_path / "megatron"))
    (folder / "release").rename(folder / "iter_0000123")
    (folder / "latest_checkpointed_iteration.txt").write_text("123\n")
    for rank in (0, 1):
        path = folder / "iter_0000123" / f"mp_rank_0{rank}" / FILE
        found = content(path)
        model = OrderedDict(found["model"])
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            real = torch.cat(
                [
                    content(halves / f"megatron/release/mp_rank_0{r}" / FILE)["model"][name]
                    for r in (0, 1)
                ]
            )[:131]
            full = torch.full((256, 64), 7.0)
            full[:131] = real
            model[name] = full.chunk(2)[rank].clone()
        model["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.ones(3, dtype=torch.uint8)
        random = {"np_rng_state": np.random.RandomState(0).get_state(), "rng": torch.zeros(4)}
        torch.save({"model": model, "optimizer": {"step": 3}, "rng_state": [random]}, path)
    source, back = load_file(halves / "hf/model.safetensors"), export(folder, tmp_path / "back")
    assert all(torch.equal(source[name], back[name]) for name in source)


class Surprise:
    """A class that a file must not load."""


def test_a_hostile_file_is_refused_by_the_name_of_the_class(halves: Path, tmp_path: Path) -> None:
    """Nothing of it runs; nothing is written."""
    folder = Path(shutil.copytree(halves / "megatron", tmp_path / "megatron"))
    path = folder / "release" / "mp_rank_01" / FILE
    found = content(path)
    torch.save(found | {"args": Namespace(what=Surprise())}, path)
    with pytest.raises(ValueError, match=r"mp_rank_01.*tests.test_legacy.Surprise"):
        export(folder, tmp_path / "back")

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (__import__("os").system, (f"touch {tmp_path}/exploded",))

    torch.save(found | {"args": Bomb()}, path)
    with pytest.raises(ValueError, match=r"mp_rank_01.*posix.system"):
        export(folder, tmp_path / "back")
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"mp_rank_01.* no file of torch.save"):
        export(folder, tmp_path / "back")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "back").exists()


def broken(halves: Path, tmp_path: Path, name: str) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    folder = Path(shutil.copytree(halves / "megatron", tmp_path / name))
    path = folder / "release" / "mp_rank_01" / FILE
    return folder, path, content(path)["model"]


FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.layers.0.self_attention.q_layernorm.weight"
FAULTS = {
    "missing": (lambda m: {k: v for k, v in m.items() if k != FC2}, rf"missing \[{FC2}\]"),
    "unknown": (lambda m: m | {"surprise": torch.ones(1)}, r"unknown \[surprise\]"),
    "shape": (lambda m: m | {FC2: m[FC2].t().contiguous()}, rf"{FC2} has shape \[88, 64\]"),
    "no tensor": (lambda m: m | {FC2: [1.0]}, rf"{FC2} is a list"),
    "copies": (lambda m: m | {NORM: m[NORM] + 1}, rf"{NORM} of tensor rank 1 differs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_does_not_fit_is_refused_by_key(
    fault: str, halves: Path, tmp_path: Path
) -> None:
    """CONV-1 for every rank: missing, unknown, misshapen, no tensor, copies that differ."""
    folder, path, model = broken(halves, tmp_path, "megatron")
    make, message = FAULTS[fault]
    change(path, model=make(model))
    with pytest.raises(ValueError, match=message):
        export(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_folders_that_are_not_whole_are_refused_by_name(halves: Path, tmp_path: Path) -> None:
    """A rank missing, a file missing or cut, virtual stages, experts, a tracker that lies."""
    folder, path, model = broken(halves, tmp_path, "megatron")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"mp_rank_01.* is cut off"):
        export(folder, tmp_path / "back")
    torch.save({"model0": model, "model1": model}, path)
    with pytest.raises(ValueError, match=r"files of \[1, 2\] virtual stages"):
        export(folder, tmp_path / "back")
    path.unlink()
    with pytest.raises(ValueError, match=r"mp_rank_01.*is missing"):
        export(folder, tmp_path / "back")
    path.parent.rename(path.parent.with_name("mp_rank_02"))
    with pytest.raises(ValueError, match="is missing"):
        export(folder, tmp_path / "back")
    shutil.copytree(path.parent.with_name("mp_rank_00"), path.parent.with_name("x"))
    shutil.rmtree(path.parent.with_name("mp_rank_02"))
    path.parent.with_name("x").rename(path.parent.with_name("mp_rank_02"))
    with pytest.raises(ValueError, match="lacks mp_rank_01"):
        export(folder, tmp_path / "back")
    path.parent.with_name("mp_rank_02").rename(path.parent.with_name("mp_rank_00_000_001"))
    with pytest.raises(ValueError, match="mixes folders of different layouts"):
        export(folder, tmp_path / "back")
    (folder / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(ValueError, match="neither 'release' nor a number"):
        export(folder, tmp_path / "back")


def test_command_line_writes_reads_inspects_and_verifies_them(
    halves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--format torch`; a layout without it is refused."""
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    hf, out = str(halves / "hf"), str(tmp_path / "megatron")
    words = ["hf2megatron", "--hf", hf, "--out", out]
    assert main([*words, "--tp", "2"]) == 2
    assert "--tp has no effect" in capsys.readouterr().err
    assert main([*words, "--format", "torch", "--tp", "3"]) == 2
    assert not (tmp_path / "megatron").exists()
    assert main([*words, "--format", "torch", "--tp", "2", "--pp", "2"]) == 0
    assert main(["verify", "--hf", hf, "--megatron", out]) == 0
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("Megatron-LM per-rank checkpoint, tp 2 pp 2")
    fc1 = "  mp_rank_*: decoder.layers.*.mlp.linear_fc1.weight  [176, 64]  float32  45.06 kB  x 8"
    assert fc1 in lines
    assert main(["megatron2hf", "--megatron", out, "--out", f"{tmp_path}/back"]) == 0
    found, source = (
        load_file(f"{folder}/model.safetensors") for folder in (f"{tmp_path}/back", hf)
    )
    assert all(torch.equal(found[name], source[name]) for name in source)
