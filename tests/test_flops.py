"""Model FLOPs against torch's operator counter and a count by hand; `perf/mfu` of whole runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megagrpo.metrics.flops import forward_flops, matmul_parameters
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.platform import peak_flops_of
from megagrpo.trainer import report
from megagrpo.trainer.grpo import train
from megagrpo.trainer.utilization import PHASES, utilization
from megagrpo.types import Experts
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder
from tests.torch_engine import AutoModelForCausalLM, build, make_place, words


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("qwen2", False)])
@pytest.mark.parametrize("length", [1, 7, 32])
def test_forward_flops_are_those_that_torch_counts(
    family: str, tied: bool, length: int, tmp_path: Path
) -> None:
    """Transformers multiplies all pairs of a sequence, those after a token too."""
    make_hf_folder(tmp_path, family, tied)
    shape = read_shape(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None] + 2, use_cache=False)
    forgone = length * length - length * (length + 1) // 2
    pairs = 4 * shape.num_layers * shape.num_heads * shape.head_dim * forgone
    assert forward_flops(shape, [length]) == counter.get_total_flops() - pairs


def test_six_n_per_trained_token_and_attention_by_hand(tmp_path: Path) -> None:
    """The toy: 4 query heads and 2 KV heads of 16."""
    make_hf_folder(tmp_path, "llama")
    shape = read_shape(tmp_path)
    sizes = (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size)
    layers, hidden, ffn, vocab = sizes
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    per_layer = hidden * 64 + 2 * hidden * 32 + 64 * hidden + 3 * hidden * ffn
    parameters = layers * per_layer + vocab * hidden
    assert matmul_parameters(shape) == parameters
    trained = 3 * forward_flops(shape, [3, 5])
    # 6 + 15 pairs; scores and values, forward and twice backward: 3 * 2 * 2 * 64 a pair and layer
    assert trained == 6 * parameters * 8 + 12 * 64 * layers * 21


def test_an_architecture_that_is_not_counted_has_no_number(tmp_path: Path) -> None:
    make_hf_folder(tmp_path, "llama")
    mixture = replace(read_shape(tmp_path), experts=Experts(count=4, top_k=2))
    assert matmul_parameters(mixture) is None and forward_flops(mixture, [3]) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_is_that_of_the_device(name: str, peak: float | None) -> None:
    assert peak_flops_of(name) == peak


def test_what_is_not_known_is_left_out_and_never_zero() -> None:
    seconds = {"update_actor": 2.0, "ref": 0.5, "gen": 9.0}
    assert utilization(1e15, seconds, 4, 1e14) == {"perf/mfu": pytest.approx(1.0)}
    assert utilization(1e15, seconds, 4, None) == {}
    assert utilization(0.0, seconds, 4, 1e14) == {}
    assert utilization(1e15, {"gen": 9.0}, 4, 1e14) == {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("flops"))


RUNS = {
    "one rank": (1, [], 3.0),
    "tensor parallel": (2, ["parallel.tp=2"], 3.0),
    "data parallel": (2, [], 3.0),
    "pipeline": (2, ["parallel.pp=2"], 3.0),
    "reference": (1, ["reference.use=always"], 4.0),
    "two passes": (1, ["algorithm.num_iterations=2"], 7.0),  # they need old log-probs as well
}


@pytest.mark.parametrize("name", RUNS)
def test_mfu_of_a_run_counts_every_pass_once_over_the_layout(
    name: str, place: Path, tmp_path: Path
) -> None:
    """Step 2, whose update makes its own old log-probs unless it iterates; peak of 1e9 FLOP/s."""
    world, more, passes = RUNS[name]

    def act(rank: int) -> tuple[list[dict[str, Any]], Any, list[int]]:
        patched: Callable[[str], float] = lambda dtype: 1e9  # noqa: E731
        report.device_peak = patched  # type: ignore[assignment]  # in this forked rank only
        run = build(rank, world, words(place, tmp_path / "run", *more))
        lengths: list[int] = []
        group = run.compare_groups

        def noted(samples: Any) -> Any:
            batch = group(samples)
            lengths[:] = [len(s.prompt.ids) + len(s.completion.ids) for s in batch.samples]
            return batch

        run.compare_groups = noted  # type: ignore[method-assign]
        train(run)
        return run.reporter.lines, run.reporter._prepared.shape, lengths

    lines, shape, lengths = run_ranks(world, act)[0]
    line = lines[-1]
    busy = sum(line.get(f"timing_s/{phase}", 0.0) for phase in PHASES)
    want = passes * forward_flops(shape, lengths)
    assert line["perf/mfu"] * busy * world * 1e9 == pytest.approx(want, rel=1e-9)
