"""Checkpoints of a run: model, optimizer, schedule position, random numbers, data position.

A checkpoint is a Megatron-Core distributed checkpoint (layout-free, so it resumes at another TP, PP
or DP) with `hf/` beside it, so that it is also a model folder for `tools/convert_hf.py` and
`model.path`. It is written under a temporary name, completed by a manifest and renamed; only then
are older ones removed, so that a kill at any moment leaves the newest complete one (manifest.py).

megatron-core pickles its `.metadata`; before upstream reads it, it passes the allow-list of
weights/torch_dist.py. Left out: asynchronous saves.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.model.build import bare
from megagrpo.model.optimizer import Trainable
from megagrpo.parallel import collectives, mcore_compat, mcore_repairs, platform
from megagrpo.parallel.context import (
    ParallelContext,
    restore_tracker_states,
    tracker_states,
)
from megagrpo.trainer import manifest
from megagrpo.weights.torch_dist import StoredTensors

from megatron.core import dist_checkpointing  # isort: skip; the hook came with model.build

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def save_checkpoint(
    folder: Path,
    step: int,
    trainable: Trainable,
    state: Mapping[str, Any],
    *,
    hf_folder: Path,
    keep_last: int,
    context: ParallelContext,
) -> Path:
    """Write `folder/step_N` and remove what `keep_last` no longer keeps; all ranks join.

    `state` is JSON-able and equal on all ranks. Raises RankFailure on every rank if one cannot
    write; the older checkpoints are then untouched.
    """
    unfinished, final = folder / f"tmp_step_{step}", manifest.checkpoint_folder(folder, step)
    problem = _attempt(lambda: _start(unfinished)) if context.rank == 0 else ""
    collectives.agree(not problem, f"checkpoint {unfinished}: {problem}", context)
    trainable.finish_param_sync()
    problem = _attempt(lambda: _write_shards(unfinished, trainable, context))
    collectives.agree(not problem, f"checkpoint {unfinished}: {problem}", context)
    if context.rank == 0:
        problem = _attempt(lambda: _finish(unfinished, final, state, hf_folder, keep_last))
    collectives.agree(not problem, f"checkpoint {unfinished}: {problem}", context)
    return final


def load_checkpoint(
    checkpoint: Path, trainable: Trainable, context: ParallelContext
) -> dict[str, Any]:
    """Restore model, optimizer and random numbers in place; returns the saved `state`.

    All ranks join. The layout may differ from the saved one; random numbers are restored only
    where the saved world had this rank. Raises ValueError if the folder's pickle holds anything
    but checkpoint metadata.
    """
    StoredTensors(checkpoint)  # refuses a hostile pickle before upstream reads it
    sharded = _sharded_state(trainable, is_loading=True)
    loaded = mcore_compat.call(dist_checkpointing.load, sharded, str(checkpoint))
    bare(trainable.chunks[0]).load_state_dict(loaded["model"], strict=False)
    trainable.optimizer.load_state_dict(loaded["optimizer"])
    trainable.apply_settings()  # the groups came with the saved run's; this run's config counts
    _restore_rng(checkpoint / "rng" / f"rank_{context.rank}.pt")
    return manifest.read_state(checkpoint)


def _attempt(action: Any) -> str:
    """Run a file action; the reason if the disk refuses, for `agree`."""
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or 'no file'})"
    return ""


def _start(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _write_shards(unfinished: Path, trainable: Trainable, context: ParallelContext) -> None:
    mcore_compat.call(
        dist_checkpointing.save,
        _sharded_state(trainable, is_loading=False),
        str(unfinished),
        content_metadata=SHARDING,
    )
    mcore_repairs.WRITE_QUEUE.shutdown()  # its process would outlive a rank that leaves hard
    # After upstream's save, which takes a folder with anything in it for a broken checkpoint.
    (unfinished / "rng").mkdir(exist_ok=True)
    rng = {**_plain(platform.rng_snapshot()), "tracker": tracker_states()}
    torch.save(rng, unfinished / "rng" / f"rank_{context.rank}.pt")


def _finish(
    unfinished: Path, final: Path, state: Mapping[str, Any], hf_folder: Path, keep_last: int
) -> None:
    shutil.copytree(
        hf_folder,
        unfinished / "hf",
        ignore=lambda _, names: [n for n in names if n.endswith((".safetensors", ".index.json"))],
    )
    (unfinished / manifest.STATE).write_text(json.dumps(state, indent=1))
    manifest.write_manifest(unfinished)
    if final.exists():  # an incomplete folder of that name: newest_checkpoint does not see it
        shutil.rmtree(final)
    unfinished.rename(final)
    manifest.prune(final.parent, keep_last)


def _sharded_state(trainable: Trainable, *, is_loading: bool) -> dict[str, Any]:
    """What megatron-core saves or loads: the model's and the optimizer's sharded tensors."""
    model = bare(trainable.chunks[0]).sharded_state_dict(metadata=SHARDING)
    optimizer = mcore_compat.call(
        trainable.optimizer.sharded_state_dict, model, is_loading=is_loading, metadata=SHARDING
    )
    return {"model": model, "optimizer": optimizer}


def _restore_rng(file: Path) -> None:
    if not file.is_file():  # the saved world was smaller
        return
    saved = torch.load(file, weights_only=True)
    key = saved["numpy"]["state"]["key"].numpy().astype(np.uint32)
    saved["numpy"]["state"]["key"] = key
    platform.rng_restore(
        platform.RngState(saved["python"], saved["numpy"], saved["cpu"], saved["cuda"])
    )
    restore_tracker_states(saved["tracker"])


def _plain(state: platform.RngState) -> dict[str, Any]:
    """Only numbers, texts and tensors, so that it loads with weights_only."""
    inner = state.numpy["state"]
    key = torch.from_numpy(inner["key"].astype(np.int64))
    numpy_state = {**state.numpy, "state": {"key": key, "pos": int(inner["pos"])}}
    return {"python": state.python, "numpy": numpy_state, "cpu": state.cpu, "cuda": state.cuda}
