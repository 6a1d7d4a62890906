"""How much a run will do, known before it starts: rollouts, optimizer steps, responses."""

from dataclasses import dataclass

from megagrpo.config import DataConfig, TrainerConfig


@dataclass(frozen=True)
class RunLength:
    """Example: 12 prompts, 4 a rollout, groups of 2, optimizer steps of 2 prompts, 2 epochs: 6
    rollouts, 12 optimizer steps, 48 responses."""

    rollouts: int
    optimizer_steps: int  # if none is skipped
    responses: int
    refills: bool = False  # further responses replace groups without signal

    def __str__(self) -> str:
        at_least = "at least " if self.refills else ""
        return (
            f"{self.rollouts} rollouts, {self.optimizer_steps} optimizer steps, "
            f"{at_least}{self.responses} responses"
        )


def run_length(
    data: DataConfig,
    trainer: TrainerConfig,
    *,
    prompts: int,
    group_size: int,
    iterations: int = 1,
    spare: int = 0,
    refills: bool = False,
) -> RunLength:
    """The length of a run over `prompts` prompts, each rollout passed `iterations` times;
    `data.minibatch_prompts` is resolved.

    The last rollout of an epoch holds the prompts that are left (data/sampler.py), and its last
    optimizer step what is left of those. `spare` prompts are drawn beyond those that are trained.
    With `refills` every step is filled up, from the next epoch too; `trainer.epochs` then stands
    for as many steps as it would be without.
    """
    per_step, per_update = data.prompts_per_step, data.minibatch_prompts
    assert per_update is not None, "preflight resolves it"
    full, rest = divmod(prompts, per_step + spare)
    per_epoch = full + (rest > 0)
    rollouts = trainer.epochs * per_epoch if trainer.steps is None else trainer.steps
    epochs, more = divmod(rollouts, per_epoch)
    updates_full, updates_rest = per_step // per_update, -(-min(rest, per_step) // per_update)
    if refills and rest:
        updates_rest = updates_full
    updates = epochs * (full * updates_full + updates_rest) + more * updates_full
    return RunLength(
        rollouts=rollouts,
        optimizer_steps=updates * iterations,
        responses=(epochs * prompts + more * (per_step + spare)) * group_size,
        refills=refills,
    )
