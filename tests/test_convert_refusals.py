"""What the converter says to folders that are not what they should be: one line, nothing written.

`test_broken_checkpoints.py` has the damaged files; here are whole ones of the wrong kind, wrong
places, and conversions that are interrupted.
"""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.weights.moves import Job, Mover
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent
main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
KEY = "model.layers.0.self_attn.k_proj.weight"
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf, megatron (torch_dist), ranks (per rank, TP 2); tests copy them."""
    folder = tmp_path_factory.mktemp("refusals")
    make_hf_folder(folder / "hf", vocab_size=32, **TINY)
    words = ["hf2megatron", "--hf", f"{folder}/hf", "--out"]
    assert main([*words, f"{folder}/megatron"]) == 0
    assert main([*words, f"{folder}/ranks", "--format", "torch", "--tp", "2"]) == 0
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time of the last change and content of every file, folders included."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: object) -> str:
    """Status 2 and one line; nothing in `folder` is new or changed."""
    before = snapshot(folder)
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert snapshot(folder) == before
    return err


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def adapter_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 8}')


def adapter_alone(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    save_file(
        {"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors"
    )


def fp8_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[KEY] = torch.zeros_like(tensors[KEY]).to(torch.float8_e4m3fn)
    tensors[f"{KEY}_scale_inv"] = torch.zeros(1, 1)
    save_file(tensors, folder / "model.safetensors")


def int4_config(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})


def old_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (adapter_beside, "holds an adapter (adapter_config.json)"),
        (adapter_alone, "holds an adapter (adapter_config.json)"),
        (fp8_tensors, f"{KEY} has dtype F8_E4M3"),
        (int4_config, "quantization_config"),
        (old_weights, "pytorch_model.bin is not read, save the model as safetensors"),
    ],
)
def test_a_source_that_cannot_be_converted_as_it_is_is_refused_by_name(
    change: Callable[[Path], None],
    said: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """CONV-38: quantised weights (a block of zeros with scale 0 too); CONV-40: adapters."""
    hf = Path(shutil.copytree(place / "hf", tmp_path / "hf"))
    change(hf)
    assert said in refused(capsys, tmp_path, "hf2megatron", "--hf", hf, "--out", tmp_path / "out")


def test_source_and_destination_in_one_another_or_swapped_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CONV-36: the same folder under any name, a folder inside the source, the wrong direction."""
    hf = Path(shutil.copytree(place / "hf", tmp_path / "hf"))
    megatron = Path(shutil.copytree(place / "megatron", tmp_path / "megatron"))
    (tmp_path / "link").symlink_to(hf)
    for out, said in (
        (hf, "source and destination are the same"),
        (hf / ".." / "hf", "source and destination are the same"),
        (tmp_path / "link", "source and destination are the same"),
        (hf / "converted", f"is inside {hf}, which is only read"),
    ):
        assert said in refused(capsys, tmp_path, "hf2megatron", "--hf", hf, "--out", out)
    for out in (megatron, megatron / "hf", megatron / "back"):
        refused(capsys, tmp_path, "megatron2hf", "--megatron", megatron, "--out", out)
    new = ["--out", tmp_path / "new"]
    said = refused(capsys, tmp_path, "hf2megatron", "--hf", megatron, *new)
    assert "it is a Megatron checkpoint" in said
    for words in ([], ["--config", hf / "config.json"]):
        said = refused(capsys, tmp_path, "megatron2hf", "--megatron", hf, *new, *words)
        assert "is a HuggingFace folder, no Megatron checkpoint" in said


@pytest.mark.parametrize("kind", ["hf", "megatron", "ranks"])
def test_a_read_only_source_converts_and_is_not_touched(
    kind: str, place: Path, tmp_path: Path
) -> None:
    """CONV-36: no file of it is written, renamed or even touched."""
    source = Path(shutil.copytree(place / kind, tmp_path / "source"))
    for path in [source, *source.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(source)
    direction = "hf2megatron" if kind == "hf" else "megatron2hf"
    option = "--hf" if kind == "hf" else "--megatron"
    try:
        assert main([direction, option, str(source), "--out", f"{tmp_path}/out"]) == 0
        assert snapshot(source) == before
    finally:
        for path in [source, *source.rglob("*")]:
            path.chmod(0o755)


def test_a_destination_that_cannot_be_written_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the way, a full folder, a place where nothing can be made."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    for out in ("file", "full", "file/below"):
        said = refused(
            capsys, tmp_path, "hf2megatron", "--hf", place / "hf", "--out", tmp_path / out
        )
        assert str(tmp_path / out.split("/")[0]) in said
    said = refused(capsys, tmp_path, "hf2megatron", "--hf", place / "hf", "--out", "/proc/x")
    assert "/proc" in said


def test_a_rank_that_is_missing_is_explained_by_what_the_run_noted(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last tensor rank gone: the folders alone look like TP 1."""
    ranks = Path(shutil.copytree(place / "ranks", tmp_path / "ranks"))
    shutil.rmtree(ranks / "release" / "mp_rank_01")
    said = refused(capsys, tmp_path, "megatron2hf", "--megatron", ranks, "--out", tmp_path / "o")
    assert "it was saved at tp 2 pp 1 ep 1, the folders here are those of tp 1" in said
    (ranks / "latest_checkpointed_iteration.txt").write_text("77")
    said = refused(capsys, tmp_path, "megatron2hf", "--megatron", ranks, "--out", tmp_path / "o")
    assert "says 77, but" in said and "iter_0000077 does not exist" in said


def test_a_torch_dist_checkpoint_below_a_tracker_file_is_found(place: Path, tmp_path: Path) -> None:
    """As Megatron-LM saves: iter_0000100 beside latest_checkpointed_iteration.txt."""
    run = tmp_path / "run"
    shutil.copytree(place / "megatron", run / "iter_0000100")
    (run / "latest_checkpointed_iteration.txt").write_text("100\n")
    template = ["--hf-template", f"{place}/hf"]
    words = ["megatron2hf", "--megatron", f"{run}", "--out", f"{tmp_path}/back", *template]
    assert main(words) == 0
    back, hf = (load_file(f / "model.safetensors") for f in (tmp_path / "back", place / "hf"))
    assert back.keys() == hf.keys() and all(torch.equal(back[name], hf[name]) for name in hf)
    assert main(["inspect", f"{run}"]) == 0
    assert main(["verify", "--hf", f"{place}/hf", "--megatron", f"{run}"]) == 0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("direction", ["hf2megatron", "megatron2hf"])
def test_an_interrupted_conversion_says_so_and_leaves_nothing(
    direction: str, workers: int, place: Path, tmp_path: Path
) -> None:
    """CONV-42: Ctrl-C in the middle, to the whole foreground group as a terminal sends it: status
    130, no traceback, no folder, no worker left."""
    source = place / ("hf" if direction == "hf2megatron" else "megatron")
    option = "--hf" if direction == "hf2megatron" else "--megatron"
    words = [direction, option, f"{source}", "--out", f"{tmp_path}/out", "--workers", f"{workers}"]
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(REPO / "tools" / "convert_hf.py"), str(tmp_path), *words],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(tmp_path / "started")
        assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [".out.partial"]
        os.killpg(child.pid, signal.SIGINT)
        err = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 130 and "Traceback" not in err, err
    assert "interrupted; nothing was kept" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["started"]
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)


# The command, with every tensor taking a minute.
SLOW = """
import pathlib, runpy, sys, time
from megagrpo.weights.moves import Mover
run, place = Mover.run, pathlib.Path(sys.argv[2])
def slow(self, job):
    (place / "started").touch()
    time.sleep(60)
    run(self, job)
Mover.run = slow
sys.exit(runpy.run_path(sys.argv[1])["main"](sys.argv[3:]))
"""


def test_a_killed_import_leaves_no_folder_that_looks_complete_and_can_be_repeated(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONV-42 for the way there, in both formats: `.metadata` and the tracker come last."""
    run = Mover.run

    def die(self: Mover, job: Job) -> None:
        run(self, job)
        os._exit(9)

    for words in ([], ["--format", "torch", "--tp", "2"]):
        command = ["hf2megatron", "--hf", f"{place}/hf", "--out", f"{tmp_path}/out", *words]
        monkeypatch.setattr(Mover, "run", die)
        pid = os.fork()
        if pid == 0:
            os._exit(main(command))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        monkeypatch.setattr(Mover, "run", run)
        (left,) = tmp_path.iterdir()
        assert left.name == ".out.partial"
        names = {path.name for path in left.rglob("*")}
        assert not names & {".metadata", "metadata.json", "latest_checkpointed_iteration.txt"}
        assert main(command) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        shutil.rmtree(tmp_path / "out")
