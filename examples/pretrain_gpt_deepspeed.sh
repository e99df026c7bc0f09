#!/usr/bin/env bash
# DeepSpeed's own launcher, and a curriculum: short samples first, which are faster and calmer.
#
# The launcher starts RANKS processes here (without a GPU too) and tells each its rank. The length
# of samples is a function of the iteration, so a run that is stopped goes on where it was; the
# block curriculum_learning of the JSON says which, or the --curriculum flags without DeepSpeed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
RANKS=${RANKS:-2}
PORT=${PORT:-29500} # another one for each run on the same machine

"$PYTHON" -m deepspeed.launcher.runner --num_gpus "$RANKS" --master_port "$PORT" pretrain_gpt.py \
  --deepspeed --deepspeed_config examples/ds_curriculum.json \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 4 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/deepspeed" --load "$WORK/deepspeed" "$@"
