"""Finding reward functions, the built-in rules, and a runner that survives what rewards do."""

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megagrpo import log
from megagrpo.rewards.base import check_columns, load_reward, read_scores, reward_name
from megagrpo.rewards.lanes import ThreadLane
from megagrpo.rewards.rules import exact_match, math_answer
from megagrpo.rewards.runner import RewardRunner, RewardSpec, SampleScore
from tests.pool import run_ranks

Make = Callable[..., RewardRunner]
SHORT = 0.3  # seconds until a call counts as hung


@pytest.fixture
def make() -> Iterator[Make]:
    """Runner of the given functions (or specs), closed at the end."""
    runners = []

    def build(*rewards: Any) -> RewardRunner:
        specs = [
            reward
            if isinstance(reward, RewardSpec)
            else RewardSpec(reward.__name__, reward, timeout_s=20.0)
            for reward in rewards
        ]
        runners.append(RewardRunner(specs))
        return runners[-1]

    yield build
    for runner in runners:
        runner.close()


def submit(runner: RewardRunner, key: Any, completions: Sequence[str], **columns: Any) -> None:
    runner.submit(key, [f"prompt {key}"] * len(completions), completions, columns)


def totals(scores: Sequence[SampleScore]) -> list[float | None]:
    return [score.total for score in scores]


def length(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


# --- paths ---------------------------------------------------------------------------------------


def test_rewards_load_from_modules_files_and_by_built_in_name(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def score(prompts, completions, **columns):\n    return [2.0]\n")
    assert load_reward(f"{file}:score")(prompts=[""], completions=[""]) == [2.0]
    assert load_reward("megagrpo.rewards.rules:math_answer") is math_answer
    assert load_reward("exact_match") is exact_match
    assert [reward_name(p) for p in (f"{file}:score", "exact_match")] == ["score", "exact_match"]


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    found = []
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "reward.py"
        file.write_text(f"def f(prompts, completions):\n    return [{value}]\n")
        found.append(load_reward(f"{file}:f"))
    assert [f([""], [""]) for f in found] == [[1.0], [2.0]]


def test_two_rewards_of_one_file_share_its_state(tmp_path: Path) -> None:
    file = tmp_path / "shared.py"
    file.write_text(
        "seen = []\n"
        "def first(prompts, completions):\n    seen.append(1)\n    return [0.0]\n"
        "def second(prompts, completions):\n    return [float(len(seen))]\n"
    )
    first, second = load_reward(f"{file}:first"), load_reward(f"{file}:second")
    first([""], [""])
    assert second([""], [""]) == [1.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact", "neither module:function nor file.py:function nor one of exact_match"),
        ("no_such_module:f", "does not import .*No module named 'no_such_module'"),
        ("no/such/file.py:f", "does not import .*no file no/such/file.py"),
        ("math:no_such", "math has no 'no_such'"),
        ("math:pi", "'pi' is a float, not a function"),
        ("FOLDER/broken.py:f", "does not import .*SyntaxError"),
        ("FOLDER/raises.py:f", "does not import .*ZeroDivisionError"),
        ("FOLDER/odd.py:f", "no parameter completions"),
    ],
)
def test_reward_paths_that_do_not_work_name_path_and_reason(
    tmp_path: Path, path: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "odd.py").write_text("def f(prompts, answers): ...\n")
    path = path.replace("FOLDER", str(tmp_path))
    before = set(sys.modules)
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(path)
    assert repr(path) in str(caught.value)
    assert not [name for name in set(sys.modules) - before if name.startswith(("broken", "raises"))]


def test_a_reward_that_needs_a_column_the_data_lacks_is_refused() -> None:
    def needs(prompts: Any, completions: Any, finished: Any, level: Any, scale: Any) -> Any: ...

    spec = RewardSpec("needs", needs, kwargs={"scale": 2})
    check_columns([spec], ["level"])
    with pytest.raises(ValueError, match="reward 'needs' needs column 'level'; the dataset has a"):
        check_columns([spec], ["a"])
    with pytest.raises(ValueError, match="needs column 'answer' .* no other column"):
        check_columns([RewardSpec("exact_match", exact_match)], [])
    with pytest.raises(ValueError, match="column 'completions' has a name that rewards get"):
        check_columns([spec], ["completions", "level"])


# --- rules ---------------------------------------------------------------------------------------


def test_exact_match_is_strict_and_wants_an_ended_completion() -> None:
    texts = ["57", "57", " 57", "057", "57", ""]
    ended = [True, False, True, True, True, True]
    answers = ["57", "57", "57", "57", 57, None]
    found = exact_match([""] * 6, texts, finished=ended, answer=answers)
    assert found == [1.0, 0.0, 0.0, 0.0, 1.0, None]
    verl = exact_match([""], ["4"], finished=[True], reward_model=[{"ground_truth": "4"}])
    assert verl == [1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 0.5", r"\frac{1}{2}", 1.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("after 3 steps: 1,234", "He has 1200 + 34.\n#### 1,234", 1.0),
        ("The answer is 41", "42", 0.0),
        ("no number here", "42", 0.0),
        ("42", None, None),
        ("42", "", None),
    ],
)
def test_math_answer_compares_values_and_not_spellings(
    completion: str, answer: str | None, reward: float | None
) -> None:
    assert math_answer([""], [completion], answer=[answer]) == [reward]
    if answer:
        assert math_answer([""], [completion], reward_model=[{"ground_truth": answer}]) == [reward]


def test_math_answer_works_off_the_main_thread(make: Make) -> None:
    runner = make(math_answer)
    submit(runner, 0, ["1/2", "2"], answer=["0.5", "0.5"])
    assert totals(runner.collect()[0]) == [1.0, 0.0] and not runner.tracebacks


def test_math_answer_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        math_answer([""], ["1"], answer=["1"])


# --- the runner ----------------------------------------------------------------------------------


def test_scoring_goes_on_while_the_caller_works(make: Make) -> None:
    generating, scored = threading.Event(), threading.Event()

    def slow(prompts: list[str], completions: list[str]) -> list[float]:
        assert generating.wait(5.0)
        scored.set()
        return [1.0] * len(completions)

    runner = make(slow)
    submit(runner, 0, ["a"])
    assert not scored.is_set(), "submit waited for the reward"
    generating.set()
    assert scored.wait(5.0), "nothing was scored before collect"
    assert totals(runner.collect()[0]) == [1.0]


def test_results_stand_in_submission_order_whoever_finishes_first(make: Make) -> None:
    """ADV-13's order p1, p2, p1, p2; ADV-11: the key tells groups apart, not the prompt's text."""

    async def late_first(prompts: list[str], completions: list[str]) -> list[float]:
        await asyncio.sleep(0.2 if completions[0] == "first" else 0.0)
        return [float(len(text)) for text in completions]

    runner = make(late_first, length)
    for key, text in ((7, "first"), (3, "xx"), (5, "x"), (4, "first")):
        runner.submit(key, ["the same prompt"] * 2, [text, ""], {})
    found = runner.collect()
    assert list(found) == [7, 3, 5, 4]
    assert [totals(scores) for scores in found.values()] == [[10, 0], [4, 0], [2, 0], [10, 0]]
    assert runner.collect() == {}


def test_a_group_stays_one_though_its_prompts_differ(make: Make) -> None:
    """ADV-12: one group id, prompts a and b; each reward stays with its completion."""
    seen: list[list[str]] = []

    def first(prompts: list[str], completions: list[str]) -> list[float]:
        seen.append(prompts)
        return [float(prompt == "a") for prompt in prompts]

    runner = make(first)
    runner.submit(0, ["a", "b"], ["x", "x"], {})
    assert totals(runner.collect()[0]) == [1.0, 0.0] and seen == [["a", "b"]]


def test_async_rewards_of_different_groups_wait_together(make: Make) -> None:
    async def waits(prompts: list[str], completions: list[str]) -> list[float]:
        await asyncio.sleep(0.2)
        return [1.0]

    runner = make(waits)
    start = time.perf_counter()
    for key in range(20):
        submit(runner, key, ["a"])
    runner.collect()
    assert time.perf_counter() - start < 2.0  # one after the other: 4 s


def test_plain_rewards_are_never_called_twice_at_once(make: Make) -> None:
    inside, most = [0], [0]

    def counts(prompts: list[str], completions: list[str]) -> list[float]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return [0.0]

    runner = make(counts)
    for key in range(8):
        submit(runner, key, ["a"])
    runner.collect()
    assert most[0] == 1


def test_functions_get_what_they_name_and_lists_of_their_own(make: Make) -> None:
    seen: dict[str, Any] = {}

    def named(prompts: Any, completions: Any, finished: Any, level: Any = None) -> list[float]:
        seen["named"] = (list(finished), level)
        completions.clear()  # somebody else's list must not feel it
        return [0.0, 0.0]

    def everything(**arguments: Any) -> list[float]:
        seen["everything"] = arguments
        return [0.0, 0.0]

    scaled = RewardSpec("everything", everything, kwargs={"scale": 3})
    runner = make(named, scaled)
    columns = {"completion_ids": [[1], [2]], "finished": [True, False], "answer": ["x", "y"]}
    runner.submit(0, ["p", "p"], ["a", "b"], columns)
    runner.collect()
    assert seen["named"] == ([True, False], None)
    expected = {**columns, "prompts": ["p", "p"], "completions": ["a", "b"], "scale": 3}
    assert seen["everything"] == expected


def test_totals_are_weighted_sums_and_a_missing_reward_is_not_zero(make: Make) -> None:
    """ADV-19: weights 0.7 and 0.3; ADV-5/6: None and NaN are missing, 0.0 is a reward."""
    first = RewardSpec("first", lambda prompts, completions: [1.0, 0.0, None, float("nan")], 0.7)
    second = RewardSpec("second", lambda prompts, completions: [0.0, 0.0, 1.0, None], 0.3)
    runner = make(first, second)
    submit(runner, 0, ["a", "b", "c", "d"])
    scores = runner.collect()[0]
    assert totals(scores) == [0.7, 0.0, 0.3, None]
    assert [score.rewards["first"] for score in scores] == [1.0, 0.0, None, None]
    assert not any(score.failed for score in scores)
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts) == (0, 0)


def test_a_raising_and_a_hanging_reward_fail_their_samples_alone(make: Make) -> None:
    """PROC-8: of 4 rewards one raises and one never returns; both samples failed, counted."""
    release = threading.Event()

    def touchy(prompts: list[str], completions: list[str]) -> list[float]:
        if completions[0] == "raise":
            raise RuntimeError("no such answer")
        if completions[0] == "hang":
            release.wait(60.0)
        return [1.0]

    runner = make(RewardSpec("touchy", touchy, timeout_s=SHORT))
    start = time.perf_counter()
    for key, text in enumerate(["good", "raise", "hang", "good"]):
        submit(runner, key, [text])
    scores = [group[0] for group in runner.collect().values()]
    assert time.perf_counter() - start < 10 * SHORT
    assert [score.failed for score in scores] == [False, True, True, False]
    assert [score.total for score in scores] == [1.0, None, None, 1.0]
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts) == (1, 1)
    assert runner.take_counts().errors == 0
    submit(runner, "next step", ["good"])
    assert totals(runner.collect()["next step"]) == [1.0], "the run goes on"
    release.set()


def test_one_bad_completion_does_not_cost_its_group(make: Make) -> None:
    def touchy(prompts: list[str], completions: list[str]) -> list[float]:
        if "raise" in completions:
            raise RuntimeError("no such answer")
        return [float(len(completions))]

    async def touchy_async(prompts: list[str], completions: list[str]) -> list[float]:
        return touchy(prompts, completions)

    runner = make(touchy, touchy_async)
    submit(runner, 0, ["a", "raise", "c"])
    scores = runner.collect()[0]
    assert [score.failed for score in scores] == [False, True, False]
    assert scores[0].rewards == {"touchy": 1.0, "touchy_async": 1.0}
    assert runner.take_counts().errors == 2
    assert "RuntimeError: no such answer" in runner.tracebacks["touchy"]


def test_a_reward_that_always_hangs_costs_about_two_limits_and_not_one_per_group(
    make: Make,
) -> None:
    release = threading.Event()

    def hangs(prompts: list[str], completions: list[str]) -> list[float]:
        release.wait(60.0)
        return [1.0]

    async def hangs_async(prompts: list[str], completions: list[str]) -> list[float]:
        await asyncio.sleep(60.0)
        return [1.0]

    runner = make(
        RewardSpec("hangs", hangs, timeout_s=SHORT),
        RewardSpec("hangs_async", hangs_async, timeout_s=SHORT),
    )
    start = time.perf_counter()
    for key in range(12):
        submit(runner, key, ["a"])
    assert all(score.failed for group in runner.collect().values() for score in group)
    assert time.perf_counter() - start < 6 * SHORT
    assert runner.take_counts().timeouts == 24
    release.set()


def test_an_async_reward_that_blocks_its_loop_is_replaced(make: Make) -> None:
    release = threading.Event()

    async def blocks(prompts: list[str], completions: list[str]) -> list[float]:
        if completions[0] == "block":
            release.wait(60.0)
        return [1.0]

    runner = make(RewardSpec("blocks", blocks, timeout_s=SHORT))
    submit(runner, 0, ["block"])
    assert runner.collect()[0][0].failed
    submit(runner, 1, ["fine"])
    assert totals(runner.collect()[1]) == [1.0]
    release.set()


@pytest.mark.parametrize("what", [asyncio.CancelledError, KeyboardInterrupt])
def test_an_async_reward_that_raises_more_than_an_exception_fails_at_once(
    make: Make, what: type[BaseException]
) -> None:
    async def odd(prompts: list[str], completions: list[str]) -> list[float]:
        raise what

    runner = make(odd)
    submit(runner, 0, ["a", "b"])
    start = time.perf_counter()
    assert [score.failed for score in runner.collect()[0]] == [True, True]
    assert time.perf_counter() - start < 10.0
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts) == (2, 0)


def test_a_hung_thread_that_comes_back_as_it_is_given_up_blocks_nobody() -> None:
    """It may take the call that stood behind it between a look at the queue and the taking."""
    lane = ThreadLane()

    class Raced(queue.SimpleQueue):  # type: ignore[type-arg]
        def empty(self) -> bool:
            return False

    lane._waiting = Raced()
    done = threading.Thread(target=lane._abandon, daemon=True)
    done.start()
    done.join(10.0)
    assert not done.is_alive()
    lane.close()


def test_a_reward_that_exits_fails_its_samples_and_not_the_run(make: Make) -> None:
    def exits(prompts: list[str], completions: list[str]) -> list[float]:
        sys.exit(3)

    runner = make(exits)
    submit(runner, 0, ["a"])
    submit(runner, 1, ["b"])
    assert [group[0].failed for group in runner.collect().values()] == [True, True]


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        ([1.0], [True, True]),
        ([1.0, 2.0, 3.0], [True, True]),
        (None, [True, True]),
        (1.0, [True, True]),
        ("ab", [True, True]),
        ({"a": 1, "b": 2}, [True, True]),
        (["1.0", 1], [True, False]),
        ([float("inf"), True], [True, False]),
        ([[1.0], 0.5], [True, False]),
        ({0.5, 1.0}, [True, True]),  # in no order
        ([10**400, 0.5], [True, False]),
        (torch.tensor([0.5, 1.0]), [False, False]),
        ((value for value in (0.5, 1.0)), [False, False]),
    ],
)
def test_answers_that_are_no_scores_fail_and_never_become_zero(
    make: Make, answer: Any, failed: list[bool]
) -> None:
    def odd(prompts: list[str], completions: list[str]) -> Any:
        return answer

    runner = make(odd)
    submit(runner, 0, ["a", "b"])
    scores = runner.collect()[0]
    assert [score.failed for score in scores] == failed
    assert all((score.total is None) == score.failed for score in scores)
    assert runner.take_counts().errors == sum(failed)


def test_read_scores_keeps_values_and_explains_the_rest() -> None:
    assert read_scores([1, None, float("nan"), 0.0], 4) == [1.0, None, None, 0.0]
    assert read_scores([1.0], 2) == ["answered 1 scores for 2 completions"] * 2
    (complaint,) = read_scores(["high"], 1)
    assert complaint == "answered 'high', which is no finite number"
    (short,) = read_scores([[0] * 10**6], 1)
    assert isinstance(short, str) and len(short) < 300


def test_only_the_first_traceback_of_a_reward_is_logged(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(prompts: list[str], completions: list[str]) -> list[float]:
        raise KeyError("gold")

    runner = make(raises)
    lines: list[str] = []
    monkeypatch.setattr(log, "warn", lambda text, **_: lines.append(text))
    for key in range(3):
        submit(runner, key, ["a", "b"])
    runner.collect()
    assert len(lines) == 1
    assert "reward 'raises' raised" in lines[0] and "KeyError: 'gold'" in lines[0]
    assert runner.take_counts().errors == 6


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"answer": ["1"]}, "2 completions but 1 answer"), ({}, "needs column 'answer'")],
)
def test_columns_that_do_not_fit_are_refused_at_submission(
    make: Make, columns: dict[str, Any], message: str
) -> None:
    runner = make(exact_match)
    with pytest.raises(ValueError, match=message):
        submit(runner, 0, ["a", "b"], finished=[True, True], **columns)


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name twice"):
        RewardRunner([RewardSpec("a", length), RewardSpec("a", length)])


def echo(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(prompt == text) for prompt, text in zip(prompts, completions, strict=True)]


def score_own_prompts(rank: int, world: int) -> list[tuple[int, str, float | None]]:
    """A replica scores its prompts, late ones first; then everybody gathers."""
    runner = RewardRunner([RewardSpec("echo", echo)])
    mine = [number for number in range(7) if number % world == rank]
    for number in reversed(mine):
        runner.submit(number, [str(number)] * 2, [str(number)] * 2, {})
    rows = [
        (key, str(key), score.total) for key, group in runner.collect().items() for score in group
    ]
    runner.close()
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, rows)
    return sorted(row for part in parts for row in part)


def test_rewards_stay_with_their_samples_through_a_gather() -> None:
    """ADV-14: prompts numbered over two replicas, reward 1 where the completion echoes it."""
    first, second = run_ranks(2, score_own_prompts, 2)
    assert first == second == [(number, str(number), 1.0) for number in range(7) for _ in range(2)]


def test_wait_seconds_are_those_that_collect_waited(make: Make) -> None:
    """What a reward does while others generate costs the step nothing and is not counted."""
    done = threading.Event()

    def slow(completions: list[str], **columns: Any) -> list[float]:
        time.sleep(0.5)
        done.set()
        return [1.0] * len(completions)

    runner = make(slow)
    runner.submit(0, ["p"], ["c"], {})
    runner.collect()
    assert runner.take_counts().wait_seconds > 0.25
    done.clear()
    runner.submit(1, ["p"], ["c"], {})
    done.wait()
    runner.collect()
    assert runner.take_counts().wait_seconds < 0.25
