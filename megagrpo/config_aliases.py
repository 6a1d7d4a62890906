"""What verl and TRL call our keys: one table for the message about an unknown key and the README.

Names are those of verl's `ppo_megatron_trainer.yaml` and of TRL 1.16's GRPOConfig with its
TrainingArguments. A note says where the same setting has another unit or other values. Left out:
keys that both systems and we call alike within the same section, and reading their files.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Alias:
    """One of our keys and what others call it; () where they have no such key."""

    ours: str
    verl: tuple[str, ...] = ()  # full dotted names
    trl: tuple[str, ...] = ()
    note: str = ""  # where the meaning differs


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_LAYOUT = f"{_ACTOR}megatron."
_CORRECTION = "algorithm.rollout_correction."
ALIASES = (
    Alias("model.path", ("actor_rollout_ref.model.path",), ("model_name_or_path",)),
    Alias("rollout.group_size", (f"{_ROLLOUT}n",), ("num_generations",)),
    Alias(
        "data.prompts_per_step",
        ("data.train_batch_size", "data.gen_batch_size"),
        ("generation_batch_size",),
        "prompts; TRL counts completions",
    ),
    Alias(
        "data.minibatch_prompts",
        (f"{_ACTOR}ppo_mini_batch_size",),
        ("steps_per_generation",),
        "prompts of one optimizer step; TRL counts the steps",
    ),
    Alias(
        "data.max_tokens_per_microbatch",
        (f"{_ACTOR}ppo_max_token_len_per_gpu", f"{_ACTOR}ppo_micro_batch_size_per_gpu"),
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        "tokens; the number of micro-batches follows",
    ),
    Alias("algorithm.num_iterations", (f"{_ACTOR}ppo_epochs",), ("num_iterations",)),
    Alias("rollout.max_prompt_tokens", ("data.max_prompt_length",), ("max_prompt_length",)),
    Alias(
        "rollout.max_response_tokens",
        ("data.max_response_length", f"{_ROLLOUT}response_length"),
        ("max_completion_length",),
    ),  # fmt: skip
    Alias("rollout.temperature", (f"{_ROLLOUT}temperature",), ("temperature",)),
    Alias("rollout.tp", (f"{_ROLLOUT}tensor_model_parallel_size",), ("vllm_tensor_parallel_size",)),
    Alias(
        "rollout.gpu_memory_utilization",
        (f"{_ROLLOUT}gpu_memory_utilization",),
        ("vllm_gpu_memory_utilization",),
    ),  # fmt: skip
    Alias("rollout.max_num_seqs", (f"{_ROLLOUT}max_num_seqs",)),
    Alias("rollout.max_num_gen_batches", ("algorithm.filter_groups.max_num_gen_batches",)),
    Alias("algorithm.filter_flat_groups", ("algorithm.filter_groups.enable",)),
    Alias("algorithm.truncated", (), ("mask_truncated_completions",), "`mask` or `keep`"),
    Alias("algorithm.loss", (f"{_ACTOR}policy_loss.loss_mode",), ("loss_type",)),
    Alias("algorithm.aggregation", (f"{_ACTOR}loss_agg_mode",), (), "TRL's follows its loss_type"),
    Alias("algorithm.level", (), ("importance_sampling_level",)),
    Alias("algorithm.eps_low", (f"{_ACTOR}clip_ratio_low", f"{_ACTOR}clip_ratio"), ("epsilon",)),
    Alias("algorithm.eps_high", (f"{_ACTOR}clip_ratio_high",), ("epsilon_high",)),
    Alias("algorithm.dual_clip", (f"{_ACTOR}clip_ratio_c",), (), "off unless set; verl's is 3"),
    Alias("algorithm.delta", (), ("delta",)),
    Alias("algorithm.tau_positive", (), ("sapo_temperature_pos",)),
    Alias("algorithm.tau_negative", (), ("sapo_temperature_neg",)),
    Alias("algorithm.gamma_positive", (), ("vespo_k_pos", "vespo_lambda_pos"), "[k, lambda]"),
    Alias("algorithm.gamma_negative", (), ("vespo_k_neg", "vespo_lambda_neg"), "[k, lambda]"),
    Alias("algorithm.entropy_coef", (f"{_ACTOR}entropy_coeff",), ("entropy_coef",)),
    Alias("algorithm.top_entropy_quantile", (), ("top_entropy_quantile",)),
    Alias(
        "algorithm.normalize",
        ("algorithm.norm_adv_by_std_in_grpo",),
        ("scale_rewards",),
        "`std`, `none` or `batch`",
    ),
    Alias(
        "algorithm.baseline",
        ("algorithm.adv_estimator",),
        (),
        "`mean` is verl's grpo, `leave_one_out` its rloo",
    ),
    Alias("algorithm.combine", (), ("multi_objective_aggregation",)),
    Alias("algorithm.kl.beta", (f"{_ACTOR}kl_loss_coef", "algorithm.kl_ctrl.kl_coef"), ("beta",)),
    Alias("algorithm.kl.estimator", (f"{_ACTOR}kl_loss_type", "algorithm.kl_penalty")),
    Alias(
        "algorithm.kl.place",
        ("algorithm.use_kl_in_reward", f"{_ACTOR}use_kl_loss"),
        (),
        "`reward` or `loss`",
    ),
    Alias("algorithm.kl.unbiased", (), ("use_bias_correction_kl",)),
    Alias(
        "algorithm.kl.controller.kind",
        ("algorithm.kl_ctrl.type",),
        (),
        "verl's `adaptive` is `proportional`",
    ),  # fmt: skip
    Alias("algorithm.kl.controller.target", ("algorithm.kl_ctrl.target_kl",)),
    Alias("algorithm.kl.controller.horizon", ("algorithm.kl_ctrl.horizon",)),
    Alias(
        "algorithm.correction.mode",
        (f"{_CORRECTION}rollout_is", f"{_CORRECTION}rollout_rs", "algorithm.rollout_is"),
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_correction"),
    ),
    Alias(
        "algorithm.correction.cap",
        (
            f"{_CORRECTION}rollout_is_threshold",
            f"{_CORRECTION}rollout_rs_threshold",
            "algorithm.rollout_is_threshold",
        ),
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    ),
    Alias(
        "algorithm.correction.low",
        (f"{_CORRECTION}rollout_rs_threshold_lower",),
        ("vllm_importance_sampling_clip_min",),
    ),
    Alias("algorithm.correction.off_policy_threshold", (), ("off_policy_mask_threshold",)),
    Alias("parallel.tp", (f"{_LAYOUT}tensor_model_parallel_size",)),
    Alias("parallel.pp", (f"{_LAYOUT}pipeline_model_parallel_size",)),
    Alias("parallel.cp", (f"{_LAYOUT}context_parallel_size",)),
    Alias("parallel.ep", (f"{_LAYOUT}expert_model_parallel_size",)),
    Alias("parallel.sequence_parallel", (f"{_LAYOUT}sequence_parallel",)),
    Alias(
        "parallel.recompute",
        (f"{_LAYOUT}override_transformer_config.recompute_granularity",),
        ("gradient_checkpointing",),
    ),
    Alias("reference.offload", ("actor_rollout_ref.ref.megatron.param_offload",)),
    Alias("optim.lr", (f"{_ACTOR}optim.lr",), ("learning_rate",)),
    Alias("optim.min_lr", (f"{_ACTOR}optim.min_lr",)),
    Alias("optim.schedule", (f"{_ACTOR}optim.lr_decay_style",), ("lr_scheduler_type",)),
    Alias("optim.warmup_steps", (f"{_ACTOR}optim.lr_warmup_steps",), ("warmup_steps",)),
    Alias("optim.weight_decay", (f"{_ACTOR}optim.weight_decay",), ("weight_decay",)),
    Alias("optim.betas", (f"{_ACTOR}optim.betas",), ("adam_beta1", "adam_beta2")),
    Alias("optim.eps", (), ("adam_epsilon",)),
    Alias(
        "optim.grad_clip", (f"{_ACTOR}optim.clip_grad", f"{_ACTOR}grad_clip"), ("max_grad_norm",)
    ),  # fmt: skip
    Alias("data.train", ("data.train_files",), ("dataset_name",)),
    Alias("data.eval", ("data.val_files",)),
    Alias("data.prompt_column", ("data.prompt_key",)),
    Alias(
        "data.chat_template_kwargs", ("data.apply_chat_template_kwargs",), ("chat_template_kwargs",)
    ),  # fmt: skip
    Alias(
        "data.overlong_prompts",
        ("data.filter_overlong_prompts", "data.truncation"),
        (),
        "`drop` or `error`",
    ),
    Alias("data.shuffle_seed", ("data.seed",), ("data_seed",)),
    Alias(
        "rewards.path",
        ("custom_reward_function.path", "reward_model.model.path"),
        ("reward_funcs",),
    ),  # fmt: skip
    Alias("rewards.weight", (), ("reward_weights",)),
    Alias("trainer.steps", ("trainer.total_training_steps",), ("max_steps",), "rollouts"),
    Alias("trainer.epochs", ("trainer.total_epochs",), ("num_train_epochs",)),
    Alias("trainer.run_dir", ("trainer.default_local_dir",), ("output_dir",)),
    Alias("trainer.save_every", ("trainer.save_freq",), ("save_steps",)),
    Alias("trainer.keep_last", ("trainer.max_actor_ckpt_to_keep",), ("save_total_limit",)),
    Alias("trainer.resume", ("trainer.resume_mode",), ("resume_from_checkpoint",)),
    Alias("trainer.seed", (f"{_LAYOUT}seed",), ("seed",)),
    Alias("eval.every", ("trainer.test_freq",), ("eval_steps",)),
    Alias("eval.at_start", ("trainer.val_before_train",), ("eval_on_start",)),
    Alias("eval.samples", (f"{_ROLLOUT}val_kwargs.n",), ("num_generations_eval",)),
    Alias("eval.temperature", (f"{_ROLLOUT}val_kwargs.temperature",)),
    Alias("eval.top_p", (f"{_ROLLOUT}val_kwargs.top_p",)),
    Alias("eval.top_k", (f"{_ROLLOUT}val_kwargs.top_k",)),
    Alias("eval.max_prompts", ("data.val_max_samples",)),
    Alias("log.wandb", ("trainer.project_name", "trainer.logger"), ("report_to",)),
    Alias("log.num_samples", ("trainer.log_val_generations",), ("num_completions_to_print",)),
)
_VLLM = "vLLM always generates, in the trainer's processes"
_PACKED = "data.max_tokens_per_microbatch packs the sequences of every pass by tokens"
ABSENT = {
    "trainer.n_gpus_per_node": "torchrun's --nproc-per-node says it",
    "trainer.nnodes": "torchrun's --nnodes says it",
    "trainer.experiment_name": "trainer.run_dir names a run",
    "trainer.critic_warmup": "GRPO has no critic",
    "critic": "GRPO has no critic",
    "algorithm.gamma": "one reward per completion is never discounted",
    "algorithm.lam": "GRPO has no critic",
    "use_vllm": _VLLM,
    "vllm_mode": _VLLM,
    f"{_ROLLOUT}name": _VLLM,
    f"{_ROLLOUT}mode": _VLLM,
    f"{_ROLLOUT}calculate_log_probs": "the engine's log-probs are always taken",
    f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.model.use_remove_padding": _PACKED,
    f"{_ACTOR}use_dynamic_bsz": _PACKED,
    f"{_ACTOR}strategy": "Megatron is the only one",
    f"{_ACTOR}optim.lr_warmup_steps_ratio": "optim.warmup_steps counts optimizer steps",
    "warmup_ratio": "optim.warmup_steps counts optimizer steps",
    "data.reward_fn_key": "every column of the data reaches the rewards",
    "remove_unused_columns": "every column of the data reaches the rewards",
    "data.shuffle": "prompts are always shuffled, by data.shuffle_seed",
    "shuffle_dataset": "prompts are always shuffled, by data.shuffle_seed",
    "custom_reward_function.name": "rewards.path holds both, as file.py:function",
    "reward_model.overlong_buffer": "the built-in reward soft_overlong does it",
    "repetition_penalty": "the trainer scores the unfiltered distribution",
    "sync_ref_model": "the reference stays as it is",
    "logging_steps": "every step is logged",
    "bf16": "model.dtype says it",
    "fp16": "model.dtype says it",
}
"""Keys of theirs without one of ours, and why."""
_THEIR_SECTIONS = ("actor_rollout_ref", "custom_reward_function", "reward_model")


def explain(unknown: str) -> str | None:
    """What verl or TRL means by `unknown`, and our key for it; None if neither knows it.

    `unknown` is a full dotted name or its end, e.g. "actor_rollout_ref.rollout.n", "rollout.n" or
    "num_generations"; a TRL name may also stand in a section of ours, e.g. "rollout.epsilon".
    """
    for name, reason in ABSENT.items():
        if unknown == name or unknown.startswith(f"{name}."):
            return f"there is no such key here: {reason}"
    last = unknown.rpartition(".")[2]
    by_trl = {name: row for row in ALIASES for name in row.trl}
    by_verl = {name: row for row in ALIASES for name in row.verl}
    if unknown in by_trl:
        return _say("TRL", unknown, by_trl[unknown])
    ends = [name for name in by_verl if f".{name}".endswith(f".{unknown}")]
    if ends:
        name = min(ends, key=len)
        return _say("verl", name, by_verl[name])
    is_ours = any(row.ours.rpartition(".")[2] == last for row in ALIASES)
    if last in by_trl and not is_ours:
        return _say("TRL", last, by_trl[last])
    if unknown.partition(".")[0] in _THEIR_SECTIONS:
        return "nothing here answers to this key of verl's; --help-all shows every key"
    return None


def _say(system: str, theirs: str, row: Alias) -> str:
    note = f" ({row.note})" if row.note else ""
    return f"{system}'s {theirs} is {row.ours!r} here{note}"


def markdown_rows() -> list[str]:
    """The README's table, a line for each of our keys."""
    rows = ["| verl | TRL | here |", "|---|---|---|"]
    for row in ALIASES:
        verl = ", ".join(f"`{name}`" for name in row.verl).replace("actor_rollout_ref.", "")
        trl = ", ".join(f"`{name}`" for name in row.trl)
        note = f": {row.note}" if row.note else ""
        rows.append(f"| {verl or '-'} | {trl or '-'} | `{row.ours}`{note} |")
    return rows
