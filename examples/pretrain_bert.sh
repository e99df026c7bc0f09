#!/usr/bin/env bash
# From text to a trained BERT with two processes and no GPU: words to guess, and the order of two
# segments.
#
# BERT's corpora are split into sentences, and its vocabulary is a WordPiece. Without DATA the text
# is the Python standard library's.
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
if [ ! -e "$WORK/sentences_text_sentence.idx" ]; then
  "$PYTHON" -m tools.preprocess_data --input "$DATA" --output-prefix "$WORK/sentences" \
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$WORK/wordpiece/vocab.txt" \
    --split-sentences --text-documents paragraphs
fi

# Flags given to this script come last, and so win.
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_bert.py \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style linear --lr-warmup-fraction 0.05 --weight-decay 0.01 \
  --num-workers 0 --data-path "$WORK/sentences_text_sentence" --split 90,5,5 \
  --eval-interval 100 --eval-iters 4 --vocab-file "$WORK/wordpiece/vocab.txt" \
  --log-interval 10 --save "$WORK/bert" --load "$WORK/bert" "$@"
