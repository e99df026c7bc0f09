#!/usr/bin/env bash
# A model that reads the beginning of a text in both directions, and writes the rest.
#
# A prefix is drawn for each row; with --reset-attention-mask each document in a row has its own, and
# none sees another. Only what stands behind a prefix is learned. When it generates, the prompt is
# the prefix.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_prefix_lm.py \
  --reset-attention-mask --reset-position-ids --loss-on-targets-only \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/prefix_lm" --load "$WORK/prefix_lm" "$@"
