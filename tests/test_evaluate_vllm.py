"""Evaluation and blind comparison with real vLLM and megatron-core: weights from files and back."""

import json
from pathlib import Path
from typing import Any

import pytest

import megagrpo.rollout.vllm_engine  # noqa: F401  (imported once, before ranks are forked)
from megagrpo.config_file import load_config
from megagrpo.trainer.grpo import train
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.preflight import prepare
from megagrpo.trainer.setup import build_run
from tests.pool import run_ranks
from tests.test_evaluate_compare import read
from tests.tiny_models import make_hf_folder

REWARD = """
def low(prompts, completions, completion_ids, **columns):
    return [sum(i < 50 for i in ids) / max(len(ids), 1) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate_vllm")
    make_hf_folder(folder / "hf", "qwen3", True, with_tokenizer=True, head_dim=32)
    rows = [{"prompt": f"{a},{b}>", "answer": str(max(a, b))} for a in range(3) for b in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(world: int, place: Path, run_dir: Path, *more: str) -> list[dict[str, Any]]:
    words = [
        f"model.path={place}/hf",
        f"data.train={place}/train.jsonl",
        f"data.eval={place}/heldout.jsonl",
        f"rewards=[{{path: '{place}/reward.py:low'}}]",
        f"trainer.run_dir={run_dir}",
        "trainer.steps=2",
        "rollout.group_size=4",
        "rollout.max_prompt_tokens=8",
        "rollout.max_response_tokens=6",
        "rollout.kv_cache_gb=0.03",
        "data.prompts_per_step=4",
        "data.max_tokens_per_microbatch=64",
        "optim.lr=1e-2",
        "optim.eps=1e-3",
        "log.tensorboard=false",
        *more,
    ]

    def act(rank: int) -> None:
        train(build_run(prepare(load_config(None, words), rank, world), Phases()))

    run_ranks(world, act, timeout=240)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def training(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    apart = ("timing_s/", "perf/", "memory/", "sync/seconds", "val/")
    return [{k: v for k, v in line.items() if not k.startswith(apart)} for line in lines]


def test_the_reference_s_weights_come_and_go_without_a_trace(place: Path, tmp_path: Path) -> None:
    """Tied weights, trainer and engine cut in two. Greedy answers of policy and reference are equal
    while nothing is learned, differ afterwards, and the run is bit-equal to one without."""
    cut = ["parallel.tp=2", "rollout.tp=2"]
    compared = ["eval.compare_every=1", "eval.compare_prompts=2"]
    with_it = run(2, place, tmp_path / "with", *cut, *compared)
    without = run(2, place, tmp_path / "without", *cut)
    assert training(with_it) == training(without)
    still = run(2, place, tmp_path / "still", *cut, *compared, "optim.lr=0")
    assert [line["sync/version"] for line in still if line["step"]] == [0, 1]
    for name, same in (("still", True), ("with", False)):
        pages = [read(tmp_path / name / "comparisons", step)[0].rows for step in (1, 2)]
        assert [len(rows) for rows in pages] == [2, 2]
        equal = [left == right for rows in pages for _, left, right in rows]
        assert all(equal) == same


def test_filtered_samples_of_evaluation_are_scored_and_training_is_untouched(
    place: Path, tmp_path: Path
) -> None:
    """EVAL-9 in vLLM: k 4 with filters; one likely id alone makes all samples of a prompt equal."""
    one = ["eval.samples=4", "eval.temperature=1.0", "eval.top_k=1"]
    sampled = run(2, place, tmp_path / "sampled", *one)
    greedy = run(2, place, tmp_path / "greedy")
    assert training(sampled) == training(greedy)
    for line, want in zip(sampled, greedy, strict=True):
        assert line.get("val/heldout/mean@4") == pytest.approx(want.get("val/heldout/mean@1"))
        assert line.get("val/heldout/maj@4") == pytest.approx(want.get("val/heldout/mean@1"))
    assert "val/heldout/pass@2" in sampled[-1] and sampled[-1]["val/heldout/count"] == 16
