"""Checkpoint folders on disk: written beside their final name and renamed when complete, and the
small files (config, tokenizer, chat template) that travel with the weights.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
SIDE_FOLDERS = ("additional_chat_templates",)


@contextmanager
def staged(out: Path, *sources: Path) -> Iterator[Path]:
    """A fresh folder beside `out` that takes its name when the block ends well, else disappears.

    Raises ValueError if `out` is one of the sources, a file, or a folder that is not empty.
    """
    for source in sources:
        if out.resolve() == source.resolve():
            raise ValueError(f"source and destination are the same: {out}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; choose another destination")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.partial"
    shutil.rmtree(folder, ignore_errors=True)  # left by a conversion that was killed
    folder.mkdir()
    try:
        yield folder
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
