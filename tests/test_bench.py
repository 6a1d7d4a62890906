"""The benchmarks start, compare what they say they compare, and print a finite table."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


def bench(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "tools" / f"{name}.py"), *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )


@pytest.mark.parametrize("name", ["bench_step", "bench_sync"])
def test_help_names_the_layouts_and_unknown_ones_are_refused(name: str) -> None:
    shown = bench(name, "--help")
    assert shown.returncode == 0 and "--layouts" in shown.stdout and "tp2" in shown.stdout
    refused = bench(name, "--layouts", "tp3")
    assert refused.returncode == 2 and "unknown layouts ['tp3']" in refused.stderr


@pytest.mark.slow
def test_both_syncs_leave_the_same_weights_and_ours_receives_nothing_it_holds() -> None:
    """The tool itself asserts bit-equal engines; TP 2 to TP 2 needs no byte from elsewhere."""
    done = bench("bench_sync", "--hidden", "256", "--layers", "2", "--rounds", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if "-tp" in line}
    assert list(rows) == ["tp2-tp1", "tp2-tp2", "pp2-tp1"]
    received = {name: (float(cells[3]), float(cells[4])) for name, cells in rows.items()}
    assert received["tp2-tp2"][0] == 0.0 and received["tp2-tp2"][1] > 1.0
    assert all(ours <= 1.05 * usual for ours, usual in received.values())


@pytest.mark.slow
def test_a_step_of_both_loops_is_timed() -> None:
    done = bench("bench_step", "--layouts", "tp2", "--steps", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tp2")]
    product, plain, ratio = (float(number) for number in re.findall(r"[\d.]+(?= s|$)", line))
    assert product > 0 and plain > 0 and ratio == pytest.approx(product / plain, abs=0.05)
