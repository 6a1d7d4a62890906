"""Fills a step with groups that can teach something: dynamic sampling and spare prompts.

A batch of prompts is generated and judged. With refilling, further batches are drawn and generated
from the same weights until enough groups are useful, or until `max_batches` (DAPO, arXiv
2503.14476, sec. 3.2). Useful groups are taken in the order of submission, never in that of finish,
which would favour short answers; the rest is surplus and counted. Every decision follows from
samples that all ranks hold alike, so that all of them go the same way.

Left out: carrying surplus groups over to the next step, whose weights are others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megagrpo.rollout.storage import FAILED, FLAT, SURPLUS, Rollout
from megagrpo.types import Prompt, Sample

Generate = Callable[[Sequence[Prompt], int], list[Sample]]
"""generate(prompts, first group number) gives the samples of one group per prompt."""


class NotEnoughGroups(RuntimeError):
    """The bound on generation batches was reached before the step was full."""


@dataclass(frozen=True)
class Refill:
    """What a step is filled with; `useful` names the groups that count.

    Example: 4 wanted, 1, 2 and 3 of 4 groups are useful: 3 batches, 12 groups, of which 4 are kept,
    6 are flat and 2 are surplus.
    """

    groups: int  # wanted, data.prompts_per_step
    max_batches: int  # generation batches of a step
    refills: bool  # whether a group that is not useful is dropped and replaced by further batches
    useful: Callable[[Sequence[Sample]], set[int]]  # groups among the given samples

    def fill(
        self,
        step: int,
        prompts: Sequence[Prompt],
        draw_more: Callable[[], Sequence[Prompt]],
        generate: Generate,
    ) -> Rollout:
        """The groups of a step, `prompts` first; all ranks join.

        Raises NotEnoughGroups if `max_batches` batches do not fill it.
        """
        rollout, useful = Rollout(), list[int]()
        for batch in range(self.max_batches):
            drawn = draw_more() if batch else prompts
            rollout = rollout.append(Rollout(tuple(generate(drawn, len(rollout.groups)))))
            fine = self.useful(rollout.samples)
            useful = [group for group in rollout.groups if group in fine]
            if not self.refills:
                return self._with_spares(rollout, useful)
            if len(useful) >= self.groups:
                flat = rollout.groups.keys() - fine
                return rollout.drop(flat, FLAT).drop(useful[self.groups :], SURPLUS)
        raise NotEnoughGroups(
            f"step {step}: {len(useful)} of {len(rollout.groups)} groups have a signal after "
            f"rollout.max_num_gen_batches={self.max_batches} batches, data.prompts_per_step="
            f"{self.groups} are wanted; raise the bound, give easier or harder prompts, or set "
            "algorithm.filter_flat_groups=false"
        )

    def _with_spares(self, rollout: Rollout, useful: list[int]) -> Rollout:
        """The first useful groups; others make up the number where those are too few."""
        poor = [group for group in rollout.groups if group not in set(useful)]
        taken = len(useful[: self.groups])
        spare = rollout.drop(useful[self.groups :], SURPLUS)
        return spare.drop(poor[self.groups - taken :], FAILED)
