"""Which regions an engine's loader reads, and how it gets them later.

The loader of any architecture is run on stand-ins twice: once to record, then at every sync to be
fed. Nothing is known here of architectures, but for one thing: an engine may keep a head of its own
for a model that ties it to the embedding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megagrpo.rollout.engine import Wants
from megagrpo.rollout.recording import Deliver, LazyTensor
from megagrpo.types import Box, Fetch, TensorInfo

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], set[str]]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def record_wants(
    load: Load, parameters: set[str], manifest: Sequence[TensorInfo]
) -> tuple[Wants, bool]:
    """The regions of every tensor that `load` copies, nothing written, and whether the head wants
    the embedding although the model ties the two.

    `load` is the model's load_weights, `parameters` the names of its distinct parameters. Raises
    RuntimeError if one of them is not filled by the manifest.
    """
    seen: dict[str, dict[Box, None]] = {info.name: {} for info in manifest}
    loaded = set(load((info.name, _stand_in(info, _note_in(seen))) for info in manifest))
    untied_head = HEAD in parameters and HEAD not in seen
    if untied_head:
        (info,) = [info for info in manifest if info.name == EMBEDDING]
        loaded |= load([(HEAD, _stand_in(info, _note_in(seen)))])
    unread = parameters - loaded
    if unread:
        raise RuntimeError(f"no tensor of the manifest fills {sorted(unread)} of the engine")
    return {name: tuple(sorted(boxes)) for name, boxes in seen.items()}, untied_head


def stand_ins(
    manifest: Iterable[TensorInfo], fetch: Fetch, untied_head: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """What load_weights takes: stand-ins that ask `fetch` for a region when it is copied."""

    def deliver(source: LazyTensor, destination: torch.Tensor) -> None:
        destination.copy_(source.materialize(fetch(source.hf_name, source.box)))

    for info in manifest:
        yield info.name, _stand_in(info, deliver)
        if untied_head and info.name == EMBEDDING:
            yield HEAD, _stand_in(info, deliver)


def _note_in(seen: dict[str, dict[Box, None]]) -> Deliver:
    def deliver(source: LazyTensor, destination: torch.Tensor) -> None:
        seen[source.hf_name][source.box] = None

    return deliver


def _stand_in(info: TensorInfo, deliver: Deliver) -> LazyTensor:
    box = tuple((0, size) for size in info.shape)
    return LazyTensor(info.name, box, tuple(range(len(box))), info.dtype, deliver)
