"""The engine law: DeepSpeed trains what the native engine trains, step by step, number by number.

Whole runs by `pretrain()`, with accumulation, clipping and masked tokens, at every ZeRO stage, in
fp32 and bf16, under SGD and AdamW, on 1, 2 and 4 ranks. Losses, gradient norms, evaluations, every
weight and the optimizer's state at the end are compared with the native engine at the same layout;
that layouts agree with each other is the layout law.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.engine.deepspeed import engine
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP32,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

# Ends of documents do not count, so micro-batches and replicas count different numbers of tokens.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {**MODELS["ragged"], "optimizer": "sgd", "lr": 0.05, "sgd_momentum": 0.9},
    "adamw": {
        **MODELS["llama"],
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "eod_mask_loss": True,
        # Far above rounding: AdamW divides by the size of a gradient, and one that is nothing but
        # rounding would otherwise become a step of full length, by another sign in each engine.
        "adam_eps": 1e-4,
        "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.5,
        "decoupled_lr": 0.02,
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {"fp64": False}, "bf16": {"bf16": True}}
COMMON: dict[str, Any] = {"train_iters": 3, "eval_iters": 1, "eval_interval": 2}
TOLERANCES = {"fp32": FP32, "bf16": BF16}
# Two engines round in bf16 at different places, so that each is off from the run in fp32 by an
# error of its own; but they start from the same rounded weights, so their distance is less than
# that error. Seen are 0.02 to 0.95 of it; a learning rate that is off by a fifth moves momentum by
# 2.3 of it.
ROUNDINGS = 1.25

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
IN_STAGES = (0, 1)  # above, ZeRO and pipelines exclude each other


class Layout(NamedTuple):
    """A grid of ranks with its flags, and the stages of ZeRO that it can have."""

    world_size: int
    flags: dict[str, Any]
    stages: tuple[int, ...] = (0, 1, 2, 3)


LAYOUTS: dict[str, Layout] = {
    "1 rank": Layout(1, {"micro_batch_size": 4}),
    "dp 2": Layout(2, {"micro_batch_size": 2}),
    "dp 4": Layout(4, {}),
    "tp 2": Layout(2, {**TP, "micro_batch_size": 4, "sequence_parallel": True}),
    "tp 2, dp 2": Layout(4, {**TP, "micro_batch_size": 2}),
    "pp 2": Layout(2, {**PP, "micro_batch_size": 2}, IN_STAGES),
    "pp 2, dp 2": Layout(4, PP, IN_STAGES),
    "pp 2, tp 2": Layout(4, {**PP, **TP, "micro_batch_size": 2}, IN_STAGES),
}
TAKEN = ("1 rank", "dp 2", "tp 2", "pp 2, tp 2")  # of the layouts, in `make test`


class Case(NamedTuple):
    """One kind of run; without a stage it is native."""

    optimizer: str
    precision: str
    stage: int | None = None

    def config(self, corpus: str, layout: Layout) -> RunConfig:
        flags = COMMON | OPTIMIZERS[self.optimizer] | PRECISIONS[self.precision] | layout.flags
        if self.stage is not None:
            flags |= {"deepspeed": True, "zero_stage": str(self.stage)}
        return tiny_run(corpus, **flags)


def cases_of(layout: str, turn: int) -> list[Case]:
    """Every stage with every optimizer for two replicas, elsewhere with one; precisions in turn.

    Two turns are every stage in every precision.
    """
    optimizers, precisions, number = [*OPTIMIZERS], [*PRECISIONS], [*LAYOUTS].index(layout)
    return [
        Case(optimizer, precisions[(stage // 2 + at + turn) % 2], stage)
        for stage in LAYOUTS[layout].stages
        for at, optimizer in enumerate(optimizers)
        if layout == "dp 2" or at == (stage + number + turn) % 2
    ]


def natives_of(cases: Sequence[Case]) -> list[Case]:
    """What the native engine trains to compare with; rounding is judged beside fp32."""
    wanted = [Case(c.optimizer, precision) for c in cases for precision in ("fp32", c.precision)]
    return list(dict.fromkeys(wanted))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def run_cases(corpus: str, layout: str, cases: Sequence[Case]) -> dict[Case, list[Record]]:
    """The records of every rank of each case, all in the same processes."""
    at = LAYOUTS[layout]
    configs = [case.config(corpus, at) for case in cases]
    by_rank = run_on_ranks(at.world_size, train_all, configs, timeout_s=280, deepspeed=True)
    return {case: [of_rank[n] for of_rank in by_rank] for n, case in enumerate(cases)}


def check_numbers(case: Case, runs: Mapping[Case, list[Record]]) -> None:
    """Return all output of DeepSpeed and of the native engine."""
    found, expected = runs[case], runs[case._replace(stage=None)]
    tolerance = TOLERANCES[case.precision]
    for record in found:  # every rank has the same numbers
        assert record.steps == found[0].steps
        assert record.progress == expected[0].progress
    assert [step.skipped for step in found[0].steps] == [False] * COMMON["train_iters"]
    assert_close(found[0].losses, expected[0].losses, tolerance)
    assert_close(found[0].grad_norms, expected[0].grad_norms, tolerance)
    assert_close(means(found), means(expected), tolerance)
    tokens, counted = (
        [evaluation.tokens for evaluation in records[0].evaluations]
        for records in (found, expected)
    )
    assert tokens == counted
    assert found[0].scalars == expected[0].scalars


def check_state(case: Case, runs: Mapping[Case, list[Record]]) -> None:
    """All that DeepSpeed and the native engine hold: weights, masters, optimizer."""
    found, expected = runs[case], runs[case._replace(stage=None)]
    if case.precision == "fp32":
        assert_all_close(whole(found), whole(expected), FP32)
    else:
        exact = runs[Case(case.optimizer, "fp32")]
        check_rounding(whole(found), whole(expected), whole(exact))


def check_rounding(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> None:
    """What two runs in bf16 hold is no further apart than they are from the run in fp32.

    Each kind of tensor as a whole: a vector of 16 numbers may be rounded well by chance.
    """
    assert found.keys() == expected.keys()
    squares: dict[str, tuple[float, float]] = {}
    for name, tensor in found.items():
        kind = "/".join(name.split("/")[:-1])
        wide = exact[name.replace("optimizer/master/", "model/")].double()
        apart, error = squares.get(kind, (0.0, 0.0))
        squares[kind] = (
            apart + float((tensor.double() - expected[name].double()).square().sum()),
            error + float((expected[name].double() - wide).square().sum()),
        )
    for kind, (apart, error) in squares.items():
        ratio = math.sqrt(apart / error)
        assert ratio <= ROUNDINGS, f"{kind}/: {ratio:.2f} times the rounding apart"


def means(records: Sequence[Record]) -> list[float]:
    return [evaluation.mean for evaluation in records[0].evaluations]


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    "layout",
    # Those of the others split nothing that these do not split.
    [
        pytest.param(name, marks=[] if name in TAKEN else [pytest.mark.wide], id=name)
        for name in LAYOUTS
    ],
)
def test_deepspeed_trains_what_the_native_engine_trains(
    corpus: str, layout: str, turn: int
) -> None:
    cases = cases_of(layout, turn)
    natives = natives_of(cases)
    runs = run_cases(corpus, layout, [*natives, *cases])
    for native in natives:
        assert max(runs[native][0].grad_norms) > 0.5, "clipping is meant to be active"
        assert runs[native][0].plans[0].num_microbatches > 1, "accumulation is meant to be active"
    wrong = []
    for case in cases:
        try:
            check_numbers(case, runs)
            check_state(case, runs)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


def train_with_default_clipping(configs: Sequence[RunConfig]) -> list[Record]:
    """Leave out DeepSpeed's setting of clipping, so that its default applies."""
    whole_json = engine.json_for_deepspeed
    engine.json_for_deepspeed = lambda plan: {
        key: value for key, value in whole_json(plan).items() if key != "gradient_clipping"
    }
    return train_all(configs)


def train_as_if_all_tokens_counted(configs: Sequence[RunConfig]) -> list[Record]:
    """What is masked counts in the mean; clipping would hide a factor of gradients."""
    counts_ahead = engine.counts_ahead
    engine.counts_ahead = lambda *given: counts_ahead(*given).fill_(8 * 16)
    return train_all([unclipped(config) for config in configs])


def unclipped(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip_grad=0))


def train_with_another_rate(configs: Sequence[RunConfig]) -> list[Record]:
    """The learning rate is off by a fifth, which the losses of four steps in bf16 hardly show."""
    return train_all(
        [
            dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, lr=0.06))
            for config in configs
        ]
    )


@pytest.mark.parametrize(
    ("body", "precision"),
    [
        # Precisions in turn.
        pytest.param(body, name, marks=[pytest.mark.wide] if (at + to) % 2 else [])
        for at, body in enumerate(
            [train_with_default_clipping, train_as_if_all_tokens_counted, train_with_another_rate]
        )
        for to, name in enumerate(PRECISIONS)
    ],
)
def test_the_law_would_notice(corpus: str, body: Any, precision: str) -> None:
    """Of two engines that agree, one is made wrong; SGD shows it, AdamW hides factors."""
    layout, case = LAYOUTS["dp 2"], Case("sgd", precision, 1)
    natives = natives_of([case])
    configs = [native.config(corpus, layout) for native in natives]
    if body is train_as_if_all_tokens_counted:
        configs = [unclipped(config) for config in configs]
    records = run_on_ranks(2, train_all, configs)
    runs = {native: [of_rank[n] for of_rank in records] for n, native in enumerate(natives)}
    config = case.config(corpus, layout)
    by_rank = run_on_ranks(2, body, [config], timeout_s=120, deepspeed=True)
    runs[case] = [of_rank[0] for of_rank in by_rank]
    assert not any(step.skipped for step in runs[case][0].steps)
    if body is not train_with_another_rate:
        with pytest.raises(AssertionError, match=r"step \d: .* apart"):
            check_numbers(case, runs)
    with pytest.raises(AssertionError, match=r"/.* apart"):
        check_state(case, runs)
