"""Scripts of bigscience's `examples/`, all of them."""

from tests.support.example_scripts.script import Script
from tools.launch_scripts.verdicts import Kind

_EVERY = "--save c --load c --data-path d --vocab-file v --save-interval 10000 --eval-interval 1000"
_GPT2 = f"""{_EVERY} --eval-iters 10 --log-interval 100 --merge-file m --data-impl mmap --fp16
    --split 949,50,1 --distributed-backend nccl --weight-decay 1e-2 --clip-grad 1.0
    --lr-warmup-fraction .01 --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine
    --checkpoint-activations --position-embedding-type absolute --micro-batch-size 4"""
_345M = f"""{_GPT2} --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-absolute-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000"""
BERT = f"""{_EVERY} --eval-iters 10 --log-interval 100 --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --train-iters 1000000 --lr 0.0001 --min-lr 1.0e-5 --clip-grad 1.0
    --lr-decay-style linear --lr-decay-iters 990000 --weight-decay 1e-2 --lr-warmup-fraction .01
    --split 949,50,1 --fp16 --seq-length 512"""
_BERT_2021 = f"""{BERT} --data-impl mmap --distributed-backend nccl --micro-batch-size 4
    --max-absolute-position-embeddings 512 --position-embedding-type absolute"""
_T5 = f"""{_EVERY} --eval-iters 10 --log-interval 100 --num-layers 12 --hidden-size 768
    --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512
    --decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 16
    --global-batch-size 2048 --train-iters 1000000 --lr-decay-iters 1000000 --data-impl mmap
    --split 949,50,1 --lr 0.0001 --min-lr 0.00001 --lr-decay-style linear --weight-decay 1e-2
    --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --vocab-extra-ids 100"""
TUNING = """--seed 1234 --train-data t --valid-data v w --tokenizer-type BertWordPieceLowerCase
    --vocab-file v --pretrained-checkpoint p --tensor-model-parallel-size 1 --num-layers 24
    --hidden-size 1024 --num-attention-heads 16 --lr-decay-style linear --seq-length 512
    --max-position-embeddings 512 --save c --log-interval 10 --eval-interval 100 --eval-iters 50
    --weight-decay 1.0e-1 --fp16"""
TENSORBOARD = """--tensorboard-dir t --tensorboard-queue-size 1 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard"""
GPT3_175B = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 --lr 6.0e-5
    --rampup-batch-size 16 16 5859375 --min-lr 6.0e-6 --lr-decay-style cosine --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --fp16
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file v --merge-file m
    --save c --load c --tensorboard-dir t --eval-interval 1000"""
UNKNOWN_MODEL = """--num-layers -1 --hidden-size -1 --num-attention-heads -1 --seq-length -1
    --max-position-embeddings -1"""
HARNESS = """--load c --no-load-optim --no-load-rng --inference --deepspeed --deepspeed_config d
    --task_list lambada,piqa,race --adaptive_seq_len --results_path r --micro-batch-size 12
    --tensor-model-parallel-size 1"""

_BASE = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --tensor-model-parallel-size 1 "
    "--max-position-embeddings 512 --vocab-file v --tokenizer-type BertWordPieceLowerCase --fp16"
)
BIGSCIENCE = (
    Script("pretrain_gpt.sh", "pretrain_gpt.py", 1, f"{_345M} --global-batch-size 8", Kind.NOTES),
    Script(
        "pretrain_gpt_distributed.sh",
        "pretrain_gpt.py",
        8,
        f"{_345M} --micro-batch-size 8 --global-batch-size 64",
        Kind.NOTES,
    ),
    Script(
        "pretrain_gpt_distributed_with_mp.sh",
        "pretrain_gpt.py",
        8,
        f"{_345M} --global-batch-size 16 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
        Kind.NOTES,
    ),
    Script(
        "pretrain_gpt_single_node.sh",
        "pretrain_gpt.py",
        2,
        f"{_EVERY} --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 "
        "--train-iters 50 --lr-decay-style cosine --merge-file m --fp16 --log-interval 10 "
        "--eval-iters 10 --checkpoint-activations",
        Kind.WORKS,
    ),
    Script(
        "pretrain_gpt_tiny.sh",
        "pretrain_gpt.py",
        1,
        f"{_GPT2} --num-layers 2 --hidden-size 128 --num-attention-heads 4 --global-batch-size 8 "
        "--seq-length 256 --max-absolute-position-embeddings 256 --train-iters 10000 "
        "--lr-decay-iters 5000 --tokenizer-type PretrainedFromHF --tokenizer-name-or-path t5-small",
        Kind.NOTES,
    ),
    Script(
        "pretrain_gpt3_175B.sh",
        "pretrain_gpt.py",
        1024,
        f"{GPT3_175B} --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples "
        "183105 --log-interval 10 --eval-iters 40 --data-path 0.2 a 0.3 b 0.5 c "
        "--save-interval 1000 --split 98,2,0 --checkpoint-activations",
        Kind.WORKS,
    ),
    Script(
        "curriculum_learning/pretrain_gpt_cl.sh",
        "pretrain_gpt.py",
        128,
        f"{TENSORBOARD} --data-path d --vocab-file v --merge-file m --data-impl mmap "
        "--override-lr-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.014 "
        "--lr-decay-samples 126953125 --lr-decay-tokens 130000000000 --lr-warmup-samples 183105 "
        "--micro-batch-size 1 --global-batch-size 512 --num-layers 12 --hidden-size 768 "
        "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
        "--train-samples 146484375 --train-tokens 10000000000 --lr 1.0e-4 --min-lr 1.0e-5 "
        "--lr-decay-style cosine --split 98,2,0 --log-interval 100 --eval-interval 100 "
        "--eval-iters 10 --save-interval 1000 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 "
        "--num-workers 0 --checkpoint-activations --fp16 --load c --save c --deepspeed "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --partition-activations",
        Kind.NOTES,
    ),
    Script(
        "pretrain_bert.sh",
        "pretrain_bert.py",
        1,
        f"{_BERT_2021} --global-batch-size 8 --train-iters 2000000",
        Kind.NOTES,
    ),
    Script(
        "pretrain_bert_distributed.sh",
        "pretrain_bert.py",
        8,
        f"{_BERT_2021} --global-batch-size 32",
        Kind.NOTES,
    ),
    Script(
        "pretrain_bert_distributed_with_mp.sh",
        "pretrain_bert.py",
        8,
        f"{_BERT_2021} --micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
        Kind.NOTES,
    ),
    *(
        Script(f"finetune_{task.lower()}_distributed.sh", "tasks/main.py", 8, flags, Kind.NOTES)
        for task, flags in (
            ("MNLI", f"--task MNLI --epochs 5 --micro-batch-size 8 --lr 5.0e-5 {TUNING}"),
            ("RACE", f"--task RACE --epochs 3 --micro-batch-size 4 --lr 1.0e-5 {TUNING}"),
        )
    ),
    Script(
        "evaluate_zeroshot_gpt.sh",
        "tasks/main.py",
        8,
        "--task LAMBADA --valid-data v --tokenizer-type GPT2BPETokenizer --strict-lambada "
        "--vocab-file v --merge-file m --load c --tensor-model-parallel-size 1 --num-layers 24 "
        "--hidden-size 1024 --num-attention-heads 16 --batch-size 8 --checkpoint-activations "
        "--seq-length 1024 --max-position-embeddings 1024 --log-interval 10 --fp16 "
        "--no-load-optim --no-load-rng",
        Kind.WORKS,
    ),
    Script(
        "run_evalharness_deepspeed.slurm",
        "tasks/eval_harness/evaluate.py",
        1,
        f"{HARNESS} --pipeline-model-parallel-size 2 --vocab-file v --merge-file m --eval_fp32 "
        f"{UNKNOWN_MODEL}",
        Kind.NOTES,
    ),
    Script(
        "run_evalharness_tr11-176b-ml.slurm",
        "tasks/eval_harness/evaluate.py",
        8,
        f"{HARNESS} --pipeline-model-parallel-size 8 --tokenizer-type PretrainedFromHF "
        "--tokenizer-name-or-path t --bf16 --bootstrap_iters 2 --intermed_results "
        f"--micro_bs_multiplier 4 {UNKNOWN_MODEL}",
        Kind.NOTES,
    ),
    Script(
        "generate_text.sh",
        "tools/generate_samples_gpt.py",
        1,
        "--tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --load c "
        "--num-attention-heads 16 --max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer "
        "--fp16 --batch-size 2 --seq-length 1024 --out-seq-length 1024 --temperature 1.0 "
        "--vocab-file v --merge-file m --genfile g --num-samples 2 --top_p 0.9 --recompute",
        Kind.NOTES,
    ),
    Script(
        "merge_mp_bert.sh",
        "tools/merge_mp_partitions.py",
        1,
        "--model-type BERT --tensor-model-parallel-size 2 --num-layers 24 --load c",
        Kind.UNCHECKED,
    ),
    Script(
        "pretrain_t5.sh, pretrain_t5_distributed.sh, pretrain_t5_distributed_with_mp.sh",
        "pretrain_t5.py",
        8,
        f"{_T5} --tensor-model-parallel-size 2",
        Kind.NOTES,
        num_scripts=3,
    ),
    Script(
        "pretrain_ict.sh",
        "pretrain_ict.py",
        1,
        f"{_BASE} --micro-batch-size 32 --seq-length 256 --train-iters 100000 --bert-load b "
        "--log-interval 100 --eval-interval 1000 --eval-iters 10 --data-impl mmap --data-path d "
        "--retriever-report-topk-accuracies 1 5 10 20 100 --retriever-score-scaling --load c "
        "--save c --titles-data-path t --lr 0.0001 --lr-decay-style linear --weight-decay 1e-2 "
        "--clip-grad 1.0 --lr-warmup-fraction 0.01 --save-interval 4000 --exit-interval 8000 "
        "--query-in-block-prob 0.1",
        Kind.NOTES,
    ),
    Script(
        "create_embeddings.sh",
        "tools/create_doc_index.py",
        1,
        f"{_BASE} --micro-batch-size 128 --checkpoint-activations --seq-length 512 --load c "
        "--retriever-seq-length 256 --evidence-data-path e --embedding-path i "
        "--indexer-log-interval 1000 --indexer-batch-size 128 --num-workers 2",
        Kind.WORKS,
    ),
    Script(
        "evaluate_ict_zeroshot_nq.sh",
        "tasks/main.py",
        1,
        f"--task ICT-ZEROSHOT-NQ {_BASE} --checkpoint-activations --seq-length 512 --load c "
        "--evidence-data-path e --embedding-path i --retriever-seq-length 256 --qa-data-dev q "
        "--qa-data-test q --faiss-use-gpu --retriever-report-topk-accuracies 1 5 20 100",
        Kind.WORKS,
    ),
)
