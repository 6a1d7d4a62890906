"""Times the weight sync against the usual one: gather every full tensor on every rank, load it.

    python tools/bench_sync.py [--layouts tp2-tp1,tp2-tp2,pp2-tp1] [--hidden 512] [--rounds 5]

Both ways run in turn on the same model, engine and ranks (two, started here), and must leave the
same bits in the engine. A layout is trainer-rollout. "Usual" is the plain form of what RL trainers
do: all-gather over TP, broadcast over PP, then vLLM's load_weights on whole tensors. Ours does more
in its time: it refuses non-finite weights, takes the digest and checks that every weight was
written. Memory is the process's (on a GPU the device's) peak over what it held before; buckets are
small, since the product's default would hold this whole model. On one machine bytes are exact and
seconds tell little about a network. Not run on a GPU.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megagrpo.hybrid.engine import HybridEngine
from megagrpo.model.build import (
    ModelSettings,
    build_model,
    load_weights_,
    local_parameters,
    naming_profile,
)
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel import platform
from megagrpo.parallel.context import ParallelContext, init_parallel
from megagrpo.rollout.engine import EngineSettings
from megagrpo.types import Coordinates, Layout, ModelShape
from megagrpo.weights.safetensors_io import HFSource
from megagrpo.weights.slices import by_megatron, index
from megagrpo.weights.table import expand, hf_manifest, local_shapes, padded_vocab

MIB = 1 << 20
LAYOUTS = {  # trainer layout, rollout TP
    "tp2-tp1": (Layout(2, tp=2), 1),
    "tp2-tp2": (Layout(2, tp=2), 2),
    "pp2-tp1": (Layout(2, pp=2), 1),
}


def gather_full(
    parameters: dict[str, torch.nn.Parameter], shape: ModelShape, context: ParallelContext
) -> tuple[dict[str, torch.Tensor], int]:
    """Every HuggingFace tensor, whole, on this rank, and the bytes that came from other ranks.

    All ranks of the world join; all parameters have one dtype.
    """
    layout, here, received = context.layout, context.coords, 0
    dtype = next(iter(parameters.values())).dtype
    full = {
        info.name: torch.empty(info.shape, dtype=dtype, device=platform.device())
        for info in hf_manifest(shape, dtype)
    }
    for stage in range(layout.pp):
        ranks = [Coordinates(tp=tp, pp=stage, dp=here.dp) for tp in range(layout.tp)]
        slices = [by_megatron(expand(shape, layout, at, naming_profile())) for at in ranks]
        source = context.rank + (stage - here.pp) * layout.tp * layout.dp
        for name, size in local_shapes(shape, layout, ranks[0], naming_profile()).items():
            shards = torch.empty(layout.tp, *size, dtype=dtype, device=platform.device())
            if stage == here.pp:
                mine = parameters[name].detach()
                # All TP ranks of this stage.
                dist.all_gather(list(shards.unbind()), mine, group=context.tp_group)
            received += shards[1:].nbytes if stage == here.pp else shards.nbytes
            # All stages of one pipeline.
            dist.broadcast(shards, src=source, group=context.pp_group)
            for shard, pieces in zip(shards, slices, strict=True):
                for piece in pieces.get(name, ()):
                    full[piece.hf][index(piece.hf_box)] = shard[index(piece.megatron_box)]
    return full, received


def measured(work: Callable[[], int]) -> tuple[float, int, int]:
    """Seconds, bytes that `work` says it received, and peak bytes over those held before."""
    dist.barrier()
    before = _start_peak()
    start = time.perf_counter()
    received = work()
    platform.synchronize()
    seconds = time.perf_counter() - start
    return seconds, received, max(0, _peak() - before)


def _start_peak() -> int:
    if platform.is_cuda():
        platform.reset_peak_memory()
        return platform.memory_stats().allocated
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would hide a peak
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _peak() -> int:
    if platform.is_cuda():
        return platform.memory_stats().peak_allocated
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def worker(name: str, folder: str, rounds: int, bucket_bytes: int) -> None:
    """One rank: both syncs in turn, and on rank 0 a line of the table."""
    from megagrpo.rollout.vllm_engine import VLLMEngine

    platform.init_process_group(timeout_s=600)
    layout, rollout_tp = LAYOUTS[name]
    context, shape = init_parallel(layout, seed=0), read_shape(folder)
    dtype = platform.default_dtype()
    chunks = build_model(
        shape,
        context,
        dtype=dtype,
        padded_vocab=padded_vocab(shape.vocab_size, layout.tp),
        settings=ModelSettings(),
    )
    load_weights_(chunks, HFSource(folder), shape, context)
    engine = VLLMEngine(
        _engine_settings(folder, dtype, rollout_tp, shape.vocab_size), context.rank, layout.world
    )
    parameters = local_parameters(chunks)
    haves = expand(shape, layout, context.coords, naming_profile())
    manifest = hf_manifest(shape, dtype)
    hybrid = HybridEngine(
        engine, haves, parameters, manifest, context, lambda: None, bucket_bytes=bucket_bytes
    )
    served = engine._model  # the usual way goes to vLLM's model itself

    def ours() -> int:
        hybrid.sync(version=0)
        return hybrid.plan.received_bytes[context.rank]

    def usual() -> int:
        full, received = gather_full(parameters, shape, context)
        served.load_weights(full.items())
        return received

    found: dict[str, list[tuple[float, int, int]]] = {"ours": [], "usual": []}
    for _ in range(1 + rounds):  # the first warms up
        after = []
        for label, way in (("ours", ours), ("usual", usual)):
            engine.sleep()  # on CPU every weight is NaN until a way has written it
            engine.wake_weights()
            found[label].append(measured(way))
            after.append({n: p.detach().clone() for n, p in served.named_parameters()})
        unequal = [n for n, p in after[0].items() if not torch.equal(p, after[1][n])]
        assert not unequal, f"the two ways left different weights: {unequal}"
        del after
    if context.rank == 0:
        _print_row(name, {label: rounds_[1:] for label, rounds_ in found.items()})


def _engine_settings(
    folder: str, dtype: torch.dtype, rollout_tp: int, vocab: int
) -> EngineSettings:
    return EngineSettings(
        model_folder=folder,
        dtype=dtype,
        tp=rollout_tp,
        max_model_len=64,
        kv_cache_gb=0.0625,
        gpu_memory_utilization=0.5,
        max_num_seqs=8,
        valid_vocab=vocab,
        seed=0,
    )


def _print_row(name: str, found: dict[str, list[tuple[float, int, int]]]) -> None:
    columns = [f"{name:9}"]
    for k, (unit, form) in enumerate(((1, ".3f"), (MIB, ".2f"), (MIB, ".1f"))):
        ours, usual = (
            statistics.median(measure[k] for measure in found[label]) for label in ("ours", "usual")
        )
        columns += [format(value / unit, form).rjust(8) for value in (ours, usual)]
        columns.append(format(ours / usual if usual else float("nan"), "6.2f"))
    sys.stdout.write("  ".join(columns) + "\n")
    sys.stdout.flush()


def make_model(folder: str, hidden: int, layers: int) -> int:
    """A random Qwen3 as a HuggingFace folder; returns its parameter count."""
    platform.mask_broken_media_packages()
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: that of the first layout that failed, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"some of {list(LAYOUTS)}")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="measured ones; medians are shown")
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # set: this process is a rank
    arguments = parser.parse_args(argv)
    names = arguments.layouts.split(",")
    if unknown := set(names) - set(LAYOUTS):
        parser.error(f"unknown layouts {sorted(unknown)}; choose from {list(LAYOUTS)}")
    if arguments.folder:
        bucket_bytes = int(arguments.bucket_mib * MIB)
        worker(names[0], arguments.folder, arguments.rounds, bucket_bytes)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        count = make_model(folder, arguments.hidden, arguments.layers)
        dtype = platform.default_dtype()
        sys.stdout.write(
            f"{count:,} parameters, {count * dtype.itemsize / MIB:.1f} MiB in {dtype}\n"
        )
        sys.stdout.write(
            "rank 0       seconds: ours, usual, ratio    received MiB: same      peak MiB: same\n"
        )
        sys.stdout.flush()
        for name in names:
            command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            command += ["--nproc-per-node", "2", __file__, "--folder", folder, "--layouts", name]
            command += ["--rounds", str(arguments.rounds)]
            command += ["--bucket-mib", str(arguments.bucket_mib)]
            if status := subprocess.run([sys.executable, *command], check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
