"""Rollouts in memory and as JSON lines files, exact enough to train on again.

A rollout keeps every group that was generated, those that are not trained too: statistics and
accounts are about all of them. Ids are integers and log-probs are written with the shortest digits
that read back to the same float, so a loaded sample equals the dumped one. Left out: columns that
JSON does not know (dates, bytes) come back as their text, tuples as lists; a chat comes back as its
rendered text alone.
"""

import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megagrpo.types import Completion, Prompt, Sample

FLAT = "flat"  # a group without signal, filtered
FAILED = "failed"  # a group without a rated sample, replaced by a spare one
SURPLUS = "surplus"  # a good group beyond need


@dataclass(frozen=True)
class Rollout:
    """Samples of whole groups in a fixed order; every method returns another rollout.

    Example: groups 0 and 1 of two samples each, dropped {1: "flat"}: `kept` are the two of group 0.
    """

    samples: tuple[Sample, ...] = ()  # all of them; those of a group stand together
    dropped: Mapping[int, str] = field(default_factory=dict)  # by group: why it is not trained

    @property
    def kept(self) -> list[Sample]:
        """The samples of the groups that are trained."""
        return [sample for sample in self.samples if sample.group not in self.dropped]

    @property
    def groups(self) -> dict[int, list[Sample]]:
        """The samples of every group, in order."""
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.group, []).append(sample)
        return found

    def append(self, other: "Rollout") -> "Rollout":
        """Both; the groups of `other` are numbered on, so that no two groups share a number."""
        start = 1 + max((sample.group for sample in self.samples), default=-1)
        number = {group: start + place for place, group in enumerate(other.groups)}
        return Rollout(
            self.samples + tuple(replace(s, group=number[s.group]) for s in other.samples),
            {**self.dropped, **{number[group]: why for group, why in other.dropped.items()}},
        )

    def drop(self, groups: Iterable[int], why: str) -> "Rollout":
        """Without these groups in `kept`; a group that was dropped before keeps its reason."""
        return replace(self, dropped={**dict.fromkeys(groups, why), **self.dropped})

    def filter(self, keep: Callable[[Sequence[Sample]], bool], why: str = FLAT) -> "Rollout":
        """Drops every group that `keep(its samples)` refuses."""
        return self.drop([g for g, samples in self.groups.items() if not keep(samples)], why)

    def shuffle(self, seed: int) -> "Rollout":
        """The groups in an order that follows from `seed` alone; members stay in theirs."""
        groups = list(self.groups.values())
        random.Random(seed).shuffle(groups)
        return replace(self, samples=tuple(sample for group in groups for sample in group))

    def dump(self, path: str | Path, extras: Mapping[str, Sequence[Any]] | None = None) -> Path:
        """Write `dump_rollouts` of all samples with the reason of each dropped one."""
        dropped = [self.dropped.get(sample.group) for sample in self.samples]
        return dump_rollouts(path, self.samples, {**(extras or {}), "dropped": dropped})

    @staticmethod
    def load(path: str | Path) -> "Rollout":
        """Read it back, in order; raises ValueError with file and line for what is no sample."""
        samples: list[Sample] = []
        dropped: dict[int, str] = {}
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                    samples.append(_from_line(line))
                except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path}:{number}: not a dumped sample ({error!r})") from error
                if line.get("dropped") is not None:
                    dropped[samples[-1].group] = line["dropped"]
        return Rollout(tuple(samples), dropped)


def dump_rollouts(
    path: str | Path, samples: Sequence[Sample], extras: Mapping[str, Sequence[Any]] | None = None
) -> Path:
    """Write one line per sample, all or nothing; returns the path.

    Not forced to disk: a rollout can be lost with the machine, a step must not wait for it.

    `extras` are further columns, one value per sample, e.g. {"advantage": [0.7, -0.7]}; they are
    there to be read by people and `Rollout.load` skips them. Raises ValueError where ids and
    log-probs, or an extra column and the samples, differ in length.
    """
    path = Path(path)
    extras = extras or {}
    for name, column in extras.items():
        if len(column) != len(samples):
            raise ValueError(f"{path.name}: {len(samples)} samples, {len(column)} values of {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    encode = json.JSONEncoder(default=str).encode  # json.dumps would make one for every line
    with open(unfinished, "w", encoding="utf-8") as file:
        for place, sample in enumerate(samples):
            line = _to_line(sample)
            assert not line.keys() & extras.keys(), f"an extra column of {[*extras]} is a sample's"
            line |= {name: column[place] for name, column in extras.items()}
            file.write(encode(line) + "\n")
    os.replace(unfinished, path)
    return path


def dumped_steps(folder: str | Path) -> list[int]:
    """Numbers of the steps whose rollouts lie in `folder`, ascending."""
    stems = [path.stem.removeprefix("step_") for path in Path(folder).glob("step_*.jsonl")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def step_file(folder: str | Path, step: int) -> Path:
    """Where the rollout of a step is dumped."""
    return Path(folder) / f"step_{step}.jsonl"


def _to_line(sample: Sample) -> dict[str, Any]:
    ids, logprobs = sample.completion.ids, sample.completion.logprobs
    if len(ids) != len(logprobs):
        raise ValueError(
            f"sample {sample.member} of group {sample.group}: {len(ids)} response ids but "
            f"{len(logprobs)} rollout_logprobs"
        )
    return {
        "group": sample.group,
        "member": sample.member,
        "prompt_index": sample.prompt.index,
        "prompt": sample.prompt.text,
        "completion": sample.text,
        "reward": sample.reward,
        "rewards": dict(sample.rewards),
        "failed": sample.failed,
        "stopped": sample.completion.stopped,
        "prompt_ids": list(sample.prompt.ids),
        "completion_ids": list(ids),
        "rollout_logprobs": list(logprobs),
        "columns": dict(sample.prompt.columns),
    }


def _from_line(line: dict[str, Any]) -> Sample:
    return Sample(
        prompt=Prompt(
            line["prompt_index"], tuple(line["prompt_ids"]), line["prompt"], line["columns"]
        ),
        group=line["group"],
        member=line["member"],
        completion=Completion(
            tuple(line["completion_ids"]), tuple(line["rollout_logprobs"]), line["stopped"]
        ),
        text=line["completion"],
        rewards=line["rewards"],
        reward=line["reward"],
        failed=line["failed"],
    )
