"""How many prompts a generation batch draws and in which order, and so of reference answers."""

from collections.abc import Sequence

from megagrpo.config import Config
from megagrpo.data.sampler import PromptSampler
from megagrpo.types import Prompt


def make_sampler(config: Config, prompts: Sequence[Prompt]) -> PromptSampler:
    """The order of the training prompts, at its beginning; a draw is one generation batch."""
    data = config.data
    assert data.shuffle_seed is not None, "resolve fills it in"
    return PromptSampler(
        len(prompts),
        data.prompts_per_step + config.rollout.oversample_prompts,
        data.shuffle_seed,
        lengths=[len(prompt.ids) for prompt in prompts] if data.bucket_by_length else None,
    )


def make_answer_sampler(config: Config, answers: int) -> PromptSampler | None:
    """The order of a cold start's own dataset, at its beginning; None without one."""
    data = config.data
    if config.algorithm.cold_start.data is None:
        return None
    assert data.shuffle_seed is not None, "resolve fills it in"
    return PromptSampler(
        answers,
        min(data.prompts_per_step, answers),
        data.shuffle_seed,
        source="algorithm.cold_start.data",
    )


def check_draw(config: Config, prompts: int) -> None:
    """Raise ValueError for a batch of more than all `prompts`, or of all where order matters."""
    data, spare = config.data, config.rollout.oversample_prompts
    drawn, said = data.prompts_per_step + spare, f"data.prompts_per_step={data.prompts_per_step}"
    if spare:
        said += f" + rollout.oversample_prompts={spare}"
    if drawn > prompts:
        raise ValueError(
            f"{said} is more than the {prompts} prompts of {data.train}; use at most that many"
        )
    if data.bucket_by_length and drawn == prompts:
        raise ValueError(
            f"data.bucket_by_length=true has no effect: {said} draws all {prompts} prompts at once"
        )
