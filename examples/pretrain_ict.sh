#!/usr/bin/env bash
# A retriever with two processes and no GPU: which block of text is a sentence from? Then an index of
# all blocks, and questions that it answers.
#
# DOCUMENTS are JSON lines with a text and a title each. Without them the text is that of this
# project's own pages, whose titles are the headings.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # everything goes here
DOCUMENTS=${DOCUMENTS:-$WORK/titled.jsonl}
ITERS=${ITERS:-200}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two ranks share the cores

mkdir -p "$WORK"
if [ ! -e "$DOCUMENTS" ]; then
  "$PYTHON" - docs "$DOCUMENTS" <<'END'
import json, pathlib, re, sys
pages, target = sys.argv[1:]
with open(target, "w", encoding="utf-8") as out:
    for page in sorted(pathlib.Path(pages).glob("*.md")):
        for part in re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            title, _, text = part.partition("\n")
            if text.count(". ") > 1:
                out.write(json.dumps({"title": title.strip(), "text": text.strip()}) + "\n")
END
fi
VOCAB=$WORK/titled/vocab.txt
if [ ! -e "$VOCAB" ]; then
  "$PYTHON" -m tools.train_tokenizer --type wordpiece --input "$DOCUMENTS" \
    --output "$WORK/titled" --vocab-size 2048
fi
TOKENIZER=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB")
if [ ! -e "$WORK/titled_title_document.idx" ]; then
  "$PYTHON" -m tools.preprocess_data --input "$DOCUMENTS" --output-prefix "$WORK/titled" \
    --json-keys text --split-sentences "${TOKENIZER[@]}"
  "$PYTHON" -m tools.preprocess_data --input "$DOCUMENTS" --output-prefix "$WORK/titled" \
    --json-keys title "${TOKENIZER[@]}"
fi
BLOCKS=(--data-path "$WORK/titled_text_sentence" --titles-data-path "$WORK/titled_title_document")

# Flags given to this script come last, and so win.
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_ict.py \
  --num-layers 1 --hidden-size 128 --num-attention-heads 4 --seq-length 96 \
  --micro-batch-size 16 --global-batch-size 32 --train-iters "$ITERS" \
  --biencoder-shared-query-context-model --retriever-score-scaling --init-method-std 0.2 \
  --hidden-dropout 0 --attention-dropout 0 --retriever-report-topk-accuracies 1 5 \
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style linear --lr-warmup-fraction 0.05 --weight-decay 0.01 \
  --num-workers 0 "${BLOCKS[@]}" --split 90,5,5 --eval-interval 100 --eval-iters 1 \
  "${TOKENIZER[@]}" --log-interval 10 --save "$WORK/ict" --load "$WORK/ict" "$@"

RETRIEVER=(--load "$WORK/ict" --embedding-path "$WORK/index-$ITERS" "${BLOCKS[@]}")
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 \
  -m tools.retrieval.create_doc_index "${RETRIEVER[@]}"
printf 'which flag shares the layers of a model?\t["--tensor-model-parallel-size", "tp"]\n' \
  > "$WORK/questions.tsv"
"$PYTHON" -m tasks.main --task ICT-ZEROSHOT-NQ "${RETRIEVER[@]}" \
  --qa-data-dev "$WORK/questions.tsv" --faiss-topk-retrievals 20
