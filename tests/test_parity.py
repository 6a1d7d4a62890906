"""Megatron's logits against transformers' on the same weights and tokens, every family and layout.

One launch per layout runs all models: launching ranks costs more than running them.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megagrpo.model import build, parity
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.context import init_parallel
from megagrpo.types import Layout
from megagrpo.weights.table import hf_manifest
from tests.megatron_toys import sequences, toy_on_rank
from tests.pool import run_ranks
from tests.tiny_models import llama3_rope, make_hf_folder

LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
MODELS = {
    "llama3-scaled": ("llama", False, {"rope_scaling": llama3_rope()}),
    "llama-linear": ("llama", False, {"rope_scaling": LINEAR_ROPE}),
    "mistral": ("mistral", False, {}),
    "qwen2": ("qwen2", False, {}),
    "qwen2-tied": ("qwen2", True, {}),
    "qwen3": ("qwen3", False, {"head_dim": 32}),
    "qwen3-tied": ("qwen3", True, {}),
    "padded-vocabulary": ("qwen3", False, {"vocab_size": 131}),
    "padded-vocabulary-tied": ("llama", True, {"vocab_size": 131}),
    "one-kv-head": ("qwen3", False, {"num_key_value_heads": 1}),
    "square-ffn": ("llama", False, {"intermediate_size": 64}),
}
# The second pack is too ragged for one padded batch: it exercises the split into parts.
PACKS = ((5, 9, 1, 12, 60), (60, 1, 2, 3, 1, 1, 17))
LAYOUTS = {
    "tp1": (Layout(1), False),
    "tp2": (Layout(2, tp=2), False),
    "tp2-sp": (Layout(2, tp=2), True),
    "tp4": (Layout(4, tp=4), False),  # twice as many ranks as KV heads
    "pp2": (Layout(2, pp=2), False),
    "tp2-pp2-sp": (Layout(4, tp=2, pp=2), True),
}
TOLERANCE = 1e-5  # logits reach about 3; float32 rounding over 4 layers is 2e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("models")
    return {
        name: make_hf_folder(root / name, family, tied, **overrides)
        for name, (family, tied, overrides) in MODELS.items()
    }


@pytest.fixture(scope="module")
def references(folders: dict[str, str]) -> dict[str, list[list[torch.Tensor]]]:
    return {
        name: [parity.hf_logits(folder, sequences(128, lengths)) for lengths in PACKS]
        for name, folder in folders.items()
    }


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_logits_equal_those_of_transformers_for_every_family(
    layout_name: str,
    folders: dict[str, str],
    references: dict[str, list[list[torch.Tensor]]],
) -> None:
    """Also PAR-6 (packs of unequal lengths), PAR-10 (lengths that tp does not divide)."""
    layout, sequence_parallel = LAYOUTS[layout_name]
    settings = build.ModelSettings(sequence_parallel=sequence_parallel)

    def differences(rank: int) -> dict[str, float]:
        context = init_parallel(layout, seed=1)
        found = {}
        for name, folder in folders.items():
            toy = toy_on_rank(folder, layout, settings, context=context)
            for lengths, reference in zip(PACKS, references[name], strict=True):
                ours = parity.megatron_logits(
                    toy.chunks, sequences(128, lengths), shape=toy.shape, context=context
                )
                report = parity.compare(ours, reference)
                assert report.max_abs_logit > 1, "logits this flat would hide a wrong weight"
                found[f"{name} {lengths}"] = report.max_abs_diff
        return found

    for rank, found in enumerate(run_ranks(layout.world, differences)):
        assert len(found) == len(MODELS) * len(PACKS)
        wrong = {name: value for name, value in found.items() if not value < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_exported_names_and_shapes_are_the_state_dict_of_transformers(
    family: str, tied: bool, tmp_path: Path
) -> None:
    """CONV-2, CONV-34: parameters and saved buffers, none lost and none invented; a tied head is
    the embedding and is not written."""
    folder = make_hf_folder(tmp_path / "hf", family, tied, vocab_size=131)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    want = {name: tuple(value.shape) for name, value in state.items()}
    if tied:
        del want["lm_head.weight"]
    shape = read_shape(folder)
    assert {info.name: info.shape for info in hf_manifest(shape, shape.dtype)} == want


def test_a_declared_uneven_split_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    """CFG-13: 5 layers as 3 + 2 on two stages."""
    folder = make_hf_folder(tmp_path, "qwen3", num_hidden_layers=5)
    ids = sequences(128)
    reference = parity.hf_logits(folder, ids)

    def difference(rank: int) -> float:
        toy = toy_on_rank(folder, Layout(2, pp=2, first_stage_layers=3))
        ours = parity.megatron_logits(toy.chunks, ids, shape=toy.shape, context=toy.context)
        return parity.compare(ours, reference).max_abs_diff

    assert max(run_ranks(2, difference)) < TOLERANCE


def test_activations_recomputed_or_not_give_the_same_logits(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path, "qwen3")
    ids = sequences(128)
    reference = parity.hf_logits(folder, ids)

    def differences(rank: int) -> list[float]:
        context = init_parallel(Layout(1), seed=1)
        found = []
        for recompute in ("none", "selective", "full"):
            settings = build.ModelSettings(recompute=recompute)
            toy = toy_on_rank(folder, Layout(1), settings, context=context)
            ours = parity.megatron_logits(toy.chunks, ids, shape=toy.shape, context=context)
            found.append(parity.compare(ours, reference).max_abs_diff)
        return found

    assert max(run_ranks(1, differences)[0]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama3-scaled", "llama-linear", "mistral"])
def test_rotary_frequencies_are_bit_equal_to_transformers(
    name: str, folders: dict[str, str]
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folders[name]).model.rotary_emb.inv_freq
    ours = build.inverse_frequencies(read_shape(folders[name]))
    assert torch.equal(ours, theirs)


def test_a_neighbour_in_the_pack_has_no_influence(folders: dict[str, str]) -> None:
    """PAR-7: another first sequence of the same length leaves the second's logits bit-equal."""
    first, other, second = sequences(128, (9, 9, 12))
    assert first != other

    def logits_of_second(rank: int) -> list[torch.Tensor]:
        toy = toy_on_rank(folders["qwen3"], Layout(1))
        return [
            parity.megatron_logits(
                toy.chunks, [neighbour, second], shape=toy.shape, context=toy.context
            )[1]
            for neighbour in (first, other)
        ]

    beside_first, beside_other = run_ranks(1, logits_of_second)[0]
    assert torch.equal(beside_first, beside_other)


def test_a_report_names_the_place_of_the_largest_difference_and_keeps_nan() -> None:
    reference = [torch.ones(3, 4), torch.ones(2, 4)]
    ours = [torch.ones(3, 4), torch.ones(2, 4)]
    ours[0][2, 1] = 1.25
    ours[1][1, 3] = -1.0
    report = parity.compare(ours, reference)
    assert (report.max_abs_diff, report.sequence, report.position) == (2.0, 1, 1)
    ours[0][0, 0] = torch.nan
    report = parity.compare(ours, reference)
    assert report.max_abs_diff != report.max_abs_diff
    assert (report.sequence, report.position, report.tokens) == (0, 0, 5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (build.ModelSettings(vpp=2), "parallel.vpp=2"),
        (build.ModelSettings(cp=2), "parallel.cp=2"),
        (build.ModelSettings(ep=2), "parallel.ep=2"),
        (build.ModelSettings(recompute="some"), "parallel.recompute='some'"),
        (build.ModelSettings(sequence_parallel=True), "parallel.sequence_parallel"),
    ],
)
def test_settings_that_are_not_built_are_refused_by_name(
    settings: build.ModelSettings, named: str, folders: dict[str, str]
) -> None:
    """CFG-16."""

    def message(rank: int) -> str:
        with pytest.raises(ValueError, match="") as caught:
            toy_on_rank(folders["qwen3"], Layout(1), settings)
        return str(caught.value)

    assert named in run_ranks(1, message)[0]


def test_a_weight_that_nobody_loaded_is_nan(folders: dict[str, str]) -> None:
    def untouched(rank: int) -> bool:
        context = init_parallel(Layout(1), seed=1)
        chunks = build.build_model(
            read_shape(folders["qwen3"]),
            context,
            dtype=torch.float32,
            padded_vocab=128,
            settings=build.ModelSettings(),
        )
        return all(bool(p.isnan().all()) for p in chunks[0].parameters())

    assert run_ranks(1, untouched) == [True]
