"""A run gets the engine that its flags choose."""

import dataclasses

import pytest

from megatron.engine import build
from megatron.engine.build import build_engine
from megatron.engine.native import NativeEngine
from megatron.model_build import model_build
from megatron.mpu.context import Group
from pretrain_gpt import gpt_task
from tests.support.tiny import tiny_run
from tests.unit.engine.engines import runtime_of


def test_there_is_the_native_engine() -> None:
    runtime = runtime_of(tiny_run("nowhere"))
    engine = build_engine(
        runtime.config, gpt_task(), model_build(runtime), runtime.tokenizer, runtime.timers
    )
    assert isinstance(engine, NativeEngine)


@pytest.mark.parametrize(("stages", "expected"), [(1, "whole"), (2, "pipeline")])
def test_deepspeed_has_an_engine_for_pipelines_and_one_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, stages: int, expected: str
) -> None:
    monkeypatch.setattr(build, "DeepSpeedEngine", lambda *args: "whole")
    monkeypatch.setattr(build, "DeepSpeedPipelineEngine", lambda *args: "pipeline")
    runtime = runtime_of(tiny_run("nowhere", deepspeed=True, fp64=False))
    context = dataclasses.replace(runtime.context, pp=Group(tuple(range(stages)), 0))
    needed = dataclasses.replace(model_build(runtime), ctx=context)
    engine = build_engine(runtime.config, gpt_task(), needed, runtime.tokenizer, runtime.timers)
    assert engine == expected
