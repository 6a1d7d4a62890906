"""How many bytes one rank reads of a converted checkpoint: a reader loads whole stored pieces.

Counted by the system: bytes that read() returned to this process (rchar of /proc/self/io).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.model.hf_config import read_shape
from megagrpo.parallel.mcore_cpu import install
from megagrpo.types import Layout, ModelShape
from megagrpo.weights.convert import hf_to_megatron, load_rank_
from megagrpo.weights.fused import stored_key
from megagrpo.weights.legacy_ranks import rank_parameters
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.table import hf_manifest, local_shapes, rank_cuts
from tests.pool import run_ranks
from tests.test_experts import moe_config
from tests.tiny_models import make_hf_folder

install()
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.validation import StrictHandling  # noqa: E402

BIG = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than the tensor ranks
    "head_dim": 96,
    "num_hidden_layers": 2,
    "vocab_size": 4099,  # divides by nothing
}


def bytes_read() -> int:
    line = next(x for x in Path("/proc/self/io").read_text().splitlines() if "rchar" in x)
    return int(line.split()[1])


def metadata_bytes(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in (".metadata", "common.pt"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reads")
    hf = Path(make_hf_folder(place / "hf", **BIG))
    hf_to_megatron(hf, place / "megatron", read_shape(hf))
    return place / "megatron"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reads_moe")
    (place / "hf").mkdir()
    wide = {**BIG, "moe_intermediate_size": 384, "vocab_size": 1031}
    (place / "hf" / "config.json").write_text(json.dumps(moe_config("qwen3_moe", 16, **wide)))
    shape = read_shape(place / "hf", to_convert=True)
    tensors = {info.name: torch.randn(info.shape) for info in hf_manifest(shape, torch.float32)}
    save_file(tensors, place / "hf" / "model.safetensors", metadata={"format": "pt"})
    hf_to_megatron(place / "hf", place / "megatron", shape)
    return place / "megatron"


@pytest.mark.parametrize("rank", range(8))
def test_our_loader_reads_at_tp_8_what_the_rank_holds(rank: int, dense: Path) -> None:
    """At most 1.2 times the rank's shard, beside the metadata."""
    shape, layout = read_shape(dense), Layout(world=8, tp=8)
    coords = layout.coordinates(rank)
    sizes = local_shapes(shape, layout, coords)
    side = {name: torch.full(size, float("nan")) for name, size in sizes.items()}
    for _ in range(2):  # the first time also reads code
        before = bytes_read()
        load_rank_(side, MegatronSource(dense, shape), shape, layout, coords)
        read = bytes_read() - before
    shard = sum(tensor.nbytes for tensor in side.values())
    assert 0.8 * shard < read, "the measurement sees nothing"
    assert read <= 1.2 * shard + metadata_bytes(dense), (read, shard)


def sharded(shape: ModelShape, tp: int, rank: int, ep: int, ep_rank: int) -> dict[str, Any]:
    """What a rank asks megatron-core for: every parameter as a ShardedTensor, cut as its layers
    cut it. Experts have no tensor ranks (etp 1)."""
    layout = Layout(world=tp, tp=tp)
    state: dict[str, Any] = {}
    coords = layout.coordinates(rank)
    for item in rank_parameters(shape, layout, coords, "te", (ep_rank, ep)):
        size, at = (1, 0) if item.expert else (tp, rank)
        row, (key, place) = item.row, stored_key(item.fused, shape)
        counts = (shape.num_layers, shape.experts.count if shape.experts else 0)
        lead = [(axis, number, counts[axis]) for axis, number in enumerate(place)]
        cuts = rank_cuts(shape, row, size, at, 8)
        for number, (_, local) in enumerate(cuts):
            tensor = torch.empty([stop - start for start, stop in local])
            offsets = list(lead)
            if row.kind != "replicated":
                axis = (1 if row.kind == "row" else 0) + len(place)
                offsets.append((axis, number * size + at, size * len(cuts)))
            state[f"{item.name}/{number}"] = ShardedTensor.from_rank_offsets(
                key, tensor, *offsets, prepend_axis_num=len(place), allow_shape_mismatch=True
            )
    return state


def core_reads(rank: int, folder: Path, shape: ModelShape, ep: int) -> tuple[int, int]:
    """(bytes read, bytes of the shard) of megatron-core's own load of one rank's tensors."""
    expert_rank = rank if ep > 1 else 0
    for _ in range(2):  # the first time also reads code
        state = sharded(shape, 8, rank, ep, expert_rank)
        shard = sum(tensor.data.nbytes for tensor in state.values())
        before = bytes_read()
        dist_checkpointing.load(
            state,
            str(folder),
            strict=StrictHandling.IGNORE_ALL,
            validate_access_integrity=False,
        )
        read = bytes_read() - before
    return read, shard


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_megatron_core_reads_at_tp_8_at_most_a_fifth_more_than_the_shard(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Its loader reads whole stored pieces; eight of them meet eight ranks. Of the 16 experts a
    rank reads its own two, whole (ep 8, etp 1)."""
    folder: Path = request.getfixturevalue(kind)
    shape = read_shape(folder, to_convert=True)
    found = run_ranks(8, core_reads, folder, shape, 8 if kind == "experts" else 1)
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    for read, shard in found:
        assert stored > 4 * shard and 0.8 * shard < read, "the measurement sees nothing"
        # every loader of a world unpickles the metadata a few times
        assert read <= 1.2 * shard + 4 * metadata_bytes(folder), (read, shard, stored)
