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

    def __str__(self) -> str:
        return (
            f"{self.rollouts} rollouts, {self.optimizer_steps} optimizer steps, "
            f"{self.responses} responses"
        )


def run_length(
    data: DataConfig, trainer: TrainerConfig, *, prompts: int, group_size: int
) -> RunLength:
    """The length of a run over `prompts` prompts; `data.minibatch_prompts` is resolved.

    The last rollout of an epoch holds the prompts that are left (data/sampler.py), and its last
    optimizer step what is left of those.
    """
    per_step, per_update = data.prompts_per_step, data.minibatch_prompts
    assert per_update is not None, "preflight resolves it"
    full, rest = divmod(prompts, per_step)
    per_epoch = full + (rest > 0)
    rollouts = trainer.epochs * per_epoch if trainer.steps is None else trainer.steps
    epochs, more = divmod(rollouts, per_epoch)
    updates_full, updates_rest = per_step // per_update, -(-rest // per_update)
    return RunLength(
        rollouts=rollouts,
        optimizer_steps=epochs * (full * updates_full + updates_rest) + more * updates_full,
        responses=(epochs * prompts + more * per_step) * group_size,
    )
