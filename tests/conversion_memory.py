"""Prints by how many bytes each direction of a conversion raises this process's peak memory, and
what the same measurement says of KNOWN bytes.

    python -m tests.conversion_memory HF_FOLDER TOY_FOLDER SCRATCH_FOLDER

A process of its own, because the heap of a test session is full of holes that hide growth or pass
for it. The toy is converted first: pages of code enter memory at their first use.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from megagrpo.model.hf_config import read_shape
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf

KNOWN = 20 << 20


def status(field: str) -> int:
    """A memory field of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def growth(step: Callable[[], object]) -> int:
    """Peak during `step` over the level before it, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def both_ways(hf: Path, scratch: Path) -> tuple[int, int]:
    """Growth of import and export."""
    shape = read_shape(hf)
    there, back = scratch / f"{hf.name}_m", scratch / f"{hf.name}_b"
    return (
        growth(lambda: hf_to_megatron(hf, there, shape)),
        growth(lambda: megatron_to_hf(there, back, shape, there / "hf")),
    )


if __name__ == "__main__":
    folder, toy, free = (Path(argument) for argument in sys.argv[1:])
    both_ways(toy, free)
    print(*both_ways(folder, free), growth(lambda: b"x" * KNOWN))
