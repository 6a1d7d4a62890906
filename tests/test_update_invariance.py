"""One rollout's update gives the same loss, metrics and weights at every layout, and equals plain
torch: transformers' model, loops over samples, torch.optim.AdamW.

Settings of design 4.4: lr 1e-2, Adam eps 1e-3, no warm-up. Bound 1e-5 relative, about ten times the
float32 rounding noise of a step of this size; a wrong sign or denominator shows as 1e-2.
"""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.algo.corrections import resolve_correction
from megagrpo.algo.kl_control import KLController, resolve_controller
from megagrpo.algo.settings import resolve_loss_defaults
from megagrpo.model.build import (
    ModelSettings,
    build_model,
    load_weights_,
    local_parameters,
    naming_profile,
)
from megagrpo.model.hf_config import read_shape
from megagrpo.model.optimizer import LRSchedule, OptimSettings, wrap_and_build
from megagrpo.parallel.context import init_parallel
from megagrpo.trainer.batch import AdvantageSettings, CutSettings, make_batch
from megagrpo.trainer.objective import Objective
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.policy import Policy, PolicySettings
from megagrpo.trainer.scoring import Reference, Scoring
from megagrpo.types import Completion, Layout, Prompt, Sample
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.slices import index
from megagrpo.weights.table import expand, padded_vocab
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

VOCAB, VALID = 131, 129  # rows of the model; pieces of its imagined tokenizer
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]
TEMPERATURE, BETA, LIMIT = 0.9, 0.04, 10
LR, EPS, DECAY, CLIP = 1e-2, 1e-3, 0.1, 1.0


def make_samples(folder: Path) -> list[Sample]:
    """4 groups of 4: unequal lengths, an empty response, a failed and a reward-less sample."""
    dice = random.Random(7)
    samples = []
    for group in range(4):
        prompt = Prompt(group, tuple(dice.randrange(VALID) for _ in range(3 + group)), "", {})
        for member in range(4):
            length = 0 if (group, member) == (2, 1) else dice.randrange(1, LIMIT)
            ids = tuple(dice.randrange(VALID) for _ in range(length))
            reward = None if (group, member) == (3, 0) else float(dice.randrange(3))
            samples.append(
                Sample(
                    prompt=prompt,
                    group=group,
                    member=member,
                    completion=Completion(ids, (0.0,) * length, True),
                    text="",
                    reward=reward,
                    failed=(group, member) == (0, 2),
                )
            )
    scored = reference_logprobs(load_transformers(folder), samples)
    return [
        with_rollout_logprobs(sample, old, dice)
        for sample, old in zip(samples, scored, strict=True)
    ]


def with_rollout_logprobs(sample: Sample, old: torch.Tensor, dice: random.Random) -> Sample:
    """The engine's log-probs: the trainer's and some noise, sometimes beyond the cap of 2."""
    noisy = tuple(value + dice.uniform(-0.9, 0.3) for value in old.tolist())
    return replace(sample, completion=replace(sample.completion, logprobs=noisy))


def load_transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager"
    )


def reference_logprobs(model, samples):
    """Log-prob of every sampled token by a dense log_softmax, one sample at a time."""
    found = []
    for sample in samples:
        prompt, ids = sample.prompt.ids, sample.completion.ids
        logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, :, :VALID]
        logp = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
        found.append(
            torch.stack([logp[p, i] for p, i in zip(places, ids, strict=True)])
            if ids
            else logp[:0, 0]
        )
    return found


def reference_update(folder: Path, samples: list[Sample], loss: str) -> dict:
    """The whole update in plain torch."""
    model = load_transformers(folder)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.999),
        eps=EPS,
    )
    with torch.no_grad():
        old = [value.clone() for value in reference_logprobs(model, samples)]
    rows = [
        row
        for row, s in enumerate(samples)
        if not s.failed and s.reward is not None and s.completion.ids
    ]
    advantages = plain_advantages(samples)
    eps_high = 0.28 if loss == "dapo" else 0.2
    losses, norms = [], []
    for groups in ((0, 1), (2, 3)):
        chosen = [row for row in rows if samples[row].group in groups]
        tokens = sum(len(samples[row].completion.ids) for row in chosen)
        total = 0.0
        scored = reference_logprobs(model, [samples[row] for row in chosen])
        current = dict(zip(chosen, scored, strict=True))
        for row in chosen:
            ratio = torch.exp(current[row] - old[row])
            advantage = advantages[row]
            term = -torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + eps_high) * advantage)
            engine = torch.tensor(samples[row].completion.logprobs)
            term = term * torch.exp(old[row] - engine).clamp(max=2.0)
            delta = old[row] - current[row]  # the reference is the start policy
            term = term + BETA * (torch.exp(delta) - delta - 1)
            scale = tokens if loss == "dapo" else len(chosen) * len(term)
            total = total + term.sum() / scale
        optimizer.zero_grad()
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(total.detach()))
    weights = dict(model.state_dict())
    moved = max(float((weights[name] - start[name]).abs().max()) for name in weights)
    return {"loss": sum(losses) / 2, "norm": sum(norms) / 2, "weights": weights, "moved": moved}


def plain_advantages(samples: list[Sample]) -> list[float]:
    found = [0.0] * len(samples)
    for group in range(4):
        rows = [
            row
            for row, s in enumerate(samples)
            if s.group == group and not s.failed and s.reward is not None
        ]
        rewards = [samples[row].reward for row in rows]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for row, reward in zip(rows, rewards, strict=True):
            found[row] = 0.0 if max(rewards) == min(rewards) else (reward - mean) / (std + 1e-6)
    return found


def megatron_update(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], loss: str, max_tokens: int
) -> dict:
    """The product's update on one rank: metrics and this rank's boxes of the new weights."""
    context = init_parallel(layout, seed=1)
    shape = read_shape(folder)
    source = HFSource(folder)

    def model():
        chunks = build_model(
            shape,
            context,
            dtype=torch.float32,
            padded_vocab=padded_vocab(VOCAB, layout.tp),
            settings=ModelSettings(),
        )
        load_weights_(chunks, source, shape, context)
        return chunks

    chunks = model()
    trainable = wrap_and_build(
        chunks, context, OptimSettings(lr=LR, eps=EPS, weight_decay=DECAY, grad_clip=CLIP)
    )
    scoring, phases = Scoring(context, TEMPERATURE, VALID), Phases()
    settings = PolicySettings(
        objective=Objective(
            loss=loss,
            settings=resolve_loss_defaults(loss, beta=BETA),
            correction=resolve_correction("token_truncate", 2.0),
        ),
        mismatch_warn=1e9,
        mismatch_stop=1e9,
        mismatch_patience=2,
    )
    kl = KLController(resolve_controller("fixed", beta=BETA))
    policy = Policy(trainable, scoring, settings, LRSchedule("constant", LR), kl, phases)
    cut = CutSettings(
        minibatch_prompts=2,
        max_tokens=max_tokens,
        min_packs=layout.pp,
        max_response_tokens=LIMIT,
    )
    batch = make_batch(
        samples,
        AdvantageSettings("std", "mean", None),
        cut,
        dp=layout.dp,
        dp_rank=context.coords.dp,
    )
    batch = policy.score_old(batch, step=1)
    batch = Reference(model(), scoring, phases).score(batch)
    metrics = policy.update(batch).as_metrics()
    parameters = local_parameters(trainable.chunks)
    boxes = [
        (piece.hf, piece.hf_box, parameters[piece.megatron][index(piece.megatron_box)].detach())
        for piece in expand(shape, layout, context.coords, naming_profile())
    ]
    return {"metrics": metrics, "boxes": [(n, b, t.clone()) for n, b, t in boxes]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(make_hf_folder(tmp_path_factory.mktemp("hf"), "qwen3", vocab_size=VOCAB))


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    with torch.no_grad():
        return make_samples(folder)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_update_is_the_same_at_every_layout_and_equals_plain_torch(
    folder: Path, samples: list[Sample], loss: str
) -> None:
    """PAR-26 for one rollout of two optimizer steps, LOSS-1, LOSS-2, LOSS-4, LP-19, LP-20."""
    want = reference_update(folder, samples, loss)
    assert want["moved"] > 1e-3
    first: dict[str, float] = {}
    for tp, pp, dp in LAYOUTS:
        for max_tokens in (24, 96):
            layout = Layout(tp * pp * dp, tp, pp)
            results = run_ranks(
                layout.world, megatron_update, folder, layout, samples, loss, max_tokens
            )
            where = f"tp {tp} pp {pp} dp {dp} packs of {max_tokens}"
            metrics = results[0]["metrics"]
            first = first or metrics
            for other in results:
                assert other["metrics"] == metrics, where
            assert metrics.keys() == first.keys(), where
            for name, value in first.items():
                assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (where, name)
            assert metrics["actor/loss"] == pytest.approx(want["loss"], rel=1e-5), where
            assert metrics["actor/grad_norm"] == pytest.approx(want["norm"], rel=1e-5), where
            seen = set()
            for result in results:
                for name, box, value in result["boxes"]:
                    seen.add(name)
                    error = relative(value, want["weights"][name][index(box)])
                    assert error < 1e-5, (where, name, box, error)
            assert seen == set(want["weights"]), where
