"""The comparison of group sizes: its budget, its numbers against numpy, no process left behind.

One small comparison runs for real, by the command line.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.cli import main
from megagrpo.metrics.records import render, rollout_metrics
from megagrpo.metrics.report_data import read_run
from megagrpo.trainer.ablate import (
    COLUMNS,
    Size,
    fit_slope,
    plan_sizes,
    read_row,
    run_command,
    to_table,
)
from megagrpo.types import Completion, Prompt, Sample
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent


# Budget


def test_every_size_samples_as_many_completions_a_step() -> None:
    assert plan_sizes([16, 4, 8], 1000, 100) == [Size(4, 8), Size(8, 4), Size(16, 2)]


@given(
    st.sets(st.integers(2, 24), min_size=1, max_size=4), st.integers(1, 50), st.integers(1, 4000)
)
def test_the_budget_is_kept_up_to_one_multiple_of_all_sizes(
    group_sizes: set[int], steps: int, more: int
) -> None:
    sizes = plan_sizes(list(group_sizes), steps + more, steps)
    (completions,) = {size.group_size * size.prompts_per_step for size in sizes}
    assert min(size.prompts_per_step for size in sizes) >= 1
    wanted = (steps + more) // steps * min(group_sizes)
    whole = math.lcm(*group_sizes)
    assert completions == whole or wanted - whole < completions <= wanted


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--group-sizes", "4,4"], "different numbers"),
        (["--group-sizes", "1,4"], "at least 2"),
        (["--group-sizes", "4,x"], "numbers between commas"),
        (["--prompts", "5", "--steps", "10"], "every step needs at least one prompt"),
        (["rollout.group_size=3"], "ablate sets rollout.group_size itself"),
        (["--nproc", "0"], "at least one process"),
        (["optim.bets=[0,0]"], "optim.betas"),
    ],
)
def test_a_comparison_that_cannot_be_is_one_line(
    more: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [word for word in more if "=" not in word]
    words = [word for word in more if "=" in word]
    needed = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]"]
    run_dir = tmp_path / "run"
    assert main(["ablate", *flags, *needed, f"trainer.run_dir={run_dir}", *words]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1 and said in errors[0] and not run_dir.exists()


def test_a_folder_with_an_ablation_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "G8").mkdir()
    needed = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]"]
    assert main(["ablate", *needed, f"trainer.run_dir={tmp_path}"]) == 2
    assert "G8 exists" in capfd.readouterr().err and not (tmp_path / "G4").exists()


def test_under_torchrun_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["ablate"]) == 2
    assert "call it without one" in capfd.readouterr().err


def test_the_comparison_s_own_keys_win() -> None:
    words = ["--config", "c.yaml", "optim.lr=1e-5"]
    command = run_command(words, Size(8, 4), 100, Path("runs/x/G8"), 2)
    train = command[command.index("train") + 1 :]
    assert train[:3] == words
    assert {"rollout.group_size=8", "data.prompts_per_step=4", "trainer.steps=100"} <= set(train)
    assert "--nproc-per-node=2" in command


# Numbers


@given(
    st.lists(st.one_of(st.none(), st.floats(-1, 1, allow_subnormal=False)), min_size=3, max_size=40)
)
def test_slope_and_error_are_those_of_numpy(values: list[float | None]) -> None:
    steps = list(range(1, len(values) + 1))
    known = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None]
    found = fit_slope(steps, values)
    if len(known) < 3:
        assert found is None
        return
    x, y = np.array(known, dtype=float).T
    design = np.stack([np.ones_like(x), x], axis=1)
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest = y - design @ solution
    cov = (rest @ rest) / (len(x) - 2) * np.linalg.inv(design.T @ design)
    assert found is not None
    assert found[0] == pytest.approx(solution[1], abs=1e-12)
    assert found[1] == pytest.approx(math.sqrt(max(cov[1, 1], 0.0)), abs=1e-9)


def test_noise_is_the_jackknife_error_of_the_group_means() -> None:
    """Leave-one-out means m_i of G rewards: sqrt((G - 1) / G sum (m_i - mean)^2)."""
    groups = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.2, 0.9]]
    samples = [
        Sample(Prompt(g, (2,), "", {}), g, m, Completion((1,), (-0.5,), True), "", {}, reward)
        for g, rewards in enumerate(groups)
        for m, reward in enumerate(rewards)
    ]
    errors = []
    for rewards in groups:
        means = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
        centre = sum(means) / len(means)
        size = len(rewards)
        errors.append(math.sqrt((size - 1) / size * sum((m - centre) ** 2 for m in means)))
    found = render(rollout_metrics(samples))
    assert found["advantage/baseline_noise"] == pytest.approx(sum(errors) / 3)


def test_a_row_holds_means_over_steps(tmp_path: Path) -> None:
    lines = [
        {
            "step": step,
            "reward/mean": 0.1 * step,
            "advantage/baseline_noise": 0.2,
            "reward/zero_variance_share": 0.5,
            "response_length/mean": 10.0 * step,
            "counts/generated": 8,
            "counts/failed": 2,
            "timing_s/gen": 0.5,
            "perf/step_seconds": 2.0 * step,
        }
        for step in range(1, 6)
    ]
    text = "".join(json.dumps(line) + "\n" for line in [{"step": 0, "val/x/mean@1": 1.0}, *lines])
    (tmp_path / "metrics.jsonl").write_text(text)
    row = read_row(read_run(tmp_path), Size(4, 2))
    assert row.reward_slope == pytest.approx(0.1) and row.reward_slope_error < 1e-12
    assert (row.tokens_per_step, row.step_seconds) == (pytest.approx(180), pytest.approx(6))
    assert (row.advantage_noise, row.flat_share) == (pytest.approx(0.2), 0.5)
    assert (row.generation_seconds, row.group_size, row.prompts_per_step) == (0.5, 4, 2)
    table = to_table([row])
    cells = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    assert cells[0] == "4" and cells[4] == "0.1" and cells[8] == "180"
    assert all(meaning in table for _, meaning in COLUMNS.values())


# Processes

FAMILY = """
import os, signal, subprocess, sys, time
kind, notes = sys.argv[1:]
if kind == "worker":  # in a session of its own and deaf, as the worst of workers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
else:
    subprocess.Popen([sys.executable, __file__, "worker", notes])
with open(notes, "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(120)
"""
PARENT = """
import sys
from megagrpo.trainer import ablate
ablate.PATIENCE_S = 2
ablate.run_child([sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_comparison_leaves_no_process_behind(
    signum: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    notes = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "family.py"), "leader", str(notes)], cwd=REPO
    )
    started = time.monotonic()
    while not (notes.exists() and len(notes.read_text().splitlines()) == 2):
        assert time.monotonic() - started < 60 and parent.poll() is None
        time.sleep(0.1)
    pids = [int(pid) for pid in notes.read_text().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    parent.send_signal(signum)
    assert parent.wait(30) == 128 + signum
    alive = [pid for pid in pids if psutil.pid_exists(pid)]
    assert not [p for p in alive if psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def test_a_failing_run_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(
        "megagrpo.trainer.ablate.run_child", lambda command: asked.append(command) or 3
    )
    needed = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]"]
    assert main(["ablate", *needed, f"trainer.run_dir={tmp_path / 'run'}"]) == 1
    said = capfd.readouterr()
    assert len(asked) == 1 and "error: status 3 of " in said.err and said.out == ""


def test_two_sizes_run_for_real(tmp_path: Path) -> None:
    make_hf_folder(tmp_path / "hf", "qwen3", with_tokenizer=True, head_dim=32)
    rows = [{"prompt": f"{a}{b}>", "answer": str(max(a, b))} for a in range(3) for b in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def low(completions, completion_ids, prompts):\n"
        "    return [sum(i < 50 for i in ids) / len(ids) for ids in completion_ids]\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megagrpo.cli", "ablate", "--group-sizes", "2,4"),
            *("--prompts", "24", "--steps", "4"),
            f"model.path={tmp_path}/hf",
            f"data.train={tmp_path}/train.jsonl",
            f"rewards=[{{path: '{tmp_path}/reward.py:low'}}]",
            f"trainer.run_dir={tmp_path}/ablation",
            "rollout.max_prompt_tokens=8",
            "rollout.max_response_tokens=4",
            "rollout.kv_cache_gb=0.03",
            "log.tensorboard=false",
        ],
        cwd=REPO,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "ablation" / "ablation.json").read_text())
    assert (tmp_path / "ablation" / "ablation.md").read_text() == done.stdout
    assert found["completions_per_step"] == 12 and found["steps"] == 4
    assert [(r["group_size"], r["prompts_per_step"]) for r in found["rows"]] == [(2, 6), (4, 3)]
    for row in found["rows"]:
        assert all(row[name] is not None for name in COLUMNS)
        place = tmp_path / "ablation" / f"G{row['group_size']}"
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        assert [line["counts/generated"] for line in lines] == [12, 12, 12, 12]
        assert not (place / "checkpoints").exists() and (place / "report.html").exists()
