"""Rewards in processes of their own: what hangs is ended by its pid, what dies is replaced."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megagrpo.config import RewardConfig
from megagrpo.rewards.base import RewardSpec, load_reward
from megagrpo.rewards.process_lane import Worker
from megagrpo.rewards.runner import RewardRunner
from tests.reward_tools import cpu_spec, totals

MODULE = '''
import os, time

PLACE = os.path.dirname(__file__)

def play(prompts, completions, delay=0.0):
    """What a completion says is done; then its length is the score."""
    for text in completions:
        if text == "die":
            os._exit(7)
        if text == "crash":
            os.kill(os.getpid(), 11)
        if text == "hang":
            time.sleep(600.0)
        if text == "raise":
            raise RuntimeError("no such answer")
        if text == "exit":
            raise SystemExit(3)
        if text == "print":
            print("[1.0, 2.0]", flush=True)
    time.sleep(delay)
    return [float(len(text)) for text in completions]

def pid(prompts, completions):
    return [float(os.getpid())] * len(completions)

def loaded(prompts, completions):
    import sys
    heavy = {"torch", "vllm", "transformers", "megatron", "numpy"} & set(sys.modules)
    return [float(len(heavy))] * len(completions)

def forks(prompts, completions):
    """The child comes back as well, with an answer of its own."""
    return [99.0 if os.fork() == 0 else float(text) for text in completions]

def scribbles(prompts, completions):
    for descriptor in range(3, 10):
        try:
            os.write(descriptor, completions[0].encode())
        except OSError:
            pass
    return [1.0] * len(completions)

def leaves(prompts, completions):
    import subprocess
    started = subprocess.Popen(["sleep", "600"])
    with open(os.path.join(PLACE, "started"), "w") as file:
        file.write(str(started.pid))
    time.sleep(600.0)

def flaky(prompts, completions):
    """Raises on the first two calls that it ever gets."""
    file = os.path.join(PLACE, "calls")
    with open(file, "a+") as calls:
        calls.write("x")
        calls.flush()
        calls.seek(0)
        count = len(calls.read())
    if count <= 2:
        raise ConnectionError(f"call {count}")
    return [1.0] * len(completions)
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "played.py"
    file.write_text(MODULE)
    return file


def living_children() -> set[int]:
    """Without the dead: where this process adopts orphans, those of a worker stay as zombies."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


@pytest.fixture
def runners() -> Iterator[list[RewardRunner]]:
    """Closed at the end, with no child of theirs left."""
    made: list[RewardRunner] = []
    before = living_children()
    yield made
    for runner in made:
        runner.close()
    deadline = time.monotonic() + 10.0
    while living_children() - before:
        assert time.monotonic() < deadline, "a worker outlived its runner"
        time.sleep(0.02)


def isolated(
    runners: list[RewardRunner], module: Path, name: str = "play", **settings: Any
) -> RewardRunner:
    path = f"{module}:{name}"
    spec = RewardSpec(name, load_reward(path), path=path, isolate=True, **settings)
    runners.append(RewardRunner([spec]))
    return runners[-1]


def scored(runner: RewardRunner, *groups: Sequence[str]) -> list[list[float | None]]:
    for key, group in enumerate(groups):
        runner.submit(key, ["p"] * len(group), list(group), {})
    return [totals(scores) for scores in runner.collect().values()]


def test_an_isolated_function_scores_elsewhere_and_keeps_its_order(
    runners: list[RewardRunner], module: Path
) -> None:
    runner = isolated(runners, module, timeout_s=30.0)
    groups = [["a" * n, "print"] for n in range(12)]
    assert scored(runner, *groups) == [[float(n), 5.0] for n in range(12)]
    (own,) = scored(isolated(runners, module, "pid"), ["x"])[0]
    assert own != os.getpid()


@pytest.mark.parametrize("how", ["die", "crash", "raise", "exit"])
def test_a_completion_that_kills_its_worker_fails_alone(
    runners: list[RewardRunner], module: Path, how: str
) -> None:
    """PROC-8: segfault, os._exit, a raise and sys.exit each cost one sample and no other."""
    runner = isolated(runners, module, workers=1, timeout_s=30.0)
    assert scored(runner, ["a", how, "ccc"], ["dd"]) == [[1.0, None, 3.0], [2.0]]
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts) == (1, 0)
    # Once in the group, once alone.
    assert counts.workers_replaced == (2 if how in ("die", "crash") else 0)
    said = {"die": "exit status 7", "crash": "signal 11", "raise": "no such", "exit": "SystemExit"}
    assert said[how] in runner.tracebacks["play"]
    assert runner.take_counts().workers_replaced == 0
    assert scored(runner, ["next step"]) == [[9.0]]


def test_a_completion_that_hangs_is_ended_by_its_pid_and_fails_alone(
    runners: list[RewardRunner], module: Path
) -> None:
    runner = isolated(runners, module, workers=1, timeout_s=1.0)
    start = time.perf_counter()
    assert scored(runner, ["a", "hang", "ccc"], ["dd"]) == [[1.0, None, 3.0], [2.0]]
    assert time.perf_counter() - start < 6.0
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts, counts.workers_replaced) == (0, 1, 2)


def test_processes_under_load_have_exact_counts(runners: list[RewardRunner], module: Path) -> None:
    """PROC-8: 120 groups of one, 4 hang, 4 die, 4 raise; the others are scored."""
    kinds = {7: "hang", 11: "die", 17: "raise"}
    texts = [next((kinds[k] for k in kinds if n % 30 == k), "ab") for n in range(120)]
    runner = isolated(runners, module, workers=2, timeout_s=0.5)
    start = time.perf_counter()
    found = scored(runner, *[[text] for text in texts])
    assert time.perf_counter() - start < 20.0
    assert found == [[2.0] if text == "ab" else [None] for text in texts]
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts, counts.workers_replaced) == (8, 4, 8)


def test_a_function_that_only_hangs_is_not_waited_for_group_by_group(
    runners: list[RewardRunner], module: Path
) -> None:
    runner = isolated(runners, module, workers=2, timeout_s=0.5)
    start = time.perf_counter()
    assert scored(runner, *[["hang"]] * 60) == [[None]] * 60
    assert time.perf_counter() - start < 8.0  # one after the other: 15 s on two workers
    assert runner.take_counts().timeouts == 60
    assert scored(runner, ["abc"]) == [[3.0]], "the next step is asked again"


def test_retries_ask_again_and_only_the_last_failure_counts(
    runners: list[RewardRunner], module: Path
) -> None:
    runner = isolated(runners, module, "flaky", retries=2, timeout_s=20.0)
    assert scored(runner, ["a"]) == [[1.0]]
    assert runner.take_counts().errors == 0
    (module.parent / "calls").unlink()
    tired = isolated(runners, module, "flaky", retries=1, timeout_s=20.0)
    assert scored(tired, ["a"]) == [[None]]
    assert tired.take_counts().errors == 1
    assert (module.parent / "calls").read_text() == "xx"


def test_a_fork_that_comes_back_never_answers_for_another_call(
    runners: list[RewardRunner], module: Path
) -> None:
    runner = isolated(runners, module, "forks", workers=1, timeout_s=30.0)
    assert scored(runner, ["1"], ["2"], ["3"]) == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    "text", ["nonsense\n", "[1.0]\n", "[1]\n", '{"a": 1}\n', "[" * 99999 + "\n"]
)
def test_what_else_is_written_into_the_pipe_of_answers_fails_its_samples_and_hangs_nobody(
    runners: list[RewardRunner], module: Path, text: str
) -> None:
    runner = isolated(runners, module, "scribbles", workers=1, timeout_s=30.0)
    assert scored(runner, [text], [text]) == [[None], [None]]
    assert "something wrote into the pipe of its answers" in runner.tracebacks["scribbles"]
    assert runner.take_counts().errors == 2


def test_a_fault_of_the_lane_itself_is_raised_and_not_waited_for(
    runners: list[RewardRunner], module: Path
) -> None:
    runner = isolated(runners, module, timeout_s=30.0, kwargs={"delay": (n for n in ())})
    runner.submit(0, ["p"], ["c"], {})
    with pytest.raises(TypeError, match="cannot pickle"):
        runner.collect()


def test_what_a_hung_function_started_ends_with_its_worker(
    runners: list[RewardRunner], module: Path
) -> None:
    assert scored(isolated(runners, module, "leaves", timeout_s=1.5), ["x"]) == [[None]]
    left = int((module.parent / "started").read_text())
    deadline = time.monotonic() + 10.0
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it outlived its worker"
        time.sleep(0.02)


def test_a_worker_starts_fast_and_loads_nothing_heavy(
    runners: list[RewardRunner], module: Path
) -> None:
    start = time.perf_counter()
    worker = Worker(f"{module}:loaded")
    try:
        assert worker.hear(time.monotonic() + 20.0) == "ready"
        assert time.perf_counter() - start < 5.0  # 0.1 s on a free core
        worker.tell((4, {"prompts": ["p"], "completions": ["c"]}, 1), time.monotonic() + 20.0)
        assert worker.hear(time.monotonic() + 20.0) == [4, [0.0]]
        memory = psutil.Process(worker.process.pid).memory_info().rss
        assert memory < 40 * 2**20
    finally:
        worker.end()


def test_a_worker_dies_with_the_process_that_started_it(module: Path) -> None:
    """A trainer that is killed leaves no worker behind, though it hangs in its function."""
    program = (
        "import sys, time\n"
        "from megagrpo.rewards.process_lane import Worker\n"
        f"worker = Worker({f'{module}:play'!r})\n"
        "worker.hear(time.monotonic() + 20.0)\n"
        "asked = (1, {'prompts': ['p'], 'completions': ['hang']}, 1)\n"
        "worker.tell(asked, time.monotonic() + 20.0)\n"
        "print(worker.process.pid, flush=True)\n"
        "time.sleep(60.0)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker = psutil.Process(json.loads(trainer.stdout.readline()))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    gone, alive = psutil.wait_procs([worker], timeout=10.0)
    assert gone and not alive


def test_a_module_that_does_not_import_in_the_worker_fails_samples_and_says_why(
    runners: list[RewardRunner], module: Path
) -> None:
    runner = isolated(runners, module, timeout_s=5.0)
    module.write_text("raise SystemExit\n")
    assert scored(runner, ["a", "b"]) == [[None, None]]
    assert "could not start its worker process" in runner.tracebacks["play"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 2}, "workers=2 of .* has no effect: .* set isolate: true"),
        ({"concurrency": 2}, "concurrency=2 of .* has no effect: the function is not async"),
        ({"concurrency": 2, "isolate": True}, "concurrency=2 of .* has no effect"),
    ],
)
def test_settings_that_a_reward_never_reads_are_refused(
    module: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cpu_spec(RewardConfig(path=f"{module}:play", **settings))


def test_an_async_function_is_not_isolated_and_built_ins_that_must_be_are(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("async def late(prompts, completions):\n    return [1.0]\n")
    with pytest.raises(ValueError, match="isolate of .* is for plain functions"):
        cpu_spec(RewardConfig(path=f"{file}:late", isolate=True))
    assert cpu_spec(RewardConfig(path=f"{file}:late", concurrency=3)).concurrency == 3
    with pytest.raises(ValueError, match="regex_format always runs in processes of its own"):
        cpu_spec(RewardConfig(path="regex_format", isolate=False))
    assert cpu_spec(RewardConfig(path="regex_format")).isolate
    assert cpu_spec(RewardConfig(path="math_answer")).isolate
    assert not cpu_spec(RewardConfig(path="math_answer", isolate=False)).isolate
    assert not cpu_spec(RewardConfig(path="exact_match")).isolate
