"""The converter: bit-equal round trips, refusals by name, and real megatron-core on both ends."""

import json
import multiprocessing
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megagrpo.model.build import ModelSettings, build_model, local_parameters
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.context import init_parallel
from megagrpo.parallel.mcore_repairs import WRITE_QUEUE
from megagrpo.types import Layout
from megagrpo.weights import torch_dist
from megagrpo.weights.convert import hf_to_megatron, load_rank_, megatron_to_hf
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.moves import Job, Mover
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.table import local_shapes, padded_vocab
from megagrpo.weights.verify import verify
from tests.conversion_memory import KNOWN
from tests.pool import run_ranks
from tests.tiny_models import ARCHITECTURES, make_hf_folder

from megatron.core import dist_checkpointing  # isort: skip; after the import hook
from megatron.core.dist_checkpointing.validation import StrictHandling  # isort: skip

REPO = Path(__file__).resolve().parent.parent
KEY = "model.layers.2.self_attn.k_proj.weight"


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def rewrite(folder: str | Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights of a folder in place."""
    tensors = weights(folder)
    change(tensors)
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def to_megatron(hf: str | Path, out: Path, dtype: torch.dtype | None = None) -> str:
    return str(hf_to_megatron(Path(hf), out, read_shape(hf), dtype))


def to_hf(megatron: Path, out: Path, **options: Any) -> str:
    shape, template = read_shape(megatron), megatron / "hf"
    return str(megatron_to_hf(megatron, out, shape, template, **options))


def assert_equal_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(HuggingFace folder, converted checkpoint) of untied toy T; tests leave both alone."""
    base = tmp_path_factory.mktemp("plain")
    hf = make_hf_folder(base / "hf", with_tokenizer=True, vocab_size=131)
    to_megatron(hf, base / "megatron")
    return Path(hf), base / "megatron"


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [128, 131])
def test_round_trip_is_bit_equal_and_loads_at_any_layout(
    family: str, tied: bool, vocab: int, tmp_path: Path
) -> None:
    """CONV-5, CONV-6, CONV-8, CONV-9, CONV-10, CONV-31: export equals the source; every rank at TP
    1, 2, 4 and PP 2 gets the same from the checkpoint as from the HuggingFace folder."""
    hf = make_hf_folder(tmp_path / "hf", family, tied, vocab_size=vocab)
    to_megatron(hf, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_equal_bits(weights(tmp_path / "back"), weights(hf))
    assert ("lm_head.weight" in weights(tmp_path / "back")) is not tied
    shape = read_shape(hf)
    verify(Path(hf), tmp_path / "megatron", shape)
    for tp, pp in ((1, 1), (2, 2), (4, 1)):
        layout = Layout(world=tp * pp, tp=tp, pp=pp)
        for rank in range(layout.world):
            coords = layout.coordinates(rank)
            sides = []
            for source in (HFSource(hf), MegatronSource(tmp_path / "megatron", shape)):
                shapes = local_shapes(shape, layout, coords)
                side = {name: torch.full(size, float("nan")) for name, size in shapes.items()}
                load_rank_(side, source, shape, layout, coords)
                sides.append(side)
            assert_equal_bits(*sides)


def megatron_core_loads_and_saves(
    rank: int, layout: Layout, hf: str, checkpoint: Path, out: Path
) -> list[str]:
    """On every rank: our checkpoint into a real GPTModel through dist_checkpointing, strictly, and
    out again; returns the parameters that differ from what the table loads."""
    shape = read_shape(hf)
    context = init_parallel(layout, seed=1)
    chunks = build_model(
        shape,
        context,
        dtype=torch.float32,
        padded_vocab=padded_vocab(shape.vocab_size, layout.tp),
        settings=ModelSettings(),
    )
    expected = {n: torch.empty_like(p) for n, p in local_parameters(chunks).items()}
    load_rank_(expected, HFSource(hf), shape, layout, context.coords)
    metadata = {"singleton_local_shards": False}
    sharded = chunks[0].sharded_state_dict(metadata=metadata)
    loaded = dist_checkpointing.load(sharded, str(checkpoint), strict=StrictHandling.RAISE_ALL)
    chunks[0].load_state_dict(loaded, strict=False)
    found = local_parameters(chunks)
    if rank == 0:
        out.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(chunks[0].sharded_state_dict(metadata=metadata), str(out))
    WRITE_QUEUE.shutdown()  # the rank leaves without exit handlers
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize(
    ("family", "tied", "tp", "pp"),
    [("qwen3", False, 1, 1), ("llama", False, 2, 1), ("qwen2", True, 2, 1), ("qwen2", True, 1, 2)],
)
def test_megatron_core_loads_what_we_write_and_we_read_what_it_saves(
    family: str, tied: bool, tp: int, pp: int, tmp_path: Path
) -> None:
    """Strict load (no key missing or left over), padded vocabulary 131, then verify its save."""
    hf = make_hf_folder(tmp_path / "hf", family, tied, vocab_size=131)
    to_megatron(hf, tmp_path / "ours")
    layout = Layout(world=tp * pp, tp=tp, pp=pp)
    different = run_ranks(
        layout.world,
        megatron_core_loads_and_saves,
        layout,
        hf,
        tmp_path / "ours",
        tmp_path / "theirs",
    )
    assert different == [[]] * layout.world
    verify(Path(hf), tmp_path / "theirs", read_shape(hf))
    shutil.copytree(hf, tmp_path / "theirs" / "hf")
    to_hf(tmp_path / "theirs", tmp_path / "back")
    assert_equal_bits(weights(tmp_path / "back"), weights(hf))


def test_extra_and_missing_source_keys_are_both_listed_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    """CONV-1."""
    hf = make_hf_folder(tmp_path / "hf")
    rewrite(hf, lambda t: (t.pop(KEY), t.update({"model.layers.0.surprise": torch.ones(2)})))
    with pytest.raises(ValueError, match=rf"missing \[{KEY}\]; unknown \[.*0.surprise\]"):
        to_megatron(hf, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_inverse_frequencies_of_old_files_are_ignored_by_name_and_said(tmp_path: Path) -> None:
    """The explicit ignore list is one suffix long; the summary names what it took."""
    hf = make_hf_folder(tmp_path / "hf", "llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(hf, lambda t: t.update({name: torch.ones(8)}))
    assert f"ignored: {name}" in to_megatron(hf, tmp_path / "megatron")


def test_tied_with_a_head_converts_only_if_it_equals_the_embedding(tmp_path: Path) -> None:
    """CONV-10; the tied export has no head."""
    hf = make_hf_folder(tmp_path / "hf", tied=True)
    rewrite(hf, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "ignored: lm_head.weight" in to_megatron(hf, tmp_path / "equal")
    to_hf(tmp_path / "equal", tmp_path / "back")
    assert "lm_head.weight" not in weights(tmp_path / "back")
    rewrite(hf, lambda t: t["lm_head.weight"][127, 63].add_(1))
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        to_megatron(hf, tmp_path / "different")


def test_untied_without_head_is_an_error_naming_the_key(tmp_path: Path) -> None:
    """CONV-11."""
    hf = make_hf_folder(tmp_path / "hf")
    rewrite(hf, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing \[lm_head.weight\]"):
        to_megatron(hf, tmp_path / "megatron")


def test_wrong_shape_is_an_error_naming_the_tensor(tmp_path: Path) -> None:
    """A transposed weight does not slip through."""
    hf = make_hf_folder(tmp_path / "hf")
    rewrite(hf, lambda t: t.update({KEY: t[KEY].t().contiguous()}))
    with pytest.raises(ValueError, match=rf"{KEY} has shape \[64, 32\], expected \[32, 64\]"):
        to_megatron(hf, tmp_path / "megatron")


def test_sharded_source_gives_the_same_as_a_single_file(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    """CONV-32, CONV-4: several files plus index; index equals headers; total size matches."""
    hf, megatron = plain
    to_hf(megatron, tmp_path / "shards", shard_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    held = {name: f for f in files for name in load_file(tmp_path / "shards" / f)}
    assert index["weight_map"] == held
    source = weights(hf)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in source.values())
    to_megatron(tmp_path / "shards", tmp_path / "again")
    for name in sorted(path.name for path in megatron.glob("*.distcp")):
        assert (tmp_path / "again" / name).read_bytes() == (megatron / name).read_bytes()


def test_index_and_headers_that_disagree_are_refused(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    """CONV-3, CONV-4: a key or a file that only one of them has."""
    to_hf(plain[1], tmp_path / "shards", shard_bytes=200_000)
    path = tmp_path / "shards" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    changed = {**index, "weight_map": index["weight_map"] | {"model.layers.9.x": first}}
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="model.layers.9.x"):
        HFSource(tmp_path / "shards")
    path.write_text(json.dumps(index))
    (tmp_path / "shards" / first).rename(tmp_path / "shards" / "elsewhere.safetensors")
    with pytest.raises(ValueError, match=f"{first}, which does not exist"):
        HFSource(tmp_path / "shards")


def test_exported_file_holds_its_tensors_and_nothing_more(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    """CONV-33: size = elements x item size + header; the library reads it."""
    to_hf(plain[1], tmp_path / "back")
    file = tmp_path / "back" / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    data = sum(tensor.nbytes for tensor in weights(tmp_path / "back").values())
    assert file.stat().st_size == header + data
    assert header % 8 == 0
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers up to 4 refuses a file without


def test_stored_chunks_hold_no_more_than_their_own_elements(plain: tuple[Path, Path]) -> None:
    """CONV-33 on the Megatron side: torch.save of a view would write the whole storage."""
    stored = torch_dist.StoredTensors(plain[1])
    data = sum(torch.Size(shape).numel() * 4 for shape in stored.shapes.values())
    files = sum(path.stat().st_size for path in plain[1].glob("*.distcp"))
    chunks = sum(stored.chunk_count(key) for key in stored.shapes)
    assert data < files < data + 2048 * (chunks + 4 * 4)


def test_dtype_is_kept_per_tensor_and_casts_are_counted(tmp_path: Path) -> None:
    """CONV-39: bf16 source with one fp32 tensor; --dtype casts, counts and notes it in config."""
    hf = make_hf_folder(tmp_path / "hf", dtype=torch.bfloat16)
    rewrite(hf, lambda t: t.update({KEY: t[KEY].float() + 1e-6}))
    assert "casts: none" in to_megatron(hf, tmp_path / "kept")
    assert "casts: none" in to_hf(tmp_path / "kept", tmp_path / "back")
    assert_equal_bits(weights(tmp_path / "back"), weights(hf))
    assert weights(tmp_path / "back")[KEY].dtype == torch.float32
    summary = to_megatron(hf, tmp_path / "cast", torch.float32)
    assert "casts: 46 bfloat16 -> float32" in summary
    to_hf(tmp_path / "cast", tmp_path / "wide")
    wide = {name: tensor.float() for name, tensor in weights(hf).items()}
    assert_equal_bits(weights(tmp_path / "wide"), wide)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"
    verify(Path(hf), tmp_path / "cast", read_shape(hf), torch.float32)
    with pytest.raises(ValueError, match="47 tensors differ|46 tensors differ"):
        verify(Path(hf), tmp_path / "cast", read_shape(hf))


def test_values_beyond_the_asked_dtype_are_refused(tmp_path: Path) -> None:
    """A finite weight never becomes infinite in silence."""
    hf = make_hf_folder(tmp_path / "hf")
    rewrite(hf, lambda t: t[KEY].fill_(1e6))
    with pytest.raises(ValueError, match=f"{KEY} has values beyond the range of torch.float16"):
        to_megatron(hf, tmp_path / "megatron", torch.float16)
    assert not (tmp_path / "megatron").exists()


def test_quantised_source_is_refused_by_tensor(tmp_path: Path) -> None:
    """CONV-38."""
    hf = make_hf_folder(tmp_path / "hf")
    rewrite(hf, lambda t: t.update({KEY: t[KEY].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=f"{KEY} has dtype F8_E4M3"):
        to_megatron(hf, tmp_path / "megatron")


def test_side_files_travel_there_and_back_with_unknown_fields(tmp_path: Path) -> None:
    """CONV-35, CONV-37: same file list, same bytes, a config field that nobody knows included."""
    hf = make_hf_folder(tmp_path / "hf", with_tokenizer=True, a_field_nobody_knows=[1, 2])
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    to_megatron(hf, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    names = sorted(path.name for path in Path(hf).iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    for name in set(names) - {"model.safetensors"}:
        assert (tmp_path / "back" / name).read_bytes() == (Path(hf) / name).read_bytes(), name


def test_existing_or_same_destination_is_refused_and_the_source_untouched(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    """CONV-36."""
    hf = Path(shutil.copytree(plain[0], tmp_path / "hf"))
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    with pytest.raises(ValueError, match="source and destination are the same"):
        to_megatron(hf, hf / ".." / "hf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        to_megatron(hf, tmp_path / "full")
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["note"]
    (tmp_path / "empty").mkdir()
    to_megatron(hf, tmp_path / "empty")
    assert (tmp_path / "empty" / ".metadata").is_file()


def test_an_export_killed_midway_leaves_nothing_under_the_final_name(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONV-42: killed after the first tensor; the next run succeeds. A failure cleans up."""
    wanted, run = tmp_path / "back", Mover.run

    def die(self: Mover, job: Job) -> None:
        run(self, job)
        os._exit(9)

    monkeypatch.setattr(Mover, "run", die)
    child = multiprocessing.get_context("fork").Process(target=to_hf, args=(plain[1], wanted))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 9
    assert [path.name for path in tmp_path.iterdir()] == [".back.partial"]

    def fail(self: Mover, job: Job) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Mover, "run", fail)
    with pytest.raises(OSError, match="disk full"):
        to_hf(plain[1], wanted)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(Mover, "run", run)
    to_hf(plain[1], wanted)
    assert_equal_bits(weights(wanted), weights(plain[0]))


class Bomb:
    """Unpickling this would create a file."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self._target}",))


@pytest.mark.parametrize("where", [".metadata", "__0_0.distcp"])
def test_hostile_pickles_are_refused_without_being_run(
    where: str, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    """In the metadata by the name of the class, in a blob by torch's own allow-list."""
    folder = Path(shutil.copytree(plain[1], tmp_path / "megatron"))
    mark = tmp_path / "exploded"
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Bomb(mark)))
        expected = "posix.system, which is not allowed"
    else:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        blob = pickle.dumps(Bomb(mark), protocol=2)
        (folder / where).write_bytes(blob)
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(blob)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        expected = "blob at 0 is refused"
    with pytest.raises(ValueError, match=expected):
        to_hf(folder, tmp_path / "back")
    assert not mark.exists() and not (tmp_path / "back").exists()


def edit_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_megatron_keys_are_accounted_too(plain: tuple[Path, Path], tmp_path: Path) -> None:
    """CONV-1, CONV-29: `_extra_state` and optimizer state are no model keys; any other is listed,
    and so is a missing one; a file or chunk that is gone is named."""
    folder = Path(shutil.copytree(plain[1], tmp_path / "megatron"))
    entry = "decoder.layers.mlp.linear_fc2.weight"

    def harmless(metadata: Any) -> None:
        tensors = metadata.state_dict_metadata
        for name in (f"optimizer.state.exp_avg.{entry}", "decoder.final_layernorm._extra_state"):
            tensors[name] = tensors["decoder.final_layernorm.weight"]
            found = {
                type(index)(name, index.offset): info
                for index, info in metadata.storage_data.items()
                if index.fqn == "decoder.final_layernorm.weight"
            }
            metadata.storage_data.update(found)

    edit_metadata(folder, harmless)
    to_hf(folder, tmp_path / "back")
    assert_equal_bits(weights(tmp_path / "back"), weights(plain[0]))

    def rename(metadata: Any) -> None:
        tensors = metadata.state_dict_metadata
        tensors["decoder.surprise"] = tensors.pop("decoder.final_layernorm.weight")
        found = {
            type(index)("decoder.surprise", index.offset): info
            for index, info in metadata.storage_data.items()
            if index.fqn == "decoder.final_layernorm.weight"
        }
        metadata.storage_data.update(found)

    edit_metadata(folder, rename)
    message = r"missing \[decoder.final_layernorm.weight\]; unknown \[decoder.surprise\]"
    with pytest.raises(ValueError, match=message):
        to_hf(folder, tmp_path / "back2")
    shutil.copyfile(plain[1] / ".metadata", folder / ".metadata")
    edit_metadata(folder, lambda m: m.state_dict_metadata[entry].chunks.pop(5))
    with pytest.raises(ValueError, match=rf"{entry}: element .* is not covered"):
        to_hf(folder, tmp_path / "back2")
    shutil.copyfile(plain[1] / ".metadata", folder / ".metadata")
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="__0_0.distcp is missing"):
        to_hf(folder, tmp_path / "back2")
    (folder / ".metadata").unlink()
    with pytest.raises(ValueError, match="no finished torch_dist checkpoint: .metadata"):
        to_hf(folder, tmp_path / "back2")
    assert not (tmp_path / "back2").exists()


def test_verify_sees_one_changed_bit_on_either_side(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    """-0.0 instead of 0.0 differs; the tensor is named in both directions."""
    hf = Path(shutil.copytree(plain[0], tmp_path / "hf"))
    rewrite(hf, lambda t: t[KEY][3, 5].zero_())
    to_megatron(hf, tmp_path / "megatron")
    rewrite(hf, lambda t: t[KEY][3, 5].fill_(-0.0))
    with pytest.raises(ValueError) as caught:
        verify(hf, tmp_path / "megatron", read_shape(hf))
    assert KEY in str(caught.value)
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in str(caught.value)


def test_a_box_is_read_without_the_rest_of_its_tensor(plain: tuple[Path, Path]) -> None:
    """Both sources give the same region, contiguous, owning no more than its elements."""
    shape = read_shape(plain[0])
    full = weights(plain[0])["model.layers.1.self_attn.o_proj.weight"]
    for source in (HFSource(plain[0]), MegatronSource(plain[1], shape)):
        part = source.read("model.layers.1.self_attn.o_proj.weight", ((8, 40), (17, 49)))
        assert torch.equal(part, full[8:40, 17:49])
        assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
        with pytest.raises(KeyError, match="model.nothing"):
            source.read("model.nothing", ((0, 1),))


def cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python tools/convert_hf.py ...` from the source checkout."""
    return subprocess.run(
        [sys.executable, str(REPO / "tools" / "convert_hf.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_line_converts_both_ways_and_verifies(tmp_path: Path) -> None:
    """The three commands; the template defaults to the checkpoint's own hf folder."""
    hf = make_hf_folder(tmp_path / "hf", "mistral", with_tokenizer=True)
    result = cli("hf2megatron", "--hf", hf, "--out", tmp_path / "megatron")
    assert result.returncode == 0 and "39 tensors" in result.stderr, result.stderr
    main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    assert main(["verify", "--hf", hf, "--megatron", megatron]) == 0
    assert main(["megatron2hf", "--megatron", megatron, "--out", back]) == 0
    assert_equal_bits(weights(back), weights(hf))
    rewrite(back, lambda t: t[KEY].add_(1))
    assert main(["verify", "--hf", back, "--megatron", megatron]) == 1


def test_command_line_answers_bad_input_with_one_line_and_status_2(tmp_path: Path) -> None:
    """Nothing is written."""
    failed = cli("hf2megatron", "--hf", tmp_path / "none", "--out", tmp_path / "x")
    assert failed.returncode == 2
    assert failed.stderr == f"error: model folder '{tmp_path / 'none'}' does not exist\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layers", [6, 12])
def test_peak_memory_is_a_few_tensors_whatever_the_depth(layers: int, tmp_path: Path) -> None:
    """CONV-28: at most three times the largest tensor (20 MB), at 110 and 190 MB of weights."""
    toy = make_hf_folder(tmp_path / "toy", "llama")
    hf = make_hf_folder(
        tmp_path / "hf",
        "llama",
        hidden_size=512,
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=10000,
        num_hidden_layers=layers,
    )
    # freed memory leaves the process, as it always does for tensors of real models
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.conversion_memory", hf, toy, tmp_path],
        env={**os.environ, "PYTHONPATH": str(REPO), **given_back},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    *grown, known = [int(word) for word in result.stdout.split()]
    sizes = [torch.Size(info.shape).numel() * 4 for info in HFSource(hf).tensors()]
    largest = max(sizes)
    assert largest == 10000 * 512 * 4 and sum(sizes) > 5 * largest
    assert 0.9 * KNOWN < known < 1.1 * KNOWN, "the measurement sees nothing"
    assert max(grown) <= 3 * largest, [size >> 20 for size in grown]
    assert max(grown) <= 16 << 20, "a few blocks, whatever the largest tensor"
