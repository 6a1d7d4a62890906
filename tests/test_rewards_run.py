"""Rewards in whole runs: a cap on the failed share, isolated workers, messages, repetition."""

from pathlib import Path
from typing import Any

import pytest

from megagrpo.rewards.entries import check_failed_share
from megagrpo.trainer.grpo import train
from megagrpo.types import Completion, Prompt, Sample
from tests.pool import run_ranks
from tests.torch_engine import build, make_place, words


def sample(failed: bool) -> Sample:
    return Sample(Prompt(0, (1,), "p", {}), 0, 0, Completion((1,), (0.0,), True), "", failed=failed)


def test_more_failed_samples_than_allowed_end_the_run_with_key_value_and_first_traceback() -> None:
    """PROC-8: the line names what was counted, the key, its value, and the first failure."""
    asked = []

    def tracebacks() -> list[dict[str, str]]:
        asked.append(1)
        return [{}, {"judge": "raised\nKeyError: 'gold'"}, {"other": "raised\nlater"}]

    half = [sample(failed) for failed in (True, False, True, False)]
    check_failed_share(half, 0.5, tracebacks)
    check_failed_share([], 0.0, tracebacks)
    check_failed_share([sample(True)] * 3, 1.0, tracebacks)
    assert not asked, "every rank agrees without a word"
    with pytest.raises(RuntimeError) as caught:
        check_failed_share([*half, sample(True)], 0.5, tracebacks)
    said = " ".join(str(caught.value).split())
    assert said.startswith("3 of 5 samples failed, over rollout.max_failed_share=0.5;")
    assert said.endswith("first failure: reward 'judge' raised KeyError: 'gold'")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


def test_a_run_whose_reward_always_fails_stops_on_every_rank_with_its_traceback(
    place: Path, tmp_path: Path
) -> None:
    """PROC-8: two ranks, one engine replica of two: only one of them has seen the traceback."""
    overrides = words(place, tmp_path / "run", "rollout.tp=2", reward="broken")

    def act(rank: int) -> str:
        run = build(rank, 2, overrides)
        try:
            train(run)
        except RuntimeError as error:
            return " ".join(str(error).split())
        return "trained"

    for said in run_ranks(2, act):
        assert "16 of 16 samples failed, over rollout.max_failed_share=0.5" in said
        assert "first failure: reward 'score' raised Traceback" in said


SEEN = '''
import os

def seen(prompts, completions, messages, **columns):
    """1 where the prompt column is what was rendered, from a process that is no rank."""
    assert os.getpid() != int(columns["trainer"][0])
    return [float(p == m) for p, m in zip(prompts, messages)]
'''


def test_an_isolated_reward_of_a_run_sees_the_prompt_as_it_stands_in_the_file(
    place: Path, tmp_path: Path
) -> None:
    """And the metrics of the step hold what rewards and repetition left."""
    (tmp_path / "seen.py").write_text(SEEN)

    def act(rank: int) -> list[dict[str, Any]]:
        import os

        entry = f"{{path: '{tmp_path}/seen.py:seen', isolate: true, kwargs: "
        entry += f"{{trainer: ['{os.getpid()}']}}}}"
        more = [f"rewards=[{entry}]", "trainer.steps=1"]
        run = build(rank, 1, words(place, tmp_path / "run", *more))
        train(run)
        return run.reporter.lines

    ((line, *_),) = run_ranks(1, act)
    assert line["reward/mean"] == 1.0 and line["reward/errors"] == 0.0
    assert line["reward/workers_replaced"] == 0.0
    assert 0.0 <= line["rollout/repetition_share"] <= 1.0
