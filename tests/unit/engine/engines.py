"""An engine in this process, without torch.distributed."""

from typing import Any

import torch

from megatron.config.run import RunConfig
from megatron.engine.native import NativeEngine
from megatron.global_vars import Runtime
from megatron.initialize import tokenizer_of
from megatron.launch import Launch
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.timers import Timers
from pretrain_gpt import gpt_task
from tests.support.tiny import EOD, TOKENS_PER_SAMPLE, VOCABULARY, tiny_run


def runtime_of(config: RunConfig) -> Runtime:
    """What initialize_megatron would make, on this process alone."""
    return Runtime(
        config,
        Launch(),
        ParallelContext.single(),
        RandomStreams(config.training.seed),
        tokenizer_of(config),
        Timers(),
        initialised_at="a test",
        process=0,
    )


def tiny_engine(**flags: Any) -> NativeEngine:
    """A native engine for a tiny run."""
    runtime = runtime_of(tiny_run("nowhere", **flags))
    return NativeEngine(runtime.config, gpt_task(), model_build(runtime), runtime.tokenizer)


def tiny_batches(
    count: int, *, size: int = 1, token: int | None = None
) -> list[dict[str, torch.Tensor]]:
    """Raw micro-batches of random tokens and ends of documents, or of one token over and over."""
    generator = torch.Generator().manual_seed(1)
    shape = (size, TOKENS_PER_SAMPLE + 1)
    return [
        {
            "text": torch.full(shape, token)
            if token is not None
            else torch.randint(0, VOCABULARY + 1, shape, generator=generator)
        }
        for _ in range(count)
    ]


ONLY_ENDS = EOD
