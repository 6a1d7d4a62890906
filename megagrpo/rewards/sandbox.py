"""Starts and ends the processes that run a model's code, as confined as this host allows.

Always: a folder of its own that is deleted afterwards, an empty environment, limits on processor
and wall time, memory, file size, processes and descriptors, no new privileges, and an end by force
of its whole process group. As root: another user (nobody). Where `unshare` works (as root, or with
user namespaces): no network, no sight of other processes, all file systems read-only but the
folder. Left out: other systems than Linux; hiding files: the code may read what that user may.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_NOBODY = 65534
_LONGEST = 8 << 20  # bytes of one answer or of a program's output
_NAMESPACES = ["--net", "--pid", "--ipc", "--mount-proc", "--fork", "--kill-child"]


@dataclass(frozen=True)
class Limits:
    """What one run of a model's code may use."""

    seconds: float = 10.0  # wall clock of all tests of a completion
    memory_mb: int = 512  # address space of a process
    file_mb: int = 16  # a file; and where it has file systems of its own, all its files
    processes: int = 32  # of its user, threads included
    descriptors: int = 64


@dataclass(frozen=True)
class Confinement:
    """What this host offers beyond limits."""

    wrapper: tuple[str, ...]  # command words before the interpreter's; empty without namespaces
    user: int | None  # to become; None if this is not root
    read_all: bool  # the interpreter's folder is closed to that user

    @property
    def alone(self) -> bool:
        """Whether the code has namespaces of its own: no network, no other processes."""
        return bool(self.wrapper)


def find_confinement() -> Confinement:
    """Try what this host allows; takes some milliseconds."""
    root = os.geteuid() == 0
    program = shutil.which("unshare")
    wrapper: tuple[str, ...] = ()
    if program is not None:
        as_user = [] if root else ["--user", "--map-root-user"]
        words = [program, *as_user, *_NAMESPACES]
        tried = subprocess.run([*words, "true"], capture_output=True, check=False)
        wrapper = tuple(words) if tried.returncode == 0 else ()
    interpreter = Path(sys.executable).resolve()
    closed = any(not folder.stat().st_mode & 1 for folder in interpreter.parents)
    return Confinement(wrapper, _NOBODY if root else None, read_all=root and closed)


class CodeEndedError(BaseException):
    """The process that runs the code is gone, hangs or talks nonsense; no test that expects an
    exception of the code may take it for one."""


class Sandbox:
    """One process with one model's code; a context manager that ends it."""

    def __init__(self, limits: Limits, confinement: Confinement, stdin: str | None = None) -> None:
        """Start it; `stdin` makes it a program whose output `run` reads."""
        self._deadline = time.monotonic() + limits.seconds
        self._confinement = confinement
        self._folder = tempfile.TemporaryDirectory(prefix="code_", ignore_cleanup_errors=True)
        if confinement.user is not None:
            os.chown(self._folder.name, confinement.user, confinement.user)
        self._children = _children()
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to us
        self._heard = b""
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._requests, False)
        given = tempfile.TemporaryFile()  # noqa: SIM115  closed below, once the child has it
        given.write((stdin or "").encode(errors="surrogateescape"))
        given.seek(0)
        try:
            self._process = subprocess.Popen(
                self._command(limits, requests, answers),
                cwd=self._folder.name,
                env={"PATH": "/usr/bin:/bin", "HOME": self._folder.name, "LANG": "C.UTF-8"},
                stdin=given,
                stdout=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(requests, answers),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        finally:
            os.close(requests)
            os.close(answers)
            given.close()

    def _command(self, limits: Limits, requests: int, answers: int) -> list[str]:
        confinement = self._confinement
        words = asdict(limits) | {"cpu_s": int(limits.seconds) + 1, "mounts": confinement.alone}
        if confinement.user is None and not confinement.alone:
            words["processes"] = 0  # counted over everything that this user runs: none is safe
        words |= {"user": confinement.user, "read_all": confinement.read_all}
        program = str(Path(__file__).with_name("sandbox_child.py"))
        python = [sys.executable, "-I", "-S", "-B", program]
        return [*confinement.wrapper, *python, str(requests), str(answers), json.dumps(words)]

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; raises CodeEndedError if there is none in time."""
        self._tell(request)
        while b"\n" not in self._heard:
            self._heard += self._read(self._answers)
            if len(self._heard) > _LONGEST:
                raise CodeEndedError(f"an answer of over {_LONGEST} bytes")
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CodeEndedError(f"an answer that is no JSON: {error}") from error
        if not isinstance(answer, dict):
            raise CodeEndedError("an answer that is no object")
        return answer

    def run(self, source: str) -> tuple[int, bytes]:
        """Run the code as a program; its exit status and what it printed."""
        self._tell({"do": "program", "source": source})
        assert self._process.stdout is not None, "started without stdin"
        output, descriptor = b"", self._process.stdout.fileno()
        while True:
            try:
                output += self._read(descriptor)
            except EOFError:
                break
            if len(output) > _LONGEST:
                raise CodeEndedError(f"it printed over {_LONGEST} bytes")
        ended = os.pidfd_open(self._process.pid)
        try:
            self._wait(ended, select.POLLIN)
        finally:
            os.close(ended)
        # Not reaped yet: `close` ends its group by this number, which must stay taken until then.
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None, "a process that ended has no status"
        return (found.si_status if found.si_code == os.CLD_EXITED else -found.si_status), output

    def _tell(self, request: Mapping[str, Any]) -> None:
        left = json.dumps(request).encode() + b"\n"
        while left:
            self._wait(self._requests, select.POLLOUT)
            try:
                left = left[os.write(self._requests, left) :]
            except BrokenPipeError:
                raise CodeEndedError("it ended") from None

    def _read(self, descriptor: int) -> bytes:
        self._wait(descriptor, select.POLLIN)
        chunk = os.read(descriptor, 1 << 16)
        if not chunk and descriptor == self._answers:
            raise CodeEndedError("it ended")
        if not chunk:
            raise EOFError
        return chunk

    def _wait(self, descriptor: int, event: int) -> None:
        waiting = select.poll()
        waiting.register(descriptor, event)
        if not waiting.poll(max(self._deadline - time.monotonic(), 0.0) * 1000):
            raise CodeEndedError("it did not answer in time")

    def close(self) -> None:
        """End the process, its group and whatever left the group; delete the folder."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        while strays := _children() - self._children:
            # Orphans of that process; the first of a process namespace ends when all in it have.
            for pid in strays:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._requests)
        os.close(self._answers)
        try:
            self._folder.cleanup()
        except RecursionError:  # folders in folders without end
            subprocess.run(["rm", "-rf", "--", self._folder.name], check=False)


def _children() -> set[int]:
    """Processes whose parent is this one, adopted orphans included."""
    while True:
        try:
            lists = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
            return {int(pid) for text in lists for pid in text.split()}
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread has ended meanwhile; its children are another's now


def _die_with_parent() -> None:
    """Between fork and exec: a worker that is killed takes the code along."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
