"""One training run: its collaborators and the verbs of the loop in grpo.py.

A step is one rollout and all its optimizer steps. Its line in metrics.jsonl is written before its
checkpoint, so that a run that is killed between the two repeats the step and rewrites the line.
`timing_s/save_checkpoint` of a step is therefore that of the save before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megagrpo import log
from megagrpo.data.prompts import PromptSet
from megagrpo.data.sampler import PromptSampler
from megagrpo.hybrid.engine import HybridEngine
from megagrpo.parallel.context import ParallelContext
from megagrpo.rewards.entries import check_failed_share
from megagrpo.rewards.runner import RewardCounts
from megagrpo.rollout.collect import Collector, Draw
from megagrpo.rollout.refill import Refill
from megagrpo.rollout.storage import Rollout
from megagrpo.trainer.accounts import fates
from megagrpo.trainer.batch import AdvantageSettings, Batch, CutSettings, make_batch
from megagrpo.trainer.checkpoint import load_checkpoint, save_checkpoint
from megagrpo.trainer.compare import Comparison
from megagrpo.trainer.demonstrations import ColdStart
from megagrpo.trainer.evaluate import Evaluator
from megagrpo.trainer.export import Exporter, export_folder
from megagrpo.trainer.kl_penalty import RewardCharge
from megagrpo.trainer.phases import Phases, phase
from megagrpo.trainer.policy import Policy
from megagrpo.trainer.replay import NoCollector, NoEngine, Replay
from megagrpo.trainer.report import Progress, StepReport
from megagrpo.trainer.scoring import NoReference, Reference
from megagrpo.trainer.update_metrics import UpdateMetrics
from megagrpo.types import Prompt, Sample, Sampling


@dataclass(frozen=True)
class RolloutSettings:
    """How training samples are drawn."""

    sampling: Sampling
    group_size: int
    seed: int
    max_failed_share: float  # of a generated batch; more ends the run


@dataclass(frozen=True)
class SaveSettings:
    """Where and when checkpoints are written."""

    run_dir: Path
    every: int  # steps; 0 saves only the last
    keep_last: int
    export_every: int  # steps; saves that also write a HuggingFace folder; 0 is off
    hf_folder: Path  # travels with every checkpoint
    origin: dict[str, Any]  # path and digest of the reference, as saved


@dataclass
class Run:
    """Everything a step needs; `done` counts finished steps, `rolled_out`, `sync` and `counts` are
    what the step's rollout left: an evaluation before the report syncs and scores as well."""

    context: ParallelContext
    phases: Phases
    prompts: PromptSet
    sampler: PromptSampler
    collector: Collector | NoCollector
    hybrid: HybridEngine | NoEngine
    refill: Refill | Replay
    policy: Policy
    reference: Reference | NoReference
    reward_charge: RewardCharge
    cold_start: ColdStart
    evaluator: Evaluator
    comparison: Comparison
    reporter: StepReport
    rollout: RolloutSettings
    advantage: AdvantageSettings
    cut: CutSettings
    save_settings: SaveSettings
    exporter: Exporter
    steps: int
    resume_from: Path | None
    done: int = 0
    rolled_out: Rollout = Rollout()
    sync: dict[str, float] = field(default_factory=dict)
    counts: RewardCounts = RewardCounts(0, 0)

    def begin(self) -> None:
        """Resume where a checkpoint stands, else evaluate the untrained policy."""
        if self.resume_from is not None:
            self._resume(self.resume_from)
        self.reporter.begin(self.done)
        if self.done == 0 and self.evaluator.at_start:
            self.reporter.write_evaluation(0, self._evaluate(0), self.phases.take())

    def remaining_steps(self) -> Iterator[int]:
        """Numbers of the steps that are left, counted from 1."""
        return iter(range(self.done + 1, self.steps + 1))

    def draw(self) -> list[Prompt]:
        """The prompts of the next generation batch, the same on every rank."""
        return [self.prompts.prompts[number] for number in self.sampler.draw()]

    @phase("gen")
    def roll_out(self, prompts: list[Prompt], step: int) -> list[Sample]:
        """The samples to train on, G per prompt, from the weights as they are; all ranks join."""
        draw, settings = Draw(self.rollout.seed, "train", step), self.rollout

        def first_failures() -> list[dict[str, str]]:
            return self.collector.tracebacks()

        def generate(batch: Sequence[Prompt], first_group: int) -> list[Sample]:
            samples = self.collector.collect(
                batch, draw, settings.sampling, settings.group_size, first_group
            )
            check_failed_share(samples, settings.max_failed_share, first_failures)
            return samples

        with self.hybrid.rollout_mode(version=step - 1):
            self.rolled_out = self.refill.fill(step, prompts, self.draw, generate)
        self.sync, self.counts = self.hybrid.stats, self.collector.rewards.take_counts()
        # Both are parts of "gen": the transfer before it, and the wait for rewards after it.
        self.phases.add("update_weights", self.sync.get("sync/seconds", 0.0))
        self.phases.add("reward", self.counts.wait_seconds)
        return self.rolled_out.kept

    @phase("adv")
    def compare_groups(self, samples: list[Sample]) -> Batch:
        """Advantages within each group, and this rank's micro-batches."""
        layout, coords = self.context.layout, self.context.coords
        batch = make_batch(samples, self.advantage, self.cut, dp=layout.dp, dp_rank=coords.dp)
        return self.cold_start.attach(batch, self.done + 1)

    @phase("adv")
    def charge_kl(self, batch: Batch) -> Batch:
        """Advantages anew where rewards pay for KL; all ranks join."""
        return self.reward_charge.charge(batch)

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics if this step is due, else nothing; a blind comparison where one is."""
        if self.comparison.due(step):
            self._compare(step)
        last = step == self.steps
        return self._evaluate(step) if self.evaluator.due(step, last) else {}

    def report(
        self, step: int, batch: Batch, outcome: UpdateMetrics, evaluation: dict[str, float]
    ) -> None:
        """The step's line in metrics.jsonl, on the console and wherever else."""
        self.reporter.write_step(
            step,
            batch,
            outcome,
            Progress(self.policy.optimizer_steps, self.policy.skipped_steps),
            rollout=self.rolled_out,
            fates=fates(self.rolled_out, self.advantage),
            evaluation=evaluation,
            sync=self.sync,
            counts=self.counts,
            seconds=self.phases.take(),
        )
        self.done = step

    def save(self, step: int) -> None:
        """A checkpoint if this step is due or the last."""
        every = self.save_settings.every
        if step == self.steps or (every and step % every == 0):
            self._save(step)

    def end(self) -> None:
        """Write the report, say where everything is, stop background threads."""
        self.reporter.end()
        self.collector.rewards.close()

    @phase("testing")
    def _evaluate(self, step: int) -> dict[str, float]:
        return self.evaluator.evaluate(step)

    @phase("testing")
    def _compare(self, step: int) -> None:
        self.comparison.write(step)

    @phase("save_checkpoint")
    def _save(self, step: int) -> None:
        settings = self.save_settings
        self.reporter.to_disk()
        state = {
            "step": step,
            "optimizer_steps": self.policy.optimizer_steps,
            "skipped_steps": self.policy.skipped_steps,
            "steps_over_stop": self.policy.steps_over_stop,
            "sampler": self.sampler.state(),
            "cold_start": self.cold_start.state(),
            "kl": self.policy.kl.state(),
            "prompts": self.prompts.digest(),
            "reference": settings.origin,
        }
        path = save_checkpoint(
            settings.run_dir / "checkpoints",
            step,
            self.policy.trainable,
            state,
            hf_folder=settings.hf_folder,
            keep_last=settings.keep_last,
            context=self.context,
        )
        log.info(f"saved {path}")
        every = settings.export_every
        if every and (step == self.steps or step % every == 0):
            out = export_folder(settings.run_dir, step)
            self.exporter.write(out)
            log.info(f"exported {out}")

    @phase("load_checkpoint")
    def _resume(self, checkpoint: Path) -> None:
        state = load_checkpoint(checkpoint, self.policy.trainable, self.context)
        self.sampler.load_state(state["sampler"])
        self.cold_start.load_state(state["cold_start"])
        self.policy.kl.load_state(state["kl"])
        self.policy.optimizer_steps = state["optimizer_steps"]
        self.policy.skipped_steps = state["skipped_steps"]
        self.policy.steps_over_stop = state["steps_over_stop"]
        self.done = state["step"]
        log.info(f"resumed from {checkpoint}: {self.done} of {self.steps} steps done")
