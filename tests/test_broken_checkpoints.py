"""Broken, hostile and unlucky inputs of the converter: one line, status 2, nothing half-written."""

import json
import random
import resource
import runpy
import shutil
import signal
import struct
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.model.hf_config import read_shape
from megagrpo.types import Layout
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent
main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
KEY = "model.layers.0.self_attn.k_proj.weight"
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf, shards (its export in several files), megatron, ranks (per rank); tests copy them."""
    folder = tmp_path_factory.mktemp("broken")
    hf = Path(make_hf_folder(folder / "hf", vocab_size=32, **TINY))
    shape = read_shape(hf)
    hf_to_megatron(hf, folder / "megatron", shape)
    hf_to_megatron(hf, folder / "ranks", shape, legacy=Layout(world=2, tp=2))
    megatron_to_hf(folder / "megatron", folder / "shards", shape, hf, shard_bytes=3000)
    return folder


def convert(folder: Path, out: Path) -> int:
    """The exit status of converting the folder, whichever kind it is."""
    if any(folder.glob("*.safetensors")) or folder.name in ("hf", "shards"):
        return int(main(["hf2megatron", "--hf", str(folder), "--out", str(out)]))
    return int(main(["megatron2hf", "--megatron", str(folder), "--out", str(out)]))


def refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *expected: str
) -> None:
    """Status 2, one line that holds all of `expected`, and nothing beside the source."""
    before = sorted(path.name for path in tmp_path.iterdir())
    assert convert(folder, tmp_path / "out") == 2
    err = capsys.readouterr().err
    lines = [line for line in err.replace("\r", "\n").splitlines() if "error: " in line]
    assert len(lines) == 1 and "Traceback" not in err, err
    assert all(part in lines[0] for part in expected), lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_truncated_file_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each kind: safetensors, a shard, a distcp file, a rank's file."""
    for kind, name in (
        ("hf", "model.safetensors"),
        ("shards", "model-00002-of-*.safetensors"),
        ("megatron", "__0_0.distcp"),
        ("ranks", "release/mp_rank_01/model_optim_rng.pt"),
    ):
        folder = Path(shutil.copytree(place / kind, tmp_path / kind))
        (file,) = folder.glob(name)
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        refused(folder, tmp_path, capsys, str(file))


def test_a_missing_shard_and_an_index_that_lies_are_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CONV-3, CONV-4; the index may not lead out of the folder either."""
    folder = Path(shutil.copytree(place / "shards", tmp_path / "shards"))
    (file,) = folder.glob("model-00002-of-*.safetensors")
    file.rename(tmp_path / "elsewhere")
    refused(folder, tmp_path, capsys, file.name, "does not exist")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for content, expected in (
        ({"weight_map": {"x": "../elsewhere"}}, "not a plain file name"),
        ({"weight_map": ["x"]}, "not a safetensors index"),
        ({"weight_map": {"x": 5}}, "not a safetensors index"),
        ({"weight_map": {}}, "not a safetensors index"),
        ([], "not a safetensors index"),
    ):
        path.write_text(json.dumps(content))
        refused(folder, tmp_path, capsys, str(path), expected)
    path.write_text(json.dumps(index)[:-20])
    refused(folder, tmp_path, capsys, str(path), "not a safetensors index")


def test_a_single_file_beside_an_index_of_others_is_two_models_and_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers takes the single file, vLLM the index: whatever is converted, somebody is
    surprised."""
    folder = Path(shutil.copytree(place / "shards", tmp_path / "shards"))
    shutil.copy(place / "hf" / "model.safetensors", folder)
    refused(folder, tmp_path, capsys, str(folder), "two models", "remove one")


def test_a_key_in_two_files_or_twice_in_one_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever came last would win in silence."""
    folder = Path(shutil.copytree(place / "shards", tmp_path / "shards"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(name for name in sorted(set(index.values())) if name != index[KEY])
    tensors = load_file(folder / other)
    tensors[KEY] = load_file(folder / index[KEY])[KEY]
    save_file(tensors, folder / other)
    refused(folder, tmp_path, capsys, KEY, index[KEY], other)
    single = Path(shutil.copytree(place / "hf", tmp_path / "hf"))
    data = (single / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].rstrip()
    entry = json.loads(header)[KEY]
    twice = header[:-1] + b"," + json.dumps({KEY: entry}).encode()[1:]
    rest = data[8 + length :]
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(twice)) + twice + rest)
    refused(single, tmp_path, capsys, "model.safetensors", f"{KEY} is in the header twice")


def test_a_wrong_shape_is_named_in_every_kind(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config of twice the MLP against each."""
    for kind in ("hf", "megatron", "ranks"):
        folder = Path(shutil.copytree(place / kind, tmp_path / kind))
        file = folder / ("config.json" if kind == "hf" else "hf/config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 32}))
        refused(folder, tmp_path, capsys, "has shape [", "expected [")


def test_nan_and_infinity_convert_and_nan_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There and back, bit for bit; the summary says how many; a clean model says nothing."""
    hf = Path(make_hf_folder(tmp_path / "hf", vocab_size=32, **TINY))
    shape = read_shape(hf)
    assert "NaN" not in str(hf_to_megatron(hf, tmp_path / "clean", shape))
    tensors = load_file(hf / "model.safetensors")
    tensors[KEY][1, 2:5] = torch.nan
    tensors["model.norm.weight"][3] = torch.inf
    tensors["lm_head.weight"][31, 15] = torch.nan
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    there = hf_to_megatron(hf, tmp_path / "megatron", shape)
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shape, hf)
    assert there.nans == back.nans == 4 and "NaN elements: 4" in str(there)
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name
    words = ["verify", "--hf", str(hf), "--megatron", f"{tmp_path}/megatron"]
    assert main(words) == 0


def test_a_folder_that_is_no_checkpoint_is_called_so_by_every_command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder, a file, nothing at all."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    config = f"{place}/hf/config.json"
    for name in ("empty", "file", "nothing"):
        thing, out = f"{tmp_path}/{name}", f"{tmp_path}/out"
        for words in (
            ["hf2megatron", "--hf", thing, "--out", out],
            ["megatron2hf", "--megatron", thing, "--out", out],
            ["megatron2hf", "--megatron", thing, "--out", out, "--config", config],
            ["verify", "--hf", f"{place}/hf", "--megatron", thing],
            ["verify", "--hf", thing, "--megatron", f"{place}/megatron"],
            ["inspect", thing],
            ["plan", "--hf", thing],
        ):
            assert main(words) == 2, words
            err = capsys.readouterr().err
            assert err.startswith("error: ") and err.count("\n") == 1, (words, err)
            assert str(tmp_path) in err, (words, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def with_a_full_disk(words: list[str], limit: int) -> None:
    """The command where no file may grow beyond `limit` bytes: a write fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    raise SystemExit(main(words))


@pytest.mark.parametrize("limit", [300, 4000])
@pytest.mark.parametrize("direction", ["there", "there per rank", "back"])
def test_a_full_disk_ends_with_one_line_and_leaves_nothing(
    direction: str, limit: int, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """CONV-42: in the first file's header and in the middle of its data."""
    words = ["hf2megatron", "--hf", f"{place}/hf", "--out", f"{tmp_path}/out"]
    if direction == "there per rank":
        words += ["--format", "torch", "--tp", "2"]
    if direction == "back":
        words = ["megatron2hf", "--megatron", f"{place}/megatron", "--out", f"{tmp_path}/out"]
    child = get_context("fork").Process(target=with_a_full_disk, args=(words, limit))
    child.start()
    child.join(timeout=60)
    err = capfd.readouterr().err
    assert child.exitcode == 2, err
    assert "error: " in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def corrupted(good: bytes, chance: random.Random) -> bytes:
    """Cut, replaced, or a few bytes changed."""
    how = chance.random()
    if how < 0.2:
        return good[: chance.randrange(len(good))]
    if how < 0.3:
        return chance.randbytes(chance.randrange(200))
    data = bytearray(good)
    for _ in range(chance.choice([1, 1, 2, 5])):
        data[chance.randrange(min(len(data), 2500))] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hf", "model.safetensors"),
        ("shards", "model.safetensors.index.json"),
        ("megatron", ".metadata"),
        ("megatron", "metadata.json"),
        ("megatron", "__0_0.distcp"),
        ("megatron", "common.pt"),
        ("ranks", "release/mp_rank_00/model_optim_rng.pt"),
    ],
)
def test_random_damage_never_ends_in_anything_but_a_refusal_or_a_result(
    kind: str, name: str, place: Path, tmp_path: Path
) -> None:
    """60 damaged versions of every file that is parsed: ValueError or OSError of one line, nothing
    left over; or the damage hit numbers only."""
    folder = Path(shutil.copytree(place / kind, tmp_path / kind))
    shape, good, chance = read_shape(place / "hf"), (folder / name).read_bytes(), random.Random(7)
    outcomes = {"refused": 0, "converted": 0}
    for _ in range(60):
        (folder / name).write_bytes(corrupted(good, chance))
        out = tmp_path / "out"
        step: Callable[[], object] = (
            (lambda: hf_to_megatron(folder, out, shape))  # noqa: B023
            if kind in ("hf", "shards")
            else (lambda: megatron_to_hf(folder, out, shape, place / "hf"))  # noqa: B023
        )
        try:
            step()
        except (ValueError, OSError) as error:
            assert "\n" not in str(error), error
            assert [path.name for path in tmp_path.iterdir()] == [kind]
            outcomes["refused"] += 1
        else:
            shutil.rmtree(out)
            outcomes["converted"] += 1
    assert outcomes["refused"] + outcomes["converted"] == 60
    if name != "common.pt":  # which holds nothing that a conversion needs
        assert outcomes["refused"] > 10, outcomes
