"""Numbers of a step as entries that can be added over micro-batches and ranks, and their names.

A mean travels as (sum, count), so that no mean of means is ever taken; an entry without data is
left out when rendered, never 0 or NaN. Values are copied to floats at once: what happens to a
tensor later does not change what was recorded. No process group here: `merge` takes plain dicts,
in rank order, from whoever gathered them.

Letters: n values, G group size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megagrpo.rewards.shaping import NGRAM, repeated_ngrams
from megagrpo.types import Sample


@dataclass(frozen=True)
class Entry:
    """One metric of one rank. Example: values 1 and 3 as a mean: Entry("mean", 2, 4.0)."""

    kind: str  # "mean", "sum", "min", "max" or "std"
    count: int  # n; 0 means that there is nothing to say
    value: float = 0.0  # sum (mean, sum), extreme (min, max) or mean (std)
    spread: float = 0.0  # std only: sum of squared distances from the mean


Record = dict[str, Entry]


def mean(total: float, count: int) -> Entry:
    """`total / count`; merged by adding both."""
    return Entry("mean", int(count), float(total))


def total(value: float) -> Entry:
    """A count or an amount that adds up."""
    return Entry("sum", 1, float(value))


def mean_of(values: Iterable[float]) -> Entry:
    """The mean of values."""
    listed = [float(value) for value in values]
    return Entry("mean", len(listed), math.fsum(listed))


def min_of(values: Iterable[float]) -> Entry:
    """The smallest value."""
    listed = [float(value) for value in values]
    return Entry("min", len(listed), min(listed, default=0.0))


def max_of(values: Iterable[float]) -> Entry:
    """The largest value."""
    listed = [float(value) for value in values]
    return Entry("max", len(listed), max(listed, default=0.0))


def std_of(values: Iterable[float]) -> Entry:
    """The unbiased standard deviation, two passes in float64; needs two values."""
    listed = [float(value) for value in values]
    if not listed:
        return Entry("std", 0)
    centre = math.fsum(listed) / len(listed)
    return Entry("std", len(listed), centre, math.fsum((v - centre) ** 2 for v in listed))


def merge(records: Sequence[Mapping[str, Entry]]) -> Record:
    """All ranks' entries (or all micro-batches') as one; a name may be missing on some."""
    merged: Record = {}
    for record in records:
        for name, entry in record.items():
            merged[name] = _join(name, merged[name], entry) if name in merged else entry
    return merged


def _join(name: str, one: Entry, two: Entry) -> Entry:
    assert one.kind == two.kind, f"{name} is recorded as {one.kind} and as {two.kind}"
    count = one.count + two.count
    if one.kind in ("mean", "sum"):  # also parts of a sum that bring no count of their own
        return Entry(one.kind, count, one.value + two.value)
    if not one.count or not two.count:
        return one if one.count else two
    if one.kind == "min":
        return Entry("min", count, min(one.value, two.value))
    if one.kind == "max":
        return Entry("max", count, max(one.value, two.value))
    gap = two.value - one.value  # Chan, Golub, LeVeque 1979: no cancellation between the parts
    spread = one.spread + two.spread + gap * gap * one.count * two.count / count
    return Entry("std", count, one.value + gap * two.count / count, spread)


def render(record: Mapping[str, Entry]) -> dict[str, float]:
    """Names to floats; what has no data is left out."""
    rendered = {}
    for name, entry in record.items():
        if entry.count == 0 or (entry.kind == "std" and entry.count < 2):
            continue
        if entry.kind == "mean":
            rendered[name] = entry.value / entry.count
        elif entry.kind == "std":
            rendered[name] = math.sqrt(entry.spread / (entry.count - 1))
        else:
            rendered[name] = entry.value
    return rendered


FATES = ("trained", "filtered", "failed", "truncated", "surplus", "buffered")
"""What can become of a generated sample, exactly one of them each: `counts/FATE` add up."""


def rollout_metrics(samples: Sequence[Sample], fates: Sequence[str] | None = None) -> Record:
    """`reward/*`, `response_length/*`, `prompt_length/*` and the `counts/*` of one rollout.

    Rewards and lengths are those of all generated samples that have not failed, whether they are
    trained or not: they describe the policy. A missing reward leaves only the reward statistics.
    `fates[i]` is what became of sample i, one of FATES (default: failed, trained where rewarded,
    else filtered).
    """
    alive = [sample for sample in samples if not sample.failed]
    rewards = [sample.reward for sample in alive if sample.reward is not None]
    lengths = [len(sample.completion.ids) for sample in alive]
    prompts = [len(sample.prompt.ids) for sample in alive]
    if fates is None:
        fates = [
            "failed" if s.failed else "filtered" if s.reward is None else "trained" for s in samples
        ]
    assert len(fates) == len(samples) and set(fates) <= set(FATES), f"fates {set(fates)}"
    ngrams = [repeated_ngrams(sample.completion.ids, NGRAM) for sample in alive]
    record = {
        "reward/mean": mean_of(rewards),
        "reward/std": std_of(rewards),
        "reward/min": min_of(rewards),
        "reward/max": max_of(rewards),
        "response_length/mean": mean_of(lengths),
        "response_length/min": min_of(lengths),
        "response_length/max": max_of(lengths),
        "response_length/clip_ratio": mean_of(not sample.completion.stopped for sample in alive),
        "prompt_length/mean": mean_of(prompts),
        "prompt_length/max": max_of(prompts),
        "rollout/repetition_share": mean(sum(r for r, _ in ngrams), sum(n for _, n in ngrams)),
        "counts/generated": total(len(samples)),
        **{f"counts/{fate}": total(fates.count(fate)) for fate in FATES},
    }
    for name in dict.fromkeys(name for sample in alive for name in sample.rewards):
        values = (sample.rewards.get(name) for sample in alive)
        record[f"reward/{name}/mean"] = mean_of(v for v in values if v is not None)
    return record | _group_metrics(alive)


def selection_metrics(samples: Sequence[Sample], dropped: Mapping[int, str]) -> Record:
    """Mean length in the groups that are trained and in those of `dropped`, by group number: a
    difference is a bias of what the step was filled with."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for sample in samples:
        if not sample.failed:
            lengths[sample.group in dropped].append(len(sample.completion.ids))
    return {
        "rollout/kept_length_mean": mean_of(lengths[False]),
        "rollout/dropped_length_mean": mean_of(lengths[True]),
    }


def _group_metrics(alive: Sequence[Sample]) -> Record:
    groups: dict[int, list[float]] = {}
    for sample in alive:
        if sample.reward is not None:
            groups.setdefault(sample.group, []).append(sample.reward)
    flat, stds, errors = [], [], []
    for rewards in groups.values():
        largest = max(1.0, max(map(abs, rewards)))
        flat.append(max(rewards) - min(rewards) <= 1e-8 * largest)
        std = std_of(rewards)
        if std.count > 1:
            stds.append(0.0 if flat[-1] else math.sqrt(std.spread / (std.count - 1)))
            errors.append(stds[-1] / math.sqrt(std.count))
    return {
        "reward/zero_variance_share": mean_of(flat),
        "reward/group_std_mean": mean_of(stds),
        "advantage/baseline_noise": mean_of(errors),
    }


_SAMPLES = "samples that have not failed"
_RATED = "rewarded samples"
_TOKENS = "trained tokens of all optimizer steps of the rollout"
_STEPS = "optimizer steps of the rollout"
METRICS: dict[str, tuple[str, str]] = {
    # name: (formula or meaning, denominator; "-" where nothing is divided)
    "reward/mean": ("sum of total rewards", _RATED),
    "reward/std": ("unbiased std of total rewards", f"{_RATED} - 1"),
    "reward/min": ("smallest total reward", "-"),
    "reward/max": ("largest total reward", "-"),
    "reward/NAME/mean": ("sum of one reward, unweighted", "samples that it rated"),
    "reward/zero_variance_share": ("groups with max - min <= 1e-8 max(1, max |r|)", "groups"),
    "reward/group_std_mean": ("sum of the groups' unbiased stds", "groups of at least 2"),
    "reward/kl_paid_mean": ("sum of kl_coef times KL, taken from rewards", "trained samples"),
    "reward/errors": ("samples whose reward raised or gave no number", "-"),
    "reward/timeouts": ("samples whose reward took too long", "-"),
    "reward/workers_replaced": ("worker processes of rewards that hung or died", "-"),
    "advantage/baseline_noise": ("sum of std / sqrt(n) of groups of n", "groups of at least 2"),
    "advantage/mean": ("sum of advantages", _RATED),
    "advantage/std": ("unbiased std of advantages", f"{_RATED} - 1"),
    "advantage/min": ("smallest advantage", "-"),
    "advantage/max": ("largest advantage", "-"),
    "advantage/abs_max": ("largest |advantage|", "-"),
    "advantage/clipped_share": ("advantages at the clip bound", _RATED),
    "actor/loss": ("sum of losses", _STEPS),
    "actor/pg_loss": ("sum of policy terms of the loss", _STEPS),
    "actor/kl_loss": ("sum of KL terms of the loss, before kl_coef", _STEPS),
    "actor/kl_coef": ("weight of the KL term", "-"),
    "actor/bc_loss": ("sum of -log-probs of the step's reference answers, nats", "their tokens"),
    "actor/bc_coef": ("weight of actor/bc_loss in the loss", "-"),
    "actor/entropy_kept_share": ("tokens of highest entropy, which have a policy term", _TOKENS),
    "actor/entropy": ("sum of the policy's token entropy, nats", _TOKENS),
    "actor/clip_low_share": ("tokens whose ratio is clipped from below", _TOKENS),
    "actor/clip_high_share": ("tokens whose ratio is clipped from above", _TOKENS),
    "actor/ppo_kl": ("sum of old_logprobs - logprobs, nats", _TOKENS),
    "actor/grad_norm": ("sum of global gradient norms before clipping", _STEPS),
    "actor/lr": ("learning rate of the last optimizer step", "-"),
    "actor/skipped_steps": ("optimizer steps of the run so far without an update", "-"),
    "kl/ref_k3": ("sum of exp(d) - d - 1 with d = ref_logprobs - logprobs, nats", _TOKENS),
    "kl/ref_k1": ("sum of logprobs - ref_logprobs, nats", _TOKENS),
    "rollout_corr/mean_abs_logprob_diff": ("sum of |old - rollout| log-probs, nats", _TOKENS),
    "rollout_corr/max_abs_logprob_diff": ("largest |old - rollout| log-prob, nats", "-"),
    "rollout_corr/k3_kl": ("sum of exp(d) - d - 1 with d = old - rollout, nats", _TOKENS),
    "rollout_corr/k1_kl": ("sum of rollout - old log-probs, nats", _TOKENS),
    "rollout_corr/ess": ("(sum r)^2 / sum r^2 with r = exp(old - rollout)", _TOKENS),
    "rollout_corr/chi2": ("sum of r^2, minus 1", _TOKENS),
    "rollout_corr/nonfinite_tokens": ("tokens whose log-prob difference is not finite", "-"),
    "rollout_corr/weight_mean": ("sum of rollout weights", _TOKENS),
    "rollout_corr/weight_max": ("largest rollout weight", "-"),
    "rollout_corr/masked_share": ("tokens that the correction zeroes", _TOKENS),
    "rollout_corr/masked_share_positive": ("zeroed tokens of sequences with A > 0", "their tokens"),
    "rollout_corr/masked_share_negative": ("zeroed tokens of sequences with A < 0", "their tokens"),
    "rollout_corr/masked_sequence_share": ("sequences that it zeroes", "trained sequences"),
    "rollout_corr/cut_sequence_share": ("sequences that it cuts", "trained sequences"),
    "rollout_corr/off_policy_share": ("tokens that the off-policy mask drops", _TOKENS),
    "rollout_corr/off_policy_sequence_share": ("sequences that it drops", "trained sequences"),
    "token_mult_prob_error": ("sum of exp |old - rollout|", _TOKENS),
    "response_length/mean": ("sum of sampled tokens, end of sequence included", _SAMPLES),
    "response_length/min": ("fewest sampled tokens", "-"),
    "response_length/max": ("most sampled tokens", "-"),
    "response_length/clip_ratio": ("samples cut at the length limit", _SAMPLES),
    "prompt_length/mean": ("sum of prompt tokens", _SAMPLES),
    "prompt_length/max": ("longest prompt, tokens", "-"),
    "val/NAME/mean@k": ("sum of each prompt's mean reward over k completions", "rated prompts"),
    "val/NAME/pass@k": ("sum of 1 - C(n-c,k)/C(n,k), c of n solved", "prompts with n >= k rated"),
    "val/NAME/maj@k": ("sum of the reward of the most frequent answer", "rated prompts"),
    "val/NAME/count": ("held-out samples that were rated", "-"),
    "val/NAME/failed": ("held-out samples without a reward", "-"),
    "sync/seconds": ("time of the weight sync, slowest rank", "-"),
    "sync/bytes_received_max": ("bytes from other ranks, largest over ranks", "-"),
    "sync/lower_bound_bytes": ("bytes wanted and not yet held, of that rank", "-"),
    "sync/extra_bytes_peak": ("staging memory, largest over ranks, bytes", "-"),
    "sync/version": ("number of the weights that generated", "-"),
    "sync/digest": ("integer sum over the source weights", "-"),
    "perf/tokens_per_second_per_gpu": ("prompt and response tokens per second", "ranks"),
    "perf/step_seconds": ("wall clock of the step", "-"),
    "perf/mfu": ("model FLOPs per second of update, old and ref passes", "ranks x peak FLOP/s"),
    "timing_s/PHASE": ("seconds in a phase of the step, this rank", "-"),
    "memory/peak_allocated_gb": ("peak device memory, largest over ranks, GiB", "-"),
    "memory/rss_gb": ("resident memory of the process, largest over ranks, GiB", "-"),
    "counts/generated": ("sampled completions", "-"),
    "counts/trained": ("samples that reach the loss", "-"),
    "counts/filtered": ("samples of groups without signal, unrated or empty ones", "-"),
    "counts/failed": ("samples whose generation or reward failed", "-"),
    "counts/singleton_groups": ("groups with one valid sample", "-"),
    "counts/missing_rewards": ("samples that no reward rated", "-"),
    "counts/truncated": ("samples removed because they were cut", "-"),
    "counts/surplus": ("samples of good groups beyond need", "-"),
    "counts/buffered": ("samples kept for a later step", "-"),
    "rollout/kept_length_mean": ("sum of sampled tokens in trained groups", _SAMPLES),
    "rollout/dropped_length_mean": ("sum of sampled tokens in dropped groups", _SAMPLES),
    "rollout/repetition_share": ("repeated 4-grams", "4-grams of the sampled tokens"),
}
"""Every metric name of this program; NAME, PHASE and k stand for what the run calls them."""
