"""Warnings inside whole runs: said once by rank 0, not again after a resume, kept in the report."""

from pathlib import Path
from typing import Any

import pytest

from megagrpo import log
from megagrpo.metrics.health import ADVICE
from megagrpo.trainer.grpo import train
from tests.pool import run_ranks
from tests.torch_engine import build, make_place, words


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("health"))


def warnings_of(place: Path, run_dir: Path, *more: str) -> list[list[str]]:
    """What each of two ranks warned about."""
    overrides = words(place, run_dir, "health.window=2", "health.span=2", *more)

    def act(rank: int) -> list[str]:
        said: list[str] = []

        def keep(message: str, **options: Any) -> None:
            said.append(message)

        log.warn = keep  # type: ignore[assignment]  # in this forked rank only
        train(build(rank, 2, overrides))
        return said

    return run_ranks(2, act)


def test_a_warning_is_said_once_and_not_again_after_a_resume(place: Path, tmp_path: Path) -> None:
    """No gradient norm is below 0: the condition holds from the second step to the end."""
    run_dir = tmp_path / "run"
    limits = ["health.grad_norm=0", "trainer.steps=3"]
    first, other = warnings_of(place, run_dir, *limits)
    (line,) = first
    assert "(health.grad_norm=0)" in line and ADVICE["grad_norm"] in line and other == []
    assert warnings_of(place, run_dir, "health.grad_norm=0", "trainer.steps=5") == [[], []]
    page = (run_dir / "report.html").read_text()
    assert "steps 2 to the last" in page and ADVICE["grad_norm"] in page


def test_thresholds_that_are_not_reached_or_off_say_nothing(place: Path, tmp_path: Path) -> None:
    for name, limit in (("high", "1e6"), ("off", "null")):
        limits = [f"health.grad_norm={limit}", "health.flat_share=null", "trainer.steps=3"]
        assert warnings_of(place, tmp_path / name, *limits) == [[], []]
