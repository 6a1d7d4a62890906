"""Settings of the policy losses and the defaults that each loss brings along.

They stand apart from the formulas because a null setting means "what this loss is published with",
and because a setting that the chosen loss never reads must be refused before anything starts.
Left out: where the numbers come from (config.py) and everything that depends on data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megagrpo.algo.advantages import NORMALIZE_NAMES
from megagrpo.algo.kl import ESTIMATORS

AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    "prompt-mean": "prompt-mean",
    "grpo": "seq-mean-token-mean",
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""verl's names, and TRL's names of losses, to the five forms; any loss may use any of them."""


@dataclass(frozen=True)
class LossSettings:
    """Numbers of one loss, null where it has no use for one; made by `resolve_loss_defaults`."""

    aggregation: str  # a value of AGGREGATIONS
    level: str = "token"  # ratio per "token", or per "sequence" (geometric mean of its tokens)
    eps_low: float | None = None  # the ratio is clipped below 1 - eps_low
    eps_high: float | None = None  # and above 1 + eps_high
    cap: float | None = None  # cispo: absolute cap of the ratio
    delta: float | None = None  # the unclipped ratio is bounded from above
    dual_clip: float | None = None  # bound c on the loss of A < 0: at most -c A
    tau_positive: float | None = None  # sapo: temperature of the gate for A > 0
    tau_negative: float | None = None  # sapo: for A <= 0
    gamma_positive: tuple[float, float] | None = None  # vespo: (k, lambda) for A >= 0
    gamma_negative: tuple[float, float] | None = None  # vespo: for A < 0
    beta: float = 0.0  # coefficient of the KL to the reference, in the loss
    kl_estimator: str = "k3"  # a key of kl.ESTIMATORS
    unbiased_kl: bool = False  # multiply the estimator by the ratio, with its gradient
    entropy_coef: float = 0.0  # bonus: this much entropy is subtracted from the loss
    normalize: str = "std"  # what advantages.group_advantages is to do for this loss


@dataclass(frozen=True)
class LossDefaults:
    """What a loss brings along, and which optional settings it reads."""

    settings: LossSettings
    reads: frozenset[str]  # of OPTIONAL
    levels: tuple[str, ...] = ("token", "sequence")
    corrections: str = "any"  # rollout correction modes: "any", or those that start with this


OPTIONAL = (
    "eps_low",
    "eps_high",
    "cap",
    "delta",
    "dual_clip",
    "tau_positive",
    "tau_negative",
    "gamma_positive",
    "gamma_negative",
)
"""Settings that some losses read and others must refuse."""

_CLIP = frozenset({"eps_low", "eps_high", "delta", "dual_clip"})

_LIMITS = {
    "eps_low": (0.0, 1.0),
    "eps_high": (0.0, math.inf),
    "cap": (0.0, math.inf),
    "delta": (0.0, math.inf),
    "dual_clip": (1.0, math.inf),
    "tau_positive": (0.0, math.inf),
    "tau_negative": (0.0, math.inf),
    "gamma_positive": (0.0, math.inf),
    "gamma_negative": (0.0, math.inf),
    "beta": (0.0, math.inf),
    "entropy_coef": (-math.inf, math.inf),  # below 0 it is a penalty
}

LOSS_DEFAULTS: dict[str, LossDefaults] = {
    "grpo": LossDefaults(LossSettings("seq-mean-token-mean", eps_low=0.2, eps_high=0.2), _CLIP),
    "bnpo": LossDefaults(LossSettings("token-mean", eps_low=0.2, eps_high=0.2), _CLIP),
    "dapo": LossDefaults(LossSettings("token-mean", eps_low=0.2, eps_high=0.28), _CLIP),
    "dr_grpo": LossDefaults(
        LossSettings("seq-mean-token-sum-norm", eps_low=0.2, eps_high=0.2, normalize="none"), _CLIP
    ),
    "gspo": LossDefaults(
        LossSettings("seq-mean-token-mean", level="sequence", eps_low=3e-4, eps_high=4e-4),
        _CLIP,
        levels=("sequence",),
    ),
    "luspo": LossDefaults(
        LossSettings("seq-mean-token-sum", level="sequence", eps_low=0.2, eps_high=0.2), _CLIP
    ),
    "cispo": LossDefaults(LossSettings("token-mean", cap=5.0), frozenset({"cap"})),
    "cispo_relative": LossDefaults(
        LossSettings("token-mean", eps_high=0.2), frozenset({"eps_high"})
    ),
    "sapo": LossDefaults(
        LossSettings("seq-mean-token-mean", tau_positive=1.0, tau_negative=1.05),
        frozenset({"tau_positive", "tau_negative"}),
    ),
    "vespo": LossDefaults(
        LossSettings("token-mean", gamma_positive=(2.0, 3.0), gamma_negative=(3.0, 2.0)),
        frozenset({"gamma_positive", "gamma_negative"}),
        levels=("token",),
        corrections="token_",
    ),
}


def aggregation_name(name: str) -> str:
    """One of the five forms under verl's name; raises ValueError listing the names."""
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregation {name!r} is unknown; use one of {list(AGGREGATIONS)}")
    return AGGREGATIONS[name]


def resolve_loss_defaults(
    name: str,
    *,
    aggregation: str | None = None,
    level: str | None = None,
    normalize: str | None = None,
    eps_low: float | None = None,
    eps_high: float | None = None,
    cap: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
    tau_positive: float | None = None,
    tau_negative: float | None = None,
    gamma_positive: Sequence[float] | None = None,
    gamma_negative: Sequence[float] | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    correction: str | None = None,
) -> LossSettings:
    """The settings of loss `name`: what is given, and its own default for every null.

    gamma_positive and gamma_negative are pairs (k, lambda). correction: mode of the rollout
    correction, checked only. Raises ValueError for an unknown loss or aggregation, a setting that
    this loss never reads, a level or a correction mode that it does not have, unbiased_kl without
    beta, and numbers out of range. Defaults: DAPO arXiv 2503.14476, Dr.GRPO 2503.20783, GSPO
    2507.18071, CISPO 2506.13585, SAPO 2511.20347.
    """
    if name not in LOSS_DEFAULTS:
        raise ValueError(f"loss {name!r} is unknown; use one of {list(LOSS_DEFAULTS)}")
    defaults = LOSS_DEFAULTS[name]
    if level is not None and level not in defaults.levels:
        raise ValueError(f"level={level!r} is not of loss {name!r}; use one of {defaults.levels}")
    if correction is not None and defaults.corrections != "any":
        _check_correction(name, correction, defaults.corrections)
    given: dict[str, Any] = {
        "eps_low": eps_low,
        "eps_high": eps_high,
        "cap": cap,
        "delta": delta,
        "dual_clip": dual_clip,
        "tau_positive": tau_positive,
        "tau_negative": tau_negative,
        "gamma_positive": gamma_positive,
        "gamma_negative": gamma_negative,
    }
    settings = replace(
        defaults.settings,
        aggregation=aggregation_name(aggregation or defaults.settings.aggregation),
        level=level or defaults.settings.level,
        normalize=normalize or defaults.settings.normalize,
        beta=beta,
        kl_estimator=kl_estimator,
        unbiased_kl=unbiased_kl,
        entropy_coef=entropy_coef,
        **_optional_settings(name, defaults.reads, given),
    )
    _check_values(settings)
    return settings


def _optional_settings(name: str, reads: frozenset[str], given: dict[str, Any]) -> dict[str, Any]:
    """What of `given` is not null; raises ValueError for what loss `name` never reads."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        if key not in reads:
            raise ValueError(
                f"{key}={value} has no effect on loss {name!r}; leave it null (it reads "
                f"{sorted(reads) or 'none of these'})"
            )
        found[key] = _pair(key, value) if key.startswith("gamma") else value
    return found


def _pair(key: str, value: Sequence[float]) -> tuple[float, float]:
    if isinstance(value, str | int | float) or len(value) != 2:
        raise ValueError(f"{key}={value} must be two numbers, (k, lambda), for example (2.0, 3.0)")
    return float(value[0]), float(value[1])


def _check_correction(name: str, correction: str, prefix: str) -> None:
    if correction != "none" and not correction.startswith(prefix):
        raise ValueError(
            f"correction mode {correction!r} cannot enter loss {name!r}; use a {prefix}* mode or "
            "none"
        )


def _check_values(settings: LossSettings) -> None:
    """Names that do not exist, ranges outside of which a setting has no meaning or no effect."""
    if settings.normalize not in NORMALIZE_NAMES:
        raise ValueError(
            f"normalize={settings.normalize!r} is unknown; use one of {NORMALIZE_NAMES}"
        )
    if settings.kl_estimator not in ESTIMATORS:
        raise ValueError(
            f"KL estimator {settings.kl_estimator!r} is unknown; use one of {list(ESTIMATORS)}"
        )
    for key, (low, high) in _LIMITS.items():
        value = vars(settings)[key]
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not (low <= number <= high and math.isfinite(number)):
                raise ValueError(f"{key}={value} is outside {low}..{high}; choose a number inside")
    for key in ("cap", "delta", "tau_positive", "tau_negative"):
        if vars(settings)[key] == 0:
            raise ValueError(f"{key}=0 switches the policy term off; choose a number over 0")
    if settings.unbiased_kl and not settings.beta:
        raise ValueError("unbiased_kl=True has no effect with beta=0; set beta or leave it false")
