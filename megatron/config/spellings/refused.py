"""Flags of other Megatrons that are refused: the feature that is missing, and what to use instead.

A star stands for every flag with that prefix; a flag with an answer of its own stands in another
group, or in another table.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.config.spellings.usage import Values, flags_of, take_values
from megatron.errors import ConfigError

# Flags that all Megatrons removed, and their successors.
REMOVED: Mapping[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}


class Refused(NamedTuple):
    """Flags of one feature that is missing here."""

    flags: str
    feature: str
    instead: str  # after "use"


_PROGRAMS = "pretrain_gpt.py or pretrain_bert.py"
_MODEL = "a model of the flags on docs/flags.md; leave it out"

REFUSALS: tuple[Refused, ...] = (
    # Other models
    Refused(
        "--block-data-path --embedding-path --evidence-data-path --indexer-batch-size "
        "--indexer-log-interval --retriever-seq-length --sample-rate",
        "an index of blocks in training programs",
        "tools/create_doc_index.py, or tasks/main.py with its task ICT-ZEROSHOT-NQ",
    ),
    Refused("--retro-* --output-bert-embeddings --bert-embedder-type", "Retro models", _PROGRAMS),
    Refused(
        "--vision-pretraining --swin-backbone-type --dino-*",
        "models of images other than ViT, and their pretraining without labels",
        "pretrain_vit.py",
    ),
    Refused(
        "--multi-latent-attention --mla-* --q-lora-rank --kv-lora-rank --qk-head-dim "
        "--qk-pos-emb-head-dim --v-head-dim --cache-mla-latents",
        "multi-latent attention",
        "--num-query-groups for smaller keys and values",
    ),
    Refused(
        "--hybrid-layer-pattern --hybrid-override-pattern --is-hybrid-model --mamba-* "
        "--disable-mamba-mem-eff-path",
        "hybrid models with Mamba layers",
        "transformer layers alone; leave it out",
    ),
    Refused(
        "--experimental-attention-variant --attention-output-gate --dsa-* --no-dsa-* "
        "--disable-dsa-* --gdp-* --linear-*",
        "sparse and linear attention",
        "--sliding-window for fewer scores",
    ),
    Refused("--mtp-*", "prediction of several tokens at once", _MODEL),
    Refused("--enable-mhc-connections --mhc-*", "hyper-connections", _MODEL),
    Refused(
        "--embedding-init-method-std",
        "initial values of embeddings alone",
        "--init-method-std, with --output-layer-init-method-std for what residuals are added to",
    ),
    Refused(
        "--enable-gpt-oss",
        "the positions of gpt-oss as a switch of ModelOpt",
        "--position-embedding-type rope --rope-type yarn --rotary-scaling-factor 32 and "
        "--yarn-original-max-position-embeddings with the length that it stands for",
    ),
    Refused(
        "--heterogeneous-layers-config-* --mrope-section --qk-l2-norm --output-logit-dtype",
        "an architecture of layers that differ, or of other positions and logits",
        _MODEL,
    ),
    Refused(
        "--rotary-interleaved",
        "rotation of neighbouring features",
        "tools/convert_checkpoint.py, which permutes what other programs wrote",
    ),
    Refused(
        "--embedding-weights-in-fp32",
        "an embedding in another dtype than the model",
        "--fp32-residual-connection",
    ),
    # Experts
    Refused(
        "--num-experts-switch",
        "the first router of Switch transformers",
        "--num-experts with --moe-router-topk 1 and --moe-router-pre-softmax",
    ),
    Refused("--moe-input-jitter-eps", "noise on routers", "a router without noise; leave it out"),
    Refused(
        "--moe-router-force-*",
        "choices that are not the router's",
        "a choice by the router; leave it out",
    ),
    Refused(
        "--moe-use-upcycling --moe-upcycling-granularity",
        "experts made of an MLP while training starts",
        "tools/upcycle_checkpoint.py, and --load of what it writes",
    ),
    Refused(
        "--moe-latent-size --moe-apply-probs-on-input --moe-enable-routing-replay "
        "--moe-expert-rank-capacity-factor --moe-mlp-glu-interleave-size "
        "--moe-shared-expert-glu-interleave-size --moe-router-quantile-balancing-ema",
        "another mixture of experts",
        "the experts of --num-experts; leave it out",
    ),
    # Parallelism
    Refused(
        "--ds-sequence-parallel-fpdt* --force-ds-sequence-parallel",
        "attention of a sequence in chunks (FPDT)",
        "--sequence-parallel, or --context-parallel-size",
    ),
    Refused(
        "--hierarchical-context-parallel-sizes --hybrid-context-parallel "
        "--max-seqlen-per-dp-cp-rank",
        "context parallelism in several levels",
        "--context-parallel-size with --cp-comm-type",
    ),
    Refused(
        "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --gtp-*",
        "weight shards within tensor parallelism (GTP)",
        "--data-parallel-sharding-strategy optim_grads_params",
    ),
    Refused(
        "--enable-full-sharding-in-hsdp",
        "state that copies of the shards share out again",
        "--num-distributed-optimizer-instances 1",
    ),
    Refused(
        "--standalone-embedding-stage --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        "an embedding or a loss counted as a layer",
        "--pipeline-balance parameters",
    ),
    Refused(
        "--pipeline-model-parallel-layout",
        "pipeline stages written as a text",
        "--pipeline-layer-counts",
    ),
    Refused("--ddp-num-buckets", "a number of gradient buckets", "--ddp-bucket-size"),
    Refused(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "a dtype of gradients for each parameter",
        "--accumulate-allreduce-grads-in-fp32",
    ),
    Refused(
        "--data-parallel-random-init",
        "initial values that differ over replicas",
        "one initial model for all replicas; leave it out",
    ),
    Refused(
        "--fake-process-group",
        "a run without communication",
        "tools/plan.py, which rehearses a layout on one rank",
    ),
    Refused(
        "--distributed-timeout-seconds-after-init",
        "a timeout of its own for the start",
        "--distributed-timeout-minutes",
    ),
    # Optimizer and numbers
    Refused(
        "--use-bnb-optimizer",
        "an optimizer whose state has 8 bits, rounded in blocks of what a rank holds, so that "
        "results would depend on the layout",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 for state of 16 bits",
    ),
    Refused(
        "--qk-clip --qk-clip-alpha --qk-clip-threshold --log-max-attention-logit",
        "clipping of queries and keys",
        "--qk-layernorm",
    ),
    Refused(
        "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type",
        "weight decay of norms",
        "--weight-decay, which never decays norms; leave it out",
    ),
    Refused("--fp16-lm-cross-entropy", "a loss in fp16", "the loss in fp32; leave it out"),
    Refused(
        "--main-params-dtype",
        "masters in other dtypes",
        "fp32 masters, as every half-precision run does; leave it out",
    ),
    Refused(
        "--main-grads-dtype",
        "gradients kept in another dtype than they are reduced in",
        "gradients in the dtype that they are reduced in; leave it out",
    ),
    Refused(
        "--fp4-* --fp8-output-proj --fp8-quantizer-factory --te-precision-config-file "
        "--kitchen-* --use-kitchen-attention",
        "this precision",
        "--fp8-format",
    ),
    Refused(
        "--export-* --finetune-hf-dataset --finetune-data-split --finetune-data-files "
        "--qad-train-target --freeze-base-for-mtp --modelopt-enabled",
        "quantization by ModelOpt",
        "tools/convert_checkpoint.py, whose files quantizers read",
    ),
    Refused(
        "--batch-invariant-*",
        "kernels whose bits do not depend on the batch",
        "--deterministic-mode",
    ),
    # Length of a run, batches, evaluation
    Refused(
        "--phase-transition-iterations --decrease-batch-size-if-needed",
        "a batch size that changes at iterations, or that is made to fit",
        "--step-batch-size-schedule, with multiples of all micro-batches of a pass",
    ),
    Refused(
        "--eval-global-batch-size --eval-micro-batch-size",
        "batches of another size for evaluation",
        "--eval-iters, the number of global batches per evaluation",
    ),
    Refused(
        "--full-validation",
        "evaluation of a whole dataset",
        "--eval-iters with the global batches that it has",
    ),
    Refused(
        "--multiple-validation-sets --validation-set-names",
        "a loss per dataset",
        "--valid-weighted-split-paths, each of whose groups is evaluated under its name",
    ),
    Refused(
        "--start-eval-at-iter",
        "a first iteration of evaluation",
        "--eval-interval, a multiple of which is the first",
    ),
    Refused(
        "--check-for-spiky-loss --check-for-large-grads",
        "an end at large losses or gradients",
        "--clip-grad, which bounds the gradient",
    ),
    # Data
    Refused(
        "--train-data-exact-num-epochs --return-data-index --train-idx-path --train-desc-path "
        "--train-doc-idx-path --train-sample-idx-path --train-shuffle-idx-path",
        "sample orders from files",
        "--data-path and --data-cache-path, which keep sample orders",
    ),
    Refused(
        "--sft-tokenizer-prompt-format --chat-template",
        "dialogues formatted while training",
        "--sft on what tools/preprocess_sft.py wrote",
    ),
    Refused(
        "--fim-split-sample",
        "parts of documents that are rearranged",
        "--fim-data without it, which takes each document by itself",
    ),
    Refused("--fim-fragment-rate", "a rate of fragments", "--fim-rate, the share of all documents"),
    Refused(
        "--fim-no-prefix",
        "documents that are left alone",
        "--fim-data without it, which treats all documents alike",
    ),
    Refused(
        "--data-efficiency-curriculum-learning",
        "a curriculum by measured difficulty",
        "--curriculum-schedule",
    ),
    Refused(
        "--random-ltd",
        "layers that drop tokens (random-LTD)",
        "all tokens in every layer; leave it out",
    ),
    Refused(
        "--trust-remote-code",
        "code that comes with a tokenizer",
        "a tokenizer that needs no code of its own",
    ),
    Refused(
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces --null-tokenizer-eod-id "
        "--tokenizer-metadata --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
        "--allow-ambiguous-pad-tokens",
        "options of a tokenizer",
        "the files of --tokenizer-model or --tokenizer-name-or-path as they are",
    ),
    # Checkpoints
    Refused("--load-tag", "tags of checkpoints", "--load with the folder of that checkpoint"),
    Refused(
        "--yaml-cfg",
        "flags from YAML in Megatron-LM's groups",
        "--config, whose keys are our flags",
    ),
    Refused(
        "--use-checkpoint-lr-scheduler --use-checkpoint-opt_param-scheduler "
        "--use-checkpoint-opt-param-scheduler",
        "a schedule from a checkpoint",
        "the schedule flags of the run that saved the checkpoint",
    ),
    Refused(
        "--override-ckpt-iteration --reset-iteration",
        "another iteration than the checkpoint's",
        "--finetune, which starts at iteration 0",
    ),
    Refused(
        "--load-main-params-from-ckpt",
        "masters of weights that are loaded without the optimizer's state",
        "--load without --no-load-optim, which loads the masters",
    ),
    Refused(
        "--ckpt-convert-*",
        "conversion by a training program",
        "tools/convert_checkpoint.py",
    ),
    Refused(
        "--non-persistent-global-ckpt-dir",
        "checkpoints of the whole run beside those in --save",
        "--non-persistent-local-ckpt-dir, or --save-interval with --keep-last",
    ),
    # Memory
    Refused(
        "--cpu-offloading-weights --no-cpu-offloading-activations "
        "--disable-cpu-offloading-activations",
        "weights in host memory, or a choice between them and activations",
        "--cpu-offloading-num-layers for activations, --optimizer-cpu-offload for AdamW's state",
    ),
    Refused(
        "--fine-grained-activation-* --offload-modules --activation-offload-fraction "
        "--delta-offload-bytes-across-pp-ranks --delay-offload-until-cuda-graph "
        "--min-offloaded-tensor-size",
        "activations of parts of layers in host memory",
        "--cpu-offloading-num-layers, the layers that keep theirs there",
    ),
    Refused(
        "--record-memory-history --memory-snapshot-path --log-memory-interval "
        "--log-device-memory-used",
        "a record of allocations",
        "--log-memory-to-tensorboard",
    ),
    # Stopping and starting again, reports
    Refused(
        "--adlr-autoresume --adlr-autoresume-interval",
        "NVIDIA's own resubmission of jobs",
        "--exit-signal-handler, which saves on SIGTERM",
    ),
    Refused(
        "--inprocess-*",
        "a restart within a process",
        "a launcher that starts the program again; --load continues from the newest checkpoint",
    ),
    Refused(
        "--fault-injector-* --error-injection-* --result-rejected-tracker-filename",
        "faults on purpose",
        "a run without them; leave it out",
    ),
    Refused(
        "--otel-* --run-workload-inspector-server",
        "telemetry",
        "--tensorboard-dir",
    ),
    Refused("--log-progress", "a file of progress", "--tensorboard-dir, or the lines of the log"),
    Refused(
        "--save-activations-interval --save-dgrads-interval --save-params-interval "
        "--save-tokens-per-expert-interval --save-wgrads-interval --moe-routing-trace-*",
        "dumps of tensors",
        "--save-interval, whose checkpoints hold parameters and optimizer state",
    ),
    Refused("--sync-replicas", "replicas that are made equal", "--check-agreement-interval"),
    # Other programs
    Refused(
        "--inference --ds-inference --inference-* --no-inference-* --max-tokens-to-oom "
        "--decode-only-cuda-graphs "
        "--enable-chunked-prefill --moe-pad-experts-for-cuda-graph-inference "
        "--num-speculative-tokens --use-legacy-static-engine "
        "--use-same-sampling-seed-across-dp-ranks",
        "an inference engine in training programs",
        "tools/generate_text.py, which continues prompts",
    ),
    Refused(
        "--rl-* --no-rl-* --grpo-* --langrl-env-config --perform-rl-step --refit-method",
        "reinforcement learning",
        "--sft or --mtf for fine-tuning",
    ),
    Refused(
        "--kd --kd-alpha-ce --kd-beta-ce --kd-temp --mos --num-layers-teacher "
        "--num-experts-teacher --hidden-size-teacher --num-attention-heads-teacher --load-teacher "
        "--logits-* --freeze-all-layers",
        "distillation",
        "a run without a teacher; leave it out",
    ),
    Refused("--compression-training", "compression of models", "the model as it is; leave it out"),
)

REFUSED: Mapping[str, Refused] = {
    flag: group for group in REFUSALS for flag, _ in flags_of(group.flags)
}

# Flags that take several values in another Megatron and one here, with the missing feature.
ONE_VALUE: Mapping[str, str] = {"--num-experts": "a number of experts for each layer"}


def take_one_value(word: str, rest: list[str]) -> list[ConfigError]:
    """Return an error for several values of a flag that takes one, and drop the others of `rest`.

    Args:
        rest: the words behind the flag.
    """
    feature = ONE_VALUE.get(word)
    values = () if feature is None else take_values(Values.MANY, rest)
    rest[:0] = values[:1]
    if len(values) < 2:
        return []
    return [
        ConfigError(
            f"these values are of a feature that this version does not have: {feature}",
            found=f"{word} {' '.join(values)}",
            fix=f"use one value, such as {word} {values[0]}",
        )
    ]
