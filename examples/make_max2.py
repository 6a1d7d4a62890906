"""Makes the quickstart's task and its start model: the larger of two numbers, "07,42>" -> "42".

    python examples/make_max2.py make OUT    # OUT/hf, OUT/train.jsonl, OUT/heldout.jsonl
    python examples/make_max2.py score OUT MODEL           # in plain transformers
    python examples/make_max2.py summary RUN/metrics.jsonl  # before and after, from a run

A few seconds on one core: a Qwen3 of 0.6 M parameters, a sentencepiece tokenizer trained on the
spot and a short supervised warm start, so that about a third of the sampled answers are right and
GRPO has something to sharpen. Left out: the supervised run to the end, which would learn the task.
"""

import argparse
import io
import json
import random
import sys
from pathlib import Path

import sentencepiece
import torch

from megagrpo.parallel.platform import mask_broken_media_packages

mask_broken_media_packages()

from transformers import (  # noqa: E402  (after the masking)
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar  # noqa: E402

disable_progress_bar()

Row = dict[str, str]  # {"prompt": "07,42>", "answer": "42"}

PAD, EOS, BOS, UNK = 0, 1, 2, 3
PRINTABLE = [chr(code) for code in range(32, 127)]
HELD_OUT = 1000  # of 10,000 pairs
ANSWER_TOKENS = 4  # two digits, the end of sequence, and room for one mistake
WARM_STEPS = 50  # sampled accuracy 0.19 to 0.29 over three seeds; 60 gives 0.35 to 0.49


def make_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """All 10,000 pairs in a fixed random order, cut into training and held-out rows."""
    rows = [
        {"prompt": f"{a:02d},{b:02d}>", "answer": f"{max(a, b):02d}"}
        for a in range(100)
        for b in range(100)
    ]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def make_tokenizer(folder: Path, rows: list[Row]) -> PreTrainedTokenizerBase:
    """Train `tokenizer.model` and save it with the files that AutoTokenizer loads.

    The vocabulary is exactly as large as the special ids and the printable characters, so no merge
    is learnt: a prompt is cut at the same places alone and with its answer behind it. No dummy
    space is put in front, spaces are kept and nothing is normalised, so text comes back as it was.
    """
    lines = [row["prompt"] + row["answer"] for row in rows] + PRINTABLE + ["a b"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=len(PRINTABLE) + 4,
        character_coverage=1.0,
        **{"pad_id": PAD, "eos_id": EOS, "bos_id": BOS, "unk_id": UNK, "pad_piece": "<pad>"},
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = LlamaTokenizer.from_pretrained(
        folder, add_prefix_space=False, add_bos_token=False, pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def make_model(seed: int) -> Qwen3ForCausalLM:
    """The untrained model, float32; 128 vocabulary rows, of which the tokenizer uses 99."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        **{"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS, "dtype": "float32"},
    )
    return Qwen3ForCausalLM(config)


def warm_start_(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: list[Row], seed: int
) -> None:
    """A short supervised run, 64 rows a step, loss on the answer and its end of sequence."""
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model.train()
    for _ in range(WARM_STEPS):
        batch = [draw.choice(rows) for _ in range(64)]
        prompts = torch.tensor([tokenizer(row["prompt"]).input_ids for row in batch])
        answers = torch.tensor([[*tokenizer(row["answer"]).input_ids, EOS] for row in batch])
        logits = model(input_ids=torch.cat([prompts, answers], 1)).logits
        predicted = logits[:, prompts.size(1) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
    model.eval()


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    *,
    sample: bool,
    seed: int = 0,
) -> float:
    """Share of rows answered exactly and ended by the end of sequence; greedy or sampled at 1."""
    torch.manual_seed(seed)
    prompts = torch.tensor([tokenizer(row["prompt"]).input_ids for row in rows])
    choice = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=sample,
        pad_token_id=PAD,
        eos_token_id=EOS,
        **choice,
    )
    right = 0
    for row, completion in zip(rows, ids[:, prompts.size(1) :].tolist(), strict=True):
        ended = completion[: completion.index(EOS)] if EOS in completion else None
        right += ended is not None and tokenizer.decode(ended) == row["answer"]
    return right / len(rows)


def make(out: Path, seed: int) -> None:
    """Write the rows, the tokenizer and the warm-started model, and say how good it is."""
    train, held_out = make_rows(seed=1234)
    tokenizer = make_tokenizer(out / "hf", train)
    for name, rows in (("train", train), ("heldout", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    model = make_model(seed)
    warm_start_(model, tokenizer, train, seed)
    model.save_pretrained(out / "hf")
    greedy = accuracy(model, tokenizer, held_out, sample=False)
    sampled = accuracy(model, tokenizer, held_out, sample=True)
    print(f"warm start: held-out accuracy {greedy:.3f} greedy, {sampled:.3f} sampled")


def score(out: Path, folder: Path) -> None:
    """Load a HuggingFace folder with plain transformers and print its held-out accuracy."""
    lines = (out / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    greedy = accuracy(model, tokenizer, rows, sample=False)
    print(f"{folder} in transformers: held-out accuracy {greedy:.3f} greedy")


def summary(metrics: Path) -> None:
    """Print the mean reward of the first and last ten steps and the first and last evaluation."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    first, last = rewards[:10], rewards[-10:]
    print(f"mean reward: {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f}")
    keys = {key for line in lines for key in line if key.startswith("val/") and "/mean@" in key}
    for key in sorted(keys):
        values = [line[key] for line in lines if key in line]
        print(f"{key}: {values[0]:.3f} before, {values[-1]:.3f} after")


def main() -> int:
    """Read the command line and do one of the three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the task and the warm-started model")
    making.add_argument("out", type=Path)
    making.add_argument("--seed", type=int, default=0, help="initial weights and warm start")
    scoring = commands.add_parser("score", help="held-out accuracy of a HuggingFace folder")
    scoring.add_argument("out", type=Path, help="folder that `make` wrote")
    scoring.add_argument("model", type=Path)
    summing = commands.add_parser("summary", help="before and after, from a run's metrics")
    summing.add_argument("metrics", type=Path)
    args = parser.parse_args()
    if args.command == "make":
        make(args.out, args.seed)
    elif args.command == "score":
        score(args.out, args.model)
    else:
        summary(args.metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
