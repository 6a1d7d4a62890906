"""The `algorithm` section of the tree: loss, advantages, KL, corrections and their alarm."""

from dataclasses import dataclass

from megagrpo.config_fields import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, key


@dataclass(frozen=True)
class KLConfig:
    """KL to the reference in the loss."""

    beta: float = key(0.0, "weight of the KL term", first=True)
    estimator: str = key("k3", "per-token estimator", choices=("k1", "k2", "k3", "low_var_kl"))


@dataclass(frozen=True)
class CorrectionConfig:
    """Importance weights between the trainer's and the engine's log-probs."""

    mode: str = key(
        "token_truncate",
        "form of the rollout correction",
        choices=(
            "none",
            "token_truncate",
            "token_mask",
            "sequence_truncate",
            "sequence_mask",
            "geometric_mask",
        ),
    )
    cap: float | None = key(
        None,
        "upper bound of the weight, inclusive; null: token_truncate 2, token_mask 5, sequence_* 3, "
        "geometric_mask 1.01",
        within=POSITIVE,
    )
    low: float | None = key(
        None,
        "lower bound, inclusive; null: token_mask 0.5, geometric_mask 0.99, else none",
        within=NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class MismatchConfig:
    """Alarm on mean |old - rollout| log-prob; null thresholds follow the dtype."""

    warn: float | None = key(
        None, "warn above this many nats; 0.05 in bfloat16, 1e-4 in float32", within=NOT_NEGATIVE
    )
    stop: float | None = key(
        None, "end the run above this; 0.1 in bfloat16, 1e-3 in float32", within=NOT_NEGATIVE
    )
    patience: int = key(2, "consecutive steps over `stop` that end the run", within=AT_LEAST_ONE)


LOSSES = (
    "grpo",
    "bnpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "luspo",
    "cispo",
    "cispo_relative",
    "sapo",
    "vespo",
)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The loss; null takes the chosen loss's own default, shown in the resolved config."""

    loss: str = key("grpo", "policy loss", choices=LOSSES, first=True)
    aggregation: str | None = key(
        None,
        "how token terms become one number",
        choices=(
            None,
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
        ),
    )
    eps_low: float | None = key(None, "lower clip distance of the ratio", first=True)
    eps_high: float | None = key(None, "upper clip distance of the ratio", first=True)
    cap: float | None = key(None, "cispo only: absolute cap of the ratio; null is 5")
    delta: float | None = key(None, "bound of the unclipped ratio from above; null is none")
    dual_clip: float | None = key(None, "bound c >= 1 on the loss of A < 0: -c A; null is none")
    normalize: str | None = key(None, "advantage scale", choices=(None, "std", "none", "batch"))
    baseline: str = key("mean", "advantage baseline", choices=("mean", "leave_one_out"))
    advantage_clip: float | None = key(None, "bound on |advantage|; null is none", within=POSITIVE)
    kl: KLConfig = key(KLConfig, "KL to the reference")
    correction: CorrectionConfig = key(CorrectionConfig, "rollout correction")
    mismatch: MismatchConfig = key(MismatchConfig, "rollout/trainer mismatch alarm")
