#!/usr/bin/env bash
# DeepSpeed's ZeRO: replicas share out what each of them would otherwise hold in full.
#
# Stage 1 shares out the optimizer's state, 2 gradients too, 3 weights too; the losses are those of
# stage 0, and those without --deepspeed. JSON and flags may not contradict each other: "auto" takes
# the flag's value, and the log says all that DeepSpeed is told.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
RANKS=${RANKS:-2}
STAGE=${STAGE:-2}

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py \
  --deepspeed --deepspeed_config examples/ds_zero.json --zero-stage "$STAGE" --bf16 \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 4 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/zero" --load "$WORK/zero" "$@"
