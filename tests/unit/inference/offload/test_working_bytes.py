"""Keys, values and a step are counted as an engine of that size has them."""

import pytest

from megatron.inference.cache_size import StepSize, step_bytes
from megatron.inference.forward import ForwardExecutor, model_block_bytes
from megatron.inference.offload.working_bytes import CacheDemand, cache_blocks, working_bytes
from megatron.inference.paged_cache import BLOCK_SIZE
from megatron.mpu.context import ParallelContext
from tests.support.models import tiny_build, tiny_config, tiny_model

CTX = ParallelContext.single()
MODEL = tiny_model(tiny_config(max_position_embeddings=3 * BLOCK_SIZE)).eval()
OF_ONE = model_block_bytes(MODEL, CTX)


@pytest.mark.parametrize(
    ("demand", "memory", "blocks"),
    [
        (CacheDemand(sequences=4), 10**9, 12),
        (CacheDemand(sequences=4, length=BLOCK_SIZE + 1), 10**9, 8),
        (CacheDemand(sequences=4, blocks=5), 10**9, 5),
        (CacheDemand(sequences=4), 4 * 8 * OF_ONE, 7),
        (CacheDemand(sequences=4), 0, 3),
    ],
    ids=["positions", "a length", "given", "a quarter of the memory", "one sequence"],
)
def test_blocks_are_those_of_the_sequences_or_of_a_quarter(
    demand: CacheDemand, memory: int, blocks: int
) -> None:
    assert cache_blocks(MODEL, CTX, demand, memory) == blocks
    working = working_bytes(MODEL, CTX, demand, memory)
    executor = ForwardExecutor(MODEL, CTX, blocks=blocks)
    assert working.cache == executor.cache.num_bytes


def test_a_step_is_bounded_as_for_an_engine() -> None:
    demand = CacheDemand(sequences=9, length=40, step_tokens=7)
    working = working_bytes(MODEL, CTX, demand, 10**9)
    build = tiny_build()
    assert working.step == step_bytes(
        MODEL.config, StepSize(9, 9, 40), tp=1, vocabulary=build.vocab.padded, dtype=build.dtype
    )
