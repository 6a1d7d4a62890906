"""The rules of the house, read off the syntax trees: floors, homes, sizes, manners.

Every rule is a function from one parsed file to its violations; the same functions judge the tree
and a planted violation each, so a rule that sees nothing fails here.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"setup.py", "megagrpo", "examples", "tools", "tests", "Dockerfile", "README.md"}
BUILT_OR_RUN = {"runs", "build", "dist", "megagrpo.egg-info", "__pycache__"}  # see .gitignore

FLOORS = {"types": 0, "log": 0, "config_fields": 0, "config_algorithm": 0, "config": 0}
FLOORS |= {"config_checks": 0, "config_aliases": 0, "config_file": 0, "weights": 1}
FLOORS |= {"algo": 2, "data": 2, "rewards": 2, "parallel": 2, "model": 3, "metrics": 3}
FLOORS |= {"rollout": 4, "tools": 4, "hybrid": 5, "planner": 5, "trainer": 6, "cli": 7, "bench": 7}
# The tree is cut into files for size, each of which imports those before it.
CONFIG = ("types", "config_fields", "config_algorithm", "config", "config_aliases")
CONFIG += ("config_checks", "config_file")
SAME_FLOOR = {(here, there) for n, here in enumerate(CONFIG) for there in CONFIG[:n]}

HOMES = {
    "vllm": ("megagrpo/rollout/vllm_engine.py",),
    "megatron": (
        "megagrpo/parallel/",
        "megagrpo/model/",
        "megagrpo/trainer/checkpoint.py",
        "tools/bench_step.py",  # its baseline is a script on the bare library
    ),
    "torch.cuda": ("megagrpo/parallel/platform.py", "megagrpo/rollout/vllm_engine.py"),
    "os.environ": (
        "megagrpo/parallel/platform.py",
        "megagrpo/cli.py",
        "megagrpo/rollout/vllm_engine.py",
    ),
    "broad except": (
        "megagrpo/rewards/calls.py",
        "megagrpo/rewards/code_tests.py",  # what a test raises is its answer
        "megagrpo/rewards/sandbox_child.py",  # and what the tested code raises is its own
    ),
}
MAX_FUNCTION, MAX_FILE, MAX_POSITIONAL, MAX_LINE = 60, 300, 7, 100
LONGER_FILES = {"megagrpo/config.py": 400}
LONGEST_LOOP = 45  # trainer/grpo.py:train fits one screen


@dataclass(frozen=True)
class Source:
    """One parsed file: its path from the repository root, text and tree."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def floor_name(self) -> str:
        parts = self.path.split("/")
        if parts[0] == "tools":  # a benchmark stands on top of what it measures
            return "bench" if parts[1].startswith("bench_") else "tools"
        return parts[1].removesuffix(".py")


def sources() -> list[Source]:
    """Every Python file that a user runs: package, tools, examples, setup.py."""
    paths = [p for top in ("megagrpo", "tools", "examples") for p in (REPO / top).rglob("*.py")]
    return [Source(str(p.relative_to(REPO)), p.read_text()) for p in [REPO / "setup.py", *paths]]


def in_package(source: Source) -> bool:
    return source.path.startswith(("megagrpo/", "tools/"))


def at_home(source: Source, what: str) -> bool:
    return not in_package(source) or source.path.startswith(HOMES[what])


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """Dotted names that the file imports anywhere, nested, typing-only and by string included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: climb from the file's own package
                climbed = source.path.removesuffix(".py").split("/")[: -node.level]
                base = ".".join([*climbed, *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            name = node.args[0]
            if called.endswith(("import_module", "__import__")) and isinstance(name, ast.Constant):
                yield str(name.value), node.lineno


def floors(source: Source) -> Iterator[str]:
    if not in_package(source) or source.path == "megagrpo/__init__.py":
        return
    here = source.floor_name
    if here not in FLOORS:
        yield f"{source.path}: {here} stands on no floor"
        return
    for name, line in imported(source):
        there = name.split(".")[1] if name.startswith("megagrpo.") else ""
        if there not in FLOORS or there == here or (here, there) in SAME_FLOOR:
            continue
        if FLOORS[there] >= FLOORS[here]:
            yield f"{source.path}:{line}: {here} ({FLOORS[here]}) imports {there} ({FLOORS[there]})"


def heavy_homes(source: Source) -> Iterator[str]:
    for name, line in imported(source):
        for heavy in ("vllm", "megatron", "torch.cuda"):
            if f"{name}.".startswith(f"{heavy}.") and not at_home(source, heavy):
                yield f"{source.path}:{line}: imports {name}; its home is {HOMES[heavy]}"
    for node in ast.walk(source.tree):
        is_cuda = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
        if is_cuda and not at_home(source, "torch.cuda"):
            yield f"{source.path}:{node.lineno}: torch.cuda; its home is {HOMES['torch.cuda']}"


def algo_is_torch_only(source: Source) -> Iterator[str]:
    if not source.path.startswith("megagrpo/algo/"):
        return
    for name, line in imported(source):
        root = name.split(".")[0]
        if root not in sys.stdlib_module_names and root not in {"torch", "megagrpo"}:
            yield f"{source.path}:{line}: algo knows only torch, not {root}"


def environment_homes(source: Source) -> Iterator[str]:
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    for node in ast.walk(source.tree):
        used = isinstance(node, ast.Attribute) and ast.unparse(node) in names
        if used and not at_home(source, "os.environ"):
            yield f"{source.path}:{node.lineno}: reads the environment outside its homes"
    for name, line in imported(source):
        if name in names and not at_home(source, "os.environ"):
            yield f"{source.path}:{line}: imports {name} outside its homes"


def no_broad_except(source: Source) -> Iterator[str]:
    broad = {"Exception", "BaseException"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught = list(node.args)
        else:
            continue
        too_much = any(kind is None or ast.unparse(kind) in broad for kind in caught)
        if too_much and not at_home(source, "broad except"):
            yield f"{source.path}:{node.lineno}: broad except"


def no_print(source: Source) -> Iterator[str]:
    if not source.path.startswith("megagrpo/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield f"{source.path}:{node.lineno}: print; use log.py"


def caps(source: Source) -> Iterator[str]:
    lines = source.text.splitlines()
    limit = LONGER_FILES.get(source.path, MAX_FILE)
    if len(lines) > limit:
        yield f"{source.path}: {len(lines)} lines, at most {limit}"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            yield f"{source.path}:{number}: {len(line)} characters, at most {MAX_LINE}"
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        is_loop = source.path == "megagrpo/trainer/grpo.py" and node.name == "train"
        most = LONGEST_LOOP if is_loop else MAX_FUNCTION
        if length > most:
            yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, at most {most}"
        positional = [a.arg for a in node.args.posonlyargs + node.args.args]
        count = len([name for name in positional if name not in {"self", "cls"}])
        if count > MAX_POSITIONAL:
            yield f"{source.path}:{node.lineno}: {node.name} takes {count} positional parameters"


def empty_inits(source: Source) -> Iterator[str]:
    if not source.path.endswith("__init__.py"):
        return
    wanted = '__version__ = "' if source.path == "megagrpo/__init__.py" else ""
    text = source.text.strip()
    if (text and not wanted) or not text.startswith(wanted) or "\n" in text:
        yield f"{source.path}: an __init__ is empty, but for the version at the top"


def public_docstrings(source: Source) -> Iterator[str]:
    if source.path.endswith("__init__.py"):
        return
    tree = source.tree
    if ast.get_docstring(tree) is None:
        yield f"{source.path}: no module docstring"
    for node in _public(tree.body):
        if ast.get_docstring(node) is None:
            yield f"{source.path}:{node.lineno}: {node.name} has no docstring"


def _public(
    body: list[ast.stmt],
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public functions, classes and methods; what is nested in a function is nobody's business."""
    for node in body:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body)


RULES: list[Callable[[Source], Iterator[str]]] = [
    floors,
    heavy_homes,
    algo_is_torch_only,
    environment_homes,
    no_broad_except,
    no_print,
    caps,
    empty_inits,
    public_docstrings,
]

_MANY = ", ".join(f"p{number}" for number in range(8))
PLANTED: list[tuple[Callable[[Source], Iterator[str]], str, str]] = [
    (floors, "megagrpo/weights/x.py", "def f():\n    from megagrpo.model import build\n"),
    (floors, "megagrpo/algo/x.py", "import megagrpo.data.packing\n"),
    (floors, "megagrpo/algo/x.py", "from ..data import packing\n"),
    (floors, "megagrpo/data/x.py", "import importlib\nimportlib.import_module('megagrpo.cli')\n"),
    (floors, "megagrpo/helpers/x.py", ""),
    (heavy_homes, "megagrpo/hybrid/x.py", "def f():\n    import vllm.config\n"),
    (heavy_homes, "megagrpo/trainer/x.py", "from megatron.core import parallel_state\n"),
    (heavy_homes, "megagrpo/algo/x.py", "import torch\ntorch.cuda.synchronize()\n"),
    (algo_is_torch_only, "megagrpo/algo/x.py", "import numpy as np\n"),
    (environment_homes, "megagrpo/data/x.py", "import os\nos.environ['RANK']\n"),
    (environment_homes, "megagrpo/data/x.py", "from os import getenv\n"),
    (
        no_broad_except,
        "megagrpo/data/x.py",
        "try:\n    f()\nexcept (OSError, Exception):\n    g()\n",
    ),
    (no_broad_except, "tools/x.py", "try:\n    f()\nexcept:\n    g()\n"),
    (no_broad_except, "megagrpo/data/x.py", "with contextlib.suppress(Exception):\n    f()\n"),
    (no_print, "megagrpo/data/x.py", "print('here')\n"),
    (caps, "megagrpo/data/x.py", "\n" * 301),
    (caps, "megagrpo/data/x.py", "x = 1  # " + "." * 93),
    (caps, "megagrpo/data/x.py", "def f():\n" + "    x = 1\n" * 60),
    (caps, "megagrpo/trainer/grpo.py", "def train():\n" + "    x = 1\n" * 45),
    (caps, "megagrpo/data/x.py", f"def f({_MANY}):\n    pass\n"),
    (empty_inits, "megagrpo/data/__init__.py", "from megagrpo.data import prompts\n"),
    (
        public_docstrings,
        "megagrpo/data/x.py",
        '"""Why."""\nclass C:\n    """C."""\n    def f(self): ...',
    ),
    (public_docstrings, "megagrpo/data/x.py", "x = 1\n"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    found = [violation for source in sources() for violation in rule(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_planted_violation_is_seen(
    rule: Callable[[Source], Iterator[str]], path: str, text: str
) -> None:
    assert list(rule(Source(path, text))), f"{rule.__name__} does not see {text!r} in {path}"


def test_permitted_homes_and_imports_pass() -> None:
    engine = Source("megagrpo/rollout/vllm_engine.py", "import os, vllm\nos.environ, vllm\n")
    runner = Source("megagrpo/rewards/calls.py", "try:\n    f()\nexcept Exception:\n    g()\n")
    trainer = Source("megagrpo/trainer/setup.py", "from megagrpo.hybrid import plan\n")
    found = [v for source in (engine, runner, trainer) for rule in RULES for v in rule(source)]
    assert [v for v in found if "docstring" not in v] == []


def test_top_level_holds_only_what_was_agreed() -> None:
    """Anything else belongs into one of the folders; dot files and build output are free."""
    names = {p.name for p in REPO.iterdir() if not p.name.startswith(".")} - BUILT_OR_RUN
    assert names - TOP_LEVEL - {"LICENSE"} == set()
    assert TOP_LEVEL | {"LICENSE"} == names
