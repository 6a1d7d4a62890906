"""What is known of the weights before they leave: that they are finite, and their digest.

The digest is a sum of integers: the bits of every element once, read as signed integers, times a
weight of the tensor's name, modulo 2^40. It does not depend on layout or order, is taken of the
trainer's weights and never of what an engine made of them, and tells two tensors apart that
changed places, though not two elements of one tensor.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megagrpo.hybrid.plan import Boxes, Region
from megagrpo.hybrid.transfer import Sources
from megagrpo.parallel import platform

MODULUS = 2**40  # 2^23 ranks add up without leaving int64; exact as a float64 metric
_STRETCH = 2**18  # elements; in the cache of a CPU core once widened
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_weight(name: str) -> int:
    """Odd weight of a tensor's name in the digest."""
    return zlib.crc32(name.encode()) | 1


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the elements' bits as signed integers: int64 scalar, modulo 2^64.

    In stretches of rows: torch widens all it is given before it adds up.
    """
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(max(1, _STRETCH // max(1, bits[:1].numel()))):
        total += part.sum(dtype=torch.int64)
    return total


def owned_regions(haves: Sequence[Boxes], rank: int) -> list[Region]:
    """The held boxes whose first holder is `rank`: every element of the model has one owner."""
    first: dict[Region, int] = {}
    for holder, have in enumerate(haves):
        for name, boxes in have.items():
            for box in boxes:
                first.setdefault(Region(name, box), holder)
    return [region for region, holder in first.items() if holder == rank]


def non_finite(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the parameters that hold NaN or an infinity."""
    named = [(n, p.detach()) for n, p in parameters.items() if p.is_floating_point()]
    if not named:
        return []
    # A finite sum proves finite elements; a sum that overflowed only looks suspicious.
    sums = torch.stack([p.sum().float() for _, p in named])
    if bool(sums.isfinite().all()):
        return []
    return [name for name, tensor in named if not bool(tensor.isfinite().all())]


def check_and_digest(
    sources: Sources,
    owned: Sequence[Region],
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
) -> int:
    """The digest of the whole model, on every rank; all ranks of `group` (CPU tensors) join.

    Raises ValueError on every rank, naming rank and parameter, if one holds NaN or infinities.
    """
    bad = non_finite(parameters)
    partial = 0
    if owned:
        sums = torch.zeros(len(owned), dtype=torch.int64, device=platform.device())
        for total, region in zip(sums, owned, strict=True):
            total += bit_sum(sources.read(region.name, region.box))
        weights = [name_weight(region.name) for region in owned]
        partial = sum(s * w for s, w in zip(sums.tolist(), weights, strict=True)) % MODULUS
    summed = torch.tensor([partial, len(bad)], dtype=torch.int64)
    # All ranks of the world.
    dist.all_reduce(summed, group=group)
    digest, failures = summed.tolist()
    if failures:
        found: list[list[str]] = [[]] * dist.get_world_size(group)
        # All ranks of the world: the sum above is the same on each.
        dist.all_gather_object(found, bad, group=group)
        named = {rank: names for rank, names in enumerate(found) if names}
        raise ValueError(f"weight sync refused: parameters are not finite, by rank: {named}")
    return digest % MODULUS
