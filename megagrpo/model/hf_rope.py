"""Rotary settings of a `config.json`: base and scaling, wherever the config keeps them.

transformers 4 has rope_theta beside the other fields and rope_scaling as a sub-object; version 5
has all of it in rope_parameters; Gemma 3 has one such object per kind of layer, or two fields.
Places that contradict each other are refused. Left out: the frequencies themselves (`build.py`).
"""

from megagrpo import log
from megagrpo.model.hf_families import Family
from megagrpo.model.hf_fields import Fields, integer, number
from megagrpo.types import RopeScaling

LAYER_KINDS = ("full_attention", "sliding_attention")


def rotary(
    config: Fields, family: Family, *, yarn: bool = False
) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of a model whose layers share them.

    Raises ValueError for contradictions and for a type that is not built (yarn unless `yarn`).
    """
    sections = _sections(config)
    base = _theta([config, *sections], "rope_theta", family.rope_theta, family.name)
    return base, _scaling(sections, yarn)


def rotary_by_kind(config: Fields, family: Family) -> tuple[float, RopeScaling | None, float]:
    """(base, scaling, base of the layers with a window) of Gemma 3."""
    wide, narrow = ([_object(config, key, kind) for key in _present(config)] for kind in (0, 1))
    if config.get("rope_parameters") and not _by_kind(config["rope_parameters"]):
        raise ValueError(f"rope_parameters={config['rope_parameters']!r} has no {LAYER_KINDS}")
    if config.get("rope_scaling") is not None and not _by_kind(config["rope_scaling"]):
        wide.append(_object(config, "rope_scaling", None))
    scaling = _scaling(wide, yarn=False)
    if _scaling(narrow, yarn=False) is not None:
        raise ValueError("rope_parameters scale layers with a window; that is not supported")
    base = _theta([config, *wide], "rope_theta", family.rope_theta, family.name)
    local = {"rope_theta": config.get("rope_local_base_freq")}
    return base, scaling, _theta([local, *narrow], "rope_theta", 1e4, f"{family.name} (window)")


def _present(config: Fields) -> list[str]:
    return [key for key in ("rope_scaling", "rope_parameters") if _by_kind(config.get(key))]


def _by_kind(section: object) -> bool:
    return isinstance(section, dict) and any(isinstance(v, dict) for v in section.values())


def _object(config: Fields, key: str, kind: int | None) -> Fields:
    section = config[key]
    if kind is not None:
        unknown = sorted(set(section) - set(LAYER_KINDS))
        if unknown:
            raise ValueError(f"{key}.{unknown[0]} is not known; {', '.join(LAYER_KINDS)} are")
        section = section.get(LAYER_KINDS[kind]) or {}
    if not isinstance(section, dict):
        raise ValueError(f"{key}={section!r} is no object")
    if section.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(f"{key}.partial_rotary_factor is not supported")
    return section


def _sections(config: Fields) -> list[Fields]:
    """The rotary sub-objects that are present."""
    sections = []
    for key in ("rope_scaling", "rope_parameters"):
        if _by_kind(config.get(key)):
            raise ValueError(f"{key}={config[key]!r}: rotary settings per layer type not supported")
        if config.get(key) is not None:
            sections.append(_object(config, key, None))
    return sections


def _theta(places: list[Fields], key: str, default: float, whose: str) -> float:
    found = {number(place, key) for place in places if place.get(key) is not None}
    if len(found) > 1:
        raise ValueError(f"{key} is given with different values: {sorted(found)}")
    if found:
        return found.pop()
    log.warn(f"config.json has no {key}; {whose}'s documented default {default} is used")
    return default


def _scaling(sections: list[Fields], yarn: bool) -> RopeScaling | None:
    kinds = {"linear": _linear, "llama3": _llama3} | ({"yarn": _yarn} if yarn else {})
    scalings = []
    for section in sections:
        kind = section.get("rope_type", section.get("type", "default"))
        if kind in ("default", None):
            continue
        if kind not in kinds:
            known = ", ".join(repr(name) for name in ("default", *kinds))
            raise ValueError(f"rope type {kind!r} is not supported; {known} are")
        scalings.append(kinds[kind](section))
    if len(set(scalings)) > 1:
        raise ValueError("rope_scaling and rope_parameters contradict each other")
    return scalings[0] if scalings else None


def _linear(section: Fields) -> RopeScaling:
    return RopeScaling(kind="linear", factor=number(section, "factor"))


def _llama3(section: Fields) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=number(section, "factor"),
        low_freq_factor=number(section, "low_freq_factor"),
        high_freq_factor=number(section, "high_freq_factor"),
        original_max_positions=integer(section, "original_max_position_embeddings"),
    )


def _yarn(section: Fields) -> RopeScaling:
    """As transformers reads it: the two mscale count for cosine and sine only if both are given."""
    if section.get("attention_factor") is not None or section.get("truncate") is False:
        raise ValueError(f"{section}: yarn with attention_factor or truncate=false not supported")
    given = {key: section.get(key) or 0 for key in ("mscale", "mscale_all_dim")}
    if bool(given["mscale"]) != bool(given["mscale_all_dim"]) and given["mscale"] != 1:
        raise ValueError(f"rope type 'yarn' with {given} is not supported; give both or none")
    return RopeScaling(
        kind="yarn",
        factor=number(section, "factor"),
        original_max_positions=integer(section, "original_max_position_embeddings"),
        beta_fast=number(section, "beta_fast", 32.0),
        beta_slow=number(section, "beta_slow", 1.0),
        mscale=number(given, "mscale") if given["mscale"] else 1.0,
        mscale_all_dim=float(given["mscale_all_dim"]),
    )
