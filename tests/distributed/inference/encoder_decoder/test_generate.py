"""Ranks that share a T5 give the same answers, and those that one rank gives."""

from typing import Any

import torch.distributed as dist

from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.inference.encoder_decoder.beam_search import BeamParams
from megatron.inference.encoder_decoder.generate import generate_answers, search_answers
from megatron.inference.sampling_params import SamplingParams
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.models import tiny_build
from tests.support.ranks import run_on_ranks
from tests.support.t5.models import T5_1_1, tiny_t5

INPUTS = [[7, 3, 9, 1], [4], [11, 12, 13]]
MARKS = DecoderMarks(0, 5, 0)


def answered(ctx: ParallelContext) -> list[Any]:
    build = tiny_build(ctx, vocab=VocabSize(51, 52 if ctx.tp.size == 1 else 64))
    model = tiny_t5(build, **T5_1_1, init_method_std=1.0)
    drawn = SamplingParams(temperature=2.0, top_p=0.9)
    answers = generate_answers(
        model, INPUTS, MARKS, max_new_tokens=6, params=drawn, seed=1, ctx=ctx
    )
    beams = search_answers(
        model, INPUTS, MARKS, max_new_tokens=6, params=BeamParams(beams=3), ctx=ctx
    )
    return [answers, [[each.tokens for each in row] for row in beams]]


def answered_on_ranks() -> list[Any]:
    return answered(ParallelContext.build(Topology(tp=dist.get_world_size())))


def test_two_ranks_answer_what_one_does() -> None:
    alone = answered(ParallelContext.single())
    first, second = run_on_ranks(2, answered_on_ranks)
    assert first == second == alone
