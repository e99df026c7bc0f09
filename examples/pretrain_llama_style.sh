#!/usr/bin/env bash
# The layers of Llama instead of GPT-2's: rotary positions, RMSNorm, SwiGLU, shared keys and values,
# no biases, no dropout, and an output matrix of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
RANKS=${RANKS:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py \
  --position-embedding-type rope --rotary-base 10000 \
  --normalization RMSNorm --layernorm-epsilon 1e-5 \
  --swiglu --num-key-value-heads 2 --disable-bias-linear \
  --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --adam-beta2 0.95 --weight-decay 0.1 \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/llama" --load "$WORK/llama" "$@"
