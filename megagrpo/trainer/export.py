"""Writes the policy as a HuggingFace folder at a save, out of the live shards.

Every element has one owner among the ranks that hold it, and the table that loads and syncs says
where it belongs. Rank 0 makes the files with their headers, every rank writes what it owns into its
places, block by block, and rank 0 gives the folder its name when all have: nothing is gathered and
nothing read again. Ranks must see one file system, as for checkpoints. Left out: exporting while
training goes on.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megagrpo.hybrid.plan import Region
from megagrpo.hybrid.source_check import owned_regions
from megagrpo.hybrid.transfer import Sources
from megagrpo.model.build import local_parameters, naming_profile
from megagrpo.model.optimizer import Trainable
from megagrpo.parallel.collectives import RankFailure, gather_objects
from megagrpo.parallel.context import ParallelContext
from megagrpo.trainer.preflight import Prepared
from megagrpo.types import TensorInfo
from megagrpo.weights.arrays import ArrayWriter
from megagrpo.weights.folders import copy_side_files, staged
from megagrpo.weights.safetensors_io import HFFolder
from megagrpo.weights.slices import cast, row_blocks, volume, whole
from megagrpo.weights.table import expand, hf_manifest

BLOCK_BYTES = 2 << 20
Places = dict[str, tuple[Path, int]]
"""File and first byte of every tensor."""


def export_folder(run_dir: Path, step: int) -> Path:
    """Where the export after `step` steps lives."""
    return run_dir / "hf" / f"step_{step}"


@dataclass(frozen=True)
class Exporter:
    """One rank's part of every export; built on all ranks together by `build_exporter`."""

    sources: Sources
    owned: Sequence[Region]  # what this rank writes
    manifest: Sequence[TensorInfo]  # in the exported dtypes
    hf_folder: Path  # config, tokenizer and the like
    dtype: torch.dtype  # that the exported config notes
    prepare: Callable[[], None]  # makes the parameters whole
    rank: int
    gather: Callable[[Any], list[Any]]  # collectives.patient_gather: slow storage loses no rank

    def write(self, out: Path) -> None:
        """Write `out`, replacing what an interrupted run left there; all ranks join.

        Raises RankFailure on every rank, and leaves nothing, if one of them cannot write.
        """
        self.prepare()
        said = self._lead(out) if self.rank == 0 else self._write_owned()
        # All ranks of the world: rank 0 says whether the folder is complete.
        problem = self.gather(said)[0]
        if problem:
            raise RankFailure(f"export {out}: {problem}")

    def _lead(self, out: Path) -> str:
        """Rank 0's way through `_write_owned`, with the files around it; what went wrong, or ""."""
        told = False  # whether the others know where to write
        try:
            if out.exists():
                shutil.rmtree(out)
            with staged(out, self.hf_folder) as folder:
                writer = HFFolder(folder, self.manifest)
                writer.create()
                told = True
                failures = self._write_owned(writer.places)
                if failures:
                    raise OSError(failures)
                copy_side_files(self.hf_folder, folder, self.dtype)
                writer.close()
        except OSError as error:
            return _reason(error) if told else self._write_owned(problem=_reason(error))
        return ""

    def _write_owned(self, places: Places | None = None, problem: str = "") -> str:
        """Learn the places from rank 0 and write there; returns what went wrong on any rank."""
        # All ranks of the world: the files are there, or rank 0 says why not.
        known, failed = self.gather((places, problem))[0]
        own = ""
        if not failed:
            try:
                self._write_regions(known)
            except OSError as error:
                own = f"rank {self.rank}: {_reason(error)}"
        # All ranks of the world: everything is written.
        return failed or next(filter(None, self.gather(own)), "")

    def _write_regions(self, places: Places) -> None:
        infos = {info.name: info for info in self.manifest}
        writer = ArrayWriter()
        for region in self.owned:
            values = self.sources.read(region.name, region.box)
            _write_region(writer, values, region, infos[region.name], places[region.name])
        writer.close()


def build_exporter(
    prepared: Prepared,
    trainable: Trainable,
    context: ParallelContext,
    gather: Callable[[Any], list[Any]],
) -> Exporter:
    """The exporter of this rank's shard; all ranks of the world join."""
    slices = expand(prepared.shape, context.layout, context.coords, naming_profile())
    sources = Sources(slices, local_parameters(trainable.chunks))
    return Exporter(
        sources=sources,
        owned=owned_regions(gather_objects(sources.boxes(), context), context.rank),
        manifest=hf_manifest(prepared.shape, prepared.dtype),
        hf_folder=prepared.hf_folder,
        dtype=prepared.dtype,
        prepare=trainable.finish_param_sync,
        rank=context.rank,
        gather=gather,
    )


def _write_region(
    writer: ArrayWriter,
    values: torch.Tensor,
    region: Region,
    info: TensorInfo,
    place: tuple[Path, int],
) -> None:
    """Write a box of a tensor into its file, a block of rows at a time."""
    path, begin = place
    size = info.dtype.itemsize
    (first, _), *inner = region.box
    row = volume(whole(info.shape[1:])) * size  # bytes from one row of the tensor to the next
    # A matrix may be cut by columns; whatever has more dimensions is cut by rows alone.
    assert len(inner) <= 1 or tuple(inner) == whole(info.shape[1:]), f"{region} of {info.shape}"
    column = inner[0][0] * size if len(inner) == 1 else 0
    for (start, stop), *_ in row_blocks(tuple(values.shape), size, BLOCK_BYTES):
        block = cast(values[start:stop].cpu(), info.dtype, info.name).contiguous()
        rows = block.view(stop - start, -1).view(torch.uint8).numpy()
        at = begin + (first + start) * row + column
        if rows.shape[1] == row:
            writer.write(path, at, rows.reshape(-1).data)
            continue
        for number, line in enumerate(rows):
            writer.write(path, at + number * row, line.data)


def _reason(error: OSError) -> str:
    """One line; an error that carries a line of ours only is that line."""
    if error.errno is None:
        return str(error)
    return f"{error.strerror} ({error.filename or 'no file'})"
