"""Nulls of the config become what runs, so that config.yaml shows it."""

from dataclasses import replace

import torch

from megagrpo.algo.corrections import resolve_correction
from megagrpo.algo.kl_control import KLController, resolve_controller
from megagrpo.algo.settings import LossSettings, resolve_loss_defaults
from megagrpo.config import Config
from megagrpo.config_algorithm import AlgorithmConfig, KLConfig, MismatchConfig
from megagrpo.parallel import platform


def kl_controller(config: Config) -> KLController:
    """What moves the KL coefficient, at its start; ValueError for what it never reads."""
    kl = config.algorithm.kl
    rule = kl.controller
    try:
        settings = resolve_controller(
            rule.kind,
            beta=kl.start_beta,
            target=rule.target,
            horizon=rule.horizon,
            kp=rule.kp,
            ki=rule.ki,
            kd=rule.kd,
        )
    except ValueError as error:
        raise ValueError(f"algorithm.kl.controller: {error}") from error
    return KLController(settings)


GENERATION_BATCHES = 10  # of a step, where groups are filtered and the config does not say


def loss_settings(config: Config) -> LossSettings:
    """The chosen loss with its own defaults in place of nulls; ValueError for what it never
    reads."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    try:
        return resolve_loss_defaults(
            algorithm.loss,
            aggregation=algorithm.aggregation,
            level=algorithm.level,
            normalize=algorithm.normalize,
            eps_low=algorithm.eps_low,
            eps_high=algorithm.eps_high,
            cap=algorithm.cap,
            delta=algorithm.delta,
            dual_clip=algorithm.dual_clip,
            tau_positive=algorithm.tau_positive,
            tau_negative=algorithm.tau_negative,
            gamma_positive=algorithm.gamma_positive,
            gamma_negative=algorithm.gamma_negative,
            beta=kl.start_beta if kl.place == "loss" else 0.0,
            kl_estimator=kl.estimator,
            unbiased_kl=kl.unbiased,
            entropy_coef=algorithm.entropy_coef,
            correction=algorithm.correction.mode,
        )
    except ValueError as error:
        raise ValueError(f"algorithm: {error}") from error


def _resolved_kl(config: Config) -> KLConfig:
    kl, found = config.algorithm.kl, kl_controller(config).settings
    rule = replace(
        kl.controller,
        target=found.target,
        horizon=found.horizon,
        kp=found.kp,
        ki=found.ki,
        kd=found.kd,
    )
    return replace(kl, beta=found.beta, controller=rule)


def resolve(config: Config) -> Config:
    """Fill every null that has a documented default, so that config.yaml shows what runs."""
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if platform.default_dtype() == torch.bfloat16 else "float32"
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
        algorithm=_resolved_algorithm(config, dtype),
        rollout=replace(
            config.rollout,
            kv_cache_gb=cache,
            max_num_gen_batches=config.rollout.max_num_gen_batches
            or (GENERATION_BATCHES if config.algorithm.filter_flat_groups else None),
            seed=seed if config.rollout.seed is None else config.rollout.seed,
        ),
        eval=replace(config.eval, seed=seed if config.eval.seed is None else config.eval.seed),
        data=replace(
            config.data,
            minibatch_prompts=config.data.minibatch_prompts or config.data.prompts_per_step,
            shuffle_seed=(seed if config.data.shuffle_seed is None else config.data.shuffle_seed),
        ),
    )


def _resolved_algorithm(config: Config, dtype: str) -> AlgorithmConfig:
    """The loss's own defaults, bounds of the correction, limits of the alarm for `dtype`."""
    algorithm, loss = config.algorithm, loss_settings(config)
    correction = algorithm.correction
    bounds = resolve_correction(correction.mode, correction.cap, correction.low)
    return replace(
        algorithm,
        eps_low=loss.eps_low,
        eps_high=loss.eps_high,
        cap=loss.cap,
        aggregation=loss.aggregation,
        level=loss.level,
        tau_positive=loss.tau_positive,
        tau_negative=loss.tau_negative,
        gamma_positive=None if loss.gamma_positive is None else list(loss.gamma_positive),
        gamma_negative=None if loss.gamma_negative is None else list(loss.gamma_negative),
        normalize=loss.normalize,
        kl=_resolved_kl(config),
        correction=replace(correction, cap=bounds.high, low=bounds.low),
        mismatch=_resolved_mismatch(algorithm.mismatch, dtype),
    )


def _resolved_mismatch(mismatch: MismatchConfig, dtype: str) -> MismatchConfig:
    warn, stop = (0.05, 0.1) if dtype == "bfloat16" else (1e-4, 1e-3)
    warn = warn if mismatch.warn is None else mismatch.warn
    stop = stop if mismatch.stop is None else mismatch.stop
    if warn > stop:
        raise ValueError(
            f"algorithm.mismatch.warn={warn} is over algorithm.mismatch.stop={stop}: the run would "
            "end without a warning; lower warn or raise stop"
        )
    return replace(mismatch, warn=warn, stop=stop)
