"""The layout law under sequence parallelism, and that it would notice a forgotten summand.

Norms, row biases and the position table see one part of the sequence on every rank. If one of them
is not summed over tensor-parallel ranks, nothing crashes: the model is another one.
"""

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.mpu.partition import set_parameter_metadata
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

ADAMW: dict[str, Any] = {"weight_decay": 0.1}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}
FULL = {"recompute_granularity": "full"}
RING = {"tp_comm_overlap": True}
# (tensor-parallel size, world size): the flags of each optimizer. Recomputation changes no bit, so
# each optimizer has a layout with and layouts without it; so it has with parts on a ring.
LAYOUTS: dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any]]] = {
    (2, 2): (ADAMW, SGD | FULL | RING),
    (4, 4): (ADAMW | FULL | RING, SGD),
    (2, 4): (ADAMW | RING, SGD),
}
# Where parameters are marked as having summands for gradients.
FORGETFUL = ("megatron.model.norms", "megatron.model.positions", "megatron.mpu.layers")
# The smallest of these differences is four orders of magnitude above what rounding leaves.
VISIBLE = 1e4 * FP64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def split_run(corpus: str, flags: Mapping[str, Any], tp: int, world_size: int) -> RunConfig:
    return tiny_run(
        corpus,
        **flags,
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
        micro_batch_size=4 * tp // world_size,
    )


def check_equal(records: Sequence[Record], alone: Sequence[Record]) -> None:
    for record in records:  # every rank has the same numbers
        assert (record.losses, record.grad_norms) == (records[0].losses, records[0].grad_norms)
    assert_close(records[0].losses, alone[0].losses, FP64)
    assert_close(records[0].grad_norms, alone[0].grad_norms, FP64)
    assert_close(
        [evaluation.mean for evaluation in records[0].evaluations],
        [evaluation.mean for evaluation in alone[0].evaluations],
        FP64,
    )
    # `whole` refuses ranks whose copies of what is not split differ in a bit.
    assert_all_close(whole(records, prefix="model/"), whole(alone, prefix="model/"), FP64)


# The matrix has every part of the first two, and of the third all but its norm of embeddings on
# the same grids.
WIDE = ("gpt2", "llama", "bloom")
TAKEN = [pytest.param(model, marks=[pytest.mark.wide] if model in WIDE else []) for model in MODELS]


@pytest.mark.parametrize("model", TAKEN)
def test_split_sequences_train_the_same_model(corpus: str, model: str) -> None:
    shape = {**MODELS[model], "eval_iters": 1}
    (alone,) = run_on_ranks(
        1, train_all, [tiny_run(corpus, **shape, **flags) for flags in (ADAMW, SGD)]
    )
    assert all(max(record.grad_norms) > 0.5 for record in alone), "clipping is meant to be active"
    # Layouts take the optimizers in turn, models begin with one and the other, and those on four
    # ranks take turns too: every layout meets every optimizer, on two ranks every model.
    number = list(MODELS).index(model)
    smallest, *others = LAYOUTS.items()
    taken = (smallest, others[number % len(others)])
    for at, ((tp, world_size), variants) in enumerate(taken, number // len(others)):
        config = split_run(corpus, shape | variants[at % 2], tp, world_size)
        records = [record for (record,) in run_on_ranks(world_size, train_all, [config])]
        check_equal(records, [alone[at % 2]])


@pytest.mark.parametrize("saved_split", [False, True])
def test_a_checkpoint_goes_on_with_and_without_split_sequences(
    corpus: str, tmp_path: Path, saved_split: bool
) -> None:
    flags = {**MODELS["bloom"], "train_iters": 4, "micro_batch_size": 4}
    ((straight,),) = run_on_ranks(1, train_all, [tiny_run(corpus, **flags)])
    at_tp2 = {**flags, "tensor_model_parallel_size": 2, "sequence_parallel": saved_split}
    saving = tiny_run(corpus, **at_tp2, exit_interval=2, save=str(tmp_path))
    run_on_ranks(2, train_all, [saving])
    loading = [
        tiny_run(corpus, **(at_tp2 | {"sequence_parallel": split}), load=str(tmp_path))
        for split in (False, True)
    ]
    by_rank = run_on_ranks(2, train_all, loading)
    for which in range(len(loading)):
        records = [found[which] for found in by_rank]
        assert_close(records[0].losses, straight.losses[2:], FP64)
        assert_close(records[0].grad_norms, straight.grad_norms[2:], FP64)
        assert_all_close(whole(records), whole([straight]), FP64)


def train_forgetting(modules: Sequence[str], config: RunConfig) -> Record:
    """Train while parameters made in `modules` are not marked as having summands for gradients."""
    for name in modules:
        module = importlib.import_module(name)
        module.set_parameter_metadata = partial(_without_saying, module.set_parameter_metadata)  # type: ignore[attr-defined]
    (record,) = train_all([config])
    return record


def _without_saying(real: Any, *args: Any, **kwargs: Any) -> None:
    assert real is set_parameter_metadata
    real(*args, **{**kwargs, "sequence_parallel": False})


@pytest.mark.parametrize("module", FORGETFUL)
def test_a_forgotten_summand_is_noticed(corpus: str, module: str) -> None:
    flags = {"optimizer": "sgd", "lr": 0.05, "train_iters": 2}
    (alone,) = run_on_ranks(1, train_all, [tiny_run(corpus, **flags)])[0]
    records = run_on_ranks(2, train_forgetting, [module], split_run(corpus, flags, 2, 2))
    with pytest.raises(AssertionError, match="replicas differ"):
        whole(records, prefix="model/")
    norms = zip(records[0].grad_norms, alone.grad_norms)
    assert all(abs(one - other) > VISIBLE * other for one, other in norms)
    # The first loss is of the values that all runs start from; the second one of the first step.
    assert_close(records[0].losses[:1], alone.losses[:1], FP64)
    assert abs(records[0].losses[1] - alone.losses[1]) > VISIBLE * alone.losses[1]


def test_nothing_else_is_forgotten_by_then(corpus: str) -> None:
    """The control of the control: the same body without forgetting finds no difference."""
    flags = {"optimizer": "sgd", "lr": 0.05, "train_iters": 2}
    (alone,) = run_on_ranks(1, train_all, [tiny_run(corpus, **flags)])[0]
    records = run_on_ranks(2, train_forgetting, [], split_run(corpus, flags, 2, 2))
    assert_close(records[0].grad_norms, alone.grad_norms, FP64)
    assert_all_close(whole(records, prefix="model/"), whole([alone], prefix="model/"), FP64)
