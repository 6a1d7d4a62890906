"""The whole path as a user takes it: task, conversion, GRPO on two ranks, export, transformers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
STAMP = Path(sys.prefix) / ".megagrpo-stamp"


@pytest.mark.slow
@pytest.mark.skipif(not STAMP.exists(), reason="needs the environment that tests/run.sh makes")
def test_quickstart_ends_with_a_model_that_transformers_scores_as_the_run_did(
    tmp_path: Path,
) -> None:
    """The run's own greedy evaluation (vLLM, synced weights) and transformers' count agree before
    and after, and the weights did change in between."""
    work = tmp_path / "work"
    answer = subprocess.run(
        ["bash", "examples/quickstart.sh", "trainer.steps=8"],
        cwd=REPO,
        env={**os.environ, "MEGAGRPO_VENV": sys.prefix, "MEGAGRPO_WORK": str(work)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    independent = [float(x) for x in re.findall(r"in transformers: .* (0\.\d+)", answer.stdout)]
    own = re.search(r"val/\S+: (0\.\d+) before, (0\.\d+) after", answer.stdout)
    assert own is not None
    # Greedy ties may fall either way between two float32 implementations: 2 of 1,000 prompts.
    assert independent == pytest.approx([float(x) for x in own.groups()], abs=0.0021)
    lines = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == list(range(1, 9))
    start, end = (work / name / "model.safetensors" for name in ("hf", "trained"))
    assert start.read_bytes() != end.read_bytes()
    assert (work / "run/report.html").exists()
