"""Training on dumped rollouts: what stands where an engine and its prompts would.

The loop, the update, metrics and checkpoints stay; steps, groups and rewards come from the files of
another run. Nothing is generated, scored or evaluated, and vLLM is never imported. The weights
start at model.path as in the run that dumped, so the same settings give the same losses; with
others the mismatch alarm says how far the policy has left the one that sampled. Left out: the draw
of prompts, which moves on by one batch a step and is not used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megagrpo.config import Config, EvalConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.rewards.runner import RewardRunner
from megagrpo.rollout.refill import Generate
from megagrpo.rollout.storage import Rollout, dumped_steps, step_file
from megagrpo.types import Prompt, Sample


class NoEngine:
    """Stands in for the hybrid engine: weights stay where they are."""

    stats: dict[str, float] = {}

    @contextmanager
    def rollout_mode(self, version: int) -> Iterator[None]:
        """Nothing moves, nothing wakes."""
        yield


@dataclass(frozen=True)
class NoCollector:
    """Stands in for the collector: rewards lie in the files."""

    gather: Callable[[Any], list[Any]]  # an object of every rank, on every rank; all ranks join
    rewards: RewardRunner = field(default_factory=lambda: RewardRunner(()))

    def collect(self, *request: Any) -> list[Sample]:
        """Never called; says so."""
        raise AssertionError("a replay generates nothing")

    def tracebacks(self) -> list[dict[str, str]]:
        """None: no reward is called."""
        return []


@dataclass(frozen=True)
class Replay:
    """Stands in for `Refill`: a step's groups are those of its file."""

    folder: Path
    prompts: Sequence[Prompt]  # of data.train
    valid_vocab: int
    max_response_tokens: int

    @property
    def steps(self) -> int:
        """Dumped steps; ValueError unless they are 1, 2, ... without a hole."""
        found = dumped_steps(self.folder)
        if not found:
            raise ValueError(f"--replay {self.folder} holds no step_N.jsonl; give RUN_DIR/rollouts")
        missing = sorted(set(range(1, found[-1] + 1)) - set(found))
        if missing:
            raise ValueError(
                f"{step_file(self.folder, missing[0])} is missing, the dump goes to step "
                f"{found[-1]}; a replay needs every step from 1 on"
            )
        return found[-1]

    def fill(
        self,
        step: int,
        prompts: Sequence[Prompt],
        draw_more: Callable[[], Sequence[Prompt]],
        generate: Generate,
    ) -> Rollout:
        """The dumped rollout of `step`, whatever was drawn."""
        return self.load(step)

    def load(self, step: int) -> Rollout:
        """The dumped rollout of `step`; ValueError if it cannot be of this model and data."""
        path = step_file(self.folder, step)
        if not path.is_file():
            raise ValueError(f"{path} is missing; a replay needs every step from 1 on")
        rollout = Rollout.load(path)
        if not rollout.kept:
            raise ValueError(f"{path} holds no sample to train on")
        own = {prompt.index: prompt.ids for prompt in self.prompts}
        for sample in rollout.samples:
            self._check(path, sample, own)
        return rollout

    def _check(self, path: Path, sample: Sample, own: dict[int, tuple[int, ...]]) -> None:
        where = f"{path}: sample {sample.member} of group {sample.group}"
        prompt, ids = sample.prompt, sample.completion.ids
        known = range(self.valid_vocab)
        outside = [i for i in (*prompt.ids, *ids) if i not in known]
        if outside:
            raise ValueError(
                f"{where} has token id {outside[0]!r}, the model {self.valid_vocab} ids; these "
                "rollouts are of another model"
            )
        if own.get(prompt.index) != prompt.ids:
            raise ValueError(
                f"{where} answers other token ids than row {prompt.index} of data.train gives; "
                "replay with the data and tokenizer of the run that dumped"
            )
        if len(ids) > self.max_response_tokens:
            raise ValueError(
                f"{where} has {len(ids)} tokens, over rollout.max_response_tokens="
                f"{self.max_response_tokens}; replay with the settings of the run that dumped"
            )
        if len(ids) != len(sample.completion.logprobs):
            raise ValueError(
                f"{where}: {len(ids)} ids, {len(sample.completion.logprobs)} log-probs"
            )


def open_replay(
    folder: Path | None, config: Config, train: PromptSet, valid_vocab: int
) -> Replay | None:
    """The dumped rollouts of `folder`, the first step read to see that they fit; ValueError."""
    if folder is None:
        return None
    replay = Replay(folder, train.prompts, valid_vocab, config.rollout.max_response_tokens)
    if config.trainer.steps is not None and config.trainer.steps < replay.steps:
        raise ValueError(
            f"trainer.steps={config.trainer.steps} is below the {replay.steps} dumped steps of "
            f"{folder}, all of which are replayed; leave it out or raise it"
        )
    replay.load(1)
    return replay


def replay_config(config: Config, folder: Path) -> Config:
    """The config without what only an engine could do; ValueError if the run would write into the
    folder that it reads."""
    run_dir = Path(config.trainer.run_dir).resolve()
    if not folder.is_dir():
        raise ValueError(f"--replay {folder} is not a folder; give RUN_DIR/rollouts")
    if run_dir == folder.resolve().parent or run_dir / "rollouts" == folder.resolve():
        raise ValueError(
            f"trainer.run_dir={config.trainer.run_dir} is the run that --replay {folder} reads; "
            "give the replay another, e.g. trainer.run_dir=runs/replay"
        )
    return replace(config, data=replace(config.data, eval=None), eval=EvalConfig())
