"""The commands of tools/convert_hf.py that look, plan and name sizes."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.types import Layout
from megagrpo.weights.table import local_shapes
from tests.test_table import toy
from tests.tiny_models import hf_config, hf_shapes, make_hf_folder

REPO = Path(__file__).resolve().parent.parent
TOOL = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))
main, Bar = TOOL["main"], TOOL["Bar"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf and megatron, the same toy of vocabulary 131; tests leave both alone."""
    folder = tmp_path_factory.mktemp("cli")
    make_hf_folder(folder / "hf", vocab_size=131)
    assert main(["hf2megatron", "--hf", f"{folder}/hf", "--out", f"{folder}/megatron"]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_inspect_counts_every_tensor_and_byte_of_both_kinds(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the list of names and shapes of the toy; layers share a line, numbers do not hide."""
    shapes = hf_shapes(hf_config(vocab_size=131))
    total = sum(torch.Size(shape).numel() * 4 for shape in shapes.values()) / 1e3
    lines = said(capsys, "inspect", place / "hf").splitlines()
    assert lines[0].endswith("HuggingFace folder")
    assert lines[1].startswith(f"{len(shapes)} tensors, {total:.2f} kB, float32, in 1 files")
    assert "  model.layers.*.mlp.down_proj.weight  [64, 176]  float32  45.06 kB  x 4" in lines
    every = said(capsys, "inspect", "--keys", place / "hf").splitlines()[2:]
    assert {line.split()[0] for line in every} == set(shapes)
    lines = said(capsys, "inspect", place / "megatron").splitlines()
    assert lines[0].endswith("Megatron-Core torch_dist checkpoint")
    assert lines[1].startswith(f"11 tensors, {total:.2f} kB, float32, in 1 files (__0_0.distcp)")
    fc2 = "  decoder.layers.mlp.linear_fc2.weight  [4, 64, 176]  float32  180.22 kB  in 32 pieces"
    assert fc2 in lines


def test_inspect_of_a_folder_that_is_no_checkpoint_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither kind, and one that only looks like it."""
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
    (tmp_path / "metadata.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 2
    assert ".metadata is missing" in capsys.readouterr().err


def test_plan_needs_a_config_only_and_shows_what_every_rank_gets(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stored tensors with their sources; local shapes of the table; a cut that cannot be."""
    config = tmp_path / "only.json"
    shutil.copyfile(place / "hf" / "config.json", config)
    text = said(capsys, "plan", "--hf", config)
    assert "decoder.layers.mlp.linear_fc1.weight  [4, 352, 64]" in text
    assert "gate_up, 16 pieces a layer, from model.layers.*.mlp.gate_proj.weight" in text
    assert "tp 0" not in text
    text = said(capsys, "plan", "--hf", config, "--tp", 2, "--pp", 2)
    layout = Layout(world=4, tp=2, pp=2)
    for rank in range(4):
        coords = layout.coordinates(rank)
        shapes = local_shapes(toy(vocab_size=131), layout, coords, "te")
        nbytes = sum(torch.Size(shape).numel() * 4 for shape in shapes.values())
        line = next(x for x in text.splitlines() if x.startswith(f"tp {coords.tp} pp {coords.pp}"))
        assert f"{len(shapes)} tensors, {nbytes / 1e3:.2f} kB" in line
    assert "decoder.final_layernorm.weight  [64]  replicated" in text
    assert main(["plan", "--hf", str(config), "--tp", "3"]) == 2
    assert "tp=3 and num_key_value_heads=2" in capsys.readouterr().err


def test_export_with_a_config_alone_in_shards_of_the_asked_size(
    place: Path, tmp_path: Path
) -> None:
    """CONV-31: no template folder; no file above the size but for its header."""
    config = tmp_path / "only.json"
    shutil.copyfile(place / "hf" / "config.json", config)
    words = ["megatron2hf", "--megatron", place / "megatron", "--out", tmp_path / "back"]
    words += ["--config", config, "--shard-size", "0.2MB"]
    assert main([str(word) for word in words]) == 0
    files = sorted(tmp_path.glob("back/*.safetensors"))
    assert len(files) > 4
    held = [load_file(file) for file in files]
    assert max(sum(t.nbytes for t in tensors.values()) for tensors in held) <= 200_000
    source = load_file(place / "hf" / "model.safetensors")
    found = {name: tensor for tensors in held for name, tensor in tensors.items()}
    assert found.keys() == source.keys()
    assert all(torch.equal(found[name], source[name]) for name in source)
    copied = (tmp_path / "back" / "config.json").read_bytes()
    assert copied == config.read_bytes()
    assert sorted(p.suffix for p in (tmp_path / "back").iterdir())[:2] == [".json", ".json"]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5 mib", 3 << 19), ("2GiB", 2 << 30), ("7", 7)]
)
def test_sizes_are_decimal_unless_they_say_binary(text: str, nbytes: int) -> None:
    """As HuggingFace reads them."""
    assert TOOL["_nbytes"](text) == nbytes


@pytest.mark.parametrize("text", ["0", "5 apples", "", "GB"])
def test_a_size_that_is_none_is_refused_by_the_parser(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and the text itself."""
    with pytest.raises(SystemExit) as caught:
        main(["megatron2hf", "--megatron", "x", "--out", "y", "--shard-size", text])
    assert caught.value.code == 2
    assert "is no size" in capsys.readouterr().err


def test_progress_ends_at_the_total_and_shows_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes, bytes per second and the time left, on stderr."""
    bar = Bar()
    for done in (10**6, 2 * 10**6):
        bar(done, 2 * 10**6)
    bar.close()
    assert "100%" in (err := capsys.readouterr().err) and "2.00M/2.00M" in err and "B/s" in err


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` is complete: every option of every command has a text."""
    parser = TOOL["parser"]()
    choices = parser._subparsers._group_actions[0].choices
    assert {"hf2megatron", "megatron2hf", "verify", "inspect", "plan"} <= set(choices)
    for command in choices.values():
        assert all(action.help for action in command._actions)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit status" in capsys.readouterr().out


def test_config_of_another_model_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first shape that does not fit is named."""
    config = json.loads((place / "hf" / "config.json").read_text()) | {"intermediate_size": 192}
    (tmp_path / "other.json").write_text(json.dumps(config))
    words = ["megatron2hf", "--megatron", f"{place}/megatron", "--out", f"{tmp_path}/back"]
    assert main([*words, "--config", f"{tmp_path}/other.json"]) == 2
    assert "linear_fc1.weight has shape [4, 352, 64], expected [4, 384, 64]" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "--tp=3 and num_key_value_heads=2: one must divide the other"),
        (["--tp", "8"], "--tp=8 does not divide num_attention_heads=4"),
        (["--pp", "3"], "--pp=3 does not divide the model's 4 layers"),
        (["--pp", "8"], "--pp=8 does not divide the model's 4 layers"),
        (["--pp", "2", "--vpp", "3"], "--pp=2 with --vpp=3 does not divide the model's 4 layers"),
        (["--vpp", "2"], "vpp=2 needs pipeline stages"),
        (["--ep", "2"], "ep=2, but Qwen3ForCausalLM has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_the_option_that_was_typed(
    words: list[str],
    message: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not by the trainer's keys, of which nobody has heard here."""
    hf, out = f"{place}/hf", f"{tmp_path}/out"
    assert main(["hf2megatron", "--hf", hf, "--out", out, "--format", "torch", *words]) == 2
    assert message in capsys.readouterr().err and not any(tmp_path.iterdir())
    if "--vpp" not in words and "--ep" not in words:
        assert main(["plan", "--hf", hf, *words]) == 2
        assert message in capsys.readouterr().err


def test_config_takes_a_file_and_the_template_a_folder(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either way round the message names the other option."""
    hf = place / "hf"
    words = ["megatron2hf", "--megatron", f"{place}/megatron", "--out", f"{tmp_path}/out"]
    for option, path, other in (
        ("--config", hf, "--hf-template"),
        ("--hf-template", hf / "config.json", "--config"),
    ):
        assert main([*words, option, str(path)]) == 2
        assert f"; {other} takes one" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
