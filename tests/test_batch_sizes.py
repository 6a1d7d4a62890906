"""Batch sizes and layouts as the config says them: units, cuts, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from megagrpo.config_checks import check_layout
from megagrpo.config_file import load_config
from megagrpo.data.packing import DUMMY_ROW
from megagrpo.model import build
from megagrpo.parallel.context import init_parallel
from megagrpo.trainer import scoring
from megagrpo.trainer.batch import AdvantageSettings, CutSettings, make_batch
from megagrpo.trainer.grpo import train
from megagrpo.trainer.preflight import prepare
from megagrpo.types import Completion, Layout, Prompt, Sample
from tests.family_toys import make_toy
from tests.megatron_toys import toy_on_rank
from tests.pool import run_ranks
from tests.torch_engine import build as build_run
from tests.torch_engine import make_place, words

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
AGGREGATIONS += ("seq-mean-token-sum-norm", "prompt-mean")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_place(tmp_path_factory.mktemp("sizes"))


def samples(prompts: int, size: int, length: int = 3) -> list[Sample]:
    return [
        Sample(
            Prompt(group, (7, 8), "p", {}),
            group,
            member,
            Completion((5,) * length, (-0.5,) * length, True),
            "t",
            {},
            float(member),
        )
        for group in range(prompts)
        for member in range(size)
    ]


def trained_rows(batch: Any) -> list[list[list[int]]]:
    """Per optimizer step and pack the samples of one rank, dummies left out."""
    return [
        [[row for row in micro.rows if row != DUMMY_ROW] for micro in mini.micro_batches]
        for mini in batch.mini_batches
    ]


def test_minibatch_prompts_counts_prompts_on_all_ranks_together() -> None:
    """CFG-3: 4 prompts of 2 completions, 4 prompts per optimizer step, DP 2: one step of 8, 4 on
    each rank."""
    cut = CutSettings(4, max_tokens=100, min_packs=1, max_response_tokens=8)
    advantage = AdvantageSettings("std", "mean", None)
    seen = []
    for rank in range(2):
        batch = make_batch(samples(4, 2), advantage, cut, dp=2, dp_rank=rank)
        assert len(batch.mini_batches) == 1
        assert batch.mini_batches[0].counts.total_sequences == 8
        rows = [row for pack in trained_rows(batch)[0] for row in pack]
        assert len(rows) == 4
        seen += rows
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("budget", [5, 10, 20, 21, 100])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_sample_is_packed_once_whatever_the_budget_divides(budget: int, dp: int) -> None:
    """CFG-4: 6 responses of 5 tokens per optimizer step; a budget of 4 of them leaves none out, and
    more ranks than packs get dummies instead of a division by zero."""
    cut = CutSettings(2, max_tokens=budget, min_packs=1, max_response_tokens=8)
    advantage = AdvantageSettings("std", "mean", None)
    packs = [
        trained_rows(make_batch(samples(2, 3), advantage, cut, dp=dp, dp_rank=rank))
        for rank in range(dp)
    ]
    rows = [row for steps in packs for pack in steps[0] for row in pack]
    assert sorted(rows) == list(range(6))
    assert all(5 * len(pack) <= budget for steps in packs for pack in steps[0])
    assert len({len(steps[0]) for steps in packs}) == 1, "ranks would wait for each other"


def test_one_token_budget_cuts_the_scoring_pass_and_the_update_alike(
    place: Path, tmp_path: Path
) -> None:
    """CFG-5: there is one key for both passes, so neither can take the other's."""
    overrides = words(place, tmp_path / "run", "data.max_tokens_per_microbatch=9")

    def act(rank: int) -> tuple[list[int], list[int]]:
        run = build_run(rank, 1, overrides)
        scored: list[int] = []
        stepped: list[int] = []
        forward, update = scoring.forward_logprobs, run.policy._optimizer_step

        def count(chunks: Any, packs: Any, **keywords: Any) -> Any:
            scored.append(len(packs))
            return forward(chunks, packs, **keywords)

        def step(mini: Any, *args: Any, **keywords: Any) -> None:
            stepped.append(len(mini.all_micro_batches))
            update(mini, *args, **keywords)

        scoring.forward_logprobs = count  # in this forked rank only
        run.policy._optimizer_step = step  # type: ignore[method-assign]
        train(run)
        return scored, stepped

    ((scored, stepped),) = run_ranks(1, act)
    assert scored[0] == stepped[0] > 8  # the first step scores; 16 samples, two at most in a pack


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_is_accepted_at_every_layout_that_divides_the_ranks(
    place: Path, tmp_path: Path, aggregation: str
) -> None:
    """CFG-6: only tp x pp has to divide the world."""
    overrides = words(place, tmp_path / "run", f"algorithm.aggregation={aggregation}")
    for world, tp, pp in ((1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (6, 2, 1), (6, 1, 2)):
        config = load_config(None, [*overrides, f"parallel.tp={tp}", f"parallel.pp={pp}"])
        assert check_layout(config, world) == Layout(world, tp=tp, pp=pp)


@pytest.mark.parametrize("key", ["cp", "ep", "etp", "vpp"])
def test_a_parallelism_that_is_not_built_is_refused_by_its_key(
    place: Path, tmp_path: Path, key: str
) -> None:
    """CFG-6, CFG-16."""
    with pytest.raises(ValueError, match=rf"parallel\.{key}=2 is not in this version"):
        load_config(None, words(place, tmp_path / "run", f"parallel.{key}=2"))


def test_a_model_with_experts_does_not_train_and_says_so(place: Path, tmp_path: Path) -> None:
    """CFG-19 and LOSS-28 as refused: no router, frozen or not, reaches the optimizer."""
    make_toy(tmp_path / "moe", "qwen3-moe")
    overrides = words(place, tmp_path / "run", f"model.path={tmp_path}/moe")
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM.*does not train"):
        prepare(load_config(None, overrides), 0, 1)


def test_kernels_that_widen_the_gap_to_the_engine_are_off(place: Path) -> None:
    """CFG-12: fused rotary embedding and fused bias-activation, in float32 and bfloat16."""

    def fused(rank: int) -> list[bool]:
        toy = toy_on_rank(f"{place}/hf", Layout(1), context=init_parallel(Layout(1), seed=1))
        config = build.bare(toy.chunks[0]).config
        return [config.apply_rope_fusion, config.bias_activation_fusion, config.bias_dropout_fusion]

    assert run_ranks(1, fused) == [[False, False, False]]
