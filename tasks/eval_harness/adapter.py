"""Our GPTs as lm-eval-harness wants models: log-likelihoods of continuations, and text.

Every rank of the grid runs the whole harness with the same requests, and the scorer shares the rows
out; so the harness is told of one process. What it asks for is checked before, what it is told
after.
"""

import math
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from megatron.engine.scoring import Row
from megatron.errors import ConfigError, DataError, NumericsError
from megatron.generation.generate import generate
from megatron.generation.sampling import SamplingParams
from tasks.loading import LoadedScorer
from tasks.zeroshot.windows import rolling_windows

_CANARY = (("one two", " three"), ("two one", " one three"))
_CLOSE = 1e-5  # of numbers that were computed twice, in other batches
_MOST_NEW = 256  # tokens, where a task does not say


class MegatronLM(TemplateLM):  # type: ignore[misc]  # lm_eval is untyped
    """A loaded GPT; rows are cut from the left where they are longer than the model."""

    def __init__(self, loaded: LoadedScorer) -> None:
        super().__init__()
        self._loaded = loaded
        if loaded.tokenizer.eod is None:
            raise ConfigError(
                "the harness puts the end of a document before texts, and there is none",
                found=f"{loaded.tokenizer.name}: {loaded.tokenizer.eod_note}",
                fix="evaluate a model with an end-of-document token",
            )
        self._length = loaded.scorer.max_length or loaded.seq_length
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        eod: int = self._loaded.tokenizer.eod  # type: ignore[assignment]  # looked at above
        return eod

    @property
    def max_length(self) -> int:
        """Tokens that a row may be read by."""
        return self._length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text; nothing is added to it."""
        return list(self._loaded.tokenizer.tokenize(string))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        return self._scored(rows)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows that score every token once."""
        rows, counts = [], []
        for (text,) in (request.args for request in requests):
            windows = rolling_windows(
                self.tok_encode(text), prefix=self.eot_token_id, length=self._length
            )
            rows += windows
            counts.append(len(windows))
        scores = iter(self._scored(rows))
        return [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop text."""
        model = self._loaded.model
        if model is None:
            raise ConfigError(
                "a model in a pipeline scores, but does not write",
                found="a task that lets the model write, --pipeline-model-parallel-size above 1",
                fix="spread it with --tensor-model-parallel-size instead",
            )
        return [self._written(*request.args) for request in requests]

    def _written(self, context: str, wishes: dict[str, Any]) -> str:
        stops = wishes.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        new = int(wishes.get("max_gen_toks", _MOST_NEW))
        temperature = float(wishes.get("temperature", 0.0) or 0.0)
        greedy = not wishes.get("do_sample", temperature > 0) or temperature == 0
        params = SamplingParams(greedy=True) if greedy else SamplingParams(temperature=temperature)
        tokens = self.tok_encode(context) or [self.eot_token_id]
        model = self._loaded.model
        assert model is not None  # noqa: S101  # invariant: generate_until looked
        (done,) = generate(
            model,
            [tokens[-max(self._length - new, 1) :]],
            max_new_tokens=new,
            params=params,
            eod=self.eot_token_id,
            seed=0,
            ctx=self._loaded.ctx,
        )
        text = self._loaded.tokenizer.detokenize(done.tokens)
        ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> Row:
        if not context or not continuation:
            raise DataError(
                "the harness asked for a continuation of nothing, or for nothing",
                found=f"{len(context)} tokens of context, {len(continuation)} to score",
                fix="look at the task's texts",
            )
        if len(continuation) > self._length:
            raise DataError(
                "a continuation is longer than the model",
                found=f"{len(continuation)} tokens, {self._length} positions",
                fix="leave the example out, or use a task with shorter answers",
            )
        tokens = (*context, *continuation)
        if len(tokens) > self._length + 1:
            self.truncated += 1
            tokens = tokens[-self._length - 1 :]
        return Row(tokens, len(tokens) - len(continuation))

    def _scored(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        scores = self._loaded.scorer.score(rows)
        wrong = [at for at, score in enumerate(scores) if not score.log_likelihood <= 0]
        if wrong:
            raise NumericsError(
                "the model's scores are no probabilities",
                found=f"log-likelihood {scores[wrong[0]].log_likelihood} of row {wrong[0]}",
                fix="look at the weights: they hold numbers that are not finite",
            )
        return [(score.log_likelihood, score.is_greedy) for score in scores]


def check_canary(adapter: MegatronLM) -> None:
    """Ask two questions as the harness would, and compare with the scorer's own answers.

    Raises:
        NumericsError: another number, order or count came back.
    """
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=at)
        for at, pair in enumerate(_CANARY)
    ]
    told = adapter.loglikelihood(asked, disable_tqdm=True)
    rows = []
    for context, continuation in _CANARY:
        whole, before = adapter.tok_encode(context + continuation), adapter.tok_encode(context)
        rows.append(Row(tuple(whole), len(before)))
    expected = [adapter._scored([row])[0] for row in rows]
    same = len(told) == len(expected) and all(
        math.isclose(mine[0], theirs[0], rel_tol=_CLOSE, abs_tol=_CLOSE) and mine[1] == theirs[1]
        for mine, theirs in zip(told, expected)
    )
    if not same:
        raise NumericsError(
            "the harness gets other answers from the model than the model gives",
            found=f"{told}, expected {expected}",
            fix="use the version of lm-eval that this adapter was tested with",
        )
