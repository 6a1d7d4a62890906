"""Runs both models of a conversion and says where they part: `convert_hf.py verify --logits`.

The tokens are the prompts of the user, a few short ones, or random ids for a folder without
tokenizer. Left out: the models and their comparison, which are `parity.py`'s.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from megagrpo.data.prompts import load_tokenizer
from megagrpo.model import parity
from megagrpo.parallel import platform
from megagrpo.types import ModelShape
from megagrpo.weights.megatron_io import MegatronSource
from megagrpo.weights.verify import Different

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "17 + 25 = 42, because 10 + 20 = 30 and 7 + 5 = 12.",
)


def check_logits(
    hf: Path, megatron: Path, shape: ModelShape, texts: Sequence[str] | None, tolerance: float
) -> str:
    """A line per layer and one for the logits, in float32 on this machine.

    `tolerance` bounds the largest difference of logits over the largest logit. Raises Different
    with the same lines if the two are further apart.
    """
    source = MegatronSource(megatron, shape)
    sequences = _sequences(hf, shape, texts)
    report, layers = parity.check_checkpoint(str(hf), source, shape, sequences)
    worst = max(layers, key=lambda layer: layer.relative)
    lines = [
        f"layer {layer.layer}: largest difference {layer.max_abs_diff:.2e} of "
        f"{layer.max_abs_value:.2e}{'  <- worst' if layer is worst else ''}"
        for layer in layers
    ]
    share = report.max_abs_diff / report.max_abs_logit
    lines.append(
        f"logits: largest difference {report.max_abs_diff:.2e} of {report.max_abs_logit:.2e} "
        f"({share:.1e}) over {report.tokens} tokens, at position {report.position} of prompt "
        f"{report.sequence}; worst layer {worst.layer}"
    )
    if not share <= tolerance:  # NaN too
        raise Different("\n".join([*lines, f"{share:.1e} is over the tolerance {tolerance:.1e}"]))
    return "\n".join(lines)


def _sequences(hf: Path, shape: ModelShape, texts: Sequence[str] | None) -> list[list[int]]:
    """Token ids to run: of the texts, or random ones where there is no tokenizer."""
    if texts is None and not any((hf / name).is_file() for name in TOKENIZER_FILES):
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randint(shape.vocab_size, (length,), generator=generator).tolist()
            for length in (5, 17, 40)
        ]
    platform.mask_broken_media_packages()
    tokenizer = load_tokenizer(hf)
    found = [tokenizer(text)["input_ids"][: shape.max_positions] for text in texts or PROMPTS]
    for ids, text in zip(found, texts or PROMPTS, strict=True):
        if not ids or max(ids) >= shape.vocab_size:
            raise ValueError(f"prompt {text!r} gives no token ids of the model; use another")
    return found
