#!/usr/bin/env bash
# A ViT learns classes of images, then is fine-tuned with a new head and evaluated.
#
# DATA is a folder with train/ and val/, each with a folder of images for each class, or a zip of it.
# Without one, small images of three colours are made.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example}
DATA=${DATA:-$WORK/images}
CLASSES=${CLASSES:-3}
ITERS=${ITERS:-60}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -e "$DATA" ]; then
  "$PYTHON" - "$DATA" <<'END'
import sys
from pathlib import Path

import numpy as np
from PIL import Image

draw = np.random.default_rng(1)
for split, count in (("train", 40), ("val", 10)):
    for number, name in enumerate(("blue", "green", "red")):
        folder = Path(sys.argv[1], split, name)
        folder.mkdir(parents=True)
        for at in range(count):
            values = draw.integers(0, 120, (32, 32, 3))
            values[..., 2 - number] += 80
            Image.fromarray(values.astype(np.uint8)).save(folder / f"{at}.png")
END
fi

MODEL=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --img-dim 32 --patch-dim 8
  --num-classes "$CLASSES" --hidden-dropout 0 --attention-dropout 0
  --micro-batch-size 8 --global-batch-size 16 --num-workers 0
  --data-path "$DATA" --lr-decay-style cosine --lr-warmup-fraction 0.1)

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_vit.py "${MODEL[@]}" \
  --train-iters "$ITERS" --lr 2e-3 --random-crop-area 0.5 --label-smoothing 0.1 \
  --eval-interval 50 --eval-iters 1 --log-interval 10 \
  --save "$WORK/vit" --load "$WORK/vit" "$@"

"$PYTHON" tasks/vision/main.py "${MODEL[@]}" --epochs 1 --lr 5e-4 --layer-lr-decay 0.75 \
  --pretrained-checkpoint "$WORK/vit" --save "$WORK/vit_tuned" --load "$WORK/vit_tuned"
