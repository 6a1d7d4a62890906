"""What a reward function is, and how one is found by its path.

The contract: `reward(prompts, completions, **columns) -> list[float | None]`, plain or `async`.
Every argument is a list with one entry per completion and is passed by name: `prompts` (rendered
text), `messages` (the prompt column as it stands: text or chat messages), `completions` (text
without special tokens), the dataset's other columns, `completion_ids` (ids as sampled) and
`finished` (ended by an end-of-sequence token). A function without `**` gets only what it names. It
judges each completion by itself and may be called again with fewer of them; None means "not rated",
never 0.
"""

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

Scores = Sequence[float | None]
RewardFunction = Callable[..., Scores | Sequence[float | str] | Awaitable[Scores]]


@dataclass(frozen=True)
class BuiltIn:
    """A reward of this package, known by its bare name."""

    path: str  # module:function
    answers: bool = False  # needs column `answer` or verl's `reward_model`
    isolate: bool = False  # runs in a process of its own unless the config says otherwise
    forced: bool = False  # and the config may not say otherwise
    alone: bool = False  # asked one completion at a time, each with a time limit of its own
    check: str = ""  # module:function that refuses kwargs, called with them by keyword


_RULES, _SHAPING = "megagrpo.rewards.rules", "megagrpo.rewards.shaping"
_CODE = "megagrpo.rewards.code_tests"
BUILT_IN = {
    "exact_match": BuiltIn(f"{_RULES}:exact_match", answers=True),
    # The library computes what an answer says, be it 9^9^9^9, and holds the interpreter meanwhile.
    "math_answer": BuiltIn(f"{_RULES}:math_answer", answers=True, isolate=True),
    "multiple_choice": BuiltIn(
        f"{_RULES}:multiple_choice", answers=True, check=f"{_RULES}:check_choices"
    ),
    "regex_format": BuiltIn(
        f"{_SHAPING}:regex_format", isolate=True, forced=True, check=f"{_SHAPING}:check_pattern"
    ),
    "length_penalty": BuiltIn(
        f"{_SHAPING}:length_penalty", check=f"{_SHAPING}:check_length_penalty"
    ),
    "soft_overlong": BuiltIn(f"{_SHAPING}:soft_overlong", check=f"{_SHAPING}:check_soft_overlong"),
    "repetition_penalty": BuiltIn(
        f"{_SHAPING}:repetition_penalty", check=f"{_SHAPING}:check_repetition_penalty"
    ),
    "code_tests": BuiltIn(
        f"{_CODE}:code_tests",
        isolate=True,
        forced=True,
        alone=True,
        check=f"{_CODE}:check_code_tests",
    ),
}
GIVEN = ("prompts", "completions", "completion_ids", "finished")
"""Arguments that every call can have; a dataset column must not take their names. `messages` is
given too, but a dataset's own column of that name wins."""
DEFAULT_CONCURRENCY, DEFAULT_WORKERS = 256, 2

# What the top level of somebody's module may raise when it is imported; a class of its own is its
# author's to read, with the traceback.
_IMPORT_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a run."""

    name: str  # in metrics and in Sample.rewards
    function: RewardFunction
    weight: float = 1.0  # factor in the total
    timeout_s: float = 60.0  # seconds one call may take; a group has (1 + retries) x that
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # extra keyword arguments
    path: str = ""  # where a worker process finds the function
    isolate: bool = False  # run in worker processes, which may hang and die
    workers: int = DEFAULT_WORKERS  # such processes
    concurrency: int = DEFAULT_CONCURRENCY  # groups that an async function has at once
    retries: int = 0  # more calls for a completion whose own call raised
    is_model: bool = False  # a reward model, which reads the prompts from `messages`
    alone: bool = False  # isolated, one completion at a time, `timeout_s` for each


def reward_name(path: str) -> str:
    """The name of a reward that was given none: the function's, e.g. "score" of `my.py:score`."""
    return path.rpartition(":")[2]


def load_reward(path: str) -> RewardFunction:
    """The function behind a built-in name, `module:function` or `file.py:function`.

    Raises ValueError with the path and the reason if it cannot be imported, is not callable or does
    not take `prompts` and `completions`.
    """
    full = BUILT_IN[path].path if path in BUILT_IN else path
    module_name, colon, function_name = full.rpartition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(
            f"reward path {path!r} is neither module:function nor file.py:function nor one of "
            f"{', '.join(BUILT_IN)}"
        )
    try:
        if module_name.endswith(".py"):
            module = _import_file(Path(module_name))
        else:
            module = importlib.import_module(module_name)
    except _IMPORT_FAULTS as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward path {path!r} does not import ({reason})") from error
    function = vars(module).get(function_name)
    if function is None:
        raise ValueError(f"reward path {path!r}: {module_name} has no {function_name!r}")
    if not callable(function):
        kind = type(function).__name__
        raise ValueError(f"reward path {path!r}: {function_name!r} is a {kind}, not a function")
    refused = {"prompts", "completions"} - accepted_arguments(function, ("prompts", "completions"))
    if refused:
        raise ValueError(
            f"reward path {path!r}: {function_name} must take prompts and completions, but has no "
            f"parameter {' or '.join(sorted(refused))}"
        )
    return function


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}, seen from {Path.cwd()}")
    full = file.resolve()
    # Named after the whole path: two files may share a name, and classes need their module.
    name = f"{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None, f"no loader for {full}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # also for the next reward of the file, which shares its state
    try:
        spec.loader.exec_module(module)
    except _IMPORT_FAULTS:
        del sys.modules[name]
        raise
    return module


def accepted_arguments(function: RewardFunction, offered: Iterable[str]) -> set[str]:
    """Those of the offered names that the function can be called with by keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(offered)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name} & set(offered)


def check_columns(specs: Sequence[RewardSpec], columns: Iterable[str]) -> None:
    """ValueError if a reward needs a column that the dataset lacks, or a column takes a name of
    ours; `columns` are the dataset's, without the prompt."""
    columns = list(columns)
    for name in columns:
        if name in GIVEN:
            raise ValueError(
                f"dataset column {name!r} has a name that rewards get from us "
                f"({', '.join(GIVEN)}); rename it"
            )
    for spec in specs:
        _check_kwargs(spec)
        if spec.is_model and "messages" in columns:
            raise ValueError(
                f"dataset column 'messages' would stand in for the prompts that reward model "
                f"{spec.name!r} reads; rename it"
            )
        if _built_in(spec).answers and not {"answer", "reward_model"} & set(columns):
            raise ValueError(
                f"reward {spec.name!r} needs column 'answer' (or verl's 'reward_model'); the "
                f"dataset has {', '.join(sorted(columns)) or 'no other column'}"
            )
        known = {*columns, *spec.kwargs, *GIVEN, "messages"}
        star = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        for parameter in inspect.signature(spec.function).parameters.values():
            needed = parameter.kind not in star and parameter.default is parameter.empty
            if needed and parameter.name not in known:
                raise ValueError(
                    f"reward {spec.name!r} needs column {parameter.name!r}; the dataset has "
                    f"{', '.join(sorted(columns)) or 'no other column'}"
                )


def _built_in(spec: RewardSpec) -> BuiltIn:
    """What the table says of the function, by whatever path it was given."""
    function = spec.function
    home = f"{function.__module__}:{function.__name__}" if inspect.isfunction(function) else ""
    return next((entry for entry in BUILT_IN.values() if entry.path == home), BuiltIn(""))


def _check_kwargs(spec: RewardSpec) -> None:
    """ValueError for extra arguments that the function does not take or that are ours to give."""
    taken = accepted_arguments(spec.function, spec.kwargs)
    for name in spec.kwargs:
        if name in GIVEN:
            raise ValueError(f"reward {spec.name!r}: kwargs.{name} is given by us; remove it")
        if name not in taken:
            raise ValueError(
                f"reward {spec.name!r} has no parameter {name!r}, which its kwargs set; remove it"
            )
    check = _built_in(spec).check
    if check:
        module_name, _, function_name = check.partition(":")
        try:
            vars(importlib.import_module(module_name))[function_name](**spec.kwargs)
        except ValueError as error:
            raise ValueError(f"reward {spec.name!r}: {error}") from error


def read_scores(answer: Any, size: int) -> list[float | None | str]:
    """A function's answer as `size` scores; NaN becomes None, what is no score its complaint.

    Text, infinities and non-numbers are no scores, and a set has no order; of an answer of another
    length none is one.
    """
    values = None
    if not isinstance(answer, str | bytes | Mapping | Set) and isinstance(answer, Iterable):
        values = list(answer)
    if values is None or len(values) != size:
        got = type(answer).__name__ if values is None else f"{len(values)} scores"
        return [f"answered {got} for {size} completions"] * size
    return [_read_score(value) for value in values]


def _read_score(value: Any) -> float | None | str:
    if value is None:
        return None
    try:
        number = math.inf if isinstance(value, str | bytes) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.inf
    if math.isinf(number):
        return f"answered {value!r:.200}, which is no finite number"
    return None if math.isnan(number) else number
