"""Every rule that crosses config groups: silent on a good plan, and its message on a bad one."""

import dataclasses
from typing import Any

import pytest

from megatron.config.activations import RecomputeModule
from megatron.config.blocks import NormPlacement
from megatron.data.kinds.program_data import BERT_DATA
from megatron.errors import ConfigError
from megatron.preflight import config as rules
from megatron.preflight.run import Check
from tests.unit.preflight.plans import found, only, plan

ALL = [
    rules.ranks_divide_into_model_replicas,
    rules.replicas_share_out_in_equal_parts,
    rules.pipeline_fits_the_model_and_the_batch,
    rules.heads_split_over_tensor_parallel_ranks,
    rules.mlp_splits_over_tensor_parallel_ranks,
    rules.sequence_splits_over_tensor_parallel_ranks,
    rules.vocabulary_pads_to_an_even_size,
    rules.activations_can_be_recomputed_as_asked,
    rules.batch_splits_into_microbatches,
    rules.sequence_fits_the_position_table,
    rules.curriculum_fits_the_samples,
    rules.schedule_fits_the_training,
    rules.intervals_make_sense,
    rules.profile_is_of_steps_and_ranks_of_the_run,
    rules.tokenizer_can_be_built,
    rules.tokenizer_knows_ends_of_documents,
]


@pytest.mark.parametrize("check", ALL)
def test_a_good_plan_passes(check: Check) -> None:
    good = plan(world_size=4, tensor_model_parallel_size=2, reset_attention_mask=True)
    assert found(check, good) == []


def test_ranks_that_do_not_divide_are_refused_rather_than_clamped() -> None:
    bad = plan(world_size=3, tensor_model_parallel_size=2)
    only(
        found(rules.ranks_divide_into_model_replicas, bad),
        "do not divide into whole model replicas",
        "3 ranks, --tensor-model-parallel-size 2",
        "torchrun --nproc-per-node 2",
    )
    # Checks that need the number of replicas leave the word to this one.
    assert found(rules.batch_splits_into_microbatches, bad) == []
    assert found(rules.schedule_fits_the_training, bad) == []


def test_a_pipeline_of_more_stages_than_layers_is_refused() -> None:
    bad = plan(world_size=4, pipeline_model_parallel_size=4)
    only(
        found(rules.pipeline_fits_the_model_and_the_batch, bad),
        "there are fewer layers than pipeline stages to hold them",
        "--num-layers 2, --pipeline-model-parallel-size 4",
    )


def test_interleaving_is_refused_for_the_smallest_batch_of_a_ramp() -> None:
    flags = {
        "num_layers": 8,
        "pipeline_model_parallel_size": 4,
        "num_virtual_stages_per_pipeline_rank": 2,
    }
    check = rules.pipeline_fits_the_model_and_the_batch
    assert found(check, plan(world_size=8, **flags)) == []
    ramp = {"rampup_batch_size": (4, 4, 8), "train_samples": 64}
    only(
        found(check, plan(world_size=8, **flags, **ramp)),
        "the interleaved schedule needs a micro-batch for every stage",
        "2 micro-batches per step, --pipeline-model-parallel-size 4",
    )


def test_layers_are_looked_at_where_the_ranks_do_not_divide() -> None:
    bad = plan(world_size=3, pipeline_model_parallel_size=4)
    only(found(rules.ranks_divide_into_model_replicas, bad), "--pipeline-model-parallel-size 4")
    only(found(rules.pipeline_fits_the_model_and_the_batch, bad), "fewer layers")


@pytest.mark.parametrize(
    ("flags", "size", "flag"),
    [
        ({}, 8, "--num-attention-heads 4"),
        ({}, 3, "--num-attention-heads 4"),
        ({"num_query_groups": 2}, 4, "--num-query-groups 2"),
    ],
)
def test_heads_are_not_cut(flags: dict[str, int], size: int, flag: str) -> None:
    bad = plan(world_size=size, tensor_model_parallel_size=size, **flags)
    only(found(rules.heads_split_over_tensor_parallel_ranks, bad), flag, f"parallel-size {size}")


def test_the_mlp_is_shared_out_evenly() -> None:
    bad = plan(world_size=2, tensor_model_parallel_size=2, ffn_hidden_size=31)
    only(
        found(rules.mlp_splits_over_tensor_parallel_ranks, bad),
        "--ffn-hidden-size 31",
        "use --ffn-hidden-size 30",
    )


def test_each_expert_is_shared_out_evenly() -> None:
    flags = {"num_experts": 4, "add_bias_linear": False, "tensor_model_parallel_size": 2}
    check = rules.mlp_splits_over_tensor_parallel_ranks
    only(
        found(check, plan(world_size=2, moe_ffn_hidden_size=7, **flags)),
        "--moe-ffn-hidden-size 7, --tensor-model-parallel-size 2",
        "use --moe-ffn-hidden-size 6",
    )
    shared = {"moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 5}
    only(
        found(check, plan(world_size=2, **shared, **flags)),
        "--moe-shared-expert-intermediate-size 5, --tensor-model-parallel-size 2",
    )
    # The width of a dense MLP is used where a layer has one.
    some = plan(world_size=2, ffn_hidden_size=7, moe_ffn_hidden_size=8, moe_layer_freq="2", **flags)
    only(found(check, some), "--ffn-hidden-size 7, --tensor-model-parallel-size 2")
    nothing = plan(world_size=2, ffn_hidden_size=7, moe_ffn_hidden_size=8, **flags)
    assert list(check(nothing)) == []


def test_a_split_sequence_is_shared_out_evenly() -> None:
    check = rules.sequence_splits_over_tensor_parallel_ranks
    uneven = {"world_size": 4, "tensor_model_parallel_size": 4, "seq_length": 18}
    only(
        found(check, plan(**uneven, sequence_parallel=True)),
        "--seq-length 18, --tensor-model-parallel-size 4, --sequence-parallel",
        "use --seq-length 16, or leave out --sequence-parallel",
    )
    assert found(check, plan(**uneven)) == []
    assert found(check, plan(**(uneven | {"seq_length": 20}), sequence_parallel=True)) == []


@pytest.mark.parametrize("flag", ["recompute_num_layers", "cpu_offloading_num_layers"])
def test_no_more_layers_are_recomputed_or_offloaded_than_there_are(flag: str) -> None:
    shown = "--" + flag.replace("_", "-")
    full = {"recompute_granularity": "full"}
    bad = plan(num_layers=4, **full, **{flag: 5})
    check = rules.activations_can_be_recomputed_as_asked
    only(found(check, bad), f"{shown} 5, --num-layers 4", f"use {shown} 4")
    assert found(check, plan(num_layers=4, **full, **{flag: 4})) == []


def test_norms_that_do_not_exist_are_not_recomputed() -> None:
    check = rules.activations_can_be_recomputed_as_asked
    norms = {
        "recompute_granularity": "selective",
        "recompute_modules": (RecomputeModule.LAYERNORM,),
    }
    after = {"norm_placement": NormPlacement.AFTER}
    only(
        found(check, plan(**norms, **after)), "layernorm, --norm-placement after", "leave layernorm"
    )
    assert found(check, plan(**norms, norm_placement=NormPlacement.BOTH)) == []


def test_the_activation_of_experts_is_not_recomputed_by_itself() -> None:
    check = rules.activations_can_be_recomputed_as_asked
    act = {"recompute_granularity": "selective", "recompute_modules": (RecomputeModule.ACTIVATION,)}
    experts = {"num_experts": 4, "add_bias_linear": False}
    only(found(check, plan(**act, **experts)), "act, --num-experts 4", "--recompute-modules mlp")
    assert found(check, plan(**act)) == []


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({}, "--tensor-model-parallel-size 1"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "--sequence-parallel"),
        ({"tensor_model_parallel_size": 2}, None),
    ],
)
def test_saved_activations_are_split_where_that_saves_something(
    flags: dict[str, Any], shown: str | None
) -> None:
    common = {"recompute_granularity": "full", "distribute_saved_activations": True}
    errors = found(
        rules.activations_can_be_recomputed_as_asked, plan(world_size=2, **common, **flags)
    )
    if shown is None:
        assert errors == []
    else:
        only(errors, shown, "leave --distribute-saved-activations out")


def test_a_vocabulary_padded_to_less_than_its_tokens_is_refused() -> None:
    errors = found(rules.vocabulary_pads_to_an_even_size, plan(pad_vocab_size_to=48))
    only(errors, "48")
    assert isinstance(errors[0], ConfigError)
    errors = found(rules.vocabulary_pads_to_an_even_size, plan(true_vocab_size=3))
    only(errors, "--true-vocab-size 3")
    unknown = dataclasses.replace(plan(pad_vocab_size_to=48), tokenizer=None)
    assert found(rules.vocabulary_pads_to_an_even_size, unknown) == []


def test_a_batch_that_leaves_a_rest_is_refused() -> None:
    bad = plan(world_size=3)
    only(found(rules.batch_splits_into_microbatches, bad), "--global-batch-size 8", "6 or 9")
    # The schedule cannot be checked then, and adds no error.
    assert found(rules.schedule_fits_the_training, bad) == []


def test_a_table_of_positions_has_a_row_for_every_position() -> None:
    check = rules.sequence_fits_the_position_table
    only(found(check, plan(max_position_embeddings=15)), "--max-position-embeddings 15", "16")
    assert found(check, plan(max_position_embeddings=16)) == []
    rotating = plan(max_position_embeddings=15, position_embedding_type="rope")
    assert found(check, rotating) == []


def test_a_schedule_is_in_the_unit_of_the_training() -> None:
    only(
        found(rules.schedule_fits_the_training, plan(lr_warmup_samples=8)),
        "--lr-warmup-samples 8",
        "--lr-warmup-iters",
    )


def test_a_float64_run_keeps_exact_state() -> None:
    narrow = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "adam_beta2": 0.95}
    check = rules.optimizer_state_is_as_exact_as_the_weights
    only(
        found(check, plan(fp64=True, **narrow)),
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 with --fp64",
        "drop --exp-avg-dtype and --exp-avg-sq-dtype",
    )
    assert found(check, plan(fp64=True)) == []
    assert found(check, plan(fp64=False, bf16=True, **narrow)) == []


@pytest.mark.parametrize(
    "sharding",
    [{"use_distributed_optimizer": True}, {"data_parallel_sharding_strategy": "optim_grads"}],
)
def test_muon_finds_whole_matrices(sharding: dict[str, Any]) -> None:
    check = rules.optimizer_updates_what_a_rank_holds
    only(
        found(check, plan(optimizer="muon", **sharding)),
        "Muon updates whole matrices",
        "leave --use-distributed-optimizer",
    )
    assert found(check, plan(optimizer="muon")) == []
    assert found(check, plan(optimizer="lion", **sharding)) == []


def test_checkpoints_to_keep_need_a_place() -> None:
    only(found(rules.intervals_make_sense, plan(keep_last=2)), "--keep-last 2 without --save")
    assert found(rules.intervals_make_sense, plan(keep_last=2, save="here")) == []


def test_a_profile_is_of_steps_and_ranks_that_there_are() -> None:
    rule = rules.profile_is_of_steps_and_ranks_of_the_run
    flags = {"profile": True, "profile_dir": "here", "train_iters": 12}
    assert found(rule, plan(**flags)) == []
    assert found(rule, plan(train_iters=2)) == []
    assert found(rule, plan(**flags | {"train_iters": None, "train_samples": 8})) == []
    only(
        found(rule, plan(**flags | {"train_iters": 11})),
        "the profile ends after the training",
        "--profile-step-start 9 --profile-step-end 11",
    )
    only(
        found(rule, plan(world_size=2, **flags, profile_ranks=[0, 2])),
        "a rank that is to be profiled is not there",
        "--profile-ranks 0 2; 2 ranks",
        "from 0 to 1",
    )


def test_a_tokenizer_that_cannot_be_built_is_a_finding() -> None:
    error = ConfigError("no such file", found="vocab.json", fix="make it")
    bad = dataclasses.replace(plan(), tokenizer=None, tokenizer_error=error)
    assert found(rules.tokenizer_can_be_built, bad) == [error]


def test_ends_of_documents_need_a_token() -> None:
    run_plan = plan(reset_attention_mask=True, eod_mask_loss=True)
    without = dataclasses.replace(run_plan.tokenizer, eod=None)  # type: ignore[type-var]
    bad = dataclasses.replace(run_plan, tokenizer=without)
    only(
        found(rules.tokenizer_knows_ends_of_documents, bad),
        "no end-of-document token",
        "--reset-attention-mask --eod-mask-loss",
    )
    plain = dataclasses.replace(plan(), tokenizer=without)
    assert found(rules.tokenizer_knows_ends_of_documents, plain) == []


CURRICULUM: dict[str, Any] = {
    "curriculum_schedule": "fixed_linear",
    "curriculum_seqlen_min": 4,
    "curriculum_seqlen_step": 2,
    "curriculum_iters": 4,
}


def test_a_curriculum_that_every_rank_can_take_part_in_passes() -> None:
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    good = plan(world_size=2, **CURRICULUM, **split)
    assert found(rules.curriculum_fits_the_samples, good) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"curriculum_seqlen_max": 32}, ("longer samples than there are", "--seq-length 16")),
        ({"sft": True}, ("cuts the end off samples", "rows of dialogues")),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True},
            ("cannot be shared out evenly", "6 tokens of fixed_linear", "multiples of 4"),
        ),
    ],
)
def test_a_curriculum_that_does_not_fit_is_refused(
    flags: dict[str, Any], words: tuple[str, ...]
) -> None:
    bad = plan(world_size=4, **(CURRICULUM | flags))
    only(found(rules.curriculum_fits_the_samples, bad), *words)


def test_samples_of_bert_are_not_cut() -> None:
    run_plan = dataclasses.replace(plan(**CURRICULUM), reads=BERT_DATA)
    only(found(rules.curriculum_fits_the_samples, run_plan), "two segments with words to guess")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, ["4 replicas, --num-distributed-optimizer-instances 3", "divides 4"]),
        ({"context_parallel_size": 2}, ["4 replicas"]),
        ({"tensor_model_parallel_size": 2}, ["2 replicas", "divides 2"]),
        (
            {"num_experts": 4, "add_bias_linear": False, "expert_model_parallel_size": 2},
            ["4 replicas, 2 of experts", "divides 2"],
        ),
    ],
    ids=str,
)
def test_replicas_that_do_not_divide_into_parts_are_refused(
    flags: dict[str, Any], words: list[str]
) -> None:
    check = rules.replicas_share_out_in_equal_parts
    flags = flags | {"use_distributed_optimizer": True}
    asked = plan(world_size=4, **flags, num_distributed_optimizer_instances=3)
    only(found(check, asked), "equal parts that share optimizer state", *words)
    assert found(check, plan(world_size=4, **flags)) == []
    fits = plan(world_size=8, **flags, num_distributed_optimizer_instances=2)
    assert found(check, fits) == []
