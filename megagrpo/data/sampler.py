"""Which prompts a step draws: a permutation per epoch that depends on (seed, epoch) alone.

No rank, layout or clock enters, so all ranks draw the same and a resumed run continues where the
saved one stood. The last step of an epoch is short where prompts_per_step does not divide the
number of prompts (5 prompts by 2: 2, 2, 1): every prompt is drawn exactly once per epoch, none is
drawn twice in a step, and the loss divides by what is there. Left out: curricula and weights.
"""

import hashlib

import torch

State = dict[str, int | bool]


class PromptSampler:
    """Draws prompt numbers step by step, epoch after epoch, without end.

    Example: 5 prompts, 2 per step, shuffle off: [0, 1], [2, 3], [4], [0, 1], ...
    """

    def __init__(
        self, num_prompts: int, prompts_per_step: int, seed: int, shuffle: bool = True
    ) -> None:
        if num_prompts < 1:
            raise ValueError("there are no prompts to draw; give data.train at least one row")
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step={prompts_per_step}; use at least 1")
        self.num_prompts, self.prompts_per_step = num_prompts, prompts_per_step
        self.seed, self.shuffle = seed, shuffle
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
        }

    def load_state(self, state: State) -> None:
        """Continue where `state` was taken; ValueError if it belongs to another draw."""
        keys = {
            "num_prompts": "prompts in data.train",
            "seed": "data.shuffle_seed",
            "shuffle": "shuffle",
        }
        for name, key in keys.items():
            own = self.state()[name]
            if state[name] != own:
                raise ValueError(
                    f"the checkpoint's data order has {key} {state[name]}, this run {own}; "
                    "resume with the same data and seed or start a new trainer.run_dir"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        digest = hashlib.sha256(f"{self.seed}/{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randperm(self.num_prompts, generator=generator).tolist()
