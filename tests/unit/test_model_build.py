"""The vocabulary and the split of sequences that a model is built for."""

import dataclasses
from typing import Any

import pytest

from megatron.config.training import AttentionBackend
from megatron.model.gpt_model import gpt_layers
from megatron.model.specs import VocabSize
from megatron.model_build import model_build, vocabulary
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from tests.support.models import second_of_two
from tests.support.tiny import tiny_run
from tests.unit.engine.engines import runtime_of


def test_a_sequence_that_nobody_shares_is_said_and_not_split(capsys: Any) -> None:
    note = "--sequence-parallel has no effect with --tensor-model-parallel-size 1"
    assert not model_build(runtime_of(tiny_run("nowhere"))).sequence_parallel
    assert note not in capsys.readouterr().out
    runtime = runtime_of(tiny_run("nowhere", sequence_parallel=True))
    assert not model_build(runtime).sequence_parallel
    assert note in capsys.readouterr().out
    two = dataclasses.replace(runtime, context=second_of_two())
    assert model_build(two).sequence_parallel
    assert note not in capsys.readouterr().out


@pytest.mark.parametrize("wanted", [False, True])
def test_a_flag_puts_the_matrices_of_all_blocks_on_a_ring(wanted: bool) -> None:
    config = tiny_run("nowhere", sequence_parallel=True, tp_comm_overlap=wanted)
    build = model_build(dataclasses.replace(runtime_of(config), context=second_of_two()))
    matrices = [
        module._on_ring
        for layer in gpt_layers(config.model, build)
        for module in layer.build().modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    assert matrices == [wanted] * 4 * config.model.num_layers


def test_a_flag_chooses_whether_a_loss_makes_its_own_logits() -> None:
    assert model_build(runtime_of(tiny_run("nowhere"))).fuse_loss
    unfused = tiny_run("nowhere", cross_entropy_loss_fusion=False)
    assert not model_build(runtime_of(unfused)).fuse_loss


def test_a_flag_is_the_weight_of_the_z_loss() -> None:
    assert model_build(runtime_of(tiny_run("nowhere"))).loss_state.z_loss_coeff == 0
    weighted = tiny_run("nowhere", z_loss_coeff=0.25)
    assert model_build(runtime_of(weighted)).loss_state.z_loss_coeff == 0.25


def test_the_loss_knows_the_soft_cap_of_logits() -> None:
    capped = model_build(runtime_of(tiny_run("nowhere", logit_soft_cap=30.0)))
    assert (capped.loss_state.soft_cap, capped.loss_state.z_loss_coeff) == (30.0, 0)


def test_a_flag_chooses_the_kernel_of_attention() -> None:
    assert model_build(runtime_of(tiny_run("nowhere"))).attention_backend is AttentionBackend.AUTO
    flash = model_build(runtime_of(tiny_run("nowhere", attention_backend="flash")))
    assert flash.attention_backend is AttentionBackend.FLASH


def test_flags_choose_the_operations_of_pytorch() -> None:
    build = model_build(runtime_of(tiny_run("nowhere")))
    assert build.fuse_rope
    assert build.fuse_gated_units
    assert build.fuse_dropout
    build = model_build(runtime_of(tiny_run("nowhere", rope_fusion=False)))
    assert not build.fuse_rope
    assert build.fuse_gated_units
    assert not model_build(
        runtime_of(tiny_run("nowhere", bias_swiglu_fusion=False))
    ).fuse_gated_units
    unfused = tiny_run("nowhere", bias_dropout_fusion=False)
    assert not model_build(runtime_of(unfused)).fuse_dropout


def test_a_format_chooses_fp8() -> None:
    assert model_build(runtime_of(tiny_run("nowhere"))).fp8 is None
    config = tiny_run("nowhere", fp8_format="e4m3", fp8_recipe="mxfp8")
    assert model_build(runtime_of(config)).fp8 == config.fp8


def test_rows_of_the_table_are_padded_for_the_tensor_parallel_ranks() -> None:
    runtime = runtime_of(tiny_run("nowhere"))
    tokens = runtime.tokenizer.vocab_size
    flags = dataclasses.replace(runtime.config.tokenizer, make_vocab_size_divisible_by=100)
    config = dataclasses.replace(runtime.config, tokenizer=flags)
    assert vocabulary(config, runtime.tokenizer) == VocabSize(tokens, -(-tokens // 100) * 100)
