#!/usr/bin/env bash
# Several machines by a hostfile: this script is started on each of them, with its NODE_RANK.
#
# HOSTFILE has a line for each, in their order: its name, and slots=N for N processes. MASTER is an
# address of the first, which all can reach. Nothing is copied: code, data and WORK are at the same
# place everywhere (or on a file system that is shared). Where machines let you in by ssh, leave out
# --no_ssh and --node_rank, and one start on the first is enough.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
HOSTFILE=${HOSTFILE:?a file with a line NAME slots=N for each machine}
NODE_RANK=${NODE_RANK:?0 on the first machine of the hostfile, 1 on the second}
MASTER=${MASTER:?an address of the first machine}
PORT=${PORT:-29500}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}

"$PYTHON" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --no_ssh --node_rank "$NODE_RANK" \
  --master_addr "$MASTER" --master_port "$PORT" pretrain_gpt.py \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 4 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 --use-distributed-optimizer \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/nodes" --load "$WORK/nodes" "$@"
