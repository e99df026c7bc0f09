#!/usr/bin/env bash
# torchrun that starts its ranks again: after a failure all of them resume from the last checkpoint.
#
# Start it on every machine with the same JOB and the same MASTER, one of them, which hosts the
# rendezvous. NODES=2:4 begins with any two to four machines, and goes on with as many when one is
# lost: the global batch stays the same, so it has to divide into micro-batches on each number.
# torchrun does not look at exit codes: a mistake in the flags is tried MAX_RESTARTS times, too.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
RANKS=${RANKS:-2}
NODES=${NODES:-1}
JOB=${JOB:-gpt}
MASTER=${MASTER:-localhost}
PORT=${PORT:-29400}
MAX_RESTARTS=${MAX_RESTARTS:-3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "$PYTHON" examples/torchrun.py --nnodes "$NODES" --nproc-per-node "$RANKS" \
  --max-restarts "$MAX_RESTARTS" \
  --rdzv-backend c10d --rdzv-id "$JOB" --rdzv-endpoint "$MASTER:$PORT" pretrain_gpt.py \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 4 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 --use-distributed-optimizer \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/elastic" --load "$WORK/elastic" --save-interval 50 "$@"
