"""The command line: `megagrpo train | evaluate | ablate | report`; parse and call, nothing else.

Environment is set here, before torch is imported by anything below: one OpenMP thread per rank on
a CPU (two on a shared core are ten times slower) and no torch.compile where no GPU is (its C++
back-end costs minutes at start and nothing here gains from it). A user's own value wins.
"""

import argparse
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from megagrpo import log
from megagrpo.config import help_text
from megagrpo.config_file import EVALUATION_NEEDS, load_config

SILENT_RANK_WAITS_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 2 a mistake of the user, 1 a failure."""
    arguments = _parse(argv)
    _set_environment()
    rank = int(os.environ.get("RANK", "0"))
    log.setup(rank)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        status = command(arguments)
    except ValueError as error:
        # Raised by checks that every rank runs alike, before any process group exists: one rank
        # of every host says it, since a file may be missing on one of them only.
        if os.environ.get("MEGAGRPO_TRACEBACK"):
            traceback.print_exc()
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        log.error(f"error: {' '.join(str(error).split())}", all_ranks=speaks)
        if not speaks:
            # torchrun ends all ranks of a host when the first exits, which must not come before
            # the one that speaks; it usually ends this sleep.
            time.sleep(SILENT_RANK_WAITS_S)
        return 2
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; `section.key=value` words may stand before and after options, which argparse
    alone takes for unknown."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    takes_words = "overrides" in arguments
    unknown = [word for word in rest if not takes_words or word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megagrpo", description="GRPO on Megatron and vLLM, started by torchrun."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a policy (under torchrun)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="keys of a first run (--help-all shows every key):\n" + help_text(short=True),
    )
    train.add_argument("--config", help="YAML file with sections as shown by --help-all")
    train.add_argument(
        "--replay",
        metavar="RUN_DIR/rollouts",
        help="train on the rollouts that a run dumped, without an engine; settings: that run's",
    )
    train.add_argument("--help-all", action="store_true", help="every key with its meaning")
    train.add_argument("overrides", nargs="*", metavar="section.key=value")
    train.set_defaults(command=_train)

    evaluate = commands.add_parser("evaluate", help="score a checkpoint on held-out prompts")
    evaluate.add_argument("--model", required=True, help="checkpoint or HuggingFace folder")
    evaluate.add_argument(
        "--config",
        help="YAML file with data.eval, rewards; default: that of the run that saved the model",
    )
    evaluate.add_argument("overrides", nargs="*", metavar="section.key=value")
    evaluate.set_defaults(command=_evaluate)

    _add_ablate(commands)

    report = commands.add_parser("report", help="write report.html of a run folder")
    report.add_argument("run_dir", metavar="RUN_DIR")
    report.set_defaults(command=_report)
    return parser


def _add_ablate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    ablate = commands.add_parser(
        "ablate", help="compare group sizes on a small budget (starts its own torchrun)"
    )
    ablate.add_argument("--config", help="YAML file as for train")
    ablate.add_argument("--group-sizes", default="4,8,16", help="comma-separated; default 4,8,16")
    ablate.add_argument(
        "--prompts",
        type=int,
        default=1000,
        help="prompts that the run of the smallest group draws; the others sample as many "
        "completions per step from fewer prompts; default 1000",
    )
    ablate.add_argument("--steps", type=int, default=100, help="steps of each run; default 100")
    ablate.add_argument(
        "--nproc", type=int, default=1, help="processes of each run on this host; default 1"
    )
    ablate.add_argument("overrides", nargs="*", metavar="section.key=value")
    ablate.set_defaults(command=_ablate)


def _set_environment() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's overlap relies on it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # torch 2.13 renames collectives that megatron-core and vLLM still call by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|vllm)\.")


def _train(arguments: argparse.Namespace) -> int:
    if arguments.help_all:
        sys.stdout.write(help_text(short=False) + "\n")
        return 0
    path, replay = arguments.config, None
    if arguments.replay is not None:
        replay = Path(arguments.replay)
        path = path or _config_of_replayed(replay)
    config = load_config(path, arguments.overrides)
    from megagrpo.parallel import platform
    from megagrpo.trainer.preflight import prepare

    prepared = prepare(config, platform.rank_from_env(), platform.world_from_env(), replay)
    from megagrpo.trainer.grpo import train
    from megagrpo.trainer.guard import run_guarded
    from megagrpo.trainer.setup import build_run

    return run_guarded(lambda phases: build_run(prepared, phases), train)


def _evaluate(arguments: argparse.Namespace) -> int:
    overrides = [f"model.path={arguments.model}", *arguments.overrides]
    path = arguments.config or _config_of_run(Path(arguments.model))
    config = load_config(path, overrides, EVALUATION_NEEDS)
    from megagrpo.parallel import platform
    from megagrpo.trainer.evaluate import evaluate_checkpoint
    from megagrpo.trainer.preflight import prepare_evaluation

    prepared = prepare_evaluation(config, platform.rank_from_env(), platform.world_from_env())
    found = evaluate_checkpoint(prepared)  # the same on every rank
    for name, value in found.items() if prepared.rank == 0 else ():
        sys.stdout.write(f"{name} {value:.4f}\n")
    sys.stdout.flush()
    return 0


def _ablate(arguments: argparse.Namespace) -> int:
    from megagrpo.parallel import platform
    from megagrpo.trainer.ablate import ablate, check_words, plan_sizes, read_sizes

    if platform.world_from_env() > 1:
        raise ValueError("ablate starts a torchrun for every group size; call it without one")
    check_words(arguments.overrides)
    sizes = plan_sizes(read_sizes(arguments.group_sizes), arguments.prompts, arguments.steps)
    config = load_config(arguments.config, arguments.overrides)
    words = [*arguments.overrides]
    if arguments.config is not None:
        words = ["--config", arguments.config, *words]
    try:
        table = ablate(config, words, sizes, arguments.steps, arguments.nproc)
    except ChildProcessError as error:
        log.error(f"error: {error}")
        return 1
    sys.stdout.write(table)
    return 0


def _config_of_replayed(rollouts: Path) -> str:
    """The config.yaml of the run that dumped RUN_DIR/rollouts."""
    path = rollouts.resolve().parent / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--replay {rollouts}: no {path}; give the run's settings with --config")
    log.info(f"settings: {path}")
    return str(path)


def _config_of_run(checkpoint: Path) -> str | None:
    """The config.yaml of the run that saved RUN_DIR/checkpoints/step_N, if it is one."""
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if checkpoint.resolve().parent.name != "checkpoints" or not path.is_file():
        return None
    log.info(f"settings: {path}")
    return str(path)


def _report(arguments: argparse.Namespace) -> int:
    from megagrpo.metrics.report_html import write_report

    sys.stdout.write(f"{write_report(Path(arguments.run_dir))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
