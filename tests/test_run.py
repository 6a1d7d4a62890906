"""Whole runs with real megatron-core and real vLLM on gloo ranks: layouts, resume, evaluation.

The ranks are forked from this process, which has imported everything, and call what the command
line calls; `test_cli.py` starts the command line itself.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megagrpo.rollout.vllm_engine  # noqa: F401  (imported once, before ranks are forked)
from megagrpo.config_file import load_config
from megagrpo.metrics.report_tables import meaning
from megagrpo.model.hf_config import read_shape
from megagrpo.trainer import setup
from megagrpo.trainer.grpo import train
from megagrpo.trainer.manifest import newest_checkpoint
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.preflight import prepare
from megagrpo.trainer.setup import build_run
from megagrpo.weights.megatron_io import MegatronSource
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

REWARD = """
def share_of_low_ids(prompts, completions, completion_ids, **columns):
    return [sum(i < 50 for i in ids) / max(len(ids), 1) for ids in completion_ids]
"""


STOP_IDS = [1, *range(40, 48)]  # the tokenizer's and those of generation_config.json


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer shorter than its vocabulary, 12 prompts, a dense reward."""
    folder = tmp_path_factory.mktemp("run")
    make_hf_folder(folder / "hf", "qwen3", with_tokenizer=True, head_dim=32)
    generation = {"eos_token_id": STOP_IDS[1:], "temperature": 0.3, "repetition_penalty": 1.3}
    (folder / "hf" / "generation_config.json").write_text(json.dumps(generation))
    rows = [{"prompt": f"{a},{b}>", "answer": str(max(a, b))} for a in range(3) for b in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (folder / "reward.py").write_text(REWARD)
    return folder


def overrides(place: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        f"model.path={place}/hf",
        f"data.train={place}/train.jsonl",
        f"data.eval={place}/heldout.jsonl",
        f"rewards=[{{path: '{place}/reward.py:share_of_low_ids', name: low}}]",
        f"trainer.run_dir={run_dir}",
        "trainer.steps=2",
        "reference.use=always",
        "rollout.group_size=4",
        "rollout.temperature=0.7",
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


def train_on_rank(rank: int, world: int, words: list[str]) -> None:
    prepared = prepare(load_config(None, words), rank, world)
    train(build_run(prepared, Phases()))


def run(world: int, words: list[str]) -> None:
    run_ranks(world, train_on_rank, world, words, timeout=240)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def rollout_rows(run_dir: Path, step: int) -> list[dict[str, Any]]:
    text = (run_dir / "rollouts" / f"step_{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def expect_documented(run_dir: Path) -> None:
    """Every number of the run has its formula in the table of metrics."""
    names = {name for line in lines(run_dir) for name in line} - {"step", "optimizer_step"}
    assert names and not [name for name in names if not meaning(name)]


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on the machine or the layout."""
    apart = ("timing_s/", "perf/", "memory/", "sync/")
    return {name: value for name, value in line.items() if not name.startswith(apart)}


def model_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    source = MegatronSource(checkpoint, read_shape(checkpoint / "hf"))
    return {
        info.name: source.read(info.name, tuple((0, size) for size in info.shape))
        for info in source.tensors()
    }


OFFLOADED = (2, ["reference.offload=true"])  # with the trainer's state offloaded too, as on a GPU
LAYOUTS = [
    (2, []),
    (2, ["parallel.tp=2"]),
    (2, ["parallel.tp=2", "rollout.tp=2"]),
    (2, ["parallel.pp=2"]),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.recompute=full"]),
    (4, ["parallel.tp=2", "parallel.pp=2", "rollout.tp=2"]),
    OFFLOADED,
]


def test_first_rollout_and_metrics_are_equal_at_every_layout(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design 4.4, 4.6, SYNC-1, SYNC-2, SYNC-27, SYNC-28, SYNC-30, PAR-22, ADV-14; ADV-25 (any of
    nine ids ends an answer); LP-12, LP-14, LP-16, SYNC-26 (temperature 0.7 on both sides,
    whatever the model's generation defaults say)."""
    run(1, overrides(place, tmp_path / "one"))
    expect_documented(tmp_path / "one")
    want, want_rows = lines(tmp_path / "one"), rollout_rows(tmp_path / "one", 1)
    assert [line["step"] for line in want] == [0, 1, 2]
    assert want[1]["reward/std"] > 0.05 and want[1]["actor/grad_norm"] > 0
    assert max(max(row["completion_ids"]) for row in want_rows) < 98, "ids beyond the tokenizer"
    for row in want_rows:
        *inner, last = row["completion_ids"]
        assert row["stopped"] == (last in STOP_IDS) and not set(inner) & set(STOP_IDS), row
    stopped = [row["completion_ids"][-1] for row in want_rows if row["stopped"]]
    assert set(stopped) - {1}, "no answer ended with an id of generation_config.json"
    assert want[1]["response_length/clip_ratio"] == 1 - len(stopped) / 16
    assert want[1]["kl/ref_k3"] < 1e-8 and want[2]["kl/ref_k3"] > 1e-4
    for group in range(4):
        answers = {tuple(r["completion_ids"]) for r in want_rows if r["group"] == group}
        assert len(answers) > 1, "the samples of a group are all the same"
    for number, (world, words) in enumerate(LAYOUTS):
        run_dir = tmp_path / str(number)
        with monkeypatch.context() as patch:
            if (world, words) == OFFLOADED:
                patch.setattr(setup, "_offload", setup.device_offload)
            run(world, overrides(place, run_dir, *words))
        got, rows = lines(run_dir), rollout_rows(run_dir, 1)
        ids = [(r["group"], r["member"], r["prompt"], r["completion_ids"]) for r in rows]
        assert ids == [
            (r["group"], r["member"], r["prompt"], r["completion_ids"]) for r in want_rows
        ], words
        for line, expected in zip(got, want, strict=True):
            assert numbers(line).keys() == numbers(expected).keys(), words
        first = numbers(got[1])
        for name, value in numbers(want[1]).items():
            bound = 2e-5 if name.startswith("rollout_corr/") else 2e-6
            assert first[name] == pytest.approx(value, rel=1e-5, abs=bound), (words, name)
        assert got[1]["rollout_corr/max_abs_logprob_diff"] < 1e-4, words
        assert got[2]["rollout_corr/max_abs_logprob_diff"] < 1e-4, words
        # The weights that generated; the evaluation after the last step syncs version 2.
        assert [line["sync/version"] for line in got[1:]] == [0, 1], words
        assert got[1]["sync/digest"] != got[2]["sync/digest"], words
        parts = ("timing_s/update_weights", "timing_s/reward")
        assert 0 < sum(got[1][part] for part in parts) < got[1]["timing_s/gen"], words
        received = got[1]["sync/bytes_received_max"]
        assert received <= 1.05 * got[1]["sync/lower_bound_bytes"] + 1, words


def test_two_steps_resumed_by_two_equal_four_bit_for_bit(place: Path, tmp_path: Path) -> None:
    """CKPT-1, CKPT-3, CKPT-5, CKPT-10: weights, moments, schedule, data order, rollouts. The
    HuggingFace folders written at the saves are the checkpoints' weights."""
    words = [
        "trainer.steps=4",
        "trainer.save_every=2",
        "trainer.export_hf_every=4",
        "optim.schedule=cosine",
        "optim.warmup_steps=1",
        "data.minibatch_prompts=2",
        "data.prompts_per_step=4",
    ]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(2, overrides(place, straight, *words))
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_4")
    for step in (3, 4):
        (resumed / "rollouts" / f"step_{step}.jsonl").unlink()
    run(2, overrides(place, resumed, *words))
    assert [line["step"] for line in lines(resumed)] == [0, 1, 2, 3, 4]
    for line, want in zip(lines(resumed), lines(straight), strict=True):
        assert numbers(line) == numbers(want)
        assert line.get("sync/digest") == want.get("sync/digest")
    for step in (1, 2, 3, 4):
        assert rollout_rows(resumed, step) == rollout_rows(straight, step)
    end = newest_checkpoint(resumed / "checkpoints")
    assert end is not None and end.name == "step_4"
    got, want_tensors = model_tensors(end), model_tensors(straight / "checkpoints" / "step_4")
    assert got.keys() == want_tensors.keys()
    for name, value in want_tensors.items():
        assert torch.equal(got[name], value), name
    assert [path.name for path in (resumed / "hf").iterdir()] == ["step_4"]
    exported = load_file(resumed / "hf" / "step_4" / "model.safetensors")
    assert exported.keys() == want_tensors.keys()
    assert all(torch.equal(exported[name], value) for name, value in want_tensors.items())
    assert (resumed / "hf" / "step_4" / "tokenizer.json").is_file()
    optimizer = optimizer_tensors(end)
    for name, value in optimizer_tensors(straight / "checkpoints" / "step_4").items():
        assert torch.equal(optimizer[name], value), name


def optimizer_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Moments and masters of a checkpoint, read by torch's own reader."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith("optimizer")
    }
    assert wanted, "the checkpoint holds no optimizer state"
    load(wanted, storage_reader=FileSystemReader(str(checkpoint)), no_dist=True)
    return wanted
