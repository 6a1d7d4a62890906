"""Whether a run folder can be written and continued: all of it known before any process group.

The newest complete checkpoint counts (manifest.py). A folder whose checkpoints are all broken is
refused, because starting anew there would write over what is left of the run.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo import log
from megagrpo.config import Config
from megagrpo.data.prompts import PromptSet
from megagrpo.data.sampler import PromptSampler
from megagrpo.model import hf_config
from megagrpo.trainer.manifest import MANIFEST, checkpoints, read_state
from megagrpo.trainer.sources import digest_of
from megagrpo.types import ModelShape


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to continue from; None starts anew.

    Raises ValueError if resume is "never" and the folder holds a run, or if it has checkpoints and
    none of them is complete.
    """
    folder = run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    saved = sorted((n for n in names if re.fullmatch(r"step_\d+", n)), key=lambda n: int(n[5:]))
    if resume == "never" and (saved or (run_dir / "metrics.jsonl").exists()):
        raise ValueError(
            f"trainer.run_dir={run_dir} holds a run and trainer.resume=never; "
            "choose another folder or trainer.resume=auto"
        )
    complete = checkpoints(folder)
    if saved and not complete:
        raise ValueError(
            f"trainer.run_dir={run_dir}: none of its checkpoints {', '.join(saved)} is complete "
            f"({MANIFEST} is missing or a file has another size than it says); restore one, or "
            "choose another folder"
        )
    if not complete:
        return None
    newest = complete[-1][1]
    if newest.name != saved[-1]:
        log.warn(f"{folder / saved[-1]} is not complete; {newest.name} is continued instead")
    return newest


def reference_origin(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Path and digest of the reference as this config names it; ValueError if it does not fit."""
    path = config.reference.path or config.model.path
    if not Path(path).is_dir():
        raise ValueError(f"reference.path={path} is not a folder; give a checkpoint folder")
    try:
        return {"path": str(Path(path).resolve()), "digest": digest_of(path, shape)}
    except ValueError as error:
        raise ValueError(f"reference {path} does not fit model.path: {error}") from error


def check_checkpoint(
    checkpoint: Path,
    prompts: PromptSet,
    samplers: Mapping[str, PromptSampler],
    origin: dict[str, Any],
    shape: ModelShape,
    controller: str,
) -> None:
    """Raise ValueError if the checkpoint belongs to other data, seed, model, reference or kind of
    KL controller. `samplers` are those of the run by their name in the state."""
    state = read_state(checkpoint)
    saved_shape = hf_config.read_shape(checkpoint)
    for name, value in vars(saved_shape).items():
        if name != "dtype" and value != vars(shape)[name]:
            raise ValueError(
                f"{checkpoint} holds a model of {name}={value}, model.path one of "
                f"{vars(shape)[name]}; give the run's own model.path or a new trainer.run_dir"
            )
    for name, sampler in samplers.items():
        if state[name]:  # empty where the run drew nothing of the kind
            try:
                sampler.load_state(state[name])
            except ValueError as error:
                raise ValueError(f"{checkpoint}: {error}") from error
    if state["prompts"] != prompts.digest():
        raise ValueError(
            f"{checkpoint}: data.train or its tokens have changed since it was saved (digest "
            f"{state['prompts']}, now {prompts.digest()}); resume with the same data or start a "
            "new trainer.run_dir"
        )
    if state["kl"]["kind"] != controller:
        raise ValueError(
            f"{checkpoint} was saved with algorithm.kl.controller.kind={state['kl']['kind']}, now "
            f"it is {controller}; resume with the same or start a new trainer.run_dir"
        )
    saved = state["reference"]
    if saved["digest"] != origin["digest"]:
        raise ValueError(
            f"{checkpoint}: the run's reference was {saved['path']} with digest "
            f"{saved['digest']}, now {origin['path']} has {origin['digest']}; give reference.path "
            "the old weights or start a new trainer.run_dir"
        )


def check_writable(run_dir: Path, rank: int) -> None:
    """Rank 0 makes the folder and tries a file; the others look only. ValueError if it cannot."""
    if rank != 0:
        return
    probe = run_dir / ".writable"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        os.remove(probe)
    except OSError as error:
        raise ValueError(
            f"trainer.run_dir={run_dir} cannot be written ({error.strerror}); choose another folder"
        ) from error
