"""Unit tests for code as a reward: right code passes, wrong code does not, hostile code never."""

import dataclasses
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megagrpo import log
from megagrpo.config import RewardConfig
from megagrpo.rewards import code_tests as rewards_code_tests
from megagrpo.rewards.base import check_columns
from megagrpo.rewards.code_tests import (
    code_tests,
    extract_code,
    read_tests,
    run_tests,
    warn_of_open_doors,
)
from megagrpo.rewards.runner import RewardRunner
from megagrpo.rewards.sandbox import Confinement, Limits, _children, find_confinement
from tests.reward_tools import cpu_spec, totals

SQUARE = "assert f(3) == 9\nassert f(4) == 16\n"
LIMITS = Limits(seconds=20.0, memory_mb=256)  # for code that ends; a loaded machine is slow
SHORT = Limits(seconds=1.5, memory_mb=256)  # for code that may not
HERE = find_confinement()
# What other hosts offer: a container without namespaces, and an ordinary user without them.
HOSTS = {
    "here": HERE,
    "container": dataclasses.replace(HERE, wrapper=()),
    "plain": Confinement((), None, read_all=False),
}


def share(
    code: str,
    tests: Any,
    entry: str | None = None,
    host: str = "here",
    limits: Limits = LIMITS,
) -> float:
    passed, total = run_tests(code, read_tests(tests), entry, limits, HOSTS[host])
    return passed / total


@pytest.fixture
def runner() -> Iterator[RewardRunner]:
    kwargs = {"allow_code_execution": True, "seconds": 3.0, "memory_mb": 256}
    made = RewardRunner([cpu_spec(RewardConfig(path="code_tests", workers=1, kwargs=kwargs))])
    yield made
    made.close()


# --- code that means well ------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_right_code_passes_and_wrong_code_does_not(host: str) -> None:
    assert share("def f(x):\n    return x * x", SQUARE, host=host) == 1.0
    assert share("def f(x):\n    return 3 * x", SQUARE, host=host) == 0.5
    assert share("def f(x):\n    return None", SQUARE, host=host) == 0.0
    assert share("def f(x:\n    return x * x", SQUARE, host=host) == 0.0
    assert share("def g(x):\n    return x * x", SQUARE, host=host) == 0.0


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f():\n    return [1, (2, 'a'), {3: {4}}, None, True, 1.5, b'x', 2j]",
         "assert f() == [1, (2, 'a'), {3: {4}}, None, True, 1.5, b'x', 2j]"),
        ("def f(n):\n    return 7 ** n", "assert f(5000) == 7 ** 5000"),
        ("def f():\n    return float('nan'), float('inf')",
         "assert f()[0] != f()[0] and f()[1] == float('inf')"),
        ("def f():\n    return '\\ud800'", "assert f() == '\\ud800'"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]\n"
         "assert next(f(1)) == 0"),
        ("def f(x):\n    raise KeyError(x)", "try:\n    f(1)\n    assert False\n"
         "except KeyError:\n    assert True"),
        ("def f(x):\n    return x.decode('ascii')", "try:\n    f(b'\\xff')\n    assert False\n"
         "except ValueError:\n    assert True"),
        ("class Odd(ValueError): pass\ndef f(x):\n    raise Odd(x)",
         "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
         "        with self.assertRaises(ValueError):\n            f(1)"),
        ("def f(items):\n    items.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
        ("def f(grid):\n    grid[0][0] = 9", "g = [[1]]\nf(g)\nassert g == [[9]]"),
        ("def f(x):\n    return lambda y: x + y", "assert f(1)(2) == 3"),
        ("class Stack:\n    def __init__(self): self.items = []\n"
         "    def push(self, x): self.items.append(x)\n    def __len__(self): "
         "return len(self.items)\n    def __eq__(self, o): return self.items == o.items\n",
         "s, t = Stack(), Stack()\ns.push(4)\nassert len(s) == 1 and s.items == [4]\n"
         "assert s != t\nt.push(4)\nassert s == t\nassert isinstance(s, Stack)"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
         "    def __add__(self, o): return P(self.x + o.x)\n"
         "    def __truediv__(self, n): return P(self.x / n)\n",
         "assert (P(1) + P(2)).x == 3 and (P(4) / 2).x == 2\np = P(1)\np.x = 5\nassert p.x == 5"),
        ("class Row:\n    def __getitem__(self, at): return [9, 8, 7][at]\ndef f(): return Row()",
         "assert f()[:2] == [9, 8] and f()[::-2] == [7, 9] and f()[1] == 8"),
        ("from collections import Counter\ndef f(s):\n    return Counter(s)",
         "assert f('aab') == {'a': 2, 'b': 1}"),
        ("import math\ndef f(x):\n    return math.sqrt(x)", "assert math.isclose(f(2), 2 ** .5)"),
        ("import threading\ndef f():\n    out = []\n    t = threading.Thread(target=out.append, "
         "args=(1,))\n    t.start(); t.join()\n    return out", "assert f() == [1]"),
    ],
)  # fmt: skip
def test_values_exceptions_objects_and_changes_cross_as_they_are(code: str, tests: str) -> None:
    assert share(code, tests) == 1.0


@pytest.mark.parametrize(
    ("tests", "entry", "expected"),
    [
        (SQUARE, None, 1.0),
        (["assert f(3) == 9", "assert f(4) == 15"], None, 0.5),
        ("def check(candidate):\n    assert candidate(3) == 9", "f", 1.0),
        ("def check(candidate):\n    assert candidate(3) == 8", "f", 0.0),
        ("def check(candidate):\n    assert candidate(3) == 9\ncheck(f)", "f", 1.0),
        ("def test_a():\n    assert f(3) == 9\ndef test_b():\n    assert f(3) == 8", None, 0.5),
        ("for x, y in [(3, 9), (4, 16)]:\n    assert f(x) == y", None, 1.0),
        ("import unittest\nclass A(unittest.TestCase):\n    def setUp(self): self.x = 3\n"
         "    def test_a(self): self.assertEqual(f(self.x), 9)\n"
         "    def test_b(self): self.assertEqual(f(self.x), 8)\n"
         "if __name__ == '__main__':\n    unittest.main()", None, 0.5),
        ("while True:\n    assert f(3) == 9", None, 0.0),
        ("x = f('a')\nassert x == 1", None, 0.0),
    ],
)  # fmt: skip
def test_the_forms_that_tests_come_in(tests: Any, entry: str | None, expected: float) -> None:
    limits = SHORT if "while" in str(tests) else LIMITS
    assert share("def f(x):\n    return x * x", tests, entry, limits=limits) == expected


@pytest.mark.parametrize("host", HOSTS)
def test_programs_are_compared_by_what_they_print(host: str) -> None:
    code = "import sys\nn = int(input())\nprint(n * n)\nprint('done ')\nsys.exit(0)"
    cases = {"inputs": ["3\n", "4"], "outputs": ["9\ndone\n\n", "15\ndone"]}
    assert share(code, cases, host=host) == 0.5
    assert share(code, '[{"input": "5", "output": "25\\ndone"}]', host=host) == 1.0
    assert share("print(9)\nprint('done')\n1 / 0", cases, host=host) == 0.0
    assert share("if __name__ == '__main__':\n    print('9\\ndone')", cases, host=host) == 0.5
    assert share("print('1\\x0b2')", {"inputs": [""], "outputs": ["1\n2"]}, host=host) == 0.0
    assert share("while True:\n    print('9' * 99)", cases, host=host, limits=SHORT) == 0.0


def test_the_last_python_block_is_the_code() -> None:
    text = (
        "First\n```python\na\n```\nor ```bash\nls\n```\nso\n```py\nb = 1\n```\nand ```text\nc\n```"
    )
    assert extract_code(text) == "b = 1\n"
    assert extract_code("def f(): pass") == "def f(): pass"


def test_a_fence_that_never_ends_is_read_at_once() -> None:
    text = "```" + "a" * 100_000
    start = time.perf_counter()
    assert extract_code(text) == text
    assert time.perf_counter() - start < 2.0


def test_code_whose_object_cannot_be_cut_is_wrong_and_no_failure_of_the_tests() -> None:
    assert share("class Z: pass\ndef f(x): return Z()", "assert f(3)[:2] == [9]") == 0.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("assert f(", "do not parse"),
        ("x = 1", "no test in"),
        ("def check(candidate):\n    assert True", "no entry_point"),
        ([], "neither Python code nor inputs and outputs"),
        ({"inputs": [1], "outputs": [2]}, "neither Python code"),
    ],
)
def test_tests_that_are_none_are_an_error_and_not_a_score(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share("def f(x): pass", tests)


def test_the_reward_reads_its_columns(runner: RewardRunner) -> None:
    right = "Here:\n```python\ndef f(x):\n    return x ** 2\n```"
    texts = [right, "no code at all", "def f(x):\n    return 9"]
    for key, column in enumerate(("tests", "test_code")):
        runner.submit(key, ["p"] * 3, texts, {column: [SQUARE] * 3})
    runner.submit(2, ["p"] * 3, texts, {"reward_model": [{"ground_truth": SQUARE}] * 3})
    runner.submit(3, ["p"] * 2, texts[:2], {"tests": [None, SQUARE]})
    found = [totals(scores) for scores in runner.collect().values()]
    assert found == [[1.0, 0.0, 0.0]] * 3 + [[None, 0.0]]
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts, counts.workers_replaced) == (0, 0, 0)


def test_a_share_and_a_prompt_in_front_by_kwarg() -> None:
    allowed = {"tests": [SQUARE], "allow_code_execution": True}
    half = ["def f(x):\n    return 9"]
    assert code_tests([""], half, **allowed, partial=True) == [0.5]
    head, body = ["def f(x):\n"], ["    return x * x"]
    assert code_tests(head, body, **allowed, prepend_prompt=True) == [1.0]
    assert code_tests(head, body, **allowed) == [0.0]


def test_the_limit_holds_for_all_tests_of_a_completion_together() -> None:
    cases = {"inputs": ["1"] * 6, "outputs": ["1"] * 6}
    start = time.perf_counter()
    found = share("print(input())\nimport time\ntime.sleep(0.7)", cases, limits=SHORT)
    assert 0.0 < found < 1.0 and time.perf_counter() - start < 2 * SHORT.seconds
    with pytest.raises(ValueError, match="timeout_s=5.0 of code_tests ends its worker before"):
        cpu_spec(RewardConfig(path="code_tests", timeout_s=5.0))


@pytest.mark.parametrize(
    "kwargs", [{"seconds": "5"}, {"memory_mb": "512"}, {"memory_mb": 99.5}, {"partial": "no"}]
)
def test_limits_that_are_no_numbers_are_refused_before_the_run(kwargs: dict[str, Any]) -> None:
    spec = cpu_spec(RewardConfig(path="code_tests", kwargs={"allow_code_execution": True} | kwargs))
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))}={next(iter(kwargs.values()))!r}"):
        check_columns([spec], ["tests"])


def test_code_is_not_run_unless_it_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = cpu_spec(RewardConfig(path="code_tests"))
    with pytest.raises(ValueError, match="allow it with kwargs: {allow_code_execution: true}"):
        check_columns([spec], ["tests"])
    monkeypatch.setattr(rewards_code_tests, "Sandbox", None)
    with pytest.raises(ValueError, match="allow_code_execution"):
        code_tests([""], ["def f(x): pass"], tests=[SQUARE])
    with pytest.raises(ValueError, match="always runs in processes of its own"):
        cpu_spec(RewardConfig(path="code_tests", isolate=False))


def test_a_host_that_cannot_confine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "warn", lambda text, **_: lines.append(text))
    for name in ("here", "plain"):
        found = HOSTS[name]
        monkeypatch.setattr(rewards_code_tests, "find_confinement", lambda found=found: found)
        warn_of_open_doors()
    assert len(lines) == 2 - HERE.alone and "keeps the network" in lines[-1]


# --- code that does not --------------------------------------------------------------------------

HOSTILE = {
    "loops while it loads": "while True: pass",
    "loops when called": "def f(x):\n    while True: pass",
    "ignores signals": (
        "import signal\nfor s in range(1, 30):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: pass"
    ),
    "takes all memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "takes one huge block": "x = bytearray(1 << 36)\ndef f(x): return x * x",
    "writes a big file": (
        "def f(x):\n    with open('big', 'wb') as out:\n"
        "        for _ in range(4096): out.write(b'x' * (1 << 20))\n    return x * x"
    ),
    "kills its parent": (
        "import os, signal\nfor pid in (os.getppid(), -1):\n"
        "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\n"
        "def f(x):\n    os.killpg(0, signal.SIGKILL)"
    ),
    "prints a fake report": "print('2 passed')\nprint('[1.0]')\nprint({'value': 9})\n",
    "writes into every pipe": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"value\": 9}\\n' * 8)\n"
        "    except OSError: pass\ndef f(x): return 9"
    ),
    "answers with nonsense": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'[' * 100000 + b'\\n')\n"
        "    except OSError: pass\ndef f(x): return 9"
    ),
    "exits with 0": "import sys\nsys.exit(0)",
    "exits with 0 when called": "import os\ndef f(x): os._exit(0)",
    "closes its pipes": "import os\nos.closerange(0, 64)\ndef f(x): return x * x",
    "equals everything": (
        "class All:\n    def __eq__(self, other): return True\n    __ne__ = __lt__ = __gt__ = "
        "__bool__ = __contains__ = __eq__\n    __class__ = int\ndef f(x): return All()"
    ),
    "a number that equals everything": (
        "class All(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef f(x): return All(0)"
    ),
    "has no difference from anything": (
        "class Z:\n    def __sub__(self, other): return 0\n    __truediv__ = __mod__ = __sub__\n"
        "def f(x): return Z()"
    ),
    "is no difference from anything": (
        "class Z:\n    def __sub__(self, other): return self\n    __pow__ = __mul__ = __neg__ = "
        "__sub__\n    def __abs__(self): return 0\n    __float__ = lambda self: 0.0\n"
        "    __bool__ = lambda self: False\ndef f(x): return Z()"
    ),
    "patches what tests use": (
        "import builtins, unittest, sys, operator\nbuiltins.AssertionError = Exception\n"
        "unittest.TestCase.assertEqual = lambda *_: None\nbuiltins.all = lambda *_: True\n"
        "operator.eq = lambda a, b: True\nsys.modules['math'] = None\n"
        "def f(x): return 0\n"
    ),
    "patches its server": (
        "import sys, __main__\n__main__.pack = lambda value, keep: True\n"
        "__main__.OPERATORS = {}\ndef f(x): return 0\n"
    ),
    "defines what tests call": (
        "def abs(x): return 0\ndef len(x): return 0\ndef all(x): return True\n"
        "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 0"
    ),
    "deletes itself": "import shutil, os\nshutil.rmtree(os.getcwd(), True)\ndef f(x): return 0",
    "nests without end": "def f(x):\n    for _ in range(10 ** 5): x = [x]\n    return x",
    "returns itself": "def f(x):\n    y = []\n    y.append(y)\n    return y",
    "a huge answer": "def f(x):\n    return 'x' * (100 << 20)",
}
TOLD = "assert abs(f(3) - 9) < 1e-6\nassert len([f(4)]) == 1 and math.isclose(f(4), 16)\n"


@pytest.mark.parametrize("what", [name for name in HOSTILE if "no difference" in name])
@pytest.mark.parametrize(
    "test",
    [
        "assert abs(f(3) - 9) < 1e-6",
        "assert not f(3) - 9",
        "assert (f(3) - 9) ** 2 < 1e-6",
        "assert abs(-(f(3) - 9)) < 1e-6",
        "assert float(f(3) - 9) == 0.0",
        "assert f(3) / 9 == 1 or f(3) / 9 == 0",
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertAlmostEqual(f(3), 9)",
    ],
)
def test_an_object_cannot_pass_for_a_number_by_what_it_says_of_differences(
    what: str, test: str
) -> None:
    assert share(HOSTILE[what], test) == 0.0
    assert share("def f(x): return x * x + 1e-9 - 1e-9", test) == 1.0


def test_folders_in_folders_without_end_are_deleted() -> None:
    code = (
        "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\ndef f(x): return 0"
    )
    before = set(Path(tempfile.gettempdir()).glob("code_*"))
    assert share(code, SQUARE, host="container") == 0.0
    assert not set(Path(tempfile.gettempdir()).glob("code_*")) - before


@pytest.mark.parametrize("host", ["here", "container"])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_code_never_passes(what: str, host: str) -> None:
    tests = TOLD if "tests" in what else SQUARE
    start = time.perf_counter()
    assert share(HOSTILE[what], tests, host=host, limits=SHORT) == 0.0
    assert time.perf_counter() - start < 4 * SHORT.seconds


def test_hostile_code_leaves_trainer_and_worker_alone(runner: RewardRunner) -> None:
    """PROC-8: a group of hostile completions, all 0, and right code after them is still right."""
    texts = [*HOSTILE.values(), "def f(x):\n    return x * x"]
    runner.submit(0, ["p"] * len(texts), texts, {"tests": [SQUARE] * len(texts)})
    assert totals(runner.collect()[0]) == [0.0] * len(HOSTILE) + [1.0]
    counts = runner.take_counts()
    assert (counts.errors, counts.timeouts, counts.workers_replaced) == (0, 0, 0)


BOMB = """
import os, time
def f(x):
    made = 0
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv('/bin/sleep', ['sleep', '61.2345'])
                os._exit(0)
            made += 1
        except OSError:
            return made
"""


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if "61.2345" in (p.info["cmdline"] or [])]


def test_children_are_found_while_threads_come_and_go() -> None:
    """A thread of the worker that ends as its children are read is no error."""
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            threading.Thread(target=int).start()

    thread = threading.Thread(target=come_and_go)
    child = subprocess.Popen(["sleep", "60"])
    thread.start()
    try:
        assert all(child.pid in _children() for _ in range(100))
    finally:
        over.set()
        thread.join()
        child.kill()
        child.wait()


@pytest.mark.parametrize("host", ["here", "container"])
def test_a_fork_bomb_is_bounded_and_leaves_nobody_behind(host: str) -> None:
    """Children in sessions of their own, orphaned on purpose: at most 32, all ended."""
    assert share(BOMB, "n = f(1)\nassert 1 <= n <= 64", host=host) == 1.0
    assert share(f"{BOMB}\nf(1)\nwhile True: pass", SQUARE, host=host, limits=SHORT) == 0.0
    assert sleepers() == []


def test_code_sees_no_tests_no_network_no_other_process_and_writes_nowhere_else() -> None:
    code = """
import gc, glob, os, socket, sys
def seen():
    found = [str(x) for x in gc.get_objects() if isinstance(x, (str, list, dict))]
    for place in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ'):
        try: found.append(open(place).read())
        except OSError: pass
    for place in glob.glob('/proc/*/mem'):
        try: found.append(open(place, 'rb').read(1 << 20).decode(errors='replace'))
        except OSError: pass
    return [x for x in found if 'unguess' + 'able' in x][:1]
def network():
    try: socket.create_connection(('127.0.0.1', PORT), 0.5)
    except OSError: return False
    return True
def processes():
    return len(glob.glob('/proc/[0-9]*'))
def writable():
    for place in ('/', '/tmp', '/var/tmp', '/dev/shm', os.path.expanduser('~root')):
        try: open(os.path.join(place, 'megagrpo_probe'), 'w').close()
        except OSError: continue
        return place
    return ''
def rights():
    return os.getuid(), dict(os.environ), sorted(os.listdir('/proc/self/fd'))[:1]
"""
    import socket

    server = socket.create_server(("127.0.0.1", 0))
    code = code.replace("PORT", str(server.getsockname()[1]))
    tests = (
        "assert seen() == []\nassert 'unguessable' != seen()\n"
        f"assert network() is {not HERE.alone}\n"
        f"assert {HERE.alone} is False or processes() <= 2\n"
        f"assert {HERE.alone} is False or writable() == ''\n"
        f"assert rights()[0] == {HERE.user if HERE.user is not None else 0}\n"
        "assert set(rights()[1]) <= {'PATH', 'HOME', 'LANG', 'LC_CTYPE'}\n"
    )
    assert share(code, tests) == 1.0
    server.close()
    assert not os.path.exists("/tmp/megagrpo_probe")
