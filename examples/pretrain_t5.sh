#!/usr/bin/env bash
# From text to a trained T5 with two processes and no GPU: spans that a text has lost, to be written
# by a decoder.
#
# Sentinels stand for the spans: tokens that --vocab-extra-ids adds to a WordPiece. Without DATA the
# text is the Python standard library's.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example}    # everything goes here
DATA=${DATA:-$WORK/text.jsonl} # a .txt or .jsonl of your own, or a folder of them
ITERS=${ITERS:-200}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two ranks share the cores

mkdir -p "$WORK"
if [ ! -e "$DATA" ]; then
  "$PYTHON" -m tools.make_corpus --output "$DATA" --max-mb 4
fi
if [ ! -e "$WORK/wordpiece/vocab.txt" ]; then
  "$PYTHON" -m tools.train_tokenizer --type wordpiece --input "$DATA" --output "$WORK/wordpiece" \
    --vocab-size 2048 --text-documents paragraphs
fi
VOCABULARY="--tokenizer-type BertWordPieceLowerCase --vocab-file $WORK/wordpiece/vocab.txt"
if [ ! -e "$WORK/spans_text_document.idx" ]; then
  # shellcheck disable=SC2086 # several words
  "$PYTHON" -m tools.preprocess_data --input "$DATA" --output-prefix "$WORK/spans" \
    $VOCABULARY --vocab-extra-ids 100 --text-documents paragraphs
fi

# Flags given to this script come last, and so win.
# shellcheck disable=SC2086
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_t5.py \
  --num-layers 3 --decoder-num-layers 3 --hidden-size 128 --num-attention-heads 4 \
  --position-embedding-type relative --normalization RMSNorm --disable-bias-linear --relu \
  --encoder-seq-length 128 --noise-density 0.15 \
  --micro-batch-size 8 --global-batch-size 32 --train-iters "$ITERS" \
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.01 \
  --hidden-dropout 0 --attention-dropout 0 \
  --num-workers 0 --data-path "$WORK/spans_text_document" --split 90,5,5 \
  --eval-interval 100 --eval-iters 4 $VOCABULARY --vocab-extra-ids 100 \
  --log-interval 10 --save "$WORK/t5" --load "$WORK/t5" "$@"
