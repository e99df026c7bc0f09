#!/usr/bin/env bash
# A pretrained BERT learns whether one sentence follows from another, on two processes.
#
# TRAIN and VALID are files of GLUE's RTE, or of any task that `python -m tasks.main --help` lists.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_bert.sh put model and vocabulary
BERT=${BERT:-$WORK/bert}
TASK=${TASK:-RTE}
TRAIN=${TRAIN:?name the file to train on}
VALID=${VALID:?name the file to judge by}
EPOCHS=${EPOCHS:-3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two ranks share the cores

# Flags given to this script come last, and so win.
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m tasks.main --task "$TASK" \
  --train-data "$TRAIN" --valid-data "$VALID" --epochs "$EPOCHS" --pretrained-checkpoint "$BERT" \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 8 --global-batch-size 16 --lr 3e-4 --lr-warmup-fraction 0.06 \
  --vocab-file "$WORK/wordpiece/vocab.txt" --num-workers 0 \
  --predictions "$WORK/predictions.tsv" --save "$WORK/finetuned" "$@"
