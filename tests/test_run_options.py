"""Options of the update in whole runs: several passes, moving KL coefficients, cold start; what a
checkpoint must keep of them, and which settings contradict each other.

Real megatron-core; the engine is plain transformers (tests/torch_engine.py).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megagrpo.config_file import load_config
from megagrpo.trainer import manifest
from megagrpo.trainer.grpo import train
from megagrpo.trainer.preflight import prepare
from megagrpo.trainer.run import Run
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder
from tests.torch_engine import build, make_place, numbers, words

LOUD = ["algorithm.mismatch.warn=9", "algorithm.mismatch.stop=10"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("options"))
    rows = [{"prompt": f"{n}>", "answer": str(n), "answer_text": str(n)} for n in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [{"prompt": f"{n}{n}>", "answer": "", "solution": f"{n}{n}"} for n in range(5)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    return folder


def lines_of(world: int, overrides: list[str]) -> list[dict[str, Any]]:
    def act(run: Run) -> list[dict[str, float]]:
        train(run)
        return run.reporter.lines

    return run_ranks(world, lambda rank: act(build(rank, world, overrides)))[0]


def test_two_passes_step_twice_as_often_and_drift_in_the_second(
    place: Path, tmp_path: Path
) -> None:
    """num_iterations 2 with two optimizer steps per pass: four a rollout, the plan says so, and the
    second pass is off-policy."""
    options = ["algorithm.num_iterations=2", "data.minibatch_prompts=2", *LOUD]
    overrides = words(place, tmp_path / "run", *options)
    assert prepare(load_config(None, overrides), 0, 1).length.optimizer_steps == 8
    lines = lines_of(1, overrides)
    assert [line["optimizer_step"] for line in lines] == [4, 8]
    assert all(abs(line["actor/ppo_kl"]) > 1e-4 for line in lines)


@pytest.mark.parametrize(
    "controller",
    [
        ["kind=adaptive"],
        ["kind=proportional", "target=1e-4", "horizon=2"],
        ["kind=pid", "target=1e-4", "kp=0.3", "ki=0.2", "kd=0.1"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_moved_kl_coefficient_resumes_bit_for_bit(
    place: Path, tmp_path: Path, controller: list[str], where: str
) -> None:
    """2 + 2 steps give the lines of 4: the controller's memory is in the checkpoint."""
    options = [f"algorithm.kl.controller.{word}" for word in controller]
    options += [f"algorithm.kl.place={where}", "trainer.save_every=2", "trainer.keep_last=9"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    want = lines_of(2, words(place, straight, *options, "trainer.steps=4"))
    betas = [line["actor/kl_coef"] for line in want]
    assert betas[0] == 0.01 and betas[1] != betas[0], betas
    paid = [line.get("reward/kl_paid_mean") for line in want]
    assert (None not in paid[1:] and paid[1] > 0) if where == "reward" else paid == [None] * 4
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_4")
    got = lines_of(2, words(place, resumed, *options, "trainer.steps=4"))
    assert [numbers(line) for line in got] == [numbers(line) for line in want[2:]]


def test_another_controller_does_not_continue_a_checkpoint(place: Path, tmp_path: Path) -> None:
    lines_of(1, words(place, tmp_path / "run", "trainer.steps=1"))
    options = ["algorithm.kl.controller.kind=adaptive", "trainer.steps=2"]
    with pytest.raises(ValueError, match=r"controller\.kind=fixed, now it is adaptive"):
        prepare(load_config(None, words(place, tmp_path / "run", *options)), 0, 1)


def test_a_fixed_kl_coefficient_is_the_config_s_after_a_resume(place: Path, tmp_path: Path) -> None:
    """CKPT-10's kind: config.yaml shows the new beta, so the run must use it."""
    run = tmp_path / "run"
    lines_of(1, words(place, run, "algorithm.kl.beta=0.01", "trainer.steps=1"))
    lines = lines_of(1, words(place, run, "algorithm.kl.beta=0.2", "trainer.steps=2"))
    assert [line["actor/kl_coef"] for line in lines] == [0.2]


def test_a_checkpoint_from_before_moving_coefficients_and_cold_start_is_continued(
    place: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    lines_of(1, words(place, run, "trainer.steps=1"))
    folder = run / "checkpoints" / "step_1"
    state = json.loads((folder / manifest.STATE).read_text())
    del state["kl"], state["cold_start"]
    (folder / manifest.STATE).write_text(json.dumps(state))
    (folder / manifest.MANIFEST).unlink()
    manifest.write_manifest(folder)
    assert [line["step"] for line in lines_of(1, words(place, run, "trainer.steps=2"))] == [2]


def test_answers_of_another_number_do_not_continue_a_checkpoint(
    place: Path, tmp_path: Path
) -> None:
    """Said before any process group, as of the prompts."""
    shown = tmp_path / "shown.jsonl"
    shown.write_text((place / "shown.jsonl").read_text())
    options = [f"algorithm.cold_start.{word}" for word in ("weight=1", "steps=9", f"data={shown}")]
    options.append("algorithm.cold_start.column=solution")
    lines_of(1, words(place, tmp_path / "run", *options, "trainer.steps=1"))
    shown.write_text("".join(shown.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(ValueError, match=r"prompts in algorithm\.cold_start\.data 5, this run 3"):
        prepare(load_config(None, words(place, tmp_path / "run", *options)), 0, 1)


def test_cold_start_imitates_less_and_less_and_then_not_at_all(place: Path, tmp_path: Path) -> None:
    """The weight falls linearly to exactly 0, after which the step is that of plain GRPO."""
    options = ["algorithm.cold_start.weight=0.5", "algorithm.cold_start.steps=2"]
    lines = lines_of(1, words(place, tmp_path / "run", *options, "trainer.steps=3"))
    assert [line.get("actor/bc_coef") for line in lines] == [0.5, 0.25, None]
    for line in lines[:2]:
        parts = line["actor/pg_loss"] + line["actor/bc_coef"] * line["actor/bc_loss"]
        assert line["actor/loss"] == pytest.approx(parts, rel=1e-6)
    assert lines[1]["actor/bc_loss"] < lines[0]["actor/bc_loss"], "imitation teaches"
    assert lines[2]["actor/loss"] == lines[2]["actor/pg_loss"]


def test_cold_start_teaches_where_no_reward_is_ever_given(place: Path, tmp_path: Path) -> None:
    """Without a rated sample plain GRPO skips the step; with answers to imitate it is taken."""
    options = ["algorithm.cold_start.weight=1", "algorithm.cold_start.steps=9"]
    overrides = words(place, tmp_path / "run", *options, "optim.lr=1e-3", reward="unrated")
    lines = lines_of(2, [*overrides, "rollout.max_failed_share=1.0"])
    assert [line["optimizer_step"] for line in lines] == [1, 2]
    assert lines[1]["actor/bc_loss"] < lines[0]["actor/bc_loss"]
    assert all(line["actor/pg_loss"] == 0.0 for line in lines)


def test_answers_of_another_dataset_are_drawn_on_after_a_resume(
    place: Path, tmp_path: Path
) -> None:
    """2 + 2 steps give the lines of 4; five answers, four a step: the draw wraps around."""
    options = [
        "algorithm.cold_start.weight=0.5",
        "algorithm.cold_start.steps=9",
        f"algorithm.cold_start.data={place}/shown.jsonl",
        "algorithm.cold_start.column=solution",
        "trainer.save_every=2",
        "trainer.keep_last=9",
        "trainer.steps=4",
    ]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    want = lines_of(2, words(place, straight, *options))
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_4")
    got = lines_of(2, words(place, resumed, *options))
    assert [numbers(line) for line in got] == [numbers(line) for line in want[2:]]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["kl.controller.kind=adaptive", "kl.beta=0"], "beta=0"),
        (["kl.controller.target=0.1"], "target=0.1 has no effect"),
        (["kl.controller.kind=pid"], "target=None"),
        (["kl.place=reward"], "place=reward has no effect with beta=0"),
        (["kl.place=reward", "kl.beta=0.1", "kl.unbiased=true"], "unbiased=true has no effect"),
        (["kl.unbiased=true"], "unbiased_kl"),
        (["combine=normalize_then_sum"], "has no effect with 1 reward"),
        (["cold_start.weight=0.1"], "needs algorithm.cold_start.steps"),
        (["cold_start.steps=4"], "no effect with cold_start.weight=0"),
        (["cold_start.weight=1", "cold_start.steps=2", "cold_start.column=x"], "no row has a"),
        (["num_iterations=0"], "num_iterations=0 is outside"),
        (["top_entropy_quantile=0"], "top_entropy_quantile=0"),
        (["tau_positive=1.0"], "tau_positive=1.0 has no effect on loss 'grpo'"),
        (["loss=vespo", "gamma_positive=[1]"], "must be two numbers"),
        (["mismatch.warn=0.5"], "warn=0.5 is over algorithm.mismatch.stop=0.001"),
        (["mismatch.warn=0.5", "mismatch.stop=0.4"], "warn=0.5 is over algorithm.mismatch.stop"),
        (["delta=0"], "delta=0 switches the policy term off"),
        (["loss=gspo", "level=token"], "level='token' is not of loss 'gspo'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_settings_without_effect_and_contradictions_are_refused_before_a_start(
    place: Path, tmp_path: Path, options: list[str], complaint: str
) -> None:
    overrides = words(place, tmp_path / "run", *(f"algorithm.{word}" for word in options))
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        prepare(load_config(None, overrides), 0, 1)
    assert not (tmp_path / "run").exists()


def test_rewards_that_all_weigh_nothing_are_refused_and_one_that_is_only_watched_is_not(
    place: Path, tmp_path: Path
) -> None:
    overrides, one = words(place, tmp_path / "run"), "{path: exact_match, weight: 0}"
    with pytest.raises(ValueError, match="rewards: every weight is 0"):
        load_config(None, [*overrides, f"rewards=[{one}]"])
    load_config(None, [*overrides, f"rewards=[{one}, {{path: math_answer}}]"])


@pytest.mark.parametrize(
    ("prompt", "answer", "own", "key"),
    [("z>", "1", False, "data.train"), ("1>", "z", False, "data.train"),
     ("1>", "z", True, "algorithm.cold_start.data")],
)  # fmt: skip
def test_ids_without_a_row_in_the_model_are_refused_in_prompts_and_in_reference_answers(
    tmp_path: Path, prompt: str, answer: str, own: bool, key: str
) -> None:
    """The tokenizer knows 98 ids, the model 64 of them; "z" is 93."""
    place = make_place(tmp_path)
    make_hf_folder(tmp_path / "small", "qwen3", with_tokenizer=True, head_dim=32, vocab_size=64)
    rows = [{"prompt": prompt, "answer": "1", "answer_text": answer}] * 8
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n' * 8)
    data = "algorithm.cold_start.data" if own else "data.train"
    cold = [f"{data}={tmp_path}/odd.jsonl", f"model.path={tmp_path}/small"]
    cold += ["algorithm.cold_start.weight=0.1", "algorithm.cold_start.steps=2"]
    with pytest.raises(ValueError, match=f"{key}: the tokenizer makes id 93, the model has 64"):
        prepare(load_config(None, words(place, tmp_path / "run", *cold)), 0, 1)
