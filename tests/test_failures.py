"""What goes wrong while a run is under way: a lost rank, a save that fails, a policy that the
engine does not hold, a run folder that does not belong to the config.
"""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megagrpo import log
from megagrpo.algo.corrections import resolve_correction
from megagrpo.algo.kl_control import KLController, resolve_controller
from megagrpo.algo.settings import resolve_loss_defaults
from megagrpo.config_file import load_config
from megagrpo.model.build import local_parameters
from megagrpo.model.optimizer import LRSchedule, OptimSettings, Trainable, wrap_and_build
from megagrpo.parallel.collectives import RankFailure
from megagrpo.parallel.mcore_repairs import WRITE_QUEUE, fork_write_queue
from megagrpo.trainer import checkpoint as saving
from megagrpo.trainer import manifest
from megagrpo.trainer.batch import AdvantageSettings, CutSettings, make_batch
from megagrpo.trainer.objective import Objective
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.policy import MismatchStop, Policy, PolicySettings
from megagrpo.trainer.preflight import Prepared, prepare
from megagrpo.trainer.scoring import Scoring, score
from megagrpo.types import Completion, Layout, Prompt, Sample
from tests.megatron_toys import Toy, toy_on_rank
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent
REWARD = "def ones(completions, prompts):\n    return [float(len(c)) for c in completions]\n"
ROWS = [{"prompt": f"{a}{b}>", "answer": str(a)} for a in range(3) for b in range(3)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, nine prompts and a reward."""
    folder = tmp_path_factory.mktemp("failures")
    make_hf_folder(folder / "hf", "qwen3", with_tokenizer=True, head_dim=32)
    write_rows(folder / "train.jsonl", ROWS)
    (folder / "reward.py").write_text(REWARD)
    return folder


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words(place: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        f"model.path={place}/hf",
        f"data.train={place}/train.jsonl",
        f"rewards=[{{path: '{place}/reward.py:ones'}}]",
        f"trainer.run_dir={run_dir}",
        "rollout.group_size=2",
        "rollout.max_prompt_tokens=8",
        "rollout.max_response_tokens=4",
        "rollout.kv_cache_gb=0.03",
        "data.prompts_per_step=4",
        "log.tensorboard=false",
        *more,
    ]


# --- a lost rank ---------------------------------------------------------------------------------


@contextmanager
def two_ranks(folder: Path, *parts: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks of the command line, started by hand: no agent of torchrun ends one for the
    other. Their stderr goes to rank_N.err."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"rank_{rank}.err").open("wb") as stderr:
            command = [sys.executable, "-m", "megagrpo.cli", *parts]
            ranks.append(subprocess.Popen(command, cwd=REPO, env=env, stderr=stderr))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("loss", "layout"),
    [(signal.SIGKILL, []), (signal.SIGSTOP, ["parallel.tp=2", "rollout.tp=2"])],
    ids=["killed, dp 2", "stopped, tp 2"],
)
def test_a_lost_rank_ends_the_other_in_time_with_the_phase_named(
    loss: signal.Signals, layout: list[str], place: Path, tmp_path: Path
) -> None:
    """PROC-1; a stopped rank keeps its sockets, so that only time limits of every group help."""
    run_dir, timeout_s = tmp_path / "run", 12
    limits = [f"parallel.timeout_s={timeout_s}", f"rollout.timeout_s={timeout_s}"]
    endless = ["trainer.steps=1000000", *limits, *layout]
    with two_ranks(tmp_path, "train", *words(place, run_dir, *endless)) as ranks:
        lines = run_dir / "metrics.jsonl"
        wait_until(
            lambda: (
                (lines.exists() and lines.read_text().count("\n") >= 2)
                or any(rank.poll() is not None for rank in ranks)
            ),
            240,
        )
        assert [rank.poll() for rank in ranks] == [None, None]
        ranks[1].send_signal(loss)
        assert ranks[0].wait(timeout=timeout_s + 15) == 1
    said = (tmp_path / "rank_0.err").read_text()
    last = [line for line in said.splitlines() if "error: failed in phase" in line]
    assert len(last) == 1, said[-3000:]
    names = ("start", "gen", "adv", "old_log_prob", "ref", "update_actor", "update_weights")
    assert any(f"failed in phase '{name}'" in last[0] for name in names), last[0]


def fork_queue() -> int:
    """The manager behind the results of a save."""
    WRITE_QUEUE.get().put("works")
    assert WRITE_QUEUE.get().get() == "works"
    return WRITE_QUEUE._manager._process.pid


def fork_writer() -> int:
    """A writer that waits for the queue of a dead rank."""

    class Writer:
        @staticmethod
        def write_preloaded_data() -> None:
            signal.pause()

    module = types.ModuleType("filesystem_async")
    module.FileSystemWriterAsync = Writer
    fork_write_queue(module)
    process = multiprocessing.get_context("fork").Process(target=Writer.write_preloaded_data)
    process.start()
    time.sleep(0.5)
    return process.pid


@pytest.mark.parametrize("fork", [fork_queue, fork_writer])
def test_the_processes_that_a_save_forks_die_with_their_rank(fork: Callable[[], int]) -> None:
    """PROC-1: they hold the rank's sockets, so the others would not see the rank's end."""
    told, tell = os.pipe()
    rank = os.fork()
    if rank == 0:
        try:
            os.write(tell, str(fork()).encode())
            signal.pause()
        finally:
            os._exit(1)
    forked = psutil.Process(int(os.read(told, 32)))
    assert forked.ppid() == rank and forked.is_running()
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    wait_until(lambda: not forked.is_running() or forked.status() == "zombie", 10)
    os.close(told)
    os.close(tell)


# --- checkpoints ---------------------------------------------------------------------------------


def fake_checkpoint(run_dir: Path, step: int, prepared: Prepared) -> Path:
    """A complete checkpoint folder without tensors, as far as a start looks at it."""
    folder = run_dir / "checkpoints" / f"step_{step}"
    shutil.copytree(prepared.hf_folder, folder / "hf")
    state = {
        "step": step,
        "sampler": prepared.sampler().state(),
        "prompts": prepared.train.digest(),
        "reference": prepared.origin,
        "kl": {"kind": "fixed"},
    }
    (folder / manifest.STATE).write_text(json.dumps(state))
    (folder / "__0_0.distcp").write_bytes(b"x" * 64)
    manifest.write_manifest(folder)
    return folder


def prepared_for(place: Path, run_dir: Path, *more: str) -> Prepared:
    return prepare(load_config(None, words(place, run_dir, *more)), rank=0, world=1)


def test_the_newest_complete_checkpoint_is_continued(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CKPT-12: by number, not by name; complete ones only, whatever is missing."""
    run_dir = tmp_path / "run"
    prepared = prepared_for(place, run_dir)
    assert prepared.resume_from is None
    for step in (2, 9, 10, 11, 12, 13):
        fake_checkpoint(run_dir, step, prepared)
    folder = run_dir / "checkpoints"
    (folder / "step_11" / manifest.MANIFEST).unlink()
    os.truncate(folder / "step_12" / "__0_0.distcp", 10)
    (folder / "step_13" / manifest.MANIFEST).write_text("[]")
    (folder / "step_9").rename(folder / "tmp_step_14")
    (folder / "step_old").mkdir()
    assert prepared_for(place, run_dir).resume_from == folder / "step_10"
    shutil.rmtree(folder / "step_10")
    assert prepared_for(place, run_dir).resume_from == folder / "step_2"
    shutil.rmtree(folder / "step_2")
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(ValueError, match="none of its checkpoints step_11, step_12, step_13"):
        prepared_for(place, run_dir)
    assert sorted(run_dir.rglob("*")) == before


def refuses(said: str, place: Path, run_dir: Path, *more: str) -> None:
    with pytest.raises(ValueError) as caught:
        prepared_for(place, run_dir, *more)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_of_other_data_seed_or_model_is_not_continued(place: Path, tmp_path: Path) -> None:
    """Known before any process group; the same command is accepted."""
    run_dir = tmp_path / "run"
    fake_checkpoint(run_dir, 2, prepared_for(place, run_dir))
    assert prepared_for(place, run_dir).resume_from == run_dir / "checkpoints" / "step_2"
    write_rows(tmp_path / "fewer.jsonl", ROWS[:-1])
    refuses("prompts in data.train 9", place, run_dir, f"data.train={tmp_path}/fewer.jsonl")
    write_rows(tmp_path / "other.jsonl", [*ROWS[:-1], {"prompt": "9>", "answer": "9"}])
    refuses("data.train or its tokens", place, run_dir, f"data.train={tmp_path}/other.jsonl")
    refuses("data.shuffle_seed 0, this run 7", place, run_dir, "trainer.seed=7")
    refuses("holds a run", place, run_dir, "trainer.resume=never")
    small = {"with_tokenizer": True, "head_dim": 32}
    make_hf_folder(tmp_path / "deep", "qwen3", num_hidden_layers=5, **small)
    refuses("num_layers=4, model.path one of 5", place, run_dir, f"model.path={tmp_path}/deep")
    make_hf_folder(tmp_path / "other", "qwen3", seed=1, **small)
    refuses("reference was", place, run_dir, f"model.path={tmp_path}/other")
    # A trained policy as model.path is fine as long as the reference is the run's own.
    kept = prepared_for(
        place, run_dir, f"model.path={tmp_path}/other", f"reference.path={place}/hf"
    )
    assert kept.resume_from is not None


def trainable_on_rank(folder: Path) -> tuple[Toy, Trainable]:
    toy = toy_on_rank(str(folder), Layout(1))
    return toy, wrap_and_build(toy.chunks, toy.context, OptimSettings(lr=1e-2))


def saves_that_fail(rank: int, folder: Path, run_dir: Path) -> None:
    """Save step 1, change the weights, fail to save step 2 at every stage, load what is left."""
    toy, trainable = trainable_on_rank(folder)
    parameters = local_parameters(trainable.chunks)
    want = {name: value.detach().clone() for name, value in parameters.items()}

    def save(step: int) -> Path:
        return saving.save_checkpoint(
            run_dir,
            step,
            trainable,
            {"step": step},
            hf_folder=folder,
            keep_last=1,
            context=toy.context,
        )

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some file")

    first = save(1)
    with torch.no_grad():
        for value in parameters.values():
            value += 1.0
    for owner, name in (
        (saving, "_start"),
        (saving.torch, "save"),
        (saving.dist_checkpointing, "save"),
        (saving.manifest, "write_manifest"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(RankFailure, match="No space left on device"):
                save(2)
        assert manifest.newest_checkpoint(run_dir) == first, name
    saving.load_checkpoint(first, trainable, toy.context)
    for name, value in local_parameters(trainable.chunks).items():
        assert torch.equal(value, want[name]), name
    second = save(2)
    assert [path.name for path in run_dir.iterdir()] == [second.name]


def test_a_save_that_fails_half_way_leaves_the_only_checkpoint(tmp_path: Path) -> None:
    """CKPT-13: keep 1; and the next good save cleans up."""
    folder = Path(make_hf_folder(tmp_path / "hf", "qwen3"))
    run_ranks(1, saves_that_fail, folder, tmp_path / "checkpoints")


# --- the mismatch alarm --------------------------------------------------------------------------


def policy_on_rank(folder: Path, layout: Layout, *, minibatch: int, warnings: list[str]) -> Any:
    """A policy with limits 0.05 / 0.1 and a maker of batches whose engine is off by `shift`."""
    toy = toy_on_rank(str(folder), layout)
    trainable = wrap_and_build(toy.chunks, toy.context, OptimSettings(lr=1e-4))
    scoring = Scoring(toy.context, 1.0, toy.shape.vocab_size)
    settings = PolicySettings(
        objective=Objective(
            loss="grpo",
            settings=resolve_loss_defaults("grpo"),
            correction=resolve_correction("token_truncate", 2.0),
        ),
        mismatch_warn=0.05,
        mismatch_stop=0.1,
        mismatch_patience=2,
    )
    kl = KLController(resolve_controller("fixed"))
    policy = Policy(trainable, scoring, settings, LRSchedule("constant", 1e-4), kl, Phases())
    cut = CutSettings(
        minibatch_prompts=minibatch,
        max_tokens=32,
        min_packs=layout.pp,
        max_response_tokens=6,
    )
    dice = torch.Generator().manual_seed(3)

    def some_ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 90, (count,), generator=dice).tolist())

    samples = [
        Sample(
            Prompt(group, some_ids(3), "", {}),
            group,
            member,
            Completion(some_ids(6), (0.0,) * 6, True),
            "",
            {},
            float(member),
            False,
        )
        for group in range(4)
        for member in range(2)
    ]
    advantage = AdvantageSettings("std", "mean", None)

    def batch(bend: Callable[[torch.Tensor], torch.Tensor], step: int) -> Any:
        """The engine answers what the trainer scores, bent."""
        plain = make_batch(samples, advantage, cut, dp=layout.dp, dp_rank=toy.context.coords.dp)
        scored = score(trainable.chunks, plain, scoring)
        bent = plain.with_values("rollout_logprobs", [bend(value) for value in scored])
        return policy.score_old(bent, step)

    log.warn = lambda message, **_: warnings.append(message)
    return policy, batch


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def off_by_a_fifth(value: torch.Tensor) -> torch.Tensor:
    return value + 0.2


def shifted_by_a_token(value: torch.Tensor) -> torch.Tensor:
    return value.roll(1)


def alarmed(rank: int, folder: Path, layout: Layout, minibatch: int) -> str:
    """Bent, good, bent, bent: the run ends at the fourth step, before its optimizer moves."""
    warnings: list[str] = []
    policy, batch = policy_on_rank(folder, layout, minibatch=minibatch, warnings=warnings)
    per_step = 4 // minibatch
    for step, bend in enumerate((off_by_a_fifth, same, off_by_a_fifth), 1):
        policy.update(batch(bend, step))
        assert policy.optimizer_steps == step * per_step
        assert policy.steps_over_stop == (bend is off_by_a_fifth)
    assert len(warnings) == 2 and all("0.2 nats" in message for message in warnings), warnings
    fourth = batch(shifted_by_a_token, 4)
    before = [
        value.detach().clone() for value in local_parameters(policy.trainable.chunks).values()
    ]
    with pytest.raises(MismatchStop) as caught:
        policy.update(fourth)
    assert policy.optimizer_steps == 3 * per_step
    for value, old in zip(local_parameters(policy.trainable.chunks).values(), before, strict=True):
        assert torch.equal(value, old)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "minibatch"),
    [(Layout(1), 4), (Layout(1), 1), (Layout(2), 2), (Layout(2, pp=2), 4), (Layout(2, pp=2), 2)],
    ids=["alone", "alone-4-updates", "dp2-2-updates", "pp2", "pp2-2-updates"],
)
def test_an_engine_that_holds_another_policy_ends_the_run_at_the_second_step(
    layout: Layout, minibatch: int, tmp_path: Path
) -> None:
    """OFF-10, LP-16: steps count, however many optimizer steps each has; one alone only warns."""
    folder = Path(make_hf_folder(tmp_path / "hf", "qwen3"))
    said = run_ranks(layout.world, alarmed, folder, layout, minibatch)
    assert len(set(said)) == 1, said
    assert "algorithm.mismatch.stop=0.1 for 2 steps" in said[0]
