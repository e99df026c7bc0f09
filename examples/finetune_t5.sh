#!/usr/bin/env bash
# From a pretrained T5 to one that answers: it reads inputs with its encoder, and learns to write
# targets with its decoder.
#
# --finetune takes the weights of LOAD and starts a run of its own. A pair is a row of each stack;
# pairs that do not fit are counted and left out. Without PAIRS there are a few about opposites.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_t5.sh put the vocabulary
LOAD=${LOAD:-$WORK/t5}     # what it trained
PAIRS=${PAIRS:-$WORK/t5_pairs.jsonl} # a .jsonl of {"inputs": "...", "targets": "..."}
ITERS=${ITERS:-300}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -e "$PAIRS" ]; then
  for number in {1..40}; do # the same again: there is little to say
    for pair in "big|small" "hot|cold" "old|young" "rich|poor" "wet|dry" "high|low" "full|empty"; do
      echo '{"inputs": "opposite: '"${pair%|*}"'", "targets": "'"${pair#*|}"'"}'
      echo '{"inputs": "opposite: '"${pair#*|}"'", "targets": "'"${pair%|*}"'"}'
    done
  done >"$PAIRS"
fi
VOCABULARY=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$WORK/wordpiece/vocab.txt"
  --vocab-extra-ids 100)
if [ ! -e "$WORK/t5_pairs_inputs_document.idx" ]; then
  "$PYTHON" -m tools.preprocess_data --input "$PAIRS" --json-keys inputs targets \
    --output-prefix "$WORK/t5_pairs" "${VOCABULARY[@]}"
fi

# Flags given to this script come last, and so win.
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_t5.py \
  --mtf --data-path "$WORK/t5_pairs" --split 80,10,10 --eval-interval 100 --eval-iters 2 \
  --finetune --load "$LOAD" --save "$WORK/t5_answers" \
  --num-layers 3 --decoder-num-layers 3 --hidden-size 128 --num-attention-heads 4 \
  --position-embedding-type relative --normalization RMSNorm --disable-bias-linear --relu \
  --encoder-seq-length 32 --decoder-seq-length 16 --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 1e-3 --lr-decay-style cosine --num-workers 0 \
  "${VOCABULARY[@]}" --log-interval 10 "$@"

"$PYTHON" -m tools.generate_text --load "$WORK/t5_answers" --num-tokens 8 --greedy \
  --prompt "opposite: hot"
