"""The quickstart task: text comes back unchanged, answers are right, the start is weak."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import sentencepiece

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def max2() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_max2", REPO / "examples/make_max2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(max2: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and what `make` printed."""
    out = tmp_path_factory.mktemp("max2")
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words: lines.append(" ".join(map(str, words))))
        max2.make(out, seed=0)
    return out, "\n".join(lines)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_all_pairs_once_with_the_larger_number(made: tuple[Path, str]) -> None:
    train, held_out = rows(made[0] / "train.jsonl"), rows(made[0] / "heldout.jsonl")
    assert (len(train), len(held_out)) == (9000, 1000)
    assert len({row["prompt"] for row in train + held_out}) == 10_000
    for row in train + held_out:
        found = re.fullmatch(r"(\d\d),(\d\d)>", row["prompt"])
        assert found is not None
        assert row["answer"] == max(found.groups())  # two digits: text order is number order


def test_tokenizer_returns_every_text_and_agrees_with_sentencepiece(
    made: tuple[Path, str],
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made[0] / "hf")
    pieces = sentencepiece.SentencePieceProcessor(str(made[0] / "hf" / "tokenizer.model"))
    printable = "".join(map(chr, range(32, 127)))
    for text in ("07,42>", "07,42>42", "42", " 1", "a  b ", printable, ""):
        ids = tokenizer(text).input_ids
        assert ids == pieces.encode(text)
        assert len(ids) == len(text)  # one id a character, nothing put in front
        assert tokenizer.decode(ids) == text
    special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    assert special == (pieces.pad_id(), pieces.eos_id(), pieces.bos_id())
    assert len(tokenizer) == pieces.get_piece_size() == 99


def test_warm_start_leaves_room_to_learn_and_survives_saving(
    made: tuple[Path, str], max2: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    out, printed = made
    greedy, sampled = (float(number) for number in re.findall(r"0\.\d+", printed))
    assert 0.15 < sampled < 0.5 < greedy < 0.9
    max2.score(out, out / "hf")
    assert f"accuracy {greedy:.3f} greedy" in capsys.readouterr().out


def test_summary_compares_the_ends_of_a_run(
    max2: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, float]] = [{"step": 0, "val/heldout/mean@1": 0.5}]
    lines += [{"step": n, "reward/mean": 0.25 if n <= 10 else 0.75} for n in range(1, 21)]
    lines[-1]["val/heldout/mean@1"] = 0.875
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    max2.summary(path)
    said = capsys.readouterr().out
    assert "0.250 -> 0.750" in said
    assert "val/heldout/mean@1: 0.500 before, 0.875 after" in said
