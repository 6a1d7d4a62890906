"""Opens a model folder, whichever kind it is, as tensors under HuggingFace names."""

import hashlib
from pathlib import Path

import torch

from megagrpo.model import hf_config
from megagrpo.types import ModelShape, TensorSource
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.verify import check_source


def open_source(path: str | Path, shape: ModelShape) -> TensorSource:
    """A converted or trained Megatron checkpoint, or a HuggingFace folder.

    Raises ValueError naming what is missing or does not fit `shape`.
    """
    is_megatron = hf_config.is_megatron_checkpoint(path)
    source = MegatronSource(path, shape) if is_megatron else HFSource(path)
    check_source(source, shape)
    return source


def digest_of(path: str | Path, shape: ModelShape) -> str:
    """Identity of a model folder without reading it whole: 16 hex digits of a SHA-256 over names,
    shapes, dtypes, all vectors (norms, biases) and the first row of every matrix.

    Raises ValueError as `open_source`.
    """
    source = open_source(path, shape)
    digest = hashlib.sha256()
    for info in sorted(source.tensors(), key=lambda info: info.name):
        digest.update(f"{info.name} {info.shape} {info.dtype}\n".encode())
        box = tuple((0, size) for size in info.shape)
        data = source.read(info.name, box if len(box) == 1 else ((0, 1), *box[1:]))
        digest.update(data.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
