"""Rules that must hold from the config file to the optimizer, on whole runs without vLLM.

The runs are the product's own (`build_run`, `train`); only the engine is `TorchEngine`, plain
transformers on the weights that the sync delivered, so that it can be bent and questioned.
"""

import copy
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagrpo.algo.corrections import CorrectionSettings
from megagrpo.algo.settings import LossSettings
from megagrpo.config import Config, RewardConfig, known_keys
from megagrpo.config_file import load_config, to_yaml
from megagrpo.data.packing import unpack
from megagrpo.model.build import local_parameters
from megagrpo.model.optimizer import LRSchedule, OptimSettings
from megagrpo.rollout.collect import Draw
from megagrpo.trainer import scoring as scoring_module
from megagrpo.trainer.batch import AdvantageSettings, CutSettings, sample_advantages
from megagrpo.trainer.evaluate import EvaluationSettings
from megagrpo.trainer.grpo import train
from megagrpo.trainer.policy import MismatchStop
from megagrpo.trainer.preflight import prepare
from megagrpo.trainer.run import RolloutSettings, Run
from megagrpo.trainer.scoring import score
from megagrpo.types import Request, Sampling
from tests.pool import run_ranks
from tests.tiny_models import CHARACTERS, make_hf_folder
from tests.torch_engine import AutoModelForCausalLM, build, make_place, numbers, weights, words

TEMPERATURE = 0.6
SAMPLING = Sampling(TEMPERATURE, 6, (1,))
LAYOUTS = [(2, []), (2, ["parallel.tp=2"]), (2, ["parallel.pp=2", "rollout.tp=2"])]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_place(tmp_path_factory.mktemp("rules"))


def play(world: int, overrides: list[str], act: Callable[[Run], Any], **engine: Any) -> list[Any]:
    """`act(run)` on every rank of a run that has been built but not started."""
    return run_ranks(world, lambda rank: act(build(rank, world, overrides, **engine)))


def trained(run: Run) -> dict[str, Any]:
    """Run to the end; what there is to say about it."""
    before = weights(run)
    train(run)
    engine = run.collector.engine
    after = weights(run)
    return {
        "lines": run.reporter.lines,
        "asked": engine.asked,
        "before": before,
        "after": after,
    }


def dumped(run_dir: Path, step: int) -> list[dict[str, Any]]:
    text = (run_dir / "rollouts" / f"step_{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def moved(result: dict[str, Any]) -> bool:
    """Whether any weight of this rank changed by a bit."""
    return any(not torch.equal(v, result["after"][n]) for n, v in result["before"].items())


# Samples on their way from the engine to the loss


def first_batch(run: Run) -> dict[str, Any]:
    """The samples of step 1 and what each packed sequence of this rank trains on."""
    samples = run.roll_out(run.draw(), 1)
    batch = run.compare_groups(samples)
    packed = {}
    for micro in batch.micro_batches:
        bounds = micro.cu_seqlens.tolist()
        labels = unpack(micro.labels, micro)
        for row, start, stop in zip(micro.rows, bounds, bounds[1:], strict=False):
            if row >= 0:
                packed[row] = (micro.tokens[start:stop].tolist(), labels[row].tolist())
    return {"samples": samples, "packed": packed, "dp": run.context.coords.dp}


def echo_with_specials(request: Request, sampling: Sampling) -> list[int]:
    """The prompt's number, then pad and begin-of-sequence, which no text shows, then for every
    second sample a character that spoils the echo, then for most the end."""
    spoilt = [20 + request.seed // 2 % 60] * (request.seed % 2)
    return [*request.prompt_ids[:-1], 0, 2, *spoilt, *[1] * (request.seed % 3 > 0)]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_samples_keep_prompt_reward_and_ids_on_their_way_to_the_loss(
    world: int, layout: list[str], place: Path, tmp_path: Path
) -> None:
    """ADV-14: numbered prompts, reward 1 for an echo. ADV-27: the sampled ids are trained on, not
    those of the text. ADV-24: id 0 within and the end of the sampled length decide the mask."""
    longer = "rollout.max_response_tokens=6"
    overrides = words(place, tmp_path / "run", *layout, longer, reward="echo")
    results = play(world, overrides, first_batch, script=echo_with_specials)
    samples = results[0]["samples"]
    assert len(samples) == 16 and [s.group for s in samples] == [n // 4 for n in range(16)]
    packed: dict[int, Any] = {}
    for result in results:
        assert result["samples"] == samples
        for row, found in result["packed"].items():
            assert packed.setdefault(row, (result["dp"], found)) == (result["dp"], found)
    assert sorted(packed) == list(range(16))
    for row, sample in enumerate(samples):
        prompt, ids = list(sample.prompt.ids), list(sample.completion.ids)
        seed = Draw(0, "train", 1).request_seed(sample.group, sample.member)
        assert ids == echo_with_specials(Request(tuple(prompt), seed), SAMPLING)
        assert sample.text == "".join(CHARACTERS[i - 3] for i in ids if i > 2), sample
        assert sample.reward == float(seed % 2 == 0), sample
        assert sample.completion.stopped == (seed % 3 > 0), sample
        assert packed[row][1] == (prompt + ids, ids)
    assert len({(sample.reward, sample.completion.stopped) for sample in samples}) == 4


def test_any_end_of_sequence_id_ends_and_belongs_to_the_answer(tmp_path: Path) -> None:
    """ADV-25 from generation_config.json to the mask: every id is a stop id, none counts as cut,
    also where it is the last allowed token."""
    place = make_place(tmp_path / "place", eos_token_id=[5, 7])

    def script(request: Request, sampling: Sampling) -> list[int]:
        length = 2 + request.seed % 4  # up to the limit of 5
        return [*[20] * (length - 1), (1, 5, 7)[request.seed % 3]]

    def act(run: Run) -> Any:
        found = first_batch(run)
        return found, run.collector.engine.asked[0][1].stop_ids, trained(run)["lines"][-1]

    ((found, stop_ids, line),) = play(1, words(place, tmp_path / "run"), act, script=script)
    assert set(stop_ids) == {1, 5, 7}
    ends = {sample.completion.ids[-1] for sample in found["samples"]}
    assert ends == {1, 5, 7} and all(sample.completion.stopped for sample in found["samples"])
    for row, sample in enumerate(found["samples"]):
        assert found["packed"][row][1] == list(sample.completion.ids)
    assert line["response_length/clip_ratio"] == 0.0 and line["response_length/max"] == 5


def test_an_empty_answer_counts_in_its_group_and_trains_no_token(
    place: Path, tmp_path: Path
) -> None:
    """ADV-3 and ADV-4: one scalar per sequence, whatever tokens it has; ADV-16's formula by
    python's statistics module."""

    def script(request: Request, sampling: Sampling) -> list[int]:
        return [] if request.seed % 3 == 0 else [10 + request.seed % 80, 60, 1]

    (result,) = play(1, words(place, tmp_path / "run"), trained, script=script)
    for step, line in zip((1, 2), result["lines"], strict=True):
        rows = dumped(tmp_path / "run", step)
        empty = [row for row in rows if not row["completion_ids"]]
        assert empty and line["response_length/min"] == 0
        assert line["counts/trained"] == 16 - len(empty)
        assert line["counts/filtered"] == len(empty)
        for group in range(4):
            members = [row for row in rows if row["group"] == group]
            rewards = [row["reward"] for row in members]
            for row in members:
                spread = statistics.stdev(rewards)
                want = (row["reward"] - statistics.fmean(rewards)) / (spread + 1e-6)
                want = want if max(rewards) > min(rewards) else 0.0
                assert row["advantage"] == pytest.approx(want, abs=1e-12)


def test_advantages_read_neither_tokens_nor_masks(place: Path, tmp_path: Path) -> None:
    """ADV-3: the same rewards with other completions give the same advantages, bit for bit."""
    ((samples,),) = play(
        1, words(place, tmp_path / "run"), lambda run: [run.roll_out(run.draw(), 1)]
    )
    settings = AdvantageSettings("std", "mean", None)
    cut = [
        replace(s, completion=replace(s.completion, ids=s.completion.ids[: n % 3], logprobs=()))
        for n, s in enumerate(samples)
    ]
    want = sample_advantages(samples, settings).advantages
    assert want.abs().max() > 0.5
    assert torch.equal(sample_advantages(cut, settings).advantages, want)


def test_ids_and_log_probs_of_unequal_number_end_the_run_naming_the_sample(
    place: Path, tmp_path: Path
) -> None:
    """LP-17: an engine that loses the last log-prob."""

    def act(run: Run) -> str:
        with pytest.raises(ValueError) as caught:
            train(run)
        return str(caught.value)

    (said,) = play(1, words(place, tmp_path / "run"), act, bend=lambda given: given[:-1])
    assert "sample 0" in said and "5 response ids but 4" in said, said


# Log-probs


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_sampler_old_reference_and_current_share_one_temperature(
    world: int, layout: list[str], place: Path, tmp_path: Path
) -> None:
    """LP-12 at temperature 0.6: engine, old, reference and current agree on the start weights, and
    the entropy is that of the tempered distribution. LP-19: the first ratio is exactly 1."""
    run_dir = tmp_path / "run"
    overrides = words(place, run_dir, "reference.use=always", *layout)
    results = play(world, overrides, trained)
    line = results[0]["lines"][0]
    assert line["rollout_corr/max_abs_logprob_diff"] < 1e-5
    assert line["kl/ref_k3"] < 1e-10 and abs(line["kl/ref_k1"]) < 1e-5
    assert line["actor/ppo_kl"] == 0.0
    assert results[0]["lines"][1]["rollout_corr/max_abs_logprob_diff"] < 1e-5
    assert results[0]["lines"][1]["kl/ref_k3"] > 1e-3
    model = AutoModelForCausalLM.from_pretrained(str(place / "hf"), dtype=torch.float32)
    entropies = []
    for row in dumped(run_dir, 1):
        ids = row["prompt_ids"] + row["completion_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(row["prompt_ids"]) - 1 : -1, :98]
        spread = torch.distributions.Categorical(logits=logits.double() / TEMPERATURE)
        entropies += spread.entropy().tolist()
    assert line["actor/entropy"] == pytest.approx(statistics.fmean(entropies), rel=1e-5)


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize(
    "fault",
    [
        {"raw": True},
        {"bend": lambda given: [*given[1:], given[0]]},
        {"bend": lambda given: [0.0 for _ in given]},
        {"bend": lambda given: [math.nan for _ in given]},
    ],
    ids=["raw", "shifted", "of another id", "nan"],
)
def test_wrong_log_probs_of_the_engine_end_the_run_before_the_optimizer_moves(
    fault: dict[str, Any], patience: int, place: Path, tmp_path: Path
) -> None:
    """LP-14 (raw instead of processed), LP-15, LP-16 (shifted by one); LP-20: the alarm comes
    before the update, at the scored first step as at the second, whose own pass scores old."""

    def act(run: Run) -> tuple[bool, int, int]:
        before = weights(run)
        with pytest.raises(MismatchStop):
            train(run)
        engine = run.collector.engine
        after = {"before": before, "after": weights(run)}
        return moved(after), len(engine.asked), run.policy.optimizer_steps

    overrides = words(place, tmp_path / "run", f"algorithm.mismatch.patience={patience}")
    for has_moved, rollouts, updates in play(2, overrides, act, **fault):
        assert (has_moved, rollouts, updates) == (patience == 2, patience, patience - 1)


def test_the_ratio_is_one_before_the_first_update_whatever_the_cut(
    place: Path, tmp_path: Path
) -> None:
    """LP-19: the same cut gives equal numbers, other packs the same to 1e-5."""

    def act(run: Run) -> tuple[float, float]:
        samples = run.roll_out(run.draw(), 1)
        batches = [run.compare_groups(samples)]
        run.cut = replace(run.cut, max_tokens=11)
        batches.append(run.compare_groups(samples))
        assert len(batches[0].micro_batches) < len(batches[1].micro_batches)
        found = []
        for batch in [batches[0], *batches]:
            by_row: dict[int, torch.Tensor] = {}
            scored = score(run.policy.trainable.chunks, batch, run.policy.scoring)
            for micro, values in zip(batch.micro_batches, scored, strict=True):
                by_row |= unpack(values, micro)
            found.append(torch.cat([by_row[row] for row in sorted(by_row)]))
        return float((found[0] - found[1]).abs().max()), float((found[0] - found[2]).abs().max())

    ((same, other),) = play(1, words(place, tmp_path / "run"), act)
    assert same == 0.0 and 0 <= other < 1e-5


def counted_passes(run: Run) -> tuple[int, dict[str, Any]]:
    """How many log-prob passes without gradient a run makes."""
    passes = 0
    forward = scoring_module.forward_logprobs

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args, **kwargs)

    scoring_module.forward_logprobs = count  # in this forked rank only
    result = trained(run)
    return passes, result


def test_old_log_probs_are_scored_once_per_rollout_unless_one_step_makes_them_its_own(
    place: Path, tmp_path: Path
) -> None:
    """LP-20: two optimizer steps per rollout score once before the first; a single one only at the
    very first step, and then gives the same update, token weights included."""

    def noisy(given: list[float]) -> list[float]:
        return [1.1 * value for value in given]

    quiet = ["algorithm.mismatch.warn=9", "algorithm.mismatch.stop=10", "trainer.steps=3"]
    overrides = words(place, tmp_path / "two", *quiet, "data.minibatch_prompts=2")
    ((passes, two),) = play(1, overrides, counted_passes, bend=noisy)
    assert passes == 3
    assert two["lines"][0]["actor/ppo_kl"] != 0.0, "the second step must not use its own as old"

    def always(run: Run) -> tuple[int, dict[str, Any]]:
        score_old = run.policy.score_old
        run.policy.score_old = lambda batch, step: score_old(batch, 1)  # type: ignore[method-assign]
        return counted_passes(run)

    ((passes, own),) = play(1, words(place, tmp_path / "own", *quiet), counted_passes, bend=noisy)
    assert passes == 1
    ((passes, scored),) = play(1, words(place, tmp_path / "all", *quiet), always, bend=noisy)
    assert passes == 3
    drawn = [value for row in dumped(tmp_path / "own", 1) for value in row["rollout_logprobs"]]
    for result in (two, own):  # both optimizer steps of a rollout count in its metrics
        found = result["lines"][0]["rollout_corr/mean_abs_logprob_diff"]
        assert found == pytest.approx(-statistics.fmean(drawn) / 11, rel=1e-5)
    for line, want in zip(own["lines"], scored["lines"], strict=True):
        assert line["rollout_corr/weight_mean"] > 1.1
        for name, value in numbers(want).items():
            assert line[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, value in scored["after"].items():
        assert torch.allclose(own["after"][name], value, rtol=1e-5, atol=1e-6), name
    assert moved(own)


# Steps without a signal


@pytest.mark.parametrize("layout", [[], ["parallel.pp=2"]])
@pytest.mark.parametrize("reward", ["broken", "unrated"])
def test_a_rollout_without_any_reward_is_skipped_and_counted(
    reward: str, layout: list[str], place: Path, tmp_path: Path
) -> None:
    """LOSS-8 and ADV-2, ADV-5 for a whole rollout: no token is valid on any rank; weights stay, the
    schedule stays. EVAL-9: a held-out pass does not take the rollout's failures along."""
    held_out = [f"data.eval={place}/heldout.jsonl", "eval.every=1", "rollout.max_failed_share=1"]
    overrides = words(place, tmp_path / "run", *layout, *held_out, reward=reward)
    for result in play(2, overrides, trained):
        assert not moved(result)
        lines = result["lines"][1:]
        assert [line["step"] for line in lines] == [1, 2]
        for line in lines:
            assert line["optimizer_step"] == 0 and line["actor/skipped_steps"] == line["step"]
            assert line["counts/trained"] == 0 and "actor/loss" not in line
            failures = 16 if reward == "broken" else 0
            assert line["reward/errors"] == line["counts/failed"] == failures
            assert line["counts/missing_rewards"] == 16 - failures
            assert line["val/heldout/failed"] == 3
            assert all(math.isfinite(value) for value in line.values())


def test_samples_without_a_reward_leave_every_mean_and_the_loss(
    place: Path, tmp_path: Path
) -> None:
    """ADV-2 and ADV-5 in a run: one member of each group failed, one not rated; rewards and
    advantages are those of the other two, and only they are trained on."""
    change = {0: {"failed": True, "reward": None}, 2: {"reward": None}}

    def act(run: Run) -> list[dict[str, float]]:
        collect = run.collector.collect
        run.collector = SimpleNamespace(
            collect=lambda *args: [replace(s, **change.get(s.member, {})) for s in collect(*args)],
            rewards=run.collector.rewards,
        )
        train(run)
        return run.reporter.lines

    (lines,) = play(1, words(place, tmp_path / "run"), act)
    for step, line in zip((1, 2), lines, strict=True):
        rows = dumped(tmp_path / "run", step)
        rated = [row for row in rows if row["member"] in (1, 3)]
        advantages = [row["advantage"] for row in rated]
        assert [row["advantage"] for row in rows if row not in rated] == [0.0] * 8
        assert line["advantage/std"] == pytest.approx(statistics.stdev(advantages), rel=1e-9)
        assert line["advantage/abs_max"] == pytest.approx(max(map(abs, advantages)), rel=1e-9)
        assert line["reward/mean"] == pytest.approx(statistics.fmean(r["reward"] for r in rated))
        assert (line["counts/generated"], line["counts/trained"]) == (16, 8)
        assert (line["counts/failed"], line["counts/filtered"]) == (4, 4)
        assert line["counts/missing_rewards"] == 4


def test_equal_rewards_everywhere_leave_the_policy_alone_and_kl_to_itself(
    place: Path, tmp_path: Path
) -> None:
    """ADV-9: loss, gradients and weights exactly as they were; with KL on, only its term acts."""
    still = ["optim.weight_decay=0", "trainer.steps=2"]
    (result,) = play(1, words(place, tmp_path / "run", *still, reward="ones"), trained)
    for line in result["lines"]:
        assert line["actor/loss"] == 0.0 and line["actor/grad_norm"] == 0.0
        assert line["reward/zero_variance_share"] == 1.0 and line["actor/skipped_steps"] == 0
    assert not moved(result)
    with_kl = [*still, "algorithm.kl.beta=0.1", "algorithm.kl.estimator=k1"]
    (result,) = play(1, words(place, tmp_path / "kl", *with_kl, reward="ones"), trained)
    for line in result["lines"]:
        assert line["actor/pg_loss"] == 0.0 and line["actor/grad_norm"] > 1e-3
        assert line["actor/loss"] == pytest.approx(0.1 * line["actor/kl_loss"], rel=1e-6)
    assert moved(result)


def test_the_learning_rate_follows_finished_optimizer_steps(place: Path, tmp_path: Path) -> None:
    """CKPT-7, CKPT-8 in a run: two optimizer steps per rollout, warm-up of 3, linear to 0 at the
    sixth; a rollout without a reward moves nothing on."""
    schedule = ["optim.schedule=linear", "optim.warmup_steps=3", "trainer.steps=3"]
    overrides = words(place, tmp_path / "run", *schedule, "data.minibatch_prompts=2")

    def act(run: Run) -> list[dict[str, float]]:
        collect, count = run.collector.collect, iter(range(3))

        def sometimes(*args: Any) -> Any:
            samples = collect(*args)
            return [replace(s, reward=None) for s in samples] if next(count) == 1 else samples

        run.collector = SimpleNamespace(collect=sometimes, rewards=run.collector.rewards)
        train(run)
        return run.reporter.lines

    (lines,) = play(1, overrides, act)
    assert [line["optimizer_step"] for line in lines] == [2, 2, 4]
    assert [line["actor/skipped_steps"] for line in lines] == [0, 2, 2]
    assert lines[0]["actor/lr"] == pytest.approx(1e-2 / 3)  # after 1 finished step
    assert "actor/lr" not in lines[1]
    assert lines[2]["actor/lr"] == pytest.approx(1e-2)  # after 3: the end of the warm-up


# Layouts and metrics


def test_every_rank_reports_the_same_numbers_and_every_layout_too(tmp_path: Path) -> None:
    """Rule 16 and design 4.4 over two rollouts of two optimizer steps: metrics are sums and counts,
    reduced once, equal on all ranks and at all layouts. PAR-25: a tied embedding that both ends of
    a pipeline hold, in a vocabulary of 131 rows of which the tokenizer knows 98."""
    place = make_place(tmp_path / "place", "qwen2", tied=True, vocab_size=131)
    more = ["data.minibatch_prompts=2", "algorithm.loss=dapo", "reference.use=always"]
    (want,) = play(1, words(place, tmp_path / "one", *more), trained)
    layouts = [*LAYOUTS, (4, ["parallel.tp=2", "parallel.pp=2"])]
    for number, (world, layout) in enumerate(layouts):
        overrides = words(place, tmp_path / str(number), *more, *layout)
        results = play(world, overrides, trained)
        for result in results:
            got = [numbers(line) for line in result["lines"]]
            assert got == [numbers(line) for line in results[0]["lines"]], layout
        for line, expected in zip(results[0]["lines"], want["lines"], strict=True):
            assert line.keys() == expected.keys()
            for name, value in numbers(expected).items():
                bound = 1e-5 if name.startswith("rollout_corr/") else 3e-6
                assert line[name] == pytest.approx(value, rel=2e-5, abs=bound), (layout, name)
            assert line["sync/version"] == expected["sync/version"]


def test_fewer_sequences_than_ranks_train_as_on_one_rank(place: Path, tmp_path: Path) -> None:
    """PAR-22: 3 sequences on 4 data-parallel ranks; the fourth runs a dummy."""
    few = ["data.prompts_per_step=1", "rollout.group_size=3"]
    (want,) = play(1, words(place, tmp_path / "one", *few), trained)
    results = play(4, words(place, tmp_path / "four", *few), trained)
    assert moved(want)
    for result in results:
        for line, expected in zip(result["lines"], want["lines"], strict=True):
            for name, value in numbers(expected).items():
                assert line[name] == pytest.approx(value, rel=1e-5, abs=3e-6), name
        for name, value in want["after"].items():
            error = float((result["after"][name] - value).abs().max() / value.abs().max())
            assert error < 1e-5, name


# Sync, evaluation, configuration


def test_evaluation_sees_the_newest_weights_and_leaves_training_as_it_was(
    place: Path, tmp_path: Path
) -> None:
    """EVAL-9: greedy single samples held out, then tempered groups in training, the same as without
    any evaluation. SYNC-1, SYNC-2: every rollout has the weights of the steps before it. SYNC-27:
    every request its own seed. CFG-18: the config is what it was."""

    def act(run: Run) -> dict[str, Any]:
        config = run.reporter._prepared.config
        before = copy.deepcopy(config)
        with pytest.raises(FrozenInstanceError):
            config.optim.lr = 1.0
        result = trained(run)
        assert config == before
        assert (run.save_settings.run_dir / "config.yaml").read_text() == to_yaml(before)
        return result

    held_out = [f"data.eval={place}/heldout.jsonl", "eval.every=1", "trainer.steps=3"]
    with_eval = play(2, words(place, tmp_path / "with", *held_out), act)
    without = play(2, words(place, tmp_path / "without", "trainer.steps=3"), act)
    for result, want in zip(with_eval, without, strict=True):
        got = [
            {name: value for name, value in numbers(line).items() if not name.startswith("val/")}
            for line in result["lines"][1:]
        ]
        assert got == [numbers(line) for line in want["lines"]]
        for line, expected in zip(result["lines"][1:], want["lines"], strict=True):
            assert line["sync/version"] == expected["sync/version"] == line["step"] - 1
            assert line["sync/digest"] == expected["sync/digest"]
        assert len({line["sync/digest"] for line in want["lines"]}) == 3
        for name, value in want["after"].items():
            assert torch.equal(result["after"][name], value), name
        kinds = [(v, s.temperature, len(r)) for v, s, r in result["asked"]]
        evaluated = [(step, 0.0) for step in range(4)]
        rolled = [(step, TEMPERATURE) for step in range(3)]
        assert [kind[:2] for kind in kinds if kind[1] == 0.0] == evaluated
        assert [kind[:2] for kind in kinds if kind[1] > 0.0] == rolled
        assert all(count == 8 for _, temperature, count in kinds if temperature > 0)
    seeds = [r.seed for result in with_eval for _, _, asked in result["asked"] for r in asked]
    assert len(set(seeds)) == len(seeds) == 3 * 16 + 4 * 3


def test_a_weight_that_is_not_finite_ends_the_run_on_every_rank(
    place: Path, tmp_path: Path
) -> None:
    """SYNC-25: one NaN on one rank after step 1; no rollout is made of it, the name is said."""

    def act(run: Run) -> tuple[str, int]:
        prompts = run.draw()
        batch = run.policy.score_old(run.compare_groups(run.roll_out(prompts, 1)), 1)
        run.policy.update(batch)
        if run.context.rank == 1:
            named = local_parameters(run.policy.trainable.chunks)
            with torch.no_grad():
                named["decoder.final_layernorm.weight"][3] = math.nan
        with pytest.raises(ValueError, match="not finite") as caught:
            run.roll_out(run.draw(), 2)
        assert run.hybrid.version == 0
        return str(caught.value), len(run.collector.engine.asked)

    for said, rollouts in play(2, words(place, tmp_path / "run", "parallel.tp=2"), act):
        assert "final_layernorm.weight" in said and rollouts == 1


# Keys that only their own check reads: they may hold one value, and any other is refused.
REFUSED = {f"rollout.{name}" for name in ("top_p", "top_k", "min_p")}
REFUSED |= {f"parallel.{name}" for name in ("vpp", "cp", "ep", "etp")}
# Functions that read a key to judge or to write it, not to act on it.
ONLY_LOOK = ("_check", "check_choices", "check_values", "check_required", "to_yaml")


def readers(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """From here on, every function of the package that reads a key, by the key's class and name."""
    seen: dict[str, set[str]] = {}
    for section in [*map(type, _tree(Config())), RewardConfig]:
        plain = section.__getattribute__

        def watched(self: Any, name: str, plain: Any = plain) -> Any:
            frame = sys._getframe(1)
            module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            if module.startswith("megagrpo.") and not function.startswith(ONLY_LOOK):
                seen.setdefault(f"{type(self).__name__}.{name}", set()).add(f"{module}.{function}")
            return plain(self, name)

        monkeypatch.setattr(section, "__getattribute__", watched)
    return seen


def _tree(node: Any) -> list[Any]:
    """The config and all its sections."""
    inner = [value for value in vars(node).values() if hasattr(value, "__dataclass_fields__")]
    return [node, *(found for section in inner for found in _tree(section))]


def test_every_key_is_read_by_what_it_configures(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CFG-2, rule 13: a run with an evaluation and a reference reads every key that exists, checks
    and dumps of the whole tree apart."""
    seen = readers(monkeypatch)
    overrides = words(
        place,
        tmp_path / "run",
        f"data.eval={place}/heldout.jsonl",
        f"reference.path={place}/hf",
        "reference.use=always",
        "trainer.steps=1",
        "log.samples_every=1",
        "algorithm.cold_start.weight=0.1",
        "algorithm.cold_start.steps=2",
        "algorithm.cold_start.column=answer",
    )
    ((_, read),) = run_ranks(1, lambda rank: (train(build(rank, 1, overrides)), seen))
    known = {name: f"{_class_of(name)}.{name.rpartition('.')[2]}" for name in known_keys()}
    unread = {name for name, field in known.items() if field not in read}
    assert unread - REFUSED == {"trainer.epochs"}, "the others are read by no part of a run"
    for name in REFUSED:
        with pytest.raises(ValueError, match=name):
            load_config(None, [*overrides, f"{name}=0.5" if "_p" in name else f"{name}=2"])
    epochs = prepare(load_config(None, [*overrides, "trainer.steps=null"]), 0, 1)
    assert epochs.length.rollouts == 3
    for field in fields(RewardConfig):
        assert f"RewardConfig.{field.name}" in read


def _class_of(name: str) -> str:
    """The class of the section that holds a key."""
    node: Any = Config()
    for part in name.split(".")[:-1]:
        node = getattr(node, part)
    return type(node).__name__


# Each differs from its default and from every other value of its kind.
UNUSUAL = [
    "rollout.group_size=3",
    "rollout.temperature=0.8",
    "rollout.max_prompt_tokens=6",
    "rollout.max_response_tokens=7",
    "rollout.seed=12",
    "rollout.max_num_seqs=9",
    "rollout.kv_cache_gb=0.03",
    "rollout.gpu_memory_utilization=0.35",
    "rollout.max_failed_share=0.95",
    "parallel.timeout_s=77",
    "data.minibatch_prompts=2",
    "data.max_tokens_per_microbatch=41",
    "data.shuffle_seed=13",
    "trainer.seed=11",
    "trainer.steps=6",
    "trainer.save_every=3",
    "trainer.keep_last=5",
    "optim.lr=0.004",
    "optim.min_lr=0.0005",
    "optim.schedule=cosine",
    "optim.warmup_steps=4",
    "optim.weight_decay=0.3",
    "optim.betas=[0.5,0.6]",
    "optim.eps=0.02",
    "optim.grad_clip=0.7",
    "algorithm.loss=dr_grpo",
    "algorithm.aggregation=token-mean",
    "algorithm.eps_low=0.11",
    "algorithm.eps_high=0.12",
    "algorithm.delta=3.5",
    "algorithm.dual_clip=2.5",
    "algorithm.normalize=batch",
    "algorithm.baseline=leave_one_out",
    "algorithm.advantage_clip=0.4",
    "algorithm.kl.beta=0.15",
    "algorithm.kl.estimator=k2",
    "algorithm.correction.mode=token_mask",
    "algorithm.correction.cap=1.7",
    "algorithm.correction.low=0.6",
    "algorithm.mismatch.warn=0.5",
    "algorithm.mismatch.stop=0.9",
    "algorithm.mismatch.patience=4",
    "eval.every=2",
    "eval.at_start=false",
    "eval.samples=2",
    "eval.temperature=0.45",
    "eval.max_prompts=1",
]


def parts(run: Run) -> dict[str, Any]:
    """What the parts of a run were given, as far as it can travel."""
    trainable = run.policy.trainable
    groups = trainable.optimizer.param_groups
    (reward,) = run.collector.rewards.specs
    return {
        "engine": run.collector.engine.settings,
        "cut": run.cut,
        "advantage": run.advantage,
        "rollout": run.rollout,
        "draw": (run.sampler.seed, run.sampler.prompts_per_step, run.steps),
        "save": (run.save_settings.every, run.save_settings.keep_last),
        "loss": run.policy.settings,
        "schedule": run.policy.schedule,
        "optim": trainable.settings,
        "groups": {(tuple(g["betas"]), g["eps"], g["weight_decay"]) for g in groups},
        "sharded": trainable.chunks[0].ddp_config.use_distributed_optimizer,
        "score": (run.policy.scoring.temperature, run.policy.scoring.valid_vocab),
        "reference": (run.reference.scoring.temperature, run.reference.scoring.valid_vocab),
        "evaluation": (len(run.evaluator.prompts), run.evaluator.settings),
        "reward": (reward.name, reward.weight, reward.timeout_s, reward.kwargs),
        "reward_calls": (reward.isolate, reward.workers, reward.retries),
    }


def test_every_value_reaches_the_part_that_it_configures(place: Path, tmp_path: Path) -> None:
    """CFG-2: no value is parsed and then lost, swapped with another or left at its default."""
    reward = f"{{path: '{place}/reward.py:low_ids', name: r, weight: 0.25, timeout_s: 5, "
    reward += "isolate: true, workers: 3, retries: 4}"
    overrides = words(place, tmp_path / "run", *UNUSUAL, f"data.eval={place}/heldout.jsonl")
    overrides += [f"rewards=[{reward}]", "parallel.use_distributed_optimizer=false"]
    overrides += ["parallel.pp=2"]
    got, second = play(2, overrides, parts)
    assert got == second
    engine, loss = got["engine"], got["loss"]
    assert engine.model_folder == f"{place}/hf" and engine.dtype == torch.float32
    assert (engine.max_model_len, engine.max_num_seqs, engine.seed) == (13, 9, 12)
    assert (engine.kv_cache_gb, engine.gpu_memory_utilization) == (0.03, 0.35)
    assert engine.valid_vocab == 98
    assert got["cut"] == CutSettings(2, 41, 2, 7)
    assert got["advantage"] == AdvantageSettings(
        "batch", "leave_one_out", 0.4, weights=(("r", 0.25),)
    )
    assert got["rollout"] == RolloutSettings(Sampling(0.8, 7, (1,)), 3, 12, 0.95)
    assert got["draw"] == (13, 4, 6) and got["save"] == (3, 5)
    objective = loss.objective
    assert (objective.loss, loss.mismatch_warn, loss.mismatch_stop) == ("dr_grpo", 0.5, 0.9)
    assert loss.mismatch_patience == 4
    assert objective.correction == CorrectionSettings("token_mask", 0.6, 1.7)
    assert objective.settings == LossSettings(
        "token-mean",
        eps_low=0.11,
        eps_high=0.12,
        delta=3.5,
        dual_clip=2.5,
        beta=0.15,
        kl_estimator="k2",
        normalize="batch",
    )
    assert got["schedule"] == LRSchedule("cosine", 0.004, 0.0005, 4, 12)
    assert got["optim"] == OptimSettings(0.004, (0.5, 0.6), 0.02, 0.3, 0.7, False)
    assert got["groups"] == {((0.5, 0.6), 0.02, 0.3), ((0.5, 0.6), 0.02, 0.0)}
    assert not got["sharded"]
    assert got["score"] == got["reference"] == (0.8, 98)
    assert got["evaluation"] == (
        1,
        EvaluationSettings("heldout", 2, False, 2, Sampling(0.45, 7, (1,)), 11),
    )
    assert got["reward"] == ("r", 0.25, 5.0, {})
    assert got["reward_calls"] == (True, 3, 4)


def test_a_correction_can_be_switched_off_and_every_mode_has_its_own_bounds(
    place: Path, tmp_path: Path
) -> None:
    """OFF-1's kind in the config: the words of a file reach the loss; CFG-17: null is the mode's
    documented default and stands in the resolved config."""
    want = {"none": (None, None), "token_truncate": (None, 2.0), "token_mask": (0.5, 5.0)}
    for mode, (low, cap) in want.items():
        overrides = words(place, tmp_path / mode, f"algorithm.correction.mode={mode}")
        resolved = prepare(load_config(None, overrides), 0, 1).config.algorithm.correction
        assert (resolved.mode, resolved.low, resolved.cap) == (mode, low, cap)

    def noisy(given: list[float]) -> list[float]:
        return [value - 0.2 for value in given]

    quiet = ["algorithm.mismatch.stop=10", "algorithm.mismatch.warn=9", "trainer.steps=1"]
    for mode, weight in (("none", 1.0), ("token_truncate", math.exp(0.2))):
        more = [*quiet, f"algorithm.correction.mode={mode}"]
        (result,) = play(1, words(place, tmp_path / mode, *more), trained, bend=noisy)
        line = result["lines"][0]
        assert line["rollout_corr/weight_mean"] == pytest.approx(weight, rel=1e-4)
        assert line["rollout_corr/mean_abs_logprob_diff"] == pytest.approx(0.2, rel=1e-4)
    with pytest.raises(ValueError, match="low=3.0, cap=2.0"):
        prepare(load_config(None, words(place, tmp_path, "algorithm.correction.low=3")), 0, 1)


@pytest.mark.parametrize(
    ("shape", "tp", "said"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_key_value_heads=3"),
        ({"num_attention_heads": 4}, 3, "num_key_value_heads=2"),
        ({"intermediate_size": 174}, 4, "intermediate_size=174"),
    ],
)
def test_a_rollout_layout_that_the_model_cannot_have_is_refused_before_the_engine(
    shape: dict[str, int], tp: int, said: str, tmp_path: Path
) -> None:
    """CFG-13 for rollout.tp: both numbers named; vLLM would only say so while it is built."""
    place = make_place(tmp_path)
    make_hf_folder(place / "hf", "qwen3", with_tokenizer=True, **shape)
    overrides = words(place, tmp_path / "run", f"rollout.tp={tp}")
    with pytest.raises(ValueError, match=f"rollout.tp={tp}.*{said}"):
        prepare(load_config(None, overrides), 0, tp)
    assert not (tmp_path / "run").exists()
