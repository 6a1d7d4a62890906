"""Single values out of a `config.json`, each checked and named in its error.

A JSON number is no proof of a sensible one: counts are positive integers, never booleans. Left out:
what the fields mean together (`hf_config.py` and its parts).
"""

import json
from pathlib import Path
from typing import Any

Fields = dict[str, Any]
"""A JSON object of a HuggingFace folder."""


def read_json(path: Path) -> Fields:
    """The object in that file; raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def integer(config: Fields, key: str) -> int:
    """A positive integer; raises ValueError if it is absent or anything else."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}={value!r}; a positive integer is needed")
    return value


def count(config: Fields, key: str) -> int:
    """An integer from 0; absent or null is 0."""
    value = config.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key}={value!r}; an integer from 0 is needed")
    return value


def number(config: Fields, key: str, default: float | None = None) -> float:
    """A positive number; absent or null is the default, if there is one."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{key}={value!r}; a positive number is needed")
    return float(value)


def flag(config: Fields, key: str, default: bool) -> bool:
    """true or false; absent or null is the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r}; true or false is needed")
    return value


def names(config: Fields, key: str) -> list[str]:
    """A list of words; absent or null is empty."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key}={value!r} is no list of names")
    return value
