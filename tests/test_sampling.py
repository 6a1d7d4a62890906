"""How a step is filled: flat groups, refills, spare prompts, cut samples, draws of like length.

No engine and no model: groups are made up, and every decision is compared with counting by hand.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algo.losses import LossCounts
from megagrpo.config import DataConfig, TrainerConfig
from megagrpo.data.sampler import PromptSampler
from megagrpo.metrics.records import FATES, render, rollout_metrics, selection_metrics
from megagrpo.metrics.report_data import Run
from megagrpo.metrics.report_tables import health
from megagrpo.rollout.refill import NotEnoughGroups, Refill
from megagrpo.rollout.storage import FAILED, FLAT, SURPLUS, Rollout
from megagrpo.trainer.accounts import fates, groups_with_a_rating, groups_with_signal
from megagrpo.trainer.batch import AdvantageSettings, CutSettings, make_batch, sample_advantages
from megagrpo.trainer.length import run_length
from megagrpo.types import Completion, Prompt, Sample

KEEP = AdvantageSettings("std", "mean", None)
MASK = replace(KEEP, truncated="mask")
CUT = CutSettings(minibatch_prompts=2, max_tokens=1000, min_packs=1, max_response_tokens=100)


def sample(
    group: int,
    member: int,
    reward: float | None,
    *,
    failed: bool = False,
    stopped: bool = True,
    length: int = 3,
) -> Sample:
    ids = tuple(range(1, 1 + length))
    completion = Completion(ids, (-0.5,) * length, stopped)
    prompt = Prompt(group, (7, 8), "p", {})
    value = None if failed else reward
    return Sample(prompt, group, member, completion, "t", {"r": value}, value, failed)


def group_of(group: int, rewards: Sequence[float | None]) -> list[Sample]:
    return [sample(group, member, reward) for member, reward in enumerate(rewards)]


GOOD, POOR = (0.0, 1.0), (1.0, 1.0)


class Engine:
    """Gives the next batch of ready-made groups, numbered as it is told to."""

    def __init__(self, batches: Sequence[Sequence[Sequence[float | None]]]) -> None:
        self.batches = list(batches)
        self.asked: list[tuple[int, int]] = []  # prompts and first group of every call

    def __call__(self, prompts: Sequence[Prompt], first_group: int) -> list[Sample]:
        rewards = self.batches[len(self.asked)]
        self.asked.append((len(prompts), first_group))
        return [s for n, row in enumerate(rewards) for s in group_of(first_group + n, row)]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(number, (7, 8), "p", {}) for number in range(count)]


def usable(per_batch: Sequence[int], size: int = 4) -> list[list[tuple[float, float]]]:
    """Batches of `size` groups, the last `n` of which have a signal."""
    return [[POOR] * (size - n) + [GOOD] * n for n in per_batch]


def fill(refill: Refill, engine: Engine, first: int = 4) -> Rollout:
    return refill.fill(1, prompts(first), lambda: prompts(4), engine)


# Dynamic sampling


def test_flat_groups_are_replaced_batch_by_batch_and_the_accounts_add_up() -> None:
    """ADV-21: 1, 2 and 3 of 4 groups are usable, 4 wanted: generated 12 = trained 4 + filtered 6 +
    surplus 2; the first usable ones in the order of submission are trained."""
    engine = Engine(usable([1, 2, 3]))
    rollout = fill(Refill(4, 3, True, groups_with_signal(KEEP)), engine)
    assert engine.asked == [(4, 0), (4, 4), (4, 8)]
    assert sorted(rollout.groups) == list(range(12))
    assert [s.group for s in rollout.kept[::2]] == [3, 6, 7, 9]
    assert Counter(rollout.dropped.values()) == {FLAT: 6, SURPLUS: 2}
    counts = Counter(fates(rollout, KEEP))
    assert counts == {"trained": 4 * 2, "filtered": 6 * 2, "surplus": 2 * 2}


def test_a_bound_that_is_too_low_is_an_error_that_names_its_key() -> None:
    """ADV-21: bound 2."""
    engine = Engine(usable([1, 2, 3]))
    with pytest.raises(NotEnoughGroups, match=r"3 of 8 .* rollout\.max_num_gen_batches=2 batches"):
        fill(Refill(4, 2, True, groups_with_signal(KEEP)), engine)
    assert len(engine.asked) == 2


def test_no_further_batch_is_generated_once_the_step_is_full() -> None:
    engine = Engine(usable([4]))
    rollout = fill(Refill(4, 10, True, groups_with_signal(KEEP)), engine)
    assert len(engine.asked) == 1 and not rollout.dropped


def test_every_further_batch_is_of_further_prompts() -> None:
    """Not of those again that gave no signal."""
    drawn, asked = iter(range(4, 100, 4)), list[list[int]]()
    engine = Engine(usable([1, 2, 3]))

    def draw_more() -> list[Prompt]:
        start = next(drawn)
        return [replace(one, index=start + one.index) for one in prompts(4)]

    def generate(batch: Sequence[Prompt], first_group: int) -> list[Sample]:
        asked.append([prompt.index for prompt in batch])
        return engine(batch, first_group)

    Refill(4, 3, True, groups_with_signal(KEEP)).fill(1, prompts(4), draw_more, generate)
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_flat_is_decided_by_the_spread_in_float64_not_by_the_mean() -> None:
    """ADV-20: (0.5, 0.5) is dropped, (0.5, 0.5001) stays; ADV-8: so is 0.1 seven times; ADV-10 and
    ADV-5: single and unrated groups have no signal."""
    rows: list[list[float | None]] = [
        [0.5, 0.5],
        [0.5, 0.5001],
        [0.1] * 7,
        [3.0, None],
        [None, None],
        [1.0, 1.0 + 1e-7],
    ]
    samples = [s for group, row in enumerate(rows) for s in group_of(group, row)]
    assert groups_with_signal(KEEP)(samples) == {1, 5}
    assert groups_with_a_rating(KEEP)(samples) == {0, 1, 2, 3, 5}


def test_a_group_is_judged_without_its_cut_samples_where_those_are_masked() -> None:
    cut = [sample(0, 0, 1.0), sample(0, 1, 1.0), sample(0, 2, 0.0, stopped=False)]
    assert groups_with_signal(KEEP)(cut) == {0}
    assert groups_with_signal(MASK)(cut) == set()


def test_dropped_groups_leave_tokens_sequences_and_the_cut_into_optimizer_steps() -> None:
    """Rule 4: N and B count the trained groups alone; two groups make an optimizer step whatever
    their numbers are."""
    engine = Engine([[POOR, GOOD, POOR, GOOD], [GOOD, POOR, GOOD, GOOD]])
    rollout = fill(Refill(4, 2, True, groups_with_signal(KEEP)), engine)
    batch = make_batch(rollout.kept, KEEP, CUT, dp=1, dp_rank=0)
    assert [mini.counts.total_sequences for mini in batch.mini_batches] == [4, 4]
    assert [mini.counts.total_tokens for mini in batch.mini_batches] == [12, 12]
    trained = [batch.samples[row].group for m in batch.micro_batches for row in m.rows if row >= 0]
    assert set(trained[:4]) == {1, 3} and set(trained[4:]) == {4, 6}
    assert batch.advantages.zero_variance_count == 0


# Spare prompts


def test_spare_groups_are_taken_in_order_of_submission_and_the_rest_is_surplus() -> None:
    """EVAL-10: 8 groups, 4 wanted; the long answers come first and finish last, and they stay."""
    samples = [sample(g, m, float(m), length=20 - 2 * g) for g in range(8) for m in range(2)]
    refill = Refill(4, 1, False, groups_with_a_rating(KEEP))
    rollout = refill.fill(1, prompts(8), lambda: [], lambda asked, first: samples)
    assert [s.group for s in rollout.kept[::2]] == [0, 1, 2, 3]
    assert Counter(fates(rollout, KEEP)) == {"trained": 8, "surplus": 8}
    found = render(selection_metrics(rollout.samples, rollout.dropped))
    assert found == {"rollout/kept_length_mean": 17.0, "rollout/dropped_length_mean": 9.0}


def test_a_group_whose_samples_all_failed_is_replaced_by_a_spare_one() -> None:
    """ADV-2: one failed group of six, four wanted: a spare one takes its place."""
    rows = {g: (None, None) if g == 1 else GOOD for g in range(6)}
    samples = [replace(s, failed=s.group == 1) for g, row in rows.items() for s in group_of(g, row)]
    refill = Refill(4, 1, False, groups_with_a_rating(KEEP))
    rollout = refill.fill(1, prompts(6), lambda: [], lambda asked, first: samples)
    assert [s.group for s in rollout.kept[::2]] == [0, 2, 3, 4]
    assert rollout.dropped == {1: FAILED, 5: SURPLUS}
    assert Counter(fates(rollout, KEEP)) == {"trained": 8, "failed": 2, "surplus": 2}


def test_without_enough_good_groups_the_step_keeps_its_number_of_groups() -> None:
    refill = Refill(4, 1, False, groups_with_a_rating(KEEP))
    engine = Engine([[(None, None), GOOD, (None, None), (None, None), (None, None)]])
    rollout = fill(refill, engine, first=5)
    assert [s.group for s in rollout.kept[::2]] == [0, 1, 2, 3] and rollout.dropped == {4: FAILED}


def test_a_short_last_draw_is_wanted_whole() -> None:
    """EVAL-7: 4 wanted, the epoch has 3 prompts left and nothing refills."""
    rollout = fill(Refill(4, 1, False, groups_with_a_rating(KEEP)), Engine(usable([3], 3)), first=3)
    assert len(rollout.groups) == 3 and not rollout.dropped


# Cut samples


def test_a_cut_sample_leaves_statistics_tokens_and_sequences_where_it_is_masked() -> None:
    """ADV-26: a cut sample of 100 tokens and one of 2 that ended: N = 2, B = 1. A response whose
    end-of-sequence id is its last allowed token is not cut."""
    long = sample(0, 0, 1.0, stopped=False, length=100)
    pair = [long, sample(0, 1, 0.0, length=2)]
    (mini,) = make_batch(pair, MASK, CUT, dp=1, dp_rank=0).mini_batches
    assert (mini.counts.total_tokens, mini.counts.total_sequences) == (2, 1)
    assert [row for micro in mini.micro_batches for row in micro.rows if row >= 0] == [1]
    ended = [replace(long, completion=replace(long.completion, stopped=True)), pair[1]]
    (mini,) = make_batch(ended, MASK, CUT, dp=1, dp_rank=0).mini_batches
    assert (mini.counts.total_tokens, mini.counts.total_sequences) == (102, 2)
    rewards = [1.0, 1.0, 0.0, 0.0]  # ADV-1's numbers, the row out for being cut
    rows = [sample(0, m, r, stopped=m != 1) for m, r in enumerate(rewards)]
    want = [2 / 3 / (math.sqrt(1 / 3) + 1e-6), 0.0, -1 / 3 / (math.sqrt(1 / 3) + 1e-6)]
    found = sample_advantages(rows, MASK).advantages
    assert found.tolist() == pytest.approx([*want, want[2]], abs=1e-12)
    assert Counter(fates(Rollout(tuple(rows)), MASK)) == {"trained": 3, "truncated": 1}
    assert Counter(fates(Rollout(tuple(rows)), KEEP)) == {"trained": 4}


# Accounts

MEMBERS = st.tuples(
    st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, None, math.nan]),
    st.booleans() | st.just(False),  # failed
    st.booleans() | st.just(True),  # stopped
    st.integers(0, 4),  # tokens
)


@settings(max_examples=150, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.lists(MEMBERS, min_size=2, max_size=2), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    wanted=st.integers(1, 4),
    refills=st.booleans(),
    truncated=st.sampled_from(["keep", "mask"]),
)
def test_accounts_add_up_in_every_case(
    batches: list[list[list[tuple[float | None, bool, bool, int]]]],
    wanted: int,
    refills: bool,
    truncated: str,
) -> None:
    """EVAL-8: generated = trained + filtered + failed + truncated + surplus + buffered, against
    the number of rows that the batch really trains; ADV-11: no two groups share a number."""
    judged = replace(KEEP, truncated=truncated)
    calls = iter(batches)

    def generate(asked: Sequence[Prompt], first: int) -> list[Sample]:
        return [
            sample(
                first + place,
                member,
                None if reward is not None and math.isnan(reward) else reward,
                failed=failed,
                stopped=stopped,
                length=length,
            )
            for place, members in enumerate(next(calls))
            for member, (reward, failed, stopped, length) in enumerate(members)
        ]

    useful = groups_with_signal(judged) if refills else groups_with_a_rating(judged)
    refill = Refill(wanted, len(batches) if refills else 1, refills, useful)
    try:
        rollout = refill.fill(1, prompts(len(batches[0])), lambda: prompts(1), generate)
    except NotEnoughGroups:
        assert refills
        return
    assert len({(s.group, s.member) for s in rollout.samples}) == len(rollout.samples)
    assert all(len(members) == 2 for members in rollout.groups.values())
    found = render(rollout_metrics(rollout.samples, fates(rollout, judged)))
    assert found["counts/generated"] == len(rollout.samples)
    assert sum(found[f"counts/{fate}"] for fate in FATES) == len(rollout.samples)
    assert found["counts/failed"] == sum(s.failed for s in rollout.samples)
    batch = make_batch(rollout.kept, judged, CUT, dp=1, dp_rank=0)
    rows = [row for micro in batch.micro_batches for row in micro.rows if row >= 0]
    assert len(rows) == len(set(rows)) == found["counts/trained"]
    assert sum(mini.counts.total_sequences for mini in batch.mini_batches) == len(rows)
    kept = {s.group for s in rollout.kept}
    assert len(kept) == (wanted if refills else min(wanted, len(batches[0])))
    if refills:
        assert batch.advantages.zero_variance_count == batch.advantages.singleton_count == 0


def test_the_report_shows_the_accounts_of_a_run_that_left_samples_out() -> None:
    def page(**counts: float) -> str:
        line = {"step": 1, **{f"counts/{fate}": 0.0 for fate in FATES}}
        line |= {f"counts/{name}": value for name, value in counts.items()}
        return " ".join(health(Run("run", [line, {**line, "step": 2}], 0, {}, None)))

    said = "24 samples generated = 8 trained + 12 filtered + 4 surplus"
    assert said in page(generated=12, trained=4, filtered=6, surplus=2)
    assert "generated =" not in page(generated=12, trained=12)


# The store


def test_the_store_appends_filters_and_shuffles_whole_groups() -> None:
    one = Rollout(tuple(group_of(4, GOOD) + group_of(9, POOR)))
    two = Rollout(tuple(group_of(4, POOR) + group_of(2, GOOD)), {2: SURPLUS})
    both = one.append(two)
    assert [s.group for s in both.samples] == [4, 4, 9, 9, 10, 10, 11, 11]
    assert both.dropped == {11: SURPLUS}
    filtered = both.filter(lambda members: members[0].reward != members[1].reward)
    assert filtered.dropped == {9: FLAT, 10: FLAT, 11: SURPLUS}
    assert [s.group for s in filtered.kept] == [4, 4]
    assert both.dropped == {11: SURPLUS}, "the first one stays as it was"
    many = Rollout(tuple(s for g in range(10) for s in group_of(g, GOOD)))
    shuffled = many.shuffle(3)
    assert shuffled == many.shuffle(3) != many.shuffle(4)
    order = [s.group for s in shuffled.samples]
    assert order != sorted(order) and sorted(order) == [s.group for s in many.samples]
    assert [s.member for s in shuffled.samples] == [0, 1] * 10


def test_optimizer_steps_follow_the_order_of_a_shuffled_store() -> None:
    groups = Rollout(tuple(s for g in range(4) for s in group_of(g, GOOD))).shuffle(1)
    order = [s.group for s in groups.samples[::2]]
    assert order != [0, 1, 2, 3]
    batch = make_batch(groups.kept, KEEP, CUT, dp=1, dp_rank=0)
    first = [groups.kept[r].group for m in batch.mini_batches[0].micro_batches for r in m.rows]
    assert set(first) == set(order[:2])


# Order of prompts


def draws(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.draw() for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=30),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_draws_of_like_length_are_neighbours_and_hold_every_prompt_once(
    lengths: list[int], per_draw: int, seed: int
) -> None:
    """Whole draws are windows of the sorted lengths without the short draw, so no other cut into
    draws spans less; the short one is last."""
    per_draw = min(per_draw, len(lengths))
    sampler = PromptSampler(len(lengths), per_draw, seed, lengths=lengths)
    for _ in range(2):
        epoch = draws(sampler, sampler.steps_per_epoch)
        assert sorted(n for draw in epoch for n in draw) == list(range(len(lengths)))
        assert all(len(draw) == per_draw for draw in epoch[:-1])
        whole = [draw for draw in epoch if len(draw) == per_draw]
        flat = sorted(lengths[n] for draw in whole for n in draw)
        windows = [flat[at : at + per_draw] for at in range(0, len(flat), per_draw)]
        assert sorted(sorted(lengths[n] for n in draw) for draw in whole) == windows
        (short,) = [[lengths[n] for n in draw] for draw in epoch if draw not in whole] or [[]]
        between = sorted(lengths)
        assert not short or any(
            sorted(short) == between[at : at + len(short)] for at in range(len(between))
        ), "the short draw is no window of the sorted lengths"


def test_draws_of_like_length_come_in_another_order_every_epoch_and_seed() -> None:
    lengths = list(range(1, 41))
    first = PromptSampler(40, 4, 0, lengths=lengths)
    one, two = draws(first, 10), draws(first, 10)
    other = draws(PromptSampler(40, 4, 1, lengths=lengths), 10)
    assert one != two and one != other
    assert one != sorted(one), "steps in order of length would be a curriculum"
    assert sorted(map(sorted, one)) == sorted(map(sorted, two)) == sorted(map(sorted, other))


def test_prompts_of_one_length_meet_others_in_every_epoch() -> None:
    sampler = PromptSampler(32, 4, 0, lengths=[5] * 32)
    one, two = draws(sampler, 8), draws(sampler, 8)
    assert {frozenset(draw) for draw in one} != {frozenset(draw) for draw in two}


def test_the_short_draw_is_not_always_of_the_longest_prompts() -> None:
    sampler = PromptSampler(10, 4, 0, lengths=list(range(10)))
    lasts = {tuple(sorted(draws(sampler, 3)[-1])) for _ in range(20)}
    assert lasts == {(0, 1), (4, 5), (8, 9)}


def test_draws_of_like_length_resume_anywhere_and_leave_other_random_numbers_alone() -> None:
    """CKPT-10, with the bucketed order; refused where the setting or the draw's size changed."""
    lengths = [random.Random(3).randrange(1, 20) for _ in range(23)]
    before = torch.get_rng_state()
    straight = draws(PromptSampler(23, 5, 7, lengths=lengths), 12)
    for stop in range(11):
        first = PromptSampler(23, 5, 7, lengths=lengths)
        drawn = draws(first, stop)
        resumed = PromptSampler(23, 5, 7, lengths=lengths)
        resumed.load_state(first.state())
        assert drawn + draws(resumed, 12 - stop) == straight
    assert torch.equal(before, torch.get_rng_state())
    state = PromptSampler(23, 5, 7, lengths=lengths).state()
    for other in (PromptSampler(23, 5, 7), PromptSampler(23, 6, 7, lengths=lengths)):
        with pytest.raises(ValueError, match="data.bucket_by_length"):
            other.load_state(state)
    with pytest.raises(ValueError, match="data.bucket_by_length"):
        PromptSampler(23, 5, 7, lengths=lengths).load_state(PromptSampler(23, 5, 7).state())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 12),
)
def test_the_plan_counts_spare_prompts_and_filled_steps(
    extra: int, per_update: int, factor: int, spare: int, refills: bool, steps: int
) -> None:
    """CFG-15 against counting draw by draw; with refills the responses are the least there can
    be, and every step trains its full number of groups."""
    per_step = per_update * factor
    count = per_step + spare + extra - 1
    data = DataConfig(prompts_per_step=per_step, minibatch_prompts=per_update)
    sampler = PromptSampler(count, per_step + spare, seed=0)
    sizes = [len(sampler.draw()) for _ in range(steps)]
    trained = [per_step if refills else min(per_step, size) for size in sizes]
    plan = run_length(
        data,
        TrainerConfig(steps=steps),
        prompts=count,
        group_size=2,
        spare=spare,
        refills=refills,
    )
    assert plan.responses == 2 * sum(sizes) and plan.rollouts == steps
    assert plan.optimizer_steps == sum(-(-size // per_update) for size in trained)
    assert ("at least" in str(plan)) == refills


def test_a_failed_sample_leaves_its_group_and_the_loss_even_if_it_holds_a_reward() -> None:
    """ADV-2: what failed is not read, whatever stands in its reward."""
    samples = group_of(0, [1.0, 0.0, 5.0])
    samples[2] = replace(samples[2], failed=True)
    alone = sample_advantages(samples[:2], KEEP).advantages.tolist()
    assert sample_advantages(samples, KEEP).advantages.tolist() == [*alone, 0.0]
    mini = make_batch(samples, KEEP, CUT, dp=1, dp_rank=0).mini_batches[0]
    assert (mini.counts.total_tokens, mini.counts.total_sequences) == (6, 2)


def test_a_group_of_cut_samples_alone_counts_as_unrated_where_those_are_masked() -> None:
    cut = [sample(0, member, float(member), stopped=False) for member in range(2)]
    rated = [*cut, *group_of(1, POOR)]
    assert groups_with_a_rating(KEEP)(rated) == {0, 1}
    assert groups_with_a_rating(MASK)(rated) == {1}


def test_prompts_of_an_optimizer_step_are_those_with_a_trained_token() -> None:
    """LOSS-10's denominator of the prompt mean: of three prompts one has no rated sample."""
    samples = [*group_of(0, GOOD), *group_of(1, (None, None)), *group_of(2, GOOD)]
    three = replace(CUT, minibatch_prompts=3)
    assert make_batch(samples, KEEP, three, dp=1, dp_rank=0).mini_batches[0].counts == LossCounts(
        total_tokens=12, total_sequences=4, max_response_length=100, total_prompts=2
    )
