"""Conversion by several processes: the same bytes, errors of any of them, nothing half-written."""

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.model.hf_config import read_shape
from megagrpo.types import Layout, TensorInfo
from megagrpo.weights import workers
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.moves import Job, Mover, Place, shares
from megagrpo.weights.slices import Part, whole
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf and megatron, the same toy; tests leave both alone."""
    folder = tmp_path_factory.mktemp("workers")
    hf = Path(make_hf_folder(folder / "hf", vocab_size=131))
    hf_to_megatron(hf, folder / "megatron", read_shape(hf))
    return folder


@pytest.mark.parametrize("count", [2, 3, 500])
def test_any_number_of_workers_writes_the_same_bytes(
    count: int, place: Path, tmp_path: Path
) -> None:
    """Both formats there, several shards back; more workers than tensors too."""
    hf, shape = place / "hf", read_shape(place / "hf")
    for number in (1, count):
        out = tmp_path / str(number)
        hf_to_megatron(hf, out / "dist", shape, workers=number)
        hf_to_megatron(hf, out / "ranks", shape, legacy=Layout(world=4, tp=2, pp=2), workers=number)
        megatron_to_hf(out / "dist", out / "back", shape, hf, None, 200_000, workers=number)
    one, many = content(tmp_path / "1"), content(tmp_path / str(count))
    assert one.keys() == many.keys() and any("model-00002" in name for name in one)
    assert [name for name in one if one[name] != many[name]] == []


def test_every_worker_moves_a_part_and_progress_ends_at_the_total(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is really shared: each process notes its id."""
    run, seen = Mover.run, []

    def note(self: Mover, job: Job) -> None:
        (tmp_path / f"pid_{os.getpid()}").touch()
        run(self, job)

    monkeypatch.setattr(Mover, "run", note)
    hf_to_megatron(
        place / "hf",
        tmp_path / "out",
        read_shape(place / "hf"),
        None,
        lambda done, total: seen.append((done, total)),
        workers=3,
    )
    pids = {int(path.name[4:]) for path in tmp_path.glob("pid_*")}
    assert len(pids) == 3 and os.getpid() not in pids
    assert seen[-1][0] == seen[-1][1] > 0 and seen == sorted(seen)


def test_shares_keep_order_and_differ_by_at_most_one_tensor() -> None:
    """Sizes 1 to 20 kB over 4: nobody has more than a fourth and a tensor."""
    jobs = [Job(str(n), (n * 1000,), torch.uint8, [], []) for n in range(1, 21)]
    parts = shares(jobs, 4)
    assert [job for part in parts for job in part] == jobs and len(parts) == 4
    sizes = [sum(job.nbytes for job in part) for part in parts]
    assert max(sizes) <= 210_000 / 4 + 20_000 and min(sizes) >= 210_000 / 4 - 20_000


def die(self: Mover, job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(self: Mover, job: Job) -> None:
    raise OSError(28, "No space left on device", "a file")


def refuse(self: Mover, job: Job) -> None:
    raise ValueError(f"{job.name} is not what it seems")


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (die, OSError, "a worker process was killed by SIGKILL"),
        (fail, OSError, "No space left on device"),
        (refuse, ValueError, "is not what it seems"),
    ],
)
def test_what_happens_to_one_worker_ends_all_and_leaves_nothing(
    fault: Any,
    kind: type[Exception],
    said: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CONV-42: the others, which would take a minute, are ended; no folder, no process is left."""
    run, names = Mover.run, []

    def one_of_three(self: Mover, job: Job) -> None:
        if job.name.startswith("embedding"):
            fault(self, job)
        (tmp_path / f"pid_{os.getpid()}").touch()
        time.sleep(60)
        run(self, job)

    monkeypatch.setattr(Mover, "run", one_of_three)
    begin = time.monotonic()
    with pytest.raises(kind, match=said):
        hf_to_megatron(place / "hf", tmp_path / "out", read_shape(place / "hf"), workers=3)
    assert time.monotonic() - begin < 30
    names = sorted(path.name for path in tmp_path.iterdir())
    assert all(name.startswith("pid_") for name in names), names
    for name in names:
        with pytest.raises(ProcessLookupError):
            os.kill(int(name[4:]), 0)


class Blocked:
    """A source whose tensor never comes to an end of being read."""

    def tensors(self) -> list[TensorInfo]:
        return [TensorInfo("x", (4,), torch.float32)]

    def read(self, name: str, box: Any) -> torch.Tensor:
        raise AssertionError("only fill_ is used")

    def fill_(self, out: torch.Tensor, name: str, box: Any) -> None:
        raise ValueError(f"{name} cannot be read")


@pytest.mark.parametrize("count", [1, 2])
def test_a_failed_read_reaches_the_caller_also_from_the_last_tensor(
    count: int, tmp_path: Path
) -> None:
    """The writing thread ends with the reader."""
    full = whole((4,))
    places = [Place(full, tmp_path / "file", 0)]
    job = Job("x", (4,), torch.float32, [Part(full, "x", full)], places)
    with pytest.raises(ValueError, match="x cannot be read"):
        workers.run_jobs([job] * count, Blocked(), count, lambda done, total: None)


def test_a_full_disk_seen_by_the_writing_thread_reaches_the_caller(tmp_path: Path) -> None:
    """Also when the failing block was the last one: the reader had nothing left to do."""

    class Zeros(Blocked):
        def fill_(self, out: torch.Tensor, name: str, box: Any) -> None:
            out.zero_()

    full = whole((4,))
    place = Place(full, tmp_path / "no such folder" / "file", 0)
    job = Job("x", (4,), torch.float32, [Part(full, "x", full)], [place])
    with pytest.raises(OSError, match="No such file"):
        workers.run_jobs([job], Zeros(), 1, lambda done, total: None)


def test_the_command_takes_workers_and_refuses_none(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    words = ["hf2megatron", "--hf", f"{place}/hf", "--out", f"{tmp_path}/out"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--workers", "0"])
    assert caught.value.code == 2 and "write 1 or more" in capsys.readouterr().err
    assert main([*words, "--workers", "2"]) == 0
    assert main(["verify", "--hf", f"{place}/hf", "--megatron", f"{tmp_path}/out"]) == 0
    words = ["megatron2hf", "--megatron", f"{tmp_path}/out", "--out", f"{tmp_path}/back"]
    assert main([*words, "--workers", "2"]) == 0
    back, hf = (load_file(f / "model.safetensors") for f in (tmp_path / "back", place / "hf"))
    assert back.keys() == hf.keys() and all(torch.equal(back[name], hf[name]) for name in hf)
