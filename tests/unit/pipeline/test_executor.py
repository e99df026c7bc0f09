"""Every schedule computes what a plain loop does, in stages that are threads of this process."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.errors import MegatronError
from megatron.mpu.context import Group
from megatron.pipeline.executor import Executor, StageWork
from megatron.pipeline.theory import peak_activations
from megatron.timers import Timers
from tests.support.stages import Chunks, ThreadExchanger, executor, microbatches, on_stages

SCALE = 0.25
# Sums over stages and micro-batches are taken in the same order everywhere but in the loss, which
# is a float64 sum of a few terms.
FP64 = 1e-12
CASES = [
    ("none", 1, 1),
    ("gpipe", 2, 1),
    ("gpipe", 3, 1),
    ("1f1b", 2, 1),
    ("1f1b", 4, 1),
    ("interleaved", 2, 2),
    ("interleaved", 3, 2),
    ("interleaved", 2, 3),
    ("zero-bubble", 2, 1),
    ("zero-bubble", 4, 1),
]


class Done(NamedTuple):
    """What the stages did: by virtual stage, and the losses of the last."""

    gradients: list[list[Tensor]]
    sums: list[Tensor]
    stages: list[Chunks]
    exchangers: list[ThreadExchanger]


def trained(
    schedule: str,
    stages: int,
    chunks: int,
    lengths: Sequence[int],
    *,
    steps: int = 1,
    overlaps: bool = False,
) -> Done:
    def body(group: Group, exchanger: ThreadExchanger) -> tuple[Chunks, list[Tensor], object]:
        held = Chunks(group.rank, stages, chunks)
        worker = executor(held, group, exchanger, schedule, overlaps=overlaps)
        sums: list[Tensor] = []
        for _ in range(steps):
            sums += worker.train(microbatches(lengths), len(lengths), scale=SCALE)
        return held, sums, exchanger

    found = on_stages(stages, body)
    by_place = {
        place: [p.grad for p in held.layers[at].parameters()]  # type: ignore[union-attr]
        for held, _, _ in found
        for at, place in enumerate(held.places)
    }
    assert all(not sums for _, sums, _ in found[:-1]), "only the last stage has losses"
    gradients = [by_place[place] for place in sorted(by_place)]
    return Done(gradients, found[-1][1], [f[0] for f in found], [f[2] for f in found])  # type: ignore[arg-type, misc]


def plain_loop(depth: int, lengths: Sequence[int], *, steps: int = 1) -> Done:
    """The same model on one stage, micro-batch by micro-batch, without an executor."""
    model = Chunks(0, 1, 1, depth)
    sums = []
    for _ in range(steps):
        for inputs, labels in microbatches(lengths):
            total, count = model.loss(model.run(0, inputs), labels)
            torch.autograd.backward(total * SCALE)
            sums.append(torch.stack([total.detach(), count]))
    (layers,) = model.layers
    gradients = [[p.grad for p in layer.parameters()] for layer in layers]  # type: ignore[attr-defined]
    return Done(gradients, sums, [model], [])


def assert_same(found: Done, expected: Done, *, bitwise: bool) -> None:
    pairs = list(zip(found.sums, expected.sums, strict=True))
    for actual, reference in zip(found.gradients, expected.gradients, strict=True):
        pairs += list(zip(actual, reference, strict=True))
    for one, other in pairs:
        if bitwise:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=FP64, atol=FP64)


@pytest.mark.parametrize(("schedule", "stages", "chunks"), CASES)
@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("overlaps", [False, True])
def test_every_schedule_computes_what_a_plain_loop_does(
    schedule: str, stages: int, chunks: int, count: int, overlaps: bool
) -> None:
    if schedule == "interleaved" and count < stages:
        count = stages
    lengths = [4] * count
    found = trained(schedule, stages, chunks, lengths, overlaps=overlaps)
    # Gradients of a chunk are added up in the order of micro-batches by all of them.
    assert_same(found, plain_loop(stages * chunks, lengths), bitwise=True)


@pytest.mark.parametrize(("schedule", "stages", "chunks"), CASES)
@pytest.mark.parametrize("overlaps", [False, True])
def test_no_more_is_alive_than_theory_says_and_nothing_in_the_end(
    schedule: str, stages: int, chunks: int, overlaps: bool
) -> None:
    found = trained(schedule, stages, chunks, [4] * 6, overlaps=overlaps)
    expected = peak_activations(schedule, num_stages=stages, num_microbatches=6, num_chunks=chunks)
    for stage, (held, peak) in enumerate(zip(found.stages, expected)):
        if schedule == "zero-bubble":
            # Graphs end with the gradient of the input; what waits for the gradient of the weights
            # is the inputs of linear layers alone.
            peak = min(stages - stage, 6)
        assert held.peak == peak, stage
        assert not held.alive
    for held in () if overlaps else found.stages[:-1]:  # else one may be on its way
        assert not held.kept_outputs, "an output is kept after it was sent"
    assert not any(ref() is not None for each in found.exchangers for ref in each.sent)


@pytest.mark.parametrize(("schedule", "stages", "chunks"), CASES)
@pytest.mark.parametrize("overlaps", [False, True])
def test_sequence_lengths_may_differ_between_micro_batches_and_steps(
    schedule: str, stages: int, chunks: int, overlaps: bool
) -> None:
    lengths = [4, 7, 4, 2, 7]
    found = trained(schedule, stages, chunks, lengths, steps=2, overlaps=overlaps)
    assert_same(found, plain_loop(stages * chunks, lengths, steps=2), bitwise=True)


def test_a_message_travels_while_others_are_computed() -> None:
    """The first stage of 1F1B computes its second output before it waits for its first message."""

    def body(overlaps: bool, group: Group, exchanger: ThreadExchanger) -> list[int]:
        held = Chunks(group.rank, 2, 1)
        run, seen = held.run, []

        def counted(chunk: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(exchanger.under_way)
            return run(chunk, inputs)

        held.run = counted  # type: ignore[method-assign]
        worker = executor(held, group, exchanger, "1f1b", overlaps=overlaps)
        worker.train(microbatches([4] * 3), 3, scale=SCALE)
        return seen

    for overlaps, expected in ((False, [0, 0, 0]), (True, [0, 1, 0])):
        first, last = on_stages(2, partial(body, overlaps))
        assert first == expected
        assert last == [0, 0, 0]


def test_what_a_message_looks_like_is_said_once_for_each_length() -> None:
    found = trained("1f1b", 2, 1, [4, 7, 4, 2, 7], steps=3)
    sent = [m for m in found.exchangers[0].messages if m.sends]
    assert len(sent) == 3 * 5 + 3


def test_a_lone_stage_exchanges_nothing() -> None:
    found = trained("none", 1, 1, [4, 5])
    assert found.exchangers[0].messages == []


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_evaluation_has_the_losses_and_keeps_nothing(stages: int, chunks: int) -> None:
    lengths = [3, 5, 3]

    def body(group: Group, exchanger: ThreadExchanger) -> tuple[list[Tensor], list[str]]:
        held = Chunks(group.rank, stages, chunks)
        timers = Timers()
        name = "interleaved" if chunks > 1 else "1f1b"
        work = StageWork(held.run, held.loss, chunks)
        worker = Executor(work, group, schedule=name, exchanger=exchanger, timers=timers)
        sums = worker.evaluate(microbatches(lengths), len(lengths))
        assert not held.alive
        assert all(parameter.grad is None for parameter in held.layers.parameters())
        return sums, list(timers.elapsed())

    *_, (sums, timed) = on_stages(stages, body)
    expected = plain_loop(stages * chunks, lengths).sums
    for one, other in zip(sums, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=FP64, atol=FP64)
    assert timed == [], "timers are about training"


def test_it_reads_as_many_micro_batches_as_it_is_told_on_every_stage() -> None:
    def body(group: Group, exchanger: ThreadExchanger) -> tuple[int, int]:
        worker = executor(Chunks(group.rank, 2, 1), group, exchanger, "1f1b")
        batches = microbatches([4] * 9)
        worker.train(batches, 4, scale=SCALE)
        worker.evaluate(batches, 3)
        return len(list(batches)), group.rank

    assert on_stages(2, body) == [(2, 0), (2, 1)]


def test_an_output_that_looks_different_from_the_last_is_an_error_that_names_both() -> None:
    class Fickle(Chunks):
        def run(self, chunk: int, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, ids = super().run(chunk, carry)
            self.seen = getattr(self, "seen", 0) + 1
            return (hidden.float() if self.seen == 2 else hidden), ids

    def body(group: Group, exchanger: ThreadExchanger) -> None:
        held = Fickle(0, 2, 1) if group.is_first else Chunks(1, 2, 1)
        executor(held, group, exchanger, "1f1b").train(microbatches([4] * 3), 3, scale=SCALE)

    with pytest.raises(MegatronError, match="hands over something else") as caught:
        on_stages(2, body)
    assert "float32[4, 2, 6] with gradient, int64[2, 4] from stage 0" in str(caught.value)
    assert "micro-batch 1; expected float64[4, 2, 6] with gradient" in str(caught.value)


def test_a_stage_with_nothing_to_train_is_passed_by() -> None:
    def body(group: Group, exchanger: ThreadExchanger) -> list[object]:
        held = Chunks(group.rank, 2, 1)
        if group.is_first:
            held.layers.requires_grad_(False)
        frozen = StageWork(
            (lambda chunk, carry: tuple(t.detach() for t in held.run(chunk, carry)))
            if group.is_first
            else held.run,
            held.loss,
        )
        worker = Executor(frozen, group, schedule="1f1b", exchanger=exchanger)
        worker.train(microbatches([4, 4]), 2, scale=SCALE)
        return [parameter.grad for parameter in held.layers.parameters()]

    first, second = on_stages(2, body)
    assert first == [None, None]
    assert all(gradient is not None for gradient in second)


def test_a_timer_runs_for_every_part_of_a_step() -> None:
    def body(group: Group, exchanger: ThreadExchanger) -> set[str]:
        held, timers = Chunks(group.rank, 2, 1), Timers()
        work = StageWork(held.run, held.loss)
        worker = Executor(work, group, schedule="1f1b", exchanger=exchanger, timers=timers)
        worker.train(microbatches([4, 4]), 2, scale=SCALE)
        return set(timers.elapsed())

    parts = {"batch-generator", "forward-compute", "backward-compute", "pipeline-exchange"}
    assert on_stages(2, body) == [parts, parts]
