"""Flags of launch scripts that were written for other Megatrons, as tables.

Each is an alias, is accepted with a log line that it has no effect and why, or is refused with its
successor. What a reader would get wrong: other names of a flag of ours are declared at its field.
"""

from collections.abc import Mapping
from typing import NamedTuple


class NoEffect(NamedTuple):
    """A flag of another Megatron that changes nothing here."""

    values: int  # how many values follow the flag; -1 for one that may be left out
    because: str
    only: str | None = None  # the one value without effect; others are refused


_FUSED = "the arithmetic is the same with and without fused kernels"
_FAST = "attention always uses the fastest kernel torch offers"
_GROUPED = "experts are one grouped product wherever PyTorch has one for the dtype"
_OVERLAP = "--tp-comm-overlap decides for all matrices at once; results are the same"
_TILES = "it saves memory and changes no result; ZeRO stage 3 gathers whole matrices"

# Spellings that stand for one of ours, with its value.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "--checkpoint-activations": ("--recompute-granularity", "full"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--activations-checkpoint-method": ("--recompute-granularity", "full", "--recompute-method"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--rotary-position-embeddings-theta": ("--rotary-base",),
    "--distributed-timeout": ("--distributed-timeout-minutes",),
    "--kill-switch-file": ("--kill-switch-path",),
    "--train-data": ("--train-data-path",),
    "--deepspeed-activation-checkpointing": ("--recompute-granularity", "full"),
    "--partition-activations": ("--distribute-saved-activations", "true"),
    "--enable-zbh1-pipeline": ("--pipeline-schedule", "zero-bubble"),
    "--fp8-e4m3": ("--fp8-format", "e4m3"),
    "--fp8-hybrid": ("--fp8-format", "hybrid"),
    "--ds-sequence-parallel-size": ("--cp-comm-type", "a2a", "--context-parallel-size"),
}

NO_EFFECT: Mapping[str, NoEffect] = {
    "--local_rank": NoEffect(1, "the launcher's LOCAL_RANK is read from the environment"),
    "--local-rank": NoEffect(1, "the launcher's LOCAL_RANK is read from the environment"),
    "--DDP-impl": NoEffect(1, "there is one data-parallel implementation"),
    "--use-contiguous-buffers-in-ddp": NoEffect(0, "gradient buffers are always contiguous"),
    "--use-cpu-initialization": NoEffect(
        0, "initial values depend on the seed and the parameter's name alone"
    ),
    "--data-impl": NoEffect(1, "corpora are memory-mapped .bin/.idx files"),
    "--mmap-warmup": NoEffect(0, "pages are read when they are first used"),
    "--no-masked-softmax-fusion": NoEffect(0, _FAST),
    "--no-persist-layer-norm": NoEffect(0, _FUSED),
    "--use-flash-attn": NoEffect(0, _FAST),
    "--use-flash-attn-v2": NoEffect(0, _FAST),
    "--use-flash-attn-triton": NoEffect(0, _FAST),
    "--use-flash-attn-builder": NoEffect(0, _FAST),
    "--attention-softmax-in-fp32": NoEffect(0, "the softmax of attention is computed in fp32"),
    "--no-query-key-layer-scaling": NoEffect(0, "scores are never scaled by the layer number"),
    "--no-async-tensor-model-parallel-allreduce": NoEffect(0, "overlap does not change results"),
    "--no-scatter-gather-tensors-in-pipeline": NoEffect(0, "stages hand over whole tensors"),
    "--sync-tp-duplicated-parameters": NoEffect(
        0, "replicated parameters stay equal by construction, and are compared"
    ),
    "--transformer-impl": NoEffect(1, "there is one transformer"),
    "--use-mcore-models": NoEffect(0, "there is one GPT"),
    "--use-precision-aware-optimizer": NoEffect(
        0, "--exp-avg-dtype and --exp-avg-sq-dtype choose the dtype of each state"
    ),
    "--log-path": NoEffect(1, "the run's configuration is stored in every checkpoint"),
    "--no-check-for-nan-in-loss-and-grad": NoEffect(0, "the loss and gradient are always checked"),
    "--deepspeed_mpi": NoEffect(0, "the launcher's ranks are read from the environment"),
    "--override-lr-scheduler": NoEffect(0, "the learning rate always follows the flags"),
    "--override-opt_param-scheduler": NoEffect(0, "the learning rate always follows the flags"),
    "--no-load-lr-state": NoEffect(0, "the learning rate always follows the flags"),
    "--exit-on-missing-checkpoint": NoEffect(0, "a checkpoint that is missing is an error"),
    "--valid-num-workers": NoEffect(
        1, "validation is read by as many processes as training; the samples are the same"
    ),
    "--contigious-checkpointing": NoEffect(
        0, "what is saved of recomputed layers is one tensor each already"
    ),
    "--synchronize-each-layer": NoEffect(0, "waiting for each layer changes no result"),
    "--profile-backward": NoEffect(0, "--log-timers-to-tensorboard times forward and backward"),
    "--use-pytorch-profiler": NoEffect(0, "--profile always uses torch.profiler"),
    "--scattered-embeddings": NoEffect(0, _TILES),
    "--split-transformers": NoEffect(0, _TILES),
    "--memory-centric-tiled-linear": NoEffect(0, _TILES),
    "--tile-factor": NoEffect(1, _TILES),
    "--disable-mem-efficient-ln": NoEffect(0, _FUSED),
    "--overlap-p2p-communication-warmup-flush": NoEffect(
        0, "--overlap-p2p-communication decides for the whole step"
    ),
    "--tp-comm-overlap-cfg": NoEffect(1, _OVERLAP),
    "--tp-comm-bootstrap-backend": NoEffect(1, "ranks share no buffers of Transformer Engine"),
    **dict.fromkeys(
        (
            "--tp-comm-overlap-rs-dgrad",
            *(
                f"--{no}-tp-comm-{part}"
                for no in ("no", "disable")
                for part in ("bulk-dgrad", "bulk-wgrad", "overlap-ag", "overlap-rs")
            ),
            *(f"--{no}-tp-comm-split-{part}" for no in ("no", "disable") for part in ("ag", "rs")),
        ),
        NoEffect(0, _OVERLAP),
    ),
    "--enable-zbh1-exact-semantics": NoEffect(0, "a step is applied once its norm is known"),
    "--timing-log-level": NoEffect(1, "timers are those of --log-timers-to-tensorboard"),
    "--timing-log-option": NoEffect(1, "timers are those of --log-timers-to-tensorboard"),
    "--log-optimizer-states-to-tensorboard": NoEffect(
        0, "norms of the optimizer's state are not logged; --log-params-norm logs the weights'"
    ),
    "--moe-router-dtype": NoEffect(1, "shares are computed in fp32 or wider", only="fp32"),
    "--moe-token-dispatcher-type": NoEffect(
        1, "tokens go to the ranks of their experts by an all-to-all; the numbers are the same"
    ),
    "--moe-grouped-gemm": NoEffect(0, _GROUPED),
    "--moe-use-legacy-grouped-gemm": NoEffect(0, _GROUPED),
    "--moe-permute-fusion": NoEffect(0, _FUSED),
    "--moe-router-fusion": NoEffect(0, _FUSED),
    "--moe-per-layer-logging": NoEffect(0, "load_balancing_loss is logged over all layers"),
    "--disable-moe-top2-2nd-expert-sampling": NoEffect(0, "experts are never drawn at random"),
    "--enable-expert-tensor-parallelism": NoEffect(
        0, "experts are split over tensor-parallel ranks unless they are shared out"
    ),
    "--use-tutel": NoEffect(0, _FUSED),
    "--init-model-with-meta-device": NoEffect(
        0, "initial values are made layer by layer, of which each rank keeps its share"
    ),
    "--fsdp-double-buffer": NoEffect(0, "--overlap-param-gather has two layers in memory"),
    "--universal-checkpoint": NoEffect(0, "every checkpoint loads at any layout"),
    "--codecarbon-dir": NoEffect(1, "energy is not measured"),
    "--lazy-mpu-init": NoEffect(-1, "groups are made by initialize_megatron"),
    "--abort-on-unmet-fused-kernel-constraints": NoEffect(0, _FUSED),
    "--fim-pad-token": NoEffect(1, "a document that is rearranged keeps its length"),
    "--fp8-interval": NoEffect(1, "scales are those of the matrices of each step"),
    "--fim-eod-token": NoEffect(1, "documents end at the tokenizer's end-of-document token"),
}

REMOVED: Mapping[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}

NOT_YET: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "--bert-load",
            "--biencoder-projection-dim",
            "--biencoder-shared-query-context-model",
            "--block-data-path",
            "--embedding-path",
            "--evidence-data-path",
            "--ict-head-size",
            "--ict-load",
            "--indexer-batch-size",
            "--indexer-log-interval",
            "--retriever-report-topk-accuracies",
            "--retriever-score-scaling",
            "--retriever-seq-length",
            "--query-in-block-prob",
            "--sample-rate",
            "--titles-data-path",
            "--use-one-sent-docs",
        ),
        "pretrain_gpt.py or pretrain_bert.py; there is no model for retrieval",
    ),
    "--decoder-seq-length": "pretrain_gpt.py or pretrain_bert.py; there is no model of T5",
    **dict.fromkeys(
        ("--num-classes", "--img-dim", "--num-channels", "--patch-dim"),
        "pretrain_gpt.py or pretrain_bert.py; there is no model of images",
    ),
    **dict.fromkeys(
        (
            "--kd",
            "--kd-alpha-ce",
            "--kd-beta-ce",
            "--kd-temp",
            "--mos",
            "--num-layers-teacher",
            "--num-experts-teacher",
            "--hidden-size-teacher",
            "--num-attention-heads-teacher",
            "--load-teacher",
            "--reset-iteration",
        ),
        "a run without a teacher; there is no distillation",
    ),
    **dict.fromkeys(
        (
            "--train-data-exact-num-epochs",
            "--return-data-index",
            "--train-idx-path",
            "--train-desc-path",
            "--train-doc-idx-path",
            "--train-sample-idx-path",
            "--train-shuffle-idx-path",
            "--repeated-dataloader",
        ),
        "--data-path and --data-cache-path, which keep sample orders",
    ),
    "--reweight-loss-based-on-position-frequency": "--mtf or --sft, where each token counts once",
    "--inference": "tools/generate_text.py",
    "--load-tag": "--load with the folder of that checkpoint",
    "--trust-remote-code": "a tokenizer that needs no code of its own",
    "--standalone-embedding-stage": "--pipeline-balance parameters",
    "--data-parallel-random-init": "one initial model for all replicas; leave it out",
    "--apply-layernorm-1p": "--normalization LayerNorm",
    "--embedding-weights-in-fp32": "--fp32-residual-connection",
    "--num-experts-switch": "--num-experts with --moe-router-topk 1 and --moe-router-pre-softmax",
    "--moe-input-jitter-eps": "a router without noise; leave it out",
    "--moe-router-force-load-balancing": "a choice by the router; leave it out",
    "--moe-use-upcycling": "tools/upcycle_checkpoint.py, and --load of what it writes",
    "--ds-sequence-parallel-fpdt": "--sequence-parallel",
    "--create-moe-param-group": "one learning rate for all weights; leave it out",
    "--force-ds-sequence-parallel": "--sequence-parallel",
    "--data-efficiency-curriculum-learning": "--curriculum-schedule",
    "--random-ltd": "all tokens in every layer; leave it out",
    "--compression-training": "the model as it is; leave it out",
    "--use-checkpoint-opt_param-scheduler": "the schedule flags of the run that saved it",
    "--use-checkpoint-args": "the flags of the run that saved the checkpoint",
    "--use-checkpoint-lr-scheduler": "the schedule flags of the run that saved the checkpoint",
    "--adlr-autoresume": "--exit-signal-handler, which saves on SIGTERM",
    "--adlr-autoresume-interval": "--exit-signal-handler, which saves on SIGTERM",
    "--fp16-lm-cross-entropy": "the loss in fp32; leave it out",
    "--main-params-dtype": "fp32 masters, as every half-precision run does; leave it out",
    "--main-grads-dtype": "gradients in the dtype that they are reduced in; leave it out",
    "--ddp-num-buckets": "--ddp-bucket-size",
    "--fim-split-sample": "--fim-data without it, which takes each document by itself",
    "--fim-fragment-rate": "--fim-rate, the share of all documents",
    "--fim-no-prefix": "--fim-data without it, which treats all documents alike",
    "--sft-tokenizer-prompt-format": "--sft on what tools/preprocess_sft.py wrote",
    "--loss-on-targets-only": "--mtf on pairs of inputs and targets, or --sft on dialogues",
    "--use-bnb-optimizer": "--optimizer adam",
    "--sync-replicas": "--check-agreement-interval",
}
