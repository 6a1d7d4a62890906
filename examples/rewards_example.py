"""Two reward functions to copy: one by rule, one that waits for somebody else's answer.

    rewards=[{path: examples/rewards_example.py:boxed_number}]
    rewards=[{path: examples/rewards_example.py:judged, weight: 0.5, kwargs: {limit: 200}}]

A reward gets lists with one entry per completion, by name: `prompts` (as rendered), `messages` (the
prompt column as it stands), `completions`, the dataset's other columns (here `answer`), and
whatever `kwargs` of the config holds. It returns one number per completion; None means "not rated"
and leaves that completion out of its group. Beside `weight`, `timeout_s` and `kwargs` an entry may
have `retries` (`judged` asks again when the server is busy), `concurrency` (groups that `judged`
has at once) and `isolate: true` (`boxed_number` in a process of its own, which may hang or die).
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any


def boxed_number(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float | None]:
    """1.0 where the last \\boxed{...} holds the answer, 0.1 where it holds anything, else 0.0."""
    scores: list[float | None] = []
    for text, truth in zip(completions, answer, strict=True):
        boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
        if not boxed:
            scores.append(0.0)
        else:
            scores.append(1.0 if boxed[-1].strip() == str(truth).strip() else 0.1)
    return scores


async def judged(
    prompts: Sequence[str], completions: Sequence[str], limit: int = 400, **_: Any
) -> list[float | None]:
    """Ask a judge about every completion at once; put a call to a model server in its place.

    Completions over `limit` characters are not sent and stay unrated.
    """

    async def ask(completion: str) -> float | None:
        if len(completion) > limit:
            return None
        await asyncio.sleep(0)  # the request; others go out while this one waits
        return 1.0 if completion.rstrip().endswith((".", "!", "?")) else 0.0

    return list(await asyncio.gather(*(ask(completion) for completion in completions)))
