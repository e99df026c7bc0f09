#!/usr/bin/env bash
# From a pretrained GPT to one that answers: dialogues, loss masks, packed rows.
#
# --finetune takes the weights of LOAD and starts a run of its own. --sft reads what
# preprocess_sft.py wrote: only answers are learned, and dialogues that share a row do not see each
# other. Without CHATS there are a few of small talk.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-runs/example} # where pretrain_gpt_cpu.sh put the tokenizer and a trained model
TOKENIZER=${TOKENIZER:-$WORK/tokenizer}
LOAD=${LOAD:-$WORK/cpu}
CHATS=${CHATS:-$WORK/chats.jsonl} # a .jsonl of {"messages": [{"role": ..., "content": ...}, ...]}
ITERS=${ITERS:-300}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -e "$CHATS" ]; then
  for number in {1..40}; do # the same again: there is little to say
    for said in "Hello|Hello, you." "Who are you?|A small model." "Thank you.|You are welcome." \
      "Is it late?|I have no clock." "What is red?|A rose, for one." "Goodbye|See you soon." \
      "Do you sleep?|Never." "Sing a song|La la la." "How old are you?|Newly trained."; do
      echo '{"messages": [{"role": "user", "content": "'"${said%|*}"'"},' \
        '{"role": "assistant", "content": "'"${said#*|}"'"}]}'
    done
  done >"$CHATS"
fi
VOCABULARY=(--tokenizer-type GPT2BPETokenizer
  --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt")
if [ ! -e "$WORK/chats_tokens_document.idx" ]; then
  "$PYTHON" -m tools.preprocess_sft --input "$CHATS" --output-prefix "$WORK/chats" \
    --template plain "${VOCABULARY[@]}"
fi

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
  --sft --data-path "$WORK/chats" --split 80,10,10 --eval-interval 100 --eval-iters 2 \
  --finetune --load "$LOAD" --save "$WORK/chat" \
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
  --micro-batch-size 4 --global-batch-size 8 --train-iters "$ITERS" \
  --lr 1e-3 --lr-decay-style cosine --hidden-dropout 0 --attention-dropout 0 --num-workers 0 \
  "${VOCABULARY[@]}" --log-interval 10 "$@"

"$PYTHON" -m tools.generate_text --load "$WORK/chat" --num-tokens 12 --greedy \
  --prompt $'### User:\nThank you.\n\n### Assistant:\n'
