"""Checkpoint folders on disk: written beside their final name and renamed when complete, and the
small files (config, tokenizer, chat template) that travel with the weights.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
ADAPTER = "adapter_config.json"
TRACKER = "latest_checkpointed_iteration.txt"
SIDE_FOLDERS = ("additional_chat_templates",)


@contextmanager
def staged(out: Path, *sources: Path) -> Iterator[Path]:
    """A fresh folder beside `out` that takes its name when the block ends well, else disappears.

    A link is followed. Raises ValueError if `out` is one of the sources or inside one, a file, a
    folder that is not empty or cannot be replaced, or if another process is about to write it.
    """
    for source in sources:
        if out.resolve() == source.resolve():
            raise ValueError(f"source and destination are the same: {out}")
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"{out} is inside {source}, which is only read; choose another place")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; choose another destination")
    given, out = out, out.resolve()
    if out.is_mount() or out == Path.cwd():
        what = "a mount point" if out.is_mount() else "the current folder"
        raise ValueError(f"{given} is {what}, which cannot be replaced; name a new folder in it")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.partial"
    with _locked(folder), ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        for path in folder.iterdir():  # left by a conversion that was killed
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield folder
        folder.rename(out)
        undo.pop_all()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made where there is none, for this process alone: two that write one folder
    would mix their files. The lock ends with the process, however that ends."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _taken(descriptor, folder):
            raise ValueError(f"another process writes {folder}; wait for it or choose another name")
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system that locks no folders, as NFS
    # Whoever held the lock before may just have given the folder its final name.
    return not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat())


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError if a HuggingFace folder holds an adapter, alone or beside its base."""
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder} holds an adapter ({ADAPTER}), which is not merged here; merge it into its "
            "base model first, or remove it"
        )


def other_kind(folder: Path) -> str:
    """What a folder without safetensors is instead, to end a message with; "" if unknown."""
    if any((folder / name).is_file() for name in (".metadata", TRACKER)) or any(
        folder.glob("mp_rank_*")
    ):
        return "; it is a Megatron checkpoint"
    found = sorted(path.name for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    return f"; {found[0]} is not read, save the model as safetensors" if found else ""


def copy_side_files(source: Path, target: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Copy everything but weights from a HuggingFace folder, `config.json` last; returns the names.

    `source` may also be a config file alone, of any name. A `dtype` is noted in the copied config;
    every other field stays, known here or not.
    """
    target.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        config_file, names = source, ["config.json"]
    else:
        config_file = source / "config.json"
        names = sorted(path.name for path in source.iterdir() if _is_side_file(path))
        for name in names:
            if name != "config.json":
                shutil.copyfile(source / name, target / name)
        for name in SIDE_FOLDERS:
            if (source / name).is_dir():
                shutil.copytree(source / name, target / name)
    text = config_file.read_text(encoding="utf-8")
    if dtype is not None:
        config = json.loads(text)
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = str(dtype).removeprefix("torch.")
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
    return names


def _is_side_file(path: Path) -> bool:
    hidden = path.name.startswith(".")
    weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
    return path.is_file() and not hidden and not weights
