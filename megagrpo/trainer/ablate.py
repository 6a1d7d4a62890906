"""`megagrpo ablate`: the same small budget for several group sizes, compared in one table.

Every run samples the same number of completions per step: prompts_per_step x G is constant, a
multiple of every G; only a step that ends an epoch may be short. The run of the smallest G draws
`prompts` prompts in `steps` steps, rounded to whole groups for all and at least one prompt a step
for the largest G; larger groups draw fewer. One optimizer step per rollout, whatever the config
says; seeds and everything else are the config's.

Each run is a `torchrun` of its own, one after the other, since an engine cannot be rebuilt within a
process; they end with this one. Left out: several hosts, repeating a size over seeds, telling which
size to take.

Letters: G group size, n steps with a reward.
"""

import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megagrpo import log
from megagrpo.config import Config
from megagrpo.metrics.report_data import Run, read_run
from megagrpo.metrics.svg_chart import number

PATIENCE_S = 45  # torchrun gives its workers 30 s to end
VARIED = ("rollout.group_size", "data.prompts_per_step", "data.minibatch_prompts", "trainer.steps")
COLUMNS = {
    "group_size": ("G", "completions per prompt"),
    "prompts_per_step": ("prompts/step", "prompts per step; times G is constant"),
    "reward_first": ("reward first", "mean of reward/mean over the first steps, at most 10"),
    "reward_last": ("reward last", "mean over the last ones"),
    "reward_slope": ("slope/step", "least squares of reward/mean over steps"),
    "reward_slope_error": (
        "+-",
        "its standard error, sqrt(residuals^2 / (n - 2) / sum (step - mean)^2), errors independent",
    ),
    "advantage_noise": (
        "noise",
        "jackknife error of a group's mean reward, std / sqrt(G); mean over groups, then steps",
    ),
    "flat_share": ("flat", "mean share of groups with equal rewards"),
    "tokens_per_step": ("tokens/step", "sampled tokens, mean over steps"),
    "generation_seconds": ("gen s/step", "seconds of generation, sync and rewards; mean"),
    "step_seconds": ("s/step", "seconds of a step; mean"),
}
"""Fields of a row: heading, and definition with its denominator."""


@dataclass(frozen=True)
class Size:
    """One run of the comparison."""

    group_size: int
    prompts_per_step: int


@dataclass(frozen=True)
class Row:
    """What one run showed; None where too few steps have the number."""

    group_size: int
    prompts_per_step: int
    reward_first: float | None
    reward_last: float | None
    reward_slope: float | None
    reward_slope_error: float | None
    advantage_noise: float | None
    flat_share: float | None
    tokens_per_step: float | None
    generation_seconds: float | None
    step_seconds: float | None


def read_sizes(text: str) -> list[int]:
    """Group sizes out of "4,8,16"; ValueError for anything else."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--group-sizes={text}: give numbers between commas, e.g. 4,8,16")
    return [int(part) for part in parts]


def check_words(overrides: Sequence[str]) -> None:
    """ValueError for an override of what the comparison sets itself."""
    for word in overrides:
        if word.partition("=")[0].strip("+") in VARIED:
            raise ValueError(f"override {word!r}: ablate sets {word.partition('=')[0]} itself")


def plan_sizes(group_sizes: Sequence[int], prompts: int, steps: int) -> list[Size]:
    """The runs in ascending G. Example: 4, 8, 16 with 1000 prompts in 100 steps: 32 completions a
    step, from 8, 4 and 2 prompts. Raises ValueError for sizes below 2 or twice, or no prompt a
    step."""
    sizes = sorted(group_sizes)
    if not sizes or sizes[0] < 2 or len(set(sizes)) != len(sizes):
        raise ValueError(f"--group-sizes={','.join(map(str, group_sizes))}: give different numbers "
                         "of at least 2, e.g. 4,8,16")  # fmt: skip
    if steps < 1 or prompts < steps:
        raise ValueError(
            f"--prompts={prompts} in --steps={steps} steps: every step needs at least one prompt"
        )
    whole = math.lcm(*sizes)
    completions = max(1, prompts // steps * sizes[0] // whole) * whole
    return [Size(size, completions // size) for size in sizes]


def ablate(
    config: Config, words: Sequence[str], sizes: Sequence[Size], steps: int, processes: int
) -> str:
    """Run all sizes, write `ablation.json` and `ablation.md` into trainer.run_dir; returns the
    table.

    `words` are the arguments of `megagrpo train` that give `config`. Raises ValueError if the
    folder holds an ablation, ChildProcessError if a run fails.
    """
    if processes < 1:
        raise ValueError(f"--nproc={processes}: a run needs at least one process")
    folder = Path(config.trainer.run_dir)
    places = {size: folder / f"G{size.group_size}" for size in sizes}
    for place in places.values():
        if place.exists():
            raise ValueError(f"{place} exists; remove it or choose another trainer.run_dir")
    rows = []
    for size, place in places.items():
        log.info(f"G {size.group_size}: {size.prompts_per_step} prompts a step, {place}")
        command = run_command(words, size, steps, place, processes)
        status = run_child(command)
        if status != 0:
            raise ChildProcessError(f"status {status} of {shlex.join(command)}")
        shutil.rmtree(place / "checkpoints", ignore_errors=True)  # nobody continues these runs
        rows.append(read_row(read_run(place), size))
    table = to_table(rows)
    (folder / "ablation.md").write_text(table, encoding="utf-8")
    found = {
        "steps": steps,
        "completions_per_step": sizes[0].group_size * sizes[0].prompts_per_step,
        "definitions": {name: meaning for name, (_, meaning) in COLUMNS.items()},
        "rows": [asdict(row) for row in rows],
    }
    (folder / "ablation.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return table


def run_command(
    words: Sequence[str], size: Size, steps: int, place: Path, processes: int
) -> list[str]:
    """The torchrun of one size; its own keys come last and win."""
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [
        *(sys.executable, "-m", *torchrun, f"--nproc-per-node={processes}"),
        *("-m", "megagrpo.cli", "train", *words),
        f"rollout.group_size={size.group_size}",
        f"data.prompts_per_step={size.prompts_per_step}",
        "data.minibatch_prompts=null",
        f"trainer.steps={steps}",
        f"trainer.run_dir={place}",
        "trainer.save_every=0",
        "trainer.export_hf_every=0",
        "trainer.resume=never",
    ]


def run_child(command: Sequence[str]) -> int:
    """Run a command to its end and return its status; it and all that it started end with us.

    Called in the main thread. An interrupt, a termination or a hang-up of this process ends the
    child first and then this process with 128 + signal.
    """
    with _signals(lambda signum, frame: sys.exit(128 + signum)):
        child = subprocess.Popen(command, start_new_session=True)
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                with _signals(signal.SIG_IGN):  # a second Ctrl-C must not leave half of them
                    _end(child)


@contextmanager
def _signals(handler: Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, handler) for signum in caught}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and its descendants: torchrun by its own way first, what is left by force."""
    family = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    try:
        child.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for process in family:  # psutil knows the start time: a number used again is not met
        if process.is_running():
            process.kill()
    psutil.wait_procs(family, timeout=PATIENCE_S)


def read_row(run: Run, size: Size) -> Row:
    """The numbers of one finished run."""
    ends = run.ends("reward/mean")
    slope = fit_slope([step["step"] for step in run.steps], run.column("reward/mean"))
    alive = zip(run.column("response_length/mean"), run.column("counts/generated"),
                run.column("counts/failed"), strict=True)  # fmt: skip
    tokens = [
        None if length is None or made is None else length * (made - (failed or 0.0))
        for length, made, failed in alive
    ]
    return Row(
        group_size=size.group_size,
        prompts_per_step=size.prompts_per_step,
        reward_first=None if ends is None else ends[0],
        reward_last=None if ends is None else ends[1],
        reward_slope=None if slope is None else slope[0],
        reward_slope_error=None if slope is None else slope[1],
        advantage_noise=_mean(run.column("advantage/baseline_noise")),
        flat_share=_mean(run.column("reward/zero_variance_share")),
        tokens_per_step=_mean(tokens),
        generation_seconds=_mean(run.column("timing_s/gen")),
        step_seconds=_mean(run.column("perf/step_seconds")),
    )


def fit_slope(steps: Sequence[float], values: Sequence[float | None]) -> tuple[float, float] | None:
    """Least-squares slope and its standard error (COLUMNS); None below 3 values."""
    pairs = [(x, y) for x, y in zip(steps, values, strict=True) if y is not None]
    if len(pairs) < 3:
        return None
    mean_x = math.fsum(x for x, _ in pairs) / len(pairs)
    mean_y = math.fsum(y for _, y in pairs) / len(pairs)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
    residual = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in pairs)
    return slope, math.sqrt(residual / (len(pairs) - 2) / spread)


def to_table(rows: Sequence[Row]) -> str:
    """The comparison as a Markdown table, and what its columns mean."""
    headings = [heading for heading, _ in COLUMNS.values()]
    lines = [[*headings], *([_cell(asdict(row)[name]) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(headings))]
    shown = [
        "| "
        + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    shown.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    meanings = [f"- {heading}: {meaning}" for heading, meaning in COLUMNS.values()]
    return "\n".join([*shown, "", *meanings, ""])


def _cell(value: float | None) -> str:
    return "-" if value is None else number(value, 3)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
