"""A sequence-classification model as a reward, against direct calls of transformers."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.config import RewardConfig
from megagrpo.rewards.base import RewardSpec, check_columns
from megagrpo.rewards.model import RewardModel
from megagrpo.rewards.runner import RewardRunner
from tests.reward_tools import cpu_spec, totals
from tests.tiny_models import make_hf_folder

LETTERS = "abcdefghijklmnopqrstuvwxyz ?.<>/"
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '</s>' }}{% endfor %}"
)


def write_own_tokenizer(folder: Path, template: str | None, pad: str | None) -> None:
    """Another alphabet in another order than the policy's, with other special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    specials = ["</s>", "<u>", "<a>", "<unk>"]
    order = list(LETTERS)
    random.Random(3).shuffle(order)
    vocab = {token: index for index, token in enumerate([*specials, *order])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    settings |= {"eos_token": "</s>", "pad_token": pad, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(
    folder: Path, template: str | None = TEMPLATE, pad: int | None = None, labels: int = 1
) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        num_labels=labels,
        pad_token_id=pad,
    )
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    write_own_tokenizer(folder, template, None if pad is None else "</s>")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("judge") / "judge")


def direct(folder: Path, texts: list[str]) -> list[float]:
    """One text at a time through transformers, unpadded, in its own code."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits.item())
    return scores


CHATS = [
    [{"role": "user", "content": "who?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    + [{"role": "user", "content": "what is it?", "tool_calls": None}],
]
COMPLETIONS = ["it is he.", "", "x" * 30]


def rendered() -> list[str]:
    """What TEMPLATE makes of CHATS with COMPLETIONS, by hand."""
    heads = ["<u>who?</s>", "<u>a</s><a>b</s><u>what is it?</s>"]
    return [f"{head}<a>{text}</s>" for head in heads for text in COMPLETIONS]


@pytest.mark.parametrize("pad", [None, 0, 7])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_scores_equal_direct_unpadded_calls_whatever_the_batches(
    tmp_path: Path, pad: int | None, max_tokens: int
) -> None:
    """Groups of two prompts, chat messages rendered by the judge's own template and tokenizer; with
    padding id 0, which is also its end of sequence, transformers reads the token before it."""
    folder = write_model(tmp_path / "judge", pad=pad)
    runner = RewardRunner(
        [cpu_spec(RewardConfig(path=str(folder), kwargs={"max_tokens": max_tokens}))]
    )
    for key, chat in enumerate(CHATS):
        runner.submit(key, ["?"] * 3, COMPLETIONS, {"messages": [chat] * 3, "answer": ["z"] * 3})
    found = [score for group in runner.collect().values() for score in totals(group)]
    runner.close()
    want = direct(folder, rendered())
    assert len({round(value, 3) for value in want}) == 6, "six texts, six scores"
    assert found == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_a_text_prompt_is_one_users_message_and_without_a_template_the_text_itself(
    folder: Path, tmp_path: Path
) -> None:
    plain = write_model(tmp_path / "plain", template=None)
    with_template = RewardModel(folder)(["who?"], ["me."], ["who?"])
    assert with_template == pytest.approx(direct(folder, ["<u>who?</s><a>me.</s>"]), rel=1e-4)
    assert RewardModel(plain)(["who?"], ["me."]) == pytest.approx(
        direct(plain, ["who?me."]), rel=1e-4
    )
    (said,) = RewardModel(plain)(["who?"], ["me."], [CHATS[0]])
    assert said == "has chat messages, but the reward model's tokenizer has no chat template"


def test_texts_it_cannot_score_fail_alone_and_are_counted(folder: Path, tmp_path: Path) -> None:
    runner = RewardRunner([cpu_spec(RewardConfig(path=str(folder), name="judge", weight=2.0))])
    texts = ["ok.", "x" * 200]
    runner.submit(0, ["p"] * 2, texts, {"messages": [CHATS[0]] * 2})
    first, second = runner.collect()[0]
    want = direct(folder, ["<u>who?</s><a>ok.</s>"])[0]
    assert first.rewards["judge"] == pytest.approx(want, rel=1e-4)
    assert first.total == pytest.approx(2 * want, rel=1e-4)
    assert second.failed and second.total is None
    assert runner.take_counts().errors == 1
    assert "has 208 tokens, the reward model takes 1 to 96" in runner.tracebacks["judge"]


def test_a_model_that_counts_positions_behind_its_padding_id_takes_fewer_tokens(
    tmp_path: Path,
) -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
        num_labels=1,
        pad_token_id=1,
    )
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    write_own_tokenizer(tmp_path, None, None)
    fits, over = RewardModel(tmp_path)(["a"] * 2, ["b" * 37, "b" * 38])
    assert isinstance(fits, float)
    assert over == "has 39 tokens, the reward model takes 1 to 38"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_no_finite_number_fails_its_sample(folder: Path, value: float) -> None:
    spec = cpu_spec(RewardConfig(path=str(folder), name="judge"))
    assert isinstance(spec.function, RewardModel)
    runner = RewardRunner([spec])
    runner.submit(0, ["p"], ["warm."], {"messages": ["p"]})
    assert not runner.collect()[0][0].failed
    with torch.no_grad():
        spec.function._model.score.weight.fill_(value)
    runner.submit(1, ["p"], ["ok."], {"messages": ["p"]})
    (score,) = runner.collect()[1]
    assert score.failed and score.total is None and score.rewards == {"judge": None}
    assert "from the reward model" in runner.tracebacks["judge"]


def test_weights_are_on_the_device_only_while_they_score_and_random_numbers_stay(
    folder: Path,
) -> None:
    """A meta device stands in for a GPU: moving there shows, and computing there does not work."""
    model = RewardModel(folder)
    events: list[str] = []
    model._device = lambda: events.append("asked") or torch.device("cpu")  # type: ignore
    before = torch.get_rng_state()
    model(["p"], ["a"])
    model(["p"], ["b"])
    assert torch.equal(before, torch.get_rng_state())
    assert events == ["asked", "asked"]

    class Moved(torch.nn.Module):
        config = type("Config", (), {"pad_token_id": None})()

        def to(self, device: Any) -> "Moved":  # type: ignore[override]
            events.append(str(device))
            return self

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            events.append("forward")
            return type("Out", (), {"logits": torch.zeros(len(input_ids), 1)})

    events.clear()
    model._model, model._release = Moved(), lambda: events.append("released")
    model._device = lambda: torch.device("meta")
    model(["p"], ["a"])
    assert events == ["meta", "forward", "cpu", "released"]


def relabelled(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "a", "1": "b"}, {"a": 0, "b": 1}
    (folder / "config.json").write_text(json.dumps(config))


def without_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text("raise AssertionError('its code ran')\n")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (relabelled, "num_labels=2; a reward is one logit"),
        (without_head, "holds no score.weight: it is no trained reward model"),
        (pickled, "no .safetensors file; pickled weights are not read"),
        (own_code, "does not load"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer loads"),
    ],
)
def test_folders_that_are_no_reward_model_are_refused_before_the_run(
    tmp_path: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    folder = write_model(tmp_path / "judge")
    spoil(folder)
    with pytest.raises(ValueError, match=message) as caught:
        cpu_spec(RewardConfig(path=str(folder)))
    assert "\n" not in str(caught.value) and "its code ran" not in str(caught.value)


def test_a_language_model_and_a_missing_weight_are_no_reward_model(tmp_path: Path) -> None:
    policy = make_hf_folder(tmp_path / "policy", "llama", with_tokenizer=True)
    with pytest.raises(ValueError, match="num_labels=2|holds no score.weight"):
        cpu_spec(RewardConfig(path=policy))
    folder = write_model(tmp_path / "judge")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = RewardModel(folder)
    with pytest.raises(RuntimeError, match="not in its files: .*layers.1.mlp.up_proj.weight"):
        model(["p"], ["a"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kwargs": {"scale": 2}}, "it takes max_tokens"),
        ({"kwargs": {"max_tokens": 0}}, "at least 1"),
        ({"isolate": True}, "isolate=True of .* has no effect"),
        ({"workers": 2}, "workers=2 of .* has no effect"),
        ({"concurrency": 2}, "concurrency=2 of .* has no effect"),
        ({"retries": 1}, "retries=1 of .* has no effect"),
        ({"timeout_s": 3.0}, "timeout_s=3.0 of .* has no effect"),
    ],
)
def test_settings_that_a_model_never_reads_are_refused(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cpu_spec(RewardConfig(path=str(folder), **settings))


def test_a_column_of_the_dataset_never_stands_in_for_the_prompt(folder: Path) -> None:
    spec = cpu_spec(RewardConfig(path=str(folder)))
    assert isinstance(spec, RewardSpec) and spec.name == "judge"
    check_columns([spec], ["answer"])
    with pytest.raises(ValueError, match="column 'messages' .* reward model"):
        check_columns([spec], ["messages"])
