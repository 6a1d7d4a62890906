"""What must not change the update: row order, padding, micro-batch cut, ranks, garbage in pads.

Random optimizer steps are cut in random ways; value, gradient and every metric sum of the parts add
up to those of one padded batch that hypothesis never cut.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algo.cold_start import cold_start_loss
from megagrpo.algo.corrections import (
    SumsAndPeaks,
    correction_metrics,
    correction_weights,
    off_policy_keep,
    resolve_correction,
)
from megagrpo.algo.entropy import entropy_threshold, high_entropy_tokens
from megagrpo.algo.kl import kl_sequence_sums
from megagrpo.algo.losses import LossCounts, policy_loss
from megagrpo.algo.settings import AGGREGATIONS, LOSS_DEFAULTS, resolve_loss_defaults

FORMS = sorted(set(AGGREGATIONS.values()))
PER_TOKEN = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy")
GARBAGE = (0.0, math.nan, math.inf, -math.inf, 1e30)


class Step:
    """One optimizer step: rows of trained tokens, prompts, advantages; made from a seed."""

    def __init__(self, lengths, prompts, seed):
        generator = torch.Generator().manual_seed(seed)

        def uniform(low, high, count):
            values = torch.rand(count, generator=generator, dtype=torch.float64)
            return low + (high - low) * values

        self.lengths, self.prompts = lengths, prompts
        self.rows = {}
        for name in PER_TOKEN:
            self.rows[name] = [uniform(-2.0, -0.1, length) for length in lengths]
        self.rows["entropy"] = [-row for row in self.rows["entropy"]]
        self.advantages = uniform(-2.0, 2.0, len(lengths))
        counted = [at for at, length in enumerate(lengths) if length]
        tokens = {
            p: sum(n for n, q in zip(lengths, prompts, strict=True) if q == p) for p in prompts
        }
        self.prompt_tokens = torch.tensor([tokens[p] for p in prompts])
        self.counts = LossCounts(
            total_tokens=sum(lengths),
            total_sequences=len(counted),
            max_response_length=7,
            total_prompts=len({prompts[at] for at in counted}),
        )
        every = torch.cat([row for row in self.rows["entropy"]])
        self.threshold = entropy_threshold(every, 0.5)


def _part(step, rows, leaves, name, loss_settings, correction, pad, garbage):
    """Loss, metric sums and correction stats of some rows, each followed by `pad` masked tokens."""

    def packed(values):
        tail = torch.full((pad,), garbage, dtype=torch.float64)
        return torch.cat([torch.cat([values[row], tail]) for row in rows] or [tail[:0]])

    table = {key: packed(step.rows[key]) for key in PER_TOKEN[1:]}
    current = packed(leaves)
    widths = torch.tensor([step.lengths[row] + pad for row in rows], dtype=torch.int64)
    place = {
        "mask": torch.cat(
            [torch.arange(step.lengths[row] + pad) < step.lengths[row] for row in rows]
            or [torch.zeros(0, dtype=torch.bool)]
        ),
        "sequence": torch.repeat_interleave(torch.arange(len(rows)), widths),
        "num_sequences": len(rows),
    }
    at = torch.tensor(rows, dtype=torch.int64)
    pair = {"rollout_logprobs": table.pop("rollout_logprobs"), "advantages": step.advantages[at]}
    weighing = correction_weights(
        old_logprobs=table["old_logprobs"], settings=correction, **pair, **place
    )
    keep = off_policy_keep(logprobs=current, threshold=0.3, **pair, **place)
    output = policy_loss(
        name=name,
        logprobs=current,
        advantages=step.advantages[at],
        counts=step.counts,
        settings=loss_settings,
        rollout_weights=weighing.weights,
        keep=keep,
        token_keep=high_entropy_tokens(
            entropies=table["entropy"], mask=place["mask"], threshold=step.threshold
        ),
        prompt_tokens=step.prompt_tokens[at],
        **table,
        **place,
    )
    return output.loss, output.sums, weighing.stats


def _cut(step, parts, pad, garbage, *call):
    """Sums over the parts: loss, gradient of every trained token, metric sums, correction stats."""
    leaves = [row.clone().requires_grad_() for row in step.rows["logprobs"]]
    found = [_part(step, rows, leaves, *call, pad, garbage) for rows in parts]
    loss = sum(part[0] for part in found)
    loss.backward()
    grads = [torch.zeros(0) if leaf.grad is None else leaf.grad for leaf in leaves]
    sums = {key: sum(part[1][key].item() for part in found) for key in found[0][1]}
    stats = SumsAndPeaks(
        {key: sum(part[2].sums[key] for part in found) for key in found[0][2].sums},
        {key: max(part[2].peaks[key] for part in found) for key in found[0][2].peaks},
    )
    return loss.item(), torch.cat(grads), sums | correction_metrics(stats)


ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=6)
CALL = st.tuples(ROWS, st.integers(0, 10**6), st.randoms(use_true_random=False))


@pytest.mark.parametrize("name", LOSS_DEFAULTS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    call=CALL, form=st.sampled_from(FORMS), pad=st.integers(0, 3), garbage=st.sampled_from(GARBAGE)
)
def test_any_cut_order_padding_and_garbage_give_the_same_update(name, call, form, pad, garbage):
    """LOSS-1, LOSS-4, LOSS-5, LOSS-7, LOSS-9, LOSS-22; a rank without a row joins with nothing."""
    rows, seed, random = call
    step = Step([length for length, _ in rows], [prompt for _, prompt in rows], seed)
    mode = "token_mask" if name == "vespo" else random.choice(["token_truncate", "sequence_mask"])
    loss_settings = resolve_loss_defaults(
        name,
        aggregation=form,
        level=random.choice(LOSS_DEFAULTS[name].levels),
        beta=0.2,
        unbiased_kl=random.random() < 0.5,
        entropy_coef=0.1,
    )
    fixed = (name, loss_settings, resolve_correction(mode, low=0.6, cap=1.5))
    whole = _cut(step, [list(range(len(rows)))], 0, 0.0, *fixed)
    order = list(range(len(rows)))
    random.shuffle(order)
    ranks = [[] for _ in range(3)]
    for row in order:
        random.choice(ranks).append(row)
    parts = _cut(step, ranks, pad, garbage, *fixed)
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(parts[1], whole[1], atol=1e-12, rtol=0)
    assert parts[2] == pytest.approx(whole[2], abs=1e-10)


@pytest.mark.parametrize("name", LOSS_DEFAULTS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(rows=ROWS, seed=st.integers(0, 10**6), width=st.integers(4, 9), form=st.sampled_from(FORMS))
def test_a_padded_batch_gives_what_the_pack_gives(name, rows, seed, width, form):
    """LOSS-5, ADV-31: the [B, S] form, with NaN in every pad."""
    step = Step([length for length, _ in rows], [prompt for _, prompt in rows], seed)
    mask = torch.arange(width) < torch.tensor(step.lengths)[:, None]
    shared = {
        "name": name,
        "advantages": step.advantages,
        "num_sequences": len(rows),
        "counts": step.counts,
        "settings": resolve_loss_defaults(name, aggregation=form, beta=0.2, entropy_coef=0.1),
        "prompt_tokens": step.prompt_tokens,
    }
    keys = [key for key in PER_TOKEN if key != "rollout_logprobs"]
    flat = {key: torch.cat(step.rows[key]).requires_grad_(key == "logprobs") for key in keys}
    index = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(step.lengths))
    packed = policy_loss(mask=torch.ones(len(index)), sequence=index, **flat, **shared)
    packed.loss.backward()
    nan = torch.full(mask.shape, math.nan, dtype=torch.float64)
    wide = {key: nan.masked_scatter(mask, flat[key].detach()) for key in keys}
    wide["logprobs"].requires_grad_()
    rectangle = torch.arange(len(rows))[:, None].expand(len(rows), width)
    padded = policy_loss(mask=mask, sequence=rectangle, **wide, **shared)
    padded.loss.backward()
    assert padded.loss.item() == pytest.approx(packed.loss.item(), abs=1e-12)
    torch.testing.assert_close(
        wide["logprobs"].grad[mask], flat["logprobs"].grad, atol=1e-12, rtol=0
    )
    assert wide["logprobs"].grad[~mask].eq(0).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=ROWS, seed=st.integers(0, 10**6), pad=st.integers(0, 3), cut=st.integers(0, 6))
def test_sums_of_the_cold_start_and_of_the_reward_kl_do_not_see_the_cut(rows, seed, pad, cut):
    """LOSS-7, LOSS-9 for the two terms that live outside of the policy loss."""
    step = Step([length for length, _ in rows], [prompt for _, prompt in rows], seed)

    def of(part):
        tail = torch.full((pad,), math.nan, dtype=torch.float64)
        whole = [torch.cat([row, tail]) for row in step.rows["logprobs"]]
        current = torch.cat([whole[row] for row in part] or [tail[:0]])
        ref = torch.cat(
            [torch.cat([step.rows["ref_logprobs"][row], tail]) for row in part] or [current]
        )
        lengths = [step.lengths[row] for row in part]
        mask = torch.cat([torch.arange(n + pad) < n for n in lengths] or [torch.zeros(0)]).bool()
        widths = torch.tensor([n + pad for n in lengths], dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(part)), widths)
        cloned = cold_start_loss(
            logprobs=current, mask=mask, total_tokens=step.counts.total_tokens, weight=0.3
        )
        kl = kl_sequence_sums(
            logprobs=current, ref_logprobs=ref, mask=mask, sequence=index, num_sequences=len(part)
        )
        return cloned, kl.tolist()

    order = list(range(len(rows)))
    (first, kl_first), (second, kl_second) = of(order[:cut]), of(order[cut:])
    nats = -sum(float(row.sum()) for row in step.rows["logprobs"]) / max(sum(step.lengths), 1)
    assert (first.loss + second.loss).item() == pytest.approx(0.3 * nats, abs=1e-12)
    bc_loss = first.sums["bc_loss"] + second.sums["bc_loss"]
    assert bc_loss.item() == pytest.approx(nats, abs=1e-12)
    assert first.sums["bc_tokens"] + second.sums["bc_tokens"] == sum(step.lengths)
    pairs = zip(step.rows["logprobs"], step.rows["ref_logprobs"], strict=True)
    assert kl_first + kl_second == pytest.approx([float((a - b).sum()) for a, b in pairs], abs=1e-9)
