"""Builds the engine that a run asks for: the native one, or one of the two of DeepSpeed."""

from megatron.config.run import RunConfig
from megatron.engine import fp8
from megatron.engine.base import Engine, PretrainTask
from megatron.engine.deepspeed.engine import DeepSpeedEngine
from megatron.engine.deepspeed.pipeline import DeepSpeedPipelineEngine
from megatron.engine.native import NativeEngine
from megatron.model.specs import ModelBuild
from megatron.ops.library import announce_kernels
from megatron.timers import Timers
from megatron.tokenizer.tokenizer import Tokenizer


def build_engine(
    config: RunConfig,
    task: PretrainTask,
    build: ModelBuild,
    tokenizer: Tokenizer,
    timers: Timers,
) -> Engine:
    """Return the engine of this rank; all ranks call this together."""
    announce_kernels()
    if build.fp8 is not None:
        fp8.announce(config, task.layers(config.model, build))
    if config.engine.deepspeed:
        in_stages = build.ctx.pp.size > 1
        kind = DeepSpeedPipelineEngine if in_stages else DeepSpeedEngine
        return kind(config, task, build, tokenizer, timers)
    return NativeEngine(config, task, build, tokenizer, timers)
