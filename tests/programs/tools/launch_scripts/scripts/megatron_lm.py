"""Example scripts of three other Megatrons: what each starts, with its flags expanded.

Facts, not texts: paths are shortened, and a script that says where files lie names any. They are of
the states that `tests/unit/config/spellings/flags_of_other_megatrons.py` names, or the last before
them that could be had.
"""

from typing import NamedTuple

from tools.launch_scripts.verdicts import Kind


class Script(NamedTuple):
    """A script: what it starts on how many ranks, and what becomes of it here.

    `missing` is a part of every reason, in order, where it is refused.
    """

    path: str
    program: str
    ranks: int
    flags: str
    kind: Kind
    missing: tuple[str, ...] = ()


_EVERY = "--save c --load c --data-path d --vocab-file v --save-interval 10000 --eval-interval 1000"
_GPT2 = f"""{_EVERY} --eval-iters 10 --log-interval 100 --merge-file m --data-impl mmap --fp16
    --split 949,50,1 --distributed-backend nccl --weight-decay 1e-2 --clip-grad 1.0
    --lr-warmup-fraction .01 --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine
    --checkpoint-activations --position-embedding-type absolute --micro-batch-size 4"""
_345M = f"""{_GPT2} --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-absolute-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000"""
_BERT = f"""{_EVERY} --eval-iters 10 --log-interval 100 --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --train-iters 1000000 --lr 0.0001 --min-lr 1.0e-5 --clip-grad 1.0
    --lr-decay-style linear --lr-decay-iters 990000 --weight-decay 1e-2 --lr-warmup-fraction .01
    --split 949,50,1 --fp16 --seq-length 512"""
_BERT_2021 = f"""{_BERT} --data-impl mmap --distributed-backend nccl --micro-batch-size 2
    --max-absolute-position-embeddings 512 --position-embedding-type absolute
    --global-batch-size 16"""
_TUNING = """--seed 1234 --train-data t --valid-data v w --tokenizer-type BertWordPieceLowerCase
    --vocab-file v --pretrained-checkpoint p --tensor-model-parallel-size 1 --num-layers 24
    --hidden-size 1024 --num-attention-heads 16 --checkpoint-activations --lr-decay-style linear
    --seq-length 512 --max-position-embeddings 512 --save c --log-interval 10 --eval-interval 100
    --eval-iters 50 --weight-decay 1.0e-1 --fp16"""
_TENSORBOARD = """--tensorboard-dir t --tensorboard-queue-size 1 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard"""
_PILE = f"""--adam-beta1 0.9 --adam-beta2 0.95 --exit-duration-in-mins 30000000 --seq-length 2048
    --max-position-embeddings 2048 --num-layers 24 --num-attention-heads 16 --data-impl mmap
    --train-tokens 300000000000 --lr-decay-style cosine --log-interval 10 --eval-interval 100
    --eval-iters 10 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16
    --load c --save c {_TENSORBOARD} --checkpoint-activations --vocab-file v --merge-file m
    --data-path d --override-opt_param-scheduler --deepspeed --deepspeed-activation-checkpointing"""
_MOE = f"""{_PILE} --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --min-lr 3.0e-5 --lr 3.0e-4
    --moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --init-method-std 0.014 --split 98,2,0
    --lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000 --micro-batch-size 4
    --global-batch-size 256 --hidden-size 1024 --pipeline-model-parallel-size 1
    --tensor-model-parallel-size 1 --save-interval 1000"""
_LLAMA2 = """--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16
    --micro-batch-size 4 --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048
    --train-iters 250000 --save c --load c --data-path 1 d --data-impl mmap --split 949,50,1
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model m --distributed-backend nccl
    --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --bf16
    --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --no-query-key-layer-scaling
    --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings --swiglu
    --untie-embeddings-and-output-weights --normalization rmsnorm --disable-bias-linear
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --deepspeed"""
_175B = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 --lr 6.0e-5
    --rampup-batch-size 16 16 5859375 --min-lr 6.0e-6 --lr-decay-style cosine --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --fp16
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file v --merge-file m
    --save c --load c --tensorboard-dir t --eval-interval 1000"""
_MOCK = """--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path d
    --tiktoken-pattern v2 --split 99,1,0 --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --num-workers 1 --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-decay-style cosine
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --seq-length 8192 --max-position-embeddings 8192
    --use-mcore-models --group-query-attention --num-query-groups 8 --position-embedding-type rope
    --rotary-percent 1.0 --untie-embeddings-and-output-weights --disable-bias-linear
    --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
    --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --log-interval 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --log-throughput
    --save c --tensorboard-dir t"""

BIGSCIENCE = (
    Script("pretrain_gpt.sh", "pretrain_gpt.py", 1, f"{_345M} --global-batch-size 8", Kind.NOTES),
    Script(
        "pretrain_gpt_distributed_with_mp.sh",
        "pretrain_gpt.py",
        8,
        f"{_345M} --global-batch-size 16 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
        Kind.NOTES,
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
        f"{_175B} --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples "
        "183105 --log-interval 10 --eval-iters 40 --data-path 0.2 a 0.3 b 0.5 c "
        "--save-interval 1000 --split 98,2,0 --checkpoint-activations",
        Kind.WORKS,
    ),
    Script(
        "curriculum_learning/pretrain_gpt_cl.sh",
        "pretrain_gpt.py",
        128,
        f"{_TENSORBOARD} --data-path d --vocab-file v --merge-file m --data-impl mmap "
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
        "pretrain_bert_distributed_with_mp.sh",
        "pretrain_bert.py",
        8,
        f"{_BERT_2021} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        Kind.NOTES,
    ),
    *(
        Script(f"finetune_{task.lower()}_distributed.sh", "tasks/main.py", 8, flags, Kind.NOTES)
        for task, flags in (
            ("MNLI", f"--task MNLI --epochs 5 --micro-batch-size 8 --lr 5.0e-5 {_TUNING}"),
            ("RACE", f"--task RACE --epochs 3 --micro-batch-size 4 --lr 1.0e-5 {_TUNING}"),
        )
    ),
    Script(
        "generate_text.sh",
        "tools/generate_samples_gpt.py",
        1,
        "--load c --num-samples 2 --genfile g --top_p 0.9 --recompute",
        Kind.NOTES,
    ),
    Script("pretrain_t5.sh", "pretrain_t5.py", 1, "", Kind.REFUSED, ("T5 models",)),
    Script("pretrain_ict.sh", "pretrain_ict.py", 1, "", Kind.REFUSED, ("models for retrieval",)),
)
MICROSOFT = (
    Script(
        "MoE/ds_pretrain_gpt_350M_dense.sh",
        "pretrain_gpt.py",
        8,
        f"{_MOE} --moe-expert-parallel-size 1 --num-experts 1 --train-samples 439453125",
        Kind.NOTES,
    ),
    Script(
        "rebase/ds_pretrain_gpt_1.3B.sh",
        "pretrain_gpt.py",
        8,
        f"{_PILE} --tensor-model-parallel-size 2 --init-method-std 0.013 --lr 2.0e-4 --seed 1234 "
        "--lr-decay-tokens 300000000000 --lr-warmup-tokens 3000000000 --micro-batch-size 2 "
        "--global-batch-size 512 --hidden-size 2048 --train-samples 292968750 --min-lr 1.0e-6 "
        "--split 949,50,1 --save-interval 100 --no-async-tensor-model-parallel-allreduce "
        "--log-optimizer-states-to-tensorboard --zero-stage 1 --pipeline-model-parallel-size 2",
        Kind.NOTES,
    ),
    Script(
        "pretrain_llama2_distributed.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA2} --num-key-value-heads 4 --zero-stage 0",
        Kind.NOTES,
    ),
    Script(
        "universal_checkpointing/run_llama_bf16.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA2} --zero-stage 1 --ds-sequence-parallel-size 1 --exit-interval 200",
        Kind.NOTES,
    ),
    Script(
        "MoE/ds_pretrain_gpt_1.3B_MoE128.sh",
        "pretrain_gpt.py",
        8,
        f"{_MOE} --moe-expert-parallel-size 8 --num-experts 16 --train-iters 858306 "
        "--create-moe-param-group --no-pipeline-parallel",
        Kind.REFUSED,
        ("experts cannot be shared out",),
    ),
)
MEGATRON_LM = (
    Script(
        "bert/train_bert_340m_distributed.sh",
        "pretrain_bert.py",
        128,
        f"{_BERT} --max-position-embeddings 512 --attention-backend auto --micro-batch-size 4 "
        "--global-batch-size 32 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
        "--tensorboard-dir t",
        Kind.WORKS,
    ),
    Script(  # before --step-batch-size-schedule; Megatron-LM refuses it as well
        "gpt3/train_gpt3_175b_distributed.sh",
        "pretrain_gpt.py",
        128,
        f"{_175B} --attention-backend auto --train-iters 500000 --lr-warmup-fraction .001 "
        "--lr-decay-iters 430000 --data-path d --split 949,50,1 --log-interval 100 "
        "--save-interval 10000 --eval-iters 10",
        Kind.REFUSED,
        ("a batch-size ramp needs training measured in samples",),
    ),
    Script(
        "llama/train_llama3_8b_h100_fp8.sh",
        "pretrain_gpt.py",
        8,
        f"{_MOCK} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --kv-channels 128 "
        "--num-attention-heads 32 --rotary-base 1000000 --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused "
        "--apply-layernorm-1p --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 "
        "--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --adam-beta1 0.9 --adam-beta2 0.95 "
        "--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc "
        "--empty-unused-memory-level 1 --exit-duration-in-mins 235 --eval-iters 32 "
        "--eval-interval 100 --save-interval 1000 --profile --profile-step-start 4 "
        "--profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --load c",
        Kind.NOTES,
    ),
    Script(
        "gptoss/02_train.sh",
        "pretrain_gpt.py",
        8,
        f"{_MOCK} --no-masked-softmax-fusion --transformer-impl transformer_engine "
        "--no-rope-fusion --normalization RMSNorm --num-layers 12 --hidden-size 512 "
        "--ffn-hidden-size 2048 --num-attention-heads 64 --rope-type rope --rotary-base 10000 "
        "--no-bias-gelu-fusion --export-force-local-attention --no-bias-dropout-fusion "
        "--quick-geglu --glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2 "
        "--activation-func-clamp-value 7.0 --window-size 128,0 --enable-gpt-oss --num-experts 4 "
        "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 2048 "
        "--moe-router-dtype fp32 --moe-z-loss-coeff 1e-3 --moe-permute-fusion --lr 1.0e-5 "
        "--min-lr 1.0e-6 --lr-warmup-fraction 0.05 --use-flash-attn --attention-softmax-in-fp32 "
        "--accumulate-allreduce-grads-in-fp32 --disable-bf16-reduced-precision-matmul "
        "--recompute-activations --pipeline-model-parallel-size 8 --eval-iters 0 "
        "--expert-model-parallel-size 1 --save-interval 10000 --eval-interval 50000000 "
        "--moe-per-layer-logging --no-load-optim --no-load-rng",
        Kind.REFUSED,
        ("an architecture of layers that differ, or of other positions",),
    ),
    Script("t5/train_t5_220m_distributed.sh", "pretrain_t5.py", 8, "", Kind.REFUSED, ("T5",)),
    Script("mamba/train.sh", "pretrain_hybrid.py", 8, "", Kind.REFUSED, ("hybrid models",)),
)
SYSTEMS = {
    "bigscience's `examples/`": BIGSCIENCE,
    "Microsoft's `examples_deepspeed/`": MICROSOFT,
    "Megatron-LM's `examples/`": MEGATRON_LM,
}
