"""What a config may hold: choices and intervals of each key, and the checks between keys.

Every mistake is a ValueError of one line with value, limit and cure. Checks that need no file are
called by `config_file.load_config`, `check_layout` where the world size is known; those that open
files belong to `trainer/preflight.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from megagrpo.config import Config
from megagrpo.types import Layout

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # of vllm 0.32; it raises lower ones to this


def check_choices(node: Any, prefix: str = "") -> None:
    """Refuse a value outside its field's choices or interval, anywhere in the tree."""
    for item in fields(node):
        value, name = getattr(node, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            check_choices(value, f"{name}.")
        elif name == "rewards":
            for number, reward in enumerate(value):
                check_choices(reward, f"rewards[{number}].")
        elif item.metadata["choices"] and value not in item.metadata["choices"]:
            allowed = [str(choice) for choice in item.metadata["choices"] if choice is not None]
            raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(allowed)}")
        elif isinstance(value, int | float):
            _check_interval(name, value, item.metadata["within"] or "(-inf, inf)")


def _check_interval(name: str, value: float, interval: str) -> None:
    """Refuse a number outside "[low, high)"; nan and the infinities always are."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        raise ValueError(f"{name}={value} is outside {interval}; choose a number inside")


def check_values(config: Config) -> None:
    """Checks between keys; each message says value, limit and cure."""
    _check_counts(config)
    _check_sampling(config)
    _check_evaluation(config)
    _check_health(config)
    _check_export(config)
    _check_filling(config)
    _check_kl_place(config)
    _check_cold_start(config)
    parallel, optim = config.parallel, config.optim
    for name in ("vpp", "cp", "ep", "etp"):
        if getattr(parallel, name) != 1:
            raise ValueError(
                f"parallel.{name}={getattr(parallel, name)} is not in this version; use 1"
            )
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ValueError("parallel.sequence_parallel=true needs parallel.tp > 1; it is 1")
    uneven = parallel.first_stage_layers or parallel.last_stage_layers
    if uneven and parallel.pp == 1:
        raise ValueError("parallel.first/last_stage_layers need parallel.pp > 1; it is 1")
    if config.reference.use == "never" and config.algorithm.kl.start_beta > 0:
        raise ValueError(
            f"algorithm.kl.beta={config.algorithm.kl.start_beta} needs a reference; "
            "set reference.use=auto or beta=0"
        )
    for name in ("path", "offload"):
        if config.reference.use == "never" and getattr(config.reference, name) is not None:
            raise ValueError(f"reference.{name} has no effect with reference.use=never; remove one")
    if optim.min_lr > optim.lr:
        raise ValueError(f"optim.min_lr={optim.min_lr} is over optim.lr={optim.lr}; lower it")
    if optim.schedule == "constant" and optim.min_lr != 0.0:
        raise ValueError(f"optim.min_lr={optim.min_lr} has no effect with schedule=constant")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas={list(optim.betas)} must be two numbers in [0, 1)")
    if config.rewards and not any(reward.weight for reward in config.rewards):
        raise ValueError("rewards: every weight is 0, so nothing would be learned; set one")
    names = [reward.name for reward in config.rewards if reward.name is not None]
    if len(names) != len(set(names)):
        raise ValueError(f"rewards have the same name twice: {names}; give each its own name")


def _check_kl_place(config: Config) -> None:
    """KL in the reward, and how several rewards become one advantage."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    if kl.place == "reward":
        if kl.start_beta == 0:
            raise ValueError("algorithm.kl.place=reward has no effect with beta=0; set kl.beta")
        if kl.unbiased:
            raise ValueError(
                "algorithm.kl.unbiased=true has no effect with kl.place=reward: a reward has no "
                "gradient; remove one"
            )
        if algorithm.combine != "sum_then_normalize":
            raise ValueError(
                f"algorithm.kl.place=reward takes KL from one total reward, combine="
                f"{algorithm.combine} has none; use sum_then_normalize or place=loss"
            )
    if algorithm.combine == "normalize_then_sum" and len(config.rewards) < 2:
        raise ValueError(
            f"algorithm.combine=normalize_then_sum has no effect with {len(config.rewards)} "
            "reward; remove it"
        )


def _check_cold_start(config: Config) -> None:
    """A weight that falls to 0 needs to know when; without a weight nothing is imitated."""
    cold = config.algorithm.cold_start
    standard = type(cold)()
    if cold.weight > 0 and cold.steps is None:
        raise ValueError(
            f"algorithm.cold_start.weight={cold.weight} needs algorithm.cold_start.steps, the "
            "rollouts after which it has fallen to 0"
        )
    for name in ("steps", "data", "column"):
        value = getattr(cold, name)
        if cold.weight == 0 and value != getattr(standard, name):
            raise ValueError(
                f"algorithm.cold_start.{name}={value} has no effect with cold_start.weight=0"
            )


def _check_filling(config: Config) -> None:
    """A bound on refilling bounds nothing where no group is filtered."""
    bound = config.rollout.max_num_gen_batches
    if bound is not None and not config.algorithm.filter_flat_groups:
        raise ValueError(
            f"rollout.max_num_gen_batches={bound} has no effect with "
            "algorithm.filter_flat_groups=false; leave it null"
        )


def _check_export(config: Config) -> None:
    """An export is made of a checkpoint, so it is due only where one is."""
    save, export = config.trainer.save_every, config.trainer.export_hf_every
    if save and export % save:
        said = f"trainer.export_hf_every={export} is no multiple of trainer.save_every={save}"
        raise ValueError(f"{said}; exports are made at saves")


def check_required(config: Config, required: Sequence[str]) -> None:
    """Refuse an unset key that the command needs, and rewards that are none."""
    for name in required:
        section, key = name.split(".")
        if not getattr(getattr(config, section), key):
            raise ValueError(f"{name} is not set; give a path, e.g. {name}=PATH")
    if not config.rewards:
        raise ValueError("rewards is empty; give at least one, e.g. rewards=[{path: exact_match}]")
    for number, reward in enumerate(config.rewards):
        if not reward.path:
            raise ValueError(f"rewards[{number}].path is not set; e.g. exact_match or module:name")


def _check_counts(config: Config) -> None:
    """The units of a batch."""
    if config.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size={config.rollout.group_size}: a group-relative advantage needs at "
            "least 2 completions per prompt"
        )
    per_step, mini = config.data.prompts_per_step, config.data.minibatch_prompts
    if mini is not None and (mini < 1 or per_step % mini):
        raise ValueError(
            f"data.minibatch_prompts={mini} does not divide data.prompts_per_step={per_step} "
            "(both count prompts); choose a divisor"
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > config.data.max_tokens_per_microbatch:
        raise ValueError(
            f"data.max_tokens_per_microbatch={config.data.max_tokens_per_microbatch} is below one "
            f"sequence of rollout.max_prompt_tokens + max_response_tokens = {longest}; raise it"
        )


def _check_sampling(config: Config) -> None:
    """Training samples must come from the distribution that the trainer scores."""
    rollout = config.rollout
    if rollout.temperature <= 0:
        raise ValueError(
            f"rollout.temperature={rollout.temperature} must be > 0 in training; "
            "greedy decoding belongs to eval.temperature=0"
        )
    for name, value, off in (
        ("top_p", rollout.top_p, 1.0),
        ("top_k", rollout.top_k, 0),
        ("min_p", rollout.min_p, 0.0),
    ):
        if value != off:
            raise ValueError(
                f"rollout.{name}={value}: the trainer scores the unfiltered distribution, so "
                f"training needs {name}={off}"
            )
    if config.eval.temperature < 0:
        raise ValueError(f"eval.temperature={config.eval.temperature} must be >= 0; 0 is greedy")
    for name, value in (("rollout", rollout.temperature), ("eval", config.eval.temperature)):
        if value != 0 and not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
            raise ValueError(
                f"{name}.temperature={value} is outside {LOWEST_TEMPERATURE}..{HIGHEST_TEMPERATURE}"
                ", what vLLM samples with; choose a number inside"
            )


def _check_evaluation(config: Config) -> None:
    """Settings of evaluation that contradict each other or change nothing."""
    evaluation = config.eval
    if evaluation.temperature == 0 and evaluation.samples > 1:
        raise ValueError(
            f"eval.samples={evaluation.samples} greedy completions are all the same; "
            "set eval.temperature > 0 or samples=1"
        )
    for name, value, off in (
        ("top_p", evaluation.top_p, 1.0),
        ("top_k", evaluation.top_k, 0),
        ("min_p", evaluation.min_p, 0.0),
    ):
        if evaluation.temperature == 0 and value != off:
            raise ValueError(
                f"eval.{name}={value} has no effect on greedy completions; set eval.temperature > "
                f"0 or {name}={off}"
            )
    if evaluation.compare_every and config.data.eval is None:
        raise ValueError(
            f"eval.compare_every={evaluation.compare_every} compares answers to held-out prompts "
            "and data.eval is not set; give data.eval=PATH"
        )
    standard = type(evaluation)().compare_prompts
    if not evaluation.compare_every and evaluation.compare_prompts != standard:
        raise ValueError(
            f"eval.compare_prompts={evaluation.compare_prompts} has no effect with compare_every=0"
        )
    _check_answer_pattern(evaluation.answer_pattern, evaluation.samples)


def _check_health(config: Config) -> None:
    """A trend compares two windows that do not overlap."""
    health = config.health
    if health.span < health.window:
        raise ValueError(
            f"health.span={health.span} is less than health.window={health.window}; raise it"
        )


def _check_answer_pattern(pattern: str | None, samples: int) -> None:
    if pattern is None:
        return
    if samples == 1:
        raise ValueError("eval.answer_pattern has no effect with eval.samples=1: nobody votes")
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(
            f"eval.answer_pattern={pattern!r} is no regular expression ({error})"
        ) from error
    if groups != 1:
        raise ValueError(
            f"eval.answer_pattern={pattern!r} has {groups} groups; put the answer, and nothing "
            "else, between one pair of parentheses: (...); others are (?:...)"
        )


def check_layout(config: Config, world: int) -> Layout:
    """The trainer's layout for `world` ranks; raises ValueError if it cannot be."""
    tp, pp = config.parallel.tp, config.parallel.pp
    if world % (tp * pp):
        raise ValueError(
            f"parallel.tp={tp} x parallel.pp={pp} = {tp * pp} does not divide the {world} "
            f"processes; start a multiple of {tp * pp}"
        )
    if world % config.rollout.tp:
        raise ValueError(
            f"rollout.tp={config.rollout.tp} does not divide the {world} processes; "
            f"use one of {[n for n in range(1, world + 1) if world % n == 0]}"
        )
    return Layout(
        world=world,
        tp=tp,
        pp=pp,
        first_stage_layers=config.parallel.first_stage_layers,
        last_stage_layers=config.parallel.last_stage_layers,
    )
