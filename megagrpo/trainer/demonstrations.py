"""Cold start: reference answers that are imitated beside the rollouts, less and less.

A policy that never finds a reward learns nothing from groups; a behaviour-cloning term on reference
answers, mixed into the loss with a weight that anneals to exactly 0, brings it to its first ones.
The answers are those of the step's own prompts, or those of a dataset of their own, drawn in an
order of its own. Left out: imitation of the policy's own best samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megagrpo.algo.cold_start import annealed_weight
from megagrpo.data.answers import Demonstration
from megagrpo.data.packing import DUMMY_SEQUENCE, pack, plan_micro_batches
from megagrpo.data.sampler import PromptSampler, State
from megagrpo.parallel.context import ParallelContext
from megagrpo.trainer.batch import Batch, CutSettings, Demonstrations
from megagrpo.trainer.order import make_answer_sampler
from megagrpo.trainer.preflight import Prepared
from megagrpo.types import MicroBatch


class ColdStart(Protocol):
    """Adds demonstrations to a batch; has a state to be saved."""

    def attach(self, batch: Batch, step: int) -> Batch:
        """The batch of `step` (from 1) with its demonstrations; moves the draw on."""

    def state(self) -> State:
        """All that a checkpoint needs to continue the draw."""

    def load_state(self, state: State) -> None:
        """Continue where `state` was taken."""


class NoColdStart:
    """Nothing is imitated."""

    def attach(self, batch: Batch, step: int) -> Batch:
        """The batch as it is."""
        return batch

    def state(self) -> State:
        """Nothing."""
        return {}

    def load_state(self, state: State) -> None:
        """Nothing to continue."""


@dataclass(frozen=True)
class AnnealedColdStart:
    """The weight falls linearly from `weight` before the first step to 0 after `steps`."""

    demonstrations: Mapping[int, Demonstration]  # by index of their prompt
    draw: PromptSampler | None  # of a dataset of their own; None: the step's own prompts
    weight: float
    steps: int  # rollouts
    cut: CutSettings
    dp: int
    dp_rank: int

    def attach(self, batch: Batch, step: int) -> Batch:
        """Every optimizer step gets its share; one without an answer has none."""
        weight = annealed_weight(weight=self.weight, steps_total=self.steps, done=step - 1)
        if weight == 0.0:
            return batch
        minis = batch.mini_batches
        shown = self._shown(batch)
        parts = [
            shown[number * len(shown) // len(minis) : (number + 1) * len(shown) // len(minis)]
            for number in range(len(minis))
        ]
        return replace(
            batch,
            mini_batches=tuple(
                replace(mini, demonstrations=self._pack(part, weight) if part else None)
                for mini, part in zip(minis, parts, strict=True)
            ),
        )

    def _shown(self, batch: Batch) -> list[Demonstration]:
        if self.draw is not None:
            rows = sorted(self.demonstrations)
            return [self.demonstrations[rows[place]] for place in self.draw.draw()]
        drawn = dict.fromkeys(sample.prompt.index for sample in batch.samples)
        return [self.demonstrations[row] for row in drawn if row in self.demonstrations]

    def _pack(self, shown: Sequence[Demonstration], weight: float) -> Demonstrations:
        lengths = [len(one.prompt_ids) + len(one.answer_ids) for one in shown]
        plan = plan_micro_batches(lengths, self.dp, self.cut.max_tokens)
        return Demonstrations(
            micro_batches=tuple(_packed(rows, shown) for rows in plan[self.dp_rank]),
            tokens=sum(len(one.answer_ids) for one in shown),
            weight=weight,
        )

    def state(self) -> State:
        """Position of the draw from a dataset of their own."""
        return {} if self.draw is None else self.draw.state()

    def load_state(self, state: State) -> None:
        """Continue that draw; ValueError if it belongs to another one."""
        if self.draw is not None and state:
            self.draw.load_state(state)


def build_cold_start(prepared: Prepared, cut: CutSettings, context: ParallelContext) -> ColdStart:
    """The config's `algorithm.cold_start`."""
    config, found = prepared.config, prepared.demonstrations
    cold = config.algorithm.cold_start
    if found is None:
        return NoColdStart()
    assert cold.steps is not None, "config_checks wants it with a weight"
    return AnnealedColdStart(
        demonstrations=found,
        draw=make_answer_sampler(config, len(found)),
        weight=cold.weight,
        steps=cold.steps,
        cut=cut,
        dp=context.layout.dp,
        dp_rank=context.coords.dp,
    )


def _packed(rows: Sequence[int], shown: Sequence[Demonstration]) -> MicroBatch:
    """One pack, its answers marked as what they are."""
    pairs = [(shown[row].prompt_ids, shown[row].answer_ids) for row in rows if row >= 0]
    sequences = pairs or [DUMMY_SEQUENCE]
    marks = [[1.0] * len(answer) for _, answer in sequences]
    return pack(sequences, {"demonstration": marks}, rows)
