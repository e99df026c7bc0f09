#!/usr/bin/env bash
# A model that can fill in the middle of a text, as completion in an editor does.
#
# Half of the documents are rearranged on the fly: the beginning, the end, and then the middle, each
# behind a mark. The corpus stays as it is. The tokenizer has no marks, so three tokens are added;
# one that has them (<fim_prefix> and so on) needs --fim-data alone.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
  --fim-data --fim-rate 0.5 --vocab-extra-ids 3 --fim-prefix-token '<extra_id_0>' \
  --fim-suffix-token '<extra_id_1>' --fim-middle-token '<extra_id_2>' \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/fim" --load "$WORK/fim" "$@"
