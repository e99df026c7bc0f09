"""Our GPTs in the interface of lm-eval-harness: log-likelihoods of continuations, and text.

Every rank of the grid runs the whole harness with the same requests, and the scorer shares the rows
out; so the harness sees one process. Its requests are checked before, its results after.
"""

import math
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from megatron.data.samples.chat_template import (
    CHATML,
    END_OF_DOCUMENT,
    LEARNED_ROLE,
    ChatMessage,
    ChatTemplate,
)
from megatron.engine.scoring import ScoringRow
from megatron.errors import ConfigError, NumericsError
from megatron.inference.generate import RowRules, generate
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_gather_object
from tasks.eval_harness.writing import GenerationRequest, fitting, generation_request
from tasks.loading import LoadedScorer
from tasks.zeroshot.pairs import checked_scores, row_of
from tasks.zeroshot.windows import rolling_windows

_CANARY = (("one two", " three"), ("two one", " one three"))
_CLOSE = 1e-5  # of numbers that were computed twice, in other batches


class MegatronLM(TemplateLM):  # type: ignore[misc]  # lm_eval is untyped
    """A loaded GPT as a model of the harness.

    Rows that are longer than the model's positions are cut from the left.
    """

    def __init__(self, loaded: LoadedScorer, template: ChatTemplate | None = None) -> None:
        super().__init__()
        self._loaded, self._template = loaded, template
        if loaded.tokenizer.eod is None:
            raise ConfigError(
                "the harness puts the end of a document before texts, and there is none",
                found=f"{loaded.tokenizer.name}: {loaded.tokenizer.eod_note}",
                fix="evaluate a model with an end-of-document token",
            )
        self._length = loaded.longest or loaded.seq_length
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        eod: int = self._loaded.tokenizer.eod  # type: ignore[assignment]  # looked at above
        return eod

    @property
    def max_length(self) -> int:
        """The most tokens of a row."""
        return self._length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return list(self._loaded.tokenizer.tokenize(string))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [
            self._row(at, context, continuation)
            for at, (_, context, continuation) in enumerate(requests)
        ]
        return self._scored(rows)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, in windows that score every token once."""
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
        """Return the generated text after each context, up to a stop text."""
        model = self._loaded.model
        if model is None:
            raise ConfigError(
                "text generation does not support pipeline parallelism",
                found="a task that lets the model write, --pipeline-model-parallel-size above 1",
                fix="spread it with --tensor-model-parallel-size instead",
            )
        texts = [
            (self.tok_encode(context) or [self.eot_token_id], generation_request(settings))
            for context, settings in (request.args for request in requests)
        ]
        prompts = [fitting(tokens, settings, self._length) for tokens, settings in texts]
        self.truncated += sum(len(tokens) > len(p) for (tokens, _), p in zip(texts, prompts))
        batches = self._batches([settings for _, settings in texts], prompts)
        replicas = self._loaded.ctx.dp
        own_texts: dict[int, str] = {}
        for which in batches[replicas.rank :: replicas.size]:
            settings = texts[which[0]][1]
            own_texts |= zip(
                which, self._written(model, [prompts[at] for at in which], settings, which)
            )
        everyone: dict[int, str] = {}
        for part in all_gather_object(own_texts, self._loaded.ctx.world):
            everyone |= part
        return [everyone[at] for at in range(len(requests))]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the messages rendered by the chosen template, up to the model's turn."""
        template = self._template
        if template is None:
            raise ConfigError(
                "messages were to be written, and no template was chosen",
                found="no --apply-chat-template",
                fix=f"add --apply-chat-template {CHATML.name}",
            )
        messages = [ChatMessage(turn["role"], turn["content"]) for turn in chat_history]
        if add_generation_prompt:
            text = template.prompt(messages)
        elif messages[-1].role == LEARNED_ROLE:  # whose answer the model goes on with
            text = template.prompt(messages[:-1]) + messages[-1].content
        else:
            text = "".join(piece.text for piece in template.render(messages))
        if END_OF_DOCUMENT in text:
            raise ConfigError(
                f"the template {template.name} ends answers with a token that is no text",
                found=f"{len(messages)} messages, an answer among them",
                fix=f"use --apply-chat-template {CHATML.name}, or --num-fewshot 0",
            )
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the name of the template, which an evaluation's record has instead of its text."""
        return None if self._template is None else self._template.name

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer and of the chat template."""
        return f"{self._loaded.tokenizer.name} {self.chat_template() or ''}".strip()

    def _batches(
        self, settings: Sequence[GenerationRequest], prompts: Sequence[list[int]]
    ) -> list[list[int]]:
        """Return batches of requests: greedy ones of equal settings sorted by length, others alone.

        What is drawn depends on the rows beside it, so that each is drawn alone.
        """
        order = sorted(range(len(settings)), key=lambda at: (-len(prompts[at]), at))
        greedy: dict[GenerationRequest, list[int]] = {}
        alone = []
        for at in order:
            if settings[at].params.greedy:
                greedy.setdefault(settings[at], []).append(at)
            else:
                alone.append([at])
        size = self._loaded.scorer.micro_batch_size
        return alone + [
            which[start : start + size]
            for which in greedy.values()
            for start in range(0, len(which), size)
        ]

    def _written(
        self,
        model: GPTModel,
        prompts: list[list[int]],
        settings: GenerationRequest,
        which: Sequence[int],
    ) -> list[str]:
        spell = self._loaded.tokenizer.detokenize
        done = generate(
            model,
            prompts,
            max_new_tokens=settings.new_tokens,
            params=settings.params,
            eod=self.eot_token_id,
            seed=which[0],
            ctx=self._loaded.ctx,
            rules=RowRules((lambda new: settings.is_over(spell(new))) if settings.until else None),
        )
        return [settings.cut(spell(one.tokens)) for one in done]

    def _row(self, at: int, context: Sequence[int], continuation: Sequence[int]) -> ScoringRow:
        row, is_cut = row_of(context, continuation, self._length, at=at)
        self.truncated += is_cut
        return row

    def _scored(self, rows: Sequence[ScoringRow]) -> list[tuple[float, bool]]:
        scores = checked_scores(self._loaded.scorer.score(rows))
        return [(score.log_likelihood, score.is_greedy) for score in scores]


def check_canary(adapter: MegatronLM) -> None:
    """Score two requests through the harness, and compare them with the scorer's results.

    Raises:
        NumericsError: another number, order or count came back.
    """
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=at)
        for at, pair in enumerate(_CANARY)
    ]
    results = adapter.loglikelihood(requests, disable_tqdm=True)
    rows = []
    for context, continuation in _CANARY:
        tokens = adapter.tok_encode(context + continuation)
        context_tokens = adapter.tok_encode(context)
        rows.append(ScoringRow(tuple(tokens), len(context_tokens)))
    expected = [adapter._scored([row])[0] for row in rows]
    same = len(results) == len(expected) and all(
        math.isclose(result[0], expected_result[0], rel_tol=_CLOSE, abs_tol=_CLOSE)
        and result[1] == expected_result[1]
        for result, expected_result in zip(results, expected)
    )
    if not same:
        raise NumericsError(
            "the harness receives other results than the model computes",
            found=f"{results}, expected {expected}",
            fix="use the version of lm-eval that this adapter was tested with",
        )
