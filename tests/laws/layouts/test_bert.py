"""The layout law for BERT, which has two losses, two segments, padding and heads of its own.

Each loss is a mean over the whole global batch, so neither micro-batches nor replicas weigh in; in
the heads of the last stage, what is whole on every tensor-parallel rank meets what is split.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.experts import LoadBalancing
from megatron.config.run import RunConfig
from megatron.errors import DataError
from megatron.model.losses import LossSum
from pretrain_bert import bert_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP32,
    FP64,
    Record,
    assert_all_close,
    assert_close,
    train,
    whole,
)
from tests.support.tiny_bert import (
    TinySentences,
    tiny_bert_run,
    train_bert_all,
    write_tiny_sentences,
)

SHAPE: dict[str, Any] = {"num_layers": 4, "train_iters": 3, "eval_iters": 1, "eval_interval": 3}
MODELS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "original": {
        "apply_residual_connection_post_layernorm": True,
        "onnx_safe": True,
        "hidden_dropout": 0.1,
    },
    "untied, rotary, without order": {
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "bert_binary_head": False,
    },
    "experts with a loss of their own": {
        "num_experts": 4,
        "ffn_hidden_size": 24,
        "add_bias_linear": False,
        "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
        "moe_aux_loss_coeff": 0.5,
    },
}
# World size: what each run of it adds to the flags of one process.
GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"micro_batch_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
        {"tensor_model_parallel_size": 2, "micro_batch_size": 4},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 4},
        {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zero-bubble",
            "micro_batch_size": 2,
        },
        {"context_parallel_size": 2, "cp_comm_type": "a2a", "micro_batch_size": 4},
    ],
    4: [
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "num_virtual_stages_per_pipeline_rank": 2,
            "micro_batch_size": 2,
        },
        {
            "tensor_model_parallel_size": 2,
            "micro_batch_size": 2,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "recompute_granularity": "full",
        },
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "context_parallel_size": 2,
            "micro_batch_size": 4,
        },
    ],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinySentences:
    return write_tiny_sentences(Path(tmp_path_factory.mktemp("sentences")))


def check_equal(
    records: list[Record], alone: Record, tolerance: float, *, parameters: float
) -> None:
    for record in records:  # every rank has the same numbers
        assert [dataclasses.astuple(step) for step in record.steps] == [
            dataclasses.astuple(step) for step in records[0].steps
        ]
    assert_close(records[0].losses, alone.losses, tolerance)
    assert_close(records[0].grad_norms, alone.grad_norms, tolerance)
    for actual, reference in zip(records[0].steps, alone.steps):
        assert_close(
            actual.means or (actual.loss,), reference.means or (reference.loss,), tolerance
        )
    for ours, expected in zip(records[0].evaluations, alone.evaluations):
        assert_close(ours.means, expected.means, tolerance)
    state = {name: t for name, t in whole(records).items() if name.startswith("model/")}
    assert_all_close(state, whole([alone], prefix="model/"), parameters)


# The models that differ most, each with one optimizer; all others in the wide suite.
TAKEN = (("original", "adamw"), ("experts with a loss of their own", "sgd"))
TURNS = [
    pytest.param(*turn, marks=[] if turn in TAKEN else [pytest.mark.wide])
    for turn in itertools.product(MODELS, ("adamw", "sgd"))
]


@pytest.mark.parametrize(("model", "optimizer"), TURNS)
def test_every_layout_trains_the_same_model(
    corpus: TinySentences, model: str, optimizer: str
) -> None:
    flags = SHAPE | MODELS[model]
    flags |= {"optimizer": "sgd", "lr": 0.05} if optimizer == "sgd" else {"weight_decay": 0.1}
    ((alone,),) = run_on_ranks(1, train_bert_all, [tiny_bert_run(corpus, **flags)])
    assert len(set(alone.losses)) == len(alone.losses), "the weights are meant to move"
    assert max(alone.grad_norms) > 0.5, "clipping is meant to be active"
    for world_size, grids in GRIDS.items():
        runs = [tiny_bert_run(corpus, **(flags | grid)) for grid in grids]
        by_rank = run_on_ranks(world_size, train_bert_all, runs)
        for at in range(len(grids)):
            check_equal([ranks[at] for ranks in by_rank], alone, FP64, parameters=FP64)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", FP32), ("bf16", BF16)])
def test_narrower_precisions_stay_within_their_bands(
    corpus: TinySentences, precision: str, tolerance: float
) -> None:
    flags = SHAPE | {"fp64": False, "bf16": precision == "bf16", "micro_batch_size": 2}
    ((alone,),) = run_on_ranks(1, train_bert_all, [tiny_bert_run(corpus, **flags)])
    run = tiny_bert_run(corpus, **(flags | GRIDS[4][0]))
    by_rank = run_on_ranks(4, train_bert_all, [run])
    # AdamW turns a gradient that is nothing but rounding into a step of full length, so that a bias
    # that begins at zero, as those of keys that mean nothing, can even come to point the other way.
    check_equal([ranks[0] for ranks in by_rank], alone, tolerance, parameters=2.0)


DEEPSPEED: list[dict[str, Any]] = [
    {"zero_stage": "3", "micro_batch_size": 2},
    {"zero_stage": "2", "tensor_model_parallel_size": 2, "micro_batch_size": 4},
    {"zero_stage": "1", "pipeline_model_parallel_size": 2, "micro_batch_size": 2},
]


def test_both_engines_train_the_same_model(corpus: TinySentences) -> None:
    flags = SHAPE | {"fp64": False, "optimizer": "sgd", "lr": 0.05}
    ((alone,),) = run_on_ranks(1, train_bert_all, [tiny_bert_run(corpus, **flags)])
    runs = [tiny_bert_run(corpus, deepspeed=True, **flags, **grid) for grid in DEEPSPEED]
    by_rank = run_on_ranks(2, train_bert_all, runs, deepspeed=True)
    for at in range(len(runs)):
        check_equal([ranks[at] for ranks in by_rank], alone, FP32, parameters=FP32)


def test_recomputation_with_dropout_changes_no_bit(corpus: TinySentences) -> None:
    flags = SHAPE | {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    runs = [
        tiny_bert_run(corpus, **flags, **more)
        for more in ({}, {"recompute_granularity": "full"}, {"recompute_granularity": "selective"})
    ]
    ((plain, *others),) = run_on_ranks(1, train_bert_all, runs)
    for other in others:
        assert (other.losses, other.grad_norms) == (plain.losses, plain.grad_norms)


def test_the_two_losses_are_means_over_the_global_batch(corpus: TinySentences) -> None:
    runs = [tiny_bert_run(corpus, **SHAPE, micro_batch_size=size) for size in (1, 8)]
    ((ones, eight),) = run_on_ranks(1, train_bert_all, runs)
    for one, other in zip(ones.steps, eight.steps):
        assert len(one.means) == 2
        assert_close(one.means, other.means, FP64)
        assert math.isclose(one.loss, sum(one.means))
    # A mean of the means of micro-batches is another number: rows have unequally many words.
    assert ones.steps[0].means[0] != pytest.approx(ones.steps[0].means[1])


def half_weighted(real: Callable[..., LossSum]) -> Callable[..., LossSum]:
    def loss(*args: Any) -> LossSum:
        done = real(*args)
        half = torch.tensor([1.0, 0.5], dtype=done.total.dtype)
        return LossSum(done.total * half, done.count)

    return loss


def train_with_a_half_weighted_order(config: RunConfig) -> Record:
    task = bert_task()
    return train(config, dataclasses.replace(task, loss=half_weighted(task.loss)))


def test_a_loss_of_another_weight_is_seen(corpus: TinySentences) -> None:
    config = tiny_bert_run(corpus, **SHAPE)
    ((alone,),) = run_on_ranks(1, train_bert_all, [config])
    (wrong,) = run_on_ranks(1, train_with_a_half_weighted_order, config)
    with pytest.raises(AssertionError, match="apart"):
        check_equal([wrong], alone, FP64, parameters=FP64)


def train_with_nothing_to_guess(config: RunConfig) -> str:
    task = bert_task()

    def nothing(labels: tuple[Tensor, ...]) -> Tensor:
        return task.counted(labels) * torch.tensor([0.0, 1.0])

    try:
        train(config, dataclasses.replace(task, counted=nothing))
    except DataError as error:
        return str(error)
    return "nothing was raised"


def test_a_batch_with_nothing_to_guess_is_an_error(corpus: TinySentences) -> None:
    (message,) = run_on_ranks(1, train_with_nothing_to_guess, tiny_bert_run(corpus, **SHAPE))
    assert "a global batch has nothing that one of its losses counts" in message
    assert "lm loss 0, sop loss 8" in message
