"""Exports from live shards: layouts, slow and full disks, what is left of an older one."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.config_file import load_config
from megagrpo.hybrid.source_check import owned_regions
from megagrpo.hybrid.transfer import Sources
from megagrpo.model.build import local_parameters, naming_profile
from megagrpo.parallel.collectives import RankFailure, gather_objects, patient_gather
from megagrpo.trainer import export
from megagrpo.types import Layout
from megagrpo.weights.arrays import ArrayWriter
from megagrpo.weights.table import expand, hf_manifest
from tests.megatron_toys import Toy, toy_on_rank
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder

MODELS = {"qwen3": ("qwen3", False), "qwen3-tied": ("qwen3", True), "qwen2": ("qwen2", False)}
LAYOUTS = {
    "one": Layout(1),
    "tp 2": Layout(2, tp=2),
    "pp 2": Layout(2, pp=2),
    "dp 2": Layout(2),
    "tp 4, over the KV heads": Layout(4, tp=4),
    "tp 2 pp 2": Layout(4, tp=2, pp=2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("export")
    return {
        name: Path(make_hf_folder(root / name, family, tied, vocab_size=131, with_tokenizer=True))
        for name, (family, tied) in MODELS.items()
    }


def exporter(
    toy: Toy, folder: Path, dtype: torch.dtype = torch.float32, seconds: float = 60
) -> export.Exporter:
    """What `build_exporter` makes of a run, of a model alone."""
    slices = expand(toy.shape, toy.context.layout, toy.context.coords, naming_profile())
    sources = Sources(slices, local_parameters(toy.chunks))
    return export.Exporter(
        sources=sources,
        owned=owned_regions(gather_objects(sources.boxes(), toy.context), toy.context.rank),
        manifest=hf_manifest(toy.shape, dtype),
        hf_folder=folder,
        dtype=dtype,
        prepare=lambda: None,
        rank=toy.context.rank,
        gather=patient_gather(seconds),
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_live_shards_give_the_source_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path, name: str, layout: Layout
) -> None:
    """CONV-35: the same files as the source has; every rank wrote no more than a block at a time,
    and all of them together every byte once."""
    out = tmp_path / "out"

    def act(rank: int) -> tuple[int, int]:
        toy = toy_on_rank(str(folders[name]), layout)
        sizes: list[int] = []
        write = ArrayWriter.write

        def watched(self: ArrayWriter, path: Path, offset: int, data: Any) -> None:
            sizes.append(len(data))
            write(self, path, offset, data)

        exporting = exporter(toy, folders[name])
        ArrayWriter.write = watched  # type: ignore[method-assign]  # in this forked rank only
        exporting.write(out)
        return max(sizes, default=0), sum(sizes)

    written = run_ranks(layout.world, act)
    got, want = load_file(out / "model.safetensors"), load_file(folders[name] / "model.safetensors")
    assert got.keys() == want.keys()
    for tensor in want:
        assert got[tensor].dtype == want[tensor].dtype, tensor
        assert torch.equal(got[tensor], want[tensor]), tensor
    assert {p.name for p in out.iterdir()} == {p.name for p in folders[name].iterdir()}
    assert max(most for most, _ in written) <= export.BLOCK_BYTES
    assert sum(total for _, total in written) == (out / "model.safetensors").stat().st_size


def test_the_exported_dtype_is_noted_in_its_config(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    def act(rank: int) -> None:
        toy = toy_on_rank(str(folders["qwen3"]), Layout(2, tp=2))
        exporter(toy, folders["qwen3"], torch.bfloat16).write(tmp_path / "out")

    run_ranks(2, act)
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(folders["qwen3"] / "model.safetensors")
    assert all(torch.equal(got[name], want[name].bfloat16()) for name in want)
    assert '"bfloat16"' in (tmp_path / "out" / "config.json").read_text()


def test_ranks_wait_for_slow_storage_beyond_the_limit_of_other_collectives(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """CONV-43: one rank writes for 2.5 s, a gather of one second would end the run."""

    def act(rank: int) -> float:
        toy = toy_on_rank(str(folders["qwen3"]), Layout(2, tp=2))
        write = export._write_region
        slow = [rank == 1]

        def slowly(*arguments: Any) -> None:
            if slow and slow.pop():
                time.sleep(2.5)
            write(*arguments)

        export._write_region = slowly  # type: ignore[assignment]
        patient, impatient = exporter(toy, folders["qwen3"]), patient_gather(1)
        begin = time.monotonic()
        patient.write(tmp_path / "out")
        waited = time.monotonic() - begin
        if rank == 0:  # what the same wait does to a group with the short limit
            with pytest.raises(RuntimeError):
                impatient("")
        else:
            time.sleep(2.5)
        return waited

    assert min(run_ranks(2, act)) > 2.4
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("where", ["headers", "numbers of rank 0", "numbers of rank 1", "index"])
def test_a_full_disk_ends_the_export_on_every_rank_with_the_reason(
    folders: dict[str, Path], tmp_path: Path, where: str
) -> None:
    """No rank is left waiting; nothing stands under the final name or beside it."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    def act(rank: int) -> str:
        toy = toy_on_rank(str(folders["qwen3"]), Layout(2, tp=2))
        exporting = exporter(toy, folders["qwen3"])
        if where == "headers":
            export.HFFolder.create = full  # type: ignore[method-assign]
        elif where == "index":
            export.HFFolder.close = full  # type: ignore[method-assign]
        elif where.endswith(str(rank)):
            export._write_region = full  # type: ignore[assignment]
        with pytest.raises(RankFailure) as caught:
            exporting.write(tmp_path / "runs" / "out")
        return str(caught.value)

    said = run_ranks(2, act)
    blamed = f"rank {where[-1]}: " if where.startswith("numbers") else ""
    assert said == [f"export {tmp_path}/runs/out: {blamed}No space left on device (a file)"] * 2
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_export_replaces_what_an_interrupted_run_left(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The step is repeated after a resume, so its folder may be there."""
    out = export.export_folder(tmp_path, 2)
    out.mkdir(parents=True)
    (out / "half.safetensors").write_bytes(b"x")

    def act(rank: int) -> None:
        toy = toy_on_rank(str(folders["qwen3"]), Layout(1))
        exporter(toy, folders["qwen3"]).write(out)

    run_ranks(1, act)
    assert {p.name for p in out.iterdir()} == {p.name for p in folders["qwen3"].iterdir()}


def test_an_export_that_no_save_would_make_is_refused() -> None:
    """Three exports a checkpoint, or one in between: both never happen as asked."""
    base = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]"]
    with pytest.raises(
        ValueError, match="export_hf_every=3 is no multiple of trainer.save_every=2"
    ):
        load_config(None, [*base, "trainer.save_every=2", "trainer.export_hf_every=3"])
    config = load_config(None, [*base, "trainer.save_every=2", "trainer.export_hf_every=4"])
    assert config.trainer.export_hf_every == 4
