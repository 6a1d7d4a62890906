"""Draws G completions for every prompt and scores a group while other groups still generate.

Prompts go to engine replicas by their place in the batch (place % replicas), so the order of
submission never depends on time. Every tensor-parallel rank of a replica runs the same requests in
lockstep; only its rank 0 hears of finished completions and runs the rewards (design 4.7). At the
end all ranks hold all samples in (group, member) order.

Left out: which groups are trained (refill.py), partial rollouts.

Letters: G group size.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megagrpo.rewards.runner import RewardRunner
from megagrpo.rollout.engine import RolloutEngine
from megagrpo.types import Completion, Prompt, Request, Sample, Sampling


@dataclass(frozen=True)
class Draw:
    """What makes the seeds of one rollout."""

    seed: int  # of the run
    stream: str  # "train" or "eval": the two never share random numbers
    step: int

    def request_seed(self, group: int, member: int) -> int:
        """A 63-bit seed of its own for every completion, equal at every layout."""
        key = f"{self.stream}/{self.seed}/{self.step}/{group}/{member}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Collector:
    """Engine, rewards and the way back to text; holds no state between rollouts."""

    engine: RolloutEngine
    rewards: RewardRunner
    decode: Callable[[Sequence[int]], str]  # ids to text, special tokens left out
    gather: Callable[[Any], list[Any]]  # an object of every rank, on every rank; all ranks join

    def collect(
        self,
        prompts: Sequence[Prompt],
        draw: Draw,
        sampling: Sampling,
        group_size: int,
        first_group: int = 0,
    ) -> list[Sample]:
        """`group_size` samples per prompt, the same list on every rank.

        All ranks join. Groups are numbered from `first_group`: those of several batches of a step
        differ, and so do the seeds of their requests. A reward that raises, hangs or answers
        nonsense marks its samples failed; a reward of None leaves `reward` None.
        """
        engine = self.engine
        mine = [place for place in range(len(prompts)) if place % engine.replicas == engine.replica]
        requests = [
            Request(prompts[place].ids, draw.request_seed(first_group + place, member))
            for place in mine
            for member in range(group_size)
        ]
        groups = _Groups(prompts, mine, group_size, self)
        leads = engine.tp_rank == 0
        completions = engine.generate(requests, sampling, groups.finished if leads else None)
        assert len(completions) == len(requests), (
            f"engine answered {len(completions)} of {len(requests)} requests"
        )
        rows = groups.scored(completions) if leads else []
        return sorted(
            (_restore(row, prompts, first_group) for part in self.gather(rows) for row in part),
            key=lambda sample: (sample.group, sample.member),
        )

    def tracebacks(self) -> list[dict[str, str]]:
        """Every rank's first failure of each reward; all ranks join."""
        return self.gather(self.rewards.tracebacks)


class _Groups:
    """Completions on their way into whole groups, on the replica's rank 0; a group goes by its
    place in the batch."""

    def __init__(
        self, prompts: Sequence[Prompt], mine: list[int], size: int, collector: Collector
    ) -> None:
        self._prompts, self._mine, self._size = prompts, mine, size
        self._collector = collector
        self._open = {group: size for group in mine}
        self._members: dict[int, dict[int, Completion]] = {group: {} for group in mine}
        self._texts: dict[int, list[str]] = {}

    def finished(self, request: int, completion: Completion) -> None:
        """Called by the engine as each completion ends; a whole group goes to the rewards."""
        group, member = self._mine[request // self._size], request % self._size
        self._members[group][member] = completion
        self._open[group] -= 1
        if self._open[group] == 0:
            self._submit(group)

    def _submit(self, group: int) -> None:
        prompt = self._prompts[group]
        members = [self._members[group][member] for member in range(self._size)]
        self._texts[group] = [self._collector.decode(member.ids) for member in members]
        columns: dict[str, list[Any]] = {
            name: [value] * self._size for name, value in prompt.columns.items()
        }
        columns["completion_ids"] = [list(member.ids) for member in members]
        columns.setdefault("messages", [prompt.messages] * self._size)
        columns["finished"] = [member.stopped for member in members]
        self._collector.rewards.submit(
            group, [prompt.text] * self._size, self._texts[group], columns
        )

    def scored(self, completions: list[Completion]) -> list[Sample]:
        """Samples of this replica, without their prompts' columns (every rank has those)."""
        assert not any(self._open.values()), f"groups never finished: {self._open}"
        scores = self._collector.rewards.collect()
        bare = [Prompt(prompt.index, (), "", {}) for prompt in self._prompts]
        samples = []
        for place, group in enumerate(self._mine):
            for member in range(self._size):
                score = scores[group][member]
                samples.append(
                    Sample(
                        prompt=bare[group],
                        group=group,
                        member=member,
                        completion=completions[place * self._size + member],
                        text=self._texts[group][member],
                        rewards=score.rewards,
                        reward=score.total,
                        failed=score.failed,
                    )
                )
        return samples


def _restore(sample: Sample, prompts: Sequence[Prompt], first_group: int) -> Sample:
    """The sample with its whole prompt and its group's number in the step; checks that it came
    back to the place that it was drawn for."""
    prompt = prompts[sample.group]
    assert sample.prompt.index == prompt.index, (
        f"group {sample.group} was prompt {prompt.index}, came back as {sample.prompt.index}"
    )
    return replace(sample, prompt=prompt, group=first_group + sample.group)
