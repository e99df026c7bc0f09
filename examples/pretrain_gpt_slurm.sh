#!/usr/bin/env bash
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Slurm: `sbatch examples/pretrain_gpt_slurm.sh` from the root of the repository.
#
# srun starts every rank, and is all that is needed: who a task is, and that ranks meet on the first
# node of the job, is read from what srun sets. On GPUs add --gpus-per-node to the lines above, one
# task for each GPU, or --gpus-per-task=1. Slurm runs a copy of this script, which cannot know where
# it lay.
#
# Two minutes before the end of its time the job saves, stops and is queued again; so it is, at most
# MAX_RESTARTS times, after a failure that the same command need not repeat. Every start resumes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put data and tokenizer
DATA_PREFIX=${DATA_PREFIX:-$WORK/corpus_text_document}
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
ITERS=${ITERS:-100}
MAX_RESTARTS=${MAX_RESTARTS:-5}

export FAILURES=$WORK/slurm-failures/${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0} # a report of each rank that fails
mkdir -p "$FAILURES"

# shellcheck disable=SC2016  # each task expands it, not this script
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
  bash -c 'TORCHELASTIC_ERROR_FILE=$FAILURES/$SLURM_PROCID exec "$@"' rank "$PYTHON" pretrain_gpt.py \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 4 --global-batch-size 16 --train-iters "$ITERS" \
  --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 --use-distributed-optimizer \
  --data-path "$DATA_PREFIX" --split 90,5,5 --eval-interval 100 --eval-iters 4 --num-workers 0 \
  --tokenizer-type GPT2BPETokenizer \
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt" \
  --log-interval 10 --save "$WORK/slurm" --load "$WORK/slurm" "$@" &
srun=$! time_is_up='' status=0
trap 'time_is_up=yes; kill -USR1 "$srun"' USR1 # srun passes it on to the ranks
wait "$srun" || status=$?
if [[ $time_is_up ]]; then # the signal has ended `wait`, not srun
  status=0
  wait "$srun" || status=$?
fi

is_worth_a_restart() {
  if ((status == 0)); then
    [[ $time_is_up ]]
  else
    ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)) && "$PYTHON" examples/is_retryable.py "$status" "$FAILURES"
  fi
}

if is_worth_a_restart; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
