"""The `algorithm` section of the tree: loss, advantages, KL, corrections and their alarm."""

from dataclasses import dataclass

from megagrpo.config_fields import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, key


@dataclass(frozen=True)
class KLControllerConfig:
    """How the KL coefficient follows the KL to the reference, averaged over 10 steps."""

    kind: str = key(
        "fixed",
        "rule that moves kl.beta after each step",
        choices=("fixed", "adaptive", "proportional", "pid"),
    )
    target: float | None = key(
        None, "proportional and pid: wanted KL, nats per token", within=POSITIVE
    )
    horizon: float | None = key(
        None,
        "proportional: steps in which an error of the target's size doubles beta; null is 10",
        within=AT_LEAST_ONE,
    )
    kp: float | None = key(None, "pid: gain of the error; null is 0.1", within=NOT_NEGATIVE)
    ki: float | None = key(None, "pid: gain of its sum; null is 0.01", within=NOT_NEGATIVE)
    kd: float | None = key(None, "pid: gain of its change; null is 0", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class KLConfig:
    """KL to the reference in the loss or in the reward."""

    beta: float | None = key(
        None,
        "weight of the KL term; null: 0, with a controller that moves it 0.01",
        within=NOT_NEGATIVE,
        first=True,
    )
    estimator: str = key("k3", "per-token estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    place: str = key(
        "loss",
        "added to the loss, or taken from each reward before advantages",
        choices=("loss", "reward"),
    )
    unbiased: bool = key(
        False, "in the loss: multiply the estimator by the ratio, with its gradient"
    )
    controller: KLControllerConfig = key(KLControllerConfig, "what moves beta")

    @property
    def start_beta(self) -> float:
        """Beta of the first step: a controller that multiplies it cannot leave 0."""
        if self.beta is not None:
            return self.beta
        return 0.0 if self.controller.kind == "fixed" else 0.01


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
    off_policy_threshold: float | None = key(
        None,
        "drop the policy term of a sequence with A < 0 whose mean rollout - current log-prob is "
        "over this many nats; null keeps all",
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
class ColdStartConfig:
    """Imitation of reference answers beside the rollouts, for rewards that are hardly ever met."""

    weight: float = key(
        0.0, "weight of the imitation term before the first step; 0 is off", within=NOT_NEGATIVE
    )
    steps: int | None = key(
        None, "rollouts after which the weight has fallen to 0, linearly", within=AT_LEAST_ONE
    )
    column: str = key("answer_text", "column with the answer to imitate")
    data: str | None = key(
        None, "dataset of prompts and answers to imitate; null: those of data.train"
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
            "prompt-mean",
        ),
    )
    level: str | None = key(
        None,
        "ratio per token, or one per sequence (geometric mean)",
        choices=(None, "token", "sequence"),
    )
    eps_low: float | None = key(None, "lower clip distance of the ratio", first=True)
    eps_high: float | None = key(None, "upper clip distance of the ratio", first=True)
    cap: float | None = key(None, "cispo only: absolute cap of the ratio; null is 5")
    delta: float | None = key(None, "bound of the unclipped ratio from above; null is none")
    dual_clip: float | None = key(None, "bound c >= 1 on the loss of A < 0: -c A; null is none")
    tau_positive: float | None = key(None, "sapo only: gate of A > 0; null is 1.0")
    tau_negative: float | None = key(None, "sapo only: gate of A <= 0; null is 1.05")
    gamma_positive: list[float] | None = key(None, "vespo only: k, lambda of A >= 0; null is 2, 3")
    gamma_negative: list[float] | None = key(None, "vespo only: k, lambda of A < 0; null is 3, 2")
    entropy_coef: float = key(0.0, "entropy bonus in the loss; below 0 a penalty")
    top_entropy_quantile: float = key(
        1.0,
        "share of an optimizer step's tokens, those of highest entropy, that get a policy term",
        within="(0, 1]",
    )
    num_iterations: int = key(1, "passes over a rollout (mu)", within=AT_LEAST_ONE)
    normalize: str | None = key(None, "advantage scale", choices=(None, "std", "none", "batch"))
    combine: str = key(
        "sum_then_normalize",
        "several rewards: one advantage of their sum, or the sum of their advantages",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    baseline: str = key("mean", "advantage baseline", choices=("mean", "leave_one_out"))
    advantage_clip: float | None = key(None, "bound on |advantage|; null is none", within=POSITIVE)
    filter_flat_groups: bool = key(
        False, "drop groups without signal and generate others in their place (DAPO)"
    )
    truncated: str = key(
        "keep",
        "samples cut at rollout.max_response_tokens: trained, or out of loss and statistics",
        choices=("keep", "mask"),
    )
    kl: KLConfig = key(KLConfig, "KL to the reference")
    correction: CorrectionConfig = key(CorrectionConfig, "rollout correction")
    mismatch: MismatchConfig = key(MismatchConfig, "rollout/trainer mismatch alarm")
    cold_start: ColdStartConfig = key(ColdStartConfig, "imitation of reference answers")
