"""Held-out evaluation: in training through the hybrid engine, and of a checkpoint by itself.

It has its own sampling and its own stream of seeds, and leaves training's random numbers alone
(the engine restores them). A checkpoint is evaluated without Megatron: the engine reads its boxes
straight from the files. What the scores mean is in `metrics/held_out.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megagrpo.data.prompts import decode
from megagrpo.hybrid.engine import HybridEngine
from megagrpo.metrics.held_out import Scoring, held_out_metrics
from megagrpo.parallel import platform
from megagrpo.rewards.runner import RewardRunner
from megagrpo.rollout.collect import Collector, Draw
from megagrpo.trainer.engine import build_engine
from megagrpo.trainer.preflight import Prepared
from megagrpo.trainer.sources import open_source
from megagrpo.types import Prompt, Sampling


@dataclass(frozen=True)
class EvaluationSettings:
    """When and how."""

    name: str  # of the held-out set, in metric names
    every: int  # steps; 0 evaluates only at the ends
    at_start: bool
    samples: int  # k
    sampling: Sampling
    seed: int
    scoring: Scoring = Scoring()


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the policy that is being trained; without prompts it does nothing."""

    prompts: Sequence[Prompt]
    collector: Collector
    hybrid: HybridEngine
    settings: EvaluationSettings

    @property
    def at_start(self) -> bool:
        """Whether the untrained policy is evaluated."""
        return bool(self.prompts) and self.settings.at_start

    def due(self, step: int, last: bool) -> bool:
        """Whether to evaluate after `step`; the last step always is."""
        every = self.settings.every
        return bool(self.prompts) and (last or (every > 0 and step % every == 0))

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the weights after `step` finished steps; all ranks join."""
        with self.hybrid.rollout_mode(step):
            return score_held_out(self.collector, self.prompts, self.settings, step)


def score_held_out(
    collector: Collector, prompts: Sequence[Prompt], settings: EvaluationSettings, step: int
) -> dict[str, float]:
    """Scores of k completions for each prompt; all ranks join."""
    draw = Draw(settings.seed, "eval", step)
    samples = collector.collect(prompts, draw, settings.sampling, settings.samples)
    collector.rewards.take_counts()  # evaluation's failures are not training's
    return held_out_metrics(samples, settings.name, settings.samples, settings.scoring)


def evaluate_checkpoint(prepared: Prepared) -> dict[str, float]:
    """`megagrpo evaluate`: the engine alone, its weights read from the checkpoint's files."""
    from megagrpo.parallel.collectives import patient_gather
    from megagrpo.weights.table import hf_manifest

    assert prepared.eval is not None, "prepare_evaluation refuses a config without data.eval"
    platform.init_process_group(prepared.config.parallel.timeout_s)
    source = open_source(prepared.config.model.path, prepared.shape)
    engine = build_engine(prepared)
    engine.wake_weights()
    engine.load(hf_manifest(prepared.shape, prepared.dtype), source.read)
    engine.check_written()
    engine.reset_prefix_cache()
    engine.wake_kv_cache()
    collector = Collector(
        engine=engine,
        rewards=RewardRunner(prepared.rewards),
        decode=lambda ids: decode(prepared.tokenizer, ids),
        gather=patient_gather(prepared.config.rollout.timeout_s),
    )
    settings = evaluation_settings(prepared)
    found = score_held_out(collector, prepared.eval.prompts, settings, step=0)
    collector.rewards.close()
    return found


def evaluation_settings(prepared: Prepared) -> EvaluationSettings:
    """The config's `eval` section; the set is named after its file."""
    config = prepared.config.eval
    path = prepared.config.data.eval
    assert config.seed is not None, "preflight resolves it"
    return EvaluationSettings(
        name="" if path is None else path.rstrip("/").split("/")[-1].split(".")[0],
        every=config.every,
        at_start=config.at_start,
        samples=config.samples,
        sampling=replace(
            prepared.sampling(config.temperature),
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
        ),
        seed=config.seed,
        scoring=Scoring(config.solved_at, config.answer_pattern),
    )
