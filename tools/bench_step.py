"""Times a training step against a plain hand-written one on the same parts.

    python tools/bench_step.py [--layouts dp2,tp2,pp2,tp2pp2] [--steps 40]

In one process per rank the product's loop and the plain step take turns, so that both see the same
machine; each trains the same quickstart-sized model (random weights) in the same Megatron and vLLM
instances. The plain step is what a script on the bare libraries does: gather full tensors and
load_weights, LLM.generate with n samples per prompt, rewards and advantages in plain Python, one
padded batch per stage through Megatron's schedule, optimizer.step. It has no reference, report,
checks, alarm, correction or entropy, and waking and sleeping of its engine are not timed. The
product runs with its defaults (log files, TensorBoard, rollout dump, entropy), without a reference.
Medians, the first quarter of the steps left out. The product's `gen` holds its sync, which is shown
once more, and its rewards; what its phases lack to its step is the report. Not run on a GPU.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_sync import gather_full

from megagrpo import log
from megagrpo.config_file import load_config
from megagrpo.model.build import bare, local_parameters
from megagrpo.parallel import platform
from megagrpo.trainer.phases import Phases
from megagrpo.trainer.preflight import Prepared, prepare
from megagrpo.trainer.run import Run
from megagrpo.types import Prompt, Request

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LAYOUTS = {  # ranks, overrides
    "dp1": (1, []),
    "dp2": (2, []),
    "tp2": (2, ["parallel.tp=2"]),
    "tp2r2": (2, ["parallel.tp=2", "rollout.tp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "tp2pp2": (4, ["parallel.tp=2", "parallel.pp=2"]),
}
Row = tuple[int, tuple[int, ...], list[int], float]  # group, prompt, sampled ids, advantage


class PlainStep:
    """The baseline; `seconds` collects its phases."""

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self.run, self.prepared = run, prepared
        self.seconds: dict[str, list[float]] = {}
        self.engine: Any = run.collector.engine
        self.position = 0

    def step(self) -> None:
        """Sync, sample, update; all ranks join."""
        self.engine.wake_weights()
        self.engine.wake_kv_cache()
        dist.barrier()
        start = time.perf_counter()
        self._timed("sync", self._sync)
        rows = self._timed("gen", self._sample)
        self._timed("update", lambda: self._update(rows))
        self.seconds.setdefault("step", []).append(time.perf_counter() - start)
        self.engine.sleep()

    def _timed(self, name: str, work: Any) -> Any:
        start = time.perf_counter()
        answer = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return answer

    def _sync(self) -> None:
        parameters = local_parameters(self.run.policy.trainable.chunks)
        full, _ = gather_full(parameters, self.prepared.shape, self.run.context)
        self.engine._model.load_weights(full.items())
        self.engine._llm.reset_prefix_cache()

    def _sample(self) -> list[Row]:
        """All ranks' rows, advantages included."""
        from megagrpo.rollout.vllm_engine import sampling_params

        rollout, prompts = self.run.rollout, self.run.prompts.prompts
        drawn = [prompts[(self.position + n) % len(prompts)] for n in range(16)]
        self.position += len(drawn)
        mine = [n for n in range(len(drawn)) if n % self.engine.replicas == self.engine.replica]
        settings = [
            sampling_params(Request(drawn[n].ids, self.position * 64 + n), rollout.sampling)
            for n in mine
        ]
        for one in settings:
            one.n = rollout.group_size
        inputs = [{"prompt_token_ids": list(drawn[n].ids)} for n in mine]
        rng = torch.get_rng_state()
        outputs = self.engine._llm.generate(inputs, settings, use_tqdm=False)
        torch.set_rng_state(rng)
        rows = [
            row
            for n, output in zip(mine, outputs, strict=True)
            for row in self._group(n, drawn[n], [list(o.token_ids) for o in output.outputs])
        ]
        everyone: list[Any] = [None] * self.run.context.layout.world
        dist.all_gather_object(everyone, rows if self.engine.tp_rank == 0 else [])
        return sorted((row for part in everyone for row in part), key=lambda row: row[0])

    def _group(self, number: int, prompt: Prompt, answers: list[list[int]]) -> list[Row]:
        decode, truth = self.run.collector.decode, prompt.columns["answer"]
        rewards = [float(decode(ids) == truth) for ids in answers]
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        return [
            (number, prompt.ids, ids, (reward - mean) / (std + 1e-6))
            for ids, reward in zip(answers, rewards, strict=True)
        ]

    def _update(self, rows: list[Row]) -> None:
        """Megatron's schedule and optimizer, one padded batch per pipeline stage."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        layout, trainable = self.run.context.layout, self.run.policy.trainable
        mine = rows[self.run.context.coords.dp :: layout.dp]
        size = len(mine) // layout.pp
        longest = max(len(prompt) + len(ids) for _, prompt, ids, _ in rows)
        batches = iter([_padded(mine[at : at + size], longest) for at in range(0, len(mine), size)])

        def forward(_: Any, model: Any) -> Any:
            tokens, mask, advantages = next(batches)
            labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
            positions = torch.arange(longest, device=tokens.device).expand_as(tokens)
            output = model(tokens, positions, None, labels=labels)

            def loss(losses: torch.Tensor) -> Any:
                logprobs = -losses.float()
                ratio = torch.exp(logprobs - logprobs.detach())
                term = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                total = -(term * mask).sum()
                return total, mask.sum().int(), {"loss": total.detach()}

            return output, loss

        bare(trainable.chunks[0]).config.finalize_model_grads_func = finalize_model_grads
        for chunk in trainable.chunks:
            chunk.zero_grad_buffer()
        trainable.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=trainable.chunks[0],
            num_microbatches=layout.pp,
            seq_length=longest,
            micro_batch_size=size,
            forward_only=False,
        )
        trainable.optimizer.step()
        trainable.optimizer.zero_grad()


def _padded(rows: list[Row], longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [n, S], mask [n, S] at the predicting positions, advantages [n, 1]."""
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest)
    for place, (_, prompt, ids, _) in enumerate(rows):
        tokens[place, : len(prompt) + len(ids)] = torch.tensor([*prompt, *ids])
        mask[place, len(prompt) - 1 : len(prompt) + len(ids) - 1] = 1
    advantages = torch.tensor([[advantage] for *_, advantage in rows])
    here = platform.device()
    return tokens.to(here), mask.to(here), advantages.to(here)


def worker(words: Sequence[str], label: str) -> None:
    """One rank: the product's loop with a plain step between any two of its steps."""
    from megagrpo.trainer.grpo import train
    from megagrpo.trainer.setup import build_run

    log.setup(1)  # nothing but the table
    config = str(EXAMPLES / "configs" / "tiny_cpu.yaml")
    prepared = prepare(
        load_config(config, words), platform.rank_from_env(), platform.world_from_env()
    )
    run = build_run(prepared, Phases())
    plain, product, numbers = PlainStep(run, prepared), list[float](), run.remaining_steps()

    def alternating() -> Iterator[int]:
        for number in numbers:
            dist.barrier()
            start = time.perf_counter()
            yield number
            product.append(time.perf_counter() - start)
            if number < prepared.length.rollouts:
                plain.step()

    run.remaining_steps = alternating  # type: ignore[method-assign]
    train(run)
    if run.context.rank == 0:
        skipped = prepared.length.rollouts // 4
        lines = (Path(prepared.config.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines][skipped:-1]  # the last step saves
        ours = {
            name.removeprefix("timing_s/"): statistics.median(line[name] for line in steps)
            for name in steps[0]
            if name.startswith("timing_s/") and name != "timing_s/step"
        }
        ours["sync"] = statistics.median(line["sync/seconds"] for line in steps)
        theirs = {name: statistics.median(all_[skipped:]) for name, all_ in plain.seconds.items()}
        pair = statistics.median(product[skipped:-1]), theirs.pop("step")
        sys.stdout.write(
            f"{label:8} product {pair[0]:.3f} s  plain {pair[1]:.3f} s  ratio "
            f"{pair[0] / pair[1]:.2f}\n         product: {_phases(ours)}\n"
            f"         plain:   {_phases(theirs)}\n"
        )
        sys.stdout.flush()


def _phases(seconds: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in seconds.items())


def make_task(folder: Path) -> None:
    """The quickstart's data, tokenizer and model without its warm start."""
    spec = importlib.util.spec_from_file_location("make_max2", EXAMPLES / "make_max2.py")
    assert spec is not None and spec.loader is not None, "examples/make_max2.py is there"
    max2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(max2)
    rows, _ = max2.make_rows(seed=1234)
    max2.make_tokenizer(folder / "hf", rows)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    max2.make_model(seed=0).save_pretrained(folder / "hf")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: that of the first layout that failed, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", default="dp2,tp2,pp2,tp2pp2", help=f"of {list(LAYOUTS)}")
    parser.add_argument("--steps", type=int, default=40, help="at least 3")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)  # this process is a rank
    arguments = parser.parse_args(argv)
    names = arguments.layouts.split(",")
    if unknown := set(names) - set(LAYOUTS):
        parser.error(f"unknown layouts {sorted(unknown)}; choose from {list(LAYOUTS)}")
    if arguments.steps < 3:
        parser.error(f"--steps={arguments.steps}: medians need at least 3")
    if arguments.worker:
        worker(arguments.worker, names[0])
        return 0
    with tempfile.TemporaryDirectory() as place:
        make_task(Path(place))
        for name in names:
            ranks, overrides = LAYOUTS[name]
            words = [f"model.path={place}/hf", f"data.train={place}/train.jsonl", "data.eval=null"]
            words += ["reference.use=auto", f"trainer.run_dir={place}/{name}"]
            words += [f"trainer.steps={arguments.steps}", *overrides]
            command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            command += ["--nproc-per-node", str(ranks), __file__, "--layouts", name, "--worker"]
            status = subprocess.run([sys.executable, *command, *words], check=False).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
