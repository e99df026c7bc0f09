#!/usr/bin/env bash
# From text to a trained GPT with two processes and no GPU, in a minute on two cores.
#
# The four steps of every pretraining: text, tokenizer, .bin/.idx, training. Without DATA the text
# is the Python standard library's. The other examples read what this one makes in WORK.
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
if [ ! -e "$WORK/tokenizer/vocab.json" ]; then
  "$PYTHON" -m tools.train_tokenizer --input "$DATA" --output "$WORK/tokenizer" \
    --vocab-size 2048 --text-documents paragraphs
fi
if [ ! -e "$WORK/corpus_text_document.idx" ]; then
  "$PYTHON" -m tools.preprocess_data --input "$DATA" --output-prefix "$WORK/corpus" \
    --tokenizer-type GPT2BPETokenizer --append-eod --text-documents paragraphs \
    --vocab-file "$WORK/tokenizer/vocab.json" --merge-file "$WORK/tokenizer/merges.txt"
fi

# Flags given to this script come last, and so win.
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 \
  --hidden-dropout 0 --attention-dropout 0 --num-workers 0 \
  --data-path "$WORK/corpus_text_document" --split 90,5,5 --eval-interval 100 --eval-iters 4 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$WORK/tokenizer/vocab.json" --merge-file "$WORK/tokenizer/merges.txt" \
  --log-interval 10 --save "$WORK/cpu" --load "$WORK/cpu" "$@"
