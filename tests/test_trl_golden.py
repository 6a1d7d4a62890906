"""Losses against numbers that TRL's own trainer computed, and against TRL itself where installed.

`golden_trl.json` says how its configurations are to be read; `_ours` is that reading. Cases marked
`differs_by_rule` follow a convention that this project knowingly does not share: they are compared
with a reference in plain loops that knows both conventions and is judged by all other cases.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch

from megagrpo.algo.corrections import off_policy_keep
from megagrpo.algo.entropy import entropy_threshold, high_entropy_tokens
from megagrpo.algo.losses import LossCounts, policy_loss
from megagrpo.algo.settings import resolve_loss_defaults
from megagrpo.parallel import platform

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_trl.json").read_text())
SAME = [case for case in GOLDEN["cases"] if "differs_by_rule" not in case]
OTHER = [case for case in GOLDEN["cases"] if "differs_by_rule" in case]
CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
WINDOW = ("dapo", "cispo", "vespo")  # their token count is num_items_in_batch


def _name(case):
    return f"{case['config']['loss_type']}-{case['seed']}"


def _config(case):
    return SimpleNamespace(**(GOLDEN["defaults"] | case["config"]))


def _wide(rows):
    return torch.tensor(rows, dtype=torch.float64)


def _settings(config):
    name = config.loss_type
    given = {"level": config.importance_sampling_level, "beta": config.beta}
    if config.beta:  # without KL the flag has no effect and is refused
        given["unbiased_kl"] = config.use_bias_correction_kl
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if name in CLIPPED:
        given |= {"eps_low": config.epsilon, "eps_high": high, "delta": config.delta}
    elif name == "cispo":
        given["cap"] = high
    elif name == "sapo":  # TRL holds the temperatures as float32 numbers
        pair = (config.sapo_temperature_pos, config.sapo_temperature_neg)
        given["tau_positive"], given["tau_negative"] = torch.tensor(pair).double().tolist()
    else:
        given["gamma_positive"] = (config.vespo_k_pos, config.vespo_lambda_pos)
        given["gamma_negative"] = (config.vespo_k_neg, config.vespo_lambda_neg)
    return resolve_loss_defaults(name, entropy_coef=config.entropy_coef, **given)


def _counts(config, mask):
    tokens = int(mask.sum()) * config.grad_accum
    if config.loss_type in WINDOW:  # the tokens that the case itself names, else those it shows
        assert config.grad_accum == config.steps_per_generation, "a factor that no case has"
        tokens = (config.num_items_in_batch or int(mask.sum())) // config.num_processes
    sequences = int((mask.sum(1) > 0).sum()) * config.grad_accum
    return LossCounts(tokens, sequences, config.max_completion_length or 1)


def _ours(case):
    """(loss, gradient [B, S]) by megagrpo.algo."""
    config, mask = _config(case), torch.tensor(case["mask"]).bool()
    leaf = _wide(case["logps"]).requires_grad_()
    rows, width = leaf.shape
    place = {
        "mask": mask,
        "sequence": torch.arange(rows)[:, None].expand(rows, width),
        "num_sequences": rows,
    }
    advantages, old = _wide(case["advantages"]), _wide(case["old_logps"])
    options = {}
    if config.sampling_ratio is not None:
        options["rollout_weights"] = _wide(config.sampling_ratio).expand(rows, width)
    if config.off_policy_mask_threshold is not None:
        options["keep"] = off_policy_keep(
            logprobs=leaf,
            rollout_logprobs=old,
            advantages=advantages,
            threshold=config.off_policy_mask_threshold,
            **place,
        )
    if config.entropies is not None:
        options["entropy"] = entropies = _wide(config.entropies)
    if config.top_entropy_quantile < 1:
        threshold = entropy_threshold(entropies[mask], 1 - config.top_entropy_quantile)
        options["token_keep"] = high_entropy_tokens(
            entropies=entropies, mask=mask, threshold=threshold
        )
    output = policy_loss(
        name=config.loss_type,
        logprobs=leaf,
        old_logprobs=old,
        advantages=advantages,
        counts=_counts(config, mask),
        settings=_settings(config),
        ref_logprobs=_wide(case["ref_logps"]),
        **options,
        **place,
    )
    output.loss.backward()
    return output.loss.item(), leaf.grad


@pytest.mark.parametrize("case", SAME, ids=_name)
def test_loss_and_gradient_equal_those_of_trl(case):
    """Every case of every loss to 1e-9, sapo included: its temperatures are given as float32."""
    loss, grad = _ours(case)
    assert loss == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(grad, _wide(case["grad"]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", OTHER, ids=_name)
def test_cases_that_differ_by_rule_follow_the_rule(case):
    """LOSS-6 (rule 4): rows without a token leave the number of sequences. OFF-14 (rule 5): the
    rollout ratio of a masked token stays out of vespo's product. LOSS-22: padding stays out of
    luspo's mean, as it does in the published code of TRL 1.16 too."""
    loss, grad = _ours(case)
    if _config(case).loss_type == "vespo":
        theirs, wanted = (_vespo_in_loops(case, masked_ratios=flag) for flag in (True, False))
        assert theirs[0] == pytest.approx(case["loss"], abs=1e-9), "the loops judge nothing"
        assert abs(theirs[0] - wanted[0]) > 1e-4
        assert loss == pytest.approx(wanted[0], abs=1e-9)
        torch.testing.assert_close(grad, wanted[1], atol=1e-9, rtol=0)
        return
    factor = len(case["mask"]) / sum(any(row) for row in case["mask"])
    assert loss == pytest.approx(factor * case["loss"], abs=1e-9)
    torch.testing.assert_close(grad, factor * _wide(case["grad"]), atol=1e-9, rtol=0)


def _vespo_in_loops(case, *, masked_ratios):
    """(loss, gradient) of vespo, one sequence and one token at a time, in plain numbers."""
    config = _config(case)
    total, tokens = 0.0, config.num_items_in_batch or sum(map(sum, case["mask"]))
    grad = torch.zeros(len(case["mask"]), len(case["mask"][0]), dtype=torch.float64)
    columns = (case["logps"], case["old_logps"], case["ref_logps"], case["mask"])
    for row, (logps, olds, refs, mask) in enumerate(zip(*columns, strict=True)):
        advantage, at = case["advantages"][row], [t for t, flag in enumerate(mask) if flag]
        log_w = sum(logps[t] - olds[t] for t in at)
        ratios = config.sampling_ratio[row]
        if len(ratios) == 1:
            ratios = ratios * len(mask)
        log_w += sum(math.log(r) for t, r in enumerate(ratios) if masked_ratios or mask[t])
        k, lam = (config.vespo_k_pos, config.vespo_lambda_pos)
        if advantage < 0:
            k, lam = (config.vespo_k_neg, config.vespo_lambda_neg)
        phi = math.exp(lam + k * log_w - lam * math.exp(log_w))
        drift = sum(olds[t] - logps[t] for t in at) / max(len(at), 1)
        if advantage < 0 and drift > config.off_policy_mask_threshold:
            phi = 0.0
        for t in at:
            delta = refs[t] - logps[t]
            total += -phi * advantage * logps[t] + config.beta * (math.exp(delta) - delta - 1)
            grad[row, t] = -phi * advantage + config.beta * (1 - math.exp(delta))
    return total / tokens, grad / tokens


def test_no_case_of_the_file_is_left_out():
    assert (len(SAME), len(OTHER)) == (63, 17)
    assert {case["config"]["loss_type"] for case in SAME} == {*CLIPPED, *WINDOW, "sapo"}


# TRL itself, where the extra `oracle` is installed


@pytest.fixture(scope="module")
def trl_loss():
    """TRL's `_compute_loss` of one case: (loss, gradient). Skipped without TRL."""
    platform.mask_broken_media_packages()
    reason = "TRL is not installed (pip install 'megagrpo[oracle]')"
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason=reason).GRPOTrainer

    def loss(case):
        leaf = _wide(case["logps"]).requires_grad_()
        stub = _trainer_stub(trainer, _config(case), leaf)
        value = trainer._compute_loss(stub, None, _trl_inputs(case, _config(case)))
        value.backward()
        return value.item(), leaf.grad

    return loss


def _trainer_stub(trainer, config, leaf):
    """What `_compute_loss` reads of its trainer; the model is the leaf of log-probs."""
    entropies = torch.zeros_like(leaf) if config.entropies is None else _wide(config.entropies)
    accelerator = SimpleNamespace(
        num_processes=config.num_processes,
        sync_gradients=False,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        pad_across_processes=lambda value, dim, pad_index: value,
    )
    stub = SimpleNamespace(
        **vars(config),
        args=config,
        epsilon_low=config.epsilon,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        use_vllm=config.sampling_ratio is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=config.grad_accum,
        _entropy_bonus_enabled=config.entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, entropies, None),
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
    )
    stub.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    stub.max_completion_length = config.max_completion_length or 1
    stub.get_high_entropy_mask = MethodType(trainer.get_high_entropy_mask, stub)
    return stub


def _trl_inputs(case, config):
    mask = torch.tensor(case["mask"])
    prompt = torch.ones(len(mask), 1, dtype=torch.int64)
    tokens = config.num_items_in_batch or int(mask.sum())
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": _wide(case["advantages"]),
        "old_per_token_logps": _wide(case["old_logps"]),
        "ref_per_token_logps": _wide(case["ref_logps"]),
        "num_items_in_batch": torch.tensor(float(tokens), dtype=torch.float64),
    }
    if config.sampling_ratio is not None:
        inputs["importance_sampling_ratio"] = _wide(config.sampling_ratio)
    return inputs


def test_the_golden_file_is_what_trl_computes(trl_loss):
    for case in GOLDEN["cases"]:
        loss, grad = trl_loss(case)
        assert loss == pytest.approx(case["loss"], abs=1e-12), _name(case)
        torch.testing.assert_close(grad, _wide(case["grad"]), atol=1e-12, rtol=0)


def _random_case(name, seed):
    """A case of the golden form without what differs by rule, with every option in turn."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    rows, width = 2 + seed % 3, 3 + seed % 4
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    logps = -uniform(0.05, 2.5, rows, width)
    level = "token" if name == "vespo" or seed % 2 else "sequence"
    config = {"loss_type": name, "importance_sampling_level": level, "epsilon": 0.21}
    config["epsilon_high"] = 1.7 if name == "cispo" else 0.34
    config |= {"max_completion_length": 11, "grad_accum": 1 + seed % 3}
    config["steps_per_generation"] = config["grad_accum"]
    if name in CLIPPED and seed % 5 == 0:
        config["delta"] = 1.6
    if seed % 3:
        config |= {"beta": 0.07, "use_bias_correction_kl": seed % 2 == 0}
    if seed % 4 == 0:
        ratios = uniform(0.6, 1.6, rows, width)
        config["sampling_ratio"] = torch.where(mask, ratios, 1.0).tolist()
    if seed % 4 == 1:
        config["off_policy_mask_threshold"] = 0.05
    config["entropies"] = uniform(0.0, 3.0, rows, width).tolist()
    if seed % 2 == 0 and int(mask.sum()) > 1:
        config["top_entropy_quantile"] = 0.37
    elif name == "bnpo" or (name in WINDOW and config["grad_accum"] == 1):
        config["entropy_coef"] = 0.02  # TRL's bonus is a token mean, whatever the loss
    return {
        "seed": seed,
        "config": config,
        "logps": logps.tolist(),
        "old_logps": (logps + uniform(-0.5, 0.5, rows, width)).tolist(),
        "ref_logps": (logps + uniform(-0.5, 0.5, rows, width)).tolist(),
        "advantages": uniform(-2.0, 2.0, rows).tolist(),
        "mask": mask.int().tolist(),
    }


@pytest.mark.parametrize("name", [*CLIPPED, *("cispo", "vespo"), "sapo"])
def test_random_cases_equal_trls_own_code(name, trl_loss):
    """LOSS-23's mask included: TRL's quantile is global too, here over the one micro-batch."""
    for seed in range(40):
        case = _random_case(name, seed)
        loss, grad = _ours(case)
        wanted, wanted_grad = trl_loss(case)
        assert loss == pytest.approx(wanted, abs=1e-9), seed
        torch.testing.assert_close(grad, wanted_grad, atol=1e-9, rtol=0)
