"""Generation with a cache equals computing everything again for every token."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.model import PositionEmbedding
from megatron.errors import ConfigError, MachineError
from megatron.inference import generate as static_batch
from megatron.inference.generate import Generation, RowRules, generate
from megatron.inference.paged_cache import BLOCK_SIZE
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from tests.support.models import GPT_POSITIONS, TINY_VOCAB, tiny_build, tiny_config, tiny_model

CTX = ParallelContext.single()
PROMPTS = [[7, 3, 9, 1], [4], [11, 12, 13, 14, 15, 16], [2, 2]]
GREEDY = SamplingParams(greedy=True)
EVERY_POSITION = GPT_POSITIONS


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
    model = tiny_model(tiny_config(max_position_embeddings=70))
    of_block = 2 * 2 * BLOCK_SIZE * 16 * 8  # keys and values, layers, tokens, width, bytes
    for blocks, tokens in ((4 * 2 - 1, 32), (4 * 2, 64)):  # half of them, for two rows
        monkeypatch.setattr(static_batch, "free_memory_bytes", lambda n=blocks: n * of_block)
        done = run(model, [[1] * 5, [2]], max_new_tokens=None)
        assert [len(each.tokens) for each in done] == [tokens - 5] * 2
    monkeypatch.setattr(static_batch, "free_memory_bytes", lambda: None)
    assert [len(done.tokens) for done in run(model, [[1] * 5], max_new_tokens=None)] == [65]


def test_rows_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tiny_config())
    of_block = 2 * 2 * BLOCK_SIZE * 16 * 8
    monkeypatch.setattr(static_batch, "free_memory_bytes", lambda: 2 * of_block - 1)
    with pytest.raises(MachineError, match="keys and values of 2 prompts do not fit"):
        run(model, [[1], [2]])
    assert len(run(model, [[1]])) == 1


def test_long_prompts_are_read_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tiny_config())
    expected = run(model)
    monkeypatch.setattr(static_batch, "_STEP_TOKENS", 3)
    assert run(model) == expected


def test_every_module_gets_its_mode_back_after_an_error() -> None:
    model = tiny_model(tiny_config()).train()
    model.get_submodule("layers.0").eval()
    before = [each.training for each in model.modules()]

    def fail(new: Any) -> bool:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(model, rules=RowRules(fail))
    assert [each.training for each in model.modules()] == before


def test_a_row_ends_where_it_is_told_to_and_the_others_go_on() -> None:
    model, prompts = tiny_model(tiny_config()), [[1, 2], [3, 4, 5]]
    free = run(model, prompts, max_new_tokens=6)
    assert [len(done.tokens) for done in free] == [6, 6]
    calls = count(1)  # of the first row, the second one, the first one again
    first, second = run(
        model, prompts, max_new_tokens=6, rules=RowRules(lambda _: next(calls) == 3)
    )
    assert (first.tokens, first.finish_reason) == (free[0].tokens[:2], "stop")
    assert second == free[1]


class Alternating:
    """Even and odd tokens in turn; what comes is noted by row."""

    def __init__(self, copies: list["Alternating"], breaks_after: int | None = None) -> None:
        self.copies, self.breaks_after = copies, breaks_after
        self.seen: list[int] = []

    def copy(self) -> "Alternating":
        self.copies.append(Alternating(self.copies, self.breaks_after))
        return self.copies[-1]

    def allowed(self, output: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.arange(TINY_VOCAB.true) % 2 == len(output) % 2

    def problem(self, output: Sequence[int]) -> str | None:
        self.seen = list(output)
        return "it broke" if len(output) == self.breaks_after else None


def test_each_row_follows_a_constraint_of_its_own() -> None:
    model, copies = tiny_model(tiny_config()), list[Alternating]()
    found = run(model, rules=RowRules(constraint=Alternating(copies)))
    assert [list(row.tokens) for row in found] == [each.seen for each in copies]
    assert all(token % 2 == at % 2 for row in found for at, token in enumerate(row.tokens))
    assert found[0] != run(model)[0]
    with pytest.raises(ConfigError, match="as its grammar says") as caught:
        run(model, rules=RowRules(constraint=Alternating(copies, breaks_after=2)))
    assert caught.value.found == "prompt 0 after 2 new tokens: it broke"
