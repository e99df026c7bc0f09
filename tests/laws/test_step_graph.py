"""A step that is captured once and launched as a whole is bit for bit the step kernel by kernel.

On a CPU its operations are recorded and done again, communication with them, while no line of
Python runs: what a graph would miss shows here. That CUDA captures them is for tests/gpu.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.engine.step_graph import WARMUP_STEPS
from tests.laws.recorded_call import RecordedCall, captured_by_recording
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    MODELS,
    Record,
    assert_same_bits,
    tiny_run,
    train_all,
    write_tiny_corpus,
)
from tests.support.tiny_bert import tiny_bert_run, train_bert_all, write_tiny_sentences

STEPS = WARMUP_STEPS + 3
CLEAN = {"hidden_dropout": 0.1, "bf16": True}
FP8 = CLEAN | {"fp8_format": "hybrid", "hidden_size": 64}
TP = {"tensor_model_parallel_size": 2}
GROWING = "batches that grow"  # steps of another kind are captured anew
PP = {"pipeline_model_parallel_size": 2}

ALONE: dict[str, dict[str, Any]] = {
    name: {**MODELS[name], "hidden_dropout": 0.1} for name in MODELS if name != "mixtral"
} | {
    "one micro-batch, fp32": {"fp64": False, "micro_batch_size": 4, "hidden_dropout": 0.1},
    "a loss scale that moves": {"fp16": True, "initial_loss_scale": 2.0**14}
    | {"loss_scale_window": 2},
    "logits at once, z loss": CLEAN | {"cross_entropy_loss_fusion": False, "z_loss_coeff": 0.01},
    "z loss, zeros": CLEAN | {"z_loss_coeff": 0.01, "log_num_zeros_in_grad": True},
    "sgd": {"optimizer": "sgd"},
    "recomputed": CLEAN | {"recompute_granularity": "full"},
    "fp8": FP8,
    "fp8, delayed": FP8 | {"fp8_recipe": "delayed"},
    GROWING: {"rampup_batch_size": (2, 2, 2 * STEPS), "hidden_dropout": 0.1}
    | {"train_iters": 2 * STEPS},
}
# Each kind of value that varies from step to step, and of state that outlives one.
TAKEN = (
    *("ragged", "one micro-batch, fp32", "a loss scale that moves", "z loss, zeros"),
    *("fp8, delayed", GROWING),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor, sequence parallel, ring": CLEAN
    | TP
    | {"sequence_parallel": True, "tp_comm_overlap": True},
    "distributed optimizer": {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    | {"ddp_bucket_size": 1000, "hidden_dropout": 0.1},
    "interleaved": PP | {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2},
    "zero-bubble": PP | {"pipeline_schedule": "zero-bubble", "hidden_dropout": 0.1},
    "context": {"context_parallel_size": 2, "hidden_dropout": 0.1},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def train_captured(
    configs: Sequence[RunConfig], train: Callable[[Sequence[RunConfig]], list[Record]] = train_all
) -> tuple[list[Record], int]:
    """Return the records of runs whose steps are recorded, and how many graphs they made."""
    with captured_by_recording():
        records = train(configs)
    return records, RecordedCall.made


def pair(corpus: str, flags: dict[str, Any]) -> list[RunConfig]:
    """A run as usual, and one with a graph."""
    every = {"train_iters": STEPS, "global_batch_size": 4, **flags}
    return [tiny_run(corpus, **every, cuda_graph=graph) for graph in (False, True)]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in TAKEN else [pytest.mark.wide]) for one in ALONE]
)
def test_a_captured_step_is_the_step_on_one_rank(corpus: str, name: str) -> None:
    ((records, graphs),) = run_on_ranks(1, train_captured, pair(corpus, ALONE[name]))
    plain, captured = records
    assert (captured.steps, graphs) == (plain.steps, 2 if name == GROWING else 1)
    assert_same_bits(captured, plain)


def test_a_captured_step_of_two_losses_is_the_step(tmp_path: Path) -> None:
    sentences = write_tiny_sentences(tmp_path)
    flags = {"train_iters": STEPS, "global_batch_size": 2, "hidden_dropout": 0.1}
    configs = [tiny_bert_run(sentences, **flags, cuda_graph=graph) for graph in (False, True)]
    (((plain, captured), graphs),) = run_on_ranks(1, train_captured, configs, train_bert_all)
    assert (captured.steps, graphs) == (plain.steps, 1)
    assert_same_bits(captured, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_captured_step_is_the_step_on_two_ranks(corpus: str, layout: str) -> None:
    found = run_on_ranks(2, train_captured, pair(corpus, LAYOUTS[layout]), timeout_s=120)
    for (plain, captured), graphs in found:
        assert (captured.steps, graphs) == (plain.steps, 1)
        assert_same_bits(captured, plain)
