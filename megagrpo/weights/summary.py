"""What a conversion says when it is done: counts of tensors, bytes, casts, NaN and side files."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megagrpo.types import TensorInfo
from megagrpo.weights.slices import volume, whole


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    tensors: int
    nbytes: int  # of the result's weights
    casts: Mapping[str, int] = field(default_factory=dict)  # "float32 -> bfloat16": tensors
    ignored: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # side files copied
    nans: int = 0  # written elements that are not a number: allowed, and said

    def __str__(self) -> str:
        """One line for the user."""
        casts = ", ".join(f"{count} {name}" for name, count in self.casts.items()) or "none"
        extra = f"; ignored: {', '.join(self.ignored)}" if self.ignored else ""
        files = f"; side files: {', '.join(self.files)}" if self.files else ""
        nans = f"; NaN elements: {self.nans}" if self.nans else ""
        return f"{self.tensors} tensors, {self.nbytes} bytes; casts: {casts}{nans}{extra}{files}"


def count_nans(tensor: torch.Tensor) -> int:
    """Elements that are not a number; one fast pass if there is none."""
    if not tensor.sum().isnan():  # a sum hands a NaN on, and may make one of infinities
        return 0
    return int(tensor.isnan().sum())


def size_of(info: TensorInfo, dtype: torch.dtype) -> int:
    """Bytes of a tensor once it has that dtype."""
    return volume(whole(info.shape)) * dtype.itemsize


def summarize(
    infos: Sequence[TensorInfo],
    dtype: torch.dtype | None,
    ignored: Collection[str],
    files: Sequence[str],
    nans: int,
) -> Summary:
    """The summary of a conversion of `infos` to `dtype` (None: each keeps its own)."""
    final = [(info, dtype or info.dtype) for info in infos]
    short = {
        kind: str(kind).removeprefix("torch.") for info, to in final for kind in (info.dtype, to)
    }
    casts = Counter(f"{short[info.dtype]} -> {short[to]}" for info, to in final if info.dtype != to)
    nbytes = sum(size_of(info, to) for info, to in final)
    return Summary(len(infos), nbytes, casts, tuple(sorted(ignored)), tuple(files), nans)
