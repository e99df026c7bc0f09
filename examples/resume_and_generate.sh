#!/usr/bin/env bash
# Stop in the middle, go on with the same command, and let the model write.
#
# --save and --load name one folder, so the command that starts a run also resumes it: batches,
# learning rate and random numbers continue as if nothing had happened. The model then writes on
# one rank, although it was trained split over two.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
PROMPT=${PROMPT:-The }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

train() {
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
    --tensor-model-parallel-size 2 \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERS" \
    --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
    --tokenizer-type GPT2BPETokenizer \
    --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
    --log-interval 10 --save "$WORK/resumed" --load "$WORK/resumed" "$@"
}

train "$@" --exit-interval "$((ITERS / 2))" # stops half way, as a job's time limit would
train "$@"                                  # the same command goes on

"$PYTHON" -m tools.inspect_checkpoint "$WORK/resumed" --verify
"$PYTHON" -m tools.generate_text --load "$WORK/resumed" --prompt "$PROMPT" --num-tokens 60 \
  --temperature 0.8 --top-k 40
