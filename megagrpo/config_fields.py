"""How a config key is declared: default, one line of help, choices or interval."""

from dataclasses import field, is_dataclass
from typing import Any


def key(
    default: Any,
    text: str,
    *,
    choices: tuple[Any, ...] = (),
    within: str = "",
    first: bool = False,
) -> Any:
    """A config field: default, one line of help, allowed values or interval, in the short help."""
    metadata = {"help": text, "choices": choices, "within": within, "first": first}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type) and is_dataclass(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE = "[1, inf)", "[0, inf)", "(0, inf)"
SEED = "[0, 4294967295]"  # what every generator takes
