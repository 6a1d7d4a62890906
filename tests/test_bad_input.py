"""Values and files that are wrong in ways a user meets: each is one ValueError that says which.

`test_cli.py` shows that such an error is one line, status 2 and touches nothing.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megagrpo.config import known_keys
from megagrpo.config_file import load_config
from megagrpo.data.prompts import load_prompts, load_tokenizer, read_rows
from megagrpo.metrics.reporters import check_packages
from megagrpo.model.hf_config import end_of_sequence_ids, read_shape
from megagrpo.rewards.base import RewardSpec, check_columns, load_reward
from megagrpo.trainer import preflight
from tests.tiny_models import hf_config, make_hf_folder, write_tokenizer

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
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused(key: str) -> None:
    """LP-14: it would sample at 0.01 in silence while the trainer divides by the smaller one."""
    from vllm import SamplingParams

    assert f"{key}=0.005 is outside 0.01..2.0" in refusal(f"{key}=0.005")
    assert f"{key}=2.5 is outside" in refusal(f"{key}=2.5")
    for fine in (0.01, 2.0):
        load_config(None, [*REQUIRED, f"{key}={fine}"])
        assert SamplingParams(temperature=fine).temperature == fine


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": 3}, "layer_types=3"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rope_theta": "abc"}, "rope_theta='abc'"),
        ({"use_sliding_window": True, "sliding_window": "x"}, "sliding_window=x"),
    ],
)
def test_a_config_json_of_wrong_types_names_the_field(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3") | change))
    with pytest.raises(ValueError) as caught:
        read_shape(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("value", [128, -1, "x", [1, None], True, 1.5])
def test_an_end_of_sequence_id_that_the_model_lacks_is_refused(value: Any, tmp_path: Path) -> None:
    """It would reach the engine as a stop id that never comes, or crash it."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match="eos_token_id"):
        end_of_sequence_ids(tmp_path, 1, 128)


def test_a_tokenizer_folder_with_a_config_of_wrong_types_is_one_error(tmp_path: Path) -> None:
    """transformers checks config.json with errors of a class of its own."""
    folder = make_hf_folder(tmp_path / "hf", "qwen3", with_tokenizer=True, sliding_window="x")
    with pytest.raises(ValueError, match="the tokenizer does not load"):
        load_tokenizer(folder)


def test_half_a_surrogate_pair_in_a_prompt_names_the_row(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1>"}\n{"prompt": "\\ud800>"}\n')
    with pytest.raises(ValueError, match="row 1 holds half of a surrogate pair"):
        load_prompts(data, load_tokenizer(tmp_path), max_prompt_tokens=8)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_bytes(b'\xef\xbb\xbf{"prompt": "1>"}\r\n{"prompt": "2>"}\r\n')
    assert read_rows(data) == [{"prompt": "1>"}, {"prompt": "2>"}]


@pytest.mark.parametrize("state", ["{", "{}", "[]", '{"_data_files": 3}', '{"_data_files": [{}]}'])
def test_a_dataset_folder_whose_state_is_broken_is_named(state: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(ValueError, match="state.json does not list the data files"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    "body", ["import sys; sys.exit(3)", "assert 1 == 2, 'no'", "x = (", "1 / 0", "input()"]
)
def test_a_reward_file_that_fails_at_its_top_level_does_not_import(
    body: str, tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"{body}\n")
    with pytest.raises(ValueError, match="does not import"):
        load_reward(f"{file}:score")


def closed(prompts: Any, completions: Any, scale: float = 1.0) -> list[float]:
    return [scale] * len(completions)


def open_ended(prompts: Any, completions: Any, **rest: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "kwargs", "said"),
    [
        (closed, {"scael": 2.0}, "has no parameter 'scael'"),
        (closed, {"prompts": []}, "kwargs.prompts is given by us"),
        (open_ended, {"finished": []}, "kwargs.finished is given by us"),
    ],
)
def test_extra_arguments_that_a_reward_cannot_take_are_refused_at_the_start(
    function: Callable[..., Any], kwargs: dict[str, Any], said: str
) -> None:
    """Every call would raise, so that a whole run would train on nothing."""
    with pytest.raises(ValueError, match=said):
        check_columns([RewardSpec("r", function, kwargs=kwargs)], ["answer"])
    for good, fine in ((closed, {"scale": 2.0}), (open_ended, {"anything": 1})):
        check_columns([RewardSpec("r", good, kwargs=fine)], ["answer"])


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_reporter_whose_package_is_missing_is_refused_at_the_start(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone opens reporters, when the others already wait for it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(ValueError, match=f"log.{package}=.*needs the {package} package"):
        check_packages(tensorboard=True, wandb="project" if package == "wandb" else None)
    check_packages(tensorboard=package != "tensorboard", wandb=None)


def test_a_cache_below_one_sequence_is_refused_and_one_above_is_not(tmp_path: Path) -> None:
    """vLLM would refuse it after every rank has loaded its weights."""
    folder = make_hf_folder(tmp_path / "hf", "qwen3", with_tokenizer=True)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n' * 4)
    words = [f"model.path={folder}", f"data.train={tmp_path}/train.jsonl"]
    words += ["rewards=[{path: exact_match}]", "data.prompts_per_step=4"]
    words += ["rollout.max_prompt_tokens=100", "rollout.max_response_tokens=100"]
    words += [f"trainer.run_dir={tmp_path}/run"]
    # 4 layers x keys and values x 2 heads of 16 numbers of 4 bytes, for 2 blocks of 128 tokens
    needed = 4 * 2 * 2 * 16 * 4 * 256 / 2**30
    preflight.prepare(load_config(None, [*words, f"rollout.kv_cache_gb={needed}"]), 0, 1)
    below = load_config(None, [*words, f"rollout.kv_cache_gb={needed * 0.99}"])
    with pytest.raises(ValueError, match="rollout.kv_cache_gb=.* 200 tokens, which needs 0.00024"):
        preflight.prepare(below, 0, 1)


@pytest.mark.parametrize(
    "word",
    [
        "algorithm.gamma=0.5",  # ADV-22, ADV-23: returns over tokens
        "algorithm.lam=0.9",
        "rollout.partial_rollouts=true",  # ADV-30
        "actor_rollout_ref.rollout.partial_rollout=true",
        "critic.optim.lr=1e-5",  # LP-13: a value head
        "value_head=true",
        "model.lora_rank=8",
        "rollout.multi_turn.enable=true",
    ],
)
def test_a_feature_that_is_not_offered_has_no_key_and_is_refused_by_its_name(word: str) -> None:
    """ADV-22, ADV-23, ADV-30, LP-13: one reward per completion, whole rollouts, no critic."""
    given = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]", word]
    with pytest.raises(ValueError, match=f"unknown key '{word.partition('=')[0]}'"):
        load_config(None, given)
