"""The laws for T5: layouts, engines, resumed and reloaded runs train one model.

The border between encoder and decoder lies inside a stage, at the end of one, and between chunks of
one rank; the rows of both stacks differ in length, and those of the encoder have padding.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from tests.laws.checkpoints.test_resume import FULL, HALF, check_joined
from tests.laws.layouts.test_compile import train_as_traced
from tests.support.ranks import run_on_ranks
from tests.support.t5.runs import tiny_span_run, tiny_t5_run, train_t5_all
from tests.support.tiny import (
    FP32,
    FP64,
    Record,
    assert_all_close,
    assert_close,
    whole,
    write_tiny_corpus,
)
from tests.support.tiny_bert import TinySentences, write_tiny_sentences

SHAPE: dict[str, Any] = {"eval_iters": 1, "eval_interval": 3}
MEGATRON: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "relu": False,
    "logit_divisor": 1.0,
    "softmax_scale": None,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
ELEVEN: dict[str, Any] = {
    "relu": False,
    "glu_activation": "geglu_tanh",
    "untie_embeddings_and_output_weights": True,
    "logit_divisor": 1.0,
}
MODELS: dict[str, dict[str, Any]] = {"1.0": {}, "megatron": MEGATRON, "1.1": ELEVEN}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
SPLIT = "pipeline_model_parallel_split_rank"
SP = {TP: 2, "sequence_parallel": True}
# World size: what each run of it adds to the flags of one process.
GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"micro_batch_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
        {**SP, "micro_batch_size": 4, "tp_comm_overlap": True},
        {PP: 2, SPLIT: 1, "micro_batch_size": 4, "recompute_granularity": "full"},
        {PP: 2, "num_virtual_stages_per_pipeline_rank": 2, "micro_batch_size": 2},
    ],
    4: [{**SP, PP: 2, "micro_batch_size": 2, "pipeline_schedule": "zero-bubble"}],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinySentences:
    return write_tiny_sentences(Path(tmp_path_factory.mktemp("sentences")))


def check_equal(records: list[Record], alone: Record, tolerance: float) -> None:
    assert_close(records[0].losses, alone.losses, tolerance)
    assert_close(records[0].grad_norms, alone.grad_norms, tolerance)
    for ours, expected in zip(records[0].evaluations, alone.evaluations, strict=True):
        assert_close(ours.means, expected.means, tolerance)
    state = {name: t for name, t in whole(records).items() if name.startswith("model/")}
    assert_all_close(state, whole([alone], prefix="model/"), tolerance)


# All layouts of T5 1.0; of the others what reads other parameters, and all in the wide suite.
TURNS = [
    pytest.param("1.0", 2),
    pytest.param("1.0", 4),
    pytest.param("megatron", 4),
    *(pytest.param(*turn, marks=pytest.mark.wide) for turn in (("megatron", 2), ("1.1", 2))),
]


@pytest.mark.parametrize(("model", "world_size"), TURNS)
def test_every_layout_trains_the_same_model(
    corpus: TinySentences, model: str, world_size: int
) -> None:
    flags, grids = SHAPE | MODELS[model], GRIDS[world_size]
    ((alone,),) = run_on_ranks(1, train_t5_all, [tiny_t5_run(corpus, **flags)])
    assert len(set(alone.losses)) == len(alone.losses), "the weights are meant to move"
    runs = [tiny_t5_run(corpus, **(flags | grid)) for grid in grids]
    by_rank = run_on_ranks(world_size, train_t5_all, runs)
    for at in range(len(grids)):
        check_equal([ranks[at] for ranks in by_rank], alone, FP64)


@pytest.mark.parametrize("model", ["1.0", pytest.param("megatron", marks=pytest.mark.wide)])
def test_compiled_layers_of_both_stacks_compute_the_same(corpus: TinySentences, model: str) -> None:
    flags = SHAPE | MODELS[model] | {"attention_dropout": 0.0}
    runs = [tiny_t5_run(corpus, compile=made, **flags) for made in (False, True)]
    ((eager, compiled),) = run_on_ranks(1, train_as_traced, runs, train_t5_all)
    check_equal([compiled], eager, FP64)


# Scales of whole matrices from the steps before, so that they do not depend on the layout.
IN_FP8: dict[str, Any] = {
    **{"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 96, "micro_batch_size": 2},
    **{"fp8_format": "hybrid", "fp8_recipe": "delayed"},
}


@pytest.mark.parametrize("model", ["1.0", pytest.param("megatron", marks=pytest.mark.wide)])
def test_every_layout_rounds_alike_in_fp8(corpus: TinySentences, model: str) -> None:
    flags = SHAPE | MODELS[model] | IN_FP8
    ((alone,),) = run_on_ranks(1, train_t5_all, [tiny_t5_run(corpus, **flags)])
    grids: list[dict[str, Any]] = [SP, {PP: 2, SPLIT: 1}]
    runs = [tiny_t5_run(corpus, **(flags | grid)) for grid in grids]
    by_rank = run_on_ranks(2, train_t5_all, runs)
    for at in range(len(grids)):
        check_equal([ranks[at] for ranks in by_rank], alone, FP64)


DEEPSPEED: dict[str, dict[str, Any]] = {
    "megatron": {"zero_stage": "3", "micro_batch_size": 2},
    "1.0": {"zero_stage": "1", PP: 2, "micro_batch_size": 2},
}


@pytest.mark.parametrize("model", DEEPSPEED)
def test_both_engines_train_the_same_model(corpus: TinySentences, model: str) -> None:
    flags = SHAPE | MODELS[model] | {"fp64": False, "optimizer": "sgd", "lr": 0.05}
    ((alone,),) = run_on_ranks(1, train_t5_all, [tiny_t5_run(corpus, **flags)])
    run = tiny_t5_run(corpus, deepspeed=True, **flags, **DEEPSPEED[model])
    by_rank = run_on_ranks(2, train_t5_all, [run], deepspeed=True)
    check_equal([record for (record,) in by_rank], alone, FP32)


def saving(config: RunConfig, folder: Path, **training: Any) -> RunConfig:
    checkpoint = dataclasses.replace(config.checkpoint, save=str(folder), load=str(folder))
    changed = dataclasses.replace(config.training, **training)
    return dataclasses.replace(config, checkpoint=checkpoint, training=changed)


def test_a_resumed_run_is_the_uninterrupted_run(corpus: TinySentences, tmp_path: Path) -> None:
    words = write_tiny_corpus(tmp_path / "text")
    flags = {"fp64": False, "train_iters": FULL, "eval_iters": 1, "eval_interval": 3}
    drops = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    plain = tiny_span_run(words, corpus, split="60,20,20", **flags, **drops)
    folder = tmp_path / "checkpoints"
    stopping = saving(plain, folder, exit_interval=HALF)
    straight, first = run_on_ranks(1, train_t5_all, [plain, stopping])[0]
    (second,) = run_on_ranks(1, train_t5_all, [saving(plain, folder)])[0]
    check_joined(straight, first, second, "spans")


def test_a_checkpoint_goes_on_at_another_layout(corpus: TinySentences, tmp_path: Path) -> None:
    first = tiny_t5_run(corpus, **{**SP, "micro_batch_size": 4, "train_iters": 4})
    stopping = saving(first, tmp_path, exit_interval=2)
    run_on_ranks(2, train_t5_all, [stopping])
    split = {PP: 2, SPLIT: 1, "micro_batch_size": 4, "train_iters": 4}
    by_rank = run_on_ranks(2, train_t5_all, [saving(tiny_t5_run(corpus, **split), tmp_path)])
    ((alone,),) = run_on_ranks(1, train_t5_all, [tiny_t5_run(corpus, train_iters=4)])
    assert_close(by_rank[0][0].losses, alone.losses[2:], FP64)
    state = whole([ranks[0] for ranks in by_rank], prefix="model/")
    assert_all_close(state, whole([alone], prefix="model/"), FP64)
