"""What a run folder says, read leniently: a run may be going on, or may have been killed.

`Run` holds it for the report. Left out: checkpoints, TensorBoard files.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megagrpo.metrics.reporters import read_lines

ENDS = 10  # steps that "first" and "last" average over
SHOWN_SAMPLES = 6


@dataclass(frozen=True)
class Run:
    """What the run folder says."""

    name: str
    lines: Sequence[Mapping[str, Any]]  # one per step, ascending; the later of two wins
    torn: int  # lines that could not be read
    config: Mapping[str, Any]  # flat, section.key
    rollout: tuple[int, Sequence[Mapping[str, Any]]] | None  # newest dump: step and its lines

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """Lines of training steps; step 0 is an evaluation."""
        return [line for line in self.lines if line["step"] > 0]

    def column(self, name: str) -> list[float | None]:
        """One value per training step, None where there is none."""
        return [finite(line.get(name)) for line in self.steps]

    def ends(self, name: str) -> tuple[float, float] | None:
        """Means over the first and the last steps that have the metric, `ends_of` of each."""
        found = [value for value in self.column(name) if value is not None]
        if not found:
            return None
        count = ends_of(len(found))
        return math.fsum(found[:count]) / count, math.fsum(found[-count:]) / count


def read_run(folder: Path) -> Run:
    """The folder's metrics, config and newest rollout; ValueError if it holds no metrics."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give the folder of a run")
    found, torn = read_lines(metrics)
    if not found:
        raise ValueError(f"{metrics} holds no step yet")
    by_step = {line["step"]: line for line in found}
    lines = [by_step[step] for step in sorted(by_step)]
    return Run(folder.resolve().name, lines, torn, _read_config(folder), _read_rollout(folder))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        return {"config.yaml": "cannot be read"}
    return dict(_flat(tree or {}, ""))


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for place, value in enumerate(tree):
            yield from _flat(value, f"{prefix}[{place}]")
    else:
        yield prefix, tree


def _read_rollout(folder: Path) -> tuple[int, list[dict[str, Any]]] | None:
    dumps = {}
    for path in (folder / "rollouts").glob("step_*.jsonl"):
        digits = path.stem.removeprefix("step_")
        if digits.isdigit():
            dumps[int(digits)] = path
    if not dumps:
        return None
    step = max(dumps)
    rows: list[dict[str, Any]] = []
    with open(dumps[step], encoding="utf-8", errors="replace") as file:
        for text in file:
            if len(rows) == SHOWN_SAMPLES:
                break
            row = json.loads(text)
            if row["member"] == 0:
                rows.append(row)
    return step, rows


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    real = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if real else None


def ends_of(count: int) -> int:
    """How many of `count` steps are its first, and its last, ones: 10, or half where it is less."""
    return min(ENDS, -(-count // 2))
