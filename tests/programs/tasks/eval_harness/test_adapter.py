"""The harness gets the model's results on every grid, and errors are reported."""

import math
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.data.samples.chat_template import CHATML, PLAIN, ChatTemplate
from megatron.engine.scoring import RowScore, ScoringRow
from megatron.errors import ConfigError, DataError, NumericsError
from megatron.initialize import shutdown_megatron
from tasks.eval_harness.adapter import MegatronLM, check_canary
from tasks.loading import LoadedScorer, load_scorer
from tasks.zeroshot.windows import rolling_windows
from tests.programs.tasks.models import SAME
from tests.support.ranks import run_on_ranks

TEXTS = ["the cat sat on a mat and it was a fine day for a cat", "a", ""]
PAIRS = [("the cat", " sat"), ("", "a dog"), ("a dog ran ", "to the cat"), ("it was " * 9, "a")]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=at)
        for at, each in enumerate(arguments)
    ]


def asked(folder: str, grid: dict[str, int]) -> dict[str, Any]:
    adapter = MegatronLM(load_scorer(folder, given={**grid, "micro_batch_size": 2}))
    check_canary(adapter)
    found = {
        "pairs": adapter.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True),
        "texts": adapter.loglikelihood_rolling(
            requests("loglikelihood_rolling", [(text,) for text in TEXTS])
        ),
        "truncated": adapter.truncated,
    }
    if "pipeline_model_parallel_size" not in grid:
        settings = {"until": ["\n", "t"], "max_gen_toks": 8}
        found["written"] = adapter.generate_until(
            requests(
                "generate_until",
                [
                    ("the cat ", settings),
                    ("", {"max_gen_toks": 4}),
                    ("a dog", {"max_gen_toks": 6, "do_sample": True, "temperature": 0.9}),
                    ("it was " * 9, settings),
                ],
            )
        )
    else:
        with pytest.raises(
            ConfigError, match="text generation does not support pipeline parallelism"
        ):
            adapter.generate_until(requests("generate_until", [("a", {})]))
        shutdown_megatron()
        with pytest.raises(ConfigError, match="the stages of a pipeline cannot store"):
            load_scorer(folder, given=grid, weight_quantization="int8")
    shutdown_megatron()
    return found


def asked_on_all(folder: str, grids: list[dict[str, int]]) -> list[dict[str, Any]]:
    """A body for `run_on_ranks`: one grid after the other in the same processes."""
    return [asked(folder, grid) for grid in grids]


@pytest.mark.slow
def test_every_grid_answers_alike(tiny_gpt: str) -> None:
    ((alone,),) = run_on_ranks(1, asked_on_all, tiny_gpt, [{}])
    assert len(alone["pairs"]) == len(PAIRS)
    assert alone["truncated"] > 0
    assert alone["texts"][2] == 0.0
    assert "t" not in alone["written"][0]
    grids: list[dict[str, int]] = [
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {},
    ]
    for each in run_on_ranks(2, asked_on_all, tiny_gpt, grids):
        for found in each:
            for (mine, greedy), (theirs, expected) in zip(found["pairs"], alone["pairs"]):
                assert mine == pytest.approx(theirs, rel=SAME)
                assert greedy == expected
            assert found["texts"] == pytest.approx(alone["texts"], rel=SAME)
            assert found.get("written", alone["written"]) == alone["written"]


@pytest.mark.parametrize(("count", "length"), [(1, 4), (4, 4), (9, 4), (12, 5), (3, 1)])
def test_windows_are_those_of_the_harness(count: int, length: int) -> None:
    tokens = list(range(100, 100 + count))
    reference = [
        make_disjoint_window(pair)
        for pair in get_rolling_token_windows(tokens, 7, max_seq_len=length, context_len=1)
    ]
    ours = rolling_windows(tokens, prefix=7, length=length)
    assert [(list(r.tokens[: r.first]), list(r.tokens[r.first :])) for r in ours] == reference


class FakeScorer:
    """Scores every row alike, and lower each time if configured so."""

    max_length: int | None = 32
    micro_batch_size = 2

    def __init__(self, answers: list[float]) -> None:
        self._answers = answers

    def score(self, rows: list[ScoringRow]) -> list[RowScore]:
        return [RowScore(self._answers.pop(0), False, len(row.tokens)) for row in rows]


class Letters:
    name, eod, eod_note = "letters", 0, ""

    def tokenize(self, text: str) -> list[int]:
        return [1 + ord(letter) % 30 for letter in text]


def adapter_of(*answers: float, **changes: Any) -> MegatronLM:
    tokenizer: Any = Letters()
    vars(tokenizer).update(changes)
    scorer: Any = FakeScorer(list(answers))
    return MegatronLM(LoadedScorer(scorer, None, tokenizer, 8, None))  # type: ignore[arg-type]


def test_what_is_no_probability_is_not_handed_over() -> None:
    pairs = requests("loglikelihood", [("a", "b")])
    for answer in (math.nan, 0.5):
        with pytest.raises(NumericsError, match="the model's scores are no probabilities"):
            adapter_of(answer).loglikelihood(pairs, disable_tqdm=True)


def test_a_harness_that_asks_otherwise_dies_at_the_canary() -> None:
    check_canary(adapter_of(-1.0, -2.0, -1.0, -2.0))
    with pytest.raises(NumericsError, match="other results than the model computes"):
        check_canary(adapter_of(-1.0, -2.0, -2.0, -1.0))


def test_requests_that_cannot_be_answered_are_said() -> None:
    with pytest.raises(DataError, match="a continuation is longer than the model"):
        adapter_of(-1.0).loglikelihood(requests("loglikelihood", [("a", "b" * 40)]))
    with pytest.raises(DataError, match="a continuation has no token, or no token before it"):
        adapter_of(-1.0)._loglikelihood_tokens([(("a", ""), [1], [])])
    with pytest.raises(ConfigError, match="puts the end of a document before texts"):
        adapter_of(eod=None)


TURNS = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "and"},
]


def templated(template: ChatTemplate | None) -> MegatronLM:
    scorer: Any = FakeScorer([])
    tokenizer: Any = Letters()
    loaded = LoadedScorer(scorer, None, tokenizer, 8, None)  # type: ignore[arg-type]
    return MegatronLM(loaded, template)


def test_messages_are_written_as_they_were_learned() -> None:
    adapter = templated(CHATML)
    assert adapter.apply_chat_template(TURNS[:2]) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    begun = adapter.apply_chat_template(TURNS[:3], add_generation_prompt=False)
    assert begun.endswith("<|im_start|>assistant\nso")
    assert adapter.chat_template(True) == "chatml"
    assert adapter.tokenizer_name == "letters chatml"


def test_messages_without_a_template_that_can_write_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="no template was chosen") as raised:
        templated(None).apply_chat_template(TURNS)
    assert raised.value.fix == "add --apply-chat-template chatml"
    assert templated(PLAIN).apply_chat_template(TURNS[:2]).endswith("### Assistant:\n")
    with pytest.raises(ConfigError, match="ends answers with a token that is no text"):
        templated(PLAIN).apply_chat_template(TURNS)
