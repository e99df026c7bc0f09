"""A run gets the engine that it asks for."""

from megatron.checkpointing import model_build
from megatron.engine.build import build_engine
from megatron.engine.native import NativeEngine
from pretrain_gpt import gpt_task
from tests.support.tiny import tiny_run
from tests.unit.engine.engines import runtime_of


def test_there_is_the_native_engine() -> None:
    runtime = runtime_of(tiny_run("nowhere"))
    engine = build_engine(
        runtime.config, gpt_task(), model_build(runtime), runtime.tokenizer, runtime.timers
    )
    assert isinstance(engine, NativeEngine)
