"""Stand-ins for HuggingFace tensors that know which region of which tensor they are.

An engine's own loader slices what it is given and ends in `copy_`; what happens there is the
`deliver` of the `LazyTensor` (see wants.py). Left out: any arithmetic on weights while loading;
such an op is refused, naming op and tensor.

Letters: a visible dimension is one that the loader sees; a source dimension one of the HuggingFace
tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megagrpo.types import Box

_T = torch.Tensor
Deliver = Callable[["LazyTensor", torch.Tensor], None]


class LazyTensor(torch.Tensor):
    """A region of the HuggingFace tensor `hf_name` without data.

    `box` has a range for every source dimension; `dims` says which source dimension each visible
    one is, None for one of length 1 that a view inserted; `reshaped` is set by a view that merges
    or splits dimensions, after which only `copy_` may follow. Example: row 1 of a [4, 6] tensor,
    transposed: box ((1, 2), (0, 6)), dims (1, 0).
    """

    hf_name: str
    box: Box
    dims: tuple[int | None, ...]
    reshaped: bool
    deliver: Deliver

    @staticmethod
    def __new__(
        cls,
        hf_name: str,
        box: Box,
        dims: tuple[int | None, ...],
        dtype: torch.dtype,
        deliver: Deliver,
        shape: tuple[int, ...] | None = None,
    ) -> "LazyTensor":
        """A stand-in of `dtype`; `shape` overrides the visible shape after a reshape."""
        visible = tuple(1 if d is None else box[d][1] - box[d][0] for d in dims)
        size = visible if shape is None else shape
        self = _T._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        self.hf_name, self.box, self.dims, self.deliver = hf_name, box, dims, deliver
        self.reshaped = size != visible
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Metadata is answered, views shrink the box, `copy_` delivers, all else is refused."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is _T.copy_ and isinstance(args[1], LazyTensor):
            return _copy_(args[0], args[1])
        view = _VIEWS.get(func)
        if view is None or not isinstance(args[0], LazyTensor):
            raise _refusal(func, next(a for a in args if isinstance(a, LazyTensor)))
        if args[0].reshaped and func not in _IDENTITIES:
            raise _refusal(func, args[0])
        return view(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Nothing may reach the data: there is none."""
        raise _refusal(func, next(a for a in args if isinstance(a, LazyTensor)))

    def materialize(self, region: torch.Tensor) -> torch.Tensor:
        """`region` is the tensor of `box`; returns it in the visible shape."""
        kept = [d for d in self.dims if d is not None]
        dropped = [d for d in range(len(self.box)) if d not in kept]
        region = region.permute(*kept, *dropped)
        return region.reshape(self.shape)


def _refusal(func: Callable[..., Any], tensor: LazyTensor) -> NotImplementedError:
    return NotImplementedError(
        f"the engine's loader calls {func} on {tensor.hf_name} {tuple(tensor.shape)}, which the "
        "weight sync does not follow; this architecture is not supported"
    )


def _copy_(destination: torch.Tensor, source: LazyTensor) -> torch.Tensor:
    assert destination.shape == source.shape, (
        f"{source.hf_name}: loader copies {tuple(source.shape)} into {tuple(destination.shape)}"
    )
    if source.numel():
        source.deliver(source, destination)
    return destination


def _with(tensor: LazyTensor, box: Box, dims: tuple[int | None, ...]) -> LazyTensor:
    return LazyTensor(tensor.hf_name, box, dims, tensor.dtype, tensor.deliver)


def _narrow(tensor: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    dim %= tensor.ndim
    size = tensor.shape[dim]
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        raise IndexError(f"{tensor.hf_name}: narrow({dim}, {start}, {length}) of {tensor.shape}")
    source = tensor.dims[dim]
    if source is None:
        if length != 1:
            raise _refusal(_T.narrow, tensor)
        return tensor
    first = tensor.box[source][0] + start
    box = tensor.box[:source] + ((first, first + length),) + tensor.box[source + 1 :]
    return _with(tensor, box, tensor.dims)


def _drop(tensor: LazyTensor, dim: int) -> LazyTensor:
    """The same region without visible dimension `dim`, which has length 1."""
    return _with(tensor, tensor.box, tensor.dims[:dim] + tensor.dims[dim + 1 :])


def _unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    dim %= tensor.ndim + 1
    return _with(tensor, tensor.box, tensor.dims[:dim] + (None,) + tensor.dims[dim:])


def _squeeze(tensor: LazyTensor, dim: int | None = None) -> LazyTensor:
    if dim is not None:
        dim %= tensor.ndim
        return _drop(tensor, dim) if tensor.shape[dim] == 1 else tensor
    kept = tuple(d for d, size in zip(tensor.dims, tensor.shape, strict=True) if size != 1)
    return _with(tensor, tensor.box, kept)


def _permute(tensor: LazyTensor, *order: Any) -> LazyTensor:
    flat = order[0] if isinstance(order[0], (tuple, list)) else order
    return _with(tensor, tensor.box, tuple(tensor.dims[d] for d in flat))


def _transpose(tensor: LazyTensor, a: int, b: int) -> LazyTensor:
    order = list(range(tensor.ndim))
    order[a], order[b] = order[b], order[a]
    return _permute(tensor, order)


def _t(tensor: LazyTensor) -> LazyTensor:
    return tensor if tensor.ndim < 2 else _transpose(tensor, 0, 1)


def _reshape(tensor: LazyTensor, *shape: Any) -> LazyTensor:
    flat = list(shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape)
    if -1 in flat:
        known = 1
        for size in flat:
            known *= size if size != -1 else 1
        flat[flat.index(-1)] = tensor.numel() // max(known, 1)
    wanted = tuple(flat)
    # Only dimensions of length 1 come or go: that is still a box.
    if [s for s in wanted if s != 1] == [s for s in tensor.shape if s != 1]:
        real = iter(d for d, s in zip(tensor.dims, tensor.shape, strict=True) if s != 1)
        return _with(tensor, tensor.box, tuple(None if s == 1 else next(real) for s in wanted))
    result = LazyTensor(
        tensor.hf_name, tensor.box, tensor.dims, tensor.dtype, tensor.deliver, shape=wanted
    )
    assert result.numel() == tensor.numel(), f"{tensor.hf_name}: {tensor.shape} viewed as {wanted}"
    return result


def _flatten(tensor: LazyTensor, start_dim: int = 0, end_dim: int = -1) -> LazyTensor:
    start, end = start_dim % tensor.ndim, end_dim % tensor.ndim
    middle = tensor.shape[start : end + 1].numel()
    return _reshape(tensor, (*tensor.shape[:start], middle, *tensor.shape[end + 1 :]))


def _split(tensor: LazyTensor, size: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    if not isinstance(size, int):
        raise _refusal(_T.split, tensor)
    length = tensor.shape[dim]
    return tuple(
        _narrow(tensor, dim, start, min(size, length - start)) for start in range(0, length, size)
    )


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _unbind(tensor: LazyTensor, dim: int = 0) -> tuple[LazyTensor, ...]:
    dim %= tensor.ndim
    return tuple(_drop(_narrow(tensor, dim, i, 1), dim) for i in range(tensor.shape[dim]))


def _getitem(tensor: LazyTensor, index: Any) -> LazyTensor:
    """Integers, slices of step 1, None and one Ellipsis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(e, (int, slice, type(None), type(...))) for e in entries):
        raise _refusal(_T.__getitem__, tensor)
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        spare = tensor.ndim - sum(e is not None and e is not Ellipsis for e in entries)
        entries[at : at + 1] = [slice(None)] * spare
    dim = 0
    for entry in entries:
        if entry is None:
            tensor, dim = _unsqueeze(tensor, dim), dim + 1
        elif isinstance(entry, int):
            tensor = _drop(_narrow(tensor, dim, entry, 1), dim)
        else:
            start, stop, step = entry.indices(tensor.shape[dim])
            if step != 1:
                raise _refusal(_T.__getitem__, tensor)
            tensor, dim = _narrow(tensor, dim, start, max(0, stop - start)), dim + 1
    return tensor


def _same(tensor: LazyTensor) -> LazyTensor:
    # A new object: loaders hang attributes such as a shard id on what they get.
    shape = tuple(tensor.shape)
    return LazyTensor(
        tensor.hf_name, tensor.box, tensor.dims, tensor.dtype, tensor.deliver, shape=shape
    )


_METADATA = {
    _T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.is_floating_point,
    _T.__len__, _T.is_complex,
    *(
        getattr(_T, attribute).__get__  # noqa: B009 - descriptors, looked up once by name
        for attribute in (
            "shape", "dtype", "device", "ndim", "is_meta", "layout", "is_cuda", "is_cpu",
            "requires_grad",
        )
    ),
}  # fmt: skip
_IDENTITIES = {_T.contiguous, _T.detach, _T.data.__get__}
_VIEWS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(_IDENTITIES, _same),
    _T.narrow: _narrow,
    _T.unsqueeze: _unsqueeze,
    _T.squeeze: _squeeze,
    _T.permute: _permute,
    _T.transpose: _transpose,
    _T.t: _t,
    _T.T.__get__: _t,
    _T.view: _reshape,
    _T.reshape: _reshape,
    _T.flatten: _flatten,
    _T.chunk: _chunk,
    _T.split: _split,
    _T.unbind: _unbind,
    _T.__getitem__: _getitem,
    torch.narrow: _narrow,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.unbind: _unbind,
    torch.squeeze: _squeeze,
    torch.unsqueeze: _unsqueeze,
    torch.permute: _permute,
    torch.transpose: _transpose,
    torch.reshape: _reshape,
    torch.flatten: _flatten,
    torch.t: _t,
}
