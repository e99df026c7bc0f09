#!/usr/bin/env bash
# What a trained GPT makes of a text that it has not seen, and the same model for other programs.
#
# The perplexity is the same on any number of ranks. The export is compared with what transformers
# computes from it, where that is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example}     # where pretrain_gpt_cpu.sh put what it made
LOAD=${LOAD:-$WORK/cpu}        # any checkpoint of a GPT
TEXT=${TEXT:-README.md}        # plain text
EXPORT=${EXPORT:-$WORK/export} # a new folder in Hugging Face's form
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Flags given to this script come last, and so win.
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m tasks.main \
  --task PERPLEXITY --load "$LOAD" --valid-data "$TEXT" --overlapping-eval 32 \
  --tensor-model-parallel-size 2 "$@"

"$PYTHON" -m tools.convert_checkpoint --load "$LOAD" --save "$EXPORT" --format huggingface
