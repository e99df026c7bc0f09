"""Executes forward plans on a model: to every layer but attention a step is one batch of tokens.

Every tp rank runs the same plans and gets the same results: scores are gathered on all of them, and
the draw of the group's first rank counts. The model has to be in evaluation mode, and its weights
stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from megatron.inference.logprobs import TokenLogprobs, token_logprobs
from megatron.inference.paged_attention import PagedAttention
from megatron.inference.paged_cache import BLOCK_SIZE, PagedCache, block_bytes
from megatron.inference.plan_limits import PlanLimits, check_plan
from megatron.inference.sampling import SequenceDraw, check_draw, draw_tokens
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_gather, broadcast
from megatron.mpu.context import ParallelContext
from megatron.ops.row_products import in_use
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice

_LEAST_ROWS = 2  # of a product: one row alone is multiplied by another kernel


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What a step found for one slice.

    Attributes:
        token: drawn after the slice; None where none was to be drawn.
        logprobs: of that token, where they were asked for.
    """

    sequence: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None


class ForwardExecutor:
    """A model with a pool of blocks.

    Args:
        blocks: the size of the pool.
        batch_invariant: multiply by products whose bits do not depend on the number of rows, and
            pad queries and keys of attention: a sequence gets the same bits whatever else is in
            the step, and in whatever parts its tokens come (`invariance`).
        draws_alone: only this rank draws; other ranks compute `scores` of the same plans. False:
            all tp ranks call `run`, and get the tokens that the first of them drew.
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
        self.cache = PagedCache(
            layers=model.config.num_layers,
            blocks=blocks,
            groups=model.config.query_groups // ctx.tp.size,
            head_width=model.config.head_width,
            dtype=model.build.dtype,
            device=self._device,
            block_size=block_size,
        )
        self.limits = PlanLimits(blocks, block_size, model.build.vocab.true, model.max_length)

    def take_new_weights(self) -> None:
        """Take note that the weights of the model have changed in place."""
        if self.batch_invariant:
            self._products = self._model.row_products()

    def run(self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]) -> list[SliceResult]:
        """Execute one step, and draw a token for every slice that samples.

        Args:
            draws: by sequence, of those slices.

        Returns:
            One result per slice, in the order of the plan.

        Raises:
            ConfigError: a draw names what is not in the vocabulary.
            NumericsError: the scores of a sequence are not finite.
            MegatronError: the plan is none (`check_plan`).
        """
        sampled = [each for each in plan.slices if each.samples]
        of_slices = [draws[each.sequence] for each in sampled]
        for draw in of_slices:
            check_draw(draw, self.limits.vocabulary)
        scores = self.scores(plan)
        if not sampled:
            return [SliceResult(each.sequence) for each in plan.slices]
        drawn = draw_tokens(scores, of_slices, [each.end for each in sampled])
        if not self._draws_alone:
            drawn = broadcast(drawn, self._ctx.tp)
        tokens: list[int] = drawn.tolist()
        results = dict(zip((each.sequence for each in sampled), tokens))
        logprobs = self._logprobs(scores, tokens, sampled, of_slices)
        return [
            SliceResult(each.sequence, results.get(each.sequence), logprobs.get(each.sequence))
            for each in plan.slices
        ]

    @torch.inference_mode()
    def scores(self, plan: ForwardPlan) -> Tensor:
        """Execute one step, and return the scores [n, v] of the true vocabulary after its n slices.

        Those are the slices that sample, in the order of the plan.

        Raises:
            NumericsError: the scores of a sequence are not finite.
            MegatronError: the plan is none (`check_plan`).
        """
        check_plan(plan, self.limits)
        self.cache.copy(plan.copies)
        self.cache.clear([block for each in plan.slices for block in self._begun(each)])
        groups = self.groups(plan.slices)
        order = [at for group in groups for at in group.slices]
        tokens, positions, last = self._batch(plan, order)
        attention = self.attention(plan.slices, groups, positions)
        sampled = [at for at, each in enumerate(plan.slices) if each.samples]
        # A pass without a draw scores one token all the same: layers are the same in every pass.
        wanted = [last[at] for at in sampled] or [0]
        wanted += [wanted[-1]] * (_LEAST_ROWS - len(wanted))
        scored = torch.tensor(wanted, device=self._device)
        with in_use(self._products):
            logits = self._model.next_token_logits(tokens, positions, scored, attention=attention)
        logits = all_gather(logits, self._ctx.tp, dim=-1)
        logits = logits[: len(sampled), : self.limits.vocabulary]
        self._check_finite(logits, [plan.slices[at] for at in sampled])
        return logits

    def groups(self, slices: Sequence[SequenceSlice]) -> tuple[AttentionGroup, ...]:
        """Return which slices of a step attend together."""
        size = self.cache.block_size
        multiple = size
        if self.batch_invariant:
            is_half = self._model.build.dtype in (torch.bfloat16, torch.float16)
            multiple = HALF_KEY_MULTIPLE if is_half else KEY_MULTIPLE
        return attention_groups(slices, block_size=size, key_multiple=multiple)

    def attention(
        self, slices: Sequence[SequenceSlice], groups: Sequence[AttentionGroup], positions: Tensor
    ) -> PagedAttention:
        """Return the attention of a step whose tokens, in the order of groups, have `positions`."""
        return PagedAttention(
            self.cache,
            self._model.geometry,
            slices,
            groups,
            positions,
            row_multiple=ROW_MULTIPLE if self.batch_invariant else 1,
            each=self._model.config.num_attention_heads // self._model.config.query_groups,
        )

    def _batch(self, plan: ForwardPlan, order: list[int]) -> tuple[Tensor, Tensor, dict[int, int]]:
        """Return tokens and positions of a step in an order of slices, padded, and last places."""
        tokens: list[int] = []
        positions: list[int] = []
        last: dict[int, int] = {}
        for at in order:
            each = plan.slices[at]
            tokens += each.tokens
            positions += range(each.start, each.end)
            last[at] = len(tokens) - 1
        missing = max(0, _LEAST_ROWS - len(tokens))
        of_all = torch.tensor(
            [tokens + [0] * missing, positions + [0] * missing], device=self._device
        )
        return of_all[0], of_all[1], last

    def _begun(self, each: SequenceSlice) -> tuple[int, ...]:
        """Return the blocks whose first slot a slice writes."""
        size = self.cache.block_size
        return each.blocks[-(-each.start // size) : -(-each.end // size)]

    def _check_finite(self, logits: Tensor, sampled: list[SequenceSlice]) -> None:
        if not sampled:
            return
        finite = logits.amax(dim=-1).isfinite().tolist()  # of NaN it is NaN
        wrong = [each.sequence for each, is_finite in zip(sampled, finite) if not is_finite]
        if wrong:
            raise NumericsError(
                "the scores of the next token are not finite",
                found=f"sequences {wrong}",
                fix="check the weights (tools/inspect_checkpoint.py), or use --bf16 in place of "
                "--fp16",
            )

    def _logprobs(
        self,
        scores: Tensor,
        tokens: list[int],
        sampled: list[SequenceSlice],
        draws: list[SequenceDraw],
    ) -> dict[int, TokenLogprobs]:
        rows = [row for row, draw in enumerate(draws) if draw.top_logprobs is not None]
        if not rows:
            return {}
        found = token_logprobs(
            scores[torch.tensor(rows, device=scores.device)],
            [tokens[row] for row in rows],
            [draws[row].top_logprobs or 0 for row in rows],
        )
        return {sampled[row].sequence: each for row, each in zip(rows, found)}


def model_block_bytes(model: GPTModel, ctx: ParallelContext, block_size: int = BLOCK_SIZE) -> int:
    """Return the bytes of one block of a model on this rank."""
    config = model.config
    groups = config.query_groups // ctx.tp.size
    return block_bytes(config.num_layers, groups, config.head_width, model.build.dtype, block_size)
