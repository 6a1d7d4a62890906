"""Measure the converter against a plain copy of the same bytes through the safetensors library.

    python tools/bench_convert.py [--gigabytes 1] [--repeats 3] [--workers 2] [--scratch DIR]

Makes a random bfloat16 model, then takes turns: plain copy (load_file, save_file), hf2megatron,
megatron2hf; both again with several workers if asked. Each step runs in a forked process, and
counts from the point where a small model went through once. The best of the repeats is printed,
because whatever else runs on the machine only slows a step down; CPU seconds are printed too, since
they suffer least from that (the memory is without that of worker processes). Files stay in the page
cache: this measures the converter, not the disk. Every export is compared with the source, byte for
byte. Linux only (/proc).
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megagrpo.model.hf_config import read_shape
from megagrpo.weights.arrays import ArrayWriter
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.safetensors_io import SINGLE, HFFolder, HFSource
from megagrpo.weights.slices import row_blocks, volume, whole
from megagrpo.weights.table import hf_manifest

HIDDEN, VOCAB = 1024, 32768
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Measurement:
    """One step, once or at its best."""

    seconds: float  # by the clock
    cpu: float  # seconds of this process and its workers
    peak: int  # bytes above what the process held before


def config_of(layers: int, hidden: int, vocab: int) -> dict[str, Any]:
    """`config.json` of the random model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": hidden // 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def layers_for(nbytes: int) -> int:
    """How many layers make a bfloat16 model of about that size; raises ValueError below one."""
    fixed = 2 * 2 * VOCAB * HIDDEN
    layer = 2 * (HIDDEN * HIDDEN * (3 * 3 + 2 * 4 - 2))
    layers = round((nbytes - fixed) / layer)
    if layers < 1:
        raise ValueError(f"--gigabytes must be at least {(fixed + layer) / 1e9:.2f}")
    return layers


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Config and random weights, block by block."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    infos = hf_manifest(read_shape(folder), torch.bfloat16)
    files, writer = HFFolder(folder, infos, shard_bytes=1 << 50), ArrayWriter()
    files.create()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(BLOCK_BYTES // 2, generator=generator).bfloat16()
    for info in infos:
        path, at = files.places[info.name]
        for box in row_blocks(info.shape, info.dtype.itemsize, BLOCK_BYTES):
            rows = noise[: volume(box)].view(torch.uint8).numpy().data
            writer.write(path, at, rows)
            at += len(rows)
    writer.close()
    files.close()


def plain_copy(hf: Path, scratch: Path) -> None:
    """The yardstick: safetensors' own reader and writer."""
    save_file(load_file(hf / SINGLE), scratch / "copy.safetensors", metadata={"format": "pt"})


def to_megatron(hf: Path, scratch: Path, workers: int = 1) -> None:
    """Import into `scratch`."""
    out = scratch / f"megatron{workers}"
    hf_to_megatron(hf, out, read_shape(hf), workers=workers)


def to_hf(hf: Path, scratch: Path, workers: int = 1) -> None:
    """Export what the import left."""
    megatron, out = scratch / "megatron1", scratch / f"back{workers}"
    megatron_to_hf(megatron, out, read_shape(hf), megatron / "hf", workers=workers)


def steps(workers: int) -> dict[str, Callable[[Path, Path], None]]:
    """What is measured in every turn, in order; with several workers also without."""
    found = {"plain copy": plain_copy, "hf2megatron": to_megatron, "megatron2hf": to_hf}
    if workers > 1:
        found[f"hf2megatron x{workers}"] = partial(to_megatron, workers=workers)
        found[f"megatron2hf x{workers}"] = partial(to_hf, workers=workers)
    return found


def memory(field: str) -> int:
    """A memory field of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def cpu_seconds() -> float:
    """Of this process and of its workers that have ended."""
    return sum(os.times()[:4])


def measure(step: Callable[[], None], warm_up: Callable[[], None]) -> tuple[float, float, int]:
    """The fields of a Measurement of `step` in this process."""
    warm_up()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here
    before, clock, cpu = memory("VmRSS"), time.perf_counter(), cpu_seconds()
    step()
    seconds, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
    return seconds, cpu, memory("VmHWM") - before


def in_child(work: Callable[[], Any]) -> Any:
    """The result of `work` in a forked process, whose memory nothing has touched before."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(work()))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise ValueError("a step failed; its traceback is above") from None
    finally:
        process.join()


def measured(step: Callable[[Path, Path], None], hf: Path, toy: Path, scratch: Path) -> Measurement:
    """One step on the model at `hf`, in a forked process."""
    warm = scratch / "toy"
    found = in_child(lambda: measure(lambda: step(hf, scratch), lambda: step(toy, warm)))
    return Measurement(*found)


def clear(scratch: Path) -> None:
    """A fresh place for the next turn."""
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "toy").mkdir(parents=True)


def check(hf: Path, scratch: Path) -> None:
    """Raise ValueError unless what was exported is the source, byte for byte."""
    for path in scratch.glob(f"back*/{SINGLE}"):
        if not filecmp.cmp(hf / SINGLE, path, shallow=False):
            raise ValueError(f"{path} differs from what it was made of")


def forget(scratch: Path) -> None:
    """Remove what a step wrote, but for the checkpoint that exports read: else the system would
    make the last steps of a turn wait for the disk."""
    for path in scratch.iterdir():
        if path.name == "copy.safetensors":
            path.unlink()
        elif path.name not in ("toy", "megatron1"):
            shutil.rmtree(path)


def best(turns: Sequence[Measurement]) -> Measurement:
    """Least time, least CPU time, largest memory."""
    return Measurement(
        seconds=min(turn.seconds for turn in turns),
        cpu=min(turn.cpu for turn in turns),
        peak=max(turn.peak for turn in turns),
    )


def table(results: dict[str, Measurement], nbytes: int, largest: int) -> str:
    """What is printed."""
    plain = results["plain copy"]
    lines = [
        f"{nbytes / 1e9:.2f} GB of weights, largest tensor {largest / 1e6:.0f} MB",
        f"{'':14} {'seconds':>8} {'GB/s':>6} {'x copy':>7} {'CPU s':>7} {'x copy':>7} "
        f"{'peak MB':>8} {'x largest':>10}",
    ]
    for name, found in results.items():
        lines.append(
            f"{name:14} {found.seconds:8.2f} {nbytes / found.seconds / 1e9:6.2f} "
            f"{plain.seconds / found.seconds:7.2f} {found.cpu:7.2f} {plain.cpu / found.cpu:7.2f} "
            f"{found.peak / 1e6:8.0f} {found.peak / largest:10.2f}"
        )
    return "\n".join(lines)


def run(gigabytes: float, repeats: int, parent: Path | None, workers: int = 1) -> str:
    """Measure; returns the table. Raises ValueError for a size that is too small."""
    layers = layers_for(int(gigabytes * 1e9))
    with tempfile.TemporaryDirectory(prefix="bench_convert_", dir=parent) as name:
        hf, toy, scratch = (Path(name) / part for part in ("hf", "toy", "scratch"))
        in_child(lambda: write_model(hf, config_of(layers, HIDDEN, VOCAB)))
        in_child(lambda: write_model(toy, config_of(2, hidden=64, vocab=512)))
        todo = steps(workers)
        turns: dict[str, list[Measurement]] = {name: [] for name in todo}
        for _ in range(repeats):
            clear(scratch)
            for name, step in todo.items():
                turns[name].append(measured(step, hf, toy, scratch))
                check(hf, scratch)
                forget(scratch)
        sizes = [volume(whole(i.shape)) * i.dtype.itemsize for i in HFSource(hf).tensors()]
        results = {name: best(found) for name, found in turns.items()}
        return table(results, sum(sizes), max(sizes))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a user error."""
    parser = argparse.ArgumentParser(prog="bench_convert.py", description="speed of the converter")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the random model")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the best counts")
    parser.add_argument("--scratch", type=Path, help="where files go; default: the temporary one")
    parser.add_argument("--workers", type=int, default=1, help="also with so many processes")
    given = parser.parse_args(argv)
    try:
        said = run(given.gigabytes, given.repeats, given.scratch, given.workers)
        sys.stdout.write(said + "\n")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
