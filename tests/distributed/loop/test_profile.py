"""A trace of ranks that train together: names of all that they do, and numbers as without it."""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.loop.breakdown import EXPOSED, OPTIMIZER, OTHER, Breakdown, breakdown
from megatron.loop.overlap import GroupOverlap, Interval, common, overlaps, read_trace, union
from megatron.mpu import collectives
from megatron.spans import WAIT
from tests.distributed.mpu.reference import build
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Record, tiny_run, train, write_tiny_corpus

SECOND_FORWARD = "forward, micro-batch 1, stage 0 of 2"
RANKS, MICROBATCHES, MATRIX, PRODUCTS = 4, 4, 64, 20
LAYOUT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "global_batch_size": MICROBATCHES,
}


class Profiled(NamedTuple):
    """A training with a profile, where messages overlap, and the same without; its trace."""

    traced: Record
    plain: Record
    names: Counter[str]  # how often each is there
    times: dict[str, list[Interval]]
    where: Breakdown


def profiled(corpus: str, folder: str) -> tuple[Record, Record]:
    profile = {
        "profile": True,
        "profile_step_start": 1,
        "profile_step_end": 3,
        "profile_ranks": [1],
        "profile_dir": folder,
        "overlap_p2p_communication": True,
    }
    return train(tiny_run(corpus, **LAYOUT, **profile)), train(tiny_run(corpus, **LAYOUT))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("profile")
    corpus = write_tiny_corpus(folder / "corpus")
    _, second, *_ = run_on_ranks(RANKS, profiled, corpus, str(folder / "traces"))
    (trace,) = (folder / "traces").glob("*")
    assert trace.name == "rank1-step2-3.pt.trace.json.gz"
    times: dict[str, list[Interval]] = defaultdict(list)
    for event in read_trace(trace):
        if event.get("ph") == "X":
            times[event["name"]].append(_interval(event))
    names = Counter({name: len(each) for name, each in times.items()})
    return Profiled(*second, names, times, breakdown(read_trace(trace)))


def test_a_profile_and_messages_that_overlap_change_no_number(result: Profiled) -> None:
    traced, plain = result.traced, result.plain
    assert [step.loss for step in traced.steps] == [step.loss for step in plain.steps]
    for name, part in plain.state.items():
        for (_, one), (_, other) in zip(part.pieces, traced.state[name].pieces):
            assert torch.equal(one, other)


def test_steps_micro_batches_and_communication_have_names(result: Profiled) -> None:
    names = result.names
    assert (names["step 1"], names["step 2"], names["step 3"]) == (0, 1, 1)
    for number in range(MICROBATCHES):
        for kind in ("forward", "backward"):
            assert names[f"{kind}, micro-batch {number}, stage 0 of 2"] == 2
    for name in ("optimizer", "pipeline-exchange", WAIT, "forward-compute", "batch-generator"):
        assert names[name] > 0
    groups = {found[1] for name in names if (found := re.match(r"(\w+) \w+, \d+ bytes$", name))}
    assert groups == {"tp", "pp", "tp_cp", "world"}
    hidden = 16 * 16 * 8  # [s, b, h] in float64
    layers_and_embedding, backward = 2 + 1, 2  # a layer is here, and reduces twice both ways
    assert names[f"tp all_reduce, {hidden} bytes"] == 2 * MICROBATCHES * (
        layers_and_embedding + backward
    )
    assert names[f"pp messages, {hidden} bytes"] > 0


def test_the_time_of_real_steps_has_classes(result: Profiled) -> None:
    where = result.where
    assert where.steps == 2
    for kind in (OPTIMIZER, "matrix products", "attention", "norms", OTHER, EXPOSED):
        assert 0 < where.seconds[kind] < where.whole, kind


def test_an_output_travels_while_the_next_one_is_computed(result: Profiled) -> None:
    times = result.times
    messages = [each for name in times if name.startswith("pp messages") for each in times[name]]
    assert len(times[SECOND_FORWARD]) == 2  # in each of two steps
    for forward in times[SECOND_FORWARD]:
        assert any(common([forward], [message]) == [forward] for message in messages)


def communication_lasts_until_it_is_done(folder: str) -> dict[str, tuple[GroupOverlap, bool]]:
    """Rank 0 computes while rank 1 has not come to its calls yet."""
    context = build(tp=2)
    tensor, matrix = torch.ones(8), torch.ones(MATRIX, MATRIX)
    starts: dict[str, Any] = {
        "all_reduce": lambda: collectives.start_all_reduce(tensor.clone(), context.tp),
        "all_gather": lambda: collectives.start_all_gather(tensor, context.tp),
        "reduce_scatter": lambda: collectives.start_reduce_scatter(tensor, context.tp),
        "shift": lambda: collectives.start_shift(tensor, context.tp),
    }
    found = {}
    for name, start in starts.items():
        path = Path(folder) / f"{name}-{context.rank}.json.gz"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            if context.rank:
                collectives.barrier(context.world)
            pending = start()
            if not context.rank:
                for _ in range(PRODUCTS):
                    matrix.mm(matrix)
                collectives.barrier(context.world)
            pending.wait()
        seen.export_chrome_trace(str(path))
        events = read_trace(path)
        (group,) = (group for group in overlaps(events) if group.group == "tp")
        (call,) = (event for event in events if event["name"] == f"tp {name}, 32 bytes")
        products = [event for event in events if event["name"] == "aten::mm"]
        inside = [
            common(*(union([_interval(one)]) for one in (call, product))) for product in products
        ]
        found[name] = group, all(inside)
    return found


def _interval(event: Any) -> Interval:
    return Interval(event["ts"], event["ts"] + event["dur"])


def test_what_is_computed_before_a_result_is_there_overlaps(tmp_path: Path) -> None:
    first, _ = run_on_ranks(2, communication_lasts_until_it_is_done, str(tmp_path))
    for group, inside in first.values():
        assert inside
        assert (group.calls, group.bytes) == (1, 32)
        assert 0 < group.overlapped < group.seconds
