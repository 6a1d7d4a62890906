"""Floating-point operations of a model, for `perf/mfu`; one multiply-add counts as two.

Per sequence of S tokens a forward pass takes 2 N S for the matrices and 2 L d S (S + 1) for causal
attention (scores and their sum over values: 4 d for each of the S (S + 1) / 2 pairs); a backward
pass takes twice as much. N counts what multiplies a token: layers and output head, the embedding's
look-up not. So a trained token costs 6 N and its attention (PaLM, arXiv 2204.02311, appendix B,
which counts all S^2 pairs). Recomputation and padding are not counted: the figure is that of the
model, not of the hardware. Left out: norms, rotations, softmax, the optimizer, generation; and
architectures that do not train here, for which there is no number.

Letters: L layers, d query heads times head size, S tokens of a sequence, N parameters.
"""

from collections.abc import Iterable

from megagrpo.types import ModelShape


def matmul_parameters(shape: ModelShape) -> int | None:
    """N of a dense model, None for other architectures."""
    if shape.experts is not None or shape.latent is not None or shape.gemma is not None:
        return None
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys_and_values = 2 * shape.num_kv_heads * shape.head_dim
    attention = hidden * (queries + keys_and_values) + queries * hidden
    mlp = 3 * hidden * shape.ffn_hidden_size  # gate, up, down
    return shape.num_layers * (attention + mlp) + shape.vocab_size * hidden


def forward_flops(shape: ModelShape, lengths: Iterable[int]) -> int | None:
    """Operations of one forward pass over packed sequences of these lengths."""
    parameters = matmul_parameters(shape)
    if parameters is None:
        return None
    per_pair = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    return sum(2 * parameters * s + per_pair * (s * (s + 1) // 2) for s in lengths)
