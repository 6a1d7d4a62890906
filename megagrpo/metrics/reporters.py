"""Where a step's numbers go: JSON lines, the console, TensorBoard, Weights & Biases.

One rank owns the reporters. All take the same flat names. Left out: buffering (a line survives the
end of the process when `write` returns) and uploads by ourselves (W&B does its own, or none).
"""

import importlib
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megagrpo import log
from megagrpo.metrics.held_out import headline_scores
from megagrpo.types import Sample

Metrics = Mapping[str, float]


class Reporter(Protocol):
    """Takes the numbers of one step after the other."""

    def write(self, step: int, optimizer_step: int, metrics: Metrics) -> None:
        """The numbers of `step`; step 0 is before training."""

    def close(self) -> None:
        """Nothing comes after this."""


def check_packages(tensorboard: bool, wandb: str | None) -> None:
    """ValueError if a chosen reporter's package is missing; importing it comes much later."""
    for package, wanted, off in (("tensorboard", tensorboard, "false"), ("wandb", wandb, "null")):
        if wanted and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"log.{package}={wanted} needs the {package} package; pip install {package} or set "
                f"log.{package}={off}"
            )


class JsonLines:
    """`metrics.jsonl`: one flat line per step, in the system's hands when `write` returns.

    Example: {"step": 3, "optimizer_step": 6, "reward/mean": 0.41}. A number that is not finite is
    written as null, since JSON has no other word for it. `resumed_step` drops the lines of later
    steps (the run is about to repeat them) and a torn last line; None starts an empty file.
    """

    def __init__(self, path: str | Path, resumed_step: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[dict[str, Any]] = []
        if resumed_step is not None and path.exists():
            kept = [line for line in read_lines(path)[0] if line["step"] <= resumed_step]
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(unfinished, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def write(self, step: int, optimizer_step: int, metrics: Metrics) -> None:
        """Append the step's line."""
        line: dict[str, Any] = {"step": step, "optimizer_step": optimizer_step}
        for name, value in metrics.items():
            line[name] = value if math.isfinite(value) else None
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def to_disk(self) -> None:
        """Wait until the lines so far would survive the end of the machine too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a `metrics.jsonl` and how many were torn (a killed run's last one)."""
    lines, torn = [], 0
    for text in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            torn += 1
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
        else:
            torn += 1
    return lines, torn


class Console:
    """The progress line: step, reward, KL, length, seconds, tokens per second.

    Example: "step  12/150  reward 0.412  kl 0.0031  length 3.0  0.21 s  1,520 tok/s".
    """

    def __init__(self, total_steps: int, ranks: int = 1) -> None:
        self._total, self._ranks = total_steps, ranks

    def write(self, step: int, optimizer_step: int, metrics: Metrics) -> None:
        """Log the line; what was not measured shows as a dash."""
        log.info(progress_line(step, self._total, metrics, self._ranks))

    def close(self) -> None:
        """Nothing to close."""


def progress_line(step: int, total_steps: int, metrics: Metrics, ranks: int = 1) -> str:
    """The words of `Console`; tokens per second are those of all ranks together."""
    rate = metrics.get("perf/tokens_per_second_per_gpu")
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        _word("reward", metrics.get("reward/mean"), ".3f"),
        _word("kl", metrics.get("kl/ref_k3"), ".4f"),
        _word("length", metrics.get("response_length/mean"), ".1f"),
        _word("", metrics.get("perf/step_seconds"), ".2f", " s"),
        _word("", None if rate is None else rate * ranks, ",.0f", " tok/s"),
    ]
    trained, generated = metrics.get("counts/trained"), metrics.get("counts/generated")
    if trained is not None and generated is not None and trained < generated:
        parts.append(f"trained {trained:,.0f}/{generated:,.0f}")
    parts += [_word(name, metrics[name], ".3f") for name in headline_scores(metrics.keys())]
    return "  ".join(parts)


def _word(name: str, value: float | None, form: str, unit: str = "") -> str:
    text = "-" if value is None else format(value, form)
    return f"{name} {text}{unit}" if name else f"{text}{unit}"


def sample_lines(samples: Sequence[Sample], count: int, width: int = 400) -> list[str]:
    """The first completion of the first `count` groups, a line each.

    Texts are shown as Python literals: a model may write line breaks and terminal codes.
    """
    firsts = {sample.group: sample for sample in reversed(samples)}
    lines = []
    for group in sorted(firsts)[:count]:
        sample = firsts[group]
        reward = "failed" if sample.failed else f"reward {sample.reward}"
        lines.append(f"{_literal(sample.prompt.text, width)} -> {_literal(sample.text, width)}")
        lines[-1] += f" ({reward})"
    return lines


def _literal(text: str, width: int) -> str:
    """At most `width` characters, the end of the text kept: that is where prompts ask."""
    return ascii(text if len(text) <= width else "..." + text[3 - width :])


class TensorBoard:
    """Scalars under `folder`; steps after `resumed_step` are hidden by the newer ones."""

    def __init__(self, folder: str | Path, resumed_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"log.tensorboard=true but {error}; pip install tensorboard or set it to false"
            ) from error
        self._summary = Summary
        purge = None if resumed_step is None else resumed_step + 1
        # Written by a thread of its own every 10 s: a step does not wait for the event file.
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge, flush_secs=10)

    def write(self, step: int, optimizer_step: int, metrics: Metrics) -> None:
        """One scalar per name, all in one event: an event each costs milliseconds a step."""
        values = {"optimizer_step": optimizer_step, **metrics}
        self._writer.file_writer.add_summary(
            self._summary(
                value=[
                    self._summary.Value(tag=name, simple_value=value)
                    for name, value in values.items()
                ]
            ),
            step,
        )

    def close(self) -> None:
        """Write what is left and close the event file."""
        self._writer.close()


class Wandb:
    """Weights & Biases. Without a network set its own WANDB_MODE=offline and sync later.

    `folder` gets its files and names the run; a resumed run goes on under the same id.
    """

    def __init__(self, project: str, folder: str | Path, config: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ValueError(
                f"log.wandb={project} but {error}; pip install wandb or set log.wandb=null"
            ) from error
        folder = Path(folder).resolve()
        identity = folder / "wandb_id.txt"
        if not identity.exists():
            identity.write_text(wandb.util.generate_id(), encoding="utf-8")
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            name=folder.name,
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
            config=dict(config),
        )

    def write(self, step: int, optimizer_step: int, metrics: Metrics) -> None:
        """One entry per step."""
        self._run.log({"optimizer_step": optimizer_step, **metrics}, step=step)

    def close(self) -> None:
        """End the run and wait for its upload."""
        self._run.finish()
