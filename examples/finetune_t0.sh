#!/usr/bin/env bash
# From a pretrained model to one that answers: inputs that are read in both directions, and targets.
#
# --finetune takes the weights of LOAD, a prefix LM or a GPT, and starts a run of its own. Pairs are
# packed into rows, in which none sees another, and only targets are learned. Without PAIRS there are
# a few about opposites.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put the tokenizer
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
LOAD=${LOAD:-$WORK/prefix_lm} # what pretrain_prefix_lm.sh trained
PAIRS=${PAIRS:-$WORK/pairs.jsonl} # a .jsonl of {"inputs": "...", "targets": "..."}
ITERS=${ITERS:-300}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -e "$PAIRS" ]; then
  for number in {1..40}; do # the same again: there is little to say
    for pair in "big|small" "hot|cold" "old|young" "rich|poor" "wet|dry" "high|low" "full|empty"; do
      echo '{"inputs": "The opposite of '"${pair%|*}"' is", "targets": " '"${pair#*|}"'."}'
      echo '{"inputs": "The opposite of '"${pair#*|}"' is", "targets": " '"${pair%|*}"'."}'
    done
  done >"$PAIRS"
fi
VOCABULARY=(--tokenizer-type GPT2BPETokenizer
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt")
if [ ! -e "$WORK/pairs_inputs_document.idx" ]; then
  "$PYTHON" -m tools.preprocess_data --input "$PAIRS" --json-keys inputs targets \
    --output-prefix "$WORK/pairs" "${VOCABULARY[@]}"
fi

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 \
  finetune_t0_non_causal_decoder.py \
  --data-path "$WORK/pairs" --split 80,10,10 --eval-interval 100 --eval-iters 2 \
  --finetune --load "$LOAD" --save "$WORK/t0" \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 4 --global-batch-size 8 --train-iters "$ITERS" \
  --lr 1e-3 --lr-decay-style cosine --num-workers 0 \
  "${VOCABULARY[@]}" --log-interval 10 "$@"

"$PYTHON" -m tools.generate_text --load "$WORK/t0" --num-tokens 4 --greedy \
  --prompt "The opposite of hot is"
