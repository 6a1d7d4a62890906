"""Every option of the update equals plain torch at several layouts: passes over a rollout, KL in
the reward, high-entropy tokens, the off-policy mask, prompt means, several rewards, cold start.
The reference is transformers' model, one sample at a time, every formula written out once more.
Bounds as in test_update_invariance.py: 1e-5 relative, where a wrong sign or denominator is 1e-2.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.algo.corrections import resolve_correction
from megagrpo.algo.kl_control import KLController, resolve_controller
from megagrpo.algo.settings import resolve_loss_defaults
from megagrpo.data.answers import Demonstration
from megagrpo.model.build import (
    ModelSettings,
    build_model,
    load_weights_,
    local_parameters,
    naming_profile,
)
from megagrpo.model.hf_config import read_shape
from megagrpo.model.optimizer import LRSchedule, OptimSettings, wrap_and_build
from megagrpo.parallel.context import ParallelContext, init_parallel
from megagrpo.trainer.batch import AdvantageSettings, CutSettings, make_batch
from megagrpo.trainer.demonstrations import AnnealedColdStart, NoColdStart
from megagrpo.trainer.kl_penalty import KLCharge, NoCharge
from megagrpo.trainer.objective import Objective
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.policy import Policy, PolicySettings
from megagrpo.trainer.scoring import Reference, Scoring
from megagrpo.types import Completion, Layout, Prompt, Sample
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.slices import index
from megagrpo.weights.table import expand, padded_vocab
from tests.pool import run_ranks
from tests.test_update_invariance import (
    CLIP,
    DECAY,
    EPS,
    LIMIT,
    LR,
    TEMPERATURE,
    VALID,
    VOCAB,
    load_transformers,
    relative,
    with_rollout_logprobs,
)
from tests.tiny_models import make_hf_folder

LAYOUTS = [Layout(1), Layout(2, tp=2), Layout(4, pp=2), Layout(4, tp=2)]
NAMES = (("first", 0.7), ("second", 0.3))
STEP = 3  # of 4 steps of cold start: half of its weight is left


@dataclass(frozen=True)
class Option:
    """One way to update; what is not said is grpo without KL and the usual truncation at 2."""

    loss: str = "grpo"
    iterations: int = 1
    aggregation: str | None = None
    level: str | None = None
    beta: float = 0.0
    estimator: str = "k3"
    place: str = "loss"
    unbiased: bool = False
    entropy_coef: float = 0.0
    top_share: float = 1.0
    threshold: float | None = None
    combine: str = "sum_then_normalize"
    imitation: float = 0.0
    answers: dict[int, Demonstration] = field(default_factory=dict)


ANSWERS = {
    0: Demonstration((5, 6, 7), (9, 8, 1)),
    1: Demonstration((5, 6, 7, 8), (3, 1)),
    3: Demonstration((11, 12), (4, 5, 6, 1)),
}
OPTIONS = {
    "two passes": Option(iterations=2, beta=0.04),
    "kl in the reward": Option(place="reward", beta=0.3, estimator="k1"),
    "high entropy": Option("dapo", top_share=0.4),
    "off-policy mask": Option("dapo", iterations=2, threshold=0.1, beta=0.04),
    "prompt mean": Option(aggregation="prompt-mean"),
    "sequence ratio": Option(iterations=2, level="sequence", entropy_coef=0.02),
    "unbiased kl": Option(iterations=2, beta=0.1, unbiased=True),
    "several rewards": Option(combine="normalize_then_sum"),
    "cold start": Option(imitation=0.8, answers=ANSWERS),
}


def make_samples(folder: Path) -> list[Sample]:
    """4 groups of 4 with two rewards each; one sample failed, one is empty, one reward missing.

    Id 0 is left out: transformers gives the embedding of the padding id no gradient.
    """
    dice = random.Random(11)
    samples = []
    for group in range(4):
        prompt = Prompt(group, tuple(dice.randrange(1, VALID) for _ in range(3 + group)), "", {})
        for member in range(4):
            length = 0 if (group, member) == (2, 1) else dice.randrange(1, LIMIT)
            ids = tuple(dice.randrange(1, VALID) for _ in range(length))
            rewards: dict[str, float | None] = {
                "first": None if (group, member) == (1, 3) else float(dice.randrange(3)),
                "second": 2.0 if group == 3 else dice.random(),
            }
            total = sum(w * rewards[name] for name, w in NAMES if rewards[name] is not None)
            samples.append(
                Sample(
                    prompt,
                    group,
                    member,
                    Completion(ids, (0.0,) * length, True),
                    "",
                    rewards,
                    total,
                    failed=(group, member) == (0, 2),
                )
            )
    with torch.no_grad():
        model = load_transformers(folder)
        old = [scores(model, s.prompt.ids, s.completion.ids)[0] for s in samples]
    return [with_rollout_logprobs(s, value, dice) for s, value in zip(samples, old, strict=True)]


def scores(
    model: Any, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every token of the answer, and the entropy of its distribution."""
    logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, :, :VALID]
    spread = torch.log_softmax(logits[len(prompt) - 1 : -1] / TEMPERATURE, dim=-1)
    entropy = -(spread.exp() * spread).sum(-1)
    return spread[torch.arange(len(answer)), torch.tensor(answer, dtype=torch.int64)], entropy


def k(estimator: str, delta: torch.Tensor) -> torch.Tensor:
    """delta = reference - current; k3 stops at 10 without gradient (LOSS-13)."""
    if estimator == "k1":
        return -delta
    value = torch.exp(delta) - delta - 1
    return torch.where(value > 10, 10.0, value)


def plain_advantages(samples: list[Sample], option: Option, paid: dict[int, float]) -> list[float]:
    def normalized(values: list[float | None]) -> list[float]:
        found = [0.0] * len(values)
        for group in range(4):
            rows = [
                row
                for row, s in enumerate(samples)
                if s.group == group and not s.failed and values[row] is not None
            ]
            rewards = [values[row] for row in rows]
            mean = sum(rewards) / len(rewards)
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            for row, reward in zip(rows, rewards, strict=True):
                found[row] = 0.0 if max(rewards) == min(rewards) else (reward - mean) / (std + 1e-6)
        return found

    if option.combine == "sum_then_normalize":
        return normalized([s.reward - paid.get(row, 0.0) for row, s in enumerate(samples)])
    parts = [(normalized([s.rewards[name] for s in samples]), weight) for name, weight in NAMES]
    return [sum(part[row] * weight for part, weight in parts) for row in range(len(samples))]


def reference_update(folder: Path, other: Path, samples: list[Sample], option: Option) -> dict:
    """The whole rollout's optimizer steps in plain torch."""
    model, frozen = load_transformers(folder), load_transformers(other)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        eps=EPS,
    )
    rows = [row for row, s in enumerate(samples) if not s.failed and s.completion.ids]
    with torch.no_grad():
        ids = {row: (samples[row].prompt.ids, samples[row].completion.ids) for row in rows}
        start = {row: scores(model, *ids[row]) for row in rows}
        ref = {row: scores(frozen, *ids[row])[0] for row in rows}
    old = {row: pair[0] for row, pair in start.items()}
    paid = {}
    if option.place == "reward":
        paid = {r: option.beta * float(k(option.estimator, ref[r] - old[r]).sum()) for r in rows}
    advantages = plain_advantages(samples, option, paid)
    losses, norms = [], []
    for _ in range(option.iterations):
        for number, groups in enumerate(((0, 1), (2, 3))):
            chosen = [row for row in rows if samples[row].group in groups]
            entropies = torch.cat([start[row][1] for row in chosen])
            # First tokens of one prompt tie but for rounding; so does the product.
            bar = torch.quantile(entropies.double(), 1 - option.top_share) - 2e-5
            total = torch.zeros(())
            for row in chosen:
                logp, entropy = scores(model, *ids[row])
                term = plain_term(option, logp, old[row], advantages[row], samples[row])
                term = torch.where(start[row][1].double() >= bar, term, 0.0)
                term = term + loss_kl(option, logp, old[row], ref[row])
                term = term - option.entropy_coef * entropy
                total = total + (term * scale(option, samples, chosen, row)).sum()
            total = total + imitation(model, option, number)
            optimizer.zero_grad()
            total.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            losses.append(float(total.detach()))
    mean = 1 / len(losses)
    return {"loss": sum(losses) * mean, "norm": sum(norms) * mean, "model": model}


def plain_term(
    option: Option, logp: torch.Tensor, old: torch.Tensor, advantage: float, sample: Sample
) -> torch.Tensor:
    log_ratio = logp - old
    ratio = log_ratio.exp()
    if option.level == "sequence":
        ratio = log_ratio.mean().exp().expand(len(logp))
    high = 1.28 if option.loss == "dapo" else 1.2
    term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, high) * advantage)
    engine = torch.tensor(sample.completion.logprobs)
    drift = float((engine - logp.detach()).mean())
    if option.threshold is not None and advantage < 0 and drift > option.threshold:
        term = term * 0.0
    return term * torch.exp(old - engine).clamp(max=2.0)


def loss_kl(
    option: Option, logp: torch.Tensor, old: torch.Tensor, ref: torch.Tensor
) -> torch.Tensor:
    if option.place == "reward" or option.beta == 0:
        return torch.zeros_like(logp)
    value = k(option.estimator, ref - logp)
    return option.beta * (torch.exp(logp - old) * value if option.unbiased else value)


def scale(option: Option, samples: list[Sample], chosen: list[int], row: int) -> float:
    """1 / the denominator of a token of `row`."""
    length = {r: len(samples[r].completion.ids) for r in chosen}
    if option.loss == "dapo":
        return 1 / sum(length.values())
    if option.aggregation == "prompt-mean":
        own = sum(length[r] for r in chosen if samples[r].group == samples[row].group)
        return 1 / (own * len({samples[r].group for r in chosen}))
    return 1 / (length[row] * len(chosen))


def imitation(model: Any, option: Option, number: int) -> torch.Tensor:
    """Of the first optimizer step prompt 0, of the second prompts 1 and 3 (a third and two)."""
    if not option.answers:
        return torch.zeros(())
    shown = [option.answers[i] for i in ((0,), (1, 3))[number]]
    parts = [scores(model, one.prompt_ids, one.answer_ids)[0] for one in shown]
    return -0.5 * option.imitation * torch.cat(parts).mean()


def product_update(
    rank: int, folder: Path, other: Path, layout: Layout, samples: list[Sample], option: Option
) -> dict:
    """The product's update on one rank: metrics and this rank's boxes of the new weights."""
    context = init_parallel(layout, seed=1)
    shape = read_shape(folder)

    def model(path: Path) -> list[torch.nn.Module]:
        chunks = build_model(
            shape,
            context,
            dtype=torch.float32,
            padded_vocab=padded_vocab(VOCAB, layout.tp),
            settings=ModelSettings(),
        )
        load_weights_(chunks, HFSource(path), shape, context)
        return chunks

    trainable = wrap_and_build(
        model(folder), context, OptimSettings(lr=LR, eps=EPS, weight_decay=DECAY, grad_clip=CLIP)
    )
    scoring, phases = Scoring(context, TEMPERATURE, VALID), Phases()
    kl = KLController(resolve_controller("fixed", beta=option.beta))
    schedule = LRSchedule("constant", LR)
    policy = Policy(trainable, scoring, settings_of(option), schedule, kl, phases)
    advantage = AdvantageSettings("std", "mean", None, combine=option.combine, weights=NAMES)
    cut = CutSettings(2, max_tokens=32, min_packs=layout.pp, max_response_tokens=LIMIT)
    batch = make_batch(samples, advantage, cut, dp=layout.dp, dp_rank=context.coords.dp)
    batch = cold_start(option, cut, context).attach(batch, STEP)
    batch = policy.score_old(batch, step=9)
    batch = Reference(model(other), scoring, phases).score(batch)
    charge = NoCharge()
    if option.place == "reward":
        charge = KLCharge(kl, option.estimator, advantage, context)
    metrics = policy.update(charge.charge(batch)).as_metrics()
    parameters = local_parameters(trainable.chunks)
    boxes = [
        (piece.hf, piece.hf_box, parameters[piece.megatron][index(piece.megatron_box)].detach())
        for piece in expand(shape, layout, context.coords, naming_profile())
    ]
    return {"metrics": metrics, "boxes": [(n, b, t.clone()) for n, b, t in boxes]}


def settings_of(option: Option) -> PolicySettings:
    return PolicySettings(
        objective=Objective(
            loss=option.loss,
            settings=resolve_loss_defaults(
                option.loss,
                aggregation=option.aggregation,
                level=option.level,
                beta=option.beta if option.place == "loss" else 0.0,
                kl_estimator=option.estimator,
                unbiased_kl=option.unbiased,
                entropy_coef=option.entropy_coef,
            ),
            correction=resolve_correction("token_truncate", 2.0),
            off_policy_threshold=option.threshold,
            kl_in_loss=option.place == "loss",
        ),
        mismatch_warn=1e9,
        mismatch_stop=1e9,
        mismatch_patience=2,
        iterations=option.iterations,
        top_entropy_share=option.top_share,
        always_score_old=option.place == "reward",
    )


def cold_start(
    option: Option, cut: CutSettings, context: ParallelContext
) -> AnnealedColdStart | NoColdStart:
    if not option.answers:
        return NoColdStart()
    return AnnealedColdStart(
        demonstrations=option.answers,
        draw=None,
        weight=option.imitation,
        steps=4,
        cut=cut,
        dp=context.layout.dp,
        dp_rank=context.coords.dp,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(make_hf_folder(tmp_path_factory.mktemp("hf"), "qwen3", vocab_size=VOCAB))


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory) -> Path:
    """A reference near the policy: KL is not 0, and far from its clamp."""
    path = Path(make_hf_folder(tmp_path_factory.mktemp("ref"), "qwen3", vocab_size=VOCAB))
    tensors = load_file(path / "model.safetensors")
    noise = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        tensor.mul_(1 + 0.1 * torch.randn(tensor.shape, generator=noise))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    return make_samples(folder)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_option_gives_the_update_of_plain_torch_at_every_layout(
    folder: Path, other: Path, samples: list[Sample], name: str
) -> None:
    """LOSS-7, LOSS-10, LOSS-12, LOSS-14, LOSS-23, OFF-9, ADV-18, LP-20 through the real model."""
    option = OPTIONS[name]
    want = reference_update(folder, other, samples, option)
    weights = dict(want["model"].state_dict())
    for layout in LAYOUTS:
        where = f"{layout}"
        results = run_ranks(layout.world, product_update, folder, other, layout, samples, option)
        metrics = results[0]["metrics"]
        assert all(result["metrics"] == metrics for result in results), where
        assert metrics["actor/loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6), where
        assert metrics["actor/grad_norm"] == pytest.approx(want["norm"], rel=1e-5), where
        for result in results:
            for tensor, box, value in result["boxes"]:
                error = relative(value, weights[tensor][index(box)])
                assert error < 1e-5, (where, tensor, box, error)


def test_each_option_changes_the_update(folder: Path, other: Path, samples: list[Sample]) -> None:
    """Each option's reference differs from that of plain grpo by far more than the bound."""
    plain = {
        loss: reference_update(folder, other, samples, Option(loss)) for loss in ("grpo", "dapo")
    }
    for name, option in OPTIONS.items():
        found = reference_update(folder, other, samples, replace(option, iterations=1))
        base = plain[option.loss]
        if name in ("two passes", "unbiased kl"):  # KL is what sets them apart in one pass
            assert found["loss"] != pytest.approx(base["loss"], rel=1e-3), name
            continue
        if name == "sequence ratio" or name == "off-policy mask":
            continue  # of ratio 1, and judged below
        assert found["norm"] != pytest.approx(base["norm"], rel=1e-3), name
    masked = reference_update(folder, other, samples, OPTIONS["off-policy mask"])
    whole = replace(OPTIONS["off-policy mask"], threshold=None)
    assert masked["norm"] != pytest.approx(
        reference_update(folder, other, samples, whole)["norm"], rel=1e-3
    )
