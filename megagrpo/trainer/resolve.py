"""Nulls of the config become what runs, so that config.yaml shows it."""

from dataclasses import replace

import torch

from megagrpo.algo.corrections import resolve_correction
from megagrpo.algo.settings import LossSettings, resolve_loss_defaults
from megagrpo.config import Config
from megagrpo.parallel import platform


def loss_settings(config: Config) -> LossSettings:
    """The chosen loss with its own defaults in place of nulls; ValueError for what it never
    reads."""
    algorithm = config.algorithm
    try:
        return resolve_loss_defaults(
            algorithm.loss,
            aggregation=algorithm.aggregation,
            normalize=algorithm.normalize,
            eps_low=algorithm.eps_low,
            eps_high=algorithm.eps_high,
            cap=algorithm.cap,
            delta=algorithm.delta,
            dual_clip=algorithm.dual_clip,
            beta=algorithm.kl.beta,
            kl_estimator=algorithm.kl.estimator,
            correction=algorithm.correction.mode,
        )
    except ValueError as error:
        raise ValueError(f"algorithm: {error}") from error


def resolve(config: Config) -> Config:
    """Fill every null that has a documented default, so that config.yaml shows what runs."""
    algorithm = config.algorithm
    loss = loss_settings(config)
    correction = algorithm.correction
    bounds = resolve_correction(correction.mode, correction.cap, correction.low)
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if platform.default_dtype() == torch.bfloat16 else "float32"
    mismatch = algorithm.mismatch
    warn, stop = (0.05, 0.1) if dtype == "bfloat16" else (1e-4, 1e-3)
    mismatch = replace(
        mismatch,
        warn=warn if mismatch.warn is None else mismatch.warn,
        stop=stop if mismatch.stop is None else mismatch.stop,
    )
    seed = config.trainer.seed
    offload = config.reference.offload
    if offload is None and config.reference.use != "never":
        offload = platform.is_cuda()
    cache = config.rollout.kv_cache_gb
    if cache is None and not platform.is_cuda():
        cache = 0.25
    return replace(
        config,
        model=replace(config.model, dtype=dtype),
        reference=replace(config.reference, offload=offload),
        algorithm=replace(
            algorithm,
            eps_low=loss.eps_low,
            eps_high=loss.eps_high,
            cap=loss.cap,
            aggregation=loss.aggregation,
            normalize=loss.normalize,
            correction=replace(correction, cap=bounds.high, low=bounds.low),
            mismatch=mismatch,
        ),
        rollout=replace(
            config.rollout,
            kv_cache_gb=cache,
            seed=seed if config.rollout.seed is None else config.rollout.seed,
        ),
        eval=replace(config.eval, seed=seed if config.eval.seed is None else config.eval.seed),
        data=replace(
            config.data,
            minibatch_prompts=config.data.minibatch_prompts or config.data.prompts_per_step,
            shuffle_seed=(seed if config.data.shuffle_seed is None else config.data.shuffle_seed),
        ),
    )
