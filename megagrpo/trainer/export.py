"""Writes the policy as a HuggingFace folder at a save, out of the checkpoint just written.

Rank 0 converts file to file, a few rows at a time, with the converter that users run by hand: no
rank holds more than its shard, and no other way from Megatron to HuggingFace exists to go wrong.
The price is one more read of the weights. Left out: exporting while training goes on.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.collectives import RankFailure
from megagrpo.weights.convert import megatron_to_hf


def export_folder(run_dir: Path, step: int) -> Path:
    """Where the export after `step` steps lives."""
    return run_dir / "hf" / f"step_{step}"


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype,
    *,
    rank: int,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Write `out`, replacing what an interrupted run left there; all ranks join.

    `gather` collects an object of every rank (collectives.patient_gather): the others wait in it as
    long as it allows, since slow storage is no lost rank. Raises RankFailure on every rank if rank
    0 cannot write.
    """
    problem = _write(checkpoint, out, dtype) if rank == 0 else ""
    # All ranks of the world.
    said = gather(problem)[0]
    if said:
        raise RankFailure(f"export {out}: {said}")


def _write(checkpoint: Path, out: Path, dtype: torch.dtype) -> str:
    try:
        if out.exists():
            shutil.rmtree(out)
        hf = checkpoint / "hf"
        megatron_to_hf(checkpoint, out, read_shape(hf), hf, dtype)
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or 'no file'})"
    return ""
