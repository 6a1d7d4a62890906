"""Datasets become prompts: rows read from disk, rendered to token ids once, checked once.

Read are JSON lines, parquet (TRL's and verl's files unchanged) and the folder that the `datasets`
library saves. A prompt is text or a list of chat messages. Messages go through the tokenizer's chat
template whole and once, and what the template wrote is encoded without adding a second BOS. Text is
encoded as the tokenizer does by default, except that an EOS it appends is taken off (the policy
must go on writing) and that a BOS already in the text is not doubled. Left out: downloads,
streaming, images and tool definitions in messages.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megagrpo.types import Prompt

Row = dict[str, Any]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    name_or_path: str
    chat_template: Any
    bos_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """`input_ids` of every text."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """The rendered conversation, text with tokenize=False."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """The text of the ids."""


@dataclass(frozen=True)
class PromptSet:
    """A dataset ready to draw from."""

    prompts: tuple[Prompt, ...]
    dropped_overlong: int  # rows left out because the prompt is too long
    first_rendered: str  # the first prompt as the model sees it, special tokens shown

    def digest(self) -> str:
        """Identity of prompts and their order: SHA-256 prefix of all ids."""
        found = hashlib.sha256()
        for prompt in self.prompts:
            found.update(f"{prompt.index}:{prompt.ids}\n".encode())
        return found.hexdigest()[:16]


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a folder; its own code is never run.

    Raises ValueError if the folder is missing or holds no tokenizer.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no tokenizer folder {folder}; set model.tokenizer or model.path to one")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer  # takes seconds; only who reads text pays

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder}: the tokenizer does not load: {reason:.300}") from error


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of sampled ids without special tokens, spaces left as they are."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    prompt_column: str = "prompt",
    max_prompt_tokens: int,
    overlong: str = "drop",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Read a dataset and render every prompt to ids; the other columns stay with the prompt.

    A prompt over `max_prompt_tokens` is left out and counted, or with overlong="error" refused.
    `Prompt.index` is the row number in the file, also behind dropped rows. Raises ValueError, one
    line each, for a missing or unreadable file, an empty dataset, a missing column, and a prompt
    that is empty, not text or (as chat) without a template.
    """
    if overlong not in ("drop", "error"):
        raise ValueError(f"overlong={overlong!r}; use drop or error")
    path = Path(path)
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path} has no rows; a dataset needs at least one prompt")
    if prompt_column not in rows[0]:
        found = ", ".join(rows[0])
        raise ValueError(
            f"{path} has no column {prompt_column!r}; it has {found} (data.prompt_column)"
        )
    raw = [row.pop(prompt_column) for row in rows]
    texts, ids = _render(path, raw, tokenizer, dict(chat_template_kwargs or {}))
    prompts = []
    for index, (text, encoded, columns) in enumerate(zip(texts, ids, rows, strict=True)):
        if not encoded:
            _refuse(path, index, "is empty")
        if len(encoded) <= max_prompt_tokens:
            prompts.append(Prompt(index, tuple(encoded), text, columns, raw[index]))
        elif overlong == "error":
            limit = f"rollout.max_prompt_tokens={max_prompt_tokens}"
            _refuse(path, index, f"has {len(encoded)} tokens, over {limit}; raise it or drop them")
    if not prompts:
        raise ValueError(
            f"all {len(rows)} prompts of {path} are longer than "
            f"rollout.max_prompt_tokens={max_prompt_tokens}; raise it"
        )
    shown = tokenizer.decode(list(prompts[0].ids), skip_special_tokens=False)
    return PromptSet(tuple(prompts), len(rows) - len(prompts), shown)


def _refuse(path: Path, index: int, what: str) -> NoReturn:
    raise ValueError(f"{path}: the prompt of row {index} {what}")


def _render(
    path: Path, raw: Sequence[Any], tokenizer: Tokenizer, template_kwargs: Row
) -> tuple[list[str], list[list[int]]]:
    """Texts and ids of all rows; chat and text may be mixed."""
    is_chat = [not isinstance(prompt, str) for prompt in raw]
    texts = []
    for index, prompt in enumerate(raw):
        if is_chat[index]:
            messages = _messages(path, index, prompt)
            texts.append(_apply_template(path, index, messages, tokenizer, template_kwargs))
        elif prompt.strip():
            texts.append(prompt)
        else:
            _refuse(path, index, "is empty")
    for index, text in enumerate(texts):
        if any("\ud800" <= character <= "\udfff" for character in text):
            _refuse(path, index, "holds half of a surrogate pair, which is no character")
    ids: list[list[int]] = [[] for _ in texts]
    for kind, encode in ((True, _encode_chat), (False, _encode_text)):
        chosen = [index for index, chat in enumerate(is_chat) if chat is kind]
        if chosen:
            encoded = encode(tokenizer, [texts[index] for index in chosen])
            for index, row_ids in zip(chosen, encoded, strict=True):
                ids[index] = row_ids
    return texts, ids


def _messages(path: Path, index: int, prompt: Any) -> list[Row]:
    """A checked conversation; fields that parquet filled up with null are taken out again."""
    if prompt is None:
        _refuse(path, index, "is missing")
    if not isinstance(prompt, list | tuple):
        _refuse(path, index, f"is a {type(prompt).__name__}, neither text nor chat messages")
    if not prompt:
        _refuse(path, index, "is empty")
    messages = []
    for message in prompt:
        fields = message if isinstance(message, dict) else {}
        for name in ("role", "content"):
            if not isinstance(fields.get(name), str):
                _refuse(path, index, f"has a message whose {name!r} is not text: {message!r:.80}")
        messages.append({name: value for name, value in fields.items() if value is not None})
    return messages


def _apply_template(
    path: Path, index: int, messages: list[Row], tokenizer: Tokenizer, kwargs: Row
) -> str:
    if tokenizer.chat_template is None and "chat_template" not in kwargs:
        raise ValueError(
            f"{path} has chat messages but tokenizer {tokenizer.name_or_path} has no chat template;"
            " use one that has, or text prompts"
        )
    from jinja2 import TemplateError  # what transformers renders with

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        _refuse(path, index, f"does not fit the tokenizer's chat template: {error}")


def _encode_chat(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _encode_text(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    added = tokenizer([""], add_special_tokens=True)["input_ids"][0]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    adds_eos = eos is not None and added[-1:] == [eos]
    adds_bos = bos is not None and added[:1] == [bos]
    encoded = []
    for ids in tokenizer(texts, add_special_tokens=True)["input_ids"]:
        start = 1 if adds_bos and list(ids[:2]) == [bos, bos] else 0
        encoded.append(ids[start : len(ids) - adds_eos])
    return encoded


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a .jsonl or .parquet file or a saved dataset folder, each with all columns.

    Raises ValueError for a missing path, another suffix, or contents that do not parse.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no dataset at {path}, seen from {Path.cwd()}")
    if path.is_dir():
        return _guarded(path, _read_folder)
    if path.suffix not in _READERS:
        raise ValueError(
            f"{path}: unknown dataset type {path.suffix!r}; use .jsonl, .parquet or a folder saved "
            "by the datasets library"
        )
    return _guarded(path, _READERS[path.suffix])


def _guarded(path: Path, read: Callable[[Path], list[Row]]) -> list[Row]:
    import pyarrow

    try:
        return read(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_json_lines(path: Path) -> list[Row]:
    """Rows filled up with None to the union of the columns, as parquet does."""
    rows: list[Row] = []
    with open(path, encoding="utf-8-sig") as file:  # with or without a byte order mark
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a row is an object, not {type(row).__name__}")
            rows.append(row)
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        return file.read().to_pylist()


def _read_folder(path: Path) -> list[Row]:
    """Rows of `Dataset.save_to_disk`: state.json names the Arrow files in their order."""
    import pyarrow as arrow

    state_file = path / "state.json"
    if not state_file.is_file():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        cure = f"it holds the splits {', '.join(splits)}; name one" if splits else "no state.json"
        raise ValueError(f"{path} is not a folder saved by the datasets library: {cure}")
    try:
        entries = json.loads(state_file.read_text(encoding="utf-8"))["_data_files"]
        names = [entry["filename"] for entry in entries]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{state_file} does not list the data files ({error!r})") from error
    rows: list[Row] = []
    for name in names:
        with arrow.memory_map(str(path / name)) as file:
            rows += arrow.ipc.open_stream(file).read_all().to_pylist()
    return rows


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
