"""The law of shared sequences: ranks that share tokens train the model that one process trains."""

from pathlib import Path
from typing import Any

import pytest

from megatron.config.experts import LoadBalancing
from megatron.config.run import RunConfig
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    MODELS,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

# Losses that are added are sums over the ranks that share a sequence.
ADDED: dict[str, dict[str, Any]] = {
    "bloom": {"z_loss_coeff": 0.1, "num_query_groups": 1},  # keys that ranks have to repeat
    "mixtral": {
        "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


EXCHANGES = ("p2p", "all_gather", "a2a")


def shared(corpus: str, exchange: str, size: int, **flags: Any) -> RunConfig:
    return tiny_run(
        corpus, **flags, context_parallel_size=size, cp_comm_type=exchange, micro_batch_size=2
    )


# The matrix has every part of the first two, and of the third all but its norm of embeddings.
WIDE = ("gpt2", "llama", "bloom")
TAKEN = [pytest.param(model, marks=[pytest.mark.wide] if model in WIDE else []) for model in MODELS]


@pytest.mark.parametrize("model", TAKEN)
def test_ranks_that_share_sequences_train_the_same_model(corpus: str, model: str) -> None:
    shape = dict(MODELS[model]) | ADDED.get(model, {})
    (alone,) = run_on_ranks(1, train_all, [tiny_run(corpus, **shape, micro_batch_size=2)])
    expected = whole(alone, prefix="model/")
    # On four ranks models take the exchanges in turn, on two each takes the others.
    at = list(MODELS).index(model) % len(EXCHANGES)
    for world, taken in ((2, [e for e in EXCHANGES if e != EXCHANGES[at]]), (4, [EXCHANGES[at]])):
        configs = [shared(corpus, exchange, world, **shape) for exchange in taken]
        for records in zip(*run_on_ranks(world, train_all, configs)):
            assert_close(records[0].losses, alone[0].losses, FP64)
            assert_close(records[0].grad_norms, alone[0].grad_norms, FP64)
            assert_all_close(whole(records, prefix="model/"), expected, FP64)


def test_rings_and_gathers_give_the_same_losses_bit_for_bit(corpus: str) -> None:
    shape = {**MODELS["llama"], "fp64": False, "train_iters": 1}
    configs = [shared(corpus, exchange, 2, **shape) for exchange in ("p2p", "all_gather")]
    ring, gathered = run_on_ranks(2, train_all, configs)[0]
    assert ring.losses == gathered.losses
