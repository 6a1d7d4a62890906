"""What a model's code defines, as tests see it: calls go into its process, plain values come back.

Tests run outside that process, so the code can neither read what they expect nor change how they
compare: only values of Python's own types, rebuilt from JSON, are ever compared with them. An
object of the code's own stays in its process and is a `Remote` here; compared with anything but
another Remote it is unequal, whatever its `__eq__` says. What is left when a plain value is
subtracted from it, or it is divided by one, would know what the test expects: it is no number,
whatever the object says. A test that asks such an object a question (`in`, a method) has its word.
Left out: functions as arguments, and exception classes of the code in `except`.
"""

import builtins
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megagrpo.rewards.sandbox import CodeEndedError
from megagrpo.rewards.sandbox_child import pack, unpack

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class CodeError(Exception):
    """The code raised an exception that Python does not know."""


class UnfitTestError(BaseException):
    """A test does what cannot be done from outside the code's process."""


class Remote:
    """An object that lives in the code's process."""

    def __init__(self, ask: Ask, number: int) -> None:
        # `_told`: made with a plain value of the test's, which may be the one that it expects.
        self.__dict__.update(_ask=ask, _number=number, _told=False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call it there; lists, dicts and sets that it changes are changed here as well."""
        reply = _send(
            self._ask,
            {
                "do": "call",
                "args": [_packed(item) for item in (self, *args)],
                "named": _packed(named),
            },
        )
        _write_back(args, reply.get("args"), self._ask)
        return _value(reply, self._ask)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _of(self, {"do": "attribute", "name": name, "args": [_packed(self)]})

    def __setattr__(self, name: str, value: Any) -> None:
        _operate("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _operate("eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._number)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and _operate("isinstance", instance, self) is True

    def __iter__(self) -> Iterator[Any]:
        made = _operate("iter", self)
        while True:
            try:
                yield _operate("next", made)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return _operate("next", self)

    def __len__(self) -> int:
        return _exact(int, "len", self)

    def __bool__(self) -> bool:
        return _exact(bool, "bool", self)

    def __int__(self) -> int:
        return _exact(int, "int", self)

    def __float__(self) -> float:
        return _exact(float, "float", self)

    def __str__(self) -> str:
        return _exact(str, "str", self)

    def __repr__(self) -> str:
        return _exact(str, "repr", self)

    def __contains__(self, item: Any) -> bool:
        return _operate("contains", self, item) is True


def _forward(name: str) -> Callable[..., Any]:
    def forwarded(self: Remote, *others: Any) -> Any:
        return _operate(name, self, *others)

    return forwarded


def _computed(name: str) -> Callable[..., Any]:
    def computed(self: Remote, *others: Any) -> Any:
        value = _operate(name, self, *others)
        told = self._told or any(isinstance(o, Remote) and o._told for o in others)
        told |= name in ("sub", "truediv") and not isinstance(others[0], Remote)
        if told and not isinstance(value, Remote):
            raise TypeError(f"{name} of the code's object with a plain value is no plain value")
        if told:
            value.__dict__["_told"] = True
        return value

    return computed


def _between(name: str) -> Callable[[Remote, Any], Any]:
    def compared(self: Remote, other: Any) -> Any:
        return _operate(name, self, other) if isinstance(other, Remote) else NotImplemented

    return compared


for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"):
    setattr(Remote, f"__{_name}__", _computed(_name))
for _name in ("neg", "pos", "abs"):
    setattr(Remote, f"__{_name}__", _computed(_name))
for _name in ("invert", "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _between(_name))


def load(ask: Ask, source: str) -> list[str]:
    """Run the code in its process; the names that it defines. Raises what the code raises."""
    names = _send(ask, {"do": "load", "source": source}).get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CodeEndedError("no list of names")
    return names


def look_up(ask: Ask, name: str) -> Any:
    """A name of the code's: a plain value, or a Remote."""
    return _value(_send(ask, {"do": "name", "name": name, "args": []}), ask)


def _operate(name: str, first: Remote, *others: Any) -> Any:
    args = [_packed(item) for item in (first, *others)]
    return _of(first, {"do": "operator", "name": name, "args": args})


def _of(owner: Remote, request: Mapping[str, Any]) -> Any:
    return _value(_send(owner._ask, request), owner._ask)


def _exact(kind: type, name: str, owner: Remote) -> Any:
    if owner._told and kind is not str:
        raise TypeError(f"{name}() of what is left of the code's object and a plain value")
    value = _operate(name, owner)
    if type(value) is not kind:
        raise TypeError(f"{name}() of the code's object is a {type(value).__name__}")
    return value


def _packed(value: Any) -> Any:
    return pack(value, _reference)


def _reference(value: Any) -> Any:
    if isinstance(value, Remote):
        return ["r", value._number]
    raise UnfitTestError(f"a {type(value).__name__} cannot be passed to code in another process")


def _send(ask: Ask, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reply; what the code raised is raised here, as the nearest exception of Python's own."""
    reply = ask(request)
    if "raised" not in reply:
        return reply
    names = reply["raised"] if isinstance(reply["raised"], list) else []
    for name in names:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                error = kind(str(reply.get("said")))
            except TypeError:
                continue  # UnicodeDecodeError and its like want more; their base will do
            raise error
    raise CodeError(f"{names[:1]}: {reply.get('said')}")


def _value(reply: Mapping[str, Any], ask: Ask) -> Any:
    try:
        return unpack(reply["value"], lambda number: Remote(ask, int(number)))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CodeEndedError(f"an answer that is no value: {error}") from error


def _write_back(args: tuple[Any, ...], changed: Any, ask: Ask) -> None:
    """Lists, dicts and sets that the code has changed are changed here as well."""
    if not isinstance(changed, list) or len(changed) != len(args):
        raise CodeEndedError("no arguments in the answer to a call")
    for old, new in zip(args, changed, strict=True):
        if type(old) not in (list, dict, set):
            continue
        value = _value({"value": new}, ask)
        if type(value) is not type(old):
            raise CodeEndedError("an argument changed its type")
        if isinstance(old, list):
            old[:] = value
        else:
            old.clear()
            old.update(value)
