"""Blind comparison: who answered, who stands where, and that hostile text stays text."""

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.config_file import load_config
from megagrpo.trainer.compare import write_comparison
from megagrpo.trainer.grpo import train
from megagrpo.types import Completion, Prompt, Sample
from tests.pool import run_ranks
from tests.torch_engine import AutoModelForCausalLM, build, make_place, words


def answer(index: int, text: str, prompt: str = "2+2", reward: float | None = 0.5) -> Sample:
    completion = Completion((1,), (-0.5,), True)
    return Sample(Prompt(index, (2,), prompt, {}), 0, 0, completion, text, {}, reward)


class Page(HTMLParser):
    """The texts of a page's `pre` elements, and every tag that it opens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._inside = tag == "pre"
        if self._inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Prompt, A and B of every number."""
        return list(zip(self.texts[::3], self.texts[1::3], self.texts[2::3], strict=True))


def read(folder: Path, step: int) -> tuple[Page, list[dict[str, Any]]]:
    key = json.loads((folder / f"step_{step}.key.json").read_text())
    assert key["step"] == step
    return Page((folder / f"step_{step}.html").read_text()), key["pairs"]


def test_the_key_says_who_stands_where_and_the_page_does_not(tmp_path: Path) -> None:
    """64 prompts: both orders occur, about equally often, and other ones at another step."""
    ours = [answer(i, f"new {i}", f"prompt {i}", 0.75) for i in range(64)]
    theirs = [answer(i, f"old {i}", f"prompt {i}", 0.125) for i in range(64)]
    orders = []
    for step in (10, 20, 10):
        write_comparison(tmp_path, step, ours, theirs, seed=3)
        page, pairs = read(tmp_path, step)
        for number, (row, pair) in enumerate(zip(page.rows, pairs, strict=True)):
            a, b = ("new", "old") if pair["policy"] == "A" else ("old", "new")
            assert row == (f"prompt {number}", f"{a} {number}", f"{b} {number}")
            assert pair["number"] == number + 1 and pair["prompt_index"] == number
            assert {pair["policy"], pair["reference"]} == {"A", "B"}
            assert (pair["policy_reward"], pair["reference_reward"]) == (0.75, 0.125)
        orders.append([pair["policy"] for pair in pairs])
        assert 16 < orders[-1].count("A") < 48  # four standard deviations of a fair coin
        text = (tmp_path / f"step_{step}.html").read_text()
        assert "0.75" not in re.sub(r"<style>.*</style>", "", text, flags=re.DOTALL)
    assert orders[0] == orders[2] != orders[1]
    assert not list(tmp_path.glob("*.tmp"))


HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></section><h1>Policy won</h1>",
    "<img src=x onerror=alert(1)>",
    "\u202egnirts desrever\x1b[2J\ud800",
    "&lt;b&gt; \"'`</style><style>*{display:none}",
]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    texts = [*HOSTILE]
    write_comparison(
        tmp_path,
        1,
        [answer(i, text, text) for i, text in enumerate(texts)],
        [answer(i, text[::-1], text) for i, text in enumerate(texts)],
        seed=0,
    )
    page, _ = read(tmp_path, 1)
    known = {"html", "head", "meta", "title", "style", "body", "h1", "p", "section", "h2", "h3"}
    assert page.tags <= known | {"div", "pre"}
    assert len(page.rows) == len(texts)
    for text, (prompt, left, right) in zip(texts, page.rows, strict=True):
        if text.isprintable():
            assert prompt == text and {left, right} == {text, text[::-1]}
        else:
            assert "\u202e" not in prompt and "\x1b" not in prompt and r"\u202e" in prompt
    head = (tmp_path / "step_1.html").read_text()
    assert "default-src 'none'" in head


def test_answers_to_different_prompts_never_stand_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="prompts 1 and 2"):
        write_comparison(tmp_path, 1, [answer(1, "")], [answer(2, "")], seed=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("compare"))


def greedy(folder: Path, ids: tuple[int, ...], most: int) -> list[int]:
    """The model's greedy completion in plain transformers; 1 ends it."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    found: list[int] = []
    with torch.no_grad():
        while len(found) < most and 1 not in found:
            logits = model(torch.tensor([[*ids, *found]])).logits[0, -1, :98]
            found.append(int(logits.argmax()))
    return found


def test_the_reference_answers_with_the_start_weights_and_the_policy_with_its_own(
    place: Path, tmp_path: Path
) -> None:
    """Three pages of two prompts out of three, by tensor-parallel trainers; the reference's answers
    are those of the model's folder in plain transformers, asked for once."""
    run_dir = tmp_path / "run"
    overrides = words(
        place,
        run_dir,
        f"data.eval={place}/heldout.jsonl",
        "eval.compare_every=1",
        "eval.compare_prompts=2",
        "parallel.tp=2",
        "trainer.steps=3",
    )

    def act(rank: int) -> tuple[list[Any], dict[int, str], dict[int, tuple[int, ...]]]:
        run = build(rank, 2, overrides)
        train(run)
        prompts = {prompt.index: prompt.ids for prompt in run.evaluator.prompts}
        texts = {
            index: run.collector.decode(greedy(place / "hf", ids, 5))
            for index, ids in prompts.items()
        }
        return run.collector.engine.asked, texts, prompts

    (asked, texts, _), (other, _, _) = run_ranks(2, act)
    assert sum(version == -2 for version, _, _ in asked) == 1
    shown, differs = [], False
    for step in (1, 2, 3):
        page, pairs = read(run_dir / "comparisons", step)
        assert len(pairs) == len(page.rows) == 2
        for row, pair in zip(page.rows, pairs, strict=True):
            sides = {"A": row[1], "B": row[2]}
            assert sides[pair["reference"]] == texts[pair["prompt_index"]]
            differs |= sides["A"] != sides["B"]
            shown.append(pair["prompt_index"])
    assert differs, "a learning rate of 1e-2 changed no answer"
    assert sorted(shown) == [0, 0, 1, 1, 2, 2]  # six places, in a round of three
    order = [0, 1, 2]
    random.Random("compare/0").shuffle(order)
    assert shown[:3] == order


def test_a_comparison_needs_held_out_prompts(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compare_every=5 compares answers to held-out prompts"):
        load_config(None, words(place, tmp_path, "eval.compare_every=5"))


def test_files_that_cannot_be_read_leave_the_engine_asleep(place: Path, tmp_path: Path) -> None:
    """And weights of somebody else are never served as the trainer's, nor nested in a rollout."""

    class Broken:
        def read(self, name: str, box: Any) -> torch.Tensor:
            raise OSError(f"{name} is gone")

    def act(rank: int) -> None:
        run = build(rank, 1, words(place, tmp_path / "run"))
        engine = run.collector.engine
        with pytest.raises(OSError, match="is gone"), run.hybrid.serving(Broken()):
            raise AssertionError("served")
        assert engine.events[-1] == "sleep" and run.hybrid.version == -1
        with (
            run.hybrid.rollout_mode(0),
            pytest.raises(RuntimeError, match="awake"),
            run.hybrid.serving(Broken()),
        ):
            raise AssertionError("served")
        assert engine.events[-1] == "sleep" and engine.version == run.hybrid.version == 0

    run_ranks(1, act)
