"""The laws with the optimizer's work shared out over replicas: layout, engine, resume and reshard.

Buckets are small, so that there are several, most parameters lie in the shares of two ranks, and
overlap has something to overlap.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.config.run import RunConfig
from tests.laws.checkpoints.test_resume import check_joined
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

SHARDED: dict[str, Any] = {
    "ddp_bucket_size": 500,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
PLAIN: dict[str, Any] = {"ddp_bucket_size": 500}
FULLY_SHARDED: dict[str, Any] = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
IN_PARTS: dict[str, Any] = {**FULLY_SHARDED, "num_distributed_optimizer_instances": 2}
ADAM: dict[str, Any] = {"weight_decay": 0.1, "decoupled_lr": 0.02}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}
SAVED_AT, ALL = 2, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {},
    "dp 3": {},
    "dp 4": {},
    "dp 2, tp 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp 2, pp 2": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "pipeline_schedule": "interleaved",
    },
}


RUNS: list[dict[str, Any]] = [
    {**MODELS["gpt2"], **ADAM},
    {**MODELS["llama"], **SGD},
    {**MODELS["llama"], **ADAM, "log_num_zeros_in_grad": True},
]
BATCHES = {2: 8, 3: 12, 4: 8}  # of dp replicas


@pytest.fixture(scope="module")
def alone(corpus: str) -> dict[int, list[Record]]:
    """What one process trains, by the size of the batch."""
    sizes = sorted(set(BATCHES.values()))
    configs = [
        tiny_run(corpus, **run, num_layers=4, global_batch_size=size)
        for size in sizes
        for run in RUNS
    ]
    (records,) = run_on_ranks(1, train_all, configs)
    return {size: records[at * len(RUNS) :][: len(RUNS)] for at, size in enumerate(sizes)}


# The matrix has shared-out work on the other grids; three replicas divide nothing evenly.
TAKEN = [
    pytest.param(layout, marks=[] if layout in ("dp 2", "dp 3") else [pytest.mark.wide])
    for layout in LAYOUTS
]


@pytest.mark.parametrize("layout", TAKEN)
def test_shared_out_work_is_the_work_of_one_process(
    corpus: str, alone: dict[int, list[Record]], layout: str
) -> None:
    dp = int(layout.split(",")[0].removeprefix("dp "))
    common = {"num_layers": 4, "global_batch_size": BATCHES[dp], "micro_batch_size": 2}
    common |= {**SHARDED, **LAYOUTS[layout]}
    world_size = dp if len(LAYOUTS[layout]) == 0 else 2 * dp
    by_rank = run_on_ranks(
        world_size, train_all, [tiny_run(corpus, **run, **common) for run in RUNS]
    )
    for at, reference in enumerate(alone[BATCHES[dp]]):
        records = [of_rank[at] for of_rank in by_rank]
        assert max(reference.grad_norms) > 0.5, "clipping is meant to be active"
        for record in records:
            assert record.steps == records[0].steps
        if "tensor_model_parallel_size" not in common:  # padding rows are zeros too
            assert [step.num_zeros for step in records[0].steps] == [
                step.num_zeros for step in reference.steps
            ]
        assert_close(records[0].losses, reference.losses, FP64)
        assert_close(records[0].grad_norms, reference.grad_norms, FP64)
        assert_all_close(whole(records), whole([reference]), FP64)


STRATEGIES = ("optim", "optim_grads", "optim_grads_params")


@pytest.mark.parametrize("model", ["gpt2", "mixtral"])
def test_parts_of_the_replicas_share_out_by_themselves(corpus: str, model: str) -> None:
    """With experts that other ranks hold, whose replicas are parted too."""
    shape = {**MODELS[model], "global_batch_size": 8, "micro_batch_size": 1, **ADAM}
    apart = {"num_distributed_optimizer_instances": 2, "log_params_norm": True}
    if model == "mixtral":
        apart["expert_model_parallel_size"] = 2
    (alone,) = run_on_ranks(1, train_all, [tiny_run(corpus, **shape)])[0]
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 500}
    runs = [
        tiny_run(corpus, **shape, **apart, **way, data_parallel_sharding_strategy=strategy)
        for strategy in STRATEGIES
        for way in ({}, overlapped)
    ]
    for records in zip(*run_on_ranks(4, train_all, runs)):
        assert_close(records[0].losses, alone.losses, FP64)
        assert_close(records[0].grad_norms, alone.grad_norms, FP64)
        assert_all_close(whole(records), whole([alone]), FP64)
        # Two ranks have a half each, and so have the two others.
        kept = [state_elements(record) for record in records]
        assert sum(kept) == 2 * state_elements(alone)


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {},
    "fp32": {"fp64": False},
    "bf16": {"bf16": True},
    "bf16, gradients too": {"bf16": True, "accumulate_allreduce_grads_in_fp32": False},
    # It overflows at first, and all ranks have to find that together.
    "fp16": {
        "fp16": True,
        "initial_loss_scale": 2.0**21,
        "hysteresis": 1,
        "train_iters": 5,
        **SGD,
    },
}


@pytest.mark.parametrize(
    "dp", [pytest.param(2, marks=pytest.mark.wide), 3, pytest.param(4, marks=pytest.mark.wide)]
)
def test_no_bit_differs_from_work_that_every_replica_does(corpus: str, dp: int) -> None:
    """Without clipping: the norm is summed in another order, and its last bits differ."""
    batch = {"global_batch_size": 2 * dp, "clip_grad": 0.0, **MODELS["llama"]}
    ways = [PLAIN, {**PLAIN, "overlap_grad_reduce": True}, SHARDED]
    configs = [
        tiny_run(corpus, **batch, **precision, **way)
        for precision in PRECISIONS.values()
        for way in ways
    ]
    by_rank = run_on_ranks(dp, train_all, configs, timeout_s=120)
    for at, name in enumerate(PRECISIONS):
        found = [[of_rank[len(ways) * at + way] for of_rank in by_rank] for way in range(len(ways))]
        expected = whole(found[0])
        skipped = [step.skipped for step in found[0][0].steps]
        assert any(skipped) == (name == "fp16")
        assert not all(skipped)
        for records in found[1:]:
            assert records[0].losses == found[0][0].losses, name
            assert [step.skipped for step in records[0].steps] == skipped, name
            assert records[0].scalars == found[0][0].scalars, name
            tensors = whole(records)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[key], expected[key]) for key in expected), name


def test_gradients_and_parameters_that_are_shared_out_change_no_bit(corpus: str) -> None:
    """Of one micro-batch and two replicas: sums of others are taken in another order."""
    batch = {"global_batch_size": 4, "micro_batch_size": 2, "clip_grad": 0.0, **MODELS["llama"]}
    ways = [PLAIN, {"data_parallel_sharding_strategy": "optim_grads"}, FULLY_SHARDED]
    ways.append({**FULLY_SHARDED, "reshard_after_forward": False})
    configs = [
        tiny_run(corpus, **batch, **precision, **way)
        for precision in PRECISIONS.values()
        for way in ways
    ]
    by_rank = run_on_ranks(2, train_all, configs, timeout_s=120)
    for at, name in enumerate(PRECISIONS):
        found = [[of_rank[len(ways) * at + way] for of_rank in by_rank] for way in range(len(ways))]
        expected = whole(found[0])
        for records in found[1:]:
            assert records[0].losses == found[0][0].losses, name
            assert records[0].scalars == found[0][0].scalars, name
            tensors = whole(records)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[key], expected[key]) for key in expected), name


def test_narrow_state_stays_within_its_band(corpus: str) -> None:
    narrow = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "adam_beta2": 0.95}
    runs = [{"bf16": True, "adam_beta2": 0.95}, {"bf16": True, **SHARDED, **narrow}]
    by_rank = run_on_ranks(2, train_all, [tiny_run(corpus, **run) for run in runs])
    wide, short = ([of_rank[at] for of_rank in by_rank] for at in range(2))
    assert_close(short[0].losses, wide[0].losses, BF16)
    state = whole(short, prefix="optimizer/")
    kinds = {name.split("/")[1]: tensor.dtype for name, tensor in state.items()}
    assert kinds == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "master": torch.float32,
    }


def test_each_replica_keeps_its_part_of_the_state(corpus: str) -> None:
    configs = [tiny_run(corpus, bf16=True, **way) for way in (PLAIN, SHARDED)]
    by_rank = run_on_ranks(4, train_all, configs)
    for records in by_rank:
        everything, part = (state_elements(record) for record in records)
        # 64 elements at either end of a share may be padding, in each of a dozen buckets
        assert part == pytest.approx(everything / 4, abs=3 * 12 * 128)
    assert sum(state_elements(records[1]) for records in by_rank) == state_elements(by_rank[0][0])


def state_elements(record: Record) -> int:
    """Elements of optimizer state, padding rows aside, that a rank holds."""
    return sum(
        values.numel()
        for name, part in record.state.items()
        if name.startswith("optimizer/")
        for _, values in part.pieces
    )


RESUMED: dict[str, dict[str, Any]] = {
    "fp32": {"fp64": False, "hidden_dropout": 0.1},
    "bf16": {**MODELS["llama"], "bf16": True},
    "bf16, narrow": {
        "bf16": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
        "adam_beta2": 0.95,
    },
    "fp16": {"fp16": True, "initial_loss_scale": 2.0**21, "hysteresis": 1, **SGD},
}


@pytest.mark.parametrize(
    ("tp", "dp", "sharding", "names"),
    [
        pytest.param(1, 2, SHARDED, [*RESUMED], id="dp 2"),
        pytest.param(2, 2, SHARDED, ["bf16", "fp16"], marks=pytest.mark.wide, id="tp 2, dp 2"),
        pytest.param(1, 2, FULLY_SHARDED, ["fp32", "bf16, narrow"], id="dp 2, fully sharded"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_run(
    corpus: str, tmp_path: Path, tp: int, dp: int, sharding: dict[str, Any], names: list[str]
) -> None:
    common = {**sharding, "tensor_model_parallel_size": tp, "train_iters": 5, "micro_batch_size": 2}
    common |= {"eval_iters": 1, "eval_interval": 2}
    runs = {name: RESUMED[name] for name in names}
    plain, saving, loading = [], [], []
    for name, flags in runs.items():
        both = {**flags, **common}
        plain.append(tiny_run(corpus, **both))
        saving.append(tiny_run(corpus, **both, exit_interval=3, save=str(tmp_path / name)))
        loading.append(tiny_run(corpus, **both, load=str(tmp_path / name)))
    before = run_on_ranks(tp * dp, train_all, [*plain, *saving], timeout_s=120)
    after = run_on_ranks(tp * dp, train_all, loading, timeout_s=120)
    for of_rank, resumed in zip(before, after, strict=True):
        straight, first = of_rank[: len(plain)], of_rank[len(plain) :]
        for name, *records in zip(runs, straight, first, resumed, strict=True):
            check_joined(*records, where=name, steps=(3, 5))


class Layout(NamedTuple):
    """A grid of ranks, and what replicas share out."""

    tp: int
    pp: int
    dp: int
    sharding: dict[str, Any]

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> dict[str, Any]:
        sizes = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
        }
        return {**sizes, **self.sharding}


ON, OFF, FULL, PARTS = SHARDED, PLAIN, FULLY_SHARDED, IN_PARTS
# What saves, and what goes on from that.
RESHARDS = [
    ((1, 1, 2, ON), [(1, 1, 1, OFF), (1, 1, 4, PARTS), (2, 1, 1, ON), (1, 2, 2, ON)]),
    ((2, 1, 2, FULL), [(1, 1, 1, OFF), (1, 2, 2, FULL), (1, 1, 3, ON)]),
    pytest.param((1, 1, 2, OFF), [(1, 1, 3, ON), (2, 1, 2, ON)], marks=pytest.mark.wide),
    pytest.param((2, 1, 2, ON), [(1, 1, 1, ON), (1, 2, 1, OFF)], marks=pytest.mark.wide),
    pytest.param((1, 2, 2, ON), [(1, 1, 3, ON), (2, 1, 1, OFF)], marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("saved_at", "loaded_at"), RESHARDS)
def test_a_checkpoint_goes_on_at_any_layout(
    corpus: str,
    tmp_path: Path,
    saved_at: tuple[int, int, int, dict[str, Any]],
    loaded_at: list[tuple[int, int, int, dict[str, Any]]],
) -> None:
    """Values of the state at once after the load, and where two more steps lead."""
    models = [{**MODELS["llama"], **ADAM}, {**MODELS["gpt2"], "optimizer": "sgd"}]

    def config(layout: Layout, at: int, **flags: Any) -> RunConfig:
        values = {"train_iters": ALL, "global_batch_size": 12, **models[at], **layout.flags}
        values["micro_batch_size"] = {1: 3, 2: 3, 3: 2, 4: 1}[layout.dp]
        return tiny_run(corpus, **{**values, **flags})

    alone, saver = Layout(1, 1, 1, OFF), Layout(*saved_at)
    straight = run_on_ranks(1, train_all, [config(alone, at) for at in range(2)])[0]
    folders = [str(tmp_path / str(at)) for at in range(2)]
    saving = [
        config(saver, at, save=folder, exit_interval=SAVED_AT) for at, folder in enumerate(folders)
    ]
    saved = run_on_ranks(saver.world_size, train_all, saving)
    for loader in map(Layout._make, loaded_at):
        configs = [
            config(loader, at, load=folder, **more)
            for at, folder in enumerate(folders)
            for more in ({}, {"train_iters": SAVED_AT})
        ]
        by_rank = run_on_ranks(loader.world_size, train_all, configs)
        for at in range(2):
            records, loaded = ([of_rank[2 * at + one] for of_rank in by_rank] for one in range(2))
            expected = whole([of_rank[at] for of_rank in saved])
            found = whole(loaded)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found), loader
            assert_close(records[0].losses, straight[at].losses[SAVED_AT:], FP64)
            assert_close(records[0].grad_norms, straight[at].grad_norms[SAVED_AT:], FP64)
            assert_all_close(whole(records), whole([straight[at]]), FP64)
