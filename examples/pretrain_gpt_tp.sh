#!/usr/bin/env bash
# Tensor parallelism: one model spread over TP ranks, for models that do not fit on one.
#
# Every rank holds 1/TP of each matrix and of the vocabulary, and sees every sample. TP has to
# divide the heads and the MLP width. The loss is that of one rank with the whole model.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
TP=${TP:-2}
PP=${PP:-1} # pipeline stages, which share the layers
RANKS=${RANKS:-$((TP * PP))} # a multiple of TP * PP; replicas share the batch
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py \
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/tp" --load "$WORK/tp" "$@"
