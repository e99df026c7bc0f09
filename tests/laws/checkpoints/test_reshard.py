"""The reshard law: save at one layout, load at another: the same bits, and the next losses.

A slice in which every value of a source is beside every value of a target, over both engines: the
pairs that hold most of that in `make test`, the others in `make test-all`;
`python -m tests.laws.checkpoints.reshard` runs every pair. The second loss after the load depends
on the optimizer's state, so that has to be right too.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import load_checkpoint
from megatron.config.run import RunConfig
from megatron.engine.base import Engine
from megatron.progress import Progress
from tests.laws.checkpoints import reshard
from tests.laws.checkpoints.reshard import (
    ALL,
    SAVED_AT,
    SLICE,
    Layout,
    Loaded,
    Pair,
    Verdict,
    combinations_in,
    config_of,
    cover,
    every_pair,
    fault_in,
    saving,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    Record,
    assert_all_close,
    assert_close,
    whole,
    write_tiny_corpus,
)

__all__ = ["ALL", "SAVED_AT", "check_continued"]  # for the laws of other formats

FIRST = 20  # pairs in `make test`: `cover` begins with those that hold most
ALONE = Layout(1, 1, 1, "native")
TENSORS = Layout(2, 1, 1, "native")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(
    "taken",
    [
        pytest.param(cover()[:FIRST], id="most"),
        pytest.param(cover()[FIRST:], marks=pytest.mark.wide, id="the others"),
    ],
)
def test_a_checkpoint_goes_on_at_any_layout(
    tmp_path: Path, corpus: str, taken: Sequence[Pair], precision: str
) -> None:
    pairs = [pair for pair in taken if pair.precision == precision]
    found = list(reshard.verdicts(pairs, corpus, tmp_path))
    assert {verdict.pair for verdict in found} == set(pairs)
    broken = [str(verdict) for verdict in found if verdict.fault]
    assert not broken, "\n".join([f"{len(broken)} of {len(pairs)} pairs", *broken])


def test_the_slice_holds_every_value_beside_every_value() -> None:
    pairs = cover()
    assert len(pairs) >= SLICE >= 40
    assert len(set(pairs)) == len(pairs)
    assert {c for pair in pairs for c in combinations_in(pair)} == {
        c for p in every_pair() for c in combinations_in(p)
    }
    sizes = {1, 2, 4}
    for axis in ("tp", "pp", "dp"):
        for other in ("tp", "pp", "dp"):
            seen = {(getattr(p.source, axis), getattr(p.target, other)) for p in pairs}
            assert seen == {(one, two) for one in sizes for two in sizes}
    engines = {(pair.source.is_deepspeed, pair.target.is_deepspeed) for pair in pairs}
    assert len(engines) == 4
    large = [pair for pair in pairs if 8 in (pair.source.world_size, pair.target.world_size)]
    assert 2 <= len(large) <= 4
    assert {pair.model for pair in pairs} == set(reshard.RUNS)
    assert cover.__wrapped__() == pairs, "the same ones every time"
    first = pairs[:FIRST]
    for size in sizes:
        for side in ("source", "target"):
            layouts = [getattr(pair, side) for pair in first]
            assert all(
                size in {getattr(one, axis) for one in layouts} for axis in ("tp", "pp", "dp")
            )
    assert len({(pair.source.is_deepspeed, pair.target.is_deepspeed) for pair in first}) == 4
    assert {pair.model for pair in first} == set(reshard.RUNS)


def without_a_fault(engine: Engine) -> None:
    pass


def halves_of_the_gated_unit_swapped(engine: Engine) -> None:
    _weights(engine, "mlp.fc1.weight").copy_(_weights(engine, "mlp.fc1.weight").roll(12, 0))


def one_bit_of_a_moment(engine: Engine) -> None:
    (moment,) = (
        tensor.parts[0].view
        for tensor in engine.state(optimizer=True).tensors
        if tensor.name == "optimizer/exp_avg_sq/final_norm.weight"
    )
    moment.view(torch.int64)[:1] ^= 1


def steps_forgotten(engine: Engine) -> None:
    """What is no tensor shows in the numbers alone: AdamW corrects its averages by the steps."""
    plain = dict(engine.state(optimizer=True).scalars)
    numbers = {**plain["optimizer"], "steps": 0}
    engine.restored({**plain, "optimizer": numbers}, optimizer=True)


def _weights(engine: Engine, end: str) -> torch.Tensor:
    tensors = engine.state(optimizer=False).tensors
    return next(tensor.parts[0].view for tensor in tensors if tensor.name.endswith(end))


FAULTS: dict[Callable[[Engine], None], str] = {
    halves_of_the_gated_unit_swapped: "mlp.fc1.weight has other bits after the load",
    one_bit_of_a_moment: "optimizer/exp_avg_sq/final_norm.weight has other bits after the load",
    steps_forgotten: "step 1: .* apart",
    without_a_fault: "",
}


def load_with_faults(run: tuple[str, RunConfig]) -> list[Loaded]:
    """A body for `run_on_ranks`: the same load again and again, each time with another fault."""
    found = []
    for fault in FAULTS:

        def load(config: RunConfig, engine: Engine, *rest: object) -> Progress:
            progress = load_checkpoint(config, engine, *rest)  # type: ignore[arg-type]
            with torch.no_grad():
                fault(engine)  # noqa: B023  # called before the next one
            return progress

        reshard.REAL_LOAD = load
        found += reshard.train_from([run])
    return found


def test_what_is_loaded_wrongly_is_seen(tmp_path: Path, corpus: str) -> None:
    pair = Pair("gated, grouped, untied, rotary", TENSORS, ALONE, "fp64")
    model, source, precision = saving(pair)
    configs = [
        config_of(corpus, model, precision, source, exit_interval=SAVED_AT, save=str(tmp_path)),
        config_of(corpus, model, precision, ALONE, load=str(tmp_path)),
        config_of(corpus, model, precision),
    ]
    saved = run_on_ranks(2, reshard.train_from, [("saves", configs[0])])
    ((straight,),) = run_on_ranks(1, reshard.train_from, [("straight", configs[2])])
    (loads,) = run_on_ranks(1, load_with_faults, ("loads", configs[1]))
    ranks = [of_rank[0] for of_rank in saved]
    faults = [fault_in(pair, ranks, [loaded], straight.record) for loaded in loads]
    for found, expected in zip(faults, FAULTS.values()):
        assert bool(found) == bool(expected), (found, expected)
        assert re.search(expected, found), (found, expected)


def test_a_verdict_names_its_pair() -> None:
    pair = Pair("tied, learned", TENSORS, ALONE, "fp64")
    words = "tp2 pp1 dp1 native -> tp1 pp1 dp1 native (tied, learned, fp64)"
    assert str(Verdict(pair, "", 1.0)) == f"held: {words}"
    assert str(Verdict(pair, "w has other bits", 1.0)) == f"BROKEN: {words}\n    w has other bits"


def check_continued(found: Sequence[Record], straight: Record) -> None:
    """A run that went on from `SAVED_AT` and one that was never interrupted have done the same."""
    assert found[0].progress == straight.progress
    assert_close(found[0].losses, straight.losses[SAVED_AT:], FP64)
    assert_close(found[0].grad_norms, straight.grad_norms[SAVED_AT:], FP64)
    # Weights and optimizer; moments are far smaller than the weights, and compared to their size.
    assert_all_close(whole(found), whole([straight]), FP64)
