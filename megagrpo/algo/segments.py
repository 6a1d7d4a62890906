"""Sums over the sequences of a pack, and the checks that losses and corrections share.

They stand apart because a wrong shape must fail in the same way everywhere: torch would broadcast
[B] against [B, T] in silence wherever B = T. Left out: sequences that several ranks share.

Letters: B sequences of this micro-batch, T packed tokens.
"""

import torch


def segment_sum(values: torch.Tensor, sequence: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum the tokens of every sequence; differentiable.

    values [T] floating, sequence [T] int64 in [0, B); returns [B] in the dtype of `values`.
    """
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def flat_mask(mask: torch.Tensor) -> torch.Tensor:
    """The mask as [T] bool; raises ValueError if an entry is neither 0 nor 1."""
    flat = mask.reshape(-1)
    if flat.dtype == torch.bool:
        return flat
    if not bool(((flat == 0) | (flat == 1)).all()):
        worst = flat[(flat != 0) & (flat != 1)][0].item()
        raise ValueError(f"mask holds {worst}; every entry must be 0 or 1 (is it another tensor?)")
    return flat.bool()


def check_token_shapes(shape: torch.Size, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError naming a per-token tensor whose shape is not exactly `shape`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} (one value per "
                "token); spread values of sequences with the `sequence` index"
            )


def check_sequence_shapes(num_sequences: int, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError naming a per-sequence tensor that is not [num_sequences]."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (num_sequences,):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected ({num_sequences},), one value "
                "per sequence"
            )
