#!/usr/bin/env bash
# From a bare machine with Python 3.11 to a GRPO run that learns, on two CPU cores.
#
#   bash examples/quickstart.sh                # set-up, then everything; about 3 minutes after it
#   bash examples/quickstart.sh --setup-only   # only the environment
#   bash examples/quickstart.sh trainer.steps=20 parallel.tp=2   # any section.key=value goes along
#
# MEGAGRPO_WORK  folder for everything it writes (default: runs/quickstart-DATE); must be new
# and those of examples/setup_env.sh: MEGAGRPO_VENV, MEGAGRPO_PYTHON, TORCH_INDEX_URL
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repo"
bash examples/setup_env.sh
if [ "${1:-}" = "--setup-only" ]; then
    exit 0
fi

SECONDS=0 # the shell's own clock: what is shown counts from here, after the installation
work="${MEGAGRPO_WORK:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}"
if [ -e "$work" ]; then
    echo "$work exists; remove it or set MEGAGRPO_WORK to a new folder" >&2
    exit 1
fi
bin="${MEGAGRPO_VENV:-$repo/.venv}/bin"
run="$work/run"
# One thread per rank: two OpenMP threads on a shared core are ten times slower. Nothing of a toy
# pays for a compiler, everything it needs is on disk, and its ranks talk on the loopback only.
export OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# torch and megatron-core warn of each other's old names at every collective.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning}"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

step() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

step "1/5 task, tokenizer and warm-started model in $work"
"$bin/python" examples/make_max2.py make "$work"

step "2/5 HuggingFace -> Megatron"
"$bin/python" tools/convert_hf.py hf2megatron --hf "$work/hf" --out "$work/megatron"

step "3/5 GRPO on two ranks"
"$bin/torchrun" --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m megagrpo.cli train \
    --config examples/configs/tiny_cpu.yaml model.path="$work/megatron" \
    data.train="$work/train.jsonl" data.eval="$work/heldout.jsonl" trainer.run_dir="$run" "$@"

step "4/5 Megatron -> HuggingFace"
last="$(ls -d "$run"/checkpoints/step_* | sort -V | tail -n 1)"
"$bin/python" tools/convert_hf.py megatron2hf --megatron "$last" --hf-template "$work/hf" \
    --out "$work/trained"

step "5/5 both models in plain transformers"
"$bin/python" examples/make_max2.py score "$work" "$work/hf"
"$bin/python" examples/make_max2.py score "$work" "$work/trained"

step "done"
"$bin/python" examples/make_max2.py summary "$run/metrics.jsonl"
echo "run folder: $run (open $run/report.html); trained model: $work/trained"
