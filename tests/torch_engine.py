"""A rollout engine in plain transformers for whole training runs without vLLM.

It generates from the weights that a sync gave it, one request at a time, with log-probs of the
distribution sampled from. Every rank of a replica holds the whole model, whatever `rollout.tp` is.
A test can put words in its mouth, bend its log-probs and read what it was asked for.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megagrpo.config_file import load_config
from megagrpo.model.build import local_parameters
from megagrpo.parallel import platform
from megagrpo.rollout.engine import EngineSettings
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.preflight import prepare
from megagrpo.trainer.run import Run
from megagrpo.trainer.setup import build_run
from megagrpo.types import Box, Completion, Request, Sampling, TensorInfo
from tests.sync_stubs import StubEngine
from tests.tiny_models import make_hf_folder

platform.mask_broken_media_packages()
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

REWARDS = '''
def low_ids(prompts, completions, completion_ids, **columns):
    """Share of ids below 50: differs between the samples of a group."""
    return [sum(i < 50 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def echo(prompts, completions, answer, completion_ids, finished):
    """1 where the completion is the prompt without its last character, by either name."""
    for prompt, wanted, ids, done in zip(prompts, answer, completion_ids, finished, strict=True):
        assert wanted == prompt[:-1] and done == (ids[-1] == 1), (prompt, wanted, ids, done)
    return [float(c == a) for c, a in zip(completions, answer)]


def ones(completions, **columns):
    return [1.0] * len(completions)


def broken(completions, **columns):
    raise KeyError("gold")


def unrated(completions, **columns):
    return [None] * len(completions)
'''


@dataclass
class TorchEngine(StubEngine):
    """See the module; `asked` keeps (version, sampling, requests) of every call to generate."""

    settings: EngineSettings | None = None
    script: Callable[[Request, Sampling], Sequence[int]] | None = None
    bend: Callable[[list[float]], list[float]] = list
    raw: bool = False  # log-probs without the temperature
    asked: list[tuple[int, Sampling, list[Request]]] = field(default_factory=list)

    def box(self, info: TensorInfo) -> Box:
        return tuple((0, size) for size in info.shape)

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        assert self.awake and self.events[-1] == "wake_kv_cache", self.events
        assert self.settings is not None
        self.asked.append((self.version, sampling, list(requests)))
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(self.settings.model_folder), attn_implementation="eager"
        )
        model.load_state_dict(self.weights, strict=False)
        model.tie_weights()
        done = [self._complete(model.eval(), request, sampling) for request in requests]
        for index in reversed(range(len(done))):  # the last asked for ends first
            if on_done is not None:
                on_done(index, done[index])
        return done

    def _complete(self, model: Any, request: Request, sampling: Sampling) -> Completion:
        assert self.settings is not None
        generator = torch.Generator().manual_seed(request.seed)
        words = None if self.script is None else list(self.script(request, sampling))
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < (sampling.max_tokens if words is None else len(words)):
            seen = torch.tensor([[*request.prompt_ids, *ids]])
            logits = model(seen, use_cache=False).logits[0, -1, : self.settings.valid_vocab]
            scaled = logits if sampling.temperature == 0 else logits / sampling.temperature
            spread = torch.log_softmax(logits if self.raw else scaled, dim=-1)
            if words is not None:
                choice = words[len(ids)]
            elif sampling.temperature == 0:
                choice = int(logits.argmax())
            else:
                chances = torch.softmax(scaled, dim=-1)
                choice = int(torch.multinomial(chances, 1, generator=generator))
            ids.append(choice)
            logprobs.append(float(spread[choice]))
            if choice in sampling.stop_ids:
                break
        stopped = bool(ids) and ids[-1] in sampling.stop_ids
        return Completion(tuple(ids), tuple(self.bend(logprobs)), stopped)


def make_place(
    folder: Path,
    family: str = "qwen3",
    tied: bool = False,
    vocab_size: int = 128,
    **generation: Any,
) -> Path:
    """A tiny model with tokenizer, 12 numbered prompts, 3 held-out ones, some rewards;
    `generation` goes to generation_config.json."""
    sizes = {"num_hidden_layers": 2, "vocab_size": vocab_size}
    make_hf_folder(folder / "hf", family, tied, with_tokenizer=True, **sizes)
    path = folder / "hf" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    rows = [{"prompt": f"{number}>", "answer": str(number)} for number in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (folder / "reward.py").write_text(REWARDS)
    return folder


def words(place: Path, run_dir: Path, *more: str, reward: str = "low_ids") -> list[str]:
    """Overrides of a small run; `more` come last and win."""
    return [
        f"model.path={place}/hf",
        f"data.train={place}/train.jsonl",
        f"rewards=[{{path: '{place}/reward.py:{reward}', name: score}}]",
        f"trainer.run_dir={run_dir}",
        "trainer.steps=2",
        "rollout.group_size=4",
        "rollout.temperature=0.6",
        "rollout.max_prompt_tokens=4",
        "rollout.max_response_tokens=5",
        "data.prompts_per_step=4",
        "data.max_tokens_per_microbatch=32",
        "optim.lr=1e-2",
        "optim.eps=1e-3",
        "log.tensorboard=false",
        "log.num_samples=0",
        *more,
    ]


def build(rank: int, world: int, overrides: Sequence[str], **engine: Any) -> Run:
    """The product's own composition with a TorchEngine in vLLM's place; all ranks call it."""

    def stand_in(settings: EngineSettings, rank: int, world: int) -> TorchEngine:
        return TorchEngine(
            rank=rank,
            world=world,
            tp=settings.tp,
            settings=settings,
            **engine,
        )

    # In this forked rank only, and without importing vLLM.
    module = ModuleType("megagrpo.rollout.vllm_engine")
    module.VLLMEngine = stand_in  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    run = build_run(prepare(load_config(None, overrides), rank, world), Phases())
    run.reporter = _Recording(run.reporter)
    return run


class _Recording:
    """The run's reporter, which also keeps on every rank what rank 0 writes."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self.lines: list[dict[str, float]] = []
        write = reporter._write

        def keep(step: int, optimizer_step: int, metrics: Any) -> None:
            self.lines.append({"step": step, "optimizer_step": optimizer_step, **metrics})
            write(step, optimizer_step, metrics)

        reporter._write = keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """What depends neither on the machine nor on the layout."""
    apart = ("timing_s/", "perf/", "memory/", "sync/")
    return {name: value for name, value in line.items() if not name.startswith(apart)}


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters."""
    return {
        name: value.detach().clone()
        for name, value in local_parameters(run.policy.trainable.chunks).items()
    }
