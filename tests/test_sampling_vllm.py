"""Dynamic sampling with the real vLLM and megatron-core on two ranks, and its replay."""

import json
from pathlib import Path
from typing import Any

import pytest

import megagrpo.rollout.vllm_engine  # noqa: F401  (imported once, before ranks are forked)
from megagrpo.cli import main
from megagrpo.metrics.records import FATES
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder
from tests.torch_engine import make_place, numbers, words

REWARD = """
def odd_prompts_teach(completion_ids, answer, **columns):
    odd = [int(number) % 2 for number in answer]
    shares = [sum(i < 50 for i in ids) / len(ids) for ids in completion_ids]
    return [share if o else 1.0 for share, o in zip(shares, odd)]
"""
SETTINGS = [
    "algorithm.filter_flat_groups=true",
    "algorithm.truncated=mask",
    "rollout.max_num_gen_batches=6",
    "rollout.kv_cache_gb=0.03",
    "data.bucket_by_length=true",
]


def commanded(world: int, *arguments: str) -> None:
    """`torchrun -m megagrpo.cli train ARGUMENTS`, the ranks forked from here."""
    status = run_ranks(world, lambda rank: main(["train", *arguments]), timeout=240)
    assert status == [0] * world


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def described(rows: list[dict[str, Any]]) -> list[list[Any]]:
    names = ("group", "member", "prompt_index", "completion_ids", "dropped", "fate")
    return [[row[name] for name in names] for row in rows]


def test_filtered_steps_are_full_at_dp_and_tp_and_replay_bit_for_bit(tmp_path: Path) -> None:
    """ADV-21, EVAL-8, SYNC-27: the first step is the same at both layouts; every step trains its
    four groups; the replay has the losses of the run to the bit."""
    place = make_place(tmp_path / "place")
    sizes = {"num_hidden_layers": 2, "head_dim": 32}  # vLLM on CPU knows no smaller heads
    make_hf_folder(place / "hf", "qwen3", with_tokenizer=True, **sizes)
    ends = {"eos_token_id": [1, *range(30, 50)]}
    (place / "hf" / "generation_config.json").write_text(json.dumps(ends))
    (place / "teach.py").write_text(REWARD)
    reward = f"rewards=[{{path: '{place}/teach.py:odd_prompts_teach', name: score}}]"
    found = {}
    for name, layout in (("dp", []), ("tp", ["parallel.tp=2", "rollout.tp=2"])):
        run_dir = tmp_path / name
        commanded(2, *words(place, run_dir, reward, *SETTINGS, *layout))
        found[name] = read(run_dir / "metrics.jsonl")
        assert [line["step"] for line in found[name]] == [1, 2]
        for step, line in enumerate(found[name], 1):
            rows = read(run_dir / "rollouts" / f"step_{step}.jsonl")
            assert sum(line[f"counts/{fate}"] for fate in FATES) == len(rows)
            kept = {row["group"] for row in rows if row["dropped"] is None}
            assert len(kept) == 4 and line["counts/filtered"] > 0
            assert all(row["prompt_index"] % 2 for row in rows if row["group"] in kept)
            answers = [tuple(row["completion_ids"]) for row in rows]
            assert len(set(answers)) > len(answers) / 2, "batches repeat each other"
            assert line["rollout_corr/max_abs_logprob_diff"] < 1e-4
    first = [tmp_path / name / "rollouts" / "step_1.jsonl" for name in ("dp", "tp")]
    assert described(read(first[0])) == described(read(first[1]))
    assert any(line["counts/generated"] > 16 for line in found["dp"]), "nothing was refilled"
    for metric, value in numbers(found["dp"][0]).items():
        bound = 2e-5 if metric.startswith("rollout_corr/") else 2e-6
        assert found["tp"][0][metric] == pytest.approx(value, rel=1e-5, abs=bound), metric
    for name in ("dp", "tp"):
        again = tmp_path / f"{name}_again"
        commanded(2, "--replay", f"{tmp_path}/{name}/rollouts", f"trainer.run_dir={again}")
        for line, want in zip(read(again / "metrics.jsonl"), found[name], strict=True):
            assert numbers(line) == numbers(want), name
