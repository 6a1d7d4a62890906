"""A HuggingFace sequence-classification model as a reward: its one logit is the score.

It reads text, never our ids: the conversation and the completion rendered with its own tokenizer
and chat template; without a template a text prompt with the completion behind it. All groups of a
rollout are scored together after generation, on the replica's rank 0; between uses the weights wait
in host memory. Only safetensors are read and the folder's own code is never run. Left out: several
logits, models cut over ranks, a time limit (nothing here waits for anybody).

Letters: B sequences, S padded length.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megagrpo.rewards.calls import Call

DEFAULT_MAX_TOKENS = 16384


class RewardModel:
    """A reward model on disk; its weights are read at the first score."""

    def __init__(
        self,
        folder: Path,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        device: Callable[[], torch.device] = lambda: torch.device("cpu"),
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Check the folder: raises ValueError if it is no model with one logit in safetensors.

        `max_tokens` bounds a batch, padding included. `device` says at every use where to compute;
        `release` gives its cached memory back afterwards.
        """
        self.folder, self._max_tokens = folder, max_tokens
        self._device, self._release = device, release
        self._config, self._limit = _read_config(folder)
        self._tokenizer = _read_tokenizer(folder)
        self._model: Any = None

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        messages: Sequence[Any] | None = None,
    ) -> list[float | str]:
        """The score of every completion, or text that says why there is none.

        `messages` are the prompts before the policy's template; without them `prompts` are taken.
        """
        asked = messages if messages is not None else prompts
        rendered = [self._encode(a, text) for a, text in zip(asked, completions, strict=True)]
        answers: dict[int, float | str] = {}
        answers |= {place: r for place, r in enumerate(rendered) if isinstance(r, str)}
        ids = {place: r for place, r in enumerate(rendered) if not isinstance(r, str)}
        for place, score in self._score(ids).items():
            sound = math.isfinite(score)
            answers[place] = score if sound else f"got logit {score} from the reward model"
        return [answers[place] for place in range(len(completions))]

    def _encode(self, asked: Any, completion: str) -> list[int] | str:
        """Token ids of one conversation, or why it has none."""
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            if not isinstance(asked, str):
                return "has chat messages, but the reward model's tokenizer has no chat template"
            ids = tokenizer(asked + completion)["input_ids"]
        else:
            from jinja2 import TemplateError  # what transformers renders with

            chat = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
            chat.append({"role": "assistant", "content": completion})
            try:
                text = tokenizer.apply_chat_template(chat, tokenize=False)
            except (TemplateError, TypeError, ValueError) as error:
                return f"does not fit the reward model's chat template: {error}"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids or (self._limit is not None and len(ids) > self._limit):
            return f"has {len(ids)} tokens, the reward model takes 1 to {self._limit}"
        return list(ids)

    def _score(self, sequences: Mapping[int, list[int]]) -> dict[int, float]:
        """Scores by key, in batches of like length; the weights are on the device meanwhile."""
        if not sequences:
            return {}
        if self._model is None:
            self._model = _load(self.folder)
        device = self._device()
        self._model.to(device)
        scores: dict[int, float] = {}
        order = sorted(sequences, key=lambda key: (len(sequences[key]), key))
        for keys in _batches(order, sequences, self._max_tokens):
            logits = self._forward([sequences[key] for key in keys], device)
            scores.update(zip(keys, logits, strict=True))
        if device.type != "cpu":
            self._model.to("cpu")
            self._release()
        return scores

    def _forward(self, rows: Sequence[list[int]], device: torch.device) -> list[float]:
        """One batch, padded on the right: ids [B, S] to B logits.

        transformers reads the logit at the last token that is not padding. Where the model has no
        padding id, one that occurs nowhere in the batch makes that the last token, as without any.
        """
        pad = self._config.pad_token_id
        if pad is None:
            used = {token for row in rows for token in row}
            pad = next(token for token in range(len(used) + 1) if token not in used)
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(longest, device=device)[None, :] < lengths[:, None]
        self._model.config.pad_token_id = pad
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask.long()).logits
        return logits.float().reshape(len(rows)).tolist()


class ModelLane:
    """Keeps calls until one is waited for, then scores all of them together in this thread."""

    replaced = 0

    def __init__(self, model: RewardModel) -> None:
        self._model = model
        self._waiting: list[Call] = []

    def submit(self, call: Call) -> None:
        """Keep it: the device belongs to the engine while others generate."""
        self._waiting.append(call)

    def wait(self, call: Call) -> None:
        """Score everything that waits."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return  # scored together with an earlier one
        joined = {
            name: [value for one in waiting for value in one.arguments[name]]
            for name in call.arguments
        }
        answers = iter(self._model(**joined))
        for one in waiting:
            one.begin()
            one.note([next(answers) for _ in range(one.size)])
            one.done.set_result(None)

    def close(self) -> None:
        """Nothing runs between calls."""


def _batches(
    order: Sequence[int], sequences: Mapping[int, list[int]], max_tokens: int
) -> Iterator[list[int]]:
    """Cut keys, sorted by length, into batches of at most `max_tokens` with padding."""
    batch: list[int] = []
    for key in order:
        if batch and (len(batch) + 1) * len(sequences[key]) > max_tokens:
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def _read_config(folder: Path) -> tuple[Any, int | None]:
    """The folder's config and its most tokens, if its weights are a model with one logit."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"reward model {folder} has no config.json; give a HuggingFace folder")
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            empty = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"reward model {folder} does not load: {reason:.300}") from error
    if config.num_labels != 1:
        raise ValueError(
            f"reward model {folder} has num_labels={config.num_labels}; a reward is one logit, "
            "num_labels=1"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"reward model {folder} has no .safetensors file; pickled weights are not read, save "
            "it with transformers' save_pretrained"
        )
    stored: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            stored |= set(tensors.keys())
    inner = f"{empty.base_model_prefix}."
    head = [name for name in empty.state_dict() if not name.startswith(inner)]
    missing = [name for name in head if name not in stored]
    if missing:
        raise ValueError(
            f"reward model {folder} holds no {', '.join(missing)}: it is no trained reward model"
        )
    return config, _longest(config, empty)


def _longest(config: Any, model: torch.nn.Module) -> int | None:
    """Tokens that the model has positions for; None is without limit.

    RoBERTa's kind counts positions from behind its padding id.
    """
    for name, part in model.named_modules():
        ours = name.endswith("position_embeddings") and isinstance(part, torch.nn.Embedding)
        if ours and part.padding_idx is not None:
            return part.num_embeddings - part.padding_idx - 1
    return config.to_dict().get("max_position_embeddings")


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"reward model {folder}: no tokenizer loads: {reason:.300}") from error


def _load(folder: Path) -> Any:
    """The model on the host, in the dtype it is stored in; every weight must come from the files.

    Random numbers of this process are left as they are.
    """
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            dtype="auto",
            output_loading_info=True,
        )
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        raise RuntimeError(f"reward model {folder}: not in its files: {', '.join(absent)}")
    return model.eval()
