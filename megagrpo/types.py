"""The nouns that cross folder borders: shape, layout, prompt, completion, sample, micro-batch.

They carry facts and small derived numbers, never behaviour that needs a process group, a model or
a file. Left out: anything that only one folder uses.

Letters: B sequences, T packed tokens, G group size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Box = tuple[tuple[int, int], ...]
"""A half-open range (start, stop) for every dimension of a tensor, e.g. ((0, 4), (8, 16))."""

Fetch = Callable[[str, Box], torch.Tensor]
"""fetch(hf_name, box) returns that region of the HuggingFace tensor; it never communicates."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of one HuggingFace tensor; no data."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling: `factor` in wavelengths past `original_max_positions`."""

    kind: str  # "llama3", "linear" or (latent attention only) "yarn"
    factor: float  # ratio by which positions are stretched
    low_freq_factor: float = 1.0  # wavelengths longer than original/low are divided by factor
    high_freq_factor: float = 4.0  # wavelengths shorter than original/high stay as they are
    original_max_positions: int = 8192  # tokens the model was trained on first
    beta_fast: float = 32.0  # yarn: turns within the first length above which nothing is stretched
    beta_slow: float = 1.0  # yarn: turns below which everything is stretched
    mscale: float = 1.0  # yarn: cosine and sine grow by 0.1 * mscale * log(factor) + 1
    mscale_all_dim: float = 0.0  # yarn: scores grow by the square of that with this number


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces the MLP of every layer, or of all but the first ones."""

    count: int
    top_k: int  # experts per token
    router_bias: bool = False  # a bias per expert that only steers the choice
    ffn_hidden_size: int | None = None  # of one expert; None: the model's
    shared_ffn: int = 0  # size of the shared experts, which every token passes; 0: none
    dense_layers: int = 0  # layers at the start that have a plain MLP of the model's size
    score: str = "softmax"  # or "sigmoid": how logits become weights
    normalized: bool = True  # the weights of the chosen experts add up to 1 before `scale`
    scale: float = 1.0  # factor of the chosen experts' weights
    groups: int = 1  # experts are chosen within the best `groups_kept` of so many groups
    groups_kept: int = 1
    group_score_top: int = 0  # experts of a group whose scores add up to the group's


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): queries and keys come out of low-rank vectors.

    A head of a query or key is [nope_dim without position; rope_dim with it]; all heads share the
    key's part with position. `ModelShape.head_dim` is nope_dim + rope_dim.
    """

    query_rank: int | None  # None: queries come straight out of the hidden state
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class GemmaTraits:
    """What Gemma 2 and 3 have beyond a Llama: norms that multiply by 1 + weight, a norm behind
    attention and one behind the MLP, embeddings times sqrt(hidden), and tanh-GELU for SiLU."""

    query_scale: float  # attention scores are multiplied by it
    windows: tuple[int | None, ...]  # by layer: tokens that a query sees, itself included; or all
    local_rope_theta: float  # rotary base of the layers with a window
    attention_softcap: float | None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None


@dataclass(frozen=True)
class ModelShape:
    """What the weights of a decoder look like, normalised from a HuggingFace `config.json`.

    Example (the toy of the tests): 4 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16: the fused
    QKV weight is [(4 + 2 * 2) * 16, 64] = [128, 64].
    """

    architecture: str  # HuggingFace class name, e.g. "Qwen3ForCausalLM"
    family: str  # transformers' model type, e.g. "llama", "qwen3_moe"
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads (query groups)
    head_dim: int
    vocab_size: int  # rows of the HuggingFace embedding, without any padding of ours
    tied: bool  # the output head shares the embedding; taken from the config, never from names
    qkv_bias: bool
    qk_norm: bool  # per-head RMSNorm of queries and keys
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    dtype: torch.dtype  # dtype that the config declares
    experts: Experts | None = None
    latent: LatentAttention | None = None
    gemma: GemmaTraits | None = None


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands; every field counts from 0."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class Layout:
    """How `world` ranks are cut; data parallel is what is left. Order: tensor fastest, then data,
    then pipeline, as megatron-core's default "tp-cp-ep-dp-pp".

    Example: Layout(world=8, tp=2, pp=2) has dp 2; rank 5 is tp 1, dp 0, pp 1.
    """

    world: int
    tp: int = 1
    pp: int = 1
    first_stage_layers: int | None = None  # declared uneven split, else layers / pp
    last_stage_layers: int | None = None

    @property
    def dp(self) -> int:
        """Data-parallel size: world / (tp * pp)."""
        return self.world // (self.tp * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank."""
        return Coordinates(
            tp=rank % self.tp,
            dp=rank // self.tp % self.dp,
            pp=rank // (self.tp * self.dp),
        )

    def stage_layers(self, num_layers: int) -> list[tuple[int, int]]:
        """Global layers [start, stop) of every pipeline stage; raises ValueError if one is empty
        or the layers do not divide."""
        sizes: list[int | None] = [None] * self.pp
        if self.first_stage_layers is not None:
            sizes[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            sizes[-1] = self.last_stage_layers
        open_stages = sizes.count(None)
        left = num_layers - sum(size for size in sizes if size is not None)
        if (open_stages == 0 and left != 0) or (open_stages and left % open_stages):
            raise ValueError(
                f"parallel.pp={self.pp} does not divide the model's {num_layers} layers; choose a "
                "divisor or declare parallel.first_stage_layers / last_stage_layers"
            )
        full = [left // open_stages if size is None else size for size in sizes]
        if min(full) < 1:
            raise ValueError(
                f"parallel.pp={self.pp} leaves a stage without layers (model has {num_layers}); "
                f"use at most pp={num_layers}"
            )
        starts = [sum(full[:stage]) for stage in range(self.pp)]
        return [(start, start + size) for start, size in zip(starts, full, strict=True)]


class TensorSource(Protocol):
    """Read access to a checkpoint, HuggingFace or Megatron, under HuggingFace names."""

    def tensors(self) -> list[TensorInfo]:
        """Every tensor of the model, in a fixed order."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That region, contiguous, on CPU, in the stored dtype; KeyError names a missing tensor."""


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, rendered to token ids once."""

    index: int  # row number in the dataset file
    ids: tuple[int, ...]
    text: str  # the rendered prompt
    columns: Mapping[str, Any]  # the other columns; they reach the rewards
    messages: Any = None  # the prompt column as it stands in the file: text or chat messages


@dataclass(frozen=True)
class Sampling:
    """How to sample; every field is sent to the engine explicitly."""

    temperature: float  # 0 means greedy (evaluation only)
    max_tokens: int
    stop_ids: tuple[int, ...]  # end-of-sequence ids
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """One completion that is wanted."""

    prompt_ids: tuple[int, ...]
    seed: int  # differs for every (run seed, step, prompt, sample)


@dataclass(frozen=True)
class Completion:
    """One sampled answer; ids as sampled, the end-of-sequence id included.

    Example: ids (17, 4, 1), logprobs (-0.2, -0.9, -0.01), stopped True.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # processed, of the sampled token, nats
    stopped: bool  # ended by an end-of-sequence id; False means cut at the length limit


@dataclass(frozen=True)
class Sample:
    """A completion in its group with its rewards."""

    prompt: Prompt
    group: int  # from the sampler: number of the prompt within the step
    member: int  # 0 .. G-1
    completion: Completion
    text: str  # decoded completion without special tokens
    rewards: Mapping[str, float | None] = field(default_factory=dict)  # by reward name
    reward: float | None = None  # weighted total; None is a missing reward
    failed: bool = False  # generation or every reward failed: leaves statistics and counts


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed behind one another for one forward pass, all tensors on the CPU.

    Position t predicts token t + 1 of its own sequence: `labels[t]` is that token and `mask[t]` is
    1 only where it was sampled by the policy. Values per token stand at the predicting position.

    Example: prompt (5, 6), completion (7,): tokens [5, 6, 7], labels [6, 7, 0], mask [0, 1, 0],
    positions [0, 1, 2], cu_seqlens [0, 3].
    """

    tokens: torch.Tensor  # [T] int64
    labels: torch.Tensor  # [T] int64; 0 where there is none
    positions: torch.Tensor  # [T] int64, restart at 0 in every sequence
    mask: torch.Tensor  # [T] bool
    cu_seqlens: torch.Tensor  # [B + 1] int32
    rows: tuple[int, ...]  # index of each sequence in the caller's list; -1 for a dummy
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [T]
