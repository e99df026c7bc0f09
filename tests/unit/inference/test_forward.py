"""Steps over blocks compute what the whole sequence computes at once, and draw from it."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.model import PositionEmbedding, SoftmaxType
from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError, MegatronError, NumericsError
from megatron.inference.forward import ForwardExecutor, SliceResult, model_block_bytes
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.examples import examples
from tests.support.inference.fed_sequences import FedSequences
from tests.support.models import (
    GPT_POSITIONS,
    TINY_VOCAB,
    tiny_build,
    tiny_config,
    tiny_model,
    tiny_tokens,
)

CTX = ParallelContext.single()
# float64; attention over blocks adds in another order than that of the whole sequence.
CLOSE = 1e-10
GREEDY = SamplingParams(greedy=True)

POSITIONS = GPT_POSITIONS
WINDOW = {"sliding_window": 3}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": WINDOW,
    "window of some layers": WINDOW | {"window_attn_skip_freq": "2"},
    "soft caps": {"attention_soft_cap": 1.5, "logit_soft_cap": 2.0},
    "sinks": {"softmax_type": SoftmaxType.LEARNABLE},
    "zero sinks and a window": {"softmax_type": SoftmaxType.OFF_BY_ONE} | WINDOW,
    "sinks and soft caps": {"softmax_type": SoftmaxType.LEARNABLE, "attention_soft_cap": 1.5},
    "experts": {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "ffn_hidden_size": 24},
    "norms of heads": {"qk_layernorm": True, "softmax_scale": 0.4},
}


@cache
def model_of(kind: PositionEmbedding, groups: int, feature: str) -> GPTModel:
    config = tiny_config(
        position_embedding_type=kind,
        num_query_groups=groups,
        max_position_embeddings=40,
        **FEATURES[feature],
    )
    return tiny_model(config).eval()


@torch.no_grad()
def whole_scores(model: GPTModel, tokens: list[int]) -> Tensor:
    """Return the scores after the last token, computed without a cache."""
    return model(torch.tensor([tokens]))[-1, 0, : TINY_VOCAB.true]


@pytest.mark.parametrize("feature", ["plain", "window", "soft caps", "sinks"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_prompts_that_are_prefixes_are_seen_whole_and_new_tokens_are_causal(
    kind: PositionEmbedding, feature: str
) -> None:
    """Prompts of 3 and 7 tokens, and two more tokens of each; at last all are computed again."""
    model, prompts = model_of(kind, 2, feature), (3, 7)
    texts: list[list[int]] = tiny_tokens(batch=2, length=9).tolist()
    executor = ForwardExecutor(model, CTX, blocks=2)
    for new, is_again in ((0, False), (1, False), (2, False), (2, True)):
        slices = []
        for row, (text, prompt) in enumerate(zip(texts, prompts)):
            start, end = (prompt + new - 1 if new and not is_again else 0), prompt + new
            slices.append(SequenceSlice(row, tuple(text[start:end]), start, (row,), True, prompt))
        found = executor.scores(ForwardPlan((), tuple(slices)))
        for row, (text, prompt) in enumerate(zip(texts, prompts)):
            tokens = torch.tensor([text[: prompt + new]])
            places = torch.arange(prompt + new)[None]
            marks = (places < prompt).long()
            with torch.no_grad():
                whole = model(tokens, places, torch.zeros_like(marks), is_prefix=marks)
            torch.testing.assert_close(
                found[row], whole[-1, 0, : TINY_VOCAB.true], rtol=CLOSE, atol=CLOSE
            )


PARTS = st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=4)
ROWS = st.lists(st.tuples(PARTS, st.integers(0, 2)), min_size=1, max_size=4)


def steps_of(rows: list[tuple[list[int], int]]) -> list[dict[int, int]]:
    """Return the parts of rows by step, where each row begins some steps after the first."""
    last = max(delay + len(parts) for parts, delay in rows)
    steps = [
        {
            row: parts[at - delay]
            for row, (parts, delay) in enumerate(rows)
            if 0 <= at - delay < len(parts)
        }
        for at in range(last)
    ]
    return [step for step in steps if step]


@examples(120)
@given(
    st.sampled_from(POSITIONS),
    st.sampled_from([4, 2, 1]),
    st.sampled_from(list(FEATURES)),
    ROWS,
    st.booleans(),
)
def test_scores_of_any_parts_are_those_of_the_whole_sequence(
    kind: PositionEmbedding,
    groups: int,
    feature: str,
    parts: list[tuple[list[int], int]],
    invariant: bool,
) -> None:
    model = model_of(kind, groups, feature)
    rows = [tiny_tokens(1, sum(each), seed=at)[0].tolist() for at, (each, _) in enumerate(parts)]
    fed = FedSequences(model, rows, batch_invariant=invariant)
    # What sequences before have left in blocks has no part in it.
    fed.executor.cache.pool[:, :, : fed.executor.cache.null_block] = torch.nan
    for step in steps_of(parts):
        for row, scores in fed.step(step).items():
            expected = whole_scores(model, rows[row][: fed.done[row]])
            torch.testing.assert_close(scores, expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", POSITIONS)
def test_every_kind_of_model_decodes_and_reads_prompts(
    kind: PositionEmbedding, feature: str
) -> None:
    model = model_of(kind, 2, feature)
    rows = [[7, 3, 9, 1, 5, 8, 2], [4, 6, 2]]
    fed = FedSequences(model, rows)
    for step in ({0: 5, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}):
        for row, scores in fed.step(step).items():
            expected = whole_scores(model, rows[row][: fed.done[row]])
            torch.testing.assert_close(scores, expected, rtol=CLOSE, atol=CLOSE)


def test_a_shared_block_is_read_by_both_and_a_copy_is_written_by_one() -> None:
    model = model_of(PositionEmbedding.ROPE, 2, "plain")
    executor = ForwardExecutor(model, CTX, blocks=4, block_size=4)
    common = (7, 3, 9, 1, 5, 8)
    executor.scores(ForwardPlan((), (SequenceSlice(0, common, 0, (2, 0), True),)))
    # Block 2 is full and shared; of block 0 the second sequence gets a copy.
    first = SequenceSlice(0, (11,), 6, (2, 0), True)
    second = SequenceSlice(1, (12, 13), 6, (2, 3), True)
    found = executor.scores(ForwardPlan(((0, 3),), (first, second)))
    for row, more in enumerate(([11], [12, 13])):
        expected = whole_scores(model, [*common, *more])
        torch.testing.assert_close(found[row], expected, rtol=CLOSE, atol=CLOSE)


def test_only_slices_that_sample_get_tokens_and_results_keep_their_order() -> None:
    model = model_of(PositionEmbedding.LEARNED, 2, "plain")
    executor = ForwardExecutor(model, CTX, blocks=9, block_size=4)
    slices = (
        SequenceSlice(5, (1, 2, 3, 4, 5), 0, (0, 1), True),
        SequenceSlice(6, (6, 7), 0, (2,), False),
        SequenceSlice(4, (8,), 0, (3,), True),
    )
    draw = SequenceDraw(params=GREEDY, seed=0)
    found = executor.run(ForwardPlan((), slices), {5: draw, 4: replace(draw, top_logprobs=2)})
    assert [each.sequence for each in found] == [5, 6, 4]
    for each, tokens in ((found[0], [1, 2, 3, 4, 5]), (found[2], [8])):
        assert each.tokens == (int(whole_scores(model, tokens).argmax()),)
    assert found[1] == SliceResult(6)
    assert found[0].logprobs == ()
    logprobs = whole_scores(model, [8]).float().log_softmax(-1)
    best = logprobs.topk(2)
    (reported,) = found[2].logprobs
    assert [token for token, _ in reported.top] == best.indices.tolist()
    assert reported.chosen == pytest.approx(float(best.values[0]), abs=1e-6)
    silent = ForwardPlan((), (SequenceSlice(7, (1,), 0, (4,), False),))
    assert executor.run(silent, {}) == [SliceResult(7)]


def test_proposed_tokens_count_as_far_as_they_are_drawn() -> None:
    model = model_of(PositionEmbedding.ROPE, 2, "plain")
    text = [7, 3, 9]
    for _ in range(4):
        text.append(int(whole_scores(model, text).argmax()))
    wrong = (text[5] + 1) % TINY_VOCAB.true
    cases = [
        (text[3:6], text[3:7]),
        ([text[3], text[4], wrong], text[3:6]),
        ([wrong, *text[4:6]], text[3:4]),
        ([], text[3:4]),
    ]
    for drafts, expected in cases:
        executor = ForwardExecutor(model, CTX, blocks=9, block_size=4)
        executor.scores(ForwardPlan((), (SequenceSlice(5, (7, 3), 0, (0,), False),)))
        slices = (
            SequenceSlice(4, (8,), 0, (3,), True),
            SequenceSlice(5, (9, *drafts), 2, (0, 1), True, drafts=len(drafts)),
            SequenceSlice(6, (2, 1), 0, (4,), True),
        )
        draw = SequenceDraw(params=GREEDY, seed=0)
        draws = {4: draw, 5: replace(draw, top_logprobs=1), 6: replace(draw, top_logprobs=0)}
        before, found, after = executor.run(ForwardPlan((), slices), draws)
        assert list(found.tokens) == expected
        assert found.drafts == len(drafts)
        for count, reported in enumerate(found.logprobs, start=3):
            logprobs = whole_scores(model, text[:count]).float().log_softmax(-1)
            assert reported.chosen == pytest.approx(float(logprobs.max()), abs=1e-6)
        assert len(found.logprobs) == len(expected)
        assert before.logprobs == ()
        for each, tokens in ((before, [8]), (after, [2, 1])):
            assert each.tokens == (int(whole_scores(model, tokens).argmax()),)
        assert len(after.logprobs) == 1


def test_a_plan_that_the_model_cannot_execute_is_refused() -> None:
    executor = ForwardExecutor(model_of(PositionEmbedding.LEARNED, 2, "plain"), CTX, blocks=20)
    late = SequenceSlice(0, (1,), 40, (0, 1), True)
    with pytest.raises(MegatronError, match="behind the last position"):
        executor.scores(ForwardPlan((), (late,)))
    draw = SequenceDraw(params=SamplingParams(logit_bias=((TINY_VOCAB.true, 1.0),)), seed=0)
    with pytest.raises(ConfigError, match="a bias is given for a token"):
        executor.run(ForwardPlan((), (replace(late, start=0, blocks=(0,)),)), {0: draw})


def test_scores_that_are_not_finite_name_their_sequences() -> None:
    model = tiny_model(tiny_config(untie_embeddings_and_output_weights=True)).eval()
    with torch.no_grad():
        model.get_parameter("embedding.word.weight")[9] = torch.nan
    executor = ForwardExecutor(model, CTX, blocks=2)
    slices = tuple(SequenceSlice(name, (8 + name,), 0, (name,), True) for name in range(2))
    with pytest.raises(NumericsError, match="scores of the next token are not finite") as raised:
        executor.scores(ForwardPlan((), slices))
    assert "sequences [1]" in str(raised.value)


def test_scores_that_are_not_finite_behind_a_proposed_token_are_not_used() -> None:
    class Overflowing(ForwardExecutor):
        bad_row: int

        def _scores(self, *step: Any) -> Tensor:
            scores = super()._scores(*step).clone()
            scores[self.bad_row] = torch.nan
            return scores

    model = model_of(PositionEmbedding.ROPE, 2, "plain")
    first = int(whole_scores(model, [8, 3]).argmax())
    part = SequenceSlice(0, (8, 3, first, 4, 5), 0, (0, 1), True, drafts=3)
    draws = {0: SequenceDraw(params=GREEDY, seed=0)}
    for bad_row, count in ((0, 0), (1, 1), (2, 2)):
        executor = Overflowing(model, CTX, blocks=2, block_size=4)
        executor.bad_row = bad_row
        (found,) = executor.run(ForwardPlan((), (part,)), draws)
        assert (found.is_finite, len(found.tokens)) == (count > 0, count)
        assert found.tokens[:1] == (first,)[:count]
        with pytest.raises(NumericsError, match="not finite"):
            executor.scores(ForwardPlan((), (part,)))


def test_scores_that_are_not_finite_concern_their_sequence_alone() -> None:
    model = tiny_model(tiny_config(untie_embeddings_and_output_weights=True)).eval()
    with torch.no_grad():
        model.get_parameter("embedding.word.weight")[9] = torch.nan
    executor = ForwardExecutor(model, CTX, blocks=4)
    slices = (
        SequenceSlice(0, (8, 3), 0, (0,), True, targets=(3,)),
        SequenceSlice(1, (9,), 0, (1,), True),
        SequenceSlice(2, (5, 9), 0, (2,), False, targets=(9, 4)),
        SequenceSlice(3, (4,), 0, (3,), True),
    )
    draw = SequenceDraw(params=GREEDY, seed=0)
    found = executor.run(ForwardPlan((), slices), {at: draw for at in (0, 1, 3)})
    assert [each.is_finite for each in found] == [True, False, False, True]
    assert found[1:3] == [SliceResult(at, is_finite=False) for at in (1, 2)]
    assert found[0].tokens == (int(whole_scores(model, [8, 3]).argmax()),)
    assert len(found[0].targets) == 1
    assert found[3].tokens == (int(whole_scores(model, [4]).argmax()),)


def test_the_bytes_of_a_block_are_those_of_the_pool() -> None:
    model = model_of(PositionEmbedding.ROPE, 2, "plain")
    executor = ForwardExecutor(model, CTX, blocks=3, block_size=4)
    assert executor.cache.num_bytes == 4 * model_block_bytes(model, CTX, 4)


@pytest.mark.parametrize("frozen", [True, False])
def test_new_weights_are_those_of_the_next_step(frozen: bool) -> None:
    model = tiny_model(tiny_config(), tiny_build(precision=PrecisionConfig(bf16=True))).eval()
    model.requires_grad_(not frozen)
    plan = ForwardPlan((), (SequenceSlice(0, (1, 2, 3), 0, (0,), True),))
    before = ForwardExecutor(model, CTX, blocks=1).scores(plan)
    assert torch.equal(ForwardExecutor(model, CTX, blocks=1).scores(plan), before)
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.fc2.weight").mul_(-2.0)
    after = ForwardExecutor(model, CTX, blocks=1).scores(plan)
    # bf16, by products of another library: a step of 2^-8 in each of a few layers.
    torch.testing.assert_close(after[0], whole_scores(model, [1, 2, 3]), rtol=0.1, atol=0.1)
    assert not torch.allclose(after, before, rtol=0.1, atol=0.1)
