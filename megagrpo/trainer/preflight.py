"""Everything that can be wrong with a run, found before any process group or model exists.

`prepare` runs alike on every rank and opens files only to read them; the run folder is touched
last, by rank 0. Every mistake is a ValueError of one line: value, limit, cure. What it returns is
all that `setup.py` needs, so nothing is read twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megagrpo import log
from megagrpo.algo.settings import LossSettings
from megagrpo.config import Config, RewardConfig
from megagrpo.config_checks import check_layout
from megagrpo.data.answers import Demonstration, read_demonstrations
from megagrpo.data.prompts import PromptSet, load_prompts, load_tokenizer
from megagrpo.data.sampler import PromptSampler
from megagrpo.metrics.reporters import check_packages
from megagrpo.model import hf_config
from megagrpo.parallel import platform
from megagrpo.rewards.base import RewardSpec, check_columns
from megagrpo.rewards.entries import make_spec
from megagrpo.trainer.length import RunLength, run_length
from megagrpo.trainer.order import check_draw, make_answer_sampler, make_sampler
from megagrpo.trainer.replay import Replay, open_replay, replay_config
from megagrpo.trainer.resolve import loss_settings, resolve
from megagrpo.trainer.resume import (
    check_checkpoint,
    check_writable,
    find_checkpoint,
    reference_origin,
)
from megagrpo.trainer.sources import open_source
from megagrpo.types import Layout, ModelShape, Sampling
from megagrpo.weights.table import check_tp

CACHE_BLOCK = 128  # tokens of one KV block of vllm 0.32 on a CPU, its largest
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    config: Config  # with every null that depends on model, loss or platform filled in
    loss: LossSettings
    rank: int
    layout: Layout
    shape: ModelShape
    hf_folder: Path  # config.json, generation config and tokenizer of the policy
    dtype: torch.dtype
    tokenizer: Any  # of transformers
    valid_vocab: int  # ids below it exist: rows of the model and pieces of the tokenizer
    stop_ids: tuple[int, ...]
    train: PromptSet
    eval: PromptSet | None
    rewards: tuple[RewardSpec, ...]
    length: RunLength
    origin: dict[str, Any]  # path and digest of the reference
    resume_from: Path | None  # the newest complete checkpoint of the run folder
    demonstrations: dict[int, Demonstration] | None = None  # of the cold start
    replay: Replay | None = None  # dumped rollouts that stand in for an engine

    @property
    def steps(self) -> int:
        """Rollout steps that run; a replay may be shorter than the plan of its schedule."""
        return self.length.rollouts if self.replay is None else self.replay.steps

    def sampling(self, temperature: float) -> Sampling:
        """Unfiltered sampling at `temperature`, the same for policy and evaluation."""
        return Sampling(
            temperature=temperature,
            max_tokens=self.config.rollout.max_response_tokens,
            stop_ids=self.stop_ids,
        )

    def sampler(self) -> PromptSampler:
        """The order of the training prompts, at its beginning."""
        return make_sampler(self.config, self.train.prompts)


def prepare(config: Config, rank: int, world: int, replay_from: Path | None = None) -> Prepared:
    """Check and read everything a training run needs; raises ValueError before work starts.

    `replay_from` is a folder of dumped rollouts to train on instead of an engine's.
    """
    if replay_from is not None:
        config = replay_config(config, replay_from)
    layout = check_layout(config, world)
    prepared = _prepare_model(config, rank, layout)
    train = _prompts(prepared, config.data.train, "data.train")
    check_draw(config, len(train.prompts))
    prepared = replace(prepared, demonstrations=_demonstrations(prepared, train))
    check_packages(config.log.tensorboard, config.log.wandb)
    run_dir = Path(config.trainer.run_dir)
    prepared = replace(
        prepared,
        train=train,
        length=run_length(
            prepared.config.data,
            config.trainer,
            prompts=len(train.prompts),
            group_size=config.rollout.group_size,
            spare=config.rollout.oversample_prompts,
            refills=config.algorithm.filter_flat_groups,
            iterations=config.algorithm.num_iterations,
        ),
        origin=reference_origin(config, prepared.shape),
        resume_from=find_checkpoint(run_dir, config.trainer.resume),
        replay=open_replay(replay_from, prepared.config, train, prepared.valid_vocab),
    )
    if prepared.resume_from is not None:
        check_checkpoint(
            prepared.resume_from,
            train,
            _samplers(prepared),
            prepared.origin,
            prepared.shape,
            config.algorithm.kl.controller.kind,
        )
    check_writable(run_dir, rank)
    return prepared


def prepare_evaluation(config: Config, rank: int, world: int) -> Prepared:
    """The same for `megagrpo evaluate`: no layout of a trainer, no run folder."""
    layout = Layout(world=world)
    if world % config.rollout.tp:
        raise ValueError(f"rollout.tp={config.rollout.tp} does not divide the {world} processes")
    return _prepare_model(config, rank, layout)


def _prepare_model(config: Config, rank: int, layout: Layout) -> Prepared:
    platform.mask_broken_media_packages()  # before anything imports transformers
    path = Path(config.model.path)
    if not path.is_dir():
        raise ValueError(f"model.path={path} is not a folder; give a checkpoint folder")
    folder = hf_config.hf_folder(path)
    shape = hf_config.read_shape(folder)
    open_source(path, shape)  # reads names and shapes only; every missing tensor is named here
    _check_model_fits(shape, layout, config)
    tokenizer = load_tokenizer(Path(config.model.tokenizer or folder))
    rewards = tuple(_reward(spec) for spec in config.rewards)
    names = [spec.name for spec in rewards]
    if len(names) != len(set(names)):
        raise ValueError(f"rewards are named {names}; give each its own `name`")
    prepared = Prepared(
        config=resolve(config),
        loss=loss_settings(config),
        rank=rank,
        layout=layout,
        shape=shape,
        hf_folder=folder,
        dtype=platform.default_dtype(),
        tokenizer=tokenizer,
        valid_vocab=min(shape.vocab_size, len(tokenizer)),
        stop_ids=hf_config.end_of_sequence_ids(folder, tokenizer.eos_token_id, shape.vocab_size),
        train=PromptSet((), 0, ""),
        eval=None,
        rewards=rewards,
        length=RunLength(0, 0, 0),
        origin={},
        resume_from=None,
    )
    prepared = replace(prepared, dtype=DTYPES[prepared.config.model.dtype])
    _check_cache(prepared)
    return _with_held_out(prepared)


def _with_held_out(prepared: Prepared) -> Prepared:
    """With the prompts of `data.eval`, where it is given."""
    evaluation, path = prepared.config.eval, prepared.config.data.eval
    if evaluation.top_k > prepared.valid_vocab:
        raise ValueError(
            f"eval.top_k={evaluation.top_k} is over the {prepared.valid_vocab} ids of the "
            "vocabulary; lower it or set 0"
        )
    if path is None:
        return prepared
    held_out = _prompts(prepared, path, "data.eval")
    limited = replace(held_out, prompts=held_out.prompts[: evaluation.max_prompts])
    if evaluation.compare_every and evaluation.compare_prompts > len(limited.prompts):
        raise ValueError(
            f"eval.compare_prompts={evaluation.compare_prompts} is more than the "
            f"{len(limited.prompts)} held-out prompts; use at most that many"
        )
    return replace(prepared, eval=limited)


def _samplers(prepared: Prepared) -> dict[str, PromptSampler]:
    """Every draw of the run, by its name in a checkpoint's state."""
    found = {"sampler": prepared.sampler()}
    answers = prepared.demonstrations
    own = None if answers is None else make_answer_sampler(prepared.config, len(answers))
    return found if own is None else found | {"cold_start": own}


def _demonstrations(prepared: Prepared, train: PromptSet) -> dict[int, Demonstration] | None:
    """The reference answers of the cold start, where it is on."""
    cold, longest = prepared.config.algorithm.cold_start, prepared.config.rollout
    if cold.weight == 0:
        return None
    key = "data.train" if cold.data is None else "algorithm.cold_start.data"
    try:
        shown = train if cold.data is None else _read_prompts(prepared, cold.data)
        found = read_demonstrations(
            shown.prompts,
            prepared.tokenizer,
            column=cold.column,
            max_tokens=longest.max_response_tokens,
        )
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    _check_ids(prepared, key, ((*one.prompt_ids, *one.answer_ids) for one in found.values()))
    return found


def _check_ids(prepared: Prepared, key: str, texts: Iterable[Sequence[int]]) -> None:
    """Every id must have a row in the model."""
    highest = max(max(ids, default=0) for ids in texts)
    if highest >= prepared.valid_vocab:
        raise ValueError(
            f"{key}: the tokenizer makes id {highest}, the model has {prepared.valid_vocab} rows; "
            "model.tokenizer does not belong to model.path"
        )


def _check_model_fits(shape: ModelShape, layout: Layout, config: Config) -> None:
    """Layouts that this model cannot have, and lengths that it cannot hold."""
    layout.stage_layers(shape.num_layers)
    check_tp(shape, layout.tp)
    check_tp(shape, config.rollout.tp, "rollout.tp")  # vLLM has the same limits
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > shape.max_positions:
        raise ValueError(
            f"rollout.max_prompt_tokens + max_response_tokens = {longest} is over the model's "
            f"{shape.max_positions} positions; lower one of them"
        )


def _check_cache(prepared: Prepared) -> None:
    """The KV cache of a rank must hold one sequence of the longest kind; vLLM counts in blocks."""
    rollout, shape = prepared.config.rollout, prepared.shape
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    tokens = -(-longest // CACHE_BLOCK) * CACHE_BLOCK
    heads = max(1, shape.num_kv_heads // rollout.tp)
    per_token = 2 * shape.num_layers * heads * shape.head_dim * prepared.dtype.itemsize
    needed = tokens * per_token / 2**30
    if rollout.kv_cache_gb is not None and rollout.kv_cache_gb < needed:
        raise ValueError(
            f"rollout.kv_cache_gb={rollout.kv_cache_gb} does not hold one sequence of {longest} "
            f"tokens, which needs {needed:.3g}; raise it or lower rollout.max_prompt_tokens or "
            "max_response_tokens"
        )


def _read_prompts(prepared: Prepared, path: str) -> PromptSet:
    data, rollout = prepared.config.data, prepared.config.rollout
    return load_prompts(
        Path(path),
        prepared.tokenizer,
        prompt_column=data.prompt_column,
        max_prompt_tokens=rollout.max_prompt_tokens,
        overlong=data.overlong_prompts,
        chat_template_kwargs=data.chat_template_kwargs,
    )


def _prompts(prepared: Prepared, path: str, key: str) -> PromptSet:
    rollout = prepared.config.rollout
    try:
        found = _read_prompts(prepared, path)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    _check_ids(prepared, key, (prompt.ids for prompt in found.prompts))
    try:
        check_columns(prepared.rewards, found.prompts[0].columns)
    except ValueError as error:
        raise ValueError(f"{key} {path}: {error}") from error
    if prepared.rank == 0 and found.dropped_overlong:
        log.warn(
            f"{key}: dropped {found.dropped_overlong} prompts over "
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}"
        )
    return found


def _reward(config: RewardConfig) -> RewardSpec:
    return make_spec(config, device=platform.device, release=platform.empty_cache)
