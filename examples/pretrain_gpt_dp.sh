#!/usr/bin/env bash
# Data parallelism: every rank holds the whole model and takes a share of each batch.
#
# The global batch stays the same whatever RANKS is: each rank accumulates the gradient of
# global / (micro x RANKS) micro-batches, here 2 on two ranks, and the sum is that of one rank.
# STRATEGY=optim, optim_grads or optim_grads_params lets ranks share out what they keep (ZeRO stages 1
# to 3, the last of which others call FSDP): less memory, the same results.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
RANKS=${RANKS:-2}
MICRO=${MICRO:-4}   # samples per forward pass: as many as the memory of a device holds
GLOBAL=${GLOBAL:-16} # samples per step: a matter of learning, not of hardware
STRATEGY=${STRATEGY:-no_shard}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py \
  --micro-batch-size "$MICRO" --global-batch-size "$GLOBAL" --train-iters "$ITERS" \
  --data-parallel-sharding-strategy "$STRATEGY" \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/dp" --load "$WORK/dp" "$@"
