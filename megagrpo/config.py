"""The one tree of settings: frozen dataclasses with a line of help for every key.

A key exists here only if something reads it. The `algorithm` section is in `config_algorithm.py`,
reading files and overrides in `config_file.py`, checks in `config_checks.py`.
"""

from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from megagrpo.config_algorithm import AlgorithmConfig
from megagrpo.config_fields import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SEED, key


@dataclass(frozen=True)
class ModelConfig:
    """The policy's start weights."""

    path: str = key("", "converted checkpoint or HuggingFace folder (required)", first=True)
    dtype: str = key(
        "auto",
        "training dtype; auto is bfloat16 on GPU and float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    tokenizer: str | None = key(None, "tokenizer folder; null is the model's own")


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy that KL is measured against."""

    use: str = key(
        "auto",
        "auto loads it when algorithm.kl.beta > 0; always also scores it at beta 0",
        choices=("auto", "always", "never"),
        first=True,
    )
    path: str | None = key(None, "checkpoint or HuggingFace folder; null is model.path at step 0")
    offload: bool | None = key(
        None, "weights wait in host memory until they score; null: on a GPU yes, on CPU no"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks are cut; data parallel is what is left."""

    tp: int = key(1, "tensor-parallel ranks of the policy", within=AT_LEAST_ONE, first=True)
    pp: int = key(1, "pipeline stages of the policy", within=AT_LEAST_ONE, first=True)
    first_stage_layers: int | None = key(
        None, "layers of the first stage of an uneven pipeline", within=AT_LEAST_ONE
    )
    last_stage_layers: int | None = key(
        None, "layers of the last stage of an uneven pipeline", within=AT_LEAST_ONE
    )
    vpp: int = key(1, "virtual pipeline stages; only 1 in this version")
    cp: int = key(1, "context-parallel ranks; only 1 in this version")
    ep: int = key(1, "expert-parallel ranks; only 1 in this version")
    etp: int = key(1, "tensor-parallel ranks of experts; only 1 in this version")
    sequence_parallel: bool = key(False, "split norms and dropout over the tensor ranks; tp > 1")
    recompute: str = key("none", "activation recomputation", choices=("none", "selective", "full"))
    use_distributed_optimizer: bool = key(True, "shard optimizer state over data parallel")
    timeout_s: int = key(
        1800, "seconds a collective waits for a lost rank before the run ends", within=AT_LEAST_ONE
    )


@dataclass(frozen=True)
class RolloutConfig:
    """The engine and how it samples."""

    tp: int = key(
        1,
        "tensor-parallel ranks of one engine replica; divides the world",
        within=AT_LEAST_ONE,
        first=True,
    )
    group_size: int = key(8, "completions per prompt (G), at least 2", first=True)
    max_prompt_tokens: int = key(1024, "longest prompt, tokens", within=AT_LEAST_ONE, first=True)
    max_response_tokens: int = key(
        1024, "longest completion, tokens", within=AT_LEAST_ONE, first=True
    )
    temperature: float = key(1.0, "sampling temperature, > 0; the trainer divides by it too")
    top_p: float = key(1.0, "must stay 1.0 in training: the trainer does not filter")
    top_k: int = key(0, "must stay 0 (off) in training: the trainer does not filter")
    min_p: float = key(0.0, "must stay 0.0 in training: the trainer does not filter")
    seed: int | None = key(None, "sampling seed; null is trainer.seed", within=SEED)
    kv_cache_gb: float | None = key(
        None, "KV cache of one rank, GiB; null: 0.25 on CPU", within=POSITIVE
    )
    gpu_memory_utilization: float = key(
        0.6, "share of GPU memory the engine may take when awake", within="(0, 1]"
    )
    max_num_seqs: int = key(256, "sequences the engine runs at once", within=AT_LEAST_ONE)
    timeout_s: int = key(1800, "seconds the slowest replica may generate", within=AT_LEAST_ONE)
    dump: bool = key(True, "write rollouts/step_N.jsonl")
    max_failed_share: float = key(
        0.5,
        "end the run when more of a generated batch's samples failed; 1 is off",
        within="[0, 1]",
    )
    oversample_prompts: int = key(
        0,
        "prompts of a batch beyond prompts_per_step; the first usable groups are trained, in order "
        "of submission",
        within=NOT_NEGATIVE,
    )
    max_num_gen_batches: int | None = key(
        None,
        "batches a step may generate with filter_flat_groups; null is 10",
        within=AT_LEAST_ONE,
    )


@dataclass(frozen=True)
class DataConfig:
    """Prompts and how many of them."""

    train: str = key("", "training prompts: .jsonl, .parquet or a dataset folder", first=True)
    eval: str | None = key(None, "held-out prompts; null evaluates nothing", first=True)
    prompt_column: str = key("prompt", "column with the prompt: text or chat messages")
    chat_template_kwargs: dict[str, Any] = key({}, "extra arguments of the chat template")
    overlong_prompts: str = key(
        "drop",
        "prompts over rollout.max_prompt_tokens: drop and count, or error",
        choices=("drop", "error"),
    )
    prompts_per_step: int = key(128, "prompts of one rollout", within=AT_LEAST_ONE, first=True)
    minibatch_prompts: int | None = key(None, "prompts of one optimizer step; null is all")
    max_tokens_per_microbatch: int = key(
        16384, "tokens of one forward pass on a rank", within=AT_LEAST_ONE
    )
    shuffle_seed: int | None = key(
        None, "seed of the prompt order; null is trainer.seed", within=SEED
    )
    bucket_by_length: bool = key(False, "prompts of like length in a step, the steps shuffled")


@dataclass(frozen=True)
class RewardConfig:
    """One reward function or model."""

    path: str = key(
        "",
        "a built-in name (exact_match, math_answer, multiple_choice, regex_format, length_penalty, "
        "soft_overlong, repetition_penalty, code_tests), module:function, file.py:function or the "
        "folder of a sequence-classification model",
    )
    name: str | None = key(None, "name in metrics; null is the function's or the folder's")
    weight: float = key(1.0, "factor in the total")
    timeout_s: float = key(
        60.0, "seconds a call may take before its samples count as failed", within=POSITIVE
    )
    retries: int = key(0, "more calls for a completion whose own call raised", within=NOT_NEGATIVE)
    isolate: bool | None = key(
        None,
        "run a plain function in worker processes, which may hang and die; null: math_answer, "
        "regex_format and code_tests do",
    )
    workers: int | None = key(
        None, "worker processes of an isolated function; null is 2", within=AT_LEAST_ONE
    )
    concurrency: int | None = key(
        None, "groups that an async function has at once; null is 256", within=AT_LEAST_ONE
    )
    kwargs: dict[str, Any] = key({}, "extra keyword arguments")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule, counted in optimizer steps."""

    lr: float = key(1e-6, "peak learning rate", within=NOT_NEGATIVE, first=True)
    min_lr: float = key(
        0.0, "learning rate at the end of a linear or cosine schedule", within=NOT_NEGATIVE
    )
    schedule: str = key("constant", "after warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", within=NOT_NEGATIVE, first=True)
    weight_decay: float = key(0.01, "decoupled weight decay of matrices", within=NOT_NEGATIVE)
    betas: list[float] = key([0.9, 0.999], "Adam's two moments")
    eps: float = key(1e-8, "Adam's epsilon", within=POSITIVE)
    grad_clip: float = key(1.0, "bound on the global gradient norm; 0 is off", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class TrainerConfig:
    """Length, place and checkpoints of the run."""

    steps: int | None = key(
        None, "rollout steps; null runs `epochs`", within=AT_LEAST_ONE, first=True
    )
    epochs: int = key(1, "passes over the prompts when steps is null", within=AT_LEAST_ONE)
    run_dir: str = key("runs/megagrpo", "folder of the run", first=True)
    save_every: int = key(
        0, "steps between checkpoints; 0 saves only the last", within=NOT_NEGATIVE, first=True
    )
    keep_last: int = key(2, "checkpoints kept; at least 1", within=AT_LEAST_ONE)
    export_hf_every: int = key(
        0, "steps between saves that also write run_dir/hf/step_N; 0 is off", within=NOT_NEGATIVE
    )
    resume: str = key(
        "auto",
        "auto continues the newest complete checkpoint of run_dir, never starts anew",
        choices=("auto", "never"),
    )
    seed: int = key(0, "seed of everything that has none of its own", within=SEED)


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation."""

    every: int = key(
        0, "steps between evaluations; 0 only at the ends", within=NOT_NEGATIVE, first=True
    )
    at_start: bool = key(True, "evaluate before the first step")
    samples: int = key(
        1, "completions per held-out prompt (k of mean@k, pass@k, maj@k)", within=AT_LEAST_ONE
    )
    temperature: float = key(0.0, "evaluation temperature; 0 is greedy")
    top_p: float = key(1.0, "nucleus of evaluation samples; 1 is off", within="(0, 1]")
    top_k: int = key(0, "most likely ids evaluation samples from; 0 is off", within=NOT_NEGATIVE)
    min_p: float = key(
        0.0, "probability over the likeliest id's that evaluation needs; 0 is off", within="[0, 1]"
    )
    seed: int | None = key(None, "seed of evaluation samples; null is trainer.seed", within=SEED)
    max_prompts: int | None = key(
        None, "held-out prompts used, the first ones; null is all", within=AT_LEAST_ONE
    )
    solved_at: float = key(1.0, "total reward from which pass@k counts a completion as solved")
    answer_pattern: str | None = key(
        None,
        "maj@k: regular expression with one group, whose last match is the answer that votes, e.g. "
        "'<answer>(.*?)</answer>'; null: the whole completion votes",
    )
    compare_every: int = key(
        0,
        "steps between blind comparisons with the reference, comparisons/step_N.html; 0 is off",
        within=NOT_NEGATIVE,
    )
    compare_prompts: int = key(8, "held-out prompts of one comparison", within=AT_LEAST_ONE)


@dataclass(frozen=True)
class LogConfig:
    """Where numbers go besides metrics.jsonl."""

    tensorboard: bool = key(True, "write TensorBoard events")
    wandb: str | None = key(None, "Weights & Biases project; null is off")
    num_samples: int = key(2, "completions printed at a time", within=NOT_NEGATIVE)
    samples_every: int = key(
        10, "steps between printed completions; 0 prints none", within=NOT_NEGATIVE
    )


@dataclass(frozen=True)
class HealthConfig:
    """When to warn, here and in the report; null is never."""

    window: int = key(10, "steps that a level is the mean of", within=AT_LEAST_ONE)
    span: int = key(100, "steps over which slow trends are judged", within=AT_LEAST_ONE)
    clipped_share: float | None = key(
        0.05, "share of advantages at algorithm.advantage_clip", within=NOT_NEGATIVE
    )
    kl: float | None = key(0.5, "KL to the reference, nats per token", within=NOT_NEGATIVE)
    kl_rise: float | None = key(
        0.1, "rise of that KL over the span, in each fifth of it, nats", within=NOT_NEGATIVE
    )
    grad_norm: float | None = key(5.0, "gradient norm before clipping", within=NOT_NEGATIVE)
    length_factor: float | None = key(
        2.0, "growth of responses over the span without a gain in reward", within="(1, inf)"
    )
    flat_share: float | None = key(0.8, "share of groups with equal rewards", within="[0, 1]")
    repetition_rise: float | None = key(
        0.1, "rise of rollout/repetition_share over the span", within=NOT_NEGATIVE
    )
    held_out_drop: float | None = key(
        0.02,
        "fall of the held-out mean between two pairs of evaluations, beyond its noise, while the "
        "reward rises",
        within=NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class Config:
    """The root; only `trainer/setup.py` and `cli.py` read it."""

    model: ModelConfig = key(ModelConfig, "policy")
    reference: ReferenceConfig = key(ReferenceConfig, "reference policy")
    parallel: ParallelConfig = key(ParallelConfig, "layout of the trainer")
    rollout: RolloutConfig = key(RolloutConfig, "generation")
    algorithm: AlgorithmConfig = key(AlgorithmConfig, "loss and advantages")
    data: DataConfig = key(DataConfig, "prompts")
    rewards: list[RewardConfig] = key([], "reward functions; at least one")
    optim: OptimConfig = key(OptimConfig, "optimizer")
    trainer: TrainerConfig = key(TrainerConfig, "run")
    eval: EvalConfig = key(EvalConfig, "evaluation")
    log: LogConfig = key(LogConfig, "reporters")
    health: HealthConfig = key(HealthConfig, "warnings")


def known_keys(node: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every leaf key with its dataclass field, e.g. {"optim.lr": Field}."""
    found: dict[str, Any] = {}
    for item in fields(node):
        name = f"{prefix}{item.name}"
        if isinstance(item.type, type) and is_dataclass(item.type):
            found.update(known_keys(item.type, f"{name}."))
        else:
            found[name] = item
    return found


def help_text(short: bool) -> str:
    """One line per key: name, default, meaning, choices; `short` shows a first run's keys."""
    lines = []
    entry = {f"rewards[].{item.name}": item for item in fields(RewardConfig)}
    for name, item in (known_keys() | entry).items():
        if short and not item.metadata["first"]:
            continue
        default = item.default if item.default is not MISSING else item.default_factory()
        choices = [str(choice) for choice in item.metadata["choices"] if choice is not None]
        one_of = f" ({' | '.join(choices)})" if choices else ""
        shown = "null" if default is None else default
        lines.append(f"  {name}={shown}\n      {item.metadata['help']}{one_of}")
    return "\n".join(lines)
