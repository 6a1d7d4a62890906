"""Which prompts a step draws: a permutation per epoch that depends on (seed, epoch) alone.

No rank, layout or clock enters, so all ranks draw the same and a resumed run continues where the
saved one stood. The last step of an epoch is short where prompts_per_step does not divide the
number of prompts (5 prompts by 2: 2, 2, 1): every prompt is drawn exactly once per epoch, none is
drawn twice at once, and the loss divides by what is there. A step that needs more prompts than one
draw gave (rollout/refill.py) draws again. Left out: curricula and weights.
"""

import hashlib
from collections.abc import Sequence

import torch

State = dict[str, int | bool]


class PromptSampler:
    """Draws prompt numbers step by step, epoch after epoch, without end.

    Example: 5 prompts, 2 per step, shuffle off: [0, 1], [2, 3], [4], [0, 1], ...

    With `lengths`, tokens of every prompt, a draw holds prompts of like length: neighbours in the
    order of length, prompts of one length in random order. The draws of an epoch come in random
    order, but for the short one, which is last and of any length.
    """

    def __init__(
        self,
        num_prompts: int,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        lengths: Sequence[int] | None = None,
        source: str = "data.train",
    ) -> None:
        """`source` is the key of the dataset, for messages; ValueError for nothing to draw."""
        if num_prompts < 1:
            raise ValueError("there are no prompts to draw; give data.train at least one row")
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step={prompts_per_step}; use at least 1")
        self.num_prompts, self.prompts_per_step = num_prompts, prompts_per_step
        if lengths is not None and not shuffle:
            raise ValueError("draws of like length come in random order; leave shuffle on")
        assert lengths is None or len(lengths) == num_prompts, (
            f"{num_prompts} prompts but {len(lengths or ())} lengths"
        )
        self.seed, self.shuffle = seed, shuffle
        self._lengths, self._source = lengths, source
        self.epoch, self.position = 0, 0
        self._order = self._permutation()

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, a short last one included."""
        return -(-self.num_prompts // self.prompts_per_step)

    def draw(self) -> list[int]:
        """Prompt numbers of the next step; moves on."""
        if self.position >= self.num_prompts:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()
        start, stop = self.position, self.position + self.prompts_per_step
        self.position = min(stop, self.num_prompts)
        return self._order[start:stop]

    def state(self) -> State:
        """All that a checkpoint needs to continue the draw."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
            # 0 where length plays no part; the order depends on the size of a draw if it does.
            "bucket_prompts": 0 if self._lengths is None else self.prompts_per_step,
        }

    def load_state(self, state: State) -> None:
        """Continue where `state` was taken; ValueError if it belongs to another draw."""
        keys = {
            "num_prompts": f"prompts in {self._source}",
            "seed": "data.shuffle_seed",
            "shuffle": "shuffle",
            "bucket_prompts": "prompts per draw of like length (0: data.bucket_by_length=false)",
        }
        for name, key in keys.items():
            own, saved = self.state()[name], state.get(name, 0)
            if saved != own:
                raise ValueError(
                    f"the checkpoint's data order has {key} {saved}, this run {own}; resume "
                    "with the same data, seed and settings or start a new trainer.run_dir"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        digest = hashlib.sha256(f"{self.seed}/{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        order = torch.randperm(self.num_prompts, generator=generator).tolist()
        return order if self._lengths is None else self._by_length(order, generator)

    def _by_length(self, order: list[int], generator: torch.Generator) -> list[int]:
        """The same numbers, cut into draws of like length, the draws in random order."""
        assert self._lengths is not None
        ordered = sorted(order, key=self._lengths.__getitem__)  # stable: ties stay random
        whole, rest = divmod(self.num_prompts, self.prompts_per_step)
        # The short draw is cut out somewhere, so that not always the longest prompts are in it.
        start = int(torch.randint(whole + 1, (), generator=generator)) * self.prompts_per_step
        short = ordered[start : start + rest]
        others = ordered[:start] + ordered[start + rest :]
        draws = [
            others[number * self.prompts_per_step : (number + 1) * self.prompts_per_step]
            for number in torch.randperm(whole, generator=generator).tolist()
        ]
        return [number for draw in [*draws, short] for number in draw]
