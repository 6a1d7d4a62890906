"""Which checkpoint folders are whole: a manifest of files and sizes, written last.

A save goes to `tmp_step_N`, gets its manifest, and is renamed to `step_N`; only then are older ones
removed. A folder without a manifest, or whose files differ from it, does not count.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "trainer.json"
# Of checkpoints from before beta could move and reference answers could be imitated.
_BEFORE: dict[str, Any] = {
    "kl": {"kind": "fixed", "beta": 0.0, "recent": [], "integral": 0.0, "last_error": None},
    "cold_start": {},
}


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lives."""
    return folder / f"step_{step}"


def write_manifest(checkpoint: Path) -> None:
    """List every file with its size; flushed to disk, written under its name in one move."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    unfinished = checkpoint / f"{MANIFEST}.tmp"
    with unfinished.open("w") as stream:
        json.dump(sizes, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(checkpoint / MANIFEST)


def is_complete(checkpoint: Path) -> bool:
    """Whether the manifest is there and every file it names has its size."""
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return False
    try:
        sizes = json.loads(manifest.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    return isinstance(sizes, dict) and all(
        (checkpoint / name).is_file() and (checkpoint / name).stat().st_size == size
        for name, size in sizes.items()
    )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's own state of a checkpoint; what it is too old to hold is as it was then."""
    return _BEFORE | json.loads((checkpoint / STATE).read_text())


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints as (step, path), by number."""
    if not folder.is_dir():
        return []
    named = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.iterdir()]
    found = [(int(match.group(1)), path) for match, path in named if match and is_complete(path)]
    return sorted(found)


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step; None if there is none."""
    found = checkpoints(folder)
    return found[-1][1] if found else None


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` complete checkpoints and unfinished saves."""
    for _, path in checkpoints(folder)[:-keep_last]:
        shutil.rmtree(path)
    for path in folder.glob("tmp_step_*"):
        shutil.rmtree(path)
