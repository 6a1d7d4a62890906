"""Numbers that add up over ranks, the reporters, and the report page."""

import json
import logging
import math
import os
import re
import statistics
import sys
import types
import warnings
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo import log
from megagrpo.metrics.records import (
    FATES,
    METRICS,
    Record,
    max_of,
    mean,
    mean_of,
    merge,
    min_of,
    render,
    rollout_metrics,
    std_of,
    total,
)
from megagrpo.metrics.report_html import write_report
from megagrpo.metrics.reporters import (
    Console,
    JsonLines,
    TensorBoard,
    Wandb,
    progress_line,
    read_lines,
    sample_lines,
)
from megagrpo.metrics.svg_chart import Series, chart, moving_mean, nice_ticks, number
from megagrpo.rollout.storage import dump_rollouts
from megagrpo.types import Completion, Prompt, Sample
from tests.pool import run_ranks


def sample(
    group: int,
    reward: float | None,
    *,
    tokens: int = 2,
    stopped: bool = True,
    failed: bool = False,
    prompt: str = "p",
    text: str = "",
) -> Sample:
    completion = Completion((5,) * tokens, (-0.5,) * tokens, stopped)
    rewards = {"rule": None if failed else reward}
    return Sample(
        Prompt(group, (1,), prompt, {}), group, 0, completion, text, rewards, reward, failed
    )


# --- records -------------------------------------------------------------------------------------


def test_fewer_samples_than_a_batch_still_give_their_mean() -> None:
    """EVAL-1: 3 samples, rewards 1, 1, 0."""
    record = rollout_metrics([sample(0, 1.0), sample(1, 1.0), sample(2, 0.0)])
    assert round(render(record)["reward/mean"], 6) == 0.666667
    assert record["reward/mean"].count == 3


def gather_and_render(rank: int, records: Sequence[Record]) -> dict[str, float]:
    parts: list[Any] = [None] * len(records)
    dist.all_gather_object(parts, records[rank])
    return render(merge(parts))


def test_a_mean_over_ranks_is_not_a_mean_of_rank_means() -> None:
    """EVAL-2: one rank has 1 token of value 1, the other 99 of value 0."""
    records = [{"x": mean_of([1.0])}, {"x": mean_of([0.0] * 99)}]
    assert run_ranks(2, gather_and_render, records) == [{"x": 0.01}] * 2


F1_DAPO = 0.029128  # golden loss of the four sequences, already over the global denominator


@pytest.mark.parametrize("cuts", [[4], [2, 2], [1, 1, 1, 1]])
def test_a_summed_loss_does_not_depend_on_micro_batches_or_the_step_before(
    cuts: list[int],
) -> None:
    """EVAL-3: sums over K = 1, 2, 4 micro-batches count one optimizer step each; 2 steps."""
    parts = torch.tensor([-0.041, 0.09, 0.0101, -0.029972], dtype=torch.float64)
    pieces = [float(piece.sum()) for piece in parts.split(cuts)]
    for _ in range(2):
        records = [{"actor/loss": mean(piece, 0)} for piece in pieces[:-1]]
        records.append({"actor/loss": mean(pieces[-1], 1)})
        assert render(merge(records)) == pytest.approx({"actor/loss": F1_DAPO}, abs=1e-12)


def test_what_has_no_data_is_left_out_without_a_warning() -> None:
    """EVAL-4: no valid token, no sample of a source."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = merge([rollout_metrics([]), {"x": mean(0.0, 0), "s": std_of([3.0])}])
        found = render(record)
    assert found == {
        "counts/generated": 0.0,
        **{f"counts/{fate}": 0.0 for fate in FATES},
    }


def test_recorded_values_do_not_follow_their_tensor() -> None:
    """EVAL-5: the tensor is scaled in place after it was recorded."""
    values = torch.tensor([1.0, 3.0])
    record = {"kl/ref_k3": mean_of(values), "top": max_of(values), "one": total(values[0])}
    values *= 100
    assert render(record) == {"kl/ref_k3": 2.0, "top": 3.0, "one": 1.0}


FLOATS = st.lists(st.floats(-1e3, 1e3), max_size=12)


@settings(max_examples=80, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=4))
def test_merged_records_equal_the_statistics_of_all_values(ranks: list[list[float]]) -> None:
    makers = {"mean": mean_of, "min": min_of, "max": max_of, "std": std_of}
    merged = merge([{name: of(values) for name, of in makers.items()} for values in ranks])
    everything = [value for values in ranks for value in values]
    expected = {}
    if everything:
        expected = {"min": min(everything), "max": max(everything)}
        expected["mean"] = statistics.fmean(everything)
    if len(everything) > 1:
        expected["std"] = statistics.stdev(everything)
    assert render(merged) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_small_spreads_survive_the_merge() -> None:
    """One-pass float32 variance would lose these; exact: 1e-5 / sqrt(2) within each pair."""
    merged = merge([{"s": std_of([1000.0, 1000.00001])}, {"s": std_of([])}])
    assert render(merged)["s"] == pytest.approx(1e-5 / math.sqrt(2), rel=1e-6)


def test_rollout_metrics_count_every_sample_once() -> None:
    samples = [
        sample(0, 1.0, tokens=4),
        sample(0, 0.0, tokens=2, stopped=False),
        sample(1, None, tokens=6),
        sample(1, None, tokens=9, failed=True),
    ]
    found = render(rollout_metrics(samples))
    assert (
        found["counts/generated"]
        == 4
        == sum(found[f"counts/{name}"] for name in ("trained", "failed", "filtered"))
    )
    assert (found["counts/trained"], found["counts/failed"]) == (2, 1)
    assert found["response_length/mean"] == 4.0 and found["response_length/max"] == 6
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["reward/mean"] == found["reward/rule/mean"] == 0.5
    assert found["reward/std"] == pytest.approx(math.sqrt(0.5))
    assert found["reward/zero_variance_share"] == 0.0


@pytest.mark.parametrize(
    ("pairs", "share"),
    [
        ([(0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0)], 1.0),  # ADV-11: two identical prompts
        ([(0, 1.0), (0, 0.0)], 0.0),  # ADV-12: prompts differ within the group
        ([(1, 1.0), (2, 2.0), (1, 1.0), (2, 2.0)], 1.0),  # ADV-13: not contiguous
        ([(0, 0.1)] * 7, 1.0),  # rule 1: std of 7 x 0.1 is not 0, max - min is
        ([(0, 0.5), (0, 0.5), (1, 0.5), (1, 0.5001)], 0.5),
    ],
)
def test_groups_are_those_of_the_sampler(pairs: list[tuple[int, float]], share: float) -> None:
    """ADV-11, 12, 13 as far as metrics go: the group number decides, not text or position."""
    samples = [
        sample(group, reward, prompt="ab"[at % 2] if share == 0.0 else "same")
        for at, (group, reward) in enumerate(pairs)
    ]
    assert render(rollout_metrics(samples))["reward/zero_variance_share"] == share


def test_any_end_of_sequence_counts_as_finished() -> None:
    """ADV-25: the engine says how a completion ended; the last id is not interpreted."""
    found = render(rollout_metrics([sample(0, 1.0), sample(0, 0.0)]))
    assert found["response_length/clip_ratio"] == 0.0


AGREED = """reward/mean std min max; reward/NAME/mean; reward/zero_variance_share errors timeouts
group_std_mean; advantage/mean std min max abs_max clipped_share; actor/loss pg_loss kl_loss kl_coef
entropy clip_low_share clip_high_share ppo_kl grad_norm lr skipped_steps; kl/ref_k3 ref_k1;
rollout_corr/mean_abs_logprob_diff max_abs_logprob_diff k3_kl ess weight_mean weight_max
masked_share; token_mult_prob_error; response_length/mean min max clip_ratio; prompt_length/mean
max; val/NAME/mean@k pass@k; sync/seconds bytes_received_max lower_bound_bytes extra_bytes_peak
version digest; perf/tokens_per_second_per_gpu step_seconds mfu; memory/peak_allocated_gb rss_gb;
counts/generated trained filtered failed truncated surplus buffered; rollout/repetition_share"""


def test_the_table_of_metrics_knows_every_agreed_name() -> None:
    for family in AGREED.replace("\n", " ").split(";"):
        first, *others = family.split()
        prefix = first[: first.rfind("/") + 1]
        for name in (first, *(prefix + other for other in others)):
            assert name in METRICS, name
    assert all(formula and denominator for formula, denominator in METRICS.values())


# --- reporters -----------------------------------------------------------------------------------


def test_each_step_is_one_flat_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write(1, 2, {"reward/mean": 0.5, "actor/loss": float("nan"), "x": float("inf")})
    assert json.loads(path.read_text()) == {
        "step": 1,
        "optimizer_step": 2,
        "reward/mean": 0.5,
        "actor/loss": None,
        "x": None,
    }
    assert "NaN" not in path.read_text()
    lines.close()


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in range(5):
        first.write(step, step, {"reward/mean": float(step)})
    first.close()
    path.write_text(path.read_text() + '{"step": 5, "rew')
    resumed = JsonLines(path, resumed_step=2)
    resumed.write(3, 3, {"reward/mean": 30.0})
    resumed.close()
    found, torn = read_lines(path)
    assert [(line["step"], line["reward/mean"]) for line in found] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert torn == 0
    JsonLines(path).close()
    assert path.read_text() == "", "a new run starts with an empty file"


def test_the_progress_line_shows_what_is_known() -> None:
    metrics = {
        "reward/mean": 0.4123,
        "response_length/mean": 3.04,
        "perf/step_seconds": 0.211,
        "perf/tokens_per_second_per_gpu": 760.2,
        "val/max2/mean@1": 0.5,
        "val/max2/count": 10,
    }
    assert progress_line(12, 150, metrics, ranks=2) == (
        "step  12/150  reward 0.412  kl -  length 3.0  0.21 s  1,520 tok/s  val/max2/mean@1 0.500"
    )
    some = {"counts/trained": 32.0, "counts/generated": 1024.0}
    assert progress_line(1, 2, some).endswith("  trained 32/1,024")
    assert "trained" not in progress_line(1, 2, dict.fromkeys(some, 32.0))


def test_console_goes_through_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("megagrpo")
    for name, value in (("handlers", []), ("propagate", True), ("level", logger.level)):
        monkeypatch.setattr(logger, name, value)  # what setup changes is put back
    log.setup(0)
    Console(3).write(1, 1, {"reward/mean": 0.25})
    captured = capsys.readouterr()
    assert "step 1/3  reward 0.250" in captured.err and captured.out == ""


def test_sampled_text_cannot_steer_the_terminal() -> None:
    samples = [
        sample(0, 1.0, text="\x1b[2J\nowned\u202e"),
        sample(0, 0.0, text="other member"),
        sample(1, None, failed=True, text="b"),
    ]
    lines = sample_lines(samples, 2)
    assert lines[0] == "'p' -> '\\x1b[2J\\nowned\\u202e' (reward 1.0)"
    assert lines[1] == "'p' -> 'b' (failed)" and len(lines) == 2
    long = sample_lines([sample(0, 1.0, text="x" * 900 + "end")], 1, width=20)[0]
    assert "...xxx" in long and "end'" in long and len(long) < 60


def test_a_step_s_line_is_forced_to_the_disk_before_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(1, 1, {"reward/mean": 0.5})
    forced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda file: forced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    lines.to_disk()
    assert forced == [str(tmp_path / "metrics.jsonl")]
    assert '"reward/mean": 0.5' in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_holds_the_same_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path)
    writer.write(1, 2, {"reward/mean": 0.25})
    writer.write(2, 4, {"reward/mean": 0.75})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(1, 0.25), (2, 0.75)]
    assert [event.value for event in events.Scalars("optimizer_step")] == [2.0, 4.0]


def test_wandb_is_asked_for_by_name_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="log.wandb=proj but .*pip install wandb"):
        Wandb("proj", tmp_path, {})


def test_a_resumed_wandb_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []

    def init(**arguments: Any) -> Any:
        calls.append(arguments)
        write = lambda values, step: logged.append((step, values))  # noqa: E731
        return types.SimpleNamespace(log=write, finish=lambda: None)

    ids = iter(["one", "two"])
    util = types.SimpleNamespace(generate_id=lambda: next(ids))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, util=util))
    for _ in range(2):
        reporter = Wandb("proj", tmp_path, {"seed": 1})
        reporter.write(3, 6, {"reward/mean": 0.5})
        reporter.close()
    assert [call["id"] for call in calls] == ["one", "one"]
    assert logged[0] == (3, {"optimizer_step": 6, "reward/mean": 0.5})


# --- report --------------------------------------------------------------------------------------

HOSTILE = (
    "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e{{config}}\ud800"
)


LOADING = {"src", "href", "srcset", "data", "action", "xlink:href", "background", "poster"}


class Tags(HTMLParser):
    """What a browser would take for tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


def run_folder(tmp_path: Path, steps: int = 30, **extra: float) -> Path:
    folder = tmp_path / "run <b>1</b>"
    lines = JsonLines(folder / "metrics.jsonl")
    lines.write(0, 0, {"val/held/mean@1": 0.5, "val/held/count": 10})
    for step in range(1, steps + 1):
        metrics = {
            "reward/mean": 0.3 + step / 100,
            "response_length/mean": 3.0 + step % 3,
            "advantage/std": 0.9,
            "advantage/abs_max": 2.4,
            "counts/failed": float(step == 2),
            "actor/grad_norm": float("inf") if step == 4 else 1.0,
        }
        lines.write(step, step, metrics | extra)
    lines.write(steps + 1, steps + 1, {"val/held/mean@1": 0.75})
    lines.close()
    (folder / "config.yaml").write_text(
        "model: {path: '<i>m</i>'}\nrewards:\n- {path: exact_match}\n"
    )
    samples = [
        sample(0, 1.0, prompt="2+2=", text=HOSTILE),
        sample(1, None, prompt="3+3=", text="6", failed=True),
    ]
    dump_rollouts(folder / "rollouts" / "step_9.jsonl", samples[1:])
    dump_rollouts(folder / "rollouts" / "step_10.jsonl", samples)
    return folder


def charts(page: str) -> dict[str, ElementTree.Element]:
    """The page's drawings by title; each must be well-formed by itself."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]
    return {svg.attrib["aria-label"]: svg for svg in found}


def test_the_report_has_four_curves_and_the_held_out_scores(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path, **{"kl/ref_k3": 0.01})).read_text()
    assert set(charts(page)) == {
        "Reward over steps",
        "KL to the reference over steps",
        "Response length over steps",
        "Advantage spread over steps",
        "Held-out val/held/mean@1",
    }
    assert "<span>0.5 &rarr;</span> 0.75" in page, "held-out before and after"
    assert "<span>0.355 &rarr;</span> 0.555" in page, "mean reward of steps 1-10 and 21-30"
    assert "1 samples failed" in page and "not finite in some step: actor/grad_norm" in page


def test_of_several_completions_the_report_and_the_console_show_the_scores_of_k(
    tmp_path: Path,
) -> None:
    scores = {f"val/held/{name}": 0.25 for name in ("mean@4", "pass@1", "pass@2", "pass@4")}
    scores |= {"val/held/maj@4": 0.5, "val/held/count": 40.0, "reward/mean": 0.1}
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        lines.write(step, step, scores)
    lines.close()
    shown = {title for title in charts(write_report(tmp_path).read_text()) if "Held" in title}
    assert shown == {f"Held-out val/held/{name}" for name in ("mean@4", "maj@4", "pass@4")}
    said = progress_line(2, 9, scores)
    assert said.endswith("val/held/mean@4 0.250  val/held/maj@4 0.500  val/held/pass@4 0.250")


def test_the_report_says_when_no_reference_was_scored(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path)).read_text()
    assert "No KL curve: no reference was scored" in page
    assert "KL to the reference over steps" not in charts(page)


def test_hostile_text_stays_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path)).read_text()
    assert "<script" not in page and "<img" not in page and "<i>m" not in page
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)" in page
    assert "\\u001b[31m\\u202e{{config}}\\ud800" in page, "steering characters are spelled out"
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", page)
    assert "default-src 'none'" in page
    tags = Tags()
    tags.feed(page)
    assert not {"script", "img", "link", "iframe", "object", "i", "b"} & set(tags.names)
    assert not [name for name in tags.attributes if name in LOADING or name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", page)


def test_samples_are_those_of_the_newest_rollout(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path)).read_text()
    assert "prompts of step 10" in page and "2+2=" in page
    assert '<td class="number">failed</td>' in page


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    with pytest.raises(ValueError, match="holds no step yet"):
        write_report(tmp_path)


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 700])
def test_a_run_of_any_length_gives_a_page(tmp_path: Path, steps: int) -> None:
    folder = run_folder(tmp_path, steps)
    (folder / "config.yaml").unlink()
    for dump in (folder / "rollouts").iterdir():
        dump.unlink()
    page = write_report(folder).read_text()
    assert len(charts(page)) == 4 and "rollout.dump was off" in page
    assert len(page) < 400_000


def test_a_run_that_only_evaluated_gives_a_page(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(0, 0, {"val/held/mean@1": 0.5})
    lines.close()
    assert "No training step" in write_report(tmp_path).read_text()


def drawn(svg: str, classes: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<path class="{classes}" d="([^"]*)"', svg)
    return [tuple(map(float, spot.split(","))) for spot in re.findall(r"[\d.]+,[\d.]+", path)]


def test_lines_stand_where_the_axis_says(tmp_path: Path) -> None:
    svg = chart([1, 2, 3], [Series("x", "a", [0.0, 1.0, 0.5])], "unit", "label")
    ticks = {
        text: float(y) for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', svg)
    }
    zero, one = ticks["0"] - 3.5, ticks["1"] - 3.5
    points = drawn(svg, "line a")
    assert [y for _, y in points] == pytest.approx([zero, one, (zero + one) / 2], abs=0.11)
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.11)


def test_a_gap_breaks_the_line_and_a_spike_survives_thinning() -> None:
    values: list[float | None] = [1.0, None, 1.0, 1.0, float("nan")]
    svg = chart(range(5), [Series("x", "a", values)], "u", "l")
    assert svg.count("M") == 1 and '<circle class="line a"' in svg and "x: no value" in svg
    spiky = [0.0] * 5000
    spiky[3123] = 9.0
    points = drawn(chart(range(5000), [Series("x", "a", spiky)], "u", "l"), "raw a")
    assert len(points) <= 400
    highest = min(y for _, y in points)
    assert [y for _, y in points].count(highest) == 1


def test_the_moving_mean_equals_a_plain_loop() -> None:
    values: list[float | None] = [1.0, 2.0, None, 4.0, 8.0, 16.0]
    expected = []
    for at in range(len(values)):
        near = [v for v in values[max(0, at - 1) : at + 2] if v is not None]
        expected.append(sum(near) / len(near))
    assert moving_mean(values, 3) == pytest.approx(expected)
    assert moving_mean([None, None, None], 1) == [None, None, None]


@settings(max_examples=80, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_cover_the_data(low: float, span: float) -> None:
    high = low + span
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), span)
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack and 2 <= len(ticks) <= 8


def test_numbers_are_short() -> None:
    shown = {0.0: "0", 0.123456: "0.1235", 1520.4: "1,520", 8.1234e-7: "8.12e-07", 3e9: "3e+09"}
    assert {value: number(value) for value in shown} == shown
