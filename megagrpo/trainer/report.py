"""One step's numbers to all reporters, and the rollout to its file; rank 0 writes.

Samples and the update's metrics are the same on every rank; what differs (memory, reward failures,
sync bytes) is reduced here, so every rank calls in.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megagrpo import log
from megagrpo.config_file import to_yaml
from megagrpo.metrics.health import Health
from megagrpo.metrics.records import (
    max_of,
    mean_of,
    min_of,
    render,
    rollout_metrics,
    selection_metrics,
    std_of,
)
from megagrpo.metrics.report_html import write_report
from megagrpo.metrics.reporters import (
    Console,
    JsonLines,
    Reporter,
    TensorBoard,
    Wandb,
    read_lines,
    sample_lines,
)
from megagrpo.parallel import collectives, platform
from megagrpo.parallel.context import ParallelContext
from megagrpo.rewards.runner import RewardCounts
from megagrpo.rollout.storage import Rollout, step_file
from megagrpo.trainer.batch import Batch
from megagrpo.trainer.preflight import Prepared
from megagrpo.trainer.update_metrics import UpdateMetrics
from megagrpo.trainer.utilization import device_peak, step_flops, utilization

GIB = 1 << 30


@dataclass(frozen=True)
class Progress:
    """Where the optimizer stands after the step."""

    optimizer_steps: int
    skipped_steps: int  # of the whole run


class StepReport:
    """Owns the reporters; `begin` opens them, `end` closes them."""

    def __init__(self, prepared: Prepared, context: ParallelContext) -> None:
        self._prepared = prepared
        self._context = context
        self._run_dir = Path(prepared.config.trainer.run_dir)
        self._reporters: list[Reporter] = []
        self._lines: JsonLines | None = None
        self._health = Health(prepared.config.health)
        self._since = time.perf_counter()

    def begin(self, done: int) -> None:
        """Open the reporters after `done` steps; a resumed run drops lines of later steps."""
        if self._context.rank == 0:
            prepared, config = self._prepared, self._prepared.config
            resumed = done if prepared.resume_from is not None else None
            (self._run_dir / "config.yaml").write_text(to_yaml(config))
            self._lines = JsonLines(self._run_dir / "metrics.jsonl", resumed)
            for line in read_lines(self._run_dir / "metrics.jsonl")[0]:
                self._health.see(line["step"], line)  # warned before this run was resumed
            console = Console(prepared.steps, self._context.layout.world)
            self._reporters = [self._lines, console]
            if config.log.tensorboard:
                self._reporters.append(TensorBoard(self._run_dir / "tensorboard", resumed))
            if config.log.wandb:
                settings = {"config": to_yaml(config)}
                self._reporters.append(Wandb(config.log.wandb, self._run_dir, settings))
            log.info(f"plan: {prepared.length}")
            if prepared.replay is not None:
                log.info(f"replay: {prepared.steps} steps from {prepared.replay.folder}")
            log.info(f"first prompt: {ascii(prepared.train.first_rendered)}")
        self._since = time.perf_counter()

    def write_evaluation(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]
    ) -> None:
        """A line of evaluation alone, for the policy before training."""
        timing = {f"timing_s/{name}": value for name, value in seconds.items()}
        self._write(step, 0, {**metrics, **timing})

    def write_step(
        self,
        step: int,
        batch: Batch,
        outcome: UpdateMetrics,
        progress: Progress,
        *,
        rollout: Rollout,
        fates: Sequence[str],
        evaluation: Mapping[str, float],
        sync: Mapping[str, float],
        counts: RewardCounts,
        seconds: Mapping[str, float],
    ) -> None:
        """The step's line; all ranks join. `sync` (by metric name) and `counts` are this rank's."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        metrics = {**outcome.as_metrics(), **_batch_metrics(batch, rollout, fates)}
        metrics["actor/skipped_steps"] = float(progress.skipped_steps)
        metrics.update(self._over_ranks(sync, counts))
        metrics.update(self._utilization(batch, seconds))
        apart = seconds.get("testing", 0.0) + seconds.get("save_checkpoint", 0.0)
        metrics.update(self._speed(rollout, elapsed - apart))
        metrics["timing_s/step"] = elapsed
        metrics.update({f"timing_s/{name}": value for name, value in seconds.items()})
        metrics.update(evaluation)
        if self._context.rank == 0 and self._prepared.config.rollout.dump:
            self._dump(step, batch, rollout, fates)
        self._write(step, progress.optimizer_steps, metrics)
        shown = self._prepared.config.log
        if shown.samples_every and step % shown.samples_every == 0:
            for line in sample_lines(batch.samples, shown.num_samples):
                log.info(f"  {line}")

    def to_disk(self) -> None:
        """Before a checkpoint: no line of a step that it holds can be lost any more."""
        if self._lines is not None:
            self._lines.to_disk()

    def end(self) -> None:
        """Close the reporters and write report.html."""
        for reporter in self._reporters:
            reporter.close()
        if self._context.rank == 0:
            log.info(f"report: {write_report(self._run_dir)}")

    def _write(self, step: int, optimizer_step: int, metrics: Mapping[str, float]) -> None:
        for reporter in self._reporters:
            reporter.write(step, optimizer_step, metrics)
        if self._context.rank == 0:
            for finding in self._health.see(step, metrics):
                log.warn(finding.line)

    def _dump(self, step: int, batch: Batch, rollout: Rollout, fates: Sequence[str]) -> None:
        """All that was generated; samples of dropped groups have no advantage."""
        values = batch.advantages.advantages.tolist()
        of = {(s.group, s.member): a for s, a in zip(batch.samples, values, strict=True)}
        advantages = [of.get((s.group, s.member)) for s in rollout.samples]
        path = step_file(self._run_dir / "rollouts", step)
        rollout.dump(path, {"advantage": advantages, "fate": fates})

    def _speed(self, rollout: Rollout, elapsed: float) -> dict[str, float]:
        """Of the step without evaluation and checkpoint, seconds."""
        tokens = sum(len(s.prompt.ids) + len(s.completion.ids) for s in rollout.samples)
        world = self._context.layout.world
        return {
            "perf/step_seconds": elapsed,
            "perf/tokens_per_second_per_gpu": tokens / elapsed / world,
        }

    def _utilization(self, batch: Batch, seconds: Mapping[str, float]) -> dict[str, float]:
        """Model FLOPs of all ranks against this rank's clock; all ranks of the world join."""
        config, layout = self._prepared.config, self._context.layout
        flops = step_flops(batch, self._prepared.shape, config.algorithm.num_iterations)
        share = torch.tensor(flops / layout.tp / layout.pp, dtype=torch.float64)
        total = collectives.sum_over(self._context.cpu_group, {"flops": share})["flops"]
        return utilization(float(total), seconds, layout.world, device_peak(config.model.dtype))

    def _over_ranks(self, sync: Mapping[str, float], counts: RewardCounts) -> dict[str, float]:
        """Sums and peaks of what each rank knows alone; all ranks of the world join."""
        memory = platform.memory_stats()
        world = self._context.cpu_group
        sums = collectives.sum_over(
            world,
            {
                "reward/errors": torch.tensor(float(counts.errors)),
                "reward/timeouts": torch.tensor(float(counts.timeouts)),
                "reward/workers_replaced": torch.tensor(float(counts.workers_replaced)),
            },
        )
        peaks = {name: torch.tensor(value, dtype=torch.float64) for name, value in sync.items()}
        peaks["memory/peak_allocated_gb"] = torch.tensor(memory.peak_allocated / GIB)
        peaks["memory/rss_gb"] = torch.tensor(memory.rss / GIB)
        peaks = collectives.max_over(world, peaks)
        return {name: float(value) for name, value in {**sums, **peaks}.items()}


def _batch_metrics(batch: Batch, rollout: Rollout, fates: Sequence[str]) -> dict[str, float]:
    """Rewards, lengths and counts of all that was generated, advantages of what is trained; known
    to every rank."""
    result = batch.advantages
    rated = result.advantages[batch.valid].tolist()
    record = rollout_metrics(rollout.samples, fates)
    record |= selection_metrics(rollout.samples, rollout.dropped)
    record |= {
        "advantage/mean": mean_of(rated),
        "advantage/std": std_of(rated),
        "advantage/min": min_of(rated),
        "advantage/max": max_of(rated),
        "advantage/abs_max": max_of(abs(value) for value in rated),
    }
    found = render(record)
    if batch.kl_paid_mean is not None:
        found["reward/kl_paid_mean"] = batch.kl_paid_mean
    found["advantage/clipped_share"] = result.clipped_share
    found["counts/singleton_groups"] = float(result.singleton_count)
    found["counts/missing_rewards"] = float(result.missing_count)
    return found
