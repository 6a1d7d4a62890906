"""Unit tests as a reward for code: the model's code runs in a confined process, the tests outside.

Nothing of the model's text is evaluated where the tests or the trainer are (`sandbox.py`,
`remote.py`). This reward itself runs in a worker process, never in the trainer's. It is off unless
the entry's kwargs say `allow_code_execution: true`. Left out: other languages than Python, packages
beyond the standard library in the tested code.
"""

import ast
import builtins
import importlib
import json
import re
import signal
import sys
import time
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from megagrpo import log
from megagrpo.rewards.remote import load, look_up
from megagrpo.rewards.sandbox import CodeEndedError, Confinement, Limits, Sandbox, find_confinement

_FENCE = re.compile(r"```[ \t]*+(\w*+)[^\n]*+\n(.*?)```", re.DOTALL)


class OutOfTimeError(BaseException):
    """The tests of one completion took too long; no test may catch it by `except Exception`."""


Unit = tuple[bool, Callable[[dict[str, Any]], None]]
"""Whether it counts as a test, and what runs it in a namespace, raising where it fails."""


@dataclass(frozen=True)
class RowTests:
    """What a row's `tests` say: Python code, or programs' inputs and outputs."""

    source: str = ""  # tests as Python code
    cases: tuple[tuple[str, str], ...] = ()  # (stdin, expected stdout)


def code_tests(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    tests: Sequence[Any] | None = None,
    test_code: Sequence[Any] | None = None,
    entry_point: Sequence[str | None] | None = None,
    reward_model: Sequence[Mapping[str, Any]] | None = None,
    allow_code_execution: bool = False,
    partial: bool = False,
    prepend_prompt: bool = False,
    seconds: float = 10.0,
    memory_mb: int = 512,
) -> list[float | None]:
    """1.0 where the completion's code passes all its tests, else 0.0; the share with `partial`.

    The code is the last fenced block of the completion, or all of it, behind the prompt with
    `prepend_prompt`. Tests come from column `tests`, `test_code` or verl's
    `reward_model.ground_truth`; None where the row has none. They are Python code (top-level
    asserts, `test_...` functions, unittest classes, HumanEval's `check(candidate)` with column
    `entry_point`), a list of such, or inputs and outputs of a program, `{"inputs": [...],
    "outputs": [...]}` or `[{"input": ..., "output": ...}]`, also as JSON text. `seconds` and
    `memory_mb` bound all tests of one completion. Raises ValueError for tests that cannot be read
    or are not allowed.
    """
    check_code_tests(allow_code_execution, partial, prepend_prompt, seconds, memory_mb)
    limits, confinement = Limits(seconds, memory_mb), find_confinement()
    given = tests if tests is not None else test_code
    if given is None:
        given = [row.get("ground_truth") for row in reward_model or [{}] * len(prompts)]
    names = entry_point if entry_point is not None else [None] * len(prompts)
    scores: list[float | None] = []
    for prompt, text, value, name in zip(prompts, completions, given, names, strict=True):
        if value is None:
            scores.append(None)
            continue
        source = (prompt if prepend_prompt else "") + extract_code(text)
        passed, total = run_tests(source, read_tests(value), name, limits, confinement)
        scores.append(passed / total if partial else float(passed == total))
    return scores


def check_code_tests(
    allow_code_execution: bool = False,
    partial: bool = False,
    prepend_prompt: bool = False,
    seconds: float = 10.0,
    memory_mb: int = 512,
) -> None:
    """ValueError unless running a model's code was allowed and the limits are sound."""
    if allow_code_execution is not True:
        raise ValueError(
            "code_tests runs what the model writes; allow it with kwargs: "
            "{allow_code_execution: true}"
        )
    numbers = type(seconds) in (int, float) and type(memory_mb) is int
    if not numbers or not seconds > 0 or memory_mb < 64:
        found = f"kwargs.seconds={seconds!r} and memory_mb={memory_mb!r}"
        raise ValueError(f"{found}; use numbers, over 0 and a whole one of at least 64")
    if type(partial) is not bool or type(prepend_prompt) is not bool:
        raise ValueError(f"kwargs {partial=} and {prepend_prompt=}; use true or false")


def warn_of_open_doors() -> None:
    """Say once, before the run, what this host cannot keep from the code."""
    if not find_confinement().alone:
        log.warn(
            "code_tests: `unshare` makes no namespaces here, so the model's code keeps the network "
            "and may signal processes of its user"
        )


def extract_code(text: str) -> str:
    """The last fenced block that is Python or names no language; without a fence all of it."""
    blocks = [body for name, body in _FENCE.findall(text) if name.lower() in _PYTHON]
    return blocks[-1] if blocks else text


_PYTHON = ("", "python", "python3", "py")


def read_tests(value: Any) -> RowTests:
    """The tests of a row; raises ValueError for what is none."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        value = parsed if isinstance(parsed, dict | list) else value
    if isinstance(value, str):
        return RowTests(source=value)
    if isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        return RowTests(source="\n".join(value))
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value):
        pairs = list(zip(value["inputs"], value["outputs"], strict=True))
    elif isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        pairs = [(item.get("input"), item.get("output")) for item in value]
    else:
        pairs = []
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ValueError(f"tests {value!r:.200} are neither Python code nor inputs and outputs")
    return RowTests(cases=tuple(pairs))


def run_tests(
    source: str, tests: RowTests, entry_point: str | None, limits: Limits, confinement: Confinement
) -> tuple[int, int]:
    """(passed, all) tests of the code; raises ValueError if the tests are no tests."""
    if tests.cases:
        good, end = 0, time.monotonic() + limits.seconds
        for given, expected in tests.cases:
            left = replace(limits, seconds=end - time.monotonic())
            good += left.seconds > 0 and _prints(source, given, expected, left, confinement)
        return good, len(tests.cases)
    units = _units(tests.source, entry_point)
    with Sandbox(limits, confinement) as sandbox, _alarm(limits.seconds):
        space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        names = _wanted_names(tests.source, entry_point)
        passed = 0
        try:
            for is_test, run in [(False, _binding(sandbox, source, names, entry_point)), *units]:
                good = _passes(run, space)
                passed += good and is_test
                if not good and not is_test:
                    break  # what the tests stand on is missing
        except (CodeEndedError, OutOfTimeError):
            pass  # what was not run has not passed
    return passed, sum(is_test for is_test, _ in units)


def _prints(
    source: str, given: str, expected: str, limits: Limits, confinement: Confinement
) -> bool:
    """Whether the code, run as a program, ends well and prints what is expected; spaces at the
    ends of lines and empty lines at the end are nobody's business."""
    with Sandbox(limits, confinement, stdin=given) as sandbox:
        try:
            status, output = sandbox.run(source)
        except CodeEndedError:
            return False
    return status == 0 and _lines(output.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _passes(run: Callable[[dict[str, Any]], None], space: dict[str, Any]) -> bool:
    """Whether a test or a piece of setup runs without raising."""
    try:
        run(space)
    except (Exception, SystemExit):  # a test is somebody's code, and says no by raising
        return False
    return True


def _wanted_names(tests: str, entry_point: str | None) -> set[str]:
    """Names that the tests may have from the code: those they mention, but no builtin and no
    module of the standard library, which would let the code redefine what tests mean."""
    mentioned = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    theirs = vars(builtins).keys() | sys.stdlib_module_names
    return (mentioned - theirs) | ({entry_point} if entry_point else set())


def _binding(
    sandbox: Sandbox, source: str, names: set[str], entry_point: str | None
) -> Callable[[dict[str, Any]], None]:
    """Loads the code and puts what the tests name into their namespace."""

    def bind(space: dict[str, Any]) -> None:
        space.update({name: importlib.import_module(name) for name in _MODULES})
        for name in sorted(names & set(load(sandbox.ask, source))):
            space[name] = look_up(sandbox.ask, name)
        space["__entry__"] = space.get(entry_point or "")

    return bind


# Tests often use these without importing them: they count on the code's own imports.
_MODULES = ("collections", "copy", "datetime", "functools", "itertools", "json", "math", "random")


def _units(source: str, entry_point: str | None) -> list[Unit]:
    """The tests in order, and the statements that they stand on."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"tests do not parse: {error}: {source!r:.200}") from error
    units: list[Unit] = []
    last: list[Unit] = []  # what is called when everything is defined
    checked = False
    for statement in tree.body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        call = ast.unparse(statement) if isinstance(statement, ast.Expr) else ""
        if call.startswith("unittest.main("):
            continue
        checked |= call.startswith("check(")
        asserts = isinstance(statement, ast.Assert | ast.For | ast.While | ast.With | ast.Try)
        asserts &= any(isinstance(node, ast.Assert) for node in ast.walk(statement))
        units.append((asserts or call.startswith("check("), _statement(statement)))
        if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test"):
            last.append((True, _called(statement.name)))
        if isinstance(statement, ast.ClassDef):
            last += [(True, _method(statement.name, name)) for name in _test_methods(statement)]
    if not checked and any(isinstance(s, ast.FunctionDef) and s.name == "check" for s in tree.body):
        if entry_point is None:
            raise ValueError("tests define check(candidate), but the row has no entry_point")
        last.append((True, _called("check", "__entry__")))
    if not any(is_test for is_test, _ in units + last):
        raise ValueError(f"no test in {source!r:.200}")
    return units + last


def _statement(statement: ast.stmt) -> Callable[[dict[str, Any]], None]:
    code = compile(ast.Module([statement], []), "<tests>", "exec")
    return lambda space: exec(code, space)


def _called(name: str, *arguments: str) -> Callable[[dict[str, Any]], None]:
    return lambda space: space[name](*(space[argument] for argument in arguments))


def _test_methods(statement: ast.ClassDef) -> list[str]:
    if not any(ast.unparse(base).endswith("TestCase") for base in statement.bases):
        return []
    functions = [node.name for node in statement.body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test")]


def _method(class_name: str, method: str) -> Callable[[dict[str, Any]], None]:
    def run(space: dict[str, Any]) -> None:
        result = unittest.TestResult()
        space[class_name](method).run(result)
        bad = [*result.failures, *result.errors, *result.skipped, *result.unexpectedSuccesses]
        assert result.testsRun == 1 and not bad, bad

    return run


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError after that time: a test itself may never end. Main thread only."""

    def ring(*_: object) -> None:
        raise OutOfTimeError

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds + 0.5)  # the code's own limit comes first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)
