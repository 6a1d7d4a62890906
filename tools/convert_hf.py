"""Convert between HuggingFace folders and Megatron-Core checkpoints, look into both, compare them.

    python tools/convert_hf.py hf2megatron --hf DIR --out DIR [--format torch --tp T --pp P --ep E]
    python tools/convert_hf.py megatron2hf --megatron DIR --out DIR [--hf-template DIR]
    python tools/convert_hf.py verify --hf DIR --megatron DIR [--logits]
    python tools/convert_hf.py inspect DIR [--keys]
    python tools/convert_hf.py plan --hf DIR [--tp T --pp P]

Arguments and messages only; the work is in `megagrpo/weights/`. No model, no process group (but for
`verify --logits`, which runs both models). A wrong input ends with one line "error: ..." and exit
status 2, nothing written; a difference that `verify` finds is exit status 1.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from megagrpo import log
from megagrpo.model import hf_config
from megagrpo.model.hf_config import DTYPES, hf_folder
from megagrpo.types import Layout, ModelShape
from megagrpo.weights import describe
from megagrpo.weights.convert import hf_to_megatron, megatron_to_hf
from megagrpo.weights.folders import refuse_adapter
from megagrpo.weights.table import PROFILES, check_tp
from megagrpo.weights.verify import Different, verify

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
EXIT_CODES = "exit status: 0 done, 1 verify found a difference, 2 wrong input or disk, 130 Ctrl-C"
INTERRUPTED = 130  # as shells count it: 128 and the number of SIGINT


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="convert_hf.py",
        description="HuggingFace folders <-> Megatron-Core checkpoints, tensor by tensor",
        epilog=EXIT_CODES,
    )
    commands = result.add_subparsers(dest="command", required=True)
    _add_conversions(commands)
    check = commands.add_parser(
        "verify", help="compare the two, every byte, both directions", epilog=EXIT_CODES
    )
    check.add_argument("--hf", type=Path, required=True, help="HuggingFace folder")
    check.add_argument("--megatron", type=Path, required=True, help="checkpoint folder")
    check.add_argument(
        "--logits",
        action="store_true",
        help="run both instead, in float32 on this machine: transformers with --hf, the Megatron "
        "model with --megatron, and compare logits and every layer's output",
    )
    check.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to run with --logits, may be repeated; default: three short ones, or random "
        "tokens for a folder without tokenizer",
    )
    check.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of logits over the largest logit with --logits (default 1e-4)",
    )
    _add_dtype(check, "cast the HuggingFace side first; default: dtypes must be equal")
    look = commands.add_parser("inspect", help="what a folder is and holds; reads no weights")
    look.add_argument("folder", type=Path, help="HuggingFace folder or Megatron checkpoint")
    look.add_argument("--keys", action="store_true", help="a line per tensor, not per kind")
    show = commands.add_parser("plan", help="what would go where; reads the config only")
    show.add_argument("--hf", type=Path, required=True, help="HuggingFace folder or config.json")
    show.add_argument("--tp", type=_count, help="tensor ranks, to see every rank's part")
    show.add_argument("--pp", type=_count, help="pipeline stages, to see every rank's part")
    return result


def _add_conversions(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    there = commands.add_parser("hf2megatron", help="HuggingFace folder -> Megatron checkpoint")
    there.add_argument("--hf", type=Path, required=True, help="HuggingFace folder to read")
    there.add_argument("--out", type=Path, required=True, help="checkpoint folder to create")
    there.add_argument(
        "--format",
        choices=("torch_dist", "torch"),
        default="torch_dist",
        help="torch_dist loads at any layout (default); torch is a file per rank, mp_rank_*",
    )
    there.add_argument("--tp", type=_count, help="tensor ranks; only with --format torch")
    there.add_argument("--pp", type=_count, help="pipeline stages; only with --format torch")
    there.add_argument(
        "--vpp", type=_count, help="virtual stages of each pipeline rank; only with --format torch"
    )
    there.add_argument(
        "--ep", type=_count, help="ranks that share the experts; only with --format torch"
    )
    there.add_argument(
        "--profile",
        choices=PROFILES,
        default="te",
        help="layers that will load it: Transformer Engine's (te, default; te_grouped with grouped "
        "experts) or megatron-core's own (local); torch_dist needs it only for experts",
    )
    back = commands.add_parser("megatron2hf", help="checkpoint of any layout -> HuggingFace folder")
    back.add_argument("--megatron", type=Path, required=True, help="checkpoint folder to read")
    back.add_argument("--out", type=Path, required=True, help="HuggingFace folder to create")
    origin = back.add_mutually_exclusive_group()
    origin.add_argument(
        "--hf-template",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer (no weights needed); default MEGATRON/hf",
    )
    origin.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json alone; no tokenizer is written"
    )
    back.add_argument(
        "--shard-size",
        type=_nbytes,
        default="5GB",
        metavar="SIZE",
        help="largest .safetensors file, e.g. 5GB or 500MiB (default 5GB); a larger tensor gets "
        "its own file",
    )
    for command in (there, back):
        _add_dtype(command, "cast every tensor; default: each keeps its own")
        command.add_argument(
            "--workers",
            type=_count,
            default=1,
            metavar="N",
            help="processes that share the tensors; each takes a few MB of memory (default 1)",
        )
        command.epilog = EXIT_CODES


def _add_dtype(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--dtype", choices=sorted(DTYPES), help=text)


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.upper())
    value = int(float(match.group(1)) * UNITS[match.group(2) or ""]) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB or 2GiB")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no such number; write 1 or more")
    return int(text)


class Bar:
    """A progress bar with bytes, speed and time left; on a file or pipe a line now and then."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def __call__(self, done: int, total: int) -> None:
        """As `convert.Progress`."""
        if self._bar is None:
            pause = 0.2 if sys.stderr.isatty() else 10.0
            self._bar = tqdm(
                total=total, unit="B", unit_scale=True, mininterval=pause, dynamic_ncols=True
            )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def run(arguments: argparse.Namespace) -> str:
    """Do what was asked; returns what to say. Raises ValueError or OSError for bad input."""
    if arguments.command == "inspect":
        return "\n".join(describe.inspect(arguments.folder, arguments.keys))
    if arguments.command == "plan":
        shape = read_shape(arguments.hf)
        return "\n".join(describe.plan(shape, _layout(arguments, shape)))
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    if arguments.command == "verify":
        if arguments.logits:
            return _verify_logits(arguments)
        for name in ("prompt", "tolerance"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} has no effect without --logits; leave it out")
        counts = verify(arguments.hf, arguments.megatron, read_shape(arguments.hf), dtype)
        return f"equal: {counts[0]} HuggingFace tensors, {counts[1]} Megatron tensors"
    bar = Bar()
    try:
        if arguments.command == "hf2megatron":
            shape = read_shape(arguments.hf)
            summary = hf_to_megatron(
                arguments.hf,
                arguments.out,
                shape,
                dtype,
                bar,
                profile=arguments.profile,
                legacy=_legacy(arguments, shape),
                vpp=arguments.vpp or 1,
                ep=arguments.ep or 1,
                workers=arguments.workers,
            )
        else:
            template = arguments.config or _template(arguments.megatron, arguments.hf_template)
            if arguments.config and template.is_dir():
                raise ValueError(f"--config {template} is a folder; --hf-template takes one")
            summary = megatron_to_hf(
                arguments.megatron,
                arguments.out,
                read_shape(template),
                template,
                dtype,
                arguments.shard_size,
                bar,
                workers=arguments.workers,
            )
    finally:
        bar.close()
    return f"wrote {arguments.out}: {summary}"


def _verify_logits(arguments: argparse.Namespace) -> str:
    from megagrpo.model.logits_check import check_logits  # its imports take seconds

    if arguments.dtype is not None:
        raise ValueError("--dtype has no effect with --logits, which compares in float32")
    tolerance = 1e-4 if arguments.tolerance is None else arguments.tolerance
    shape = read_shape(arguments.hf)
    return check_logits(arguments.hf, arguments.megatron, shape, arguments.prompt, tolerance)


def read_shape(path: Path) -> ModelShape:
    """The shape of a folder or a config.json, families that do not train included."""
    refuse_adapter(path)
    return hf_config.read_shape(path, to_convert=True)


def _template(megatron: Path, given: Path | None) -> Path:
    """The HuggingFace folder that an export takes config and tokenizer from."""
    if given is not None and given.is_file():
        raise ValueError(f"--hf-template {given} is a file; --config takes one")
    if given is None and any(megatron.glob("*.safetensors")):
        raise ValueError(f"{megatron} is a HuggingFace folder, no Megatron checkpoint")
    if given is None and megatron.is_dir() and not (megatron / "hf").is_dir():
        raise ValueError(
            f"{megatron} has no folder hf/ that says which model it is; name one with "
            "--hf-template DIR, or a config with --config FILE"
        )
    return hf_folder(given or megatron / "hf")


def _legacy(arguments: argparse.Namespace, shape: ModelShape) -> Layout | None:
    if arguments.format == "torch":
        return _layout(arguments, shape, arguments.vpp or 1) or Layout(world=1)
    for name in ("tp", "pp", "vpp", "ep"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} has no effect with --format torch_dist; leave it out")
    return None


def _layout(arguments: argparse.Namespace, shape: ModelShape, vpp: int = 1) -> Layout | None:
    if (arguments.tp, arguments.pp) == (None, None):
        return None
    tp, pp = arguments.tp or 1, arguments.pp or 1
    check_tp(shape, tp, "--tp")
    if shape.num_layers % (pp * vpp):
        stages = f"--pp={pp}" + f" with --vpp={vpp}" * (vpp > 1)
        raise ValueError(f"{stages} does not divide the model's {shape.num_layers} layers")
    return Layout(world=tp * pp, tp=tp, pp=pp)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if `verify` found a difference, 2 for a user error."""
    arguments = parser().parse_args(argv)
    log.setup(rank=0)
    try:
        said = run(arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1 if isinstance(error, Different) else 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was kept\n")
        return INTERRUPTED
    if arguments.command in ("inspect", "plan"):
        sys.stdout.write(said + "\n")
    else:
        log.info(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
