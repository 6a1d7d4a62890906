"""What a training run saves and exports, against what its engine said with the same weights."""

import json
import runpy
from pathlib import Path

import torch
from safetensors.torch import load_file

import megagrpo.rollout.vllm_engine  # noqa: F401  (imported once, before ranks are forked)
from megagrpo.model.parity import hf_logits
from tests.test_run import REWARD, overrides, rollout_rows, run
from tests.tiny_models import make_hf_folder

REPO = Path(__file__).resolve().parent.parent
main = runpy.run_path(str(REPO / "tools" / "convert_hf.py"))["main"]
TEMPERATURE, VALID_VOCAB = 0.7, 98  # of the runs of test_run.py; ids of the toy's tokenizer


def test_a_run_at_tp_2_and_pp_2_exports_the_weights_that_its_engine_answered_with(
    tmp_path: Path,
) -> None:
    """A vocabulary with padding rows. The export at the save and megatron2hf of the checkpoint that
    megatron-core saved are the same bytes; transformers on them gives vLLM's log-probabilities of
    the next step, which were sampled after the weight sync, and not those of the first one."""
    make_hf_folder(tmp_path / "hf", "qwen3", with_tokenizer=True, head_dim=32, vocab_size=131)
    rows = [{"prompt": f"{a},{b}>", "answer": str(max(a, b))} for a in range(3) for b in range(4)]
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    run_dir = tmp_path / "run"
    saves = ["trainer.save_every=1", "trainer.export_hf_every=1"]
    layout = ["parallel.tp=2", "parallel.pp=2", "rollout.tp=2"]
    run(4, overrides(tmp_path, run_dir, *saves, *layout))
    checkpoint, exported, back = run_dir / "checkpoints/step_1", run_dir / "hf/step_1", "back"
    words = ["megatron2hf", "--megatron", str(checkpoint), "--out", str(tmp_path / back)]
    assert main(words) == 0
    files = [place / "model.safetensors" for place in (exported, tmp_path / back)]
    assert files[0].read_bytes() == files[1].read_bytes()
    before = load_file(tmp_path / "hf" / "model.safetensors")
    changed = [name for name, value in load_file(files[0]).items() if not value.equal(before[name])]
    assert len(changed) == len(before)
    assert difference(exported, rollout_rows(run_dir, 2)[0]) < 1e-4
    assert difference(exported, rollout_rows(run_dir, 1)[0]) > 1e-2


def difference(folder: Path, row: dict[str, list[int]]) -> float:
    """Largest gap between the recorded log-probabilities and those of transformers."""
    prompt, answer = row["prompt_ids"], row["completion_ids"]
    (logits,) = hf_logits(str(folder), [prompt + answer])
    scaled = logits[len(prompt) - 1 : -1, :VALID_VOCAB] / TEMPERATURE
    found = scaled.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((found - torch.tensor(row["rollout_logprobs"])).abs().max())
