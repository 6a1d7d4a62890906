"""The printed plan of a run against counting the sampler's draws one by one."""

from hypothesis import given
from hypothesis import strategies as st

from megagrpo.config import DataConfig, TrainerConfig
from megagrpo.data.sampler import PromptSampler
from megagrpo.trainer.length import RunLength, run_length


def test_plan_of_the_documented_example() -> None:
    """CFG-15."""
    data = DataConfig(prompts_per_step=4, minibatch_prompts=2)
    length = run_length(data, TrainerConfig(epochs=2), prompts=12, group_size=2)
    assert length == RunLength(rollouts=6, optimizer_steps=12, responses=48)
    assert str(length) == "6 rollouts, 12 optimizer steps, 48 responses"


@given(
    prompts=st.integers(1, 40),
    per_update=st.integers(1, 4),
    factor=st.integers(1, 4),
    group=st.integers(2, 5),
    steps=st.none() | st.integers(1, 30),
    epochs=st.integers(1, 4),
)
def test_plan_is_what_the_sampler_draws(
    prompts: int, per_update: int, factor: int, group: int, steps: int | None, epochs: int
) -> None:
    """CFG-15, EVAL-7: short last rollouts and short last optimizer steps included."""
    per_step = min(per_update * factor, prompts // per_update * per_update) or per_update
    data = DataConfig(prompts_per_step=per_step, minibatch_prompts=per_update)
    sampler = PromptSampler(prompts, per_step, seed=0)
    rollouts = steps or epochs * sampler.steps_per_epoch
    draws = [len(sampler.draw()) for _ in range(rollouts)]
    want = RunLength(
        rollouts=rollouts,
        optimizer_steps=sum(len(range(0, drawn, per_update)) for drawn in draws),
        responses=sum(draws) * group,
    )
    trainer = TrainerConfig(steps=steps, epochs=epochs)
    assert run_length(data, trainer, prompts=prompts, group_size=group) == want
