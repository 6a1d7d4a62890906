"""Builds the engine of a prepared run, for training and for `megagrpo evaluate` alike."""

from megagrpo.rollout.engine import EngineSettings, RolloutEngine
from megagrpo.trainer.preflight import Prepared


def build_engine(prepared: Prepared) -> RolloutEngine:
    """The engine, asleep; all ranks of the world join, with the default process group in place."""
    from megagrpo.rollout.vllm_engine import VLLMEngine  # vLLM takes seconds to import

    rollout = prepared.config.rollout
    assert rollout.seed is not None, "preflight resolves the seed"
    settings = EngineSettings(
        model_folder=str(prepared.hf_folder),
        dtype=prepared.dtype,
        tp=rollout.tp,
        max_model_len=rollout.max_prompt_tokens + rollout.max_response_tokens,
        kv_cache_gb=rollout.kv_cache_gb,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        max_num_seqs=rollout.max_num_seqs,
        valid_vocab=prepared.valid_vocab,
        seed=rollout.seed,
        timeout_s=prepared.config.parallel.timeout_s,
    )
    return VLLMEngine(settings, prepared.rank, prepared.layout.world)
