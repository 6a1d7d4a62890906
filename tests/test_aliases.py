"""Keys of verl and TRL: each leads to a key that exists, in files, overrides and the README."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from megagrpo.config import RewardConfig, known_keys
from megagrpo.config_aliases import ABSENT, ALIASES, explain, markdown_rows
from megagrpo.config_file import load_config

KNOWN = set(known_keys()) | {f"rewards.{item.name}" for item in fields(RewardConfig)}
NEEDED = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]"]
THEIRS = [(name, row.ours) for row in ALIASES for name in (*row.verl, *row.trl)]


def refusal(overrides: list[str], path: Path | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(None if path is None else str(path), [*NEEDED, *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_key_of_the_table_exists_and_every_name_stands_in_it_once() -> None:
    assert not {row.ours for row in ALIASES} - KNOWN
    ours = [row.ours for row in ALIASES]
    assert len(set(ours)) == len(ours)
    for system in ("verl", "trl"):
        names = [name for row in ALIASES for name in getattr(row, system)]
        assert len(set(names)) == len(names)
    assert not set(ABSENT) & {name for name, _ in THEIRS}


def test_every_name_of_theirs_leads_to_our_key() -> None:
    for theirs, ours in THEIRS:
        said = explain(theirs)
        assert said is not None and f"{theirs} is {ours!r} here" in said


@pytest.mark.parametrize(("theirs", "ours"), [pair for pair in THEIRS if pair[0] not in KNOWN][::9])
def test_a_pasted_override_names_our_key(theirs: str, ours: str) -> None:
    said = refusal([f"{theirs}=1"])
    assert said.startswith(f"unknown key {theirs!r} in override '{theirs}=1'")
    assert f"is {ours!r} here" in said


@pytest.mark.parametrize(
    ("tree", "ours"),
    [
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, "rollout.group_size"),
        ({"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}}, "optim.lr"),
        ({"data": {"train_batch_size": 64}}, "data.prompts_per_step"),
        ({"trainer": {"total_epochs": 3}}, "trainer.epochs"),
        ({"num_generations": 8, "learning_rate": 1e-6}, "rollout.group_size"),
        ({"rollout": {"n": 8}}, "rollout.group_size"),
        ({"algorithm": {"epsilon_high": 0.28}}, "algorithm.eps_high"),
    ],
)
def test_a_pasted_file_names_our_key(tree: dict, ours: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    said = refusal([], path)
    assert f"in file {path}" in said and f"is {ours!r} here" in said


@pytest.mark.parametrize("theirs", ABSENT)
def test_a_key_that_nothing_here_needs_says_why(theirs: str) -> None:
    said = refusal([f"{theirs}.x=1" if theirs == "critic" else f"{theirs}=1"])
    assert f"there is no such key here: {ABSENT[theirs]}" in said


@pytest.mark.parametrize(
    "theirs",
    ["actor_rollout_ref.rollout.enforce_eager", "actor_rollout_ref.actor.fsdp_config.offload",
     "reward_model.launch_reward_fn_async", "custom_reward_function.other"],
)  # fmt: skip
def test_a_key_of_a_section_of_verl_s_is_never_sent_to_a_key_that_only_looks_alike(
    theirs: str,
) -> None:
    said = refusal([f"{theirs}=1"])
    assert "verl's" in said and "nearest known key" not in said and "is '" not in said


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("optim.bets", "optim.betas"), ("loss.clip_hihg", None), ("rewards_path", None),
     ("reward.path", None), ("model.pth", "model.path")],
)  # fmt: skip
def test_a_typo_is_not_taken_for_somebody_else_s_key(typo: str, nearest: str | None) -> None:
    assert explain(typo) is None
    said = refusal([f"{typo}=1"])
    assert "nearest known key" in said and (nearest is None or nearest in said)


def test_the_readme_shows_the_table() -> None:
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    rows = markdown_rows()
    assert "\n".join(rows) in text
    assert len(rows) == len(ALIASES) + 2
