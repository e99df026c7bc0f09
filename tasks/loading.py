"""A trained GPT made ready for a task: the model of a checkpoint, on the layout of the flags."""

from pathlib import Path
from typing import NamedTuple

import torch

from megatron import log
from megatron.checkpoint.load.inference_config import Values
from megatron.checkpoint.load.stored_run import NOTHING_GIVEN
from megatron.device import current
from megatron.engine.evaluation_memory import EvaluationMemory
from megatron.engine.scoring import Scorer
from megatron.errors import ConfigError
from megatron.inference.end_ids import check_end_id
from megatron.inference.model_checks import check_inference_model
from megatron.inference.weight_quantization import quantize_weights
from megatron.model.gpt_model import GPTModel
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.ops.quantized_products import StoredFormat
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.trained_model import initialize_for_inference, load_weights

MICRO_BATCH_SIZE = 8  # rows that a replica reads together without a flag


class LoadedScorer(NamedTuple):
    """A model that scores rows, with its tokenizer and flags."""

    scorer: Scorer
    model: GPTModel | None  # the whole of it, which can write too; None in a pipeline
    tokenizer: Tokenizer
    seq_length: int  # tokens of a window: of --seq-length, or of training
    ctx: ParallelContext
    asked_length: int | None = None  # --seq-length, where it was given

    @property
    def longest(self) -> int | None:
        """The most tokens of a row; None: unlimited."""
        return self.scorer.max_length if self.asked_length is None else self.asked_length


def load_scorer(
    folder: str | Path,
    iteration: int | None = None,
    *,
    given: Values = NOTHING_GIVEN,
    weight_quantization: StoredFormat | None = None,
) -> LoadedScorer:
    """Return the GPT of a checkpoint on this rank's part of the grid; all ranks call it together.

    Args:
        given: flags beside the checkpoint's, by the fields of a run: the grid, the precision, the
            micro-batch size (`MICRO_BATCH_SIZE` when not given), the length of a window.
        weight_quantization: see `load_model_for_inference`.

    Raises:
        CheckpointError: missing, damaged, not of a GPT, or of another model than the flags'.
        ConfigError: weights in 8 bits of a stage of a pipeline.
        MachineError: there is too little memory for the weights.
    """
    runtime = initialize_for_inference(folder, iteration, given=given)
    build = model_build(runtime)
    memory = EvaluationMemory(runtime.config, build)
    memory.check_weights()
    size = given.get("micro_batch_size", MICRO_BATCH_SIZE)
    model = None
    if build.ctx.pp.size == 1:
        with torch.device(current()):
            model = GPTModel(runtime.config.model, build).eval().requires_grad_(False)
    scorer = Scorer(runtime.config, build, micro_batch_size=size, memory=memory, model=model)
    load_weights(scorer.stage, folder, iteration, runtime)
    eod = runtime.tokenizer.eod
    check_end_id(eod, build.vocab.true)
    if model is not None and build.share.size == 1:  # a stage has no scores
        check_inference_model(model, build.ctx, vocabulary=runtime.tokenizer.vocab_size, eod=eod)
    if weight_quantization is not None:
        if model is None:
            raise ConfigError(
                "the stages of a pipeline cannot store their weights in 8 bits",
                found=f"--weight-quantization {weight_quantization}, "
                f"--pipeline-model-parallel-size {build.ctx.pp.size}",
                fix="spread it with --tensor-model-parallel-size instead",
            )
        log.info(str(quantize_weights(model, weight_quantization)))
    seq_length = given.get("seq_length")
    seq_length = None if seq_length == -1 else seq_length
    length = runtime.config.data.seq_length if seq_length is None else seq_length
    return LoadedScorer(scorer, model, runtime.tokenizer, length, runtime.context, seq_length)
