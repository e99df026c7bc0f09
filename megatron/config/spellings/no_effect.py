"""Flags of other Megatrons that change nothing here, with the reason of each.

Every use is logged with its reason. Of a flag with `only`, these values alone have no effect, and
any other is refused.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.config.spellings.usage import Values, flags_of


class NoEffect(NamedTuple):
    """Flags of other Megatrons that change nothing here for one reason."""

    usage: str
    because: str
    only: tuple[str, ...] = ()  # the values without effect; others are refused


WITHOUT_EFFECT: tuple[NoEffect, ...] = (
    # Start and groups of ranks
    NoEffect(
        "--local_rank N --local-rank N --deepspeed_mpi",
        "the launcher's ranks are read from the environment",
    ),
    NoEffect("--lazy-mpu-init N", "groups are made by initialize_megatron"),
    NoEffect("--DDP-impl N", "there is one data-parallel implementation"),
    NoEffect(
        "--use-contiguous-buffers-in-ddp --no-contiguous-buffers-in-local-ddp",
        "gradient buffers are always contiguous",
    ),
    NoEffect(
        "--disable-gloo-process-groups --create-all-gather-group",
        "groups are those that the layout needs",
    ),
    NoEffect(
        "--transformer-impl N --use-mcore-models --enable-experimental --test-mode",
        "there is one GPT, with kernels of its own and of PyTorch; Transformer Engine and apex are "
        "not used",
    ),
    NoEffect(
        "--use-cpu-initialization --no-initialization",
        "initial values depend on the seed and the parameter's name alone",
    ),
    NoEffect(
        "--init-model-with-meta-device",
        "initial values are made layer by layer, of which each rank keeps its share",
    ),
    NoEffect(
        "--te-rng-tracker --inference-rng-tracker",
        "random numbers depend on the seed and on the parameter, or on the layer, the sample and "
        "the token",
    ),
    NoEffect(
        "--no-data-sharding --iter-per-epoch N",
        "images have one order for all ranks, of which each reads its share",
    ),
    NoEffect("--vision-backbone-type N", "images are read by a ViT", ("vit",)),
    NoEffect("--vision-pretraining-type N", "images are classified", ("classify",)),
    NoEffect("--mask-type N", "no part of an image is masked", ("random",)),
    NoEffect("--mask-factor N", "no part of an image is masked", ("1", "1.0")),
    NoEffect("--exit-signal N", "the signal to save and to exit is SIGTERM", ("SIGTERM",)),
    NoEffect(
        "--exit-signal-handler-for-training --exit-signal-handler-for-dataloader",
        "--exit-signal-handler saves on SIGTERM, and workers that read ahead end with their rank",
    ),
    NoEffect(
        "--mup-width-mult N",
        "it is --hidden-size over --mup-base-hidden-size, as there",
    ),
    NoEffect(
        "--muon-fp32-matmul-prec N --muon-use-syrk",
        "Muon makes matrices orthogonal in the dtype of the masters",
    ),
    NoEffect(
        "--muon-tp-mode N",
        "Muon makes whole matrices orthogonal, whichever ranks have parts of them",
        ("duplicated", "distributed"),
    ),
    NoEffect(
        "--no-use-layer-wise-param-layout --disable-use-layer-wise-param-layout",
        "each replica keeps Muon's state of whole matrices",
    ),
    # Data
    NoEffect(
        "--repeated-dataloader",
        "samples are ordered for as many epochs as the training takes",
    ),
    NoEffect("--data-impl N", "corpora are memory-mapped .bin/.idx files"),
    NoEffect(
        "--mmap-warmup --dataloader-defer-npy-index-mmap --dataloader-fast-cache-load "
        "--num-dataset-builder-threads N --per-dataset-sequences-path N",
        "indices are mapped and pages read when they are first used; sample orders are the same",
    ),
    NoEffect(
        "--mid-level-dataset-surplus N",
        "datasets of a blend have exactly the samples that the blend takes of them",
    ),
    NoEffect(
        "--valid-num-workers N",
        "validation is read by as many processes as training; the samples are the same",
    ),
    NoEffect(
        "--no-create-attention-mask-in-dataloader",
        "batches hold tokens, and masks are made on the device",
    ),
    NoEffect(
        "--object-storage-cache-path N --enable-msc --disable-msc",
        "corpora are files; checkpoints alone may be objects, by their address",
    ),
    NoEffect("--aml-data-download-path N", "Megatron-DeepSpeed reads it nowhere"),
    NoEffect("--use-dataset-only N", "the data is for this training", ("false", "False")),
    NoEffect("--fim-pad-token N", "a document that is rearranged keeps its length"),
    NoEffect("--fim-eod-token N", "documents end at the tokenizer's end-of-document token"),
    NoEffect(
        "--tokenizer-hf-no-use-fast --use-gigatoken --tokenizer-hf-no-include-special-tokens",
        "corpora are tokenized already; tools/preprocess_data.py chooses what is fast",
    ),
    NoEffect("--null-tokenizer-pad-id N", "NullTokenizer has no padding", ("-1",)),
    # Attention, norms and other kernels
    NoEffect(
        "--apply-layernorm-1p",
        "weights of norms are stored as they are, and not minus 1; as they are never decayed, they "
        "are trained alike",
    ),
    NoEffect(
        "--no-masked-softmax-fusion --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 "
        "--use-flash-attn-triton --use-flash-attn-builder --flash-attention-version N "
        "--flash-decode --export-force-local-attention",
        "attention always uses the fastest kernel that fits; --attention-backend chooses another",
    ),
    NoEffect("--attention-softmax-in-fp32", "the softmax of attention is computed in fp32"),
    NoEffect(
        "--no-query-key-layer-scaling --apply-query-key-layer-scaling",
        "dividing scores by the number of a layer and multiplying them back gives the same scores",
    ),
    NoEffect(
        "--no-persist-layer-norm --disable-mem-efficient-ln --fused-residual-rmsnorm "
        "--abort-on-unmet-fused-kernel-constraints --moe-permute-fusion --moe-router-fusion "
        "--use-tutel --disable-jit-fuser --cross-entropy-fusion-impl N "
        "--use-fused-weighted-squared-relu --use-te-activation-func "
        "--use-transformer-engine-op-fuser --mlp-chunks-for-prefill N --mlp-chunks-for-training N "
        "--use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert",
        "the arithmetic is the same with and without fused kernels",
    ),
    NoEffect("--spec N...", "there is one implementation of each layer", ("local",)),
    NoEffect(
        "--cuda-graph-impl N --cuda-graph-modules N... --cuda-graph-warmup-steps N "
        "--enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph",
        "a captured layer computes what its kernels compute; --cuda-graph captures all passes of a "
        "step",
    ),
    NoEffect("--ds_fused_adam", "AdamW updates all parameters by one kernel"),
    NoEffect(
        "--use-precision-aware-optimizer",
        "--exp-avg-dtype and --exp-avg-sq-dtype choose the dtype of each state",
    ),
    NoEffect("--fp8-interval N", "scales are those of the matrices of each step"),
    NoEffect(
        "--fp8-param-gather --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag",
        "weights are kept and gathered in the model's dtype, and converted for each product",
    ),
    # Communication and its overlap
    NoEffect(
        "--no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline "
        "--use-nccl-ub --disable-symmetric-registration --fsdp-manual-registration --use-sharp "
        "--sharp-enabled-group N --high-priority-stream-groups N... "
        "--nccl-communicator-config-path N --pipeline-model-parallel-comm-backend N "
        "--use-ring-exchange-p2p --suggested-communication-unit-size N --symmetric-ar-type N "
        "--nccl-all-reduce-for-prefill --high-priority-a2a-comm-stream --ddp-average-in-collective "
        "--ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation "
        "--no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather "
        "--no-gradient-reduce-div-fusion --no-clone-scatter-output-in-embedding "
        "--disable-clone-scatter-output-in-embedding --overlap-param-gather-with-optimizer-step "
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit N --delay-wgrad-compute "
        "--microbatch-group-size-per-virtual-pipeline-stage N --overlap-moe-expert-parallel-comm "
        "--overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release",
        "how and when messages travel changes no result",
    ),
    NoEffect(
        "--flight-recorder-* N... --no-flight-recorder-* N...",
        "--check-collectives names the rank that differs or is missing",
    ),
    NoEffect(
        "--overlap-p2p-communication-warmup-flush",
        "--overlap-p2p-communication decides for the whole step",
    ),
    NoEffect(
        "--tp-comm-overlap-cfg N --tp-comm-overlap-rs-dgrad --no-tp-comm-bulk-* "
        "--no-tp-comm-overlap-* --no-tp-comm-split-* --disable-tp-comm-*",
        "--tp-comm-overlap decides for all matrices at once; results are the same",
    ),
    NoEffect("--tp-comm-bootstrap-backend N", "ranks share no buffers of Transformer Engine"),
    NoEffect(
        "--sync-tp-duplicated-parameters",
        "replicated parameters stay equal by construction, and are compared",
    ),
    NoEffect(
        "--fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail "
        "--megatron-fsdp-max-pool-double-buffer --megatron-fsdp-enable-fine-grained-param-gather",
        "--overlap-param-gather has two layers in memory",
    ),
    NoEffect("--megatron-fsdp-version N", "there is one fully sharded engine"),
    NoEffect(
        "--megatron-fsdp-main-grads-dtype N --megatron-fsdp-grad-comm-dtype N "
        "--megatron-fsdp-main-params-dtype N",
        "masters are fp32, and --grad-reduce-in-bf16 chooses the dtype of gradients",
        ("auto",),
    ),
    NoEffect(
        "--outer-dp-sharding-strategy N",
        "--num-distributed-optimizer-instances copies of the shards are equal replicas",
        ("no_shard",),
    ),
    NoEffect("--enable-zbh1-exact-semantics", "a step is applied once its norm is known"),
    # Memory
    NoEffect(
        "--contigious-checkpointing",
        "what is saved of recomputed layers is one tensor each already",
    ),
    NoEffect("--synchronize-each-layer", "waiting for each layer changes no result"),
    NoEffect(
        "--scattered-embeddings --split-transformers --memory-centric-tiled-linear --tile-factor N",
        "it saves memory and changes no result; ZeRO stage 3 gathers whole matrices",
    ),
    NoEffect(
        "--empty-unused-memory-level N", "the caching allocator keeps memory for its next use"
    ),
    NoEffect(
        "--cpu-offloading --cpu-offloading-activations --cpu-offloading-double-buffering "
        "--cpu-offloading-retain-pinned-cpu-buffers",
        "--cpu-offloading-num-layers says whose activations wait in host memory, and how they get "
        "there changes no result",
    ),
    NoEffect(
        "--no-pin-cpu-grads --no-pin-cpu-params --overlap-cpu-optimizer-d2h-h2d "
        "--use-torch-optimizer-for-cpu-offload",
        "how state reaches host memory changes no result",
    ),
    # Experts
    NoEffect("--moe-router-dtype N", "shares are computed in fp32 or wider", ("fp32",)),
    NoEffect(
        "--moe-token-dispatcher-type N --moe-enable-deepep --moe-flex-dispatcher-backend N "
        "--moe-flex-dispatcher-num-sms N --moe-deepep-num-sms N "
        "--moe-hybridep-num-blocks-permute N --moe-hybridep-num-blocks-unpermute N "
        "--moe-hybridep-num-sms N --moe-hybridep-num-sms-preprocessing N "
        "--moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy "
        "--moe-permute-fusion-into-hybridep --moe-paged-stash "
        "--moe-paged-stash-buffer-size-factor-cpu N --moe-paged-stash-buffer-size-factor-cuda N "
        "--moe-paged-stash-page-size N",
        "tokens go to the ranks of their experts by an all-to-all; the numbers are the same",
    ),
    NoEffect(
        "--moe-combine-bwd-dtype N --moe-dispatch-fwd-dtype N",
        "tokens travel in the model's dtype",
        ("bf16",),
    ),
    NoEffect(
        "--moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-use-grouped-tensor "
        "--moe-single-grouped-bias --moe-single-grouped-weight --moe-router-padding-for-fp8 "
        "--moe-router-padding-for-quantization",
        "experts are one grouped product wherever PyTorch has one for the dtype",
    ),
    NoEffect(
        "--create-moe-param-group",
        "gradients of experts are summed over the ranks that hold them; the groups into which "
        "DeepSpeed splits the optimizer's parameters have the same learning rate",
    ),
    NoEffect("--moe-per-layer-logging", "load_balancing_loss is logged over all layers"),
    NoEffect("--disable-moe-top2-2nd-expert-sampling", "experts are never drawn at random"),
    NoEffect(
        "--enable-expert-tensor-parallelism",
        "experts are split over tensor-parallel ranks unless they are shared out",
    ),
    # Learning rate and loss
    NoEffect(
        "--override-lr-scheduler --override-opt_param-scheduler --override-opt-param-scheduler "
        "--no-load-lr-state",
        "the learning rate always follows the flags",
    ),
    NoEffect(
        "--calculate-per-token-loss",
        "the loss is always the mean over all counted tokens of the global batch",
    ),
    NoEffect("--no-check-for-nan-in-loss-and-grad", "the loss and the gradient are always checked"),
    NoEffect(
        "--rerun-mode N",
        "--rerun-check-interval computes steps twice; --nonfinite-policy decides on bad losses",
        ("disabled", "validate_results"),
    ),
    # Checkpoints
    NoEffect("--exit-on-missing-checkpoint", "a checkpoint that is missing is an error"),
    NoEffect("--universal-checkpoint --use-dist-ckpt", "every checkpoint loads at any layout"),
    NoEffect("--auto-detect-ckpt-format", "--load always detects the format"),
    NoEffect(
        "--dist-ckpt-strictness N",
        "a tensor that is missing or left over is an error, unless --load-only or --load-except "
        "names it",
        (
            *("assume_ok_unexpected", "log_unexpected", "log_all"),
            *("raise_unexpected", "raise_all", "return_unexpected", "return_all"),
        ),
    ),
    NoEffect(
        "--verify-integrity",
        "files are compared with their digests before they are read (--checkpoint-verify)",
    ),
    NoEffect(
        "--use-persistent-ckpt-worker --async-strategy N --async-ckpt-cpu-priority N "
        "--async-ckpt-io-priority N --async-ckpt-use-cpu-shm --ckpt-assume-constant-structure "
        "--ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load "
        "--ckpt-fully-parallel-load-exchange-algo N --ckpt-fully-parallel-load-process-group N "
        "--ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-save-process-group N "
        "--ckpt-pg-tensors-cache-create --ckpt-pg-tensors-cache-path N "
        "--ckpt-drop-redundant-extra-state --no-ckpt-load-validate-sharding-integrity "
        "--disable-ckpt-load-validate-sharding-integrity --dist-ckpt-save-pre-mcore-014 "
        "--dist-ckpt-workers N --dist-ckpt-optim-fully-reshardable "
        "--distrib-optim-fully-reshardable-mem-efficient --no-strict-fsdp-dtensor-load "
        "--disable-strict-fsdp-dtensor-load",
        "a plan decides which rank writes and reads what, and any layout loads it",
    ),
    NoEffect(
        "--no-save-tokenizer-assets --disable-save-tokenizer-assets",
        "checkpoints hold the flags of a tokenizer, and none of its files",
    ),
    NoEffect(
        "--log-path N --config-logger-dir N",
        "the run's configuration is stored in every checkpoint",
    ),
    # Reports
    NoEffect("--log-throughput", "the log line always has the throughput"),
    NoEffect(
        "--timing-log-level N --timing-log-option N --no-barrier-with-level-1-timing",
        "timers are those of --log-timers-to-tensorboard",
    ),
    NoEffect(
        "--log-straggler --straggler-minmax-count N --straggler-ctrlr-port N "
        "--disable-straggler-on-startup --gpu-sniff-test-interval N --train-sync-interval N "
        "--dump-param-to-param-group-map N",
        "--straggler-report-interval names slow ranks; --profile-ranks shows what one waits for",
    ),
    NoEffect(
        "--log-optimizer-states-to-tensorboard",
        "norms of the optimizer's state are not logged; --log-params-norm logs the weights'",
    ),
    NoEffect(
        "--profile-backward",
        "--log-timers-to-tensorboard times forward and backward",
    ),
    NoEffect(
        "--use-pytorch-profiler --pytorch-profiler-collect-* --nvtx-ranges --record-shapes",
        "--profile always uses torch.profiler, and records operations and kernels by their names",
    ),
    NoEffect("--codecarbon-dir N --log-energy", "energy is not measured"),
    NoEffect(
        "--app-tag-run-name N --app-tag-run-version N --no-one-logger --one-logger-async "
        "--one-logger-project N --one-logger-run-name N --calc-ft-timeouts --enable-ft-package "
        "--ft-num-warmup-iters N",
        "services of NVIDIA's clusters are not spoken to",
    ),
    NoEffect(
        "--non-persistent-ckpt-type N",
        "checkpoints beside those in --save are local ones",
        ("local",),
    ),
    NoEffect(
        "--non-persistent-local-ckpt-algo N",
        "each rank saves all of the state that it holds",
        ("atomic", "fully_parallel"),
    ),
)


class Ignored(NamedTuple):
    """One flag that changes nothing here."""

    values: Values
    because: str
    only: tuple[str, ...]


NO_EFFECT: Mapping[str, Ignored] = {
    flag: Ignored(values, group.because, group.only)
    for group in WITHOUT_EFFECT
    for flag, values in flags_of(group.usage)
}
