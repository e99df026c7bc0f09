"""Generation with a cache equals computing all again, and beams are those of transformers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron.config.model import PositionEmbedding
from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.errors import ConfigError, NumericsError
from megatron.inference.encoder_decoder.beam_search import BeamParams, EarlyStopping
from megatron.inference.encoder_decoder.generate import (
    generate_answers,
    search_answers,
    without_end,
)
from megatron.inference.generate import Generation
from megatron.inference.sampling_params import SamplingParams
from megatron.model.t5_model import T5Model
from megatron.mpu.context import ParallelContext
from tests.support.models import TINY_VOCAB
from tests.support.t5.models import T5_1_0, T5_1_1, in_transformers, tiny_t5

CTX = ParallelContext.single()
INPUTS = [[7, 3, 9, 1], [4], [11, 12, 13, 14, 15, 16], [2, 2]]
START, END = 0, 1
MARKS = DecoderMarks(START, END, 0)
ENDLESS = DecoderMarks(START, TINY_VOCAB.true - 1, 0)
GREEDY = SamplingParams(greedy=True)
NEW = 7
MODELS: Mapping[str, Mapping[str, Any]] = {
    "1.0": T5_1_0,
    "1.1": T5_1_1,
    "megatron": {},
    "rope, groups, a window": {
        "position_embedding_type": PositionEmbedding.ROPE,
        "num_query_groups": 2,
        "sliding_window": 3,
    },
    "alibi, soft cap": {
        "position_embedding_type": PositionEmbedding.ALIBI,
        "attention_soft_cap": 2.0,
    },
}


def varied(**flags: Any) -> T5Model:
    """A model whose choices depend on what stands before them, and little on its biases."""
    values = {"untie_embeddings_and_output_weights": True, "init_method_std": 1.5} | flags
    model = tiny_t5(**values).eval()
    with torch.no_grad():
        for name in ("decoder.final_norm.bias", "output_bias.bias"):
            if name in dict(model.named_parameters()):
                model.get_parameter(name).zero_()
    return model


def run(model: T5Model, inputs: Any = INPUTS, marks: DecoderMarks = MARKS, **changes: Any) -> Any:
    values = {"max_new_tokens": NEW, "params": GREEDY, "seed": 1, "ctx": CTX} | changes
    return generate_answers(model, inputs, marks, **values)


def answered_slowly(model: T5Model, tokens: list[int], end: int) -> list[int]:
    answer: list[int] = []
    for _ in range(NEW):
        given = torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.int64)
        logits = model(*given, torch.tensor([[START, *answer]]))
        answer.append(int(logits[-1, 0, : TINY_VOCAB.true].argmax()))
        if answer[-1] == end:
            return answer[:-1]
    return answer


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_the_cache_changes_no_token(flags: Mapping[str, Any]) -> None:
    model = varied(**flags)
    expected = [answered_slowly(model, tokens, END) for tokens in INPUTS]
    assert [list(found.tokens) for found in run(model)] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


@pytest.mark.parametrize(
    ("flags", "beams", "penalty", "stopping"),
    [
        (T5_1_0, 1, 1.0, EarlyStopping.HEURISTIC),
        (T5_1_1, 3, 1.0, EarlyStopping.ALL_ENDED),
        (T5_1_0, 4, 2.0, EarlyStopping.HEURISTIC),
        (T5_1_1, 4, -0.5, EarlyStopping.HEURISTIC),
        (T5_1_0, 2, 1.5, EarlyStopping.NEVER),
        (T5_1_1, 4, 0.0, EarlyStopping.NEVER),
    ],
)
def test_beams_are_those_of_transformers(
    flags: Mapping[str, Any], beams: int, penalty: float, stopping: EarlyStopping
) -> None:
    model = varied(**({"untie_embeddings_and_output_weights": False} | dict(flags)))
    end = run(model, marks=ENDLESS)[0].tokens[2]
    longest = max(map(len, INPUTS))
    padded = torch.tensor([[*each, *[0] * (longest - len(each))] for each in INPUTS])
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in INPUTS])
    theirs = {EarlyStopping.ALL_ENDED: True, EarlyStopping.HEURISTIC: False}
    rows = in_transformers(model).generate(
        input_ids=padded,
        attention_mask=mask,
        max_new_tokens=NEW,
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=penalty,
        early_stopping=theirs.get(stopping, "never"),
        do_sample=False,
        use_cache=False,  # it has room for as many layers as the encoder has
        decoder_start_token_id=START,
        eos_token_id=end,
        pad_token_id=0,
    )
    expected = [_answer(row.tolist(), end) for row in rows]
    marks = DecoderMarks(START, end, 0)
    params = BeamParams(beams=beams, length_penalty=penalty, early_stopping=stopping)
    found = search_answers(model, INPUTS, marks, max_new_tokens=NEW, params=params, ctx=CTX)
    assert [tuple(each.tokens) for row in found for each in row] == expected
    assert any(end in answer for answer in expected)


def _answer(row: list[int], end: int) -> tuple[int, ...]:
    """Return the tokens behind the start, up to the end and with it."""
    tokens = row[1:]
    return tuple(tokens[: tokens.index(end) + 1] if end in tokens else tokens)


def test_a_row_gets_the_same_answer_alone_and_in_company() -> None:
    model = varied(**T5_1_1)
    assert [run(model, [each])[0] for each in INPUTS] == run(model)


def test_a_row_ends_at_the_end_token_or_where_stop_says_and_the_others_go_on() -> None:
    model = varied(**T5_1_1)
    whole = run(model, marks=ENDLESS)
    end = whole[0].tokens[2]
    ended = run(model, marks=DecoderMarks(START, end, 0))
    stopped = run(model, marks=ENDLESS, stop=lambda tokens: tokens[-1] == end)
    for before, by_end, by_stop in zip(whole, ended, stopped, strict=True):
        if end not in before.tokens:
            assert by_end == by_stop == before
            assert before.finish_reason == "length"
            continue
        at = before.tokens.index(end)
        assert by_end == Generation(before.tokens[:at], "eod")
        assert by_stop == Generation(before.tokens[: at + 1], "stop")
    assert ended[0].finish_reason == "eod"
    assert {each.finish_reason for each in ended} == {"eod", "length"}


def test_draws_repeat_with_the_seed_and_rows_differ() -> None:
    model = varied(**T5_1_1)
    hot = SamplingParams(temperature=3.0, top_p=0.95)
    first = run(model, [[7, 3]] * 3, params=hot)
    assert first == run(model, [[7, 3]] * 3, params=hot)
    assert first != run(model, [[7, 3]] * 3, params=hot, seed=2)
    assert len({each.tokens for each in first}) == 3


def test_a_penalty_of_what_was_written_changes_what_is_written() -> None:
    model = varied(**T5_1_1)
    params = SamplingParams(greedy=True, repetition_penalty=1e6)
    for before, after in zip(run(model, marks=ENDLESS), run(model, marks=ENDLESS, params=params)):
        assert len(set(after.tokens)) == NEW
        assert before.tokens[0] == after.tokens[0]  # tokens of the input are not penalised
    assert any(len(set(each.tokens)) < NEW for each in run(model, marks=ENDLESS))


def test_padding_tokens_of_the_vocabulary_are_never_chosen() -> None:
    model = varied(**T5_1_1)
    with torch.no_grad():
        model.get_parameter("output.weight")[TINY_VOCAB.true :] = 1e3
    beams = BeamParams(beams=3)
    found = search_answers(model, INPUTS, MARKS, max_new_tokens=NEW, params=beams, ctx=CTX)
    tokens = [each.tokens for row in found for each in row]
    tokens += [each.tokens for each in run(model, params=SamplingParams(temperature=5.0))]
    assert max(map(max, tokens)) < TINY_VOCAB.true


def test_the_model_gets_its_mode_back() -> None:
    model = varied(**T5_1_1).train()
    run(model)
    assert model.training


@pytest.mark.parametrize(
    ("inputs", "changes", "message"),
    [
        ([], {}, "there is nothing to continue"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[TINY_VOCAB.true]], {}, "a token that is not in the vocabulary"),
        ([[1]], {"max_new_tokens": 0}, "--num-tokens 0"),
        ([[1] * 13], {}, "an input of 13 tokens, --num-tokens 7, 12 positions"),
        ([[1]], {"max_new_tokens": 13}, "an input of 1 tokens, --num-tokens 13, 12 positions"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_computed(
    inputs: list[list[int]], changes: dict[str, Any], message: str
) -> None:
    model = varied()  # with a table of 12 positions
    with pytest.raises(ConfigError, match=message):
        run(model, inputs, **changes)


def test_scores_that_are_not_finite_are_an_error() -> None:
    model = varied(**T5_1_1)
    with torch.no_grad():
        model.get_parameter("decoder.final_norm.weight")[0] = torch.nan
    for call in (run, searched):
        with pytest.raises(NumericsError, match="scores of the next token are not finite"):
            call(model)


def searched(model: T5Model) -> Any:
    beams = BeamParams(beams=2)
    return search_answers(model, INPUTS, MARKS, max_new_tokens=NEW, params=beams, ctx=CTX)


def test_an_answer_is_shown_without_the_token_that_ends_it() -> None:
    assert without_end((5, 6, END), END) == (5, 6)
    assert without_end((5, 6), END) == (5, 6)
    assert without_end((), END) == ()
