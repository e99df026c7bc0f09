"""Ranks that share a model and differ are found on all of them before it is used."""

import torch.distributed as dist

from megatron.errors import NumericsError
from megatron.inference.model_checks import check_inference_model
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.models import TINY_VOCAB, roughen, tiny_build, tiny_config
from tests.support.ranks import run_on_ranks

RANKS = 2


def looked_at_with_faults() -> list[str]:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    is_faulty = ctx.rank == 1
    found = []
    for fault in ("none", "mode", "weight", "hidden"):
        model = GPTModel(tiny_config(), tiny_build(ctx)).eval().requires_grad_(False)
        roughen(model, ctx)
        if is_faulty and fault == "mode":
            model.train()
        if is_faulty and fault == "weight":
            model.get_parameter("final_norm.weight")[0] += 1e-9
        if is_faulty and fault == "hidden":
            norm = model.get_submodule("final_norm")
            norm.register_forward_hook(lambda module, args, output: output * (1 + 1e-12))
        try:
            check_inference_model(model, ctx, vocabulary=TINY_VOCAB.true, eod=None)
            found.append("")
        except NumericsError as error:
            found.append(f"{error.problem}: {error.found}")
        dist.barrier()
    return found


def test_ranks_that_differ_are_found_by_all() -> None:
    for none, mode, weight, hidden in run_on_ranks(RANKS, looked_at_with_faults):
        assert none == ""
        assert "rank 1: the model and " in mode
        assert "in training mode" in mode
        assert "weights that are not split: 1 of 15 parameters, final_norm.weight" in weight
        assert hidden.endswith("tensor-parallel ranks compute different hidden states")
