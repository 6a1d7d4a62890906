"""The command line as a user meets it: a run under torchrun, its report, and every mistake.

A mistake costs one line on stderr, status 2, no process group and no file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megagrpo.cli import main
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent
REWARD = "def ones(completions, **columns):\n    return [float(len(c)) for c in completions]\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    make_hf_folder(folder / "hf", "qwen3", with_tokenizer=True, head_dim=32)
    rows = [{"prompt": f"{a}{b}>", "answer": str(max(a, b))} for a in range(3) for b in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def words(place: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        f"model.path={place}/hf",
        f"data.train={place}/train.jsonl",
        f"rewards=[{{path: '{place}/reward.py:ones'}}]",
        f"trainer.run_dir={run_dir}",
        "trainer.steps=2",
        "rollout.group_size=2",
        "rollout.max_prompt_tokens=8",
        "rollout.max_response_tokens=4",
        "rollout.kv_cache_gb=0.03",
        "data.prompts_per_step=4",
        *more,
    ]


def command(*parts: str, processes: int = 2, timeout: int = 300) -> subprocess.CompletedProcess:
    """`python -m megagrpo.cli PARTS` on `processes` ranks of torchrun, loopback only."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return subprocess.run(
        [sys.executable, *torchrun, f"--nproc-per-node={processes}"]
        + ["-m", "megagrpo.cli", *parts],
        cwd=REPO,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_train_evaluate_and_report_work_from_the_command_line(place: Path, tmp_path: Path) -> None:
    """Two ranks, training TP 2, rollout TP 1, a run folder with everything in it."""
    run_dir = tmp_path / "run"
    held_out = f"data.eval={place}/train.jsonl"
    done = command("train", *words(place, run_dir, "parallel.tp=2", held_out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 2/2  reward" in done.stderr
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "tensorboard", "rollouts", "checkpoints"}
    assert "<svg" in (run_dir / "report.html").read_text()
    trained = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    checkpoint = run_dir / "checkpoints" / "step_2"
    scored = command("evaluate", f"--model={checkpoint}")
    assert scored.returncode == 0, scored.stderr[-3000:]
    shown = [line.split() for line in scored.stdout.splitlines() if line.startswith("val/")]
    found = dict(shown)
    assert len(found) == len(shown), "every rank printed"
    assert float(found["val/train/mean@1"]) == pytest.approx(
        trained[-1]["val/train/mean@1"], abs=1e-4
    )
    assert main(["report", str(run_dir)]) == 0


MISTAKES = {
    "unknown key": (["loss.clip_hihg=0.3"], "unknown key 'loss.clip_hihg'"),
    "unknown key in a section": (["optim.bets=[0, 0]"], "optim.betas"),
    "layout that does not divide": (["parallel.tp=3"], "does not divide the 1 processes"),
    "rollout layout": (["rollout.tp=2"], "rollout.tp=2 does not divide"),
    "missing model folder": (["model.path={tmp}/absent"], "model.path={tmp}/absent"),
    "missing tokenizer": (["model.tokenizer={tmp}/absent"], "absent"),
    "no tokenizer in the folder": (["model.tokenizer={tmp}"], "tokenizer"),
    "missing dataset": (["data.train={tmp}/absent.jsonl"], "absent.jsonl"),
    "empty dataset": (["data.train={tmp}/empty.jsonl"], "empty.jsonl"),
    "broken line": (["data.train={tmp}/broken.jsonl"], "broken.jsonl"),
    "missing column": (["data.prompt_column=question"], "'question'"),
    "column of a reward": (
        ["rewards=[{{path: exact_match}}]", "data.train={tmp}/no_answer.jsonl"],
        "answer",
    ),
    "reward that does not import": (["rewards=[{{path: 'no.such:thing'}}]"], "no.such"),
    "reward that is not there": (["rewards=[{{path: '{place}/reward.py:twos'}}]"], "twos"),
    "no reward": (["rewards=[]"], "rewards is empty"),
    "prompt too long": (
        ["rollout.max_prompt_tokens=2", "data.overlong_prompts=error"],
        "max_prompt_tokens",
    ),
    "every prompt too long": (["rollout.max_prompt_tokens=2"], "max_prompt_tokens"),
    "run folder that is a file": (["trainer.run_dir={tmp}/file"], "trainer.run_dir"),
    "unsupported architecture": (["model.path={tmp}/foo"], "FooForCausalLM"),
    "virtual stages": (["parallel.vpp=2"], "parallel.vpp=2 is not in this version"),
    "context parallel": (["parallel.cp=2"], "parallel.cp=2 is not in this version"),
    "temperature 0": (["rollout.temperature=0"], "rollout.temperature=0"),
    "a filter the trainer lacks": (["rollout.top_p=0.9"], "top_p"),
    "one sample per group": (["rollout.group_size=1"], "group_size=1"),
    "null where a number belongs": (["parallel.tp=null"], "parallel.tp"),
    "sequence over the model's positions": (
        ["rollout.max_response_tokens=600", "data.max_tokens_per_microbatch=4096"],
        "512 positions",
    ),
    "a setting without effect": (["algorithm.cap=3"], "cap"),
    "more prompts than there are": (["data.prompts_per_step=64"], "prompts_per_step=64"),
    "minibatch that does not divide": (["data.minibatch_prompts=3"], "minibatch_prompts=3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_touches_nothing(
    mistake: str, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """CFG-1, CFG-7, CFG-8, CFG-9, CFG-13, CFG-16, CFG-17 and the issue's list of bad input."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1>"}\n{"prompt": \n')
    (tmp_path / "no_answer.jsonl").write_text('{"prompt": "1>"}\n' * 8)
    (tmp_path / "file").write_text("")
    make_hf_folder(tmp_path / "foo", "qwen3", architectures=["FooForCausalLM"])
    run_dir = tmp_path / "run"
    wrong, said = MISTAKES[mistake]
    wrong = [word.format(tmp=tmp_path, place=place) for word in wrong]
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *words(place, run_dir, *wrong)]) == 2
    output = capfd.readouterr()
    lines = [line for line in output.err.splitlines() if "error:" in line]
    assert len(lines) == 1, output.err
    assert said.format(tmp=tmp_path) in lines[0]
    assert "Traceback" not in output.err and output.out == ""
    assert sorted(tmp_path.rglob("*")) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("world", "wrong", "said"),
    [
        (8, ["parallel.pp=8"], "4 layers"),
        (8, ["parallel.tp=8"], "parallel.tp=8 does not divide num_attention_heads=4"),
        (3, ["parallel.tp=3"], "parallel.tp=3 and num_key_value_heads=2"),
        (3, ["rollout.tp=3"], "rollout.tp=3 and num_key_value_heads=2"),
        (2, ["parallel.pp=2", "parallel.first_stage_layers=4"], "without layers"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(
    world: int,
    wrong: list[str],
    said: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """CFG-13."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert main(["train", *words(place, tmp_path / "run", *wrong)]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(("local", "times"), [("0", 1), ("1", 0)])
def test_a_mistake_on_another_host_is_said_by_its_first_rank(
    local: str,
    times: int,
    place: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dataset that is missing on the second host only."""
    for name, value in {"RANK": "8", "LOCAL_RANK": local, "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr("megagrpo.cli.time.sleep", waited.append)
    assert main(["train", *words(place, tmp_path / "run", "data.train=absent.jsonl")]) == 2
    assert capfd.readouterr().err.count("[rank 8] error: ") == times
    assert len(waited) == 1 - times, "who says nothing must not end the one who speaks"


def test_words_stand_before_and_after_options_and_what_is_neither_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.yaml").write_text("optim: {lr: 1.0e-5}\n")
    between = ["train", "model.path=x", "--config", str(tmp_path / "few.yaml")]
    assert main([*between, "data.train=y", "rollout.gruop_size=3"]) == 2
    assert "unknown key 'rollout.gruop_size' in override" in capfd.readouterr().err
    assert main([*between, "data.train=y"]) == 2
    assert "rewards is empty" in capfd.readouterr().err  # both paths were read
    assert main([*between, "data.train=???"]) == 2
    assert "data.train in override 'data.train=???' is '???'" in capfd.readouterr().err
    for wrong in (["train", "a=1", "--confg", "b"], ["report", str(tmp_path), "optim.lr=1"]):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2 and wrong[-1] in capfd.readouterr().err


def test_unwritable_run_folder_is_refused(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """/proc takes no folders, not even from root."""
    assert main(["train", *words(place, Path("/proc/megagrpo/run"))]) == 2
    assert "trainer.run_dir=/proc/megagrpo/run cannot be written" in capfd.readouterr().err


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` shows the first keys, `--help-all` all of them with their meaning."""
    from megagrpo.config import known_keys

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    short = capsys.readouterr().out
    assert "rollout.group_size=8" in short and "optim.eps" not in short
    assert main(["train", "--help-all"]) == 0
    whole = capsys.readouterr().out
    for name, item in known_keys().items():
        assert f"  {name}=" in whole and item.metadata["help"] in whole
