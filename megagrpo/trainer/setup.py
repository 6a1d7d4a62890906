"""The composition root: turns a checked config into a run. The only reader of the whole tree.

Order (design 4.6): process group, Megatron weights, engine (a collective of the world; it is asleep
afterwards), optimizer, hybrid engine; a checkpoint is loaded by `Run.begin`.
"""

from pathlib import Path

import torch

from megagrpo.algo.corrections import resolve_correction
from megagrpo.data.prompts import decode
from megagrpo.hybrid.engine import HybridEngine
from megagrpo.hybrid.memory import DeviceOffload, Offload, Parked, Resident, TrainingState
from megagrpo.model.build import (
    Chunks,
    ModelSettings,
    build_model,
    load_weights_,
    local_parameters,
    naming_profile,
)
from megagrpo.model.optimizer import LRSchedule, OptimSettings, Trainable, wrap_and_build
from megagrpo.parallel import platform
from megagrpo.parallel.collectives import patient_gather
from megagrpo.parallel.context import ParallelContext, init_parallel
from megagrpo.rewards.runner import RewardRunner
from megagrpo.rollout.collect import Collector
from megagrpo.rollout.engine import RolloutEngine
from megagrpo.rollout.refill import Refill
from megagrpo.trainer.accounts import groups_with_a_rating, groups_with_signal
from megagrpo.trainer.batch import AdvantageSettings, CutSettings
from megagrpo.trainer.compare import build_comparison
from megagrpo.trainer.demonstrations import build_cold_start
from megagrpo.trainer.engine import build_engine
from megagrpo.trainer.evaluate import Evaluator, evaluation_settings
from megagrpo.trainer.export import build_exporter
from megagrpo.trainer.kl_penalty import KLCharge, NoCharge, RewardCharge
from megagrpo.trainer.objective import Objective
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.policy import Policy, PolicySettings
from megagrpo.trainer.preflight import Prepared
from megagrpo.trainer.replay import NoCollector, NoEngine
from megagrpo.trainer.report import StepReport
from megagrpo.trainer.resolve import kl_controller
from megagrpo.trainer.run import RolloutSettings, Run, SaveSettings
from megagrpo.trainer.scoring import NoReference, Reference, Scoring
from megagrpo.trainer.sources import open_source
from megagrpo.weights.table import expand, hf_manifest, padded_vocab


def build_run(prepared: Prepared, phases: Phases) -> Run:
    """All collaborators of a training run; all ranks of the world join."""
    config, shape = prepared.config, prepared.shape
    platform.init_process_group(config.parallel.timeout_s)
    context = init_parallel(prepared.layout, config.trainer.seed, config.parallel.timeout_s)
    source = open_source(config.model.path, shape)
    chunks = _model(prepared, context)
    load_weights_(chunks, source, shape, context)
    scoring = Scoring(context, config.rollout.temperature, prepared.valid_vocab)
    reference = _reference(prepared, scoring, phases)
    engine = None if prepared.replay is not None else _engine(prepared, chunks)
    trainable = _trainable(prepared, chunks, context)
    hybrid = NoEngine() if engine is None else _hybrid(prepared, context, trainable, engine)
    collector = _collector(prepared, engine)
    policy = _policy(prepared, trainable, scoring, phases)
    return Run(
        context=context,
        phases=phases,
        prompts=prepared.train,
        sampler=prepared.sampler(),
        collector=collector,
        hybrid=hybrid,
        refill=prepared.replay or _refill(prepared),
        policy=policy,
        reference=reference,
        reward_charge=_reward_charge(prepared, policy),
        cold_start=build_cold_start(prepared, _cut(prepared), context),
        evaluator=Evaluator(
            prompts=() if prepared.eval is None else prepared.eval.prompts,
            collector=collector,
            hybrid=hybrid,
            settings=evaluation_settings(prepared),
        ),
        comparison=build_comparison(prepared, collector, hybrid),
        reporter=StepReport(prepared, context),
        rollout=_rollout(prepared),
        advantage=_advantage(prepared),
        cut=_cut(prepared),
        save_settings=_save(prepared),
        exporter=build_exporter(prepared, trainable, context, collector.gather),
        steps=prepared.steps,
        resume_from=prepared.resume_from,
    )


def _engine(prepared: Prepared, chunks: Chunks) -> RolloutEngine:
    """Built while the policy's weights are on the host: vLLM sizes itself by the free memory."""
    weights = Parked(local_parameters(chunks).values() if platform.is_cuda() else ())
    engine = build_engine(prepared)
    weights.restore()
    return engine


def _collector(prepared: Prepared, engine: RolloutEngine | None) -> Collector | NoCollector:
    gather = patient_gather(prepared.config.rollout.timeout_s)
    if engine is None:
        return NoCollector(gather)
    return Collector(
        engine=engine,
        rewards=RewardRunner(prepared.rewards),
        decode=lambda ids: decode(prepared.tokenizer, ids),
        gather=gather,
    )


def _refill(prepared: Prepared) -> Refill:
    config, advantage = prepared.config, _advantage(prepared)
    refills = config.algorithm.filter_flat_groups
    return Refill(
        groups=config.data.prompts_per_step,
        max_batches=config.rollout.max_num_gen_batches or 1,
        refills=refills,
        useful=groups_with_signal(advantage) if refills else groups_with_a_rating(advantage),
    )


def _model(prepared: Prepared, context: ParallelContext) -> list[torch.nn.Module]:
    parallel = prepared.config.parallel
    return build_model(
        prepared.shape,
        context,
        dtype=prepared.dtype,
        padded_vocab=padded_vocab(prepared.shape.vocab_size, context.layout.tp),
        settings=ModelSettings(
            sequence_parallel=parallel.sequence_parallel, recompute=parallel.recompute
        ),
    )


def _trainable(prepared: Prepared, chunks: Chunks, context: ParallelContext) -> Trainable:
    optim = prepared.config.optim
    return wrap_and_build(
        chunks,
        context,
        OptimSettings(
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            grad_clip=optim.grad_clip,
            use_distributed_optimizer=prepared.config.parallel.use_distributed_optimizer,
        ),
    )


def _reference(prepared: Prepared, scoring: Scoring, phases: Phases) -> Reference | NoReference:
    config = prepared.config
    use, beta = config.reference.use, config.algorithm.kl.start_beta
    if use == "never" or (use == "auto" and beta == 0):
        return NoReference()
    chunks: Chunks = _model(prepared, scoring.context)
    source = open_source(prepared.origin["path"], prepared.shape)
    load_weights_(chunks, source, prepared.shape, scoring.context)
    for chunk in chunks:
        chunk.requires_grad_(False)
    if not config.reference.offload:
        return Reference(chunks, scoring, phases)
    weights = Parked(local_parameters(chunks).values())
    return Reference(chunks, scoring, phases, weights.on_device)


def _hybrid(
    prepared: Prepared,
    context: ParallelContext,
    trainable: Trainable,
    engine: RolloutEngine,
) -> HybridEngine:
    return HybridEngine(
        engine=engine,
        haves=expand(prepared.shape, context.layout, context.coords, naming_profile()),
        parameters=local_parameters(trainable.chunks),
        manifest=hf_manifest(prepared.shape, prepared.dtype),
        context=context,
        prepare=trainable.finish_param_sync,
        offload=_offload(trainable),
    )


def _offload(trainable: Trainable) -> Offload:
    """On CPU trainer and engine share one memory."""
    return device_offload(trainable) if platform.is_cuda() else Resident()


def device_offload(trainable: Trainable) -> DeviceOffload:
    """Moves the trainer's whole state off the device while the engine works."""
    return DeviceOffload(
        TrainingState(
            parameters=trainable.parameter_tensors,
            gradients=trainable.gradient_tensors,
            optimizer=trainable.optimizer_tensors,
        )
    )


def _policy(prepared: Prepared, trainable: Trainable, scoring: Scoring, phases: Phases) -> Policy:
    algorithm, optim = prepared.config.algorithm, prepared.config.optim
    mismatch = algorithm.mismatch
    assert mismatch.warn is not None and mismatch.stop is not None, "preflight resolves them"
    correction = algorithm.correction
    return Policy(
        trainable,
        scoring,
        PolicySettings(
            objective=Objective(
                loss=algorithm.loss,
                settings=prepared.loss,
                correction=resolve_correction(correction.mode, correction.cap, correction.low),
                off_policy_threshold=correction.off_policy_threshold,
                kl_in_loss=algorithm.kl.place == "loss",
            ),
            mismatch_warn=mismatch.warn,
            mismatch_stop=mismatch.stop,
            mismatch_patience=mismatch.patience,
            iterations=algorithm.num_iterations,
            top_entropy_share=algorithm.top_entropy_quantile,
            always_score_old=algorithm.kl.place == "reward",
        ),
        LRSchedule(
            kind=optim.schedule,
            max_lr=optim.lr,
            min_lr=optim.min_lr,
            warmup_steps=optim.warmup_steps,
            total_steps=prepared.length.optimizer_steps,
        ),
        kl_controller(prepared.config),
        phases,
    )


def _advantage(prepared: Prepared) -> AdvantageSettings:
    algorithm = prepared.config.algorithm
    return AdvantageSettings(
        normalize=prepared.loss.normalize,
        baseline=algorithm.baseline,
        clip=algorithm.advantage_clip,
        truncated=algorithm.truncated,
        combine=algorithm.combine,
        weights=tuple((spec.name, spec.weight) for spec in prepared.rewards),
    )


def _reward_charge(prepared: Prepared, policy: Policy) -> RewardCharge:
    kl = prepared.config.algorithm.kl
    if kl.place == "loss":
        return NoCharge()
    return KLCharge(policy.kl, kl.estimator, _advantage(prepared), policy.scoring.context)


def _save(prepared: Prepared) -> SaveSettings:
    trainer = prepared.config.trainer
    return SaveSettings(
        run_dir=Path(trainer.run_dir),
        every=trainer.save_every,
        keep_last=trainer.keep_last,
        export_every=trainer.export_hf_every,
        hf_folder=prepared.hf_folder,
        origin=prepared.origin,
    )


def _cut(prepared: Prepared) -> CutSettings:
    config = prepared.config
    assert config.data.minibatch_prompts is not None, "preflight resolves it"
    return CutSettings(
        minibatch_prompts=config.data.minibatch_prompts,
        max_tokens=config.data.max_tokens_per_microbatch,
        min_packs=config.parallel.pp,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def _rollout(prepared: Prepared) -> RolloutSettings:
    rollout = prepared.config.rollout
    assert rollout.seed is not None, "preflight resolves it"
    return RolloutSettings(
        sampling=prepared.sampling(rollout.temperature),
        group_size=rollout.group_size,
        seed=rollout.seed,
        max_failed_share=rollout.max_failed_share,
    )
