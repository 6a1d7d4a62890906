"""One rank's file of a Megatron-LM checkpoint, and the names of its folder.

Pickles are untrusted: tensors, plain values and the few classes below load, the rest is refused by
name. Only the places of the numbers are taken from a file; they are read when asked for.
"""

import re
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import safe_globals

from megagrpo.weights.accounting import EXTRA_STATE
from megagrpo.weights.arrays import StoredArray
from megagrpo.weights.blobs import BROKEN, first_line
from megagrpo.weights.folders import TRACKER
from megagrpo.weights.rows import EMBEDDING

HF_DTYPES = "megagrpo_hf_dtypes"  # dtypes of tensors stored wider than they were, as noted
FILE = "model_optim_rng.pt"
FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
SIZES = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "ep": "expert"}
CHUNK = re.compile(r"model(\d+)")


@dataclass(frozen=True, order=True)
class Rank:
    """Which file: tensor, pipeline and expert rank."""

    tp: int
    pp: int = 0
    ep: int = 0


class _Setting:
    """Stands for an enum of megatron's arguments, whose value nobody asks for."""

    def __init__(self, value: object) -> None:
        self.value = value


# numpy's share: the states of random number generators, which a training run saves beside "model".
ALLOWED: list[Any] = [
    Namespace,
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
    (np.zeros(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
    (np.zeros(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
    (_Setting, "megatron.core.transformer.enums.AttnBackend"),
    (_Setting, "megatron.core.enums.ModelType"),
]


def is_legacy(folder: Path) -> bool:
    """Whether the folder, or the iteration that its tracker file names, has per-rank folders."""
    return any(FOLDER.fullmatch(path.name) for path in iteration(folder).glob("mp_rank_*"))


def iteration(folder: Path) -> Path:
    """Where the checkpoint is: the folder itself or the one that its tracker file names, which is
    how Megatron-LM saves either format."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    said = tracker.read_text().strip()
    if said != "release" and not said.isdigit():
        raise ValueError(f"{tracker} says {said!r}, neither 'release' nor a number")
    home = folder / (said if said == "release" else f"iter_{int(said):07d}")
    if not home.is_dir():
        raise ValueError(f"{tracker} says {said}, but {home} does not exist")
    return home


def rank_folder(rank: Rank, pp: int, ep: int) -> str:
    """Megatron-LM's name for one rank's folder at these sizes."""
    stage = f"_{rank.pp:03d}" if pp > 1 else ""
    return f"mp_rank_{rank.tp:02d}{stage}" + (f"_{rank.ep:03d}" if ep > 1 else "")


def sizes(ranks: Iterable[Rank]) -> tuple[int, int, int]:
    """How many tensor, pipeline and expert ranks these are part of."""
    tp, pp, ep = zip(*((rank.tp, rank.pp, rank.ep) for rank in ranks), strict=True)
    return 1 + max(tp), 1 + max(pp), 1 + max(ep)


class RankFile:
    """The parameters of one rank: shapes, dtypes and where in the file their numbers lie."""

    def __init__(self, path: Path) -> None:
        content = _content(path)
        self.saved_at = _sizes_in(content.get("args"))
        self.noted = noted_dtypes(content, path)
        # one for every virtual pipeline stage of the rank, usually a single one
        self.models = [_places(path, model) for model in _models(path, content)]

    def tensors(self) -> list[tuple[str, StoredArray]]:
        """(name, array) of all of them; with virtual stages "model1: " and so on stands before."""
        several = len(self.models) > 1
        return [
            (f"model{number}: {name}" if several else name, array)
            for number, model in enumerate(self.models)
            for name, array in model.items()
        ]


def noted_dtypes(content: object, path: Path) -> dict[str, torch.dtype]:
    """The dtypes that the converter noted in a loaded file; a file from elsewhere has none."""
    noted = content.get(HF_DTYPES, {}) if isinstance(content, dict) else {}
    if not isinstance(noted, dict) or not all(isinstance(d, torch.dtype) for d in noted.values()):
        raise ValueError(f"{path} is broken: {HF_DTYPES} holds no dtypes")
    return dict(noted)


def _content(path: Path) -> dict[str, Any]:
    """The file without the tensors' numbers; torch notes where in the file those are."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is cut off, or no file of torch.save since torch 1.6")
    try:
        with FakeTensorMode(), safe_globals(ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN as error:
        raise ValueError(f"{path} is refused: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, no checkpoint")
    return content


def _sizes_in(arguments: object) -> dict[str, int]:
    """The layout that the arguments of the saved run name; it only explains what does not fit."""
    named = vars(arguments) if isinstance(arguments, Namespace) else {}
    found = {short: named.get(f"{long}_model_parallel_size") for short, long in SIZES.items()}
    return {short: size for short, size in found.items() if isinstance(size, int)}


def _models(path: Path, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What "model" holds, or "model0", "model1", ... in order."""
    names = sorted((int(m[1]), key) for key in content if (m := CHUNK.fullmatch(str(key))))
    models = [content[key] for _, key in names] if names else [content.get("model")]
    gap = [number for number, _ in names] != list(range(len(names)))
    if gap or ("model" in content) == bool(names):
        keys = [str(key) for key in content if str(key).startswith("model")]
        raise ValueError(f"{path} has {keys}, expected 'model' or 'model0', 'model1', ...")
    for model in models:
        if not isinstance(model, Mapping):
            raise ValueError(f"{path}: 'model' is a {type(model).__name__}, no parameters")
    return [model for model in models if isinstance(model, Mapping)]


def _places(path: Path, model: Mapping[str, Any]) -> dict[str, StoredArray]:
    found = {}
    for name, tensor in model.items():
        if EXTRA_STATE.search(str(name)):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path}: {name} is a {type(tensor).__name__}, no tensor")
        if not tensor.is_contiguous():
            raise ValueError(f"{path}: {name} is stored as a strided view; save it contiguous")
        begin = tensor.untyped_storage()._checkpoint_offset
        assert begin is not None, f"torch noted no place of {name} in {path}"
        offset = begin + int(tensor.storage_offset()) * tensor.dtype.itemsize
        found[str(name)] = StoredArray(path, offset, tuple(tensor.shape), tensor.dtype)
    return found


def _reason(error: BaseException) -> str:
    """The class that torch refused, else the first line of its message."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if refused:
        return f"it refers to {refused.group(1)}, which is not allowed"
    return first_line(error)


def rank_files(folder: Path) -> dict[Rank, RankFile]:
    """The files of all ranks of a checkpoint folder.

    A single number behind the tensor rank is the pipeline stage, or the expert rank where there are
    no stages; then every file has the embedding. Raises ValueError if there is no such folder.
    """
    home = iteration(folder)
    matches = [(path, FOLDER.fullmatch(path.name)) for path in sorted(home.glob("mp_rank_*"))]
    files = {
        (int(match[1]), *(int(n) for n in match.groups()[1:] if n)): RankFile(path / FILE)
        for path, match in matches
        if match
    }
    if not files:
        raise ValueError(f"{home} has no folders mp_rank_TT[_PPP][_EEE]")
    if len({len(place) for place in files}) > 1:
        names = ", ".join(path.name for path, match in matches if match)
        raise ValueError(f"{home} mixes folders of different layouts: {names}")
    later = [file for place, file in files.items() if len(place) == 2 and place[1] > 0]
    if later and all(EMBEDDING in file.models[0] for file in later):
        return {Rank(tp, 0, ep): file for (tp, ep), file in files.items()}
    return {Rank(*place): file for place, file in files.items()}
