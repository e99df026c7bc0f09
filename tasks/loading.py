"""A trained model made ready for a task, from the flags that its checkpoint holds."""

from pathlib import Path
from typing import NamedTuple

import torch

from megatron.checkpointing import initialize_for_inference, load_weights, model_build
from megatron.config.parallel import ParallelConfig
from megatron.device import current
from megatron.engine.scoring import Scorer
from megatron.errors import CheckpointError
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.tokenizer.tokenizer import Tokenizer


class LoadedScorer(NamedTuple):
    """A model that scores rows, and what is needed to make rows and speak of them."""

    scorer: Scorer
    model: GPTModel | None  # the whole of it, which can write too; None in a pipeline
    tokenizer: Tokenizer
    seq_length: int  # that it was trained with
    ctx: ParallelContext


class Grid(NamedTuple):
    """Over how many ranks the model is spread; what is left over are replicas."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1


def load_scorer(
    folder: str | Path,
    iteration: int | None = None,
    *,
    grid: Grid | None = None,
    micro_batch_size: int = 8,
    device: str | None = None,
) -> LoadedScorer:
    """The GPT of a checkpoint on this rank's part of the grid; all ranks call it together.

    Raises:
        CheckpointError: missing, damaged, or not of a GPT.
    """
    parallel = ParallelConfig(**(grid or Grid())._asdict())
    runtime = initialize_for_inference(folder, iteration, parallel=parallel, device=device)
    build = model_build(runtime)
    model = None
    if build.ctx.pp.size == 1:
        with torch.device(current()):
            model = GPTModel(runtime.config.model, build)
        model.eval()
    scorer = Scorer(runtime.config, build, micro_batch_size=micro_batch_size, model=model)
    try:
        load_weights(scorer.stage, folder, iteration, runtime)
    except CheckpointError as error:
        error.add_note("this task takes a GPT: checkpoints of other models do not fit it")
        raise
    return LoadedScorer(
        scorer, model, runtime.tokenizer, runtime.config.data.seq_length, runtime.context
    )
