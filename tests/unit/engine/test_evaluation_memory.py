"""What does not fit is refused before it is tried, and what fits is not."""

from typing import Any

import pytest
import torch

from megatron import device
from megatron.config.model import PositionEmbedding
from megatron.engine.evaluation_memory import (
    EvaluationMemory,
    halve_until_it_fits,
)
from megatron.engine.scoring import Scorer, ScoringRow
from megatron.errors import MachineError
from megatron.model.accounting import RankShare, memory_bytes, parameter_count
from megatron.model.specs import VocabSize
from tests.support.live_bytes import PeakBytes
from tests.support.models import roughen, tiny_build
from tests.support.tiny import tiny_run

# Of what is alive at once, against a formula that leaves out masks, targets and temporaries.
LEAST, MOST = 0.5, 2.0


def memory_of(**flags: Any) -> EvaluationMemory:
    config = tiny_run("nowhere", **flags)
    return EvaluationMemory(config, tiny_build(precision=config.precision))


def with_free(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(device, "free_memory_bytes", lambda: free)


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize("kind", [PositionEmbedding.LEARNED, PositionEmbedding.ROPE])
def test_the_estimate_is_what_scoring_takes(kind: PositionEmbedding, vocabulary: int) -> None:
    config = tiny_run(
        "nowhere", hidden_size=64, seq_length=64, position_embedding_type=kind.value, fp64=False
    )
    build = tiny_build(
        precision=config.precision, seq_length=64, vocab=VocabSize(vocabulary, vocabulary)
    )
    scorer = Scorer(config, build, micro_batch_size=4)
    roughen(scorer.stage, build.ctx)
    rows = [ScoringRow(tuple(at % 50 for at in range(65)), 1)] * 4
    with PeakBytes(apart_from=scorer.stage.parameters()) as live:
        scorer.score(rows)
    estimated = EvaluationMemory(config, build).bytes_of(4, 64)
    assert LEAST < estimated / live.peak < MOST, (estimated, live.peak)


def test_bytes_are_those_of_the_parts() -> None:
    memory = memory_of()
    one = memory.bytes_of(1, 8)
    assert memory.bytes_of(6, 8) == 6 * one == 2 * memory.bytes_of(3, 8)
    # Logits and their softmax in float64, beside two of the stream; blocks are narrower.
    wide = EvaluationMemory(
        memory.config, tiny_build(vocab=VocabSize(4000, 4096), precision=memory.config.precision)
    )
    assert wide.bytes_of(1, 8) == 8 * (2 * 16 * 8 + 4096 * (8 + 8))


def test_rows_that_do_not_fit_are_refused_with_a_number_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = memory_of()
    with_free(monkeypatch, memory.bytes_of(3, 8) + 1)
    assert memory.agreed_rows(3, 8) == 3
    with pytest.raises(MachineError, match="rows that are read together do not fit") as caught:
        memory.agreed_rows(8, 8)
    assert "--micro-batch-size 8, the longest row of 8 tokens" in str(caught.value.found)
    assert caught.value.fix == "use --micro-batch-size 3"
    with_free(monkeypatch, memory.bytes_of(1, 8) - 1)
    with pytest.raises(MachineError, match="do not fit into memory") as caught:
        memory.agreed_rows(1, 8)
    assert "spread the model over more ranks" in caught.value.fix


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of()
    model, build = memory.config.model, memory.build
    need = 8 * parameter_count(model, build.vocab.padded, build.seq_length)
    share = RankShare(micro_batch_size=1, seq_length=build.seq_length)
    assert memory_bytes(model, build.vocab, memory.config.precision, share).weights == need
    with_free(monkeypatch, need)
    memory.check_weights()
    with_free(monkeypatch, need - 1)
    with pytest.raises(MachineError, match="the weights of the model do not fit"):
        memory.check_weights()


def test_where_nobody_tells_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, None)
    memory = memory_of()
    memory.check_weights()
    assert memory.agreed_rows(8, 8) == 8


def test_memory_that_is_not_given_when_asked_for_halves_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, real = memory_of(), torch.empty
    with_free(monkeypatch, None)

    def short(size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(size, int) and size > memory.bytes_of(2, 8):
            raise torch.OutOfMemoryError("no more")
        return real(size, *args, **kwargs)

    monkeypatch.setattr(torch, "empty", short)
    assert memory.agreed_rows(8, 8) == 2
    output = capsys.readouterr().err
    assert "--micro-batch-size 8 and rows of up to 8 tokens: all ranks go on with 4" in output
    assert "all ranks go on with 2" in output
    with pytest.raises(MachineError, match="memory ran out while rows were scored") as caught:
        memory.agreed_rows(1, 80)
    assert "shorter --seq-length" in caught.value.fix


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of()
    with_free(monkeypatch, None)

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("another")

    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(RuntimeError, match="another"):
        memory.agreed_rows(1, 8)


def test_one_row_cannot_be_halved() -> None:
    assert halve_until_it_fits(5, 8, [1]) == 2
    with pytest.raises(MachineError, match="memory ran out"):
        halve_until_it_fits(1, 8, [])
