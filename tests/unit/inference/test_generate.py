"""Generation with a cache equals computing everything again for every token."""

from itertools import count
from typing import Any

import pytest
import torch

from megatron.config.model import PositionEmbedding, SoftmaxType
from megatron.errors import ConfigError
from megatron.inference.generate import Generation, generate
from megatron.inference.sampling import SamplingParams
from megatron.model import gpt_model
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from tests.support.models import TINY_VOCAB, tiny_build, tiny_config, tiny_model

CTX = ParallelContext.single()
PROMPTS = [[7, 3, 9, 1], [4], [11, 12, 13, 14, 15, 16], [2, 2]]
GREEDY = SamplingParams(greedy=True)
EVERY_POSITION = list(PositionEmbedding)


def run(model: GPTModel, prompts: Any = PROMPTS, **changes: Any) -> list[Generation]:
    values = {"max_new_tokens": 6, "params": GREEDY, "eod": None, "seed": 1, "ctx": CTX} | changes
    return generate(model, prompts, **values)  # type: ignore[arg-type]


def continued_slowly(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]))[-1, 0, : TINY_VOCAB.true]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("kind", EVERY_POSITION)
def test_the_cache_changes_no_token(kind: PositionEmbedding, groups: int) -> None:
    model = tiny_model(tiny_config(position_embedding_type=kind, num_query_groups=groups))
    expected = [continued_slowly(model, prompt, 6) for prompt in PROMPTS]
    assert [list(g.tokens) for g in run(model)] == expected


NARROW = {"sliding_window": 3, "window_attn_skip_freq": "2"}
SINKS = {"softmax_type": SoftmaxType.LEARNABLE}


@pytest.mark.parametrize("more", [{}, NARROW, NARROW | SINKS], ids=["", "windows", "and sinks"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", EVERY_POSITION)
def test_cached_scores_equal_those_of_the_whole_sequence(
    kind: PositionEmbedding, groups: int, more: dict[str, Any]
) -> None:
    config = tiny_config(position_embedding_type=kind, num_query_groups=groups, **more)
    model = tiny_model(config).eval()
    rows = torch.tensor([[7, 3, 9, 1, 5, 8], [4, 6, 2, 0, 0, 0]])
    lengths = torch.tensor([4, 1])
    cache = model.new_cache(batch=2, capacity=6)
    with torch.no_grad():
        scores = [model.next_token_logits(rows[:, :4], lengths - 1, cache=cache)]
        for step in range(2):
            at = lengths + step
            newest = rows.gather(1, at.unsqueeze(1))
            scores.append(
                model.next_token_logits(
                    newest, torch.zeros_like(at), cache=cache, positions=at.unsqueeze(1)
                )
            )
    for step in range(3):
        for row in range(2):
            whole = model(rows[row : row + 1, : lengths[row] + step])[-1, 0]
            # float64; the masked kernel adds in another order.
            torch.testing.assert_close(scores[step][row], whole, rtol=1e-10, atol=1e-10)


def test_a_prompt_gets_the_same_answer_alone_and_in_company() -> None:
    model = tiny_model(tiny_config())
    alone = [run(model, [prompt])[0] for prompt in PROMPTS]
    assert alone == run(model)


def test_a_row_ends_at_the_end_of_document_and_the_others_go_on() -> None:
    model = tiny_model(tiny_config())
    whole = run(model)
    eod = whole[0].tokens[2]
    ended = run(model, eod=eod)
    for before, after in zip(whole, ended):
        if eod in before.tokens:
            assert after == Generation(before.tokens[: before.tokens.index(eod)], "eod")
        else:
            assert after == before
            assert after.finish_reason == "length"
    assert ended[0].finish_reason == "eod"


def test_padding_tokens_are_never_chosen() -> None:
    model = tiny_model(tiny_config(untie_embeddings_and_output_weights=True, num_layers=1))
    with torch.no_grad():
        # Padding scores would win by far if they were not cut off.
        model.get_parameter("output.weight")[TINY_VOCAB.true :] = 1e3
        model.get_parameter("final_norm.weight").fill_(0)
        model.get_parameter("final_norm.bias").fill_(1)
    for params in (GREEDY, SamplingParams(temperature=5.0)):
        for generation in run(model, [[1]] * 50, params=params):
            assert max(generation.tokens) < TINY_VOCAB.true


def test_sampling_repeats_with_the_seed_and_rows_differ() -> None:
    model = tiny_model(tiny_config())
    hot = SamplingParams(temperature=3.0)
    first = run(model, [[1, 2]] * 4, params=hot)
    assert first == run(model, [[1, 2]] * 4, params=hot)
    assert first != run(model, [[1, 2]] * 4, params=hot, seed=2)
    assert len({g.tokens for g in first}) > 1


@pytest.mark.parametrize("training", [True, False])
def test_the_model_computes_without_dropout_and_gets_its_mode_back(training: bool) -> None:
    build = tiny_build()
    dropping = tiny_model(tiny_config(hidden_dropout=0.5, attention_dropout=0.5), build)
    dropping.train(training)
    with build.streams.of(None):  # nothing is drawn
        assert run(dropping) == run(tiny_model(tiny_config()))
    assert dropping.training is training
    assert all(p.grad is None for p in dropping.parameters())


def test_training_goes_on_without_the_cache_afterwards() -> None:
    model, tokens = tiny_model(tiny_config()), torch.arange(12).unsqueeze(0)
    before = model(tokens)
    run(model, [[1, 2]])  # leaves a cache of 8 positions, if it leaves one
    assert torch.equal(model(tokens), before)


def test_positions_that_the_model_does_not_have_are_refused_before_the_start() -> None:
    model = tiny_model(tiny_config())
    assert len(run(model, [[1] * 6], max_new_tokens=6)[0].tokens) == 6
    with pytest.raises(ConfigError, match="do not fit into the positions") as raised:
        run(model, [[1] * 6], max_new_tokens=7)
    assert "use --num-tokens 6" in str(raised.value)
    with pytest.raises(ConfigError, match="use prompts below 12 tokens"):
        run(model, [[1] * 12])
    endless = tiny_config(position_embedding_type=PositionEmbedding.ALIBI)
    assert len(run(tiny_model(endless), [[1] * 6], max_new_tokens=9)[0].tokens) == 9


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "there is nothing to continue"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[TINY_VOCAB.true]], {}, "a token that is not in the vocabulary"),
        ([[-1]], {}, "a token that is not in the vocabulary"),
        ([[1]], {"max_new_tokens": 0}, "number of tokens to generate is not positive"),
        ([[1]], {"eod": TINY_VOCAB.true}, "ends a text is not in the vocabulary"),
        ([[1]], {"eod": -1}, "ends a text is not in the vocabulary"),
        ([[1] * 12], {"max_new_tokens": None}, "do not fit into the positions"),
    ],
)
def test_requests_without_a_meaning_are_refused(
    prompts: list[list[int]], changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tiny_model(tiny_config()), prompts, **changes)


@pytest.mark.parametrize("kind", [PositionEmbedding.LEARNED, PositionEmbedding.ALIBI])
def test_without_a_number_all_positions_are_used_and_the_reason_is_the_length(
    kind: PositionEmbedding,
) -> None:
    model = tiny_model(tiny_config(position_embedding_type=kind))
    for done in run(model, [[1] * 5, [2]], max_new_tokens=None):  # 12 positions, or tokens trained
        assert (len(done.tokens), done.finish_reason) == (7, "length")


def test_without_a_number_the_cache_fits_into_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(tiny_config())
    of_one = 2 * 2 * 2 * 16 * 8  # keys and values, layers, rows, width, bytes
    monkeypatch.setattr(gpt_model, "free_memory_bytes", lambda: 2 * 8 * of_one)
    assert model.cache_capacity(batch=2) == 8
    assert [len(done.tokens) for done in run(model, [[1] * 5, [2]], max_new_tokens=None)] == [3, 3]
    monkeypatch.setattr(gpt_model, "free_memory_bytes", lambda: None)
    assert model.cache_capacity(batch=2) is None
    assert [len(done.tokens) for done in run(model, [[1] * 5], max_new_tokens=None)] == [7]


def test_every_module_gets_its_mode_back_after_an_error() -> None:
    model = tiny_model(tiny_config()).train()
    model.get_submodule("layers.0").eval()
    before = [each.training for each in model.modules()]

    def fail(new: Any) -> bool:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(model, stop=fail)
    assert [each.training for each in model.modules()] == before


def test_a_row_ends_where_it_is_told_to_and_the_others_go_on() -> None:
    model, prompts = tiny_model(tiny_config()), [[1, 2], [3, 4, 5]]
    free = run(model, prompts, max_new_tokens=6)
    assert [len(done.tokens) for done in free] == [6, 6]
    calls = count(1)  # of the first row, the second one, the first one again
    first, second = run(model, prompts, max_new_tokens=6, stop=lambda _: next(calls) == 3)
    assert (first.tokens, first.finish_reason) == (free[0].tokens[:2], "stop")
    assert second == free[1]
