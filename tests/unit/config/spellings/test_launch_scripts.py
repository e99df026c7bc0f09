"""Flag lists as users of Megatron-DeepSpeed have them in their scripts: all of them are understood.

Written in our own words after the flags that those scripts use. A script is read with the JSON that
it would have beside it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import CommandLineError, parse_args
from megatron.config.activations import RecomputeMethod
from megatron.config.deepspeed.plan import deepspeed_plan
from megatron.config.engine import RemoteDevice, ZeroStage
from megatron.config.model import Activation, Normalization, PositionEmbedding
from megatron.config.precision import Precision
from megatron.config.run import RunConfig

# A large model on TP, PP and ZeRO 1, in samples, as bigscience trains.
GPT_PIPELINE = """
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 3
    --pp-partition-method type:transformer|embedding
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048
    --init-method-std 0.0048 --embed-layernorm --sync-tp-duplicated-parameters
    --position-embedding-type alibi --bf16 --seed 42 --pad-vocab-size-to 250880
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path tokenizer
    --micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048
    --train-samples 220_000_000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 200_000_000
    --lr-warmup-samples 183_105 --clip-grad 1.0 --weight-decay 1e-1
    --train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path valid.txt
    --num-workers 2 --valid-num-workers 0 --data-impl mmap
    --log-interval 1 --log-level info --log-level-replica error
    --save-interval 100 --save out --load out
    --eval-interval 1000 --eval-iters 1 --exit-duration-in-mins 5990 --kill-switch-path stop
    --tensorboard-dir tensorboard --tensorboard-queue-size 5 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
    --checkpoint-activations --distributed-backend nccl --abort-on-unmet-fused-kernel-constraints
    --DDP-impl local --codecarbon-dir carbon
    --deepspeed --deepspeed_config DS --zero-stage 1.0
    --deepspeed-activation-checkpointing --partition-activations --local_rank 3
"""

# ZeRO 3 with everything on the CPU, as Microsoft's examples of ZeRO-Infinity have it.
GPT_OFFLOAD = """
    --tensor-model-parallel-size 2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --train-iters 1000
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 900 --lr-warmup-fraction 0.01
    --data-path corpus --vocab-file vocab.json --merge-file merges.txt
    --tokenizer-type GPT2BPETokenizer --split 949,50,1 --fp16 --clip-grad 1.0
    --log-interval 10 --eval-interval 100 --eval-iters 10 --no-load-lr-state
    --deepspeed --deepspeed_config DS --zero-stage 3 --zero-reduce-scatter
    --zero-contigious-gradients --zero-reduce-bucket-size 50000000
    --zero-allgather-bucket-size 500000000 --remote-device cpu --use-pin-memory --cpu-optimizer
    --checkpoint-activations --checkpoint-num-layers 1 --partition-activations
    --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer --profile-backward
    --deepspeed-activation-checkpointing --no-pipeline-parallel
    --scattered-embeddings --split-transformers --memory-centric-tiled-linear --tile-factor 4
"""

# A GPT with the lengths in tokens, as Microsoft's GPT-3 examples have them.
GPT_CURRICULUM = """
    --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 1
    --moe-expert-parallel-size 1 --num-experts 1 --moe-loss-coeff 0.01
    --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4
    --init-method-std 0.014 --lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000
    --micro-batch-size 4 --exit-duration-in-mins 30000000 --global-batch-size 256
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --train-tokens 300000000000 --train-samples 439453125
    --lr 3.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 98,2,0 --log-interval 10
    --eval-interval 100 --eval-iters 10 --save-interval 10000 --weight-decay 0.1 --clip-grad 1.0
    --hysteresis 2 --num-workers 0 --fp16 --load out --save out --tensorboard-queue-size 1
    --log-timers-to-tensorboard --timing-log-level 1 --no-pipeline-parallel
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
    --log-optimizer-states-to-tensorboard
    --tensorboard-dir tensorboard --vocab-file vocab.json --merge-file merges.txt
    --tokenizer-type GPT2BPETokenizer --data-path corpus --data-impl mmap
    --deepspeed --deepspeed_config DS --zero-stage 0 --checkpoint-activations
    --deepspeed-activation-checkpointing
"""

LLAMA = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --num-layers 24 --hidden-size 2048
    --ffn-hidden-size 5504 --num-attention-heads 16 --num-key-value-heads 4 --micro-batch-size 1
    --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048 --train-iters 250000
    --save out --load out --data-path corpus --data-impl mmap
    --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model model.spm --split 949,50,1 --distributed-backend nccl --lr 3e-4
    --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 2000
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000
    --eval-interval 1000 --eval-iters 10 --bf16 --no-query-key-layer-scaling --attention-dropout 0
    --hidden-dropout 0 --use-rotary-position-embeddings --untie-embeddings-and-output-weights
    --swiglu --normalization rmsnorm --disable-bias-linear --ds-sequence-parallel-size 1
    --exit-on-missing-checkpoint --deepspeed --zero-stage=1 --deepspeed_config=DS
"""

BERT = """
    --tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --micro-batch-size 4 --global-batch-size 16 --seq-length 512 --max-position-embeddings 512
    --train-iters 1000000 --save out --load out --data-path corpus --vocab-file vocab.txt
    --tokenizer-type BertWordPieceLowerCase --data-impl mmap --split 949,50,1 --mask-prob 0.15
    --short-seq-prob 0.1 --bert-no-binary-head --lr 0.0001 --lr-decay-style linear --min-lr 1e-5
    --lr-decay-iters 990000 --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
    --mmap-warmup --num-workers 2 --deepspeed --deepspeed_config DS --zero-stage 2 --cpu_torch_adam
"""


# Every flag of bigscience's parser, and those that Microsoft's adds.
def template(**changes: Any) -> dict[str, Any]:
    """The JSON that stands beside such scripts."""
    return {
        "steps_per_print": 10,
        "prescale_gradients": True,
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
    } | changes


FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 11,
}
SEQLEN = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 80,
    "max_difficulty": 2048,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 110000, "difficulty_step": 8},
}


def read(folder: Path, script: str, values: dict[str, Any]) -> RunConfig:
    """The run of a script and its JSON."""
    path = folder / "ds.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return parse_args(script.replace("DS", str(path), 1).split() if "=DS" in script else [
        str(path) if word == "DS" else word for word in script.split()
    ])  # fmt: skip


def test_a_pipeline_with_zero_1(tmp_path: Path) -> None:
    values = template(
        train_batch_size=2048,
        train_micro_batch_size_per_gpu=2,
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
    )
    config = read(tmp_path, GPT_PIPELINE, values)
    assert config.model.position_embedding_type is PositionEmbedding.ALIBI
    assert config.training.activations.method is RecomputeMethod.UNIFORM
    assert config.training.activations.distribute
    plan = deepspeed_plan(config, data_parallel_size=32)
    assert (plan.stage, plan.partition_method) == (1, "type:transformer|embedding")
    assert plan.json["gradient_accumulation_steps"] == 32
    assert plan.json["prescale_gradients"] is True


def test_zero_3_with_everything_on_the_cpu(tmp_path: Path) -> None:
    offload = {"device": "cpu", "pin_memory": True}
    values = template(
        train_batch_size=64,
        fp16=FP16,
        zero_optimization={
            "stage": 3,
            "reduce_bucket_size": 50000000,
            "stage3_max_live_parameters": 1e9,
            "offload_param": offload,
            "offload_optimizer": offload | {"buffer_count": 4},
        },
    )
    config = read(tmp_path, GPT_OFFLOAD, values)
    assert config.engine.zero_stage is ZeroStage.PARAMETERS
    assert config.engine.remote_device is RemoteDevice.CPU
    assert config.training.global_batch_size == 64  # of the file
    assert config.precision.initial_loss_scale == 2.0**11  # likewise
    policy = config.training.activations
    assert policy.offload_layers >= config.model.num_layers
    plan = deepspeed_plan(config, data_parallel_size=8)
    assert (plan.offload_param, plan.offload_optimizer) == ("cpu", "cpu")
    assert plan.json["fp16"]["loss_scale_window"] == 500
    assert plan.json["zero_optimization"]["stage3_max_live_parameters"] == 10**9


def test_lengths_in_tokens_and_a_curriculum(tmp_path: Path) -> None:
    values = template(
        train_batch_size=256,
        train_micro_batch_size_per_gpu=4,
        zero_optimization={"stage": 0, "elastic_checkpoint": True},
        fp16=FP16,
        bf16={"enabled": False},
        curriculum_learning=SEQLEN,
    )
    config = read(tmp_path, GPT_CURRICULUM, values)
    assert config.training.train_tokens == 300_000_000_000
    assert config.schedule.lr_decay_tokens == 260_000_000_000
    assert config.schedule.lr_warmup_tokens == 375_000_000
    assert config.training.curriculum_seqlen_min == 80
    assert config.training.curriculum_iters == 110000
    plan = deepspeed_plan(config, data_parallel_size=8)
    assert plan.curriculum == SEQLEN
    assert any(remark.startswith("zero_optimization.elastic_checkpoint") for remark in plan.remarks)


def test_llama_on_a_pipeline(tmp_path: Path) -> None:
    values = template(
        train_batch_size=32,
        train_micro_batch_size_per_gpu=1,
        steps_per_print=1,
        zero_optimization={"stage": 1},
        bf16={"enabled": True},
    )
    config = read(tmp_path, LLAMA, values)
    assert config.model.normalization is Normalization.RMS_NORM
    assert config.model.activation is Activation.SILU
    assert config.model.query_groups == 4
    assert config.engine.zero_stage is ZeroStage.OPTIMIZER
    assert deepspeed_plan(config, data_parallel_size=4).json["bf16"]["enabled"] is True


def test_bert(tmp_path: Path) -> None:
    optimizer = {
        "type": "Adam",
        "params": {"lr": 1e-4, "weight_decay": 0.01, "betas": [0.9, 0.999]},
    }
    values = template(train_batch_size=16, fp16=FP16, optimizer=optimizer)
    values["zero_optimization"] = {"stage": 2, "contiguous_gradients": True}
    config = read(tmp_path, BERT, values)
    assert not config.data.bert_binary_head
    plan = deepspeed_plan(config, data_parallel_size=4)
    assert (plan.stage, plan.cpu_adam) == (2, False)


def test_what_the_file_says_fills_flags_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = LLAMA.replace("--bf16", "").replace("--clip-grad 1 ", "")
    config = read(tmp_path, script, template(bf16={"enabled": True}, gradient_clipping=0.3))
    assert config.precision.precision is Precision.BF16
    assert config.optimizer.clip_grad == 0.3
    output = capsys.readouterr().out
    assert f"--clip-grad 0.3: from {tmp_path / 'ds.json'}, as the flag is not given" in output
    assert "--bf16 True: from " in output


def test_a_required_flag_may_come_from_the_file(tmp_path: Path) -> None:
    script = LLAMA.replace("--micro-batch-size 1", "")
    config = read(tmp_path, script, template(train_micro_batch_size_per_gpu=8))
    assert config.training.micro_batch_size == 8


def test_without_deepspeed_the_file_says_nothing(tmp_path: Path) -> None:
    script = LLAMA.replace("--deepspeed ", "").replace("--clip-grad 1 ", "")
    assert read(tmp_path, script, template(gradient_clipping=0.3)).optimizer.clip_grad == 1.0


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("{", ["DeepSpeed's JSON file is not JSON"]),
        ('{"a": 1, "b": 2}', ["DeepSpeed has no such key"] * 2),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_with_all_else(
    tmp_path: Path, text: str, problems: list[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    words = LLAMA.replace("DS", str(path)).split()
    with pytest.raises(CommandLineError) as caught:
        parse_args([*words, "--hidden-dropout", "2"])
    found = [finding.error.problem for finding in caught.value.findings]
    assert found == [*problems, "a dropout probability is outside [0, 1)"]
