"""One rollout as a JSON lines file, exact enough to train on again.

Ids are integers and log-probs are written with the shortest digits that read back to the same
float, so a loaded sample equals the dumped one. Left out: columns that JSON does not know (dates,
bytes) come back as their text, tuples as lists.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.types import Completion, Prompt, Sample


def dump_rollouts(
    path: str | Path, samples: Sequence[Sample], extras: Mapping[str, Sequence[Any]] | None = None
) -> Path:
    """Write one line per sample, all or nothing; returns the path.

    Not forced to disk: a rollout can be lost with the machine, a step must not wait for it.

    `extras` are further columns, one value per sample, e.g. {"advantage": [0.7, -0.7]}; they are
    there to be read by people and `load_rollouts` skips them. Raises ValueError where ids and
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


def load_rollouts(path: str | Path) -> list[Sample]:
    """Read the samples back in order, ids and log-probs exactly as dumped.

    Raises ValueError with file and line for a line that is no sample.
    """
    samples = []
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                samples.append(_from_line(json.loads(text)))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a dumped sample ({error!r})") from error
    return samples


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
