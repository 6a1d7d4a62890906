"""Convert between HuggingFace folders and Megatron-Core distributed checkpoints.

    python tools/convert_hf.py hf2megatron --hf DIR --out DIR [--dtype bfloat16]
    python tools/convert_hf.py megatron2hf --megatron DIR --out DIR [--hf-template DIR] [--dtype ..]
    python tools/convert_hf.py verify --hf DIR --megatron DIR [--dtype bfloat16]

Arguments and messages only; the work is in `megagrpo/weights/convert.py`. One process, no model, no
process group. A wrong input ends with one line "error: ..." and exit status 2, nothing written.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megagrpo import log
from megagrpo.model.hf_config import DTYPES, hf_folder, read_shape
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.verify import verify


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="convert_hf.py", description="HuggingFace <-> Megatron-Core torch_dist checkpoints"
    )
    commands = result.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("hf2megatron", help="HuggingFace folder -> torch_dist")
    to_megatron.add_argument("--hf", type=Path, required=True, help="HuggingFace folder to read")
    to_megatron.add_argument("--out", type=Path, required=True, help="checkpoint folder to create")
    to_hf = commands.add_parser("megatron2hf", help="torch_dist -> HuggingFace folder")
    to_hf.add_argument("--megatron", type=Path, required=True, help="checkpoint folder to read")
    to_hf.add_argument("--out", type=Path, required=True, help="HuggingFace folder to create")
    to_hf.add_argument(
        "--hf-template",
        type=Path,
        help="folder with config.json and tokenizer (no weights needed); default MEGATRON/hf",
    )
    check = commands.add_parser("verify", help="compare the two, every byte, both directions")
    check.add_argument("--hf", type=Path, required=True, help="HuggingFace folder")
    check.add_argument("--megatron", type=Path, required=True, help="checkpoint folder")
    for command in (to_megatron, to_hf, check):
        command.add_argument(
            "--dtype", choices=sorted(DTYPES), help="cast every tensor; default: each keeps its own"
        )
    return result


def run(arguments: argparse.Namespace) -> str:
    """Do what was asked; returns the summary line. Raises ValueError or OSError for bad input."""
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    if arguments.command == "hf2megatron":
        shape = read_shape(arguments.hf)
        return f"wrote {arguments.out}: {hf_to_megatron(arguments.hf, arguments.out, shape, dtype)}"
    if arguments.command == "megatron2hf":
        template = hf_folder(arguments.hf_template or arguments.megatron / "hf")
        shape = read_shape(template)
        summary = megatron_to_hf(arguments.megatron, arguments.out, shape, template, dtype)
        return f"wrote {arguments.out}: {summary}"
    counts = verify(arguments.hf, arguments.megatron, read_shape(arguments.hf), dtype)
    return f"equal: {counts[0]} HuggingFace tensors, {counts[1]} Megatron tensors"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a user error."""
    arguments = parser().parse_args(argv)
    log.setup(rank=0)
    try:
        log.info(run(arguments))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
