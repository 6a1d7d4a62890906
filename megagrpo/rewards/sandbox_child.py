"""The program that runs a model's code, in a process that nothing else lives in.

Started as a script by `sandbox.py`, with the standard library alone: it confines itself, then does
what the lines of JSON on its control pipe say: load the code, call what it defines, look at what
came back. It holds no test and no expected value, and whatever the code does to this process, all
it can change is the answers that it gives.

Values cross as JSON (`pack`, `unpack`): plain Python values by content, everything else as the
number of an object that stays here.
"""

import builtins
import ctypes
import json
import operator
import os
import resource
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

_PLAIN = (bool, float, str, type(None))
_MIB = 1 << 20


def pack(value: Any, keep: Callable[[Any], Any]) -> Any:
    """A value as JSON; `keep` stands in for what is no plain value. Subclasses count as their base.

    Example: [(1, "a")] is ["l", [["t", [1, "a"]]]].
    """
    if isinstance(value, _PLAIN):
        return _base(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else ["i", hex(value)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, dict):
        return ["d", [[pack(k, keep), pack(v, keep)] for k, v in value.items()]]
    if isinstance(value, slice):
        return ["x", [pack(part, keep) for part in (value.start, value.stop, value.step)]]
    for tag, kind in (("l", list), ("t", tuple), ("s", set), ("f", frozenset)):
        if isinstance(value, kind):
            return [tag, [pack(item, keep) for item in value]]
    return keep(value)


def _base(value: Any) -> Any:
    """A plain value without its subclass."""
    if value is None or isinstance(value, bool):
        return value
    return float(value) if isinstance(value, float) else str.__str__(value)


def unpack(data: Any, find: Callable[[int], Any]) -> Any:
    """What `pack` wrote; `find` knows the kept objects. Raises ValueError on anything else."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("an object is no packed value")
        return data
    tag, *rest = data
    if tag == "r":
        return find(rest[0])
    if tag in ("i", "b"):
        return int(rest[0], 16) if tag == "i" else bytes.fromhex(rest[0])
    if tag == "c":
        return complex(*rest)
    if tag == "d":
        return {unpack(k, find): unpack(v, find) for k, v in rest[0]}
    if tag == "x":
        return slice(*(unpack(part, find) for part in rest[0]))
    kinds: dict[str, Callable[[Any], Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}
    if tag not in kinds:
        raise ValueError(f"unknown tag {tag!r}")
    return kinds[tag](unpack(item, find) for item in rest[0])


OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"),
        *("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "contains"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    )
} | {
    name: getattr(builtins, name)
    for name in (
        "len",
        "iter",
        "next",
        "repr",
        "str",
        "bool",
        "int",
        "float",
        "isinstance",
        "setattr",
    )
}
"""What may be done with a kept object from outside, beside calls and attributes."""


class _Served:
    """The model's code as a module, and the objects of it that somebody holds a number of."""

    def __init__(self) -> None:
        self.module = types.ModuleType("solution")
        sys.modules["solution"] = self.module
        self._kept: list[Any] = []

    def keep(self, value: Any) -> Any:
        self._kept.append(value)
        return ["r", len(self._kept) - 1]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do one request; what the code raises is part of the answer."""
        try:
            return self._do(request)
        except BaseException as error:  # the code's own, sys.exit included
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"raised": names, "said": str(error)[:2000]}

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        kind = request["do"]
        if kind == "load":
            exec(compile(request["source"], "<solution>", "exec"), vars(self.module))
            return {"names": [name for name in vars(self.module) if not name.startswith("__")]}
        args = [unpack(item, self._kept.__getitem__) for item in request["args"]]
        if kind == "name":
            return {"value": pack(vars(self.module)[request["name"]], self.keep)}
        if kind == "attribute":
            return {"value": pack(getattr(args[0], request["name"]), self.keep)}
        if kind == "operator":
            return {"value": pack(OPERATORS[request["name"]](*args), self.keep)}
        assert kind == "call", f"unknown request {kind}"
        named = unpack(request["named"], self._kept.__getitem__)
        value = args[0](*args[1:], **named)
        return {"value": pack(value, self.keep), "args": [pack(a, self.keep) for a in args[1:]]}


def main() -> None:
    """argv: read end and write end of the control pipe, the limits as JSON."""
    requests, answers = int(sys.argv[1]), int(sys.argv[2])
    confine_(json.loads(sys.argv[3]))
    served = _Served()
    for line in os.fdopen(requests, "r"):
        request = json.loads(line)
        if request["do"] == "program":
            os.close(answers)
            _be_program(request["source"])
        reply = served.answer(request)
        try:
            text = json.dumps(reply)
        except BaseException as error:  # an object of the code that only looks like a plain value
            text = json.dumps({"raised": [type(error).__name__, "Exception"], "said": ""})
        left = text.encode() + b"\n"
        while left:
            left = left[os.write(answers, left) :]


def _be_program(source: str) -> None:
    """Run the code as a script between our stdin and stdout, and end with its status."""
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    exec(compile(source, "<solution>", "exec"), vars(main_module))
    sys.exit(0)


def confine_(limits: Mapping[str, Any]) -> None:
    """Give up for good what the code must not have.

    `limits`: cpu_s, memory_mb, file_mb, processes, descriptors; user: id to become, or null;
    read_all: keep the right to read (the interpreter lies where that user may not look); mounts:
    this process has file systems of its own, so that all can become read-only but its folder.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if limits["mounts"]:
        _read_only_but_here(libc, limits["file_mb"])
    if limits["user"] is not None:
        libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
        os.setgroups([])
        os.setgid(limits["user"])
        os.setuid(limits["user"])
    _keep_capabilities(libc, 1 << 2 if limits["read_all"] else 0)  # CAP_DAC_READ_SEARCH
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG; a change of user has cleared it
    for name, value in (
        ("RLIMIT_CPU", limits["cpu_s"]),
        ("RLIMIT_AS", limits["memory_mb"] * _MIB),
        ("RLIMIT_FSIZE", limits["file_mb"] * _MIB),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_NOFILE", limits["descriptors"]),
        ("RLIMIT_CORE", 0),
    ):
        which, hard = getattr(resource, name), resource.getrlimit(getattr(resource, name))[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (most, most))


def _read_only_but_here(libc: ctypes.CDLL, megabytes: int) -> None:
    """Every mount read-only, and a small file system in memory on the working folder."""
    here = os.getcwd().encode()
    with open("/proc/self/mounts", "rb") as table:
        places = [line.split()[1].decode("unicode_escape").encode() for line in table]
    for place in places:
        try:
            old = os.statvfs(place).f_flag
        except OSError:
            continue
        # A remount must repeat the flags that a user namespace may not take off.
        flags = (old & 0xC0E) | (1 << 21 if old & 4096 else 0)
        libc.mount(None, place, None, ctypes.c_ulong(flags | 1 | 32 | 4096), None)
    options = f"size={megabytes}m,mode=777".encode()
    if libc.mount(b"tmpfs", here, b"tmpfs", ctypes.c_ulong(2 | 4), options) == 0:
        os.chdir(here)


def _keep_capabilities(libc: ctypes.CDLL, mask: int) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    data = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    libc.capset(header, data)


if __name__ == "__main__":
    main()
