"""Whole runs that drop, refill, over-sample and mask, with a plain engine in vLLM's place.

`test_replay.py` has the run with the real one.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.config_file import load_config
from megagrpo.metrics.records import FATES
from megagrpo.metrics.report_tables import meaning
from megagrpo.rollout.refill import NotEnoughGroups
from megagrpo.trainer.grpo import train
from megagrpo.trainer.preflight import prepare
from megagrpo.trainer.run import Run
from megagrpo.types import Request, Sampling
from tests.pool import run_ranks
from tests.torch_engine import build, make_place, numbers, weights, words

REWARDS = """
def odd_prompts_teach(completions, completion_ids, answer, **columns):
    '''Even prompts are solved by everybody, so their groups are flat.'''
    odd = [int(number) % 2 for number in answer]
    return [float(sum(i) % 3) / 2 if o else 1.0 for i, o in zip(completion_ids, odd)]


def seventh_fails(completions, completion_ids, answer, **columns):
    if answer[0] == "7":
        raise KeyError("no answer")
    return [sum(i < 50 for i in ids) / max(len(ids), 1) for ids in completion_ids]
"""
FILTER = ["algorithm.filter_flat_groups=true", "rollout.max_num_gen_batches=6"]
LAYOUTS = [(1, []), (2, []), (2, ["parallel.tp=2", "rollout.tp=2"])]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("sampling"))
    (folder / "teach.py").write_text(REWARDS)
    return folder


def overrides(place: Path, run_dir: Path, *more: str, reward: str = "odd_prompts_teach") -> Any:
    spec = f"rewards=[{{path: '{place}/teach.py:{reward}', name: score}}]"
    return words(place, run_dir, spec, "data.prompts_per_step=3", *more)


def play(world: int, settings: list[str], act: Callable[[Run], Any], **engine: Any) -> list[Any]:
    return run_ranks(world, lambda rank: act(build(rank, world, settings, **engine)))


def trained(run: Run) -> dict[str, Any]:
    train(run)
    return {
        "lines": run.reporter.lines,
        "asked": run.collector.engine.asked,
        "weights": weights(run),
        "sampler": run.sampler.state(),
    }


def rows(run_dir: Path, step: int) -> list[dict[str, Any]]:
    text = (run_dir / "rollouts" / f"step_{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def expect_accounts(line: dict[str, Any], dumped: list[dict[str, Any]]) -> None:
    """EVAL-8, and the dump says the same of every sample."""
    assert line["counts/generated"] == len(dumped)
    assert sum(line[f"counts/{fate}"] for fate in FATES) == len(dumped)
    for fate in FATES:
        assert line[f"counts/{fate}"] == sum(row["fate"] == fate for row in dumped), fate
    mine = [name for name in line if name.startswith(("counts/", "rollout/"))]
    assert len(mine) > len(FATES) and all(meaning(name) for name in mine)


def test_filtered_steps_are_full_and_equal_at_every_layout(place: Path, tmp_path: Path) -> None:
    """ADV-20, ADV-21, ADV-11, PROC-3, PROC-4: all ranks take the same branch, all batches of a
    step have one set of weights, every request its own seed."""
    settings = [*FILTER, "trainer.steps=3"]
    want: list[dict[str, Any]] = []
    for number, (world, layout) in enumerate(LAYOUTS):
        run_dir = tmp_path / str(number)
        results = play(world, overrides(place, run_dir, *settings, *layout), trained)
        lines = [numbers(line) for line in results[0]["lines"]]
        refilled = 0
        for step, line in enumerate(lines, 1):
            dumped = rows(run_dir, step)
            expect_accounts(line, dumped)
            kept = [row for row in dumped if row["dropped"] is None]
            groups = {row["group"] for row in kept}
            assert len(groups) == 3 and len(kept) == line["counts/trained"] == 12
            assert all(row["prompt_index"] % 2 and row["advantage"] is not None for row in kept)
            for group in groups:
                assert len({row["reward"] for row in kept if row["group"] == group}) > 1
            flat = [row for row in dumped if row["dropped"] == "flat"]
            assert line["counts/filtered"] == len(flat)
            for group in {row["group"] for row in flat}:
                assert len({row["reward"] for row in flat if row["group"] == group}) == 1
            taken = max(groups)
            surplus = {row["group"] for row in dumped if row["dropped"] == "surplus"}
            assert all(group > taken for group in surplus), "not in the order of submission"
            share = len({r["group"] for r in flat}) / len({r["group"] for r in dumped})
            assert line["reward/zero_variance_share"] == pytest.approx(share)
            assert line["advantage/abs_max"] == max(abs(row["advantage"]) for row in kept)
            assert len({row["group"] for row in dumped}) * 4 == len(dumped)
            refilled += len(dumped) > 12 and bool(flat)
        assert refilled, "no step needed a second batch"
        for result in results:
            versions = [version for version, _, _ in result["asked"]]
            assert versions == sorted(versions) and len(versions) > 3 == len(set(versions))
            assert versions == [version for version, _, _ in results[0]["asked"]]
            seeds = [r.seed for _, _, asked in result["asked"] for r in asked]
            assert len(seeds) == len(set(seeds)), "two requests share a seed"
        want = want or lines
        for line, expected in zip(lines, want, strict=True):
            assert line.keys() == expected.keys(), layout
            for name, value in line.items():
                assert value == pytest.approx(expected[name], rel=1e-4, abs=2e-5), (layout, name)


def test_a_bound_reached_ends_the_run_on_all_ranks_and_names_its_key(
    place: Path, tmp_path: Path
) -> None:
    """ADV-21: every group is flat."""

    def act(run: Run) -> tuple[str, int]:
        with pytest.raises(NotEnoughGroups) as caught:
            train(run)
        return str(caught.value), len(run.collector.engine.asked)

    flat = f"rewards=[{{path: '{place}/reward.py:ones'}}]"
    settings = overrides(
        place, tmp_path / "run", *FILTER[:1], "rollout.max_num_gen_batches=2", flat
    )
    for said, asked in play(2, settings, act):
        assert "rollout.max_num_gen_batches=2" in said and "0 of 6 groups" in said and asked == 2


def test_two_filtered_steps_resumed_by_two_equal_four_bit_for_bit(
    place: Path, tmp_path: Path
) -> None:
    """CKPT-10, CKPT-11: the sampler's position after further draws is saved, so the resumed run
    draws, generates, filters and learns what the straight one did; with draws of like length."""
    settings = [*FILTER, "trainer.steps=4", "trainer.save_every=2", "data.bucket_by_length=true"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    (want, _) = play(2, overrides(place, straight, *settings), trained)
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_4")
    (got, _) = play(2, overrides(place, resumed, *settings), trained)
    drawn = [len(rows(straight, step)) // 12 for step in (1, 2, 3, 4)]
    assert sum(drawn[:2]) > 2, "nothing was refilled before the checkpoint"
    assert [line["step"] for line in got["lines"]] == [3, 4]
    for line, expected in zip(got["lines"], want["lines"][2:], strict=True):
        assert numbers(line) == numbers(expected)
    for step in (3, 4):
        assert rows(resumed, step) == rows(straight, step)
    assert got["sampler"] == want["sampler"]
    assert all(torch.equal(value, want["weights"][name]) for name, value in got["weights"].items())
    with pytest.raises(ValueError, match="data.bucket_by_length"):
        prepare(
            load_config(None, overrides(place, resumed, *settings, "data.bucket_by_length=false")),
            0,
            2,
        )


@pytest.mark.parametrize(("world", "layout"), LAYOUTS[1:])
def test_spare_prompts_replace_failed_groups_in_order_of_submission(
    world: int, layout: list[str], place: Path, tmp_path: Path
) -> None:
    """EVAL-10, ADV-2: all 12 prompts are asked, 8 wanted, one fails as a whole; its place goes to
    the next one and three are surplus."""

    def longer_later(request: Request, sampling: Sampling) -> list[int]:
        return [20 + request.seed % 60] * (1 + request.prompt_ids[0] % 4) + [1]

    settings = overrides(
        place,
        tmp_path / "run",
        *layout,
        "data.prompts_per_step=8",
        "rollout.oversample_prompts=4",
        "trainer.steps=1",
        reward="seventh_fails",
    )
    results = play(world, settings, trained, script=longer_later)
    line, dumped = results[0]["lines"][0], rows(tmp_path / "run", 1)
    expect_accounts(line, dumped)
    by_group = {row["group"]: row for row in dumped}
    failed = [group for group, row in by_group.items() if row["prompt_index"] == 7]
    good = [group for group in range(12) if group not in failed]
    kept = sorted(group for group, row in by_group.items() if row["dropped"] is None)
    assert kept == good[:8]
    assert (line["counts/trained"], line["counts/failed"], line["counts/surplus"]) == (32, 4, 12)
    for name, wanted in (("kept", kept), ("dropped", good[8:])):
        lengths = [len(row["completion_ids"]) for row in dumped if row["group"] in wanted]
        assert line[f"rollout/{name}_length_mean"] == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize(("world", "layout"), LAYOUTS[1:])
def test_masked_cut_samples_are_counted_and_not_trained(
    world: int, layout: list[str], place: Path, tmp_path: Path
) -> None:
    """ADV-26 in a run: the limit is 5; an answer whose fifth id ends it is trained."""

    def script(request: Request, sampling: Sampling) -> list[int]:
        return [20 + request.seed // 4 % 60] * 4 + [1 if request.seed % 4 else 30]

    settings = overrides(
        place, tmp_path / "run", *layout, "algorithm.truncated=mask", reward="seventh_fails"
    )
    settings += ["trainer.steps=1", f"rewards=[{{path: '{place}/reward.py:low_ids'}}]"]
    results = play(world, settings, trained, script=script)
    line, dumped = results[0]["lines"][0], rows(tmp_path / "run", 1)
    expect_accounts(line, dumped)
    cut = [row for row in dumped if not row["stopped"]]
    assert cut and all(row["fate"] == "truncated" and row["advantage"] == 0.0 for row in cut)
    assert line["counts/trained"] == 12 - len(cut) and line["counts/truncated"] == len(cut)
    assert line["response_length/clip_ratio"] == pytest.approx(len(cut) / 12)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.max_num_gen_batches=3", "max_num_gen_batches=3 has no effect with .*false"),
        ("algorithm.truncated=drop", "'drop' is not known; use one of keep, mask"),
        ("rollout.oversample_prompts=10", r"=3 \+ rollout.oversample_prompts=10 is more than"),
    ],
)
def test_settings_without_effect_or_out_of_reach_are_refused(
    place: Path, tmp_path: Path, setting: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(load_config(None, overrides(place, tmp_path / "run", setting)), 0, 1)
    assert not (tmp_path / "run").exists()


def test_bucketing_a_draw_of_all_prompts_is_refused(place: Path, tmp_path: Path) -> None:
    more = ["data.bucket_by_length=true", "data.prompts_per_step=12"]
    with pytest.raises(ValueError, match="bucket_by_length=true has no effect: .* all 12 prompts"):
        prepare(load_config(None, overrides(place, tmp_path / "run", *more)), 0, 1)


def test_defaults_of_a_filtered_run_are_in_its_config(place: Path, tmp_path: Path) -> None:
    found = prepare(load_config(None, overrides(place, tmp_path / "run", FILTER[0])), 0, 1)
    assert found.config.rollout.max_num_gen_batches == 10 and "at least" in str(found.length)
    plain = prepare(load_config(None, overrides(place, tmp_path / "run")), 0, 1)
    assert plain.config.rollout.max_num_gen_batches is None
