#!/usr/bin/env bash
# GRPO on a 70B model: run this on every node, or let examples/slurm_grpo.sbatch do so.
# Not run on a GPU yet; DRY_RUN=1 prints the command of this node and starts nothing.
#
#   NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 MODEL=/ckpt/llama-70b DATA=/data/train.jsonl \
#       bash examples/run_grpo_70b.sh [section.key=value ...]
#
# Needed    NNODES NODE_RANK MASTER_ADDR   nodes of the job, this one's number, host of number 0
#           MODEL                          converted checkpoint (quicker to load) or HF folder
#           DATA                           training prompts: .jsonl, .parquet or dataset folder
# Optional  MASTER_PORT=29500  GPUS_PER_NODE=8
#           TP=8 PP=4 ROLLOUT_TP=8         tensor and pipeline ranks of the policy; of one engine
#           EVAL                           held-out prompts
#           REWARD=math_answer             or module:function, or file.py:function
#           RUN_DIR=runs/grpo_70b          on a file system that every node sees
#           CONFIG=examples/configs/grpo_70b.yaml
set -euo pipefail

fail() {
    echo "run_grpo_70b.sh: $*" >&2
    exit 2
}

require() {
    local name
    for name in "$@"; do
        [ -n "${!name:-}" ] || fail "$name is not set; see the head of this file"
    done
}

count() { # NAME LEAST: a whole number, no sign
    [[ "${!1}" =~ ^[0-9]+$ ]] || fail "$1=${!1} is not a whole number"
    [ "${!1}" -ge "$2" ] || fail "$1=${!1} must be at least $2"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${MASTER_PORT:=29500}" "${GPUS_PER_NODE:=8}" "${TP:=8}" "${PP:=4}" "${ROLLOUT_TP:=8}"
: "${REWARD:=math_answer}" "${RUN_DIR:=runs/grpo_70b}"
: "${CONFIG:=examples/configs/grpo_70b.yaml}" "${DRY_RUN:=0}"

require NNODES NODE_RANK MASTER_ADDR MODEL DATA
for name in NNODES GPUS_PER_NODE MASTER_PORT TP PP ROLLOUT_TP; do count "$name" 1; done
count NODE_RANK 0
[ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK must be below NNODES=$NNODES"
world=$((NNODES * GPUS_PER_NODE))
[ $((world % (TP * PP))) -eq 0 ] ||
    fail "TP=$TP x PP=$PP does not divide $world ranks ($NNODES nodes x $GPUS_PER_NODE GPUs)"
[ $((GPUS_PER_NODE % TP)) -eq 0 ] ||
    fail "TP=$TP does not divide GPUS_PER_NODE=$GPUS_PER_NODE; tensor ranks belong on one node"
[ $((GPUS_PER_NODE % ROLLOUT_TP)) -eq 0 ] ||
    fail "ROLLOUT_TP=$ROLLOUT_TP does not divide GPUS_PER_NODE=$GPUS_PER_NODE"
[[ "${PYTORCH_CUDA_ALLOC_CONF:-}" != *expandable_segments:True* ]] ||
    fail "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, which vLLM's sleep cannot use"
if [ "$DRY_RUN" != 1 ]; then
    [ -d "$MODEL" ] || fail "MODEL=$MODEL is no folder on $(hostname)"
    for name in DATA EVAL CONFIG; do
        [ -z "${!name:-}" ] || [ -e "${!name}" ] || fail "$name=${!name} is not on $(hostname)"
    done
fi

command=(
    torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    -m megagrpo.cli train --config "$CONFIG"
    "model.path=$MODEL" "data.train=$DATA" ${EVAL:+"data.eval=$EVAL"}
    "parallel.tp=$TP" "parallel.pp=$PP" "rollout.tp=$ROLLOUT_TP"
    "rewards=[{path: $REWARD}]" "trainer.run_dir=$RUN_DIR" "$@"
)
if [ "$DRY_RUN" = 1 ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
