"""The state of rows that are decoded: what is refused, and rows that go on from others."""

import pytest
import torch

from megatron.errors import ConfigError, MachineError
from megatron.inference.encoder_decoder import decoder_state
from megatron.inference.encoder_decoder.decoder_state import DecoderState
from megatron.mpu.context import ParallelContext
from tests.support.models import second_of_two, tiny_build
from tests.support.t5.models import T5_1_1, tiny_t5

CTX = ParallelContext.single()
# float64: cached or not, sums differ by the order of their parts.
SAME = {"rtol": 1e-10, "atol": 1e-10}


def test_rows_that_go_on_from_others_score_what_those_would() -> None:
    model = tiny_t5(**T5_1_1).eval()
    inputs = [[7, 3, 9], [4]]
    # Rows 0 and 2 are of the first input, 1 and 3 of the second.
    state = DecoderState(model, CTX, inputs, pad=0, copies=2, length=3)
    state.step([0, 0, 0, 0])
    state.step([5, 6, 7, 8])
    state.reorder([2, 1, 2, 1])
    scores = state.step([9, 9, 9, 10])
    written = {0: [0, 7, 9], 1: [0, 6, 9], 2: [0, 7, 9], 3: [0, 6, 10]}
    for row, tokens in written.items():
        given = torch.tensor([inputs[row % 2]])
        with torch.no_grad():
            logits = model(given, torch.ones_like(given), torch.tensor([tokens]))
        torch.testing.assert_close(scores[row], logits[-1, 0, :50], **SAME)


def test_sequences_that_are_split_over_ranks_are_refused() -> None:
    model = tiny_t5(tiny_build(second_of_two(), sequence_parallel=True), **T5_1_1)
    with pytest.raises(ConfigError, match="cannot generate token by token"):
        DecoderState(model, CTX, [[1]], pad=0, length=1)


def test_keys_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_state, "free_memory_bytes", lambda: 1000)
    with pytest.raises(MachineError, match="of 2 rows of 5 tokens behind 3 do not fit"):
        DecoderState(tiny_t5(**T5_1_1), CTX, [[1, 2, 3], [4]], pad=0, length=5)
