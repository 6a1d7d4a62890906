"""`verify --logits`: both models run, and the layer that differs is named."""

import contextlib
import io
import json
import runpy
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.family_toys import make_toy
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent


def verify(_rank: int, hf: str, megatron: str, words: list[str]) -> tuple[int, str]:
    """The command in a process of its own, since it makes a process group."""
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(["verify", "--logits", "--hf", hf, "--megatron", megatron, *words])
    return code, said.getvalue()


def layer_differences(said: str) -> dict[int, float]:
    """What the command says of each layer."""
    return {
        int(line.split("layer ")[1].split(":")[0]): float(line.split("difference ")[1].split()[0])
        for line in said.splitlines()
        if "layer " in line and ": largest" in line and "logits" not in line
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf with a tokenizer, its checkpoint, and `other`: layer 2 changed by 5 %."""
    folder = tmp_path_factory.mktemp("logits")
    hf = make_hf_folder(folder / "hf", with_tokenizer=True, vocab_size=131)
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    assert main(["hf2megatron", "--hf", hf, "--out", f"{folder}/megatron"]) == 0
    shutil.copytree(hf, folder / "other")
    file = folder / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.down_proj.weight"] *= 1.05
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_equal_weights_agree_to_rounding_in_every_layer(place: Path) -> None:
    """CONV-41: with the folder's tokenizer, with an own prompt, and without a tokenizer."""
    for words in ([], ["--prompt", "3 apples"]):
        ((code, said),) = run_ranks(1, verify, f"{place}/hf", f"{place}/megatron", words)
        assert code == 0, said
        assert all(f"layer {layer}: largest difference" in said for layer in range(4))
        logits = next(line for line in said.splitlines() if "logits: " in line)
        difference = float(logits.split("largest difference ")[1].split()[0])
        largest = float(logits.split(" of ")[1].split()[0])
        assert difference < 1e-5 < 0.1 < largest
    bare = place / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(place / "hf" / name, bare / name)
    ((code, said),) = run_ranks(1, verify, str(bare), f"{place}/megatron", [])
    assert code == 0 and "over 62 tokens" in said


def test_a_changed_layer_is_found_and_named_with_status_1(place: Path) -> None:
    """Layers before it agree, it and the later ones do not; prompt and position are given."""
    ((code, said),) = run_ranks(1, verify, f"{place}/other", f"{place}/megatron", [])
    assert code == 1
    found = layer_differences(said)
    assert max(found[0], found[1]) < 1e-5 < 1e-4 < min(found[2], found[3])
    assert "is over the tolerance 1.0e-04" in said and "of prompt" in said
    words = ["--tolerance", "0.5"]
    ((code, _),) = run_ranks(1, verify, f"{place}/other", f"{place}/megatron", words)
    assert code == 0


@pytest.mark.parametrize("toy", ["qwen3-moe", "deepseek-v3", "gemma3"])
def test_families_that_do_not_train_are_compared_too_and_their_changed_layer_is_named(
    toy: str, tmp_path: Path
) -> None:
    """One expert, or one norm behind the MLP, of layer 2: layers before it agree."""
    hf = make_toy(tmp_path / "hf", toy)
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    assert main(["hf2megatron", "--hf", str(hf), "--out", f"{tmp_path}/megatron"]) == 0
    ((code, said),) = run_ranks(1, verify, str(hf), f"{tmp_path}/megatron", [])
    assert code == 0 and "over 62 tokens" in said, said
    tensors = load_file(hf / "model.safetensors")
    leaf = (
        "post_feedforward_layernorm.weight" if toy == "gemma3" else "mlp.experts.3.up_proj.weight"
    )
    tensors[f"model.layers.2.{leaf}"] += 0.5
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    ((code, said),) = run_ranks(1, verify, str(hf), f"{tmp_path}/megatron", [])
    found = layer_differences(said)
    assert code == 1 and "worst layer " in said
    assert max(found[0], found[1]) < 1e-5 < 1e-3 < min(found[2], found[3])


def test_options_without_effect_and_models_that_do_not_run_are_refused(place: Path) -> None:
    """One line, status 2."""
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    words = ["verify", "--hf", f"{place}/hf", "--megatron", f"{place}/megatron"]
    assert main([*words, "--prompt", "x"]) == 2
    assert main([*words, "--logits", "--dtype", "bfloat16"]) == 2
    config = json.loads((place / "hf" / "config.json").read_text())
    (place / "moe").mkdir()
    config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    (place / "moe" / "config.json").write_text(json.dumps(config))
    words = ["verify", "--logits", "--hf", f"{place}/moe", "--megatron", f"{place}/megatron"]
    assert main(words) == 2
