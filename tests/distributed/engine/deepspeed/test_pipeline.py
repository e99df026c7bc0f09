"""DeepSpeed's pipeline trains what one native process trains, step by step, on every grid."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.engine.base import StepPlan, StepReport
from megatron.errors import NumericsError
from tests.distributed.engine.pipelines import (
    ADAMW,
    ALONE,
    BUCKETS,
    DEADLINE_S,
    RECOMPUTE,
    SGD,
    SHAPE,
    Grid,
    check_equal,
    engine_of,
    native,
    piped,
    run_alone,
    run_piped,
    same_bits,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP32,
    MODELS,
    TOKENS_PER_SAMPLE,
    assert_all_close,
    assert_close,
    train_all,
    whole,
    write_tiny_corpus,
)
from tests.support.tiny_bert import tiny_bert_run, train_bert_all, write_tiny_sentences
from tests.unit.engine.engines import tiny_batches


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def test_two_stages_train_every_kind_of_model(corpus: str) -> None:
    cases = [
        (0, [MODELS["gpt2"], ADAMW]),
        (1, [MODELS["gpt2"], ADAMW, RECOMPUTE]),
        (0, [MODELS["bloom"], SGD, RECOMPUTE]),
        (1, [MODELS["llama"], SGD]),
        (1, [MODELS["ragged"], ADAMW]),
    ]
    alone = run_alone([native(corpus, ALONE, *flags) for _, flags in cases])
    assert max(alone[0].grad_norms) > 0.5, "clipping is meant to be active"
    assert len(set(alone[0].losses)) == 3, "the weights are meant to move"
    runs = run_piped(2, [piped(corpus, (1, 2, 1), stage, *flags) for stage, flags in cases])
    for records, one in zip(runs, alone):
        check_equal(records, one)


def test_four_ranks_train_alike_on_every_grid(corpus: str) -> None:
    # The tables of words are a group of their own, which stages in the middle have not.
    tied, untied = [MODELS["gpt2"], ADAMW, {"decoupled_lr": 0.02}], [MODELS["llama"], SGD]
    alone_tied, alone_untied = run_alone(
        [native(corpus, ALONE, *tied), native(corpus, ALONE, *untied)]
    )
    split = {"sequence_parallel": True}
    cases = [
        (alone_tied, piped(corpus, (1, 2, 2), 0, *tied)),
        (alone_tied, piped(corpus, (1, 2, 2), 1, *tied)),
        (alone_untied, piped(corpus, (2, 2, 1), 0, *untied)),
        (alone_tied, piped(corpus, (2, 2, 1), 1, *tied, split)),
        (alone_tied, piped(corpus, (2, 2, 1), 0, *tied, split)),
        (alone_tied, piped(corpus, (1, 4, 1), 1, *tied)),
        (alone_untied, piped(corpus, (1, 4, 1), 0, *untied)),
    ]
    runs = run_piped(4, [config for _, config in cases])
    for records, (alone, _) in zip(runs, cases):
        check_equal(records, alone)


def test_bert_trains_with_both_of_its_losses(tmp_path: Path) -> None:
    corpus = write_tiny_sentences(tmp_path / "sentences")
    shape: dict[str, Any] = {**SHAPE, **ADAMW, "num_layers": 4, "micro_batch_size": 2}
    deepspeed: dict[str, Any] = {**shape, **BUCKETS, "deepspeed": True}
    two, four = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
    heads_apart = {"pp_partition_method": "uniform"}  # what they score travels in several tensors
    configs = [
        tiny_bert_run(corpus, **deepspeed, **two, zero_stage="1"),
        tiny_bert_run(corpus, **deepspeed, **four, **heads_apart, zero_stage="0"),
    ]
    ((alone,),) = run_on_ranks(
        1, train_bert_all, [tiny_bert_run(corpus, **shape)], timeout_s=DEADLINE_S
    )
    assert all(len(step.means) == 2 for step in alone.steps)
    by_rank = run_on_ranks(4, train_bert_all, configs, timeout_s=DEADLINE_S, deepspeed=True)
    for at in range(len(configs)):
        records = [records[at] for records in by_rank]
        check_equal(records, alone)
        for step, expected in zip(records[0].steps, alone.steps):
            assert_close(step.means, expected.means, FP32)


def test_half_precision_stays_in_its_band(corpus: str) -> None:
    half = {"bf16": True, "optimizer": "sgd", "lr": 0.05}
    (alone,) = run_alone([native(corpus, ALONE, half)])
    runs = run_piped(4, [piped(corpus, (1, 2, 2), stage, half) for stage in (0, 1)])
    for records in runs:
        check_equal(records, alone, BF16)
        assert "optimizer/master/embedding.word.weight" in whole(records)


def test_the_optimizers_state_may_lie_on_the_host(corpus: str) -> None:
    host = {"cpu_optimizer": True, "cpu_torch_adam": True}
    half = {"bf16": True, **SGD}
    alone = run_alone([native(corpus, ALONE, ADAMW), native(corpus, ALONE, half)])
    whole_fp32, whole_bf16 = run_piped(
        4, [piped(corpus, (1, 2, 2), 1, host, flags) for flags in (ADAMW, half)]
    )
    check_equal(whole_fp32, alone[0])
    check_equal(whole_bf16, alone[1], BF16)


def test_fp16_scales_its_loss_without_zero(corpus: str) -> None:
    scale = {"fp16": True, "initial_loss_scale": 2.0**21, "hysteresis": 1, "loss_scale_window": 2}
    half = {**SGD, **scale, "train_iters": 6}
    (alone,) = run_alone([native(corpus, ALONE, half)])
    ((one, _),) = run_piped(2, [piped(corpus, (1, 2, 1), 0, half)])
    assert {step.overflow for step in alone.steps} == {True, False}
    assert [step.loss_scale for step in one.steps] == [step.loss_scale for step in alone.steps]
    assert_close(one.losses, alone.losses, BF16)
    assert one.scalars == alone.scalars


def test_dropout_is_that_of_the_native_pipeline_and_recomputed_alike(corpus: str) -> None:
    drop = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    grid = (1, 2, 1)
    plain, again = run_piped(
        2, [piped(corpus, grid, 1, drop, ADAMW), piped(corpus, grid, 1, drop, ADAMW, RECOMPUTE)]
    )
    ours = run_on_ranks(2, train_all, [native(corpus, grid, drop, ADAMW)], timeout_s=DEADLINE_S)
    for one, other, (own,) in zip(plain, again, ours):
        assert same_bits(one, other)
        assert_close(one.losses, own.losses, FP32)
        assert_close(one.grad_norms, own.grad_norms, FP32)


def test_the_number_of_micro_batches_and_their_length_may_grow(corpus: str) -> None:
    ramp = {"rampup_batch_size": (4, 4, 8), "train_iters": None, "train_samples": 36}
    curriculum = {
        "curriculum_schedule": "fixed_discrete",
        "curriculum_seqlens": (6, 12, 16),
        "curriculum_seqlens_until": (1, 2),
        "eval_interval": 1,  # at full length in between
    }
    cases: list[dict[str, Any]] = [ramp, curriculum]
    ramped, longer = run_alone([native(corpus, ALONE, each) for each in cases])
    assert len({plan.num_microbatches for plan in ramped.plans}) == 3
    assert [plan.seq_length for plan in longer.plans] == [6, 12, 16]
    for stage in (0, 1):
        runs = run_piped(2, [piped(corpus, (1, 2, 1), stage, each) for each in cases])
        check_equal(runs[0], ramped)
        check_equal(runs[1], longer)


# ZeRO needs replicas; without it two stages are enough.
RUNS: dict[str, tuple[int, Grid, dict[str, Any]]] = {
    "fp32": (0, (1, 2, 1), {}),
    "fp32, zero": (1, (1, 2, 2), {}),
    "bf16": (0, (1, 2, 1), {"bf16": True}),
    "bf16, zero": (1, (1, 2, 2), {"bf16": True}),
    "sgd, zero": (1, (1, 2, 2), SGD),
}


def test_a_resumed_run_is_the_uninterrupted_run(corpus: str, tmp_path: Path) -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    half = {"exit_interval": 1, "save_interval": 1}
    for grid in sorted({grid for _, grid, _ in RUNS.values()}):
        flags = {
            name: (stage, dropout, {"train_iters": 2}, flags)
            for name, (stage, of_run, flags) in RUNS.items()
            if of_run == grid
        }
        configs = []
        for name, each in flags.items():
            configs.append(piped(corpus, grid, *each))
            configs.append(piped(corpus, grid, *each, half, {"save": str(tmp_path / name)}))
        before = run_piped(2 * grid[-1], configs)
        loading = [
            piped(corpus, grid, *each, {"load": str(tmp_path / name)})
            for name, each in flags.items()
        ]
        after = run_piped(2 * grid[-1], loading)
        for name, straight, first, second in zip(flags, before[::2], before[1::2], after):
            for whole_run, one, other in zip(straight, first, second):
                joined = dataclasses.replace(other, steps=[*one.steps, *other.steps])
                assert same_bits(joined, whole_run), name
                assert other.scalars == whole_run.scalars


def test_a_checkpoint_goes_from_engine_to_engine_and_grid_to_grid(
    corpus: str, tmp_path: Path
) -> None:
    flags = {**ADAMW, "train_iters": 6}
    (straight,) = run_alone([native(corpus, ALONE, flags)])

    def leg(at: int) -> dict[str, Any]:
        places = {"save": str(tmp_path / str(at)), "exit_interval": 2}
        return {**places, **({"load": str(tmp_path / str(at - 1))} if at else {})}

    first = run_on_ranks(
        2, train_all, [native(corpus, (2, 1, 1), flags, leg(0))], timeout_s=DEADLINE_S
    )
    (second,) = run_piped(4, [piped(corpus, (1, 2, 2), 1, flags, leg(1))])
    (third,) = run_alone([native(corpus, ALONE, flags, leg(2))])
    records = [first[0][0], second[0], third]
    assert_close([loss for each in records for loss in each.losses], straight.losses, FP32)
    norms = [norm for each in records for norm in each.grad_norms]
    assert_close(norms, straight.grad_norms, FP32)
    assert_all_close(whole([third]), whole([straight]), FP32)
    assert third.scalars == straight.scalars


def broken_then_mended(corpus: str, stage: int) -> list[StepReport | str]:
    engine = engine_of(piped(corpus, (1, 2, 1), stage))
    plan = StepPlan(
        2, 8, learning_rate=0.01, weight_decay=0.1, seq_length=TOKENS_PER_SAMPLE, first_sample=0
    )
    messages: list[StepReport | str] = []
    name = "embedding.word.weight"
    weight = engine.stage.get_parameter(name)
    with torch.no_grad():
        kept = weight[0, 0].clone()
        if dist.get_rank() == 1:
            weight[0, 0] = math.inf
    before = {n: p.detach().clone() for n, p in engine.named}
    try:
        engine.check_replicas()
    except NumericsError as error:
        messages.append(f"{error.problem}: {error.found}")
    messages.append(engine.train_step(iter(tiny_batches(2, size=4)), plan))
    assert all(torch.equal(p, before[n]) for n, p in engine.named)
    with torch.no_grad():
        weight[0, 0] = kept
    messages.append(engine.train_step(iter(tiny_batches(2, size=4)), plan))
    engine.check_replicas()
    return messages


@pytest.mark.parametrize("stage", [0, 1])
def test_a_broken_weight_is_named_and_skips_the_step_on_every_rank(corpus: str, stage: int) -> None:
    by_rank = run_on_ranks(
        2, broken_then_mended, corpus, stage, timeout_s=DEADLINE_S, deepspeed=True
    )
    for named, skipped, done in by_rank:
        assert "different values of weights that they share: embedding.word.weight" in str(named)
        assert isinstance(skipped, StepReport)
        assert isinstance(done, StepReport)
        assert skipped.skipped
        assert not math.isfinite(skipped.grad_norm)
        assert not done.skipped
        assert math.isfinite(done.grad_norm)
    assert by_rank[0][2] == by_rank[1][2]
