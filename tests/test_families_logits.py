"""Logits of every family: transformers against megatron-core's model out of the converted folder.

What converts is checked by what it computes; bit-equal round trips alone would also pass with two
matching mistakes.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.model import build, parity
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.context import init_parallel
from megagrpo.types import Layout
from megagrpo.weights.convert import hf_to_megatron
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.table import padded_vocab
from tests.family_toys import TOYS, make_toy, toy_config, write_config
from tests.megatron_toys import sequences
from tests.pool import run_ranks
from tests.tiny_models import hf_config, llama3_rope, make_hf_folder

TOLERANCE = 1e-5  # logits reach about 3; float32 rounding is 1e-6 to 3e-6
LENGTHS = (5, 9, 1, 40)
DENSE = {
    "llama3-rope": ("llama", False, {"rope_scaling": llama3_rope()}),
    "llama-linear-rope": ("llama", False, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-eps-1e-5": ("llama", False, {"rms_norm_eps": 1e-5}),
    "mistral": ("mistral", False, {}),
    "qwen2": ("qwen2", False, {}),
    "qwen2.5-tied": ("qwen2", True, {}),
    "qwen3": ("qwen3", False, {"head_dim": 32}),
}
LAYOUTS = {
    "tp1": (Layout(1), False),
    "tp2": (Layout(2, tp=2), False),
    "tp2-sp": (Layout(2, tp=2), True),
    "tp4": (Layout(4, tp=4), False),
    "pp2": (Layout(2, pp=2), False),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(HuggingFace folder, converted folder) of every model."""
    root: Path = tmp_path_factory.mktemp("logits")
    folders = {name: make_toy(root / name, name) for name in TOYS}
    for name, (family, tied, fields) in DENSE.items():
        folders[name] = Path(make_hf_folder(root / name, family, tied, vocab_size=131, **fields))
    found = {}
    for name, hf in folders.items():
        out = root / f"{name}-megatron"
        hf_to_megatron(hf, out, read_shape(hf, to_convert=True))
        found[name] = (hf, out)
    return found


@pytest.fixture(scope="module")
def references(converted: dict[str, tuple[Path, Path]]) -> dict[str, list[torch.Tensor]]:
    ids = sequences(131, LENGTHS)
    return {name: parity.hf_logits(str(hf), ids) for name, (hf, _) in converted.items()}


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_logits_of_every_family_equal_those_of_transformers(
    layout_name: str,
    converted: dict[str, tuple[Path, Path]],
    references: dict[str, list[torch.Tensor]],
) -> None:
    """CONV-24, 25, 41 from the converted checkpoint, packed sequences: experts, latent attention,
    yarn, windows, soft-caps, norms that add 1."""
    layout, sequence_parallel = LAYOUTS[layout_name]
    names = [
        name
        for name, (hf, _) in converted.items()
        if read_shape(hf, to_convert=True).num_layers % layout.pp == 0
    ]

    def differences(rank: int) -> dict[str, float]:
        context = init_parallel(layout, seed=1)
        found = {}
        for name in names:
            shape = read_shape(converted[name][0], to_convert=True)
            chunks = build.build_model(
                shape,
                context,
                dtype=torch.float32,
                padded_vocab=padded_vocab(shape.vocab_size, layout.tp),
                settings=build.ModelSettings(sequence_parallel=sequence_parallel),
            )
            build.load_weights_(chunks, MegatronSource(converted[name][1], shape), shape, context)
            for chunk in chunks:
                chunk.eval()
            ids = sequences(131, LENGTHS)
            ours = parity.megatron_logits(chunks, ids, shape=shape, context=context)
            report = parity.compare(ours, references[name])
            assert report.max_abs_logit > 1, f"{name}: logits this flat would hide a wrong weight"
            found[name] = report.max_abs_diff
        return found

    for rank, found in enumerate(run_ranks(layout.world, differences)):
        assert found.keys() == set(names)
        wrong = {name: value for name, value in found.items() if not value < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


def test_qkv_biases_fifty_times_as_large_leave_the_logits_equal(tmp_path: Path) -> None:
    """CONV-41: T-bias; the bias decides attention here, so a swapped one shows."""
    hf = Path(make_hf_folder(tmp_path / "hf", "qwen2"))
    tensors = load_file(hf / "model.safetensors")
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name] *= 50
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    shape = read_shape(hf)
    hf_to_megatron(hf, tmp_path / "megatron", shape)

    def difference(rank: int) -> parity.ParityReport:
        source = MegatronSource(tmp_path / "megatron", shape)
        return parity.check_checkpoint(str(hf), source, shape, sequences(128, LENGTHS))[0]

    (report,) = run_ranks(1, difference)
    assert report.max_abs_diff < 1e-4 and report.max_abs_logit > 1
    assert max(float(t.abs().max()) for n, t in tensors.items() if n.endswith(".bias")) > 10


def test_linear_scaling_by_two_gives_position_six_the_angles_of_position_three(
    tmp_path: Path,
) -> None:
    """CONV-24."""
    plain = hf_config("llama", rope_theta=5e5)
    scaled = plain | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    three, six = (
        at * build.inverse_frequencies(read_shape(write_config(tmp_path, config)))
        for at, config in ((3, plain), (6, scaled))
    )
    assert torch.equal(three, six)


@pytest.mark.parametrize(
    ("toy", "change", "message"),
    [
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("deepseek-v3", {"num_experts_per_tok": 2}, "ranks a group by its best .* = 1 experts"),
        (
            "deepseek-v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "ranks a group by its best .* = 2 experts, the model by its best 1",
        ),
        ("mixtral", {"num_experts_per_tok": 1}, "one expert a token"),
    ],
)
def test_what_megatron_core_has_no_equal_of_converts_and_is_refused_to_run(
    toy: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """The weights are well defined; the reason why no logits can be compared is said."""
    folder = write_config(tmp_path / "hf", toy_config(toy) | change)
    shape = read_shape(folder, to_convert=True)

    def build_it(rank: int) -> str:
        context = init_parallel(Layout(1), seed=1)
        settings = build.ModelSettings()
        with pytest.raises(ValueError, match="cannot run") as caught:
            build.build_model(
                shape, context, dtype=torch.float32, padded_vocab=136, settings=settings
            )
        return str(caught.value)

    (said,) = run_ranks(1, build_it)
    assert re.search(message, said), said
