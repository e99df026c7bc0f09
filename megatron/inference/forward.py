"""Executes forward plans on a model: to every layer but attention a step is one batch of tokens.

Every rank that shares the model (tp and pp) runs the same plans and gets the same results: scores
are gathered on all of them, and the draw of the first rank counts. The model has to be in
evaluation mode, and its weights stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megatron.errors import NumericsError
from megatron.inference.attention_plan import (
    HALF_KEY_MULTIPLE,
    KEY_MULTIPLE,
    ROW_MULTIPLE,
    AttentionGroup,
    attention_groups,
)
from megatron.inference.kernel_attention import KernelAttention, kernel_serves
from megatron.inference.logprobs import TokenLogprobs, token_logprobs
from megatron.inference.paged_attention import PagedAttention
from megatron.inference.paged_cache import BLOCK_SIZE, PagedCache, block_bytes
from megatron.inference.plan_limits import PlanLimits, check_plan
from megatron.inference.sampling import SequenceDraw, check_draw, draw_tokens
from megatron.inference.stage_links import StageLinks
from megatron.model.geometry import CachedAttention
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_gather, broadcast
from megatron.mpu.context import ParallelContext
from megatron.ops.row_products import in_use
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice

_LEAST_ROWS = 2  # of a product: one row alone is multiplied by another kernel
FIX_OF_SCORES = "check the weights (tools/inspect_checkpoint.py), or use --bf16 in place of --fp16"
SCORED_TOGETHER = 64  # tokens of prompts whose scores over the vocabulary are in memory at once


StepUnderWay: TypeAlias = Callable[[], list["SliceResult"]]
"""Ends a step that was begun; called once, in the order in which steps were begun."""
_Share: TypeAlias = Callable[[tuple[int, ...], Callable[[], Tensor]], Tensor | None]


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What a step found for one slice.

    Attributes:
        tokens: drawn after the slice: none where none was to be drawn; else the proposed tokens
            that were drawn as well, and one more.
        logprobs: of those tokens, where they were asked for.
        targets: log-probabilities of the slice's targets.
        hidden: states [n, h] of its tokens after the last norm, where they were asked for.
        is_finite: whether its scores were finite; there is nothing else where they were not.
        drafts: how many tokens were proposed.
    """

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    targets: tuple[TokenLogprobs, ...] = ()
    hidden: Tensor | None = None
    is_finite: bool = True
    drafts: int = 0


class _Row(NamedTuple):
    """One row of scores: what is drawn from it, its position, and the token proposed for that."""

    sequence: int
    draw: SequenceDraw
    position: int
    draft: int | None


class _StepStates(NamedTuple):
    """Hidden states [t, h] of a step; where the slice of each sequence begins.

    They are those before the last norm; on other stages than the last one, those sent to the next.
    """

    hidden: Tensor
    first: Mapping[int, int]


class ForwardExecutor:
    """A model with a pool of blocks.

    Args:
        blocks: the size of the pool.
        batch_invariant: multiply by products whose bits do not depend on the number of rows, and
            pad queries and keys of attention: a sequence gets the same bits whatever else is in
            the step, and in whatever parts its tokens come (`invariance`).
        draws_alone: only this rank calls `run` and draws; the others call `follow`. False: all
            ranks call `run`, and get the tokens that the first of them drew.
    """

    def __init__(
        self,
        model: GPTModel,
        ctx: ParallelContext,
        *,
        blocks: int,
        block_size: int = BLOCK_SIZE,
        batch_invariant: bool = True,
        draws_alone: bool = False,
    ) -> None:
        self._model, self._ctx = model, ctx
        self._draws_alone = draws_alone
        self._device = next(model.parameters()).device
        self.batch_invariant = batch_invariant
        self._products = model.row_products() if batch_invariant else None
        self._links = StageLinks(model, ctx)
        self._share = self._links.to_first if draws_alone else self._links.from_last
        self.cache = PagedCache(
            layers=model.blocks.size,
            blocks=blocks,
            groups=model.config.query_groups // ctx.tp.size,
            head_width=model.config.head_width,
            dtype=model.build.dtype,
            device=self._device,
            block_size=block_size,
            first_layer=model.blocks.start,
        )
        self._has_kernel = batch_invariant and kernel_serves(model.config, self.cache)
        self.limits = PlanLimits(blocks, block_size, model.build.vocab.true, model.max_length)

    def take_new_weights(self) -> None:
        """Take note that the weights of the model have changed in place."""
        if self.batch_invariant:
            self._products = self._model.row_products()

    def run(self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]) -> list[SliceResult]:
        """Execute one step, and draw tokens for every slice that samples.

        After each proposed token one is drawn as if those before it were part of the sequence; it
        counts if they were drawn too. So tokens are the same, whatever is proposed.

        Args:
            draws: by sequence, of those slices.

        Returns:
            One result per slice, in the order of the plan. Scores that are not finite concern the
            result of their slice alone; behind a proposed token they are not used.

        Raises:
            ConfigError: a draw names what is not in the vocabulary.
            MegatronError: the plan is none (`check_plan`).
        """
        return self.start(plan, draws)()

    def start(self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]) -> StepUnderWay:
        """Begin one step: do what this stage does before others; see `run` for arguments, errors.

        With `draws_alone`, others may be begun before it ends, of other sequences: the other stages
        compute this one meanwhile.
        """
        for each in plan.slices:
            if each.samples:
                check_draw(draws[each.sequence], self.limits.vocabulary)
        return partial(self._ended, plan, draws, self._states(plan))

    def _ended(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw], states: _StepStates
    ) -> list[SliceResult]:
        """Return the results of a step that was begun."""
        sampled = [each for each in plan.slices if each.samples]
        targets = self._target_logprobs(plan, states)
        hidden = self._final_states(plan, states)
        scores = self._scores(plan, states, self._share)
        if self._draws_alone and not _has_results(plan):
            self._links.end_step()
        every = [row for each in sampled for row in _rows_of(each, draws[each.sequence])]
        usable = _usable_rows(every, _finite_rows(scores))
        rows = [every[at] for at in usable]
        if len(rows) < len(every):
            scores = scores[torch.tensor(usable, dtype=torch.int64, device=scores.device)]
        wrong = {each.sequence for each in plan.slices if each.targets} - targets.keys()
        wrong |= {each.sequence for each in sampled} - {row.sequence for row in rows}
        wrong |= {name for name, each in hidden.items() if not bool(each.isfinite().all())}
        tokens: list[int] = []
        if rows:
            drawn = draw_tokens(scores, [row.draw for row in rows], [row.position for row in rows])
            if not self._draws_alone:
                drawn = broadcast(drawn, self._ctx.whole_model)
            tokens = drawn.tolist()
        right = _right_rows(rows, tokens)
        logprobs = self._logprobs(scores, tokens, rows, right)
        found: dict[int, list[int]] = {each.sequence: [] for each in plan.slices}
        for at in right:
            found[rows[at].sequence].append(tokens[at])
        return [
            SliceResult(each.sequence, is_finite=False)
            if each.sequence in wrong
            else SliceResult(
                each.sequence,
                tuple(found[each.sequence]),
                tuple(logprobs.get(each.sequence, ())),
                targets.get(each.sequence, ()),
                hidden.get(each.sequence),
                drafts=each.drafts,
            )
            for each in plan.slices
        ]

    def follow(self, plan: ForwardPlan) -> None:
        """Take part in a step for which another rank calls `run`: make its collectives, in order.

        Raises:
            MegatronError: the plan is none (`check_plan`).
        """
        states = self._states(plan)
        for rows in _together(_target_rows(plan, states)):
            self._share(*self._logits(states.hidden, rows))
        if self._model.is_stage:
            for each in plan.slices:
                if each.embeds:
                    self._share(*self._final(states, each))
        if rows := _sampled_rows(plan, states):
            self._share(*self._logits(states.hidden, rows))
        if not _has_results(plan):
            self._links.end_step()

    def scores(self, plan: ForwardPlan) -> Tensor:
        """Execute one step, and return scores [n, v] of the true vocabulary.

        Those are of the slices that sample, in the order of the plan: of each after its last token
        that is not a draft, and after each draft.

        Raises:
            NumericsError: the scores of a sequence are not finite.
            MegatronError: the plan is none (`check_plan`).
        """
        scores = self._scores(plan, self._states(plan), self._links.from_last)
        finite = _finite_rows(scores)
        first = 0
        are_finite = {}
        for each in plan.slices:
            if each.samples:
                are_finite[each.sequence] = all(finite[first : first + 1 + each.drafts])
                first += 1 + each.drafts
        require_finite(are_finite)
        return scores

    @torch.inference_mode()
    def _states(self, plan: ForwardPlan) -> _StepStates:
        check_plan(plan, self.limits)
        self.cache.copy(plan.copies)
        self.cache.clear([block for each in plan.slices for block in self._begun(each)])
        groups = self.groups(plan.slices)
        order = [at for group in groups for at in group.slices] or list(range(len(plan.slices)))
        tokens, positions, first = self._batch(plan, order)
        attention = self.attention(plan.slices, groups, positions)
        before = self._links.receive(len(tokens))
        with in_use(self._products):
            hidden = self._model.hidden_states(
                tokens, positions, attention=attention, before=before
            )
        self._links.send(hidden)
        return _StepStates(hidden, first)

    def _scores(self, plan: ForwardPlan, states: _StepStates, share: _Share) -> Tensor:
        """Return the scores [n, v] after the slices that sample, and after their drafts."""
        if not (rows := _sampled_rows(plan, states)):
            return states.hidden.new_empty((0, self.limits.vocabulary))
        return _there(share(*self._logits(states.hidden, rows)))

    def _logits(
        self, hidden: Tensor, rows: Sequence[int]
    ) -> tuple[tuple[int, ...], Callable[[], Tensor]]:
        """Return the shape of the scores [n, v] after n rows of hidden states [t, h], and they.

        They are of the true vocabulary, and computed when they are called for.
        """

        @torch.inference_mode()
        def compute() -> Tensor:
            wanted = [*rows, *([rows[-1]] * (_LEAST_ROWS - len(rows)))]
            scored = torch.tensor(wanted, device=self._device)
            with in_use(self._products):
                logits = self._model.next_token_logits(hidden.index_select(0, scored))
            return all_gather(logits, self._ctx.tp, dim=-1)[: len(rows), : self.limits.vocabulary]

        return (len(rows), self.limits.vocabulary), compute

    def _final_states(self, plan: ForwardPlan, states: _StepStates) -> dict[int, Tensor]:
        """Return the states [n, h] of the slices that embed after the last norm, by sequence."""
        embedding = (each for each in plan.slices if each.embeds)
        return {
            each.sequence: _there(self._share(*self._final(states, each))) for each in embedding
        }

    def _final(
        self, states: _StepStates, part: SequenceSlice
    ) -> tuple[tuple[int, ...], Callable[[], Tensor]]:
        """Return the shape of the states [n, h] of a slice after the last norm, and they."""
        first = states.first[part.sequence]
        rows = states.hidden[first : first + len(part.tokens)]
        return tuple(rows.shape), torch.inference_mode()(partial(self._model.final_states, rows))

    def _target_logprobs(
        self, plan: ForwardPlan, states: _StepStates
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Return the log-probabilities of the targets of each slice that has some, by sequence.

        A sequence whose scores are not finite is left out.
        """
        scored = [each for each in plan.slices if each.targets]
        owners = [each for each in scored for _ in each.targets]
        tokens = [token for each in scored for token in each.targets]
        found: dict[int, list[TokenLogprobs]] = {each.sequence: [] for each in scored}
        wrong: set[int] = set()
        start = 0
        for rows in _together(_target_rows(plan, states)):
            part = slice(start, start := start + len(rows))
            logits = _there(self._share(*self._logits(states.hidden, rows)))
            for each, is_finite in zip(owners[part], _finite_rows(logits)):
                if not is_finite:
                    wrong.add(each.sequence)
            counts = [each.top_targets for each in owners[part]]
            for each, one in zip(owners[part], token_logprobs(logits, tokens[part], counts)):
                found[each.sequence].append(one)
        return {at: tuple(each) for at, each in found.items() if at not in wrong}

    def groups(self, slices: Sequence[SequenceSlice]) -> tuple[AttentionGroup, ...]:
        """Return which slices of a step attend together; none where a kernel takes them all."""
        if self._has_kernel:
            return ()
        size = self.cache.block_size
        multiple = size
        if self.batch_invariant:
            is_half = self._model.build.dtype in (torch.bfloat16, torch.float16)
            multiple = HALF_KEY_MULTIPLE if is_half else KEY_MULTIPLE
        return attention_groups(slices, block_size=size, key_multiple=multiple)

    def attention(
        self, slices: Sequence[SequenceSlice], groups: Sequence[AttentionGroup], positions: Tensor
    ) -> CachedAttention:
        """Return the attention of a step whose tokens, in the order of groups, have `positions`."""
        config = self._model.config
        each = config.num_attention_heads // config.query_groups
        if self._has_kernel:
            window = config.sliding_window
            return KernelAttention(self.cache, slices, each=each, window=window)
        return PagedAttention(
            self.cache,
            self._model.geometry,
            slices,
            groups,
            positions,
            row_multiple=ROW_MULTIPLE if self.batch_invariant else 1,
            each=each,
        )

    def _batch(self, plan: ForwardPlan, order: list[int]) -> tuple[Tensor, Tensor, dict[int, int]]:
        """Return tokens and positions of a step in an order of slices, padded, and where each
        sequence begins.
        """
        tokens: list[int] = []
        positions: list[int] = []
        first: dict[int, int] = {}
        for at in order:
            each = plan.slices[at]
            first[each.sequence] = len(tokens)
            tokens += each.tokens
            positions += range(each.start, each.end)
        missing = max(0, _LEAST_ROWS - len(tokens))
        of_all = torch.tensor(
            [tokens + [0] * missing, positions + [0] * missing], device=self._device
        )
        return of_all[0], of_all[1], first

    def _begun(self, each: SequenceSlice) -> tuple[int, ...]:
        """Return the blocks whose first slot a slice writes."""
        size = self.cache.block_size
        return each.blocks[-(-each.start // size) : -(-each.end // size)]

    def _logprobs(
        self, scores: Tensor, tokens: list[int], rows: Sequence[_Row], right: Sequence[int]
    ) -> dict[int, list[TokenLogprobs]]:
        """Return those of the tokens of `right` rows for which they were asked, by sequence."""
        asked = [at for at in right if rows[at].draw.top_logprobs is not None]
        found: dict[int, list[TokenLogprobs]] = {}
        if asked:
            logprobs = token_logprobs(
                scores[torch.tensor(asked, device=scores.device)],
                [tokens[at] for at in asked],
                [rows[at].draw.top_logprobs or 0 for at in asked],
            )
            for at, each in zip(asked, logprobs):
                found.setdefault(rows[at].sequence, []).append(each)
        return found


def _there(result: Tensor | None) -> Tensor:
    """Return what the last stage computed, on a rank that draws."""
    assert result is not None  # noqa: S101  # invariant: the first rank alone, or all
    return result


def _has_results(plan: ForwardPlan) -> bool:
    """Return whether the last stage computes anything that the first one needs."""
    return any(each.samples or each.targets or each.embeds for each in plan.slices)


def _sampled_rows(plan: ForwardPlan, states: _StepStates) -> list[int]:
    """Return the rows after which something is drawn: of slices that sample, and their drafts."""
    rows: list[int] = []
    for each in plan.slices:
        if each.samples:
            end = states.first[each.sequence] + len(each.tokens)
            rows += range(end - 1 - each.drafts, end)
    return rows


def _target_rows(plan: ForwardPlan, states: _StepStates) -> list[int]:
    """Return the rows before the targets of all slices."""
    return [
        states.first[each.sequence] + place
        for each in plan.slices
        for place in range(len(each.targets))
    ]


def _together(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield rows whose scores are in memory at once."""
    for start in range(0, len(rows), SCORED_TOGETHER):
        yield rows[start : start + SCORED_TOGETHER]


def _rows_of(part: SequenceSlice, draw: SequenceDraw) -> Iterator[_Row]:
    """Yield the rows of a slice that samples: without its drafts, and after each of them."""
    first = len(part.tokens) - part.drafts
    drafts = part.tokens[first:]
    for count, following in enumerate((*drafts, None)):
        after = replace(draw, output=(*draw.output, *drafts[:count])) if count else draw
        yield _Row(part.sequence, after, part.start + first + count, following)


def _usable_rows(rows: Sequence[_Row], finite: Sequence[bool]) -> list[int]:
    """Return the rows of each sequence before its first one that is not finite."""
    usable: list[int] = []
    ended: set[int] = set()
    for at, row in enumerate(rows):
        if not finite[at]:
            ended.add(row.sequence)
        if row.sequence not in ended:
            usable.append(at)
    return usable


def _right_rows(rows: Sequence[_Row], tokens: Sequence[int]) -> list[int]:
    """Return the rows before which all proposed tokens of their sequence were drawn."""
    right: list[int] = []
    ended: set[int] = set()
    for at, (row, token) in enumerate(zip(rows, tokens)):
        if row.sequence not in ended:
            right.append(at)
        if token != row.draft:
            ended.add(row.sequence)
    return right


def require_finite(are_finite: Mapping[int, bool]) -> None:
    """Check that the scores of sequences are finite.

    Raises:
        NumericsError: those of some are not, which are named.
    """
    wrong = [sequence for sequence, is_finite in are_finite.items() if not is_finite]
    if wrong:
        raise NumericsError(
            "the scores of the next token are not finite",
            found=f"sequences {wrong}",
            fix=FIX_OF_SCORES,
        )


def _finite_rows(logits: Tensor) -> list[bool]:
    """Return whether each row [v] of scores has a finite largest one, which NaN never is."""
    if len(logits) == 0:
        return []
    finite: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    return finite


def model_block_bytes(model: GPTModel, ctx: ParallelContext, block_size: int = BLOCK_SIZE) -> int:
    """Return the bytes of one block of the layers of a model that are on this rank."""
    config = model.config
    groups = config.query_groups // ctx.tp.size
    layers = model.blocks.size
    return block_bytes(layers, groups, config.head_width, model.build.dtype, block_size)
