"""Scores of rows are those of one look at each row alone; wrong rows are refused by number."""

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.engine.scoring import RowScore, Scorer, ScoringRow
from megatron.errors import ConfigError, DataError
from megatron.model.gpt_model import GPTModel
from tests.support.models import TINY_VOCAB, roughen, tiny_build
from tests.support.tiny import tiny_run

ROWS = [
    ScoringRow((7, 3, 9, 1), 2),
    ScoringRow((4, 5), 1),
    ScoringRow((11, 12, 13, 4, 9, 0, 2), 6),
    ScoringRow((1, 2, 3), 1),
    ScoringRow((5, 5, 5, 5, 5), 1),
]


def run_of(**flags: object) -> RunConfig:
    return tiny_run("nowhere", **{"seq_length": 12, "init_method_std": 0.3, **flags})


def scorer_of(config: RunConfig, *, micro_batch_size: int = 2) -> Scorer:
    build = tiny_build(fuse_loss=True)  # as training is built; scores need logits all the same
    scorer = Scorer(config, build, micro_batch_size=micro_batch_size)
    roughen(scorer.stage, build.ctx)
    return scorer


def naive(config: RunConfig, rows: list[ScoringRow]) -> list[RowScore]:
    """One row at a time, with the plain softmax over the true vocabulary."""
    build = tiny_build()
    model = GPTModel(config.model, build)
    roughen(model, build.ctx)
    model.eval()
    found = []
    for tokens, first in rows:
        logits = model(torch.tensor([tokens[:-1]])).detach()
        scores = logits[:, 0, : TINY_VOCAB.true].log_softmax(-1)
        targets = torch.tensor(tokens[1:])
        each = scores.gather(1, targets.unsqueeze(1)).squeeze(1)[first - 1 :]
        greedy = scores.argmax(-1)[first - 1 :] == targets[first - 1 :]
        found.append(RowScore(float(each.sum()), bool(greedy.all()), len(tokens) - first))
    return found


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
@pytest.mark.parametrize("kind", ["learned_absolute", "rope", "alibi"])
def test_batches_and_padding_change_nothing(kind: str, micro_batch_size: int) -> None:
    config = run_of(position_embedding_type=kind)
    scores = scorer_of(config, micro_batch_size=micro_batch_size).score(ROWS)
    for actual, expected in zip(scores, naive(config, ROWS)):
        # float64, other batch sizes: only the order of additions differs
        assert actual.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-11)
        assert actual[1:] == expected[1:]


def test_what_greedy_choice_would_say_is_known_as_such() -> None:
    config = run_of()
    scorer, tokens = scorer_of(config), [7, 3]
    model = GPTModel(config.model, tiny_build())
    roughen(model, tiny_build().ctx)
    model.eval()
    for _ in range(3):
        logits = model(torch.tensor([tokens]))[-1, 0, : TINY_VOCAB.true]
        tokens.append(int(logits.argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % TINY_VOCAB.true]
    scores = scorer.score([ScoringRow(tuple(tokens), 2), ScoringRow(tuple(other), 2)])
    assert [score.is_greedy for score in scores] == [True, False]


def test_no_rows_have_no_scores() -> None:
    assert scorer_of(run_of()).score([]) == []


@pytest.mark.parametrize("row", [ScoringRow((3,), 1), ScoringRow((3, 4), 2), ScoringRow((3, 4), 0)])
def test_a_row_needs_context_and_something_to_score(row: ScoringRow) -> None:
    with pytest.raises(DataError, match="a row has no token to score, or none before the first"):
        scorer_of(run_of()).score([ROWS[0], row])


def test_an_unknown_token_is_refused() -> None:
    with pytest.raises(
        DataError, match="a row holds a token outside of the model's vocabulary"
    ) as raised:
        scorer_of(run_of()).score([ROWS[0], ScoringRow((1, 50), 1)])
    assert "row 1: token 50, a vocabulary of 50" in str(raised.value)


def test_a_row_that_is_too_long_is_refused() -> None:
    scorer = scorer_of(run_of())
    assert scorer.max_length == 12
    assert len(scorer.score([ScoringRow((1,) * 13, 12)])) == 1
    with pytest.raises(ConfigError, match="a row is longer than the positions that the model has"):
        scorer.score([ScoringRow((1,) * 14, 12)])
    assert scorer_of(run_of(position_embedding_type="alibi")).max_length is None


def test_scoring_gives_each_module_its_mode_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = scorer_of(run_of())
    scorer.stage.get_submodule("layers.0").eval()
    before = [each.training for each in scorer.stage.modules()]
    scorer.score(ROWS)
    assert [each.training for each in scorer.stage.modules()] == before

    def fail(*args: object) -> None:
        raise ArithmeticError

    monkeypatch.setattr(scorer, "_batch", fail)
    with pytest.raises(ArithmeticError):
        scorer.score(ROWS)
    assert [each.training for each in scorer.stage.modules()] == before
