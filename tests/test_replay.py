"""Training on dumped rollouts: the losses of the run that dumped, without an engine."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.cli import main
from megagrpo.config_file import load_config
from megagrpo.rollout.storage import Rollout
from megagrpo.trainer.grpo import train
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.preflight import prepare
from megagrpo.trainer.setup import build_run
from tests.pool import run_ranks
from tests.torch_engine import build, make_place, numbers, weights, words

REWARD = """
def odd_prompts_teach(completion_ids, answer, **columns):
    odd = [int(number) % 2 for number in answer]
    return [float(sum(i) % 3) / 2 if o else 1.0 for i, o in zip(completion_ids, odd)]
"""
SETTINGS = [
    "algorithm.filter_flat_groups=true",
    "algorithm.truncated=mask",
    "rollout.oversample_prompts=1",
    "reference.use=always",
    "algorithm.kl.beta=0.01",
    "data.prompts_per_step=4",
    "data.minibatch_prompts=2",
    "optim.schedule=cosine",
    "optim.warmup_steps=1",
    "trainer.steps=3",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("replay"), eos_token_id=[1, *range(30, 50)])
    (folder / "teach.py").write_text(REWARD)
    return folder


def live(rank: int, settings: list[str]) -> dict[str, Any]:
    run = build(rank, 2, settings)
    train(run)
    return {"lines": run.reporter.lines, "weights": weights(run)}


@pytest.fixture(scope="module")
def dumped(place: Path, tmp_path_factory) -> tuple[Path, list[dict[str, Any]], list[Any]]:
    """A run of two data-parallel ranks that filtered, refilled and masked: its folder, its lines
    and the weights of its ranks."""
    run_dir = tmp_path_factory.mktemp("dumped") / "run"
    reward = f"rewards=[{{path: '{place}/teach.py:odd_prompts_teach', name: score}}]"
    results = run_ranks(2, live, words(place, run_dir, reward, *SETTINGS))
    return run_dir, results[0]["lines"], [result["weights"] for result in results]


def replayed(rank: int, world: int, run_dir: Path, folder: Path, more: list[str]) -> dict[str, Any]:
    """The command's own path; whoever imports vLLM or our wrapper of it fails."""
    sys.modules["vllm"] = None  # type: ignore[assignment]
    sys.modules["megagrpo.rollout.vllm_engine"] = None  # type: ignore[assignment]
    settings = [f"trainer.run_dir={run_dir}", *more]
    config = load_config(str(folder.parent / "config.yaml"), settings)
    run = build_run(prepare(config, rank, world, folder), Phases())
    train(run)
    return weights(run)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_replay_at_the_same_layout_equals_its_run_bit_for_bit(
    dumped: tuple[Path, list[dict[str, Any]], list[Any]], tmp_path: Path
) -> None:
    """Losses, all other metrics that do not tell of time or memory, weights of every rank, and the
    rollouts that the replay dumps in turn."""
    source, want, want_weights = dumped
    kinds = {
        why for step in (1, 2, 3) for why in Rollout.load(step_of(source, step)).dropped.values()
    }
    assert kinds == {"flat", "surplus"} and sum(line["counts/truncated"] for line in want) > 0
    assert any(line["counts/generated"] > 5 * 4 for line in want), "nothing was refilled"
    found = run_ranks(2, replayed, 2, tmp_path / "again", source / "rollouts", [])
    for line, expected in zip(lines(tmp_path / "again"), want, strict=True):
        assert numbers(line) == numbers(expected)
        assert abs(line["actor/loss"]) > 0 and not any(name.startswith("sync/") for name in line)
    for one, other in zip(found, want_weights, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    for step in (1, 2, 3):
        assert step_of(tmp_path / "again", step).read_text() == step_of(source, step).read_text()
    assert (tmp_path / "again" / "checkpoints" / "step_3").is_dir()
    assert (tmp_path / "again" / "report.html").is_file()


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, []), (2, ["parallel.tp=2"]), (2, ["parallel.pp=2"])],
    ids=["one rank", "tp 2", "pp 2"],
)
def test_a_replay_at_another_layout_has_the_same_losses(
    world: int,
    layout: list[str],
    dumped: tuple[Path, list[dict[str, Any]], list[Any]],
    tmp_path: Path,
) -> None:
    """1e-5 relative for what is a number of the update; differences of nearly equal log-probs are
    compared by what float32 leaves of them."""
    source, want, _ = dumped
    run_ranks(world, replayed, world, tmp_path / "run", source / "rollouts", layout)
    for line, expected in zip(lines(tmp_path / "run"), want, strict=True):
        assert numbers(line).keys() == numbers(expected).keys()
        for name, value in numbers(expected).items():
            assert line[name] == pytest.approx(value, rel=1e-5, abs=2e-5), name
        for name in ("actor/loss", "actor/pg_loss"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_a_stopped_replay_resumes(
    dumped: tuple[Path, list[dict[str, Any]], list[Any]], tmp_path: Path
) -> None:
    source, want, want_weights = dumped
    settings = ["trainer.save_every=2"]
    run_ranks(2, replayed, 2, tmp_path / "run", source / "rollouts", settings)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_3")
    found = run_ranks(2, replayed, 2, tmp_path / "run", source / "rollouts", settings)
    assert numbers(lines(tmp_path / "run")[2]) == numbers(want[2])
    for one, other in zip(found, want_weights, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


def step_of(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step_{step}.jsonl"


# What is refused, from the command line


def copied(source: Path, folder: Path) -> Path:
    """Dump and settings of a run, to be spoilt."""
    folder.mkdir()
    shutil.copytree(source / "rollouts", folder / "rollouts")
    shutil.copy(source / "config.yaml", folder / "config.yaml")
    return folder / "rollouts"


def change(path: Path, **fields: Any) -> None:
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | fields), *rest]) + "\n")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`megagrpo train --replay FOLDER words` on one rank: the one line of its refusal."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)

    def call(folder: Path, *more: str) -> str:
        assert main(["train", "--replay", str(folder), *more]) == 2
        said = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
        assert len(said) == 1, said
        return said[0]

    return call


def test_a_replay_never_writes_into_the_run_that_it_reads(
    dumped: tuple[Path, list[dict[str, Any]], list[Any]], refused: Any
) -> None:
    source = dumped[0]
    before = sorted(path.name for path in source.iterdir())
    assert "is the run that --replay" in refused(source / "rollouts")
    odd_spelling = f"trainer.run_dir={source}/rollouts/../"
    assert "is the run that --replay" in refused(source / "rollouts", odd_spelling)
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_missing_step_or_folder_is_named(
    dumped: tuple[Path, list[dict[str, Any]], list[Any]], tmp_path: Path, refused: Any
) -> None:
    folder = copied(dumped[0], tmp_path / "copy")
    (folder / "step_2.jsonl").unlink()
    elsewhere = f"trainer.run_dir={tmp_path}/new"
    assert "step_2.jsonl is missing, the dump goes to step 3" in refused(folder, elsewhere)
    for path in folder.iterdir():
        path.unlink()
    assert "holds no step_N.jsonl" in refused(folder, elsewhere)
    assert "give the run's settings with --config" in refused(tmp_path / "nowhere" / "rollouts")
    settings = ["--config", str(tmp_path / "copy" / "config.yaml"), elsewhere]
    assert "is not a folder" in refused(tmp_path / "nowhere", *settings)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"completion_ids": [98], "rollout_logprobs": [-1.0]},
            "token id 98, the model 98 ids; these rollouts are of another model",
        ),
        ({"prompt_ids": [98]}, "token id 98, the model 98 ids"),
        ({"prompt_ids": ["a"]}, "token id 'a', the model 98 ids"),
        ({"prompt_ids": [5]}, "other token ids than row"),
        ({"prompt_index": 99}, "other token ids than row 99 of data.train"),
        (
            {"completion_ids": [5] * 6, "rollout_logprobs": [-1.0] * 6},
            "6 tokens, over rollout.max_response_tokens=5",
        ),
        ({"completion_ids": [5], "rollout_logprobs": []}, "1 ids, 0 log-probs"),
    ],
)
def test_rollouts_of_another_model_or_data_are_refused(
    fields: dict[str, Any],
    message: str,
    dumped: tuple[Path, list[dict[str, Any]], list[Any]],
    tmp_path: Path,
    refused: Any,
) -> None:
    folder = copied(dumped[0], tmp_path / "copy")
    change(folder / "step_1.jsonl", **fields)
    assert message in refused(folder, f"trainer.run_dir={tmp_path}/new")
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_no_rollout_names_its_line(
    dumped: tuple[Path, list[dict[str, Any]], list[Any]], tmp_path: Path, refused: Any
) -> None:
    folder = copied(dumped[0], tmp_path / "copy")
    (folder / "step_1.jsonl").write_text('{"group": 0}\n')
    said = refused(folder, f"trainer.run_dir={tmp_path}/new")
    assert "step_1.jsonl:1: not a dumped sample" in said


def test_a_step_that_goes_bad_in_the_middle_ends_the_replay_by_its_name(
    dumped: tuple[Path, list[dict[str, Any]], list[Any]], tmp_path: Path
) -> None:
    folder = copied(dumped[0], tmp_path / "copy")
    change(folder / "step_2.jsonl", prompt_ids=[98])

    def act(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            replayed(rank, 1, tmp_path / "run", folder, [])
        return str(caught.value)

    (said,) = run_ranks(1, act)
    assert "step_2.jsonl: sample 0 of group 0 has token id 98" in said
    assert [line["step"] for line in lines(tmp_path / "run")] == [1]


def test_fewer_steps_than_were_dumped_are_refused(
    dumped: tuple[Path, list[dict[str, Any]], list[Any]], tmp_path: Path, refused: Any
) -> None:
    said = refused(dumped[0] / "rollouts", f"trainer.run_dir={tmp_path}/new", "trainer.steps=2")
    assert "trainer.steps=2 is below the 3 dumped steps" in said
