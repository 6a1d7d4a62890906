"""Reads the config: defaults, then a YAML file, then `section.key=value` words; refuses early.

OmegaConf does the merging and the type checks: a structured config refuses unknown keys and wrong
types, and its dot-list is the override syntax that users of this field know. What it lacks is
here: where an unknown key came from, what verl or TRL mean by it (`config_aliases.py`), else the
nearest known one. What values may be is in `config_checks.py`.
"""

import difflib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf import errors as omegaconf_errors

from megagrpo.config import Config, RewardConfig, known_keys
from megagrpo.config_aliases import explain
from megagrpo.config_checks import check_choices, check_required, check_values

TRAINING_NEEDS = ("model.path", "data.train")
EVALUATION_NEEDS = ("model.path", "data.eval")


def load_config(
    path: str | None, overrides: Sequence[str] = (), required: Sequence[str] = TRAINING_NEEDS
) -> Config:
    """Merge defaults, a YAML file and `section.key=value` words, and check them.

    `required` names keys that must be set. Raises ValueError with one line: unknown key (where it
    came from and the nearest known one), wrong type, value outside its choices, or a contradiction
    between keys.
    """
    tree = OmegaConf.structured(Config)
    if path is not None:
        tree = _merge(tree, _read_yaml(path), f"file {path}")
    for word in overrides:
        if "=" not in word[1:]:
            raise ValueError(f"override {word!r} is not section.key=value")
        tree = _merge(tree, _read_word(word), f"override {word!r}")
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    check_choices(config)
    check_required(config, required)
    check_values(config)
    return config


def _read_yaml(path: str) -> DictConfig:
    if not Path(path).is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        layer = OmegaConf.load(path)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {path}: {' '.join(str(error).split())}") from error
    if not isinstance(layer, DictConfig):
        raise ValueError(f"config file {path} has no sections; write `section: {{key: value}}`")
    return layer


def _read_word(word: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([word])
    except (yaml.YAMLError, omegaconf_errors.OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"override {word!r} does not parse: {reason}") from error


def _merge(tree: DictConfig, layer: DictConfig, origin: str) -> DictConfig:
    """One layer over another; an unknown key names the nearest known one."""
    _check_sections(layer, origin)
    for name in sorted(OmegaConf.missing_keys(layer)):
        raise ValueError(f"{name} in {origin} is '???', which stands for no value; give it one")
    try:
        merged = OmegaConf.merge(tree, layer)
    except omegaconf_errors.ConfigKeyError as error:
        unknown = _first_unknown(OmegaConf.to_container(layer)) or str(error.full_key)
        cure = explain(unknown) or f"the nearest known key is {_nearest_key(unknown)!r}"
        raise ValueError(f"unknown key {unknown!r} in {origin}; {cure}") from error
    except (omegaconf_errors.OmegaConfBaseException, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        where = getattr(error, "full_key", None) or "a section"
        raise ValueError(f"{where} in {origin}: {reason}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _check_sections(layer: DictConfig, origin: str) -> None:
    """Refuse a section that is no mapping and rewards that are no list of mappings."""
    given = OmegaConf.to_container(layer)
    assert isinstance(given, dict)
    for section in fields(Config):
        value = given.get(section.name, {})
        if section.name != "rewards":
            if not isinstance(value, dict):
                raise ValueError(
                    f"{section.name} in {origin} is {value!r}; a section holds keys, e.g. "
                    f"{section.name}: {{key: value}}"
                )
        elif value != {} and not (
            isinstance(value, list) and all(isinstance(reward, dict) for reward in value)
        ):
            raise ValueError(
                f"rewards in {origin} is {value!r}; write a list, e.g. rewards=[{{path: "
                "exact_match}]"
            )


def _first_unknown(layer: Any, prefix: str = "") -> str | None:
    """The first leaf of `layer` that is no key of the tree, by its full name."""
    rewards = {f"rewards.{item.name}" for item in fields(RewardConfig)}
    for name, value in layer.items():
        full = f"{prefix}{name}"
        if full == "rewards" and isinstance(value, list):
            found = [_first_unknown(reward, "rewards.") for reward in value]
            if any(found):
                return next(filter(None, found))
        elif full not in known_keys() and full not in rewards:
            if not isinstance(value, dict):
                return full
            if (inner := _first_unknown(value, f"{full}.")) is not None:
                return inner
    return None


def _nearest_key(unknown: str) -> str:
    """The known key with the most alike name, comparing whole names and last parts."""

    def likeness(name: str) -> float:
        whole = difflib.SequenceMatcher(None, unknown, name).ratio()
        last = difflib.SequenceMatcher(None, unknown.split(".")[-1], name.split(".")[-1]).ratio()
        return whole + last

    rewards = [f"rewards.{item.name}" for item in fields(RewardConfig)]
    return max([*known_keys(), *rewards], key=likeness)


def to_yaml(config: Config) -> str:
    """The whole tree as YAML, every default spelled out."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
