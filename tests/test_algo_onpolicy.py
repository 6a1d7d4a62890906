"""The on-policy identity: the gradient of every token is -c A, through the real log-probs.

c is the coefficient that the loss's own aggregation stands for, written down here a second time.
Any factor that a tensor-parallel reduction, the pipeline schedule or DDP put in would show.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megagrpo.algo.logprobs import vocab_parallel_logprobs
from megagrpo.algo.losses import LossCounts, policy_loss
from megagrpo.algo.settings import LOSS_DEFAULTS, resolve_loss_defaults
from megagrpo.types import Layout, MicroBatch
from tests.pool import run_ranks

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
LENGTHS = GOLDEN["fixture"]["lengths"]
ADVANTAGES = torch.tensor(GOLDEN["advantages"]["eps_1e-4"]["group"], dtype=torch.float64)
SEQUENCE = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
COUNTS = LossCounts(total_tokens=10, total_sequences=4, max_response_length=8)


def _wanted(name, lengths=LENGTHS, advantages=ADVANTAGES, limit=8):
    """-c A of every token: c = 1/N, 1/(B L), 1/(B limit) or 1/B."""
    tokens, rows = sum(lengths), len(lengths)
    table = {
        **dict.fromkeys(("dapo", "bnpo", "cispo", "cispo_relative", "vespo"), lambda _: tokens),
        **dict.fromkeys(("grpo", "sapo", "gspo"), lambda length: rows * length),
        "dr_grpo": lambda _: rows * limit,
        "luspo": lambda _: rows,
    }
    pairs = zip(lengths, advantages.tolist(), strict=True)
    return [-a / table[name](length) for length, a in pairs for _ in range(length)]


def _through_logprobs(rank, world):
    """Per loss (gradient of the log-probs, gradient of this rank's logits)."""
    logits = torch.randn(10, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = torch.arange(10)
    columns = -(-11 // world)
    padded = torch.cat([logits, torch.zeros(10, columns * world - 11, dtype=torch.float64)], 1)
    found = {}
    for name in LOSS_DEFAULTS:
        shard = padded[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
        logprobs, _ = vocab_parallel_logprobs(
            shard, labels, group=dist.group.WORLD if world > 1 else None, valid_vocab=11, chunk=3
        )
        logprobs.retain_grad()
        output = policy_loss(
            name=name,
            logprobs=logprobs,
            old_logprobs=None,
            advantages=ADVANTAGES,
            mask=torch.ones(10),
            sequence=SEQUENCE,
            num_sequences=4,
            counts=COUNTS,
            settings=resolve_loss_defaults(name),
        )
        output.loss.backward()
        found[name] = (logprobs.grad, shard.grad)
    onehot = torch.nn.functional.one_hot(labels, 11).double()
    return found, onehot - logits.softmax(1)


@pytest.mark.parametrize("world", [1, 2])
def test_the_gradient_through_vocab_parallel_log_probs_is_minus_c_a(world):
    """LOSS-24 at TP 1 and 2: d loss / d logits = -c A (onehot - p), for every loss."""
    ranks = [_through_logprobs(0, 1)] if world == 1 else run_ranks(2, _through_logprobs, 2)
    slope = ranks[0][1]
    for name in LOSS_DEFAULTS:
        wanted = torch.tensor(_wanted(name), dtype=torch.float64)
        for found, _ in ranks:
            torch.testing.assert_close(found[name][0], wanted, atol=1e-15, rtol=1e-12)
        joined = torch.cat([found[name][1] for found, _ in ranks], 1)
        torch.testing.assert_close(joined[:, :11], wanted[:, None] * slope, atol=1e-14, rtol=1e-10)


def test_the_printed_numbers_of_f1_are_those_of_dapo():
    """LOSS-24: per token [-0.070701, 0.070701, 0.070706, -0.070706] by sequence."""
    printed = [-0.070701] * 4 + [0.070701] * 2 + [0.070706] * 3 + [-0.070706]
    assert _through_logprobs(0, 1)[0]["dapo"][0].tolist() == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize(
    "layout", [Layout(2, tp=2), Layout(2, pp=2), Layout(2)], ids=["tp2", "pp2", "dp2"]
)
def test_the_gradient_through_the_megatron_schedule_is_minus_c_a(layout, tmp_path):
    """LOSS-24 under TP 2, PP 2 and DP 2: nothing around the loss divides or multiplies it."""
    from megagrpo.model import optimizer, schedule
    from tests.megatron_toys import OPTIM, dealt, sequences, toy_on_rank, trained
    from tests.tiny_models import make_hf_folder

    folder = make_hf_folder(tmp_path / "model", "qwen3", False)
    batch = sequences(128, (7, 12, 4, 9), seed=4)
    lengths = [sum(trained(ids)) for ids in batch]
    advantages = dict(zip(map(tuple, batch), ADVANTAGES.tolist(), strict=True))
    counts = LossCounts(sum(lengths), len(batch), max_response_length=16)

    def check(rank):
        toy = toy_on_rank(folder, layout)
        trainable = optimizer.wrap_and_build(toy.chunks, toy.context, OPTIM)
        found = []  # (loss, row's first tokens, gradient of its trained tokens)

        def loss_of(name):
            def loss(logprobs, _, micro: MicroBatch):
                widths = micro.cu_seqlens.diff()
                rows = [tuple(ids.tolist()) for ids in micro.tokens.split(widths.tolist())]

                def note(grad):
                    pieces = zip(rows, grad.split(widths.tolist()), strict=True)
                    found.extend((name, row, piece.tolist()) for row, piece in pieces)

                logprobs.register_hook(note)
                output = policy_loss(
                    name=name,
                    logprobs=logprobs,
                    old_logprobs=None,
                    advantages=torch.tensor([advantages.get(row, 0.0) for row in rows]),
                    mask=micro.mask,
                    sequence=torch.repeat_interleave(torch.arange(len(rows)), widths),
                    num_sequences=len(rows),
                    counts=counts,
                    settings=resolve_loss_defaults(name),
                )
                return output.loss, {}

            return loss

        for name in LOSS_DEFAULTS:
            schedule.forward_backward(
                trainable,
                dealt(batch, layout, rank, cuts=2),
                loss_of(name),
                context=toy.context,
                temperature=1.0,
                valid_vocab=toy.shape.vocab_size,
                with_entropy=False,
            )
        return found

    found = [entry for part in run_ranks(layout.world, check) for entry in part]
    wanted = {name: _wanted(name, lengths, limit=16) for name in LOSS_DEFAULTS}
    seen = set()
    for name, row, grad in found:
        at = [list(row) == ids for ids in batch].index(True)
        start = sum(lengths[:at])
        flags = trained(batch[at])
        expected = [wanted[name][start] if flag else 0.0 for flag in flags]
        assert grad == pytest.approx(expected, rel=1e-6, abs=0), (name, at)
        seen.add((name, at))
    assert len(seen) == 4 * len(LOSS_DEFAULTS), "not every row of every loss was seen"
