"""Scripts of Microsoft's `examples_deepspeed/`, all of them."""

from collections.abc import Mapping

from tests.support.example_scripts.bigscience import (
    HARNESS,
    TENSORBOARD,
    TUNING,
    UNKNOWN_MODEL,
)
from tests.support.example_scripts.script import CONTRADICTION, Script
from tools.launch_scripts.verdicts import Kind

_PILE = f"""--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95
    --exit-duration-in-mins 30000000 --seq-length 2048 --max-position-embeddings 2048
    --num-layers 24 --num-attention-heads 16 --train-tokens 300000000000 --lr-decay-style cosine
    --log-interval 10 --eval-interval 100 --eval-iters 10 --weight-decay 0.1 --clip-grad 1.0
    --hysteresis 2 --num-workers 0 --fp16 --load c --save c {TENSORBOARD} --vocab-file v
    --merge-file m --data-path d --data-impl mmap --deepspeed"""
_RECOMPUTED = "--checkpoint-activations --deepspeed-activation-checkpointing"
_EXPERTS = f"""{_PILE} {_RECOMPUTED} --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0
    --moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --init-method-std 0.014 --split 98,2,0
    --lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000 --pipeline-model-parallel-size 1
    --tensor-model-parallel-size 1"""
_DENSE_350M = f"""{_EXPERTS} --moe-expert-parallel-size 1 --num-experts 1 --micro-batch-size 4
    --global-batch-size 256 --hidden-size 1024 --train-samples 439453125 --lr 3.0e-4
    --min-lr 3.0e-5 --save-interval 1000"""
_MOE = f"""{_EXPERTS} --moe-expert-parallel-size 64 --micro-batch-size 8 --global-batch-size 512
    --hidden-size 2048 --train-iters 858306 --lr 1.2e-4 --min-lr 1.0e-6 --save-interval 10000
    --create-moe-param-group --no-pipeline-parallel"""
_LARGE_BATCH = f"""{_PILE} {_RECOMPUTED} --tensor-model-parallel-size 2 --init-method-std 0.013
    --lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000 --micro-batch-size 16
    --global-batch-size 4096 --hidden-size 2048 --train-samples 439453125 --lr 8.0e-4
    --min-lr 2.0e-5 --split 98,2,0 --save-interval 1000 --log-optimizer-states-to-tensorboard
    --zero-stage 0 --pipeline-model-parallel-size 1 --no-pipeline-parallel"""
_REBASED = f"""{_PILE} --init-method-std 0.013 --lr-decay-tokens 300000000000
    --lr-warmup-tokens 3000000000 --micro-batch-size 2 --global-batch-size 512 --hidden-size 2048
    --train-samples 292968750 --lr 2.0e-4 --min-lr 1.0e-6 --split 949,50,1 --save-interval 100
    --seed 1234 --no-async-tensor-model-parallel-allreduce --log-optimizer-states-to-tensorboard"""
_3D = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1"
_32K = """--tensor-model-parallel-size 1 --ds-sequence-parallel-size 4 --seq-length 32768
    --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 2
    --train-samples 18310546 --pipeline-model-parallel-size 1 --no-pipeline-parallel"""
_BERT_PILE = f"""{TENSORBOARD} --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.999
    --init-method-std 0.02 --tensor-model-parallel-size 1 --lr-warmup-iters 10000
    --micro-batch-size 16 --global-batch-size 1024 --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 --lr 1e-4 --min-lr 1e-5
    --lr-decay-style linear --split 949,50,1 --log-interval 100 --eval-interval 1000 --eval-iters 10
    --save-interval 20000 --weight-decay 1e-2 --clip-grad 1.0 --num-workers 4 --fp16 --load c
    --save c --log-optimizer-states-to-tensorboard --vocab-file v --data-path d --data-impl mmap
    --deepspeed --zero-stage 0 --pipeline-model-parallel-size 1 --no-pipeline-parallel"""
_GPT2 = """--lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1 --eval-iters 40
    --eval-interval 1000 --data-path d --vocab-file v --merge-file m --split 98,2,0 --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
    --checkpoint-activations --deepspeed-activation-checkpointing --tensorboard-dir t --deepspeed"""
_AZURE = f"""{_GPT2} --fp16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --save-interval 1000 --exit-interval 5000 --no-pipeline-parallel"""
_UNIVERSAL = f"""{_GPT2} {_3D} --num-layers 4 --hidden-size 512 --num-attention-heads 32
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 16
    --train-iters 100000 --save c --load c --save-interval 100 --exit-interval 200
    --make-vocab-size-divisible-by 256 --ds-sequence-parallel-size 1"""
_LLAMA = """--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16
    --micro-batch-size 4 --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048
    --train-iters 250000 --save c --load c --data-path 1 d --data-impl mmap --split 949,50,1
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model m --distributed-backend nccl
    --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --bf16
    --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --no-query-key-layer-scaling
    --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings --swiglu
    --untie-embeddings-and-output-weights --normalization rmsnorm --disable-bias-linear
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --deepspeed"""


def _json(stage: int, **more: object) -> dict[str, object]:
    """The settings that most of these scripts have in common, in float16."""
    scale = {"loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
    return {
        "steps_per_print": 10,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "prescale_gradients": stage == 0,
        "fp16": {"enabled": True, "initial_scale_power": 11, **scale},
        "wall_clock_breakdown": False,
    } | more


def _by_length(shortest: int, longest: int, steps: int) -> Mapping[str, object]:
    return {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": shortest,
        "max_difficulty": longest,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": steps, "difficulty_step": 8},
    }


_BF16 = {"steps_per_print": 1, "bf16": {"enabled": True}}
_QUANTIZED = {"weight_quantization": {"shared_parameters": {"enabled": True}}}
_OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}

DENSE = (
    Script(
        "MoE/ds_pretrain_gpt_{350M,1.3B,6.7B}_dense.sh and compression/..._350M_dense_kd.sh",
        "pretrain_gpt.py",
        64,
        _DENSE_350M,
        Kind.NOTES,
        num_scripts=4,
        settings=_json(0, bf16={"enabled": False}),
    ),
    Script(
        "MoE/ds_pretrain_gpt_{125M,1.3B}_dense_cl.sh",
        "pretrain_gpt.py",
        128,
        _LARGE_BATCH,
        Kind.NOTES,
        num_scripts=2,
        settings=_json(0, curriculum_learning=_by_length(80, 2048, 13767)),
    ),
    *(
        Script(
            f"azure/run-{size}.sh",
            "pretrain_gpt.py",
            8,
            f"{_AZURE} --num-layers 128 --hidden-size 25600 --num-attention-heads 160 --loss-scale "
            "15 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 "
            f"--global-batch-size 8 --train-iters 1000 --zero-stage=3 {offload}",
            Kind.NOTES,
            num_scripts=count,
            settings={"zero_optimization": zero, "fp16": {"enabled": True}},
        )
        for size, offload, zero, count in (
            ("{1t,175b}", "--cpu-optimizer", _OFFLOADED, 2),
            ("benchmark-model", "", {"stage": 3}, 1),
        )
    ),
    Script(
        "run_deepspeed_example.sh",
        "pretrain_gpt.py",
        16,
        f"{_AZURE} --num-layers 24 --hidden-size 512 --num-attention-heads 16 --seq-length 256 "
        "--loss-scale 12 --max-position-embeddings 1024 --micro-batch-size 4 "
        "--global-batch-size 1024 --train-iters 1000 --zero-stage=2",
        Kind.REFUSED,
        ("--global-batch-size 1024",),
        f"{CONTRADICTION}: a batch of 64 in its JSON, and of 1024 in its flags",
        settings={
            "train_batch_size": 64,
            "zero_optimization": {"stage": 2},
            "fp16": {"enabled": True, "initial_scale_power": 12},
        },
    ),
    Script(
        "pretrain_llama_distributed.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA} --zero-stage=0 --deepspeed-activation-checkpointing",
        Kind.NOTES,
        settings=_BF16 | {"zero_optimization": {"stage": 0}},
    ),
    Script(
        "pretrain_llama2_distributed.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA} --num-key-value-heads 4 --zero-stage=0",
        Kind.NOTES,
        settings=_BF16 | {"zero_optimization": {"stage": 0}},
    ),
    Script(
        "universal_checkpointing/llama/run_{llama,universal_llama}_bf16.sh",
        "pretrain_gpt.py",
        8,
        f"{_LLAMA} --zero-stage=1 --ds-sequence-parallel-size 1 --exit-interval 200 "
        "--tensorboard-dir t --universal-checkpoint",
        Kind.NOTES,
        num_scripts=2,
        settings=_BF16 | {"zero_optimization": {"stage": 1}},
    ),
    Script(
        "universal_checkpointing/megatron_gpt/run_{bf16,universal_bf16}.sh",
        "pretrain_gpt.py",
        8,
        f"{_UNIVERSAL} --universal-checkpoint --bf16",
        Kind.NOTES,
        num_scripts=2,
        settings=_BF16 | {"zero_optimization": {"stage": 1}},
    ),
    Script(
        "universal_checkpointing/megatron_gpt/run_{fp16,universal_fp16}.sh",
        "pretrain_gpt.py",
        8,
        f"{_UNIVERSAL} --universal-checkpoint --fp16 --loss-scale 12",
        Kind.REFUSED,
        ("--loss-scale 12.0; fp16.loss_scale 0",),
        f"{CONTRADICTION}: a constant loss scale in its flags, a dynamic one in its JSON",
        num_scripts=2,
        settings={
            "zero_optimization": {"stage": 1},
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 50},
        },
    ),
    Script(
        "rebase/ds_pretrain_gpt_{125M,1.3B,13B}.sh",
        "pretrain_gpt.py",
        64,
        f"{_REBASED} {_RECOMPUTED} {_3D}",
        Kind.NOTES,
        num_scripts=3,
        settings=_json(1),
    ),
    Script(
        "rebase/ds_pretrain_gpt_125M_flashattn.sh",
        "pretrain_gpt.py",
        64,
        f"{_REBASED} {_RECOMPUTED} {_3D} --use-flash-attn",
        Kind.NOTES,
        settings=_json(1),
    ),
    Script(
        "rebase/ds_pretrain_gpt_1.3B_megatron_checkpointing.sh",
        "pretrain_gpt.py",
        64,
        f"{_REBASED} {_3D} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        Kind.NOTES,
        settings=_json(1),
    ),
    *(
        Script(
            f"{folder}/ds_pretrain_gpt_1.3B_{name}.sh",
            "pretrain_gpt.py",
            64,
            f"{_REBASED} {_RECOMPUTED} --tensor-model-parallel-size 4 --zero-stage 1 "
            "--pipeline-model-parallel-size 8 --use-rotary-position-embeddings "
            "--rotary-percent 0.25",
            Kind.NOTES,
            settings=settings,
        )
        for folder, name, settings in (
            ("rebase", "rope", _json(1)),
            (
                "curriculum_learning",
                "rope_slw",
                _json(1, curriculum_learning=_by_length(64, 2048, 953)),
            ),
        )
    ),
    Script(
        "curriculum_learning/ds_train.sh, curriculum_learning/ds_pretrain_gpt2.sh",
        "pretrain_gpt.py",
        128,
        f"{TENSORBOARD} --tensor-model-parallel-size 1 --num-layers 48 --hidden-size 1600 "
        "--num-attention-heads 25 --seq-length 1024 --max-position-embeddings 1024 "
        "--micro-batch-size 32 --global-batch-size 4096 --train-iters 75000 "
        "--train-tokens 157286400000 --lr-decay-tokens 157286400000 --save c --load c "
        "--data-path d --vocab-file v --merge-file m --data-impl mmap --split 949,50,1 "
        "--distributed-backend nccl --override-opt_param-scheduler --lr 6e-4 --min-lr 1.0e-5 "
        "--lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-iters 3000 "
        "--log-interval 100 --save-interval 1000 --eval-interval 100 --eval-iters 10 --fp16 "
        f"--seed 1234 --no-masked-softmax-fusion {_RECOMPUTED} --deepspeed --zero-stage 1 "
        "--pipeline-model-parallel-size 1",
        Kind.REFUSED,
        ("zero_allow_untested_optimizer", "--global-batch-size 4096", "--lr 0.0006"),
        f"{CONTRADICTION}: another batch and learning rate in its JSON than in its flags",
        num_scripts=2,
        settings={
            "train_batch_size": 512,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "betas": [0.9, 0.95]}},
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000},
            "zero_allow_untested_optimizer": False,
            "curriculum_learning": _by_length(64, 1024, 45000),
        },
    ),
    Script(
        "deepspeed4science/megatron_long_seq_support/pretrain_gpt_{1.3B,30B}_seq_parallel.sh",
        "pretrain_gpt.py",
        8,
        f"--sequence-parallel {_REBASED} {_RECOMPUTED} --tensor-model-parallel-size 8 "
        "--zero-stage 0 --pipeline-model-parallel-size 1 --micro-batch-size 1 "
        "--global-batch-size 2 --use-flash-attn-triton --no-pipeline-parallel",
        Kind.NOTES,
        num_scripts=2,
        settings=_json(0, flops_profiler={"enabled": True, "profile_step": 1}),
    ),
    Script(
        "sequence_parallel/ds_pretrain_gpt_{1.3B,30B}_seq_parallel_32k.sh",
        "pretrain_gpt.py",
        8,
        f"{_REBASED} {_RECOMPUTED} {_32K} --zero-stage 1 --use-flash-attn-triton",
        Kind.REFUSED,
        ("ranks cannot share sequences: only the native engine does it",),
        "Ulysses through DeepSpeed: leave DeepSpeed's flags out",
        num_scripts=2,
        settings=_json(1) | {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    ),
    Script(
        "zero_bubble_pp/zbh1_pretrain_gpt_1.3b.sh",
        "pretrain_gpt.py",
        8,
        f"{_REBASED} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 "
        "--zero-stage 0 --micro-batch-size 1 --global-batch-size 16 --enable-zbh1-pipeline "
        "--enable-zbh1-exact-semantics",
        Kind.REFUSED,
        ("--pipeline-schedule zero-bubble with --deepspeed",),
        "zero-bubble pipelines through DeepSpeed: leave DeepSpeed's flags out",
        settings=_json(0),
    ),
    Script(
        "offload_pp/ds_pretrain_gpt_350M.sh",
        "pretrain_gpt.py",
        16,
        f"{_DENSE_350M} --micro-batch-size 2 --rampup-batch-size 32 32 1953125 --cpu-optimizer "
        "--timing-log-level 1 --no-pipeline-parallel",
        Kind.REFUSED,
        ("--fp16; fp16.enabled false", "--fp16; bf16.enabled true"),
        f"{CONTRADICTION}: float16 in its flags, bfloat16 in its JSON",
        settings=_json(3) | {"fp16": {"enabled": False}, "bf16": {"enabled": True}},
    ),
    Script(
        "data_efficiency/gpt/pretrain/ds_pretrain_gpt_1.3B_dense_base_script.sh",
        "pretrain_gpt.py",
        64,
        f"{_REBASED} {_RECOMPUTED} --tensor-model-parallel-size 1 --zero-stage 1 "
        "--micro-batch-size 8 --pipeline-model-parallel-size 1 --no-pipeline-parallel",
        Kind.NOTES,
        settings=_json(1, data_efficiency={"enabled": False}),
    ),
    Script(
        "bert_with_pile/ds_pretrain_bert.sh",
        "pretrain_bert.py",
        64,
        f"{_BERT_PILE} --train-iters 2000000 --lr-decay-iters 2000000",
        Kind.NOTES,
        settings=_json(0),
    ),
    Script(
        "data_efficiency/bert/pretrain/ds_pretrain_bert_336M_base_script.sh",
        "pretrain_bert.py",
        64,
        f"{_BERT_PILE} --train-iters 4000000 --train-tokens 1048576000000 "
        "--lr-decay-tokens 1048576000000 --exit-duration-in-mins 30000000 --seed 1234",
        Kind.NOTES,
        settings=_json(0, data_efficiency={"enabled": False}),
    ),
)
CONSISTENT = tuple(script for script in DENSE if not script.why.startswith(CONTRADICTION))
MICROSOFT = (
    *DENSE,
    Script(
        "MoE/ds_pretrain_gpt_{125M_MoE64,350M_MoE128,1.3B_MoE128}.sh",
        "pretrain_gpt.py",
        64,
        f"{_MOE} --num-experts 128",
        Kind.REFUSED,
        ("experts cannot be shared out: only the native engine does it",),
        "experts shared out through DeepSpeed: leave DeepSpeed's flags out",
        num_scripts=3,
        settings=_json(0),
    ),
    Script(
        "MoE/ds_pretrain_gpt_{1.3B_PR-MoE64or128,350M_PR-MoE32or64}.sh",
        "pretrain_gpt.py",
        64,
        f"{_MOE} --num-experts 64 64 64 64 64 64 64 64 64 64 128 128 --mlp-type residual",
        Kind.REFUSED,
        ("a number of experts for each layer",),
        "a number of experts for each layer",
        num_scripts=2,
        settings=_json(2),
    ),
    Script(
        "MoE/ds_pretrain_gpt_{1.3B_PR-MoE64or128,350M_PR-MoE32or64}_MoS.sh",
        "pretrain_gpt.py",
        64,
        f"{_MOE} --num-experts 64 64 64 64 64 64 64 64 128 128 --mlp-type residual --mos "
        "--kd-beta-ce 1 --num-layers-teacher 24 --num-experts-teacher 64 128 --load-teacher t "
        "--hidden-size-teacher 2048 --num-attention-heads-teacher 16",
        Kind.REFUSED,
        ("a number of experts for each layer", *("distillation",) * 7),
        "distillation, and a number of experts for each layer",
        num_scripts=2,
        settings=_json(2),
    ),
    Script(
        "compression/ds_pretrain_gpt_{125M_dense,125M_dense_cl,1.3B_dense_cl}_kd.sh",
        "pretrain_gpt.py",
        128,
        f"{_LARGE_BATCH} --kd --kd-beta-ce 1 --num-layers-teacher 24 --hidden-size-teacher 2048 "
        "--num-attention-heads-teacher 16 --load-teacher t",
        Kind.REFUSED,
        ("distillation",) * 6,
        "distillation",
        num_scripts=3,
        settings=_json(0, curriculum_learning=_by_length(80, 2048, 13767)),
    ),
    Script(
        "compression/125M-{,L10-,L12-}Int8-test-64gpu-distilled-group48.sh",
        "pretrain_gpt.py",
        64,
        f"{_DENSE_350M} --no-load-lr-state --reset-iteration --no-pipeline-parallel",
        Kind.REFUSED,
        ("another iteration than the checkpoint's",),
        "quantization while training",
        num_scripts=3,
        settings=_json(0, compression_training=_QUANTIZED),
    ),
    Script(
        "sequence_parallel/ds_pretrain_gpt_6.7B_fpdt_32k.sh",
        "pretrain_gpt.py",
        8,
        f"{_REBASED} {_RECOMPUTED} {_32K} --zero-stage 3 --ds-sequence-parallel-fpdt "
        "--ds-sequence-parallel-fpdt-chunk-size 65536 --ds-sequence-parallel-fpdt-offloading",
        Kind.REFUSED,
        ("attention of a sequence in chunks (FPDT)",) * 3,
        "attention of a sequence in chunks (FPDT)",
        settings=_json(3),
    ),
    Script(
        "data_efficiency/gpt/pretrain/ds_pretrain_gpt_1.3B_dense_run.sh",
        "pretrain_gpt.py",
        64,
        f"{_REBASED} {_RECOMPUTED} --zero-stage 1 --random-ltd --train-doc-idx-path a "
        "--train-sample-idx-path b --train-shuffle-idx-path c "
        "--data-efficiency-curriculum-learning --no-pipeline-parallel",
        Kind.REFUSED,
        ("random-LTD", *("sample orders from files",) * 3, "a curriculum by measured difficulty"),
        "curricula by measured difficulty, random-LTD",
        settings=_json(1),
    ),
    Script(
        "data_efficiency/bert/pretrain/ds_pretrain_bert_336M_run.sh",
        "pretrain_bert.py",
        64,
        f"{_BERT_PILE} --train-iters 4000000 --random-ltd --train-idx-path a "
        "--data-efficiency-curriculum-learning",
        Kind.REFUSED,
        ("random-LTD", "sample orders from files", "a curriculum by measured difficulty"),
        "curricula by measured difficulty, random-LTD",
        settings=_json(0),
    ),
    Script(
        "bert_with_pile/ds_finetune_bert_{mnli,qqp,race}.sh and five of data_efficiency/bert/",
        "tasks/main.py",
        8,
        f"{TUNING} --finetune --task QQP --epochs 12 --global-batch-size 128 --micro-batch-size 16 "
        "--lr 5e-5 --lr-warmup-fraction 0.065 --save-interval 500000 --deepspeed --zero-stage 0 "
        "--pipeline-model-parallel-size 1 --no-pipeline-parallel",
        Kind.NOTES,
        num_scripts=8,
        settings=_json(0),
    ),
    Script(
        "{MoE,compression}/ds_evalharness.sh, data_efficiency/gpt/eval/ds_evalharness_*.sh",
        "tasks/eval_harness/evaluate.py",
        1,
        f"{HARNESS} --pipeline-model-parallel-size 1 --moe-expert-parallel-size 1 --vocab-file v "
        "--merge-file m --disable-moe-token-dropping --tokenizer-type GPT2BPETokenizer --eval_fp32 "
        f"{UNKNOWN_MODEL} --no-pipeline-parallel",
        Kind.NOTES,
        num_scripts=5,
    ),
    Script(
        "generate_text.sh",
        "tools/generate_samples_gpt.py",
        1,
        "--tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --load c --fp16 "
        "--num-attention-heads 16 --max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer "
        "--num-experts 1 --mlp-type standard --micro-batch-size 8 --seq-length 1024 "
        "--out-seq-length 1024 --temperature 1.0 --vocab-file v --merge-file m --genfile g "
        "--top_p 0.9 --log-interval 1 --num-samples 0",
        Kind.WORKS,
    ),
    Script(
        "finetune_hf_llama/finetune_llama.sh",
        "finetune_llama.py",
        8,
        "",
        Kind.REFUSED,
        ("LLaMA on records of instructions",),
        "records of instructions: `tools/preprocess_sft.py` and `--sft`",
    ),
    Script(
        "data_efficiency/{bert,gpt}/ds_analyze_*_data_{map,reduce}.sh",
        "analyze_data.py",
        1,
        "",
        Kind.REFUSED,
        ("curricula by measured difficulty",),
        "curricula by measured difficulty",
        num_scripts=4,
    ),
)
