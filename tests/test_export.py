"""Exports at saves: ranks that wait, what is left of an older one, what cannot be."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.config_file import load_config
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.collectives import RankFailure, patient_gather
from megagrpo.trainer import export
from megagrpo.weights.convert import hf_to_megatron
from tests.pool import run_ranks
from tests.tiny_models import make_hf_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A converted checkpoint as a run writes one."""
    hf = Path(make_hf_folder(tmp_path / "source", vocab_size=131))
    hf_to_megatron(hf, tmp_path / "step_2", read_shape(hf))
    return tmp_path / "step_2"


def slow_export(rank: int, checkpoint: Path, out: Path) -> float:
    """Seconds that the rank spent in an export that takes rank 0 more than one second."""
    write = export.megatron_to_hf

    def slow(*arguments: object) -> object:
        time.sleep(2.5)
        return write(*arguments)  # type: ignore[arg-type]

    export.megatron_to_hf = slow  # type: ignore[assignment]
    impatient, patient = patient_gather(1), patient_gather(60)
    begin = time.monotonic()
    export.export_checkpoint(checkpoint, out, torch.float32, rank=rank, gather=patient)
    waited = time.monotonic() - begin
    with pytest.raises(RuntimeError):  # what the same wait does to a group with the short limit
        export.export_checkpoint(checkpoint, out, torch.float32, rank=rank, gather=impatient)
    return waited


def test_ranks_wait_for_slow_storage_beyond_the_limit_of_other_collectives(
    checkpoint: Path, tmp_path: Path
) -> None:
    """CONV-43: the export takes 2.5 s, a gather of one second would end the run."""
    waited = run_ranks(2, slow_export, checkpoint, tmp_path / "out")
    assert min(waited) > 2.4
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(tmp_path / "source" / "model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def disk_full(rank: int, checkpoint: Path, out: Path) -> str:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    export.megatron_to_hf = full  # type: ignore[assignment]
    with pytest.raises(RankFailure) as caught:
        export.export_checkpoint(
            checkpoint, out, torch.float32, rank=rank, gather=patient_gather(60)
        )
    return str(caught.value)


def test_a_full_disk_ends_the_export_on_every_rank_with_the_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    """No rank is left waiting; nothing stands under the final name."""
    said = run_ranks(2, disk_full, checkpoint, tmp_path / "out")
    assert said == [f"export {tmp_path}/out: No space left on device (a file)"] * 2
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_what_an_interrupted_run_left(checkpoint: Path, tmp_path: Path) -> None:
    """The step is repeated after a resume, so its folder may be there."""
    out = export.export_folder(tmp_path, 2)
    out.mkdir(parents=True)
    (out / "half.safetensors").write_bytes(b"x")
    export.export_checkpoint(
        checkpoint, out, torch.bfloat16, rank=0, gather=lambda problem: [problem]
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert '"bfloat16"' in (out / "config.json").read_text()


def test_an_export_that_no_save_would_make_is_refused() -> None:
    """Three exports a checkpoint, or one in between: both never happen as asked."""
    base = ["model.path=x", "data.train=y", "rewards=[{path: exact_match}]"]
    with pytest.raises(
        ValueError, match="export_hf_every=3 is no multiple of trainer.save_every=2"
    ):
        load_config(None, [*base, "trainer.save_every=2", "trainer.export_hf_every=3"])
    config = load_config(None, [*base, "trainer.save_every=2", "trainer.export_hf_every=4"])
    assert config.trainer.export_hf_every == 4
