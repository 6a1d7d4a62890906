"""Controllers of beta, the coefficient of the KL to the reference.

They exist because a good beta depends on how fast the policy drifts. Every controller reads the
mean of the last `WINDOW` values of `kl/ref_k3` (token mean, nats) and acts once per step, so its
state is a few numbers that a checkpoint can hold. What differs from Ziegler et al. and verl: the
horizon counts steps, not samples, and the PID's integral stops where beta would leave its bounds.
Left out: where the KL enters (loss or reward).
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

WINDOW = 10  # steps of the moving average
HIGH, LOW, FACTOR = 0.5, 0.05, 1.5  # adaptive: nats, nats, beta's factor
MAX_ERROR = 0.2  # proportional: bound on the relative error
BETA_MIN, BETA_MAX = 1e-8, 1e3  # a product that reached 0 could never grow again

CONTROLLERS = {
    "fixed": frozenset[str](),
    "adaptive": frozenset[str](),
    "proportional": frozenset({"target", "horizon"}),
    "pid": frozenset({"target", "kp", "ki", "kd"}),
}
"""The controllers and which settings each of them reads besides beta."""

_DEFAULTS = {"horizon": 10.0, "kp": 0.1, "ki": 0.01, "kd": 0.0}
START = 0.01  # beta of the controllers that move it


@dataclass(frozen=True)
class ControllerSettings:
    """One controller's numbers, null where it has no use for one; by `resolve_controller`."""

    kind: str  # a key of CONTROLLERS
    beta: float  # at step 0
    target: float | None = None  # nats of kl/ref_k3
    horizon: float | None = None  # steps in which a constant error of 1 would double beta
    kp: float | None = None  # beta per nat
    ki: float | None = None  # beta per nat and step
    kd: float | None = None  # beta per nat of change in one step


def resolve_controller(
    kind: str,
    *,
    beta: float | None = None,
    target: float | None = None,
    horizon: float | None = None,
    kp: float | None = None,
    ki: float | None = None,
    kd: float | None = None,
) -> ControllerSettings:
    """The settings of controller `kind`: what is given, and its default for every null.

    beta: null is 0 for fixed, 0.01 for the others, which refuse 0. target (nats) has no default;
    horizon 10 steps, kp 0.1, ki 0.01, kd 0. Raises ValueError for an unknown kind, a setting that
    this kind never reads and numbers out of range. Ziegler et al., arXiv 1909.08593, sec. 2.2
    (proportional; its K_beta 0.1 is horizon 10).
    """
    if kind not in CONTROLLERS:
        raise ValueError(f"KL controller {kind!r} is unknown; use one of {list(CONTROLLERS)}")
    given = {"target": target, "horizon": horizon, "kp": kp, "ki": ki, "kd": kd}
    reads = CONTROLLERS[kind]
    for key, value in given.items():
        if value is not None and key not in reads:
            raise ValueError(
                f"{key}={value} has no effect on KL controller {kind!r}; leave it null (it reads "
                f"{sorted(reads) or 'none of these'})"
            )
    chosen = {key: given[key] if given[key] is not None else _DEFAULTS.get(key) for key in reads}
    start = (0.0 if kind == "fixed" else START) if beta is None else beta
    settings = ControllerSettings(kind=kind, beta=start, **chosen)
    _check(settings)
    return settings


def _check(settings: ControllerSettings) -> None:
    """Ranges outside of which a number has no meaning."""
    kind, beta = settings.kind, settings.beta
    lowest = 0.0 if kind == "fixed" else BETA_MIN
    if not lowest <= beta <= BETA_MAX:
        raise ValueError(
            f"beta={beta} is outside {lowest}..{BETA_MAX} for KL controller {kind!r}; it usually "
            f"starts at {START}"
        )
    if "target" in CONTROLLERS[kind] and not 0 < (settings.target or 0) < math.inf:
        raise ValueError(
            f"target={settings.target} of KL controller {kind!r} must be over 0 nats; 0.1 is usual"
        )
    if settings.horizon is not None and not 1 <= settings.horizon < math.inf:
        raise ValueError(f"horizon={settings.horizon} must be at least 1 step; 10 is usual")
    gains = (settings.kp, settings.ki, settings.kd)
    if kind == "pid":
        if any(gain is None or not 0 <= gain < math.inf for gain in gains):
            raise ValueError(f"kp, ki, kd = {gains} must be numbers from 0; 0.1, 0.01, 0 are usual")
        if not any(gains):
            raise ValueError("kp, ki, kd are all 0: a pid without effect; use controller fixed")


class KLController:
    """Holds beta and what is remembered from earlier steps.

    Example: adaptive from 0.01, KL of the first two steps 0.9 and 0.01: beta 0.015 (mean 0.9), then
    0.015 (mean 0.455, between the thresholds).
    """

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.beta = settings.beta
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._integral = 0.0  # pid: sum of errors, nats times steps
        self._last_error: float | None = None  # pid: of the step before

    def update(self, kl: float | None) -> float:
        """One step's `kl/ref_k3` in nats; returns the beta of the next step.

        None, or a number that is not finite (nothing was trained), changes nothing.
        """
        if kl is None or not math.isfinite(kl):
            return self.beta
        self._recent.append(float(kl))
        mean = math.fsum(self._recent) / len(self._recent)
        if self.settings.kind == "adaptive":
            self.beta = _bounded(self.beta * _adaptive_factor(mean))
        elif self.settings.kind == "proportional":
            self.beta = _bounded(self.beta * self._proportional_factor(mean))
        elif self.settings.kind == "pid":
            self.beta = self._pid(mean)
        return self.beta

    def _proportional_factor(self, mean: float) -> float:
        target, horizon = self.settings.target, self.settings.horizon
        assert target is not None and horizon is not None, self.settings
        error = min(max(mean / target - 1.0, -MAX_ERROR), MAX_ERROR)
        return 1.0 + error / horizon

    def _pid(self, mean: float) -> float:
        """start + kp e + ki (sum of e) + kd (e - last e), within 0..BETA_MAX.

        Anti-windup: the sum never goes where start + ki sum alone would leave the bounds, so beta
        moves again as soon as the error turns.
        """
        start, target = self.settings.beta, self.settings.target
        kp, ki, kd = self.settings.kp, self.settings.ki, self.settings.kd
        assert target is not None and kp is not None, self.settings
        assert ki is not None and kd is not None, self.settings
        error = mean - target
        if ki:
            bounds = (0.0 - start) / ki, (BETA_MAX - start) / ki
            self._integral = min(max(self._integral + error, bounds[0]), bounds[1])
        slope = 0.0 if self._last_error is None else error - self._last_error
        self._last_error = error
        output = start + kp * error + ki * self._integral + kd * slope
        return min(max(output, 0.0), BETA_MAX)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: numbers, a list of them and the kind."""
        return {
            "kind": self.settings.kind,
            "beta": self.beta,
            "recent": list(self._recent),
            "integral": self._integral,
            "last_error": self._last_error,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; raises ValueError if another kind took it.

        A fixed beta is the config's, which may be another one by now; a moved one is the state's.
        """
        if state["kind"] != self.settings.kind:
            raise ValueError(
                f"the checkpoint holds KL controller {state['kind']!r}, the config asks for "
                f"{self.settings.kind!r}; resume with the same controller"
            )
        if self.settings.kind != "fixed":
            self.beta = state["beta"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
        self._integral = state["integral"]
        self._last_error = state["last_error"]


def _adaptive_factor(mean: float) -> float:
    if mean > HIGH:
        return FACTOR
    return 1.0 / FACTOR if mean < LOW else 1.0


def _bounded(beta: float) -> float:
    return min(max(beta, BETA_MIN), BETA_MAX)
