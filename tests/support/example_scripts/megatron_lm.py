"""Scripts of Megatron-LM's `examples/`; those of programs without a counterpart in one row each."""

from tests.support.example_scripts.bigscience import BERT, GPT3_175B
from tests.support.example_scripts.script import Script
from tools.launch_scripts.verdicts import Kind

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

_LLAMA3_8B = f"""{_MOCK} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --kv-channels 128 --num-attention-heads 32 --rotary-base 1000000
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134
    --attention-backend fused --apply-layernorm-1p --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --adam-beta1 0.9 --adam-beta2 0.95 --cross-entropy-loss-fusion
    --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --exit-duration-in-mins 235 --eval-iters 32 --eval-interval 100
    --save-interval 1000 --distributed-timeout-minutes 60 --load c"""

MEGATRON_LM = (
    Script(
        "bert/train_bert_340m_distributed.sh",
        "pretrain_bert.py",
        128,
        f"{BERT} --max-position-embeddings 512 --attention-backend auto --micro-batch-size 4 "
        "--global-batch-size 32 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
        "--tensorboard-dir t",
        Kind.WORKS,
    ),
    Script(  # before --step-batch-size-schedule
        "gpt3/train_gpt3_175b_distributed.sh",
        "pretrain_gpt.py",
        128,
        f"{GPT3_175B} --attention-backend auto --train-iters 500000 --lr-warmup-fraction .001 "
        "--lr-decay-iters 430000 --data-path d --split 949,50,1 --log-interval 100 "
        "--save-interval 10000 --eval-iters 10",
        Kind.WORKS,
    ),
    Script(
        "llama/train_llama3_8b_h100_fp8.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA3_8B} --grad-reduce-in-bf16 --profile --profile-step-start 4 "
        "--profile-step-end 6 --ckpt-format torch_dist",
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
        ("the positions of gpt-oss as a switch of ModelOpt",),
        "YaRN without a switch: `--rope-type yarn`, in place of `--enable-gpt-oss`",
    ),
    Script(
        "academic_paper_scripts/sc21/run_{figure_11,...,figure_18,table_1}.sh",
        "pretrain_gpt.py",
        64,
        "--activations-checkpoint-method uniform --tensor-model-parallel-size 32 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 32 "
        "--num-layers 32 --hidden-size 20480 --num-attention-heads 128 --DDP-impl local "
        "--data-path d --vocab-file v --merge-file m --log-interval 5 --seq-length 2048 "
        "--max-position-embeddings 2048 --train-iters 500 --lr-decay-iters 320 --lr 0.0001 "
        "--min-lr 0.00001 --lr-decay-style cosine --lr-warmup-fraction 0.01 --split 969,30,1 "
        "--eval-iters 100 --eval-interval 1000 --clip-grad 1.0 --fp16 --loss-scale 8192",
        Kind.NOTES,
        num_scripts=9,
    ),
    Script(
        "mixtral/train_mixtral_8x7b_distributed.sh",
        "pretrain_gpt.py",
        32,
        "--use-mcore-models --disable-bias-linear --seq-length 4096 --num-layers 32 "
        "--max-position-embeddings 32768 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 "
        "--no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8 "
        "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather "
        "--overlap-grad-reduce --tokenizer-type Llama2Tokenizer --tokenizer-model m --data-path d "
        "--split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 "
        "--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 "
        "--weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
        "--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel "
        "--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save c "
        "--load c --tensorboard-dir t --no-load-optim --no-load-rng",
        Kind.NOTES,
    ),
    Script(
        "megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA3_8B} --normalization RMSNorm --no-check-for-nan-in-loss-and-grad "
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--no-gradient-accumulation-fusion --init-model-with-meta-device "
        "--ckpt-format fsdp_dtensor --use-nccl-ub --fsdp-double-buffer --fsdp-manual-registration "
        "--logging-level 20",
        Kind.NOTES,
    ),
    Script(
        "megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh",
        "pretrain_gpt.py",
        256,
        "--tensor-model-parallel-size 1 --expert-model-parallel-size 8 --context-parallel-size 1 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn "
        "--disable-bias-linear --micro-batch-size 4 --global-batch-size 2048 --num-workers 6 "
        "--train-samples 585937500 --exit-duration-in-mins 220 --manual-gc --manual-gc-interval 10 "
        "--recompute-granularity selective --recompute-modules mlp moe mla_up_proj layernorm "
        "--seq-length 4096 --tokenizer-type HuggingFaceTokenizer --tokenizer-model m --data-path d "
        "--split 99,1,0 --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --kv-channels "
        "128 --num-attention-heads 128 --max-position-embeddings 4096 --position-embedding-type "
        "rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --qk-layernorm "
        "--untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 1536 "
        "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
        "--mtp-num-layers 1 "
        "--mtp-loss-scaling-factor 0.1 --moe-router-force-load-balancing --num-experts 256 "
        "--moe-router-topk 8 --moe-layer-freq [0]*3+[1]*58 --lr 3.9e-6 --min-lr 3.9e-7 --bf16",
        Kind.REFUSED,
        (
            *("multi-latent attention",) * 6,
            *("prediction of several tokens",) * 2,
            "choices that are not the router's",
            *("--recompute-modules moe", "--recompute-modules mla_up_proj"),
        ),
        "multi-latent attention, and prediction of several tokens: planned",
    ),
    Script(
        "post_training/modelopt/train.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA3_8B} --modelopt-enabled --export-te-mcore-model --auto-detect-ckpt-format",
        Kind.REFUSED,
        ("quantization by ModelOpt",) * 2,
        "quantization by ModelOpt",
    ),
    Script(
        "t5/train_t5_220m_distributed.sh",
        "pretrain_t5.py",
        8,
        "--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 "
        "--num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 "
        "--decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 64 "
        "--global-batch-size 512 --lr 0.0001 --train-iters 1000000 --lr-decay-iters 1000000 "
        "--lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2 --lr-warmup-fraction .01 "
        "--clip-grad 1.0 --bf16 --vocab-extra-ids 100 --init-method-std 0.015 "
        "--transformer-impl transformer_engine --tensor-model-parallel-size 1 "
        "--pipeline-model-parallel-size 1 --attention-backend auto --data-path d --vocab-file v "
        "--tokenizer-type BertWordPieceCase --split 99982,9,9 --log-interval 100 "
        "--tensorboard-dir t --save-interval 500 --eval-interval 1000 --eval-iters 10",
        Kind.NOTES,
    ),
    Script(
        "mamba/train.sh",
        "pretrain_hybrid.py",
        8,
        "",
        Kind.REFUSED,
        ("hybrid models",),
        "hybrid models with Mamba layers",
    ),
    Script(
        "inference/*.sh, mamba/run_text_gen*.sh",
        "tools/run_text_generation_server.py",
        8,
        "--load c --use-checkpoint-args --inference-max-requests 8",  # and others of that group
        Kind.REFUSED,
        ("an inference engine in training programs",),
        "flags of its engine (`--inference-*`); the server here has its own",
        5,
    ),
    *(
        Script(path, program, 8, "", Kind.REFUSED, (missing,), why, count)
        for path, program, missing, why, count in (
            (
                "rl/model_configs/*.sh",
                "train_rl.py",
                "reinforcement learning",
                "reinforcement learning",
                14,
            ),
            *(
                (path, program, f"there is no {program} here", why, count)
                for path, program, why, count in (
                    (
                        "multimodal/**.sh, mimo/**.sh",
                        "examples/multimodal/train.py",
                        "models of images and text",
                        21,
                    ),
                    (
                        "post_training/modelopt/*.sh but train.sh",
                        "examples/post_training/modelopt/quantize.py",
                        "quantization by ModelOpt",
                        13,
                    ),
                    (
                        "academic_paper_scripts/{detxoify_lm,msdp}/**.sh",
                        "tasks/msdp/main.py",
                        "detoxification, and dialogues with knowledge",
                        10,
                    ),
                    (
                        "megatron_fsdp/sbatch_checkpoint_convert.sh",
                        "tools/checkpoint/checkpoint_inspector.py",
                        "checkpoints of its FSDP (`fsdp_dtensor`)",
                        1,
                    ),
                )
            ),
        )
    ),
)
