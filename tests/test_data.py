"""Datasets, chat templates, the order of prompts, and rollout files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.data.packing import pack
from megagrpo.data.prompts import decode, load_prompts, load_tokenizer
from megagrpo.data.sampler import PromptSampler
from megagrpo.rollout.storage import Rollout, dump_rollouts
from megagrpo.types import Completion, Prompt, Sample
from tests.tiny_models import BOS_ID, EOS_ID, write_tokenizer

Rows = Sequence[dict[str, Any]]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat_tokenizer")
    write_tokenizer(path, chat_template=True)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture
def greedy_tokenizer(folder: Path) -> Any:
    """Adds BOS and EOS by itself, and its template writes a BOS: every trap at once."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS_ID), ("<eos>", EOS_ID)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


def json_lines(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: Any, **settings: Any) -> Any:
    return load_prompts(path, tokenizer, **({"max_prompt_tokens": 200} | settings))


def test_chat_prompts_equal_the_tokenizers_own_rendering(tmp_path: Path, tokenizer: Any) -> None:
    found = load(json_lines(tmp_path / "a.jsonl", [{"prompt": CHAT}]), tokenizer)
    own = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)
    assert list(found.prompts[0].ids) == list(own["input_ids"])
    assert found.prompts[0].text.endswith("[user]3+3?[assistant]")
    assert found.first_rendered == found.prompts[0].text


def test_neighbouring_messages_of_one_role_are_rendered_as_one_conversation(
    tmp_path: Path, folder: Path
) -> None:
    """ADV-29: a template may join two tool messages; rendered one by one they would stay apart."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.first or m.role != loop.previtem.role %}[{{ m.role }}]"
        "{% else %}+{% endif %}{{ m.content }}{% endfor %}"
    )
    chat = [{"role": role, "content": text} for role, text in (("user", "1"), ("tool", "2"))]
    chat.append({"role": "tool", "content": "3"})
    found = load(json_lines(tmp_path / "a.jsonl", [{"prompt": chat}]), tokenizer)
    assert found.prompts[0].text == "[user]1[tool]2+3"


def test_chat_templates_get_the_configured_arguments(tmp_path: Path, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if thinking %}<think>{% endif %}"
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": CHAT[1:2]}])
    assert load(path, tokenizer).prompts[0].text == "2+2?"
    chosen = load(path, tokenizer, chat_template_kwargs={"thinking": True})
    assert chosen.prompts[0].text == "2+2?<think>"


def test_neither_chat_nor_text_gets_a_second_bos_or_an_eos(
    tmp_path: Path, greedy_tokenizer: Any
) -> None:
    rows = [{"prompt": CHAT[1:2]}, {"prompt": "1+1="}, {"prompt": "<bos>1+1="}]
    prompts = load(json_lines(tmp_path / "a.jsonl", rows), greedy_tokenizer).prompts
    plain = greedy_tokenizer.encode("1+1=", add_special_tokens=False)
    assert list(prompts[1].ids) == [BOS_ID, *plain] == list(prompts[2].ids)
    for prompt in prompts:
        assert prompt.ids[0] == BOS_ID and prompt.ids.count(BOS_ID) == 1
        assert EOS_ID not in prompt.ids


def test_an_eos_that_the_text_itself_ends_with_stays(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "1+1=<eos>"}])
    assert load(path, tokenizer).prompts[0].ids[-1] == EOS_ID


def test_chat_without_a_template_is_refused_by_the_tokenizers_name(tmp_path: Path) -> None:
    (tmp_path / "plain_tokenizer").mkdir()
    write_tokenizer(tmp_path / "plain_tokenizer")
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": CHAT}])
    with pytest.raises(ValueError, match="plain_tokenizer has no chat template"):
        load(path, load_tokenizer(tmp_path / "plain_tokenizer"))


def test_a_conversation_the_template_refuses_names_the_row(tmp_path: Path, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": CHAT}])
    with pytest.raises(ValueError, match="row 0 does not fit .* roles must alternate"):
        load(path, tokenizer)


VERL_ROWS = [
    {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2+2?", "name": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7, "split": "train"},
    }
]


def test_verl_parquet_reaches_rewards_unchanged(tmp_path: Path, tokenizer: Any) -> None:
    parquet.write_table(arrow.Table.from_pylist(VERL_ROWS), tmp_path / "v.parquet")
    (prompt,) = load(tmp_path / "v.parquet", tokenizer).prompts
    assert prompt.text == "[user]2+2?[assistant]"
    assert prompt.columns == {k: v for k, v in VERL_ROWS[0].items() if k != "prompt"}


def test_trl_parquet_takes_text_and_messages(tmp_path: Path, tokenizer: Any) -> None:
    text = arrow.table({"prompt": ["1+1=", "2+2="], "solution": ["2", "4"]})
    parquet.write_table(text, tmp_path / "text=1.parquet")  # no partition is read off the name
    found = load(tmp_path / "text=1.parquet", tokenizer).prompts
    assert [(p.index, p.text, p.columns) for p in found] == [
        (0, "1+1=", {"solution": "2"}),
        (1, "2+2=", {"solution": "4"}),
    ]
    parquet.write_table(arrow.table({"question": [CHAT]}), tmp_path / "chat.parquet")
    found = load(tmp_path / "chat.parquet", tokenizer, prompt_column="question").prompts
    assert found[0].text.startswith("[system]Be brief.[user]2+2?[assistant]4[user]3+3?")


def saved_dataset(folder: Path, shards: Sequence[Rows]) -> Path:
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams and state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-{len(shards):05d}.arrow" for at in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = arrow.Table.from_pylist(list(rows))
        with (
            arrow.OSFile(str(folder / name), "wb") as file,
            arrow.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_folder_is_read_shard_by_shard(tmp_path: Path, tokenizer: Any) -> None:
    shards = [[{"prompt": "a", "answer": 1}], [{"prompt": "b", "answer": 2}]]
    found = load(saved_dataset(tmp_path / "set", shards), tokenizer).prompts
    assert [(p.index, p.text, p.columns) for p in found] == [
        (0, "a", {"answer": 1}),
        (1, "b", {"answer": 2}),
    ]


def test_a_folder_of_splits_asks_for_one(tmp_path: Path, tokenizer: Any) -> None:
    for split in ("train", "test"):
        saved_dataset(tmp_path / "set" / split, [[{"prompt": "a"}]])
    with pytest.raises(ValueError, match="splits test, train; name one"):
        load(tmp_path / "set", tokenizer)


def test_json_rows_get_all_columns(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1}, {"y": 2, "prompt": "b"}])
    found = load(path, tokenizer).prompts
    assert [dict(p.columns) for p in found] == [{"x": 1, "y": None}, {"x": None, "y": 2}]


def test_overlong_prompts_are_dropped_and_counted_or_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "12345"}, {"prompt": "1"}])
    found = load(path, tokenizer, max_prompt_tokens=4)
    assert [p.index for p in found.prompts] == [1] and found.dropped_overlong == 1
    with pytest.raises(ValueError, match="row 0 has 5 tokens, over rollout.max_prompt_tokens=4"):
        load(path, tokenizer, max_prompt_tokens=4, overlong="error")
    assert len(load(path, tokenizer, max_prompt_tokens=5, overlong="error").prompts) == 2
    with pytest.raises(ValueError, match="all 2 prompts .* longer"):
        load(path, tokenizer, max_prompt_tokens=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no dataset at .*missing.jsonl"),
        ("a.csv", "", r"unknown dataset type '.csv'; use .jsonl, .parquet"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt', r"a.jsonl:3: not JSON"),
        ("a.jsonl", "[1]", r"a.jsonl:1: a row is an object, not list"),
        ("a.jsonl", '{"text": "a", "answer": 1}', "no column 'prompt'; it has text, answer"),
        ("a.jsonl", '{"prompt": " "}', "row 0 is empty"),
        ("a.jsonl", '{"prompt": []}', "row 0 is empty"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": null}', "row 1 is missing"),
        ("a.jsonl", '{"prompt": 7}', "row 0 is a int, neither text nor chat"),
        ("a.jsonl", '{"prompt": [{"role": "user", "content": [1]}]}', "'content' is not text"),
        ("a.jsonl", '{"prompt": ["hello"]}', "'role' is not text"),
        ("a.parquet", "no parquet", "a.parquet cannot be read"),
    ],
)
def test_bad_datasets_are_refused_in_one_line(
    tmp_path: Path, tokenizer: Any, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / name, tokenizer)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer folder .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no tokenizer: none of tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="the tokenizer does not load"):
        load_tokenizer(tmp_path)


def test_sampled_ids_are_trained_even_where_encoding_the_text_would_merge_them() -> None:
    """ADV-27: a tokenizer that merges `a` + `b`; sampled were (a)(b)."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = models.BPE({"<eos>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")])
    merging = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<eos>")
    sampled = (1, 2, 0)
    text = decode(merging, sampled)
    again = merging(text.replace(" ", ""))["input_ids"]
    assert again == [3], "this tokenizer does merge"
    packed = pack([((3,), sampled)], {}, [0])
    assert packed.labels[packed.mask].tolist() == list(sampled)


def test_decoding_leaves_out_special_tokens_and_keeps_spaces(tokenizer: Any) -> None:
    ids = tokenizer.encode("a , b .", add_special_tokens=False)
    assert decode(tokenizer, [*ids, EOS_ID]) == "a , b ."


def test_resumed_draw_continues_where_the_saved_one_stood() -> None:
    """CKPT-10: 6 prompts, 2 per step; stopped at step 2 and at the epoch's end, 2 + 2 equal 4."""
    for stop in (2, 3):
        straight = PromptSampler(6, 2, seed=5)
        expected = [straight.draw() for _ in range(stop + 4)]
        first = PromptSampler(6, 2, seed=5)
        drawn = [first.draw() for _ in range(stop)]
        state = json.loads(json.dumps(first.state()))
        resumed = PromptSampler(6, 2, seed=5)
        resumed.load_state(state)
        drawn += [resumed.draw() for _ in range(4)]
        assert drawn == expected and all(len(step) == 2 for step in drawn)
        assert resumed.epoch >= 1


def test_the_last_short_step_of_an_epoch_is_drawn() -> None:
    """EVAL-7: 5 prompts, 2 per step: 2, 2, 1, then the next epoch; nothing is dropped."""
    sampler = PromptSampler(5, 2, seed=0)
    steps = [sampler.draw() for _ in range(6)]
    assert [len(step) for step in steps] == [2, 2, 1, 2, 2, 1]
    assert sampler.steps_per_epoch == 3
    for epoch in (steps[:3], steps[3:]):
        assert sorted(number for step in epoch for number in step) == [0, 1, 2, 3, 4]
    held_out = PromptSampler(5, 2, seed=0, shuffle=False)
    assert sum([held_out.draw() for _ in range(held_out.steps_per_epoch)], []) == [0, 1, 2, 3, 4]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def order(seed: int, torch_seed: int) -> list[list[int]]:
        torch.manual_seed(torch_seed)
        before = torch.get_rng_state()
        sampler = PromptSampler(50, 50, seed)
        drawn = [sampler.draw(), sampler.draw()]
        assert torch.equal(before, torch.get_rng_state()), "the run's random numbers moved"
        return drawn

    assert order(0, 1) == order(0, 2)
    assert order(0, 1) != order(1, 1)
    first, second = order(0, 1)
    assert first != second and sorted(first) == sorted(second) == list(range(50))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 3))
def test_an_epoch_draws_every_prompt_once(prompts: int, per_step: int, seed: int) -> None:
    sampler = PromptSampler(prompts, per_step, seed)
    steps = [sampler.draw() for _ in range(sampler.steps_per_epoch)]
    assert sorted(number for step in steps for number in step) == list(range(prompts))
    assert sampler.epoch == 0 and len(sampler.draw()) and sampler.epoch == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptSampler(7, 2, 0), "prompts in data.train 6, this run 7"),
        (PromptSampler(6, 2, 1), "data.shuffle_seed 0, this run 1"),
    ],
)
def test_a_draw_of_other_data_is_not_resumed(other: PromptSampler, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        other.load_state(PromptSampler(6, 2, 0).state())


LOGPROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200_000), LOGPROBS), max_size=8), st.text(max_size=20))
def test_dumped_rollouts_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[tuple[int, float]], text: str
) -> None:
    ids, logprobs = tuple(t for t, _ in tokens), tuple(p for _, p in tokens)
    prompt = Prompt(3, (1, 2), text, {"answer": text, "reward_model": {"ground_truth": "4"}})
    samples = [
        Sample(prompt, 0, 0, Completion(ids, logprobs, True), text, {"r": 1 / 3}, 1 / 3),
        Sample(prompt, 0, 1, Completion(ids, logprobs, False), text, {"r": None}, None, True),
    ]
    path = tmp_path_factory.mktemp("dump") / "rollouts" / "step_3.jsonl"
    dump_rollouts(path, samples, {"advantage": [0.5, -0.5]})
    assert list(Rollout.load(path).samples) == samples
    assert [json.loads(line)["advantage"] for line in path.read_text().splitlines()] == [0.5, -0.5]
    assert [file.name for file in path.parent.iterdir()] == ["step_3.jsonl"]


def test_a_sample_whose_ids_and_logprobs_differ_is_not_dumped(tmp_path: Path) -> None:
    """LP-17: 5 ids, 4 log-probs; the file does not appear."""
    broken = Completion((1, 2, 3, 4, 5), (0.0,) * 4, True)
    samples = [Sample(Prompt(0, (1,), "p", {}), 2, 1, broken, "")]
    with pytest.raises(ValueError, match="sample 1 of group 2: 5 response ids but 4"):
        dump_rollouts(tmp_path / "step_1.jsonl", samples)
    assert not (tmp_path / "step_1.jsonl").exists()


def test_a_file_that_is_no_rollout_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"group": 1}\n')
    with pytest.raises(ValueError, match="x.jsonl:1: not a dumped sample"):
        Rollout.load(tmp_path / "x.jsonl")
