"""Packing against a plain loop, and the plan's promises."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.data.packing import DUMMY_SEQUENCE, pack, plan_micro_batches, unpack
from megagrpo.types import MicroBatch
from tests.pool import run_ranks

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
SEQUENCES = st.lists(
    st.tuples(IDS, st.lists(st.integers(0, 9), max_size=5)), min_size=1, max_size=7
)


def plainly_packed(sequences: list, numbers: list, multiple: int) -> dict[str, list]:
    """The contract of MicroBatch token by token, without a tensor operation."""
    out: dict[str, list] = {name: [] for name in ("tokens", "labels", "positions", "mask", "value")}
    out["cu_seqlens"] = [0]
    for (prompt, response), row in zip(sequences, numbers, strict=True):
        ids = [*prompt, *response]
        for at, token in enumerate(ids):
            next_is_sampled = len(prompt) <= at + 1 < len(ids)
            out["tokens"].append(token)
            out["labels"].append(ids[at + 1] if at + 1 < len(ids) else 0)
            out["positions"].append(at)
            out["mask"].append(next_is_sampled)
            out["value"].append(row[at + 1 - len(prompt)] if next_is_sampled else 0.0)
        out["cu_seqlens"].append(len(out["tokens"]))
    at = 0
    while len(out["tokens"]) % multiple:
        for name, item in zip(
            ("tokens", "labels", "mask", "value"), (0, 0, False, 0.0), strict=True
        ):
            out[name].append(item)
        out["positions"].append(at)
        at += 1
    if at:
        out["cu_seqlens"].append(len(out["tokens"]))
    return out


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 5))
def test_pack_equals_a_plain_loop_and_unpack_inverts_it(sequences: list, multiple: int) -> None:
    numbers = [[0.25 + at for at in range(len(response))] for _, response in sequences]
    rows = [5 * at for at in range(len(sequences))]
    packed = pack(sequences, {"value": numbers}, rows, multiple)
    expected = plainly_packed(sequences, numbers, multiple)
    for name in ("tokens", "labels", "positions", "mask", "cu_seqlens"):
        assert getattr(packed, name).tolist() == expected[name], name
    assert packed.values["value"].tolist() == expected["value"]
    assert len(packed.rows) == len(packed.cu_seqlens) - 1
    found = unpack(packed.values["value"], packed)
    assert {row: part.tolist() for row, part in found.items()} == dict(
        zip(rows, numbers, strict=True)
    )


def test_dtypes_are_those_of_the_contract() -> None:
    values = {"a": [[0.5]], "b": [torch.tensor([1 / 3], dtype=torch.float64)]}
    packed = pack([((5, 6), (7,))], values, [0])
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == torch.int64
    assert packed.cu_seqlens.dtype == torch.int32 and packed.mask.dtype == torch.bool
    assert packed.values["a"].dtype == torch.float32
    assert packed.values["b"].tolist() == [0.0, 1 / 3, 0.0]


def test_gradient_of_a_response_token_stands_only_where_it_is_predicted() -> None:
    """ADV-32: prompt of 2 tokens, response of 1, A = 1."""
    packed = pack([((5, 6), (7,))], {"advantages": [[1.0]]}, [0])
    logits = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    chosen = torch.log_softmax(logits, -1)[torch.arange(3), packed.labels]
    (-(chosen * packed.values["advantages"])[packed.mask].sum()).backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).nonzero().flatten().tolist() == [1]
    assert int(logits.grad[1].argmin()) == 7  # descent raises the sampled token


def test_mask_follows_the_sampled_length_when_pad_and_eos_are_the_same_id() -> None:
    """ADV-24: pad id = eos id = 0, sampled [5, 0], padded to a longer pack."""
    packed = pack([((3, 0), (5, 0))], {}, [0], pad_to_multiple=8)
    assert packed.mask.tolist() == [False, True, True, False, False, False, False, False]
    assert packed.labels[packed.mask].tolist() == [5, 0]


@pytest.mark.parametrize("eos", [2, 3, 7])
def test_any_end_of_sequence_id_is_trained_on(eos: int) -> None:
    """ADV-25: EOS ids {2, 3, 7}; whichever ended the response belongs to the mask."""
    packed = pack([((1,), (4, eos))], {}, [0])
    assert packed.labels[packed.mask].tolist() == [4, eos]


def test_earlier_assistant_turns_in_the_prompt_are_not_trained_on() -> None:
    """ADV-28: the prompt holds the very ids that the policy then samples again."""
    packed = pack([((1, 8, 9, 2, 1), (8, 9))], {}, [0])
    assert packed.mask.nonzero().flatten().tolist() == [4, 5]


def test_a_dummy_contributes_no_token_and_no_row() -> None:
    packed = pack([DUMMY_SEQUENCE], {"old_logprobs": [()]}, [-1], pad_to_multiple=2)
    assert packed.tokens.tolist() == [0, 0] and not packed.mask.any()
    assert packed.rows == (-1, -1) and unpack(packed.values["old_logprobs"], packed) == {}


def test_lengths_of_ids_and_logprobs_must_agree_by_sample() -> None:
    """LP-17: 5 ids, 4 log-probs."""
    sequences = [((1,), (2,)), ((1,), (2, 3, 4, 5, 6))]
    with pytest.raises(ValueError, match="sample 8: 5 response ids but 4 values of old_logprobs"):
        pack(sequences, {"old_logprobs": [[0.0], [0.0] * 4]}, [3, 8])


@pytest.mark.parametrize(
    ("sequence", "row", "message"),
    [(((), (1,)), 4, "sample 4 has no prompt token"), (((1,), (2,)), -1, "dummy .* 1 response")],
)
def test_sequences_that_cannot_be_packed_are_refused(
    sequence: tuple, row: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack([sequence], {}, [row])


LENGTHS = st.lists(st.integers(1, 30), max_size=40)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(30, 64), st.integers(1, 3))
def test_every_row_is_planned_once_within_budget_and_evenly(
    lengths: list[int], dp: int, budget: int, minimum: int
) -> None:
    plan = plan_micro_batches(lengths, dp, budget, minimum)
    assert plan == plan_micro_batches(lengths, dp, budget, minimum)
    packs = [rows for rank in plan for rows in rank]
    assert len(plan) == dp and len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= minimum
    real = [rows for rows in packs if rows != [-1]]
    assert sorted(row for rows in real for row in rows) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in rows) <= budget for rows in real)
    assert all(rows == sorted(rows) for rows in real)
    # Two packs that fit together on every rank would be a wasted pass.
    least = -(-sum(lengths) // budget)
    assert len(plan[0]) <= max(minimum, 1, -(-(2 * least) // dp))


@pytest.mark.parametrize("budget", [4096, 8192, 16384, 65536])
def test_the_slowest_rank_has_at_most_four_percent_over_the_mean(budget: int) -> None:
    draw = random.Random(0)
    lengths = [draw.randint(500, 2000) for _ in range(512)]
    plan = plan_micro_batches(lengths, 8, budget)
    loads = [sum(lengths[row] for rows in rank for row in rows) for rank in plan]
    assert max(loads) <= 1.04 * sum(lengths) / 8


def test_an_even_spread_that_breaks_the_budget_gives_way_to_a_tight_one() -> None:
    """Longest first to the lightest pack makes 8 and 10 tokens of these; 9 and 9 exist."""
    lengths = [5, 4, 3, 3, 3]
    (packs,) = plan_micro_batches(lengths, 1, 9)
    assert sorted(sum(lengths[row] for row in rows) for rows in packs) == [9, 9]


def test_a_sequence_over_the_budget_is_refused_by_key_length_and_sample() -> None:
    """PAR-12: budget 8, length 9."""
    pattern = "data.max_tokens_per_microbatch=8 is too small for sample 2 with 9 tokens"
    with pytest.raises(ValueError, match=pattern):
        plan_micro_batches([3, 8, 9], 1, 8)


def test_values_come_back_in_input_order_after_balancing() -> None:
    """PAR-23: lengths [7, 1, 5, 3], budget 8; every token carries its row and place."""
    lengths = [7, 1, 5, 3]
    sequences = [((9,), tuple(range(length - 1))) for length in lengths]
    numbers = [[10.0 * row + at for at in range(n - 1)] for row, n in enumerate(lengths)]
    plan = plan_micro_batches(lengths, 1, 8)
    assert len(plan[0]) == 2
    found: dict[int, torch.Tensor] = {}
    for rows in plan[0]:
        packed = pack([sequences[r] for r in rows], {"v": [numbers[r] for r in rows]}, rows)
        found |= unpack(packed.values["v"], packed)
    assert [found[row].tolist() for row in range(4)] == numbers


def masked_score(packed: MicroBatch) -> torch.Tensor:
    """Stands for a loss: depends on tokens, labels, places and values of masked positions only."""
    terms = packed.values["v"].double() * (packed.labels + 1) * (packed.positions + 2)
    return terms[packed.mask].sum()


def one_rank(rank: int, lengths: list[int], dp: int) -> tuple[int, float]:
    """This rank's packs; a collective per pack, as a pipeline or expert layer would have."""
    sequences = [((3,), tuple(range(length - 1))) for length in lengths]
    values = [[0.5 + row] * (length - 1) for row, length in enumerate(lengths)]
    plan = plan_micro_batches(lengths, dp, 8)
    total = torch.zeros((), dtype=torch.float64)
    for rows in plan[rank if dp > 1 else 0]:
        chosen = [DUMMY_SEQUENCE if row < 0 else sequences[row] for row in rows]
        given = [() if row < 0 else values[row] for row in rows]
        score = masked_score(pack(chosen, {"v": given}, rows))
        if dp > 1:
            dist.all_reduce(score)
        total += score
    return len(plan[0]), float(total)


@pytest.mark.parametrize(("lengths", "dp"), [([8, 8, 1, 1], 2), ([8, 7, 5], 4), ([], 2)])
def test_ranks_with_less_work_run_dummies_and_the_sum_stays(lengths: list[int], dp: int) -> None:
    """PAR-11: [8, 8] and [1, 1] on two ranks; PAR-22: 3 sequences on four; and none at all."""
    answers = run_ranks(dp, one_rank, lengths, dp)
    assert len({count for count, _ in answers}) == 1
    _, alone = one_rank(0, lengths, 1)
    assert all(total == alone for _, total in answers)
    assert (alone > 0) == bool(lengths)


def test_128_short_sequences_pack_in_under_two_milliseconds() -> None:
    sequences = [((1, 2, 3, 4, 5, 6), (7, 8, 9, 1))] * 128
    values = {name: [[0.1] * 4] * 128 for name in ("rollout_logprobs", "advantages")}
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        plan_micro_batches([10] * 128, 2, 4096)
        pack(sequences, values, range(128), 2)
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3, f"{best * 1e3:.2f} ms"
