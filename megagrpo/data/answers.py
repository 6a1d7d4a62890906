"""Reference answers as token ids, for the cold start of a policy that never finds a reward.

An answer is encoded without special tokens and ends with the tokenizer's end-of-sequence id, as the
policy is to end its own. Left out: answers with several turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.data.prompts import Tokenizer
from megagrpo.types import Prompt


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the answer to imitate. Example: prompt (5, 6), answer (7, 1)."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]  # the end-of-sequence id included


def read_demonstrations(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, column: str, max_tokens: int
) -> dict[int, Demonstration]:
    """Demonstrations by `Prompt.index`, of the rows whose `column` holds a text.

    Raises ValueError if no row has one, if one is no text, or longer than `max_tokens` with its
    end.
    """
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    told = [prompt for prompt in prompts if prompt.columns.get(column) is not None]
    if not told:
        have = ", ".join(sorted(prompts[0].columns)) or "no other column"
        raise ValueError(
            f"no row has a reference answer in column {column!r} (there is {have}); give "
            "algorithm.cold_start.column the right name or set its weight to 0"
        )
    for prompt in told:
        if not isinstance(prompt.columns[column], str):
            kind = type(prompt.columns[column]).__name__
            raise ValueError(f"row {prompt.index}: column {column!r} holds a {kind}, not a text")
    texts = [prompt.columns[column] for prompt in told]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found = {}
    for prompt, ids in zip(told, encoded, strict=True):
        answer = (*ids, *end)
        if len(answer) > max_tokens:
            raise ValueError(
                f"row {prompt.index}: its reference answer has {len(answer)} tokens, more than "
                f"rollout.max_response_tokens={max_tokens}; raise that or leave the answer out"
            )
        found[prompt.index] = Demonstration(prompt.ids, answer)
    return found
