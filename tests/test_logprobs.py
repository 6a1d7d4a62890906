"""Vocab-parallel log-probs and entropy against dense float64 log_softmax."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megagrpo.algo.logprobs import vocab_parallel_logprobs
from tests.pool import run_ranks


@dataclass(frozen=True)
class Case:
    """One call; `logits` are the unpadded columns [T, V]."""

    logits: list[list[float]]
    labels: list[int]
    pad_value: float = 0.0
    temperature: float = 1.0
    weights: tuple[float, float] = (1.0, 1.0)  # of the log-probs and the entropies in the loss
    chunk: int = 4096
    dtype: torch.dtype = torch.float64


def _dense(case: Case):
    """(log-probs, entropies, gradient of the weighted sum) by torch's own log_softmax."""
    logits = torch.tensor(case.logits, dtype=torch.float64, requires_grad=True)
    every = (logits / case.temperature).log_softmax(-1)
    logprobs = every.gather(1, torch.tensor(case.labels)[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    (case.weights[0] * logprobs.sum() + case.weights[1] * entropy.sum()).backward()
    return logprobs.detach(), entropy.detach(), logits.grad


def _sharded(rank: int, world: int, cases: list[Case]):
    """The same three, by this rank's columns of the padded logits."""
    answers = []
    for case in cases:
        whole = torch.tensor(case.logits, dtype=case.dtype)
        columns = -(-whole.shape[1] // world)
        pad = whole.new_full((len(whole), columns * world - whole.shape[1]), case.pad_value)
        shard = torch.cat([whole, pad], 1)[:, rank * columns : (rank + 1) * columns].clone()
        before = shard.clone()
        shard.requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            shard,
            torch.tensor(case.labels),
            group=dist.group.WORLD if world > 1 else None,
            valid_vocab=whole.shape[1],
            temperature=case.temperature,
            chunk=case.chunk,
            with_entropy=True,
        )
        loss = case.weights[0] * logprobs.sum() + case.weights[1] * entropy.sum()
        loss.backward(retain_graph=True)
        first = shard.grad.clone()
        shard.grad = None
        loss.backward()
        assert torch.equal(shard.grad, first), "a second backward gives another gradient"
        same = torch.equal(shard.detach().view(torch.int64), before.view(torch.int64))
        assert same, "the caller's logits changed"
        answers.append((logprobs.detach(), entropy.detach(), first))
    return answers


_ROW = [1.0, 2.0, 0.5, -1.0, 0.0]
_RANDOM = torch.randn(7, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CASES = {
    "LP-1 V 5": Case([_ROW] * 5, [0, 1, 2, 3, 4]),
    "LP-2 log-prob only": Case([_ROW[:4]], [3], weights=(1.0, 0.0)),
    "LP-2 entropy only": Case([_ROW[:4]], [3], weights=(0.0, 1.0)),
    "LP-3 pad 50": Case([_ROW] * 5, [0, 1, 2, 3, 4], pad_value=50.0),
    "LP-3 pad nan": Case([_ROW] * 2, [0, 4], pad_value=float("nan")),
    "LP-4 V 3": Case([[0.3, -0.2, 1.1]] * 3, [0, 1, 2]),
    "LP-6 chunk 3": Case((3 * _RANDOM).tolist(), [0, 3, 10, 5, 5, 2, 9], chunk=3),
    "LP-12 temperature": Case([[2.0, 1.0, 0.0]] * 3, [0, 1, 2], temperature=0.5),
    "LP-9 large": Case([[1e4, 0.0, 0.0, 0.0]] * 2, [0, 3]),
    "LP-9 large and cold": Case([[1e4, 0.0, 9.9e3, 1.0]] * 2, [0, 2], temperature=0.5),
    "-inf logit": Case([[1.0, -math.inf, 0.0, 2.0]], [0]),
}


@pytest.fixture(scope="module", params=[1, 2, 4])
def sharded(request):
    """(world, answers of every rank to CASES); one launch per world size."""
    world, cases = request.param, list(CASES.values())
    ranks = [_sharded(0, 1, cases)] if world == 1 else run_ranks(world, _sharded, world, cases)
    return world, {name: [rank[i] for rank in ranks] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", [name for name in CASES if name != "-inf logit"])
def test_values_and_gradients_equal_dense_float64_at_any_tp(sharded, name):
    """LP-1, LP-2, LP-3, LP-4, LP-5, LP-6, LP-9, LP-12: values, both gradients, pads exactly 0.
    LP-8: V 5 in blocks of 3 (TP 2) and 2 (TP 4), each with a tail that is no token."""
    world, answers = sharded
    case, (logprobs, entropy, grad) = CASES[name], _dense(CASES[name])
    for rank_logprobs, rank_entropy, _ in answers[name]:
        torch.testing.assert_close(rank_logprobs, logprobs, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(rank_entropy, entropy, atol=1e-12, rtol=1e-12)
    joined = torch.cat([shard_grad for _, _, shard_grad in answers[name]], 1)
    vocab = len(case.logits[0])
    torch.testing.assert_close(joined[:, :vocab], grad, atol=1e-12, rtol=1e-12)
    assert joined[:, vocab:].eq(0).all(), "a padded column got a gradient"


def test_values_are_those_of_the_table_of_fault_kinds(sharded):
    """LP-1, LP-2, LP-12 by their printed numbers, so that the dense reference is checked too."""
    _, answers = sharded
    logprobs, entropy, _ = answers["LP-1 V 5"][0]
    expected = [-1.574438, -0.574438, -2.074438, -3.574438, -2.574438]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)
    assert entropy.tolist() == pytest.approx([1.206489] * 5, abs=1e-6)
    grad = torch.cat([shard_grad for _, _, shard_grad in answers["LP-2 log-prob only"]], 1)
    expected = [-0.224208, -0.60946, -0.135989, 0.969657]
    assert grad[0, :4].tolist() == pytest.approx(expected, abs=1e-6)
    logprobs, _, _ = answers["LP-12 temperature"][0]
    assert logprobs.tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


def test_a_logit_of_minus_infinity_has_no_share_in_the_entropy(sharded):
    """LP-4, LP-9: 0 x -inf must not become NaN in values or gradients."""
    _, answers = sharded
    dense = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64).log_softmax(-1)
    logprobs, entropy, _ = answers["-inf logit"][0]
    grad = torch.cat([shard_grad for _, _, shard_grad in answers["-inf logit"]], 1)
    assert logprobs.item() == pytest.approx(dense[0].item(), abs=1e-12)
    assert entropy.item() == pytest.approx(-(dense.exp() * dense).sum().item(), abs=1e-12)
    assert grad.isfinite().all() and grad[0, 1] == 0


def _gathered_and_gradcheck(rank: int):
    logits = torch.zeros(1, 4)
    uniform, _ = vocab_parallel_logprobs(
        logits, torch.tensor([2]), group=dist.group.WORLD, valid_vocab=4
    )
    generator = torch.Generator().manual_seed(1)
    shards = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 4, 3])

    def outputs(shard):
        return vocab_parallel_logprobs(
            shard,
            labels,
            group=dist.group.WORLD,
            valid_vocab=5,
            temperature=0.7,
            chunk=2,
            with_entropy=True,
        )

    mine = shards[rank].requires_grad_()
    analytic = torch.autograd.functional.jacobian(
        lambda shard: torch.stack(outputs(shard)), mine, vectorize=False
    )
    numeric = torch.zeros(2, 2, 3, 3, 3, dtype=torch.float64)
    for owner in range(2):  # both ranks join every call; only the owner's shard moves
        for token in range(3):
            for column in range(3):
                ends = []
                for sign in (1, -1):
                    moved = shards[rank].detach().clone()
                    if rank == owner:
                        moved[token, column] += sign * 1e-6
                    ends.append(torch.stack(outputs(moved)))
                numeric[owner, :, :, token, column] = (ends[0] - ends[1]) / 2e-6
    return uniform.item(), (analytic - numeric[rank]).abs().max().item()


def test_finite_differences_over_two_ranks_and_gathered_logits():
    """LP-2: every element of both ranks' gradients by central differences. LP-10: logits that were
    gathered already give -ln V, not -ln(V TP)."""
    for uniform, error in run_ranks(2, _gathered_and_gradcheck):
        assert uniform == pytest.approx(-1.386294, abs=1e-6)
        assert error < 1e-8  # central differences of step 1e-6 in float64


@pytest.mark.parametrize("with_entropy", [False, True])
def test_double_precision_gradcheck(with_entropy):
    """LP-2 on one rank, by torch's own checker."""
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 4, 1, 2, 2])

    def outputs(shard):
        answer = vocab_parallel_logprobs(
            shard, labels, group=None, valid_vocab=5, temperature=1.3, with_entropy=with_entropy
        )
        return tuple(value for value in answer if value is not None)

    assert torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize("chunk", [1, 3, 7, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batched", [False, True])
def test_chunks_and_a_leading_dimension_change_nothing(chunk, dtype, batched):
    """LP-6: packed [7, V] and [1, 7, V], any chunk: values and gradients equal the unchunked."""
    logits = torch.randn(7, 24, generator=torch.Generator().manual_seed(5)).to(dtype)
    labels = torch.tensor([0, 3, 19, 5, 5, 2, 9])
    answers = []
    for size, lead in ((4096, ()), (chunk, (1,) if batched else ())):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            leaf.view(*lead, 7, 24),
            labels.view(*lead, 7),
            group=None,
            valid_vocab=20,
            temperature=0.9,
            chunk=size,
            with_entropy=True,
        )
        assert logprobs.shape == (*lead, 7) and logprobs.dtype == torch.float32
        (logprobs.sum() - 2 * entropy.sum()).backward()
        answers.append((logprobs.flatten(), entropy.flatten(), leaf.grad))
    for plain, chunked in zip(*answers, strict=True):
        assert torch.equal(plain, chunked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_error_is_at_most_twice_that_of_the_plain_fp32_log_softmax(dtype, scale):
    """LP-9: the same stored logits, judged against float64."""
    logits = (scale * torch.randn(64, 512, generator=torch.Generator().manual_seed(9))).to(dtype)
    labels = torch.arange(64) * 7
    exact = logits.double().log_softmax(-1)
    plain = logits.float().log_softmax(-1)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, labels, group=None, valid_vocab=512, with_entropy=True
    )
    rows = torch.arange(64)
    allowed = 2 * (plain[rows, labels] - exact[rows, labels]).abs().max()
    floor = 1e-6 * exact[rows, labels].abs().clamp(min=1)
    assert ((logprobs - exact[rows, labels]).abs() <= torch.maximum(allowed, floor)).all()
    exact_entropy = -(exact.exp() * exact).sum(-1)
    plain_entropy = -(plain.exp() * plain).sum(-1)
    allowed = 2 * (plain_entropy - exact_entropy).abs().max()
    floor = 1e-6 * exact_entropy.clamp(min=1)
    assert ((entropy - exact_entropy).abs() <= torch.maximum(allowed, floor)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_give_exact_closed_forms(dtype):
    """LP-9: overflow; LP-11: entropy of a uniform distribution is +ln V."""
    logits = torch.tensor([[1e4, 0, 0, 0], [1e4, 0, 0, 0], [7, 7, 7, 7]], dtype=dtype)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, torch.tensor([0, 2, 1]), group=None, valid_vocab=4, with_entropy=True
    )
    top = logits[0, 0].item()  # 1e4, or what bf16 makes of it
    assert logprobs[:2].tolist() == [0.0, -top] and entropy[:2].tolist() == [0.0, 0.0]
    assert logprobs[2].item() == pytest.approx(-math.log(4), rel=1e-6)
    uniform = vocab_parallel_logprobs(
        torch.zeros(1, 8, dtype=dtype), torch.tensor([3]), group=None, valid_vocab=8,
        with_entropy=True,
    )  # fmt: skip
    assert uniform[1].item() == pytest.approx(2.079442, abs=1e-6)


class _LargestUpcast(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most elements of any fp32 tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                self.elements = max(self.elements, value.numel())
        return out


def test_only_one_chunk_is_upcast_and_only_the_stored_logits_are_saved():
    """LP-7: bf16 [64, 1024], chunk 8: no fp32 tensor above 8 x 1024, forward and backward; saved
    bytes are those of the bf16 logits."""
    logits = torch.randn(64, 1024).bfloat16().requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with _LargestUpcast() as seen:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs, entropy = vocab_parallel_logprobs(
                logits, torch.arange(64), group=None, valid_vocab=1000, chunk=8, with_entropy=True
            )
        (logprobs.sum() + entropy.sum()).backward()
    assert 0 < seen.elements <= 8 * 1024
    assert sum(saved) == 64 * 1024 * 2
    assert logits.grad.dtype == torch.bfloat16


def test_logits_that_changed_before_backward_are_refused():
    """LP-5: never another number."""
    logits = torch.randn(2, 4, requires_grad=True)
    stored = logits * 1.0
    logprobs, _ = vocab_parallel_logprobs(stored, torch.tensor([0, 1]), group=None, valid_vocab=4)
    stored.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_one_shift_pairs_logits_with_the_next_token():
    """ADV-32: prompt of 2 tokens, response of 1: gradient at position 1 alone."""
    logits = torch.randn(1, 3, 6, requires_grad=True)
    tokens = torch.tensor([[4, 2, 5]])
    labels, mask = torch.tensor([[2, 5, 0]]), torch.tensor([[0.0, 1.0, 0.0]])
    logprobs, _ = vocab_parallel_logprobs(logits, labels, group=None, valid_vocab=6)
    (logprobs * mask).sum().backward()
    rows = logits.grad.abs().sum(-1)[0]
    assert rows[1] > 0 and rows[0] == 0 and rows[2] == 0
    assert logits.grad[0, 1].argmax() == tokens[0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be > 0"),
        ({"temperature": float("nan")}, "temperature=nan must be > 0"),
        ({"valid_vocab": 9}, "valid_vocab=9 is outside 1..8"),
        ({"labels": torch.tensor([0, 1, 2])}, "expected one label for each row"),
        ({"labels": torch.tensor([0, 7])}, "labels reach from 0 to 7, valid ids are 0..5"),
        ({"labels": torch.tensor([0, -1])}, "labels reach from -1 to 0"),
    ],
)
def test_bad_arguments_are_refused_with_value_and_limit(change, message):
    call = {"logits": torch.zeros(2, 8), "labels": torch.tensor([0, 1]), "valid_vocab": 6}
    call |= change
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(call.pop("logits"), call.pop("labels"), group=None, **call)


def test_tempered_log_probs_and_entropy_equal_the_golden_table():
    """LP-12, LP-14: the numbers that an engine with processed log-probs gives as well."""
    golden = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
    for row in golden["tables"]["temperature"]:
        logits = torch.tensor([row["logits"]] * 4, dtype=torch.float64)
        logprobs, entropy = vocab_parallel_logprobs(
            logits,
            torch.arange(4),
            group=None,
            valid_vocab=4,
            temperature=row["temperature"],
            with_entropy=True,
        )
        assert logprobs.tolist() == pytest.approx(row["logp"], abs=2e-6)
        assert entropy.tolist() == pytest.approx([row["entropy"]] * 4, abs=2e-6)
