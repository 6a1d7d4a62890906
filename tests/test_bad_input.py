"""Values and files that are wrong in ways a user meets: each is one ValueError that says which.

`test_cli.py` shows that such an error is one line, status 2 and touches nothing.
"""

from pathlib import Path

import pytest

from megagrpo.config import known_keys
from megagrpo.config_file import load_config

REQUIRED = ["model.path=m", "data.train=d", "rewards=[{path: exact_match}]"]


def refusal(*words: str) -> str:
    """What `load_config` says about these overrides."""
    with pytest.raises(ValueError) as caught:
        load_config(None, [*REQUIRED, *words])
    return str(caught.value)


@pytest.mark.parametrize("name", [n for n, item in known_keys().items() if item.type is float])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_none_is_refused_for_every_key(name: str, value: str) -> None:
    """CFG-17: it would surface as a NaN loss or a hang far from its key."""
    message = refusal(f"{name}={value}")
    assert name.split(".")[-1] in message and value in message


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trainer.steps=0", "trainer.steps=0 is outside [1, inf)"),
        ("trainer.save_every=-1", "trainer.save_every=-1 is outside [0, inf)"),
        ("trainer.seed=-1", "trainer.seed=-1 is outside [0, 4294967295]"),
        ("eval.every=-1", "eval.every=-1"),
        ("eval.max_prompts=0", "eval.max_prompts=0"),
        ("optim.lr=-1", "optim.lr=-1.0"),
        ("optim.eps=0", "optim.eps=0.0 is outside (0, inf)"),
        ("optim.min_lr=1", "optim.min_lr=1.0 is over optim.lr"),
        ("rollout.kv_cache_gb=0", "rollout.kv_cache_gb=0.0"),
        ("rollout.gpu_memory_utilization=3", "(0, 1]"),
        ("algorithm.advantage_clip=0", "algorithm.advantage_clip=0.0"),
        ("algorithm.correction.cap=0", "algorithm.correction.cap=0.0"),
        ("rewards=[{path: exact_match, timeout_s: 0}]", "rewards[0].timeout_s=0.0"),
        ("rewards=[{path: exact_match, weight: .nan}]", "rewards[0].weight=nan"),
    ],
)
def test_a_number_outside_its_interval_is_named_with_the_interval(word: str, said: str) -> None:
    assert said in refusal(word)


@pytest.mark.parametrize("key", ["rollout.temperature", "eval.temperature"])
def test_a_temperature_that_vllm_would_raise_in_silence_is_refused(key: str) -> None:
    """LP-14: the engine would sample at 0.01 while the trainer divides by the smaller one."""
    from vllm import sampling_params

    from megagrpo.config_file import LOWEST_TEMPERATURE

    assert sampling_params._MAX_TEMP == LOWEST_TEMPERATURE
    assert f"{key}=0.005" in refusal(f"{key}=0.005")
    load_config(None, [*REQUIRED, f"{key}={LOWEST_TEMPERATURE}"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "has no sections"),
        ("optim: 3\n", "optim in file"),
        ("optim: [1]\n", "is [1]; a section holds keys"),
        ("optim:\n", "optim in file"),
        ("rewards: {path: exact_match}\n", "write a list"),
        ("rewards: exact_match\n", "write a list"),
        ("rewards: [exact_match]\n", "write a list"),
        ("rewards: [{pth: exact_match}]\n", "rewards.path"),
        ("optim: {lr: high}\n", "optim.lr"),
        ("trainer: {steps: 2.5}\n", "trainer.steps"),
        ("optim: {lr: 1}\noptim: {lr: 2}\n", "duplicate key optim"),
        ("model:\n\tpath: x\n", "cannot start any token"),
    ],
)
def test_a_yaml_file_of_the_wrong_form_is_named_with_what_is_wrong(
    text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_config(str(file), REQUIRED)
    assert said in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
